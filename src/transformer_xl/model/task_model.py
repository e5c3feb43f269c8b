"""A model with a head, as fine-tuning makes it: texts of any length in; what the head says of them out.

A text is read segment by segment with the memory of its own beginning, and if it is a row of a document, with that of the rows
before it. Segments are counted from the end, so the first one is the short one, and the last one, whose last state sums the
text up, is always whole. So what a row gives depends neither on the batch nor on its padding, and rows of any lengths fit in
one batch.

Shapes: B batch, C choices, L tokens of a row, T tokens of a segment, D d_model.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from transformer_xl.batch import Batch, TaskRows
from transformer_xl.config.model import ModelConfig
from transformer_xl.errors import CheckpointError, ConfigError
from transformer_xl.kernels.device import at_least_fp32
from transformer_xl.model.base import SequenceModel
from transformer_xl.model.call import Execution, ModelOutput, Regularizers
from transformer_xl.model.heads import SpanHead, SpanScores, make_head
from transformer_xl.model.kinds import make_backbone
from transformer_xl.model.memory import Memory

_States = tuple[Tensor, Tensor | None, Memory]
"""Of a segment: the last states, (B, T, D); how much of it is padding, (B,) or None; the memory after it."""


class TaskModel(SequenceModel):
    """A model that was read with, `backbone`, and what answers for it, `head`.

    It is a `SequenceModel` so that runs, checkpoints, training and loading work with it as they are. Only memory is another
    matter: every text begins with an empty one, which ends with it, unless texts are rows of documents (`head.in_documents`).

    Args:
        config: sizes and options of the backbone; `head` must be set.

    Attributes:
        config: its settings.
        backbone: the model that reads.
        head: what it reads for.

    Example:
        >>> from transformer_xl.config.model import HeadConfig, XLNetConfig
        >>> head = HeadConfig(kind="classification", labels=("good", "bad"), tgt_len=4)
        >>> sizes = {"n_layer": 2, "d_model": 8, "n_head": 2, "d_head": 4, "d_inner": 16}
        >>> model = TaskModel(XLNetConfig(vocab_size=11, **sizes, head=head)).eval()
        >>> ids = torch.tensor([[0, 0, 0, 3, 1, 4], [1, 5, 9, 2, 6, 5]])
        >>> model(ids, n_pad=torch.tensor([3, 0])).logits.shape
        torch.Size([2, 2])
    """

    def __init__(self, config: ModelConfig) -> None:
        nn.Module.__init__(self)  # embedding and layers are the backbone's
        if config.head is None:
            raise ConfigError("head (None) must say what a TaskModel gives; set head, or build the model without one")
        self.config, self._head_config = config, config.head
        self.backbone = make_backbone(config)
        _check_head(config, self.backbone)
        self.head = make_head(
            config.head,
            d_model=config.d_model,
            layer_norm_epsilon=getattr(config, "layer_norm_epsilon", 1e-5),
            init_std=config.init_std,
        )
        for name, parameter in self.backbone.named_parameters():
            if name.startswith(self.backbone.only_predicting):
                parameter.requires_grad_(False)  # or processes would wait for gradients that never come

    @classmethod
    def _check_kind(cls, config: ModelConfig, source: str) -> None:
        if config.head is None:
            raise CheckpointError(f"'{source}' has no head; txl finetune gives it one, and txl.load reads it as it is")

    @property
    def layers(self) -> nn.ModuleList:  # pyright: ignore[reportIncompatibleVariableOverride]  # nobody sets it
        """The backbone's layers."""
        return self.backbone.layers

    @property
    def mem_len(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]  # nobody sets it
        """Positions of memory that the backbone keeps of a text."""
        return self.backbone.mem_len

    def init_mems(self, batch_size: int, *, length: int | None = None) -> Memory:
        # without `in_documents` every text begins anew: `forward` returns the memory that it was given, unchanged
        return self.backbone.init_mems(batch_size, length=length if self._head_config.in_documents else 0)

    def smallest_batch(self) -> Batch:
        kind, zero = self._head_config.kind, torch.zeros(1, 2, dtype=torch.int64, device=self.device)
        if kind in ("classification", "choice"):
            labels = zero[:, 0]
        elif kind == "span":
            labels = zero.new_zeros(1, 3)
        elif kind == "tokens":
            labels = zero[:, :1]
        else:
            n_label = (self._head_config.n_score,) if kind == "multilabel" else ()
            labels = torch.zeros(1, *n_label, device=self.device)
        ids = zero.unsqueeze(1) if kind == "choice" else zero
        words = labels if kind == "tokens" else None
        return Batch(ids, labels, extra=TaskRows(segments=ids, may_answer=ids == 0, words=words))

    def check_backend(self, backend: str, device: torch.device) -> None:
        self.backbone.check_backend(backend, device)

    def with_context(self, **changes: Any) -> Self:
        view = object.__new__(type(self))
        vars(view).update(vars(self))
        vars(view)["_modules"] = {**self._modules, "backbone": self.backbone.with_context(**changes)}
        return view

    def loss(
        self,
        batch: Batch,
        *,
        mems: Any,
        execution: Execution = Execution(),
        keep_graph: bool = False,
        regularizers: Regularizers = Regularizers(),
    ) -> ModelOutput:
        if mems is not None and (starts := batch.rows.document_starts) is not None:
            mems = mems.reset(starts.any(dim=1))
        out = self(
            batch.ids,
            n_pad=batch.rows.n_pad,
            segments=batch.texts.segments,
            labels=batch.labels,
            may_answer=batch.texts.may_answer,
            words=batch.texts.words,
            mems=mems,
            execution=execution,
        )
        weights = batch.texts.weights
        return out if weights is None or out.nll is None else replace(out, nll=out.nll * weights)

    def forward(
        self,
        ids: Tensor,
        *,
        n_pad: Tensor | None = None,
        segments: Tensor | None = None,
        labels: Tensor | None = None,
        may_answer: Tensor | None = None,
        words: Tensor | None = None,
        mems: Memory | None = None,
        execution: Execution = Execution(),
    ) -> ModelOutput:
        """Read texts to their end, and score them.

        Args:
            ids: int64 (B, L), or (B, C, L) with C choices each.
            n_pad: int64 (B,) or (B, C), padding at the left of each row; None: none.
            segments: int64 like `ids`, the text that each token belongs to, for an XLNet; None: all to the same.
            labels: what is right, see `TextHead.nll` and `SpanHead.nll`.
            may_answer: bool (B, L), tokens that an answer may consist of, for a span; None: all.
            words: int64 (B, W), the token that stands for each word, for tokens; None: all tokens stand for themselves, W = L.
            mems: of the rows before in each document, `init_mems` or None where it begins; of texts that stand alone, it comes
                out as it goes in.
            execution: how to compute; the result is the same.

        Returns:
            logits (B, n_score), or (B, C) of a choice, (B, W, n_score) of tokens; with labels the loss of each example (B,), or
            of each word (B, W), 0 where it is not scored.

        Raises:
            ValueError: shapes that do not fit together, a span's window that is longer than a segment, or one without labels.
        """
        past = self.init_mems(len(ids)) if mems is None else mems
        states = self._checked_states(ids, n_pad, segments, past, execution)
        if isinstance(self.head, SpanHead):
            if labels is None:
                raise ValueError("a span head gives no logits without labels; use span_scores")
            return ModelOutput(past, nll=self.head.nll(*_window(states, may_answer), labels))
        head_input, new_mems = self._head_input(states, words)
        scores, out = self.head(head_input), new_mems if self._head_config.in_documents else past
        if self.head.kind == "choice":
            scores = scores.view(ids.shape[:2])
        if labels is None:
            return ModelOutput(out, logits=scores)
        return ModelOutput(out, nll=self.head.nll(scores, labels))

    def span_scores(
        self,
        ids: Tensor,
        *,
        n_pad: Tensor | None = None,
        segments: Tensor | None = None,
        may_answer: Tensor | None = None,
        n_start: int = 5,
        n_end: int = 5,
        execution: Execution = Execution(),
    ) -> SpanScores:
        """Return the best places of an answer in each window.

        Args:
            ids: int64 (B, L), windows of at most `head.tgt_len` tokens; the last token stands for "no answer".
            n_pad: int64 (B,), padding at the left of each row; None: none.
            segments: int64 (B, L), the text that each token belongs to, for an XLNet; None: all to the same.
            may_answer: bool (B, L), tokens that an answer may consist of; None: all.
            n_start: K, how many starts are wanted.
            n_end: J, how many ends of each.
            execution: how to compute; the result is the same.

        Returns:
            Starts and ends with their log-probabilities, best first, and how likely there is no answer.

        Raises:
            ValueError: another head, or shapes that do not fit together.
        """
        if not isinstance(self.head, SpanHead):
            raise ValueError(f"a head of kind '{self._head_config.kind}' gives no places in a text; only 'span' does")
        states = self._checked_states(ids, n_pad, segments, None, execution)
        return self.head.best(*_window(states, may_answer), n_start=n_start, n_end=n_end)

    def _checked_states(
        self, ids: Tensor, n_pad: Tensor | None, segments: Tensor | None, mems: Memory | None, execution: Execution
    ) -> Iterator[_States]:
        """Refuse shapes that do not fit together, else yield what `_states` does, with each choice as a row."""
        kind = self._head_config.kind
        if ids.dim() != (3 if kind == "choice" else 2) or 0 in ids.shape:
            wanted = "(batch, choices, length)" if kind == "choice" else "(batch, length)"
            raise ValueError(f"ids {tuple(ids.shape)} of a {kind} must have shape {wanted}, none of them 0")
        for name, given, shape in (("n_pad", n_pad, ids.shape[:-1]), ("segments", segments, ids.shape)):
            if given is not None and given.shape != shape:
                raise ValueError(f"{name} {tuple(given.shape)} must have shape {tuple(shape)} to fit ids {tuple(ids.shape)}")
        if kind == "span" and ids.shape[1] > self._head_config.tgt_len:
            longest = f"a segment (head.tgt_len {self._head_config.tgt_len})"
            raise ValueError(f"ids {tuple(ids.shape)} of a span must be no longer than {longest}; cut the text into windows")
        n_pad = None if n_pad is None else n_pad.flatten()
        segments = None if segments is None else segments.flatten(0, -2)
        if not self._head_config.in_documents:
            mems = None
        self.check_memory(mems, len(ids))
        return self._states(ids.flatten(0, -2), n_pad, segments, mems, execution)

    def _head_input(self, states: Iterator[_States], words: Tensor | None) -> tuple[Tensor, Memory]:
        """Return the states of words, (B, W, D), or what sums each text up, (B, D): the last one, or their mean.

        And the memory after them.
        """
        if self._head_config.kind == "tokens":
            parts, _, after = zip(*states, strict=True)
            h_BLD = torch.cat(parts, dim=1)
            return h_BLD if words is None else h_BLD.take_along_dim(words.unsqueeze(-1), dim=1), after[-1]
        if self._head_config.summary == "last":
            ((h_BTD, _, mems),) = deque(states, maxlen=1)  # those before matter through memory
            return h_BTD[:, -1], mems
        total_BD, n_B, mems = 0.0, 0, cast("Memory", None)
        for h_BTD, n_pad, mems in states:  # noqa: B007
            real_BT = _is_real(h_BTD, n_pad)
            total_BD = total_BD + at_least_fp32(h_BTD).where(real_BT.unsqueeze(-1), 0.0).sum(dim=1)
            n_B = n_B + real_BT.sum(dim=1)
        return cast("Tensor", total_BD) / cast("Tensor", n_B).clamp(min=1).unsqueeze(-1), mems

    def _states(
        self, ids: Tensor, n_pad: Tensor | None, segments: Tensor | None, mems: Memory | None, execution: Execution
    ) -> Iterator[_States]:
        """Yield the states of each segment after a memory; None: nothing is before the texts.

        Only the last `gradient_segments` segments keep the graph; of tokens, whose states are all learned from, every group of
        so many.
        """
        length, tgt_len = ids.shape[1], self._head_config.tgt_len
        begins = [0, *range(length % tgt_len or tgt_len, length, tgt_len)]
        most_pad = 0 if n_pad is None else int(n_pad.max())
        n_learned = self._head_config.gradient_segments
        for i, (begin, end) in enumerate(zip(begins, [*begins[1:], length], strict=True)):
            own_pad = None if n_pad is None or most_pad <= begin else (n_pad - begin).clamp(min=0, max=end - begin)
            own_segments = None if segments is None else segments[:, begin:end]
            n_after = len(begins) - 1 - i
            is_learned = n_after < n_learned or self._head_config.kind == "tokens"
            with torch.set_grad_enabled(torch.is_grad_enabled() and is_learned):
                h_BTD, new_mems = self.backbone.read_text(
                    ids[:, begin:end],
                    mems=mems,
                    n_pad=own_pad,
                    segments=own_segments,
                    execution=execution,
                    keep_graph=is_learned and n_after % n_learned > 0,
                )
                h_BTD = self.backbone.drop_output(h_BTD)
            if n_after and mems is not None and own_pad is not None and self._head_config.in_documents:
                new_mems = new_mems.where(own_pad < end - begin, mems)  # absolute positions change what is only kept, too
            mems = new_mems
            yield h_BTD, own_pad, mems


def _is_real(h_BTD: Tensor, n_pad: Tensor | None) -> Tensor:
    """Return bool (B, T), True where a token is no padding."""
    if n_pad is None:
        return torch.ones(h_BTD.shape[:2], dtype=torch.bool, device=h_BTD.device)
    return torch.arange(h_BTD.shape[1], device=h_BTD.device) >= n_pad.unsqueeze(1)


def _window(states: Iterator[_States], may_answer: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the states of windows, (B, L, D), each read as one segment, and bool (B, L), tokens that may answer."""
    ((h_BLD, n_pad, _),) = states
    real_BL = _is_real(h_BLD, n_pad)
    return h_BLD, real_BL if may_answer is None else may_answer & real_BL


def _check_head(config: ModelConfig, backbone: SequenceModel) -> None:
    """Refuse a head whose segments the model cannot read, or that would forget how a text begins."""
    head, room = config.head, backbone.learned_length
    assert head is not None
    if room is not None and head.tgt_len > room:
        raise ConfigError(
            f"head.tgt_len ({head.tgt_len}) is longer than what {backbone.described} learned positions for; use at most {room}"
        )
    if config.mem_len == 0 and head.in_documents:
        raise ConfigError(
            f"rows of documents are read with a memory of those before, and {backbone.described} has mem_len 0; set mem_len "
            "(model.mem_len), or leave the document (task.document) out"
        )
    is_whole = head.max_len is not None and head.max_len <= head.tgt_len
    if config.mem_len == 0 and head.summary == "last" and head.kind != "span" and not is_whole:
        raise ConfigError(
            f"a text of more than head.tgt_len ({head.tgt_len}) tokens needs memory, and {backbone.described} has mem_len 0; "
            f"set max_len to at most {head.tgt_len}, or summary to 'mean' (task.max_len, task.summary)"
        )

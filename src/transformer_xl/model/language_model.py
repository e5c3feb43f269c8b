"""Language models: tokens in, nats or scores of the tokens that follow out.

A kind defines how it reads a segment (`read`).

Shapes: B batch, T tgt_len, D d_model, V vocabulary.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from transformer_xl.errors import ConfigError
from transformer_xl.kernels.device import at_least_fp32
from transformer_xl.model.attention.block import AttentionKind
from transformer_xl.model.call import Execution, Regularizers, Rows
from transformer_xl.model.memory import Memory
from transformer_xl.model.sequence_model import ModelOutput, SequenceModel
from transformer_xl.model.softmax import TokenSoftmax


class LanguageModel(SequenceModel):
    """A model that predicts each token of a stream from those before it, segment by segment; see `SequenceModel`."""

    def smallest_call(self) -> dict[str, Tensor]:
        """Return arguments of a call with labels that uses all parameters."""
        ids = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        return {"ids": ids, "labels": ids}

    @property
    def window(self) -> int | None:
        """How many keys a query sees, itself included, with `same_length`; None: memory and all of its segment before it."""
        return None

    @property
    def trained_length(self) -> int | None:
        """Tokens of a segment, if positions are right only in segments as long as in training; None: they are in any."""
        return None

    @property
    def adds_losses(self) -> bool:
        """Whether other losses are added to that of the next token in training."""
        return False

    @property
    def keeps_keys(self) -> bool:
        """Whether a `Reader` reads as this model does: keys and values of a position stay the same while the text goes on."""
        return False

    @property
    def carries_state(self) -> bool:
        """Whether the memory holds all that the model knows of the text before, so that it can read on token by token."""
        return self.config.remembers == "state" and self.mem_len > 0

    @abstractmethod
    def reach(self, tgt_len: int) -> int:
        """Return how many tokens, in segments of `tgt_len`, fill an empty memory so that it equals that of the whole stream."""

    def forward(
        self,
        ids: Tensor,
        *,
        mems: Memory | None = None,
        labels: Tensor | None = None,
        rows: Rows = Rows(),
        execution: Execution = Execution(),
        keep_graph: bool = False,
        progress: float = 0.0,
        regularizers: Regularizers = Regularizers(),
    ) -> ModelOutput:
        """Read one segment after the memory of those before it.

        Args:
            ids: int64 (B, T), token ids.
            mems: memory returned by the last call, or `init_mems`; None: empty.
            labels: int64 (B, T), the tokens that follow `ids`, shifted by the caller; -100 is not scored.
            rows: padding and beginnings of documents.
            execution: how to compute; the result is the same.
            keep_graph: the new memory keeps its gradients, so that a loss of the next segment reaches back into this one. The
                caller detaches it (`Memory.detach`) to end that.
            progress: share of the training's budget that is used up; some auxiliary losses depend on it.
            regularizers: what is added to the loss as `auxiliary`, so that nats per token stay what they are.

        Returns:
            logits, or with labels nats per token, and the new memory.

        Raises:
            ConfigError: regularizers that this kind of model cannot have.
            ValueError: shapes that do not fit together.
        """
        if ids.dim() != 2 or ids.shape[1] == 0:
            raise ValueError(f"ids {tuple(ids.shape)} must have shape (batch, tgt_len) with tgt_len of at least 1")
        if labels is not None and labels.shape != ids.shape:
            raise ValueError(f"labels {tuple(labels.shape)} must have the shape of ids {tuple(ids.shape)}")
        if mems is not None:
            mems.check(ids.shape[0], self.config.n_layer)  # len would fix the number of rows of an exported graph
        if labels is not None and self.training and self.adds_losses:
            call = {"rows": rows, "execution": execution, "keep_graph": keep_graph, "progress": progress}
            if (out := self.with_own_losses(ids, mems=mems, labels=labels, **call)) is not None:
                return out
        with self._last_states(regularizers) as last:
            h_BTD, new_mems = self.read(ids, mems=mems, rows=rows, execution=execution, keep_graph=keep_graph)
        if labels is None:
            return ModelOutput(new_mems, logits=self.softmax.logits(h_BTD, self.embedding))
        n_read_only = 0 if torch.is_grad_enabled() else _leading_unlabelled(labels)
        scored = (h_BTD[:, n_read_only:], labels[:, n_read_only:], self.embedding)
        nll = self.softmax.nll(*scored, tail_sizes=execution.tail_sizes)
        added = []
        if regularizers.label_smoothing:
            assert isinstance(self.softmax, TokenSoftmax)
            added.append(regularizers.label_smoothing * self.softmax.advantage(h_BTD, labels, self.embedding))
        for last_BTD in last:
            added.append((labels >= 0).sum() * _penalty(last_BTD, regularizers))  # the caller divides by the number of labels
        return ModelOutput(new_mems, nll=F.pad(nll, (n_read_only, 0)), auxiliary=sum(added[1:], added[0]) if added else None)

    def with_own_losses(self, ids: Tensor, *, mems: Any, labels: Tensor, **call: Any) -> ModelOutput | None:
        """Return nats of labels, and as `auxiliary` the losses of a kind that `adds_losses`; called in training only.

        Args:
            ids: int64 (B, T), checked.
            mems: the memory before them, checked; None: there is none.
            labels: int64 (B, T), checked.
            call: `rows`, `execution`, `keep_graph` and `progress` of `forward`.

        Returns:
            None: the kind has no such losses, and `forward` goes on.
        """
        return None

    @contextmanager
    def _last_states(self, regularizers: Regularizers) -> Iterator[list[Tensor]]:
        """Note the last layer's states before their dropout, (B, T, D), while the model reads; only if they are needed."""
        last: list[Tensor] = []
        if not (regularizers.activation or regularizers.temporal):
            yield last
            return
        hook = self.drop_output.register_forward_pre_hook(lambda _, given: last.append(given[0]))
        try:
            yield last
        finally:
            hook.remove()
        if len(last) != 1:
            raise ConfigError(
                f"penalties on the last layer's states need a {type(self).__name__}.read that gives them to self.drop_output "
                f"once, and it does so {len(last)} times; set them to 0"
            )

    def hidden_states(
        self, ids: Tensor, *, mems: Memory | None = None, rows: Rows = Rows()
    ) -> tuple[tuple[Tensor, ...], Memory]:
        """Read one segment, and return what every layer makes of it, for example to probe what a model knows.

        Args:
            ids: int64 (B, T), token ids.
            mems: see `forward`.
            rows: see `forward`.

        Returns:
            The input of each layer, embeddings first, and last the input of the softmax, each (B, T, D) (an LSTM's inner layers
            have widths of their own); and the new memory.

        Example:
            >>> from transformer_xl.model.lstm import Lstm, LstmConfig
            >>> model = Lstm(LstmConfig(vocab_size=11, n_layer=2, d_model=8)).eval()
            >>> states, mems = model.hidden_states(torch.zeros(3, 5, dtype=torch.int64))
            >>> [tuple(h.shape) for h in states]
            [(3, 5, 8), (3, 5, 8), (3, 5, 8)]
        """
        states: list[Tensor] = []
        hooks = [layer.register_forward_pre_hook(lambda _, given: states.append(given[0])) for layer in self.layers]
        try:
            last, new_mems = self.read(ids, mems=mems, rows=rows)
        finally:
            for hook in hooks:
                hook.remove()
        return (*states, last), new_mems

    def attention_weights(self, ids: Tensor, *, mems: Memory | None = None) -> tuple[tuple[Tensor, ...], Memory]:
        """Read one segment, and return where its heads look.

        Args:
            ids: int64 (B, T), token ids.
            mems: see `forward`.

        Returns:
            The weights of each layer, fp32 (B, N, T, S): how much each head attends from each token to the S keys, memory first
            and then the segment; the weights of a token sum to 1. And the new memory.

        Raises:
            ConfigError: the layers of this kind of model do not attend.

        Example:
            >>> from transformer_xl import TransformerXL, TransformerXLConfig
            >>> model = TransformerXL(TransformerXLConfig(vocab_size=11, n_layer=2, d_model=8, n_head=3, d_head=8, mem_len=4))
            >>> weights, mems = model.eval().attention_weights(torch.zeros(1, 5, dtype=torch.int64))
            >>> [tuple(each.shape) for each in weights]
            [(1, 3, 5, 5), (1, 3, 5, 5)]
        """
        if not self.attention_blocks():
            raise ConfigError(f"{self.described} has no attention weights, because its layers do not attend")
        weights: list[Tensor] = []
        new_mems = self.visit_attention(ids, lambda _, weight: weights.append(weight), mems=mems)
        return tuple(weights), new_mems

    @torch.no_grad()
    def visit_attention(self, ids: Tensor, visit: Callable[[int, Tensor], None], *, mems: Memory | None = None) -> Memory:
        """Read one segment as `attention_weights` does, and hold the weights of only one layer at a time.

        Args:
            ids: int64 (B, T), token ids.
            visit: called with the number of each layer, from 0 on, and its weights.
            mems: see `forward`.

        Returns:
            The new memory.
        """
        layers = {block: layer for layer, block in enumerate(self.attention_blocks())}

        def hook(block: AttentionKind, arguments: tuple[Tensor, ...], options: dict[str, Any]) -> None:
            visit(layers[block], block.weights(*arguments, **options).float())

        hooks = [block.register_forward_pre_hook(hook, with_kwargs=True) for block in layers]
        try:
            return self.read(ids, mems=mems)[1]
        finally:
            for each in hooks:
                each.remove()

    @abstractmethod
    def read(
        self,
        ids: Tensor,
        *,
        mems: Memory | None = None,
        rows: Rows = Rows(),
        execution: Execution = Execution(),
        keep_graph: bool = False,
    ) -> tuple[Tensor, Memory]:
        """Return the input of the softmax, (B, T, D), and the new memory; the arguments are those of `forward`."""


def check_reads_on(model: SequenceModel) -> None:
    """Refuse a model that does not predict each token from those before it, for what reads or writes with one."""
    if isinstance(model, LanguageModel):
        return
    if model.config.head is not None:
        raise ConfigError(f"a model that is fine-tuned ({model.config.head.kind}) predicts no tokens; use txl.predict")
    raise ConfigError(f"{model.described} does not read from left to right; call it, or its read, or use txl eval")


def _leading_unlabelled(labels: Tensor) -> int:
    """Return how many leading positions have no label in any row, for example because their text is read again.

    This waits for the device, so it is not used in training.
    """
    scored = (labels >= 0).any(dim=0).nonzero()
    return int(scored[0]) if len(scored) else labels.shape[1] - 1


def _penalty(last_BTD: Tensor, by: Regularizers) -> Tensor:
    """Return what is added to the mean loss of a token for the size of the last layer's states, and for their changes."""
    last_BTD = at_least_fp32(last_BTD)
    penalty = by.activation * last_BTD.square().mean()
    if by.temporal and last_BTD.shape[1] > 1:
        penalty = penalty + by.temporal * F.mse_loss(last_BTD[:, 1:], last_BTD[:, :-1])
    return penalty

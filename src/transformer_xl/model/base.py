"""What all kinds of model have in common (`SequenceModel`), and those that predict each token from the ones before it.

A kind defines how it reads a segment (`read`), and, if its memory is no hidden states, with what it begins (`init_mems`).

Shapes: B batch, T tgt_len, S keys, N heads, D d_model, V vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from transformer_xl.batch import Batch, Rows
from transformer_xl.config.model import AttentionConfig, ModelConfig
from transformer_xl.errors import Bounds, ConfigError
from transformer_xl.model.adaptive import AdaptiveEmbedding, AdaptiveSoftmax, make_embedding
from transformer_xl.model.attention.block import AttentionKind
from transformer_xl.model.call import Execution, ModelOutput, Regularizers, check_tokens
from transformer_xl.model.dropout import Dropout, WordDropout
from transformer_xl.model.memory import Memory, Mems, ZeroFirstMems
from transformer_xl.model.pretrained import PretrainedMixin
from transformer_xl.model.room import check_room
from transformer_xl.model.softmax import TokenEmbedding, TokenSoftmax

_LAYER_BYTES = 50_000
"""Python objects of a layer, in bytes, besides weights."""


class SequenceModel(nn.Module, PretrainedMixin, ABC):
    """A model that reads text segment by segment, with a memory that the caller keeps.

    Args:
        config: sizes and options; `vocab_size` must be set.

    Attributes:
        config: its settings.
        mem_len: positions of memory that a forward pass keeps.
        clamp_len: largest distance told apart; None: no limit.
        same_length: every query sees `mem_len` keys, itself included (or besides, see `same_length_besides_self`).
        ext_len: positions at the end of a segment that are not remembered, because the caller begins the next segment with them
            (the authors' extended context). These four belong to reading, not to the weights: see `with_context`.
    """

    config: ModelConfig
    only_predicting: ClassVar[tuple[str, ...]] = ("softmax.",)
    """Prefixes of the parameters that `read` does not use."""
    layers: nn.ModuleList
    embedding: TokenEmbedding | AdaptiveEmbedding
    softmax: TokenSoftmax | AdaptiveSoftmax

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if config.vocab_size is None:
            raise ConfigError("vocab_size (None) must be set before a model is built; take it from the tokenizer")
        if config.head is not None:
            raise ConfigError(
                f"head ({config.head.kind}) is no part of {type(self).__name__}; build a TaskModel of these settings"
            )
        # even on the meta device each layer takes a millisecond
        check_room(config.n_layer * _LAYER_BYTES, None, f"a model of n_layer {config.n_layer:,}")
        self.config = config
        self.mem_len, self.ext_len = config.mem_len, 0
        self.clamp_len: int | None = None
        self.same_length = False
        self.embedding = make_embedding(config)
        self.drop_words = WordDropout(config.dropemb, vocab_size=config.vocab_size)
        dropinput = config.dropout if config.dropinput is None else config.dropinput
        dropoutput = config.dropout if config.dropoutput is None else config.dropoutput
        self.drop_input = Dropout(dropinput, locked=config.locked_dropout)
        self.drop_output = Dropout(dropoutput, locked=config.locked_dropout)

    @torch.no_grad()
    def init_weights(self) -> None:
        """Draw all weights as the authors' `weights_init` does: normal or uniform, biases 0, norms around 1."""
        config = self.config
        if self.device.type == "meta":  # there are no numbers, and each call takes as long as making a layer
            return
        for name, parameter in self.named_parameters():
            owner, _, kind = name.rpartition(".")
            if self.init_own(name, parameter):
                pass
            elif owner.endswith("norm") and kind == "weight":
                parameter.normal_(1.0, config.init_std)
            elif kind in ("bias", "cluster_bias") or owner.endswith("biases"):
                parameter.zero_()
            elif owner.endswith(("projection", "projections")):
                parameter.normal_(0.0, config.proj_init_std)
            elif config.init == "uniform":
                parameter.uniform_(-config.init_range, config.init_range)
            else:
                parameter.normal_(0.0, config.init_std)

    def init_own(self, name: str, parameter: Tensor) -> bool:
        """Set a parameter's initial values and return True, or return False so that they are drawn like all others."""
        return False

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights and of the memory."""
        return next(self.parameters()).dtype

    @property
    def described(self) -> str:
        """What kind of model it is, for messages."""
        return f"a model of kind '{self.config.kind}'"

    @property
    def vocab_size(self) -> int:
        """V: how many tokens it tells apart."""
        assert self.config.vocab_size is not None  # or it would not have been built
        return self.config.vocab_size

    @property
    def learned_length(self) -> int | None:
        """Tokens of a segment that it has learned positions for; None: any number."""
        return None

    @property
    def is_sharded(self) -> bool:
        """True if this process holds only parts of the weights (FSDP)."""
        return any(hasattr(parameter, "full_tensor") for parameter in self.parameters())

    def init_mems(self, batch_size: int, *, length: int | None = None) -> Any:
        """Return an empty memory; with `zero_first_memory`, queries attend to its zeros.

        Args:
            batch_size: B, number of rows.
            length: positions allotted per row; None: `mem_len`, so that shapes stay constant from the first segment on.

        Returns:
            The `Memory` at the beginning of a stream, on the model's device: `Mems`, unless the kind of model has its own.
        """
        config, dtype, device = self.config, self.dtype, self.device
        length = self.n_kept if length is None else length
        n_bytes = config.n_layer * length * batch_size * config.d_model * dtype.itemsize
        check_room(n_bytes, device, f"a memory of mem_len {length} and batch_size {batch_size}")
        zeros = torch.zeros(batch_size, length, config.d_model, dtype=dtype, device=device)
        tokens = torch.zeros(batch_size, config.n_earlier, dtype=torch.int64, device=device) if config.n_earlier else None
        n_valid = torch.full((batch_size,), length if self.mems_class.valid_when_empty else 0, device=device)
        return self.mems_class((zeros,) * config.n_layer, n_valid, tokens)

    @property
    def n_kept(self) -> int:
        """Positions that the memory keeps when it is full."""
        return self.mem_len

    @property
    def mems_class(self) -> type[Mems]:
        """The kind of its memory, which knows what an empty row is."""
        return ZeroFirstMems if self.config.begins_with_zeros else Mems

    def check_memory(self, mems: Memory | None, batch_size: int) -> None:
        """Refuse a memory that this model cannot have made; no number on the device is looked at.

        Args:
            mems: memory before a segment; None: empty.
            batch_size: B, rows of the segment.

        Raises:
            TypeError: it is none, but for example a list of tensors.
            ValueError: it is of another class, another number of rows or layers, of other widths or types, or too long.
        """
        if mems is None:
            return
        if not isinstance(mems, Memory):
            raise TypeError(f"mems must be what a call returned, or model.init_mems({batch_size}), not a {type(mems).__name__}")
        mems.check(batch_size, self.init_mems(0))

    def read_text(
        self, ids: Tensor, *, mems: Any, n_pad: Tensor | None, segments: Tensor | None, execution: Execution, keep_graph: bool
    ) -> tuple[Tensor, Memory]:
        """Read a segment of a text for a head, as `read` does.

        Args:
            ids: int64 (B, T), token ids.
            mems: memory of the text before; None: the text begins.
            n_pad: int64 (B,), padding at the left of each row; None: none.
            segments: int64 (B, T), the text that each token belongs to, for an XLNet; None: all to the same.
            execution: how to compute.
            keep_graph: the new memory keeps its gradients.

        Raises:
            ConfigError: this kind of model cannot be fine-tuned.
        """
        raise ConfigError(f"{self.described} cannot be fine-tuned: it neither reads from left to right nor is an xlnet")

    @abstractmethod
    def loss(
        self,
        batch: Batch,
        *,
        mems: Any,
        execution: Execution = Execution(),
        keep_graph: bool = False,
        regularizers: Regularizers = Regularizers(),
    ) -> ModelOutput:
        """Read a batch, and return the loss of each of its labels.

        Args:
            batch: of the kind that this model learns from, on its device.
            mems: memory returned by the last call, or `init_mems`; None: empty.
            execution: how to compute; the result is the same.
            keep_graph: the new memory keeps its gradients, see `LanguageModel.forward`.
            regularizers: what is added to the loss; only a `LanguageModel` knows them.

        Returns:
            `nll`, 0 where nothing is learned, `auxiliary`, and the new memory.
        """

    @abstractmethod
    def smallest_batch(self) -> Batch:
        """Return a batch whose loss uses all parameters."""

    def attention_blocks(self) -> list[AttentionKind]:
        """Return the attention block of each layer; none if layers do not attend."""
        layers = self.layers if isinstance(self.config, AttentionConfig) else ()
        return [cast("AttentionKind", layer.attention) for layer in layers]

    @contextmanager
    def watched(
        self, *, states: Callable[[Tensor], None] | None = None, weights: Callable[[Tensor], None] | None = None
    ) -> Iterator[None]:
        """Show what happens in the layers while the model reads in this context, layer by layer.

        Args:
            states: is called with what enters a layer, (B, T, D).
            weights: is called with how much its heads attend from each token to the S keys, fp32 (B, N, T, S), without a graph.

        Raises:
            ConfigError: weights of a kind of model whose layers do not attend.
        """
        blocks = self.attention_blocks()
        if weights and not blocks:
            raise ConfigError(f"{self.described} has no attention weights, because its layers do not attend")

        def attend(block: AttentionKind, arguments: tuple[Tensor, ...], options: dict[str, Any]) -> None:
            assert weights
            with torch.no_grad():
                weights(block.weights(*arguments, **options).float())

        with ExitStack() as hooks:
            for layer in self.layers if states else ():
                hooks.enter_context(layer.register_forward_pre_hook(lambda _, given: states and states(given[0])))
            for block in blocks if weights else ():
                hooks.enter_context(block.register_forward_pre_hook(attend, with_kwargs=True))
            yield

    def with_context(
        self,
        *,
        mem_len: int | None = None,
        clamp_len: int | None = None,
        same_length: bool | None = None,
        ext_len: int | None = None,
    ) -> Self:
        """Return the same model with another context, for example a longer memory at evaluation.

        Args:
            mem_len: positions of memory; None: unchanged.
            clamp_len: largest distance told apart; None: unchanged (a limit can be changed, not lifted).
            same_length: the same number of keys for every query; None: unchanged.
            ext_len: positions at the end of a segment that are not remembered; None: unchanged.

        Returns:
            A view of this model that shares its parameters. Its `config`, which is what gets saved, stays the same.

        Raises:
            ConfigError: values that cannot work together, or that this kind of model does not have.
        """
        for name, value in {"mem_len": mem_len, "clamp_len": clamp_len, "ext_len": ext_len}.items():
            Bounds(1 if name == "clamp_len" else 0, whole=True, optional=True).check(name, value)
        view = object.__new__(type(self))  # not copy.copy, which fails for a model that is sharded
        vars(view).update(vars(self))
        view.mem_len = self.mem_len if mem_len is None else mem_len
        view.clamp_len = self.clamp_len if clamp_len is None else clamp_len
        view.same_length = self.same_length if same_length is None else same_length
        view.ext_len = self.ext_len if ext_len is None else ext_len
        view.check_context()
        return view

    def for_text(self, n_token: int) -> Self:
        """Return a view with a memory no longer than a text, which gives the same numbers and takes no more than it needs."""
        if self.mem_len <= n_token or self.config.begins_with_zeros:
            return self
        return self.with_context(mem_len=n_token)

    def check_context(self) -> None:
        """Refuse a context that this kind of model cannot have.

        Raises:
            ConfigError: see `with_context`.
        """
        for name, value in (("clamp_len", self.clamp_len), ("same_length", self.same_length)):
            if value:
                raise ConfigError(f"{name} ({value}) needs a memory of positions, and {self.described} has none")

    def check_backend(self, backend: str, device: torch.device) -> None:
        """Refuse an attention backend that cannot run on a device.

        Args:
            backend: its name, see `choose_backend`.
            device: where the model shall run.

        Raises:
            ConfigError: no backend of that name, or one that cannot run there with this model's weights.
        """
        if backend != "auto":
            raise ConfigError(
                f"train.attention ({backend}) chooses an attention backend, and {self.described} has none; "
                "use train.attention=auto"
            )

    def embed(self, ids: Tensor) -> Tensor:
        """Return the vectors of ids, (B, T, D); in training, dropped words are shrunk, see `WordDropout`."""
        return self.drop_words(self.embedding(ids), ids)


class LanguageModel(SequenceModel):
    """A model that predicts each token of a stream from those before it, segment by segment; see `SequenceModel`."""

    def loss(
        self,
        batch: Batch,
        *,
        mems: Any,
        execution: Execution = Execution(),
        keep_graph: bool = False,
        regularizers: Regularizers = Regularizers(),
    ) -> ModelOutput:
        return self(
            batch.ids,
            mems=mems,
            labels=batch.labels,
            rows=batch.rows,
            execution=execution,
            keep_graph=keep_graph,
            regularizers=regularizers,
        )

    def smallest_batch(self) -> Batch:
        ids = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        return Batch(ids, ids)

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
        """Whether `forward` adds other losses to that of the next token in training."""
        return False

    @property
    def keeps_keys(self) -> bool:
        """Whether a `Reader` reads as this model does: keys and values of a position stay the same while the text goes on."""
        return False

    @property
    def carries_state(self) -> bool:
        """Whether the memory holds all that the model knows of the text before, so that it can read on token by token."""
        return self.config.remembers == "state" and self.mem_len > 0

    def read_text(
        self, ids: Tensor, *, mems: Any, n_pad: Tensor | None, segments: Tensor | None, execution: Execution, keep_graph: bool
    ) -> tuple[Tensor, Memory]:
        return self.read(ids, mems=mems, rows=Rows(n_pad=n_pad), execution=execution, keep_graph=keep_graph)

    @abstractmethod
    def reach(self, tgt_len: int) -> int:
        """Return how many tokens, in segments of `tgt_len`, fill an empty memory so that it equals that of the whole stream."""

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
        """Return the last states, (B, T, D), before `drop_output`, and the new memory; the arguments are those of `forward`."""

    def forward(
        self,
        ids: Tensor,
        *,
        mems: Memory | None = None,
        labels: Tensor | None = None,
        rows: Rows = Rows(),
        execution: Execution = Execution(),
        keep_graph: bool = False,
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
            regularizers: what is added to the loss as `auxiliary`, so that nats per token stay what they are.

        Returns:
            logits, or with labels nats per token, and the new memory.

        Raises:
            TypeError: ids are no tensor, or mems no memory.
            ValueError: shapes that do not fit together, or the memory of another model.
        """
        self.check_segment(ids, mems, labels)
        last_BTD, new_mems = self.read(ids, mems=mems, rows=rows, execution=execution, keep_graph=keep_graph)
        h_BTD = self.drop_output(last_BTD)
        if labels is None:
            return ModelOutput(new_mems, logits=self.softmax.logits(h_BTD, self.embedding))
        n_read_only = 0 if torch.is_grad_enabled() else _leading_unlabelled(labels)
        scored = (h_BTD[:, n_read_only:], labels[:, n_read_only:], self.embedding)
        nll = self.softmax.nll(*scored, tail_sizes=execution.tail_sizes)
        added = []
        if regularizers.label_smoothing:
            assert isinstance(self.softmax, TokenSoftmax)
            added.append(regularizers.label_smoothing * self.softmax.advantage(h_BTD, labels, self.embedding))
        if regularizers.activation or regularizers.temporal:
            added.append((labels >= 0).sum() * regularizers.penalty(last_BTD))  # the caller divides by the number of labels
        return ModelOutput(new_mems, nll=F.pad(nll, (n_read_only, 0)), auxiliary=sum(added[1:], added[0]) if added else None)

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
        self.check_segment(ids, mems)
        states: list[Tensor] = []
        with self.watched(states=states.append):
            last, new_mems = self.read(ids, mems=mems, rows=rows)
        return (*states, last), new_mems

    @torch.no_grad()
    def attention_weights(
        self, ids: Tensor, *, mems: Memory | None = None, keep: Callable[[int, Tensor], Any] | None = None
    ) -> tuple[tuple[Any, ...], Memory]:
        """Read one segment, and return where its heads look.

        Args:
            ids: int64 (B, T), token ids.
            mems: see `forward`.
            keep: what it returns of the number of each layer, from 0 on, and its weights is kept instead of them, so that those
                of only one layer are held at a time; None: the weights.

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
        self.check_segment(ids, mems)
        kept: list[Any] = []
        with self.watched(weights=lambda weights: kept.append(weights if keep is None else keep(len(kept), weights))):
            _, new_mems = self.read(ids, mems=mems)
        return tuple(kept), new_mems

    def check_segment(self, ids: Tensor, mems: Memory | None, labels: Tensor | None = None) -> None:
        """Refuse what does not fit together; see `forward`."""
        check_tokens(ids, "batch", "tgt_len")
        if labels is not None and labels.shape != ids.shape:
            raise ValueError(f"labels {tuple(labels.shape)} must have the shape of ids {tuple(ids.shape)}")
        self.check_memory(mems, ids.shape[0])  # len would fix the number of rows of an exported graph


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

"""What all kinds of model have in common: embedding, softmax, initialization, and a memory that the caller keeps.

Those that predict each token from the ones before it are language models (`language_model.py`).

Shapes: B batch, T tgt_len, D d_model, V vocabulary.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn

from transformer_xl.config.model import AttentionConfig, ModelConfig
from transformer_xl.errors import ConfigError
from transformer_xl.kernels.choose import check_no_backend
from transformer_xl.model.adaptive import AdaptiveEmbedding, AdaptiveSoftmax
from transformer_xl.model.attention.block import AttentionKind
from transformer_xl.model.dropout import Dropout, WordDropout
from transformer_xl.model.memory import Memory, Mems, ZeroFirstMems
from transformer_xl.model.pretrained import PretrainedMixin
from transformer_xl.model.room import check_room
from transformer_xl.model.softmax import TokenEmbedding, TokenSoftmax


@dataclass(frozen=True)
class ModelOutput:
    """What a forward pass returns.

    Attributes:
        mems: the memory after the segment, for the next call.
        logits: (B, T, V), scores of the token that follows each position (log-probabilities with an adaptive softmax); None if
            labels were given.
        nll: nats of each label, 0 where it is -100: (B, T) in the order of the tokens, or (B, K) of an XLNet; None without.
        auxiliary: scalar, nats that a kind adds to the sum of `nll` in training; None: it adds none.
    """

    mems: Memory
    logits: Tensor | None = None
    nll: Tensor | None = None
    auxiliary: Tensor | None = None


class SequenceModel(nn.Module, PretrainedMixin, ABC):
    """A model that reads text segment by segment, with a memory that the caller keeps.

    Args:
        config: sizes and options; `vocab_size` must be set.

    Attributes:
        config: its settings.
        mem_len: positions of memory that a forward pass keeps.
        clamp_len: largest distance told apart; None: no limit.
        same_length: every query sees `mem_len` keys, itself included.
        ext_len: positions at the end of a segment that are not remembered, because the caller begins the next segment with them
            (the authors' extended context). These four belong to reading, not to the weights: see `with_context`.
    """

    config: ModelConfig
    only_predicting: ClassVar[tuple[str, ...]] = ("softmax.",)
    """How names of parameters begin that `read` does without."""
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
        self.embedding = _embedding(config)
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
    def learned_length(self) -> int | None:
        """Tokens of a segment that it has learned positions for; None: any number."""
        return None

    @property
    def is_sharded(self) -> bool:
        """True if this process holds only parts of the weights (FSDP)."""
        return any(hasattr(parameter, "full_tensor") for parameter in self.parameters())

    @abstractmethod
    def init_mems(self, batch_size: int, *, length: int | None = None) -> Memory:
        """Return an empty memory.

        Args:
            batch_size: B, number of rows.
            length: positions allotted per row; None: `mem_len`, so that shapes stay constant from the first segment on.

        Returns:
            The memory at the beginning of a stream, on the model's device.
        """

    def empty_mems(self, batch_size: int, *, length: int | None) -> Mems:
        """Return an empty memory of hidden states, as `init_mems`; with `zero_first_memory`, queries attend to its zeros."""
        return self.mems_class.empty(
            batch_size,
            n_layer=self.config.n_layer,
            d_model=self.config.d_model,
            length=self.n_kept if length is None else length,
            n_token=self.config.n_earlier,
            dtype=self.dtype,
            device=self.device,
        )

    @property
    def n_kept(self) -> int:
        """Positions that the memory keeps when it is full."""
        return self.mem_len

    @property
    def mems_class(self) -> type[Mems]:
        """The kind of its memory, which knows what an empty row is."""
        return ZeroFirstMems if self.config.begins_with_zeros else Mems

    @abstractmethod
    def smallest_call(self) -> dict[str, Any]:
        """Return arguments of a call with labels that uses all parameters."""

    def attention_blocks(self) -> list[AttentionKind]:
        """Return the attention block of each layer; none if layers do not attend."""
        layers = self.layers if isinstance(self.config, AttentionConfig) else ()
        return [cast("AttentionKind", layer.attention) for layer in layers]

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
        view = object.__new__(type(self))  # not copy.copy, which fails for a model that is sharded
        vars(view).update(vars(self))
        view.mem_len = self.mem_len if mem_len is None else mem_len
        view.clamp_len = self.clamp_len if clamp_len is None else clamp_len
        view.same_length = self.same_length if same_length is None else same_length
        view.ext_len = self.ext_len if ext_len is None else ext_len
        if view.mem_len < 0 or view.ext_len < 0:
            raise ConfigError(f"mem_len ({view.mem_len}) must be at least 0, ext_len ({view.ext_len}) too")
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
        check_no_backend(backend, self.described)

    def embed(self, ids: Tensor) -> Tensor:
        """Return the vectors of ids, (B, T, D); in training, zeros for dropped words."""
        return self.drop_words(self.embedding(ids), ids)


_LAYER_BYTES = 50_000
"""What the objects of a layer take besides its weights."""


def make_softmax(config: ModelConfig) -> TokenSoftmax | AdaptiveSoftmax:
    """Return the softmax over the vocabulary that the settings describe."""
    assert config.vocab_size is not None
    tied, tied_projections = config.tie_weight, config.tied_projections
    if not config.cutoffs and config.div_val == 1:
        sizes = {"d_embed": config.d_embed or config.d_model, "d_model": config.d_model}
        return TokenSoftmax(config.vocab_size, **sizes, tied=tied, tied_projection=tied_projections[0])
    return AdaptiveSoftmax(config.vocab_size, **_clusters(config), tied=tied, tied_projections=tied_projections)


def _embedding(config: ModelConfig) -> TokenEmbedding | AdaptiveEmbedding:
    assert config.vocab_size is not None
    if config.div_val == 1:
        sizes = {"d_embed": config.d_embed or config.d_model, "d_model": config.d_model}
        return TokenEmbedding(config.vocab_size, **sizes, scale=config.embedding_scale)
    return AdaptiveEmbedding(config.vocab_size, **_clusters(config))


def _clusters(config: ModelConfig) -> dict[str, Any]:
    """Return the arguments that adaptive embedding and softmax have in common."""
    return {
        "cutoffs": config.cutoffs,
        "div_val": config.div_val,
        "d_embed": config.d_embed or config.d_model,
        "d_model": config.d_model,
        "proj_same_dim": config.proj_same_dim,
    }

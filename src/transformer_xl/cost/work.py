"""`Work`: one training pass to be counted, with its model, lanes and segments, precision and vocabulary.

The model is built on the meta device, with every shape and no numbers. So the model's code alone says how large things are.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

from transformer_xl.config.model import KINDS, ModelConfig, TransformerXLConfig
from transformer_xl.config.run import RunConfig
from transformer_xl.data.named import NAMED
from transformer_xl.errors import ConfigError
from transformer_xl.kernels.device import Precision
from transformer_xl.kernels.fused import KEPT_BYTES
from transformer_xl.model.attention.absolute import AlRfouAttention
from transformer_xl.model.attention.block import AttentionKind
from transformer_xl.model.attention.relative import RelativeAttention
from transformer_xl.model.attention.shaw import ShawAttention
from transformer_xl.model.base import LanguageModel
from transformer_xl.model.build import completed, make_blueprint
from transformer_xl.model.kinds import MODELS
from transformer_xl.model.softmax import CHUNK_ELEMENTS, GPU_CHUNK_ELEMENTS
from transformer_xl.model.transformer_xl import TransformerXL

Backend = Literal["equation", "matmul", "triton"]
"""Backends that can be counted: the paper's equation (operations only), and those that `auto` takes."""

_PIECES = 8192


COMPARE_DISTANCES = (RelativeAttention, ShawAttention)
"""Kinds of attention that also multiply queries by a key of each distance."""


@dataclass(frozen=True)
class Work:
    """One forward and backward pass of one process."""

    model: TransformerXL  # on the meta device; its memory is full
    rows: int  # B, lanes read at once
    tgt_len: int  # T, tokens per segment of a lane
    precision: Precision  # of the matrix products
    backend: Backend
    on_cpu: bool  # a CPU's dropout and attention keep other tensors than a GPU's
    checkpointing: bool  # layers are computed again in the backward pass instead of being kept
    shares: tuple[float, ...]  # of the tokens in each cluster of the softmax, head first
    segments: int = 1  # K, read one after another, with gradients through the memory between them

    @property
    def n_token(self) -> int:
        """X, tokens per segment of all lanes."""
        return self.rows * self.tgt_len

    @property
    def n_key(self) -> int:
        """S, positions that a lane attends to."""
        return self.model.mem_len + self.tgt_len

    @property
    def attention_width(self) -> int:
        """A, width of all heads together."""
        return self.model.config.n_head * self.model.config.d_head

    @property
    def element(self) -> int:
        """e, bytes of a number in a matrix product."""
        return 4 if self.precision == "fp32" else 2

    @property
    def is_fused(self) -> bool:
        """Whether what stands between the products of a layer are kernels that keep no masks."""
        return self.backend == "triton" and not self.on_cpu

    @property
    def kept_position_bytes(self) -> int:
        """Bytes of the scores of positions that fused kernels keep in a layer; lengths are padded to multiples of eight."""
        if self.backend != "triton" or not self.by_keys:
            return 0
        n_query, n_column = (-(-n // 8) * 8 for n in (self.tgt_len, self.n_key))
        n_byte = self.rows * self.model.config.n_head * n_query * n_column * self.element
        return n_byte if n_byte <= KEPT_BYTES else 0

    @property
    def changes_memory(self) -> bool:
        """Whether weights change the memory before a layer projects it, so that the products with it have two gradients."""
        return self.model.config.pre_lnorm or issubclass(self.kind, AlRfouAttention)

    @property
    def kind(self) -> type[AttentionKind]:
        """Its kind of attention."""
        return self.model.attention_kind

    @property
    def by_keys(self) -> bool:
        """Whether positions are keys alone, so that fused kernels can compute attention."""
        return self.kind.by_keys

    @property
    def compares_distances(self) -> bool:
        """Whether queries are also multiplied by a key of each distance."""
        return issubclass(self.kind, COMPARE_DISTANCES)


@dataclass(frozen=True)
class Cluster:
    """One cluster of the vocabulary in the softmax."""

    n_class: int  # tokens, and in the head one class for each tail
    width: int  # of the tokens' vectors
    projected: bool  # whether hidden states are projected to that width first
    share: float  # of all labels that it scores; the head scores all

    def tokens_at_once(self, *, on_cpu: bool) -> int:
        """Return how many tokens are scored at once."""
        return max(1, math.floor((CHUNK_ELEMENTS if on_cpu else GPU_CHUNK_ELEMENTS) / self.n_class))


def build(config: TransformerXLConfig) -> TransformerXL:
    """Return the model without its numbers."""
    return cast(TransformerXL, make_blueprint(config))


def clusters(model: LanguageModel, shares: Sequence[float]) -> list[Cluster]:
    """Return the clusters of a model's softmax with the shares of tokens in each, head first; a plain softmax has one."""
    parts, classes = model.softmax.clusters(model.embedding)
    n_tail = 0 if classes is None else len(classes[0])
    return [
        Cluster(len(bias) + (n_tail if i == 0 else 0), vectors.shape[1], projection is not None, 1.0 if i == 0 else share)
        for i, ((projection, vectors, bias), share) in enumerate(zip(parts, shares, strict=True))
    ]


def is_counted(settings: ModelConfig | type[ModelConfig]) -> bool:
    """Return whether operations and memory of such models are counted here, so that `txl plan` can plan their runs."""
    kind = settings if isinstance(settings, type) else type(settings)
    return MODELS.get(kind) is TransformerXL


def with_vocabulary(config: RunConfig) -> tuple[TransformerXLConfig, str]:
    """Return a run's model settings with the size of the vocabulary, and where that size comes from."""
    if not is_counted(config.model):
        planned = ", ".join(name for name, settings in KINDS.items() if is_counted(settings))
        raise ConfigError(f"only {planned} models can be planned, and '{config.name}' is of kind '{config.model.kind}'")
    size, origin = vocabulary(config)
    return cast(TransformerXLConfig, completed(config.model, vocab_size=size, tgt_len=config.train.tgt_len)), origin


def vocabulary(config: RunConfig) -> tuple[int, str]:
    """Return the size that a run's vocabulary will have, and where that size comes from."""
    model, tokenizer, corpus = config.model, config.tokenizer, config.data.corpus
    if model.vocab_size:
        return model.vocab_size, "as set"
    if tokenizer.kind == "byte":
        return 256, "bytes"
    if tokenizer.kind in ("bpe", "unigram"):
        return tokenizer.vocab_size or _PIECES, f"{tokenizer.kind}, {'as set' if tokenizer.vocab_size else 'the default'}"
    if tokenizer.kind == "ids" and tokenizer.vocab_size:
        return tokenizer.vocab_size, "ids, as set"
    if corpus in NAMED and tokenizer.kind in NAMED[corpus].vocabularies:
        return NAMED[corpus].vocabularies[tokenizer.kind], f"{tokenizer.kind}s of {corpus}"
    raise ConfigError(
        f"how many {tokenizer.kind.removesuffix('s')}s '{corpus}' has is known only after preparing it (txl corpus prepare); "
        "for a plan say it with --set model.vocab_size=N"
    )


def zipf_shares(cutoffs: Sequence[int], vocab_size: int) -> tuple[float, ...]:
    """Return the share of tokens in each cluster if the k-th most frequent token has a frequency proportional to 1/k.

    Example:
        >>> [round(share, 2) for share in zipf_shares((20_000, 40_000, 200_000), 267_735)]
        [0.8, 0.05, 0.12, 0.02]
    """
    borders = [*cutoffs, vocab_size]
    sums = [math.log(border) + 0.5772 + 0.5 / border for border in borders]  # of 1/k, up to each border
    return tuple((high - low) / sums[-1] for low, high in zip([0.0, *sums[:-1]], sums, strict=True))

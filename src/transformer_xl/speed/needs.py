"""What a token needs: bytes that a decoder reads for it, and operations that scoring it takes.

Bytes are those of the tensors that are really read, in the types in which they lie in memory.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from torch import Tensor, nn

from transformer_xl.generation.decoder import Decoder
from transformer_xl.model.adaptive import AdaptiveSoftmax
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.layers import AttentionBlock, DecoderLayer
from transformer_xl.model.reader import Reader
from transformer_xl.model.softmax import Embedding, TokenSoftmax
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.model_config import AttentionConfig, TransformerXLConfig

_OF_POSITIONS = ("position_keys", "distance_bias")


@dataclass(frozen=True)
class BytesPerToken:
    """What a step of a decoder reads.

    Attributes:
        weights: all that vectors are multiplied by or added to, but the tails of an adaptive softmax; once for all rows.
        positions: keys and biases of all distances; once for all rows.
        memory: keys and values of all slots of one row.
        embedding: what is looked up for one row.
        tails: each tail of an adaptive softmax, read only where it can matter.
    """

    weights: int
    positions: int
    memory: int
    embedding: int
    tails: tuple[int, ...] = ()

    def of_step(self, n_row: int, tail_shares: Sequence[float] | None = None) -> float:
        """Return the bytes of one token of each row.

        Args:
            n_row: number of rows.
            tail_shares: the share of steps that needed each tail; None: no step did.
        """
        shares = [0.0] * len(self.tails) if tail_shares is None else tail_shares
        tails = sum(size * share for size, share in zip(self.tails, shares, strict=True))
        return self.weights + self.positions + n_row * (self.memory + self.embedding) + tails


@dataclass(frozen=True)
class SessionBytes:
    """What a decoder adds to its model.

    Attributes:
        memory: keys and values: layers x rows x slots x 2 x heads x d_head x the size of a number, and counters.
        positions: keys and biases of all distances.
        weights: copies of weights in another type or order; the others are shared with the model.
    """

    memory: int
    positions: int
    weights: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.memory + self.positions + self.weights


def bytes_per_token(decoder: Decoder) -> BytesPerToken | None:
    """Count what a token makes a decoder read; None where tokens are read again and again instead."""
    kept = decoder.kept
    if kept is None:
        return None
    reader, memory, model = kept.reader, kept.memory, decoder.model
    head, tails = _softmax_parts(reader)
    projections = _parameters(model.embedding, looked_up=False)
    norms = cast("TransformerXL", model).final_norm.parameters()  # only this kind keeps keys
    multiplied = [*_layer_tensors(reader, of_positions=False), *head, *norms, *projections]
    return BytesPerToken(
        weights=_n_bytes(multiplied),
        positions=_n_bytes(_layer_tensors(reader, of_positions=True)),
        memory=_n_bytes((*memory.keys, *memory.values)) // memory.batch_size,
        embedding=_n_bytes(table[0] for table in _parameters(model.embedding, looked_up=True)),
        tails=tuple(_n_bytes(tail) for tail in tails),
    )


def session_bytes(decoder: Decoder) -> SessionBytes | None:
    """Count what a decoder holds beside its model; None where it keeps no keys."""
    kept = decoder.kept
    if kept is None:
        return None
    head, tails = _softmax_parts(kept.reader)
    shared = {_place(parameter) for parameter in decoder.model.parameters()}
    frozen = [*_layer_tensors(kept.reader, of_positions=False), *head, *itertools.chain(*tails)]
    copies = {_place(x): x for x in frozen if _place(x) not in shared}
    return SessionBytes(
        memory=kept.memory.n_bytes,
        positions=_n_bytes(_layer_tensors(kept.reader, of_positions=True)),
        weights=_n_bytes(copies.values()),
    )


def slots_per_row(decoder: Decoder) -> int:
    """Return how many tokens fill the memory of a row."""
    kept = decoder.kept
    return decoder.mem_len + decoder.tgt_len if kept is None else kept.memory.n_slot


def flops_per_token(model: LanguageModel, ids: np.ndarray, *, tgt_len: int) -> float:
    """Count what scoring a text needs per token, whatever a program does beyond it.

    Every token is projected once, compared with the keys that it may see, and scored; a tail of an adaptive softmax counts for
    the tokens that belong to it.

    Args:
        model: with the memory that it reads with.
        ids: integers (N,), the text.
        tgt_len: tokens per segment.

    Returns:
        Floating-point operations on average, a multiplication and an addition counted as two.
    """
    length = tgt_len + model.ext_len
    again = length / tgt_len
    return 2 * (again * _products_of_layers(model, length) + _products_of_vocabulary(model, ids, again))


def _products_of_layers(model: LanguageModel, length: int) -> float:
    """Return the multiplications that all layers take for a token, on average over the tokens of a segment."""
    config = model.config
    if not isinstance(config, AttentionConfig):
        weights = (weight for name, weight in model.named_parameters() if name.startswith("layers."))
        return sum(weight.numel() for weight in weights if weight.dim() == 2)
    seen = [model.window or model.mem_len + place for place in range(1, length + 1)]
    by_distance = isinstance(config, TransformerXLConfig) and not config.counts_from_end
    told_apart = [min(n, (model.clamp_len or n) + 1) for n in seen] if by_distance else []
    attention = (2 * sum(seen) + sum(told_apart)) / length * config.n_head * config.d_head
    return sum(_products(cast(DecoderLayer, layer)) + attention for layer in model.layers)


def _products(layer: DecoderLayer) -> int:
    attention, feed_forward = cast(AttentionBlock, layer.attention), layer.feed_forward
    return sum(linear.weight.numel() for linear in (attention.qkv_net, attention.o_net, feed_forward.inner, feed_forward.outer))


def _products_of_vocabulary(model: LanguageModel, ids: np.ndarray, n_read: float) -> float:
    """Return the multiplications that embedding and softmax take for a token that is read so often and scored once."""
    softmax, embedding = cast(TokenSoftmax | AdaptiveSoftmax, model.softmax), cast(Embedding, model.embedding)
    clusters, classes = softmax.clusters(embedding)
    borders = np.cumsum([len(bias) for _, _, bias in clusters])
    shares = np.bincount(np.searchsorted(borders, ids, side="right"), minlength=len(clusters)) / len(ids)
    total = 0.0 if classes is None else classes[0].numel()
    for i, (projection, vectors, _) in enumerate(clusters):
        scored = vectors.numel() + (0 if projection is None else projection.numel())
        embedded = embedding.projection_of(i)
        total += (1.0 if i == 0 else shares[i]) * scored
        total += 0.0 if embedded is None else n_read * shares[i] * embedded.numel()
    return float(total)


def _layer_tensors(reader: Reader, *, of_positions: bool) -> Iterator[Tensor]:
    """Yield what all layers multiply by and add: what they have for each distance, or all the rest."""
    for layer in reader.layers:
        yield from _tensors(part for name, part in layer._asdict().items() if (name in _OF_POSITIONS) == of_positions)


def _softmax_parts(reader: Reader) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Return the tensors of the head, with those of the tails as classes of it, and of each tail."""
    softmax = reader.softmax
    head, *tails = (list(_tensors(cluster)) for cluster in softmax.clusters)
    return [*head, *_tensors(softmax.tail_classes)], tails


def _tensors(parts: Tensor | Iterable[object] | None) -> Iterator[Tensor]:
    """Yield the tensors within tuples of tuples."""
    if isinstance(parts, Tensor):
        yield parts
    elif parts is not None:
        for part in parts:
            yield from _tensors(cast("Tensor | Iterable[object] | None", part))


def _parameters(embedding: nn.Module, *, looked_up: bool) -> list[Tensor]:
    """Return the tables of an embedding, or what their rows are multiplied by."""
    return [x.detach() for name, x in embedding.named_parameters() if name.startswith("projection") != looked_up]


def _n_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(x.nbytes for x in tensors)


def _place(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()

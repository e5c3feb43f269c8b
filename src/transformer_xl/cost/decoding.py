"""Bytes of decoding: what a decoder reads for a token and holds besides its model.

Counts are of the tensors that the decoder really reads, in their types in memory.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from torch import Tensor

from transformer_xl.generation.decoder import Decoder
from transformer_xl.inference.reader import Reader
from transformer_xl.model.transformer_xl import TransformerXL

_OF_POSITIONS = ("position_keys", "distance_bias")


@dataclass(frozen=True)
class BytesPerToken:
    """What a decoder reads for a token."""

    weights: int  # everything that multiplies vectors or is added to them, except tails; read once for all rows
    positions: int  # keys and biases of all distances; read once for all rows
    memory: int  # keys and values of all slots of one row
    embedding: int  # vectors that one row looks up
    tails: tuple[int, ...] = ()  # each tail of an adaptive softmax, read only where it can matter

    def of_step(self, n_row: int, tail_shares: Sequence[float] | None = None) -> float:
        """Return the bytes of a step of `n_row` rows, if each tail was needed in such a share of the steps."""
        shares = [0.0] * len(self.tails) if tail_shares is None else tail_shares
        tails = sum(size * share for size, share in zip(self.tails, shares, strict=True))
        return self.weights + self.positions + n_row * (self.memory + self.embedding) + tails


@dataclass(frozen=True)
class SessionBytes:
    """What a decoder holds besides its model."""

    memory: int  # keys and values: layers x rows x slots x 2 x heads x d_head x the size of a number, and counters
    positions: int  # keys and biases of all distances
    weights: int  # copies of weights in another type or order; the others are the model's own

    @property
    def total(self) -> int:
        """All of it."""
        return self.memory + self.positions + self.weights


def bytes_per_token(decoder: Decoder) -> BytesPerToken | None:
    """Count what a decoder reads for a token; None if it keeps no keys and reads earlier tokens again instead."""
    kept = decoder.kept
    if kept is None:
        return None
    reader, memory, model = kept.reader, kept.memory, decoder.model
    head, tails = _softmax_parts(reader)
    tables = list(model.embedding.named_parameters())
    projections = [x for name, x in tables if name.startswith("projection")]
    norms = cast("TransformerXL", model).final_norm.parameters()  # only this kind keeps keys
    ngrams = [] if reader.ngrams is None else reader.ngrams.tables
    return BytesPerToken(
        weights=_n_bytes([*_layer_tensors(reader, of_positions=False), *head, *norms, *projections]),
        positions=_n_bytes(_layer_tensors(reader, of_positions=True)),
        memory=_n_bytes((*memory.keys, *memory.values)) // memory.batch_size,
        embedding=_n_bytes(x[0] for x in (*(x for name, x in tables if not name.startswith("projection")), *ngrams)),
        tails=tuple(map(_n_bytes, tails)),
    )


def session_bytes(decoder: Decoder) -> SessionBytes | None:
    """Count what a decoder holds besides its model; None if it keeps no keys."""
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


def _layer_tensors(reader: Reader, *, of_positions: bool) -> Iterator[Tensor]:
    """Yield the weights of all layers: those for each distance, or all others."""
    for layer in reader.layers:
        yield from _tensors(part for name, part in layer._asdict().items() if (name in _OF_POSITIONS) == of_positions)


def _softmax_parts(reader: Reader) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Return the tensors of the head, in which each tail is a class, and those of each tail."""
    head, *tails = (list(_tensors(cluster)) for cluster in reader.softmax.clusters)
    return [*head, *_tensors(reader.softmax.tail_classes)], tails


def _tensors(parts: Tensor | Iterable[object] | None) -> Iterator[Tensor]:
    if isinstance(parts, Tensor):
        yield parts
    elif parts is not None:
        for part in parts:
            yield from _tensors(cast("Tensor | Iterable[object] | None", part))


def _n_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(x.nbytes for x in tensors)


def _place(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()

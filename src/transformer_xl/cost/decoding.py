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
class DecoderBytes:
    """What a decoder reads for a token, and what it holds besides its model."""

    weights: int  # everything that multiplies vectors or is added to them, except tails; read once for all rows
    copies: int  # of weights and tails, in another type or order; the others are the model's own
    positions: int  # keys and biases of all distances; read once for all rows
    memory: int  # keys and values of all slots of one row
    embedding: int  # vectors that one row looks up
    held_memory: int  # keys and values of all rows, and counters
    tails: tuple[int, ...] = ()  # each tail of an adaptive softmax, read only where it can matter

    def of_step(self, n_row: int, tail_shares: Sequence[float]) -> float:
        """Return the bytes of a step of `n_row` rows, if each tail was needed in such a share of the steps."""
        tails = sum(size * share for size, share in zip(self.tails, tail_shares, strict=True))
        return self.weights + self.positions + n_row * (self.memory + self.embedding) + tails

    @property
    def held(self) -> dict[str, int]:
        """What is held, by parts."""
        parts = {"memory": self.held_memory, "positions": self.positions, "weights": self.copies}
        return {"total": sum(parts.values()), **parts}


def count_bytes(decoder: Decoder) -> DecoderBytes | None:
    """Count what a decoder reads and holds; None if it keeps no keys and reads earlier tokens again instead."""
    kept = decoder.kept
    if kept is None:
        return None
    reader, memory, model = kept.reader, kept.memory, decoder.model
    head, tails = _softmax_parts(reader)
    layers = list(_layer_tensors(reader, of_positions=False))
    shared = {_place(parameter) for parameter in model.parameters()}
    copies = {_place(x): x for x in (*layers, *head, *itertools.chain(*tails)) if _place(x) not in shared}
    tables = list(model.embedding.named_parameters())
    projections = [x for name, x in tables if name.startswith("projection")]
    norms = cast("TransformerXL", model).final_norm.parameters()  # only this kind keeps keys
    ngrams = [] if reader.ngrams is None else reader.ngrams.tables
    return DecoderBytes(
        weights=_n_bytes([*layers, *head, *norms, *projections]),
        copies=_n_bytes(copies.values()),
        positions=_n_bytes(_layer_tensors(reader, of_positions=True)),
        memory=_n_bytes((*memory.keys, *memory.values)) // memory.batch_size,
        embedding=_n_bytes(x[0] for x in (*(x for name, x in tables if not name.startswith("projection")), *ngrams)),
        held_memory=memory.n_bytes,
        tails=tuple(map(_n_bytes, tails)),
    )


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

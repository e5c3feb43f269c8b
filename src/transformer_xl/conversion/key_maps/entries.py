"""A reversible table between the tensors of a foreign checkpoint and ours.

An entry says that some native tensors and some foreign ones hold the same numbers. First, each foreign tensor is transposed (of
more than two dimensions: the first becomes the last) or its rows are reversed, if the entry says so. Then the elements of the
foreign tensors, one after another, are those of the native tensors. This covers every difference: names, joined or separate
projections, one table or one per cluster, one tensor per layer or all stacked. Where numbers differ, an entry computes the
native tensors from the foreign ones; from that there is no way back.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, Literal, TypeVar

import torch
from torch import Tensor

from transformer_xl.config.model import AttentionConfig
from transformer_xl.errors import CheckpointError, shown
from transformer_xl.model.adaptive import Clusters

C = TypeVar("C", bound=AttentionConfig)
Change = Literal["", "transposed", "reversed"]
Shape = tuple[int, ...]

_MOST_NAMED = 20
"""The most tensors that a note names."""


@dataclass(frozen=True)
class Part:
    """A foreign tensor, with its name and shape in the foreign checkpoint."""

    name: str
    shape: Shape
    aliases: tuple[str, ...] = ()  # other names of the same tensor (tied weights)
    optional: bool = False  # a checkpoint may lack it; it is zeros then


@dataclass(frozen=True)
class Entry:
    """Native tensors and foreign ones that hold the same numbers, each in order."""

    native: tuple[str, ...]
    foreign: tuple[Part, ...]
    change: Change = ""  # applied to each foreign tensor, and undone on the way back
    compute: Callable[[list[Tensor]], list[Tensor]] | None = (
        None  # of a format that is only read: from foreign to native numbers
    )


@dataclass(frozen=True)
class Sizes(Generic[C]):
    """Sizes of a model's tensors; `config.vocab_size` is set."""

    config: C

    @cached_property
    def clusters(self) -> Clusters:
        """The clusters of the vocabulary."""
        return Clusters.of(self.config)

    @property
    def one_table(self) -> bool:
        """Whether the embedding is one table for all clusters, with one projection."""
        return self.config.div_val == 1

    @property
    def tables(self) -> tuple[int, ...]:
        """Tokens per table of the embedding."""
        return (sum(self.clusters.sizes),) if self.one_table else self.clusters.sizes

    @property
    def plain(self) -> bool:
        """Whether there is one softmax over the whole vocabulary."""
        return self.one_table and not self.config.cutoffs

    def shape(self, letters: str) -> tuple[int, ...]:
        """Return the shape for letters such as "3H D", where "3H" is three times H.

        L: layers, K: learned positions, n: heads, d: width of a head, H: width of all heads, D: states, F: inner layer,
        V: vocabulary.
        """
        config = self.config
        known = {"L": config.n_layer, "K": getattr(config, "max_klen", None) or 0, "n": config.n_head, "d": config.d_head}
        known |= {"V": config.vocab_size or 0, "H": config.n_head * config.d_head, "D": config.d_model, "F": config.d_inner}
        return tuple(int(size[:-1] or 1) * known[size[-1]] for size in letters.split())


def per_layer(
    sizes: Sizes[C], table: Mapping[str, Iterable[tuple[str, str]]], prefix: str, *, transposed: bool = False
) -> list[Entry]:
    """Return entries for every layer.

    Args:
        sizes: of the model.
        table: for each native name in a layer, foreign names and shapes, in the letters of `Sizes.shape`.
        prefix: the prefix of foreign names; `{i}` is the layer.
        transposed: foreign tensors are transposed, except vectors.
    """
    entries = []
    for i in range(sizes.config.n_layer):
        for ours, theirs in table.items():
            parts = tuple(Part(prefix.format(i=i) + name, sizes.shape(letters)) for name, letters in theirs)
            change = "transposed" if transposed and len(parts[0].shape) > 1 else ""
            entries.append(Entry((f"layers.{i}.{ours}",), parts, change))
    return entries


@dataclass(frozen=True)
class KeyMap:
    """All entries of a model in a foreign format. Every native and every foreign name occurs once."""

    entries: tuple[Entry, ...]
    ignored: tuple[str, ...] = ()  # regular expressions of foreign names that hold nothing learned
    left_out: tuple[str, ...] = ()  # the same, of what was learned and has no place in our models; users are told

    @cached_property
    def _by_native(self) -> dict[str, Entry]:
        return {name: entry for entry in self.entries for name in entry.native}

    @cached_property
    def _by_foreign(self) -> dict[str, Entry]:
        return {part.name: entry for entry in self.entries for part in entry.foreign}

    def parts(self) -> Iterator[Part]:
        """Yield all foreign tensors."""
        for entry in self.entries:
            yield from entry.foreign

    def locate(self, shapes: Mapping[str, Shape], origin: str) -> dict[str, list[str]]:
        """Return the names of each part in a checkpoint, by the part's name. Tensors of several names should be equal.

        Parts that are optional and missing are left out.
        """
        found: dict[str, list[str]] = {}
        for part in self.parts():
            names = [name for name in (part.name, *part.aliases) if name in shapes]
            if not names and part.optional:
                continue
            if not names:
                raise CheckpointError(f"'{origin}' lacks tensor '{part.name}' {part.shape}, which its settings call for")
            for name in names:
                shape = tuple(shapes[name])
                if shape != part.shape:
                    raise CheckpointError(
                        f"tensor '{name}' of '{origin}' has shape {shown(shape)}, its settings call for {part.shape}"
                    )
            found[part.name] = names
        known = {name for names in found.values() for name in names}
        for name in shapes:
            if name not in known and not _matches(name, (*self.ignored, *self.left_out)):
                raise CheckpointError(
                    f"'{origin}' holds tensor {shown(name)} {shown(tuple(shapes[name]))}, for which its settings have no use"
                )
        return found

    def notes(self, names: Iterable[str]) -> Iterator[str]:
        """Yield what a checkpoint with tensors of these names has besides the model, and what it lacks, a line each."""
        found = set(names)
        known = {name for part in self.parts() for name in (part.name, *part.aliases)}
        learned = (name for name in found - known if not _matches(name, self.ignored))
        if others := sorted(name for name in learned if _matches(name, self.left_out)):
            more = f" and {len(others) - _MOST_NAMED:,} more" if len(others) > _MOST_NAMED else ""
            named = ", ".join(map(shown, others[:_MOST_NAMED]))
            yield f"left out, because heads of other tasks are not converted: {named}{more}"
        for entry in self.entries:
            if any(part.optional and not found & {part.name, *part.aliases} for part in entry.foreign):
                yield f"there is no tensor '{entry.foreign[0].name}', so '{entry.native[0]}' is zeros"

    def check_native(self, shapes: Mapping[str, Shape], origin: str) -> None:
        """Check that the table covers each tensor of a model, with as many numbers as the foreign tensors have."""
        for name in shapes:
            entry = self._by_native.get(name)
            if entry is None:
                raise CheckpointError(
                    f"'{origin}' holds nothing for '{name}', which the settings call for; leave them as they are"
                )
            if entry.compute is not None:
                continue
            ours = sum(torch.Size(shapes[other]).numel() for other in entry.native if other in shapes)
            theirs = sum(torch.Size(part.shape).numel() for part in entry.foreign)
            if ours != theirs:
                raise CheckpointError(
                    f"'{origin}' holds {theirs:,} numbers for '{name}', the settings call for {ours:,}; leave them as they are"
                )

    def native(self, name: str, shapes: Mapping[str, Shape], load: Callable[[Part], Tensor]) -> Tensor:
        """Return a native tensor, from the shapes of all native tensors and a function that reads a foreign one."""
        entry = self._by_native[name]
        pieces = [_changed(load(part), entry.change) for part in entry.foreign]
        if entry.compute is not None:
            pieces = entry.compute(pieces)
        if entry.native == (name,) and len(pieces) == 1:
            return pieces[0].reshape(shapes[name])
        return _cut(pieces, [shapes[other] for other in entry.native])[entry.native.index(name)]

    def foreign(self, part_name: str, load: Callable[[str], Tensor]) -> Tensor:
        """Return a foreign tensor; `load` reads a native one."""
        entry = self._by_foreign[part_name]
        changed = [part.shape for part in entry.foreign]
        if entry.change == "transposed":
            changed = [(torch.Size(shape[1:]).numel(), shape[0]) for shape in changed]
        index = [part.name for part in entry.foreign].index(part_name)
        return _changed(_cut([load(name) for name in entry.native], changed)[index], entry.change).reshape(
            entry.foreign[index].shape
        )


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in patterns)


def _changed(tensor: Tensor, change: Change) -> Tensor:
    """Transpose or reverse; each is its own inverse, up to the shape of what comes after the first dimension."""
    if change == "transposed":
        return tensor.flatten(1).T.contiguous()
    return tensor.flip(0) if change == "reversed" else tensor


def _cut(pieces: list[Tensor], shapes: list[Shape]) -> list[Tensor]:
    """Join the elements of all pieces and cut them into tensors of other shapes."""
    flat = pieces[0].flatten() if len(pieces) == 1 else torch.cat([piece.flatten() for piece in pieces])
    sizes = [torch.Size(shape).numel() for shape in shapes]
    return [cut.reshape(shape) for cut, shape in zip(flat.split(sizes), shapes, strict=True)]

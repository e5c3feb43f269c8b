"""Dividing files into train, valid and test: by their names, by turns or by ratio."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path, PurePath

from transformer_xl.data.ids import document_border, id_file_size
from transformer_xl.data.named import SPLITS, SplitName
from transformer_xl.data.text_files import (
    BLOCK_BYTES,
    EVERY_LINE,
    FileRange,
    code_point_border,
    content_size,
    read_blocks,
    read_chunks,
)

Splits = Mapping[SplitName, Sequence[FileRange]]

_SPLIT_WORDS: dict[str, SplitName] = {
    "train": "train",
    "training": "train",
    "valid": "valid",
    "validation": "valid",
    "val": "valid",
    "dev": "valid",
    "test": "test",
    "testing": "test",
}
ABOUT_THE_CORPUS = {"readme", "license", "licence", "copying", "index", "metadata", "checksums", "notice"}


def split_of(name: PurePath) -> SplitName | None:
    """Return the split that a path inside a corpus names in its file name, or else in a directory.

    Example:
        >>> split_of(PurePath("wiki.valid.tokens.xz")), split_of(PurePath("test/book.txt")), split_of(PurePath("a.txt"))
        ('valid', 'test', None)
    """
    words = {_SPLIT_WORDS[word] for word in re.split(r"[^a-z]+", name.name.lower()) if word in _SPLIT_WORDS}
    if len(words) == 1:
        return words.pop()
    folders = [_SPLIT_WORDS[part.lower()] for part in name.parts[:-1] if part.lower() in _SPLIT_WORDS]
    return folders[0] if folders else None


def splits_by_name(files: Sequence[Path], root: Path) -> Splits | None:
    """Return the splits that the files' names give, or None if the names are not clear.

    They are clear if there is a train file and another split, and every file belongs to a split. Files about the corpus, such
    as README or LICENSE, are left out.
    """
    named = [(split_of(file.relative_to(root)), FileRange(file)) for file in files]
    others = {re.split(r"[.\-_]", piece.path.name.lower())[0] for split, piece in named if split is None}
    splits = _gathered(named)
    is_clear = splits["train"] and (splits["valid"] or splits["test"]) and others <= ABOUT_THE_CORPUS
    return splits if is_clear else None


def _gathered(pieces: Iterable[tuple[SplitName | None, FileRange]]) -> Splits:
    """Return the pieces of each split, in order."""
    splits: dict[SplitName | None, list[FileRange]] = {name: [] for name in (*SPLITS, None)}
    for name, piece in pieces:
        splits[name].append(piece)
    return {name: splits[name] for name in SPLITS}


def splits_by_turns(files: Sequence[Path], shares: tuple[float, float, float]) -> Splits:
    """Deal files out in order; each goes to the split that lacks most bytes of its share of the bytes so far."""
    pieces, lacking = [], [0.0, 0.0, 0.0]
    for file in files:
        size = content_size(file)
        lacking = [lack + share * size for lack, share in zip(lacking, shares, strict=True)]
        neediest = lacking.index(max(lacking))
        lacking[neediest] -= size
        pieces.append((SPLITS[neediest], FileRange(file)))
    return _gathered(pieces)


def splits_by_ratio(
    files: Sequence[Path], shares: tuple[float, float, float], separator: str | None, *, hold_ids: bool = False
) -> Splits:
    """Divide files by shares of bytes: between files if that comes near the shares, else inside files.

    A cut inside a file moves forward to the next `separator`, or to a `document_border` if files `hold_ids`. A split with a
    share of 0 is empty.
    """
    size_of = id_file_size if hold_ids else content_size

    def border(file: Path, position: int, start: int, limit: int) -> int:
        return document_border(file, position, start) if hold_ids else _border(file, position, limit, separator)

    sized = [(file, size) for file in files if (size := size_of(file))]
    wanted = [name for name, share in zip(SPLITS, shares, strict=True) if share]
    whole = _between_files(sized, shares, wanted) if len(sized) >= max(2, len(wanted)) else None
    if whole and _are_near(whole, shares, dict(sized)):
        return whole
    cut = _inside_files(sized, shares, border)
    return cut if whole is None or all(cut[name] for name in wanted) else whole  # a text of a few bytes


def _are_near(splits: Splits, shares: tuple[float, float, float], sizes: Mapping[Path, int]) -> bool:
    """Return whether splits of whole files have between half and twice the bytes that they should have."""
    total = sum(sizes.values())
    parts = [sum(sizes[piece.path] for piece in splits[name]) / total for name in SPLITS]
    return all(share / 2 <= part <= 2 * share for part, share in zip(parts, shares, strict=True))


def is_cut_inside(splits: Splits) -> bool:
    """Return whether a file belongs to several splits."""
    return any(piece.start for pieces in splits.values() for piece in pieces)


def _between_files(sized: list[tuple[Path, int]], shares: tuple[float, float, float], wanted: list[SplitName]) -> Splits:
    """Give each file to the split in which its middle lies, but at least one file to every wanted split."""
    total, before, ranks = sum(size for _, size in sized), 0, []
    borders = [round(sum(shares[: i + 1]), 9) * total for i, name in enumerate(SPLITS) if name in wanted]
    for _, size in sized:
        ranks.append(next((i for i, border in enumerate(borders) if before + size / 2 < border), len(wanted) - 1))
        before += size
    # no split may be skipped, and the last file belongs to the last one
    ranks = list(accumulate([0, *ranks[1:]], lambda before, rank: min(rank, before + 1)))
    ranks = list(accumulate([len(wanted) - 1, *ranks[-2::-1]], lambda after, rank: max(rank, after - 1)))[::-1]
    return _gathered((wanted[rank], FileRange(file)) for (file, _), rank in zip(sized, ranks, strict=True))


def _inside_files(
    sized: list[tuple[Path, int]], shares: tuple[float, float, float], border: Callable[[Path, int, int, int], int]
) -> Splits:
    """Cut the files, read one after another, at the shares of bytes."""
    total = sum(size for _, size in sized)
    targets = [int(round(sum(shares[: i + 1]), 9) * total) for i in range(len(SPLITS))]
    targets[-1] = total
    pieces, before = [], 0
    for file, size in sized:
        start = 0
        for name, target, next_target in zip(SPLITS, targets, [*targets[1:], total], strict=True):
            stop = min(max(target - before, 0), size)
            if 0 < stop < size:
                stop = max(start, border(file, stop, start, min(next_target - before, size)))
            if stop > start:
                pieces.append((name, FileRange(file, start, None if stop == size else stop)))
                start = stop
        before += size
    return _gathered(pieces)


def _border(file: Path, position: int, limit: int, separator: str | None) -> int:
    """Return where the first document from `position` on begins if that is before `limit`, else a border of code points."""
    if separator == EVERY_LINE:
        following = position
        for block in read_blocks(FileRange(file, position, limit)) if limit > position else ():
            if (end := block.find(b"\n") + 1) and following + end < limit:
                return following + end
            following += len(block)
    elif separator is not None and limit > position:
        for chunk in read_chunks(FileRange(file, position, limit), BLOCK_BYTES, separator):
            if chunk.starts_document and chunk.offset > position:
                return chunk.offset
    return code_point_border(file, position)

"""Reading text files, plain or compressed, as blocks and chunks of bytes, in bounded memory."""

import gzip
import hashlib
import lzma
import re
import zlib
from collections.abc import Iterable, Iterator
from itertools import islice, zip_longest
from pathlib import Path
from typing import Literal, NamedTuple

from transformer_xl.errors import CorpusError
from transformer_xl.untrusted import kind_of_bytes, not_utf8

COMPRESSED = (".gz", ".xz", ".zst")
"""Name endings of compressed files; all other files are read as they are."""

EVERY_LINE = "\n"
"""The separator that makes each line a document and leaves nothing out."""

MAX_LINE_BYTES = 1 << 26
"""The longest line: what is longer, such as an endless device, has no lines."""

BLOCK_BYTES = 1 << 18
_PAIRS = 1 << 10  # lines joined at once
_ZST_INPUT_BYTES = 1 << 10  # small, because a malicious file may fill 32 kB with a byte


class FileRange(NamedTuple):
    """A byte range of a file's decompressed content; `stop=None` means to the end.

    With a `translation`, a file with as many lines, the content is pairs of lines, divided by a tab.
    """

    path: Path
    start: int = 0
    stop: int | None = None
    translation: Path | None = None

    @property
    def paths(self) -> tuple[Path, ...]:
        """All files of it."""
        return (self.path,) if self.translation is None else (self.path, self.translation)


class Chunk(NamedTuple):
    """Consecutive bytes of one document, or of several documents of one line each (`has_lines`), and their place in a file."""

    data: bytes
    starts_document: bool
    path: Path
    offset: int
    has_lines: bool = False

    def text(self) -> str:
        """Return the chunk's text; raise a `CorpusError` if it is not UTF-8."""
        try:
            return self.data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise CorpusError(f"'{self.path}': {not_utf8(error, offset=self.offset)}, or use tokenizer.kind=byte") from None


def read_blocks(piece: FileRange) -> Iterator[bytes]:
    """Yield the bytes of a piece in blocks of bounded size."""
    if piece.translation is not None:
        yield from _pairs(piece.path, piece.translation)
        return
    position = 0 if piece.path.suffix in COMPRESSED else piece.start  # only plain files can be opened in the middle
    if not piece.path.is_file() and piece.path.exists():  # texts are read more than once
        raise CorpusError(f"'{piece.path}' is a directory, pipe or device; give a file")
    try:
        for block in _blocks(piece.path, position):
            begin, position = position, position + len(block)
            stop = len(block) if piece.stop is None else max(0, piece.stop - begin)
            if wanted := block[max(0, piece.start - begin) : stop]:
                yield wanted
            if piece.stop is not None and position >= piece.stop:
                return
    except (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError) as error:
        raise CorpusError(f"compressed file '{piece.path}' is damaged ({error}); fetch or compress it again") from None
    if piece.stop is not None and position < piece.stop:
        raise CorpusError(
            f"'{piece.path}' ends at byte {position}, but should have {piece.stop}; "
            "it is incomplete or was changed while being read"
        )


def _pairs(path: Path, translation: Path) -> Iterator[bytes]:
    """Yield lines of two files with a tab between them; a tab inside a line becomes a space."""
    both = enumerate(zip_longest(*(read_lines(FileRange(each)) for each in (path, translation))), start=1)
    while block := list(islice(both, _PAIRS)):
        for number, (line, other) in block:
            if line is None or other is None:
                short, long = (path, translation) if line is None else (translation, path)
                raise CorpusError(f"'{short}' ends before line {number}, which '{long}' has; they must have as many lines")
        yield b"".join(b"%b\t%b\n" % tuple(line.replace(b"\t", b" ") for line in pair) for _, pair in block)


def read_lines(piece: FileRange) -> Iterator[bytes]:
    r"""Yield the lines of a piece without their ends, `\n` or `\r\n`."""
    for _, line in numbered_lines(read_blocks(piece), f"'{piece.path}'"):
        yield line.removesuffix(b"\n").removesuffix(b"\r")


def numbered_lines(blocks: Iterable[bytes], name: str) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of blocks, with their ends, and their numbers from 1."""
    number, parts, size = 1, [], 0
    for block in blocks:
        *whole, rest = block.split(b"\n")
        for line in whole:
            yield number, b"".join([*parts, line, b"\n"])
            number, parts, size = number + 1, [], 0
        if rest:
            parts.append(rest)
            size += len(rest)
        if size > MAX_LINE_BYTES:
            raise CorpusError(f"{name} line {number}: it has more than {MAX_LINE_BYTES:,} bytes; divide it")
    if parts:
        yield number, b"".join(parts)


def content_size(path: Path) -> int:
    """Return the decompressed size of a file in bytes; reads it through if it is compressed."""
    if path.suffix in COMPRESSED:
        return sum(len(block) for block in read_blocks(FileRange(path)))
    return path.stat().st_size


def content_sha256(path: Path) -> str:
    """Return the SHA-256 of the decompressed content of a file."""
    digest = hashlib.sha256()
    for block in read_blocks(FileRange(path)):
        digest.update(block)
    return digest.hexdigest()


def cut_chunks(blocks: Iterable[bytes], chunk_bytes: int) -> Iterator[bytes]:
    r"""Cut a stream of bytes into chunks of at most `chunk_bytes`; the cuts do not depend on the division into blocks.

    A chunk ends after its last line end that is not followed by another, else after its last white space, else between two code
    points.

    Example:
        >>> list(cut_chunks([b"one tw", b"o\nthree four"], 9))
        [b'one two\n', b'three ', b'four']
    """
    buffer = b""
    for block in blocks:
        buffer += block
        start = 0
        while len(buffer) - start > chunk_bytes:
            cut = _cut_point(buffer, start, start + chunk_bytes)
            yield buffer[start:cut]
            start = cut
        buffer = buffer[start:]
    if buffer:
        yield buffer


def read_chunks(piece: FileRange, chunk_bytes: int, separator: str | None = None) -> Iterator[Chunk]:
    """Yield a piece, whose first byte begins a document, as chunks, cut as in `cut_chunks`.

    A new document begins after a line that is the `separator`, which is left out. `EVERY_LINE`: each line is a document, and a
    chunk has many.
    """
    pattern = None if separator is None else re.compile(rb"^%b\r?(?:\n|\Z)" % re.escape(separator.encode()), re.MULTILINE)
    offset, starts, at_line_start = piece.start, True, True
    for data in cut_chunks(read_blocks(piece), chunk_bytes):
        if separator == EVERY_LINE:
            yield Chunk(data, at_line_start, piece.path, offset, has_lines=True)
            offset, at_line_start = offset + len(data), data.endswith(b"\n")
            continue
        begin = 0
        for line in pattern.finditer(data) if pattern else ():
            if line.start() == 0 and not at_line_start:  # the end of a line that was cut
                continue
            if line.start() > begin:
                yield Chunk(data[begin : line.start()], starts, piece.path, offset + begin)
            begin, starts = line.end(), True
        if begin < len(data):
            yield Chunk(data[begin:], starts, piece.path, offset + begin)
            starts = False
        offset, at_line_start = offset + len(data), data.endswith(b"\n")


def code_point_border(path: Path, position: int) -> int:
    """Return the first byte position from `position` on that lies between two code points."""
    following = b"".join(read_blocks(FileRange(path, position, min(position + 4, content_size(path)))))
    at_most = len(following) if len(following) < 4 else 0  # four continuation bytes in a row are not UTF-8
    inside = next((i for i, byte in enumerate(following) if byte & 0xC0 != 0x80), at_most)
    return position + inside


def kind_of_file(path: Path) -> Literal["UTF-8", "another encoding", "binary"]:
    """Tell by its beginning whether a file is text; see `kind_of_bytes`."""
    return kind_of_bytes(next(read_blocks(FileRange(path)), b""))


def _cut_point(buffer: bytes, start: int, limit: int) -> int:
    end = limit
    while (end := buffer.rfind(b"\n", start, end)) >= 0:
        if buffer[end + 1] != 0x0A:
            return end + 1
        end = start + len(buffer[start:end].rstrip(b"\n"))
    if space := max(buffer.rfind(bytes([space]), start, limit) for space in b" \t\n\r\v\f") + 1:
        return space
    cut = limit
    while cut > limit - 4 and cut > start + 1 and buffer[cut] & 0xC0 == 0x80:
        cut -= 1
    return limit if buffer[cut] & 0xC0 == 0x80 else cut


def _blocks(path: Path, start: int) -> Iterator[bytes]:
    """Yield the content from byte `start`, which must be 0 for a compressed file."""
    if path.suffix == ".zst":
        yield from _zst_blocks(path)
        return
    opener = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)
    with opener(path, "rb") as file:
        file.seek(start)
        while block := file.read(BLOCK_BYTES):
            yield block


def _zst_blocks(path: Path) -> Iterator[bytes]:
    try:
        import zstandard
    except ImportError:
        raise CorpusError(f"reading '{path}' needs the zstandard package: pip install zstandard") from None
    frame = None
    with path.open("rb") as file:
        while data := file.read(_ZST_INPUT_BYTES):
            while data:  # a file may consist of several frames
                frame = zstandard.ZstdDecompressor().decompressobj() if frame is None or frame.eof else frame
                try:
                    yield frame.decompress(data)
                except zstandard.ZstdError as error:
                    raise EOFError(str(error)) from None
                data = frame.unused_data if frame.eof else b""
    if frame is None or not frame.eof:
        raise EOFError("it ends in the middle")

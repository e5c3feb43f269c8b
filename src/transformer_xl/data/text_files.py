"""Reading text files, plain or compressed, as blocks and chunks of bytes, in bounded memory."""

import gzip
import hashlib
import lzma
import re
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from transformer_xl.errors import CorpusError

COMPRESSED = (".gz", ".xz", ".zst")
"""Name endings of compressed files; anything else is read as it is."""

EVERY_LINE = "\n"
"""As a separator: each line is a document, and nothing is left out."""

BLOCK_BYTES = 1 << 18
_ZST_INPUT_BYTES = 1 << 12  # so that a maliciously compressible file cannot fill the memory in one step


class Piece(NamedTuple):
    """A byte range of the decompressed content of one file; `stop=None` means to the end."""

    path: Path
    start: int = 0
    stop: int | None = None


class Chunk(NamedTuple):
    """Some consecutive bytes of a document, or of several that are a line each, with where they come from."""

    data: bytes
    starts_document: bool
    path: Path
    offset: int
    has_lines: bool = False


def read_blocks(piece: Piece) -> Iterator[bytes]:
    """Yield the bytes of a piece in blocks of bounded size.

    Raises:
        CorpusError: the file vanished, is unreadable or damaged, or ends before `piece.stop`.
    """
    position = 0 if piece.path.suffix in COMPRESSED else piece.start  # only plain files can be opened in the middle
    with _readable_errors(piece.path):
        for block in _blocks(piece.path, position):
            begin, position = position, position + len(block)
            stop = len(block) if piece.stop is None else max(0, piece.stop - begin)
            if wanted := block[max(0, piece.start - begin) : stop]:
                yield wanted
            if piece.stop is not None and position >= piece.stop:
                return
    if piece.stop is not None and position < piece.stop:
        raise CorpusError(
            f"'{piece.path}' ends at byte {position}, but should have {piece.stop}; "
            "it is incomplete or was changed while being read"
        )


def content_size(path: Path) -> int:
    """Return the decompressed size of a file in bytes; reads it through if it is compressed."""
    if path.suffix in COMPRESSED:
        return sum(len(block) for block in read_blocks(Piece(path)))
    with _readable_errors(path):
        return path.stat().st_size


def content_sha256(path: Path) -> str:
    """Return the SHA-256 of the decompressed content of a file."""
    digest = hashlib.sha256()
    for block in read_blocks(Piece(path)):
        digest.update(block)
    return digest.hexdigest()


def cut_chunks(blocks: Iterable[bytes], chunk_bytes: int) -> Iterator[bytes]:
    r"""Cut a stream of bytes into chunks, always at the same places however it is divided into blocks.

    Args:
        blocks: the bytes.
        chunk_bytes: largest size of a chunk.

    Yields:
        Chunks that end after the last line end (one that no other follows), else after the last whitespace, else between
        two code points.

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


def read_chunks(piece: Piece, chunk_bytes: int, separator: str | None = None) -> Iterator[Chunk]:
    """Yield a piece as chunks that are cut as `cut_chunks` says.

    Args:
        piece: what to read; its first byte begins a document.
        chunk_bytes: largest size of a chunk.
        separator: a line after which a new document begins; such lines are left out. `EVERY_LINE`: each line is a document,
            and a chunk has many.

    Raises:
        CorpusError: as `read_blocks`.
    """
    offset, starts, at_line_start = piece.start, True, True
    for data in cut_chunks(read_blocks(piece), chunk_bytes):
        if separator == EVERY_LINE:
            yield Chunk(data, at_line_start, piece.path, offset, has_lines=True)
            offset, at_line_start = offset + len(data), data.endswith(b"\n")
            continue
        begin = 0
        for line in _separator_lines(data, separator):
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
    """Return the first position from `position` on at which no code point is cut through (bytes of the content)."""
    following = b"".join(read_blocks(Piece(path, position, min(position + 4, content_size(path)))))
    at_most = len(following) if len(following) < 4 else 0  # four such bytes in a row are not UTF-8
    inside = next((i for i, byte in enumerate(following) if byte & 0xC0 != 0x80), at_most)
    return position + inside


def is_text(path: Path) -> bool:
    """Tell whether the file's beginning has no NUL byte."""
    return b"\0" not in next(read_blocks(Piece(path)), b"")[:4096]


def _separator_lines(data: bytes, separator: str | None) -> Iterable[re.Match[bytes]]:
    if separator is None:
        return ()
    return re.finditer(rb"^%b\r?(?:\n|\Z)" % re.escape(separator.encode()), data, re.MULTILINE)


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
    """Yield the content from `start`, which is 0 for a compressed file."""
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
    frame = zstandard.ZstdDecompressor().decompressobj()
    complete = False
    with path.open("rb") as file:
        while data := file.read(_ZST_INPUT_BYTES):
            while data:  # a file may consist of several frames
                if frame.eof:
                    frame = zstandard.ZstdDecompressor().decompressobj()
                try:
                    block = frame.decompress(data)
                except zstandard.ZstdError as error:
                    raise CorpusError(_damaged(path, error)) from None
                if block:
                    yield block
                data, complete = frame.unused_data if frame.eof else b"", frame.eof
    if not complete:
        raise CorpusError(_damaged(path, "it ends in the middle"))


@contextmanager
def _readable_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise CorpusError(f"'{path}' has vanished; restore it, or give another corpus") from None
    except (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError) as error:
        raise CorpusError(_damaged(path, error)) from None
    except OSError as error:
        raise CorpusError(f"cannot read '{path}': {error.strerror or error}; check its permissions and the disk") from None


def _damaged(path: Path, error: Exception | str) -> str:
    return f"compressed file '{path}' is damaged ({error}); fetch or compress it again"

import gzip
import lzma
import os
import random
import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transformer_xl.data import text_files
from transformer_xl.data.text_files import (
    BLOCK_BYTES,
    FileRange,
    code_point_border,
    content_size,
    cut_chunks,
    read_blocks,
    read_chunks,
    read_lines,
)
from transformer_xl.errors import CorpusError
from transformer_xl.untrusted import kind_of_bytes

zstandard = pytest.importorskip("zstandard", reason="zstandard is not installed; it comes with the extra zstd")

COMPRESS = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstandard.ZstdCompressor().compress}
ENDINGS = pytest.mark.parametrize("ending", list(COMPRESS))
CONTENT = "".join(f"line {i} naïve 東京\n" for i in range(35_000)).encode()


def _write(path, ending: str, content: bytes):
    path = path / f"text.txt{ending}"
    path.write_bytes(COMPRESS[ending](content))
    return path


@ENDINGS
def test_ranges_of_the_content(ending: str, tmp_path) -> None:
    path = _write(tmp_path, ending, CONTENT)
    path.write_bytes(path.read_bytes() + COMPRESS[ending](b"more"))  # as of several frames
    assert content_size(path) == len(CONTENT) + 4 > 3 * BLOCK_BYTES
    for start, stop in [(0, None), (0, 10), (7, 7), (BLOCK_BYTES - 1, BLOCK_BYTES + 1), (300_000, None), (5, len(CONTENT))]:
        assert b"".join(read_blocks(FileRange(path, start, stop))) == (CONTENT + b"more")[start:stop]


@pytest.mark.parametrize("ending", [".gz", ".xz", ".zst"])
@pytest.mark.parametrize("is_cut", [True, False])
def test_damaged_compression(ending: str, is_cut: bool, tmp_path) -> None:
    path = _write(tmp_path, ending, CONTENT[:30_000])
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2] if is_cut else b"just text")
    with pytest.raises(CorpusError, match=r"compressed file '.*text.txt\.\w+' is damaged \(.+\); fetch or compress it again"):
        content_size(path)


def test_what_is_no_file_or_too_short(tmp_path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(CorpusError, match=rf"'{path}' is a directory, pipe or device; give a file"):
            list(read_blocks(FileRange(path)))
    path = _write(tmp_path, "", b"short")
    with pytest.raises(CorpusError, match=r"ends at byte 5, but should have 9; it is incomplete or was changed"):
        list(read_blocks(FileRange(path, 0, 9)))


def test_zst_without_the_package(tmp_path, monkeypatch) -> None:
    path = _write(tmp_path, ".zst", b"x")
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    with pytest.raises(CorpusError, match=r"needs the zstandard package: pip install zstandard"):
        list(read_blocks(FileRange(path)))


@given(st.text("ab \n東🙂", max_size=200), st.integers(4, 30), st.integers(1, 50))
def test_cuts(text: str, chunk_bytes: int, block: int) -> None:
    data = text.encode()
    chunks = list(cut_chunks([data], chunk_bytes))
    assert b"".join(chunks) == data
    assert chunks == list(cut_chunks([data[i : i + block] for i in range(0, len(data), block)], chunk_bytes))
    for chunk, following in pairwise(chunks):
        assert 0 < len(chunk) <= chunk_bytes
        chunk.decode()  # no code point is cut
        window = chunk + following[:1]
        lines = [match.end() for match in re.finditer(rb"\n(?!\n)", window[:-1]) if window[match.end()] != 0x0A]
        if lines:
            assert chunk.endswith(b"\n")
            assert not following.startswith(b"\n")
        elif re.search(rb"\s", chunk):
            assert chunk[-1:].isspace()


def test_lines_are_as_long_as_may_be(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(text_files, "MAX_LINE_BYTES", BLOCK_BYTES)
    content = b"a" * (BLOCK_BYTES - 1) + b"\r\n" + b"b\rc\n\n\r\nd"
    assert list(read_lines(FileRange(_write(tmp_path, "", content)))) == [b"a" * (BLOCK_BYTES - 1), b"b\rc", b"", b"", b"d"]
    path = _write(tmp_path, ".gz", b"a\n" + bytes(BLOCK_BYTES + 1))
    with pytest.raises(CorpusError, match=r"^'.*text.txt.gz' line 2: it has more than 262,144 bytes; divide it$"):
        list(read_lines(FileRange(path)))


def test_code_point_border(tmp_path) -> None:
    path = _write(tmp_path, "", "aé東🙂".encode())
    assert [code_point_border(path, i) for i in range(11)] == [0, 1, 3, 3, 6, 6, 6, 10, 10, 10, 10]


PROSE = "Le garçon a reçu un noël près de l'église; où est-il? Жил-был старик со старухой у самого синего моря. " * 60


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"", "UTF-8"),
        (PROSE.encode(), "UTF-8"),
        *((b"a" * n + "ж".encode() * 3000, "UTF-8") for n in (0, 1)),  # cut inside a character, or not
        (b"\x1b[31mred\x1b[0m\x07\x08", "UTF-8"),
        (PROSE.encode("latin-1", "ignore"), "another encoding"),
        (PROSE.encode("cp1251", "ignore"), "another encoding"),
        (PROSE.encode("utf-16"), "binary"),
        (random.Random(0).randbytes(5000).replace(b"\0", b""), "binary"),
        (b"\x89PNG\r\n\x1a\n", "binary"),
    ],
)
def test_kinds_of_files_are_told_apart(data: bytes, kind: str) -> None:
    assert kind_of_bytes(data) == kind


@pytest.mark.parametrize("chunk_bytes", [6, 8, 100])
def test_separator_lines(chunk_bytes: int, tmp_path) -> None:
    path = _write(tmp_path, "", b"--\na\nb\n--\n--\nc --\n-- \r\nd\n--\r\ne\n--")
    documents: list[bytes] = []
    for chunk in read_chunks(FileRange(path), chunk_bytes, "--"):
        assert chunk.data == path.read_bytes()[chunk.offset : chunk.offset + len(chunk.data)]
        if chunk.starts_document:
            documents.append(b"")
        documents[-1] += chunk.data
    assert documents == [b"a\nb\n", b"c --\n-- \r\nd\n", b"e\n"]

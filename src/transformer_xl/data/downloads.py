"""Downloading files over HTTP, resumable and verified, and unpacking named members of archives."""

import hashlib
import http.client
import tarfile
import urllib.request
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from transformer_xl import console
from transformer_xl.errors import CorpusError
from transformer_xl.files import make_directories, whole_file

TIMEOUT = 30.0
"""Seconds without a byte after which a connection counts as lost."""

_BLOCK_BYTES = 1 << 18
_BY_HAND = "download it by hand and give its directory with --corpus DIR or TXL_DATA"


def download(urls: Sequence[str], target: Path, *, size: int, sha256: str) -> None:
    """Download a file; it gets its name only when it is complete and verified.

    The bytes go to `target.part`; if an earlier attempt left this file, only the rest is requested.
    """
    part = target.with_name(target.name + ".part")
    make_directories(target.parent)
    done = part.stat().st_size if part.is_file() else 0
    if done < size:
        _receive(_answer(urls, done), part, done, size)
    with part.open("rb") as file:
        found_size, found_hash = part.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()
    if (found_size, found_hash) != (size, sha256):
        part.unlink()
        raise CorpusError(
            f"'{urls[0]}' is not the expected file ({found_size:,} bytes with sha256 {found_hash}, expected {size:,} with "
            f"{sha256}) and was removed; try again, or {_BY_HAND}"
        )
    part.replace(target)


def _answer(urls: Sequence[str], done: int) -> http.client.HTTPResponse:
    """Ask for what follows the bytes that are there; return the answer of the first mirror that gives one."""
    complaint = ""
    for url in urls:
        headers = {"User-Agent": "transformer_xl", **({"Range": f"bytes={done}-"} if done else {})}
        try:
            return urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT)
        except (OSError, http.client.HTTPException) as error:  # among them HTTPError, such as 404
            complaint = f"cannot download '{url}': {error}"
    raise CorpusError(f"{complaint}; check the network, or {_BY_HAND}")


def _receive(response: http.client.HTTPResponse, part: Path, done: int, size: int) -> None:
    if response.status != http.HTTPStatus.PARTIAL_CONTENT:
        done = 0
    with response, part.open("ab" if done else "wb") as file, console.progress(unit="bytes") as bar:
        bar.begin(part.name.removesuffix(".part"), size, done=done)
        while done <= size:  # a server that sends more than it should is cut off
            try:
                block = response.read(_BLOCK_BYTES)
            except (OSError, http.client.HTTPException) as error:  # the connection is lost
                block = getattr(error, "partial", b"")
            if not block:
                break
            file.write(block)
            done += len(block)
            bar.advance(len(block))
    if done < size:
        raise CorpusError(f"download cut off: '{part}' has {done:,} of {size:,} bytes; run the command again to resume")


def unpack(archive: Path, members: Mapping[str, Path], *, limit: int) -> None:
    """Unpack the named members of a .zip or .tar.gz, and nothing else; one that unpacks to more than `limit` bytes is refused.

    Paths inside the archive are only compared, never used, so that no archive can write elsewhere.
    """
    left = dict(members)
    try:
        if archive.suffix == ".zip":
            with zipfile.ZipFile(archive) as opened:
                for name in sorted(left.keys() & set(opened.namelist())):
                    _copy(opened.open(name), left.pop(name), limit)
        else:
            with tarfile.open(archive, "r|gz") as opened:
                for entry in opened:
                    if entry.isreg() and entry.name in left and (source := opened.extractfile(entry)):
                        _copy(source, left.pop(entry.name), limit)
    except (zipfile.BadZipFile, tarfile.TarError, zlib.error, EOFError) as error:
        raise CorpusError(f"archive '{archive}' is damaged ({error}); delete it and download it again") from None
    if left:
        raise CorpusError(f"archive '{archive}' lacks {', '.join(sorted(left))}; delete it and download it again")


def _copy(source: IO[bytes], target: Path, limit: int) -> None:
    n_bytes = 0
    with source, whole_file(target) as stray, stray.open("wb") as file:
        while block := source.read(_BLOCK_BYTES):
            n_bytes += len(block)
            if n_bytes > limit:
                raise CorpusError(
                    f"archive member for '{target}' has more than {limit:,} bytes; delete the archive, do not trust it"
                )
            file.write(block)

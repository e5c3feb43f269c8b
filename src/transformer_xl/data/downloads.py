"""Downloading files over HTTP, resumable and verified, and unpacking named members of archives."""

import hashlib
import http.client
import tarfile
import urllib.error
import urllib.parse
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


class _UnreachableError(CorpusError):
    """A mirror did not answer; another one may."""


def download(urls: Sequence[str], target: Path, *, size: int, sha256: str) -> None:
    """Download a file; it gets its name only when it is complete and verified.

    The bytes go to `target.part`; if an earlier attempt left this file, only the rest is requested.

    Args:
        urls: http(s) addresses, mirrors that are tried in order until one answers.
        target: the file to write.
        size: expected bytes.
        sha256: expected hash as hex.

    Raises:
        CorpusError: no connection, cut off (running again resumes), wrong size or hash (the file is removed), disk full.
    """
    part = target.with_name(target.name + ".part")
    try:
        make_directories(target.parent)
        for i, mirror in enumerate(urls, 1):
            try:
                _fetch(mirror, part, size=size)
                break
            except _UnreachableError:
                if i == len(urls):
                    raise
        _verify(part, urls[0], size=size, sha256=sha256)
        part.replace(target)
    except OSError as error:
        raise CorpusError(
            f"cannot write '{part}': {error.strerror or error}; free space there or set TXL_DATA to another directory"
        ) from None


def unpack(archive: Path, members: Mapping[str, Path], *, limit: int) -> None:
    """Unpack the named members of a .zip or .tar.gz, and nothing else.

    Paths inside the archive are only compared, never used, so that no archive can write elsewhere.

    Args:
        archive: need not be trusted.
        members: name in the archive → file to write.
        limit: the most bytes that a member may unpack to.

    Raises:
        CorpusError: a damaged archive, a missing member, one that is too large, disk full.
    """
    try:
        left = dict(members)
        if archive.suffix == ".zip":
            with zipfile.ZipFile(archive) as opened:
                for name in sorted(left.keys() & set(opened.namelist())):
                    with opened.open(name) as source:
                        _copy(source, left.pop(name), limit)
        else:
            with tarfile.open(archive, "r|gz") as opened:
                for entry in opened:
                    source = opened.extractfile(entry) if entry.isreg() and entry.name in left else None
                    if source:
                        _copy(source, left.pop(entry.name), limit)
                    if not left:
                        break
    except (zipfile.BadZipFile, tarfile.TarError, zlib.error, EOFError, NotImplementedError) as error:
        raise CorpusError(f"archive '{archive}' is damaged ({error}); delete it and download it again") from None
    except OSError as error:
        raise CorpusError(f"cannot unpack '{archive}': {error.strerror or error}; free space there or set TXL_DATA") from None
    if left:
        raise CorpusError(f"archive '{archive}' lacks {', '.join(sorted(left))}; delete it and download it again")


def _fetch(url: str, part: Path, *, size: int) -> None:
    """Download the rest of `part`."""
    parsed = urllib.parse.urlsplit(url)
    if parsed.scheme not in ("http", "https"):
        raise CorpusError(f"cannot download '{url}': only http and https; {_BY_HAND}")
    done = part.stat().st_size if part.is_file() else 0
    if done >= size:  # complete or too long; the verification will say which
        return
    request = urllib.request.Request(url, headers={"User-Agent": "transformer_xl"})
    if done:
        request.add_header("Range", f"bytes={done}-")
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        with error:
            if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:  # nothing is left to send
                return
        raise _UnreachableError(f"cannot download '{url}': {error.code} {error.reason}; {_BY_HAND}") from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise _UnreachableError(f"cannot reach {parsed.netloc} ({reason}); check the network, or {_BY_HAND}") from None
    with response:
        resumed = response.status == http.HTTPStatus.PARTIAL_CONTENT
        _receive(response, part, done=done if resumed else 0, size=size)


def _receive(response: http.client.HTTPResponse, part: Path, *, done: int, size: int) -> None:
    with part.open("ab" if done else "wb") as file, console.progress(unit="bytes") as bar:
        bar.begin(part.name.removesuffix(".part"), size, done=done)
        while done <= size:  # a server that sends more than it should is cut off
            try:
                block = response.read(_BLOCK_BYTES)
            except (http.client.HTTPException, OSError) as error:
                block = error.partial if isinstance(error, http.client.IncompleteRead) else b""
            if not block:
                break
            file.write(block)
            done += len(block)
            bar.advance(len(block))
    if done < size:
        raise CorpusError(f"download cut off: '{part}' has {done:,} of {size:,} bytes; run the command again to resume")


def _verify(part: Path, url: str, *, size: int, sha256: str) -> None:
    """Remove a file that is not the expected one, and raise an error."""
    with part.open("rb") as file:
        found_size, found_hash = part.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()
    if found_size != size:
        complaint = f"size {found_size:,} bytes, expected {size:,}"
    elif found_hash != sha256:
        complaint = f"sha256 {found_hash}, expected {sha256}"
    else:
        return
    part.unlink()
    raise CorpusError(f"'{url}' is not the expected file ({complaint}) and was removed; try again, or {_BY_HAND}")


def _copy(source: IO[bytes], target: Path, limit: int) -> None:
    n_bytes = 0
    with whole_file(target) as stray, stray.open("wb") as file:
        while block := source.read(_BLOCK_BYTES):
            n_bytes += len(block)
            if n_bytes > limit:
                raise CorpusError(
                    f"archive member for '{target}' has more than {limit:,} bytes; delete the archive, do not trust it"
                )
            file.write(block)

import hashlib
import io
import tarfile
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from transformer_xl.config.run import DataConfig
from transformer_xl.data import corpora
from transformer_xl.data.corpora import fetch, find_corpus
from transformer_xl.data.downloads import download, unpack
from transformer_xl.data.named import Download, NamedCorpus, SplitFiles
from transformer_xl.errors import CorpusError

CONTENT = bytes(range(256)) * 4000
SIZE = len(CONTENT)
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Server(ThreadingHTTPServer):
    """Serves `content` at any path but /missing; can cut off, and ignore Range."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.content = CONTENT
        self.cut_off: int | None = None
        self.ignore_range = False
        self.ranges: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/file"


class _Handler(BaseHTTPRequestHandler):
    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]  # no other kind of server makes this handler

    def do_GET(self) -> None:
        server = self.server
        asked = self.headers.get("Range")
        server.ranges.append(asked)
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked and not server.ignore_range else 0
        if self.path == "/missing":
            self.send_error(404)
            return
        body = server.content[start:]
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body if server.cut_off is None else body[: server.cut_off])

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server():
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def _get(url: str | list[str], path: Path, size: int = SIZE, sha256: str = SHA256) -> None:
    download([url] if isinstance(url, str) else url, path, size=size, sha256=sha256)


@pytest.mark.parametrize("ignore_range", [False, True])
def test_cut_off_and_resumed(server: Server, tmp_path, ignore_range: bool) -> None:
    server.cut_off = 300_000
    with pytest.raises(CorpusError, match=r"cut off: '.*file.part' has 300,000 of 1,024,000 bytes; run the command again"):
        _get(server.url, tmp_path / "file")
    assert not (tmp_path / "file").exists()
    server.cut_off, server.ignore_range = None, ignore_range
    _get(server.url, tmp_path / "file")
    assert server.ranges == [None, "bytes=300000-"]
    assert (tmp_path / "file").read_bytes() == CONTENT
    (tmp_path / "file").rename(tmp_path / "file.part")  # as if killed before it got its name
    _get(server.url, tmp_path / "file")
    assert len(server.ranges) == 2 and [path.name for path in tmp_path.iterdir()] == ["file"]


def test_wrong_content_is_removed(server: Server, tmp_path) -> None:
    server.content = CONTENT[:-1] + b"x"
    with pytest.raises(CorpusError, match=rf"not the expected file \(1,024,000 bytes .* with {SHA256}\) and was removed"):
        _get(server.url, tmp_path / "file")
    server.content = CONTENT + b"x"
    with pytest.raises(CorpusError, match=r"1,024,001 bytes with sha256 \w+, expected 1,024,000 with"):
        _get(server.url, tmp_path / "file")
    assert list(tmp_path.iterdir()) == []


def test_missing_and_unreachable(server: Server, tmp_path) -> None:
    missing = server.url.replace("/file", "/missing")
    with pytest.raises(CorpusError, match=r"cannot download 'http.*missing': HTTP Error 404: Not Found; check the network"):
        _get(missing, tmp_path / "file")
    with pytest.raises(CorpusError, match=r"cannot download .*refused.*; check the network, or download it by hand"):
        _get("http://127.0.0.1:9/file", tmp_path / "file")
    _get([missing, server.url], tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == CONTENT


def _archive(path, members: dict[str, bytes]):
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data in members.items():
                archive.writestr(name, data)
    else:
        with tarfile.open(path, "w:gz") as archive:
            for name, data in members.items():
                entry = tarfile.TarInfo(name)
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data))
    return path


@pytest.mark.parametrize("name", ["a.zip", "a.tar.gz"])
def test_unpacking(name: str, tmp_path) -> None:
    archive = _archive(tmp_path / name, {"../evil": b"evil", "dir/one": b"1" * 1000, "two": b"2"})
    target = tmp_path / "target"
    unpack(archive, {"dir/one": target}, limit=1000)
    assert target.read_bytes() == b"1" * 1000
    assert {path.name for path in tmp_path.iterdir()} == {name, "target"}
    with pytest.raises(CorpusError, match=r"has more than 999 bytes"):
        unpack(archive, {"dir/one": tmp_path / "other"}, limit=999)
    with pytest.raises(CorpusError, match=r"lacks three"):
        unpack(archive, {"two": target, "three": tmp_path / "3"}, limit=1000)
    archive.write_bytes(archive.read_bytes()[:60])
    with pytest.raises(CorpusError, match=r"archive '.*' is damaged \(.*delete it and download it again"):
        unpack(archive, {"dir/one": target}, limit=1000)


def test_tar_links_are_not_followed(tmp_path) -> None:
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as archive:
        entry = tarfile.TarInfo("one")
        entry.type, entry.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(entry)
    with pytest.raises(CorpusError, match=r"lacks one"):
        unpack(tmp_path / "a.tar.gz", {"one": tmp_path / "target"}, limit=1000)


def test_a_named_corpus_is_fetched_once(server: Server, tmp_path, monkeypatch) -> None:
    archive = _archive(tmp_path / "c.zip", {f"c/{split}.txt": split.encode() for split in ("train", "valid", "test")})
    server.content = archive.read_bytes()
    source = Download(
        (server.url + ".zip",),
        len(server.content),
        hashlib.sha256(server.content).hexdigest(),
        tuple((f"c/{split}.txt", f"{split}.txt") for split in ("train", "valid", "test")),
        unpacked_limit=100,
    )
    splits = {split: SplitFiles((f"{split}.txt",)) for split in ("train", "valid", "test")}
    monkeypatch.setitem(corpora.NAMED, "toy", NamedCorpus("toy", "free", splits, sources=(source,)))
    monkeypatch.setenv("TXL_DATA", str(tmp_path / "data"))
    with ThreadPoolExecutor(4) as pool:  # as the processes of a run do
        assert set(pool.map(fetch, ["toy"] * 4)) == {tmp_path / "data" / "toy"}
    assert len(server.ranges) == 1
    assert [chunk.data for chunk in find_corpus(DataConfig(corpus="toy")).chunks("valid")] == [b"valid"]
    assert fetch("toy") == tmp_path / "data" / "toy"
    assert len(server.ranges) == 1
    assert sorted(path.name for path in (tmp_path / "data" / "toy").iterdir()) == ["test.txt", "train.txt", "valid.txt"]

from pathlib import Path

from transformer_xl.data.paths import cache_dir, data_dir


def test_directories(monkeypatch) -> None:
    for name in ("TXL_CACHE", "TXL_DATA", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_dir() == Path("/home/someone/.cache/transformer_xl")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_dir() == Path("/xdg/transformer_xl")
    monkeypatch.setenv("TXL_CACHE", "~/cache")
    assert cache_dir() == Path("/home/someone/cache")
    assert data_dir() == Path("/home/someone/cache/corpora")
    monkeypatch.setenv("TXL_DATA", "/data")
    assert data_dir() == Path("/data")

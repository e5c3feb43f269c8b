"""Directories of zip files are read as zipfile reads them, or refused."""

import struct
import zipfile

import pytest

from tests.conversion.hostile import raw_zip, zip_file
from transformer_xl.conversion.readers import zip_directory
from transformer_xl.conversion.readers.zip_directory import read_directory
from transformer_xl.errors import CheckpointError
from transformer_xl.untrusted import open_regular

FILES = {"data.pkl": b"pickle", "data/0": bytes(100), "data/1": b"", "ünï": b"x"}


def read(path):
    file, size = open_regular(path)
    with file:
        return read_directory(path, file, size)


def check(path, entries):
    """The bytes at each place are those that zipfile finds."""
    data = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        assert set(entries) == set(archive.namelist())
        for info in archive.infolist():
            entry = entries[info.filename]
            assert data[entry.offset : entry.offset + entry.size] == archive.read(info)
            assert entry.crc == info.CRC


def test_plain_files(tmp_path):
    (tmp_path / "x.pt").write_bytes(zip_file(FILES))
    check(tmp_path / "x.pt", read(tmp_path / "x.pt"))


def test_wide_fields(tmp_path, monkeypatch):
    """As for files of more than 4 GB: zipfile is told that a few bytes are too many for 4-byte fields."""
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 50)
    monkeypatch.setattr(zipfile, "ZIP_FILECOUNT_LIMIT", 2)
    (tmp_path / "x.pt").write_bytes(zip_file(FILES))
    assert b"PK\x06\x06" in (tmp_path / "x.pt").read_bytes()
    check(tmp_path / "x.pt", read(tmp_path / "x.pt"))


def test_wide_fields_in_the_directory_alone(tmp_path):
    """As PyTorch writes it: the local header holds 4-byte fields that nobody reads."""
    head = struct.pack("<4s5H3L2H", b"PK\x03\x04", 45, 0, 0, 0, 0, 0, 0xFFFFFFFF, 0xFFFFFFFF, 3, 0) + b"a/b"
    wide = struct.pack("<2H3Q", 1, 24, 5, 5, 0)
    fields = (b"PK\x01\x02", 45, 45, 0, 0, 0, 0, 7, 0xFFFFFFFF, 0xFFFFFFFF, 3, len(wide) + 6, 0, 0, 0, 0, 0xFFFFFFFF)
    central = struct.pack("<4s6H3L5H2L", *fields) + b"a/b" + struct.pack("<2H2s", 99, 2, b"xy") + wide
    at = len(head) + 5
    end64 = struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, 1, 1, len(central), at)
    locator = struct.pack("<4sLQL", b"PK\x06\x07", 0, at + len(central), 1)
    end = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    (tmp_path / "x.pt").write_bytes(head + b"12345" + central + end64 + locator + end)
    entry = read(tmp_path / "x.pt")["a/b"]
    assert (entry.offset, entry.size, entry.crc) == (len(head), 5, 7)


def test_entries_may_touch_but_not_overlap(tmp_path):
    sound = zip_file({"a": b"1" * 40, "b": b"2"})
    (tmp_path / "x.pt").write_bytes(sound)
    assert len(read(tmp_path / "x.pt")) == 2
    at = sound.index(b"PK\x01\x02") + 20  # sizes of the first
    (tmp_path / "x.pt").write_bytes(sound[:at] + struct.pack("<2L", 41, 41) + sound[at + 8 :])
    with pytest.raises(CheckpointError, match="overlap"):
        read(tmp_path / "x.pt")


@pytest.mark.parametrize("bad", ["../a", "a/../b", "a/..", "/a", "a\\b", "C:a", "a\nb", "a\x7fb", "", "\u202eb"])
def test_names_that_lead_elsewhere(tmp_path, bad):
    (tmp_path / "x.pt").write_bytes(raw_zip([("a/b", b"1"), (bad, b"2")]))
    with pytest.raises(CheckpointError, match="leads elsewhere"):
        read(tmp_path / "x.pt")


@pytest.mark.parametrize("fine", ["a/b", "...", "..a", "a/b..", "ünï/1"])
def test_names_that_do_not(tmp_path, fine):
    (tmp_path / "x.pt").write_bytes(raw_zip([(fine, b"2")]))
    assert set(read(tmp_path / "x.pt")) == {fine}


@pytest.mark.parametrize(("limit", "n"), [("MAX_ENTRIES", 2), ("MAX_DIRECTORY_BYTES", 100)])
def test_limits(tmp_path, monkeypatch, limit, n):
    (tmp_path / "x.pt").write_bytes(raw_zip([("a", b"1"), ("b", b"2")]))
    monkeypatch.setattr(zip_directory, limit, n)
    assert len(read(tmp_path / "x.pt")) == 2
    monkeypatch.setattr(zip_directory, limit, n - 7)
    with pytest.raises(CheckpointError, match="is the most accepted"):
        read(tmp_path / "x.pt")


def test_names_occur_once(tmp_path):
    (tmp_path / "x.pt").write_bytes(raw_zip([("a", b"1"), ("a", b"2")]))
    with pytest.raises(CheckpointError, match="two entries 'a'"):
        read(tmp_path / "x.pt")

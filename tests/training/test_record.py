"""The log survives whatever a model writes and wherever a process is killed."""

import json
import math
from pathlib import Path

import pytest

from transformer_xl.errors import CheckpointError
from transformer_xl.training.record import Record, read_metrics

ODD = "é\ud800\u2028\x85\n\t\0€\U0001f600"


@pytest.fixture
def record(tmp_path: Path) -> Record:
    record = Record(tmp_path)
    for step in (4, 8, 12):
        record.write("train", step, loss=1.0 / step, tokens=step * 10)
    record.write("sample", 12, text=ODD)
    return record


def test_entries_come_back_one_to_a_line(record: Record) -> None:
    entries = read_metrics(record.directory)
    assert entries[0] == {"kind": "train", "step": 4, "loss": 0.25, "tokens": 40}
    assert entries[-1] == {"kind": "sample", "step": 12, "text": ODD}
    assert record.path.read_bytes().count(b"\n") == 4


def test_numbers_that_json_lacks_are_null(record: Record) -> None:
    record.write("valid", 16, loss=math.nan, ppl=math.inf, tokens=1)
    assert json.loads(record.path.read_text().splitlines()[-1], parse_constant=pytest.fail) == {
        "kind": "valid",
        "step": 16,
        "loss": None,
        "ppl": None,
        "tokens": 1,
    }


@pytest.mark.parametrize(("step", "kept"), [(0, 0), (4, 1), (7, 1), (8, 2), (11, 2), (12, 4), (99, 4)])
def test_rewinding_drops_what_came_later(record: Record, step: int, kept: int) -> None:
    lines = record.path.read_bytes().splitlines(keepends=True)
    record.rewind(step)
    assert record.path.read_bytes() == b"".join(lines[:kept])


def test_a_line_cut_anywhere_is_dropped(record: Record) -> None:
    whole = record.path.read_bytes()
    begin = whole[:-1].rindex(b"\n") + 1
    for end in range(begin, len(whole) - 1):
        record.path.write_bytes(whole[:end])
        assert len(read_metrics(record.directory)) == 3
        record.rewind(99)
        assert record.path.read_bytes() == whole[:begin]


def test_the_final_line_is_written_again_by_a_resumed_run(record: Record) -> None:
    record.write("final", 12, loss=1.0)
    record.rewind(12)
    assert [entry["kind"] for entry in read_metrics(record.directory)] == ["train", "train", "train", "sample"]


def test_nothing_yet(tmp_path: Path) -> None:
    record = Record(tmp_path)
    record.sync()
    record.rewind(3)
    assert record.draw() is None
    assert list(tmp_path.iterdir()) == []
    record.close()


@pytest.mark.parametrize("action", ["write", "rewind", "draw", "sync"])
def test_a_disk_that_refuses_is_one_line(record: Record, action: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    actions = {
        "write": ("pathlib.Path.open", lambda: record.write("train", 16)),
        "rewind": ("transformer_xl.training.record.replace_file", lambda: record.rewind(4)),
        "draw": ("matplotlib.figure.Figure.savefig", record.draw),
        "sync": ("os.fsync", record.sync),
    }
    target, act = actions[action]
    before = record.path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(target, full)
        with pytest.raises(CheckpointError, match=r"cannot write .*No space left on device; free disk space, then --resume"):
            act()
    assert record.path.read_bytes() == before


def test_the_picture_shows_what_there_is(record: Record) -> None:
    for _ in range(2):
        assert record.draw() == record.directory / "loss.png"
        assert (record.directory / "loss.png").read_bytes().startswith(b"\x89PNG")
        record.write("train", 16, loss=None, tokens=160)  # every step was skipped
        record.write("valid", 16, loss=0.5, tokens=160)
        record.write("final", 16, loss=0.5, loss_without_memory=0.7, tokens=160)
    assert sorted(path.name for path in record.directory.iterdir()) == ["loss.png", "metrics.jsonl"]


def test_nothing_finite_draws_nothing(tmp_path: Path) -> None:
    record = Record(tmp_path)
    record.write("train", 4, loss=None, tokens=40)
    assert record.draw() is None

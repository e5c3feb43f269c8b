"""The log survives whatever a model writes, wherever a process is killed, and whatever happens to its file."""

import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from transformer_xl.config.run import RunConfig
from transformer_xl.errors import CheckpointError, ConfigError
from transformer_xl.training.entries import read_metrics
from transformer_xl.training.record import Record, check_loggers

CONFIG = RunConfig()
ODD = "é\ud800\u2028\x85\n\t\0€\U0001f600"


@pytest.fixture
def record(tmp_path: Path) -> Record:
    record = Record(tmp_path)
    for step in (4, 8, 12):
        record.write("train", step, loss=1.0 / step, tokens=step * 10, seconds=1.0)
    record.write("sample", 12, text=ODD)
    return record


def test_entries_come_back_one_to_a_line(record: Record) -> None:
    entries = read_metrics(record.directory)
    assert entries[0] == {"kind": "train", "step": 4, "loss": 0.25, "tokens": 40, "seconds": 1.0}
    assert entries[-1] == {"kind": "sample", "step": 12, "text": ODD}
    assert record.path.read_bytes().count(b"\n") == 4


def test_numbers_that_json_lacks_are_null(record: Record) -> None:
    record.write("train", 16, loss=math.nan, ppl=math.inf, lr=1e30, tokens=1, seconds=1.0)
    json.loads(record.path.read_text().splitlines()[-1], parse_constant=pytest.fail)
    expected = {"kind": "train", "step": 16, "loss": None, "ppl": None, "lr": 1e30, "tokens": 1, "seconds": 1.0}
    assert read_metrics(record.directory)[-1] == expected


def test_a_line_cut_anywhere_is_dropped(record: Record) -> None:
    whole = record.path.read_bytes()
    begin = whole[:-1].rindex(b"\n") + 1
    for end in range(begin, len(whole) - 1):
        record.path.write_bytes(whole[:end])
        assert len(read_metrics(record.directory)) == 3
        record.rewind(99)
        assert record.path.read_bytes() == whole[:begin]


SOUND: dict[str, Any] = {"kind": "train", "step": 4, "loss": 0.25, "tokens": 40, "seconds": 1.0}


@pytest.mark.parametrize(
    "bad",
    [
        *(json.dumps(SOUND | {name: value}) for name, value in (("step", "4"), ("kind", "trian"), ("kind", ["train"]))),
        *(json.dumps(SOUND | {name: value}) for name, value in (("loss", "x"), ("tokens", None), ("seconds", True))),
        *('{"kind": "valid", "step": 3}', '{"kind": "train", "step": 3, "seconds": 1e999}'),
        *(json.dumps({name: value for name, value in SOUND.items() if name != left}) for left in ("kind", "step")),
        *("text", "[]", '{"loss": NaN}', "[" * 100_000, "\0"),
    ],
)
def test_a_line_that_is_no_entry_is_named_and_nothing_is_changed(record: Record, bad: str) -> None:
    lines = record.path.read_text().splitlines()
    record.path.write_text("\n".join([lines[0], bad, *lines[1:]]) + "\n")
    before = record.path.read_bytes()
    for read in (lambda: read_metrics(record.directory), lambda: record.rewind(99)):
        with pytest.raises(CheckpointError, match=rf"^'{record.path}', line 2 is no entry of a log \(.*\); delete that line$"):
            read()
    assert record.path.read_bytes() == before


def test_the_final_line_is_written_again_by_a_resumed_run(record: Record) -> None:
    record.write("final", 12, loss=1.0, bpc=1.0)
    record.rewind(12)
    assert [entry["kind"] for entry in read_metrics(record.directory)] == ["train", "train", "train", "sample"]


def test_nothing_yet(tmp_path: Path) -> None:
    record = Record(tmp_path)
    record.sync()
    record.rewind(3)
    assert record.draw(CONFIG) is None
    assert list(tmp_path.iterdir()) == []
    record.close()


@pytest.mark.parametrize("action", ["write", "rewind", "draw", "sync"])
def test_a_disk_that_refuses_leaves_the_log_as_it_is(record: Record, action: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    actions = {
        "write": ("pathlib.Path.open", lambda: record.write("train", 16)),
        "rewind": ("transformer_xl.training.record.replace_file", lambda: record.rewind(4)),
        "draw": ("matplotlib.figure.Figure.savefig", lambda: record.draw(CONFIG)),
        "sync": ("os.fsync", record.sync),
    }
    target, act = actions[action]
    before = record.path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(target, full)
        with pytest.raises(OSError, match="No space left on device"):
            act()
    assert record.path.read_bytes() == before


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has it")
def test_a_disk_that_is_really_full_is_named_by_its_file(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"No space left on device: '.*metrics.jsonl'"):
        Record(tmp_path).write("train", 16)


class Remote:
    """A run of W&B, as far as it is used here."""

    def __init__(self, **options: Any) -> None:
        self.options, self.got, self.metrics, self.finished = options, [], [], False

    def define_metric(self, *names: str, **more: str) -> None:
        self.metrics.append((*names, more))

    def log(self, values: dict[str, Any], **more: Any) -> None:
        self.got.append((values, more))

    def finish(self) -> None:
        self.finished = True


@pytest.fixture
def remotes(monkeypatch: pytest.MonkeyPatch) -> list[Remote]:
    """What was opened by a W&B that is made up."""
    opened: list[Remote] = []
    module = ModuleType("wandb")

    def init(**options: Any) -> Remote:
        opened.append(Remote(**options))
        return opened[-1]

    module.init = init  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "wandb", module)
    return opened


def write_some(directory: Path, *loggers: str, **more: Any) -> None:
    record = Record(directory, loggers=loggers, settings={"train": {"seed": 3}}, **more)
    record.write("train", 4, loss=0.5, tokens=40, seconds=1.0, skipped=None)
    record.write("sample", 4, text="once")
    record.close()


def test_wandb_gets_the_numbers_with_their_step_and_a_resumed_run_goes_on_in_the_same_place(
    tmp_path: Path, remotes: list[Remote]
) -> None:
    for _ in range(2):
        write_some(tmp_path, "wandb", "wandb")
    (tmp_path / "other").mkdir()
    write_some(tmp_path / "other", "wandb")
    first, again, other = remotes
    assert (
        first.options
        == again.options
        == {
            **{"project": "transformer_xl", "name": tmp_path.name, "resume": "allow", "dir": str(tmp_path)},
            **{"id": json.loads((tmp_path / "loggers.json").read_text())["wandb"], "config": {"train": {"seed": 3}}},
        }
    )
    assert other.options["id"] != first.options["id"]
    assert first.metrics == [("step", {}), ("*", {"step_metric": "step"})]
    assert first.got == [({"train/loss": 0.5, "train/tokens": 40, "train/seconds": 1.0, "step": 4}, {})]
    assert first.finished
    assert len(read_metrics(tmp_path)) == 4


@pytest.mark.parametrize("moment", ["init", "log", "finish"])
def test_a_logger_that_fails_ends_no_run(
    moment: str, tmp_path: Path, remotes: list[Remote], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("gone")

    monkeypatch.setattr(*((sys.modules["wandb"], "init", fail) if moment == "init" else (Remote, moment, fail)))
    said: list[str] = []
    write_some(tmp_path, "wandb", warn=said.append)
    write_some(tmp_path, "wandb", warn=said.append)
    assert said == ["wandb failed (gone); it gets nothing more, metrics.jsonl has everything"] * 2
    assert len(read_metrics(tmp_path)) == 4


def test_a_logger_that_is_unknown_or_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformer_xl.training.record.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="logger 'wandb' is not installed; pip install wandb, or leave out --logger wandb"):
        check_loggers(["wandb"])
    with pytest.raises(ConfigError, match="unknown logger 'wandbb'; did you mean 'wandb'"):
        check_loggers(["wandbb"])


def test_tensorboard_by_name_and_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, remotes: list[Remote]) -> None:
    opened: list[tuple[Path, int | None]] = []
    got: list[object] = []

    class Board:
        def add_scalar(self, *values: object) -> None:
            got.append(values)

        add_text = add_scalar

        def close(self) -> None:
            pass

    monkeypatch.setattr("transformer_xl.training.record._tensorboard", lambda *place: opened.append(place) or Board())
    monkeypatch.setitem(sys.modules, "tensorboard", ModuleType("tensorboard"))
    write_some(tmp_path)
    assert got == [("train/loss", 0.5, 4), ("train/tokens", 40, 4), ("train/seconds", 1.0, 4), ("sample", "once", 4)]
    write_some(tmp_path, "tensorboard")
    assert opened == [(tmp_path, None)] * 2
    write_some(tmp_path, "wandb")  # who names others means those
    assert len(opened) == 2


def test_tensorboard_forgets_what_a_resumed_run_logs_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int | None] = []
    monkeypatch.setattr("transformer_xl.training.record._tensorboard", lambda _, forgotten_from: opened.append(forgotten_from))
    write_some(tmp_path)
    record = Record(tmp_path)
    record.rewind(2)
    assert opened == [None]  # nothing is opened before there is something to log
    record.write("train", 3, loss=1.0, tokens=30, seconds=1.0)
    record.write("train", 4, loss=1.0, tokens=40, seconds=1.0)
    record.close()
    assert opened == [None, 3]

"""Nothing that a file says is ever executed, written or believed: every hostile file is refused, soon and cheaply."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conversion.hostile import CANARIES, make_hostile

ROOT = Path(__file__).parents[2]
MAX_SECONDS = 1.0
MAX_KILOBYTES = 100_000
EVERY = [pytest.param(4, id="every fourth"), pytest.param(1, id="all", marks=pytest.mark.slow)]


def tree(folder):
    """Return everything in a folder with what tells whether it changed."""
    return {
        str(path.relative_to(folder)): (path.lstat().st_size, path.lstat().st_mtime_ns) for path in sorted(folder.rglob("*"))
    }


def run(cases, folder):
    """Read the cases in one process that stands in an empty directory; return its report, and check what is left behind."""
    work = folder / "work"
    work.mkdir(exist_ok=True)
    (folder / "cases.json").write_text(json.dumps([(case.name, str(case.path), case.reader) for case in cases]))
    files = folder / "files"
    before = tree(files)
    result = subprocess.run(
        [sys.executable, "-m", "tests.conversion.refuse_child", str(folder / "cases.json"), str(work / "out")],
        cwd=work,
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.startswith('{"report"'), result.stdout[:200]
    found = json.loads(result.stdout)
    assert found["environment"], "the environment changed"
    assert tree(files) == before, "files changed"
    assert list((files / CANARIES).iterdir()) == [], "a payload ran"
    assert list(work.iterdir()) == [], "something was written"
    assert not (folder / "escape").exists()
    assert not (folder.parent / "escape").exists()
    return found["report"]


def check(report, n_least):
    """Every case was refused by one line that names the file, for little time and memory."""
    assert len(report) >= n_least
    wrong = [(name, outcome[:200]) for name, outcome, *_ in report if not outcome.startswith("CheckpointError: ")]
    assert not wrong
    long = [(name, outcome[:500]) for name, outcome, *_ in report if "\n" in outcome or len(outcome) > 700]
    assert not long
    slow = [(name, seconds) for name, _, seconds, _, _ in report if seconds >= MAX_SECONDS]
    assert not slow
    assert max(wall for _, _, _, wall, _ in report) < 20  # on a machine that does other things, too; a pipe would wait forever
    assert sum(memory for *_, memory in report) < MAX_KILOBYTES  # all of them together


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "files").mkdir()
    return folder, make_hostile(folder / "files")


@pytest.mark.parametrize("every", EVERY)
def test_hostile_files_are_refused(hostile, every):
    folder, cases = hostile
    cases = [case for case in cases if case.reader != "convert"][::every]
    report = run(cases, folder)
    check(report, 250 // every)
    # a name or link that leads elsewhere names itself; everything else the file it was read from
    unnamed = [
        case.name
        for case, (_, outcome, *_) in zip(cases, report, strict=True)
        if case.path.name not in outcome.replace("\0", "") and "\0" not in str(case.path)
    ]
    assert not unnamed


@pytest.mark.parametrize("reader", ["pickle", "torch"])
def test_refusals_name_what_they_refuse(hostile, reader):
    _, cases = hostile
    from tests.conversion.refuse_child import attempt

    by_name = {case.name: case for case in cases}
    case = by_name["pickle: os.system.pkl" if reader == "pickle" else "torch: legacy, in a key"]
    assert "'os.system'" in attempt(case.path, case.reader, case.path)


@pytest.mark.parametrize("every", EVERY)
def test_hostile_directories_are_not_converted(hostile, every):
    folder, cases = hostile
    check(run([case for case in cases if case.reader == "convert"][::every], folder), 50 // every)

"""Runs `refuse_child` over hostile files, and checks what is left behind and what it took."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.conversion.hostile import CANARIES, Hostile

ROOT = Path(__file__).parents[1]
MAX_SECONDS = 1.0
MAX_KILOBYTES = 100_000
MAX_LETTERS = 700


def tree(folder: Path) -> dict[str, tuple[int, int]]:
    """Return everything in a folder with what tells whether it changed."""
    return {
        str(path.relative_to(folder)): (path.lstat().st_size, path.lstat().st_mtime_ns) for path in sorted(folder.rglob("*"))
    }


def run(cases: Sequence[Hostile], folder: Path, *, warm: Sequence[Hostile] = ()) -> list[Any]:
    """Open the cases in one process that stands in an empty directory; return its report, and check what is left behind.

    Only `folder / "cache"` and what lies in `folder / "writable"` may be written.
    """
    work = folder / "work"
    work.mkdir(exist_ok=True)
    plan = {
        "warm": [(str(case.path), case.reader) for case in warm],
        "cases": [(case.name, str(case.path), case.reader) for case in cases],
    }
    (folder / "cases.json").write_text(json.dumps(plan))
    files = folder / "files"
    before = tree(files)
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    result = subprocess.run(
        [sys.executable, "-m", "tests.refuse_child", str(folder / "cases.json"), str(work / "out")],
        cwd=work,
        env=environment | {"HF_HUB_OFFLINE": "1", "HOME": str(folder / "cache"), "TXL_CACHE": str(folder / "cache")},
        capture_output=True,
        text=True,
        timeout=300,
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


def check(report: list[Any], cases: Sequence[Hostile], errors: Sequence[str] = ("CheckpointError",)) -> str:
    """Every case was refused by one line, or accepted if that does no harm, for little time and memory; return the figures."""
    harmless = {case.name for case in cases if case.harmless}
    wrong = [
        (name, outcome[:300])
        for name, outcome, *_ in report
        if outcome.partition(": ")[0] not in errors and not (name in harmless and outcome.startswith("accepted"))
    ]
    assert not wrong, f"{len(wrong)}:\n" + "\n".join(map(str, wrong))
    long = [(name, outcome[:500]) for name, outcome, *_ in report if "\n" in outcome or len(outcome) > MAX_LETTERS]
    assert not long
    slow = [(name, seconds) for name, _, seconds, _, _ in report if seconds >= MAX_SECONDS]
    assert not slow
    assert max(wall for _, _, _, wall, _ in report) < 20  # on a machine that does other things, too; a pipe would wait forever
    large = [(name, memory) for name, *_, memory in report if memory >= MAX_KILOBYTES]
    assert not large
    accepted = sum(outcome.startswith("accepted") for _, outcome, *_ in report)
    seconds, kilobytes = (max(values) for values in ([each[2] for each in report], [each[4] for each in report]))
    return (
        f"{len(report) - accepted:,} of {len(report):,} hostile files refused, {accepted} accepted without harm, 0 executed, "
        f"at most {seconds:.2f} s and {kilobytes / 1000:.0f} MB each"
    )

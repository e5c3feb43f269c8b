"""No command line, however strange, ends in a traceback, without a word, or never.

TXL_SEED draws others than the suite's; TXL_LINES says how many `make faults` tries.
"""

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.command_lines import lines
from tests.cli.forked_lines import Ending, fault, furnish
from tests.forked import run_jobs

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits of processes")

_SEED = int(os.environ.get("TXL_SEED", "0"))
_MANY = int(os.environ.get("TXL_LINES", "600"))


@pytest.fixture(scope="module")
def furnished(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("lines") / "home"
    shutil.copytree(home, place, ignore=shutil.ignore_patterns("cache"))
    furnish(place)
    return place


FULL_SIZE = pytest.param(_MANY, marks=[pytest.mark.faults, pytest.mark.long, pytest.mark.timeout(3600)])


KNOWN = [
    (["generate", "run", "--prompts", "-", "--tokens", "0", "--json"], "one\ntwo\n"),
    (["eval", "gone"], ""),
    (["generate", "run", "--tokens", "1000000000", "--compile", "no"], ""),
    (["frobnicate"], ""),
]
"""Lines of which one goes on for ever."""


@pytest.mark.parametrize("n", [30, FULL_SIZE])
def test_every_line_ends_well(furnished: Path, record_property: Callable[[str, object], None], n: int) -> None:
    drawn, attempt = lines(_SEED, n), "tests.cli.forked_lines:attempt"
    jobs = {"known": (attempt, str(furnished), KNOWN, 2), "drawn": (attempt, str(furnished), drawn)}
    ended = {name: [Ending(*each) for each in endings] for name, (endings,) in run_jobs(jobs, 1, timeout=3500).items()}

    known = ended["known"]
    assert [ending.status for ending in known] == [0, 1, -signal.SIGXCPU, 2]
    assert "'gone' " in known[1].err
    assert [fault(ending) is None for ending in known] == [True, True, False, True]

    told = [(line, ending, fault(ending)) for line, ending in zip(drawn, ended["drawn"], strict=True)]
    found = [f"{what}\n  {line}\n  {ending.err[-2000:]}" for line, ending, what in told if what]
    record_property("figure", f"{n - len(found):,} of {n:,} random command lines end well (seed {_SEED})")
    assert not found, "\n\n".join(found)


@pytest.mark.parametrize(
    ("ending", "what"),
    [
        (Ending(0, "warning: this\n", []), None),
        (Ending(1, "warning: this\ntxl: error: that\n", []), None),
        (Ending(1, "Traceback (most recent call last):\n", []), "traceback"),
        (Ending(1, "", []), "status 1 and 0 errors"),
        (Ending(0, "txl: error: that\n", []), "status 0 and 1 errors"),
        (Ending(1, "txl: error: this\ntxl: error: that\n", []), "status 1 and 2 errors"),
        (Ending(1, f"txl: error: {'x' * 1000}\n", []), "an error of 1,012 characters"),
        (Ending(-24, "", []), "more than 20 s of the processor"),
        (Ending(-14, "", []), "waits for ever"),
        (Ending(-11, "", []), "signal 11"),
        (Ending(0, "a/b.py:3: UserWarning: that\n", []), "a warning for programmers: .py:3: UserWarning"),
        (Ending(1, "txl: error: \x1b[31m\n", []), "a raw control character: '\\x1b'"),
        (Ending(0, "", ["fifo"]), "replaced fifo"),
    ],
)
def test_what_a_bad_ending_is(ending: Ending, what: str | None) -> None:
    assert fault(ending) == what


def test_lines_name_every_option() -> None:
    """A command that is added has its turn."""
    used = {argument.partition("=")[0] for line in lines(0, 2_000) for argument in line.arguments}
    assert {"prepare", "--per-token", "--repetition-penalty", "--dry-run", "--read-only", "-n"} <= used

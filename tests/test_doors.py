"""Whatever file the library opens: nothing in it is executed or believed, and what it takes is bounded."""

from collections.abc import Callable
from pathlib import Path

from tests.doors import make_doors
from tests.refusals import check, run
from transformer_xl.errors import TxlError

ERRORS = [error.__name__ for error in TxlError.__subclasses__()]


def test_all_doors_refuse_hostile_files(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    cases, sound = make_doors(tmp_path)
    report = run([*sound, *cases], tmp_path, warm=sound)
    assert [outcome for _, outcome, *_ in report[: len(sound)]] == ["accepted"] * len(sound)
    record_property("figure", check(report[len(sound) :], cases, ERRORS))

"""Whatever file the library opens: nothing in it is executed or believed, and what it takes is bounded."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conversion.hostile import Hostile
from tests.doors import make_doors
from tests.refusals import check, run
from transformer_xl.errors import TxlError

ALL = pytest.param(1, id="all", marks=[pytest.mark.faults, pytest.mark.long])
ERRORS = [error.__name__ for error in TxlError.__subclasses__()]
Made = tuple[Path, list[Hostile], list[Hostile]]


@pytest.fixture(
    scope="module",
    params=[pytest.param(23, id="every 23rd"), pytest.param(5, id="every fifth", marks=pytest.mark.faults), ALL],
)
def doors(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("doors")
    hostile, sound = make_doors(folder, every=request.param)
    assert len(hostile) >= 1000 // request.param
    return folder, hostile, sound


def test_all_doors_refuse_hostile_files(doors: Made, record_property: Callable[[str, object], None]) -> None:
    folder, cases, sound = doors
    report = run([*sound, *cases], folder, warm=sound)
    assert [outcome for _, outcome, *_ in report[: len(sound)]] == ["accepted"] * len(sound)
    record_property("figure", check(report[len(sound) :], cases, ERRORS))

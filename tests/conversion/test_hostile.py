"""Nothing that a file says is ever executed, written or believed: every hostile file is refused, soon and cheaply."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conversion.hostile import Hostile, make_hostile
from tests.refusals import check, run

EVERY = [pytest.param(8, id="every eighth"), pytest.param(1, id="all", marks=pytest.mark.faults)]


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Hostile]]:
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "files").mkdir()
    return folder, make_hostile(folder / "files")


@pytest.mark.parametrize("every", EVERY)
def test_hostile_files_are_refused(
    hostile: tuple[Path, list[Hostile]], every: int, record_property: Callable[[str, object], None]
) -> None:
    folder, cases = hostile
    cases = [case for case in cases if case.reader != "convert"][::every]
    assert len(cases) >= 250 // every
    report = run(cases, folder)
    record_property("figure", check(report, cases))
    # a name or link that leads elsewhere names itself; everything else the file it was read from
    unnamed = [
        case.name
        for case, (_, outcome, *_) in zip(cases, report, strict=True)
        if case.path.name not in outcome.replace("\0", "") and "\0" not in str(case.path)
    ]
    assert not unnamed


@pytest.mark.parametrize("reader", ["pickle", "torch"])
def test_refusals_name_what_they_refuse(hostile: tuple[Path, list[Hostile]], reader: str) -> None:
    _, cases = hostile
    from tests.refuse_child import attempt

    by_name = {case.name: case for case in cases}
    case = by_name["pickle: os.system.pkl" if reader == "pickle" else "torch: legacy, in a key"]
    assert "'os.system'" in attempt(case.path, case.reader, case.path)


@pytest.mark.parametrize("every", EVERY)
def test_hostile_directories_are_not_converted(
    hostile: tuple[Path, list[Hostile]], every: int, record_property: Callable[[str, object], None]
) -> None:
    folder, cases = hostile
    cases = [case for case in cases if case.reader == "convert"][::every]
    assert len(cases) >= 50 // every
    record_property("figure", check(run(cases, folder), cases))

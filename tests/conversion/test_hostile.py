"""Nothing that a file says is ever executed, written or believed: every hostile file is refused, soon and cheaply."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conversion.hostile import Hostile, make_hostile
from tests.refusals import check, run


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Hostile]]:
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "files").mkdir()
    return folder, make_hostile(folder / "files")


def test_hostile_files_are_refused(hostile: tuple[Path, list[Hostile]], record_property: Callable[[str, object], None]) -> None:
    folder, cases = hostile
    assert len(cases) == 52
    report = run(cases, folder)
    record_property("figure", check(report, cases))
    unnamed = [
        case.name
        for case, (_, outcome, *_) in zip(cases, report, strict=True)
        if case.path.name not in outcome and not outcome.startswith("accepted")
    ]
    assert not unnamed


def test_refusals_name_what_they_refuse(hostile: tuple[Path, list[Hostile]]) -> None:
    _, cases = hostile
    from tests.refuse_child import attempt

    path = next(case.path for case in cases if case.name == "unpickle: os.system.pkl")
    assert "refers to 'os.system'" in attempt(path, "unpickle", path)

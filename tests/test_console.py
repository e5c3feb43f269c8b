"""What people see: lines, tables and the bar."""

import pytest
from rich.progress import Progress

from transformer_xl.console import Bar, progress


def test_it_starts_anew_for_each_thing() -> None:
    with Progress(disable=True) as shown:
        shown.add_task("", total=None)
        bar = Bar(shown)
        bar.begin("a", 50)
        bar.advance(30)
        bar.begin("b", 60)
        bar.advance(10)
        (task,) = shown.tasks
        assert (task.completed, task.total, task.description) == (10, 60, "b")


def test_on_a_terminal_it_says_what_and_how_fast(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # which rich takes for a terminal
    monkeypatch.setenv("COLUMNS", "120")
    with progress("a [text]", 2000) as bar:
        for _ in range(20):
            bar.advance(100)
    shown = capfd.readouterr().err
    assert "a [text]" in shown and "100%" in shown and "tokens/s" in shown


@pytest.mark.parametrize("hidden", [True, False])
def test_elsewhere_it_shows_nothing(hidden: bool, capfd: pytest.CaptureFixture[str]) -> None:
    with progress("it", 2000, hidden=hidden) as bar:
        bar.advance(2000)
    assert capfd.readouterr().err == ""

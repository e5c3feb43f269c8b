"""The bar for tokens."""

import pytest
from rich.progress import Progress

from transformer_xl.progress import TokenBar, token_progress


def test_it_starts_anew_for_each_thing() -> None:
    with Progress(disable=True) as progress:
        progress.add_task("", total=None)
        bar = TokenBar(progress)
        bar.begin("a", 50)
        bar.advance(30)
        bar.begin("b", 60)
        bar.advance(10)
        (task,) = progress.tasks
        assert (task.completed, task.total, task.description) == (10, 60, "b")


def test_on_a_terminal_it_says_what_and_how_fast(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # which rich takes for a terminal
    monkeypatch.setenv("COLUMNS", "120")
    with token_progress(2000, "a [text]") as advance:
        for _ in range(20):
            advance(100)
    shown = capfd.readouterr().err
    assert "a [text]" in shown and "100%" in shown and "tokens/s" in shown


@pytest.mark.parametrize("hidden", [True, False])
def test_elsewhere_it_shows_nothing(hidden: bool, capfd: pytest.CaptureFixture[str]) -> None:
    with token_progress(2000, hidden=hidden) as advance:
        advance(2000)
    assert capfd.readouterr().err == ""

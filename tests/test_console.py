"""Messages, tables and the progress bar."""

import io
import subprocess
import sys
import threading
from typing import Any

import pytest
from rich.console import Console

from transformer_xl.console import clock, fitted, progress, say, table, warn
from transformer_xl.training.display import Display


def test_on_a_terminal_it_says_what_and_how_fast(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # makes rich believe in a terminal
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr("transformer_xl.console.DRAW_SECONDS", 0.0)
    with progress("a [text]", 2000) as bar:
        for _ in range(20):
            bar.advance(100)
    shown = capfd.readouterr().err
    assert "a [text]" in shown and "100%" in shown and "tokens/s" in shown


def test_what_is_timed_is_not_disturbed(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    n_threads = threading.active_count()
    with progress(total=2, unit=None) as bar:
        assert threading.active_count() == n_threads
        now = 0.3
        bar.next("first")
        assert "first" in capfd.readouterr().err
        bar.note("1 of 2")  # too soon to be drawn again
        assert capfd.readouterr().err == ""
        now = 0.6
        bar.note("2 of 2")
        assert "2 of 2" in capfd.readouterr().err


class Clock:
    """Time that passes only when a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr("time.monotonic", lambda: self.now)
        monkeypatch.setattr("transformer_xl.console.LINE_SECONDS", 10.0)


def test_elsewhere_it_is_a_line_every_ten_seconds(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    clock, lines = Clock(monkeypatch), {}
    with progress("scoring", 20_000) as bar:
        for second in range(1, 26):
            clock.now += 1
            bar.advance(100)
            if shown := capfd.readouterr().err:
                lines[second] = shown
    left = {10: "scoring: 5% · 100 tokens/s · 3:10 left\n", 20: "scoring: 10% · 100 tokens/s · 3:00 left\n"}
    assert lines == left
    with progress("scoring", 20_000, hidden=True) as bar:
        clock.now += 60
        bar.advance(100)
    assert capfd.readouterr().err == ""


def test_lines_of_other_tasks(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    clock = Clock(monkeypatch)

    def line() -> str:
        return capfd.readouterr().err

    with progress(total=3, unit=None) as bar:
        bar.next("one row")
        clock.now += 5
        bar.note("1 of 2")
        assert line() == ""
        clock.now += 5
        bar.note("2 of 2")
        assert line() == "one row: 0 of 3 · 2 of 2\n"
        clock.now += 10
        bar.next("two rows")
        assert line() == "two rows: 1 of 3\n"
    with progress(unit="bytes") as bar:
        bar.begin("a", None, done=500)
        clock.now += 10
        bar.advance(20_000)
        assert line() == "a: 20,500 bytes · 2 kB/s\n"
        bar.begin("b", 1000)
        clock.now += 10
        bar.advance(500)
        assert line() == "b: 50% · 50 B/s · 0:10 left\n"
    with progress("nothing yet", 10) as bar:
        clock.now += 10
        bar.advance(0)
        assert line() == "nothing yet: 0% · 0 tokens/s\n"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (3599, "59:59"), (3600, "1:00:00"), (-1, "0:00"), (float("inf"), "?")]
)
def test_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text


def test_without_a_terminal_nothing_is_imported_to_draw_with() -> None:
    code = "import sys; from transformer_xl.console import progress\nwith progress('x'): print('rich' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_warning_is_one_line_that_no_terminal_acts_on(capfd: pytest.CaptureFixture[str]) -> None:
    warn("'\x1b[31mred\nline' is strange")
    assert capfd.readouterr().err == "warning: '\\x1b[31mred line' is strange\n"


def test_full_width_characters_take_two_columns() -> None:
    assert table([["label", "n"], ["\u533b\u751f", "1"], ["caf\u00e9", "22"]]) == "label   n\n\u533b\u751f    1\ncaf\u00e9   22"


@pytest.mark.parametrize("width", [60, 80, 100])
def test_narrow_terminals_break_between_words(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of the text is there, in order; only a word that is longer than a line reaches beyond it."""
    rows = [
        ["name", "value", "what it is for"],
        ["n" * 31, "a" * 18, "several words of a longer text " * 5],
        ["x", "1", "/" * 90],
    ]
    wide = table(rows, n_left=3)
    monkeypatch.setenv("COLUMNS", str(width))
    narrow = table(rows, n_left=3)
    assert narrow.split() == wide.split()
    assert all(len(line.rstrip()) <= width or set(line.split()[-1]) == {"/"} for line in narrow.splitlines())
    assert fitted("word " * 40).splitlines()[0] == ("word " * (width // 5))[: width - 1].rstrip()


def test_on_a_terminal_messages_are_broken_and_all_warnings_have_a_color(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    warn("one two three four five")
    assert capsys.readouterr().err == "warning: one two three four five\n"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    warn("one two three four five")
    say("one two three four five 日本語日本語日 a")
    shown = io.StringIO()
    Display(console=Console(file=shown, force_terminal=True, width=20)).warn("one two three four five")
    warning, said = (
        "\x1b[33mwarning: one two\x1b[0m\n\x1b[33mthree four five\x1b[0m\n",
        "one two three four\nfive 日本語日本語日\na\n",
    )
    assert capsys.readouterr().err == warning + said
    assert shown.getvalue() == warning

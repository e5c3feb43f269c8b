"""What is shown on a terminal, in a pipe, and in quiet runs."""

import errno
import io
import os
import re

import pytest
from rich.console import Console

from transformer_xl.training.display import Display


def display(*, terminal: bool = False, quiet: bool = False) -> tuple[Display, io.StringIO]:
    out = io.StringIO()
    return Display(quiet=quiet, console=Console(file=out, force_terminal=terminal, width=60, highlight=False)), out


def show_all(shown: Display) -> None:
    with shown:
        shown.say("a line that is longer than sixty columns, with a path: /some/where/very/deep/down/in/the/tree")
        shown.advance(step=10, progress=0.25, loss=1.23456, tokens_per_second=12345.6, final=False)
        shown.advance(step=20, progress=0.5, loss=float("nan"), tokens_per_second=12345.6, final=True)
        shown.show("[bold]generated[/bold] text", title="a sample [x]")
        shown.warn("mind the gap")


def test_lines_in_a_pipe_are_whole() -> None:
    shown, out = display()
    show_all(shown)
    lines = out.getvalue().splitlines()
    assert lines[0].endswith("with a path: /some/where/very/deep/down/in/the/tree")
    assert re.fullmatch(r" 50% · step 20 · loss nan · 12,346 tokens/s · \d:\d\d left", lines[1])
    assert "[bold]generated[/bold] text" in out.getvalue()  # not taken for markup
    assert "a sample [x]" in out.getvalue()
    assert lines[-1] == "warning: mind the gap"
    assert "step 10" not in out.getvalue()


def test_a_terminal_has_a_bar_and_quiet_runs_show_warnings_only() -> None:
    shown, out = display(terminal=True)
    show_all(shown)
    assert "\x1b[" in out.getvalue()
    shown.advance(step=30, progress=0.7, loss=1.0, tokens_per_second=1.0, final=True)  # after the end: no bar, no error
    shown, out = display(quiet=True)
    show_all(shown)
    assert out.getvalue() == "warning: mind the gap\n"


def test_time_left_is_extrapolated(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("transformer_xl.training.display.time.monotonic", lambda: now[0])
    shown, out = display()
    for progress, left in ((0.2, ""), (0.4, " · 3:00 left"), (1.0, " · 0:00 left")):
        shown.advance(step=1, progress=progress, loss=1.0, tokens_per_second=1.0, final=True)
        assert out.getvalue().rstrip().endswith(f"tokens/s{left}")
        now[0] += 60


@pytest.mark.parametrize(("code", "is_lost"), [(errno.EPIPE, True), (errno.EIO, False), (errno.ENOSPC, False)])
@pytest.mark.parametrize("terminal", [True, False])
def test_what_cannot_be_shown_ends_nothing(code: int, is_lost: bool, terminal: bool) -> None:
    """A pipe without a reader, a terminal that was closed, a full disk."""
    shown, out = display(terminal=terminal)

    def fail(text: str) -> int:
        raise OSError(code, os.strerror(code))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(out, "write", fail)
        show_all(shown)
    show_all(shown)
    assert (shown.is_lost, out.getvalue()) == (is_lost, "")


@pytest.mark.parametrize("terminal", [True, False])
def test_how_far_a_scoring_is(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr("transformer_xl.console.LINE_SECONDS", 10.0)
    shown, out = display(terminal=terminal)
    with shown:
        advance = shown.scoring("scoring", 1000)
        for _ in range(12):
            now[0] += 1
            advance(50)
        state = str(shown._bar.tasks[0].fields["state"]) if shown._bar else ""
    line = "scoring: 60% · 50 tokens/s · 0:08 left"
    assert state == (line if terminal else "")
    assert out.getvalue() == "scoring: 50% · 50 tokens/s · 0:10 left\n" or terminal
    display(quiet=True)[0].scoring("scoring", 10)(10)


@pytest.mark.parametrize("terminal", [True, False])
def test_names_and_paths_do_not_act_on_the_terminal(terminal: bool) -> None:
    out = io.StringIO()
    shown = Display(console=Console(file=out, force_terminal=terminal, color_system=None, width=60), name="\x1b[1mme")
    shown.say("in '\x1b[31mred'")
    shown.warn("no '\x9b5m'")
    shown.advance(step=1, progress=1.0, loss=1.0, tokens_per_second=1.0, final=True)
    said, warned, last = out.getvalue().splitlines()
    assert (said, warned) == (r"in '\x1b[31mred'", r"warning: \x1b[1mme: no '\x9b5m'")
    assert r" · \x1b[1mme: step 1 " in last


def test_a_sample_does_not_act_on_the_terminal_and_needs_no_right_border() -> None:
    """Terminals do not agree how wide some of these are, so nothing may stand after them."""
    shown, out = display(terminal=True)
    texts = ["e\u0301 a\u0308", "東京", "नमस्ते", "👩\u200d👩\u200d👧", "a\u202eb", "\x1b[31mred\x07\x9b5m"]
    shown.show("\n".join(texts), title="a sample")
    _, *lines, _ = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue()).splitlines()
    assert [line.strip() for line in lines] == [*texts[:-1], r"\x1b[31mred\x07\x9b5m"]

"""`txl generate --interactive`: a conversation is one text, and no mistake ends it."""

import builtins
import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import forked
from tests.cli.conftest import Answer, Txl
from transformer_xl.cli.interactive import _SETTINGS, HELP
from transformer_xl.console import Bar
from transformer_xl.generation.decoder import Decoder
from transformer_xl.generation.session_file import describe_session

Talk = Callable[..., Answer]


@pytest.fixture
def talk(txl: Txl, monkeypatch: pytest.MonkeyPatch) -> Talk:
    """Type lines into a conversation; no token is a line end, so that each text is a line."""

    def talk(*typed: str, options: tuple[str, ...] = ()) -> Answer:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in typed)))
        return txl("generate", "run", "--interactive", "--tokens", "9", "--seed", "5", "--bias", "10=-inf", *ASCII, *options)

    return talk


ASCII = ("--top-k", "20")


def remembered(file: str) -> bytes:
    """The tokens of a session, which are bytes here."""
    return bytes(int(token) for token in describe_session(Path(file))["note"]["tail"].split())


def test_what_is_read_first(talk: Talk) -> None:
    """A prompt, or nothing: then a text begins with a line end. In the end it is said how fast it was."""
    answer = talk("cat", options=("--prompt", "the", "--memory", "a"))
    assert remembered("a").startswith(b"the\ncat")
    assert answer.out.count("\n") == 1
    assert re.match(r"goodbye; read 7 tokens in .*, wrote \d+ tokens in .*; fp32, .*; seed 5$", answer.err.splitlines()[-2])
    talk("", options=("--memory", "b"))
    assert (remembered("b")[:1], len(remembered("b"))) == (b"\n", 10)


def test_a_conversation_is_one_text(talk: Talk) -> None:
    """What is on the screen is what the model remembers: a line that follows a text begins on a line of its own."""
    answer = talk("the cat", "", "//sat", options=("--memory", "a", "--quiet"))
    assert (answer.status, answer.err) == (0, "")
    first, second, third = answer.out.splitlines()
    raw = remembered("a")
    assert len(raw) == len("the cat") + 9 + 9 + len("\n/sat") + 9
    texts = re.fullmatch(rb"the cat(.{9})(.{9})\n/sat(.{9})", raw, re.DOTALL)
    assert texts
    for text, shown in zip(texts.groups(), (first, second, third), strict=True):
        assert text.decode("utf-8", "replace").startswith(shown.rstrip("\ufffd"))


def test_turns_are_repeatable_and_go_on_from_a_file(talk: Talk) -> None:
    whole = talk("the", "cat", "sat")
    assert talk("the", "cat", "sat").out == whole.out
    assert talk("the", "cat", "sat", options=("--temperature", "3")).out != whole.out
    turn_by_turn = talk("the", "cat", options=("--memory", "a"))
    assert turn_by_turn.err.splitlines()[-1] == "25 tokens saved to a"
    assert whole.out.startswith(turn_by_turn.out)
    before = Path("a").read_bytes()
    talk("mats", options=("--memory", "a", "--read-only"))
    assert Path("a").read_bytes() == before


@pytest.mark.parametrize("ending", [("/quit",), ()])
def test_a_session_that_remembers_nothing_is_saved_only_when_asked_for(talk: Talk, ending: tuple[str, ...]) -> None:
    assert talk("the", options=("--memory", "a")).status == 0
    before = Path("a").read_bytes()
    answer = talk("/reset", *ending, options=("--memory", "a"))
    assert answer.err.splitlines()[-1] == "nothing is remembered, so a stays as it was"
    assert Path("a").read_bytes() == before
    assert "nothing is remembered, so b stays as it was" in talk(*ending, options=("--memory", "b")).err
    assert not Path("b").exists()
    talk("/reset", "/save", *ending, options=("--memory", "a"))
    assert remembered("a") == b""


def test_stop_strings_are_set_as_with_the_option(talk: Talk) -> None:
    letters = ("--bias", "97=90", "--bias", "98=90", "--bias", "99=90")  # a, b and c only
    whole = talk("x", options=letters).out
    stops = [whole[3:5], whole[2:4]]
    assert talk(f"/set stop {stops[0]}", "x", options=letters).out == talk("x", options=(*letters, "--stop", stops[0])).out
    both = talk("x", options=(*letters, "--stop", stops[0], "--stop", stops[1])).out
    assert len(both) < len(whole)
    assert talk(f"/set stop {json.dumps(stops)}", "x", options=letters).out == both
    assert talk("/set stop none", "x", options=(*letters, "--stop", stops[0])).out == whole


def test_stop_strings_are_shown_as_they_can_be_typed(talk: Talk) -> None:
    pairs = [
        ("none", "none"),
        ("[]", "none"),
        ("Q:", '["Q:"]'),
        ("=a = b", '["a = b"]'),
        ("42", '["42"]'),
        (r'"\n "', r'["\n "]'),
        ('["é", "A:"]', '["é", "A:"]'),
        ("[1]", '["[1]"]'),
        ("[" * 100_000, '["' + "[" * 100_000 + '"]'),
    ]
    typed = [line for pair in pairs for stop in pair for line in ("/set stop z", f"/set stop {stop}", "/set")]
    found = re.findall(r"^stop (.*)$", talk(*typed, options=("--stop", "z")).err, re.MULTILINE)
    assert found == [shown for _, shown in pairs for _ in range(2)]


def test_commands(talk: Talk, workbench: Path) -> None:
    answer = talk(
        "the", "/save a", "cat", "/save b", "/reset", "/save c", "/load a", "cat", "/save d", "/help", "/quit", "never"
    )
    assert answer.status == 0
    assert remembered("a") == remembered("b")[: len(remembered("a"))] != b""
    assert remembered("c") == b""
    assert len(remembered("b")) == len(remembered("d"))
    assert answer.out.count("\n") == 3
    assert HELP in answer.err
    said = re.findall(r"^(\d+) tokens (?:saved to )?(\w+)", answer.err, re.MULTILINE)
    assert said == [("12", "a"), ("25", "b"), ("0", "c"), ("12", "remembered"), ("25", "d")]


def test_settings_are_shown_and_changed(talk: Talk) -> None:
    answer = talk("/set", "/set top_k none", "/set temperature 0", "/set tokens=3", "/set repetition-window 7", "/set")
    shown = {name: re.findall(rf"^{name} (.*)$", answer.err, re.MULTILINE) for name in _SETTINGS}
    changed = {"top_k": ["20", "none"], "temperature": ["0.8", "0"], "tokens": ["9", "3"], "repetition_window": ["64", "7"]}
    assert shown | changed | {"seed": ["5", "5"], "stop": ["none", "none"]} == shown
    assert talk("/save a", "the", "/load a", "/set seed 5", "the").out == talk("the").out * 2
    assert talk("the", "/reset", "the").out == talk("the").out * 2
    assert talk("/set temperature 3", "the").out == talk("the", options=("--temperature", "3")).out != talk("the").out
    assert talk("/set tokens 2", "the", options=("--bias", "97=50")).out == "aa\n"


def test_mistakes_are_one_line_and_change_nothing(talk: Talk) -> None:
    complaints = {
        "/sav a": "unknown command /sav; did you mean 'save'?",
        "/": "unknown command /; known: help, load, quit, reset, save, set",
        "/save": "/save needs a file: /save FILE",
        "/load": "/load needs a file: /load FILE",
        "/load gone": "'gone': No such file or directory",
        "/load text.txt": "'text.txt' is no sound safetensors file",
        "/save no/where": "'no/.where.session.tmp': No such file",
        "/set temprature 1": "temprature cannot be set; did you mean 'temperature'?",
        "/set temperature hot": "temperature ('hot') must be at least 0",
        "/set temperature": "temperature ('') must be at least 0",
        "/set temperature -1": "temperature (-1) must be at least 0",
        "/set temperature none": "temperature (None) must be at least 0",
        "/set top_k 1.5": "top_k (1.5) must be at least 1",
        "/set top_p 2": "top_p (2) must be above 0",
        "/set temperature 0": "temperature 0 takes the likeliest token, so top_k (20) would do nothing",
        "/set tokens -1": "tokens ('-1') must be a whole number of at least 0",
        "/set stop": "a stop string ('') is empty",
        '/set stop ["a", ""]': "a stop string ('') is empty",
        "/set seed -1": "seed ('-1') must be a whole number of at least 0",
        f"/set seed {2**64}": f"seed ({2**64}) must be between 0",
    }
    answer = talk("the", *complaints, "cat", "/save a", options=("--quiet",))
    assert answer.status == 0
    for error, complaint in zip(answer.err.splitlines(), complaints.values(), strict=True):
        assert error.startswith(f"error: {complaint}")
    assert answer.out == talk("the", "cat", "/save b").out
    assert remembered("a") == remembered("b")


class Typist(io.StringIO):
    """Ctrl-C where a line is None."""

    def __init__(self, *typed: str | None) -> None:
        super().__init__()
        self.typed = iter(typed)

    def readline(self, size: int | None = -1, /) -> str:
        line = next(self.typed, "")
        if line is None:
            raise KeyboardInterrupt
        return line


def test_ctrl_c_at_the_prompt_says_goodbye_and_saves(txl: Txl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", Typist("the\n", None, "never\n"))
    answer = txl("generate", "run", "--interactive", "--tokens", "2", "--memory", "a", "--bias", "10=-inf")
    assert (answer.status, answer.err.count("\ngoodbye; read 3 tokens in ")) == (130, 1)
    assert len(remembered("a")) == len("the") + 2
    monkeypatch.setattr(sys, "stdin", Typist(None))
    assert txl("generate", "run", "--interactive").err.splitlines()[1:] == ["goodbye"]


def test_it_greets_before_it_opens_the_model_and_compiles_when_asked(talk: Talk, txl: Txl, monkeypatch: Any) -> None:
    greeting, error = txl("generate", "missing", "--interactive").err.splitlines()
    assert greeting.startswith("Type text") and error.startswith("txl: error: 'missing'")
    monkeypatch.setattr("transformer_xl.generation.fastest._COMPILE_SECONDS", -1.0)
    monkeypatch.setattr("transformer_xl.generation.fastest.cannot_compile", lambda device: "there is no compiler")
    assert "not compiled (as set)" in talk("the").err
    assert "compile (True) cannot work here: there is no compiler" in talk("the", options=("--compile", "yes")).err


def test_ctrl_c_while_reading_keeps_what_was_read(txl: Txl, monkeypatch: pytest.MonkeyPatch, workbench: Path) -> None:
    monkeypatch.setattr(Bar, "advance", lambda self, n: os.kill(os.getpid(), signal.SIGINT))
    monkeypatch.setattr(sys, "stdin", Typist("x" * 3000 + "\n", "/save a\n"))
    answer = txl("generate", "run", "--interactive", "--tokens", "2", "--quiet")
    assert answer.status == 0
    assert answer.err.strip() == "stopped reading; 64 tokens remembered"
    assert answer.out == ""
    assert remembered("a") == b"x" * 64
    assert describe_session(Path("a"))["note"]["tokens"] == "64"


def interrupt(monkeypatch: pytest.MonkeyPatch, line: str, *later: str, times: int = 1) -> None:
    """Type a line, and press Ctrl-C when the decoder begins to do what it says; then type others."""
    begun = []

    def typed() -> Iterator[str]:
        begun.append(line)
        yield f"{line}\n"
        yield from later

    for name in ("load", "save", "reset", "step"):
        method = getattr(Decoder, name)

        def interrupted(*arguments: Any, method: Callable[..., Any] = method, **options: Any) -> Any:
            for _ in range(times if begun else 0):
                begun.clear()
                signal.raise_signal(signal.SIGINT)
            return method(*arguments, **options)

        monkeypatch.setattr(Decoder, name, interrupted)
    typist = Typist()
    typist.typed = typed()
    monkeypatch.setattr(sys, "stdin", typist)


COMMAND = ("generate", "run", "--interactive", "--tokens", "2", "--compile", "no", "--bias", "10=-inf", "--memory")


@pytest.mark.parametrize("line", ["/load b", "/save c", "/reset", "the"])
def test_one_ctrl_c_brings_a_command_to_its_end(txl: Txl, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    """It is as if it came at the prompt after it; the conversation goes on."""
    for name, text in (("a", "the cat"), ("b", "sat")):
        monkeypatch.setattr(sys, "stdin", Typist(f"{text}\n"))
        assert txl(*COMMAND, name).status == 0
    monkeypatch.setattr(sys, "stdin", Typist(f"{line}\n", "/save d\n"))
    assert txl(*COMMAND, "a", "--read-only", "--seed", "1").status == 0
    expected = Path("d").read_bytes()
    interrupt(monkeypatch, line, "/save d\n", "/quit\n")
    answer = txl(*COMMAND, "a", "--read-only", "--seed", "1")
    assert answer.status == 0
    assert "Ctrl-C again, or /quit, leaves" in answer.err or line == "the"  # of which it ends the writing
    assert Path("d").read_bytes() == expected


@pytest.mark.parametrize("line", ["the", "/load b"])
def test_a_second_ctrl_c_leaves_the_file_as_it_was(txl: Txl, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    """What is remembered in the middle of something may be half of it."""
    monkeypatch.setattr(sys, "stdin", Typist("the cat\n", "/save b\n"))
    assert txl(*COMMAND, "a").status == 0
    before = Path("a").read_bytes()
    interrupt(monkeypatch, line, "never\n", times=2)
    answer = txl(*COMMAND, "a")
    assert answer.status == 130
    assert "stopped; a is unchanged" in answer.err
    assert Path("a").read_bytes() == before


def test_an_import_that_swallows_ctrl_c_does_not_hide_it(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    really = builtins.__import__

    def importing(name: str, *where: Any) -> Any:
        if name == "transformer_xl.cli.interactive" and where[0]["__name__"] == "transformer_xl.cli.generate":
            with contextlib.suppress(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
        return really(name, *where)

    monkeypatch.setattr(builtins, "__import__", importing)
    answer = talk("the cat")
    assert (answer.status, answer.out, answer.err.splitlines()[-1]) == (130, "", "interrupted")


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX terminals")
def test_ctrl_d_before_the_prompt_ends_it_and_the_terminal_is_as_before(workbench: Path) -> None:
    import pty
    import termios

    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    how: Any = {"environment": os.environ | {"TERM": "dumb"}, "terminal": os.ttyname(theirs)}
    with forked.start("tests.world_cases:program", "generate", "run", "--interactive", **how) as child:
        shown = os.read(ours, 1000)
        os.write(ours, b"\x04")
        while b"goodbye" not in shown:
            shown += os.read(ours, 1000)
        assert child.wait() == 0
    assert termios.tcgetattr(theirs) == before
    os.close(theirs)
    os.close(ours)


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX terminals")
def test_lines_typed_while_the_text_goes_to_a_file_still_end(workbench: Path) -> None:
    """Then nobody edits, so the terminal itself must take a rubbed-out letter, and Ctrl-D as the end."""
    import pty

    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "transformer_xl", "generate", "run", "--interactive", "--tokens", "1"]
    with subprocess.Popen(command, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout and child.stderr
        assert child.stdout.read(2) == b"> "
        os.write(ours, b"\x04")
        try:
            assert child.wait(timeout=30) == 0
        finally:
            child.kill()
        assert b"goodbye" in child.stderr.read()
    os.close(theirs)
    os.close(ours)


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX terminals")
def test_a_terminal_shows_a_prompt_and_keeps_lines(workbench: Path) -> None:
    """In a real terminal: what is typed early is answered, a line is edited and repeated, controls are spelled out."""
    import pty

    ours, theirs = pty.openpty()
    os.write(ours, b"the cat\nsat\n")
    options = ("--interactive", "--tokens", "3", "--bias", "7=90", "--compile", "no")
    with forked.start(
        "tests.world_cases:program",
        "generate",
        "run",
        *options,
        environment=os.environ | {"TERM": "dumb"},
        terminal=os.ttyname(theirs),
    ) as child:
        shown = b""
        for n_answer, typed in ((2, b"\x10\n"), (3, b"\x04")):  # Ctrl-P: the line before
            while shown.count(b"\\x07\\x07\\x07") < n_answer or not shown.endswith(b"> "):
                shown += os.read(ours, 1000)
            os.write(ours, typed)
        os.close(theirs)
        with pytest.raises(OSError) if sys.platform == "linux" else pytest.raises(StopIteration):
            while True:
                shown += os.read(ours, 1000)
        assert child.wait() == 0
    os.close(ours)
    text = shown.decode().replace("\r", "")
    assert text.count("\\x07\\x07\\x07") == 3
    assert re.search(r"> the cat\n.*> sat\n.*> sat\n.*> \ngoodbye; ", text, re.DOTALL)
    assert "Traceback" not in text

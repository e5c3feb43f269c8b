"""`txl generate --interactive`: a person types lines, a model goes on after each, and remembers all of it."""

import contextlib
import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Any

from transformer_xl.cli.generate_options import Remembered
from transformer_xl.cli.job import WritingJob
from transformer_xl.cli.printers import StreamPrinter, describe_decoder, print_events
from transformer_xl.cli.prompts import Prompt, beginning, nothing, typed
from transformer_xl.console import say
from transformer_xl.errors import ConfigError, TxlError, counted, did_you_mean, message_of, one_line
from transformer_xl.generation.sampling import NUMBERS
from transformer_xl.generation.seeds import check_seed, text_seed
from transformer_xl.generation.session import TextSession
from transformer_xl.process import interrupts

HELP = """\
Type text and press Enter: the model reads it and goes on. An empty line lets it go on as it is.
Ctrl-C ends what it is writing; it remembers what was read and shown. Where it waits for you, Ctrl-C leaves.

/set             show the settings
/set NAME VALUE  change one, such as /set temperature 0.7 or /set top_k none
/set stop TEXT   end texts before TEXT; JSON is read, such as "\\n" or ["Q:", "A:"]; none: nowhere
/reset           forget everything
/save [FILE]     write the session to a file (default: that of --memory)
/load FILE       go on from one
/quit            leave; so does Ctrl-D
//TEXT           text that begins with a slash"""

_COMMANDS = ("help", "load", "quit", "reset", "save", "set")

_COUNTS = ("tokens", "seed")
_SETTINGS = (*_COUNTS, *NUMBERS, "stop")


class Conversation:
    """Lines of a person and how a model goes on after each."""

    def __init__(self, session: TextSession, job: WritingJob, remembered: Remembered, *, quiet: bool) -> None:
        self._session, self._job, self._file, self._quiet = session, job, remembered.memory, quiet
        self._saves = remembered.memory is not None and not remembered.read_only
        self._seed, self._turn = job.seed, 0

    def run(self, prompts: list[Prompt]) -> None:
        """Read the first prompt, if any, then lines until there are no more, and save the session."""
        if prompts:
            with interrupts() as received:
                self._write(prompts[0], received, n_tokens=0)
        status = None
        while True:
            try:
                line = input("> " if sys.stdin.isatty() else "")
            except (EOFError, KeyboardInterrupt) as end:
                say("", quiet=not sys.stdin.isatty())  # the prompt's line has no end yet
                status = 130 if isinstance(end, KeyboardInterrupt) else None
                break
            received: list[int] = []
            try:
                with interrupts() as received:
                    goes_on = self._answer(line, received)
            except (TxlError, OSError) as error:
                say(f"error: {one_line(message_of(error))}")
                goes_on = True
            except KeyboardInterrupt:  # a second one, in the middle of something: the session may hold half of it
                say(f"\nstopped{f'; {self._file} is unchanged' if self._saves else ''}")
                sys.exit(130)
            if not goes_on:
                break
            if received:
                say("\nCtrl-C again, or /quit, leaves")
        self._leave()
        sys.exit(status)

    def _answer(self, line: str, received: list[int]) -> bool:
        """Carry out a line; return whether to go on."""
        if not line.startswith("/") or line.startswith("//"):
            self._write(self._prompt(line.removeprefix("/")), received, n_tokens=self._job.n_tokens)
            return True
        name, _, argument = line[1:].strip().partition(" ")
        argument = argument.strip()
        match name:
            case "help":
                say(HELP)
            case "load":
                if not argument:
                    raise ConfigError("/load needs a file: /load FILE")
                self._session.load(Path(argument))
                say(f"{counted(self._session.text.n_tokens, 'token')} remembered")
            case "quit":
                return False
            case "reset":
                self._session.reset()
                self._turn = 0
                say("forgotten")
            case "save":
                self._save(argument)
            case "set":
                self._set(argument)
            case _:
                raise ConfigError(f"unknown command /{name}; {did_you_mean(name, _COMMANDS)}")
        return True

    def _prompt(self, text: str) -> Prompt:
        """Return a line as a prompt; after a text that does not end in a line end, it begins with one."""
        session = self._session
        if not text:
            return beginning(session.tokenizer) if session.text.n_tokens == 0 else nothing()
        separator = session.tokenizer.separator
        if session.text.n_tokens == 0 or session.tokenizer.decode(session.text.tail).endswith(separator):
            separator = ""
        return typed(separator + text, session.tokenizer)

    def _write(self, prompt: Prompt, received: list[int], *, n_tokens: int) -> None:
        """Go on from a prompt; an interrupt that ends this has done its work."""
        job = dataclasses.replace(self._job, n_tokens=n_tokens, seed=text_seed(self._seed, self._turn, 0))
        self._turn += 1
        events = job.run([prompt], received, self._session)
        if print_events(events, StreamPrinter(), len(prompt.ids), hidden=self._quiet):
            say(f"\nstopped reading; {counted(self._session.text.n_tokens, 'token')} remembered")
        elif received:
            say("")
        received.clear()

    def _leave(self) -> None:
        """Say so, print figures, and save the session; but an empty one, as after /reset, does not replace a file."""
        totals = self._job.totals
        line = totals.line(describe_decoder(self._job.decoder), self._seed, interrupted=False)
        say(f"goodbye; {line}" if totals.n_read + totals.n_written else "goodbye", quiet=self._quiet)
        if self._saves and self._session.text.n_tokens > 0:
            with interrupts():
                self._save("")
        elif self._saves:
            say(f"nothing is remembered, so {self._file} stays as it was", quiet=self._quiet)

    def _save(self, argument: str) -> None:
        path = Path(argument) if argument else self._file
        if path is None:
            raise ConfigError("/save needs a file: /save FILE")
        self._session.save(path)
        say(f"{counted(self._session.text.n_tokens, 'token')} saved to {path}", quiet=self._quiet)

    def _set(self, argument: str) -> None:
        if not argument:
            settings = dataclasses.asdict(self._job.sampling) | {"tokens": self._job.n_tokens, "seed": self._seed}
            stop = self._job.stopping.strings
            settings["stop"] = json.dumps(list(stop), ensure_ascii=False) if stop else None
            say("\n".join(f"{name} {'none' if settings[name] is None else settings[name]}" for name in _SETTINGS))
            return
        name, _, text = re.split(r"(\s*=\s*|\s+|$)", argument, maxsplit=1)
        name = name.replace("-", "_")
        if name not in _SETTINGS:
            raise ConfigError(f"{name} cannot be set; {did_you_mean(name, _SETTINGS)}")
        if name == "stop":
            stopping = dataclasses.replace(self._job.stopping, strings=_strings(text))
            self._job = dataclasses.replace(self._job, stopping=stopping)
            return
        value = _value(name, text)
        if name == "seed":
            self._seed, self._turn = check_seed(value), 0
        elif name == "tokens":
            self._job = dataclasses.replace(self._job, n_tokens=value)
        else:
            self._job = dataclasses.replace(self._job, sampling=dataclasses.replace(self._job.sampling, **{name: value}))


def _value(name: str, text: str) -> Any:
    """Return a whole number, a number, none, or else the text, which no setting takes."""
    value: Any = None if text == "none" else text
    for kind in (float, int):
        with contextlib.suppress(ValueError):
            value = kind(text)
    if name in _COUNTS and (type(value) is not int or value < 0):
        raise ConfigError(f"{name} ({text!r}) must be a whole number of at least 0")
    return value


def _strings(text: str) -> list[str]:
    """Return stop strings: a text as it is or in JSON, or a list of them in JSON; none: no text."""
    if text == "none":
        return []
    try:
        read = json.loads(text)
    except (ValueError, RecursionError):
        return [text]
    strings = read if isinstance(read, list) else [read]
    return strings if all(isinstance(string, str) for string in strings) else [text]

"""What `txl generate` prints: text as it comes, finished texts in order, or JSON lines; and a bar while it reads."""

import io
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import Progress

    from transformer_xl.data.tokenizers import Tokenizer
    from transformer_xl.generation.job import Sample
    from transformer_xl.generation.requests import Chosen, Finished
    from transformer_xl.world import World

_BAR_FROM = 4096
"""Tokens from which on reading a prompt takes long enough to show how far it is."""

_UNPRINTABLE = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if code not in (9, 10)}


def show(text: str) -> None:
    """Write to standard output at once; control characters that would act on a terminal are spelled out there."""
    if text:
        sys.stdout.write(text.translate(_UNPRINTABLE) if sys.stdout.isatty() else text)
        sys.stdout.flush()


class StreamPrinter:
    """One text, as it comes."""

    def __init__(self, *, echo: bool | None, tokenizer: "Tokenizer") -> None:
        self._echo, self._tokenizer, self._last = echo, tokenizer, "\n"

    def begin(self, text: "Sample") -> None:
        """Show the prompt as the model reads it, if it was typed."""
        self._show(_echoed(text, self._echo, self._tokenizer))

    def token(self, text: "Sample", chosen: "Chosen") -> None:
        """Show what the token adds."""
        self._show(text.piece)

    def end(self, text: "Sample", finished: "Finished", rest: str) -> None:
        """Show the rest, and end the line."""
        self._show(rest)
        if self._last != "\n":
            show("\n")

    def _show(self, text: str) -> None:
        show(text)
        self._last = text[-1:] or self._last


class TextPrinter:
    """Finished texts in order, with their number and seed if there are several."""

    def __init__(self, *, echo: bool | None, tokenizer: "Tokenizer", several: bool, first: int = 0) -> None:
        self._echo, self._tokenizer, self._several = echo, tokenizer, several
        self._pieces: dict[int, list[str]] = {}
        self._waiting: dict[int, str] = {}
        self._next = first

    def begin(self, text: "Sample") -> None:
        """Begin with the prompt, if it is shown."""
        self._pieces[text.number] = [_echoed(text, self._echo, self._tokenizer)]

    def token(self, text: "Sample", chosen: "Chosen") -> None:
        """Keep what the token adds."""
        self._pieces[text.number].append(text.piece)

    def end(self, text: "Sample", finished: "Finished", rest: str) -> None:
        """Show all texts whose turn it is."""
        whole = "".join([*self._pieces.pop(text.number), rest])
        interrupted = ", interrupted" if finished.reason == "interrupted" else ""
        head = f"=== {text.number + 1} (seed {text.seed}{interrupted}) ===\n" if self._several else ""
        self._waiting[text.number] = f"{head}{whole}" + ("" if whole[-1:] in ("\n", "") else "\n")
        while self._next in self._waiting:
            show(self._waiting.pop(self._next))
            self._next += 1


class JsonPrinter:
    """One JSON line for each finished text, as soon as it is finished; if streaming, also one for each token."""

    def __init__(self, *, tokenizer: "Tokenizer", stream: bool, logprobs: bool) -> None:
        self._tokenizer, self._stream, self._logprobs = tokenizer, stream, logprobs
        self._pieces: dict[int, list[str]] = {}
        self._tokens: dict[int, list[dict[str, Any]]] = {}

    def begin(self, text: "Sample") -> None:
        """Begin with nothing."""
        self._pieces[text.number], self._tokens[text.number] = [], []

    def token(self, text: "Sample", chosen: "Chosen") -> None:
        """Keep what the token adds, and print it if streaming."""
        self._pieces[text.number].append(text.piece)
        if self._logprobs:
            self._tokens[text.number].append(self._report(chosen))
        if self._stream:
            line = {"prompt_index": text.prompt_number, "sample": text.sample, "text": text.piece}
            self._print(line | (self._report(chosen) if self._logprobs else {"token": chosen.token}))

    def end(self, text: "Sample", finished: "Finished", rest: str) -> None:
        """Print the text."""
        line = {
            "prompt_index": text.prompt_number,
            "sample": text.sample,
            **text.prompt.origin,
            "text": "".join([*self._pieces.pop(text.number), rest]),
            "prompt_tokens": finished.n_read,
            "tokens": finished.n_written,
            "seed": text.seed,
            "finish": finished.reason,
            "stopped_by": text.transcript.stopped_by if finished.stop_token is None else finished.stop_token,
            "seconds": round(finished.reading + finished.writing, 6),
            "tokens_per_second": round(finished.n_written / max(finished.writing, 1e-9), 3),
        }
        tokens = self._tokens.pop(text.number)
        self._print(line | ({"logprobs": tokens} if self._logprobs else {}))

    def _report(self, chosen: "Chosen") -> dict[str, Any]:
        def entry(token: int, value: float | None) -> dict[str, Any]:
            rounded = None if value is None else round(value, 6)
            return {"token": token, "token_text": self._tokenizer.decode([token]), "logprob": rounded}

        likeliest = [entry(token, value) for token, value in chosen.likeliest]
        return entry(chosen.token, chosen.log_probability) | ({"likeliest": likeliest} if likeliest else {})

    def _print(self, line: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()


class ReadingBar:
    """Shows how far a long prompt is read, with rate and time left, on a terminal."""

    def __init__(self, total: int, *, hidden: bool = False) -> None:
        self._hidden = hidden or total < _BAR_FROM
        self._total, self._done, self._begin = total, 0, time.perf_counter()
        self._progress: Progress | None = None

    def __enter__(self) -> "ReadingBar":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def advance(self, n: int) -> None:
        """Take note of tokens just read; the bar disappears with the last ones."""
        if self._done == 0 and not self._hidden:
            self._open()
        self._done += n
        if self._progress is not None:
            rate = self._done / max(time.perf_counter() - self._begin, 1e-9)
            self._progress.update(self._progress.task_ids[0], completed=self._done, rate=rate)
            if self._done >= self._total:
                self.close()

    def close(self) -> None:
        """Remove the bar."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _open(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(stderr=True)
        if not console.is_terminal:
            return
        columns = (
            TextColumn("reading"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.fields[rate]:,.0f} tokens/s"),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=console, transient=True)
        self._progress.add_task("", total=self._total, rate=0)
        self._progress.start()


@contextmanager
def gathered_output(world: "World") -> Iterator[None]:
    """Print in the first process what all of several print in the block, by rank, when it ends everywhere."""
    if world.alone:
        yield
        return
    with redirect_stdout(io.StringIO()) as own:
        yield
    outputs = world.exchange(own.getvalue())
    if world.first:
        show("".join(outputs))


def say(message: str, *, quiet: bool = False) -> None:
    """Write a line to standard error."""
    if not quiet:
        print(message, file=sys.stderr, flush=True)


def _echoed(text: "Sample", echo: bool | None, tokenizer: "Tokenizer") -> str:
    """Return the prompt as the model reads it, if it is to be shown; by default, if it was typed.

    A character that it ends within is completed by the text.
    """
    if not (text.prompt.shown if echo is None else echo):
        return ""
    decoder = tokenizer.stream()
    return "".join([decoder.push(token) for token in text.prompt.ids.tolist()])

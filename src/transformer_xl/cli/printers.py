"""Output of `txl generate`: text as it comes, finished texts in order, or JSON lines; and a bar while it reads."""

import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from transformer_xl.console import printable, progress
from transformer_xl.files import naming, whole_file

if TYPE_CHECKING:
    from transformer_xl.cli.prompts import Prompt
    from transformer_xl.generation.beam import Hypothesis
    from transformer_xl.generation.decoder import Decoder
    from transformer_xl.generation.draft import Chosen, Ended, Event
    from transformer_xl.tokenizers.base import Tokenizer

_BAR_FROM = 4096
"""Tokens from which on reading a prompt takes long enough to show a bar."""


def show(text: str) -> None:
    """Write to standard output at once; on a terminal, spell out control characters that would act on it."""
    if text:
        _write(printable(text) if sys.stdout.isatty() else text)


def _write(text: str) -> None:
    with naming(Path("standard output")):
        sys.stdout.write(text)
        sys.stdout.flush()


class Printer(Protocol):
    """Shows texts while they are written, and when they are finished."""

    def token(self, chosen: "Chosen") -> None:
        """Show one more token."""
        ...

    def end(self, ended: "Ended") -> None:
        """Show the end of a text."""
        ...


def print_events(events: "Iterator[Event]", printer: Printer, n_token: int, *, hidden: bool) -> bool:
    """Show texts as they come, and how far `n_token` tokens of prompts are read, unless `hidden`.

    Returns:
        Whether the last text ended while its prompt was being read.
    """
    from transformer_xl.generation.draft import Chosen, Read

    draft, n_left = None, n_token
    with ExitStack() as reading:  # the bar goes with the last token of a prompt, because the text comes after it
        bar = None
        for event in events:
            draft = event.draft
            if isinstance(event, Read):
                bar = bar or reading.enter_context(progress("reading", n_token, hidden=hidden or n_token < _BAR_FROM))
                bar.advance(event.n)
                n_left -= event.n
                if n_left <= 0:
                    reading.close()
            elif isinstance(event, Chosen):
                printer.token(event)
            else:
                printer.end(event)
    return draft is not None and draft.reason == "interrupted" and draft.n_written == 0


class StreamPrinter:
    """Prints one text as it comes, after its beginning."""

    def __init__(self, beginning: str = "") -> None:
        self._last = "\n"
        self._show(beginning)

    def token(self, chosen: "Chosen") -> None:
        """Show what the token adds."""
        self._show(chosen.piece)

    def end(self, ended: "Ended") -> None:
        """Show the rest, and end the line."""
        self._show(ended.rest)
        if self._last != "\n":
            show("\n")

    def _show(self, text: str) -> None:
        show(text)
        self._last = text[-1:] or self._last


class InOrder:
    """Shows texts in the order of their numbers; each waits for those before."""

    def __init__(self) -> None:
        self._next, self._waiting = 0, dict[int, str]()

    def add(self, number: int, text: str) -> None:
        """Show all texts that are next in order."""
        self._waiting[number] = text
        while self._next in self._waiting:
            show(self._waiting.pop(self._next))
            self._next += 1

    def finish(self) -> None:
        """Show what still waits for texts that did not come."""
        for number in sorted(self._waiting):
            show(self._waiting[number])


class TextPrinter:
    """Prints finished texts in order, with number and seed if there are several, after the `beginnings` of their prompts."""

    def __init__(self, beginnings: Callable[[int], str], *, several: bool) -> None:
        self._beginnings, self._several = beginnings, several
        self._pieces: defaultdict[int, list[str]] = defaultdict(list)
        self._order = InOrder()

    def token(self, chosen: "Chosen") -> None:
        """Keep what the token adds."""
        self._pieces[chosen.draft.label].append(chosen.piece)

    def end(self, ended: "Ended") -> None:
        """Show all texts that are next in order."""
        draft, number = ended.draft, ended.draft.label
        whole = "".join([self._beginnings(number), *self._pieces.pop(number, ()), ended.rest])
        interrupted = ", interrupted" if draft.reason == "interrupted" else ""
        head = f"=== {number + 1} (seed {draft.seed}{interrupted}) ===\n" if self._several else ""
        self._order.add(number, head + _as_lines(whole))


class JsonPrinter:
    """Prints a JSON line for each text as soon as it is finished; if streaming, also one for each token."""

    def __init__(self, prompts: "Sequence[Prompt]", n: int, tokenizer: "Tokenizer", *, stream: bool, logprobs: bool) -> None:
        self._prompts, self._n, self._tokenizer, self._stream, self._logprobs = prompts, n, tokenizer, stream, logprobs
        self._pieces: defaultdict[int, list[str]] = defaultdict(list)
        self._tokens: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)

    def token(self, chosen: "Chosen") -> None:
        """Keep what the token adds, and print it if streaming."""
        number = chosen.draft.label
        self._pieces[number].append(chosen.piece)
        if self._logprobs:
            self._tokens[number].append(self._report(chosen))
        if self._stream:
            line = self._place(number) | {"text": chosen.piece}
            _write_json(line | (self._report(chosen) if self._logprobs else {"token": chosen.token}))

    def end(self, ended: "Ended") -> None:
        """Print the text."""
        draft, number = ended.draft, ended.draft.label
        line = {
            **self._place(number),
            **self._prompts[number // self._n].origin,
            "text": "".join([*self._pieces.pop(number, ()), ended.rest]),
            "prompt_tokens": draft.n_read,
            "tokens": draft.n_written,
            "seed": draft.seed,
            "finish": draft.reason,
            "stopped_by": draft.stopped_by,
            "seconds": round(draft.reading + draft.writing, 6),
            "tokens_per_second": round(draft.n_written / max(draft.writing, 1e-9), 3),
        }
        _write_json(line | ({"logprobs": self._tokens.pop(number, [])} if self._logprobs else {}))

    def _place(self, number: int) -> dict[str, Any]:
        index, sample = divmod(number, self._n)
        return {"prompt_index": index, "sample": sample}

    def _report(self, chosen: "Chosen") -> dict[str, Any]:
        def entry(token: int, value: float | None) -> dict[str, Any]:
            rounded = None if value is None else round(value, 6)
            return {"token": token, "token_text": self._tokenizer.decode([token]), "logprob": rounded}

        likeliest = [entry(token, value) for token, value in chosen.likeliest]
        return entry(chosen.token, chosen.log_probability) | ({"likeliest": likeliest} if likeliest else {})


class BeamPrinter:
    """Prints what a beam search finds: texts in the order of their prompts, JSON lines as they are found."""

    def __init__(
        self, prompts: "Sequence[Prompt]", tokenizer: "Tokenizer", *, n: int, echo: bool | None, as_json: bool
    ) -> None:
        self._prompts, self._tokenizer, self._n, self._echo, self._as_json = prompts, tokenizer, n, echo, as_json
        self._order = InOrder()

    def found(self, number: int, hypotheses: "Sequence[Hypothesis]") -> None:
        """Take the hypotheses of one prompt, and show all that are next in order."""
        texts = [self._one(number, sample, hypothesis) for sample, hypothesis in enumerate(hypotheses)]
        if not self._as_json:
            self._order.add(number, "".join(texts))

    def end(self) -> None:
        """Show what still waits for prompts whose search was interrupted."""
        self._order.finish()

    def _one(self, number: int, sample: int, hypothesis: "Hypothesis") -> str:
        from transformer_xl.generation.stopping import Transcript

        prompt = self._prompts[number]
        transcript = Transcript(self._tokenizer, prompt.ids)
        text = "".join([*(transcript.push(token) for token in hypothesis.tokens), transcript.finish()])
        if self._as_json:
            line = {"prompt_index": number, "sample": sample, **prompt.origin, "text": text, "prompt_tokens": len(prompt.ids)}
            line |= {"tokens": len(hypothesis.tokens), "log_probability": round(hypothesis.log_probability, 6)}
            line |= {"score": round(hypothesis.score, 6), "finish": "length" if hypothesis.stop_token is None else "stop"}
            _write_json(line | {"stopped_by": hypothesis.stop_token})
        is_one = len(self._prompts) * self._n == 1
        head = "" if is_one else f"=== {number * self._n + sample + 1} (score {hypothesis.score:.3f}) ===\n"
        return head + _as_lines(echoed(prompt, self._echo, self._tokenizer) + text)


class FilePrinter:
    """Writes the ids of one text, prompt and all, to a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ids: list[int] = []

    def token(self, chosen: "Chosen") -> None:
        """Keep the token."""
        self._ids.append(chosen.token)

    def end(self, ended: "Ended") -> None:
        """Write the array."""
        import numpy as np

        with whole_file(self._path) as stray, stray.open("wb") as file:
            np.save(file, np.array([*ended.draft.ids.tolist(), *self._ids]))


def _as_lines(text: str) -> str:
    """Return a text with a line end, unless it is empty."""
    return text + ("" if text[-1:] in ("\n", "") else "\n")


def _write_json(line: dict[str, Any]) -> None:
    _write(json.dumps(line) + "\n")


def describe_decoder(decoder: "Decoder") -> str:
    """Return a decoder's precision, and whether it is compiled and why."""
    return f"{decoder.precision}, {'compiled' if decoder.compiled else 'not compiled'} ({decoder.reason})"


def echoed(prompt: "Prompt", echo: bool | None, tokenizer: "Tokenizer") -> str:
    """Return the prompt as the model reads it, or nothing if it is not echoed; by default, a typed prompt is.

    If it ends within a character, the text completes it.
    """
    if not (prompt.shown if echo is None else echo):
        return ""
    decoder = tokenizer.stream()
    return "".join([decoder.push(token) for token in prompt.ids.tolist()])

"""Output of `txl generate`: text as it comes, finished texts in order, or JSON lines; and a bar while it reads."""

import io
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformer_xl.console import Bar, printable, progress
from transformer_xl.errors import ConfigError
from transformer_xl.files import check_file, naming, replace_file, whole_file

if TYPE_CHECKING:
    from transformer_xl.data.tokenizers import Tokenizer
    from transformer_xl.generation.beam import Hypothesis
    from transformer_xl.generation.decoder import Decoder
    from transformer_xl.generation.job import Sample
    from transformer_xl.generation.requests import Chosen, Finished, Prompt
    from transformer_xl.world import World

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


class StreamPrinter:
    """Prints one text as it comes."""

    def __init__(self, *, echo: bool | None, tokenizer: "Tokenizer") -> None:
        self._echo, self._tokenizer, self._last = echo, tokenizer, "\n"

    def begin(self, text: "Sample") -> None:
        """Show the prompt, if `echo` asks for it."""
        self._show(_echoed(text.prompt, self._echo, self._tokenizer))

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
    """Prints finished texts in order, with number and seed if there are several."""

    def __init__(self, *, echo: bool | None, tokenizer: "Tokenizer", several: bool, first: int = 0) -> None:
        self._echo, self._tokenizer, self._several = echo, tokenizer, several
        self._pieces: dict[int, list[str]] = {}
        self._waiting: dict[int, str] = {}
        self._next = first

    def begin(self, text: "Sample") -> None:
        """Begin with the prompt, if `echo` asks for it."""
        self._pieces[text.number] = [_echoed(text.prompt, self._echo, self._tokenizer)]

    def token(self, text: "Sample", chosen: "Chosen") -> None:
        """Keep what the token adds."""
        self._pieces[text.number].append(text.piece)

    def end(self, text: "Sample", finished: "Finished", rest: str) -> None:
        """Show all texts that are next in order."""
        whole = "".join([*self._pieces.pop(text.number), rest])
        interrupted = ", interrupted" if finished.reason == "interrupted" else ""
        head = f"=== {text.number + 1} (seed {text.seed}{interrupted}) ===\n" if self._several else ""
        self._waiting[text.number] = f"{head}{whole}" + ("" if whole[-1:] in ("\n", "") else "\n")
        while self._next in self._waiting:
            show(self._waiting.pop(self._next))
            self._next += 1


class JsonPrinter:
    """Prints a JSON line for each text as soon as it is finished; if streaming, also one for each token."""

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
        _write(json.dumps(line) + "\n")


class BeamPrinter:
    """Prints what a beam search finds: texts in the order of their prompts, JSON lines as they are found."""

    def __init__(
        self, prompts: "Sequence[Prompt]", tokenizer: "Tokenizer", *, n: int, echo: bool | None, as_json: bool
    ) -> None:
        self._prompts, self._tokenizer, self._n, self._echo, self._as_json = prompts, tokenizer, n, echo, as_json
        self._waiting: dict[int, str] = {}
        self._next = 0

    def found(self, number: int, hypotheses: "Sequence[Hypothesis]") -> None:
        """Take the hypotheses of one prompt, and show all that are next in order."""
        lines = [self._one(number, sample, hypothesis) for sample, hypothesis in enumerate(hypotheses)]
        if self._as_json:
            _write("".join(lines))
            return
        self._waiting[number] = "".join(lines)
        while self._next in self._waiting:
            show(self._waiting.pop(self._next))
            self._next += 1

    def end(self) -> None:
        """Show what still waits for prompts whose search was interrupted."""
        for number in sorted(self._waiting):
            show(self._waiting[number])

    def _one(self, number: int, sample: int, hypothesis: "Hypothesis") -> str:
        from transformer_xl.generation.stopping import Transcript

        prompt = self._prompts[number]
        transcript = Transcript(self._tokenizer, prompt.ids)
        text = "".join([*(transcript.push(token) for token in hypothesis.tokens), transcript.finish()])
        if self._as_json:
            line = {"prompt_index": number, "sample": sample, **prompt.origin, "text": text, "prompt_tokens": len(prompt.ids)}
            line |= {"tokens": len(hypothesis.tokens), "log_probability": round(hypothesis.log_probability, 6)}
            line |= {"score": round(hypothesis.score, 6), "finish": "length" if hypothesis.stop_token is None else "stop"}
            return json.dumps(line | {"stopped_by": hypothesis.stop_token}) + "\n"
        whole = _echoed(prompt, self._echo, self._tokenizer) + text
        is_one = len(self._prompts) * self._n == 1
        head = "" if is_one else f"=== {number * self._n + sample + 1} (score {hypothesis.score:.3f}) ===\n"
        return f"{head}{whole}" + ("" if whole[-1:] in ("\n", "") else "\n")


class FilePrinter:
    """Collects texts as ids, prompts and all, for a file."""

    def __init__(self, path: Path) -> None:
        check_file(path, option="out")
        if path.suffix not in (".npy", ".jsonl"):
            raise ConfigError(f"--out '{path}' must end in .npy or .jsonl")
        self._path = path
        self._texts: dict[int, list[int]] = {}

    def begin(self, text: "Sample") -> None:
        """Begin with the prompt."""
        self._texts[text.number] = text.prompt.ids.tolist()

    def token(self, text: "Sample", chosen: "Chosen") -> None:
        """Keep the token."""
        self._texts[text.number].append(chosen.token)

    def end(self, text: "Sample", finished: "Finished", rest: str) -> None:
        """Do nothing; `save` writes all texts."""

    def save(self) -> None:
        """Write the texts in order: lines of JSON, or an array."""
        import numpy as np

        texts = [self._texts[number] for number in sorted(self._texts)]
        if self._path.suffix == ".npy":
            with whole_file(self._path) as stray, stray.open("wb") as file:
                np.save(file, np.array(texts[0]))
        else:
            replace_file(self._path, "".join(f"{json.dumps(ids)}\n" for ids in texts).encode())


def describe_decoder(decoder: "Decoder") -> str:
    """Return a decoder's precision, and whether it is compiled and why."""
    return f"{decoder.precision}, {'compiled' if decoder.compiled else 'not compiled'} ({decoder.reason})"


@contextmanager
def reading_bar(n_token: int, *, hidden: bool = False) -> Iterator[Callable[[int], None]]:
    """Show on a terminal how far a long prompt is read; yield a function to call with the number of tokens just read.

    The bar appears with the first tokens and goes with the last, because the prompt is printed before and the text after.
    """
    bar, n_read = Bar(), 0
    with ExitStack() as stack:

        def advance(n: int) -> None:
            nonlocal bar, n_read
            if n_read == 0:
                bar = stack.enter_context(progress("reading", n_token, hidden=hidden or n_token < _BAR_FROM))
            bar.advance(n)
            n_read += n
            if n_read >= n_token:
                stack.close()

        yield advance


@contextmanager
def gathered_output(world: "World") -> Iterator[None]:
    """Let the first of several processes print what all print in the block, by rank, once all have ended it."""
    if world.alone:
        yield
        return
    with redirect_stdout(io.StringIO()) as own:
        yield
    outputs = world.exchange(own.getvalue())
    if world.first:
        show("".join(outputs))


def _echoed(prompt: "Prompt", echo: bool | None, tokenizer: "Tokenizer") -> str:
    """Return the prompt as the model reads it, or nothing if it is not echoed; by default, a typed prompt is.

    If it ends within a character, the text completes it.
    """
    if not (prompt.shown if echo is None else echo):
        return ""
    decoder = tokenizer.stream()
    return "".join([decoder.push(token) for token in prompt.ids.tolist()])

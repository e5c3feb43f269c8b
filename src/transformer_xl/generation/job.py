"""`WritingJob`: many texts for some prompts, written until an interrupt, and handed to a printer as they come."""

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Protocol

import numpy as np

from transformer_xl.data.tokenizers import Tokenizer
from transformer_xl.generation.decoder import Decoder
from transformer_xl.generation.requests import Chosen, Finished, FinishReason, Prompt, Request, text_seed
from transformer_xl.generation.sampling import Sampling
from transformer_xl.generation.session import TextSession
from transformer_xl.generation.stopping import Stopping, Transcript
from transformer_xl.generation.writing import write
from transformer_xl.world import World

_Events = Iterator[Chosen | Finished]


@dataclass
class Sample:
    """A text while it is written."""

    number: int  # in order of all texts
    prompt: Prompt  # what it continues
    prompt_number: int  # in order of the prompts
    sample: int  # number among the texts of one prompt
    seed: int  # of the text
    transcript: Transcript  # tokens to text
    piece: str = ""  # what the last token added


class Printer(Protocol):
    """Shows texts while they are written, and when they are finished."""

    def begin(self, text: Sample) -> None:
        """Show what a text continues, before it is read."""
        ...

    def token(self, text: Sample, chosen: Chosen) -> None:
        """Show one more token."""
        ...

    def end(self, text: Sample, finished: Finished, rest: str) -> None:
        """Show the end of a text; its rest is certain only now."""
        ...


@dataclass
class Totals:
    """Tokens and seconds of all texts."""

    n_read: int = 0
    n_written: int = 0
    reading: float = 0.0
    writing: float = 0.0

    def add(self, finished: Finished) -> None:
        """Add a finished text."""
        self.n_read += finished.n_read
        self.n_written += finished.n_written
        self.reading += finished.reading

    def of_all(self, world: World) -> "Totals":
        """Return the tokens of all processes, and the seconds of the slowest."""
        n_read, n_written, reading, writing = zip(*world.exchange(list(vars(self).values())), strict=True)
        return Totals(sum(n_read), sum(n_written), max(reading), max(writing))

    def line(self, machine: str, seed: int, *, interrupted: bool) -> str:
        """Return one line: whether it was interrupted, what was read and written and how fast, and how it was written.

        Example:
            >>> Totals(n_read=30, n_written=500, reading=0.1, writing=1.0).line("fp32", 7, interrupted=False)
            'read 30 tokens in 0.10 s (300 tokens/s), wrote 500 tokens in 1.00 s (500 tokens/s); fp32; seed 7'
        """
        parts = []
        if self.n_read:
            parts.append(f"read {_figures(self.n_read, self.reading)}")
        if self.n_written:
            parts.append(f"wrote {_figures(self.n_written, self.writing)}")
        begin = ["interrupted"] if interrupted else []
        end = [machine, f"seed {seed}"] if self.n_written else []
        return "; ".join([*begin, ", ".join(parts) or "nothing to do", *end])


def _figures(n: int, seconds: float) -> str:
    return f"{n:,} token{'s' if n != 1 else ''} in {seconds:.2f} s ({n / max(seconds, 1e-9):,.0f} tokens/s)"


class StoppedReading(KeyboardInterrupt):
    """Ctrl-C while a prompt was being read; the decoder is in order and remembers what it has read."""


class Interrupts:
    """In this context the first Ctrl-C only sets `noted`, so that the work can end in good order; a second one raises.

    This changes nothing if Ctrl-C is ignored, as in the background of a shell, or outside the main thread.
    """

    def __init__(self) -> None:
        self.noted = False
        self._before: Any = None

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread() and callable(signal.getsignal(signal.SIGINT)):
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.noted:
            raise KeyboardInterrupt
        self.noted = True


@dataclass
class WritingJob:
    """Texts to write."""

    decoder: Decoder
    tokenizer: Tokenizer
    sampling: Sampling
    stopping: Stopping
    n_tokens: int  # of each text, at most
    seed: int  # of all texts
    n: int = 1  # texts per prompt
    likeliest: int | None = None  # how many of the likeliest tokens are reported with their log-probabilities; None: no report
    own: range | None = None  # numbers of the texts that this process writes; None: all
    totals: Totals = field(default_factory=Totals)

    def run(self, prompts: Sequence[Prompt], printer: Printer, on_read: Callable[[int], object]) -> bool:
        """Write all texts, and print them; return whether this was interrupted.

        An interrupt ends the texts that have begun, in good order, and no other begins; a second one raises. This calls
        `on_read` with the number of prompt tokens just read.
        """
        with Interrupts() as interrupts:

            def events(requests: Iterator[Request]) -> _Events:
                return write(
                    self.decoder,
                    requests,
                    sampling=self.sampling,
                    likeliest=self.likeliest,
                    on_read=lambda _, n: on_read(n),
                    interrupted=lambda: interrupts.noted,
                )

            self._write(self._texts(prompts), events, printer, interrupts)
            return interrupts.noted

    def ask(self, session: TextSession, prompts: Sequence[Prompt], printer: Printer, on_read: Callable[[int], object]) -> bool:
        """Write all texts one after another, each after what the session remembers now and not after the others; as `run`.

        In the end the session also remembers the last text.
        """
        kept = session.keep()
        with Interrupts() as interrupts:

            def events(requests: Iterator[Request]) -> _Events:
                for number, request in enumerate(requests):
                    session.restore(kept)
                    for event in self._turn(session, request, on_read, interrupts):
                        yield event._replace(text=number)

            self._write(self._texts(prompts, list(session.text.tail)), events, printer, interrupts)
            return interrupts.noted

    def go_on(self, session: TextSession, prompt: Prompt, printer: Printer, on_read: Callable[[int], object]) -> bool:
        """Write one text after all that a session has read, and remember it; return whether this was interrupted.

        An interrupt ends the text in good order; one while the prompt is being read, or a second one, raises.
        """
        with Interrupts() as interrupts:

            def events(requests: Iterator[Request]) -> _Events:
                for request in requests:
                    for event in self._turn(session, request, on_read, interrupts):
                        if isinstance(event, Finished) and event.reason == "interrupted" and event.n_written == 0:
                            raise StoppedReading
                        yield event

            self._write(self._texts([prompt], session.text.tail), events, printer, interrupts)
            return interrupts.noted

    def _turn(
        self, session: TextSession, request: Request, on_read: Callable[[int], object], interrupts: Interrupts
    ) -> _Events:
        return session.write(
            request,
            sampling=self.sampling,
            likeliest=self.likeliest,
            on_read=on_read,
            interrupted=lambda: interrupts.noted,
        )

    def _write(
        self,
        texts: Iterator[Sample],
        events: Callable[[Iterator[Request]], _Events],
        printer: Printer,
        interrupts: Interrupts,
    ) -> None:
        """Print texts while `events` writes them; after an interrupt no other begins."""
        open_texts: dict[int, Sample] = {}  # by the number of the request

        def requests() -> Iterator[Request]:
            for number, text in enumerate(texts):
                if interrupts.noted:
                    return
                open_texts[number] = text
                printer.begin(text)
                yield self._request(text)

        begin, reading = time.perf_counter(), self.totals.reading
        for event in events(requests()):
            text = open_texts[event.text]
            if isinstance(event, Chosen):
                printer.token(text, event)
            else:
                printer.end(text, event, text.transcript.finish())
                self.totals.add(event)
                del open_texts[event.text]
        self.totals.writing += time.perf_counter() - begin - (self.totals.reading - reading)

    def _texts(self, prompts: Sequence[Prompt], remembered: Sequence[int] = ()) -> Iterator[Sample]:
        for index, prompt in enumerate(prompts):
            before = np.concatenate([np.array(remembered, np.int64), prompt.ids])
            seed, place = (self.seed, index) if prompt.seed is None else (prompt.seed, 0)
            for sample in range(self.n):
                number = index * self.n + sample
                if self.own is None or number in self.own:
                    transcript = Transcript(self.tokenizer, before, self.stopping)
                    yield Sample(number, prompt, index, sample, text_seed(seed, place, sample), transcript)

    def _request(self, text: Sample) -> Request:
        def ends(token: int) -> FinishReason | None:
            text.piece = text.transcript.push(token)
            return None if text.transcript.stopped_by is None else "stop"

        return Request(
            prompt=text.prompt.ids,
            seed=text.seed,
            max_new_tokens=self.n_tokens,
            stop_tokens=frozenset(self.stopping.tokens),
            ends=ends,
        )

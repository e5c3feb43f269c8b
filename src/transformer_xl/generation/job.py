"""`Job`: many texts for some prompts, written up to an interrupt, and handed to a printer as they come."""

import contextlib
import itertools
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
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

_OnRead = Callable[[int, int], object]
"""Called with the number of a text and of the tokens of its prompt that were just read."""


@dataclass
class Sample:
    """A text while it is written.

    Attributes:
        number: in order of all texts.
        prompt: what it goes on from.
        prompt_number: in order of the prompts.
        sample: number among the texts of one prompt.
        seed: of the text.
        transcript: tokens to text.
        piece: what the last token added.
        begun: when, by `time.perf_counter`.
        n_read: tokens of the prompt so far.
        reading: seconds that they took.
        n_written: tokens of the text so far.
    """

    number: int
    prompt: Prompt
    prompt_number: int
    sample: int
    seed: int
    transcript: Transcript
    piece: str = field(default="", init=False)
    begun: float = field(default_factory=time.perf_counter, init=False)
    n_read: int = field(default=0, init=False)
    reading: float = field(default=0.0, init=False)
    n_written: int = field(default=0, init=False)


class Printer(Protocol):
    """Shows texts while they are written, and when they are finished."""

    def begin(self, text: Sample) -> None:
        """Show what a text goes on from, before it is read."""
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
        """Count a finished text in."""
        self.n_read += finished.n_read
        self.n_written += finished.n_written
        self.reading += finished.reading

    def of_all(self, world: World) -> "Totals":
        """Return the tokens of all processes, and the seconds of the slowest."""
        n_read, n_written, reading, writing = zip(*world.exchange(list(vars(self).values())), strict=True)
        return Totals(sum(n_read), sum(n_written), max(reading), max(writing))

    def line(self, machine: str, seed: int, *, interrupted: bool) -> str:
        """Return in one line whether it was interrupted, what was read and written and how fast, by what, and the seed."""
        parts = []
        if self.n_read:
            parts.append(f"read {_figures(self.n_read, self.reading)}")
        if self.n_written:
            parts.append(f"wrote {_figures(self.n_written, self.writing)}")
        begin = ["interrupted"] if interrupted else []
        return "; ".join([*begin, ", ".join(parts) or "nothing to do", machine, f"seed {seed}"])


def _figures(n: int, seconds: float) -> str:
    return f"{n:,} token{'s' if n != 1 else ''} in {seconds:.2f} s ({n / max(seconds, 1e-9):,.0f} tokens/s)"


class StoppedReading(KeyboardInterrupt):
    """Ctrl-C while a prompt was being read; the decoder is in order, and remembers what it has read."""


class Interrupts:
    """Within this context the first Ctrl-C is only noted, so that what is being done can be brought to an end; a second raises.

    Where Ctrl-C is ignored, as in the background of a shell, or somebody else's, as outside the main thread, it stays so.

    Attributes:
        noted: whether there was one.
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
class Job:
    """Texts to write.

    Attributes:
        decoder: its rows write.
        tokenizer: of the model.
        sampling: how tokens are chosen.
        stopping: what ends a text.
        n_tokens: of each text, at most.
        seed: of all texts.
        n: texts per prompt.
        likeliest: how many of the likeliest tokens are reported with their log-probabilities; None: nothing is reported.
        own: numbers of the texts that this process writes; None: all.
        totals: what was read and written so far.
    """

    decoder: Decoder
    tokenizer: Tokenizer
    sampling: Sampling
    stopping: Stopping
    n_tokens: int
    seed: int
    n: int = 1
    likeliest: int | None = None
    own: range | None = None
    totals: Totals = field(default_factory=Totals)

    def run(self, prompts: Sequence[Prompt], printer: Printer, on_read: Callable[[int], object]) -> bool:
        """Write all texts, and print them.

        An interrupt ends those that have begun, in good order, and no other begins; a second one raises.

        Returns:
            Whether it was interrupted.
        """

        def events(requests: Iterator[Request], note: _OnRead) -> _Events:
            first = self.own.start if self.own else 0
            for event in write(
                self.decoder,
                requests,
                sampling=self.sampling,
                likeliest=self.likeliest,
                on_read=lambda text, n: note(first + text, n),
            ):
                yield event._replace(text=first + event.text)

        return self._write_all(self._texts(prompts), events, printer, on_read)

    def ask(self, session: TextSession, prompts: Sequence[Prompt], printer: Printer, on_read: Callable[[int], object]) -> bool:
        """Write all texts, one after another, each after what a session remembers now and none of the others; as `run`.

        Args:
            session: remembers the last text as well in the end.
            prompts: of the texts.
            printer: of the texts.
            on_read: called with the number of prompt tokens just read.
        """
        kept = session.keep()

        def events(requests: Iterator[Request], note: _OnRead) -> _Events:
            for number, request in enumerate(requests):
                session.restore(kept)
                own = partial(note, number)
                for event in session.write(request, sampling=self.sampling, likeliest=self.likeliest, on_read=own):
                    yield event._replace(text=number)

        return self._write_all(self._texts(prompts, list(session.tail)), events, printer, on_read)

    def go_on(self, session: TextSession, prompt: Prompt, printer: Printer, on_read: Callable[[int], object]) -> bool:
        """Write one text after all that a session has read, and remember it.

        An interrupt ends the text in good order; one while the prompt is being read, or a second one, raises.

        Returns:
            Whether it was interrupted.
        """
        with Interrupts() as interrupts:

            def note(n: int) -> None:
                on_read(n)
                if interrupts.noted:
                    raise StoppedReading

            (text,) = self._texts([prompt], session.tail)
            printer.begin(text)
            request = self._request(text, interrupts)
            events = session.write(request, sampling=self.sampling, likeliest=self.likeliest, on_read=note)
            self._print(events, {0: text}, printer)
            return interrupts.noted

    def _write_all(
        self,
        all_texts: Iterable[Sample],
        events: Callable[[Iterator[Request], _OnRead], _Events],
        printer: Printer,
        on_read: Callable[[int], object],
    ) -> bool:
        """Write all texts, and print them, up to an interrupt; return whether there was one."""
        texts: dict[int, Sample] = {}  # those that have begun and not ended
        with Interrupts() as interrupts:

            def requests() -> Iterator[Request]:
                for text in all_texts:
                    if interrupts.noted:
                        return
                    texts[text.number] = text
                    printer.begin(text)
                    yield self._request(text, interrupts)

            def note(number: int, n: int) -> None:
                text = texts[number]
                text.n_read += n
                text.reading = time.perf_counter() - text.begun
                on_read(n)
                if interrupts.noted:
                    raise StoppedReading

            self._print(_to_the_end(events(requests(), note), texts), texts, printer)
            return interrupts.noted

    def _texts(self, prompts: Sequence[Prompt], remembered: Sequence[int] = ()) -> Iterator[Sample]:
        numbers = itertools.count()
        for index, prompt in enumerate(prompts):
            for sample in range(self.n):
                number = next(numbers)
                if self.own is not None and number not in self.own:
                    continue
                own = prompt.seed is not None
                seed = text_seed(prompt.seed if prompt.seed is not None else self.seed, 0 if own else index, sample)
                before = np.concatenate([np.array(remembered, np.int64), prompt.ids])
                transcript = Transcript(self.tokenizer, before, self.stopping)
                yield Sample(number, prompt, index, sample, seed, transcript)

    def _request(self, text: Sample, interrupts: Interrupts) -> Request:
        def ends(token: int) -> FinishReason | None:
            text.piece = text.transcript.push(token)
            text.n_written += 1
            if text.transcript.stopped_by is not None:
                return "stop"
            return "interrupted" if interrupts.noted else None

        return Request(
            prompt=text.prompt.ids,
            seed=text.seed,
            max_new_tokens=self.n_tokens,
            stop_tokens=frozenset(self.stopping.tokens),
            ends=ends,
        )

    def _print(self, events: _Events, texts: dict[int, Sample], printer: Printer) -> None:
        begin, reading = time.perf_counter(), self.totals.reading
        for event in events:
            text = texts[event.text]
            if isinstance(event, Chosen):
                printer.token(text, event)
            else:
                printer.end(text, event, text.transcript.finish())
                self.totals.add(event)
                del texts[event.text]
        self.totals.writing += time.perf_counter() - begin - (self.totals.reading - reading)


def _to_the_end(events: _Events, texts: dict[int, Sample]) -> _Events:
    """Yield events, and where a prompt was not read to its end, the end of each text that has begun."""
    with contextlib.suppress(StoppedReading):
        yield from events
    for text in list(texts.values()):
        writing = time.perf_counter() - text.begun - text.reading
        yield Finished(text.number, "interrupted", text.n_read, text.n_written, text.reading, writing)

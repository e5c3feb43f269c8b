"""Writes the texts that `txl generate` was asked for, and prints them."""

import itertools
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Literal

import numpy as np

from transformer_xl.cli.prompts import Prompt
from transformer_xl.cli.showing import Printer, ReadingBar, Text, Totals
from transformer_xl.data.tokenizers import Tokenizer
from transformer_xl.generation.decoder import Decoder
from transformer_xl.generation.sampling import Sampling
from transformer_xl.generation.session import TextSession
from transformer_xl.generation.stopping import Stopping
from transformer_xl.generation.transcript import Transcript
from transformer_xl.generation.writing import Chosen, Finished, FinishReason, Request, text_seed, write


class StoppedReading(KeyboardInterrupt):
    """Ctrl-C while a prompt was being read; the decoder is in order, and remembers what it has read."""


class Interrupts:
    """Within this context the first Ctrl-C is only noted, so that what is being done can be brought to an end; a second raises.

    Attributes:
        noted: whether there was one.
    """

    def __init__(self) -> None:
        self.noted = False

    def __enter__(self) -> "Interrupts":
        self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
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
    totals: Totals = field(default_factory=Totals)

    def run(self, prompts: Sequence[Prompt], printer: Printer, bar: ReadingBar) -> Literal[False]:
        """Write all texts, and print them.

        Returns:
            That it was not interrupted: an interrupt raises at once, and what was finished has been printed.
        """
        texts: dict[int, Text] = {}

        def requests() -> Iterator[Request]:
            for number, text in enumerate(self._texts(prompts)):
                texts[number] = text
                printer.begin(text)
                yield self._request(text)

        events = write(self.decoder, requests(), sampling=self.sampling, likeliest=self.likeliest, on_read=bar.advance)
        self._print(events, texts, printer)
        return False

    def go_on(self, session: TextSession, prompt: Prompt, printer: Printer, bar: ReadingBar) -> bool:
        """Write one text after all that a session has read, and remember it.

        An interrupt ends the text in good order; one while the prompt is being read, or a second one, raises.

        Returns:
            Whether it was interrupted.
        """
        with Interrupts() as interrupts:

            def on_read(n: int) -> None:
                bar.advance(n)
                if interrupts.noted:
                    raise StoppedReading

            before = np.concatenate([np.array(session.tail, np.int64), prompt.ids])
            text = Text(0, prompt, 0, 0, self.seed, Transcript(self.tokenizer, before, self.stopping))
            printer.begin(text)
            request = self._request(text, interrupts)
            events = session.write(request, sampling=self.sampling, likeliest=self.likeliest, on_read=on_read)
            self._print(events, {0: text}, printer)
            return interrupts.noted

    def _texts(self, prompts: Sequence[Prompt]) -> Iterator[Text]:
        numbers = itertools.count()
        for index, prompt in enumerate(prompts):
            for sample in range(self.n):
                own = prompt.seed is not None
                seed = text_seed(prompt.seed if prompt.seed is not None else self.seed, 0 if own else index, sample)
                transcript = Transcript(self.tokenizer, prompt.ids, self.stopping)
                yield Text(next(numbers), prompt, index, sample, seed, transcript)

    def _request(self, text: Text, interrupts: Interrupts | None = None) -> Request:
        def ends(token: int) -> FinishReason | None:
            text.piece = text.transcript.push(token)
            if text.transcript.stopped_by is not None:
                return "stop"
            return "interrupted" if interrupts is not None and interrupts.noted else None

        return Request(
            prompt=text.prompt.ids,
            seed=text.seed,
            max_new_tokens=self.n_tokens,
            stop_tokens=frozenset(self.stopping.tokens),
            ends=ends,
        )

    def _print(self, events: Iterator[Chosen | Finished], texts: dict[int, Text], printer: Printer) -> None:
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

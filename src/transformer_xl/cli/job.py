"""`WritingJob`: many texts for some prompts, written until an interrupt."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from transformer_xl.cli.prompts import Prompt
from transformer_xl.errors import counted
from transformer_xl.generation.decoder import Decoder
from transformer_xl.generation.draft import Draft, Ended, Event
from transformer_xl.generation.sampling import Sampling
from transformer_xl.generation.scheduler import write
from transformer_xl.generation.seeds import text_seed
from transformer_xl.generation.session import TextSession
from transformer_xl.generation.stopping import Stopping
from transformer_xl.tokenizers.base import Tokenizer


@dataclass
class Totals:
    """Tokens and seconds of all texts."""

    n_read: int = 0
    n_written: int = 0
    reading: float = 0.0
    writing: float = 0.0

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
    return f"{counted(n, 'token')} in {seconds:.2f} s ({n / max(seconds, 1e-9):,.0f} tokens/s)"


@dataclass
class WritingJob:
    """Texts to write. Those that have begun end in good order at an interrupt, and no other begins."""

    decoder: Decoder
    tokenizer: Tokenizer
    sampling: Sampling
    stopping: Stopping
    n_tokens: int  # of each text, at most
    seed: int  # of all texts
    n: int = 1  # texts per prompt
    likeliest: int | None = None  # how many of the likeliest tokens are reported with their log-probabilities; None: no report
    totals: Totals = field(default_factory=Totals)

    def run(
        self, prompts: Sequence[Prompt], received: Sequence[int], session: TextSession | None = None, *, apart: bool = False
    ) -> Iterator[Event]:
        """Write all texts; `received` holds an interrupt once there is one. The label of a draft is its number.

        With a session, one after another: each after all that it has read, or `apart`, after what it remembers now and not
        after the others. In the end it also remembers the last text.
        """
        open_drafts: list[Draft] = []

        def drafts() -> Iterator[Draft]:
            for draft in self._drafts(prompts):
                if received:
                    return
                open_drafts.append(draft)
                yield draft

        begin, reading = time.perf_counter(), self.totals.reading
        for event in write(self.decoder, drafts()) if session is None else _remembered(session, drafts(), apart=apart):
            yield event
            for draft in open_drafts if received else ():
                draft.interrupt()
            if isinstance(event, Ended):
                draft = event.draft
                open_drafts.remove(draft)
                self.totals.n_read += draft.n_read
                self.totals.n_written += draft.n_written
                self.totals.reading += draft.reading
        self.totals.writing += time.perf_counter() - begin - (self.totals.reading - reading)

    def _drafts(self, prompts: Sequence[Prompt]) -> Iterator[Draft]:
        for number in range(len(prompts) * self.n):
            index, sample = divmod(number, self.n)
            prompt = prompts[index]
            seed, place = (self.seed, index) if prompt.seed is None else (prompt.seed, 0)
            yield Draft(
                prompt.ids,
                seed=text_seed(seed, place, sample),
                sampling=self.sampling,
                max_new_tokens=self.n_tokens,
                stopping=self.stopping,
                tokenizer=self.tokenizer,
                likeliest=self.likeliest,
                label=number,
            )


def _remembered(session: TextSession, drafts: Iterator[Draft], *, apart: bool) -> Iterator[Event]:
    kept = session.keep() if apart else None
    for draft in drafts:
        if kept is not None:
            session.restore(kept)
        yield from session.write(draft)

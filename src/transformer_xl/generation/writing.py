"""Write texts with the rows of a `Decoder`: each free row takes the next prompt, and all rows step together.

A text depends on its prompt, its seed and the sampling alone: every row draws from a generator of its own, and what the other
rows read and write makes no difference. (In exact arithmetic; another number of rows may round differently.)
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from transformer_xl.errors import TokenizerError
from transformer_xl.generation.decoder import Decoder
from transformer_xl.generation.requests import EMPTY_PROMPT, Chosen, Finished, FinishReason, Request
from transformer_xl.generation.requests import check_seed as check_seed
from transformer_xl.generation.requests import fresh_seed as fresh_seed
from transformer_xl.generation.requests import text_seed as text_seed
from transformer_xl.generation.sampling import Sampling
from transformer_xl.generation.scores import Scores

_PIECE = 1024
"""Tokens of a prompt read between two calls of `on_read`; any number gives the same scores."""


def write(
    decoder: Decoder,
    requests: Iterable[Request],
    *,
    sampling: Sampling,
    likeliest: int | None = None,
    go_on: bool = False,
    on_read: Callable[[int], object] | None = None,
) -> Iterator[Chosen | Finished]:
    """Write texts, as many at a time as the decoder has rows; the others queue.

    What is kept does not grow with the length of a text.

    Args:
        decoder: its rows are taken one by one; those that are not free lose what they have read, unless `go_on`.
        requests: taken as rows become free.
        sampling: how tokens are drawn.
        likeliest: how many of the likeliest tokens to report with each token, and its log-probability; None: neither.
        go_on: rows remember what they read before, and read the last token of their text as well (but none that ended it as a
            stop does), so that the next text goes on from there.
        on_read: called with the number of prompt tokens just read; the decoder is in order then, whatever it raises.

    Yields:
        Tokens as they are chosen, and the end of each text.

    Raises:
        ConfigError: a sampling that does not fit the vocabulary, or no token that can be drawn.
        TokenizerError: an empty prompt, or an id outside the vocabulary.
    """
    sampling.check(decoder.model.config.vocab_size or 0)
    queue = enumerate(requests)
    rows: list[_Text | None] = [None] * decoder.batch_size
    scores: Scores | None = None
    while True:
        for row, text in enumerate(rows):
            while text is None and (following := next(queue, None)) is not None:
                text = _start(decoder, row, *following, sampling=sampling, go_on=go_on, on_read=on_read)
                scores = None
                if text.request.max_new_tokens == 0:
                    yield text.finished("length")
                    text = None
            rows[row] = text
        if not any(rows):
            return
        tokens, active = [0] * decoder.batch_size, [False] * decoder.batch_size
        scores = scores or decoder.scores
        for row, text in enumerate(rows):
            if text is not None:
                tokens[row] = sampling.choose(scores, row, text.history.last(), text.generator)
        busy = [row for row, text in enumerate(rows) if text is not None]
        reported = dict(zip(busy, _report(scores, [tokens[row] for row in busy], likeliest, rows=busy), strict=True))
        for row, text in enumerate(rows):
            if text is None:
                continue
            token = tokens[row]
            if token in text.request.stop_tokens:
                rows[row] = None
                yield text.finished("stop", stop_token=token)
                continue
            reason = text.add(token)
            yield Chosen(text.number, token, *reported[row])
            active[row] = reason is None or (go_on and reason != "stop")
            if reason is not None:
                rows[row] = None
                yield text.finished(reason)
        if any(active):
            scores = decoder.step(torch.tensor(tokens), active=None if all(active) else torch.tensor(active))


@dataclass
class _Text:
    """A text being written."""

    number: int
    request: Request
    history: "_History"
    generator: torch.Generator
    reading: float
    begin: float
    n_written: int = field(default=0, init=False)

    def add(self, token: int) -> FinishReason | None:
        """Take one more token, and return why it was the last, if it was."""
        self.n_written += 1
        self.history.add(token)
        reason = self.request.ends(token) if self.request.ends else None
        whole = self.n_written >= self.request.max_new_tokens
        return "length" if whole and reason in (None, "interrupted") else reason

    def finished(self, reason: FinishReason, stop_token: int | None = None) -> Finished:
        """Return the end of it."""
        writing = time.perf_counter() - self.begin
        return Finished(self.number, reason, len(self.request.prompt), self.n_written, self.reading, writing, stop_token)


class _History:
    """The tokens that a repetition penalty looks at: the last ones, or of all each once, so that it does not grow."""

    def __init__(self, sampling: Sampling) -> None:
        self._window = sampling.repetition_window
        self._used = sampling.repetition_penalty != 1
        self._last: deque[int] = deque(maxlen=self._window)
        self._all: dict[int, None] = {}

    def add(self, *tokens: int) -> None:
        if self._used and self._window is None:
            self._all.update(dict.fromkeys(tokens))
        elif self._used:
            self._last.extend(tokens)

    def last(self) -> list[int]:
        return list(self._all if self._window is None else self._last)


def _start(
    decoder: Decoder,
    row: int,
    number: int,
    request: Request,
    *,
    sampling: Sampling,
    go_on: bool,
    on_read: Callable[[int], object] | None,
) -> _Text:
    """Let a row read a prompt."""
    if len(request.prompt) == 0 and not go_on:
        raise TokenizerError(EMPTY_PROMPT)
    if not go_on:
        decoder.reset(torch.arange(decoder.batch_size) == row)
    history = _History(sampling)
    history.add(*request.history)
    begin = time.perf_counter()
    for first in range(0, len(request.prompt), _PIECE):
        piece = np.asarray(request.prompt[first : first + _PIECE]).tolist()
        decoder.read([piece if other == row else [] for other in range(decoder.batch_size)])
        history.add(*piece)
        if on_read:
            on_read(len(piece))
    generator = request.generator or torch.Generator().manual_seed(request.seed)
    now = time.perf_counter()
    return _Text(number, request, history, generator, reading=now - begin, begin=now)


_Reported = tuple[float | None, tuple[tuple[int, float], ...]]


def _report(scores: Scores, tokens: list[int], likeliest: int | None, *, rows: list[int]) -> list[_Reported]:
    """Return what is reported of the tokens of some rows; of the others, no rare cluster is computed."""
    if likeliest is None:
        return [(None, ())] * len(tokens)
    values = scores.log_probability(torch.tensor(tokens), rows=rows).tolist()
    if likeliest == 0:
        return [(value, ()) for value in values]
    best, ids = (x.tolist() for x in scores.top(min(likeliest, scores.vocab_size), rows=rows))
    return [(value, tuple(zip(ids[i], best[i], strict=True))) for i, value in enumerate(values)]

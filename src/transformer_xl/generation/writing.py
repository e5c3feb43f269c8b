"""Write texts with the rows of a `Decoder`: each free row takes the next request, and all rows that write step together.

A long prompt does not stop the others: between two steps, each row that still reads takes one piece of its prompt.

A text depends only on its prompt, its seed and its sampling: every row draws from its own generator, and what the other rows
read and write makes no difference. (In exact arithmetic; another number of rows may round differently.)
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch

from transformer_xl.errors import TokenizerError
from transformer_xl.generation.decoder import Decoder
from transformer_xl.generation.requests import EMPTY_PROMPT, Chosen, Finished, FinishReason, Request
from transformer_xl.generation.sampling import Sampling
from transformer_xl.generation.scores import Scores


class Draft:
    """A text in one row of a decoder: its prompt is read piece by piece, then tokens are chosen one by one.

    The caller uses `read_piece` while the draft `is_reading`, then `choose`, `add` and `Decoder.step` in turns, and `finished`
    at the end; see `write`, also for the arguments. `number` is that of the request, in order.
    """

    def __init__(
        self, decoder: Decoder, row: int, number: int, request: Request, *, sampling: Sampling, go_on: bool = False
    ) -> None:
        if len(request.prompt) == 0 and not go_on:
            raise TokenizerError(EMPTY_PROMPT)
        self.row, self.number, self.request = row, number, request
        self.n_read = self.n_written = 0
        self._decoder, self._sampling = decoder, request.sampling or sampling
        self._sampling.check(decoder.model.config.vocab_size or 0)
        if not go_on:
            decoder.reset(torch.arange(decoder.batch_size) == row)
        self._history = _History(self._sampling)
        self._history.add(*request.history)
        self._generator = request.generator or torch.Generator().manual_seed(request.seed)
        self._begin = self._read = time.perf_counter()

    @property
    def is_reading(self) -> bool:
        """Whether a part of the prompt is still to be read."""
        return self.n_read < len(self.request.prompt)

    def read_piece(self) -> int:
        """Read the next `tgt_len` tokens of the prompt, and return how many there were.

        Pieces are counted from the beginning of the prompt, so their bits do not depend on what happens in between.
        """
        first = self.n_read
        piece = np.asarray(self.request.prompt[first : first + self._decoder.tgt_len]).tolist()
        if len(self.request.prompt) == 1:  # single tokens are always stepped
            self._decoder.read([piece if row == self.row else [] for row in range(self._decoder.batch_size)])
        else:
            self._decoder.advance(self.row, piece)
        self._history.add(*piece)
        self.n_read += len(piece)
        self._read = time.perf_counter()
        return len(piece)

    def choose(self, scores: Scores) -> int:
        """Draw the next token."""
        return self._sampling.choose(scores, self.row, self._history.last(), self._generator)

    def add(self, token: int) -> FinishReason | None:
        """Append a token that was chosen, and return why it was the last, or None."""
        self.n_written += 1
        self._history.add(token)
        reason = self.request.ends(token) if self.request.ends else None
        whole = self.n_written >= self.request.max_new_tokens
        return "length" if whole and reason in (None, "interrupted") else reason

    def finished(self, reason: FinishReason, stop_token: int | None = None) -> Finished:
        """Return the end of the text."""
        reading, writing = self._read - self._begin, time.perf_counter() - self._read
        return Finished(self.number, reason, self.n_read, self.n_written, reading, writing, stop_token)


def write(
    decoder: Decoder,
    requests: Iterable[Request],
    *,
    sampling: Sampling,
    likeliest: int | None = None,
    go_on: bool = False,
    on_read: Callable[[int, int], object] | None = None,
    interrupted: Callable[[], bool] = lambda: False,
) -> Iterator[Chosen | Finished]:
    """Write texts, as many at a time as the decoder has rows; the others queue.

    The memory that this takes does not grow with the length of a text.

    Args:
        decoder: each of its rows that takes a request forgets what it has read, unless `go_on`.
        requests: taken as rows become free.
        sampling: how tokens are drawn if a request does not say.
        likeliest: how many of the likeliest tokens to report with each token, and its log-probability; None: neither.
        go_on: rows remember what they read before, and also read the last token of their text (unless the text ended in a
            stop), so that the next text goes on from there.
        on_read: called with the number of a request, in order, and how many tokens of its prompt were just read; the decoder
            is in order then, whatever it raises.
        interrupted: whether to end all texts; asked after each piece of a prompt and after each token.

    Yields:
        Tokens as they are chosen, and the end of each text.

    Raises:
        ConfigError: a sampling that does not fit the vocabulary, or no token that can be drawn.
        TokenizerError: an empty prompt, or an id outside the vocabulary.
    """
    sampling.check(decoder.model.config.vocab_size or 0)
    queue = enumerate(requests)
    drafts: list[Draft | None] = [None] * decoder.batch_size
    scores: Scores | None = None  # of the last step; a row that has just read its prompt needs new ones
    while True:
        began = False
        for row, draft in enumerate(drafts):
            if draft is None:
                if (following := next(queue, None)) is None:
                    continue
                draft = drafts[row] = Draft(decoder, row, *following, sampling=sampling, go_on=go_on)
                began = True
            elif not draft.is_reading:
                continue
            if draft.is_reading:
                n = draft.read_piece()
                if on_read:
                    on_read(draft.number, n)
                if interrupted():
                    begun = sorted((each for each in drafts if each), key=lambda each: each.number)
                    yield from [each.finished("interrupted") for each in begun]
                    return
            if not draft.is_reading:
                scores = None
                if draft.request.max_new_tokens == 0:
                    yield draft.finished("length")
                    drafts[row] = None
        if not any(drafts) and not began:
            return
        ready = [draft for draft in drafts if draft is not None and not draft.is_reading]
        if not ready:
            continue
        scores = scores or decoder.scores
        tokens, active = [0] * decoder.batch_size, [False] * decoder.batch_size
        for draft, chosen in zip(ready, _choose(ready, scores, likeliest), strict=True):
            if chosen.token in draft.request.stop_tokens:
                yield draft.finished("stop", stop_token=chosen.token)
                drafts[draft.row] = None
                continue
            reason = draft.add(chosen.token)
            if reason is None and interrupted():
                reason = "interrupted"
            yield chosen
            tokens[draft.row], active[draft.row] = chosen.token, reason is None or (go_on and reason != "stop")
            if reason is not None:
                yield draft.finished(reason)
                drafts[draft.row] = None
        if any(active):
            scores = decoder.step(torch.tensor(tokens), active=None if all(active) else torch.tensor(active))


def _choose(drafts: Sequence[Draft], scores: Scores, likeliest: int | None) -> list[Chosen]:
    """Draw a token for each draft; for the reports, compute no rare cluster in the rows of others."""
    tokens, rows = [draft.choose(scores) for draft in drafts], [draft.row for draft in drafts]
    values: Sequence[float | None] = [None] * len(tokens)
    best: list[tuple[tuple[int, float], ...]] = [()] * len(tokens)
    if likeliest is not None:
        values = scores.log_probability(torch.tensor(tokens), rows=rows).tolist()
    if likeliest:
        nats, ids = (x.tolist() for x in scores.top(min(likeliest, scores.vocab_size), rows=rows))
        best = [tuple(zip(*own, strict=True)) for own in zip(ids, nats, strict=True)]
    return [Chosen(draft.number, *own) for draft, own in zip(drafts, zip(tokens, values, best, strict=True), strict=True)]


class _History:
    """The tokens that a repetition penalty looks at: the last ones, or each token once, so that it does not grow."""

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

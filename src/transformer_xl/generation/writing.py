"""Write texts with the rows of a `Decoder`: each free row takes a request, and all rows that write step together.

A long prompt does not stop the others: between two steps, each row that still reads takes one piece of its prompt.

A text depends only on its prompt, its seed and its sampling: every row draws from its own generator, and what the other rows
read and write makes no difference. (In exact arithmetic; another number of rows may round differently.)
"""

import reprlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch

from transformer_xl.errors import ConfigError, TokenizerError
from transformer_xl.generation.decoder import Decoder
from transformer_xl.generation.requests import EMPTY_PROMPT, Chosen, Failed, Finished, FinishReason, Read, Request
from transformer_xl.generation.sampling import Sampling
from transformer_xl.generation.scores import Scores
from transformer_xl.generation.session_file import RowState
from transformer_xl.model.softmax import check_ids


class Scheduler:
    """Write many texts side by side, each in a row of a `Decoder`; texts may come, end and be cancelled at any time.

    The caller has the loop: `submit` requests while rows are free, and call `tick` until the scheduler is idle. The tokens of a
    text are the same, to the last bit, whatever other rows do, as long as the decoder has the same number of rows. Pieces of a
    prompt (`tgt_len` tokens of the decoder) are counted from its beginning, so a busy scheduler delays a text and does not
    change it.

    Only one thread may call a scheduler and its decoder; a server passes requests to that thread and events back. Between two
    ticks, a row has read exactly what events have said, so the caller may `take` any row, and `put` or `reset` free ones.

    Args:
        decoder: its rows write.
        sampling: how tokens are drawn if a request does not say; None: as the model believes.
        likeliest: how many of the likeliest tokens to report with each token, and its log-probability; None: neither.

    Raises:
        ConfigError: a sampling that does not fit the vocabulary.

    Example:
        >>> from transformer_xl import Decoder, TransformerXL, TransformerXLConfig
        >>> from transformer_xl.generation.requests import Request
        >>> model = TransformerXL(TransformerXLConfig(vocab_size=4, n_layer=1, d_model=8, n_head=1, d_head=8, d_inner=8))
        >>> scheduler = Scheduler(Decoder(model, batch_size=2))
        >>> numbers = [scheduler.submit(Request(prompt=[i, 1], seed=i, max_new_tokens=2)) for i in scheduler.free_rows]
        >>> while not scheduler.idle:
        ...     print([(type(event).__name__, event.text) for event in scheduler.tick()])
        [('Read', 0), ('Read', 1), ('Chosen', 0), ('Chosen', 1)]
        [('Chosen', 0), ('Finished', 0), ('Chosen', 1), ('Finished', 1)]
    """

    def __init__(self, decoder: Decoder, *, sampling: Sampling | None = None, likeliest: int | None = None) -> None:
        self._decoder, self._sampling, self._likeliest = decoder, sampling or Sampling(), likeliest
        self._sampling.check(decoder.model.config.vocab_size or 0)
        if likeliest is not None and likeliest < 0:
            raise ConfigError(f"likeliest ({likeliest}) must be at least 0; None reports nothing")
        self._drafts: list[_Draft | None] = [None] * decoder.batch_size
        self._n_submitted = 0
        self._asks_request = False  # whether a request's `ends` is being called, which must not call back
        self._scores: Scores | None = None  # of the last step; a row that has just read its prompt needs new ones

    @property
    def idle(self) -> bool:
        """Whether no text is being read or written."""
        return not any(self._drafts)

    @property
    def free_rows(self) -> list[int]:
        """Rows without a text."""
        return [row for row, draft in enumerate(self._drafts) if draft is None]

    def submit(
        self,
        request: Request,
        *,
        row: int | None = None,
        state: RowState | None = None,
        go_on: bool = False,
        remember: bool = False,
    ) -> int:
        """Begin a text in a free row; `tick` reads and writes it.

        The row forgets what it has read, unless `state` or `go_on` is given; then the prompt may be empty.

        Args:
            request: what to write.
            row: a free row; None: the first one.
            state: what the text goes on from, as `Decoder.take` returned it.
            go_on: the text goes on from what `row` remembers.
            remember: the row also reads the last token of the text (unless the text ended in a stop), so that `Decoder.take`
                then returns all of it. Otherwise nobody needs the step that reads it.

        Returns:
            The number of the text, from 0 on, by which events name it.

        Raises:
            ConfigError: a sampling that does not fit the vocabulary.
            TokenizerError: an id outside the vocabulary, or an empty prompt where nothing was read before.
            ValueError: no such free row, a prompt that is not token ids, or a state of another model or decoder. After any of
                these errors, no text has begun and the other rows are as they were.
        """
        self._refuse_calls_back()
        free = self.free_rows
        if row is not None and not 0 <= row < len(self._drafts):
            raise ValueError(f"row ({row}) must be at least 0 and at most {len(self._drafts) - 1}")
        if not free or (row is not None and row not in free):
            which = "no row is free" if row is None else f"row ({row}) is not free (free: {free})"
            raise ValueError(f"{which}; tick until a text ends")
        if state is not None and go_on:
            raise ValueError("a text goes on from a state or from what its row remembers (go_on), not from both; leave one out")
        if go_on and row is None:
            raise ValueError("go_on needs a row: the first free one may remember somebody else's text")
        row = free[0] if row is None else row
        draft = _Draft(self._decoder, row, self._n_submitted, request, sampling=self._sampling, remember=remember)
        if not (draft.is_reading or state is not None or go_on):
            raise TokenizerError(EMPTY_PROMPT)
        if state is not None:
            self._decoder.put(row, state)
        elif not go_on:
            self._forget(row)
        if not draft.is_reading:
            self._scores = self._decoder.scores
            if self._scores.row(row).cluster(0).isnan().any():
                raise TokenizerError(EMPTY_PROMPT)
        self._drafts[row] = draft
        self._n_submitted += 1
        return draft.number

    def cancel(self, number: int) -> Finished | None:
        """End a text ("interrupted"); its row is free, and remembers what was read and shown.

        Args:
            number: of the text, as `submit` returned it.

        Returns:
            The end of the text; None if it has ended before, or there is none of this number.
        """
        self._refuse_calls_back()
        draft = next((draft for draft in self._drafts if draft and draft.number == number), None)
        return draft and self._end(draft, "interrupted")

    def tick(self) -> list[Read | Chosen | Finished | Failed]:
        """Read one piece of each prompt that is not read yet, then write one token of each of the other texts.

        A text that fails (because no token can be drawn, or its `ends` raises) ends with `Failed`, and the others go on. Its
        row is free then. If it failed while its prompt was read, the row is empty; else it remembers what was read and shown.
        If the step itself fails, all texts that took part in it end so, and their rows are empty.

        Returns:
            What happened, in order.
        """
        self._refuse_calls_back()
        pieces = [self._read(row) for row in range(len(self._drafts))]
        return [*(event for event in pieces if event), *self._step(lambda: False)]

    def _read(self, row: int) -> Read | Failed | None:
        """Read one piece of a row's prompt, if there is one."""
        draft = self._drafts[row]
        if draft is None or not draft.is_reading:
            return None
        try:
            n = draft.read_piece()
        except Exception as error:
            self._forget(row)  # it may have read a part of the piece
            return self._fail(draft, error)
        if not draft.is_reading:
            self._scores = None
        return Read(draft.number, n)

    def _step(self, interrupted: Callable[[], bool]) -> Iterator[Chosen | Finished | Failed]:
        """Choose a token for each text whose prompt is read, show it, and then read all of them in one step.

        `interrupted` is asked after each token; the text ends then.
        """
        ready = [draft for draft in self._drafts if draft is not None and not draft.is_reading]
        for draft in ready:
            if draft.request.max_new_tokens == 0:
                yield self._end(draft, "length")
        ready = [draft for draft in ready if draft.request.max_new_tokens > 0]
        if not ready:
            return
        try:
            self._scores = self._scores or self._decoder.scores
        except Exception as error:
            yield from self._fail_rows([draft.row for draft in ready], error)
            return
        chosen: list[tuple[_Draft, int]] = []
        for draft in ready:
            try:
                chosen.append((draft, draft.choose(self._scores)))
            except Exception as error:
                yield self._fail(draft, error)
        try:
            reports = self._reports(self._scores, chosen)
        except Exception as error:
            yield from self._fail_rows([draft.row for draft, _ in chosen], error)
            return
        tokens, active = [0] * len(self._drafts), [False] * len(self._drafts)
        for (draft, token), report in zip(chosen, reports, strict=True):
            if token in draft.request.stop_tokens:
                yield self._end(draft, "stop", stop_token=token)
                continue
            try:
                self._asks_request = True
                reason = draft.add(token)
            except Exception as error:
                yield self._fail(draft, error)
                continue
            finally:
                self._asks_request = False
            if reason is None and interrupted():
                reason = "interrupted"
            yield report
            tokens[draft.row], active[draft.row] = token, reason is None or (draft.remember and reason != "stop")
            if reason is not None:
                yield self._end(draft, reason)
        if any(active):
            try:
                self._scores = self._decoder.step(torch.tensor(tokens), active=None if all(active) else torch.tensor(active))
            except Exception as error:
                yield from self._fail_rows([row for row, is_active in enumerate(active) if is_active], error)

    def _reports(self, scores: Scores, chosen: Sequence[tuple["_Draft", int]]) -> list[Chosen]:
        """Return the events of tokens; log-probabilities compute no rare cluster in the rows of others."""
        rows, tokens = [draft.row for draft, _ in chosen], [token for _, token in chosen]
        values: Sequence[float | None] = [None] * len(rows)
        best: list[tuple[tuple[int, float], ...]] = [()] * len(rows)
        if self._likeliest is not None and rows:
            values = scores.log_probability(torch.tensor(tokens), rows=rows).tolist()
        if self._likeliest and rows:
            nats, ids = (x.tolist() for x in scores.top(min(self._likeliest, scores.vocab_size), rows=rows))
            best = [tuple(zip(*own, strict=True)) for own in zip(ids, nats, strict=True)]
        reported = zip(chosen, values, best, strict=True)
        return [Chosen(draft.number, token, value, leading) for (draft, token), value, leading in reported]

    def _end(self, draft: "_Draft", reason: FinishReason, stop_token: int | None = None) -> Finished:
        self._drafts[draft.row] = None
        return draft.finished(reason, stop_token)

    def _fail_rows(self, rows: Sequence[int], error: Exception) -> Iterator[Failed]:
        """End all texts of some rows, which forget, because nobody knows what they have read."""
        self._scores = None
        for row in rows:
            self._forget(row)
            if (draft := self._drafts[row]) is not None:
                yield self._fail(draft, error)

    def _refuse_calls_back(self) -> None:
        if self._asks_request:
            raise RuntimeError("a request's `ends` must not call the scheduler that asks it; do so after the tick")

    def _fail(self, draft: "_Draft", error: Exception) -> Failed:
        self._drafts[draft.row] = None
        return Failed(draft.number, error, draft.n_read, draft.n_written)

    def _forget(self, row: int) -> None:
        self._decoder.reset(torch.arange(self._decoder.batch_size) == row)


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
    """Write texts, as many at a time as the decoder has rows; the others queue. A `Scheduler` does the work.

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
        ValueError: a prompt that is not token ids.
    """
    scheduler = Scheduler(decoder, sampling=sampling, likeliest=likeliest)
    queue = iter(requests)
    while True:
        for row in range(decoder.batch_size):  # a text begins only when the row before has read, so few are interrupted
            if scheduler._drafts[row] is None and (request := next(queue, None)) is not None:
                scheduler.submit(request, row=row, go_on=go_on, remember=go_on)
            event = scheduler._read(row)
            if isinstance(event, Failed):
                raise event.error
            if event and on_read:
                on_read(event.text, event.n)
            if event and interrupted():
                begun = sorted(draft.number for draft in scheduler._drafts if draft)
                yield from [end for number in begun if (end := scheduler.cancel(number))]
                return
        if scheduler.idle:
            return
        for event in scheduler._step(interrupted):
            if isinstance(event, Failed):
                raise event.error
            yield event


class _Draft:
    """A text in one row of a decoder: its prompt is read piece by piece, then tokens are chosen one by one."""

    def __init__(
        self, decoder: Decoder, row: int, number: int, request: Request, *, sampling: Sampling, remember: bool
    ) -> None:
        self.row, self.number, self.request, self.remember = row, number, request, remember
        self.n_read = self.n_written = 0
        self._prompt = np.asarray(request.prompt)
        if self._prompt.ndim != 1 or (len(self._prompt) and self._prompt.dtype.kind not in "iu"):
            raise ValueError(
                f"prompt, {reprlib.repr(request.prompt)}, must be the token ids of one text; tokenizer.encode(text) makes them"
            )
        vocab_size = decoder.model.config.vocab_size or 0
        check_ids(self._prompt, vocab_size=vocab_size)
        self._decoder, self._sampling = decoder, request.sampling or sampling
        self._sampling.check(vocab_size)
        self._history = _History(self._sampling)
        self._history.add(*request.history)
        self._generator = request.generator or torch.Generator().manual_seed(request.seed)
        self._begin = self._read = time.perf_counter()

    @property
    def is_reading(self) -> bool:
        """Whether a part of the prompt is still to be read."""
        return self.n_read < len(self._prompt)

    def read_piece(self) -> int:
        """Read the next `tgt_len` tokens of the prompt, and return how many there were.

        Pieces are counted from the beginning of the prompt, so their bits do not depend on what happens in between.
        """
        first = self.n_read
        if first == 0:
            self._begin = time.perf_counter()
        piece = self._prompt[first : first + self._decoder.tgt_len].tolist()
        if len(self._prompt) == 1:  # single tokens are always stepped
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
        reason = self.request.ends(token) if self.request.ends else None
        self.n_written += 1
        self._history.add(token)
        whole = self.n_written >= self.request.max_new_tokens
        return "length" if whole and reason in (None, "interrupted") else reason

    def finished(self, reason: FinishReason, stop_token: int | None = None) -> Finished:
        """Return the end of the text."""
        reading, writing = self._read - self._begin, time.perf_counter() - self._read
        return Finished(self.number, reason, self.n_read, self.n_written, reading, writing, stop_token)


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

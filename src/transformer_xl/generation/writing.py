"""Write texts with the rows of a `Decoder`: each free row takes a request, and all rows that write step together.

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
from transformer_xl.generation.choice import choose, choose_together
from transformer_xl.generation.decoder import Decoder
from transformer_xl.generation.drawing import require_drawable
from transformer_xl.generation.inputs import text_ids
from transformer_xl.generation.requests import (
    EMPTY_PROMPT,
    Chosen,
    Event,
    Failed,
    Finished,
    FinishReason,
    Read,
    Request,
    seeded_generator,
)
from transformer_xl.generation.sampling import Sampling
from transformer_xl.generation.scores import Scores
from transformer_xl.generation.session_file import RowState


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
        >>> from transformer_xl import Decoder, Request, TransformerXL, TransformerXLConfig
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
        self._drafts: list[_Draft | None] = [None] * decoder.batch_size
        self._n_submitted = 0
        self._n_piece = 0  # that ticks with a limit have read
        self._scores: Scores | None = None  # of the last step; a row that has just read its prompt needs new ones
        self._ticking = False

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

        The row forgets what it has read, unless `state` or `go_on` is given. The prompt may be empty only with one of them.

        Args:
            request: what to write.
            row: a free row; None: the first one, which `go_on` does not allow.
            state: what the text continues, as `Decoder.take` returned it.
            go_on: the text continues what the row remembers.
            remember: the row also reads the last token of the text (unless the text ended in a stop), so that `Decoder.take`
                then returns all of it. Otherwise nobody needs the step that reads it.

        Returns:
            The number of the text, from 0 on, by which events name it.

        Raises:
            ConfigError: a sampling that does not fit the vocabulary.
            TokenizerError: an id outside the vocabulary, or an empty prompt where nothing was read before.
            ValueError: no such free row, none with `go_on`, a prompt that is not token ids, or a state of another model or
                decoder. After any of these errors, no text has begun and the other rows are as they were.
            RuntimeError: called from inside a tick.
        """
        self._refuse_inside_a_tick("submit")
        if go_on and (row is None or state is not None):
            raise ValueError("go_on continues what the row remembers, and no state; give row, and leave state out")
        free = self.free_rows
        row = free[0] if row is None and free else row
        if row is None or row not in free:
            raise ValueError(f"row ({row}) is not free (free: {free}); take one of these, or tick until a text ends")
        draft = _Draft(self._decoder, row, self._n_submitted, request, sampling=self._sampling, remember=remember)
        if not (draft.is_reading or state is not None or go_on):
            raise TokenizerError(EMPTY_PROMPT)
        if state is not None:
            self._decoder.put(row, state)
        elif not go_on:
            self._forget(row)
        if not draft.is_reading:
            self._scores = self._decoder.scores
            if np.isnan(self._scores.row(row).cluster(0)).any():
                raise TokenizerError(EMPTY_PROMPT)
        self._drafts[row] = draft
        self._n_submitted += 1
        return draft.number

    def cancel(self, number: int) -> Finished | None:
        """End a text ("interrupted"); its row is free, and remembers what was read and shown.

        Its end is returned here; it is not among the events of `tick`.

        Args:
            number: of the text, as `submit` returned it.

        Returns:
            The end of the text; None if it has ended before, or there is none of this number.

        Raises:
            RuntimeError: called from inside a tick.
        """
        self._refuse_inside_a_tick("cancel")
        draft = next((draft for draft in self._drafts if draft and draft.number == number), None)
        return draft and self._end(draft, "interrupted")

    def _interrupt(self) -> list[Finished]:
        drafts = sorted((draft for draft in self._drafts if draft), key=lambda draft: draft.number)
        return [self._end(draft, "interrupted") for draft in drafts]

    def tick(self, *, pieces: int | None = None) -> list[Event]:
        """Read one piece of each prompt that is not read yet, then write one token of each of the other texts.

        A text that fails (because no token can be drawn, or its `ends` raises) ends with `Failed`, and the others go on. Its
        row is free then, and remembers what was read and shown. If it failed while its prompt was read, the row is empty.

        If scores or the step fail, which all texts that write share, these texts end with `Failed`, and their rows are empty;
        texts whose prompts are still read go on. An exception that is no `Exception`, such as KeyboardInterrupt, ends the same
        texts and is raised.

        Args:
            pieces: the most pieces to read, so that texts that write wait no longer however many prompts there are. Prompts of
                which least is left come first, but one piece in four goes to the others in turn, so that all are read. None:
                one of each prompt.

        Returns:
            What happened, in order.

        Raises:
            RuntimeError: called from inside a tick.
        """
        self._refuse_inside_a_tick("tick")
        self._ticking = True
        try:
            return list(self._round(pieces=pieces))
        finally:
            self._ticking = False

    def _refuse_inside_a_tick(self, method: str) -> None:
        if self._ticking:
            raise RuntimeError(f"{method} was called from inside a tick (by a request's ends); call it after the tick")

    def _round(
        self,
        begin: Callable[[int], object] = lambda row: None,
        interrupted: Callable[[], bool] = lambda: False,
        *,
        pieces: int | None = None,
    ) -> Iterator[Event]:
        """Read and write as `tick` does, one event after another; there is none only if there is no text.

        Args:
            begin: called with each free row when it is its turn to read; may submit a text.
            interrupted: asked after each token; the text ends then.
            pieces: see `tick`.
        """
        for row in range(len(self._drafts)) if pieces is None else self._next_rows(pieces):
            if self._drafts[row] is None:
                begin(row)
            yield from self._read(row)
        ready = [draft for draft in self._drafts if draft is not None and not draft.is_reading]
        try:
            yield from self._step(ready, interrupted)
        except GeneratorExit:  # nothing failed; nobody wants more events
            raise
        except BaseException as error:
            yield from self._abandon([draft for draft in ready if self._drafts[draft.row] is draft], error)

    def _next_rows(self, n: int) -> list[int]:
        """Return the rows whose prompts are read next, at most `n` of them."""
        reading = [draft for draft in self._drafts if draft and draft.is_reading]
        chosen: list[int] = []
        while reading and len(chosen) < n:
            in_turn = self._n_piece % _ONE_IN == 0
            draft = min(reading, key=lambda draft: (draft.last_read, draft.row) if in_turn else (draft.n_left, draft.number))
            draft.last_read = self._n_piece = self._n_piece + 1
            reading.remove(draft)
            chosen.append(draft.row)
        return chosen

    def _read(self, row: int) -> list[Read | Failed]:
        """Read one piece of a row's prompt, if there is one."""
        draft = self._drafts[row]
        if draft is None or not draft.is_reading:
            return []
        try:
            piece, scores = draft.read_piece()
            scored = self._scored(draft, piece, scores) if scores else ()
        except BaseException as error:
            return [*self._abandon([draft], error)]
        if not draft.is_reading:
            self._scores = None
        return [Read(draft.number, len(piece), scored)]

    def _scored(self, draft: "_Draft", piece: list[int], scores: Scores) -> tuple[Chosen, ...]:
        """Return the tokens of a piece with what the model expected; nothing is known of what comes first of all."""
        first = int(np.isnan(scores.row(0).cluster(0)).any())
        unknown = [Chosen(draft.number, token, None, ()) for token in piece[:first]]
        if len(piece) == first:
            return tuple(unknown)
        rows, tokens, n = range(first, len(piece)), piece[first:], self._n_likeliest(draft)
        return (*unknown, *_reported([draft.number] * len(rows), tokens, [n or 0] * len(rows), scores, rows))

    def _step(self, ready: Sequence["_Draft"], interrupted: Callable[[], bool]) -> Iterator[Chosen | Finished | Failed]:
        """Choose a token for each text whose prompt is read, show it, and then read all of them in one step."""
        for draft in ready:
            if draft.request.max_new_tokens == 0:
                yield self._end(draft, "length")
        ready = [draft for draft in ready if draft.request.max_new_tokens > 0]
        if not ready:
            return
        self._scores = self._scores or self._decoder.scores
        chosen: list[tuple[_Draft, int]] = []
        drawn = _drawn_together(self._scores, ready)
        for draft in ready:
            try:
                chosen.append((draft, draft.choose(self._scores, drawn.get(draft.row))))
            except Exception as error:
                yield self._fail(draft, error)
        tokens, active = [0] * len(self._drafts), [False] * len(self._drafts)
        last: list[tuple[_Draft, FinishReason]] = []  # these end when their rows have read the last token
        for (draft, token), report in zip(chosen, self._reports(self._scores, chosen), strict=True):
            if token in draft.request.stop_tokens:
                yield self._end(draft, "stop", stop_token=token)
                continue
            try:
                reason = draft.add(token)
            except Exception as error:
                yield self._fail(draft, error)
                continue
            if reason is None and interrupted():
                reason = "interrupted"
            yield report
            tokens[draft.row], active[draft.row] = token, reason is None or (draft.remember and reason != "stop")
            if reason is not None and active[draft.row]:
                last.append((draft, reason))
            elif reason is not None:
                yield self._end(draft, reason)
        if any(active):
            self._scores = self._decoder.step(torch.tensor(tokens), active=None if all(active) else torch.tensor(active))
        for draft, reason in last:
            yield self._end(draft, reason)

    def _reports(self, scores: Scores, chosen: Sequence[tuple["_Draft", int]]) -> list[Chosen]:
        """Return the events of tokens; log-probabilities compute no rare cluster in the rows of others."""
        rows, tokens = [draft.row for draft, _ in chosen], [token for _, token in chosen]
        numbers, likeliest = [draft.number for draft, _ in chosen], [self._n_likeliest(draft) for draft, _ in chosen]
        return _reported(numbers, tokens, likeliest, scores, rows)

    def _n_likeliest(self, draft: "_Draft") -> int | None:
        own = draft.request.likeliest
        return self._likeliest if own is None else own

    def _end(self, draft: "_Draft", reason: FinishReason, stop_token: int | None = None) -> Finished:
        self._drafts[draft.row] = None
        return draft.finished(reason, stop_token)

    def _fail(self, draft: "_Draft", error: Exception) -> Failed:
        self._drafts[draft.row] = None
        return Failed(draft.number, error, draft.n_read, draft.n_written)

    def _abandon(self, drafts: Sequence["_Draft"], error: BaseException) -> list[Failed]:
        """End texts after a failure and empty their rows, which may have read anything; re-raise what is not an `Exception`."""
        self._scores = None
        for draft in drafts:
            self._drafts[draft.row] = None
        self._forget(*(draft.row for draft in drafts))
        if not isinstance(error, Exception):
            raise error
        return [self._fail(draft, error) for draft in drafts]

    def _forget(self, *rows: int) -> None:
        self._decoder.reset(torch.tensor([row in rows for row in range(self._decoder.batch_size)]))


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
            stop), so that the next text continues there.
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
    scheduler, queue = Scheduler(decoder, sampling=sampling, likeliest=likeliest), iter(requests)

    def begin(row: int) -> None:  # only when the row before has read, so few texts are interrupted
        if (request := next(queue, None)) is not None:
            scheduler.submit(request, row=row, go_on=go_on, remember=go_on)

    has_texts = True
    while has_texts:
        has_texts = False
        for event in scheduler._round(begin, interrupted):
            has_texts = True
            if isinstance(event, Failed):
                raise event.error
            if not isinstance(event, Read):
                yield event
                continue
            if on_read:
                on_read(event.text, event.n)
            if interrupted():
                yield from scheduler._interrupt()
                return


_ONE_IN = 4
"""Of so many pieces, one goes to the prompt that has waited longest, however much of it is left."""


def _reported(
    numbers: Sequence[int], tokens: Sequence[int], likeliest: Sequence[int | None], scores: Scores, rows: Sequence[int]
) -> list[Chosen]:
    """Return the events of tokens in rows of scores; each has as many of the likeliest as it asks for (None: no scores)."""
    asking = [i for i, n in enumerate(likeliest) if n is not None]
    values: dict[int, float] = {}
    best: dict[int, tuple[tuple[int, float], ...]] = {}
    if asking:
        nats = scores.log_probability(torch.tensor([tokens[i] for i in asking]), rows=[rows[i] for i in asking])
        values = dict(zip(asking, nats.tolist(), strict=True))
    if asking := [i for i in asking if likeliest[i]]:
        most = min(max(likeliest[i] or 0 for i in asking), scores.vocab_size)
        top = (x.tolist() for x in scores.top(most, rows=[rows[i] for i in asking]))
        for i, nats, ids in zip(asking, *top, strict=True):
            best[i] = tuple(zip(ids, nats, strict=True))[: likeliest[i]]
    return [Chosen(numbers[i], token, values.get(i), best.get(i, ())) for i, token in enumerate(tokens)]


def _drawn_together(scores: Scores, drafts: Sequence["_Draft"]) -> dict[int, int]:
    """Draw for all texts with the same settings at once where a GPU does that; return the tokens by row."""
    if scores.on_device is None:
        return {}
    alike: dict[int, list[_Draft]] = {}
    for draft in drafts:
        alike.setdefault(id(draft.sampling), []).append(draft)
    drawn: dict[int, int] = {}
    for group in alike.values():
        rows = [draft.row for draft in group]
        try:
            tokens = choose_together(scores, rows, group[0].sampling, [draft.generator for draft in group])
        except Exception:  # each draws alone then, so that only the one whose fault it is fails
            continue
        drawn.update(zip(rows, tokens or (), strict=False))
    return drawn


class _Draft:
    """A text in one row of a decoder: its prompt is read piece by piece, then tokens are chosen one by one."""

    def __init__(
        self, decoder: Decoder, row: int, number: int, request: Request, *, sampling: Sampling, remember: bool
    ) -> None:
        self.row, self.number, self.request, self.remember = row, number, request, remember
        self.n_read = self.n_written = 0
        self.last_read = 0  # when it was its turn, in pieces of all prompts
        vocab_size = decoder.model.config.vocab_size or 0
        self._prompt = text_ids(request.prompt, vocab_size).numpy(force=True).copy()  # the caller may change theirs
        self._decoder, self.sampling = decoder, request.sampling or sampling
        self.sampling.check(vocab_size)
        self._history = _History(self.sampling)
        self._history.add(*request.history)
        self.generator = request.generator or seeded_generator(request.seed)
        self._begin = self._read = time.perf_counter()

    @property
    def is_reading(self) -> bool:
        return self.n_read < len(self._prompt)

    @property
    def n_left(self) -> int:
        return len(self._prompt) - self.n_read

    def read_piece(self) -> tuple[list[int], Scores | None]:
        """Read the next `tgt_len` tokens of the prompt, and return them, and their scores if the request wants these.

        Pieces are counted from the beginning of the prompt, so their bits do not depend on what happens in between.
        """
        first = self.n_read
        if first == 0:
            self._begin = time.perf_counter()
        piece = self._prompt[first : first + self._decoder.tgt_len].tolist()
        scores = None
        if len(self._prompt) == 1:  # single tokens are always stepped
            scores = self._decoder.scores_of(self.row) if self.request.score_prompt else None
            self._decoder.read([piece if row == self.row else [] for row in range(self._decoder.batch_size)])
        elif self.request.score_prompt:
            scores = self._decoder.advance_scored(self.row, piece)
        else:
            self._decoder.advance(self.row, piece)
        self._history.add(*piece)
        self.n_read += len(piece)
        self._read = time.perf_counter()
        return piece, scores

    def choose(self, scores: Scores, drawn: int | None) -> int:
        """Draw the next token, unless it is drawn already; see `_drawn_together`."""
        if drawn is not None:
            require_drawable(drawn >= 0)
            return drawn
        return choose(scores, self.row, self.sampling, self._history.last(), self.generator)

    def add(self, token: int) -> FinishReason | None:
        """Append a token that was chosen, and return why it was the last, or None."""
        reason = self.request.ends(token) if self.request.ends else None
        self.n_written += 1
        self._history.add(token)
        whole = self.n_written >= self.request.max_new_tokens
        return "length" if whole and reason in (None, "interrupted") else reason

    def finished(self, reason: FinishReason, stop_token: int | None = None) -> Finished:
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

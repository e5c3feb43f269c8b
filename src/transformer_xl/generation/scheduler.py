"""Write texts with the rows of a `Decoder`: each free row takes a draft, and all rows that write step together.

A long prompt does not stop the others: between two steps, each row that still reads takes one piece of its prompt.

A text depends only on its prompt, its seed and its sampling: every row draws from its own generator, and what the other rows
read and write makes no difference. (In exact arithmetic; another number of rows may round differently.)
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import numpy as np
import torch

from transformer_xl.errors import TokenizerError
from transformer_xl.generation.choice import choose, choose_together
from transformer_xl.generation.decoder import Decoder
from transformer_xl.generation.draft import Chosen, Draft, Ended, Event, Read
from transformer_xl.generation.drawing import require_drawable
from transformer_xl.generation.inputs import EMPTY_PROMPT
from transformer_xl.generation.scores import Scores
from transformer_xl.generation.session_file import RowState
from transformer_xl.model.softmax import check_ids

_ONE_IN = 4
"""One of this many pieces goes to the prompt that has waited longest, however much of it is left."""


class Scheduler:
    """Write many texts side by side, each in a row of a `Decoder`; texts may come, end and be cancelled at any time.

    The caller has the loop: `submit` drafts while rows are free, and call `tick` until the scheduler is idle. The tokens of a
    text are the same, to the last bit, whatever other rows do, as long as the decoder has the same number of rows. Pieces of a
    prompt (`tgt_len` tokens of the decoder) are counted from its beginning, so a busy scheduler delays a text and does not
    change it.

    Only one thread may call a scheduler and its decoder; a server passes drafts to that thread and events back. Between two
    ticks, a row has read exactly what events have said, so the caller may `take` any row, and `put` or `reset` free ones.

    Args:
        decoder: its rows write.

    Example:
        >>> from transformer_xl import Decoder, Draft, TransformerXL, TransformerXLConfig
        >>> model = TransformerXL(TransformerXLConfig(vocab_size=4, n_layer=1, d_model=8, n_head=1, d_head=8, d_inner=8))
        >>> scheduler = Scheduler(Decoder(model, batch_size=2))
        >>> rows = [scheduler.submit(Draft([i, 1], seed=i, max_new_tokens=2)) for i in scheduler.free_rows]
        >>> while not scheduler.idle:
        ...     print([(type(event).__name__, event.draft.row) for event in scheduler.tick()])
        [('Read', 0), ('Read', 1), ('Chosen', 0), ('Chosen', 1)]
        [('Chosen', 0), ('Ended', 0), ('Chosen', 1), ('Ended', 1)]
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._drafts: list[Draft | None] = [None] * decoder.batch_size
        self._last_read = [0] * decoder.batch_size  # when it was a row's turn, in pieces of all prompts
        self._n_piece = 0  # that ticks with a limit have read
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
        self, draft: Draft, *, row: int | None = None, state: RowState | None = None, n_read: int = 0, go_on: bool = False
    ) -> int:
        """Begin a text in a free row; `tick` reads and writes it.

        The row forgets what it has read, unless `state` or `go_on` is given. The prompt may be empty only with one of them.

        Args:
            draft: what to write.
            row: a free row; None: the first one, which `go_on` does not allow.
            state: what the text continues, as `Decoder.take` returned it.
            n_read: tokens of the prompt that the state has read already, so that its pieces are counted on from there.
            go_on: the text continues what the row remembers.

        Returns:
            The row.

        Raises:
            ConfigError: a sampling or a stop token that does not fit the vocabulary.
            TokenizerError: an id outside the vocabulary, or an empty prompt where nothing was read before.
            TypeError: no draft.
            ValueError: no such free row, none with `go_on`, a draft that has begun before, a state of another model or decoder,
                or more tokens read than the prompt has. After any of these errors, no text has begun and the other rows are
                as they were.
        """
        if not isinstance(draft, Draft):
            raise TypeError(f"a text to write is a Draft, not a {type(draft).__name__}; give Draft(token_ids, seed=0)")
        if go_on and (row is None or state is not None):
            raise ValueError("go_on continues what the row remembers, and no state; give row, and leave state out")
        free = self.free_rows
        row = free[0] if row is None and free else row
        if row is None or row not in free:
            raise ValueError(f"row ({row}) is not free (free: {free}); take one of these, or tick until a text ends")
        if draft.row >= 0:
            raise ValueError("a draft is written once, and this one has begun; make another one")
        vocab_size = self._decoder.model.vocab_size
        if n_read and (state is None or not 0 < n_read < len(draft.ids)):
            raise ValueError(
                f"n_read ({n_read}) must leave some of the {len(draft.ids)} tokens of the prompt, and needs a state"
            )
        draft.sampling.check(vocab_size)
        draft.stopping.check(vocab_size)
        check_ids(torch.from_numpy(draft.ids), vocab_size=vocab_size)
        if not (draft.n_left or state is not None or go_on):
            raise TokenizerError(EMPTY_PROMPT)
        if state is not None:
            self._decoder.put(row, state)
        elif not go_on:
            self._forget(row)
        if not draft.n_left:
            self._scores = self._decoder.scores
            if np.isnan(self._scores.row(row).cluster(0)).any():
                raise TokenizerError(EMPTY_PROMPT)
        draft.begin(row, n_read=n_read)
        self._drafts[row], self._last_read[row] = draft, 0
        return row

    def cancel(self, draft: Draft) -> Ended | None:
        """End a text ("interrupted"); its row is free, and remembers what was read and shown.

        Its end is returned here; it is not among the events of `tick`.

        Args:
            draft: the text.

        Returns:
            The end of the text; None if it has ended before, or was never submitted.
        """
        if draft not in self._drafts:
            return None
        draft.interrupt()
        return self._end(draft)

    def tick(self, *, pieces: int | None = None) -> list[Event]:
        """Read one piece of each prompt that is not read yet, then write one token of each of the other texts.

        A text for which no token can be drawn ends as failed, and the others go on. Its row is free then, and remembers what
        was read and shown. If it failed while its prompt was read, the row is empty.

        If scores or the step fail, which all texts that write share, these texts end as failed, and their rows are empty; texts
        whose prompts are still read go on. An exception that is no `Exception`, such as KeyboardInterrupt, ends the same texts
        and is raised.

        Args:
            pieces: the most pieces to read, so that texts that write wait no longer however many prompts there are. Prompts of
                which least is left come first, but one piece in four goes to the others in turn, so that all are read. None:
                one of each prompt.

        Returns:
            What happened, in order.
        """
        rows = range(len(self._drafts)) if pieces is None else self._next_rows(pieces)
        return [*chain.from_iterable(map(self._read, rows)), *self._write()]

    def _next_rows(self, n: int) -> list[int]:
        """Return the rows whose prompts are read next, at most `n` of them."""
        reading = [draft for draft in self._drafts if draft and draft.n_left]
        rows: list[int] = []
        while reading and len(rows) < n:
            in_turn = self._n_piece % _ONE_IN == 0
            draft = min(reading, key=lambda draft: (self._last_read[draft.row] if in_turn else draft.n_left, draft.row))
            self._last_read[draft.row] = self._n_piece = self._n_piece + 1
            reading.remove(draft)
            rows.append(draft.row)
        return rows

    def _read(self, row: int) -> Iterator[Read | Ended]:
        """Read one piece of a row's prompt, if there is one.

        Pieces are counted from the beginning of the prompt, so their bits do not depend on what happens in between.
        """
        draft = self._drafts[row]
        if draft is None or not draft.n_left:
            return
        piece = draft.ids[draft.n_read : draft.n_read + self._decoder.tgt_len].tolist()
        try:
            if len(draft.ids) == 1:  # by a step, as all single tokens: as a segment it would have other bits
                scores = self._decoder.scores_of(row) if draft.score_prompt else None
                self._decoder.read([piece if other == row else [] for other in range(len(self._drafts))])
            else:
                scores = self._decoder.advance(row, piece, scored=draft.score_prompt)
            draft.count_read(len(piece))
            scored = _scored(draft, piece, scores) if scores else ()
        except BaseException as error:
            yield from self._abandon([draft], error)
            return
        if not draft.n_left:
            self._scores = None
        yield Read(draft, len(piece), scored)
        if draft.reason:
            yield self._end(draft)

    def _write(self) -> Iterator[Chosen | Ended]:
        """Write a token of each text whose prompt is read, and then read all of them in one step."""
        ready = [draft for draft in self._drafts if draft and not draft.n_left]
        try:
            yield from self._step(ready)
        except GeneratorExit:  # nothing failed; nobody wants more events
            raise
        except BaseException as error:
            yield from self._abandon([draft for draft in ready if self._drafts[draft.row] is draft], error)

    def _step(self, ready: Sequence[Draft]) -> Iterator[Chosen | Ended]:
        for draft in ready:
            if draft.max_new_tokens == 0 and draft.reason is None:
                draft.reason = "length"
            if draft.reason:
                yield self._end(draft)
        ready = [draft for draft in ready if draft.reason is None]
        if not ready:
            return
        self._scores = self._scores or self._decoder.scores
        chosen: list[tuple[Draft, int, str]] = []
        drawn = _drawn_together(self._scores, ready)
        for draft in ready:
            try:
                token = _choose(self._scores, draft, drawn.get(draft))
                chosen.append((draft, token, draft.add(token)))
            except Exception as error:
                yield self._fail(draft, error)
        reports = _reported(chosen, self._scores, [draft.row for draft, *_ in chosen])
        tokens, active = [0] * len(self._drafts), [False] * len(self._drafts)
        for report in reports:
            draft = report.draft
            if not isinstance(draft.stopped_by, int):  # a stop token is no part of the text
                yield report
            tokens[draft.row] = report.token
            active[draft.row] = draft.reason is None or (draft.remember and draft.reason != "stop")
            if draft.reason and not active[draft.row]:
                yield self._end(draft)
        if any(active):
            self._scores = self._decoder.step(torch.tensor(tokens), active=None if all(active) else torch.tensor(active))
        for draft in [draft for draft, *_ in chosen if draft.reason and active[draft.row]]:
            yield self._end(draft)

    def _end(self, draft: Draft) -> Ended:
        self._drafts[draft.row] = None
        return Ended(draft, draft.finish())

    def _fail(self, draft: Draft, error: Exception) -> Ended:
        draft.reason, draft.error = "failed", error
        return self._end(draft)

    def _abandon(self, drafts: Sequence[Draft], error: BaseException) -> list[Ended]:
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


def write(decoder: Decoder, drafts: Iterable[Draft], *, go_on: bool = False) -> Iterator[Event]:
    """Write texts, as many at a time as the decoder has rows; the others queue.

    The memory that this takes does not grow with the length of a text. Between two events, the caller may `interrupt` drafts.

    Args:
        decoder: each of its rows that takes a draft forgets what it has read, unless `go_on`.
        drafts: taken as rows become free.
        go_on: rows remember what they read before; with `remember` drafts, the next text continues there.

    Yields:
        Pieces of prompts that were read, when the decoder is in order; tokens as they are chosen, before they are read; the end
        of each text.

    Raises:
        ConfigError: a sampling or stop token that does not fit the vocabulary, or no token that can be drawn.
        TokenizerError: an empty prompt, or an id outside the vocabulary.
        ValueError: a draft that has begun before.
    """
    scheduler, queue = Scheduler(decoder), iter(drafts)
    has_texts = True
    while has_texts:
        has_texts = False
        for event in _round(scheduler, queue, decoder.batch_size, go_on):
            has_texts = True
            if event.draft.error is not None:
                raise event.draft.error
            yield event


def _round(scheduler: Scheduler, queue: Iterator[Draft], n_row: int, go_on: bool) -> Iterator[Event]:
    for row in range(n_row):  # a draft begins when it is its row's turn, so that few texts have begun at an interrupt
        if row in scheduler.free_rows and (draft := next(queue, None)) is not None:
            scheduler.submit(draft, row=row, go_on=go_on)
        yield from scheduler._read(row)
    yield from scheduler._write()


def _scored(draft: Draft, piece: list[int], scores: Scores) -> tuple[Chosen, ...]:
    """Return the tokens of a piece with what the model expected; nothing is known of what comes first of all."""
    first = int(np.isnan(scores.row(0).cluster(0)).any())
    unknown = [Chosen(draft, token, None, ()) for token in piece[:first]]
    known = [(draft, token, "") for token in piece[first:]]
    return (*unknown, *_reported(known, scores, range(first, len(piece)), least=0))


def _reported(
    tokens: Sequence[tuple[Draft, int, str]], scores: Scores, rows: Sequence[int], least: int | None = None
) -> list[Chosen]:
    """Return the events of tokens in rows of scores; each has as many of the likeliest as its draft asks for, else `least`.

    With None it has no log-probability either, and no rare cluster is computed in its row.
    """
    n_likeliest = [least if draft.likeliest is None else draft.likeliest for draft, *_ in tokens]
    asking = [i for i, n in enumerate(n_likeliest) if n is not None]
    values: dict[int, float] = {}
    best: dict[int, tuple[tuple[int, float], ...]] = {}
    if asking:
        nats = scores.log_probability(torch.tensor([tokens[i][1] for i in asking]), rows=[rows[i] for i in asking])
        values = dict(zip(asking, nats.tolist(), strict=True))
    if asking := [i for i in asking if n_likeliest[i]]:
        most = min(max(n_likeliest[i] or 0 for i in asking), scores.vocab_size)
        top = (x.tolist() for x in scores.top(most, rows=[rows[i] for i in asking]))
        for i, nats, ids in zip(asking, *top, strict=True):
            best[i] = tuple(zip(ids, nats, strict=True))[: n_likeliest[i]]
    return [Chosen(draft, token, values.get(i), best.get(i, ()), piece) for i, (draft, token, piece) in enumerate(tokens)]


def _drawn_together(scores: Scores, drafts: Sequence[Draft]) -> dict[Draft, int]:
    """Draw for all texts with the same settings at once where a GPU does that; return their tokens."""
    if scores.on_device is None:
        return {}
    alike: dict[int, list[Draft]] = {}
    for draft in drafts:
        alike.setdefault(id(draft.sampling), []).append(draft)
    drawn: dict[Draft, int] = {}
    for group in alike.values():
        rows, generators = [draft.row for draft in group], [draft.generator for draft in group]
        try:
            tokens = choose_together(scores, rows, group[0].sampling, generators)
        except Exception:  # each draws alone then, so that only the one whose fault it is fails
            continue
        drawn.update(zip(group, tokens or (), strict=False))
    return drawn


def _choose(scores: Scores, draft: Draft, drawn: int | None) -> int:
    """Draw the next token, unless it is drawn already; see `_drawn_together`."""
    if drawn is not None:
        require_drawable(drawn >= 0)
        return drawn
    return choose(scores, draft.row, draft.sampling, draft.history, draft.generator)

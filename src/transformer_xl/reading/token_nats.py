"""The nats of every token: of one text that comes in parts, or of many texts side by side, each from its own beginning."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from transformer_xl.errors import CorpusError, TrainingError
from transformer_xl.kernels.device import InferencePrecision, PrecisionName, precision_of_segments
from transformer_xl.model.base import LanguageModel
from transformer_xl.reading.evaluation import Reading, Score, evaluate
from transformer_xl.reading.segments import cut
from transformer_xl.reading.stream import Stream, open_stream, scoring
from transformer_xl.world import World

_BLOCK = 1 << 13  # tokens that `evaluate` gets at once
_MOST_SCORES = 1 << 25  # held at once
_DOCUMENTS = 512  # scored together, sorted by length


class Nats(NamedTuple):
    """Nats of tokens and, if one was asked for, of an event in the place of each, fp32 (n,)."""

    tokens: np.ndarray
    event: np.ndarray | None = None


def nats_in_parts(
    model: LanguageModel,
    parts: Iterable[np.ndarray],
    reading: Reading,
    *,
    precision: InferencePrecision = "fp32",
    event: np.ndarray | None = None,
) -> Iterator[Nats]:
    """Yield the nats of each part (n,) of one text, as `evaluate` gives them in one lane, in constant memory.

    How the text is divided makes no difference, to the last bit. The first token has NaN, because nothing predicts it.
    `event` (E,) is that of `evaluate`.
    """
    how = {**vars(reading), "batch_size": 1, "precision": precision, "keep_state": True, "per_token": True}
    how["event"] = event
    block = max(1, _BLOCK // reading.tgt_len) * reading.tgt_len
    sizes: deque[int] = deque()
    unread, n_unread, state = [np.empty(0, np.int64)], 0, None
    nats = np.full((1 if event is None else 2, 1), np.nan, np.float32)  # known, but not given yet
    for part in chain(parts, [None]):
        if part is not None:
            sizes.append(len(part))
            unread.append(part)
            n_unread += len(part)
        n = n_unread - 1 if part is None else (n_unread - 1) // block * block
        if n > 0:
            ids = np.concatenate(unread)
            score = evaluate(model, ids[: n + 1], state=state, **how)
            assert score.token_nats is not None
            _check(score.token_nats, precision)
            known = [score.token_nats] if score.event_nats is None else [score.token_nats, score.event_nats]
            nats, state = np.concatenate([nats, known], axis=1), score.state
            unread, n_unread = [ids[n:]], n_unread - n
        while sizes and sizes[0] <= nats.shape[1]:
            given, nats = np.split(nats, [sizes.popleft()], axis=1)
            yield Nats(*given)


def score_answers(
    model: LanguageModel,
    ids: np.ndarray,
    document_starts: np.ndarray,
    *,
    separator: int,
    reading: Reading,
    precision: PrecisionName = "fp32",
    limit: int | None = None,
    on_tokens: Callable[[int], object] | None = None,
    world: World | None = None,
) -> Score:
    """Score what follows the first separator of each document, each document from its own beginning.

    Without memory (`reading.mem_len` 0) only the separator stands before an answer, so that the difference is what the model
    makes of questions.

    Args:
        model: its mode (training or not) is restored afterwards.
        ids: integers (N,); may be memory-mapped.
        document_starts: places in `ids` at which documents start, increasing.
        separator: id that ends questions. Documents without it, or with nothing after it, are left out.
        reading: segments, memory and rows.
        precision: see `evaluate`.
        limit: read only documents that begin before this many tokens.
        on_tokens: called with the number of tokens just read here.
        world: processes that divide the documents; None: this one alone.

    Returns:
        The score; `Score.share` says how much of the text was read.

    Raises:
        CorpusError: no document has an answer.
    """
    everyone = world or World()
    world = World() if model.is_sharded else everyone
    n_read = len(ids) if limit is None else min(limit, len(ids))
    starts = document_starts[: np.searchsorted(document_starts, n_read)]
    ends = np.append(document_starts[1 : len(starts) + 1], len(ids))[: len(starts)]
    view, begin, nats, n_token = reading.view(model), time.perf_counter(), 0.0, 0
    chosen = precision_of_segments(precision, model.device)
    side_by_side = SideBySide(view, batch_size=reading.batch_size, tgt_len=reading.tgt_len, precision=chosen)
    own = list(zip(starts.tolist(), ends.tolist(), strict=True))[world.rank :: world.size]
    for at in range(0, len(own), _DOCUMENTS):
        texts, n_asked = [], []
        for start, end in own[at : at + _DOCUMENTS]:
            text = np.asarray(ids[start:end])
            answer = text[int((text == separator).argmax()) :]
            if answer[0] == separator and len(answer) > 1:
                texts.append(text if reading.mem_len else answer)
                n_asked.append(len(answer) - 1)
        scored = side_by_side.score(texts, n_asked=n_asked) if texts else []
        nats += sum(float(each.nats.astype(np.float64).sum()) for each in scored)
        n_token += sum(n_asked)
        if on_tokens:
            on_tokens(own[min(at + _DOCUMENTS, len(own)) - 1][1] - own[at][0])
    nats, n_answer = world.sum(nats, float(n_token))
    nats = everyone.from_first(nats) if model.is_sharded else nats
    if not n_answer:
        raise CorpusError("no document of the text has an answer; write each as question, tab, answer")
    n = round(n_answer)
    return Score(nats, n, n, None, time.perf_counter() - begin, share=int(ends[-1]) / len(ids))


class Scored(NamedTuple):
    """Nats fp32 (n,) of the tokens of a text that were asked for, and whether each is the likeliest, bool (n,).

    If an event was asked for, also its nats in the place of each, fp32 (n,).
    """

    nats: np.ndarray
    likeliest: np.ndarray
    event: np.ndarray | None = None


class SideBySide:
    """Scores texts in rows side by side, the longest first; what a text gets does not depend on its neighbors.

    Every token sees exactly the `mem_len` tokens before it, as in a `Decoder`. Models whose keys cannot be kept read segments.

    Args:
        model: in evaluation mode; a view of it says what its memory is.
        batch_size: rows.
        tgt_len: tokens that are read at once, or of a segment.
        precision: of the matrix products.
    """

    def __init__(self, model: LanguageModel, *, batch_size: int, tgt_len: int, precision: InferencePrecision = "fp32") -> None:
        self._model, self._batch_size, self._tgt_len = model, batch_size, tgt_len
        self._precision: InferencePrecision = precision
        self._streams: dict[int, Stream] = {}

    @torch.no_grad()
    def score(
        self,
        texts: Sequence[np.ndarray],
        *,
        n_asked: Sequence[int] | None = None,
        likeliest: bool = False,
        event: np.ndarray | None = None,
    ) -> list[Scored]:
        """Return the scores of each text.

        Args:
            texts: integers (n,), at least one each; the first is only read.
            n_asked: how many tokens at the end of each text are scored; None: all but the first.
            likeliest: also tell whether they are the likeliest ones, for which the whole vocabulary is scored.
            event: ids (E,); also tell the nats of any of them coming in the place of each token.
        """
        found: dict[int, Scored] = {}
        ids = None if event is None else torch.as_tensor(event, device=self._model.device)
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        with scoring(self._model):
            for first in range(0, len(order), self._batch_size):
                batch = order[first : first + self._batch_size]
                stream = self._stream(len(texts[batch[0]]))
                stream.reset(torch.arange(self._batch_size) < len(batch))
                asked = [len(texts[i]) - 1 if n_asked is None else n_asked[i] for i in batch]
                found |= zip(
                    batch, _read(stream, [texts[i] for i in batch], asked, likeliest=likeliest, event=ids), strict=True
                )
        for one in found.values():
            _check(one.nats, self._precision)
        return [found[i] for i in range(len(texts))]

    def _stream(self, n_token: int) -> Stream:
        """Return rows for texts of so many tokens; a memory that they cannot fill would only take room."""
        view = self._model.for_text(1 << max(n_token, 16).bit_length())
        if view.mem_len not in self._streams:
            alone = view.keeps_keys and view.mem_len > 0
            how = {"tgt_len": self._tgt_len, "precision": self._precision, "token_by_token": alone}
            self._streams[view.mem_len] = open_stream(view, self._batch_size, **how)
        return self._streams[view.mem_len]


def _check(nats: np.ndarray, precision: str) -> None:
    """Refuse nats that are no numbers, because NaN says that nothing was predicted."""
    if not np.isfinite(nats).all():
        raise TrainingError(f"nats in {precision} are not finite numbers; use --precision fp32, or train with a lower optim.lr")


def _read(
    stream: Stream, texts: Sequence[np.ndarray], asked: Sequence[int], *, likeliest: bool, event: Tensor | None
) -> list[Scored]:
    """Read texts, the longest first, in the first rows of a stream."""
    ids, device = np.concatenate(texts), stream.model.device
    n_read = torch.tensor([len(text) - 1 for text in texts])
    last = (n_read + 1).cumsum(0) - 1
    scored = last - torch.tensor(asked)
    nats, is_best = torch.zeros(1 if event is None else 2, len(ids)), torch.zeros(len(ids), dtype=torch.bool)
    for at in range(0, int(n_read[0]), stream.tgt_len):
        n_row = int((n_read > at).sum())  # the others have ended
        begin, end = (last - n_read)[:n_row] + at, last[:n_row]
        end = torch.minimum(begin + stream.tgt_len, end)
        segment = cut(ids, begin, end, scored=torch.maximum(begin, scored[:n_row]), pad_left=stream.pads_left)
        n_pad = None if segment.n_pad is None else segment.n_pad.to(device)
        h_BTD = stream.read(segment.ids.to(device), rows=slice(0, n_row), n_pad=n_pad)
        if (where := segment.is_scored).any():
            h_XD, labels_X = h_BTD[where.to(device)], segment.labels[where].to(device)
            places = segment.places[where] + 1
            if event is None:
                nats[:, places] = stream.nll(h_XD[None], labels_X[None]).float().cpu()
            else:
                nats[:, places] = stream.softmax.nll_and_event(h_XD, labels_X, event).float().cpu()
            if likeliest:
                parts = h_XD.split(max(1, _MOST_SCORES // stream.softmax.borders[-1]))
                best_X = torch.cat([stream.softmax.logits(part_XD).argmax(-1) for part_XD in parts])
                is_best[places] = (best_X == labels_X).cpu()
    spans = [slice(end + 1 - n, end + 1) for end, n in zip(last.tolist(), asked, strict=True)]
    return [Scored(nats[0, span].numpy(), is_best[span].numpy(), *nats[1:, span].numpy()) for span in spans]

"""The nats of every token of texts that come one after another: each text alone, or each going on where the last one ended.

Texts that stand alone are read side by side, in windows that are sorted by length, so that little of what is read is padding.
A text that goes on is read as `evaluate` reads one lane. Either way no more than a window or a segment is held.

Shapes: n tokens of a text, X tokens scored at once, E tokens of an event, K numbers of each token.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from transformer_xl.batch import NOT_SCORED
from transformer_xl.data.labels import Example
from transformer_xl.errors import CorpusError, TrainingError
from transformer_xl.kernels.device import InferencePrecision, precision_of_segments
from transformer_xl.model.base import LanguageModel, check_reads_on
from transformer_xl.model.softmax import check_ids
from transformer_xl.reading.evaluation import Score, divided, over_processes
from transformer_xl.reading.reading import Reading
from transformer_xl.reading.segments import Cut, cut, segments_in_parts
from transformer_xl.reading.stream import Stream, in_order, open_stream, scoring
from transformer_xl.world import World

WINDOW = 16
"""Batches whose texts are sorted by length: enough to save most of the padding, few enough that answers come soon."""

_T = TypeVar("_T")
_END = -1  # in place of the id after a text's last token
_MOST_CHARACTERS = 1 << 24  # of a window's texts, so that long ones do not fill the memory
_MOST_SCORES = 1 << 25  # held at once


class Ending(NamedTuple):
    """A text, integers (n,), whose last `n_scored` tokens are scored; those before them are only read."""

    ids: np.ndarray
    n_scored: int


class Nats(NamedTuple):
    """What is known of each token of a text that is scored, in order.

    Attributes:
        tokens: fp32 (n,), nats; NaN where nothing predicts the token.
        event: fp32 (n,), nats of the event in its place; None unless asked for.
        likeliest: bool (n,), whether no other token was likelier; None unless asked for.
    """

    tokens: np.ndarray
    event: np.ndarray | None = None
    likeliest: np.ndarray | None = None


def nats(
    model: LanguageModel,
    texts: Iterable[np.ndarray | Ending],
    reading: Reading,
    *,
    carried: bool = False,
    event: np.ndarray | None = None,
    likeliest: bool = False,
    asks_after: bool = False,
    skip: int = 0,
    is_ready: Callable[[], bool] | None = None,
) -> Iterator[Nats]:
    """Yield the nats of each text, in their order; the texts are read on demand, and may be without end.

    A text alone: its first token is only read. Every token sees exactly the `mem_len` tokens before it, as in a `Decoder`, if
    keys can be kept; other models read segments. What a text gets does not depend on its neighbors.

    Args:
        model: its mode (training or not) is restored whenever a text is handed out.
        texts: integers (n,); alone, at least one token each, or `Ending`s.
        reading: segments, memory, rows side by side and precision.
        carried: the texts are parts of one text, read as `evaluate` reads one lane. How it is divided makes no difference, to
            the last bit. Its very first token has NaN.
        event: ids (E,); also tell the nats of any of them coming in the place of each token, -log Σ p.
        likeliest: also tell whether tokens are the likeliest ones, for which the whole vocabulary is scored.
        asks_after: yield one more at the end of a text that is carried: the event after its last token, (1,). The other nats
            stay as they are, to the last bit: the last segment is read again with one token more.
        skip: texts at the beginning that may get NaN, unread, if they stand alone; the others get the same bits.
        is_ready: whether the next text is there already; texts that others still have to write are not waited for while some
            that are there have no nats. None: they all are there.

    Raises:
        TokenizerError: ids outside the model's vocabulary.
        ConfigError: an unknown precision, lengths that cannot work together, or a model that does not read on.
        TrainingError: nats that are no numbers, because NaN says that nothing was predicted.

    Example:
        >>> from transformer_xl import TransformerXL, TransformerXLConfig
        >>> model = TransformerXL(TransformerXLConfig(vocab_size=4, n_layer=1, d_model=8, n_head=1, d_head=8, d_inner=8))
        >>> [len(each.tokens) for each in nats(model, [np.array([0, 1, 2]), Ending(np.array([3, 1]), 1)], Reading(tgt_len=2))]
        [2, 1]
    """
    check_reads_on(model)
    chosen = precision_of_segments(reading.precision, model.device)
    looks = _Looks(None if event is None else torch.as_tensor(event, device=model.device), likeliest, chosen)
    endings = (_checked(text, model.vocab_size) for text in texts)
    if carried:
        return _carried(model, (text.ids for text in endings), reading, looks, asks_after)
    return _alone(model, endings, reading, looks, skip, is_ready)


def _checked(text: np.ndarray | Ending, vocab_size: int) -> Ending:
    ending = text if isinstance(text, Ending) else Ending(text, len(text) - 1)
    check_ids(ending.ids, vocab_size=vocab_size)
    return ending


@dataclass(frozen=True)
class _Looks:
    """What is looked at in the scores of each token."""

    event: Tensor | None
    likeliest: bool
    precision: InferencePrecision

    @property
    def only_nats(self) -> bool:
        return self.event is None and not self.likeliest

    def at(self, stream: Stream, h_XD: Tensor, labels_X: Tensor) -> Tensor:
        """Return numbers (K, X) on the CPU: nats of the labels that follow states, of the event, and 1 for a likeliest one."""
        if self.event is None:
            numbers = [stream.nll(h_XD[None], labels_X[None])]
        else:
            numbers = [stream.softmax.nll_and_event(h_XD, labels_X, self.event)]
        if self.likeliest:
            parts = h_XD.split(max(1, _MOST_SCORES // stream.softmax.borders[-1]))
            best_X = torch.cat([stream.softmax.logits(part_XD).argmax(-1) for part_XD in parts])
            numbers.append((best_X == labels_X)[None].to(numbers[0].dtype))
        return torch.cat(numbers).float().cpu()

    def unread(self, n: int) -> np.ndarray:
        """Return numbers (K, n) of tokens that nothing predicts."""
        return np.full((1 + (self.event is not None) + self.likeliest, n), np.nan, np.float32)

    def named(self, numbers: np.ndarray) -> Nats:
        """Return numbers (K, n) by their names."""
        event = None if self.event is None else numbers[1]
        return Nats(numbers[0], event, numbers[-1] == 1 if self.likeliest else None)


def check_finite(nats: Tensor, precision: InferencePrecision) -> None:
    """Refuse nats that are no numbers, because NaN says that nothing was predicted."""
    if not nats.isfinite().all():
        raise TrainingError(f"nats in {precision} are not finite numbers; use --precision fp32, or train with a lower optim.lr")


def _carried(
    model: LanguageModel, parts: Iterable[np.ndarray], reading: Reading, looks: _Looks, asks_after: bool
) -> Iterator[Nats]:
    """Yield the nats of each part of one text, and of what follows it."""
    sizes: deque[int] = deque()

    def sized() -> Iterator[np.ndarray]:
        for part in chain(parts, [np.array([_END])] if asks_after and looks.event is not None else []):
            sizes.append(len(part))
            yield part

    known = looks.unread(1)
    for numbers in chain(_in_segments(model, sized(), reading, looks), [looks.unread(0)]):
        known = np.concatenate([known, numbers], axis=1)
        while sizes and sizes[0] <= known.shape[1]:
            part, known = np.split(known, [sizes.popleft()], axis=1)
            yield looks.named(part)
    if asks_after and looks.event is None:
        yield looks.named(looks.unread(1))


def _in_segments(model: LanguageModel, parts: Iterable[np.ndarray], reading: Reading, looks: _Looks) -> Iterator[np.ndarray]:
    """Yield numbers (K, T) of the tokens of each segment of a text."""
    with scoring(model):
        stream = open_stream(reading.view(model), 1, tgt_len=reading.tgt_len, precision=looks.precision)

    def score(segment: Cut) -> Tensor:
        with scoring(model):
            if looks.only_nats:
                return stream.score(segment.ids, segment.labels)
            ids, labels = segment.ids.to(model.device), segment.labels[0].to(model.device)
            if segment.labels[0, -1] != _END:
                return looks.at(stream, stream.read(ids)[0], labels)
            # a segment of its own, because positions may count from the end, and longer products round differently
            before, numbers = stream.take(0), torch.from_numpy(looks.unread(len(labels) - 1))
            if segment.is_scored.any():
                numbers = looks.at(stream, stream.read(ids[:, :-1])[0], labels[:-1])
                stream.put(0, before)
            end = looks.at(stream, stream.read(ids)[0, -1:], labels.new_zeros(1))  # any label
            return torch.cat([numbers, end], dim=1)

    segments = segments_in_parts(parts, tgt_len=reading.tgt_len, ext_len=reading.ext_len)
    for segment, numbers in in_order(segments, score, model.device):
        own = numbers[:, segment.labels[0] != NOT_SCORED].float()
        check_finite(own, looks.precision)
        yield own.numpy()


def _alone(
    model: LanguageModel,
    texts: Iterator[Ending],
    reading: Reading,
    looks: _Looks,
    skip: int,
    is_ready: Callable[[], bool] | None,
) -> Iterator[Nats]:
    """Yield the nats of each text, which knows nothing of the others; those of a window are read the longest first."""
    with scoring(model):
        view = replace(reading, ext_len=0).view(model)  # nothing is read again
    streams: dict[int, Stream] = {}  # by the length of their memory
    n_done = 0
    for window in windows(texts, reading.batch_size, is_ready, size=lambda text: len(text.ids)):
        n_done += len(window)
        if n_done <= skip:
            yield from (looks.named(looks.unread(text.n_scored)) for text in window)
            continue
        found: dict[int, np.ndarray] = {}
        order = sorted(range(len(window)), key=lambda i: -len(window[i].ids))
        with scoring(model):
            for first in range(0, len(order), reading.batch_size):
                batch = order[first : first + reading.batch_size]
                # a memory that texts cannot fill would only take room
                fitting = view.for_text(1 << max(len(window[batch[0]].ids), 16).bit_length())
                if (stream := streams.get(fitting.mem_len)) is None:
                    stream = streams[fitting.mem_len] = _rows(fitting, reading, looks)
                stream.reset(torch.arange(reading.batch_size) < len(batch))
                found |= zip(batch, _read(stream, [window[i] for i in batch], looks), strict=True)
        yield from (looks.named(found[i]) for i in range(len(window)))


def _rows(view: LanguageModel, reading: Reading, looks: _Looks) -> Stream:
    by_token = view.keeps_keys and view.mem_len > 0
    how: dict[str, Any] = {"tgt_len": reading.tgt_len, "precision": looks.precision, "token_by_token": by_token}
    return open_stream(view, reading.batch_size, **how)


@torch.no_grad()
def _read(stream: Stream, texts: Sequence[Ending], looks: _Looks) -> Iterator[np.ndarray]:
    """Read texts, the longest first, in the first rows of a stream; yield numbers (K, n) of what is scored of each."""
    ids, device = np.concatenate([text.ids for text in texts]), stream.model.device
    n_read = torch.tensor([len(text.ids) - 1 for text in texts])
    last = (n_read + 1).cumsum(0) - 1
    scored = last - torch.tensor([text.n_scored for text in texts])
    numbers = torch.from_numpy(looks.unread(len(ids)))
    for at in range(0, int(n_read[0]), stream.tgt_len):
        n_row = int((n_read > at).sum())  # the others have ended
        begin, end = (last - n_read)[:n_row] + at, last[:n_row]
        end = torch.minimum(begin + stream.tgt_len, end)
        segment = cut(ids, begin, end, scored=torch.maximum(begin, scored[:n_row]), pad_left=stream.pads_left)
        n_pad = None if segment.n_pad is None else segment.n_pad.to(device)
        h_BTD = stream.read(segment.ids.to(device), rows=slice(0, n_row), n_pad=n_pad)
        if (where := segment.is_scored).any():
            own = looks.at(stream, h_BTD[where.to(device)], segment.labels[where].to(device))
            check_finite(own, looks.precision)
            numbers[:, segment.places[where] + 1] = own
    for text, end in zip(texts, (last + 1).tolist(), strict=True):
        yield numbers[:, end - text.n_scored : end].numpy()


def score_answers(
    model: LanguageModel,
    ids: np.ndarray,
    document_starts: np.ndarray,
    reading: Reading,
    *,
    separator: int,
    limit: int | None = None,
    on_tokens: Callable[[int], object] = lambda n: None,
    world: World | None = None,
) -> Score:
    """Score what follows the first separator of each document, each document from its own beginning.

    Without memory (`reading.mem_len` 0) only the separator stands before an answer, so that the difference is what the model
    makes of questions.

    Args:
        model: its mode (training or not) is restored afterwards.
        ids: integers (N,); may be memory-mapped.
        document_starts: places in `ids` at which documents start, increasing.
        reading: segments, memory, rows and precision.
        separator: id that ends questions. Documents without it, or with nothing after it, are left out.
        limit: read only documents that begin before this many tokens.
        on_tokens: called with the number of tokens of each document that is read here.
        world: processes that divide the documents; None: this one alone.

    Returns:
        The score; `Score.share` says how much of the text was read.

    Raises:
        CorpusError: no document has an answer.
    """
    begin, everyone = time.perf_counter(), world or World()
    n_read = len(ids) if limit is None else min(limit, len(ids))
    starts = document_starts[: np.searchsorted(document_starts, n_read)]
    ends = np.append(document_starts[1 : len(starts) + 1], len(ids))[: len(starts)]

    remembers = (model.mem_len if reading.mem_len is None else reading.mem_len) > 0

    def answers() -> Iterator[Ending]:
        own = divided(model, everyone)
        for start, end in zip(starts[own.rank :: own.size].tolist(), ends[own.rank :: own.size].tolist(), strict=True):
            text = np.asarray(ids[start:end])
            answer = text[int((text == separator).argmax()) :]
            if answer[0] == separator and len(answer) > 1:
                yield Ending(text if remembers else answer, len(answer) - 1)
            on_tokens(end - start)

    total, n_token = 0.0, 0
    for answer in nats(model, answers(), reading):
        total += float(answer.tokens.sum(dtype=np.float64))
        n_token += len(answer.tokens)
    total, n_answer = over_processes(model, everyone, total, float(n_token))
    if not n_answer:
        raise CorpusError("no document of the text has an answer; write each as question, tab, answer")
    n = round(n_answer)
    return Score(total, n, n, None, time.perf_counter() - begin, share=int(ends[-1]) / len(ids))


def n_characters(example: Example) -> int:
    """Return how many characters the texts of an example have."""
    return sum(map(len, (example.text, example.pair or "", *example.choices)))


def windows(
    examples: Iterable[_T],
    batch_size: int,
    is_ready: Callable[[], bool] | None = None,
    *,
    size: Callable[[Any], int] = n_characters,
) -> Iterator[list[_T]]:
    """Yield texts in lists: the first of one batch, each of the next twice as long, up to `WINDOW` batches.

    So the first answers come soon. Where the lists end follows from the texts alone, unless some are waited for (`is_ready`).
    """
    source, n_most = iter(examples), batch_size
    while True:
        window: list[_T] = []
        n_character = 0
        while len(window) < n_most and n_character < _MOST_CHARACTERS and (not window or is_ready is None or is_ready()):
            example = next(source, None)
            if example is None:
                break
            window.append(example)
            n_character += size(example)
        if not window:
            return
        yield window
        n_most = min(2 * n_most, WINDOW * batch_size)

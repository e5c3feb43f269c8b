"""Facts about every token of a text: its nats with and without memory, likelier tokens, and where the model looked.

The text is read once without memory, many segments side by side, and once in order with memory.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from transformer_xl.analysis.explain.attention import (
    Details,
    DistanceBins,
    Distances,
    Looks,
    Shelf,
    visit_attention,
)
from transformer_xl.errors import CheckpointError, CorpusError
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.memory import Memory
from transformer_xl.model.precision import Precision, autocast
from transformer_xl.model.softmax import check_ids
from transformer_xl.reading.evaluation import Reading
from transformer_xl.reading.segments import Cut, segments
from transformer_xl.reading.stream import CarriedState, scoring

_SCORES_AT_ONCE = 1 << 24  # of tokens times vocabulary: 64 MB


@dataclass(frozen=True)
class Facts:
    """What was found; arrays begin with the second token of the text, the first that is predicted."""

    nats: np.ndarray  # float32 (n,)
    without: np.ndarray | None  # float32 (n,), nats without memory; None: the model has no memory
    rank: np.ndarray  # int64 (n,), how many tokens were likelier
    top_ids: np.ndarray  # int64 (n, k), the likeliest tokens
    top_probabilities: np.ndarray  # float32 (n, k)
    details: Details | None  # attention of some tokens; None: the model does not attend
    distances: DistanceBins | None  # None: the same

    @property
    def gain(self) -> np.ndarray | None:
        """Nats that memory saved on each token; negative where it misled."""
        return None if self.without is None else self.without - self.nats


def remembers(model: LanguageModel, reading: Reading) -> bool:
    """Say whether the model has memory when it is read so."""
    return reading.view(model).reach(reading.tgt_len) > 0


def gather(
    model: LanguageModel,
    ids: np.ndarray,
    reading: Reading,
    *,
    top: int = 5,
    precision: Precision = "fp32",
    on_tokens: Callable[[int], object] | None = None,
) -> Facts:
    """Read a text and find the facts about its tokens. Each is read and reported twice if there is memory.

    Raises:
        CorpusError: fewer than two tokens.
        TokenizerError: ids outside the model's vocabulary.
        ConfigError: lengths that cannot work together.
        CheckpointError: a model whose losses are no numbers.
    """
    if len(ids) < 2:
        raise CorpusError(f"the text has {len(ids)} tokens; at least 2 are needed, because nothing predicts the first")
    check_ids(ids, vocab_size=model.config.vocab_size or 0)
    tell = on_tokens or (lambda _: None)
    with scoring(model):
        without = _nats_without_memory(model, ids, reading, precision, tell) if remembers(model, reading) else None
        return _read(model, ids, reading, without, top, precision, tell)


def _nats_without_memory(
    model: LanguageModel, ids: np.ndarray, reading: Reading, precision: Precision, tell: Callable[[int], object]
) -> np.ndarray:
    rows = _rows(reading)
    stream = CarriedState(reading.without_memory().view(model), rows, tgt_len=reading.tgt_len, precision=precision)
    nats = np.zeros(len(ids) - 1, np.float32)
    for cut in segments(ids, tgt_len=reading.tgt_len, ext_len=reading.ext_len, rows=rows):
        h_BTD = stream.read(cut.ids.to(model.device), rows=slice(len(cut.ids)))[:, cut.n_context :]
        nll = stream.nll(h_BTD, cut.labels[:, cut.n_context :].to(model.device))
        nats[cut.places[:, cut.n_context :].numpy()] = nll.float().cpu().numpy()
        tell(nll.numel())
    return nats


def _rows(reading: Reading) -> int:
    """Return how many segments are read side by side without memory."""
    return max(1, 2048 // (reading.tgt_len + reading.ext_len))


def _read(
    model: LanguageModel,
    ids: np.ndarray,
    reading: Reading,
    without: np.ndarray | None,
    top: int,
    precision: Precision,
    tell: Callable[[int], object],
) -> Facts:
    """Read the text with memory, and look at the attention of the segments that are shown or sampled."""
    n, view = len(ids) - 1, reading.view(model)
    k = min(top, model.config.vocab_size or top)
    found = Facts(
        nats=np.zeros(n, np.float32),
        without=without,
        rank=np.zeros(n, np.int64),
        top_ids=np.zeros((n, k), np.int64),
        top_probabilities=np.zeros((n, k), np.float32),
        details=None,
        distances=None,
    )
    watch = _Watch(view, reading, math.ceil(n / reading.tgt_len)) if model.config.attends else None
    rows = _rows(reading) if without is None else 1
    # hidden states are what attention weights can be computed from, kept keys are not
    stream = CarriedState(view, rows, tgt_len=reading.tgt_len, precision=precision)
    index = 0
    for cut in segments(ids, tgt_len=reading.tgt_len, ext_len=reading.ext_len, rows=rows):
        own_ids, mems = cut.ids.to(model.device), stream.mems.select(slice(len(cut.ids)))
        h_BTD = stream.read(own_ids, rows=slice(len(cut.ids)))[:, cut.n_context :]
        with autocast(model.device, precision):
            _note(found, cut, h_BTD, view)
            if watch:
                watch.look(index, cut, own_ids, mems, found)
        index += len(cut.ids)
        tell(int(cut.is_scored.sum()))
    if not np.isfinite(found.nats).all():
        raise CheckpointError("the model gives no finite probabilities for this text; choose another --checkpoint")
    if watch is None:
        return found
    return replace(found, details=watch.shelf.details(), distances=watch.distances.binned())


def _note(found: Facts, cut: Cut, h_BTD: Tensor, view: LanguageModel) -> None:
    """Note what the scores of a segment say, for few enough tokens at once."""
    n_chunk = max(1, _SCORES_AT_ONCE // (view.config.vocab_size or 1))
    places, labels = (part[:, cut.n_context :].flatten() for part in (cut.places, cut.labels))
    k = found.top_ids.shape[-1]
    parts = (x.split(n_chunk) for x in (h_BTD.flatten(0, 1), labels.to(h_BTD.device), places))
    for h, label, place in zip(*parts, strict=True):
        at = place.numpy()
        log_p = view.softmax.logits(h[None], view.embedding)[0].float().log_softmax(dim=-1)
        own = log_p.gather(-1, label.unsqueeze(-1))
        best, best_ids = log_p.topk(k, dim=-1)
        found.nats[at] = -own.squeeze(-1).cpu().numpy()
        found.rank[at] = (log_p > own).sum(-1).cpu().numpy()
        found.top_ids[at] = best_ids.cpu().numpy()
        found.top_probabilities[at] = best.exp().cpu().numpy()


class _Watch:
    """Chooses segments whose attention is looked at, and keeps what it sees."""

    def __init__(self, view: LanguageModel, reading: Reading, n_segment: int) -> None:
        config = view.config
        self._view = view
        self._every = math.ceil(n_segment / 256)  # so that at most 256 segments are averaged by distance
        n_distance = reading.tgt_len + reading.ext_len + reading.mem_len
        self.distances = Distances(config.n_layer, config.heads_per_layer, n_distance)
        self.shelf = Shelf(n_segment, reading.tgt_len, config.n_layer * config.heads_per_layer)

    def look(self, index: int, cut: Cut, ids: Tensor, mems: Memory, found: Facts) -> None:
        """Look at those rows that are shown or sampled; the first row is segment `index` of the text."""
        places_BT = cut.places[:, cut.n_context :].numpy()
        scores = [self._score(found, places_T) for places_T in places_BT]
        wanted = [self.shelf.wants(index + row, score) for row, score in enumerate(scores)]
        sampled = [(index + row) % self._every == 0 for row in range(len(scores))]
        if not any(wanted) and not any(sampled):
            return
        T = places_BT.shape[1]
        looks = [Looks(T) for _ in scores]

        def visit(layer: int, weight_BNTS: Tensor) -> None:
            n_memory = weight_BNTS.shape[-1] - ids.shape[1]
            for row, weight_NTS in enumerate(weight_BNTS[:, :, -T:]):
                if wanted[row]:
                    looks[row].add(weight_NTS, n_memory=n_memory)
                if sampled[row]:
                    self.distances.add(layer, weight_NTS, n_memory=n_memory)

        visit_attention(self._view, ids, mems, visit)
        for row, score in enumerate(scores):
            if wanted[row]:
                self.shelf.put(index + row, int(places_BT[row, 0]), score, looks[row])

    @staticmethod
    def _score(found: Facts, places_T: np.ndarray) -> float:
        """Return what memory gained a segment; without memory, its nats."""
        nats = found.nats[places_T].astype(np.float64)
        return float(nats.sum() if found.without is None else (found.without[places_T] - nats).sum())

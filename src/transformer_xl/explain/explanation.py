"""A text explained: facts about every token, totals, and the passages that gain most from memory; page and pictures show them.

The text is read once without memory, many segments side by side, and once in order with memory.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor

from transformer_xl.config.model import AttentionConfig, ModelConfig
from transformer_xl.errors import CheckpointError, ConfigError
from transformer_xl.explain.attention import AttentionWatch, Details, DistanceBins
from transformer_xl.explain.causes import Causes, find_causes
from transformer_xl.explain.token_text import text_of
from transformer_xl.kernels.device import Precision, autocast
from transformer_xl.model.base import LanguageModel
from transformer_xl.reading.evaluation import evaluate
from transformer_xl.reading.reading import Reading
from transformer_xl.reading.segments import Cut, segments
from transformer_xl.reading.stream import CarriedState, scoring, stream_ids
from transformer_xl.tokenizers.base import Tokenizer

_SCORES_AT_ONCE = 1 << 24  # of tokens times vocabulary: 64 MB


@dataclass(frozen=True)
class Facts:
    """What was found about each token; arrays begin with the second token of the text, the first that is predicted."""

    nats: np.ndarray  # float32 (n,)
    without: np.ndarray | None  # float32 (n,), nats without memory; None: the model has no memory
    rank: np.ndarray  # int64 (n,), how many tokens were likelier
    top_ids: np.ndarray  # int64 (n, k), the likeliest tokens
    top_probabilities: np.ndarray  # float32 (n, k)
    details: Details | None  # attention of some tokens; None: the model does not attend
    distances: DistanceBins | None  # attention by distance; None: the model does not attend
    causes: Causes | None = None  # what raised or lowered the predictions of some tokens; None: was not asked for

    @property
    def gain(self) -> np.ndarray | None:
        """Nats that memory saved on each token; negative where it misled."""
        return None if self.without is None else self.without - self.nats


@dataclass(frozen=True)
class Passage:
    """A few tokens in a row."""

    begin: int  # place of the first token in the text
    end: int  # place after the last one
    score: float  # nats that memory saved on them; without memory, their nats
    best: int  # place of the token with the largest share of the score


@dataclass(frozen=True)
class Explanation:
    """What a model made of a text."""

    name: str  # of the text
    run: str  # of the model
    ids: np.ndarray  # int64 (N,)
    n_left_out: int  # tokens after these that were not read
    tokenizer: Tokenizer = field(repr=False)
    config: ModelConfig
    reading: Reading
    precision: str
    facts: Facts = field(repr=False)
    n_characters: int | None = None  # of the predicted tokens; None: as many as are shown

    @cached_property
    def passages(self) -> list[Passage]:
        """The passages that gain most from memory; without memory, the most surprising ones."""
        gain = self.facts.gain
        return best_passages(self.facts.nats if gain is None else gain, tgt_len=self.reading.tgt_len)

    @cached_property
    def totals(self) -> dict[str, Any]:
        """Sums and means over all predicted tokens, as JSON values."""
        facts, n_token = self.facts, len(self.facts.nats)
        n_characters = n_token if self.tokenizer.counts != "character" else self.n_characters
        if not n_characters:
            text, first = (text_of(self.tokenizer, ids)[0] for ids in (self.ids, self.ids[:1]))
            n_characters = max(1, len(text) - len(first))
        nats = float(facts.nats.sum(dtype=np.float64))

        def bpc(nats: float) -> float:
            return nats / n_characters / math.log(2)

        figures = {"tokens": n_token, "n_characters": n_characters, "nats": nats, "loss": nats / n_token, "bpc": bpc(nats)}
        if facts.without is None:
            return figures
        without = float(facts.without.sum(dtype=np.float64))
        figures |= {"nats_without_memory": without, "loss_without_memory": without / n_token}
        return figures | {"bpc_without_memory": bpc(without), "memory_is_worth_bpc": bpc(without - nats)}

    @property
    def heads(self) -> tuple[int, int] | None:
        """Layers and heads per layer; None if the model does not attend."""
        return (self.config.n_layer, self.config.n_head) if isinstance(self.config, AttentionConfig) else None


def explain(
    model: LanguageModel,
    tokenizer: Tokenizer,
    ids: np.ndarray,
    reading: Reading,
    *,
    name: str = "text",
    run: str = "model",
    top: int = 5,
    most: int | None = None,
    attributed: int = 0,
    token: int | None = None,
    n_characters: int | None = None,
    precision: Precision = "fp32",
    on_tokens: Callable[[int], object] = lambda n: None,
    on_attributing: Callable[[int], object] = lambda n: None,
) -> Explanation:
    """Read at most `most` tokens of a text with memory and without, and find what memory gained each.

    See `Explanation` for the other arguments; `top` is the number of likeliest tokens shown. The predictions of `attributed`
    segments, those that gain most, and of that with `token`, a number from 1 on, are attributed to the tokens before them.
    """
    read = (ids if most is None else ids[:most]).astype(np.int64)
    if token is not None and not 1 < token <= len(read):
        raise ConfigError(f"token ({token}) must be from 2 to {len(read)}: no other one of this text is predicted")
    facts = find_facts(model, read, reading, top=max(top, 2), precision=precision, on_tokens=on_tokens)
    scores, T = facts.nats if facts.gain is None else facts.gain, min(reading.tgt_len, len(read) - 1)
    best = np.argsort(-np.add.reduceat(scores, np.arange(0, len(scores), T)), kind="stable")[:attributed]
    begins = {int(i) * T for i in best} | ({(token - 2) // T * T} if token else set())
    on_attributing(min(len(begins) * T, len(scores)))
    causes = find_causes(model, read, replace(reading, tgt_len=T), facts.top_ids, begins, on_tokens)
    facts = replace(facts, causes=causes, top_ids=facts.top_ids[:, :top], top_probabilities=facts.top_probabilities[:, :top])
    n_left_out = len(ids) - len(read)
    known = None if n_left_out else n_characters
    return Explanation(name, run, read, n_left_out, tokenizer, model.config, reading, precision, facts, known)


def remembers(model: LanguageModel, reading: Reading) -> bool:
    """Return whether the model has memory if it reads in this way."""
    return reading.view(model).reach(reading.tgt_len) > 0


def find_facts(
    model: LanguageModel,
    ids: np.ndarray,
    reading: Reading,
    *,
    top: int = 5,
    precision: Precision = "fp32",
    on_tokens: Callable[[int], object] = lambda n: None,
) -> Facts:
    """Read a text and find the facts about its tokens. Each is read and reported twice if there is memory."""
    ids = stream_ids(ids, model, "text")
    reading, without = replace(reading, tgt_len=min(reading.tgt_len, len(ids) - 1), precision=precision), None
    if remembers(model, reading):
        in_lanes = replace(reading.without_memory(), batch_size=_rows(reading))
        without = evaluate(model, ids, in_lanes, per_token=True, on_tokens=on_tokens).token_nats
    with scoring(model):
        return _facts_with_memory(model, ids, reading, without, top, precision, on_tokens)


def _rows(reading: Reading) -> int:
    return max(1, 2048 // (reading.tgt_len + reading.ext_len))


def _facts_with_memory(
    model: LanguageModel,
    ids: np.ndarray,
    reading: Reading,
    without: np.ndarray | None,
    top: int,
    precision: Precision,
    report: Callable[[int], object],
) -> Facts:
    """Read the text with memory, and record the attention of the segments that are shown or sampled."""
    n, view = len(ids) - 1, reading.view(model).for_text(len(ids))
    k = min(top, model.vocab_size)
    facts = Facts(
        nats=np.zeros(n, np.float32),
        without=without,
        rank=np.zeros(n, np.int64),
        top_ids=np.zeros((n, k), np.int64),
        top_probabilities=np.zeros((n, k), np.float32),
        details=None,
        distances=None,
    )
    watch = AttentionWatch(view, reading, math.ceil(n / reading.tgt_len)) if model.attention_blocks() else None
    rows = _rows(reading) if without is None else 1
    # attention weights can be computed from hidden states, but not from kept keys
    stream = CarriedState(view, rows, tgt_len=reading.tgt_len, precision=precision)
    index = 0
    for cut in segments(ids, tgt_len=reading.tgt_len, ext_len=reading.ext_len, rows=rows):
        own_ids, mems = cut.ids.to(model.device), stream.mems.select(slice(len(cut.ids)))
        h_BTD = stream.read(own_ids, rows=slice(len(cut.ids)))[:, cut.n_context :]
        with autocast(model.device, precision):
            _score_tokens(facts, cut, h_BTD, view)
            if watch:
                places_BT = cut.places[:, cut.n_context :].numpy()
                scores = [_segment_score(facts, places_T) for places_T in places_BT]
                watch.add(index, places_BT, own_ids, mems, scores)
        index += len(cut.ids)
        report(int(cut.is_scored.sum()))
    if not np.isfinite(facts.nats).all():
        raise CheckpointError("the model gives no finite probabilities for this text; choose another --checkpoint")
    if watch is None:
        return facts
    return replace(facts, details=watch.details.joined(), distances=watch.distances.binned())


def _score_tokens(facts: Facts, cut: Cut, h_BTD: Tensor, view: LanguageModel) -> None:
    """Write nats, ranks and likeliest tokens of a segment into `facts`, for few enough tokens at once.

    Ranks need the scores of the whole vocabulary, which `Stream.nll` never holds, so nats are taken from these scores, too.
    """
    n_chunk = max(1, _SCORES_AT_ONCE // view.vocab_size)
    places, labels = (part[:, cut.n_context :].flatten() for part in (cut.places, cut.labels))
    k = facts.top_ids.shape[-1]
    parts = (x.split(n_chunk) for x in (h_BTD.flatten(0, 1), labels.to(h_BTD.device), places))
    for h, label, place in zip(*parts, strict=True):
        at = place.numpy()
        log_p = view.softmax.logits(h[None], view.embedding)[0].float().log_softmax(dim=-1)
        own = log_p.gather(-1, label.unsqueeze(-1))
        best, best_ids = log_p.topk(k, dim=-1)
        facts.nats[at] = -own.squeeze(-1).cpu().numpy()
        facts.rank[at] = (log_p > own).sum(-1).cpu().numpy()
        facts.top_ids[at] = best_ids.cpu().numpy()
        facts.top_probabilities[at] = best.exp().cpu().numpy()


def _segment_score(facts: Facts, places_T: np.ndarray) -> float:
    """Return what memory gained a segment; without memory, its nats."""
    nats = facts.nats[places_T].astype(np.float64)
    return float(nats.sum() if facts.without is None else (facts.without[places_T] - nats).sum())


def best_passages(values: np.ndarray, *, tgt_len: int, n: int = 50) -> list[Passage]:
    """Return the `n` passages with the highest sums above zero, the highest first; none crosses a border of segments.

    `values` begin with the second token of the text.

    Example:
        >>> best_passages(np.array([0.0, 1.0, 5.0, 0.0]), tgt_len=2)
        [Passage(begin=3, end=5, score=5.0, best=3), Passage(begin=1, end=3, score=1.0, best=2)]
    """
    length = -(-tgt_len // -(-tgt_len // 64))  # equal passages of 64 tokens at most
    segment_starts = np.arange(0, len(values), tgt_len)
    starts = np.concatenate([np.arange(start, min(start + tgt_len, len(values)), length) for start in segment_starts])
    sums = np.add.reduceat(values.astype(np.float64), starts)
    ends = np.append(starts[1:], len(values))
    order = np.argsort(-sums, kind="stable")[:n]
    chosen = [(int(starts[i]), int(ends[i]), float(sums[i])) for i in order if sums[i] > 0]
    return [Passage(a + 1, b + 1, score, int(a + values[a:b].argmax()) + 1) for a, b, score in chosen]

"""Score a model on a text: how the text is read, the sum of its nats, and the nats of each token.

The text is one stream. Every token but the very first is predicted once, the first token of each segment too. If the text is
read in several lanes side by side, each lane first reads the tokens before its part without counting them, so that its memory
holds what it would hold if one lane had read everything.
"""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from transformer_xl.batch import NOT_SCORED
from transformer_xl.errors import ConfigError
from transformer_xl.files import whole_file
from transformer_xl.kernels.device import precision_of_segments
from transformer_xl.model.base import LanguageModel, check_reads_on
from transformer_xl.model.call import Execution
from transformer_xl.reading.cache import Cache, CacheRows
from transformer_xl.reading.dynamic import Dynamic, LearningState, precision_of_learning
from transformer_xl.reading.reading import Reading
from transformer_xl.reading.segments import Cut, Lanes
from transformer_xl.reading.stream import Stream, in_order, open_stream, scoring, stream_ids
from transformer_xl.tokenizers.base import Tokenizer
from transformer_xl.world import World


@dataclass(frozen=True)
class Score:
    """The outcome of `evaluate`.

    Attributes:
        nats: total negative log-likelihood, summed in float64.
        tokens: predicted tokens.
        n_characters: characters of these tokens; the number of tokens if it is not known.
        n_bytes: UTF-8 bytes of these tokens; None if it is not known.
        seconds: time it took.
        token_nats: float32 (tokens,), nats of each token in order; None unless asked for.
        share: part of the text that was read, where `tokens` does not say it, because they are targets.
        nats_at: total nats by temperature, of all temperatures asked for.
    """

    nats: float
    tokens: int
    n_characters: int
    n_bytes: int | None
    seconds: float
    token_nats: np.ndarray | None = field(default=None, repr=False)
    share: float = 1.0
    nats_at: Mapping[float, float] = field(default_factory=dict, repr=False)

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nats / self.tokens

    @property
    def ppl(self) -> float:
        """Perplexity per token; infinite where it exceeds a float."""
        return math.exp(self.loss) if self.loss < 709 else math.inf

    @property
    def doubt(self) -> str:
        """What an infinite perplexity means, in words; empty if it is finite."""
        if math.isfinite(self.ppl):
            return ""
        return "such a loss is that of a model whose training diverged; train again with a lower optim.lr"

    @property
    def bpc(self) -> float:
        """Bits per character."""
        return self.nats / self.n_characters / math.log(2)

    @property
    def bpb(self) -> float | None:
        """Bits per UTF-8 byte, None if the number of bytes is not known."""
        return None if self.n_bytes is None else self.nats / self.n_bytes / math.log(2)

    def in_words(self, predicts: str = "token", unit: str = "character") -> str:
        """Return the loss in words.

        Args:
            predicts: what is counted, see `ModelConfig.predicts`.
            unit: what `n_characters` counts, see `Tokenizer.counts`.

        Example:
            >>> Score(nats=7.0, tokens=10, n_characters=40, n_bytes=None, seconds=1.0).in_words()
            '0.252 bits per character (0.7000 nats per token)'
        """
        loss = f"{self.loss:.4f} nats per {predicts}"
        return f"{self.bpc:.3f} bits per {unit} ({loss})" if predicts == "token" else loss

    @property
    def tokens_per_second(self) -> float:
        """Predicted tokens per second."""
        return self.tokens / max(self.seconds, 1e-9)

    def as_dict(self, unit: str = "character") -> dict[str, float | int | None]:
        """Return all figures for JSON, with None for infinity, and per character if `unit` is a word (see `in_words`)."""
        names = ("nats", "tokens", "n_characters", "n_bytes", "loss", "ppl", "bpc", "bpb", "seconds", "tokens_per_second")
        values = {name: getattr(self, name) for name in names}
        values |= dict.fromkeys(("n_characters", "bpc")) if unit == "word" else {}
        return {name: value if value is None or math.isfinite(value) else None for name, value in values.items()}


def evaluate(
    model: LanguageModel,
    token_ids: np.ndarray | torch.Tensor,
    reading: Reading = Reading(),
    *,
    n_characters: int | None = None,
    n_bytes: int | None = None,
    dynamic: Dynamic | None = None,
    cache: Cache | None = None,
    temperature: float | Sequence[float] = 1.0,
    per_token: bool = False,
    on_tokens: Callable[[int], object] = lambda n: None,
    world: World | None = None,
    execution: Execution = Execution(),
    **options: Any,
) -> Score:
    """Score a whole stream, every token counted once, with warm memory.

    Several processes divide the lanes, and each returns the score of all lanes. If each holds only a part of the weights, all
    of them read all lanes.

    Args:
        model: its mode (training or not) is restored afterwards.
        token_ids: integers (N,), N ≥ 2; may be memory-mapped.
        reading: segments, memory, lanes and precision.
        n_characters: characters of the predicted text, for `Score.bpc`; None: one per token.
        n_bytes: bytes of the predicted text, for `Score.bpb`.
        dynamic: let a copy of the weights learn from each segment after it has been scored; `model` stays as it is. The text is
            read in one lane, so `batch_size` must be 1.
        cache: mix what followed similar states into the prediction. Lanes first read as many tokens as it keeps.
        temperature: divides the scores before the softmax, as `Sampling.temperature` does: p becomes p^(1/t) / Σ p^(1/t). Of
            several, the score is that of the first, and `Score.nats_at` has the total nats of each. Neither dynamic evaluation
            nor a cache goes with another than 1.
        per_token: keep the nats of every token.
        on_tokens: called with the number of tokens just scored here, for progress bars; on a GPU one segment late.
        world: the processes that score the stream together, each with the same arguments; None: this one alone.
        execution: how the model computes where it reads whole segments itself; kept keys are read in one way only.
        options: attributes of `Reading` that replace those of `reading`, such as `tgt_len=64`.

    Returns:
        The score.

    Raises:
        CorpusError: fewer than two tokens.
        TokenizerError: ids outside the model's vocabulary.
        ConfigError: sizes below 1, a temperature that is not above 0, an unknown precision, `mem_len`, `clamp_len` and
            `same_length` that cannot work together, a model that does not read from left to right, or what cannot be done with
            dynamic evaluation or a cache.
        TrainingError: dynamic evaluation diverged.
        TypeError: an unknown option, or a reading that is no `Reading`.
        ValueError: ids that are not integers, or of another shape; or mean squares of another model.

    Example:
        >>> from transformer_xl import TransformerXL, TransformerXLConfig
        >>> model = TransformerXL(TransformerXLConfig(vocab_size=4, n_layer=1, d_model=8, n_head=1, d_head=8, d_inner=8))
        >>> evaluate(model, np.array([0, 1, 2, 3, 0, 1]), tgt_len=2).tokens
        5
    """
    check_reads_on(model)
    ids = stream_ids(token_ids, model, "text to score")
    reading, everyone = _changed(reading, options), world or World()
    n_predicted = len(ids) - 1
    temperatures = _temperatures(temperature, model, adapts=dynamic is not None or cache is not None)
    token_nats = torch.zeros(n_predicted, dtype=torch.float32) if per_token else None
    begin, totals = time.perf_counter(), [0.0] * len(temperatures)
    with scoring(model):
        lanes, rows = _open(model, ids, reading, dynamic, cache, everyone, execution)
        segments = lanes.segments(pad_left=rows.stream.pads_left)
        for segment, nats_KBT in in_order(segments, lambda segment: rows.score(segment, temperatures), model.device):
            totals = [total + float(own.double().sum()) for total, own in zip(totals, nats_KBT, strict=True)]
            if token_nats is not None:
                token_nats[segment.places[segment.is_scored]] = nats_KBT[0][segment.is_scored].float()
            on_tokens(int(segment.is_scored.sum()))
    totals = over_processes(model, everyone, *totals)
    if token_nats is not None:
        divided(model, everyone).add_(token_nats)
    seconds = time.perf_counter() - begin
    kept = None if token_nats is None else token_nats.numpy()
    nats_at = dict(zip(temperatures, totals, strict=True))
    return Score(totals[0], n_predicted, n_characters or n_predicted, n_bytes, seconds, kept, nats_at=nats_at)


def _changed(reading: Reading, options: dict[str, Any]) -> Reading:
    """Return the reading with other attributes; TypeError unless it is one, and has them."""
    unknown = options.keys() - {attribute.name for attribute in fields(Reading)}
    if unknown or not isinstance(reading, Reading):
        given = ", ".join(sorted(unknown)) or f"a value of type {type(reading).__name__}"
        raise TypeError(f"evaluate got {given}; how to read is a Reading or attributes of it: evaluate(model, ids, tgt_len=64)")
    return replace(reading, **options)


def divided(model: LanguageModel, world: World) -> World:
    """Return the processes that divide what is read: none if each holds only a part of the weights, so that all read all."""
    return World() if model.is_sharded else world


def over_processes(model: LanguageModel, world: World, *sums: float) -> tuple[float, ...]:
    """Return sums of what each process has read, `divided`, as sums of all; all processes get the same bits."""
    # where each has read everything, devices may differ in the last bit
    return world.from_first(sums) if model.is_sharded else world.sum(*sums)


TEMPERATURES = tuple(i / 20 for i in range(14, 31))
"""Candidates for `best_temperature`, from 0.7 to 1.5; reading a text once scores it at all of them."""


def best_temperature(nats_at: Mapping[float, float]) -> float:
    """Return the temperature with the fewest nats, to three digits; see `Score.nats_at`.

    In 1/t the nats are convex: a sum of linear functions and of log Σ exp. So the least is beside the best candidate, at the
    vertex of the parabola through it and its neighbors; an end of the range stays what it is.

    Example:
        >>> best_temperature({t: (1 / t - 0.8) ** 2 for t in TEMPERATURES})
        1.25
    """
    tried = sorted(nats_at, reverse=True)
    best = min(range(len(tried)), key=lambda i: nats_at[tried[i]])
    if not 0 < best < len(tried) - 1:
        return tried[best]
    near = tried[best - 1 : best + 2]
    curve = np.polyfit([1 / t - 1 / tried[best] for t in near], [nats_at[t] - nats_at[tried[best]] for t in near], 2)
    return round(float(1 / (1 / tried[best] - curve[1] / (2 * curve[0]))), 3) if curve[0] > 0 else tried[best]


def _temperatures(given: float | Sequence[float], model: LanguageModel, *, adapts: bool) -> tuple[float, ...]:
    """Return temperatures; refuse what is no divisor, and others than 1 where scores are not all at hand or are mixed."""
    temperatures = tuple(map(float, given if isinstance(given, Sequence) else [given]))
    if not temperatures or not all(0 < t < math.inf for t in temperatures):
        raise ConfigError(f"temperature ({', '.join(map(str, temperatures))}) must be above 0 and finite; 1 changes nothing")
    if temperatures == (1.0,):
        return temperatures
    if adapts:
        raise ConfigError("a temperature is for a model without dynamic evaluation and without a cache; leave one of them out")
    if model.is_sharded:
        raise ConfigError("a temperature needs all weights in one process; do not shard the model")
    return temperatures


def _check_alone(model: LanguageModel, world: World, batch_size: int, *, dynamic: bool, cache: bool) -> None:
    """Refuse lanes and processes for what goes strictly from the beginning of a text to its end."""
    if dynamic and batch_size > 1:
        raise ConfigError(f"dynamic evaluation reads from beginning to end in one lane; set batch_size ({batch_size}) to 1")
    if dynamic and not world.alone:
        raise ConfigError(f"dynamic evaluation reads in one process, not in {world.size}; start it without torchrun")
    if model.is_sharded and (dynamic or cache):
        what = "a cache" if cache else "dynamic evaluation"
        raise ConfigError(f"{what} needs all weights in one process; do not shard the model")


@dataclass
class _Rows:
    """The rows of a stream that read lanes, and what they keep for a cache, if there is one."""

    stream: Stream
    cache: CacheRows | None

    def score(self, segment: Cut, temperatures: tuple[float, ...] = (1.0,)) -> torch.Tensor:
        """Read a segment of all rows; return nats (K, rows, W) of its tokens at each temperature, 0 where there is no label."""
        if temperatures != (1.0,):
            return self.stream.score_at(segment.ids, segment.labels, temperatures, n_pad=segment.n_pad)
        if not self.cache:
            return self.stream.score(segment.ids, segment.labels, n_pad=segment.n_pad)[None]
        h_BTD, nats_BT = self.stream.read_and_score(segment.ids, segment.labels, n_pad=segment.n_pad)
        n = segment.n_context  # read again: in the cache already
        mixed = self.cache.mix(nats_BT[:, n:], h_BTD[:, n:], segment.labels[:, n:].to(h_BTD.device))
        return torch.cat([nats_BT[:, :n], mixed], dim=1)[None]

    def warm_up(self, segment: Cut) -> None:
        """Read a segment that is not scored."""
        nowhere = torch.full_like(segment.ids, NOT_SCORED)
        if self.cache is None:
            self.stream.score(segment.ids, nowhere)
        else:
            h_BTD, n = self.stream.read_and_score(segment.ids, nowhere)[0], segment.n_context
            self.cache.add(h_BTD[:, n:], segment.labels[:, n:].to(h_BTD.device))

    def prepend(self, n: int) -> None:
        """Put `n` rows that have read nothing before the others."""
        self.stream.prepend(n)
        if self.cache:
            self.cache.prepend(n)


def _open(
    model: LanguageModel,
    ids: np.ndarray,
    reading: Reading,
    dynamic: Dynamic | None,
    cache: Cache | None,
    world: World,
    execution: Execution,
) -> tuple[Lanes, _Rows]:
    """Return a text in lanes, and a row for each that has read what stands before the lane."""
    _check_alone(model, world, reading.batch_size, dynamic=dynamic is not None, cache=cache is not None)
    view, n_predicted = reading.view(model).for_text(len(ids)), len(ids) - 1
    tgt_len = min(reading.tgt_len, n_predicted)
    n_before = view.reach(tgt_len) + (math.ceil(cache.size / tgt_len) * tgt_len if cache else 0)
    n_lane = max(1, min(reading.batch_size, n_predicted // max(n_before + reading.ext_len, 1)))
    lanes = Lanes(ids, n_lane, tgt_len=tgt_len, ext_len=reading.ext_len, world=divided(model, world))
    n_cold = lanes.n_cold if n_before else lanes.n_lane  # rows that begin without memory
    n_row = lanes.n_lane - n_cold or n_cold or 1
    if dynamic:
        learned = precision_of_learning(reading.precision, model.device)
        stream: Stream = LearningState(view, dynamic, tgt_len=tgt_len, precision=learned, execution=execution)
    else:
        chosen = precision_of_segments(reading.precision, model.device)
        stream = open_stream(view, n_row, tgt_len=tgt_len, precision=chosen, execution=execution)
    dtype = torch.promote_types(view.dtype, torch.float32)
    sizes = {"d_model": view.config.d_model, "tgt_len": tgt_len}
    rows = _Rows(stream, CacheRows(cache, n_row, **sizes, dtype=dtype, device=view.device) if cache else None)
    if n_cold < lanes.n_lane:
        for segment in lanes.before(n_before):
            rows.warm_up(segment)
        if n_cold:
            rows.prepend(n_cold)
    return lanes, rows


def write_token_nats(path: Path, ids: np.ndarray, nats: np.ndarray, tokenizer: Tokenizer) -> None:
    """Write an array if the name ends in .npy, else a line for each predicted token: position, id, nats, text in JSON.

    Args:
        path: of the file; an earlier one is replaced.
        ids: of the text, integers (N,).
        nats: of all tokens but the first, (N - 1,).
        tokenizer: of the text.
    """
    if path.suffix == ".npy":
        with whole_file(path) as stray:
            np.save(stray, nats)
        return
    texts: dict[int, str] = {}
    with whole_file(path) as stray, stray.open("w", encoding="utf-8") as file:
        file.write("position\tid\tnats\ttoken\n")
        pairs = zip(ids[1:].tolist(), nats.tolist(), strict=True)
        for position, (token, value) in enumerate(pairs, start=1):
            text = texts.setdefault(token, json.dumps(tokenizer.decode([token]), ensure_ascii=False))
            file.write(f"{position}\t{token}\t{value:.6f}\t{text}\n")

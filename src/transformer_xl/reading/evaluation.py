"""Score a model on a text: how the text is read, the sum of its nats, and the nats of each token.

The text is one stream. Every token but the very first is predicted once, the first token of each segment too. If the text is
read in several lanes side by side, each lane first reads the tokens before its part without counting them, so that its memory
holds what it would hold if one lane had read everything.
"""

import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from transformer_xl.config.model import ModelConfig
from transformer_xl.config.run import RunConfig
from transformer_xl.data.tokenizers import Tokenizer
from transformer_xl.errors import ConfigError, CorpusError
from transformer_xl.files import whole_file
from transformer_xl.kernels.device import InferencePrecision, PrecisionName, precision_of_segments
from transformer_xl.kernels.graphs import Readback
from transformer_xl.model.base import LanguageModel, check_reads_on
from transformer_xl.model.call import Execution
from transformer_xl.model.softmax import check_ids
from transformer_xl.reading.cache import Cache, CacheRows
from transformer_xl.reading.dynamic import Dynamic, LearningState, precision_of_learning
from transformer_xl.reading.segments import NOT_SCORED, Cut, Lanes
from transformer_xl.reading.stream import Stream, check_names, open_stream, scoring
from transformer_xl.world import World


def memory_in_words(config: ModelConfig, mem_len: int) -> str:
    """Return with what memory a model of these settings reads if it has this many positions, in two to four words."""
    if not mem_len or config.remembers == "nothing":
        return "no memory"
    return "a state carried on" if config.remembers == "state" else f"memory of {mem_len:,}"


@dataclass(frozen=True)
class Reading:
    """How a text is read to score it; `evaluate(model, ids, **vars(reading))` reads it so.

    Attributes:
        tgt_len: tokens per segment.
        mem_len: positions of memory.
        ext_len: tokens before each segment that are read again with it instead of being remembered.
        batch_size: lanes read side by side.
        same_length: the same number of keys for every query; None: as the model does. False without memory.
        clamp_len: largest distance told apart; None: as the model does.

    Example:
        >>> Reading(tgt_len=64, mem_len=128, same_length=True).without_memory()
        Reading(tgt_len=64, mem_len=0, ext_len=0, batch_size=1, same_length=False, clamp_len=None)
    """

    tgt_len: int
    mem_len: int
    ext_len: int = 0
    batch_size: int = 1
    same_length: bool | None = None
    clamp_len: int | None = None

    def __post_init__(self) -> None:
        if not self.mem_len:
            object.__setattr__(self, "same_length", False)

    @classmethod
    def of_run(cls, config: RunConfig, **changes: Any) -> Self:
        """Return how `txl eval` reads for a run, with changed attributes; those that are None are the run's own."""
        own = {
            "tgt_len": config.eval_tgt_len,
            "mem_len": config.eval_mem_len,
            "ext_len": config.eval.ext_len,
            "batch_size": config.eval.batch_size,
            "same_length": config.eval.same_length,
            "clamp_len": config.eval.clamp_len,
        }
        return cls(**own | {name: value for name, value in changes.items() if value is not None})

    @property
    def length(self) -> int:
        """Positions before a segment that its tokens may see: the attention length."""
        return self.mem_len + self.ext_len

    def in_words(self, config: ModelConfig) -> str:
        """Return how a model of these settings is read, in words.

        Example:
            >>> from transformer_xl.config.model import LstmConfig
            >>> Reading(tgt_len=16, mem_len=1).in_words(LstmConfig())
            'segments of 16, a state carried on'
            >>> Reading(tgt_len=16, mem_len=0, ext_len=48).in_words(LstmConfig())
            'segments of 16, 48 read again before each, no memory'
        """
        again = f", {self.ext_len:,} read again before each" if self.ext_len else ""
        return f"segments of {self.tgt_len:,}{again}, {memory_in_words(config, self.mem_len)}"

    def without_memory(self) -> Self:
        """Return the same without memory."""
        return replace(self, mem_len=0)

    def view(self, model: LanguageModel) -> LanguageModel:
        """Return the model with these lengths; ConfigError if it cannot be read with them."""
        if self.tgt_len < 1:
            raise ConfigError(f"tgt_len ({self.tgt_len}) must be at least 1")
        return model.with_context(
            mem_len=self.mem_len, clamp_len=self.clamp_len, same_length=self.same_length, ext_len=self.ext_len
        )


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
        event_nats: float32 (tokens,), nats of the event in the place of each token; None unless asked for.
        share: part of the text that was read, where `tokens` does not say it, because they are targets.
        state: from which `evaluate` goes on: tensors on the CPU by name; None unless asked for.
        nats_at: total nats by temperature, of all temperatures asked for.
    """

    nats: float
    tokens: int
    n_characters: int
    n_bytes: int | None
    seconds: float
    token_nats: np.ndarray | None = field(default=None, repr=False)
    event_nats: np.ndarray | None = field(default=None, repr=False, kw_only=True)
    share: float = 1.0
    state: dict[str, torch.Tensor] | None = field(default=None, repr=False)
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

    def as_dict(self) -> dict[str, float | int | None]:
        """Return all figures for JSON, with None for infinity."""
        names = ("nats", "tokens", "n_characters", "n_bytes", "loss", "ppl", "bpc", "bpb", "seconds", "tokens_per_second")
        values = {name: getattr(self, name) for name in names}
        return {name: value if value is None or math.isfinite(value) else None for name, value in values.items()}


def evaluate(
    model: LanguageModel,
    token_ids: np.ndarray | torch.Tensor,
    *,
    tgt_len: int = 128,
    mem_len: int | None = None,
    batch_size: int = 1,
    same_length: bool | None = None,
    clamp_len: int | None = None,
    ext_len: int = 0,
    n_characters: int | None = None,
    n_bytes: int | None = None,
    precision: PrecisionName = "fp32",
    dynamic: Dynamic | None = None,
    cache: Cache | None = None,
    state: Mapping[str, torch.Tensor] | None = None,
    keep_state: bool = False,
    temperature: float | Sequence[float] = 1.0,
    per_token: bool = False,
    event: np.ndarray | None = None,
    on_tokens: Callable[[int], object] | None = None,
    world: World | None = None,
    execution: Execution = Execution(),
) -> Score:
    """Score a whole stream, every token counted once, with warm memory.

    Several processes divide the lanes, and each returns the score of all lanes. If each holds only a part of the weights, all
    of them read all lanes.

    Args:
        model: its mode (training or not) is restored afterwards.
        token_ids: integers (N,), N ≥ 2; may be memory-mapped.
        tgt_len: tokens per segment.
        mem_len: positions of memory; None: the model's; 0: none.
        batch_size: lanes read side by side, at most; fewer where lanes would be too short to warm up the next.
        same_length: the same number of keys for every query; None: as the model does.
        clamp_len: largest distance told apart; None: as the model does.
        ext_len: tokens before each segment that are read again with it instead of being remembered (the authors' extended
            context); their states are as new as the segment's, but they are computed twice.
        n_characters: characters of the predicted text, for `Score.bpc`; None: one per token.
        n_bytes: bytes of the predicted text, for `Score.bpb`.
        precision: of the matrix products, and of keys and values; int8 rounds the weights, auto takes what the device
            multiplies natively.
        dynamic: let a copy of the weights learn from each segment after it has been scored; `model` stays as it is. The text is
            read in one lane, so `batch_size` must be 1.
        cache: mix what followed similar states into the prediction. Lanes first read as many tokens as it keeps.
        state: `Score.state` of the text before, read with the same settings; the first of `token_ids` is then the last token
            of that text, whose length, less 1, must be a multiple of `tgt_len` to give the score of one text. `batch_size`
            must be 1.
        keep_state: return what is needed to go on, as `Score.state`; `batch_size` must be 1.
        temperature: divides the scores before the softmax, as `Sampling.temperature` does: p becomes p^(1/t) / Σ p^(1/t). Of
            several, the score is that of the first, and `Score.nats_at` has the total nats of each. Neither dynamic evaluation
            nor a cache goes with another than 1.
        per_token: keep the nats of every token.
        event: ids (E,); also keep, with `per_token`, the nats of any of them coming next: -log Σ p. Neither a temperature nor
            dynamic evaluation nor a cache goes with it.
        on_tokens: called with the number of tokens just scored here, for progress bars; on a GPU one segment late.
        world: the processes that score the stream together, each with the same arguments; None: this one alone.
        execution: how the model computes where it reads whole segments itself; kept keys are read in one way only.

    Returns:
        The score.

    Raises:
        CorpusError: fewer than two tokens.
        TokenizerError: ids outside the model's vocabulary.
        ConfigError: sizes below 1, a temperature that is not above 0, an unknown precision, `mem_len`, `clamp_len` and
            `same_length` that cannot work together, a model that does not read from left to right, or what cannot be done with
            dynamic evaluation, a cache or a state.
        TrainingError: dynamic evaluation diverged.
        ValueError: ids that are not integers, or of another shape; a state, or mean squares, of another model or settings.

    Example:
        >>> from transformer_xl import TransformerXL, TransformerXLConfig
        >>> model = TransformerXL(TransformerXLConfig(vocab_size=4, n_layer=1, d_model=8, n_head=1, d_head=8, d_inner=8))
        >>> evaluate(model, np.array([0, 1, 2, 3, 0, 1]), tgt_len=2).tokens
        5
    """
    check_reads_on(model)
    ids = np.asarray(token_ids)
    if ids.ndim != 1 or (ids.dtype.kind not in "iu" and ids.size):
        raise ValueError(f"token_ids, {ids.dtype} {ids.shape}, must be integers of shape (N,)")
    n_predicted = len(ids) - 1
    if n_predicted < 1:
        raise CorpusError(f"the text to score has {len(ids)} tokens; at least 2 are needed, because nothing predicts the first")
    if tgt_len < 1 or batch_size < 1 or ext_len < 0:
        raise ConfigError(
            f"tgt_len ({tgt_len}) and batch_size ({batch_size}) must be at least 1, and ext_len ({ext_len}) at least 0"
        )
    check_ids(ids, vocab_size=model.config.vocab_size or 0)
    temperatures = tuple(map(float, temperature if isinstance(temperature, Sequence) else [temperature]))
    _check_temperatures(temperatures, model, adapts=dynamic is not None or cache is not None)
    if event is not None and (temperatures != (1.0,) or dynamic or cache or model.is_sharded):
        raise ConfigError("an event goes with neither a temperature, dynamic evaluation, a cache nor a sharded model")
    everyone = world or World()
    carried = state is not None or keep_state
    _check_alone(model, everyone, batch_size, dynamic=dynamic is not None, cache=cache is not None, carried=carried)
    if not carried:
        tgt_len = min(tgt_len, n_predicted)
    chosen = (precision_of_learning if dynamic else precision_of_segments)(precision, model.device)
    world = World() if model.is_sharded else everyone
    kept_nats = torch.zeros(0 if not per_token else 1 if event is None else 2, n_predicted, dtype=torch.float32)
    begin, totals = time.perf_counter(), [0.0] * len(temperatures)
    with scoring(model):
        view = model.with_context(mem_len=mem_len, clamp_len=clamp_len, same_length=same_length, ext_len=ext_len)
        if not carried:
            view = view.for_text(len(ids))
        n_before = view.reach(tgt_len) + (math.ceil(cache.size / tgt_len) * tgt_len if cache else 0)
        n_lane = max(1, min(batch_size, n_predicted // max(n_before + ext_len, 1)))
        lanes = Lanes(ids, n_lane, tgt_len=tgt_len, ext_len=ext_len, world=world)
        how: dict[str, Any] = {"tgt_len": tgt_len, "precision": chosen, "execution": execution}
        rows = _Rows(view, lanes, n_before, dynamic, cache, temperatures, event, **how)
        if state is not None:
            rows.put(state)
        for segment, nll in rows.nats():
            totals = [total + float(own.double().sum()) for total, own in zip(totals, nll, strict=event is None)]
            kept_nats[:, segment.places[segment.is_scored]] = nll[: len(kept_nats), segment.is_scored].float()
            if on_tokens:
                on_tokens(int(segment.is_scored.sum()))
        left = rows.take() if keep_state else None
    # all processes need the same bits: if each has read all lanes, devices may differ in the last bit
    totals = everyone.from_first(totals) if model.is_sharded else world.sum(*totals)
    if per_token:
        world.add_(kept_nats)
    seconds = time.perf_counter() - begin
    kept = dict(zip(("token_nats", "event_nats"), kept_nats.numpy(), strict=False))
    nats_at = dict(zip(temperatures, totals, strict=True))
    return Score(totals[0], n_predicted, n_characters or n_predicted, n_bytes, seconds, **kept, state=left, nats_at=nats_at)


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


def _check_temperatures(temperatures: tuple[float, ...], model: LanguageModel, *, adapts: bool) -> None:
    """Refuse temperatures that are no divisors, and others than 1 where scores are not all at hand or are mixed."""
    if not temperatures or not all(0 < t < math.inf for t in temperatures):
        raise ConfigError(f"temperature ({', '.join(map(str, temperatures))}) must be above 0 and finite; 1 changes nothing")
    if temperatures == (1.0,):
        return
    if adapts:
        raise ConfigError("a temperature is for a model without dynamic evaluation and without a cache; leave one of them out")
    if model.is_sharded:
        raise ConfigError("a temperature needs all weights in one process; do not shard the model")


def _check_alone(model: LanguageModel, world: World, batch_size: int, *, dynamic: bool, cache: bool, carried: bool) -> None:
    """Refuse lanes and processes for what goes strictly from the beginning of a text to its end."""
    what = "dynamic evaluation" if dynamic else "a state that is handed over"
    if dynamic or carried:
        if batch_size > 1:
            raise ConfigError(f"{what} reads from beginning to end in one lane; set batch_size ({batch_size}) to 1")
        if not world.alone:
            raise ConfigError(f"{what} reads in one process, not in {world.size}; start it without torchrun")
    if model.is_sharded and (dynamic or carried or cache):
        raise ConfigError(f"{'a cache' if cache else what} needs all weights in one process; do not shard the model")


_LATE = 1
"""Segments that a GPU computes while the host still waits for the nats of the one before, so that it always has work."""


class _Rows:
    """The lanes of a text, read by a stream and with a cache, if there is one."""

    def __init__(
        self,
        view: LanguageModel,
        lanes: Lanes,
        n_before: int,
        dynamic: Dynamic | None,
        cache: Cache | None,
        temperatures: tuple[float, ...],
        event: np.ndarray | None,
        *,
        tgt_len: int,
        precision: InferencePrecision,
        execution: Execution,
    ) -> None:
        self._lanes, self._n_before, self._temperatures = lanes, n_before, temperatures
        self._event = None if event is None else torch.as_tensor(event, device=view.device)
        self._n_late = _LATE if view.device.type == "cuda" else 0
        self._n_cold = lanes.n_cold if n_before else lanes.n_lane  # rows that begin without memory
        n_row = lanes.n_lane - self._n_cold or self._n_cold or 1
        self.stream: Stream
        if dynamic:
            assert precision != "int8"  # see precision_of_learning
            self.stream = LearningState(view, dynamic, tgt_len=tgt_len, precision=precision, execution=execution)
        else:
            self.stream = open_stream(view, n_row, tgt_len=tgt_len, precision=precision, execution=execution)
        dtype = torch.promote_types(view.dtype, torch.float32)
        sizes = {"d_model": view.config.d_model, "tgt_len": tgt_len}
        self.cache = CacheRows(cache, n_row, **sizes, dtype=dtype, device=view.device) if cache else None

    def nats(self) -> Iterator[tuple[Cut, torch.Tensor]]:
        """Yield each segment of all lanes with the nats of its tokens at each temperature, (K, lanes, W) on the CPU.

        With an event, its nats follow.

        They are 0 where there is no label.
        """
        if not self._lanes.n_lane:
            return
        if self._n_cold < self._lanes.n_lane:  # let the other lanes read what stands before them
            for segment in self._lanes.before(self._n_before):
                nowhere = torch.full_like(segment.ids, NOT_SCORED)
                if self.cache:
                    self.cache.add(*_new(segment, self.stream.read_and_score(segment.ids, nowhere)[0]))
                else:
                    self.stream.score(segment.ids, nowhere)
            if self._n_cold:
                self.stream.prepend(self._n_cold)
                if self.cache:
                    self.cache.prepend(self._n_cold)
        late: deque[tuple[Cut, Readback]] = deque()
        for segment in self._lanes.segments(pad_left=self.stream.pads_left):
            late.append((segment, Readback(self._score(segment))))
            if len(late) > self._n_late:
                first, nats = late.popleft()
                yield first, nats.tensor
        yield from ((segment, nats.tensor) for segment, nats in late)

    def take(self) -> dict[str, torch.Tensor]:
        """Return what the only row knows, as tensors on the CPU by name."""
        parts = {"memory": self.stream.take(0)}
        if self.cache:
            parts["cache"] = self.cache.take(0)
        if isinstance(self.stream, LearningState):
            parts["weights"] = self.stream.take_weights()
        return {f"{part}.{name}": x.cpu() for part, tensors in parts.items() for name, x in tensors.items()}

    def put(self, state: Mapping[str, torch.Tensor]) -> None:
        """Let the only row go on from what `take` returned; ValueError if it does not fit."""

        def part(prefix: str) -> dict[str, torch.Tensor]:
            return {name.removeprefix(prefix): x for name, x in state.items() if name.startswith(prefix)}

        memory = part("memory.")
        check_names(state, self.take())
        self.stream.check(memory)
        if self.cache:
            self.cache.put(0, part("cache."))
        if isinstance(self.stream, LearningState):
            self.stream.put_weights(part("weights."))
        self.stream.put(0, memory)

    def _score(self, segment: Cut) -> torch.Tensor:
        if self._temperatures != (1.0,):
            return self.stream.score_at(segment.ids, segment.labels, self._temperatures, n_pad=segment.n_pad)
        if self._event is not None:
            return self.stream.score_event(segment.ids, segment.labels, self._event, n_pad=segment.n_pad)
        if not self.cache:
            return self.stream.score(segment.ids, segment.labels, n_pad=segment.n_pad)[None]
        h_BTD, nats_BT = self.stream.read_and_score(segment.ids, segment.labels, n_pad=segment.n_pad)
        n = segment.n_context
        return torch.cat([nats_BT[:, :n], self.cache.mix(nats_BT[:, n:], *_new(segment, h_BTD))], dim=1)[None]


def _new(segment: Cut, h_BTD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the states and labels of a segment without what was read again before it."""
    n = segment.n_context
    return h_BTD[:, n:], segment.labels[:, n:].to(h_BTD.device)


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

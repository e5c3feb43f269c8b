"""Score a model on a token stream: summed nats with their counts; every other unit is derived last.

The stream is read as one text. Every token but the very first, which nothing precedes, is predicted once, the first of each
segment too. Read in several lanes side by side, each lane first reads the tokens before its part, uncounted, so that its memory
is as warm as if it had come from there.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from transformer_xl.errors import ConfigError, CorpusError
from transformer_xl.model.call import Rows
from transformer_xl.model.frozen import InferencePrecision
from transformer_xl.model.key_value_memory import KeyValueMemory
from transformer_xl.model.language_model import LanguageModel, describe_reading
from transformer_xl.model.memory import Mems
from transformer_xl.model.precision import Precision, autocast
from transformer_xl.model.precision_names import PrecisionName, precision_of_segments
from transformer_xl.model.reader import Reader, keeps_keys
from transformer_xl.model.token_ids import check_ids
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.world import World, parts


@dataclass(frozen=True)
class Score:
    """The outcome of `evaluate`.

    Attributes:
        nats: total negative log-likelihood, summed in float64.
        tokens: predicted tokens.
        n_characters: characters that these tokens stand for; the number of tokens where it was not given.
        n_bytes: UTF-8 bytes that they stand for; None where it was not given.
        seconds: time it took.
        token_nats: float32 (tokens,), nats of each token in order; None unless asked for.
    """

    nats: float
    tokens: int
    n_characters: int
    n_bytes: int | None
    seconds: float
    token_nats: np.ndarray | None = field(default=None, repr=False)

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nats / self.tokens

    @property
    def ppl(self) -> float:
        """Perplexity per token; infinite where it exceeds a float."""
        return math.exp(self.loss) if self.loss < 709 else math.inf

    @property
    def bpc(self) -> float:
        """Bits per character."""
        return self.nats / self.n_characters / math.log(2)

    @property
    def bpb(self) -> float | None:
        """Bits per UTF-8 byte, None if the number of bytes is not known."""
        return None if self.n_bytes is None else self.nats / self.n_bytes / math.log(2)

    @property
    def tokens_per_second(self) -> float:
        """Predicted tokens per second."""
        return self.tokens / max(self.seconds, 1e-9)

    def as_dict(self) -> dict[str, float | int | None]:
        """Return all figures, for JSON, which knows no infinity: None stands for it."""
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
    per_token: bool = False,
    on_tokens: Callable[[int], object] | None = None,
    world: World | None = None,
) -> Score:
    """Score a whole stream, every token counted once, with warm memory.

    Several processes divide the lanes, and each returns the score of all of them; if they hold parts of the weights only, all
    read all lanes.

    Args:
        model: its mode (training or not) is restored afterwards.
        token_ids: integers (N,), N ≥ 2; may be memory-mapped.
        tgt_len: tokens per segment.
        mem_len: positions of memory; None: the model's; 0: none.
        batch_size: lanes read side by side, at most; fewer where lanes would be too short to warm up the next.
        same_length: the same number of keys for every query; None: as the model does.
        clamp_len: largest distance told apart; None: as the model does.
        ext_len: tokens before each segment that are read again with it instead of being remembered (the authors' extended
            context); their states are as new as the segment's, at the price of computing them twice.
        n_characters: characters of the predicted text, for `Score.bpc`; None: one per token.
        n_bytes: bytes of the predicted text, for `Score.bpb`.
        precision: of the matrix products, and of keys and values; int8 rounds the weights, auto takes what the device
            multiplies natively.
        per_token: keep the nats of every token.
        on_tokens: called with the number of tokens just scored here, for progress bars.
        world: the processes that score the stream together, each with the same arguments; None: this one alone.

    Returns:
        The score.

    Raises:
        CorpusError: fewer than two tokens.
        TokenizerError: ids outside the model's vocabulary.
        ConfigError: sizes below 1, an unknown precision, or `mem_len`, `clamp_len` and `same_length` that cannot work together.
        ValueError: ids that are no integers, or of another shape.

    Example:
        >>> from transformer_xl.model_config import TransformerXLConfig
        >>> model = TransformerXL(TransformerXLConfig(vocab_size=4, n_layer=1, d_model=8, n_head=1, d_head=8, d_inner=8))
        >>> evaluate(model, np.array([0, 1, 2, 3, 0, 1]), tgt_len=2).tokens
        5
    """
    ids = np.asarray(token_ids)
    if ids.ndim != 1 or (ids.dtype.kind not in "iu" and ids.size):
        raise ValueError(f"token_ids, {ids.dtype} {ids.shape}, must be integers of shape (N,)")
    n_predicted = len(ids) - 1
    if n_predicted < 1:
        raise CorpusError(f"the text to score has {len(ids)} tokens; at least 2 are needed, for the first is predicted by none")
    if tgt_len < 1 or batch_size < 1 or ext_len < 0:
        raise ConfigError(
            f"tgt_len ({tgt_len}) and batch_size ({batch_size}) must be at least 1, and ext_len ({ext_len}) at least 0"
        )
    check_ids(ids, vocab_size=model.config.vocab_size or 0)
    chosen = precision_of_segments(precision, model.device)
    view = model.with_context(mem_len=mem_len, clamp_len=clamp_len, same_length=same_length, ext_len=ext_len)
    reach = view.reach(tgt_len)
    everyone = world or World()
    world = World() if model.is_sharded else everyone
    lanes = _Lanes(ids, max(1, min(batch_size, n_predicted // max(reach + ext_len, 1))), tgt_len, ext_len, world)
    token_nats = torch.zeros(n_predicted) if per_token else None

    was_training = model.training
    model.eval()
    begin, total = time.perf_counter(), 0.0
    try:
        with torch.no_grad():
            for segment, nll in _nats(view, lanes, reach, chosen):
                total += float(nll.double().sum())
                scored = segment.labels >= 0
                if token_nats is not None:
                    token_nats[segment.place[scored]] = nll[scored].float()
                if on_tokens:
                    on_tokens(int(scored.sum()))
    finally:
        model.train(was_training)
    # all go on with the same bits: where each has read all lanes, unequal devices may differ in the last one
    (total,) = (everyone.from_first(total),) if model.is_sharded else world.sum(total)
    if token_nats is not None:
        world.add_(token_nats)
    seconds = time.perf_counter() - begin
    kept = None if token_nats is None else token_nats.numpy()
    return Score(total, n_predicted, n_characters or n_predicted, n_bytes, seconds, kept)


def _nats(
    model: LanguageModel, lanes: "_Lanes", reach: int, precision: InferencePrecision
) -> Iterator[tuple["_Segment", torch.Tensor]]:
    """Yield each segment of all lanes with the nats of its tokens, fp32 (lanes, W) on the CPU, 0 where there is no label."""
    if lanes.n_lane == 0:
        return iter(())
    if keeps_keys(model) and model.ext_len == 0 and not model.is_sharded:
        return _nats_of_kept_keys(model, lanes, reach, precision)
    if precision == "int8":
        raise ConfigError(
            f"precision int8 needs keys that stay the same; with {describe_reading(model)} and ext_len ({model.ext_len}) "
            "they do not: use bf16 or fp32"
        )
    return _nats_of_states(model, lanes, reach, precision)


def _nats_of_kept_keys(
    model: TransformerXL, lanes: "_Lanes", reach: int, precision: InferencePrecision
) -> Iterator[tuple["_Segment", torch.Tensor]]:
    """Read with frozen weights: no remembered position is projected twice."""
    reader = Reader(model, tgt_len=lanes.tgt_len, precision=precision)
    n_cold = lanes.n_cold if reach else lanes.n_lane
    memory = reader.empty_memory(lanes.n_lane - n_cold or n_cold)
    if n_cold < lanes.n_lane:
        for ids in lanes.before(reach).split(lanes.tgt_len, dim=1):
            reader.read(ids.to(model.device), memory)
    if 0 < n_cold < lanes.n_lane:
        cold = reader.empty_memory(n_cold)
        cold.end.copy_(memory.end[:n_cold])  # an empty ring may begin anywhere: beside the others, so that all are read at once
        memory = KeyValueMemory.concatenate([cold, memory])
    for at in range(0, lanes.length, lanes.tgt_len):
        segment = lanes.segment(at, pad_left=False)
        if not segment.ids.numel():  # the last lane is shorter, and may be this process's only one
            return
        h_BTD = reader.read(segment.ids.to(model.device), memory)
        yield (
            segment,
            reader.softmax.nll(h_BTD.flatten(0, 1), segment.labels.to(model.device).flatten()).view(segment.labels.shape).cpu(),
        )


def _nats_of_states(
    model: LanguageModel, lanes: "_Lanes", reach: int, precision: Precision
) -> Iterator[tuple["_Segment", torch.Tensor]]:
    """Read with hidden states as memory, where keys cannot be kept or the ends of segments are read twice."""
    with autocast(model.device, precision):
        mems = _warm_up(model, lanes, reach)
    for at in range(0, lanes.length, lanes.tgt_len):
        segment = lanes.segment(at)
        if not segment.ids.numel():
            return
        n_pad = None if segment.n_pad is None else segment.n_pad.to(model.device)
        with autocast(model.device, precision):
            out = model(segment.ids.to(model.device), mems=mems, labels=segment.labels.to(model.device), rows=Rows(n_pad=n_pad))
        mems = out.mems
        yield segment, out.nll.cpu()


@dataclass(frozen=True)
class _Segment:
    """What one forward pass reads: ids, labels and places in the stream (lanes, W), and how much of it is padding (lanes,)."""

    ids: torch.Tensor
    labels: torch.Tensor
    place: torch.Tensor
    n_pad: torch.Tensor | None


class _Lanes:
    """A stream cut into contiguous lanes; lane b predicts tokens b·n + 1 … (b + 1)·n, so that together they miss none.

    Each process has some of them.
    """

    def __init__(self, ids: np.ndarray, n_lane: int, tgt_len: int, ext_len: int, world: World) -> None:
        self.ids, self.tgt_len, self.ext_len = ids, tgt_len, ext_len
        self.length = math.ceil((len(ids) - 1) / n_lane / tgt_len) * tgt_len  # lanes begin where one lane's segments would
        n_all = math.ceil((len(ids) - 1) / self.length)  # so that rounding up leaves no lane empty
        self._own = parts(range(n_all), world)
        self.n_lane = len(self._own)
        self.n_cold = int(0 in self._own)  # lanes that begin with the stream, and so without memory

    def segment(self, at: int, *, pad_left: bool = True) -> _Segment:
        """Return what each lane reads at offset `at`: the extended context, and `tgt_len` tokens to score.

        Where the stream begins or ends within, a lane has fewer. Lanes end together, padded at the left, because some models
        count positions from the end of a segment; or they begin together, for models that do not mind what follows a text.
        """
        last = len(self.ids) - 1
        first = torch.tensor(self._own) * self.length + at
        end = (first + self.tgt_len).clamp(max=last)
        begin = torch.minimum((first - self.ext_len).clamp(min=0), end)
        width = int((end - begin).max())
        place = end[:, None] + torch.arange(-width, 0) if pad_left else begin[:, None] + torch.arange(width)
        n_pad = width - (end - begin)
        inputs = self.ids[place.clamp(min=0, max=last).numpy()].astype(np.int64)
        targets = self.ids[(place + 1).clamp(min=0, max=last).numpy()].astype(np.int64)
        scored = (place >= first[:, None]) & (place < end[:, None])
        labels = torch.from_numpy(targets).masked_fill(~scored, -100)
        return _Segment(torch.from_numpy(inputs), labels, place, n_pad if n_pad.any() else None)

    def before(self, n: int) -> torch.Tensor:
        """Return the `n` tokens before each lane but that which begins the stream, (lanes - n_cold, n)."""
        lanes = [self.ids[b * self.length - n : b * self.length] for b in self._own if b > 0]
        return torch.from_numpy(np.stack(lanes).astype(np.int64))


def _warm_up(model: LanguageModel, lanes: _Lanes, reach: int) -> Mems:
    """Fill the memory of every lane but the first by reading what stands before it, as far back as the layers reach."""
    if lanes.n_lane == lanes.n_cold or reach == 0:
        return model.init_mems(lanes.n_lane)
    mems = model.init_mems(lanes.n_lane - lanes.n_cold)
    for ids in lanes.before(reach + lanes.ext_len).unfold(1, lanes.tgt_len + lanes.ext_len, lanes.tgt_len).unbind(1):
        mems = model(ids.to(model.device), mems=mems).mems
    return Mems.concatenate([model.init_mems(1), mems]) if lanes.n_cold else mems

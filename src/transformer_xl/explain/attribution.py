"""Which tokens raised or lowered a prediction, and by how many nats.

Each token s has a gate g_s between 0 (left out) and 1 (there), which all heads of all layers obey. A query always sees itself.

    w_ts = g_s exp A_ts / Σ_r g_r exp A_tr    g_t = 1; see `kernels/equation.py` for A
    f(g) = log p(token), less log p(contrast)

    leave-out     f(1) - f(1, but g_s = 0)    exact: the prediction is computed again without each token
    gradient      ∂f/∂g_s at 1                the same to first order, for all tokens by one backward pass
    integrated    ∫ ∂f/∂g_s at (α, …, α) dα   from 0 to 1 in 16 steps; add up to f(1) - f(0) within about a tenth

Gates as in Michel et al. 2019 (arXiv 1905.10650), and not remembered states: where a layer norm comes first, a state's length
changes nothing, so state times gradient says next to nothing. The integral is that of Sundararajan et al. 2017 (arXiv
1703.01365). Without attention, gates multiply the vectors of tokens. What they do not reach stays: a memory from before the
first segment that obeys them, shifts, and n-grams.

Shapes: B rows, T tokens of a segment, S keys, N heads, G gates, K predictions.
"""

import copy
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from threading import get_ident
from typing import Any, Literal, NamedTuple, cast, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module

from transformer_xl.batch import NOT_SCORED, Order
from transformer_xl.errors import Bounds, ConfigError, did_you_mean
from transformer_xl.generation.inputs import integers, text_ids
from transformer_xl.kernels.device import in_full_precision
from transformer_xl.kernels.equation import Positions, relative_weights
from transformer_xl.model.attention.block import AttentionKind
from transformer_xl.model.attention.two_streams import Sight, TwoStreamAttention
from transformer_xl.model.base import LanguageModel, SequenceModel, check_reads_on
from transformer_xl.model.mask import Mask
from transformer_xl.model.memory import Memory
from transformer_xl.model.softmax import check_ids
from transformer_xl.model.xlnet import XLNet
from transformer_xl.reading.stream import scoring

Method = Literal["leave-out", "gradient", "integrated"]
_TOKENS, _WEIGHTS = 4096, 1 << 23  # read at once, and how much heads attend: 0.3 GB with a graph
_CLOSED = 1e-30  # a gate that lets nothing through beside a query's own key


class Attribution(NamedTuple):
    """What raised or lowered a prediction."""

    places: np.ndarray  # int64 (n,), the tokens that it could see, in the order of the text
    nats: np.ndarray  # float64 (n,), by how much each raised it; below 0: lowered
    log_p: float  # log-probability of the token, less that of the contrast
    without: float  # the same if no token sees another (an XLNet's target still sees each of them)

    def __repr__(self) -> str:
        first = "".join(f"{self.nats[i]:+.3f} by {self.places[i]}, " for i in np.argsort(-np.abs(self.nats), kind="stable")[:3])
        return f"Attribution({first}of {len(self.nats)} tokens, log_p={self.log_p:.4f}, without={self.without:.4f})"


def attribute(
    model: SequenceModel,
    ids: np.ndarray | Tensor,
    position: int,
    *,
    contrast: int | None = None,
    method: Method = "leave-out",
    tgt_len: int = 128,
    segments: int = 1,
) -> Attribution:
    """Say which tokens raised or lowered the prediction of a token, and by how many nats.

    The text is read as `evaluate` reads it, in segments with memory. The token right before the predicted one, from which it is
    predicted, cannot be left out and is not listed, except for a kind without attention. An XLNet sees both sides.

    Args:
        model: its mode (training or not) is restored afterwards; for another memory see `with_context`.
        ids: integers (N,), the text from its beginning on.
        position: which token of it is predicted, counted from 0 (the page of `txl explain` counts from 1).
        contrast: a token, to say why the model preferred the one at `position` to it; None: why that is likely.
        method: `leave-out` (exact), or the estimates `gradient` and `integrated`, see this module.
        tgt_len: tokens of a segment; give those of the run, `eval.tgt_len` or else `train.tgt_len`, as `txl explain` does.
        segments: in how many of the last ones a token is left out. Memory from before them stays as it was computed.

    Returns:
        Places and nats.

    Raises:
        ConfigError: a position that nothing predicts, a contrast equal to the token, an unknown method, sizes below 1, a model
            that is fine-tuned or has no weights, or leaving out where there is no attention.
        TokenizerError: ids or a contrast outside the vocabulary.
        ValueError: ids or a contrast that are not integers, or of another shape.

    Example:
        >>> from transformer_xl import TransformerXL, TransformerXLConfig
        >>> sizes = {"n_layer": 1, "d_model": 8, "n_head": 1, "d_head": 8, "d_inner": 8, "mem_len": 2}
        >>> model = TransformerXL(TransformerXLConfig(vocab_size=4, **sizes))
        >>> attribute(model, np.array([0, 1, 2, 3, 0, 1]), 5, tgt_len=2).places  # memory 2, 3; predicted from 4
        array([2, 3])
    """
    with scoring(model), in_full_precision(model.device):
        text, asked = ask(model, ids, position, contrast=contrast, tgt_len=tgt_len, segments=segments)
        if method not in get_args(Method):
            raise ConfigError(f"unknown method '{method}'; {did_you_mean(str(method), get_args(Method))}")
        attends = bool(model.attention_blocks())
        if method == "leave-out" and not attends:
            raise ConfigError(f"method '{method}' hides tokens from attention, and {model.described} has none; use 'gradient'")
        log_p, without = (float(text.log_p(torch.full((1, len(text.places)), gate), asked)) for gate in (1.0, _CLOSED))
        nats = text.left_out(asked)[:, 0] if method == "leave-out" else getattr(text, method)(asked)[0]
    seen = text.places != position if isinstance(model, XLNet) else text.places < position - attends
    return Attribution(text.places[seen], nats[seen], log_p, without)


Asked = tuple[Tensor, Tensor, Tensor]
"""Predictions, each int64 (B, K): which state predicts, the tokens, and what they are compared with (-100: nothing)."""


def ask(
    model: SequenceModel, ids: np.ndarray | Tensor, position: int, *, contrast: int | None, tgt_len: int, segments: int
) -> tuple["GatedText", Asked]:
    """Return the segments before a prediction, read within `scoring`, and the prediction; see `attribute`."""
    both_sides = isinstance(model, XLNet)
    if not both_sides:
        check_reads_on(model)
    text, first = text_ids(ids, "ids").numpy(force=True), int(not both_sides)
    check_ids(np.append(text, integers([] if contrast is None else [contrast], "contrast")), vocab_size=model.vocab_size)
    Bounds(2).check("the number of ids", len(text))
    Bounds(first, len(text) - 1, whole=True).check("position", position)
    for name, value in (("tgt_len", tgt_len), ("segments", segments)):
        Bounds(1, whole=True).check(name, value)
    query, label = position - first, int(text[position])
    if contrast == label:
        raise ConfigError(f"contrast ({contrast}) is the token at position {position} itself")
    if model.device.type == "meta":
        raise ConfigError("model is on the device 'meta', which holds no weights")
    # where later tokens of the segment change nothing, they are not read
    ends_here = isinstance(model, LanguageModel) and (model.keeps_keys or model.carries_state)
    text = text[: query + 1 if ends_here else len(text) - first]
    (read,) = gated_texts(model, text, {query // tgt_len * tgt_len}, tgt_len=tgt_len, segments=segments)
    T = read.pieces[-1][0].shape[1]
    at = torch.tensor([[T - read.end + query]])
    if both_sides:  # the query of g comes after all others
        rank = torch.full((1, T), -1).scatter(1, at, 0)
        read, at = replace(read, order=Order(rank, torch.zeros_like(rank), targets=at)), torch.tensor([[T]])
    return read, (at, torch.tensor([[label]]), torch.tensor([[NOT_SCORED if contrast is None else contrast]]))


Piece = tuple[Tensor, int, Memory]
"""What is read at once: ids (1, T), the place after them, and the memory before them."""


def gated_texts(
    model: SequenceModel, text: np.ndarray, begins: Collection[int], *, tgt_len: int, segments: int
) -> Iterator["GatedText"]:
    """Read a text (N,) within `scoring`, and yield its segments that begin at these places, each as the last of `segments`."""
    view: Any = model.for_text(len(text))
    view = copy.deepcopy(view).float() if view.dtype.itemsize < 4 else view  # rounded, what one token changes is noise
    # an empty memory equals that of the whole text after so many tokens
    warm = view.reach(tgt_len) + segments * tgt_len if isinstance(model, LanguageModel) else len(text)
    mems, pieces, place = view.init_mems(1), deque[Piece](maxlen=segments if view.mem_len else 1), 0
    for start in sorted({start for begin in begins for start in range(begin, max(begin - warm, -1), -tgt_len)}):
        if start > place:
            mems = view.init_mems(1)
        place = min(start + tgt_len, len(text))
        ids = torch.from_numpy(text[max(start - view.ext_len, 0) : place])[None].to(view.device)
        pieces.append((ids, place, mems))
        if start in begins:
            yield GatedText(view, tuple(pieces))
        mems = view.read(ids, mems=mems)[1]


@dataclass(frozen=True)
class GatedText:
    """The last segments of a text, and a gate for each of their tokens and of those in the memory before them."""

    model: SequenceModel
    pieces: tuple[Piece, ...]
    order: Order | None = None  # of an XLNet's last segment, of one row

    @cached_property
    def places(self) -> np.ndarray:
        """The tokens that have gates, int64 (G,)."""
        (ids, end, _), *_ = self.pieces
        n_memory = self.model.mem_len if self.model.attention_blocks() else 0
        return np.arange(max(end - ids.shape[1] - n_memory, 0), self.end)

    @property
    def end(self) -> int:
        """The place after the last token."""
        return self.pieces[-1][1]

    @property
    def _n_row(self) -> int:
        n_token, n_head = sum(ids.shape[1] for ids, *_ in self.pieces), sum(b.n_head for b in self.model.attention_blocks())
        return max(1, min(64, _TOKENS // n_token, _WEIGHTS // (n_token * len(self.places) * max(n_head, 1))))

    def log_p(self, gate_BG: Tensor, asked: Asked) -> Tensor:
        """Return log-probabilities (B, K), less those of what they are compared with, if tokens have these gates."""
        model: Any = self.model
        B, order, h_BXD = len(gate_BG), self.order, torch.empty(0)
        mems: Any = self.pieces[0][2].select(torch.zeros(B, dtype=torch.int64))
        for one, end, _ in self.pieces:
            ids, rows = one.expand(B, -1), None
            with gated(model, gate_BG.to(model.device, model.dtype), ends=end - int(self.places[0])):
                if not order:
                    h_BXD, mems = model.read(ids, mems=mems, keep_graph=True)
                    continue
                if end == self.end:
                    rows = Order(*(x.expand(B, -1).to(ids.device) for x in (order.rank, order.sees, order.targets)))
                h_BXD, mems = model.read(ids, order=rows, mems=mems, is_backward=ids[:, 0] < 0, keep_graph=True)
        columns, *labels = (x.expand(B, -1).to(h_BXD.device) for x in asked)
        h_BKD = h_BXD.gather(1, columns.unsqueeze(-1).expand(-1, -1, h_BXD.shape[-1]))
        nll, other = (model.softmax.nll(h_BKD, of, model.embedding) for of in labels)
        return other - nll

    def left_out(self, asked: Asked) -> np.ndarray:
        """Return the nats (G, K) that predictions of one row lose without each token."""
        gates = 1 - torch.eye(len(self.places))
        rest = torch.cat([self.log_p(some, asked) for some in gates.split(self._n_row)])
        return (self.log_p(torch.ones_like(gates[:1]), asked) - rest).double().cpu().numpy()

    def gradient(self, asked: Asked, gate: float = 1.0) -> np.ndarray:
        """Return the derivatives (B, G) of predictions, one of each row, by all gates, where all are the same."""
        grads = []
        for columns, labels, contrast in zip(*(x.split(self._n_row) for x in asked), strict=True):
            gate_BG = torch.full((len(columns), len(self.places)), gate, dtype=self.model.dtype, requires_grad=True)
            with torch.enable_grad():
                total = self.log_p(gate_BG, (columns, labels, contrast)).sum()
            grads.append(torch.autograd.grad(total, gate_BG)[0])
        return torch.cat(grads).double().cpu().numpy()

    def integrated(self, asked: Asked) -> np.ndarray:
        """Return the mean of `gradient` on the way from closed to open gates, (B, G)."""
        # near 0 a gate counts beside the query's own key: so there the steps (Gauss-Legendre) are short
        at, weight = np.polynomial.legendre.leggauss(16)
        at = (at + 1) / 2
        return np.tensordot(weight * 2 * at**3, [self.gradient(asked, gate) for gate in at**4], axes=1)

    def attention(self) -> np.ndarray:
        """Return how much the tokens of the last segment attend to what it sees, (T, G): the mean of all heads and layers."""
        (ids, _, mems), model = self.pieces[-1], cast("LanguageModel", self.model)
        means, _ = model.attention_weights(ids, mems=mems, keep=lambda _, weight_BNTS: weight_BNTS[0].mean(0))
        return torch.stack(means).mean(0)[:, -len(self.places) :].cpu().numpy()


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Return Spearman's rank correlation of two series (n,); 0 where one has no order."""
    ranks = np.stack([np.searchsorted(np.sort(x), x) + np.searchsorted(np.sort(x), x, side="right") for x in (a, b)])
    return float(torch.corrcoef(torch.from_numpy(ranks).double())[0, 1]) if (np.ptp(ranks, axis=1) > 0).all() else 0.0


@contextmanager
def gated(model: SequenceModel, gate_BG: Tensor, *, ends: int) -> Iterator[None]:
    """Let a model that this thread reads in this context a segment with, which ends before gate number `ends`, obey gates."""
    reader = get_ident()

    def of_keys(n_key: int) -> Tensor:
        return F.pad(gate_BG[:, max(ends - n_key, 0) : ends], (max(n_key - ends, 0), 0), value=1.0)  # what is before stays

    def attend(q: Tensor, k: Tensor, v: Tensor, positions: Positions, *, first_BT: Tensor, dropatt: float = 0.0) -> Tensor:
        exact = torch.float32 if q.device.type == "mps" else torch.float64  # what a sharp head leaves to others is tiny
        weight_BNTS = relative_weights(q.to(exact), k.to(exact), positions, first_BT=first_BT)
        own_TS = torch.eye(k.shape[1], dtype=torch.bool, device=q.device)[-q.shape[1] :]
        gate_BTS = of_keys(k.shape[1]).unsqueeze(1).masked_fill(own_TS, 1.0)
        weight_BNTS = weight_BNTS * gate_BTS.unsqueeze(1) + own_TS.to(exact) * torch.finfo(exact).tiny  # or 0 / 0
        return torch.einsum("bnts,bsnh->btnh", (weight_BNTS / weight_BNTS.sum(-1, keepdim=True)).to(v.dtype), v)

    def obey(block: AttentionKind, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if get_ident() != reader:
            return None
        if isinstance(block, TwoStreamAttention):
            sight = options["sight"]
            return arguments, {**options, "sight": sight._replace(hidden=_added(of_keys(sight.hidden.shape[2]), sight))}
        mask = options.get("mask")
        if mask is None:  # a model without memory may say nothing where each token sees all before it
            nothing = torch.zeros_like(gate_BG[:, 0], dtype=torch.int64)
            mask = Mask.of(None, nothing, None, tgt_len=arguments[0].shape[1], memory_length=0)
        return arguments, {**options, "mask": mask, "backend": attend}

    def multiply(embedding: Module, ids: tuple[Tensor, ...], x_BTD: Tensor) -> Tensor:
        return x_BTD * of_keys(x_BTD.shape[1]).unsqueeze(-1) if get_ident() == reader else x_BTD

    with ExitStack() as hooks:
        blocks = model.attention_blocks()
        for block in blocks:
            hooks.enter_context(block.register_forward_pre_hook(obey, with_kwargs=True))
        if not blocks:
            hooks.enter_context(model.embedding.register_forward_hook(multiply))
        yield


def _added(gate_BS: Tensor, sight: Sight) -> Tensor:
    """Return what gates, and what is hidden, add to the scores of an XLNet, (B, Q, S); a token sees itself."""
    Q, S = sight.hidden.shape[1:]
    T, low = Q - sight.targets.shape[1], torch.finfo(gate_BS.dtype).min / 2
    own_QS = F.pad(torch.eye(T, dtype=torch.bool, device=gate_BS.device), (S - T, 0, 0, Q - T))
    return gate_BS.log().clamp(min=low).unsqueeze(1).masked_fill(own_QS, 0.0).masked_fill(sight.hidden, low)

"""A Transformer-XL layer with frozen weights, over keys and values in ring buffers: a segment, or one token of each row.

The attention is that of the model (`kernels/equation.py`), arranged for frozen weights:

    A_ij = ((q_i + u)·k_j + (q_i + v)·r_{i-j} + b_{i-j}) / √H

with r computed once for each distance. In the paper's attention r = W_kR R, and there is no b. In Shaw's, r and b are learned
and there is no v. ALiBi has only b. With rotary positions (`attention/rotary.py`) there is only q_i·k_j: both are turned by
their positions in the stream before keys are written, so what was written stays as it is.

Shapes: B rows, T tokens, C slots, P distances with a key of their own, N heads, H d_head, D d_model.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from transformer_xl.inference.buffer import Rings, runs, slot_of
from transformer_xl.inference.frozen import (
    FrozenGate,
    LayerOptions,
    LayerWeights,
    Matrix,
    Norm,
    Product,
    product,
    streamed_product,
)
from transformer_xl.kernels.choose import Attention
from transformer_xl.kernels.cpu_linear import products
from transformer_xl.kernels.device import at_least_fp32
from transformer_xl.kernels.equation import Positions, hidden_keys, plus
from transformer_xl.kernels.rotation import Turns, turned
from transformer_xl.model.gates import gru_gate
from transformer_xl.model.layers import activate

_CACHED_BYTES = 4 << 20
"""Scores of a segment that a CPU computes at once: few enough to stay in its cache between products."""

_HELD_BYTES = 1 << 27
"""The same on other devices, where only memory limits them."""

Attend = Callable[[Tensor, Tensor, Tensor, Rings, LayerWeights, Any], Tensor]
"""Takes queries, keys and values of what is read, (…, N, H), writes keys and values into the rings, and returns what queries
gather from these, (…, N, H)."""


class Way(NamedTuple):
    """How a layer is computed."""

    product: Product
    attend: Attend
    normalize_sum: Callable[[Tensor, Tensor, Norm, LayerOptions], Tensor] | None = None
    """The norm of the sum of states and of what a block found, in one step; None: in two."""


def read_layer(
    h: Tensor,
    weights: LayerWeights,
    rings: Rings,
    *,
    places: Any,
    options: LayerOptions,
    way: Way,
    before_BkD: Tensor | None = None,
    turns: Turns | None = None,
) -> Tensor:
    """Run one layer over a segment, or over one token of each row, and keep its keys and values.

    Args:
        h: the layer's input, (B, T, D); of single tokens (B, D).
        weights: of the layer.
        rings: of keys and values; written in place.
        places: where what is read stands in the rings, and what it sees, as `way.attend` wants to know it.
        options: of all layers.
        way: how to compute.
        before_BkD: inputs of the layer at the k positions before; None: it has no shift.
        turns: of the positions, (B or 1, T, 1, H / 2) or (B, 1, H / 2); None: queries and keys are not turned.

    Returns:
        The layer's output, like `h`.
    """
    joined = None if before_BkD is None else torch.cat([before_BkD, h.reshape(len(h), -1, h.shape[-1])], dim=1)

    def multiply(x: Tensor, matrix: Matrix, bias: Tensor | None = None) -> Tensor:
        return way.product(x, matrix, rings.keys.dtype, bias)

    def enter(h: Tensor, norm: Norm) -> Tensor:
        x = h if joined is None or weights.shift is None else shifted(h, joined, *weights.shift)
        return normalize(x, norm, options) if options.pre_lnorm else x

    def close(h: Tensor, found: Tensor, gate: FrozenGate | None, norm: Norm) -> Tensor:
        if way.normalize_sum and gate is None and not options.pre_lnorm:
            return way.normalize_sum(h, found, norm, options)
        h = h + found if gate is None else _gated(h, found.to(h.dtype), gate, multiply)
        return h if options.pre_lnorm else normalize(h, norm, options)

    qkv = multiply(enter(h, weights.attention_norm), weights.qkv)
    q, k, v = qkv.view(*qkv.shape[:-1], 3, options.n_head, options.d_head).unbind(-3)
    if turns is not None:
        q, k = turned(at_least_fp32(q), *turns), turned(k, *turns)
    attended = way.attend(q, k, v, rings, weights, places)
    h = close(h, multiply(attended.flatten(-2), weights.output), weights.attention_gate, weights.attention_norm)
    inner = activate(multiply(enter(h, weights.feed_forward_norm), weights.inner, weights.inner_bias), options.activation)
    found = multiply(inner, weights.outer, weights.outer_bias)
    return close(h, found, weights.feed_forward_gate, weights.feed_forward_norm)


def shifted(x: Tensor, joined_BLD: Tensor, own: Tensor, taps_kD: Tensor) -> Tensor:
    """Return what a block reads instead of `x`, (B, T, D) or one token (B, D); `joined_BLD` are the inputs that it sees."""
    k = len(taps_kD)
    if x.dim() == 2:
        return own * x + (joined_BLD[:, :k] * taps_kD.flip(0)).sum(1)
    windows_BTDk = joined_BLD[:, :-1].unfold(1, k, 1)
    return own * x + torch.einsum("btdk,kd->btd", windows_BTDk, taps_kD.flip(0))


def normalize(h: Tensor, norm: Norm, options: LayerOptions) -> Tensor:
    """Apply a layer norm."""
    return F.layer_norm(h, h.shape[-1:], *norm, options.layer_norm_epsilon)


def _gated(h: Tensor, found: Tensor, gate: FrozenGate, multiply: Callable[[Tensor, Matrix], Tensor]) -> Tensor:
    return gru_gate(h, found, gate.bias, *(lambda x, net=net: multiply(x, net).to(h.dtype) for net in gate[1:]))


# a segment


@dataclass(frozen=True)
class SegmentPlaces:
    """Where a segment stands in the rings, and what it sees.

    Attributes:
        oldest: int64 (B or 1, 1), each row's slot of the key that is first in time; those of the segment are last.
        n_slot: C.
        first: int64 (B or 1, T), the first key that each query sees, in the order of time; it sees all from there to its own.
        common_oldest: the slot in `oldest`, where all rows have the same and the host knows it.
        dtype: of scores.
    """

    oldest: Tensor
    n_slot: int
    first: Tensor
    common_oldest: int | None
    dtype: torch.dtype
    _room: list[Tensor] = field(default_factory=list)

    def room(self, n_score: int) -> Tensor:
        """Return memory for scores, at most as many as at first, the same for all layers.

        The system gives out so large a piece page by page. Once for each group, that takes a fifth of the time of all the rest.
        """
        if not self._room:
            self._room.append(torch.empty(n_score, dtype=self.dtype, device=self.first.device))
        return self._room[0][:n_score]

    @cached_property
    def slots(self) -> Tensor:
        """int64 (B or 1, C), each row's slots in the order of time."""
        return slot_of(self.oldest + torch.arange(self.n_slot, device=self.oldest.device), self.n_slot)

    @cached_property
    def hidden(self) -> list[tuple[slice, Tensor]]:
        """Runs of keys that some query must not see, as they lie; for each (B or 1, T, keys), -inf where hidden, else 0.

        They are added, which takes a fraction of the time of filling.
        """
        T, C = self.first.shape[1], self.n_slot
        hidden_BTC = hidden_keys(self.first, C)
        bias_BTC = torch.zeros((), dtype=self.dtype, device=hidden_BTC.device).masked_fill(hidden_BTC, float("-inf"))
        if self.common_oldest is None:
            return [(slice(None), bias_BTC)]
        # later tokens than some query, and on from the oldest key; with a full memory most keys are not hidden from any query
        n_hidden, bias_BTC = min(C, T - 1 + int(self.first.max())), bias_BTC.roll(T - 1, -1)
        return [(slots, bias_BTC[..., columns]) for slots, columns in runs((self.common_oldest - T + 1) % C, n_hidden, C)]


def attend_segment(
    q_BTNH: Tensor, k_BTNH: Tensor, v_BTNH: Tensor, rings: Rings, weights: LayerWeights, places: SegmentPlaces
) -> Tensor:
    """Attend from a segment to the rings by the library's products, (B, T, N, H), some heads and rows at a time.

    So the scores of a group are still in a CPU's cache when the next step reads them. Rings whose rows stand at one slot are
    read as they lie, others from copies in the order of time, which have far fewer numbers than the scores.
    """
    (B, T, N, H), C, P, dtype = q_BTNH.shape, rings.keys.shape[2], weights.n_distance, rings.keys.dtype
    if places.common_oldest is None:
        rings.write(k_BTNH, v_BTNH, places.slots[:, C - T :])
        keys_NBCH, values_NBHC = rings.in_order(places.slots)
    else:
        rings.write_at(k_BTNH, v_BTNH, (places.common_oldest - T) % C)
        keys_NBCH, values_NBHC = rings
    q_BTNH = at_least_fp32(q_BTNH)
    by_content, by_position = (
        (plus(q_BTNH, bias) * H**-0.5).to(dtype).permute(2, 0, 1, 3) for bias in (weights.content_bias, weights.position_bias)
    )
    r_NWH, b_NW = (_of_newest(x, min(C, P + T - 1)) for x in (weights.position_keys, weights.distance_bias))
    older_N111 = None if b_NW is None else (b_NW[:, :1, None, None] * H**-0.5).to(dtype)
    attended_NBTH = torch.empty(N, B, T, H, dtype=dtype, device=q_BTNH.device)
    for heads, rows in _groups(by_content, C):
        query = by_content[heads, rows]
        score_NBTC = places.room(query.shape[:3].numel() * C).view(*query.shape[:3], C)
        score = score_NBTC.flatten(0, 1)
        products(query.flatten(0, 1), keys_NBCH[heads, rows].flatten(0, 1), out=score)
        if P > 1:
            found = _position_scores(by_position[heads, rows], *(x if x is None else x[heads] for x in (r_NWH, b_NW)))
            older = None if older_N111 is None else older_N111[heads]
            _add_positions(score_NBTC, found, older, oldest=places.common_oldest or 0)
        for slots, hidden_BTX in places.hidden:
            score_NBTC[..., slots].add_(hidden_BTX if len(hidden_BTX) == 1 else hidden_BTX[rows])
        torch.softmax(score, dim=-1, out=score)
        products(score, values_NBHC[heads, rows].flatten(0, 1), out=attended_NBTH[heads, rows].view(-1, T, H))
    return attended_NBTH.permute(1, 2, 0, 3)


def _of_newest(by_distance: Tensor | None, n_key: int) -> Tensor | None:
    """Return r (N, W, H) or b (N, W) of the W newest keys of a segment's last token; farther ones have that of P - 1."""
    if by_distance is None or by_distance.shape[1] == n_key:
        return by_distance
    n_farther = n_key - by_distance.shape[1]
    return torch.cat([by_distance[:, :1].expand(-1, n_farther, *by_distance.shape[2:]), by_distance], dim=1)


def _position_scores(query_NBTH: Tensor, r_NWH: Tensor | None, b_NW: Tensor | None) -> Tensor:
    """Return what distance adds to the scores of the W newest keys, (N, B or 1, T, W).

    Scores of distances are shifted (`rel_shift`) by a view, which holds meaningless numbers for keys after a query.
    """
    N, B, T, H = query_NBTH.shape
    score_NXW = None if r_NWH is None else products(query_NBTH.reshape(N, B * T, H), r_NWH)
    if b_NW is not None:
        b_N1W = b_NW.unsqueeze(1) * H**-0.5
        B, score_NXW = (1, b_N1W.repeat(1, T, 1)) if score_NXW is None else (B, score_NXW.add_(b_N1W))
    assert score_NXW is not None
    W = score_NXW.shape[-1]
    return score_NXW.as_strided((N, B, T, W), (B * T * W, T * W, W - 1, 1), T - 1)


def _add_positions(score_NBTC: Tensor, found_NBTW: Tensor, older_N111: Tensor | None, *, oldest: int) -> None:
    """Add to the scores of the W newest keys, which lie before `oldest` in the ring, and if it is no more, on from its end.

    The others have one b in common, `older_N111`; None: nothing.
    """
    W, C = found_NBTW.shape[-1], score_NBTC.shape[-1]
    for slots, columns in runs((oldest - W) % C, W, C):
        score_NBTC[..., slots].add_(found_NBTW[..., columns])
    if older_N111 is not None:
        for slots, _ in runs(oldest, C - W, C):
            score_NBTC[..., slots].add_(older_N111)


def _groups(query_NBTH: Tensor, n_slot: int) -> Iterator[tuple[slice, slice]]:
    """Yield groups of heads and rows whose scores are not too many at once."""
    N, B, T, _ = query_NBTH.shape
    most = _CACHED_BYTES if query_NBTH.device.type == "cpu" else _HELD_BYTES
    n_fit = max(1, most // (T * n_slot * query_NBTH.element_size()))
    n_row, n_head = min(B, n_fit), max(1, min(N, n_fit // B))
    for head, row in itertools.product(range(0, N, n_head), range(0, B, n_row)):
        yield slice(head, head + n_head), slice(row, row + n_row)


def attend_by_kernel(
    q_BTNH: Tensor,
    k_BTNH: Tensor,
    v_BTNH: Tensor,
    rings: Rings,
    weights: LayerWeights,
    places: SegmentPlaces,
    *,
    backend: Attention,
) -> Tensor:
    """Attend from a segment to the rings by a backend of training whose kernel holds no scores by content, (B, T, N, H).

    For positions that are u, v and r.
    """
    T, C = q_BTNH.shape[1], rings.keys.shape[2]
    rings.write(k_BTNH, v_BTNH, places.slots[:, C - T :])
    keys_NBCH, values_NBHC = rings.in_order(places.slots)
    r_NCH = _of_newest(weights.position_keys, C)
    positions = Positions(weights.content_bias, weights.position_bias, None if r_NCH is None else r_NCH.transpose(0, 1))
    k_BCNH, v_BCNH = keys_NBCH.permute(1, 2, 0, 3), values_NBHC.permute(1, 3, 0, 2)
    return backend(q_BTNH.to(k_BCNH.dtype), k_BCNH, v_BCNH, positions, first_BT=places.first)


# one token of each row


class TokenPlaces(NamedTuple):
    """Where each row's token stands in the rings, and what it sees."""

    slot: Tensor
    """int64 (B), where the token goes."""
    columns: Tensor
    """int64 (B, C), for each slot the column of the position keys for its distance."""
    bias: Tensor
    """(B, C), -inf where a row must not see a slot, else 0."""

    @classmethod
    def of(cls, end_B: Tensor, farthest_B: Tensor, *, n_slot: int, n_distance: int) -> "TokenPlaces":
        """Return the places of tokens at positions `end_B` that see keys up to distances `farthest_B`, int64."""
        slot_B = slot_of(end_B, n_slot)
        distance_BC = (slot_B.unsqueeze(1) - torch.arange(n_slot, device=slot_B.device)) % n_slot
        is_seen_BC = distance_BC <= farthest_B.unsqueeze(1)
        bias_BC = torch.zeros((), device=slot_B.device).where(is_seen_BC, float("-inf"))
        return cls(slot_B, (n_distance - 1 - distance_BC).clamp(min=0), bias_BC)


def attend_token(
    q_BNH: Tensor,
    k_BNH: Tensor,
    v_BNH: Tensor,
    rings: Rings,
    weights: LayerWeights,
    places: TokenPlaces,
    *,
    streamed: bool = False,
) -> Tensor:
    """Attend from one token of each row to the rings, (B, N, H), slot by slot, in shapes and steps that never change.

    `streamed` writes products as multiplications and sums, which a compiler turns into loops, instead of calling matmul.
    """
    rings.write(k_BNH, v_BNH, places.slot)
    times = _streamed_times if streamed else _times
    q_BNH = at_least_fp32(q_BNH)
    by_content, by_position = (plus(q_BNH, bias).transpose(0, 1) for bias in (weights.content_bias, weights.position_bias))
    score_NBC = times(rings.keys, by_content)
    if weights.position_keys is not None:
        if streamed:  # position keys are fetched in the order of slots: to fetch scores instead would be a loop of its own
            score_NBC = score_NBC + times(weights.position_keys[:, places.columns], by_position)
        else:
            score_NBP = torch.bmm(by_position.to(rings.keys.dtype), weights.position_keys.mT).to(score_NBC.dtype)
            score_NBC = score_NBC + score_NBP.gather(-1, places.columns.expand(score_NBC.shape))
    if weights.distance_bias is not None:
        score_NBC = score_NBC + weights.distance_bias[:, places.columns]
    weight_NBC = (score_NBC * q_BNH.shape[-1] ** -0.5 + places.bias).softmax(-1)
    return times(rings.values, weight_NBC).transpose(0, 1)


def _times(matrix: Tensor, vector: Tensor) -> Tensor:
    """Return the products of matrices (…, O, I) with vectors (…, I), in the type of the vectors."""
    return torch.matmul(vector.to(matrix.dtype).unsqueeze(-2), matrix.mT).squeeze(-2).to(vector.dtype)


def _streamed_times(matrix: Tensor, vector: Tensor) -> Tensor:
    return (matrix.to(vector.dtype) * vector.unsqueeze(-2)).sum(-1)


SEGMENT = Way(product, attend_segment)
TOKEN = Way(product, attend_token)
STREAMED = Way(streamed_product, partial(attend_token, streamed=True))
"""`STREAMED` computes what `TOKEN` does, one token of each row, in the form that a compiler fuses best."""

"""A Transformer-XL layer with frozen weights, over keys and values in ring buffers: a whole segment at once, or one token.

Weights are multiplied in fp32, bf16, fp16, or int8 with a scale per output channel. The attention is that of the model
(`attention/relative.py`, `attention/shaw.py`, `attention/alibi.py`), arranged for frozen weights:

    A_ij = ((q_i + u)·k_j + (q_i + v)·r_{i-j} + b_{i-j}) / √H

with r computed once for each distance. In the paper's attention r = W_kR R, and there is no b. In Shaw's, r and b are learned
and there is no v. ALiBi has only b. With rotary positions (`attention/rotary.py`) there is only q_i·k_j: both are turned by
their positions in the stream before keys are written, so what was written stays as it is.

Shapes: B rows, T tokens, C slots, P distances with a key of their own, N heads, H d_head, D d_model, I inputs, O outputs.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from transformer_xl.config.model import Activation
from transformer_xl.kernels.device import InferencePrecision, activation_dtype, at_least_fp32
from transformer_xl.kernels.equation import Positions
from transformer_xl.kernels.rotation import turned
from transformer_xl.model.attention.block import AttentionKind
from transformer_xl.model.gates import Gate, gru_gate
from transformer_xl.model.layers import DecoderLayer, FeedForward, ShiftedLayer, activate
from transformer_xl.model.shift import with_before

# weights


class Matrix(NamedTuple):
    """A weight matrix (O, I), and for int8 the scale of each output channel, fp32 (O,)."""

    weight: Tensor
    scale: Tensor | None = None


Norm = tuple[Tensor, Tensor]
"""Weight and bias of a layer norm."""

Product = Callable[[Tensor, Matrix, torch.dtype, Tensor | None], Tensor]
"""How vectors are multiplied by weights: `product` or `streamed_product`."""


class LayerWeights(NamedTuple):
    """All numbers of one layer; tensors alone, so that one compiled function serves every layer."""

    qkv: Matrix
    output: Matrix
    attention_norm: Norm
    inner: Matrix
    inner_bias: Tensor
    outer: Matrix
    outer_bias: Tensor
    feed_forward_norm: Norm
    content_bias: Tensor | None
    """u, (N, H): added to queries that are compared with keys."""
    position_bias: Tensor | None
    """v, (N, H): added to queries that are compared with position keys."""
    position_keys: Tensor | None
    """r of the distances P - 1, …, 0; (N, P, H). Farther ones have the key of P - 1."""
    distance_bias: Tensor | None
    """b, what a distance adds to a score whatever the query, (N, P)."""
    shift: tuple[Tensor, Tensor] | None
    """Weights (D,) and (k, D) of what both blocks read of a token and of those before it; see `Shift.kernel`."""
    attention_gate: "FrozenGate | None"
    feed_forward_gate: "FrozenGate | None"

    @property
    def n_distance(self) -> int:
        """P, distances that scores are told apart by, whatever the content."""
        by_distance = self.distance_bias if self.position_keys is None else self.position_keys
        return 1 if by_distance is None else by_distance.shape[1]


class FrozenGate(NamedTuple):
    """The numbers of a `Gate`."""

    bias: Tensor
    x: Matrix
    y: Matrix
    candidate: Matrix


Turns = tuple[Tensor, Tensor]
"""Cosines and sines that queries and keys of positions are turned by, see `rotation.turns`."""


class LayerOptions(NamedTuple):
    """What all layers of a model have in common."""

    n_head: int
    d_head: int
    pre_lnorm: bool
    layer_norm_epsilon: float
    activation: Activation


def freeze(weight: Tensor, precision: InferencePrecision) -> Matrix:
    """Return a weight matrix (O, I) as inference multiplies by it; in fp32 it is shared, not copied.

    int8 rounds each output channel to 255 steps between plus and minus its largest magnitude.

    Example:
        >>> matrix = freeze(torch.tensor([[1.27, -0.5]]), "int8")
        >>> matrix.weight.tolist(), round(matrix.scale.item(), 4)
        ([[127, -50]], 0.01)
    """
    weight = weight.detach()
    if precision == "int8":
        scale = weight.abs().amax(dim=1).float().clamp(min=torch.finfo(torch.float32).tiny) / 127
        return Matrix((weight / scale.unsqueeze(1)).round_().to(torch.int8), scale)
    return Matrix(weight.to(activation_dtype(precision, weight.dtype)))


def freeze_vector(parameter: Tensor) -> Tensor:
    """Return a parameter that is added to hidden states or scales them: always in fp32 at least."""
    return at_least_fp32(parameter.detach())


def freeze_norm(norm: nn.LayerNorm) -> Norm:
    """Return weight and bias of a layer norm."""
    return freeze_vector(norm.weight), freeze_vector(norm.bias)


def freeze_layer(layer: DecoderLayer, positions: Positions, precision: InferencePrecision) -> LayerWeights:
    """Return what one layer computes with."""
    attention, feed_forward = cast(AttentionKind, layer.attention), cast(FeedForward, layer.feed_forward)
    inner, outer = feed_forward.inner, feed_forward.outer
    u, v, keys_PNH, bias_PN, *_ = attention.complete(positions)
    return LayerWeights(
        qkv=freeze(attention.qkv_net.weight, precision),
        output=freeze(attention.o_net.weight, precision),
        attention_norm=freeze_norm(attention.layer_norm),
        inner=freeze(inner.weight, precision),
        inner_bias=freeze_vector(inner.bias),
        outer=freeze(outer.weight, precision),
        outer_bias=freeze_vector(outer.bias),
        feed_forward_norm=freeze_norm(feed_forward.layer_norm),
        content_bias=None if u is None else freeze_vector(u),
        position_bias=None if v is None else freeze_vector(v),
        position_keys=None if keys_PNH is None else _heads_first(keys_PNH, precision),
        distance_bias=None if bias_PN is None else freeze_vector(bias_PN.T).contiguous(),
        shift=_frozen_shift(layer),
        attention_gate=_frozen_gate(attention.gate, precision),
        feed_forward_gate=_frozen_gate(feed_forward.gate, precision),
    )


def _frozen_gate(gate: Gate | None, precision: InferencePrecision) -> FrozenGate | None:
    if gate is None:
        return None
    nets = (gate.x_net, gate.y_net, gate.candidate_net)
    return FrozenGate(freeze_vector(gate.bias), *(freeze(net.weight, precision) for net in nets))


def _join(h: Tensor, found: Tensor, gate: FrozenGate | None, product: Product, dtype: torch.dtype) -> Tensor:
    """Return the sum of states and what a block found, or what a gate makes of them."""
    if gate is None:
        return h + found
    found = found.to(h.dtype)
    return gru_gate(h, found, gate.bias, *(partial(_net, matrix, product, dtype, h.dtype) for matrix in gate[1:]))


def _net(matrix: Matrix, product: Product, dtype: torch.dtype, result: torch.dtype, x: Tensor) -> Tensor:
    return product(x, matrix, dtype, None).to(result)


def _frozen_shift(layer: DecoderLayer) -> tuple[Tensor, Tensor] | None:
    if not isinstance(layer, ShiftedLayer):
        return None
    norm = cast(FeedForward, layer.feed_forward).layer_norm
    own, taps = (freeze_vector(x.to(norm.weight)) for x in layer.shift.kernel(len(norm.weight)))
    return own, taps


def _heads_first(keys_PNH: Tensor, precision: InferencePrecision) -> Tensor:
    return keys_PNH.detach().transpose(0, 1).to(activation_dtype(precision, keys_PNH.dtype)).contiguous()


# products


def product(x_XI: Tensor, matrix: Matrix, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + bias, (…, O), as the library's matrix product in `dtype`."""
    if matrix.scale is None:
        return F.linear(x_XI.to(dtype), matrix.weight, None if bias is None else bias.to(dtype))
    y = F.linear(x_XI.to(dtype), matrix.weight.to(dtype)) * matrix.scale
    return y if bias is None else y + bias


def streamed_product(x_BI: Tensor, matrix: Matrix, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + bias, (B, O), as multiplications and sums, for a compiler.

    A product with a single row takes as long as reading the weights. Compiled, these loops read them at the memory's speed and
    turn them to fp32 on the way; the libraries' matrix-vector products take two to four times as long. From two rows on, the
    libraries' products are faster.
    """
    if x_BI.shape[0] > 1:
        return product(x_BI, matrix, dtype, bias)
    y = (matrix.weight.to(x_BI.dtype) * x_BI).sum(-1).unsqueeze(0)
    y = y if matrix.scale is None else y * matrix.scale
    return y if bias is None else y + bias


def project(
    h: Tensor, joined: Tensor | None, weights: LayerWeights, options: LayerOptions, product: Product, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a layer's queries, keys and values (…, N, H); `joined` are the inputs that a shift sees."""
    h = shifted(h, joined, weights.shift)
    normalized = normalize(h, weights.attention_norm, options) if options.pre_lnorm else h
    q, k, v = product(normalized, weights.qkv, dtype, None).unflatten(-1, (3, options.n_head, options.d_head)).unbind(-3)
    return q, k, v


def finish(
    h: Tensor,
    attended: Tensor,
    joined: Tensor | None,
    weights: LayerWeights,
    options: LayerOptions,
    product: Product,
    dtype: torch.dtype,
    *,
    normalize_sum: Callable[[Tensor, Tensor, Norm, LayerOptions], Tensor] | None = None,
) -> Tensor:
    """Add the output of the heads, then that of the feed-forward network; `normalize_sum` may do both steps of a norm."""

    def close(h: Tensor, found: Tensor, gate: FrozenGate | None, norm: Norm) -> Tensor:
        if normalize_sum and gate is None and not options.pre_lnorm:
            return normalize_sum(h, found, norm, options)
        h = _join(h, found, gate, product, dtype)
        return h if options.pre_lnorm else normalize(h, norm, options)

    found = product(attended.flatten(-2), weights.output, dtype, None)
    h = close(h, found, weights.attention_gate, weights.attention_norm)
    x = shifted(h, joined, weights.shift)
    x = normalize(x, weights.feed_forward_norm, options) if options.pre_lnorm else x
    inner = activate(product(x, weights.inner, dtype, weights.inner_bias), options.activation)
    found = product(inner, weights.outer, dtype, weights.outer_bias)
    return close(h, found, weights.feed_forward_gate, weights.feed_forward_norm)


def shifted(x: Tensor, joined_BLD: Tensor | None, kernel: tuple[Tensor, Tensor] | None) -> Tensor:
    """Return what a block reads instead of `x`, (B, T, D) or one token (B, D); `joined_BLD` are the inputs that it sees."""
    if kernel is None or joined_BLD is None:
        return x
    own, taps_kD = kernel
    k = len(taps_kD)
    if x.dim() == 2:
        return own * x + (joined_BLD[:, :k] * taps_kD.flip(0)).sum(1)
    windows_BTDk = joined_BLD[:, :-1].unfold(1, k, 1)
    return own * x + torch.einsum("btdk,kd->btd", windows_BTDk, taps_kD.flip(0))


def normalize(h: Tensor, norm: Norm, options: LayerOptions) -> Tensor:
    """Apply a layer norm."""
    return F.layer_norm(h, h.shape[-1:], *norm, options.layer_norm_epsilon)


# a segment


def read_segment(
    h_BTD: Tensor,
    weights: LayerWeights,
    keys_NBCH: Tensor,
    values_NBHC: Tensor,
    *,
    at: int,
    hidden: Sequence[tuple[slice, Tensor]],
    scratch: Tensor,
    options: LayerOptions,
    before_BkD: Tensor | None = None,
    turns: Turns | None = None,
) -> Tensor:
    """Run one layer over a segment of rows whose rings stand at the same slot, and write its keys and values to the rings.

    Products run over all slots as they lie. What depends on distance is added in the order of time, which in a ring is two runs
    of slots: from the oldest to the ring's end, and from its beginning to the newest.

    Args:
        h_BTD: the layer's input.
        weights: of the layer.
        keys_NBCH: ring of keys; written in place.
        values_NBHC: ring of values; written in place.
        at: slot of the segment's first token.
        hidden: runs of slots that some query must not see, each with a bias (B or 1, T, slots): -inf where hidden, else 0.
        scratch: for N x B x T x C scores, in the type of keys; overwritten.
        options: of all layers.
        before_BkD: inputs of the layer at the k positions before the segment; None: it has no shift.
        turns: of the tokens' positions, (B or 1, T, 1, H / 2); None: queries and keys are not turned.

    Returns:
        The layer's output, (B, T, D).
    """
    T, C, dtype = h_BTD.shape[1], keys_NBCH.shape[2], keys_NBCH.dtype
    joined, q, k, v = project_segment(h_BTD, weights, options, dtype, before_BkD=before_BkD, turns=turns)
    _write(keys_NBCH, k.to(dtype).permute(2, 0, 1, 3), at, dim=2)
    _write(values_NBHC, v.to(dtype).permute(2, 0, 3, 1), at, dim=3)
    attended = _attend(q, keys_NBCH, values_NBHC, weights, oldest=(at + T) % C, hidden=hidden, scratch=scratch)
    return finish(h_BTD, attended, joined, weights, options, product, dtype)


def read_segment_in_order(
    h_BTD: Tensor,
    weights: LayerWeights,
    keys_NBCH: Tensor,
    values_NBHC: Tensor,
    *,
    slot_BC: Tensor,
    hidden_BTC: Tensor,
    scratch: Tensor,
    options: LayerOptions,
    before_BkD: Tensor | None = None,
    turns: Turns | None = None,
) -> Tensor:
    """Run one layer over a segment as `read_segment` does, but with copies of keys and values in the order of time.

    Where the rings stand is known on the device alone, so a graph of this serves all places. A copy has far fewer numbers than
    the scores. Arguments are those of `read_segment`, except two. `slot_BC`, int64, lists each row's slots in the order of
    time; the segment's own come last. `hidden_BTC` has the type of keys: -inf where a query must not see a key, else 0.
    """
    (B, T, _), (N, _, C, H) = h_BTD.shape, keys_NBCH.shape
    dtype = keys_NBCH.dtype
    joined, q, k, v = project_segment(h_BTD, weights, options, dtype, before_BkD=before_BkD, turns=turns)
    row_B1, own_BT = torch.arange(B, device=slot_BC.device).unsqueeze(1), slot_BC[:, -T:]
    keys_NBCH[:, row_B1, own_BT] = k.to(dtype).permute(2, 0, 1, 3)
    values_NBHC[:, row_B1, :, own_BT] = v.to(dtype)
    ordered_keys = keys_NBCH[:, row_B1, slot_BC]
    ordered_values = values_NBHC.gather(3, slot_BC[None, :, None].expand(N, B, H, C))
    everywhere = [(slice(0, C), hidden_BTC)]
    attended = _attend(q, ordered_keys, ordered_values, weights, oldest=0, hidden=everywhere, scratch=scratch)
    return finish(h_BTD, attended, joined, weights, options, product, dtype)


def project_segment(
    h_BTD: Tensor,
    weights: LayerWeights,
    options: LayerOptions,
    dtype: torch.dtype,
    *,
    before_BkD: Tensor | None,
    turns: Turns | None,
) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
    """Return the inputs that a shift sees, and a segment's queries, keys and values (B, T, N, H); see `read_segment`."""
    joined = None if before_BkD is None else with_before(h_BTD, before_BkD, before_BkD.shape[1])
    q, k, v = project(h_BTD, joined, weights, options, product, dtype)
    if turns is not None:
        q, k = turned(at_least_fp32(q), *turns), turned(k, *turns)
    return joined, q, k, v


def _attend(
    q_BTNH: Tensor,
    keys_NBCH: Tensor,
    values_NBHC: Tensor,
    weights: LayerWeights,
    *,
    oldest: int,
    hidden: Sequence[tuple[slice, Tensor]],
    scratch: Tensor,
) -> Tensor:
    """Return what a segment's queries gather from rings whose oldest slot is known, (B, T, N, H)."""
    (B, T, N, H), C, dtype = q_BTNH.shape, keys_NBCH.shape[2], keys_NBCH.dtype
    scale = H**-0.5
    content_query = (_plus(q_BTNH, weights.content_bias) * scale).to(dtype).permute(2, 0, 1, 3).reshape(N * B, T, H)
    score = scratch[: N * B * T * C].view(N * B, T, C)
    torch.bmm(content_query, keys_NBCH.flatten(0, 1).transpose(1, 2), out=score)
    score_NBTC = score.view(N, B, T, C)
    if weights.n_distance > 1:  # what all keys get alike, a softmax does not see
        position_query = (_plus(q_BTNH, weights.position_bias) * scale).to(dtype).permute(2, 0, 1, 3).reshape(N, B * T, H)
        shifted = _position_scores(position_query, weights, scale, tgt_len=T, n_slot=C)
        n_far = C - shifted.shape[-1]
        for slots, ages in _in_time(oldest, C, slice(n_far, C)):
            score_NBTC[..., slots] += shifted[..., ages.start - n_far : ages.stop - n_far]
    for slots, bias in hidden:
        score_NBTC[..., slots] += bias
    torch.softmax(score, dim=-1, out=score)
    attended = torch.bmm(score, values_NBHC.flatten(0, 1).transpose(1, 2))
    return attended.view(N, B, T, H).permute(1, 2, 0, 3)


def _position_scores(query_NXH: Tensor, weights: LayerWeights, scale: float, *, tgt_len: int, n_slot: int) -> Tensor:
    """Return what distance adds to the scores (N, B or 1, T, W) of the W newest keys, for X = B·T queries.

    The segment's last token is last. Scores of all distances are shifted (`rel_shift`) by a view, which holds meaningless
    numbers for keys after a query. Every older key is at least as far from each query as the farthest distance with a key of
    its own. Where there are such keys, that distance's score is subtracted from all scores, which does not change a softmax, so
    nothing has to be added to them.
    """
    keys_NPH = weights.position_keys
    bias_N1P = None if weights.distance_bias is None else weights.distance_bias.unsqueeze(1) * scale
    P, T = weights.n_distance, tgt_len
    n_key = min(n_slot, P + T - 1)
    if n_slot > P:
        keys_NPH = None if keys_NPH is None else F.pad(keys_NPH - keys_NPH[:, :1], (0, 0, n_key - P, 0))
        bias_N1P = None if bias_N1P is None else F.pad(bias_N1P - bias_N1P[..., :1], (n_key - P, 0))
    if keys_NPH is None:  # the same for all rows
        assert bias_N1P is not None
        score_NXP = bias_N1P.repeat(1, T, 1)
    else:
        score_NXP = torch.bmm(query_NXH, keys_NPH.transpose(1, 2))
        if bias_N1P is not None:
            score_NXP += bias_N1P
    N, X, _ = score_NXP.shape
    return score_NXP.as_strided((N, X // T, T, n_key), (X * n_key, T * n_key, n_key - 1, 1), T - 1)


def _plus(q: Tensor, bias: Tensor | None) -> Tensor:
    return at_least_fp32(q) if bias is None else q + bias


def _in_time(oldest: int, n_slot: int, ages: slice) -> Iterator[tuple[slice, slice]]:
    """Yield the runs of slots that hold the keys of some ages, 0 for the slot `oldest`, and the ages of each run."""
    for first, last in ((0, n_slot - oldest), (n_slot - oldest, n_slot)):
        start, stop = max(first, ages.start), min(last, ages.stop)
        if start < stop:
            shift = oldest if first == 0 else oldest - n_slot
            yield slice(start + shift, stop + shift), slice(start, stop)


def _write(ring: Tensor, new: Tensor, at: int, *, dim: int) -> None:
    """Write a segment into a ring from slot `at` on, and on from the ring's beginning where it reaches its end."""
    T, C = new.shape[dim], ring.shape[dim]
    first = min(T, C - at)
    ring.narrow(dim, at, first).copy_(new.narrow(dim, 0, first))
    if first < T:
        ring.narrow(dim, 0, T - first).copy_(new.narrow(dim, first, T - first))


# one token


def read_token(
    h_BD: Tensor,
    weights: LayerWeights,
    keys_NBCH: Tensor,
    values_NBHC: Tensor,
    *,
    slot_B: Tensor,
    column_BC: Tensor,
    bias_BC: Tensor,
    options: LayerOptions,
    before_BkD: Tensor | None = None,
    turns: Turns | None = None,
    streamed: bool = False,
) -> Tensor:
    """Run one layer over one token of each row, in shapes and steps that never change.

    Args:
        h_BD: the layer's input.
        weights: of the layer.
        keys_NBCH: ring of keys; written in place.
        values_NBHC: ring of values; written in place.
        slot_B: int64, where each row's token goes.
        column_BC: int64, for each slot the column of the position keys for its distance.
        bias_BC: -inf where a row must not see a slot, else 0.
        options: of all layers.
        before_BkD: inputs of the layer at the k positions before the token; None: it has no shift.
        turns: of the tokens' positions, (B, 1, H / 2); None: queries and keys are not turned.
        streamed: write products as multiplications and sums, which a compiler turns into loops, instead of calling matmul.

    Returns:
        The layer's output, (B, D).
    """
    N, B, C, H = keys_NBCH.shape
    dtype = keys_NBCH.dtype
    multiply = streamed_product if streamed else product
    joined = joined_with(h_BD, before_BkD)
    q_BNH, k_BNH, v_BNH = project(h_BD, joined, weights, options, multiply, dtype)
    if turns is not None:
        q_BNH, k_BNH = turned(at_least_fp32(q_BNH), *turns), turned(k_BNH, *turns)
    # assigned by index, which a compiler does in place; it would copy the whole ring for scatter_
    head_N1, row_B = torch.arange(N, device=h_BD.device).unsqueeze(1), torch.arange(B, device=h_BD.device)
    keys_NBCH[head_N1, row_B, slot_B] = k_BNH.to(dtype).transpose(0, 1)
    values_NBHC[head_N1, row_B, :, slot_B] = v_BNH.to(dtype).transpose(0, 1)

    content_query = _plus(q_BNH, weights.content_bias).transpose(0, 1)
    score = (_streamed_scores if streamed else _scores)(content_query, keys_NBCH)
    if weights.position_keys is not None:
        position_query = _plus(q_BNH, weights.position_bias).transpose(0, 1)
        if streamed:
            # rows of position keys are fetched in the order of slots: to fetch scores instead would be a loop of its own
            position = _streamed_scores(position_query, weights.position_keys[:, column_BC])
        else:
            position = _scores(position_query, weights.position_keys.unsqueeze(1)).gather(-1, column_BC.expand(N, B, C))
        score = score + position
    if weights.distance_bias is not None:
        score = score + weights.distance_bias[:, column_BC]
    weight_NBC = (score * H**-0.5 + bias_BC).softmax(-1)
    if streamed:
        attended = (weight_NBC.unsqueeze(-2) * values_NBHC.to(weight_NBC.dtype)).sum(-1)
    else:
        attended = torch.matmul(values_NBHC, weight_NBC.to(dtype).unsqueeze(-1)).squeeze(-1).to(weight_NBC.dtype)
    return finish(h_BD, attended.transpose(0, 1), joined, weights, options, multiply, dtype)


def joined_with(h_BD: Tensor, before_BkD: Tensor | None) -> Tensor | None:
    """Return a layer's inputs at the last k positions and at the token, (B, k + 1, D); None without a shift."""
    return None if before_BkD is None else torch.cat([before_BkD, h_BD.unsqueeze(1)], dim=1)


def _streamed_scores(q_NBH: Tensor, keys_NBCH: Tensor) -> Tensor:
    return (q_NBH.unsqueeze(-2) * keys_NBCH.to(q_NBH.dtype)).sum(-1)


def _scores(q_NBH: Tensor, keys_NBCH: Tensor) -> Tensor:
    q = q_NBH.to(keys_NBCH.dtype)
    if keys_NBCH.shape[1] == 1:  # the same keys for all rows
        return torch.bmm(q, keys_NBCH.squeeze(1).transpose(1, 2)).to(q_NBH.dtype)
    return torch.matmul(keys_NBCH, q.unsqueeze(-1)).squeeze(-1).to(q_NBH.dtype)

"""One layer over a key/value memory: a whole segment by matrix products, or one token of every row in fixed shapes.

The attention of both is that of the model (`attention.py`, `shaw.py`), arranged for frozen weights:

    A_ij = (q_i + u)·k_j + (q_i + v)·r_{i-j} + b_{i-j}

with r computed once, for each distance that is told apart. In the paper's attention r = W_kR R, and there is no b; in Shaw's, r
and b are learned and there is no v.

Shapes: B rows, T tokens, C slots, P distances told apart, N heads, H d_head, D d_model.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from transformer_xl.model.frozen import LayerWeights, Product, product, streamed_product
from transformer_xl.model.layers import Activation, activate


class LayerOptions(NamedTuple):
    """What all layers of a model have in common."""

    n_head: int
    d_head: int
    pre_lnorm: bool
    layer_norm_epsilon: float
    activation: Activation


def read_segment(
    h_BTD: Tensor,
    weights: LayerWeights,
    keys_NBCH: Tensor,
    values_NBHC: Tensor,
    *,
    at: int,
    hidden: Sequence[tuple[slice, Tensor]],
    room: Tensor,
    options: LayerOptions,
) -> Tensor:
    """Run one layer over a segment of rows whose rings stand at the same place, and remember the segment in them.

    Products run over all slots as they lie. What depends on distance is added in the order of time, which in a ring is two runs
    of slots: from the oldest to the ring's end, and from its beginning to the newest.

    Args:
        h_BTD: what enters the layer.
        weights: of the layer.
        keys_NBCH: ring of keys; written in place.
        values_NBHC: ring of values; written in place.
        at: slot of the segment's first token.
        hidden: slots that some query must not see, each with -inf (B or 1, T, slots) where that is so, else 0.
        room: for N x B x T x C scores, in the type of keys; what lies there is lost.
        options: of all layers.

    Returns:
        What leaves the layer, (B, T, D).
    """
    (B, T, _), (N, _, C, H) = h_BTD.shape, keys_NBCH.shape
    dtype = keys_NBCH.dtype
    q, k, v = _project(h_BTD, weights, options, product, dtype)
    _write(keys_NBCH, k.to(dtype).permute(2, 0, 1, 3), at, dim=2)
    _write(values_NBHC, v.to(dtype).permute(2, 0, 3, 1), at, dim=3)

    scale = H**-0.5
    content_query = ((q + weights.content_bias) * scale).to(dtype).permute(2, 0, 1, 3).reshape(N * B, T, H)
    position_query = ((q + weights.position_bias) * scale).to(dtype).permute(2, 0, 1, 3).reshape(N, B * T, H)
    score = room[: N * B * T * C].view(N * B, T, C)
    torch.bmm(content_query, keys_NBCH.flatten(0, 1).transpose(1, 2), out=score)
    shifted = _position_scores(position_query, weights, scale, tgt_len=T, n_slot=C)
    oldest, n_far = (at + T) % C, C - shifted.shape[-1]
    for slots, ages in _in_time(oldest, C, slice(n_far, C)):
        score[..., slots] += shifted[..., ages.start - n_far : ages.stop - n_far]
    for slots, bias in hidden:
        score.view(N, B, T, C)[..., slots] += bias
    torch.softmax(score, dim=-1, out=score)
    attended = torch.bmm(score, values_NBHC.flatten(0, 1).transpose(1, 2))
    return _finish(h_BTD, attended.view(N, B, T, H).permute(1, 2, 0, 3), weights, options, product, dtype)


def _position_scores(query_NXH: Tensor, weights: LayerWeights, scale: float, *, tgt_len: int, n_slot: int) -> Tensor:
    """Return what distance adds to the scores (N·B, T, W) of the W newest keys of all, for X = B·T queries.

    The segment's last token is last. Scores of all distances are shifted (`rel_shift`) by a view, which for keys after a query
    holds numbers of no meaning. Every older key is at least as far from each query as the farthest distance that is told apart;
    where there are such keys, that distance's score is taken away from all, which a softmax does not mind: they get none.
    """
    keys_NPH = weights.position_keys
    bias_N1P = None if weights.distance_bias is None else weights.distance_bias.unsqueeze(1) * scale
    P, T = keys_NPH.shape[1], tgt_len
    n_key = min(n_slot, P + T - 1)
    if n_slot > P:
        keys_NPH = F.pad(keys_NPH - keys_NPH[:, :1], (0, 0, n_key - P, 0))
        bias_N1P = None if bias_N1P is None else F.pad(bias_N1P - bias_N1P[..., :1], (n_key - P, 0))
    score_NXP = torch.bmm(query_NXH, keys_NPH.transpose(1, 2))
    if bias_N1P is not None:
        score_NXP += bias_N1P
    N, X, _ = score_NXP.shape
    return score_NXP.as_strided((N * X // T, T, n_key), (T * n_key, n_key - 1, 1), T - 1)


def _in_time(oldest: int, n_slot: int, ages: slice) -> Iterator[tuple[slice, slice]]:
    """Yield the runs of slots that hold the keys of some ages, 0 for the slot `oldest`; and which ages each run has."""
    for first, last in ((0, n_slot - oldest), (n_slot - oldest, n_slot)):
        start, stop = max(first, ages.start), min(last, ages.stop)
        if start < stop:
            shift = oldest if first == 0 else oldest - n_slot
            yield slice(start + shift, stop + shift), slice(start, stop)


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
    streamed: bool = False,
) -> Tensor:
    """Run one layer over one token of each row, in shapes and steps that never change.

    Args:
        h_BD: what enters the layer.
        weights: of the layer.
        keys_NBCH: ring of keys; written in place.
        values_NBHC: ring of values; written in place.
        slot_B: int64, where each row's token goes.
        column_BC: int64, for each slot the column of the position keys that its distance has.
        bias_BC: -inf where a row must not see a slot, else 0.
        options: of all layers.
        streamed: multiply and sum, for a compiler, instead of calling matrix products.

    Returns:
        What leaves the layer, (B, D).
    """
    N, B, C, H = keys_NBCH.shape
    dtype = keys_NBCH.dtype
    multiply = streamed_product if streamed else product
    q_BNH, k_BNH, v_BNH = _project(h_BD, weights, options, multiply, dtype)
    # assigned by index, which a compiler does in place; it would copy the whole ring for scatter_
    head_N1, row_B = torch.arange(N, device=h_BD.device).unsqueeze(1), torch.arange(B, device=h_BD.device)
    keys_NBCH[head_N1, row_B, slot_B] = k_BNH.to(dtype).transpose(0, 1)
    values_NBHC[head_N1, row_B, :, slot_B] = v_BNH.to(dtype).transpose(0, 1)

    content_query = (q_BNH + weights.content_bias).transpose(0, 1)
    position_query = (q_BNH + weights.position_bias).transpose(0, 1)
    if streamed:
        # rows of position keys are fetched in the order of slots: to fetch scores instead would be a loop of its own
        position = _streamed_scores(position_query, weights.position_keys[:, column_BC])
        content = _streamed_scores(content_query, keys_NBCH)
    else:
        position = _scores(position_query, weights.position_keys.unsqueeze(1)).gather(-1, column_BC.expand(N, B, C))
        content = _scores(content_query, keys_NBCH)
    score = content + position
    if weights.distance_bias is not None:
        score = score + weights.distance_bias[:, column_BC]
    weight_NBC = (score * H**-0.5 + bias_BC).softmax(-1)
    attended = (_streamed_sum if streamed else _sum)(weight_NBC, values_NBHC)
    return _finish(h_BD, attended.transpose(0, 1), weights, options, multiply, dtype)


def _streamed_scores(q_NBH: Tensor, keys_NBCH: Tensor) -> Tensor:
    return (q_NBH.unsqueeze(-2) * keys_NBCH.to(q_NBH.dtype)).sum(-1)


def _streamed_sum(weight_NBC: Tensor, values_NBHC: Tensor) -> Tensor:
    return (weight_NBC.unsqueeze(-2) * values_NBHC.to(weight_NBC.dtype)).sum(-1)


def _scores(q_NBH: Tensor, keys_NBCH: Tensor) -> Tensor:
    q = q_NBH.to(keys_NBCH.dtype)
    if keys_NBCH.shape[1] == 1:  # the same keys for all rows
        return torch.bmm(q, keys_NBCH.squeeze(1).transpose(1, 2)).to(q_NBH.dtype)
    return torch.matmul(keys_NBCH, q.unsqueeze(-1)).squeeze(-1).to(q_NBH.dtype)


def _sum(weight_NBC: Tensor, values_NBHC: Tensor) -> Tensor:
    return torch.matmul(values_NBHC, weight_NBC.to(values_NBHC.dtype).unsqueeze(-1)).squeeze(-1).to(weight_NBC.dtype)


def _project(
    h: Tensor, weights: LayerWeights, options: LayerOptions, product: Product, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values (…, N, H)."""
    normalized = normalize(h, weights.attention_norm, options) if options.pre_lnorm else h
    q, k, v = product(normalized, weights.qkv, dtype, None).unflatten(-1, (3, options.n_head, options.d_head)).unbind(-3)
    return q, k, v


def _finish(
    h: Tensor, attended: Tensor, weights: LayerWeights, options: LayerOptions, product: Product, dtype: torch.dtype
) -> Tensor:
    """Add what the heads found, and what the feed-forward network makes of it."""
    h = h + product(attended.flatten(-2), weights.output, dtype, None)
    if not options.pre_lnorm:
        h = normalize(h, weights.attention_norm, options)
    x = normalize(h, weights.feed_forward_norm, options) if options.pre_lnorm else h
    inner = activate(product(x, weights.inner, dtype, weights.inner_bias), options.activation)
    h = h + product(inner, weights.outer, dtype, weights.outer_bias)
    return h if options.pre_lnorm else normalize(h, weights.feed_forward_norm, options)


def normalize(h: Tensor, norm: tuple[Tensor, Tensor], options: LayerOptions) -> Tensor:
    """Apply a layer norm."""
    return F.layer_norm(h, h.shape[-1:], *norm, options.layer_norm_epsilon)


def _write(ring: Tensor, new: Tensor, at: int, *, dim: int) -> None:
    """Write a segment into a ring from slot `at` on, around its end if need be."""
    T, C = new.shape[dim], ring.shape[dim]
    first = min(T, C - at)
    ring.narrow(dim, at, first).copy_(new.narrow(dim, 0, first))
    if first < T:
        ring.narrow(dim, 0, T - first).copy_(new.narrow(dim, first, T - first))

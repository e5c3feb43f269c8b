"""`read_segment` on a GPU, by the fused attention of training (`kernels/flash.py`).

That wants keys and values in the order of time. So one kernel writes those of the segment into the rings, and copies all of
them in that order; a copy has far fewer numbers than the scores by content, which are not held. Where the rings stand is known
on the device alone, so a graph of this serves all places.

Needs Triton and a GPU; with TRITON_INTERPRET=1 it runs on any device, slowly.

Shapes: B rows, T tokens, C slots, N heads, H d_head, P H rounded up to a power of two, W slots of a tile.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from transformer_xl.inference.frozen import LayerOptions, LayerWeights, Turns, finish, product, project_segment
from transformer_xl.kernels.equation import Positions
from transformer_xl.kernels.flash import fused_attention
from transformer_xl.kernels.fused import launch

_TILE_ELEMENTS = 4096
"""Numbers of a tile of keys, of which each thread holds a few dozen."""


@triton.jit(do_not_specialize=["T", "B"])
def _order_kernel(
    k, v, keys, values, end, ordered_keys, ordered_values,
    k_row, k_t, k_head, v_row, v_t, v_head, ring_head, ring_row, T, B,
    C: tl.constexpr, H: tl.constexpr, P: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Copy one tile of a row's head in the order of time; the segment's own keys and values go to the rings, too."""
    row = tl.program_id(0).to(tl.int64)
    batch, head = row % B, row // B
    age, h = tl.program_id(1) * W + tl.arange(0, W), tl.arange(0, P)
    slot = (tl.load(end + batch) + T + age) % C
    t = age - (C - T)
    inside = (age < C)[:, None] & (h < H)[None, :]
    is_new = inside & (t >= 0)[:, None]
    is_old = inside & (t < 0)[:, None]
    keys += head * ring_head + batch * ring_row
    values += head * ring_head + batch * ring_row
    k_at, v_at = keys + slot[:, None] * H + h[None, :], values + h[:, None] * C + slot[None, :]
    new_key = tl.load(k + batch * k_row + head * k_head + t[:, None] * k_t + h[None, :], mask=is_new, other=0.0)
    new_value = tl.load(v + batch * v_row + head * v_head + t[:, None] * v_t + h[None, :], mask=is_new, other=0.0)
    key = tl.where(is_new, new_key, tl.load(k_at, mask=is_old, other=0.0))
    value = tl.where(is_new, new_value, tl.trans(tl.load(v_at, mask=tl.trans(is_old), other=0.0)))
    tl.store(k_at, key, mask=is_new)
    tl.store(v_at, tl.trans(value), mask=tl.trans(is_new))
    ordered = row * C * H + age[:, None] * H + h[None, :]
    tl.store(ordered_keys + ordered, key, mask=inside)
    tl.store(ordered_values + ordered, value, mask=inside)


def fused_read_segment(
    h_BTD: Tensor,
    weights: LayerWeights,
    keys_NBCH: Tensor,
    values_NBHC: Tensor,
    *,
    end_B: Tensor,
    first_BT: Tensor,
    position_keys_CNH: Tensor,
    options: LayerOptions,
    before_BkD: Tensor | None = None,
    turns: Turns | None = None,
) -> Tensor:
    """Run one layer over a segment as `frozen.read_segment` does, for positions that have keys and nothing else.

    Arguments as there, but: `end_B`, int64, is the position of each row's first token; `first_BT`, int64, is the first key that
    each query sees, in the order of time, where the segment's last of all C is last; `position_keys_CNH` are those of the
    distances C - 1, …, 0; `turns` is None, because queries and keys are not turned.
    """
    assert turns is None and weights.content_bias is not None and weights.position_bias is not None
    dtype = keys_NBCH.dtype
    joined, q, k, v = project_segment(h_BTD, weights, options, dtype, before_BkD=before_BkD, turns=turns)
    ordered_keys, ordered_values = _ordered(k.to(dtype), v.to(dtype), keys_NBCH, values_NBHC, end_B)
    attended = fused_attention(
        q.to(dtype),
        ordered_keys.permute(1, 2, 0, 3),
        ordered_values.permute(1, 2, 0, 3),
        Positions(weights.content_bias, weights.position_bias, position_keys_CNH),
        first_BT=first_BT,
    )
    return finish(h_BTD, attended, joined, weights, options, product, dtype)


def _ordered(k_BTNH: Tensor, v_BTNH: Tensor, keys_NBCH: Tensor, values_NBHC: Tensor, end_B: Tensor) -> tuple[Tensor, Tensor]:
    """Write a segment's keys and values into rings, and return copies of these in the order of time, (N, B, C, H) each."""
    N, B, C, H = keys_NBCH.shape
    strides = [x.stride(i) for x in (k_BTNH, v_BTNH) for i in range(3)]
    copies = [torch.empty(keys_NBCH.shape, dtype=keys_NBCH.dtype, device=keys_NBCH.device) for _ in range(2)]
    P = max(16, triton.next_power_of_2(H))
    W = max(16, _TILE_ELEMENTS // P)
    launch(
        _order_kernel, (N * B, triton.cdiv(C, W)),
        k_BTNH, v_BTNH, keys_NBCH, values_NBHC, end_B, *copies,
        *strides, *keys_NBCH.stride()[:2], k_BTNH.shape[1], B,
        C=C, H=H, P=P, W=W,
    )  # fmt: skip
    return copies[0], copies[1]

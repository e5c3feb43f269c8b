"""One token on a GPU: its attention in two kernels, and products with a single row at the speed of memory.

A library takes some ten kernels for what a token does with its memory, and each takes longer than its bytes. Here one kernel
writes the token's key and value into the rings, scores a run of slots by content and by distance, and gathers their values. As
one row has too few heads for a GPU, slots are divided among programs, and a second kernel joins what they found. How they are
divided depends on shapes alone, so results are the same to the last bit every time. Sums are in fp32.

Needs Triton and a GPU; with TRITON_INTERPRET=1 it runs on any device, slowly.

Shapes: B rows, C slots, P distances with a key of their own, N heads, H d_head, D d_model, I inputs, O outputs; H2, D2: H and D
rounded up to a power of two; W slots or inputs of a tile.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from transformer_xl.inference.buffer import Rings
from transformer_xl.inference.frozen import LayerOptions, LayerWeights, Matrix, Norm, product
from transformer_xl.inference.layer import Way
from transformer_xl.kernels.fused import launch

_TILE_ELEMENTS = 4096
"""Numbers of a tile of keys, of which each thread holds a few dozen."""

_MOST_PROGRAMS = 1024
"""So many fill the multiprocessors of any GPU; from there on, a program takes more slots."""

_OUTPUTS = 4
"""Outputs of a program of `_product_kernel`: few, so that a narrow layer has programs for all multiprocessors."""


@triton.jit
def _attend_kernel(
    q, k, v, keys, values, u, w, r, b, end, farthest, found, scale, q_row, k_row, v_row, B,
    C: tl.constexpr, P: tl.constexpr, H: tl.constexpr, H2: tl.constexpr, W: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Attend with one row's head to one run of slots; write its own key and value if their slot is among these."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    batch, head = row % B, row // B
    h = tl.arange(0, H2)
    is_h = h < H
    own = (tl.load(end + batch) % C).to(tl.int32)
    most = tl.load(farthest + batch).to(tl.int32)
    query = tl.load(q + batch * q_row + head * H + h, mask=is_h, other=0.0).to(tl.float32)
    own_key = tl.load(k + batch * k_row + head * H + h, mask=is_h, other=0.0).to(keys.dtype.element_ty)
    own_value = tl.load(v + batch * v_row + head * H + h, mask=is_h, other=0.0).to(values.dtype.element_ty)
    by_content = query
    if u is not None:
        by_content += tl.load(u + head * H + h, mask=is_h, other=0.0)
    by_position = query
    if w is not None:
        by_position += tl.load(w + head * H + h, mask=is_h, other=0.0)
    keys += row * C * H
    values += row * H * C

    highest = -1e30  # finite, so that a run in which nothing is visible has no NaN
    total = 0.0
    attended = tl.zeros([H2], tl.float32)
    for i in range(TILES):
        c = (part * TILES + i) * W + tl.arange(0, W)
        is_c, is_own = c < C, c == own
        inside = is_c[:, None] & is_h[None, :]
        k_at = keys + c[:, None] * H + h[None, :]
        v_at = values + h[:, None] * C + c[None, :]
        k_tile = tl.load(k_at, mask=inside, other=0.0)
        v_tile = tl.load(v_at, mask=tl.trans(inside), other=0.0)
        k_tile = tl.where(is_own[:, None], own_key[None, :], k_tile)
        v_tile = tl.where(is_own[None, :], own_value[:, None], v_tile)
        tl.store(k_at, k_tile, mask=is_own[:, None] & is_h[None, :])
        tl.store(v_at, v_tile, mask=is_h[:, None] & is_own[None, :])
        distance = tl.where(c <= own, own - c, own - c + C)
        column = tl.maximum(P - 1 - distance, 0)
        score = tl.sum(k_tile.to(tl.float32) * by_content[None, :], 1)
        if r is not None:
            r_tile = tl.load(r + (head * P + column)[:, None] * H + h[None, :], mask=inside, other=0.0)
            score += tl.sum(r_tile.to(tl.float32) * by_position[None, :], 1)
        if b is not None:
            score += tl.load(b + head * P + column, mask=is_c, other=0.0)
        score = tl.where(is_c & (distance <= most), score * scale, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(score, 0))
        weight, faded = tl.exp(score - new_highest), tl.exp(highest - new_highest)
        total = total * faded + tl.sum(weight, 0)
        attended = attended * faded + tl.sum(v_tile.to(tl.float32) * weight[None, :], 1)
        highest = new_highest
    found += (row * tl.num_programs(1) + part) * (H + 2)
    tl.store(found + h, attended, mask=is_h)
    tl.store(found + H, highest)
    tl.store(found + H + 1, total)


@triton.jit
def _join_kernel(found, out, out_row, B, n_run, H: tl.constexpr, H2: tl.constexpr, RUNS: tl.constexpr):
    """Join what all runs of slots found for one row's head."""
    row = tl.program_id(0).to(tl.int64)
    batch, head = row % B, row // B
    s, h = tl.arange(0, RUNS), tl.arange(0, H2)
    found += row * n_run * (H + 2)
    highest = tl.load(found + s * (H + 2) + H, mask=s < n_run, other=-1e30)
    total = tl.load(found + s * (H + 2) + H + 1, mask=s < n_run, other=0.0)
    attended = tl.load(found + s[:, None] * (H + 2) + h[None, :], mask=(s < n_run)[:, None] & (h < H)[None, :], other=0.0)
    faded = tl.exp(highest - tl.max(highest, 0))
    joined = tl.sum(attended * faded[:, None], 0) / tl.sum(total * faded, 0)  # pyright: ignore[reportOperatorIssue]
    tl.store(out + batch * out_row + head * H + h, joined.to(out.dtype.element_ty), mask=h < H)


@triton.jit
def _product_kernel(x, weight, scale, bias, y, O, I: tl.constexpr, W: tl.constexpr, OUTPUTS: tl.constexpr):  # noqa: E741
    """Multiply one row by some rows of a weight matrix."""
    o = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    products = tl.zeros([OUTPUTS, W], tl.float32)
    for first in range(0, I, W):
        i = first + tl.arange(0, W)
        x_tile = tl.load(x + i, mask=i < I, other=0.0).to(tl.float32)
        at = weight + o.to(tl.int64)[:, None] * I + i[None, :]
        products += tl.load(at, mask=(o < O)[:, None] & (i < I)[None, :], other=0).to(tl.float32) * x_tile[None, :]
    total = tl.sum(products, 1)
    if scale is not None:
        total *= tl.load(scale + o, mask=o < O, other=0.0)
    if bias is not None:
        total += tl.load(bias + o, mask=o < O, other=0.0)
    tl.store(y + o, total, mask=o < O)


@triton.jit
def _norm_kernel(h, found, weight, bias, out, epsilon, D: tl.constexpr, D2: tl.constexpr):
    """Normalize the sum of one row's states and of what a block found."""
    row, d = tl.program_id(0), tl.arange(0, D2)
    x = tl.load(h + row * D + d, mask=d < D, other=0.0) + tl.load(found + row * D + d, mask=d < D, other=0.0).to(tl.float32)
    x = tl.where(d < D, x - tl.sum(x, 0) / D, 0.0)
    x *= tl.rsqrt(tl.sum(x * x, 0) / D + epsilon)
    y = x * tl.load(weight + d, mask=d < D, other=0.0) + tl.load(bias + d, mask=d < D, other=0.0)
    tl.store(out + row * D + d, y, mask=d < D)


def fused_attend_token(
    q_BNH: Tensor, k_BNH: Tensor, v_BNH: Tensor, rings: Rings, weights: LayerWeights, places: tuple[Tensor, Tensor]
) -> Tensor:
    """Attend from one token of each row to the rings, (B, N, H), as `layer.attend_token` does.

    `places` are int64 (B): the position of each row's token, and the largest distance of a key that the row sees.
    """
    N, B, C, H = rings.keys.shape
    q, k, v = (x if x.stride()[1:] == (H, 1) else x.contiguous() for x in (q_BNH, k_BNH, v_BNH))
    H2 = max(16, triton.next_power_of_2(H))
    W = min(max(16, _TILE_ELEMENTS // H2), triton.next_power_of_2(C))
    n_tile = triton.cdiv(C, W)
    tiles = triton.cdiv(n_tile, max(1, min(n_tile, _MOST_PROGRAMS // (N * B))))
    n_run = triton.cdiv(n_tile, tiles)
    found = torch.empty(N * B, n_run, H + 2, dtype=torch.float32, device=q.device)
    by_distance = (weights.content_bias, weights.position_bias, weights.position_keys, weights.distance_bias)
    launch(
        _attend_kernel, (N * B, n_run),
        q, k, v, *rings, *by_distance, *places, found,
        H**-0.5, q.stride(0), k.stride(0), v.stride(0), B,
        C=C, P=weights.n_distance, H=H, H2=H2, W=W, TILES=tiles,
    )  # fmt: skip
    # what a single row is multiplied by next takes fp32 as it is
    attended = torch.empty(B, N, H, dtype=torch.float32 if B == 1 else rings.keys.dtype, device=q.device)
    launch(_join_kernel, (N * B,), found, attended, N * H, B, n_run, H=H, H2=H2, RUNS=triton.next_power_of_2(n_run))
    return attended


def _normalize_sum(h_BD: Tensor, found_BD: Tensor, norm: Norm, options: LayerOptions) -> Tensor:
    (B, D), out = h_BD.shape, torch.empty_like(h_BD)
    tensors = (h_BD.contiguous(), found_BD.contiguous(), *norm, out)
    launch(_norm_kernel, (B,), *tensors, options.layer_norm_epsilon, D=D, D2=triton.next_power_of_2(D))
    return out


def fused_product(x_BI: Tensor, matrix: Matrix, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + bias, (B, O): for a single row in fp32, as fast as the weights are read; for more by the library."""
    weight = matrix.weight
    if x_BI.shape[0] > 1 or not weight.is_contiguous():
        return product(x_BI, matrix, dtype, bias)
    O, I = weight.shape  # noqa: E741
    y = torch.empty(1, O, dtype=torch.float32, device=x_BI.device)
    W = min(1024, max(16, triton.next_power_of_2(I)))
    tensors = (x_BI.contiguous(), weight, matrix.scale, bias, y)
    launch(_product_kernel, (triton.cdiv(O, _OUTPUTS),), *tensors, O, I=I, W=W, OUTPUTS=_OUTPUTS)
    return y


FUSED = Way(fused_product, fused_attend_token, _normalize_sum)

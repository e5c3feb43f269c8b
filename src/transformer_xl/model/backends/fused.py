"""`relative_attention` by the fused kernels of `fused_kernels.py`, which keep no scores and no weights.

Scores of positions P, and what follows from their gradients, are products of the library: (q + v)·rᵀ before a kernel reads P,
dP·r and dPᵀ·(q + v) after a kernel has written dP. P and dP are computed for a few rows and heads at a time, so that they take
little memory and are still in the GPU's cache when they are read.

Results are the same to the last bit every time. Needs Triton and a GPU; with TRITON_INTERPRET=1 it runs on any device, slowly.

Shapes: B batch, T tgt_len, M memory, S = M + T keys, N heads, H d_head, C columns of a score of positions, W edge of a tile.
"""

import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from transformer_xl.model.backends import SCRATCH_BYTES
from transformer_xl.model.backends import fused_kernels as kernels


def fused_attention(
    q_BTNH: Tensor,
    k_BSNH: Tensor,
    v_BSNH: Tensor,
    r_SNH: Tensor,
    *,
    r_w_bias: Tensor,
    r_r_bias: Tensor,
    first_BT: Tensor,
    dropatt: float = 0.0,
) -> Tensor:
    """Compute `relative_attention`; the same arguments and result."""
    dtype, scale = q_BTNH.dtype, q_BTNH.shape[-1] ** -0.5
    content_query = (q_BTNH + r_w_bias.to(dtype)) * scale
    position_query = (q_BTNH + r_r_bias.to(dtype)) * scale
    return _attend(content_query, position_query, k_BSNH, v_BSNH, r_SNH.to(dtype), first_BT, dropatt)


@torch.compiler.disable(reason="the kernels are compiled already")
def _attend(*inputs: Any) -> Tensor:
    """Run the autograd node outside of what `torch.compile` makes of a layer; it would trace the launches, and some fail."""
    return _FusedAttention.apply(*inputs)


class Tile(NamedTuple):
    """How the work is divided: W, queries and keys of a tile, and the number of warps that share it."""

    width: int
    warps: int
    key_warps: int
    """Warps for the gradients of keys and values, which take more registers."""


def tile_of(d_head: int, dtype: torch.dtype) -> Tile:
    """Return the tile for a width of heads: the largest that spills no registers, of those tried.

    It is not chosen by timing when a program runs, because another tile has another order of sums. Wide heads in fp32 take
    smaller tiles, to fit the 99 KB of shared memory of desktop GPUs.
    """
    if dtype == torch.float32:
        return Tile(16 if d_head > 64 else 32, 8, 8)
    if d_head <= 64:
        return Tile(64, 4, 8)
    return Tile(32, 4, 4) if d_head <= 128 else Tile(32, 8, 8)


class _FusedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any, **_: Any) -> Tensor:
        qu, qv, k, v, r, first_BT, dropatt = args
        B, T, N, _ = qu.shape
        qu, qv = qu.contiguous(), qv.contiguous()
        k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
        first = first_BT.to(torch.int32).contiguous().expand(B, T)
        seed = drawn_seed(dropatt, qu.device)
        out, log_sum = torch.empty_like(qu), torch.empty(B, N, T, dtype=torch.float32, device=qu.device)
        ctx.launch = Launch.of(qu, k, dropatt, n_distance=k.shape[1])
        for part in parts(qu, ctx.launch.n_column):
            qu_, qv_, k_, v_, out_ = (x[part.rows, :, part.heads] for x in (qu, qv, k, v, out))
            position = _heads_first(qv_) @ _padded(r[:, part.heads], ctx.launch.n_column).transpose(1, 2)
            tensors = (qu_, k_, v_, position, first[part.rows], out_, log_sum[part.rows, part.heads])
            ctx.launch(kernels.forward_kernel, T, part, tensors, (qu, k, v, log_sum, first), seed)
        ctx.save_for_backward(qu, qv, k, v, r, first, out, log_sum, seed)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        qu, qv, k, v, r, first, out, log_sum, seed = ctx.saved_tensors
        grad, launch = grad_outputs[0].contiguous(), ctx.launch
        # softmax backward, weight * (grad_weight - sum(grad_weight * weight)); that sum over keys is also grad · out
        mean = (grad.float() * out.float()).sum(-1).transpose(1, 2).contiguous()
        grad_qu, grad_qv = torch.empty_like(qu), torch.empty_like(qv)
        grad_k, grad_v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
        grad_r = torch.zeros(r.shape, dtype=torch.float32, device=r.device)
        last = _last_queries(first, launch)
        for part in parts(qu, launch.n_column):
            of_rows = (qu, qv, k, v, grad, grad_qu, grad_qv, grad_k, grad_v)
            qu_, qv_, k_, v_, grad_, grad_qu_, grad_qv_, grad_k_, grad_v_ = (x[part.rows, :, part.heads] for x in of_rows)
            first_, log_sum_, mean_ = first[part.rows], log_sum[part.rows, part.heads], mean[part.rows, part.heads]
            r_NCH, qv_NXH = _padded(r[:, part.heads], launch.n_column), _heads_first(qv_)
            position = qv_NXH @ r_NCH.transpose(1, 2)
            grad_position = torch.zeros_like(position)  # kernels write what is seen
            tensors = (qu_, k_, v_, position, first_, last[part.rows], grad_, log_sum_, mean_, grad_k_, grad_v_, grad_position)
            strided = (qu, k, v, log_sum, first, last, grad_k)
            launch(kernels.key_gradient_kernel, launch.n_key, part, tensors, strided, seed, by_key=True)
            tensors = (k_, grad_position, first_, grad_qu_)
            launch(kernels.query_gradient_kernel, launch.tgt_len, part, tensors, (qu, k, first), seed)
            _heads_first(grad_qv_).copy_(grad_position @ r_NCH)
            grad_r[:, part.heads] += (grad_position.transpose(1, 2) @ qv_NXH).transpose(0, 1)[: len(r)]
        return grad_qu, grad_qv, grad_k, grad_v, grad_r.to(r.dtype), None, None


def drawn_seed(dropatt: float, device: torch.device) -> Tensor:
    """Return what decides which weights are dropped, int64 (1,).

    It stays on the device, so that the host does not wait for it and a graph can be captured.
    """
    return torch.randint(2**62, (1,), device=device) if dropatt else torch.zeros(1, dtype=torch.int64, device=device)


def _last_queries(first_BT: Tensor, launch: "Launch") -> Tensor:
    """Return, for each row and tile of keys, the number of queries up to the last one that sees any of these keys; int32."""
    T, W, device = launch.tgt_len, launch.tile.width, first_BT.device
    highest = torch.arange(W, launch.n_key + W, W, device=device)[:, None] - 1
    return (first_BT[:, None] <= highest).mul(torch.arange(1, T + 1, device=device)).amax(-1).int()


class Part(NamedTuple):
    """Rows and heads whose scores of positions are computed together."""

    number: int
    rows: slice
    heads: slice
    n_row: int
    n_head: int


def parts(q_BTNH: Tensor, n_column: int) -> Iterator[Part]:
    """Divide rows, or the heads of each row if one row is too large, into parts whose scores of positions fit the scratch."""
    B, T, N, _ = q_BTNH.shape
    n_fit = max(1, SCRATCH_BYTES // (T * n_column * q_BTNH.element_size()))
    n_row, n_head = max(1, n_fit // N), min(n_fit, N)
    slices = itertools.product(_slices(B, n_row), _slices(N, n_head))
    for number, (rows, heads) in enumerate(slices):
        yield Part(number, rows, heads, rows.stop - rows.start, heads.stop - heads.start)


def _slices(n: int, most: int) -> list[slice]:
    """Cut n into the fewest slices of at most so many, of nearly equal lengths."""
    n_slice = -(-n // most)
    edges = [n * i // n_slice for i in range(n_slice + 1)]
    return [slice(*edge) for edge in itertools.pairwise(edges)]


def _heads_first(x_BTNH: Tensor) -> Tensor:
    """View (B, T, N, H) as (N, B·T, H)."""
    return x_BTNH.flatten(0, 1).transpose(0, 1)


def _padded(r_SNH: Tensor, n_column: int) -> Tensor:
    """Copy position keys to (N, C, H), with zeros at the end."""
    return F.pad(r_SNH.transpose(0, 1), (0, 0, 0, n_column - len(r_SNH)))


class Launch(NamedTuple):
    """The arguments that all kernels of one call have in common; `tgt_len` is the number of queries."""

    tile: Tile
    tgt_len: int
    n_key: int
    n_column: int
    d_head: int
    dropatt: float
    precision: str
    device: torch.device

    @classmethod
    def of(cls, q: Tensor, k: Tensor, dropatt: float, *, n_distance: int) -> "Launch":
        """Return those for queries (B, T, N, H) and keys (B, S, N, H), whose positions are scored at so many distances."""
        (_, T, _, H), S = q.shape, k.shape[1]
        n_column = -(-n_distance // 8) * 8  # products of other widths are slower
        precision = "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"
        return cls(tile_of(H, q.dtype), T, S, n_column, H, dropatt, precision, q.device)

    def __call__(
        self,
        kernel: Any,
        length: int,
        part: Part,
        tensors: tuple[Tensor | None, ...],
        strided: tuple[Tensor, ...],
        seed: Tensor,
        *,
        by_key: bool = False,
    ) -> None:
        """Launch a kernel for all tiles along `length` of the rows and heads of a part, with the strides of some tensors."""
        grid = (triton.cdiv(length, self.tile.width) * part.n_row * part.n_head,)
        on_device = torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()
        with on_device:  # Triton launches on the current device, which may not be that of the tensors
            kernel[grid](
                *tensors,
                seed,
                *(stride for x in strided for stride in _strides(x)),
                self.tgt_len,
                self.n_key,
                self.n_column,
                part.n_row,
                part.number,
                self.dropatt,
                H=self.d_head,
                P=max(16, triton.next_power_of_2(self.d_head)),
                W=self.tile.width,
                DROPS=self.dropatt > 0,
                PRECISION=self.precision,
                num_warps=self.tile.key_warps if by_key else self.tile.warps,
            )


def _strides(x: Tensor) -> tuple[int, ...]:
    """Return the strides of a tensor by row, by head, and by time unless that is 1; of (B, T), by row."""
    if x.ndim == 4:
        return x.stride(0), x.stride(2), x.stride(1)
    return x.stride()[:-1]

"""`relative_attention` by the fused kernels of `fused_kernels.py`: nothing of size (T, S) is stored, forward or backward.

Results are the same to the last bit every time. Needs Triton and a GPU; with TRITON_INTERPRET=1 it runs on any device, slowly.

Shapes: B batch, T tgt_len, M memory, S = M + T keys, N heads, H d_head, W edge of a tile.
"""

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from transformer_xl.model.backends import fused_kernels as kernels

_POSITION_PROGRAMS = 512
"""About this many programs sum the gradient of the position keys; more would take more memory for their partial sums."""


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


def tile_of(d_head: int, dtype: torch.dtype) -> Tile:
    """Return the tile for a width of heads: the one that spilled the fewest registers of those tried.

    It is not chosen by timing when a program runs, because another tile has another order of sums. Wide heads in fp32 take
    smaller tiles, to fit the 99 KB of shared memory of desktop GPUs.
    """
    if dtype == torch.float32 and d_head > 64:
        return Tile(16, 8)
    return Tile(32, 4 if dtype != torch.float32 and d_head <= 64 else 8)


class _FusedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any, **_: Any) -> Tensor:
        qu, qv, k, v, r, first_BT, dropatt = args
        B, T, N, _ = qu.shape
        qu, qv = qu.contiguous(), qv.contiguous()
        k, v, r = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v, r))
        first = first_BT.to(torch.int32).contiguous()
        # the seed stays on the device, so that the host does not wait for it and a graph can be captured
        seed = torch.randint(2**62, (1,), device=qu.device) if dropatt else torch.zeros(1, dtype=torch.int64, device=qu.device)
        out, log_sum = torch.empty_like(qu), torch.empty(B, N, T, dtype=torch.float32, device=qu.device)
        ctx.launch = _Launch.of(qu, k, v, r, first, dropatt)
        ctx.launch(kernels.forward_kernel, (ctx.launch.n_query_tile * B * N,), qu, qv, k, v, r, first, out, log_sum, seed)
        ctx.save_for_backward(qu, qv, k, v, r, first, out, log_sum, seed)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        *inputs, out, log_sum, seed = ctx.saved_tensors
        qu, qv, k, v, r, _ = inputs
        B, _, N, _ = qu.shape
        grad, launch = grad_outputs[0].contiguous(), ctx.launch
        # softmax backward, weight * (grad_weight - sum(grad_weight * weight)); that sum over keys is also grad · out
        mean_BNT = (grad.float() * out.float()).sum(-1).transpose(1, 2).contiguous()
        common = (*inputs, grad, log_sum, mean_BNT)
        grad_qu, grad_qv = torch.empty_like(qu), torch.empty_like(qv)
        grad_k, grad_v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
        launch(kernels.query_gradient_kernel, (launch.n_query_tile * B * N,), *common, grad_qu, grad_qv, seed)
        launch(kernels.key_gradient_kernel, (launch.n_key_tile * B * N,), *common, grad_k, grad_v, seed)
        n_part = max(1, min(B, _POSITION_PROGRAMS // (launch.n_diagonal * N)))
        partial = torch.empty(
            n_part, N, launch.n_diagonal, 2, launch.tile.width, r.shape[-1], dtype=torch.float32, device=r.device
        )
        launch(kernels.position_gradient_kernel, (launch.n_diagonal, N, n_part), *common, partial, seed, B, n_part)
        grad_r = _sum_diagonals(partial, tgt_len=launch.tgt_len, n_key=launch.n_key).to(r.dtype)
        return grad_qu, grad_qv, grad_k, grad_v, grad_r, None, None


class _Launch(NamedTuple):
    """The arguments that all kernels of one call have in common."""

    tile: Tile
    tgt_len: int
    n_key: int
    strides: tuple[int, ...]
    n_head: int
    d_head: int
    dropatt: float
    precision: str
    device: torch.device

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, r: Tensor, first: Tensor, dropatt: float) -> "_Launch":
        by_row_head_time = [x.stride(dim) for x in (q, k, v) for dim in (0, 2, 1)]
        strides = (*by_row_head_time, r.stride(1), r.stride(0), 0 if len(first) == 1 else first.stride(0))
        _, T, N, H = q.shape
        precision = "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"
        return cls(tile_of(H, q.dtype), T, k.shape[1], strides, N, H, dropatt, precision, q.device)

    @property
    def n_query_tile(self) -> int:
        return triton.cdiv(self.tgt_len, self.tile.width)

    @property
    def n_key_tile(self) -> int:
        return triton.cdiv(self.n_key, self.tile.width)

    @property
    def n_diagonal(self) -> int:
        """Number of diagonals of tiles with visible keys, beginning with that of the last query tile and the first key tile."""
        return self.n_query_tile + triton.cdiv(self.n_key - self.tgt_len, self.tile.width)

    def __call__(self, kernel: Any, grid: tuple[int, ...], *tensors_and_counts: Any) -> None:
        """Launch a kernel with its tensors, followed by the counts that only this kernel takes."""
        on_device = torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()
        with on_device:  # Triton launches on the current device, which may not be that of the tensors
            kernel[grid](
                *tensors_and_counts,
                *self.strides,
                self.tgt_len,
                self.n_key,
                self.n_head,
                self.dropatt,
                H=self.d_head,
                P=max(16, triton.next_power_of_2(self.d_head)),
                W=self.tile.width,
                DROPS=self.dropatt > 0,
                PRECISION=self.precision,
                num_warps=self.tile.warps,
            )


def _sum_diagonals(partial: Tensor, *, tgt_len: int, n_key: int) -> Tensor:
    """Return the gradient (S, N, H) of the position keys from the sums of diagonals, (parts, N, diagonals, 2, W, H).

    Neighboring diagonals share a block: it is `hi` of one and `lo` of the next.
    """
    lo, hi = partial.sum(0).unbind(2)
    N, n_diagonal, W, H = lo.shape
    blocks = lo.new_zeros(N, n_diagonal + 1, W, H)
    blocks[:, :-1] += lo
    blocks[:, 1:] += hi
    before = triton.cdiv(tgt_len, W) * W - (tgt_len - 1)  # columns of the first block that lie before the first position key
    return blocks.flatten(1, 2)[:, before : before + n_key].transpose(0, 1)

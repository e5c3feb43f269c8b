"""`relative_attention` by the fused kernels of `flash_kernels.py`, which keep no scores and no weights.

Scores of positions P, and what follows from their gradients, are products of the library: (q + v)·rᵀ before a kernel reads P,
dP·r and dPᵀ·(q + v) after a kernel has written dP. Where they would take more than `SCRATCH_BYTES`, P and dP are computed for
some rows and heads at a time. The backward pass multiplies P again, unless it is small.

Results are the same to the last bit every time. Needs Triton and a GPU; with TRITON_INTERPRET=1 it runs on any device, slowly.

Shapes: B batch, T tgt_len, M memory, S = M + T keys, N heads, H d_head; U queries of a phase
and C columns of scores of positions, see there.
"""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from transformer_xl.kernels import flash_kernels as kernels
from transformer_xl.kernels.blocks import column_sums
from transformer_xl.kernels.equation import Positions
from transformer_xl.kernels.flash_kernels import Tiles, tiles_of
from transformer_xl.kernels.fused import KEPT_BYTES, SCRATCH_BYTES, launch, n_padded
from transformer_xl.kernels.seeds import drawn_seeds


def fused_attention(
    q_BTNH: Tensor, k_BSNH: Tensor, v_BSNH: Tensor, positions: Positions, *, first_BT: Tensor, dropatt: float = 0.0
) -> Tensor:
    """Compute `relative_attention` with u, v and r; the same result."""
    u, v, r_SNH, b_SN, *_ = positions
    assert u is not None and v is not None and r_SNH is not None and b_SN is None, "see AttentionKind.by_keys"
    inputs = (q_BTNH, k_BSNH, v_BSNH, r_SNH.to(q_BTNH.dtype), u, v, first_BT, dropatt)
    if not torch.compiler.is_compiling():
        return _run(*inputs)
    from transformer_xl.kernels.untraced import call  # which loads the compiler

    return call(_run, *inputs)  # launches cannot be traced


def _run(*inputs: Any) -> Tensor:
    return _FusedAttention.apply(*inputs)


class _FusedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any, **_: Any) -> Tensor:
        q, k, v, r, u, v_bias, first_BT, dropatt = args
        B, T, N, _ = q.shape
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        u, v_bias = u.contiguous(), v_bias.contiguous()
        first = first_BT.contiguous().expand(B, T)
        seed = drawn_seeds(1, q.device) if dropatt else None
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        log_sum = torch.empty(B, N, T, dtype=torch.float32, device=q.device)
        ctx.launcher = launcher = Launcher.of(q, k, dropatt)
        n_more, ctx.n_row = n_padded(k.shape[1]) - len(r), len(r)
        padded = F.pad(r, (0, 0, 0, 0, 0, n_more)) if n_more else r
        pieces, kept = list(groups(q, launcher.n_column)), None
        for group in pieces:
            k_, v_, out_ = (x[group.rows, :, group.heads] for x in (k, v, out))
            log_sum_ = log_sum[group.rows, group.heads]
            qu, qv = _with_biases(q, u, v_bias, first, out, log_sum, seed, launcher, group)
            position = qv @ _position_keys(padded, group, launcher).transpose(1, 2)
            tensors = (qu, k_, v_, position, first[group.rows], out_, log_sum_, seed)
            strided = (qu, k, v, out, log_sum, first)
            launcher(kernels.forward_kernel, "forward", group, tensors, strided)
            kept = position if len(pieces) == 1 and position.nbytes <= KEPT_BYTES else None
        ctx.save_for_backward(q, k, v, padded, u, v_bias, first, out, log_sum, seed, kept)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, padded, u, v_bias, first, out, log_sum, seed, kept = ctx.saved_tensors
        grad, launcher = grad_outputs[0].contiguous(), ctx.launcher
        B, T, N, H = q.shape
        grad_q, mean = torch.empty_like(out), torch.empty_like(log_sum)
        S = k.shape[1]
        grad_k, grad_v = torch.empty(B, S, 2, N, H, dtype=k.dtype, device=k.device).unbind(2)  # as `halves` would like them
        grad_r: dict[int, Tensor] = {}  # by the first head of a group
        n_tile = triton.cdiv(T, launcher.tiles.queries.queries)
        grad_biases = torch.empty(B, n_tile, N, 2 * H, dtype=torch.float32, device=q.device)  # of each tile of queries
        pieces = list(groups(q, launcher.n_column))
        r_dtype = torch.float32 if len(pieces) > 1 else padded.dtype
        for group in pieces:
            of_rows = (k, v, grad, grad_q, grad_k, grad_v)
            k_, v_, grad_, grad_q_, grad_k_, grad_v_ = (x[group.rows, :, group.heads] for x in of_rows)
            first_, log_sum_, mean_ = first[group.rows], log_sum[group.rows, group.heads], mean[group.rows, group.heads]
            r_windows = _position_keys(padded, group, launcher)
            grad_position = q.new_empty(8 * group.n_head, group.n_row * triton.cdiv(T, 8), launcher.n_column)
            gradients = (grad, mean, grad_position)
            qu, qv = _with_biases(q, u, v_bias, first, out, log_sum, seed, launcher, group, gradients)
            position = qv @ r_windows.transpose(1, 2) if kept is None else kept
            tensors = (qu, k_, v_, position, first_, grad_, log_sum_, mean_, grad_k_, grad_v_, grad_position, seed)
            strided = (qu, k, v, out, log_sum, first, grad_k)
            launcher(kernels.key_gradient_kernel, "keys", group, tensors, strided)
            grad_qv = grad_position @ r_windows
            tensors = (k_, grad_position, first_, grad_qv, grad_q_, grad_biases[group.rows, :, group.heads], seed)
            launcher(kernels.query_gradient_kernel, "queries", group, tensors, (k, out, first, grad_biases))
            by_phase = grad_position.transpose(1, 2) @ qv
            found, head = sum_of_phases(by_phase, S, ctx.n_row, r_dtype), group.heads.start
            grad_r[head] = grad_r[head] + found if head in grad_r else found
        grad_u, grad_v_bias = column_sums(grad_biases.view(B * n_tile, -1), u.dtype).view(N, 2 * H).split(H, dim=1)
        of_r = torch.cat(list(grad_r.values()), 1) if len(grad_r) > 1 else grad_r[0]
        return grad_q, grad_k, grad_v, of_r.to(padded.dtype), grad_u, grad_v_bias, None, None


def _with_biases(
    q: Tensor, u: Tensor, v: Tensor, first: Tensor, out: Tensor, log_sum: Tensor, seed: Tensor | None,
    launcher: "Launcher", group: "Group",
    gradients: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None),
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the scaled queries of a group with u, (B, T, N, H), and with v by phase, (8·N, B·U, H); see `flash_kernels.py`.

    Given the gradient of the output, the kernel also writes the sum of their products. The gradient of a softmax is
    weight * (grad_weight - sum(grad_weight * weight)), and that sum over keys is also grad · out.
    """
    _, T, _, H = q.shape
    grad, mean, grad_position = gradients
    qu = torch.empty(group.n_row, T, group.n_head, H, dtype=q.dtype, device=q.device)
    qv = torch.empty(8 * group.n_head, group.n_row * triton.cdiv(T, 8), H, dtype=q.dtype, device=q.device)
    q_, out_, grad_ = (None if x is None else x[group.rows, :, group.heads] for x in (q, out, grad))
    mean_ = None if mean is None else mean[group.rows, group.heads]
    tensors = (q_, u[group.heads], v[group.heads], out_, grad_, first[group.rows], qu, qv, mean_, grad_position, seed)
    launcher(kernels.query_kernel, "queries", group, tensors, (q, u, v, qu, out, log_sum, first))
    return qu, qv


def _position_keys(padded_XNH: Tensor, group: "Group", launcher: "Launcher") -> Tensor:
    """Return a group's position keys for each phase, (8·N, C, H): those of phase w begin at row w of keys and zeros."""
    _, n_all, H = padded_XNH.shape
    windows = padded_XNH.as_strided((8, n_all, launcher.n_column, H), (n_all * H, H, n_all * H, 1))[:, group.heads]
    return windows.reshape(8 * group.n_head, launcher.n_column, H)


def sum_of_phases(by_phase_XCH: Tensor, n_key: int, n_row: int, dtype: torch.dtype) -> Tensor:
    """Return the gradients of position keys, (n_row, N, H), from those of eight phases, (8·N, C, H), in units of log 2.

    Rows after those of the keys are zeros.
    """
    n_all, C, H = by_phase_XCH.shape
    out = torch.empty(n_row, n_all // 8, H, dtype=dtype, device=by_phase_XCH.device)
    R, W = 16, triton.next_power_of_2(H)
    grid = (triton.cdiv(n_row, R) * (n_all // 8),)
    launch(kernels.phase_kernel, grid, by_phase_XCH, out, n_key, n_row, C, H=H, W=W, R=R, num_warps=max(R * W // 512, 1))
    return out


class Group(NamedTuple):
    """Rows and heads whose scores of positions are computed together."""

    number: int
    rows: slice
    heads: slice
    n_row: int
    n_head: int


def groups(q_BTNH: Tensor, n_column: int) -> Iterator[Group]:
    """Divide rows, or the heads of each row if one row is too large, into groups whose scores of positions fit the scratch."""
    B, T, N, _ = q_BTNH.shape
    n_fit = max(1, SCRATCH_BYTES // (T * n_column * q_BTNH.element_size()))
    n_row, n_head = max(1, n_fit // N), min(n_fit, N)
    slices = itertools.product(_slices(B, n_row), _slices(N, n_head))
    for number, (rows, heads) in enumerate(slices):
        yield Group(number, rows, heads, rows.stop - rows.start, heads.stop - heads.start)


def _slices(n: int, most: int) -> list[slice]:
    """Cut n into the fewest slices of at most so many, of nearly equal lengths."""
    n_slice = -(-n // most)
    edges = [n * i // n_slice for i in range(n_slice + 1)]
    return [slice(*edge) for edge in itertools.pairwise(edges)]


class Launcher(NamedTuple):
    """The arguments that all kernels of one call have in common; `tgt_len` is the number of queries."""

    tiles: Tiles
    tgt_len: int
    n_key: int
    n_column: int
    d_head: int
    dropatt: float
    precision: str

    @classmethod
    def of(cls, q: Tensor, k: Tensor, dropatt: float) -> "Launcher":
        """Return those for queries (B, T, N, H) and keys (B, S, N, H)."""
        (_, T, _, H), S = q.shape, k.shape[1]
        n_column = -(-S // 8) * 8  # products of other widths are slower
        precision = "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"
        return cls(tiles_of(H, q.dtype, drops=dropatt > 0, tgt_len=T), T, S, n_column, H, dropatt, precision)

    def __call__(
        self,
        kernel: Any,
        name: str,
        group: Group,
        tensors: tuple[Tensor | None, ...],
        strided: tuple[Tensor, ...],
    ) -> None:
        """Launch a kernel for a group's rows and heads, in tiles of a name in `Tiles`, with the strides of some tensors."""
        tile = getattr(self.tiles, name)
        n_tile = triton.cdiv(self.n_key, tile.keys) if "keys" in name else triton.cdiv(self.tgt_len, tile.queries)
        launch(
            kernel,
            (n_tile * group.n_row * group.n_head,),
            *tensors,
            *(stride for x in strided for stride in _strides(x)),
            self.tgt_len,
            self.n_key,
            self.n_column,
            group.n_row,
            group.number,
            self.dropatt,
            H=self.d_head,
            P=max(16, triton.next_power_of_2(self.d_head)),
            Q=tile.queries,
            K=tile.keys,
            DROPS=self.dropatt > 0,
            PRECISION=self.precision,
            num_warps=tile.warps,
            num_stages=tile.stages,
            maxnreg=tile.registers,
        )


def _strides(x: Tensor) -> tuple[int, ...]:
    """Return the strides of a tensor by row, by head, and by time unless that is 1; of (B, T), by row."""
    if x.ndim == 4:
        return x.stride(0), x.stride(2), x.stride(1)
    return x.stride()[:-1]

"""Cross entropy of bf16 or fp16 scores without a copy of them in fp32, as two GPU kernels; sums are in fp32.

One pass over a row of scores finds the logarithm of its sum, a second one writes the gradient. PyTorch's way passes over fp32
copies four times, and holds two of them. Needs Triton and a GPU; with TRITON_INTERPRET=1 it runs on any device, slowly.

Shapes: X tokens, V vocabulary.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from transformer_xl.kernels.fused import launch

_WIDTH = 4096
"""Most scores that a program holds at once."""


@triton.jit
def loss_kernel(scores, labels, nats, log_sums, row_stride, V, W: tl.constexpr):
    """Compute -log softmax of one row at its label, and the logarithm of the sum of the exponentials."""
    row = tl.program_id(0).to(tl.int64)
    scores += row * row_stride
    label = tl.load(labels + row)
    highest, total = tl.full([], -1e30, tl.float32), tl.full([], 0.0, tl.float32)
    for v0 in range(0, V, W):
        v = v0 + tl.arange(0, W)
        score = tl.load(scores + v, mask=v < V, other=float("-inf")).to(tl.float32)
        new_highest = tl.maximum(highest, tl.max(score, 0))
        total = total * tl.exp(highest - new_highest) + tl.sum(tl.exp(score - new_highest), 0)
        highest = new_highest
    log_sum = highest + tl.log(total)
    own = tl.load(scores + tl.maximum(label, 0)).to(tl.float32)
    tl.store(nats + row, tl.where(label < 0, 0.0, log_sum - own))
    tl.store(log_sums + row, log_sum)


@triton.jit
def gradient_kernel(scores, labels, log_sums, grad, grad_scores, row_stride, V, W: tl.constexpr):
    """Compute (softmax - 1 at the label) times the gradient of a row's loss, for a part of the row."""
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    factor = tl.load(grad + row)
    v = tl.program_id(1) * W + tl.arange(0, W)
    score = tl.load(scores + row * row_stride + v, mask=v < V, other=float("-inf")).to(tl.float32)
    share = tl.exp(score - tl.load(log_sums + row)) - tl.where(v == label, 1.0, 0.0)
    gradient = tl.where(label < 0, 0.0, share * factor)  # also where scores without a label are infinite
    tl.store(grad_scores + row * V + v, gradient.to(grad_scores.dtype.element_ty), mask=v < V)


class FusedNll(torch.autograd.Function):
    """Nats (X,) in fp32 of labels int64 (X,), 0 where the label is -100, from scores (X, V)."""

    @staticmethod
    def forward(ctx: Any, *args: Any, **_: Any) -> Tensor:
        scores, labels = args
        scores, labels = scores if scores.stride(1) == 1 else scores.contiguous(), labels.contiguous()
        n_row, n_score = scores.shape
        nats, log_sums = (torch.empty(n_row, dtype=torch.float32, device=scores.device) for _ in range(2))
        width = min(_WIDTH, triton.next_power_of_2(n_score))
        launch(loss_kernel, (n_row,), scores, labels, nats, log_sums, scores.stride(0), n_score, W=width, num_warps=8)
        ctx.save_for_backward(scores, labels, log_sums)
        return nats

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        scores, labels, log_sums = ctx.saved_tensors
        n_row, n_score = scores.shape
        grad_scores = torch.empty((n_row, n_score), dtype=scores.dtype, device=scores.device)
        grad = grad_outputs[0].float().contiguous()
        width = min(_WIDTH, triton.next_power_of_2(n_score))
        tensors, grid = (scores, labels, log_sums, grad, grad_scores), (n_row, triton.cdiv(n_score, width))
        launch(gradient_kernel, grid, *tensors, scores.stride(0), n_score, W=width, num_warps=8)
        return grad_scores, None

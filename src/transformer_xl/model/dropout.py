"""Dropout of activations, of words and of weights, with the masks of `kernels/seeds.py`, or on a GPU by kernels that keep none.

Shapes: B batch, T tgt_len, D width.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from transformer_xl.kernels.cpu_linear import linear
from transformer_xl.kernels.fused import fused_blocks
from transformer_xl.kernels.seeds import apply_mask, keep_mask

_LEFT_OF_A_WORD = 1e-6  # share of a dropped word's vector that stays


class Dropout(nn.Module):
    """`torch.nn.Dropout` with the mask of `keep_mask` on a CPU; if locked, all positions of a row share it.

    Locked dropout is the variational dropout of Gal and Ghahramani 2016 (arXiv 1512.05287). A mean over positions does not
    average its noise out, so it regularizes more than independent masks of the same rate. The mask changes with every call.

    Args:
        p: probability of dropping an element, at least 0 and below 1.
        locked: drop features (…, 1, D) of inputs (…, T, D) instead of single elements.
    """

    def __init__(self, p: float, *, locked: bool = False) -> None:
        super().__init__()
        self.p, self.locked = p, locked

    @property
    def rate(self) -> float:
        """The probability now: none is dropped in evaluation."""
        return self.p if self.training else 0.0

    def forward(self, x: Tensor) -> Tensor:
        """Zero elements at random while training; shape and dtype are kept."""
        if not self.rate:
            return x
        if blocks := fused_blocks(x):
            return blocks.dropped(x, p=self.p, locked=self.locked)[0]
        if self.locked:
            keep, factor = keep_mask(x[..., :1, :], self.p)
            return _broadcast_mask(x, keep, factor)
        return _CpuDropout.apply(x, self.p) if x.device.type == "cpu" else F.dropout(x, self.p)

    def extra_repr(self) -> str:
        return f"p={self.p}, locked=True" if self.locked else f"p={self.p}"


def dropped_pair(drop: Dropout, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return drop(x) and drop(y), each with a mask of its own; on a GPU one kernel computes both."""
    if drop.rate and (blocks := fused_blocks(x, drop)):
        return blocks.dropped(x, y, p=drop.p, locked=drop.locked)
    return drop(x), drop(y)


class WordDropout(nn.Module):
    """Drop words from the vocabulary, wherever they occur, and scale the vectors of the others (Gal and Ghahramani 2016).

    AWD-LSTM (Merity et al. 2017, arXiv 1708.02182) does the same to the rows of the embedding matrix, with a copy of it. Each
    call draws the dropped words anew. A softmax that shares the matrix keeps all of them.

    A millionth of a dropped word's vector stays. From a row of zeros, such as a text's first word when biases are zero, every
    layer norm makes zeros again and multiplies their gradient by 1 / sqrt(epsilon) = 316, and 32 norms overflow any number.
    From a millionth, a few norms make a vector of the usual size. (The authors' code for Penn Treebank puts 1e-12 into every
    feature of a dropped word.)

    Args:
        p: probability of dropping a word, at least 0 and below 1.
        vocab_size: number of words.
    """

    def __init__(self, p: float, *, vocab_size: int) -> None:
        super().__init__()
        self.p, self.vocab_size = p, vocab_size

    def forward(self, embedded_BTD: Tensor, ids_BT: Tensor) -> Tensor:
        """Shrink the vectors of dropped words while training; `ids_BT` are the words of the vectors."""
        if not self.training or self.p == 0:
            return embedded_BTD
        like = torch.empty(self.vocab_size, dtype=torch.uint8, device=embedded_BTD.device)
        keep, factor = keep_mask(like, self.p)
        keep_BT1 = keep[ids_BT].unsqueeze(-1).to(embedded_BTD.dtype).clamp_min(_LEFT_OF_A_WORD)
        return _broadcast_mask(embedded_BTD, keep_BT1, factor)

    def extra_repr(self) -> str:
        return f"p={self.p}, vocab_size={self.vocab_size}"


class DropConnectLinear(nn.Linear):
    """`torch.nn.Linear` with dropout of its weights while training (DropConnect, Wan et al. 2013); biases stay.

    Every call draws one mask for all of its input.

    Args:
        n_in: width of the input.
        n_out: width of the output.
        bias: add a bias.
        dropweight: probability of dropping a weight, at least 0 and below 1.
    """

    def __init__(self, n_in: int, n_out: int, *, bias: bool = True, dropweight: float = 0.0) -> None:
        super().__init__(n_in, n_out, bias=bias)
        self.drop = Dropout(dropweight)

    def drawn_weight(self) -> Tensor:
        """Return the weights with some dropped and the others scaled; for callers that use them more than once."""
        return self.drop(self.weight)

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.drawn_weight(), self.bias)


def _broadcast_mask(x: Tensor, keep: Tensor, factor: float) -> Tensor:
    """Multiply by a mask smaller than `x`; the backward pass needs only the small mask."""
    return (x * keep.to(x.dtype)).mul_(factor)  # in this order a factor that bf16 rounds cannot shift the mean


class _CpuDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any, **_: Any) -> Tensor:
        x, p = args
        keep, ctx.factor = keep_mask(x, p)
        ctx.save_for_backward(keep)
        return apply_mask(x, keep, ctx.factor)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        (grad,) = grad_outputs
        (keep,) = ctx.saved_tensors
        return apply_mask(grad, keep, ctx.factor), None


def relu_dropout(x: Tensor, net: DropConnectLinear, drop: Dropout) -> Tensor:
    """Return drop(relu(net(x))); the backward pass needs only the result, which is 0 where either one zeroed it."""
    if blocks := fused_blocks(x, net, drop):
        return blocks.active_inner(linear(x, net.drawn_weight()), net.bias, p=drop.rate, locked=drop.locked)
    inner = net(x)
    if drop.rate and not drop.locked and inner.device.type == "cpu":
        return _CpuReluDropout.apply(inner, drop.p)
    return drop(F.relu(inner))


class _CpuReluDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any, **_: Any) -> Tensor:
        x, p = args
        keep, ctx.factor = keep_mask(x, p)
        out = apply_mask(x, keep, ctx.factor).clamp_min_(0)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        (grad,) = grad_outputs
        (out,) = ctx.saved_tensors
        return torch.ops.aten.threshold_backward(grad, out, 0).mul_(ctx.factor), None

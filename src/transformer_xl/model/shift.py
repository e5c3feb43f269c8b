"""What a layer reads of the tokens right before each token, besides what it attends to.

    x_t = [h_{t-1}; h_t]                           token shift: some channels are those of the token before
    x_t = h_t + w_1 ⊙ h_{t-1} + … + w_k ⊙ h_{t-k}     short convolution, depthwise

Both blocks of a layer read such an x_t instead of h_t, and add their output to h_t. The earlier h are inputs of the layer, for
the feed-forward network too: they are what the memory keeps, so segments need nothing new to read on as one text. Memory is
longer by these k positions, which only its oldest key needs.

Reference: `time_shift` of Peng et al. 2023 (RWKV, arXiv 2305.13048); Canon layers of Allen-Zhu 2025 (arXiv 2512.17351), whose
convolution reads the input of each block instead, which takes a state of its own.

Shapes: B batch, L positions, T the last of them, D d_model, k earlier tokens.
"""

from abc import abstractmethod
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from transformer_xl.model.attention.equation import first_keys
from transformer_xl.model.call import Rows
from transformer_xl.model_config import AttentionConfig, TransformerXLConfig


class Shift(nn.Module):
    """Changes what a block reads by the inputs of the layer at earlier tokens.

    Attributes:
        reach: k, how many tokens back it reads.
    """

    reach: int

    @abstractmethod
    def forward(self, x_BTD: Tensor, earlier: Sequence[Tensor]) -> Tensor:
        """Return what the block reads, (B, T, D).

        Args:
            x_BTD: what it would read otherwise.
            earlier: k tensors (B, T, D), the layer's inputs one token before, two tokens before, …; 0 where there was none.
        """


class TokenShift(Shift):
    """The first half of the channels is that of the token before; it has no parameters."""

    reach = 1

    def forward(self, x_BTD: Tensor, earlier: Sequence[Tensor]) -> Tensor:
        """Replace the first channels."""
        return self.mix(x_BTD, earlier[0])

    @staticmethod
    def mix(x: Tensor, before: Tensor) -> Tensor:
        """Return the first half of `before` and the second half of `x`, (…, D)."""
        half = x.shape[-1] // 2
        return torch.cat([before[..., :half], x[..., half:]], dim=-1)


class ShortConvolution(Shift):
    """Adds the last `reach` tokens, each channel by weights of its own, which begin at 0."""

    def __init__(self, d_model: int, reach: int) -> None:
        super().__init__()
        self.reach = reach
        self.taps = nn.Parameter(torch.zeros(reach, 1, d_model))

    def forward(self, x_BTD: Tensor, earlier: Sequence[Tensor]) -> Tensor:
        """Add the weighted tokens."""
        return self.mix(x_BTD, earlier, self.taps)

    @staticmethod
    def mix(x: Tensor, earlier: Sequence[Tensor], taps: Tensor) -> Tensor:
        """Add to `x` the earlier states (…, D), each weighted by a row of `taps` (k, 1, D)."""
        for tap, h in zip(taps, earlier, strict=True):
            x = torch.addcmul(x, h, tap)
        return x


def make_shift(config: AttentionConfig) -> Shift | None:
    """Return the shift of one block, as the settings describe it; None: it reads its own token."""
    if config.shift_reach == 0:
        return None
    if isinstance(config, TransformerXLConfig) and config.shift == "token":
        return TokenShift()
    return ShortConvolution(config.d_model, config.shift_reach)


def first_positions(rows: Rows, n_valid: Tensor, *, tgt_len: int, memory_length: int) -> Tensor | None:
    """Return the first position of memory and segment that each of them may look back to, int64 (B, M + T).

    It is that of its own text. None: nothing is hidden from any position, or rather, on a CPU, where finding out is cheap.

    Args:
        rows: padding and beginnings of documents.
        n_valid: int64 (B,), how many of the last memory positions are real.
        tgt_len: T.
        memory_length: M.
    """
    n_pad, M = rows.n_pad, memory_length
    if n_pad is None and rows.document_starts is None and n_valid.device.type == "cpu" and (n_valid == M).all():
        return None
    first_BT, _ = first_keys(rows.document_starts, n_valid, n_pad, tgt_len=tgt_len, memory_length=M, window=None)
    oldest_B = M - n_valid if n_pad is None else M - n_valid + n_pad
    return torch.cat([oldest_B.unsqueeze(1).expand(-1, M), first_BT], dim=1)


def without_oldest(first_BT: Tensor, n_before: int, n_pad: Tensor | None, *, n_key: int) -> Tensor:
    """Return the first key that each query sees (see `first_keys`) when the memory's oldest positions are no keys.

    Args:
        first_BT: with them.
        n_before: how many they are.
        n_pad: int64 (B,), padding tokens at the left of each row, by which its memory has moved up; None: none.
        n_key: keys without them.

    Example:
        >>> without_oldest(torch.tensor([[0, 3]]), 1, None, n_key=4).tolist()
        [[0, 2]]
    """
    oldest_B1 = torch.zeros_like(first_BT[:, :1]) if n_pad is None else n_pad.unsqueeze(1)
    own_T = torch.arange(n_key - first_BT.shape[1], n_key, device=first_BT.device)
    return (first_BT - n_before).maximum(oldest_B1).minimum(own_T)


def earlier_states(h_BTD: Tensor, first_BT: Tensor | None, reach: int, *, before_BMD: Tensor | None = None) -> list[Tensor]:
    """Return the states 1, …, `reach` positions before each position, k tensors (B, T, D).

    Args:
        h_BTD: states, contiguous in time.
        first_BT: int64, the first position that each position may look back to, counted from the first of `before_BMD`;
            None: all that there are.
        reach: k.
        before_BMD: states right before them; None: there are none.

    Example:
        >>> (before,) = earlier_states(torch.tensor([[[1.0], [2.0], [3.0]]]), torch.tensor([[0, 0, 2]]), 1)
        >>> before.flatten().tolist()  # a text begins at position 2
        [0.0, 1.0, 0.0]
    """
    T, M = h_BTD.shape[1], 0 if before_BMD is None else before_BMD.shape[1]
    n = min(M, reach)
    joined = h_BTD if before_BMD is None else torch.cat([before_BMD[:, M - n :], h_BTD], dim=1)
    joined = F.pad(joined, (0, 0, reach - n, 0))
    found = [joined[:, reach - k : reach - k + T] for k in range(1, reach + 1)]
    if first_BT is None:
        return found
    own_T = torch.arange(M, M + T, device=h_BTD.device)
    return [torch.where((own_T - k >= first_BT).unsqueeze(-1), x, 0) for k, x in enumerate(found, start=1)]

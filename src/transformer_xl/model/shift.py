"""What a layer reads of the tokens right before each token, besides what it attends to.

    x_t = [h_{t-1}; a_t; b_t; h_t]     a quarter of the channels is of the token before; two eighths are means that fade

Both blocks of a layer read such an x_t instead of h_t, and add their output to h_t. The earlier h are inputs of the layer, for
the feed-forward network too: they are what the memory keeps, so segments need nothing new to read on as one text. Memory is
longer by these k positions, which only its oldest key needs.

Reference: `time_shift` of Peng et al. 2023 (RWKV, arXiv 2305.13048); the moving averages of Ma et al. 2022 (Mega, arXiv
2209.10655), here with fixed decays. They read the input of each block.

Shapes: B batch, T tokens, L = k + T, D d_model, n channels that a shift makes, k earlier tokens.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from transformer_xl.config.model import AttentionConfig, TransformerXLConfig
from transformer_xl.kernels.device import in_full_precision

GROUPS = ((2, 0.0), (1, 0.5), (1, 0.8))
"""Channels from the first on: how many eighths of D, and how much less a token counts than the one after it."""

BLOCK = 64
"""Tokens whose averages are one product, so that the products grow with the text and not with its square."""


class Shift(nn.Module):
    """Replaces the first channels of what a block reads by what they were at the tokens before, without parameters.

    Args:
        reach: k, how many tokens back it reads.
    """

    def __init__(self, reach: int) -> None:
        super().__init__()
        self.reach = reach

    def forward(self, h_BLD: Tensor, first_BT: Tensor | None = None) -> Tensor:
        """Return what they were, (B, T, n).

        Args:
            h_BLD: the layer's inputs: k before the tokens, 0 where there were none, then those at the tokens.
            first_BT: int64, the first of the L positions that each token may look back to; None: all.
        """
        *parts, _ = h_BLD.split(_widths(h_BLD.shape[-1]), dim=-1)  # whose gradients are joined at once
        past = [faded(x, decay, first_BT, reach=self.reach) for x, (_, decay) in zip(parts, GROUPS, strict=True)]
        return torch.cat(past, dim=-1)

    def mix(self, x: Tensor, past: Tensor) -> Tensor:
        """Return what the block reads instead of `x` (…, D), with what `forward` returned (…, n)."""
        return torch.cat([past, x[..., past.shape[-1] :]], dim=-1)

    def kernel(self, d_model: int) -> tuple[Tensor, Tensor]:
        """Return weights w_0 (D,) and w_1, …, w_k (k, D) so that x_t is w_0 ⊙ x + Σ w_i ⊙ h_{t-i}, for frozen weights."""
        *widths, n_own = _widths(d_model)
        taps = [
            fading(decay, self.reach, dtype=torch.float64).flip(0).unsqueeze(1).expand(-1, n)
            for n, (_, decay) in zip(widths, GROUPS, strict=True)
        ]
        own = torch.cat([torch.zeros(d_model - n_own), torch.ones(n_own)])
        return own, F.pad(torch.cat(taps, dim=1), (0, n_own))


def _widths(d_model: int) -> list[int]:
    """Return the channels of each group, and those that stay."""
    widths = [n * d_model // 8 for n, _ in GROUPS]
    return [*widths, d_model - sum(widths)]


def make_shift(config: AttentionConfig) -> Shift | None:
    """Return the shift of a layer, as the settings describe it; None: its blocks read their own token."""
    has_shift = isinstance(config, TransformerXLConfig) and config.shift != "none"
    return Shift(config.shift_reach) if has_shift else None


def with_before(h_BTD: Tensor, before_BMD: Tensor, n: int) -> Tensor:
    """Return states with the `n` before them, (B, n + T, D), and zeros where `before_BMD` has fewer."""
    M = before_BMD.shape[1]
    joined = torch.cat([before_BMD[:, max(M - n, 0) :], h_BTD], dim=1)
    return joined if n <= M else F.pad(joined, (0, 0, n - M, 0))  # which copies even where it adds nothing


def before(h_BLD: Tensor, first_BT: Tensor | None, *, reach: int) -> Tensor:
    """Return the states right before each of the T = L - `reach` last tokens, (B, T, D); 0 before `first_BT`.

    Example:
        >>> h_BLD = torch.tensor([[[0.0], [1.0], [2.0], [3.0]]])
        >>> before(h_BLD, torch.tensor([[0, 0, 3]]), reach=1).flatten().tolist()  # a text begins at the last position
        [0.0, 1.0, 0.0]
    """
    moved = h_BLD[:, reach - 1 : -1]
    if first_BT is None:
        return moved
    own_T = torch.arange(reach, h_BLD.shape[1], device=h_BLD.device)
    return torch.where((own_T > first_BT).unsqueeze(-1), moved, 0)


def faded(h_BLD: Tensor, decay: float, first_BT: Tensor | None, *, reach: int) -> Tensor:
    """Return Σ_k (1 - α) α^(k-1) h_{t-k} over `reach` tokens before each of the T last ones, (B, T, D), from `first_BT` on.

    Example:
        >>> h_BLD = torch.tensor([[[4.0], [8.0], [0.0]]])
        >>> faded(h_BLD, 0.5, None, reach=2).flatten().tolist()
        [5.0]
    """
    if not decay:
        return before(h_BLD, first_BT, reach=reach)
    B, T = h_BLD.shape[0], h_BLD.shape[1] - reach
    weights = fading(decay, reach, dtype=torch.promote_types(h_BLD.dtype, torch.float32), device=h_BLD.device)
    band_TL = _band(weights.to(h_BLD.dtype), min(T, BLOCK))
    sums = []
    for start in range(0, max(T, 1), BLOCK):
        n = min(BLOCK, T - start)
        weight = band_TL[:n, : reach + n].expand(B, -1, -1)
        if first_BT is not None:
            position = torch.arange(start, start + reach + n, device=h_BLD.device)
            weight = torch.where(position >= first_BT[:, start : start + n].unsqueeze(-1), weight, 0)
        with in_full_precision(h_BLD.device):  # the products are small, and states stay as exact as they are
            sums.append(torch.bmm(weight, h_BLD[:, start : start + reach + n]))
    return sums[0] if len(sums) == 1 else torch.cat(sums, dim=1)


def fading(decay: float, reach: int, *, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Tensor:
    """Return the weights of the last `reach` tokens in a mean, oldest first; computed where they are needed, so nothing waits.

    Example:
        >>> fading(0.5, 3).tolist(), fading(0.0, 2).tolist()
        ([0.125, 0.25, 0.5], [0.0, 1.0])
    """
    return (1 - decay) * decay ** torch.arange(reach - 1, -1, -1, dtype=dtype or torch.get_default_dtype(), device=device)


def _band(weights_K: Tensor, n_row: int) -> Tensor:
    """Return a matrix with the weights in each row, one column farther than in the row before, (rows, K + rows).

    Example:
        >>> _band(torch.tensor([1, 2]), 2).tolist()
        [[1, 2, 0, 0], [0, 1, 2, 0]]
    """
    n_column = len(weights_K) + n_row
    return F.pad(weights_K, (0, n_row + 1)).repeat(n_row)[: n_row * n_column].view(n_row, n_column)

"""Relative positions: sinusoids of a distance, and the shift that turns distances into keys.

Shapes: B batch, T tgt_len, M memory, S = M + T keys, N heads, D d_model.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def sinusoids(distances: Tensor, d_model: int, dtype: torch.dtype | None = None) -> Tensor:
    """Encode distances as sines followed by cosines of geometric wavelengths, the paper's R (Vaswani et al. 2017, sec. 3.5).

    Args:
        distances: how far a key lies before its query (tokens), shape (S,).
        d_model: width of the encoding; even.
        dtype: of the result; computed in it, but never in less than fp32. None: the default dtype.

    Returns:
        tensor (S, d_model): d_model / 2 sines, then d_model / 2 cosines, the order of the authors' code
        (`PositionalEmbedding` in `pytorch/mem_transformer.py`), not the interleaved one.

    Example:
        >>> sinusoids(torch.tensor([0, 1]), 4).tolist()[0]
        [0.0, 0.0, 1.0, 1.0]
    """
    dtype = dtype or torch.get_default_dtype()
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    exponents = torch.arange(0, d_model, 2, device=distances.device, dtype=exact) / d_model
    angles = torch.outer(distances.to(exact), 1.0 / 10000.0**exponents)
    return torch.cat([angles.sin(), angles.cos()], dim=-1).to(dtype)


def key_distances(n_key: int, *, clamp_len: int | None, device: torch.device | None = None) -> Tensor:
    """Return the distances S-1, …, 1, 0 that position keys stand for, limited to `clamp_len`.

    Args:
        n_key: S, number of distances.
        clamp_len: largest distance told apart (tokens); farther ones share its encoding. None: no limit.
        device: where the result lives.

    Returns:
        int64 tensor (S,).

    Example:
        >>> key_distances(5, clamp_len=2).tolist()
        [2, 2, 2, 1, 0]
    """
    distances = torch.arange(n_key - 1, -1, -1, device=device)
    return distances if clamp_len is None else distances.clamp(max=clamp_len)


def rel_shift(score_BNTS: Tensor) -> Tensor:
    """Re-index position scores from distance to key (Dai et al. 2019, appendix B).

    Column j of the input scores a query against distance S-1-j; column s of the output scores it against key s, which lies
    M + t - s before query t. So `out[t, s] = in[t, s + T - 1 - t]`: row t moves left by T - 1 - t. One column of padding makes
    each row one element longer, so that reading the same memory with the old row length moves every row by one more.

    Args:
        score_BNTS: terms (b) + (d) of the paper's A^rel, shape (…, T, S) with S ≥ T.

    Returns:
        The same shape. Entries with s > M + t come from the next row and mean nothing; the causal mask must cover them.

    Raises:
        ValueError: if S < T, when there is no shift that keeps every query's own key.

    Example:
        >>> x = torch.arange(6.0).view(1, 1, 2, 3)        # T=2, M=1
        >>> rel_shift(x)[0, 0].tril(1).tolist()
        [[1.0, 2.0, 0.0], [3.0, 4.0, 5.0]]
    """
    T, S = score_BNTS.shape[-2:]
    if S < T:
        raise ValueError(f"keys ({S}) must include the segment's own positions ({T})")
    padded = F.pad(score_BNTS, (1, 0)).flatten(-2)
    return padded[..., T:].unflatten(-1, (T, S))

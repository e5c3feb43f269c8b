"""Positions that left are written into a matrix per head (Munkhdalai et al. 2024, arXiv 2404.07143, section 2.1).

    φ = ELU + 1
    o_mem = φ(q) S / (φ(q)·z)                      what a query reads
    S ← S + Σ φ(k)ᵀ v      z ← z + Σ φ(k)          linear: what a block writes
    S ← S + Σ φ(k)ᵀ (v − φ(k) S / (φ(k)·z))        delta: only what the block before does not say yet; z as above

Keys have no position part. Only positions that no query sees any more are written, as in RAttention (arXiv 2506.15545); the
original writes all. The newest block is kept as hidden states and read in the graph, so W_k and W_v learn from what they
write. S and z are one tensor: z is the column of S of a value that is always 1.

Shapes: B batch, T tgt_len, S keys, s those of them that may have left, N heads, H d_head, Z = H + 1, n blocks of C.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from transformer_xl.model.beyond.layer import Beyond
from transformer_xl.model.beyond.memory import Leaving
from transformer_xl.model.precision import at_least_fp32
from transformer_xl.model_config import TransformerXLConfig

_WARM_UP = 4096
"""Tokens that a matrix has seen before a lane of a text is scored; it forgets none, so any number is a choice."""


class LinearMatrix(Beyond):
    """Sums of outer products, added to what attention gathers after a norm.

    The mean of many values is small, the smaller the longer the text; the norm gives it the size of what attention gathers,
    as in RAttention, and a scale per channel, 1 at first, says how much of it counts. A gate per head, as in Infini-attention,
    learned more slowly in a task of recall (docs/memory.md).
    """

    reads_waiting = True

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__(config)
        self.scale = nn.Parameter(
            torch.ones(config.n_head * config.d_head)
        )  # a vector, so that no optimizer takes it for a matrix

    @staticmethod
    def shape(config: TransformerXLConfig) -> tuple[int, ...]:
        """Return (N, H, H + 1)."""
        return (config.n_head, config.d_head, config.d_head + 1)

    @staticmethod
    def reach(config: TransformerXLConfig) -> int:
        """Return enough tokens to say something."""
        return _WARM_UP

    def init_own(self, name: str, parameter: Tensor) -> bool:
        """Begin with a scale of 1."""
        parameter.fill_(1.0)
        return True

    def add(
        self,
        attended_BTNH: Tensor,
        q_BTNH: Tensor,
        k_BSNH: Tensor,
        v_BSNH: Tensor,
        beyond_B: Tensor,
        *,
        seen_BT: Tensor,
        leaving: Leaving,
        n_near: int,
    ) -> Tensor:
        """Add the normalized o_mem of the positions before `seen_BT`; the arguments are those of `Beyond.add`."""
        with torch.autocast(q_BTNH.device.type, enabled=False):
            q, k = feature(q_BTNH), feature(k_BSNH[:, :n_near])
            read = torch.einsum("btnh,bnhz->btnz", q, beyond_B)
            if leaving.goes_on is not None:
                read = read.where(leaving.goes_on[..., None, None], 0.0)
            place_s = torch.arange(n_near, device=q.device)
            near_BTs = (place_s >= leaving.first[..., None]) & (place_s < seen_BT[..., None])
            weight_BNTs = torch.einsum("btnh,bsnh->bnts", q, k).where(near_BTs[:, None], 0.0)
            value_BsNZ = with_one(self.news(k, v_BSNH[:, :n_near], beyond_B))
            read = read + torch.einsum("bnts,bsnz->btnz", weight_BNTs, value_BsNZ)
            added = F.rms_norm(mean_of(read), (read.shape[-1] - 1,), eps=1e-6) * self.scale.view(q.shape[2:])
        return attended_BTNH + added.to(attended_BTNH.dtype)

    def write(self, beyond_B: Tensor, *, h_BSD: Tensor, k_BSNH: Tensor, v_BSNH: Tensor, leaving: Leaving) -> Tensor:
        """Return the matrix with all blocks in it; the arguments are those of `Beyond.write`."""
        with torch.autocast(k_BSNH.device.type, enabled=False):
            k = feature(leaving.blocks(k_BSNH)).where(leaving.leaves[..., None, None, None], 0.0)
            return self.written(beyond_B, k, leaving.blocks(v_BSNH))

    def written(self, beyond_B: Tensor, k_BnCNH: Tensor, v_BnCNH: Tensor) -> Tensor:
        """Add φ(k)ᵀ [v, 1] of all blocks; features of those that do not leave are 0."""
        return beyond_B + torch.einsum("bxcnh,bxcnz->bnhz", k_BnCNH, with_one(at_least_fp32(v_BnCNH)))

    def news(self, k_BsNH: Tensor, v_BsNH: Tensor, beyond_B: Tensor) -> Tensor:
        """Return what is written for values whose keys have these features."""
        return at_least_fp32(v_BsNH)


class DeltaMatrix(LinearMatrix):
    """The same, where a block writes only what the matrix does not say of its keys yet."""

    def written(self, beyond_B: Tensor, k_BnCNH: Tensor, v_BnCNH: Tensor) -> Tensor:
        """Write block after block."""
        for k_BCNH, v_BCNH in zip(k_BnCNH.unbind(1), v_BnCNH.unbind(1), strict=True):
            news = with_one(self.news(k_BCNH, v_BCNH, beyond_B))
            beyond_B = beyond_B + torch.einsum("bcnh,bcnz->bnhz", k_BCNH, news)
        return beyond_B

    def news(self, k_BsNH: Tensor, v_BsNH: Tensor, beyond_B: Tensor) -> Tensor:
        """Return values less what the matrix says of their keys."""
        return at_least_fp32(v_BsNH) - mean_of(torch.einsum("bsnh,bnhz->bsnz", k_BsNH, beyond_B))


def feature(x: Tensor) -> Tensor:
    """Return φ(x) = ELU(x) + 1, in fp32 at least."""
    return F.elu(at_least_fp32(x)) + 1.0


def with_one(v_H: Tensor) -> Tensor:
    """Return values (…, H) and a 1 after each, (…, H + 1)."""
    return F.pad(v_H, (0, 1), value=1.0)


def mean_of(read_Z: Tensor) -> Tensor:
    """Return sums of values divided by the sum of their weights, which is last, (…, H); 0 where nothing has weight."""
    weight_1 = read_Z[..., -1:]
    return read_Z[..., :-1] / weight_1.where(weight_1 > 0, 1.0)

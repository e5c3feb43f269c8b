"""Positions that left are compressed, several into one state (Rae et al. 2019, arXiv 1911.05507).

    c = f(o_1 … o_C)                                 mean, maximum, or a convolution whose kernel and stride are C
    compressed ← the last K of [compressed ; c]
    attention over [compressed ; memory ; segment]   a compressed state counts as one position

Positions that wait for a whole block stay in sight, as part of the memory.

The convolution learns from attention reconstruction alone (their section 3.2), each layer by itself, from what left in the
segment:  Σ_t ‖ A(SG h_t, SG o) − A(SG h_t, f(SG o)) ‖² / (N H).  A is attention by content with the layer's weights, which
learn nothing from it.

Shapes: B batch, T tgt_len, Y hidden states held, K compressed_len, N heads, H d_head, D d_model, n blocks of C.
"""

from abc import abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from transformer_xl.model.attention.block import AttentionBlock
from transformer_xl.model.beyond.layer import Beyond
from transformer_xl.model.beyond.memory import Leaving
from transformer_xl.model.memory import join
from transformer_xl.model.precision import at_least_fp32
from transformer_xl.model_config import TransformerXLConfig


class Pooling(Beyond):
    """A queue of compressed states; subclasses say how a block becomes one."""

    @staticmethod
    def shape(config: TransformerXLConfig) -> tuple[int, ...]:
        """Return (K, D)."""
        return (n_slot(config), config.d_model)

    @staticmethod
    def reach(config: TransformerXLConfig) -> int:
        """Return the positions that a full queue was made of."""
        return n_slot(config) * config.compression

    @staticmethod
    def n_before(config: TransformerXLConfig, n_block_B: Tensor) -> tuple[int, Tensor | int]:
        """Return K, and how many states are in the queue."""
        return n_slot(config), n_block_B.clamp(max=n_slot(config))

    def before(self, beyond_B: Tensor, held_BYD: Tensor, n_valid_B: Tensor) -> Tensor:
        """Return the queue and the held states, moved up to the first of them that is real."""
        return join(beyond_B, held_BYD, held_BYD.shape[1] - n_valid_B)

    def write(self, beyond_B: Tensor, *, h_BSD: Tensor, k_BSNH: Tensor, v_BSNH: Tensor, leaving: Leaving) -> Tensor:
        """Return the queue after the blocks have joined it; the arguments are those of `Beyond.write`."""
        queue = torch.cat([beyond_B, self.compress(leaving.blocks(h_BSD)).to(beyond_B.dtype)], dim=1)
        last_BK = leaving.n_block[:, None] + torch.arange(beyond_B.shape[1], device=queue.device)
        return queue[torch.arange(len(queue), device=queue.device)[:, None], last_BK]

    @abstractmethod
    def compress(self, h_BnCD: Tensor) -> Tensor:
        """Return a state for each block, (B, n, D)."""


class MeanPooling(Pooling):
    """The mean of a block."""

    def compress(self, h_BnCD: Tensor) -> Tensor:
        """Return means."""
        return h_BnCD.mean(dim=2)


class MaxPooling(Pooling):
    """The maximum of each channel."""

    def compress(self, h_BnCD: Tensor) -> Tensor:
        """Return maxima."""
        return h_BnCD.amax(dim=2)


class Convolution(Pooling):
    """A linear map of a block, which is what a convolution with stride = kernel does. It begins as the mean."""

    adds_loss = True

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__(config)
        self.conv = nn.Linear(config.compression * config.d_model, config.d_model)

    def init_own(self, name: str, parameter: Tensor) -> bool:
        """Begin as the mean of a block."""
        parameter.zero_()
        if name == "conv.weight":
            n_channel = parameter.shape[0]
            size = parameter.shape[1] // n_channel
            parameter.copy_(torch.eye(n_channel, dtype=parameter.dtype, device=parameter.device).repeat(1, size) / size)
        return True

    def compress(self, h_BnCD: Tensor) -> Tensor:
        """Return mapped blocks; the map does not learn from what becomes of them."""
        return F.linear(h_BnCD.flatten(2), self.conv.weight.detach(), self.conv.bias.detach())

    def loss(self, block: AttentionBlock, h_BTD: Tensor, h_BSD: Tensor, *, leaving: Leaving, n_pad: Tensor | None) -> Tensor:
        """Return how far attention to compressed states is from attention to what left, summed over queries of its document."""
        leaves_Bn = leaving.leaves
        if not leaving.n_most:  # processes that share gradients still expect them
            return 0.0 * sum((parameter.sum() for parameter in self.parameters()), h_BTD.new_zeros(()))
        h_BnCD, size = leaving.blocks(h_BSD), leaving.size
        kept = _reconstruct(block, h_BTD, h_BnCD.flatten(1, 2), leaves_Bn.repeat_interleave(size, dim=1))
        made = _reconstruct(block, h_BTD, self.conv(h_BnCD.flatten(2)), leaves_Bn)
        # queries of the last document: of it are the positions that leave
        asks_BT = (leaving.first == leaving.first[:, -1:]) & leaves_Bn.any(dim=1, keepdim=True)
        if n_pad is not None:
            asks_BT = asks_BT & (torch.arange(h_BTD.shape[1], device=h_BTD.device) >= n_pad[:, None])
        return at_least_fp32(kept - made).square().mean(dim=(2, 3)).where(asks_BT, 0.0).sum()


def n_slot(config: TransformerXLConfig) -> int:
    """Return K."""
    return config.compressed_len or config.mem_len


def _reconstruct(block: AttentionBlock, h_BTD: Tensor, x_BXD: Tensor, is_real_BX: Tensor) -> Tensor:
    """Attend by content from a segment to states, without positions, dropout or gradients of weights: (B, T, N, H)."""
    w_q, w_kv = block.qkv_net.weight.detach().tensor_split([block.n_head * block.d_head])
    if block.pre_lnorm:
        norm = block.layer_norm
        h_BTD, x_BXD = (
            F.layer_norm(x, norm.normalized_shape, norm.weight.detach(), norm.bias.detach(), norm.eps) for x in (h_BTD, x_BXD)
        )
    q = F.linear(h_BTD, w_q).unflatten(-1, (block.n_head, block.d_head)).transpose(1, 2)
    k, v = F.linear(x_BXD, w_kv).unflatten(-1, (2, block.n_head, block.d_head)).permute(2, 0, 3, 1, 4).unbind(0)
    is_real_BX = is_real_BX | ~is_real_BX.any(dim=1, keepdim=True)  # a softmax over nothing is NaN
    return F.scaled_dot_product_attention(q, k, v, attn_mask=is_real_BX[:, None, None]).transpose(1, 2)

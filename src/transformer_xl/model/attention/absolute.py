"""Attention by content alone, where positions were added to the states it reads: once (vaswani) or in every layer (al_rfou).

Positions count from the end of the segment, as in the authors' code: the last token has position 0. The original of vaswani
fails on an empty memory; with NVIDIA's correction it has one, as here.

Reference: `MultiHeadAttn` (`attn_type` 2 and 3) of the authors' `pytorch/mem_transformer.py`; Vaswani et al. 2017, Al-Rfou et
al. 2018 (arXiv 1808.04444).

Shapes: B batch, T tgt_len, M memory, S = M + T keys, D d_model.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from transformer_xl.model.attention.block import Attending, AttentionBlock
from transformer_xl.model.attention.equation import hidden_keys
from transformer_xl.model.attention.positions import sinusoids
from transformer_xl.model.attention.shaw import table_rows, table_size
from transformer_xl.model_config import TransformerXLConfig


class AbsoluteAttention(AttentionBlock):
    """Multi-head scaled dot-product attention over memory and segment."""

    normalizes_queries = False  # with pre_lnorm the original normalizes what keys and values are made of, and not the queries

    def forward(self, h_BTD: Tensor, *, mem_BMD: Tensor, first_BT: Tensor, n_pad: Tensor | None = None) -> Tensor:
        """Attend from the segment to memory and segment."""
        q, k, v = (x.transpose(1, 2) for x in self.project(h_BTD, mem_BMD, n_pad))
        dropatt = self.dropatt if self.training else 0.0
        visible_BTS = ~hidden_keys(first_BT, k.shape[2])
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=visible_BTS.unsqueeze(1), dropout_p=dropatt)
        return self.add(h_BTD, attended.transpose(1, 2))


class VaswaniAttention(AbsoluteAttention):
    """Sinusoids of positions are added once, to the embedding and to what the first layer remembers."""

    @staticmethod
    def enter(model: Attending, layer: int, mem_BMD: Tensor, h_BTD: Tensor, n_pad: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return memory and segment, before the first layer with sinusoids, and with dropout after they were added."""
        if layer > 0:
            return mem_BMD, h_BTD

        def encode(distances: Tensor) -> Tensor:
            limited = distances if model.clamp_len is None else distances.clamp(max=model.clamp_len)
            return sinusoids(limited.flatten(), model.config.d_model, model.dtype).unflatten(0, distances.shape)

        mem_BMD, h_BTD = add_positions(encode, mem_BMD, h_BTD, n_pad)
        return mem_BMD, model.drop_input(h_BTD)


class AlRfouAttention(AbsoluteAttention):
    """Learned positions are added before every layer, whose own they are."""

    @staticmethod
    def shapes(config: TransformerXLConfig) -> dict[str, tuple[int, ...]]:
        """Return that of each layer's table; a position is as wide as all heads."""
        return {"r_emb": (config.n_layer, table_size(config), config.n_head, config.d_head)}

    @staticmethod
    def enter(model: Attending, layer: int, mem_BMD: Tensor, h_BTD: Tensor, n_pad: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return memory and segment with the layer's positions."""
        mem_BMD, h_BTD = AttentionBlock.enter(model, layer, mem_BMD, h_BTD, n_pad)
        table = model.learned_positions["r_emb"][layer].flatten(1)
        return add_positions(lambda d: table[table_rows(d, n_row=len(table), clamp_len=None)], mem_BMD, h_BTD, n_pad)


def add_positions(
    encode: Callable[[Tensor], Tensor], mem_BMD: Tensor, h_BTD: Tensor, n_pad: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Add positions to the states that enter a layer, the memory's too.

    What is remembered of a segment has its positions in it, and gets others added in the next: so does the original, which adds
    them in place.

    Args:
        encode: int64 distances to the end of the segment, of any shape, to vectors of width D.
        mem_BMD: memory.
        h_BTD: the segment's states.
        n_pad: int64 (B,), padding tokens at the left of each row; its memory moves up by so much.

    Returns:
        Memory and segment with positions.
    """
    M, T = mem_BMD.shape[1], h_BTD.shape[1]
    distance_S = torch.arange(M + T - 1, -1, -1, device=h_BTD.device)
    distance_mem = distance_S[:M] if n_pad is None else (distance_S[:M] - n_pad.unsqueeze(1)).clamp(min=0)
    return mem_BMD + encode(distance_mem).to(mem_BMD.dtype), h_BTD + encode(distance_S[M:]).to(h_BTD.dtype)

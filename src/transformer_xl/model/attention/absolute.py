"""Attention by content alone, where positions were added to the states it reads: once (vaswani) or in every layer (al_rfou).

Positions count from the end of the segment, as in the authors' code: the last token has position 0. The original of vaswani
fails on an empty memory; with NVIDIA's correction it has one, as here.

Reference: `MultiHeadAttn` (`attn_type` 2 and 3) of the authors' `pytorch/mem_transformer.py`; Vaswani et al. 2017, Al-Rfou et
al. 2018 (arXiv 1808.04444).

Shapes: B batch, T tgt_len, M memory, S = M + T keys, D d_model.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from transformer_xl.config.model import TransformerXLConfig
from transformer_xl.errors import ConfigError
from transformer_xl.kernels.equation import sinusoids
from transformer_xl.model.attention.block import AttentionKind
from transformer_xl.model.attention.shaw import table_rows, table_size

if TYPE_CHECKING:
    from transformer_xl.model.transformer_xl import TransformerXL


class AbsoluteAttention(AttentionKind):
    """Attention by content over memory and segment."""

    counts_from_end = True
    normalizes_queries = False  # with pre_lnorm the original normalizes the input of keys and values, but not that of queries


class VaswaniAttention(AbsoluteAttention):
    """Sinusoids of positions are added once, to the embedding and to the memory of the first layer."""

    name = "vaswani"

    @staticmethod
    def enter(
        model: "TransformerXL", layer: int, mem_BMD: Tensor, h_BTD: Tensor, n_pad: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return memory and segment; before the first layer, sinusoids are added, then dropout is applied."""
        if layer > 0:
            return mem_BMD, h_BTD

        def encode(distances: Tensor) -> Tensor:
            limited = distances if model.clamp_len is None else distances.clamp(max=model.clamp_len)
            return sinusoids(limited.flatten(), model.config.d_model, model.dtype).unflatten(0, distances.shape)

        mem_BMD, h_BTD = add_positions(encode, mem_BMD, h_BTD, n_pad)
        return mem_BMD, model.drop_input(h_BTD)


class AlRfouAttention(AbsoluteAttention):
    """Learned positions are added before every layer; each layer has its own."""

    name = "al_rfou"
    learns_positions = True

    @classmethod
    def check(cls, config: TransformerXLConfig) -> None:
        """Refuse positions that are not as wide as states."""
        width = config.n_head * config.d_head
        if width != config.d_model:
            raise ConfigError(
                f"attention '{cls.name}' adds positions of width n_head x d_head ({width}) to states of width d_model "
                f"({config.d_model}); make them equal"
            )

    @staticmethod
    def shapes(config: TransformerXLConfig) -> dict[str, tuple[int, ...]]:
        """Return the shape of the layers' tables; a position is as wide as all heads together."""
        return {"r_emb": (config.n_layer, table_size(config), config.n_head, config.d_head)}

    @staticmethod
    def enter(
        model: "TransformerXL", layer: int, mem_BMD: Tensor, h_BTD: Tensor, n_pad: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return memory and segment with the layer's positions."""
        mem_BMD, h_BTD = AttentionKind.enter(model, layer, mem_BMD, h_BTD, n_pad)
        table = model.learned_positions["r_emb"][layer].flatten(1)
        return add_positions(lambda d: table[table_rows(d, n_row=len(table), clamp_len=None)], mem_BMD, h_BTD, n_pad)


def add_positions(
    encode: Callable[[Tensor], Tensor], mem_BMD: Tensor, h_BTD: Tensor, n_pad: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Add positions to the states that enter a layer, those of the memory too.

    States are remembered with their positions, and get new positions added in the next segment. The original does the same,
    because it adds positions in place. `encode` maps int64 distances to the end of the segment, of any shape, to vectors of
    width D. Padding (`n_pad`) at the left of a row moves its memory up.
    """
    M, T = mem_BMD.shape[1], h_BTD.shape[1]
    distance_S = torch.arange(M + T - 1, -1, -1, device=h_BTD.device)
    distance_mem = distance_S[:M] if n_pad is None else (distance_S[:M] - n_pad.unsqueeze(1)).clamp(min=0)
    return mem_BMD + encode(distance_mem).to(mem_BMD.dtype), h_BTD + encode(distance_S[M:]).to(h_BTD.dtype)

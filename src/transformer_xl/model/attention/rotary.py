"""Rotary positions: queries and keys are turned by their places (Su et al. 2021, arXiv 2104.09864, sec. 3.2).

    A_ij = (R_i q_i)·(R_j k_j) = q_i·R_{j-i} k_j

R_p turns each pair of numbers of a head by the angle p θ_f, with θ_f = 10000^(-2f/H) and f = 0 … H/2 - 1. Only i - j matters,
so positions may be counted from anywhere: here from the first key, and with kept keys from the beginning of the stream.

Shapes: S keys, H d_head, F = H / 2 pairs.
"""

import torch
from torch import Tensor

from transformer_xl.config.model import TransformerXLConfig
from transformer_xl.errors import ConfigError
from transformer_xl.kernels.rotation import Turns, turns
from transformer_xl.model.attention.block import AttentionKind


class RotaryAttention(AttentionKind):
    """Multi-head attention over memory and segment by content, where positions turn queries and keys."""

    name = "rotary"
    limits_distances = False

    @classmethod
    def check(cls, config: TransformerXLConfig) -> None:
        if config.d_head % 2:
            raise ConfigError(
                f"d_head ({config.d_head}) must be even, because attention '{cls.name}' turns pairs of numbers; "
                f"use {config.d_head + 1}"
            )

    @classmethod
    def turns(cls, config: TransformerXLConfig, position: Tensor, dtype: torch.dtype) -> list[Turns | None]:
        return [turns(position.unsqueeze(-1), config.d_head, dtype)] * config.n_layer

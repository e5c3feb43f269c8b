"""Rotary positions: queries and keys are turned by their places (Su et al. 2021, arXiv 2104.09864, sec. 3.2).

    A_ij = (R_i q_i)·(R_j k_j) = q_i·R_{j-i} k_j

R_p turns each pair of numbers of a head by the angle p θ_f, with θ_f = 10000^(-2f/H) and f = 0 … H/2 - 1. Only i - j matters,
so positions may be counted from anywhere: here from the first key, and with kept keys from the beginning of the stream.

Number f of a head's first half and number f of its second half are a pair, as in GPT-NeoX and transformers' `rotate_half`. The
paper pairs neighbors, which is the same with the rows of W_q and W_k in another order.

Shapes: B batch, T tgt_len, M memory, S = M + T keys, N heads, H d_head, F = H / 2 pairs.
"""

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from transformer_xl.config.model import TransformerXLConfig
from transformer_xl.errors import ConfigError
from transformer_xl.kernels.cpu_attention import content_attention
from transformer_xl.model.attention.block import AttentionKind, FrozenPositions

if TYPE_CHECKING:
    from transformer_xl.model.transformer_xl import TransformerXL


class RotaryAttention(AttentionKind):
    """Multi-head attention over memory and segment by content, where positions turn queries and keys."""

    name = "rotary"
    limits_distances = False

    @classmethod
    def check(cls, config: TransformerXLConfig) -> None:
        """Refuse heads of an odd width."""
        if config.d_head % 2:
            raise ConfigError(
                f"d_head ({config.d_head}) must be even, because attention '{cls.name}' turns pairs of numbers; "
                f"use {config.d_head + 1}"
            )

    @staticmethod
    def positions(model: "TransformerXL", n_key: int, *, backend: str) -> list[dict[str, Any]]:
        """Return the turns of the positions 0, …, S-1, which all layers share."""
        positions = torch.arange(n_key, device=model.device)
        cos_SF, sin_SF = turns(positions, model.config.d_head, model.dtype)
        return [{"cos_S1F": cos_SF.unsqueeze(1), "sin_S1F": sin_SF.unsqueeze(1)}] * len(model.layers)

    @staticmethod
    def frozen(model: "TransformerXL", n_slot: int) -> list[FrozenPositions]:
        """Say that keys are kept as they are turned."""
        return [FrozenPositions(turned=True)] * len(model.layers)

    def attend(self, q_BTNH: Tensor, k_BSNH: Tensor, v_BSNH: Tensor, *, first_BT: Tensor, **positions: Tensor) -> Tensor:
        """Return what each query gathers from the values; `positions` are the turns of all keys."""
        q_BTNH, k_BSNH = _both_turned(q_BTNH, k_BSNH, **positions)
        dropatt = self.dropatt if self.training else 0.0
        return content_attention(q_BTNH, k_BSNH, v_BSNH, first_BT=first_BT, dropatt=dropatt)

    def attention_weights(self, q_BTNH: Tensor, k_BSNH: Tensor, *, first_BT: Tensor, **positions: Tensor) -> Tensor:
        """Return how much each query attends to each key; `positions` are the turns of all keys."""
        q_BTNH, k_BSNH = _both_turned(q_BTNH, k_BSNH, **positions)
        return super().attention_weights(q_BTNH, k_BSNH, first_BT=first_BT)


def turns(positions: Tensor, d_head: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of the angles of positions, int64 (…), as (…, F) in `dtype`, but at least fp32.

    Angles are computed in fp64: in fp32, those of positions above a million would be off by a tenth and more.

    Example:
        >>> turns(torch.tensor([0]), 4, torch.float32)
        (tensor([[1., 1.]]), tensor([[0., 0.]]))
    """
    place = torch.device("cpu") if positions.device.type == "mps" else positions.device  # which has no fp64
    exponents = torch.arange(0, d_head, 2, device=place, dtype=torch.float64) / d_head
    angles = positions.to(place, torch.float64).unsqueeze(-1) * 10000.0**-exponents
    to = {"device": positions.device, "dtype": torch.promote_types(dtype, torch.float32)}
    return angles.cos().to(**to), angles.sin().to(**to)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs of queries or keys (…, H) by angles (…, F); with `-sin` that is undone."""
    if x.requires_grad and torch.is_grad_enabled():
        return cast("Tensor", _Turn.apply(x, cos, sin))
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    halves = [torch.addcmul(first * cos, second, sin, value=-1), torch.addcmul(second * cos, first, sin)]
    return torch.cat(halves, dim=-1).to(x.dtype)


class _Turn(torch.autograd.Function):
    """The gradient of a turn is one turn back, where autograd would add up those of its products."""

    @staticmethod
    def forward(ctx: Any, *args: Any, **_: Any) -> Tensor:
        x, cos, sin = args
        ctx.save_for_backward(cos, sin)
        return turned(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        cos, sin = ctx.saved_tensors
        return turned(grad_outputs[0], cos, -sin), None, None


def _both_turned(q_BTNH: Tensor, k_BSNH: Tensor, *, cos_S1F: Tensor, sin_S1F: Tensor) -> tuple[Tensor, Tensor]:
    T = q_BTNH.shape[1]
    return turned(q_BTNH, cos_S1F[-T:], sin_S1F[-T:]), turned(k_BSNH, cos_S1F, sin_S1F)

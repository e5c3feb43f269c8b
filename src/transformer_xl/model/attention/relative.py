"""The paper's attention (Dai et al. 2019, sec. 3.3) over memory and segment, as a block of a layer.

Its equation is `kernels/equation.py`; here are its parameters: W_kR in each block, u and v in the model, and R, which has none.

Shapes: S keys, L layers, N heads, H d_head, D d_model, E = N H, X rows with those of zeros.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from transformer_xl.config.model import TransformerXLConfig
from transformer_xl.kernels.device import narrowed
from transformer_xl.kernels.equation import Positions, sinusoids
from transformer_xl.kernels.fused import is_fused, n_padded
from transformer_xl.model.attention.block import AttentionKind, Distances
from transformer_xl.model.dropout import DropConnectLinear


class RelativeAttention(AttentionKind):
    """Multi-head attention over memory and segment by content and sinusoids of distances.

    Reference: `RelPartialLearnableMultiHeadAttn` of the authors' `pytorch/mem_transformer.py`. Deviation: queries are
    projected for the segment alone; the original projects them for the memory too and throws them away.

    Args:
        d_model: D.
        dropweight: on the weights of the projections.
        block: the other arguments of `AttentionKind`.
    """

    name = "transformer_xl"
    by_keys = True

    def __init__(self, d_model: int, *, dropweight: float = 0.0, **block: Any) -> None:
        super().__init__(d_model, dropweight=dropweight, **block)
        self.r_net = DropConnectLinear(d_model, self.n_head * self.d_head, bias=False, dropweight=dropweight)

    @classmethod
    def shapes(cls, config: TransformerXLConfig) -> dict[str, tuple[int, ...]]:
        shape = (config.n_layer if config.untie_r else 1, config.n_head, config.d_head)
        return {"r_w_bias": shape, "r_r_bias": shape}

    @classmethod
    def positions(cls, config: TransformerXLConfig, learned: Mapping[str, Tensor], distances: Distances) -> list[Positions]:
        """Return u, v, and the encoded distances R (S, D) where r will be; `complete` makes keys of them."""
        R_SD = distances.drop(sinusoids(distances.limited, config.d_model, distances.dtype))
        # expanded, so that gradients of all layers are added up at once
        u, v = (learned[name].expand(config.n_layer, -1, -1).unbind() for name in ("r_w_bias", "r_r_bias"))
        return [Positions(u_NH, v_NH, R_SD) for u_NH, v_NH in zip(u, v, strict=True)]

    def complete(self, positions: Positions) -> Positions:
        """Return r = W_kR R."""
        R_SD = positions.r
        if R_SD is None or R_SD.dim() == 3:  # they are keys already
            return positions
        return positions._replace(r=self.r_net(R_SD).unflatten(-1, (self.n_head, self.d_head)))

    @classmethod
    def complete_together(cls, blocks: Sequence[AttentionKind], positions: list[Positions]) -> list[Positions]:
        """Return r of all layers by one product on a GPU, for which a layer's alone is too small, with zeros after the keys."""
        R_SD = positions[0].r
        if R_SD is None or not is_fused(R_SD) or cls.complete is not RelativeAttention.complete:
            return positions
        weights = [block.r_net.drawn_weight() for block in blocks if isinstance(block, RelativeAttention)]
        if not all(is_fused(weight) for weight in weights):  # parts of weights in several processes
            return positions
        # padded here once; fused attention would have to do it in each layer
        padded_XD = F.pad(narrowed(R_SD), (0, 0, 0, n_padded(len(R_SD)) - len(R_SD)))
        r_LXE = torch.bmm(padded_XD.expand(len(blocks), -1, -1), torch.stack(weights).transpose(1, 2))
        r_LXNH = r_LXE.unflatten(-1, (blocks[0].n_head, blocks[0].d_head))
        return [of_layer._replace(r=r_XNH) for of_layer, r_XNH in zip(positions, r_LXNH.unbind(), strict=True)]

    def position_weights(self) -> list[Tensor]:
        return [self.r_net.weight]

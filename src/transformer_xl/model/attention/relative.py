"""The paper's attention, by content and by sinusoids of distances (Dai et al. 2019, sec. 3.3), as a kind.

Shapes: B batch, T tgt_len, M memory, S = M + T keys, N heads, H d_head, D d_model.
"""

from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from transformer_xl.config.model import TransformerXLConfig
from transformer_xl.kernels.choose import Attention, choose_backend, is_fused
from transformer_xl.kernels.cpu_linear import narrowed
from transformer_xl.kernels.equation import key_distances, relative_weights, sinusoids
from transformer_xl.model.attention.block import AttentionKind, FrozenPositions
from transformer_xl.model.dropout import DropConnectLinear

if TYPE_CHECKING:
    from transformer_xl.model.transformer_xl import TransformerXL


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

    def __init__(self, d_model: int, *, dropweight: float = 0.0, **block: Any) -> None:
        super().__init__(d_model, dropweight=dropweight, **block)
        self.r_net = DropConnectLinear(d_model, self.n_head * self.d_head, bias=False, dropweight=dropweight)

    @classmethod
    def check_backend(cls, backend: str, device: torch.device, *, dtype: torch.dtype, d_head: int) -> None:
        """Refuse a backend that cannot run on a device."""
        choose_backend(backend, device, dtype=dtype, d_head=d_head)

    @staticmethod
    def shapes(config: TransformerXLConfig) -> dict[str, tuple[int, ...]]:
        """Return the shapes of u and v, which layers share unless `untie_r`."""
        shape = (config.n_layer if config.untie_r else 1, config.n_head, config.d_head)
        return {"r_w_bias": shape, "r_r_bias": shape}

    @staticmethod
    def positions(model: "TransformerXL", n_key: int, *, backend: str) -> list[dict[str, Any]]:
        """Return R, the layer's u and v, and the function of the backend."""
        config, device = model.config, model.device
        distances = key_distances(n_key, clamp_len=model.clamp_len, device=device)
        r_SD = model.drop_input(sinusoids(distances, config.d_model, model.dtype))
        attend = choose_backend(backend, device, dtype=model.dtype, d_head=config.d_head)
        keys = zip(_keys_or_encoded(model, r_SD, attend), _biases(model), strict=True)
        return [{"r_SD": r, "r_w_bias": u, "r_r_bias": v, "backend": attend} for r, (u, v) in keys]

    @staticmethod
    def frozen(model: "TransformerXL", n_slot: int) -> list[FrozenPositions]:
        """Return u, v, and r = W_kR R of all distances up to `clamp_len`."""
        n_distance = n_slot if model.clamp_len is None else min(n_slot, model.clamp_len + 1)
        distances = key_distances(n_distance, clamp_len=None, device=model.device)
        encoded = sinusoids(distances, model.config.d_model, model.dtype)
        blocks = [cast("RelativeAttention", layer.attention) for layer in model.layers]
        keys = [block._position_keys(encoded) for block in blocks]
        return [FrozenPositions(u, v, r_PNH, None) for (u, v), r_PNH in zip(_biases(model), keys, strict=True)]

    def attend(
        self,
        q_BTNH: Tensor,
        k_BSNH: Tensor,
        v_BSNH: Tensor,
        *,
        first_BT: Tensor,
        r_SD: Tensor,
        backend: Attention,
        **biases: Tensor,
    ) -> Tensor:
        """Return what each query gathers from the values; `biases` are u and v, as `relative_attention` names them."""
        dropatt = self.dropatt if self.training else 0.0
        return backend(q_BTNH, k_BSNH, v_BSNH, self._position_keys(r_SD), first_BT=first_BT, dropatt=dropatt, **biases)

    def attention_weights(
        self, q_BTNH: Tensor, k_BSNH: Tensor, *, first_BT: Tensor, r_SD: Tensor, backend: Attention, **biases: Tensor
    ) -> Tensor:
        """Return how much each query attends to each key, by the paper's equation whatever `backend` is."""
        keys = self._position_keys(r_SD)[: k_BSNH.shape[1]]
        return relative_weights(q_BTNH, k_BSNH, keys, first_BT=first_BT, **biases)

    def position_weights(self) -> list[Tensor]:
        """Return W_kR."""
        return [self.r_net.weight]

    def _position_keys(self, r_SD: Tensor) -> Tensor:
        if r_SD.ndim == 3:  # they are keys already
            return r_SD
        return self.r_net(r_SD).unflatten(-1, (self.n_head, self.d_head))


def _keys_or_encoded(model: "TransformerXL", r_SD: Tensor, attend: Attention) -> list[Tensor]:
    """Return the position keys of each layer, (S, N, H), computed together on a GPU; else the encoded distances for each.

    The fused backend gets the rows of zeros that it would add to those of each layer.
    """
    blocks = cast("list[RelativeAttention]", model.attention_blocks())
    if not is_fused(r_SD) or any(type(block) is not RelativeAttention for block in blocks):
        return [r_SD] * len(blocks)
    weights = [block.r_net.drawn_weight() for block in blocks]
    if not all(is_fused(weight) for weight in weights):  # parts of weights in several processes
        return [r_SD] * len(blocks)
    if attend.__module__.endswith(".fused"):
        from transformer_xl.kernels.flash import n_padded

        r_SD = F.pad(r_SD, (0, 0, 0, n_padded(len(r_SD)) - len(r_SD)))
    heads = (blocks[0].n_head, blocks[0].d_head)
    r_LSD = narrowed(r_SD).expand(len(blocks), *r_SD.shape)
    return [keys_SX.unflatten(1, heads) for keys_SX in torch.bmm(r_LSD, torch.stack(weights).transpose(1, 2))]


def _biases(model: "TransformerXL") -> list[tuple[Tensor, Tensor]]:
    """Return u and v of each layer."""
    both = (model.learned_positions[name] for name in ("r_w_bias", "r_r_bias"))
    # expanded, so that gradients of all layers are added up at once
    u, v = (x.expand(len(model.layers), *x.shape[1:]).unbind() for x in both)
    return list(zip(u, v, strict=True))

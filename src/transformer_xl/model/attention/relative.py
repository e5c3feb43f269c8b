"""The paper's attention, by content and by sinusoids of distances (Dai et al. 2019, sec. 3.3), as a kind.

Shapes: B batch, T tgt_len, M memory, S = M + T keys, N heads, H d_head, D d_model.
"""

from typing import Any, cast

from torch import Tensor

from transformer_xl.model.attention.block import Attending, AttentionBlock, FrozenPositions
from transformer_xl.model.attention.equation import hidden_keys, relative_weights
from transformer_xl.model.attention.positions import key_distances, sinusoids
from transformer_xl.model.backends import Attention, choose_backend
from transformer_xl.model.dropout import DropConnectLinear
from transformer_xl.model_config import TransformerXLConfig


class RelativeAttention(AttentionBlock):
    """Multi-head attention over memory and segment by content and sinusoids of distances.

    Reference: `RelPartialLearnableMultiHeadAttn` of the authors' `pytorch/mem_transformer.py`. Deviation: queries are
    projected for the segment alone; the original projects them for the memory too and throws them away.

    Args:
        d_model: D.
        dropweight: on the weights of the projections.
        block: the other arguments of `AttentionBlock`.
    """

    def __init__(self, d_model: int, *, dropweight: float = 0.0, **block: Any) -> None:
        super().__init__(d_model, dropweight=dropweight, **block)
        self.r_net = DropConnectLinear(d_model, self.n_head * self.d_head, bias=False, dropweight=dropweight)

    @staticmethod
    def shapes(config: TransformerXLConfig) -> dict[str, tuple[int, ...]]:
        """Return those of u and v, which layers share unless `untie_r`."""
        shape = (config.n_layer if config.untie_r else 1, config.n_head, config.d_head)
        return {"r_w_bias": shape, "r_r_bias": shape}

    @staticmethod
    def positions(model: Attending, n_key: int, *, backend: str) -> list[dict[str, Any]]:
        """Return R, the layer's u and v, and the function that attends."""
        config, device = model.config, model.device
        distances = key_distances(n_key, clamp_len=model.clamp_len, device=device)
        r_SD = model.drop_input(sinusoids(distances, config.d_model, model.dtype))
        dropatt = config.dropatt if model.training else 0.0
        attend = choose_backend(backend, device, dtype=model.dtype, dropatt=dropatt, d_head=config.d_head)
        return [{"r_SD": r_SD, "r_w_bias": u, "r_r_bias": v, "attend": attend} for u, v in _biases(model)]

    @staticmethod
    def frozen(model: Attending, n_slot: int) -> list[FrozenPositions]:
        """Return u, v, and r = W_kR R of the distances told apart."""
        n_distance = n_slot if model.clamp_len is None else min(n_slot, model.clamp_len + 1)
        distances = key_distances(n_distance, clamp_len=None, device=model.device)
        encoded = sinusoids(distances, model.config.d_model, model.dtype)
        blocks = [cast("RelativeAttention", layer.attention) for layer in model.layers]
        keys = [block.r_net(encoded).unflatten(-1, (block.n_head, block.d_head)) for block in blocks]
        return [FrozenPositions(u, v, r_PNH, None) for (u, v), r_PNH in zip(_biases(model), keys, strict=True)]

    def forward(
        self,
        h_BTD: Tensor,
        *,
        mem_BMD: Tensor,
        first_BT: Tensor,
        n_pad: Tensor | None = None,
        r_SD: Tensor,
        r_w_bias: Tensor,
        r_r_bias: Tensor,
        attend: Attention,
    ) -> Tensor:
        """Attend from the segment to memory and segment by `attend`; see `relative_attention` for the other arguments."""
        q, k, v = self.project(h_BTD, mem_BMD, n_pad)
        dropatt = self.dropatt if self.training else 0.0
        r_SNH = self._position_keys(r_SD)
        return self.add(h_BTD, attend(q, k, v, r_SNH, r_w_bias=r_w_bias, r_r_bias=r_r_bias, first_BT=first_BT, dropatt=dropatt))

    def weights(
        self,
        h_BTD: Tensor,
        *,
        mem_BMD: Tensor,
        first_BT: Tensor,
        n_pad: Tensor | None = None,
        r_SD: Tensor,
        r_w_bias: Tensor,
        r_r_bias: Tensor,
        attend: Attention,
    ) -> tuple[Tensor, Tensor]:
        """Return how much each query attends to each key, by the paper's equation whatever `attend` is."""
        q, k, _ = self.project(h_BTD, mem_BMD, n_pad)
        told = {"r_w_bias": r_w_bias, "r_r_bias": r_r_bias, "first_BT": first_BT}
        return relative_weights(q, k, self._position_keys(r_SD), **told), hidden_keys(first_BT, k.shape[1])

    def position_weights(self) -> list[Tensor]:
        """Return W_kR."""
        return [self.r_net.weight]

    def _position_keys(self, r_SD: Tensor) -> Tensor:
        return self.r_net(r_SD).unflatten(-1, (self.n_head, self.d_head))


def _biases(model: Attending) -> list[tuple[Tensor, Tensor]]:
    """Return u and v of each layer."""
    u, v = (model.learned_positions[name] for name in ("r_w_bias", "r_r_bias"))
    return [(u[i % len(u)], v[i % len(v)]) for i in range(len(model.layers))]

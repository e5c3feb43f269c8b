"""Where each head looks: the attention weights of a segment, by the model's own equation.

The model reads the segment as always; what enters each attention block is seen on the way, and the weights are computed of it.

Shapes: B rows, T tokens read, S = memory + T keys, N heads.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from transformer_xl.model.attention import hidden_keys, relative_weights
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.layers import AttentionBlock, RelativeAttention
from transformer_xl.model.memory import Mems
from transformer_xl.model.shaw import ShawAttention, shaw_weights
from transformer_xl.model.vanilla import CausalAttention

Visit = Callable[[int, Tensor, Tensor], None]
"""Called with a layer, its weights (B, N, T, S) in fp32, and which keys are hidden, bool (B or 1, T, S)."""


def has_heads(model: LanguageModel) -> bool:
    """Say whether a model attends at all."""
    return all(isinstance(block, AttentionBlock) for block in _blocks(model))


def visit_attention(model: LanguageModel, ids: Tensor, mems: Mems | None, visit: Visit) -> None:
    """Read a segment and hand over the attention weights of one layer after another, so that no two are held at once.

    Args:
        model: one whose layers attend, in evaluation mode.
        ids: int64 (B, T).
        mems: the memory before the segment.
        visit: takes a layer's weights.
    """
    with _watching(model, visit), torch.no_grad():
        model.read(ids, mems=mems)


def attention_weights(block: nn.Module, h_BTD: Tensor, told: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the weights that an attention block gives to its keys, and which keys are hidden.

    Args:
        block: of any kind.
        h_BTD: what enters it.
        told: its keyword arguments.

    Returns:
        Weights (B, N, T, S), and bool (B or 1, T, S), True where a query must not see a key.
    """
    if isinstance(block, CausalAttention):
        return _causal_weights(block, h_BTD, told.get("first_BT"))
    assert isinstance(block, AttentionBlock)
    q, k, _ = block.project(h_BTD, told["mem_BMD"], told.get("n_pad"))
    first_BT = told["first_BT"]
    hidden_BTS = hidden_keys(first_BT, k.shape[1])
    if isinstance(block, RelativeAttention):
        r_SNH = block.r_net(told["r_SD"]).unflatten(-1, (block.n_head, block.d_head))
        u, v = told["r_w_bias"], told["r_r_bias"]
        return relative_weights(q, k, r_SNH, r_w_bias=u, r_r_bias=v, first_BT=first_BT), hidden_BTS
    if isinstance(block, ShawAttention):
        learned = {name: told[name] for name in ("r_bias_SN", "r_w_bias")}
        return shaw_weights(q, k, told["r_SNH"], **learned, first_BT=first_BT), hidden_BTS
    return _content_weights(q, k, hidden_BTS), hidden_BTS


def _causal_weights(block: CausalAttention, h_BTD: Tensor, first_BT: Tensor | None) -> tuple[Tensor, Tensor]:
    h = block.layer_norm(h_BTD) if block.pre_lnorm else h_BTD
    q, k, _ = F.linear(h, block.qkv_net.drawn_weight()).unflatten(-1, (3, block.n_head, block.d_head)).unbind(2)
    first = torch.zeros(1, h.shape[1], dtype=torch.int64, device=h.device) if first_BT is None else first_BT
    hidden_BTS = hidden_keys(first, h.shape[1])
    return _content_weights(q, k, hidden_BTS), hidden_BTS


def _content_weights(q_BTNH: Tensor, k_BSNH: Tensor, hidden_BTS: Tensor) -> Tensor:
    score_BNTS = torch.einsum("btnh,bsnh->bnts", q_BTNH, k_BSNH) * q_BTNH.shape[-1] ** -0.5
    return score_BNTS.masked_fill(hidden_BTS.unsqueeze(1), float("-inf")).softmax(dim=-1)


@contextmanager
def _watching(model: LanguageModel, visit: Visit) -> Iterator[None]:
    def watcher(layer: int) -> Callable[..., None]:
        def watch(block: nn.Module, arguments: tuple[Tensor, ...], told: dict[str, Any]) -> None:
            weight_BNTS, hidden_BTS = attention_weights(block, arguments[0], told)
            visit(layer, weight_BNTS.float(), hidden_BTS)

        return watch

    hooks = [block.register_forward_pre_hook(watcher(layer), with_kwargs=True) for layer, block in enumerate(_blocks(model))]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _blocks(model: LanguageModel) -> list[nn.Module]:
    return [cast("nn.Module", getattr(layer, "attention", layer)) for layer in model.layers]

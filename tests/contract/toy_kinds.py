"""Kinds that the package knows nothing of: one of attention, and one of model with a memory of its own."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

import transformer_xl as txl
from transformer_xl.model.attention.block import Attending, AttentionBlock, FrozenPositions
from transformer_xl.model.attention.equation import hidden_keys
from transformer_xl.model.attention.positions import key_distances, rel_shift
from transformer_xl.model.call import Execution, Rows
from transformer_xl.model.language_model import LanguageModel, make_softmax
from transformer_xl.model.memory import Memory
from transformer_xl.model_config import ModelConfig, TransformerXLConfig
from transformer_xl.settings import Natural


class SlopedAttention(AttentionBlock):
    """By content, and the less the farther a key is: each head learns how steeply (as ALiBi, Press et al. 2021, sets it)."""

    @staticmethod
    def shapes(config: TransformerXLConfig) -> dict[str, tuple[int, ...]]:
        return {"slopes": (config.n_layer, config.n_head)}

    @staticmethod
    def positions(model: Attending, n_key: int, *, backend: str) -> list[dict[str, Any]]:
        return [{"bias_SN": bias_SN} for bias_SN in slopes(model, n_key)]

    @staticmethod
    def frozen(model: Attending, n_slot: int) -> list[FrozenPositions]:
        heads = (model.config.n_head, model.config.d_head)
        none, keys = torch.zeros(heads, dtype=model.dtype), torch.zeros(n_slot, *heads, dtype=model.dtype)
        return [FrozenPositions(none, none, keys, bias_PN) for bias_PN in slopes(model, n_slot)]

    def forward(
        self, h_BTD: Tensor, *, mem_BMD: Tensor, first_BT: Tensor, n_pad: Tensor | None = None, bias_SN: Tensor
    ) -> Tensor:
        q, k, v = self.project(h_BTD, mem_BMD, n_pad)
        by_content = torch.einsum("btnh,bsnh->bnts", q, k)
        by_distance = rel_shift(bias_SN.T.unsqueeze(1).expand(-1, q.shape[1], -1))
        score_BNTS = (by_content + by_distance) * self.d_head**-0.5
        hidden_BTS = hidden_keys(first_BT, k.shape[1])
        weight_BNTS = score_BNTS.masked_fill(hidden_BTS.unsqueeze(1), float("-inf")).softmax(dim=-1)
        return self.add(h_BTD, torch.einsum("bnts,bsnh->btnh", weight_BNTS, v))


def slopes(model: Attending, n_key: int) -> Tensor:
    """Return what each layer adds to the scores of the distances S-1, …, 0, (L, S, N)."""
    distance_S = key_distances(n_key, clamp_len=model.clamp_len, device=model.device).to(model.dtype)
    return -distance_S[:, None] * model.learned_positions["slopes"].abs().unsqueeze(1)


@dataclass(frozen=True)
class Trace(Memory):
    """What is left of all that was read: one vector per row, (B, D)."""

    trace: Tensor

    def state_dict(self) -> dict[str, Tensor]:
        return {"trace": self.trace}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Tensor]) -> "Trace":
        return cls(state["trace"])


class FadingConfig(ModelConfig):
    kind: ClassVar[str] = "fading"
    model_class: ClassVar[str] = f"{__name__}:Fading"
    remembers: ClassVar[Literal["positions", "state", "nothing"]] = "state"

    mem_len: Natural = Field(default=1, description="1: the trace goes on from segment to segment")
    half_life: float = Field(default=2.0, gt=0, description="tokens after which half of a vector is left")


class Fading(LanguageModel):
    """A trace to which every token adds its vector, and which fades, then a network on top of it."""

    kind = FadingConfig.kind
    config: FadingConfig

    def __init__(self, config: FadingConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(nn.Linear(config.d_model, config.d_model) for _ in range(config.n_layer))
        self.softmax = make_softmax(config)
        self.init_weights()

    def init_mems(self, batch_size: int, *, length: int | None = None) -> Trace:
        return Trace(torch.zeros(batch_size, self.config.d_model, dtype=self.dtype, device=self.device))

    def reach(self, tgt_len: int) -> int:
        return -(-64 // tgt_len) * tgt_len

    def read(
        self,
        ids: Tensor,
        *,
        mems: Trace | None = None,
        rows: Rows = Rows(),
        execution: Execution = Execution(),
        keep_graph: bool = False,
    ) -> tuple[Tensor, Trace]:
        trace, traces = (mems or self.init_mems(len(ids))).trace, []
        for t, x_BD in enumerate(self.drop_input(self.embed(ids)).unbind(1)):
            if rows.document_starts is not None:
                trace = trace.where(~rows.document_starts[:, t, None], 0.0)
            new = trace * 0.5 ** (1 / self.config.half_life) + x_BD
            trace = new if rows.n_pad is None else new.where((rows.n_pad <= t)[:, None], trace)
            traces.append(trace)
        h_BTD = torch.stack(traces, dim=1)
        for layer in self.layers:
            h_BTD = h_BTD + execution.run(layer, h_BTD.tanh())
        return self.drop_output(h_BTD), Trace(trace if keep_graph else trace.detach())


SLOPED = txl.AttentionKind("sloped", f"{__name__}:SlopedAttention", keeps_keys=True, compares_distances=True)

"""Kinds that the package knows nothing of: one of attention, and one of model with a memory of its own."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

import transformer_xl as txl
from transformer_xl.batch import Rows
from transformer_xl.config.model import ModelConfig, TransformerXLConfig
from transformer_xl.config.settings import Natural
from transformer_xl.kernels.equation import Positions
from transformer_xl.model.adaptive import make_softmax
from transformer_xl.model.attention.block import AttentionKind, Distances
from transformer_xl.model.base import LanguageModel
from transformer_xl.model.call import Execution
from transformer_xl.model.memory import Memory


class SlopedAttention(AttentionKind):
    """By content, and the less the farther a key is: each head learns how steeply (as ALiBi, Press et al. 2021, sets it)."""

    name = "sloped"

    @classmethod
    def shapes(cls, config: TransformerXLConfig) -> dict[str, tuple[int, ...]]:
        return {"slopes": (config.n_layer, config.n_head)}

    @staticmethod
    def init_own(name: str, parameter: Tensor) -> bool:
        parameter.fill_(0.25)
        return True

    @classmethod
    def positions(cls, config: TransformerXLConfig, learned: Mapping[str, Tensor], distances: Distances) -> list[Positions]:
        distance_S = distances.limited.to(distances.dtype)
        return [Positions(b=-torch.outer(distance_S, slope_N.abs())) for slope_N in learned["slopes"]]


@dataclass(frozen=True)
class Trace(Memory):
    """What is left of all that was read: one vector per row, (B, D), and how many tokens that were, (B,).

    Its tensors are called as some of the package's own are, and mean something else.
    """

    names: ClassVar = ("keys.trace", "n_valid")
    trace: Tensor
    n_read: Tensor

    @classmethod
    def empty(cls, model: LanguageModel, batch_size: int) -> "Trace":
        trace = torch.zeros(batch_size, model.config.d_model, dtype=model.dtype, device=model.device)
        return cls(trace, torch.zeros(batch_size, dtype=torch.int64, device=model.device))

    def state_dict(self) -> dict[str, Tensor]:
        return dict(zip(self.names, (self.trace, self.n_read), strict=True))

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Tensor]) -> "Trace":
        return cls(*(state[name] for name in cls.names))

    def check_values(self) -> None:
        if (self.n_read < 0).any():
            raise ValueError("it has read fewer than 0 tokens")


class FadingConfig(ModelConfig):
    kind: ClassVar[str] = "fading"
    remembers: ClassVar[Literal["positions", "state", "nothing"]] = "state"

    mem_len: Natural = Field(default=1, description="1: the trace is carried from segment to segment")
    half_life: float = Field(default=2.0, gt=0, description="tokens after which half of a vector is left")


class Fading(LanguageModel):
    """A trace to which every token adds its vector, and which fades, then a network on top of it."""

    kind = FadingConfig.kind
    config: FadingConfig  # pyright: ignore[reportIncompatibleVariableOverride]  # of a frozen attribute, this is safe

    def __init__(self, config: FadingConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(nn.Linear(config.d_model, config.d_model) for _ in range(config.n_layer))
        self.softmax = make_softmax(config)
        self.init_weights()

    def init_mems(self, batch_size: int, *, length: int | None = None) -> Trace:
        return Trace.empty(self, batch_size)

    def reach(self, tgt_len: int) -> int:
        return -(-64 // tgt_len) * tgt_len

    def read(  # pyright: ignore[reportIncompatibleMethodOverride]  # it gets its own memory back
        self,
        ids: Tensor,
        *,
        mems: Trace | None = None,
        rows: Rows = Rows(),
        execution: Execution = Execution(),
        keep_graph: bool = False,
    ) -> tuple[Tensor, Trace]:
        mems = mems or self.init_mems(len(ids))
        trace, traces = mems.trace, []
        n_read = mems.n_read + ids.shape[1] - (0 if rows.n_pad is None else rows.n_pad)
        for t, x_BD in enumerate(self.drop_input(self.embed(ids)).unbind(1)):
            if rows.document_starts is not None:
                trace = trace.where(~rows.document_starts[:, t, None], 0.0)
            new = trace * 0.5 ** (1 / self.config.half_life) + x_BD
            trace = new if rows.n_pad is None else new.where((rows.n_pad <= t)[:, None], trace)
            traces.append(trace)
        h_BTD = torch.stack(traces, dim=1)
        for layer in self.layers:
            h_BTD = h_BTD + execution.run(layer, h_BTD.tanh())
        return h_BTD, Trace(trace if keep_graph else trace.detach(), n_read)


class SummaryConfig(TransformerXLConfig):
    kind: ClassVar[str] = "summary"


class Summary(txl.TransformerXL):
    """A Transformer-XL that remembers something else: the sum of the states of each segment, which is added to the next."""

    def init_mems(self, batch_size: int, *, length: int | None = None) -> Trace:  # pyright: ignore[reportIncompatibleMethodOverride]
        return Trace.empty(self, batch_size)

    def read(self, ids: Tensor, *, mems: Trace | None = None, **options: Any) -> tuple[Tensor, Trace]:  # pyright: ignore
        mems = mems or self.init_mems(len(ids))
        empty = super().init_mems(len(ids), length=0)
        h_BTD = super().read(ids, mems=empty)[0] + mems.trace.unsqueeze(1)
        return h_BTD, Trace(h_BTD.sum(1).detach(), mems.n_read + ids.shape[1])

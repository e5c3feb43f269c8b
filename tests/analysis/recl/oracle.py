"""Sources whose tokens depend on those a known number of steps back, and a model that knows it."""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.memory import Mems
from transformer_xl.model.sequence_model import make_softmax
from transformer_xl.model_config import ModelConfig

N_VALUE = 8
_CERTAIN = 20.0


def repeating(lags: list[int], n: int, *, seed: int = 0) -> np.ndarray:
    """Tokens (n,) of a value and the number of a lag; the next value is that of the token so many steps before it."""
    rng = np.random.default_rng(seed)
    values, which = rng.integers(0, N_VALUE, n), rng.integers(0, len(lags), n)
    for t in range(1, n):
        lag = lags[which[t - 1]]
        values[t] = values[t - lag] if lag <= t else values[t]
    return (which * N_VALUE + values).astype(np.uint16)


class OracleConfig(ModelConfig):
    kind = "oracle"


class Oracle(LanguageModel):
    """Predicts the next value if the token that it repeats is in the segment or the memory, else anything alike."""

    config: OracleConfig  # pyright: ignore[reportIncompatibleVariableOverride]  # of a frozen attribute, this is safe

    def __init__(self, lags: list[int], *, mem_len: int) -> None:
        n_token = len(lags) * N_VALUE
        super().__init__(OracleConfig(vocab_size=n_token, n_layer=1, d_model=n_token, mem_len=mem_len))
        self.lags = torch.tensor(lags)
        self.softmax = make_softmax(self.config)
        with torch.no_grad():
            self.get_parameter("embedding.weight").copy_(torch.eye(n_token))
            self.softmax.bias.zero_()

    def init_mems(self, batch_size: int, *, length: int | None = None) -> Mems:
        return Mems.empty(batch_size, n_layer=1, d_model=1, length=self.mem_len if length is None else length)

    def reach(self, tgt_len: int) -> int:
        return self.mem_len

    def read(  # pyright: ignore[reportIncompatibleMethodOverride]  # it gets its own memory back
        self, ids: Tensor, *, mems: Mems | None = None, **_: Any
    ) -> tuple[Tensor, Mems]:
        mems = self.init_mems(len(ids)) if mems is None else mems
        tokens = torch.cat([mems.hidden[0].squeeze(2).long(), ids], dim=1)
        place = torch.arange(mems.length, tokens.shape[1]) + 1 - self.lags[ids // N_VALUE]
        seen = place >= mems.length - mems.n_valid.unsqueeze(1)
        value = tokens.gather(1, place.clamp(min=0)) % N_VALUE
        h_BTD = F.one_hot(value, N_VALUE).repeat(1, 1, len(self.lags)) * seen.unsqueeze(2) * _CERTAIN
        kept = tokens[:, max(tokens.shape[1] - self.mem_len, 0) :].unsqueeze(2).float()
        return h_BTD.float(), Mems((kept,), (mems.n_valid + ids.shape[1]).clamp(max=kept.shape[1]))

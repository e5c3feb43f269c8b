"""Tiny models that a long context matters to, and what they are read with."""

from typing import Any

import numpy as np
import torch

from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.lstm import Lstm
from transformer_xl.model.vanilla import Vanilla
from transformer_xl.model_config import LstmConfig, VanillaConfig

IDS = np.random.default_rng(0).integers(0, 13, 90).astype(np.uint16)
MAX_LEN = 7


def loud(model: LanguageModel) -> LanguageModel:
    """Random weights of a size at which every token of the context matters."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.5)
    return model.eval()


def vanilla() -> LanguageModel:
    sizes: dict[str, Any] = {"n_layer": 2, "d_model": 6, "n_head": 2, "d_head": 5, "d_inner": 9}
    return loud(Vanilla(VanillaConfig(vocab_size=13, max_len=MAX_LEN, **sizes)))


def lstm() -> LanguageModel:
    return loud(Lstm(LstmConfig(vocab_size=13, n_layer=2, d_model=6, d_hidden=10)))

"""Tiny random models of each kind, and what they are read with."""

from typing import Any

import torch

from tests.helpers import tiny_model
from transformer_xl.config.model import LstmConfig, VanillaConfig
from transformer_xl.model.lstm import Lstm
from transformer_xl.model.vanilla import Vanilla
from transformer_xl.reading.reading import Reading

ATTENTION: dict[str, dict[str, Any]] = {
    "paper": {},
    "pre_lnorm, untie_r": {"pre_lnorm": True, "untie_r": True},
    "same_length, clamp_len": {"same_length": True, "clamp_len": 3},
    "zero first memory": {"zero_first_memory": True},
    "shaw": {"attention": "shaw", "max_klen": 6},
    "rotary": {"attention": "rotary", "pre_lnorm": True},
    "alibi": {"attention": "alibi", "clamp_len": 3},
    "vaswani": {"attention": "vaswani", "pre_lnorm": True},
    "al_rfou": {"attention": "al_rfou", "max_klen": 20, "n_head": 2, "d_head": 5},
}
SIZES: dict[str, Any] = {"vocab_size": 13, "n_layer": 2, "d_model": 10, "dropout": 0.0}
HEADS: dict[str, Any] = {"n_head": 3, "d_head": 4, "d_inner": 14}


def make(name: str, vocab_size: int = 13) -> Any:
    if name == "lstm":
        return _random(Lstm(LstmConfig(**{**SIZES, "vocab_size": vocab_size})))
    if name.startswith("vanilla"):
        pre_lnorm = "pre_lnorm" in name
        return _random(Vanilla(VanillaConfig(max_len=8, pre_lnorm=pre_lnorm, **{**SIZES, "vocab_size": vocab_size}, **HEADS)))
    return tiny_model(vocab_size=vocab_size, **ATTENTION[name])


def reading(model: Any, **changes: Any) -> Reading:
    same_length, clamp_len = getattr(model.config, "same_length", None), getattr(model.config, "clamp_len", None)
    return Reading(**{"tgt_len": 4, "mem_len": model.mem_len, "same_length": same_length, "clamp_len": clamp_len, **changes})


def _random(model: Any) -> Any:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.4)
    return model.eval()

"""Mistral of Hugging Face transformers as a kind of model: separate segments in training, a sliding cache in reading."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from rivals.rival import Rival, library
from rivals.settings import MistralConfig
from transformer_xl.model.memory import Memory


@dataclass(frozen=True)
class Window(Memory):
    """Keys and values of each layer at the last positions, newest last, (B, heads, M, d_head), and the tokens read, (B,).

    Keys are turned by their position since the text began, so a row must know how many tokens it has read.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    n_read: Tensor

    def state_dict(self) -> dict[str, Tensor]:
        """Return the tensors by name."""
        keys = {f"keys.{i}": x for i, x in enumerate(self.keys)}
        return {"n_read": self.n_read, **keys, **{f"values.{i}": x for i, x in enumerate(self.values)}}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Tensor]) -> "Window":
        """Rebuild a memory from `state_dict()`."""
        layers = range(len(state) // 2)
        return cls(tuple(state[f"keys.{i}"] for i in layers), tuple(state[f"values.{i}"] for i in layers), state["n_read"])

    def check_values(self) -> None:
        """Refuse rows that have read less than nothing."""
        if (self.n_read < 0).any():
            raise ValueError("its rows have read fewer than 0 tokens")


class Mistral(Rival):
    """The layers of a `MistralForCausalLM` with tied embeddings."""

    kind = MistralConfig.kind
    config: MistralConfig  # pyright: ignore[reportIncompatibleVariableOverride]  # of a frozen attribute, this is safe

    def make_body(self) -> nn.Module:
        """Return a `MistralModel`."""
        module, config = library("transformers.models.mistral.modeling_mistral"), self.config
        sizes = module.MistralConfig(
            vocab_size=1,  # its own embedding is not used
            hidden_size=config.d_model,
            num_hidden_layers=config.n_layer,
            intermediate_size=config.d_inner,
            num_attention_heads=config.n_head,
            num_key_value_heads=config.n_head,
            head_dim=config.d_head,
            sliding_window=config.mem_len + 1,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
        body = module.MistralModel(sizes)
        with torch.device("cpu"):  # no file holds its frequencies, so they must be numbers wherever the weights are made
            body.rotary_emb = module.MistralRotaryEmbedding(sizes)
        return body

    def register_parts(self) -> None:
        """Register layers and last norm."""
        self.layers = cast("nn.ModuleList", self.body.layers)
        self.final_norm = self.body.norm

    def init_embedding(self, weight: Tensor) -> None:
        """Draw as the library does: normal, with a deviation of 0.02."""
        weight.normal_(0.0, cast("Any", self.body.config).initializer_range)

    def init_mems(self, batch_size: int, *, length: int | None = None) -> Window:
        """Return an empty cache of fixed size; more positions than the trained window has would not be seen."""
        length = min(self.mem_len if length is None else length, self.config.mem_len)
        shape = (batch_size, self.config.n_head, length, self.config.d_head)
        zeros = (torch.zeros(shape, dtype=self.dtype, device=self.device),) * self.config.n_layer
        return Window(zeros, zeros, torch.zeros(batch_size, dtype=torch.int64, device=self.device))

    def reach(self, tgt_len: int) -> int:
        """Return how far back the windows of all layers go, in whole segments."""
        return math.ceil(self.config.n_layer * min(self.mem_len, self.config.mem_len) / tgt_len) * tgt_len

    def read_rows(self, x_BTD: Tensor, mems: Window) -> tuple[Tensor, Window]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Read after the cache; in training, or without memory, each segment alone."""
        T, M = x_BTD.shape[1], mems.keys[0].shape[2]
        if self.training or not M:
            return self.body(inputs_embeds=x_BTD, use_cache=False).last_hidden_state, mems
        cache = library("transformers").DynamicCache(config=self.body.config)
        for layer, keys, values in zip(cache.layers, mems.keys, mems.values, strict=True):
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
        place, new = torch.arange(T, device=x_BTD.device), torch.arange(M + T, device=x_BTD.device) - M
        distance_TS = place[:, None] - new
        seen_BTS = (distance_TS >= 0) & (distance_TS <= self.config.mem_len) & (new >= -mems.n_read[:, None, None])
        h_BTD = self.body(
            inputs_embeds=x_BTD,
            attention_mask=seen_BTS.unsqueeze(1),
            position_ids=mems.n_read[:, None] + place,
            cache=cache,
            use_cache=True,
        ).last_hidden_state
        keys, values = (
            tuple(getattr(layer, name)[:, :, -M:].to(self.dtype) for layer in cache.layers) for name in ("keys", "values")
        )
        return h_BTD, Window(keys, values, mems.n_read + T)

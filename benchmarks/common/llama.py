"""What a user would pick instead, in a process of its own: `llama.py train PRECISION` or `llama.py read PRECISION [compiled]`.

`LlamaForCausalLM` of transformers 5 with random weights and its defaults (SDPA, no dropout), as many layers, heads and channels
as ours, and a feed-forward layer so wide that it has as many parameters. It has no memory: in training, a token sees what
comes before it in its row, which is as long as segment and memory of ours together.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache, __version__

from common.side import ReadingSide, Side, TrainingSide
from common.wire import serve
from transformer_xl.kernels.device import activation_dtype, autocast, choose_precision


class Llama(Side):
    def __init__(self, precision: str, *compiled: str) -> None:
        super().__init__()
        self.precision: Any = choose_precision(precision, torch.device("cpu"))[0]
        self.compiled = bool(compiled)

    def versions(self) -> dict[str, str]:
        name = f"transformers {__version__} LlamaForCausalLM"
        return {"name": name, "torch": torch.__version__, "precision": self.precision}

    def _build(self, weights: str) -> None:
        """Make a model with as many parameters as ours, whose layers have five D·D matrices (its own four) and two D·I."""
        ours = self.config
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=ours["vocab_size"],
            hidden_size=ours["d_model"],
            num_hidden_layers=ours["n_layer"],
            num_attention_heads=ours["n_head"],
            head_dim=ours["d_head"],
            intermediate_size=(2 * ours["d_inner"] + ours["n_head"] * ours["d_head"]) // 3,
            max_position_embeddings=2 * ours["mem_len"],
            tie_word_embeddings=True,
        )
        self.model = LlamaForCausalLM(config)


class TrainingLlama(Llama, TrainingSide):
    def _loss(self, batch: dict[str, Tensor]) -> Tensor:
        ids = batch["ids"]
        rows = ids.view(-1, ids.shape[1] + self.config["mem_len"])
        with autocast(ids.device, self.precision):
            return self.model(rows, labels=rows, use_cache=False).loss


class ReadingLlama(Llama, ReadingSide):
    """Reads every token as the last of M, in a static cache."""

    def _build(self, weights: str) -> None:
        super()._build(weights)
        self.model.to(activation_dtype(self.precision, torch.float32)).eval()
        self._call = torch.compile(self.model, dynamic=False) if self.compiled else self.model
        self._start()
        self.tokens([0, 0, 0])

    def _start(self) -> None:
        self.cache: Any = StaticCache(config=self.model.config, max_cache_len=self.config["mem_len"])
        self._read_piece(torch.zeros(1, self.config["mem_len"] - 1, dtype=torch.int64))

    def _read_piece(self, ids: Tensor) -> None:
        self.model(ids, cache=self.cache)

    def _read_token(self, ids: Tensor) -> Tensor:
        for layer in self.cache.layers:  # so that every token sees M positions, itself among them
            layer.cumulative_length.fill_(self.config["mem_len"] - 1)
        return self._call(ids.unsqueeze(0), cache=self.cache).logits[0, -1]


if __name__ == "__main__":
    serve({"train": TrainingLlama, "read": ReadingLlama}[sys.argv[1]](*sys.argv[2:]))

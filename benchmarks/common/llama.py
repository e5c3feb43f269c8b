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

from common.contestant import TrainingSide
from common.reading import ReadingSide
from common.reading_shapes import ReadingShape
from common.shapes import Shape
from common.wire import serve
from transformer_xl.kernels.device import autocast, choose_precision


class Llama:
    """What training and reading have in common."""

    model: Any

    def versions(self) -> dict[str, str]:
        name = f"transformers {__version__} LlamaForCausalLM"
        return {"name": name, "torch": torch.__version__}

    def _make(self, shape: Shape | ReadingShape, n_position: int) -> None:
        """Make a model with as many parameters as ours, whose layers have five D·D matrices (its own four) and two D·I."""
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=shape.vocab_size,
            hidden_size=shape.d_model,
            num_hidden_layers=shape.n_layer,
            num_attention_heads=shape.n_head,
            head_dim=shape.d_head,
            intermediate_size=(2 * shape.d_inner + shape.n_head * shape.d_head) // 3,
            max_position_embeddings=n_position,
            tie_word_embeddings=True,
        )
        self.model = LlamaForCausalLM(config)


class TrainingLlama(Llama, TrainingSide[Any]):
    def __init__(self, precision: str) -> None:
        super().__init__()
        self.precision: Any = choose_precision(precision, torch.device("cpu"))[0]

    def _build(self, shape: Shape, weights: str) -> None:
        self._make(shape, shape.tgt_len + shape.mem_len)

    def _loss(self, ids: Tensor) -> Tensor:
        rows = ids.view(-1, self.model.config.max_position_embeddings)
        with autocast(ids.device, self.precision):
            return self.model(rows, labels=rows, use_cache=False).loss


class ReadingLlama(Llama, ReadingSide):
    """Reads every token as the last of M, in a static cache."""

    def __init__(self, precision: str, *compiled: str) -> None:
        super().__init__()
        self.dtype, self.compiled = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision], bool(compiled)

    def _build(self, weights: str) -> None:
        self._make(self.shape, self.shape.mem_len)
        self.model.to(self.dtype).eval()
        self.step = torch.compile(self.model, dynamic=False) if self.compiled else self.model
        self._start()
        self.tokens([0, 0, 0])

    def _start(self) -> None:
        self.cache: Any = StaticCache(config=self.model.config, max_cache_len=self.shape.mem_len)
        self._read_piece(torch.zeros(1, self.shape.mem_len - 1, dtype=torch.int64))

    def _read_piece(self, ids: Tensor) -> None:
        self.model(ids, cache=self.cache)

    def _read_token(self, ids: Tensor) -> Tensor:
        for layer in self.cache.layers:  # so that every token sees M positions, itself among them
            layer.cumulative_length.fill_(self.shape.mem_len - 1)
        return self.step(ids.unsqueeze(0), cache=self.cache).logits[0, -1]

    def _choose(self, ids: Tensor) -> int:
        return int(self._read_token(ids).argmax())


if __name__ == "__main__":
    serve({"train": TrainingLlama, "read": ReadingLlama}[sys.argv[1]](*sys.argv[2:]))

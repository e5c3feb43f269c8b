"""One process of `processes.py`: a trainer, alone or together with others, that takes steps when it is told to.

What makes it one of several are the variables that `torchrun` sets.
"""

import gc
import sys
import time
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch

from common.machine import peak_mb, reset_peak
from common.shapes import SHAPES, Shape
from common.wire import serve
from transformer_xl.config.model import TransformerXLConfig
from transformer_xl.config.run import OptimConfig, Parallelism, TrainConfig
from transformer_xl.data.streams import SegmentStream
from transformer_xl.kernels.device import Precision
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.process import keep_freed_memory
from transformer_xl.training.trainer import Trainer
from transformer_xl.world import World, joined


class Process:
    def __init__(self) -> None:
        keep_freed_memory()  # as `txl train` does
        self._held = ExitStack()  # the others are met once, and left when the process ends

    def build(
        self, shape: str, precision: Precision, how: Parallelism, n_threads: int, rows: int, dropout: float | None
    ) -> None:
        """Make a trainer, the same weights and text in every process; a former one is forgotten.

        Args:
            rows: lanes of all processes together.
            dropout: None: that of the shape.
        """
        torch.set_num_threads(n_threads)
        if not hasattr(self, "_world"):
            self._world = self._held.enter_context(joined())
        self.__dict__.pop("_trainer", None)
        gc.collect()  # a trainer refers to itself, and would count in the peak of the next
        sizes = SHAPES[shape]
        torch.manual_seed(0)
        model = TransformerXL(model_config(sizes, sizes.dropout if dropout is None else dropout))
        self._trainer = Trainer(
            model,
            random_text(sizes, rows, self._world),
            train=TrainConfig(batch_size=rows, tgt_len=sizes.tgt_len, max_steps=1_000_000, precision=precision, parallel=how),
            optim=OptimConfig(optimizer="adam", schedule="constant"),
            precision=precision,
            world=self._world,
        )

    def losses(self, n: int) -> list[float]:
        """Take steps, and return the nats per token of each."""
        results = [self._trainer.train_step() for _ in range(n)]
        return [result.nats / result.tokens for result in results]

    def steps(self, n: int) -> float:
        """Take steps, and return the seconds that they took together."""
        begin = time.perf_counter()
        for _ in range(n):
            self._trainer.train_step()
        return time.perf_counter() - begin

    def forget_peak(self) -> None:
        """Let `memory` count from here."""
        reset_peak()

    def memory(self) -> float:
        """Return the most memory (MB) that this process held."""
        return peak_mb()


def model_config(shape: Shape, dropout: float) -> TransformerXLConfig:
    """Return the settings of a shape's model."""
    return TransformerXLConfig(
        vocab_size=shape.vocab_size,
        n_layer=shape.n_layer,
        d_model=shape.d_model,
        n_head=shape.n_head,
        d_head=shape.d_head,
        d_inner=shape.d_inner,
        mem_len=shape.mem_len,
        dropout=dropout,
        zero_first_memory=True,  # so that the first step costs what all others do
    )


def random_text(shape: Shape, rows: int, world: World) -> SegmentStream:
    """Return this process's lanes of a random text, the same text in every run; its end is followed by its beginning."""
    ids = np.random.default_rng(0).integers(0, shape.vocab_size, rows * shape.tgt_len * 16 + 1).astype(np.uint16)
    return SegmentStream(ids, batch_size=rows, tgt_len=shape.tgt_len, rank=world.rank, world_size=world.size)


if __name__ == "__main__":
    serve(Process())

"""Trains two steps in a process of their own, and returns the most memory that they took above what was held before.

Without oneDNN, which multiplies fp32 on some processors and keeps ten megabytes of its own, whatever the model.
"""

import ctypes
import gc
from pathlib import Path
from typing import Any

import numpy as np

from transformer_xl.config.model import TransformerXLConfig
from transformer_xl.config.run import OptimConfig, TrainConfig
from transformer_xl.data.streams import SegmentStream
from transformer_xl.kernels import cpu_linear as products
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.training.trainer import Trainer

_M_MMAP_THRESHOLD = -3  # of <malloc.h>
_TINY = {
    "model": {"n_layer": 1, "d_model": 8, "n_head": 1, "d_head": 8, "d_inner": 8, "vocab_size": 300, "mem_len": 4},
    "train": {"tgt_len": 4},
}


def peak(settings: dict[str, Any]) -> int:
    """Return the peak of settings with the sections model and train, and the precision."""
    products._prefers_onednn = lambda: False
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 16)  # what is freed goes back to the system at once
    two_steps({name: {**value, **_TINY[name]} if name in _TINY else value for name, value in settings.items()})
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
    before = in_use("VmRSS")  # after the libraries have loaded and allotted what they keep
    two_steps(settings)
    return in_use("VmHWM") - before


def in_use(name: str) -> int:
    """Return bytes of this process by their name in its status."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines())
    return 1024 * int(fields[name].split()[0])


def two_steps(settings: dict[str, Any]) -> None:
    model, train = TransformerXLConfig(**settings["model"]), TrainConfig(**settings["train"])
    n_token = 2 * train.tbptt_segments * train.batch_size * train.tgt_len + 1  # two whole steps: one epoch
    ids = np.random.default_rng(0).integers(0, model.vocab_size or 1, n_token)
    stream = SegmentStream(ids.astype(np.uint16), batch_size=train.batch_size, tgt_len=train.tgt_len)
    trainer = Trainer(TransformerXL(model), stream, train=train, optim=OptimConfig(), precision=settings["precision"])
    for _ in range(2):
        assert not trainer.train_step().skipped

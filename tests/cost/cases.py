"""Tiny models and the work that is counted of them."""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from transformer_xl.config.model import TransformerXLConfig
from transformer_xl.config.run import RunConfig, TrainConfig
from transformer_xl.cost.work import Backend, Work, build
from transformer_xl.model.transformer_xl import TransformerXL

SIZES: dict[str, Any] = {
    **{"vocab_size": 29, "n_layer": 2, "d_model": 12, "n_head": 3, "d_head": 4, "d_inner": 14, "dropout": 0.1, "mem_len": 6},
    "max_klen": 40,
}

# nothing changes a model whose numbers are not there, so all works of it share one
_built: Callable[[Any], TransformerXL] = cache(build)


def config(**changes: Any) -> TransformerXLConfig:
    return TransformerXLConfig(**(SIZES | changes))


def run_config(*, model: dict[str, Any] | None = None, **train: Any) -> RunConfig:
    settings: dict[str, Any] = {"batch_size": 8, "tgt_len": 5, "max_steps": 100} | train
    return RunConfig(model=config(**(model or {})), train=TrainConfig(**settings))


def work(
    config: TransformerXLConfig,
    *,
    rows: int = 4,
    tgt_len: int = 5,
    precision: Any = "fp32",
    backend: Backend = "matmul",
    checkpointing: bool = False,
    labels: Tensor | None = None,
) -> Work:
    """The work of a pass; `labels` say how many tokens belong to each cluster."""
    borders = [*config.cutoffs, config.vocab_size]
    shares = [1.0] * len(borders)
    if labels is not None:
        cluster = np.searchsorted(borders, labels.flatten().numpy(), side="right")
        shares = list(np.bincount(cluster, minlength=len(borders)) / labels.numel())
    return Work(_built(config), rows, tgt_len, precision, backend, True, checkpointing, tuple(shares))


def tokens(rows: int = 4, tgt_len: int = 5, vocab_size: int = 29) -> tuple[Tensor, Tensor]:
    return torch.randint(vocab_size, (rows, tgt_len)), torch.randint(vocab_size, (rows, tgt_len))

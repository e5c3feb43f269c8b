"""Trainings that several processes do together, for `tests.forked`."""

import hashlib
import math
import os
import signal
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from tests.checkpoint.helpers import as_bytes
from tests.training.helpers import OPTIM, tiny_model, tiny_stream
from tests.world_cases import txl
from transformer_xl.checkpoint.store import CheckpointStore
from transformer_xl.config.run import OptimConfig, TrainConfig
from transformer_xl.model.base import LanguageModel
from transformer_xl.reading.evaluation import evaluate
from transformer_xl.training.parallel import whole
from transformer_xl.training.trainer import Trainer
from transformer_xl.world import World, joined

Changes = dict[str, dict[str, Any]]


def make(world: World, changes: Changes) -> Trainer:
    """A trainer of a tiny model on random tokens: 8 lanes in all processes together, 9 segments an epoch."""
    torch.manual_seed(0)
    dtype = getattr(torch, changes.get("dtype", {}).get("name", "float32"))
    model = tiny_model(**changes.get("model", {})).to(dtype)
    settings: dict[str, Any] = {"batch_size": 8, "tgt_len": 5, "max_steps": 50}
    train = TrainConfig(**settings | changes.get("train", {}))
    ids = np.random.default_rng(0).integers(0, 11, 8 * 45 + 1).astype(np.uint16)
    stream = tiny_stream(ids, train, [0, 13, 50, 97, 211], model.config, world)
    optim = OptimConfig(**(OPTIM | changes.get("optim", {})))
    precision = changes.get("precision", {}).get("name", "fp32")
    return Trainer(model, stream, train=train, optim=optim, precision=precision, world=world)


def _language_model(trainer: Trainer) -> LanguageModel:
    assert isinstance(trainer.model, LanguageModel)
    return trainer.model


def losses(cases: list[Changes], n_step: int) -> list[list[float]]:
    """Loss of each step, of each case."""
    with joined() as world:
        return [_steps(make(world, changes), n_step) for changes in cases]


def resumed(cases: list[Changes], n_before: int, n_after: int) -> list[list[Any]]:
    """Bits of the whole state after so many steps: in one go, and with a checkpoint between.

    With `bad`, a gradient of the last process is not finite in the step before the checkpoint.
    """
    with joined() as world:
        return [
            [_state(_trained(world, each, n_before, n_after)), _state(_cut(world, each, n_before, n_after))] for each in cases
        ]


def saved(directory: str, changes: Changes, n_step: int) -> list[float]:
    """Train, save what any number of processes can go on from, and return the losses."""
    with joined() as world:
        trainer = make(world, changes)
        found = _steps(trainer, n_step)
        checkpoint = trainer.checkpoint({})
        if checkpoint is not None:
            CheckpointStore(Path(directory)).save(checkpoint)
        return found


def gone_on(directory: str, changes: Changes, n_step: int, then: str | None = None) -> list[float]:
    """Go on from what was saved, return the losses, and save again if told where."""
    with joined() as world:
        trainer = make(world, changes)
        trainer.restore(CheckpointStore(Path(directory)).load_newest(on_damaged=print))
        found = _steps(trainer, n_step)
        checkpoint = trainer.checkpoint({})
        if checkpoint is not None and then is not None:
            CheckpointStore(Path(then)).save(checkpoint)
        return found


def averaged(changes: Changes, n_step: int) -> list[Any]:
    """Nats of the averaged weights, and those of the plain ones before and after."""
    ids = np.random.default_rng(1).integers(0, 11, 200)
    with joined() as world:
        trainer = make(world, changes)
        _steps(trainer, n_step)
        plain = evaluate(_language_model(trainer), ids, world=world).nats
        with trainer.average.in_place_of(trainer.model):
            average = evaluate(_language_model(trainer), ids, world=world).nats
        return [average, plain, evaluate(_language_model(trainer), ids, world=world).nats]


def clocks(n_step: int) -> float:
    """Seconds counted by a trainer whose budget is time, where the second process is slower."""
    with joined() as world:
        trainer = make(world, {"train": {"max_steps": None, "max_minutes": 10}})
        for _ in range(n_step):
            trainer.train_step()
            time.sleep(0.02 * world.rank)
        return trainer.seconds


def gathered(changes: Changes) -> list[str]:
    """Names of the weights that this process holds whole for a checkpoint."""
    with joined() as world:
        return list(whole(make(world, changes).model.state_dict(), world))


def die_before_an_update(rank: int, changes: Changes) -> None:
    """One process ends without a word after its backward pass; with weights in parts, the update of the others waits for it."""
    with joined() as world:
        trainer = make(world, changes)
        if world.rank == rank:
            trainer.optimizers.step = lambda rate, **_: os._exit(7)
        _steps(trainer, 2)


def txl_that_is_killed(rank: int, step: int, *arguments: str) -> dict[str, Any]:
    """Call `txl train`; before a step, one process is killed."""
    train_step = Trainer.train_step

    def train_step_until_killed(trainer: Trainer) -> Any:
        if trainer.world.rank == rank and trainer.step == step:
            signal.raise_signal(signal.SIGKILL)
        return train_step(trainer)

    with patch.object(Trainer, "train_step", train_step_until_killed):
        return txl(*arguments)


def scores(cases: list[Changes], settings: dict[str, Any]) -> list[list[float]]:
    """Nats of every token and their sum, of each case's untrained model."""
    ids = np.random.default_rng(1).integers(0, 11, 300)
    found = []
    with joined() as world:
        for changes in cases:
            model = _language_model(make(world, changes))
            score = evaluate(model, ids, per_token=True, world=world, **settings)
            assert score.token_nats is not None
            found.append([score.nats, *score.token_nats.tolist()])
    return found


def _steps(trainer: Trainer, n_step: int) -> list[float]:
    results = [trainer.train_step() for _ in range(n_step)]
    assert not any(result.skipped for result in results)
    return [result.nats / result.tokens for result in results]


def _steps_before(trainer: Trainer, changes: Changes, n_step: int) -> None:
    if "bad" not in changes:
        _steps(trainer, n_step)
        return
    _steps(trainer, n_step - 1)
    value = math.nan if trainer.world.rank == trainer.world.size - 1 else 1.0
    hook = trainer.model.get_parameter("r_w_bias").register_hook(lambda grad: grad * value)
    assert trainer.train_step().skipped
    hook.remove()


def _trained(world: World, changes: Changes, n_before: int, n_after: int) -> Trainer:
    trainer = make(world, changes)
    _steps_before(trainer, changes, n_before)
    _steps(trainer, n_after)
    return trainer


def _cut(world: World, changes: Changes, n_before: int, n_after: int) -> Trainer:
    import tempfile

    trainer = make(world, changes)
    _steps_before(trainer, changes, n_before)
    checkpoint = trainer.checkpoint({})
    directory = world.from_first(tempfile.mkdtemp() if world.first else None)
    if checkpoint is not None:
        CheckpointStore(Path(directory)).save(checkpoint)
    world.exchange(None)
    torch.manual_seed(99)
    trainer = make(world, changes)
    torch.rand(7)
    trainer.restore(CheckpointStore(Path(directory)).load_newest(on_damaged=print))
    _steps(trainer, n_after)
    return trainer


def _state(trainer: Trainer) -> dict[str, str] | None:
    checkpoint = trainer.checkpoint({})
    if checkpoint is None:
        return None
    tensors = {**checkpoint.model, **checkpoint.training}
    bits = {name: hashlib.sha256(as_bytes(t)).hexdigest() for name, t in tensors.items()}
    return bits | {"state": str({k: v for k, v in checkpoint.state.items() if k != "seconds"})}

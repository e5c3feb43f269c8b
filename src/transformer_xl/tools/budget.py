"""How many steps fit into the budget of a run, and how long a step takes.

Steps of several runs are timed in turn, so that other work on the machine slows all of them. The time of a step is the shortest
one seen, because other programs can only add to it. If only one thread computes, its processor time is measured.
"""

import time
from collections.abc import Callable, Mapping
from statistics import fmean
from typing import Any

import torch

from transformer_xl.config.model import VanillaConfig
from transformer_xl.config.run import RunConfig
from transformer_xl.data.prepare import PreparedCorpus
from transformer_xl.data.streams import EndlessStream
from transformer_xl.model.build import count_parameters
from transformer_xl.tools.variants import AblationPlan, Trial
from transformer_xl.training.run import text_stream
from transformer_xl.training.start import ReadyModel, complete, ready_model
from transformer_xl.training.trainer import Trainer
from transformer_xl.world import World

ROUNDS = 5  # how often each run gets its turn
_LONG = 1_000_000
_NO_BUDGET = {"max_steps": None, "max_tokens": None, "max_epochs": None, "max_minutes": None}


def measure_paces(
    configs: Mapping[str, RunConfig],
    corpora: Mapping[str, PreparedCorpus],
    *,
    rounds: int = ROUNDS,
    report: Callable[[str], object] = lambda name: None,
) -> dict[str, float]:
    """Measure the seconds of a training step of several runs in turn; `report` is called with the name of each at its turn.

    They are the shortest seen, a mean over the training if some of its steps take longer.
    """
    seen: dict[str, dict[float, list[float]]] = {name: {} for name in configs}
    for _ in range(rounds):
        for name, config in configs.items():
            report(name)
            _take_turn(config, corpora[name], seen[name])
    return {name: fmean(min(times) for times in own.values()) for name, own in seen.items()}


def budgeted(plan: AblationPlan, trial: Trial, paces: dict[str, float]) -> RunConfig:
    """Return the settings of a run: the variant's, with the plan's budget, seed and validations.

    `paces` has an entry for each variant whose budget is time.
    """
    config, name = trial.variant.config, trial.variant.name
    changes: dict[str, Any] = {"seed": trial.seed, "sample_tokens": 0}
    if plan.steps:
        changes |= _NO_BUDGET | {"max_steps": plan.steps}
    elif plan.minutes:
        changes |= _NO_BUDGET | {"max_steps": steps_in(plan.minutes, paces[name])}
    elif config.train.max_minutes:
        steps = steps_in(config.train.max_minutes, paces[name])
        changes |= {"max_minutes": None, "max_steps": min(steps, config.train.max_steps or steps)}
    validated = [each.config.eval.max_tokens for each in plan.variants]
    same_text = min((n for n in validated if n is not None), default=None)  # so that learning curves can be compared
    config = config.changed(train=changes, eval={"max_tokens": same_text})
    n_step = steps_of(config)
    if plan.validations is None or n_step is None:
        return config
    return config.changed(train={"eval_interval": max(1, -(-n_step // plan.validations))})


def steps_of(config: RunConfig) -> int | None:
    """Return how many steps a budget is; None if that depends on the text."""
    train = config.train
    steps = [train.max_steps] if train.max_steps else []
    steps += [-(-train.max_tokens // (train.batch_size * train.tgt_len * train.tbptt_segments))] if train.max_tokens else []
    return min(steps) if steps and not train.max_epochs else None


def steps_in(minutes: float, pace: float) -> int:
    """Return how many steps of `pace` seconds fit into this many minutes, at least 1.

    Example:
        >>> steps_in(2, 0.5), steps_in(0.001, 1.0)
        (240, 1)
    """
    return max(1, int(minutes * 60 / pace * (1 + 1e-9)))  # because 0.6 / 0.1 is a little less than 6


def n_parameters(config: RunConfig, vocab_size: int) -> int:
    """Return the number of a run's parameters, without making them."""
    return count_parameters(complete(config, vocab_size).model)


def make_parts(config: RunConfig, corpus: PreparedCorpus) -> tuple[ReadyModel, EndlessStream]:
    """Make what a run in a single process trains: its model, and what it reads; refuse what it would fail at."""
    start = ready_model(complete(config, corpus.tokenizer.vocab_size), World())
    return start, text_stream(start.config, corpus, World())


def _take_turn(config: RunConfig, corpus: PreparedCorpus, seen: dict[float, list[float]]) -> None:
    """Time the steps of a turn, and add their seconds to `seen`, by their place in the training."""
    places = _places(config)
    endless = config.changed(train=_NO_BUDGET | {"max_steps": _LONG})  # no turn uses that up
    start, stream = make_parts(endless, corpus)
    own = {"train": start.config.train, "optim": start.config.optim}
    trainer = Trainer(start.model, stream, **own, precision=start.precision, device=start.device)
    trainer.step = round(places[0] * _LONG)
    _timed_step(trainer)  # not counted, because memory is allotted and code compiled
    n_step = max(1, min(10, int(0.5 / _timed_step(trainer))) // len(places))  # of about half a second in all
    for place in places:
        trainer.step = round(place * _LONG)
        seen.setdefault(place, []).extend(_timed_step(trainer) for _ in range(n_step))


def _timed_step(trainer: Trainer) -> float:
    alone = trainer.device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.process_time if alone else time.perf_counter
    begin = clock()
    trainer.settle(trainer.train_step())
    return max(clock() - begin, 1e-9)  # a coarse clock may not have moved


def _places(config: RunConfig) -> list[float]:
    """Return the shares of the training at which steps are timed: several if steps do not all take equally long."""
    model = config.model
    n = 2 * model.n_layer if isinstance(model, VanillaConfig) and model.intermediate_losses else 1
    if config.train.varlen:
        n = max(n, 16)
    return [(i + 0.5) / n for i in range(n)]

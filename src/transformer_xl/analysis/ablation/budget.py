"""What a budget comes to: the settings with which a run of an ablation is trained, and its steps."""

from typing import Any

from transformer_xl.analysis.ablation.pace import Pace, steps_in
from transformer_xl.analysis.ablation.plan import Plan, Trial
from transformer_xl.config import RunConfig, merge

_NO_BUDGET = {"max_steps": None, "max_tokens": None, "max_epochs": None, "max_minutes": None}


def budgeted(plan: Plan, trial: Trial, paces: dict[str, Pace]) -> RunConfig:
    """Return the settings of a run: the variant's, with budget, seed and validations of the plan."""
    config, name = trial.variant.config, trial.variant.name
    changes: dict[str, Any] = {"seed": trial.seed, "sample_tokens": 0}
    if plan.steps:
        changes |= _NO_BUDGET | {"max_steps": plan.steps}
    elif plan.minutes:
        changes |= _NO_BUDGET | {"max_steps": steps_in(plan.minutes, paces[name].seconds)}
    elif config.train.max_minutes:
        steps = steps_in(config.train.max_minutes, paces[name].seconds)
        changes |= {"max_minutes": None, "max_steps": min(steps, config.train.max_steps or steps)}
    validated = [each.config.eval.max_tokens for each in plan.variants]
    same_text = min((n for n in validated if n is not None), default=None)  # or learning curves could not be compared
    config = RunConfig(**merge(config.model_dump(), {"train": changes, "eval": {"max_tokens": same_text}}))
    n_step = steps_of(config)
    if plan.validations is None or n_step is None:
        return config
    return RunConfig(**merge(config.model_dump(), {"train": {"eval_interval": max(1, -(-n_step // plan.validations))}}))


def steps_of(config: RunConfig) -> int | None:
    """Return how many steps a budget is; None: only the text can tell."""
    train = config.train
    steps = [train.max_steps] if train.max_steps else []
    steps += [-(-train.max_tokens // (train.batch_size * train.tgt_len * train.tbptt_segments))] if train.max_tokens else []
    return min(steps) if steps and not train.max_epochs else None

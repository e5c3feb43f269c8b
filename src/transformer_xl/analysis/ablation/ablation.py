"""An ablation on the disk: a plan that stays as it is, runs, and what became of them.

runs/ablate-quickstart/
ablation.json            the plan: variants with all their settings, budget, seeds
pace.json                seconds of a step of each variant, if the budget is time
results/RUN.json         parameters, steps, time and scores of a run that is finished
VARIANT-seedN/           an ordinary run
table.md  curves.png  lengths.png
"""

import fcntl
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from transformer_xl.analysis.ablation.pace import Pace, steps_in
from transformer_xl.analysis.ablation.variants import Variant, differences
from transformer_xl.checkpoint.disk import replace_file
from transformer_xl.config import RunConfig, merge
from transformer_xl.data.waiting import one_at_a_time
from transformer_xl.errors import CheckpointError

PLAN_FILE, PACE_FILE, RESULTS, LOCK_FILE = "ablation.json", "pace.json", "results", ".lock"

_NO_BUDGET = {"max_steps": None, "max_tokens": None, "max_epochs": None, "max_minutes": None}


@dataclass(frozen=True)
class Plan:
    """What is compared, and how; frozen when an ablation begins.

    Attributes:
        variants: that are compared.
        seeds: each is trained with so many: the recipe's, and those that follow.
        steps: budget of each run; None: another.
        minutes: budget of training time, turned into steps by the pace of each variant; None: another, or the recipe's own.
        validations: so many in each run, for its curve; None: as the recipe says.
        lengths: attention lengths to score; None: those around the trained one.
        exact: score vanilla models one position at a time, too.
        tokens: at most so many of the split are scored; None: all.
    """

    variants: tuple[Variant, ...]
    seeds: int = 1
    steps: int | None = None
    minutes: float | None = None
    validations: int | None = None
    lengths: tuple[int, ...] | None = None
    exact: bool = False
    tokens: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON values."""
        variants = [vars(variant) | {"config": variant.config.model_dump(mode="json")} for variant in self.variants]
        return vars(self) | {"variants": variants, "lengths": None if self.lengths is None else list(self.lengths)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Plan":
        """Rebuild it from JSON values."""
        variants = tuple(Variant(**{**entry, "config": RunConfig(**entry["config"])}) for entry in values["variants"])
        lengths = values["lengths"]
        return cls(**{**values, "variants": variants, "lengths": None if lengths is None else tuple(lengths)})

    def difference(self, other: "Plan") -> str | None:
        """Return in what another plan differs first, as `what (its value) is not that (own value)`; None: in nothing."""
        for name in ("seeds", "steps", "minutes", "validations", "lengths", "exact", "tokens"):
            own, its = getattr(self, name), getattr(other, name)
            if own != its:
                return f"{name} ({_shown(its)}) differs from its {name} ({_shown(own)})"
        own, its = ([variant.name for variant in plan.variants] for plan in (self, other))
        if own != its:
            return f"variants ({', '.join(its)}) differ from its variants ({', '.join(own)})"
        for one, another in zip(self.variants, other.variants, strict=True):
            for key, before, after in differences(one.config, another.config):
                return f"{key} of '{one.name}' ({after!r}) differs from what it was ({before!r})"
        return None


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


@dataclass(frozen=True)
class Run:
    """One training of a variant.

    Attributes:
        variant: what is trained.
        seed: of weights and dropout.
    """

    variant: Variant
    seed: int

    @property
    def name(self) -> str:
        """Name of its directory."""
        return f"{self.variant.name}-seed{self.seed}"


class Ablation:
    """An ablation in a directory.

    Args:
        directory: where it lies.
        plan: of it.
    """

    def __init__(self, directory: Path, plan: Plan) -> None:
        self.directory, self.plan = directory, plan

    @classmethod
    def begin(cls, directory: Path, plan: Plan) -> "Ablation":
        """Begin an ablation, or go on with the same; a plan with more seeds is the same with more to do.

        Raises:
            CheckpointError: the directory holds another one or something else, or cannot be written.
        """
        with writing(directory):
            directory.mkdir(parents=True, exist_ok=True)
            with one_at_a_time(directory / LOCK_FILE, lambda: None):
                if not (directory / PLAN_FILE).exists():
                    if {path.name for path in directory.iterdir()} - {LOCK_FILE, RESULTS}:
                        raise CheckpointError(f"'{directory}' is not empty and holds no ablation; choose another --out")
                    (directory / RESULTS).mkdir(exist_ok=True)
                    replace_file(directory / PLAN_FILE, _json(plan.as_dict()))
                stored = cls.open(directory)
                if stored.plan.seeds < plan.seeds and not replace(stored.plan, seeds=plan.seeds).difference(plan):
                    replace_file(directory / PLAN_FILE, _json(plan.as_dict()))  # more of the same
                    stored = cls(directory, plan)
        difference = stored.plan.difference(plan)
        if difference:
            raise CheckpointError(
                f"'{directory}' holds an ablation with another plan: {difference}; "
                f"go on with its own by txl ablate --out {directory}, or choose another --out"
            )
        return stored

    @classmethod
    def open(cls, directory: Path) -> "Ablation":
        """Open an ablation that was begun.

        Raises:
            CheckpointError: there is none, or its plan is damaged.
        """
        path = directory / PLAN_FILE
        try:
            return cls(directory, Plan.from_dict(json.loads(path.read_text(encoding="utf-8"))))
        except (FileNotFoundError, NotADirectoryError):
            raise CheckpointError(f"'{directory}' holds no ablation: {PLAN_FILE} is missing; name the recipe, too") from None
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise CheckpointError(f"'{path}' is damaged ({error}); restore it, or choose another --out") from None

    @property
    def runs(self) -> list[Run]:
        """All runs in the order in which they are trained: every variant once, then all with the next seed."""
        return [Run(variant, variant.config.train.seed + k) for k in range(self.plan.seeds) for variant in self.plan.variants]

    def path_of(self, run: Run) -> Path:
        """Return the directory of a run."""
        return self.directory / run.name

    def minutes_of(self, variant: Variant) -> float | None:
        """Return the training time that a variant is given; None: its budget is another."""
        if self.plan.steps:
            return None
        return self.plan.minutes or variant.config.train.max_minutes

    @property
    def paced(self) -> list[Variant]:
        """The variants whose budget is time."""
        return [variant for variant in self.plan.variants if self.minutes_of(variant)]

    @property
    def is_stored(self) -> bool:
        """Whether the directory holds this plan, perhaps with another number of seeds."""
        try:
            stored = Ablation.open(self.directory).plan
        except CheckpointError:
            return False
        return not replace(stored, seeds=self.plan.seeds).difference(self.plan)

    def paces(self) -> dict[str, Pace]:
        """Return the measured time of a step by variant; empty before it is measured.

        Raises:
            CheckpointError: what is stored is damaged.
        """
        path = self.directory / PACE_FILE
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            return {name: Pace(**value) for name, value in values.items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise CheckpointError(f"'{path}' is damaged ({error}); restore it, or choose another --out") from None

    def save_paces(self, paces: dict[str, Pace]) -> None:
        """Store measured times, from then on for good."""
        with writing(self.directory):
            replace_file(self.directory / PACE_FILE, _json({name: asdict(pace) for name, pace in paces.items()}))

    def config_of(self, run: Run, paces: dict[str, Pace]) -> RunConfig:
        """Return the settings of a run, with its budget in steps and its seed.

        Args:
            run: which.
            paces: time of a step by variant.
        """
        return budgeted(self.plan, run, paces)

    def result(self, run: Run) -> dict[str, Any] | None:
        """Return what became of a run that is trained; None: nothing yet."""
        try:
            return json.loads(self._result_path(run).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise CheckpointError(f"'{self._result_path(run)}' is damaged ({error}); delete it to score again") from None

    def save_result(self, run: Run, result: dict[str, Any]) -> None:
        """Store what became of a run."""
        with writing(self.directory):
            replace_file(self._result_path(run), _json(result))

    def _result_path(self, run: Run) -> Path:
        return self.directory / RESULTS / f"{run.name}.json"

    @contextmanager
    def claimed(self, run: Run) -> Iterator[bool]:
        """Keep other processes from a run until the block ends; yields False if another has it."""
        with writing(self.directory):
            file = (self.directory / RESULTS / f".{run.name}.lock").open("w")
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            except OSError:  # a file system that cannot lock
                pass
            yield True

    @contextmanager
    def alone(self, on_wait: Callable[[], object]) -> Iterator[None]:
        """Wait until no other process is in such a block."""
        with one_at_a_time(self.directory / LOCK_FILE, on_wait):
            yield


def budgeted(plan: Plan, run: Run, paces: dict[str, Pace]) -> RunConfig:
    """Return the settings of a run: the variant's, with budget, seed and validations of the plan."""
    config, name = run.variant.config, run.variant.name
    changes: dict[str, Any] = {"seed": run.seed, "sample_tokens": 0}
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


@contextmanager
def writing(directory: Path) -> Iterator[None]:
    """Say in one line why a directory cannot be written."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise CheckpointError(f"cannot write to '{directory}': {reason}; free disk space or choose another --out") from None


def _json(values: dict[str, Any] | Sequence[Any]) -> bytes:
    return (json.dumps(values, indent=2) + "\n").encode()

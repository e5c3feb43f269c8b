"""The directory of an ablation: plan, runs and results. The plan never changes, and several processes share the directory.

runs/ablate-quickstart/
ablation.json            the plan: variants with all their settings, budget, seeds
pace.json                seconds of a step of each variant, if the budget is time
results/RUN.json         parameters, steps, time and scores of a finished run
VARIANT-seedN/           an ordinary run
table.md
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from transformer_xl.errors import CheckpointError
from transformer_xl.files import locked, make_directories, replace_file
from transformer_xl.tools.variants import AblationPlan, Trial, Variant
from transformer_xl.untrusted import read_json_object

_REMEDY = "restore it, or choose another --out"

PLAN_FILE, PACE_FILE, RESULTS, LOCK_FILE = "ablation.json", "pace.json", "results", ".lock"


class _ClaimedError(Exception):
    """Another process has claimed the run."""


class Ablation:
    """An ablation in a directory."""

    def __init__(self, directory: Path, plan: AblationPlan) -> None:
        self.directory, self.plan = directory, plan

    def begin(self) -> None:
        """Store the plan, unless it is stored already. A plan with more seeds replaces the stored one and adds runs.

        Raises:
            CheckpointError: the directory holds another ablation or something else.
        """
        make_directories(self.directory)
        with self.alone(lambda: None):
            stored = self._stored()
            if stored is None or stored.seeds < self.plan.seeds:
                (self.directory / RESULTS).mkdir(exist_ok=True)
                replace_file(self.directory / PLAN_FILE, _json(self.plan.as_dict()))

    def check_directory(self) -> None:
        """Refuse, as `begin` does, a directory in which this ablation can neither begin nor go on; write nothing."""
        self._stored()

    def _stored(self) -> AblationPlan | None:
        """Return the plan that the directory holds, which may have other seeds; None if there is none."""
        path = self.directory
        if not (path / PLAN_FILE).exists():
            if path.exists() and {entry.name for entry in path.iterdir()} - {LOCK_FILE, RESULTS}:
                raise CheckpointError(f"'{path}' is not empty and holds no ablation; choose another --out")
            return None
        stored = Ablation.open(path).plan
        more = replace(stored, seeds=max(stored.seeds, self.plan.seeds))
        if difference := more.difference(self.plan):
            raise CheckpointError(
                f"'{path}' holds an ablation with another plan: {difference}; "
                f"go on with its own by txl ablate --out {path}, or choose another --out"
            )
        return stored

    @classmethod
    def open(cls, directory: Path) -> "Ablation":
        """Open an ablation that was begun; CheckpointError if there is none or its plan is damaged."""
        path = directory / PLAN_FILE
        if not path.exists():
            raise CheckpointError(f"'{directory}' holds no ablation: {PLAN_FILE} is missing; name the recipe, too")
        try:
            return cls(directory, AblationPlan.from_dict(read_json_object(path, remedy=_REMEDY)))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))[:100]
            raise CheckpointError(f"'{path}' is no plan of this version ({where}: {first['msg']}); {_REMEDY}") from None

    def path_of(self, trial: Trial) -> Path:
        """Return the directory of a run."""
        return self.directory / trial.name

    def stored_paces(self) -> dict[str, float]:
        """Return the measured seconds of a step by variant; empty before they are measured."""
        path = self.directory / PACE_FILE
        if not path.exists():
            return {}
        remedy = "delete it to measure the time of steps again"
        return {name: pace["seconds"] for name, pace in read_json_object(path, remedy=remedy).items()}

    def save_paces(self, paces: dict[str, float]) -> None:
        """Store measured times."""
        replace_file(self.directory / PACE_FILE, _json({name: {"seconds": pace} for name, pace in paces.items()}))

    def result(self, trial: Trial) -> dict[str, Any] | None:
        """Return the result of a trained run; None: there is none yet."""
        path = self.result_path(trial)
        return read_json_object(path, remedy="delete it to score again") if path.exists() else None

    def results(self, variant: Variant) -> list[dict[str, Any]]:
        """Return the results that the runs of a variant have so far."""
        results = (self.result(trial) for trial in self.plan.trials if trial.variant is variant)
        return [result for result in results if result is not None]

    def save_result(self, trial: Trial, result: dict[str, Any]) -> None:
        """Store the result of a run."""
        replace_file(self.result_path(trial), _json(result))

    def result_path(self, trial: Trial) -> Path:
        """Return the file of the result of a run."""
        return self.directory / RESULTS / f"{trial.name}.json"

    @contextmanager
    def claimed(self, trial: Trial) -> Iterator[bool]:
        """Claim a run while the block runs; yields False if another process has claimed it."""

        def give_up() -> None:
            raise _ClaimedError

        try:
            with locked(self.directory / RESULTS / f".{trial.name}.lock", on_busy=give_up):
                yield True
        except _ClaimedError:
            yield False

    @contextmanager
    def alone(self, on_wait: Callable[[], object]) -> Iterator[None]:
        """Run the block while no other process is in one; `on_wait` is called if this process has to wait."""
        with locked(self.directory / LOCK_FILE, on_busy=on_wait):
            yield


def _json(values: dict[str, Any]) -> bytes:
    return (json.dumps(values, indent=2) + "\n").encode()

"""The checkpoints of a run: the newest few and the best are kept, and the newest sound one can be loaded.

Layout of the directory: `step-00001000/` is a finished checkpoint, `best.json` names the best, and names that end in `.tmp` are
left over from killed processes. One process at a time may save. Others may load at the same time; to them a checkpoint that is
deleted while they read it looks damaged.

One directory cannot replace another in one operation. So if a step is saved again, its old checkpoint first moves to
`step-00001000.old`, where readers find it until the new one has the name. So there always is a sound checkpoint of that step.
"""

import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from transformer_xl.checkpoint.checkpoint import (
    FORMAT_OF_0_2,
    REMEDY,
    Checkpoint,
    read_checkpoint,
    read_copies,
    write_checkpoint,
)
from transformer_xl.checkpoint.steps import STEP_NAME, final_path, finished_steps, old_path, readable_path
from transformer_xl.console import short
from transformer_xl.errors import CheckpointError, ConfigError, message_of, one_line
from transformer_xl.files import (
    canonical_json,
    discard_directory,
    make_directory,
    remove,
    replace_file,
    stray_name,
    sync_directory,
)
from transformer_xl.untrusted import read_json_object

__all__ = ["AVERAGE_PREFIX", "Checkpoint", "CheckpointStore", "averaged_weights"]

_STRAY_NAME = re.compile(rf"({STEP_NAME.pattern}|best\.json)\.tmp")
AVERAGE_PREFIX = "average."  # begins the names, in `Checkpoint.training`, of weights averaged over steps


class CheckpointStore:
    """Saves and finds the checkpoints of one run.

    Args:
        directory: the first save creates it if its parent exists.
        keep: how many of the newest checkpoints to keep; the best is kept, too.

    Example:
        >>> import tempfile, torch
        >>> store = CheckpointStore(Path(tempfile.mkdtemp()), keep=1)
        >>> for step in (1, 2, 3):
        ...     checkpoint = Checkpoint(step=step, model={"w": torch.ones(2)}, training={}, state={"lr": 0.1})
        ...     path = store.save(checkpoint, best=step == 1)
        >>> store.steps(), store.best_step, path.name
        ([1, 3], 1, 'step-00000003')
        >>> store.load_newest(on_damaged=print).state
        {'lr': 0.1}
    """

    def __init__(self, directory: Path, *, keep: int = 2) -> None:
        if keep < 1:
            raise ConfigError(f"keep ({keep}) must be at least 1; without a checkpoint no run can resume")
        self.directory = Path(directory)
        self.keep = keep

    def save(self, checkpoint: Checkpoint, *, best: bool = False) -> Path:
        """Save a checkpoint, then delete those that need not be kept; return its directory.

        When this returns, the checkpoint is safely on the disk. An interruption never damages a checkpoint that was complete
        before. A step that exists already is replaced. `best` records it as the best so far.

        Raises:
            CheckpointError: a tensor or the state cannot be stored.
            OSError: the checkpoint cannot be written; in both cases earlier checkpoints are intact.
        """
        final = self._path(checkpoint.step)
        self._write(checkpoint, final)
        if best:
            self._record_best(checkpoint.step)
        self._settle(checkpoint.step)
        self._rotate(newest=checkpoint.step)
        return final

    def check_room(self, size: int, *, warn: Callable[[str], object]) -> None:
        """Refuse to begin if the disk has no room for another checkpoint of `size` bytes.

        `warn` gets one line if it has room for fewer than are there while one is saved. Nothing is written.
        """
        place = next(path for path in (self.directory, *self.directory.absolute().parents) if path.is_dir())
        free = shutil.disk_usage(place).free
        units = ("B", "kB", "MB", "GB", "TB")
        has = f"the disk of {str(place)!r} has {short(free, units)} free, and a checkpoint takes {short(size, units)}"
        if free < size:
            raise CheckpointError(f"{has}; free disk space or choose another --out")
        n_room, n_needed = free // size + len(self.steps()), self.keep + 1
        if n_room < n_needed:
            warn(f"{has}; train.keep_checkpoints ({self.keep}) needs room for {n_needed}, so free disk space soon")

    def steps(self) -> list[int]:
        """Return the steps of all finished checkpoints, ascending; only loading shows whether they are sound."""
        return finished_steps(self.directory)

    @property
    def best_step(self) -> int | None:
        """The step recorded as the best; None if no step is recorded or the record is damaged."""
        try:
            return self._read_best()
        except CheckpointError:
            return None

    def load(self, step: int) -> Checkpoint:
        """Load one of `steps()` to the CPU, after verifying every byte of it.

        Raises:
            CheckpointError: a file is damaged (the message says which and how).
            OSError: there is no such step, or a file of it is missing or cannot be read.
        """
        return read_checkpoint(readable_path(self.directory, step), step=step)

    def newest_copies(self) -> dict[str, bytes]:
        """Return settings and tokenizer from the newest checkpoint where these are sound; empty if there is none."""
        for step in reversed(self.steps()):
            with suppress(CheckpointError, OSError):
                return read_copies(readable_path(self.directory, step), step=step)
        return {}

    def change_copies(self, copies: Mapping[str, bytes]) -> None:
        """Save all sound checkpoints again with other settings; an interruption leaves each with the old or the new ones."""
        for step in self.steps():
            try:
                checkpoint = self.load(step)
            except (CheckpointError, OSError):  # nobody will load it
                continue
            self._write(replace(checkpoint, copies=copies), self._path(step))
            self._settle(step)

    def load_newest(self, *, on_damaged: Callable[[str], None]) -> Checkpoint:
        """Load the newest sound checkpoint; raise a `CheckpointError` if there is none.

        `on_damaged` gets a one-line message, which names the file, for each newer checkpoint that is damaged.
        """
        return self._load_first_sound(reversed(self.steps()), on_damaged)

    def load_best(self, *, on_damaged: Callable[[str], None]) -> Checkpoint:
        """Load the best checkpoint, or the newest sound one if the best is unknown, missing or damaged.

        `on_damaged` gets a one-line message if the best or a newer checkpoint is not used.
        """
        steps = self.steps()
        try:
            best = self._read_best()
            if best is None and steps:
                on_damaged(f"no best checkpoint is recorded in {str(self.directory)!r}; loading the newest")
        except CheckpointError as error:
            on_damaged(str(error))
            best = None
        others = (step for step in reversed(steps) if step != best)
        return self._load_first_sound(others if best is None else (best, *others), on_damaged)

    def rewind(self, step: int, *, best: int | None) -> None:
        """Go back to `step`, so that a run can continue from there.

        Later checkpoints, which are damaged or could not be read, get the ending `.abandoned`; from then on they are not read,
        counted or deleted. Earlier ones that need not be kept are deleted, because a killed process may not have come to that.
        Call this after `clean`, before anything is saved.

        Args:
            step: the newest step to keep.
            best: the best step up to there, which is recorded again if another step is recorded; None: there is none.
        """
        for later in self.steps():
            if later > step:
                abandoned = self._path(later).with_suffix(".abandoned")
                remove(abandoned)
                self._path(later).rename(abandoned)
        if best is None:
            remove(self._best_path)
        elif best != self.best_step:
            self._record_best(best)
        sync_directory(self.directory)
        self._rotate(newest=step)

    def clean(self) -> None:
        """Remove what killed processes left behind; call this when a run starts, before anything is saved."""
        for path in list(self.directory.glob("*.tmp")):
            if _STRAY_NAME.fullmatch(path.name):
                remove(path)
        for step in self.steps():
            self._settle(step)

    @property
    def _best_path(self) -> Path:
        return self.directory / "best.json"

    def _path(self, step: int) -> Path:
        return final_path(self.directory, step)

    def _old_path(self, step: int) -> Path:
        return old_path(self.directory, step)

    def _write(self, checkpoint: Checkpoint, final: Path) -> None:
        partial = stray_name(final)
        make_directory(self.directory)
        remove(partial)
        try:
            write_checkpoint(partial, checkpoint)
            if final.is_dir():  # it stays readable until the new checkpoint has its name
                old = self._old_path(checkpoint.step)
                discard_directory(old)
                final.rename(old)
            partial.rename(final)
            sync_directory(self.directory)
        except BaseException:
            with suppress(OSError):  # report the first error; `clean` removes what is left
                remove(partial)
            raise

    def _settle(self, step: int) -> None:
        """Finish an interrupted replacement: delete the old checkpoint, or give it its name back if no new one has the name."""
        final, old = self._path(step), self._old_path(step)
        if final.is_dir():
            discard_directory(old)
        else:
            old.rename(final)
            sync_directory(self.directory)

    def _rotate(self, *, newest: int) -> None:
        try:
            best = self._read_best()
        except CheckpointError:
            return  # any step may be the best, so delete none until the next best is recorded
        steps = self.steps()
        # Keep the run's newest even if there are damaged ones of later steps, from before the run was resumed.
        kept = {*steps[-self.keep :], newest, best}
        for step in steps:
            if step not in kept:
                discard_directory(self._old_path(step))
                discard_directory(self._path(step))

    def _best_record(self, step: int) -> dict[str, object]:
        """Return what the record of the best step says. It says it twice, so that damage shows."""
        return {"directory": self._path(step).name, "step": step}

    def _record_best(self, step: int) -> None:
        replace_file(self._best_path, canonical_json(self._best_record(step)))

    def _read_best(self) -> int | None:
        remedy = "the best is unknown until the next is saved"
        try:
            record = read_json_object(self._best_path, remedy=remedy)
        except FileNotFoundError:
            return None
        step = record.get("step")
        if not isinstance(step, int) or (record != self._best_record(step) and record.get("format") != FORMAT_OF_0_2):
            raise CheckpointError(f"'{self._best_path}' is damaged: it does not name a step as it was written; {remedy}")
        return step

    def _load_first_sound(self, steps: Iterable[int], on_damaged: Callable[[str], None]) -> Checkpoint:
        reasons: list[str] = []
        for step in steps:
            try:
                checkpoint = self.load(step)
            except (CheckpointError, OSError) as error:
                reasons.append(one_line(message_of(error)).removesuffix(REMEDY))
                continue
            for reason in reasons:
                on_damaged(f"{reason}; step {step:,} is loaded instead")
            return checkpoint
        where = f"in {str(self.directory)!r}"
        if not reasons:
            raise CheckpointError(f"no checkpoint {where}; check the path, or train first")
        tried = f"can be loaded ({len(reasons)} tried); the first: {reasons[0]}"
        raise CheckpointError(f"no checkpoint {where} {tried}; restore one from a copy, or train again")


def averaged_weights(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Return a checkpoint's weights averaged over steps; empty if it has none."""
    named = checkpoint.training.items()
    return {name.removeprefix(AVERAGE_PREFIX): tensor for name, tensor in named if name.startswith(AVERAGE_PREFIX)}

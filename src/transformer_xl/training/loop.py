"""One loop for all runs, whatever they learn: go on, learn, save, stop cleanly, and be scored in the end.

A `Run` is what `start` has settled. Runs differ by their `Objective` alone: pre-training on a text (`run.py`), or fine-tuning
on labelled texts (`finetune.py`). The functions below stand in the order in which a run calls them. All processes of a run
call all of them. Only the first process writes files and prints.
"""

import math
import shlex
import signal
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from transformer_xl.checkpoint.run_directory import RunDirectory, copies
from transformer_xl.checkpoint.store import Checkpoint, CheckpointStore
from transformer_xl.config.run import RunConfig
from transformer_xl.data.streams import EndlessStream
from transformer_xl.errors import CheckpointError, ToldElsewhereError, TrainingError, message_of
from transformer_xl.process import stop_signals
from transformer_xl.tokenizers.base import Tokenizer
from transformer_xl.training.display import Display
from transformer_xl.training.record import Record
from transformer_xl.training.trainer import StepResult, Trainer
from transformer_xl.world import World

Ending = TypeVar("Ending")


class StopError(Exception):
    """A signal, its argument, ends the final scoring."""


@dataclass(frozen=True)
class RunOutcome:
    """How a run ended, whatever it learned.

    Attributes:
        directory: of the run.
        finished: whether the budget or the patience is used up; False if a signal ended the run.
        step: steps so far.
        tokens: of training, read so far.
        seconds: of training steps so far.
        stopped_by: the signal that ended it; SIGPIPE: nobody reads standard error any more.
    """

    directory: Path
    finished: bool
    step: int
    tokens: int
    seconds: float
    stopped_by: signal.Signals | None


class Objective(ABC, Generic[Ending]):
    """What a run learns from and how it is scored. The methods stand in the order in which a run calls them."""

    command: ClassVar[str]  # begins and resumes such runs
    noun: ClassVar[str]  # what `recipe_name` is the name of
    scoring_command: ClassVar[str]  # scores a finished run, given its directory

    overrides: list[str]  # `section.key=value`
    base: str | None  # whose weights a new run begins with; None: of a run that goes on, or random ones
    tokenizer: Tokenizer  # known when the texts are read
    text: str  # a phrase that names what is learned from, likewise
    checksum: str  # of it, wherever it lies
    sizes: dict[str, int]  # tokens or texts of each split

    @property
    @abstractmethod
    def begins(self) -> bool:
        """Whether it says what a new run would be."""

    @abstractmethod
    def recipe_name(self) -> str | None:
        """Return the name that runs of its recipe or task have; None: it names none."""

    @abstractmethod
    def new_settings(self) -> RunConfig:
        """Return the settings of a new run."""

    @abstractmethod
    def changed(self, config: RunConfig) -> RunConfig:
        """Return the settings of a run that goes on with what shall change."""

    @abstractmethod
    def read(self, config: RunConfig, tokenizer: Tokenizer | None, *, fresh: bool) -> RunConfig:
        """Read what is learned from, and return the settings with those that depend on it.

        Args:
            config: the settings.
            tokenizer: of the run or its base; None: it is made from the text.
            fresh: the run is a new one.
        """

    @abstractmethod
    def stream(self, config: RunConfig, world: World) -> EndlessStream:
        """Return the batches that a process learns from."""

    @abstractmethod
    def contents(self, config: RunConfig) -> str:
        """Return how much is learned from, as a clause."""

    @abstractmethod
    def notes(self, config: RunConfig) -> Iterator[str]:
        """Yield what a person should know before the training."""

    @abstractmethod
    def validate(self, run: "Run[Ending]") -> list[tuple[float, float]]:
        """Score the weights and, if there is one, their average; note and say the scores.

        Returns:
            Of each a loss, and a number that decides between equal losses; empty: there is nothing to validate on.
        """

    @abstractmethod
    def conclude(self, run: "Run[Ending]", received: list[int]) -> Ending:
        """Score a finished run; one of the `received` signals ends that.

        Raises:
            StopError: one has.
        """

    @abstractmethod
    def outcome(self, run: "Run[Ending]", stopped_by: signal.Signals | None) -> Ending:
        """Return how a run ended that is not scored."""


@dataclass
class Interval:
    """Sums since the last line of the log. Checkpoints hold them, so a resumed run logs the same lines."""

    nats: float = 0.0  # this, tokens and scored leave out skipped steps
    tokens: int = 0
    scored: int = 0  # tokens in the sum of nats
    seconds: float = 0.0  # of all steps

    def add(self, result: StepResult, seconds: float) -> None:
        """Count a step."""
        self.seconds += seconds
        if not result.skipped:
            self.nats += result.nats
            self.tokens += result.tokens
            self.scored += result.scored

    @property
    def loss(self) -> float | None:
        """Nats per token; None if every step was skipped."""
        return self.nats / self.scored if self.scored else None


@dataclass(frozen=True)
class Best:
    """The best validation so far: its loss in nats per token, or of a task minus its main metric, and its step."""

    loss: float
    step: int
    average: bool = False  # whether it is the loss of the averaged weights
    tie_break: float = 0.0  # the lower one is better where losses are equal; of a task: nats or squared error

    @property
    def order(self) -> tuple[float, float]:
        """Sort key; lower is better."""
        return (math.inf if math.isnan(self.loss) else self.loss), self.tie_break


@dataclass
class Run(Generic[Ending]):
    """The parts of a run, and its counts."""

    objective: Objective[Ending]
    directory: RunDirectory
    config: RunConfig
    trainer: Trainer
    world: World
    display: Display
    record: Record | None  # None in processes other than the first
    checkpoint_bytes: int
    interval: Interval = field(default_factory=Interval)
    best: Best | None = None
    since_best: int = 0  # validations since the best one; only tasks with `task.patience` count them
    began: int = 0  # the step at which this process began

    @property
    def is_over(self) -> bool:
        """Whether the budget is used up, or the patience."""
        patience = self.config.task and self.config.task.patience
        return self.trainer.progress >= 1 or bool(patience and self.since_best >= patience)

    @property
    def store(self) -> CheckpointStore:
        """The run's checkpoints."""
        return self.directory.store(keep=self.config.train.keep_checkpoints)

    @property
    def quoted_path(self) -> str:
        """Its directory, quoted for a shell."""
        return shlex.quote(str(self.directory.path))

    @property
    def resume_command(self) -> str:
        """The command that trains a finished run longer: with twice each budget that is used up, or more where that is less."""
        patience = self.config.task and self.config.task.patience
        sets = [
            f" --set train.{name}={getattr(self.config.train, name) * 2 ** math.floor(math.log2(n) + 1)}"
            for name, n in self.trainer.used.items()
            if n >= 1
        ]
        if patience and self.since_best >= patience:
            sets.append(f" --set task.patience={2 * self.since_best}")
        return f"txl {self.objective.command} --resume --out {self.quoted_path}{''.join(sets)}"

    def note(self, kind: str, **values: Any) -> None:
        """Write an entry of the log."""
        trainer = self.trainer
        if self.record:
            self.record.write(kind, trainer.step, **values, tokens=trainer.tokens, seconds=round(trainer.seconds, 3))

    def stopped_by(self, received: list[int]) -> signal.Signals | None:
        """Return the signal that stops the run, in any process; all call this."""
        own = received[0] if received else signal.SIGPIPE if self.display.is_lost else None
        return next((signal.Signals(number) for number in self.world.exchange(own) if number is not None), None)

    def curve(self, end: str = "") -> Path | None:
        """Draw the loss curve, if there is something to draw; `end` says how the run failed."""
        return self.record.draw(self.config, end=end) if self.record else None

    def facts(self, stopped_by: signal.Signals | None) -> dict[str, Any]:
        """Return what every `RunOutcome` says."""
        trainer = self.trainer
        done = {"step": trainer.step, "tokens": trainer.tokens, "seconds": trainer.seconds}
        return {"directory": self.directory.path, "finished": self.is_over, **done, "stopped_by": stopped_by}


def conduct(run: Run[Ending]) -> Ending:
    """Train a run from where it stands, with everything saved that somebody may want to go on with, and score it."""
    objective, say = run.objective, run.display.say
    with stop_signals(once=run.world.alone) as received, run.display:
        try:
            number = learn(run, received)
            if number is None:
                return objective.conclude(run, received)
        except StopError as stop:
            (number,) = stop.args
            how = f"txl {objective.scoring_command} {run.quoted_path}"
            say(f"{number.name}: saved step {run.trainer.step:,}, which is not scored; score it with: {how}")
        except TrainingError as error:
            with suppress(CheckpointError, OSError):  # the other error matters more
                if picture := run.curve(str(error).partition(":")[0]):
                    say(f"loss curve: {picture}")
            raise
        return objective.outcome(run, number)


def restore(run: Run[Any]) -> None:
    """Go back to the newest undamaged checkpoint; drop later entries of the log and later checkpoints."""
    world = run.world
    checkpoint: Checkpoint | None = None
    with world.agreed():
        if world.first:
            run.store.clean()
            checkpoint = run.store.load_newest(on_damaged=run.display.warn) if run.store.steps() else None
    step = world.from_first(checkpoint.step if checkpoint else None)
    if step is None:
        if run.record:
            run.record.rewind(0)
        run.display.warn(f"no checkpoint in '{run.directory.path}' yet: starting from the beginning")
        return
    with world.agreed():
        checkpoint = checkpoint or run.store.load(step)
        _apply(run, checkpoint)
    with world.agreed():
        if run.record:
            _rewind(run, run.record, step)
    saved_by = checkpoint.state["world_size"]
    if saved_by != world.size:
        run.display.say(
            f"number of processes: {saved_by} until here, {world.size} from now on; the same text in the same order, "
            "other random numbers in dropout"
        )
    run.display.say(f"resumed at step {checkpoint.step:,}, {100 * min(run.trainer.progress, 1):.0f}% of the budget")


def _apply(run: Run[Any], checkpoint: Checkpoint) -> None:
    """Take the state of a checkpoint, if it is one of this run."""
    where = f"the run in '{run.directory.path}'"
    if not checkpoint.copies:
        raise CheckpointError(
            f"'{run.directory.path}' was trained by transformer_xl 0.2, which saved other states; go on with that version, "
            "or begin a new run with its weights (--from)"
        )
    try:
        saved = checkpoint.state["record"]
        if saved["training_text"] != run.objective.checksum:
            raise CheckpointError(
                f"{run.objective.text} is not the one that {where} has read so far; restore it, or start another run with "
                "another --out"
            )
        run.trainer.restore(checkpoint)
        run.interval, run.since_best = Interval(**saved["interval"]), saved["waiting"]
        best = Best(**saved["best"]) if saved["best"] else None
    except (ValueError, RuntimeError, LookupError, TypeError) as error:
        reason = str(error).strip().splitlines()[-1].partition(";")[0].strip()
        remedy = "restore it from a copy, or delete its directory to go on from the one before"
        raise CheckpointError(f"checkpoint {checkpoint.step} does not fit {where}: {reason}; {remedy}") from None
    run.best = best if best and best.step in run.store.steps() else None
    run.began = checkpoint.step


def _rewind(run: Run[Any], record: Record, step: int) -> None:
    """Drop entries of the log and checkpoints that are later than a step."""
    run.store.rewind(step, best=run.best.step if run.best else None)
    if not run.is_over:
        run.store.check_room(run.checkpoint_bytes, warn=run.display.warn)
    record.rewind(step)


def learn(run: Run[Any], received: list[int]) -> signal.Signals | None:
    """Train until the budget is used up or a signal is received, save the last step, and return the signal."""
    trainer, config = run.trainer, run.config.train
    saved_step = trainer.step if run.world.from_first(bool(run.store.steps())) else None
    stopping, told_of_graph, progress = False, False, trainer.progress
    unread: deque[tuple[StepResult, float]] = deque()
    while not run.is_over and not (stopping := run.world.any(received or run.display.is_lost)):
        before = trainer.seconds
        result = trainer.train_step()
        unread.append((result, trainer.seconds - before))
        progress_before, progress = progress, trainer.progress
        validates = _validates(trainer, progress_before, progress)
        intervals = (config.log_interval, config.checkpoint_interval)
        is_due = trainer.waits or validates or any(trainer.step % interval == 0 for interval in intervals)
        _count(run, unread, n_late=0 if is_due else 1)
        if last := run.is_over:
            _count(run, unread, n_late=0)
        if trainer.graph_problem and not told_of_graph:
            run.display.warn(f"steps are launched kernel by kernel, because a graph fails: {trainer.graph_problem}")
            told_of_graph = True
        if trainer.step % config.log_interval == 0 or last:
            _log(run, result, ends_interval=True)
        elif trainer.step % 10 == 0:
            _log(run, result, ends_interval=False)
        best = _validate(run) if validates or last else None
        if run.is_over and not last and run.interval.tokens:  # patience has ended it
            _log(run, result, ends_interval=True)
        if trainer.step % config.checkpoint_interval == 0 or best or run.is_over:
            saved_step = save(run, best=best, must=run.is_over) or saved_step
    number = run.stopped_by(received) if stopping else None
    _count(run, unread, n_late=0)
    if number is None:
        return None
    if saved_step != trainer.step:
        save(run, must=True)
    program = "txl" if run.world.alone else f"torchrun with {run.world.size} processes: -m transformer_xl"
    command = f"{program} {run.objective.command} --resume --out {run.quoted_path}"
    run.display.say(f"{number.name}: saved step {trainer.step:,}; go on with: {command}")
    return number


def _validates(trainer: Trainer, before: float, after: float) -> bool:
    """Say whether a step, which took a run from one share of its budget to another, is followed by a validation.

    Where time ends a run, nobody knows how many steps it has: until `eval_interval` is reached, each quarter has one.
    """
    step, interval = trainer.step, trainer.config.eval_interval
    by_share = step < interval and trainer.used.get("max_minutes") == after  # no other limit is nearer
    return step % interval == 0 or (by_share and math.floor(4 * after) > math.floor(4 * before))


def _count(run: Run[Any], unread: deque[tuple[StepResult, float]], *, n_late: int) -> None:
    """Settle all but the newest steps, which a device may still compute, and count them with their seconds."""
    trainer = run.trainer
    while len(unread) > n_late:
        (result, seconds), before = unread.popleft(), trainer.seconds
        trainer.settle(result)
        run.interval.add(result, seconds + trainer.seconds - before)
        if result.skipped:
            run.display.warn(f"step {result.step}: loss or gradient not finite, step skipped ({trainer.skipped} so far)")


def _log(run: Run[Any], result: StepResult, *, ends_interval: bool) -> None:
    """Show the progress. `ends_interval` also writes the interval to the log and begins a new one."""
    interval, trainer = run.interval, run.trainer
    speed = interval.tokens / max(interval.seconds, 1e-9)
    loss = interval.loss
    run.display.advance(
        step=trainer.step,
        progress=trainer.progress,
        loss=math.nan if loss is None else loss,
        tokens_per_second=speed,
        final=ends_interval,
    )
    if ends_interval:
        rate, skipped = run.config.optim.lr * result.rate, trainer.skipped
        figures = {"lr": rate, "grad_norm": result.grad_norm, "skipped": skipped, "tokens_per_second": round(speed, 1)}
        run.note("train", loss=loss, **figures)
        run.interval = Interval()


def _validate(run: Run[Any]) -> Best | None:
    """Validate the weights and their average, and return the better ones if nothing was better before."""
    losses = run.objective.validate(run)
    if not losses:
        return None
    step = run.trainer.step
    run.trainer.schedule.validated(losses[0][0])
    candidates = [Best(loss, step, average=i > 0, tie_break=tie_break) for i, (loss, tie_break) in enumerate(losses)]
    best = min(candidates, key=lambda each: each.order)
    is_best = best.order < (run.best.order if run.best else (math.inf,))
    run.since_best = 0 if is_best else run.since_best + 1
    return best if is_best else None


def save(run: Run[Any], *, best: Best | None = None, must: bool) -> int | None:
    """Save a checkpoint and return its step. A failure ends the run only if `must`, as for the last checkpoint."""
    trainer = run.trainer
    if trainer.bad_in_a_row and not must:  # the run may be about to fail, and a bad checkpoint would replace a good one
        return None
    newest_best = best or run.best
    state: dict[str, Any] = {
        "interval": asdict(run.interval),
        "best": asdict(newest_best) if newest_best else None,
        "training_text": run.objective.checksum,
        "waiting": run.since_best,
    }
    try:
        finite = trainer.finite
        with run.world.agreed():
            if not finite:
                raise TrainingError(
                    f"diverged: weights are not finite after step {trainer.step}, so they are not saved; the checkpoints "
                    "before are intact, resume with a lower optim.lr or optim.clip"
                )
        checkpoint = trainer.checkpoint(state)
        with run.world.agreed():
            if checkpoint and run.record:
                run.record.sync()
                own = replace(checkpoint, copies=copies(run.config, run.objective.tokenizer))
                run.store.save(own, best=best is not None)
    except (CheckpointError, TrainingError, ToldElsewhereError, OSError) as error:
        if must:
            raise
        run.display.warn(f"step {trainer.step} is not saved: {message_of(error)}; training goes on")
        return None
    run.best = newest_best
    return trainer.step

"""What all runs have in common, whatever they learn from: begin or go on, learn, save, and stop cleanly.

The functions below `conduct` stand in the order in which a run calls them. All processes of a run call all of them. Only the
first process writes files and prints.
"""

import math
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from typing import Any, TypeVar

import torch

from transformer_xl.checkpoint.run_directory import RunDirectory, copies
from transformer_xl.checkpoint.store import Checkpoint
from transformer_xl.config.run import RunConfig
from transformer_xl.errors import CheckpointError, ToldElsewhereError, TrainingError, lacks_memory, message_of, no_memory
from transformer_xl.kernels.device import Precision
from transformer_xl.model.base import SequenceModel
from transformer_xl.process import stop_signals
from transformer_xl.tokenizers.base import Tokenizer
from transformer_xl.training.display import Display
from transformer_xl.training.environment import computing_with, deterministic, last_threads, write_environment
from transformer_xl.training.feed import AnyStream
from transformer_xl.training.record import Record
from transformer_xl.training.run_base import Best, Interval, Run
from transformer_xl.training.trainer import StepResult, Trainer, checkpoint_bytes
from transformer_xl.world import World

AnyRun = TypeVar("AnyRun", bound=Run)
Ending = TypeVar("Ending")


class NoRoomError(TrainingError):
    """Memory ran out in a run with these settings."""

    def __init__(self, message: str, config: RunConfig) -> None:
        super().__init__(message)
        self.config = config


@contextmanager
def _room(config: RunConfig, directory: RunDirectory) -> Iterator[None]:
    """Turn a lack of memory into a `NoRoomError` with what to change; what was saved stays."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not lacks_memory(error):
            raise
        steps = directory.store().steps() if directory.holds_run else ()
        goes_on = f"; step {max(steps):,} is saved, and --resume goes on from it" if steps else ""
        config = directory.config() if directory.holds_run else config  # with the size of the vocabulary
        lanes = f"{config.train.batch_size // config.train.accumulate:,} lanes of {config.train.tgt_len:,} tokens at once"
        remedy = "raise train.accumulate, set train.checkpoint_layers=true, or lower train.batch_size or train.tgt_len"
        said = no_memory(error)
        remedy += ", or set train.graph=off" if " on GPU" in said else ""  # a graph keeps its memory between steps
        raise NoRoomError(f"{said} for {lanes}; {remedy}{goes_on}", config) from None


def conduct(
    directory: RunDirectory,
    config: RunConfig,
    *,
    set_up: Callable[[], AnyRun],
    end: Callable[[AnyRun, signal.Signals | None, list[int]], Ending],
    world: World,
    display: Display,
    resume: bool,
    goes_on: bool,
) -> Ending:
    """Train a run in its directory from where it stands, with everything saved that somebody may want to go on with.

    `set_up` makes its parts. `end` scores it, or not if a signal has ended it, gets the signals that arrive meanwhile, and
    returns what this does. `resume`: it was asked to go on; `goes_on`: there is something to go on with.
    """
    with _room(config, directory), ExitStack() as held:
        with world.agreed():
            if world.first:
                held.enter_context(directory.locked())
        held.enter_context(deterministic(config.train.deterministic))
        held.enter_context(computing_with(config.train.threads))
        if resume and not goes_on:
            display.say(f"no run in '{directory.path}' yet: starting '{config.name}' from the beginning")
        run = set_up()
        if run.record:
            held.callback(run.record.close)
        if goes_on:
            restore(run)
            _compare_threads(run, last_threads(directory.path))
        with world.agreed():
            if world.first:
                if goes_on and run.config != directory.config():  # the next --resume uses these settings
                    directory.save_config(run.config, run.tokenizer)
                write_environment(
                    directory.path,
                    seed=run.config.train.seed,
                    device=run.trainer.device,
                    step=run.trainer.step,
                )
        with stop_signals(once=world.alone) as received, run.display:
            try:
                ending = end(run, learn(run, received), received)
            except TrainingError as error:
                run.draw_failed(error)
                raise
        return ending


def open_files(
    directory: RunDirectory,
    config: RunConfig,
    tokenizer: Tokenizer,
    model: SequenceModel,
    stream: AnyStream,
    *,
    precision: Precision,
    device: Any,
    world: World,
    display: Display,
    loggers: Sequence[str] = (),
    fresh: bool,
) -> tuple[Trainer, Record | None, int]:
    """Make the trainer of a run and open its files; a fresh run's directory is written only now, when it can start.

    Returns:
        The trainer; the log, in the first process; the bytes of a checkpoint.
    """
    size = checkpoint_bytes(model, train=config.train, optim=config.optim)
    trainer = Trainer(model, stream, train=config.train, optim=config.optim, precision=precision, world=world, device=device)
    record = None
    with world.agreed():
        if world.first:
            if fresh:
                directory.store(keep=config.train.keep_checkpoints).check_room(size, warn=display.warn)
                directory.create(config, tokenizer)
            settings = config.model_dump(mode="json")
            record = Record(directory.path, loggers=loggers, settings=settings, warn=display.warn)
    return trainer, record, size


def restore(run: Run) -> None:
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
        if not checkpoint.copies:
            raise CheckpointError(
                f"'{run.directory.path}' was trained by transformer_xl 0.2, which saved other states; go on with that version, "
                "or begin a new run with its weights (--from)"
            )
        try:
            record = checkpoint.state["record"]
            is_same_text = record["training_text"] == run.training_sha256
            if is_same_text:
                run.trainer.restore(checkpoint)
            run.interval, run.waiting = Interval(**record["interval"]), record["waiting"]
            best = Best(**record["best"]) if record["best"] else None
        except (ValueError, RuntimeError, LookupError, TypeError) as error:
            reason = str(error).strip().splitlines()[-1].partition(";")[0].strip()
            remedy = "restore it from a copy, or delete its directory to go on from the one before"
            raise CheckpointError(
                f"checkpoint {step} does not fit the run in '{run.directory.path}': {reason}; {remedy}"
            ) from None
        if not is_same_text:
            raise CheckpointError(
                f"{run.text} is not the one that the run in '{run.directory.path}' has read so far; restore it, or start "
                "another run with another --out"
            )
        run.best = best if best and best.step in run.store.steps() else None
    final: dict[str, Any] | None = None
    with world.agreed():
        if run.record:
            run.store.rewind(step, best=run.best.step if run.best else None)
            if not run.is_over:
                run.store.check_room(run.checkpoint_bytes, warn=run.display.warn)
            is_finished = run.is_over and run.config.eval == run.directory.config().eval
            final = run.record.rewind(step, is_finished=is_finished)
    run.take_final(world.from_first(final))
    saved_by = checkpoint.state["world_size"]
    if saved_by != world.size:
        run.display.say(
            f"number of processes: {saved_by} until here, {world.size} from now on; the same text in the same order, "
            "other random numbers in dropout"
        )
    run.display.say(f"resumed at step {checkpoint.step:,}, {100 * min(run.trainer.progress, 1):.0f}% of the budget")


def _compare_threads(run: Run, before: int | None) -> None:
    """Say whether a resumed run goes on with another number of threads, which rounds sums otherwise; None: nobody knows."""
    now = torch.get_num_threads()
    if run.trainer.device.type == "cpu" and not run.is_over and before not in (None, now):
        run.display.say(f"threads: {before} until here, {now} from now on; --set train.threads={before} rounds as before")


def learn(run: Run, received: list[int]) -> signal.Signals | None:
    """Train until the budget is used up or a signal is received, save the last step, and return the signal."""
    trainer, config = run.trainer, run.config.train
    saved_step = trainer.step if run.world.from_first(bool(run.store.steps())) else None
    stopping, skipped, told_of_graph = False, trainer.skipped, False
    unread: list[tuple[StepResult, float]] = []
    while not run.is_over and not (stopping := run.world.any(received or run.display.is_lost)):
        before = trainer.seconds
        result = trainer.train_step()
        intervals = (config.log_interval, config.eval_interval, config.checkpoint_interval)
        is_due = run.is_over or any(trainer.step % interval == 0 for interval in intervals)
        if is_due:
            trainer.settle()
        last, seconds = run.is_over, trainer.seconds - before
        unread.append((result, seconds))
        while len(unread) > (0 if is_due or trainer.why_no_graph else 1):  # a graph may still compute the last one
            run.interval.add(*unread.pop(0))
        if trainer.skipped > skipped:
            run.display.warn(
                f"step {trainer.last_skipped}: loss or gradient not finite, step skipped ({trainer.skipped} so far)"
            )
        skipped = trainer.skipped
        if trainer.graph_problem and not told_of_graph:
            run.display.warn(f"steps are launched kernel by kernel, because a graph fails: {trainer.graph_problem}")
            told_of_graph = True
        if trainer.step % config.log_interval == 0 or last:
            _log(run, result, final=True)
        elif trainer.step % 10 == 0:
            _log(run, result, final=False)
        best = run.validate() if trainer.step % config.eval_interval == 0 or last else None
        if run.is_over and not last and run.interval.tokens:  # patience has ended it
            _log(run, result, final=True)
        if trainer.step % config.checkpoint_interval == 0 or best or run.is_over:
            saved_step = save(run, best=best, must=run.is_over) or saved_step
    number = run.stopped_by(received) if stopping else None
    trainer.settle()
    for each in unread:
        run.interval.add(*each)
    if number is None:
        return None
    if saved_step != trainer.step:
        save(run, must=True)
    command = "txl" if run.world.alone else f"torchrun with {run.world.size} processes: -m transformer_xl"
    run.display.say(
        f"{number.name}: saved step {trainer.step:,}; go on with: {command} {run.command} --resume --out {run.where}"
    )
    return number


def _log(run: Run, result: StepResult, *, final: bool) -> None:
    """Show the progress. `final` also writes the interval to the log and begins a new one."""
    interval, trainer = run.interval, run.trainer
    speed = interval.tokens / max(interval.seconds, 1e-9)
    loss = interval.loss
    run.display.advance(
        step=trainer.step,
        progress=trainer.progress,
        loss=math.nan if loss is None else loss,
        tokens_per_second=speed,
        final=final,
    )
    if final:
        run.note(
            "train",
            loss=loss,
            lr=run.config.optim.lr * result.rate,
            grad_norm=result.grad_norm,
            tokens=trainer.tokens,
            skipped=trainer.skipped,
            tokens_per_second=round(speed, 1),
            seconds=round(trainer.seconds, 3),
        )
        run.interval = Interval()


def save(run: Run, *, best: Best | None = None, must: bool) -> int | None:
    """Save a checkpoint and return its step. A failure ends the run only if `must`, as for the last checkpoint."""
    trainer = run.trainer
    if trainer.bad_in_a_row and not must:  # the run may be about to fail, and a bad checkpoint would replace a good one
        return None
    newest_best = best or run.best
    record: dict[str, Any] = {
        "interval": asdict(run.interval),
        "best": asdict(newest_best) if newest_best else None,
        "training_text": run.training_sha256,
        "waiting": run.waiting,
    }
    try:
        finite = trainer.finite
        with run.world.agreed():
            if not finite:
                raise TrainingError(
                    f"diverged: weights are not finite after step {trainer.step}, so they are not saved; the checkpoints "
                    "before are intact, resume with a lower optim.lr or optim.clip"
                )
        checkpoint = trainer.checkpoint(record)
        with run.world.agreed():
            if checkpoint and run.record:
                run.record.sync()
                own = replace(checkpoint, copies=copies(run.config, run.tokenizer))
                run.store.save(own, best=best is not None)
    except (CheckpointError, TrainingError, ToldElsewhereError, OSError) as error:
        if must:
            raise
        run.display.warn(f"step {trainer.step} is not saved: {message_of(error)}; training goes on")
        return None
    run.best = newest_best
    return trainer.step

"""A training run from start to end: start or resume, learn, validate, save, stop cleanly.

The functions below `train` stand in the order in which a run calls them. All processes of a run call all of them. Only the
first process writes files and prints.
"""

import math
import signal
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import numpy as np
from rich.console import Console

from transformer_xl.checkpoint.run_directory import RunDirectory, check_tokenizer
from transformer_xl.checkpoint.store import Checkpoint
from transformer_xl.config import RunConfig, merge
from transformer_xl.data.prepare import PreparedCorpus, TokenSplit, prepare
from transformer_xl.data.tokenizers import Tokenizer
from transformer_xl.errors import CheckpointError, ToldElsewhereError, TrainingError
from transformer_xl.generation.generate import generate
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.xlnet import XLNet
from transformer_xl.process import restarts, stop_signals
from transformer_xl.reading.targets import filled_in, scored_stream
from transformer_xl.training.asked import asked_directory, settle
from transformer_xl.training.display import Display
from transformer_xl.training.environment import (
    begun_by_this_launch,
    computing_with,
    deterministic,
    last_threads,
    write_environment,
)
from transformer_xl.training.parts import Best, Interval, Outcome, Run
from transformer_xl.training.record import Record
from transformer_xl.training.saved import SavedRecord
from transformer_xl.training.scoring import conclude, extent, recorded, score_split
from transformer_xl.training.speed import Pace, check_threads, choose_threads
from transformer_xl.training.starting import begin, what_all_share
from transformer_xl.training.trainer import StepResult, Trainer, checkpoint_bytes
from transformer_xl.world import World, joined

_MOST_GAPS = 8  # in the sample of a validation


def train(
    recipe: str | RunConfig | None = None,
    *,
    out: str | Path | None = None,
    overrides: Sequence[str] = (),
    corpus: str | None = None,
    resume: bool = False,
    loggers: Sequence[str] = (),
    display: Display | None = None,
) -> Outcome:
    """Train a model, or go on training one.

    If `torchrun` starts several processes, they train it together. Only the first one writes files and prints.

    Args:
        recipe: name or TOML file, or the settings themselves; None: `quickstart`, or the run's own recipe when it is resumed.
        out: directory of the run; None: `runs/<recipe>`.
        overrides: `section.key=value`, which replace settings of the recipe.
        corpus: name, file, directory or glob; or a directory that holds the recipe's named corpus.
        resume: go on with the run in `out`, or start it if there is none and `recipe` or `corpus` says what it should be.
        loggers: `tensorboard`, `wandb` or `trackio`, besides `metrics.jsonl`; none: TensorBoard if it is installed.
        display: shows the progress; None: on stderr.

    Returns:
        How it ended.

    Raises:
        TxlError: any of the package's errors, each one line.
    """
    with joined() as world, ExitStack() as held:
        display = (display or Display()) if world.first else Display(quiet=True, console=Console(quiet=True))
        with world.agreed():
            directory = asked_directory(recipe, out, overrides)
        # when torchrun restarts processes, it repeats the command, although the directory may hold another run
        resume = resume or (restarts() > 0 and begun_by_this_launch(directory.path))
        goes_on = world.from_first(resume and directory.holds_run)
        with world.agreed():
            must_exist = resume and out is not None and recipe is None and corpus is None
            config = settle(
                directory, recipe, overrides, corpus, goes_on=goes_on, must_exist=must_exist, must_be_free=world.first
            )
            tokenizer: Tokenizer | None = None
            if goes_on:
                tokenizer = directory.tokenizer(config.model.vocab_size)
                check_tokenizer(tokenizer, config.model.vocab_size, str(directory.path))
            text = prepare(config.data, tokenizer or config.tokenizer)
        world.check_same(**what_all_share(config, text))
        with world.agreed():
            lock = held.enter_context(directory.locked()) if world.first else None
        held.enter_context(deterministic(config.train.deterministic))
        held.enter_context(computing_with(config.train.threads))
        if resume and not goes_on:
            display.say(f"no run in '{directory.path}' yet: starting '{config.name}' from the beginning")
        run = _set_up(directory, config, text, display, loggers, world, fresh=not goes_on)
        run.held, run.is_locked = held, lock or run.is_locked
        if run.record:
            held.callback(run.record.close)
        if goes_on:
            _restore(run)
            check_threads(run.trainer, last_threads(directory.path), say=display.say, warn=display.warn)
        with world.agreed():
            if world.first:
                if goes_on and run.config != directory.config():  # the next --resume uses these settings
                    directory.save_config(run.config, text.tokenizer)
                write_environment(
                    directory.path,
                    seed=run.config.train.seed,
                    device=run.trainer.device,
                    step=run.trainer.step,
                    warn=display.warn,
                )
        with stop_signals(once=world.alone) as received, run.display:
            try:
                stopped_by = _learn(run, received)
                outcome = run.outcome(stopped_by=stopped_by) if stopped_by else conclude(run, received)
            except TrainingError as error:
                run.draw_failed(error)
                raise
            if not world.from_first(world.first and run.trainer.step in run.store.steps()):  # somebody has deleted it meanwhile
                _save(run, must=True)
        return outcome


def _set_up(
    directory: RunDirectory,
    config: RunConfig,
    corpus: PreparedCorpus,
    display: Display,
    loggers: Sequence[str],
    world: World,
    *,
    fresh: bool,
) -> Run:
    """Build the model and its trainer, and open the run's files."""
    start = begin(config, corpus, world, warn=None if fresh else display.warn)
    config, device = start.config, start.device
    size = checkpoint_bytes(start.model, train=config.train, optim=config.optim)
    trainer = Trainer(
        start.model,
        start.stream,
        train=config.train,
        optim=config.optim,
        precision=start.precision,
        world=world,
        device=device,
    )
    if fresh and (threads := choose_threads(trainer, warn=display.warn)):
        config = RunConfig(**merge(config.model_dump(), {"train": {"threads": threads}}))
    record = None
    with world.agreed():
        if world.first:
            if fresh:  # nothing was written until now, when it is certain that the run can start
                directory.store(keep=config.train.keep_checkpoints).check_room(size, warn=display.warn)
                directory.create(config, corpus.tokenizer)
            settings = config.model_dump(mode="json")
            record = Record(directory.path, loggers=loggers, settings=settings, warn=display.warn)
    n_parameters = sum(p.numel() for p in start.model.parameters())
    display.say(
        f"{config.name}: {n_parameters:,} parameters, vocabulary {corpus.tokenizer.vocab_size:,} ({corpus.tokenizer.kind}), "
        f"{len(corpus.splits['train'].ids):,} training tokens of {config.data.corpus}"
    )
    if start.comparison:
        display.say(str(start.comparison))
    display.say(f"{start.precision} on {device}: {start.why_precision}; run directory {directory.path}")
    if not world.alone:
        what = "a part of the model each" if config.train.parallel == "fsdp" else "the whole model each"
        display.say(f"{world.size} processes, {what}, {config.train.batch_size // world.size} of the lanes each")
    return Run(directory, config, corpus, trainer, world, display, record, size)


def _restore(run: Run) -> None:
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
        try:
            record = SavedRecord(**run.trainer.restore(checkpoint))
        except (ValueError, RuntimeError, LookupError, TypeError) as error:
            reason = str(error).strip().splitlines()[-1].partition(";")[0].strip()
            remedy = "restore it from a copy, or delete its directory to go on from the one before"
            raise CheckpointError(
                f"checkpoint {step} does not fit the run in '{run.directory.path}': {reason}; {remedy}"
            ) from None
        if record.training_text != run.corpus.training_sha256:
            raise CheckpointError(
                f"the text of '{run.config.data.corpus}' is not the one that the run in '{run.directory.path}' has read so "
                "far; restore it, or start another run with another --out"
            )
        run.interval = Interval(**record.interval.model_dump())
        best = Best(**record.best.model_dump()) if record.best else None
        run.best = best if best and best.step in run.store.steps() else None
    final: dict[str, Any] | None = None
    with world.agreed():
        if run.record:
            run.store.rewind(step, best=run.best.step if run.best else None)
            if run.trainer.progress < 1:
                run.store.check_room(run.checkpoint_bytes, warn=run.display.warn)
            is_finished = run.trainer.progress >= 1 and run.config.eval == run.directory.config().eval
            final = run.record.rewind(step, n_entry=record.entries, is_finished=is_finished)
    run.recorded = recorded(world.from_first(final))
    saved_by = checkpoint.state["world_size"]
    if saved_by != world.size:
        run.display.say(
            f"number of processes: {saved_by} until here, {world.size} from now on; the same text in the same order, "
            "other random numbers in dropout"
        )
    run.display.say(f"resumed at step {checkpoint.step:,}, {100 * min(run.trainer.progress, 1):.0f}% of the budget")


def _learn(run: Run, received: list[int]) -> signal.Signals | None:
    """Train until the budget is used up or a signal is received, save the last step, and return the signal."""
    trainer, config = run.trainer, run.config.train
    saved_step = trainer.step if run.world.from_first(bool(run.store.steps())) else None
    stopping, pace = False, Pace()
    while trainer.progress < 1 and not (stopping := run.world.any(received or run.display.is_lost)):
        before, length = trainer.seconds, trainer.lengths.due(trainer.progress)
        result = trainer.train_step()
        run.interval.add(result, trainer.seconds - before)
        if told := pace.add(result.tokens, trainer.seconds - before, length=length):
            run.display.warn(told)
        if result.skipped:
            run.display.warn(f"step {trainer.step}: loss or gradient not finite, step skipped ({trainer.skipped} so far)")
        last = trainer.progress >= 1
        if trainer.step % config.log_interval == 0 or last:
            _log(run, result, final=True)
        elif trainer.step % 10 == 0:
            _log(run, result, final=False)
        best = _validate(run) if trainer.step % config.eval_interval == 0 or last else None
        if trainer.step % config.checkpoint_interval == 0 or best or last:
            saved_step = _save(run, best=best, must=last) or saved_step
    number = run.stopped_by(received) if stopping else None
    if number is None:
        return None
    if saved_step != trainer.step:
        _save(run, must=True)
    command = "txl" if run.world.alone else f"torchrun with {run.world.size} processes: -m transformer_xl"
    run.display.say(f"{number.name}: saved step {trainer.step:,}; go on with: {command} train --resume --out {run.where}")
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


def _validate(run: Run) -> Best | None:
    """Score the validation split and write a sample; return the loss if it is the best so far."""
    split = run.corpus.splits["valid"]
    trainer, config = run.trainer, run.config
    if len(split.ids) < 2:
        return None
    run.validated = score_split(run, split, "validation", limit=config.eval.max_tokens)
    score, averaged = run.validated.plain, run.validated.average
    trainer.schedule.validated(score.loss)
    run.note(
        "valid",
        loss=score.loss,
        ppl=score.ppl,
        bpc=score.bpc if config.model.predicts == "token" else None,
        nats=score.nats,
        tokens=trainer.tokens,
        seconds=round(trainer.seconds, 3),
        **extent(run, score),
        **({"average_loss": averaged.loss} if averaged else {}),
    )
    of_average = f"; averaged weights {averaged.loss:.4f}" if averaged else ""
    predicts = config.model.predicts
    per_character = f", {score.bpc:.3f} bits per character" if predicts == "token" else ""
    run.display.say(f"step {trainer.step:,}: validation {score.loss:.4f} nats per {predicts}{per_character}{of_average}")
    if config.train.sample_tokens and math.isfinite(score.loss) and run.world.first and not trainer.model.is_sharded:
        text = _sample(run, split)
        run.note("sample", text=text)
        run.display.show(text, title=f"{'a sample' if predicts == 'token' else 'gaps filled in'} at step {trainer.step:,}")
    best = Best(score.loss, trainer.step)
    if averaged and (averaged.loss < score.loss or math.isnan(score.loss)):
        best = Best(averaged.loss, trainer.step, average=True)
    return best if best.loss < (run.best.loss if run.best else math.inf) else None


def _sample(run: Run, split: TokenSplit) -> str:
    """Continue the first tokens of the validation split, with separate random numbers; or fill the gaps of its first row."""
    model, tokenizer = run.trainer.model, run.corpus.tokenizer
    if isinstance(model, XLNet):
        segment = next(scored_stream(run.config, split.ids, tokenizer, document_starts=split.document_starts))
        return filled_in(model, segment, tokenizer, precision=run.trainer.precision, most=_MOST_GAPS)
    written = generate(
        cast("LanguageModel", model),
        np.asarray(split.ids[:32], dtype=np.int64).tolist(),
        max_new_tokens=run.config.train.sample_tokens,
        temperature=0.8,
        seed=run.trainer.step,
        precision=run.trainer.precision,
    )
    return tokenizer.decode(list(written))


def _save(run: Run, *, best: Best | None = None, must: bool) -> int | None:
    """Save a checkpoint and return its step. A failure ends the run only if `must`, as for the last checkpoint."""
    trainer = run.trainer
    if trainer.bad_in_a_row and not must:  # the run may be about to fail, and a bad checkpoint would replace a good one
        return None
    newest_best = best or run.best
    record: dict[str, Any] = {
        "interval": asdict(run.interval),
        "best": asdict(newest_best) if newest_best else None,
        "training_text": run.corpus.training_sha256,
        "entries": run.record.n_entry if run.record else None,
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
                run.mend()
                run.record.sync()
                run.store.save(checkpoint, best=best is not None)
    except (CheckpointError, TrainingError, ToldElsewhereError) as error:
        if must:
            raise
        run.display.warn(f"{error}; training goes on")
        return None
    run.best = newest_best
    return trainer.step

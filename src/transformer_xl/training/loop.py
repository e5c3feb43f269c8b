"""Train a run from its configuration to its last checkpoint: prepare, learn, validate, save, stop cleanly, resume exactly."""

import math
import signal
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from transformer_xl.checkpoint.run_directory import RunDirectory, check_tokenizer
from transformer_xl.config import RunConfig
from transformer_xl.data.prepare import prepare
from transformer_xl.data.tokenizers import Tokenizer
from transformer_xl.ranks import restarts
from transformer_xl.reading.evaluation import Score
from transformer_xl.training.determinism import deterministic
from transformer_xl.training.display import Display, clock
from transformer_xl.training.environment import begun_by_this_launch
from transformer_xl.training.run import Interval, Run
from transformer_xl.training.run_settings import asked_settings, resumed_settings, what_all_share, with_corpus
from transformer_xl.training.saving import save
from transformer_xl.training.silent import silent_display
from transformer_xl.training.starting import set_up
from transformer_xl.training.stopping import stop_signal
from transformer_xl.training.trainer import StepResult
from transformer_xl.training.validation import score_of_average, score_split, validate
from transformer_xl.world import joined


@dataclass(frozen=True)
class Outcome:
    """How a call of `train` ended.

    Attributes:
        directory: of the run.
        finished: the budget is used up; False if a signal ended it.
        step: steps done.
        score: of the validation split at the end, with memory; None if there is no such split or the run did not finish.
        score_without_memory: the same weights on the same text without memory; None if they have none.
        score_of_average: the averaged weights on the same text, with memory; None without `train.average`.
        picture: the loss curve.
    """

    directory: Path
    finished: bool
    step: int
    score: Score | None = None
    score_without_memory: Score | None = None
    picture: Path | None = None
    score_of_average: Score | None = None


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

    Started by `torchrun`, all processes train it together. The first one writes and speaks for all.

    Args:
        recipe: name or TOML file, or the settings themselves; None: `quickstart`, or when resuming whatever the run is.
        out: directory of the run; None: `runs/<recipe>`.
        overrides: `section.key=value`, laid over the recipe.
        corpus: name, file, directory or glob; a directory that holds the recipe's named corpus serves as its source.
        resume: go on with the run in `out`, or start it if there is none.
        loggers: `tensorboard`, `wandb` or `trackio`, besides `metrics.jsonl`; none: TensorBoard if it is installed.
        display: where progress is shown; None: stderr.

    Returns:
        How it ended.

    Raises:
        TxlError: any of the package's errors, each one line.
    """
    with joined() as world, ExitStack() as held:
        with world.agreed():
            if out is None:
                out = Path("runs") / asked_settings(recipe, overrides).name
            directory = RunDirectory(out)
        # torchrun repeats the whole command when it starts anew what failed, be it that the directory holds another run
        resume = resume or (restarts() > 0 and begun_by_this_launch(directory.path))
        goes_on = world.from_first(resume and directory.holds_run)
        with world.agreed():
            tokenizer: Tokenizer | None = None
            if goes_on:
                config = resumed_settings(directory, recipe, overrides, corpus)
                tokenizer = directory.tokenizer()
                check_tokenizer(tokenizer, config.model.vocab_size, str(directory.path))
            else:
                if world.first:
                    directory.check_free()
                config = asked_settings(recipe, overrides)
            config = with_corpus(config, corpus)
            prepared = prepare(config.data, tokenizer or config.tokenizer)
        world.check_same(**what_all_share(config, prepared))
        with world.agreed():
            if world.first:
                held.enter_context(directory.locked())
        held.enter_context(deterministic(config.train.deterministic))
        shown = display or Display()
        if resume and not goes_on and world.first:
            shown.say(f"no run in '{directory.path}' yet: starting '{config.name}' from the beginning")
        run = set_up(directory, config, prepared, shown if world.first else silent_display(), loggers, world, fresh=not goes_on)
        held.callback(run.record.close)
        with stop_signal(once=world.alone) as stopped:
            _learn(run, stopped)
        if run.trainer.progress < 1:
            return Outcome(run.directory.path, False, run.trainer.step, picture=run.record.draw())
        return _conclude(run)


def _learn(run: Run, stopped: list[int]) -> None:
    """Train until the budget is used up or a signal arrives; either way, the last step is saved when this returns."""
    trainer, config = run.trainer, run.config.train
    saved_step = trainer.step if run.world.from_first(bool(run.store.steps())) else None
    stopping = False
    with run.display:
        while trainer.progress < 1 and not (stopping := run.world.any(stopped)):
            before = trainer.seconds
            result = trainer.train_step()
            run.interval.add(result, trainer.seconds - before)
            if result.skipped:
                run.display.warn(f"step {trainer.step}: loss or gradient not finite, step skipped ({trainer.skipped} so far)")
            last = trainer.progress >= 1
            if trainer.step % config.log_interval == 0 or last:
                _log(run, result, final=True)
            elif trainer.step % 10 == 0:
                _log(run, result, final=False)
            best = validate(run) if trainer.step % config.eval_interval == 0 or last else None
            if trainer.step % config.checkpoint_interval == 0 or best or last:
                saved_step = save(run, best=best, must=last) or saved_step
        if stopping and saved_step != trainer.step:
            save(run, must=True)
    if stopping:
        name = signal.Signals(stopped[0]).name if stopped else "another process was stopped"
        command = "txl" if run.world.alone else f"torchrun with {run.world.size} processes: -m transformer_xl"
        run.display.say(f"{name}: saved step {trainer.step:,}; go on with: {command} train --resume --out {run.directory.path}")


def _log(run: Run, result: StepResult, *, final: bool) -> None:
    """Show progress; `final` also closes the interval and writes it down."""
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
        run.record.write(
            "train",
            trainer.step,
            loss=loss,
            lr=run.config.optim.lr * result.rate,
            grad_norm=result.grad_norm,
            tokens=trainer.tokens,
            skipped=trainer.skipped,
            tokens_per_second=round(speed, 1),
            seconds=round(trainer.seconds, 3),
        )
        run.interval = Interval()


def _conclude(run: Run) -> Outcome:
    """Score the finished model on the whole validation split, with and without its memory, and say what that means."""
    split = run.corpus.splits["valid"]
    trainer, say = run.trainer, run.display.say
    say(f"finished: {trainer.step:,} steps, {trainer.tokens:,} tokens in {clock(trainer.seconds)} of training")
    if len(split.ids) < 2:
        return Outcome(run.directory.path, True, trainer.step, picture=run.record.draw())
    remembers = run.config.eval_mem_len > 0
    how = ", with memory and without" if remembers else ""
    say(f"scoring all {len(split.ids) - 1:,} tokens of the validation split{how}")
    score = score_split(run, split, limit=None)
    without = score_split(run, split, remembers=False, limit=None) if remembers else None
    averaged = score_of_average(run, split, limit=None)
    more = {"loss_without_memory": without.loss} if without else {}
    more |= {"average_loss": averaged.loss} if averaged else {}
    more |= {"tokens": trainer.tokens, "seconds": round(trainer.seconds, 3)}
    run.record.write("final", trainer.step, loss=score.loss, bpc=score.bpc, **more)
    found = f"validation, {score.tokens:,} tokens: {score.bpc:.3f} bits per character ({score.loss:.4f} nats per token)"
    if without:
        found += (
            f"; with its memory taken away {without.bpc:.3f}: memory is worth {without.bpc - score.bpc:.3f} bits per character"
        )
    say(found)
    if averaged:
        say(f"averaged weights: {averaged.bpc:.3f} bits per character ({averaged.loss:.4f} nats per token)")
    return Outcome(run.directory.path, True, trainer.step, score, without, run.record.draw(), averaged)

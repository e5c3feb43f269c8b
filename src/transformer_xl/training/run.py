"""A training run from start to end: start or resume, learn, validate, save, stop cleanly.

The functions below `train` stand in the order in which a run calls them. All processes of a run call all of them. Only the
first process writes files and prints.
"""

import math
import shlex
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from rich.console import Console

from transformer_xl.checkpoint.run_directory import RunDirectory, check_tokenizer
from transformer_xl.checkpoint.store import Checkpoint, CheckpointStore
from transformer_xl.config import RunConfig
from transformer_xl.console import clock
from transformer_xl.data.prepare import PreparedCorpus, TokenSplit, prepare
from transformer_xl.data.tokenizers import Tokenizer
from transformer_xl.errors import CheckpointError, ConfigError, ToldElsewhereError, TrainingError
from transformer_xl.generation.generate import generate
from transformer_xl.opening import beginning, not_scored
from transformer_xl.process import restarts
from transformer_xl.reading.evaluation import Reading, Score, evaluate
from transformer_xl.training.display import Display
from transformer_xl.training.environment import begun_by_this_launch, deterministic, write_environment
from transformer_xl.training.record import Record
from transformer_xl.training.starting import asked_settings, begin, resumed_settings, what_all_share
from transformer_xl.training.trainer import StepResult, Trainer, checkpoint_bytes
from transformer_xl.world import World, joined

_SCORING_SECONDS, _SCORING_SHARE = 120.0, 0.1  # the whole split is scored at the end in this time, or share of that of training


@dataclass(frozen=True)
class Outcome:
    """How a call of `train` ended."""

    directory: Path
    finished: bool  # whether the budget is used up; False if a signal ended the run
    step: int  # steps so far
    tokens: int  # of training, read so far
    seconds: float  # of training steps so far
    score: Score | None = None  # validation, with memory; None without such a split, and if the run did not finish
    score_without_memory: Score | None = None  # None if the model has no memory
    picture: Path | None = None  # the loss curve
    score_of_average: Score | None = None  # averaged weights, with memory; None without `train.average`
    stopped_by: signal.Signals | None = None  # the signal that ended it; SIGPIPE: nobody reads standard error any more


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
    """The best validation so far: its loss in nats per token, and its step."""

    loss: float
    step: int
    average: bool = False  # whether it is the loss of the averaged weights


@dataclass(frozen=True)
class Scores:
    """How well a model predicts the validation split, or its beginning."""

    plain: Score  # with memory
    average: Score | None = None  # of averaged weights, with memory
    without_memory: Score | None = None


class _StopError(Exception):
    """A signal, its argument, ends the final scoring."""


@dataclass
class Run:
    """The parts of a run, and its counts."""

    directory: RunDirectory
    config: RunConfig
    corpus: PreparedCorpus
    trainer: Trainer
    world: World
    display: Display
    record: Record | None  # None in processes other than the first
    checkpoint_bytes: int
    interval: Interval = field(default_factory=Interval)
    best: Best | None = None
    validated: Scores | None = None  # by the last validation of this process
    recorded: Scores | None = None  # by the process that finished the run
    held: ExitStack = field(default_factory=ExitStack)  # until the run ends, such as the lock of its directory
    is_locked: Callable[[], bool] = lambda: True  # whether that lock is still there

    @property
    def store(self) -> CheckpointStore:
        """The run's checkpoints."""
        return self.directory.store(keep=self.config.train.keep_checkpoints)

    @property
    def where(self) -> str:
        """Its directory, quoted for a shell."""
        return shlex.quote(str(self.directory.path))

    def mend(self) -> None:
        """Write those files of the run's directory again that somebody has deleted; a warning names them.

        Raises:
            CheckpointError: they cannot be written, or the directory belongs to another run by now.
        """
        if not self.is_locked():
            self.is_locked = self.held.enter_context(self.directory.locked())
            if self.directory.holds_run and self.directory.config() != self.config:
                raise CheckpointError(
                    f"'{self.directory.path}' was deleted and holds another run now, so this one cannot be saved"
                )
        if missing := self.directory.write_missing(self.config, self.corpus.tokenizer):
            names = ", ".join(missing)
            self.display.warn(f"'{self.directory.path}' has lost {names} while it trained; written again")

    def note(self, kind: str, **values: Any) -> None:
        """Write an entry of the log."""
        if self.record:
            self.mend()
            self.record.write(kind, self.trainer.step, **values)

    def stopped_by(self, received: list[int]) -> signal.Signals | None:
        """Return the signal that stops the run, in any process; all call this."""
        own = received[0] if received else signal.SIGPIPE if self.display.is_lost else None
        return next((signal.Signals(number) for number in self.world.exchange(own) if number is not None), None)

    def outcome(self, scores: Scores | None = None, *, stopped_by: signal.Signals | None = None) -> Outcome:
        """Draw the loss curve, and return how the run ended."""
        picture = self.record.draw() if self.record else None
        trainer = self.trainer
        return Outcome(
            self.directory.path,
            trainer.progress >= 1,
            trainer.step,
            trainer.tokens,
            trainer.seconds,
            scores and scores.plain,
            scores and scores.without_memory,
            picture,
            scores and scores.average,
            stopped_by,
        )


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
            directory = RunDirectory(Path("runs") / asked_settings(recipe, overrides).name if out is None else out)
        # when torchrun restarts processes, it repeats the command, although the directory may hold another run
        resume = resume or (restarts() > 0 and begun_by_this_launch(directory.path))
        goes_on = world.from_first(resume and directory.holds_run)
        with world.agreed():
            tokenizer: Tokenizer | None = None
            if goes_on:
                config = resumed_settings(directory, recipe, overrides, corpus)
                tokenizer = directory.tokenizer(config.model.vocab_size)
                check_tokenizer(tokenizer, config.model.vocab_size, str(directory.path))
            else:
                if resume and out is not None and recipe is None and corpus is None:
                    directory.config()  # there is none, so the name is misspelled
                if world.first:
                    directory.check_free()
                config = asked_settings(recipe, overrides, corpus)
            text = prepare(config.data, tokenizer or config.tokenizer)
        world.check_same(**what_all_share(config, text))
        with world.agreed():
            lock = held.enter_context(directory.locked()) if world.first else None
        held.enter_context(deterministic(config.train.deterministic))
        if resume and not goes_on:
            display.say(f"no run in '{directory.path}' yet: starting '{config.name}' from the beginning")
        run = _set_up(directory, config, text, display, loggers, world, fresh=not goes_on)
        run.held, run.is_locked = held, lock or run.is_locked
        if run.record:
            held.callback(run.record.close)
        if goes_on:
            _restore(run)
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
        with _stop_signal(once=world.alone) as received, run.display:
            stopped_by = _learn(run, received)
            outcome = run.outcome(stopped_by=stopped_by) if stopped_by else _conclude(run, received)
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
            record = run.trainer.restore(checkpoint)
        except (ConfigError, RuntimeError, KeyError) as error:
            reason = str(error).strip().splitlines()[-1].strip()
            raise CheckpointError(f"checkpoint {step} does not fit the run in '{run.directory.path}': {reason}") from None
        if record["training_text"] != run.corpus.training_sha256:
            raise CheckpointError(
                f"the text of '{run.config.data.corpus}' is not the one that the run in '{run.directory.path}' has read so "
                "far; restore it, or start another run with another --out"
            )
        run.interval = Interval(**record["interval"])
        best = Best(**record["best"]) if record["best"] else None
        run.best = best if best and best.step in run.store.steps() else None
    final: dict[str, Any] | None = None
    with world.agreed():
        if run.record:
            run.store.rewind(step, best=run.best.step if run.best else None)
            if run.trainer.progress < 1:
                run.store.check_room(run.checkpoint_bytes, warn=run.display.warn)
            is_finished = run.trainer.progress >= 1 and run.config.eval == run.directory.config().eval
            final = run.record.rewind(step, n_entry=record.get("entries"), is_finished=is_finished)
    run.recorded = _recorded(world.from_first(final))
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
    stopping = False
    while trainer.progress < 1 and not (stopping := run.world.any(received or run.display.is_lost)):
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
    run.validated = _scores(run, split, "validation", limit=config.eval.max_tokens)
    score, averaged = run.validated.plain, run.validated.average
    trainer.schedule.validated(score.loss)
    run.note(
        "valid",
        loss=score.loss,
        ppl=score.ppl,
        bpc=score.bpc,
        nats=score.nats,
        tokens=trainer.tokens,
        seconds=round(trainer.seconds, 3),
        **({"average_loss": averaged.loss} if averaged else {}),
    )
    of_average = f"; averaged weights {averaged.loss:.4f}" if averaged else ""
    run.display.say(
        f"step {trainer.step:,}: validation {score.loss:.4f} nats per token, {score.bpc:.3f} bits per character{of_average}"
    )
    if config.train.sample_tokens and math.isfinite(score.loss) and run.world.first and not trainer.model.is_sharded:
        text = _sample(run, split)
        run.note("sample", text=text)
        run.display.show(text, title=f"a sample at step {trainer.step:,}")
    best = Best(score.loss, trainer.step)
    if averaged and (averaged.loss < score.loss or math.isnan(score.loss)):
        best = Best(averaged.loss, trainer.step, average=True)
    return best if best.loss < (run.best.loss if run.best else math.inf) else None


def _score(
    run: Run, split: TokenSplit, *, what: str, remembers: bool = True, limit: int | None, received: list[int] | None = None
) -> Score:
    """Evaluate on a split or its beginning, with a memory of its own; training's memory does not change.

    Raises:
        _StopError: one of the `received` signals ends it; None: no signal does.
    """
    text, reading = beginning(split, run.corpus.tokenizer, limit), Reading.of_run(run.config)
    show = run.display.scoring(what, (len(text.ids) - 1) // run.world.size)

    def on_tokens(n: int) -> None:
        show(n)
        if received is not None and run.world.alone:  # several processes must stop together
            _check(run, received)

    if received is not None:
        _check(run, received)
    return evaluate(
        run.trainer.model,
        text.ids,
        **vars(reading if remembers else reading.without_memory()),
        n_characters=text.n_characters,
        n_bytes=text.n_bytes,
        precision=run.trainer.precision,
        on_tokens=on_tokens,
        world=run.world,
        execution=run.trainer.execution,
    )


def _scores(run: Run, split: TokenSplit, what: str, *, limit: int | None, received: list[int] | None = None) -> Scores:
    """Evaluate the weights and, if there are any, the averaged weights; see `_score`."""
    plain = _score(run, split, what=what, limit=limit, received=received)
    average = run.trainer.average
    if not average.count:
        return Scores(plain)
    with average.in_place_of(run.trainer.model):
        return Scores(plain, _score(run, split, what=f"{what} averaged weights", limit=limit, received=received))


def _sample(run: Run, split: TokenSplit) -> str:
    """Continue the first tokens of the validation split, with separate random numbers."""
    written = generate(
        run.trainer.model,
        np.asarray(split.ids[:32], dtype=np.int64).tolist(),
        max_new_tokens=run.config.train.sample_tokens,
        temperature=0.8,
        seed=run.trainer.step,
        precision=run.trainer.precision,
    )
    return run.corpus.tokenizer.decode(list(written))


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


def _conclude(run: Run, received: list[int]) -> Outcome:
    """Score the finished model with and without memory, and report the difference; a signal ends only the scoring."""
    split, trainer, say = run.corpus.splits["valid"], run.trainer, run.display.say
    did = f"{trainer.step:,} steps, {trainer.tokens:,} tokens in {clock(trainer.seconds)} of training"
    if run.recorded:
        longer = "".join(
            f" --set train.{name}={2 * getattr(run.config.train, name)}" for name, share in trainer.used.items() if share >= 1
        )
        say(f"finished already: {did}; to train longer: txl train --resume --out {run.where}{longer}")
    else:
        say(f"finished: {did}")
    n_token = len(split.ids) - 1
    if n_token < 1:
        return run.outcome()
    scores = run.recorded
    if not scores:
        try:
            scores = _final_scores(run, split, received)
        except _StopError as stop:
            (number,) = stop.args
            say(f"{number.name}: saved step {trainer.step:,}, which is not scored; score it with: txl eval {run.where}")
            return run.outcome(stopped_by=number)
        with run.world.agreed():
            if not math.isfinite(scores.plain.loss):
                raise TrainingError(
                    f"diverged at step {trainer.last_good_step + 1}: losses of the trained model are not finite numbers; train "
                    f"again with a lower optim.lr ({run.config.optim.lr:g})"
                )
        run.note("final", tokens=trainer.tokens, seconds=round(trainer.seconds, 3), **_as_entry(scores))
    plain, without, averaged = scores.plain, scores.without_memory, scores.average
    which = f"{plain.tokens:,}" if plain.tokens == n_token else f"the first {plain.tokens:,} of {n_token:,}"
    found = f"validation, {which} tokens: {plain.bpc:.3f} bits per character ({plain.loss:.4f} nats per token)"
    if without:
        found += (
            f"; with its memory taken away {without.bpc:.3f}: memory is worth {without.bpc - plain.bpc:.3f} bits per character"
        )
    say(found)
    if left_out := not_scored(run.corpus.tokenizer):
        say(left_out)
    if plain.doubt:
        run.display.warn(plain.doubt)
    if averaged:
        say(f"averaged weights: {averaged.bpc:.3f} bits per character ({averaged.loss:.4f} nats per token)")
    return run.outcome(scores)


def _final_scores(run: Run, split: TokenSplit, received: list[int]) -> Scores:
    """Score the whole split, or if that takes too long what validations read of it."""
    _check(run, received)
    n_token, limit, say = len(split.ids) - 1, run.config.eval.max_tokens, run.display.say
    remembers = run.config.eval_mem_len > 0
    how = ", with memory and without" if remembers else ""
    scores = run.validated or _scores(run, split, "scoring", limit=limit, received=received)
    n_pass = 1 + remembers + bool(scores.average)
    seconds = run.world.from_first(n_pass * n_token / scores.plain.tokens_per_second)
    n_scored = scores.plain.tokens
    if n_scored == n_token or seconds <= max(_SCORING_SECONDS, _SCORING_SHARE * run.trainer.seconds):
        say(f"scoring all {n_token:,} tokens of the validation split{how}")
        limit = None
        if n_scored < n_token:
            scores = _scores(run, split, "scoring", limit=limit, received=received)
    else:
        say(
            f"scoring the first {n_scored:,} of {n_token:,} tokens of the validation split{how}, because all would take "
            f"{clock(seconds)}; txl eval {run.where} --split valid scores all"
        )
    if not remembers:
        return scores
    without = _score(run, split, what="scoring without memory", remembers=False, limit=limit, received=received)
    return replace(scores, without_memory=without)


def _check(run: Run, received: list[int]) -> None:
    if number := run.stopped_by(received):
        raise _StopError(number)


def _as_entry(scores: Scores) -> dict[str, float | int | None]:
    """Return scores as the log keeps them, from which `_recorded` makes them again."""
    plain = scores.plain
    losses = {"loss": scores.plain, "loss_without_memory": scores.without_memory, "average_loss": scores.average}
    sizes = {"scored": plain.tokens, "characters": plain.n_characters, "bytes": plain.n_bytes}
    return {name: score.loss for name, score in losses.items() if score} | {"bpc": plain.bpc} | sizes


def _recorded(entry: dict[str, Any] | None) -> Scores | None:
    """Return the scores of an entry of the log; None if it has none that are complete and finite."""
    if entry is None or None in (entry.get(name) for name in ("loss", "scored", "characters")):
        return None

    def score(name: str) -> Score | None:
        loss, n = entry.get(name), entry["scored"]
        return None if loss is None else Score(loss * n, n, entry["characters"], entry.get("bytes"), seconds=0.0)

    plain = score("loss")
    assert plain is not None
    return Scores(plain, score("average_loss"), score("loss_without_memory"))


@contextmanager
def _stop_signal(*, once: bool) -> Iterator[list[int]]:
    """Collect SIGINT, SIGTERM and SIGHUP in a list instead of dying; the training loop looks at it between steps.

    With `once`, a second signal has its usual effect, except for SIGHUP, which arrives twice when a terminal is closed. Under
    `torchrun` it must not, because the terminal sends a signal to all processes, and `torchrun` sends it to them again. What
    `nohup` started goes on without a terminal.
    """
    received: list[int] = []
    previous: dict[int, Any] = {}

    def handle(number: int, frame: FrameType | None) -> None:
        received.append(number)
        for signal_number, handler in previous.items() if once else ():
            if signal_number != signal.SIGHUP:
                signal.signal(signal_number, handler)

    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                previous[number] = signal.signal(number, handle)
    except ValueError:  # not the main thread, so the caller handles signals
        pass
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)

"""Train a run from its configuration to its last checkpoint: prepare, learn, validate, save, stop cleanly, resume exactly."""

import math
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch

from transformer_xl import __version__
from transformer_xl.checkpoint.run_directory import RunDirectory, check_tokenizer
from transformer_xl.checkpoint.store import Checkpoint
from transformer_xl.config import RunConfig, apply_overrides, load_recipe, merge
from transformer_xl.data.corpora import choose_corpus
from transformer_xl.data.prepare import PreparedCorpus, TokenSplit, prepare
from transformer_xl.data.streams import SegmentStream
from transformer_xl.data.tokenizers import Tokenizer
from transformer_xl.errors import CheckpointError, ConfigError, TrainingError
from transformer_xl.evaluation import Score, evaluate, predicted_sizes
from transformer_xl.generation.generate import generate
from transformer_xl.model.comparison import compare_parameters
from transformer_xl.model.kinds import make_model
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.precision import choose_device, choose_precision
from transformer_xl.model.vanilla import Vanilla
from transformer_xl.training.determinism import deterministic
from transformer_xl.training.display import Display, clock
from transformer_xl.training.environment import begun_by_this_launch, write_environment
from transformer_xl.training.lengths import SegmentLengths
from transformer_xl.training.record import Record
from transformer_xl.training.silent import SilentRecord, silent_display
from transformer_xl.training.trainer import StepResult, Trainer, check_settings
from transformer_xl.world import ToldElsewhereError, World, joined, restarts

_FIXED_SECTIONS = ("model", "tokenizer", "data")  # what a checkpoint depends on: a resumed run cannot change it
_FIXED_KEYS = ("batch_size", "tgt_len", "accumulate", "seed", "reset_at_documents")


@dataclass
class Interval:
    """Sums since the last line of the log; part of the state, so that a resumed run logs the same lines.

    Attributes:
        nats: summed loss of the steps that were not skipped.
        tokens: their tokens.
        scored: tokens that the loss is of.
        skipped: steps skipped.
        seconds: time they took.
    """

    nats: float = 0.0
    tokens: int = 0
    skipped: int = 0
    seconds: float = 0.0
    scored: int = 0

    def add(self, result: StepResult, seconds: float) -> None:
        """Count a step."""
        self.seconds += seconds
        if result.skipped:
            self.skipped += 1
        else:
            self.nats += result.nats
            self.tokens += result.tokens
            self.scored += result.scored

    @property
    def loss(self) -> float | None:
        """Nats per token, None if every step was skipped."""
        return self.nats / self.scored if self.scored else None


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


@dataclass(frozen=True)
class _Best:
    loss: float
    step: int
    average: bool = False  # the averaged weights have this loss, not the plain ones


@dataclass
class _Run:
    """What the loop works with."""

    directory: RunDirectory
    config: RunConfig
    trainer: Trainer
    tokenizer: Tokenizer
    corpus: PreparedCorpus
    record: Record
    display: Display
    world: World
    interval: Interval = field(default_factory=Interval)
    best: _Best | None = None

    def __post_init__(self) -> None:
        self.store = self.directory.store(keep=self.config.train.keep_checkpoints)


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
                out = Path("runs") / _asked(recipe, overrides).name
            directory = RunDirectory(out)
        # torchrun repeats the whole command when it starts anew what failed, be it that the directory holds another run
        resume = resume or (restarts() > 0 and begun_by_this_launch(directory.path))
        goes_on = world.from_first(resume and directory.holds_run)
        with world.agreed():
            tokenizer: Tokenizer | None = None
            if goes_on:
                config = _resumed_config(directory, recipe, overrides, corpus)
                tokenizer = directory.tokenizer()
                check_tokenizer(tokenizer, config.model.vocab_size, str(directory.path))
            else:
                if world.first:
                    directory.check_free()
                config = _asked(recipe, overrides)
            config = _with_corpus(config, corpus)
            prepared = prepare(config.data, tokenizer or config.tokenizer)
        world.check_same(**_what_all_share(config, prepared))
        with world.agreed():
            if world.first:
                held.enter_context(directory.locked())
        held.enter_context(deterministic(config.train.deterministic))
        shown = display or Display()
        run = _set_up(
            directory, config, prepared, shown if world.first else silent_display(), loggers, world, fresh=not goes_on
        )
        held.callback(run.record.close)
        with _stop_signal(once=world.alone) as stopped:
            _learn(run, stopped)
        if run.trainer.progress < 1:
            return Outcome(run.directory.path, False, run.trainer.step, picture=run.record.draw())
        return _conclude(run)


def _what_all_share(config: RunConfig, corpus: PreparedCorpus) -> dict[str, Any]:
    """Return what must be the same in all processes; where the corpus lies may differ."""
    settings = config.model_dump(mode="json", exclude={"data": {"directory"}})
    sizes = {name: len(split.ids) for name, split in corpus.splits.items()}
    text = {"text": corpus.training_sha256, "tokens": sizes, "vocabulary": corpus.tokenizer.fingerprint}
    return settings | text | {"version": __version__}


def _asked(recipe: str | RunConfig | None, overrides: Sequence[str] = ()) -> RunConfig:
    if isinstance(recipe, RunConfig):
        return apply_overrides(recipe.model_dump(), list(overrides))
    return load_recipe(recipe or "quickstart", list(overrides))


def _resumed_config(
    directory: RunDirectory, recipe: str | RunConfig | None, overrides: Sequence[str], corpus: str | None
) -> RunConfig:
    """Return the run's own settings with overrides, after checking that nothing it rests on changes."""
    saved = directory.config()
    if recipe is not None and (name := _asked(recipe).name) != saved.name:
        raise CheckpointError(
            f"'{directory.path}' is a run of recipe '{saved.name}', not '{recipe if isinstance(recipe, str) else name}'; "
            "leave the recipe out, or choose another --out"
        )
    config = apply_overrides(saved.model_dump(), list(overrides))
    config = _with_corpus(config, corpus)
    pairs = [(section, key) for section in _FIXED_SECTIONS for key in type(getattr(saved, section)).model_fields]
    pairs.remove(("data", "directory"))  # the same text may lie elsewhere now
    pairs += [("optim", "optimizer"), *(("train", key) for key in _FIXED_KEYS)]
    for section, key in pairs:
        old, new = getattr(getattr(saved, section), key), getattr(getattr(config, section), key)
        if old != new:
            raise CheckpointError(
                f"{section}.{key} ({new!r}) differs from that of the run in '{directory.path}' ({old!r}); "
                "resume without changing it, or start another run with another --out"
            )
    return config


def _with_corpus(config: RunConfig, corpus: str | None) -> RunConfig:
    return config.model_copy(update={"data": choose_corpus(config.data, corpus)})


def _set_up(
    directory: RunDirectory,
    config: RunConfig,
    corpus: PreparedCorpus,
    display: Display,
    loggers: Sequence[str],
    world: World,
    *,
    fresh: bool,
) -> _Run:
    """Build the model, its trainer and the run's files; restore the newest good checkpoint of an existing run."""
    with world.agreed():
        device = choose_device(config.train.device)
        world.check_device(device)
        precision, reason = choose_precision(config.train.precision, device)
    world.check_same(device=device.type, precision=precision)
    sizes = {"vocab_size": corpus.tokenizer.vocab_size, "tgt_len": SegmentLengths(config.train).longest}
    resolved = {"model": config.model.completed(**sizes).model_dump(), "train": {"precision": precision}}
    config = RunConfig(**merge(config.model_dump(), resolved))
    with world.agreed():
        comparison = _comparison(config, display, fresh=fresh)
    torch.manual_seed(config.train.seed)
    model = make_model(config.model)
    training = corpus.splits["train"]
    with world.agreed():
        stream = SegmentStream(
            training.ids,
            batch_size=config.train.batch_size,
            tgt_len=config.train.tgt_len,
            document_starts=training.document_starts,
            rank=world.rank,
            world_size=world.size,
            shuffle=config.data.shuffle,
            seed=config.train.seed,
        )
        check_settings(model, train=config.train, precision=precision, world=world, device=device)
        _check_reading(model, config)
    trainer = Trainer(model, stream, train=config.train, optim=config.optim, precision=precision, world=world, device=device)
    with world.agreed():
        if fresh and world.first:  # only now is it certain that the run can start; until here nothing was written
            directory.create(config, corpus.tokenizer)
        settings = config.model_dump(mode="json")
        opened = {"loggers": loggers, "settings": settings, "warn": display.warn}
        record = Record(directory.path, **opened) if world.first else SilentRecord()
    run = _Run(directory, config, trainer, corpus.tokenizer, corpus, record, display, world)
    n_parameters = sum(p.numel() for p in model.parameters())
    display.say(
        f"{config.name}: {n_parameters:,} parameters, vocabulary {corpus.tokenizer.vocab_size:,} ({corpus.tokenizer.kind}), "
        f"{len(training.ids):,} training tokens of {config.data.corpus}"
    )
    if comparison:
        display.say(comparison)
    display.say(f"{precision} on {device}: {reason}; run directory {directory.path}")
    if not world.alone:
        what = "a part of the model each" if config.train.parallel == "fsdp" else "the whole model each"
        display.say(f"{world.size} processes, {what}, {config.train.batch_size // world.size} of the lanes each")
    if not fresh:
        _restore(run)
    with world.agreed():
        if world.first:
            if not fresh and config != directory.config():  # the next --resume goes on with these settings, not with older ones
                directory.save_config(config)
            write_environment(directory.path, seed=config.train.seed, device=device, step=trainer.step)
    return run


def _check_reading(model: LanguageModel, config: RunConfig) -> None:
    """Refuse now what the first segment or validation would fail at."""
    options, mem_len = config.eval, config.eval_mem_len
    same_length = options.same_length if mem_len else False
    model.with_context(mem_len=mem_len, clamp_len=options.clamp_len, same_length=same_length, ext_len=options.ext_len)
    if not isinstance(model, Vanilla):
        return
    lengths = {
        "train.tgt_len": SegmentLengths(config.train).longest,
        "eval.tgt_len and eval.ext_len together": config.eval_tgt_len + options.ext_len,
    }
    for name, length in lengths.items():
        if length > model.positions.shape[1]:
            raise ConfigError(
                f"{name} ({length}) must be at most model.max_len ({model.positions.shape[1]}), the positions that a vanilla "
                "model learns"
            )


def _comparison(config: RunConfig, display: Display, *, fresh: bool) -> str | None:
    """Return how many parameters the compared recipe has; a run goes on even if that is gone by now."""
    try:
        comparison = compare_parameters(config, config.model)
    except ConfigError as error:
        if fresh:
            raise
        display.warn(str(error))
        return None
    return None if comparison is None else str(comparison)


def _restore(run: _Run) -> None:
    world = run.world
    checkpoint: Checkpoint | None = None
    with world.agreed():
        if world.first:
            run.store.clean()
            checkpoint = run.store.load_newest(on_damaged=run.display.warn) if run.store.steps() else None
    step = world.from_first(checkpoint.step if checkpoint else None)
    if step is None:
        run.record.rewind(0)
        run.display.say("no checkpoint yet: starting from the beginning")
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
        run.interval = Interval(**{"scored": record["interval"]["tokens"], **record["interval"]})
        best = _Best(**record["best"]) if record["best"] else None
        run.best = best if best and best.step in run.store.steps() else None
    with world.agreed():
        if world.first:
            run.store.rewind(step, best=run.best.step if run.best else None)
            run.record.rewind(step)
    saved_by = checkpoint.state.get("world_size", 1)
    if saved_by != world.size:
        run.display.say(
            f"number of processes: {saved_by} until here, {world.size} from now on; the same text in the same order, "
            "other random numbers in dropout"
        )
    run.display.say(f"resumed at step {checkpoint.step:,}, {100 * min(run.trainer.progress, 1):.0f}% of the budget")


def _learn(run: _Run, stopped: list[int]) -> None:
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
            best = _validate(run) if trainer.step % config.eval_interval == 0 or last else None
            if trainer.step % config.checkpoint_interval == 0 or best or last:
                saved_step = _save(run, best=best, must=last) or saved_step
        if stopping and saved_step != trainer.step:
            _save(run, must=True)
    if stopping:
        name = signal.Signals(stopped[0]).name if stopped else "another process was stopped"
        command = "txl" if run.world.alone else f"torchrun with {run.world.size} processes: -m transformer_xl"
        run.display.say(f"{name}: saved step {trainer.step:,}; go on with: {command} train --resume --out {run.directory.path}")


def _log(run: _Run, result: StepResult, *, final: bool) -> None:
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


def _validate(run: _Run) -> _Best | None:
    """Score the validation split and write a sample; return the loss if it is the best so far."""
    split = run.corpus.splits["valid"]
    trainer, config = run.trainer, run.config
    if len(split.ids) < 2:
        return None
    score = _score(run, split, mem_len=config.eval_mem_len, limit=config.eval.max_tokens)
    averaged = _score_of_average(run, split, limit=config.eval.max_tokens)
    trainer.schedule.validated(score.loss)
    more = {"average_loss": averaged.loss} if averaged else {}
    run.record.write(
        "valid",
        trainer.step,
        loss=score.loss,
        ppl=score.ppl,
        bpc=score.bpc,
        nats=score.nats,
        tokens=trainer.tokens,
        seconds=round(trainer.seconds, 3),
        **more,
    )
    of_average = f"; averaged weights {averaged.loss:.4f}" if averaged else ""
    run.display.say(
        f"step {trainer.step:,}: validation {score.loss:.4f} nats per token, {score.bpc:.3f} bits per character{of_average}"
    )
    if config.train.sample_tokens and math.isfinite(score.loss) and run.world.first and not trainer.model.is_sharded:
        text = _sample(run, split)
        run.record.write("sample", trainer.step, text=text)
        run.display.show(text, title=f"a sample at step {trainer.step:,}")
    best = _Best(score.loss, trainer.step)
    if averaged and (averaged.loss < score.loss or math.isnan(score.loss)):
        best = _Best(averaged.loss, trainer.step, average=True)
    return best if best.loss < (run.best.loss if run.best else math.inf) else None


def _score(run: _Run, split: TokenSplit, *, mem_len: int, limit: int | None) -> Score:
    """Evaluate on (the beginning of) a split, with a memory of its own: training's is not touched."""
    ids = split.ids[:limit]
    share = len(ids) / len(split.ids)
    sizes = {"n_characters": round(split.n_characters * share), "n_bytes": round(split.n_bytes * share)}
    n_characters, n_bytes = predicted_sizes(run.tokenizer.decode([int(ids[0])]), **sizes)
    return evaluate(
        run.trainer.model,
        ids,
        tgt_len=run.config.eval_tgt_len,
        mem_len=mem_len,
        batch_size=run.config.eval.batch_size,
        same_length=run.config.eval.same_length if mem_len else False,
        clamp_len=run.config.eval.clamp_len,
        ext_len=run.config.eval.ext_len,
        n_characters=n_characters,
        n_bytes=n_bytes,
        precision=run.trainer.precision,
        world=run.world,
    )


def _score_of_average(run: _Run, split: TokenSplit, *, limit: int | None) -> Score | None:
    """Evaluate the averaged weights with memory; None if there are none yet."""
    average = run.trainer.average
    if not average.count:
        return None
    with average.in_place_of(run.trainer.model):
        return _score(run, split, mem_len=run.config.eval_mem_len, limit=limit)


def _sample(run: _Run, split: TokenSplit) -> str:
    """Write on from the first tokens of the validation split; training's random numbers are not touched."""
    prompt = np.asarray(split.ids[:32], dtype=np.int64)
    written = generate(
        run.trainer.model,
        prompt.tolist(),
        max_new_tokens=run.config.train.sample_tokens,
        temperature=0.8,
        seed=run.trainer.step,
        precision=run.trainer.precision,
    )
    return run.tokenizer.decode(list(written))


def _save(run: _Run, *, best: _Best | None = None, must: bool) -> int | None:
    """Save a checkpoint and return its step; a failure is fatal only for the last one (`must`)."""
    trainer = run.trainer
    if trainer.bad_in_a_row and not must:  # they may be the beginning of the end, which must not replace a good checkpoint
        return None
    newest_best = best or run.best
    record: dict[str, Any] = {
        "interval": vars(run.interval),
        "best": vars(newest_best) if newest_best else None,
        "training_text": run.corpus.training_sha256,
    }
    try:
        finite = trainer.finite
        with run.world.agreed():
            if not finite:
                raise TrainingError(
                    f"weights are not finite after step {trainer.step}, so they are not saved; the checkpoints before are "
                    "intact, resume with a lower optim.lr or optim.clip"
                )
        checkpoint = trainer.checkpoint(record)
        with run.world.agreed():
            if checkpoint is not None:
                run.record.sync()
                run.store.save(checkpoint, best=best is not None)
    except (CheckpointError, TrainingError, ToldElsewhereError) as error:
        if must:
            raise
        run.display.warn(f"{error}; training goes on")
        return None
    run.best = newest_best
    return trainer.step


def _conclude(run: _Run) -> Outcome:
    """Score the finished model on the whole validation split, with and without its memory, and say what that means."""
    split = run.corpus.splits["valid"]
    trainer, say = run.trainer, run.display.say
    say(f"finished: {trainer.step:,} steps, {trainer.tokens:,} tokens in {clock(trainer.seconds)} of training")
    if len(split.ids) < 2:
        return Outcome(run.directory.path, True, trainer.step, picture=run.record.draw())
    remembers = run.config.eval_mem_len > 0
    how = ", with memory and without" if remembers else ""
    say(f"scoring all {len(split.ids) - 1:,} tokens of the validation split{how}")
    score = _score(run, split, mem_len=run.config.eval_mem_len, limit=None)
    without = _score(run, split, mem_len=0, limit=None) if remembers else None
    averaged = _score_of_average(run, split, limit=None)
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


@contextmanager
def _stop_signal(*, once: bool) -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM in a list instead of dying; a second one acts as it always did, if only `once` is meant.

    `torchrun` passes on a signal that a terminal has sent to all processes already, so that each gets it twice.
    """
    received: list[int] = []
    previous: dict[int, Any] = {}

    def handle(number: int, frame: FrameType | None) -> None:
        received.append(number)
        for signal_number, handler in previous.items() if once else ():
            signal.signal(signal_number, handler)

    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            previous[number] = signal.signal(number, handle)
    except ValueError:  # not the main thread: whoever runs it handles signals
        pass
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)

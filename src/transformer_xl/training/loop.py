"""Train a run from its configuration to its last checkpoint: prepare, learn, validate, save, stop cleanly, resume exactly."""

import math
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch

from transformer_xl.checkpoint.run_directory import RunDirectory, check_tokenizer
from transformer_xl.config import RunConfig, apply_overrides, load_recipe, merge
from transformer_xl.data.corpora import choose_corpus
from transformer_xl.data.prepare import PreparedCorpus, TokenSplit, prepare
from transformer_xl.data.streams import SegmentStream
from transformer_xl.data.tokenizers import Tokenizer
from transformer_xl.errors import CheckpointError, ConfigError, TrainingError
from transformer_xl.evaluation import Score, evaluate, predicted_sizes
from transformer_xl.generation.generate import generate
from transformer_xl.model.precision import choose_device, choose_precision
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.training.display import Display, clock
from transformer_xl.training.record import Record
from transformer_xl.training.trainer import StepResult, Trainer

_FIXED_SECTIONS = ("model", "tokenizer", "data")  # what a checkpoint depends on: a resumed run cannot change it
_FIXED_KEYS = ("batch_size", "tgt_len", "accumulate", "seed", "reset_at_documents")


@dataclass
class Interval:
    """Sums since the last line of the log; part of the state, so that a resumed run logs the same lines.

    Attributes:
        nats: summed loss of the steps that were not skipped.
        tokens: their tokens.
        skipped: steps skipped.
        seconds: time they took.
    """

    nats: float = 0.0
    tokens: int = 0
    skipped: int = 0
    seconds: float = 0.0

    def add(self, result: StepResult, seconds: float) -> None:
        """Count a step."""
        self.seconds += seconds
        if result.skipped:
            self.skipped += 1
        else:
            self.nats += result.nats
            self.tokens += result.tokens

    @property
    def loss(self) -> float | None:
        """Nats per token, None if every step was skipped."""
        return self.nats / self.tokens if self.tokens else None


@dataclass(frozen=True)
class Outcome:
    """How a call of `train` ended.

    Attributes:
        directory: of the run.
        finished: the budget is used up; False if a signal ended it.
        step: steps done.
        score: of the validation split at the end, with memory; None if there is no such split or the run did not finish.
        score_without_memory: the same weights on the same text without memory.
        picture: the loss curve.
    """

    directory: Path
    finished: bool
    step: int
    score: Score | None = None
    score_without_memory: Score | None = None
    picture: Path | None = None


@dataclass(frozen=True)
class _Best:
    loss: float
    step: int


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
    interval: Interval = field(default_factory=Interval)
    best: _Best | None = None

    def __post_init__(self) -> None:
        self.store = self.directory.store(keep=self.config.train.keep_checkpoints)


def train(
    recipe: str | None = None,
    *,
    out: str | Path | None = None,
    overrides: Sequence[str] = (),
    corpus: str | None = None,
    resume: bool = False,
    display: Display | None = None,
) -> Outcome:
    """Train a model, or go on training one.

    Args:
        recipe: name or TOML file; None: `quickstart`, or when resuming whatever the run is.
        out: directory of the run; None: `runs/<recipe>`.
        overrides: `section.key=value`, laid over the recipe.
        corpus: name, file, directory or glob; a directory that holds the recipe's named corpus serves as its source.
        resume: go on with the run in `out`, or start it if there is none.
        display: where progress is shown; None: stderr.

    Returns:
        How it ended.

    Raises:
        TxlError: any of the package's errors, each one line.
    """
    display = display or Display()
    if out is None:
        out = Path("runs") / load_recipe(recipe or "quickstart", list(overrides)).name
    directory = RunDirectory(out)
    if resume and directory.holds_run:
        config = _resumed_config(directory, recipe, overrides, corpus)
        tokenizer: Tokenizer | None = directory.tokenizer()
        check_tokenizer(tokenizer, config.model.vocab_size, str(directory.path))
    else:
        directory.check_free()
        config, tokenizer = load_recipe(recipe or "quickstart", list(overrides)), None
    config = _with_corpus(config, corpus)
    prepared = prepare(config.data, tokenizer or config.tokenizer)
    with directory.locked():
        run = _set_up(directory, config, prepared, display, fresh=tokenizer is None)
        try:
            with _stop_signal() as stopped:
                _learn(run, stopped)
            if run.trainer.progress < 1:
                return Outcome(run.directory.path, False, run.trainer.step, picture=run.record.draw())
            return _conclude(run)
        finally:
            run.record.close()


def _resumed_config(directory: RunDirectory, recipe: str | None, overrides: Sequence[str], corpus: str | None) -> RunConfig:
    """Return the run's own settings with overrides, after checking that nothing it rests on changes."""
    saved = directory.config()
    if recipe is not None and load_recipe(recipe).name != saved.name:
        raise CheckpointError(
            f"'{directory.path}' is a run of recipe '{saved.name}', not '{recipe}'; "
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


def _set_up(directory: RunDirectory, config: RunConfig, corpus: PreparedCorpus, display: Display, *, fresh: bool) -> _Run:
    """Build the model, its trainer and the run's files; restore the newest good checkpoint of an existing run."""
    device = choose_device(config.train.device)
    precision, reason = choose_precision(config.train.precision, device)
    max_klen = config.model.max_klen or config.train.tgt_len + config.model.mem_len
    resolved = {
        "model": {"vocab_size": corpus.tokenizer.vocab_size, "max_klen": max_klen if config.model.learns_positions else None},
        "train": {"precision": precision},
    }
    config = RunConfig(**merge(config.model_dump(), resolved))
    torch.manual_seed(config.train.seed)
    model = TransformerXL(config.model).to(device)
    training = corpus.splits["train"]
    stream = SegmentStream(
        training.ids,
        batch_size=config.train.batch_size,
        tgt_len=config.train.tgt_len,
        document_starts=training.document_starts,
    )
    trainer = Trainer(model, stream, train=config.train, optim=config.optim, precision=precision)
    if fresh:  # only now is it certain that the run can start; until here nothing was written
        directory.create(config, corpus.tokenizer)
    run = _Run(directory, config, trainer, corpus.tokenizer, corpus, Record(directory.path), display)
    n_parameters = sum(p.numel() for p in model.parameters())
    display.say(
        f"{config.name}: {n_parameters:,} parameters, vocabulary {corpus.tokenizer.vocab_size:,} ({corpus.tokenizer.kind}), "
        f"{len(training.ids):,} training tokens of {config.data.corpus}"
    )
    display.say(f"{precision} on {device}: {reason}; run directory {directory.path}")
    if not fresh:
        _restore(run)
        if config != directory.config():  # the next --resume goes on with these settings, not with older ones
            directory.save_config(config)
    return run


def _restore(run: _Run) -> None:
    run.store.clean()
    if not run.store.steps():
        run.record.rewind(0)
        run.display.say("no checkpoint yet: starting from the beginning")
        return
    checkpoint = run.store.load_newest(on_damaged=run.display.warn)
    try:
        record = run.trainer.restore(checkpoint)
    except (ConfigError, RuntimeError, KeyError) as error:
        reason = str(error).strip().splitlines()[-1].strip()
        raise CheckpointError(
            f"checkpoint {checkpoint.step} does not fit the run in '{run.directory.path}': {reason}"
        ) from None
    if record["training_text"] != run.corpus.training_sha256:
        raise CheckpointError(
            f"the text of '{run.config.data.corpus}' is not the one that the run in '{run.directory.path}' has read so far; "
            "restore it, or start another run with another --out"
        )
    run.interval = Interval(**record["interval"])
    best = _Best(**record["best"]) if record["best"] else None
    run.best = best if best and best.step in run.store.steps() else None
    run.store.rewind(checkpoint.step, best=run.best.step if run.best else None)
    run.record.rewind(checkpoint.step)
    run.display.say(f"resumed at step {checkpoint.step:,}, {100 * min(run.trainer.progress, 1):.0f}% of the budget")


def _learn(run: _Run, stopped: list[int]) -> None:
    """Train until the budget is used up or a signal arrives; either way, the last step is saved when this returns."""
    trainer, config = run.trainer, run.config.train
    saved_step = trainer.step if run.store.steps() else None
    with run.display:
        while trainer.progress < 1 and not stopped:
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
        if stopped and saved_step != trainer.step:
            _save(run, must=True)
    if stopped and trainer.progress < 1:
        name = signal.Signals(stopped[0]).name
        run.display.say(f"{name}: saved step {trainer.step:,}; go on with: txl train --resume --out {run.directory.path}")


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
    trainer.schedule.validated(score.loss)
    run.record.write(
        "valid", trainer.step, loss=score.loss, ppl=score.ppl, bpc=score.bpc, nats=score.nats, tokens=trainer.tokens
    )
    run.display.say(f"step {trainer.step:,}: validation {score.loss:.4f} nats per token, {score.bpc:.3f} bits per character")
    if config.train.sample_tokens and math.isfinite(score.loss):
        text = _sample(run, split)
        run.record.write("sample", trainer.step, text=text)
        run.display.show(text, title=f"a sample at step {trainer.step:,}")
    return _Best(score.loss, trainer.step) if score.loss < (run.best.loss if run.best else math.inf) else None


def _score(run: _Run, split: TokenSplit, *, mem_len: int, limit: int | None) -> Score:
    """Evaluate on (the beginning of) a split, with a memory of its own: training's is not touched."""
    ids = split.ids[:limit] if limit else split.ids
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
    )


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
        if not trainer.finite:
            raise TrainingError(
                f"weights are not finite after step {trainer.step}, so they are not saved; the checkpoints before are intact, "
                "resume with a lower optim.lr or optim.clip"
            )
        run.record.sync()
        run.store.save(trainer.checkpoint(record), best=best is not None)
    except (CheckpointError, TrainingError) as error:
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
    with_memory = _score(run, split, mem_len=run.config.eval_mem_len, limit=None)
    without = _score(run, split, mem_len=0, limit=None)
    run.record.write(
        "final",
        trainer.step,
        loss=with_memory.loss,
        bpc=with_memory.bpc,
        loss_without_memory=without.loss,
        tokens=trainer.tokens,
    )
    say(
        f"validation, {with_memory.tokens:,} tokens: {with_memory.bpc:.3f} bits per character "
        f"({with_memory.loss:.4f} nats per token); with its memory taken away {without.bpc:.3f}: "
        f"memory is worth {without.bpc - with_memory.bpc:.3f} bits per character"
    )
    return Outcome(run.directory.path, True, trainer.step, with_memory, without, run.record.draw())


@contextmanager
def _stop_signal() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM in a list instead of dying; a second one acts as it always did."""
    received: list[int] = []
    previous: dict[int, Any] = {}

    def handle(number: int, frame: FrameType | None) -> None:
        received.append(number)
        for signal_number, handler in previous.items():
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

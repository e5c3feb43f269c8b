"""Fine-tuning from start to end: a model that has read much learns what to say of a text.

A run of it is a run as any other (`loop.py`). It validates by the main metric of its task, ends when patience is used up, and
is scored at the end with the weights that were best.
"""

import hashlib
import math
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from rich.console import Console

from transformer_xl.checkpoint.run_directory import RunDirectory, check_tokenizer, load
from transformer_xl.checkpoint.store import averaged_weights
from transformer_xl.config.model import HeadConfig
from transformer_xl.config.recipes import load_task
from transformer_xl.config.run import RunConfig
from transformer_xl.console import clock
from transformer_xl.data.labelled import LabelledRows, LabelledStream, LabelledTexts, Layout
from transformer_xl.data.squad import LabelledWindows, Question, WindowLayout
from transformer_xl.data.task_texts import TaskTexts, read_task
from transformer_xl.errors import ConfigError, TrainingError, message_of
from transformer_xl.model.base import SequenceModel
from transformer_xl.model.build import make_blueprint, make_model
from transformer_xl.model.pretrained import RUNS
from transformer_xl.model.task_model import TaskModel
from transformer_xl.pictures import can_draw
from transformer_xl.process import restarts
from transformer_xl.tasks.metrics import TaskScore, tally_of
from transformer_xl.tasks.predict import predictions
from transformer_xl.tokenizers.base import Tokenizer
from transformer_xl.training.confusion import draw_confusion
from transformer_xl.training.display import Display
from transformer_xl.training.environment import begun_by_this_launch
from transformer_xl.training.loop import conduct, open_files, save
from transformer_xl.training.run_base import Best, Run, StopError
from transformer_xl.training.start import (
    adapt,
    check_machine,
    check_weights,
    new_task_settings,
    resumed_task_settings,
    take_weights,
)
from transformer_xl.version import __version__
from transformer_xl.world import World, joined

Columns = str | Sequence[str] | None

_MANY_EPOCHS = 20


@dataclass(frozen=True)
class TaskOutcome:
    """How a call of `finetune` ended.

    Attributes:
        directory: of the run.
        finished: whether the budget or the patience is used up; False if a signal ended the run.
        step: steps so far.
        seconds: of training steps so far.
        best_step: the step whose weights were best on the validation texts, which `txl.load` and `txl predict` take.
        valid: score of these weights on the validation texts; None if the run did not finish.
        test: the same on the test texts; None without such texts.
        pictures: what was drawn: the loss curve and the confusions.
        stopped_by: the signal that ended it.
    """

    directory: Path
    finished: bool
    step: int
    seconds: float
    best_step: int | None = None
    valid: TaskScore | None = None
    test: TaskScore | None = None
    pictures: tuple[Path, ...] = ()
    stopped_by: signal.Signals | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return all that for JSON."""
        return {
            "directory": str(self.directory),
            "finished": self.finished,
            "step": self.step,
            "seconds": round(self.seconds, 3),
            "best_step": self.best_step,
            "valid": self.valid and self.valid.as_dict(),
            "test": self.test and self.test.as_dict(),
            "pictures": [str(path) for path in self.pictures],
            "stopped_by": self.stopped_by and self.stopped_by.name,
        }


def finetune(
    source: str | Path | None = None,
    *,
    task: str | None = None,
    data: str | Path | None = None,
    out: str | Path | None = None,
    overrides: Sequence[str] = (),
    text: str | None = None,
    pair: str | None = None,
    label: Columns = None,
    seed: int | None = None,
    resume: bool = False,
    display: Display | None = None,
) -> TaskOutcome:
    """Teach a model a task, or go on teaching it.

    If `torchrun` starts several processes, they teach it together. Only the first one writes files, scores and prints.

    Args:
        source: a run, an exported directory or a hub id; None: the run in `out` goes on. Of a model with a head of another task
            only the rest is taken.
        task: name or TOML file, see docs/finetuning.md.
        data: file of texts with labels, or a directory of such files.
        out: directory of the run; None: `runs/<task>`.
        overrides: `section.key=value`, which replace settings of the task.
        text: column of the text; None: found by its name.
        pair: column of the second text; None: found by its name.
        label: column of the label, or several of `multilabel`; None: found by its name.
        seed: of the order of texts, dropout and the head's first weights; None: that of the task.
        resume: go on with the run in `out`, or start it if there is none.
        display: shows the progress; None: on stderr.

    Returns:
        How it ended.

    Raises:
        TxlError: any of the package's errors, each one line.
        OSError: a file cannot be read or written.
    """
    texts = {"text": text, "pair": pair, "label": (label,) if isinstance(label, str) else label and tuple(label)}
    columns = {name: value for name, value in (texts | {"data": data and str(data)}).items() if value is not None}
    base = None if source is None else str(source)
    with joined() as world:
        display = (display or Display()) if world.first else Display(quiet=True, console=Console(quiet=True))
        with world.agreed():
            if out is None and task is None:
                raise ConfigError("--task is missing, such as --task classification; or name the run to go on with by --out")
            directory = RunDirectory(RUNS / load_task(task or "")["name"] if out is None else out)
        # when torchrun restarts processes, it repeats the command
        resume = resume or (restarts() > 0 and begun_by_this_launch(directory.path))
        goes_on = world.from_first(resume and (directory.holds_run or base is None))
        with world.agreed():
            if goes_on:
                config = resumed_task_settings(directory, base, task, overrides, columns, seed)
            else:
                if base is None:
                    raise ConfigError("no model is named that learns the task; give a run, an exported directory or a hub id")
                if task is None:
                    raise ConfigError("--task is missing, such as --task classification; docs/finetuning.md lists the tasks")
                if world.first:
                    directory.check_free()
                config = new_task_settings(base, task, overrides, columns, seed)
        return _learn(directory, config, world, display, resume=resume, goes_on=goes_on)


def _learn(
    directory: RunDirectory, config: RunConfig, world: World, display: Display, *, resume: bool, goes_on: bool
) -> TaskOutcome:
    """Read the texts and the model that a run begins with, and learn."""
    with world.agreed():
        if config.train.parallel == "fsdp" and not world.alone:
            raise ConfigError("train.parallel (fsdp) divides a model, which fine-tuning scores whole; use ddp")
        assert config.task is not None
        texts = read_task(config.task, seed=config.train.seed)
        bases: list[SequenceModel] = []  # what the set-up takes out, so that it is not held while the model learns
        tokenizer: Tokenizer | None = None
        if not (goes_on and directory.store().steps()):  # a run that was killed before it saved anything begins again
            base, tokenizer = load(config.task.base, on_damaged=display.warn)
            bases.append(base)
            del base
        if goes_on or tokenizer is None:
            tokenizer = directory.tokenizer()
            check_tokenizer(tokenizer, config.model.vocab_size, str(directory.path))
        else:
            config = with_head(config, texts, display)
        rows = rows_of(config, texts, tokenizer)
    checksum = f"{rows.checksum:08x}"
    world.check_same(**config.model_dump(mode="json"), texts=checksum, version=__version__)
    return conduct(
        directory,
        config,
        set_up=lambda: _set_up(directory, config, tokenizer, texts, rows, bases, display, world, fresh=not goes_on),
        end=_end,
        world=world,
        display=display,
        resume=resume,
        goes_on=goes_on,
    )


def with_head(config: RunConfig, texts: TaskTexts, display: Display) -> RunConfig:
    """Return the settings of a new run with those of its head, and with intervals no longer than an epoch."""
    task, model = config.task, config.model
    assert task is not None
    learned, max_len = make_blueprint(model).learned_length, task.max_len
    tgt_len = config.train.tgt_len if learned is None else min(config.train.tgt_len, learned)
    if model.mem_len == 0 and max_len is None and task.summary == "last" and task.kind != "span":
        max_len = tgt_len
        display.say(
            f"this model has no memory, so {tgt_len} tokens of a text are read; --set model.mem_len={tgt_len} reads all"
        )
    span = {name: getattr(task, name) for name in ("doc_stride", "max_query_len", "max_answer_len")}
    head = HeadConfig(
        kind=task.kind,
        labels=texts.labels,
        summary=task.summary,
        tgt_len=tgt_len,
        max_len=max_len,
        gradient_segments=task.gradient_segments,
        **(span if task.kind == "span" else {}),
    )
    n_step = -(-len(texts.train) // config.train.batch_size)
    intervals = {name: min(getattr(config.train, name), n_step) for name in ("eval_interval", "checkpoint_interval")}
    intervals["log_interval"] = min(config.train.log_interval, max(1, intervals["eval_interval"] // 2))
    return config.changed(model={"head": head.model_dump()}, train=intervals)


def rows_of(config: RunConfig, texts: TaskTexts, tokenizer: Tokenizer) -> LabelledRows:
    """Return the training texts as rows of ids."""
    head = config.model.head
    assert head is not None
    if head.kind == "span":
        return LabelledWindows(texts.train, WindowLayout.of(config.model, tokenizer))
    return LabelledTexts(texts.train, Layout.of(config.model, tokenizer), head)


def _set_up(
    directory: RunDirectory,
    config: RunConfig,
    tokenizer: Tokenizer,
    texts: TaskTexts,
    rows: LabelledRows,
    bases: list[SequenceModel],
    display: Display,
    world: World,
    *,
    fresh: bool,
) -> "TaskRun":
    """Build the model from its base and a new head, and its trainer; open the run's files."""
    has_base = bool(bases)
    device, precision, reason = check_machine(config, world, warn=None if fresh else display.warn)
    config = config.changed(train={"precision": precision})
    check_weights(config, world, device)
    torch.manual_seed(config.train.seed)
    model = cast("TaskModel", make_model(config.model))
    has_head = has_base and _begin_with(model, bases.pop())
    adapt(model.backbone, config.train)
    stream = LabelledStream(
        rows, batch_size=config.train.batch_size, seed=config.train.seed, rank=world.rank, world_size=world.size
    )
    trainer, record, size = open_files(
        directory,
        config,
        tokenizer,
        model,
        stream,
        precision=precision,
        device=device,
        world=world,
        display=display,
        fresh=fresh,
    )
    assert config.task is not None
    n_parameters = sum(p.numel() for p in model.parameters())
    head = "its own head" if has_head else "a new head"
    display.say(
        f"{config.name}: {config.task.base} with {head}, {n_parameters:,} parameters; "
        f"{len(texts.train):,} texts to learn from, {len(texts.valid):,} to validate on"
    )
    display.say(f"{precision} on {device}: {reason}; run directory {directory.path}")
    for note in (*texts.notes, *_warnings(config, texts, len(rows.lengths))):
        display.say(note)
    if isinstance(rows, LabelledWindows) and rows.n_lost:
        display.say(f"{rows.n_lost:,} answers begin or end inside of a token, so no prediction can be exactly one of them")
    what, checksum = "the text to learn from or to validate on", _checksum(rows, texts.valid)
    run = TaskRun(directory, config, tokenizer, what, checksum, trainer, world, display, record, size, texts=texts)
    if has_base:
        save(run, must=True)  # so that a resumed run needs nothing of its base
    return run


def _warnings(config: RunConfig, texts: TaskTexts, n_row: int) -> Iterator[str]:
    """Yield what a person should know before texts are learned from."""
    if texts.labels and config.model.head and config.model.head.kind == "classification":
        (label, n), *_ = Counter(str(each.label) for each in texts.valid).most_common(1)
        yield f"always saying {label!r} would be right for {n / len(texts.valid):.1%} of the texts to validate on"
    epochs = (config.train.max_steps or 0) * config.train.batch_size / n_row
    if epochs > _MANY_EPOCHS and config.task and config.task.patience is None:
        yield (
            f"{config.train.max_steps:,} steps are {epochs:.0f} passes over these texts; --set task.patience=5 ends sooner, or "
            f"--task {config.task.kind if config.task.kind != 'span' else 'squad'}, which is for fewer texts"
        )


def _checksum(rows: LabelledRows, valid: Sequence[Any]) -> str:
    """Return a hash of what is learned from and validated on, wherever it lies: scores of other texts cannot be compared."""
    digest = hashlib.sha256(f"{rows.checksum}".encode())
    for each in valid:
        digest.update(repr(replace(each, place="")).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def _begin_with(model: TaskModel, base: SequenceModel) -> bool:
    """Give a model the weights of another, with those of its head if it is for the same; return whether it is."""
    backbone = base.backbone if isinstance(base, TaskModel) else base
    take_weights(model.backbone, backbone)
    own, theirs = model.config.head, base.config.head
    assert own is not None
    is_same = theirs is not None and all(
        getattr(own, name) == getattr(theirs, name) for name in ("kind", "labels", "projection")
    )
    if is_same:
        model.head.load_state_dict(cast("TaskModel", base).head.state_dict())
    return is_same


@dataclass
class TaskRun(Run):
    """A run that teaches a task."""

    texts: TaskTexts = field(kw_only=True)

    is_noted: bool = False  # whether the log has the final scores already

    command: ClassVar[str] = "finetune"

    @property
    def model(self) -> TaskModel:
        """The model in training."""
        return cast("TaskModel", self.trainer.model)

    @property
    def head(self) -> HeadConfig:
        """What the model gives."""
        assert self.config.model.head is not None
        return self.config.model.head

    def score(self, texts: Sequence[Any], what: str, *, received: list[int] | None = None) -> TaskScore:
        """Score the weights, in this process alone; one of the `received` signals ends it.

        Raises:
            StopError: one has.
        """
        show = self.display.scoring(what, len(texts), unit="texts")
        tally = tally_of(self.head.kind, self.head.labels)
        examples = [text.example if isinstance(text, Question) else text for text in texts]
        batch_size, precision = self.config.eval.batch_size, self.trainer.precision
        found = predictions(self.model, self.tokenizer, examples, batch_size=batch_size, precision=precision)
        for prediction in found:
            tally.add(prediction)
            show(1)
            if received and self.world.alone:
                raise StopError(self.stopped_by(received))
        return tally.score()

    def take_final(self, entry: dict[str, Any] | None) -> None:
        self.is_noted = entry is not None

    def validate(self) -> Best | None:
        scores: list[TaskScore] = []
        with self.world.agreed():
            try:
                if self.world.first:
                    scores.append(self.score(self.texts.valid, "validation"))
                    if self.trainer.average.count:
                        with self.trainer.average.in_place_of(self.model):
                            scores.append(self.score(self.texts.valid, "validating averaged weights"))
            except ConfigError as error:
                if "not finite" not in str(error):
                    raise
                raise TrainingError(
                    f"diverged: scores of the validation texts are not finite numbers after step {self.trainer.step}; the "
                    "checkpoints before are intact, resume with a lower optim.lr"
                ) from None
        found: list[list[float]] = self.world.from_first([[-score.main, _tie_break(score)] for score in scores])
        trainer = self.trainer
        plain, *averages = [
            Best(loss, trainer.step, average=i > 0, tie_break=tie_break) for i, (loss, tie_break) in enumerate(found)
        ]
        best = min(plain, *averages, key=_order) if averages else plain
        trainer.schedule.validated(plain.loss)
        for score in scores[:1]:
            averaged = {f"average_{scores[1].main_name}": scores[1].main} if len(scores) > 1 else {}
            figures = {"loss": _loss(score), "bpc": None, "tokens": trainer.tokens, "seconds": round(trainer.seconds, 3)}
            self.note("valid", **figures, **score.metrics, **averaged)
            of_average = f"; averaged weights: {scores[1].in_words()}" if averaged else ""
            self.display.say(f"step {trainer.step:,}: {score.in_words()}{of_average}")
        is_best = self.best is None or _order(best) < _order(self.best)
        self.waiting = 0 if is_best else self.waiting + 1
        return best if is_best else None

    def set_threshold(self, score: TaskScore) -> bool:
        """Take over the threshold of no answer that was best, and return whether it changed."""
        threshold = score.metrics.get("best_f1_threshold")
        if threshold is None or threshold == self.head.no_answer_above:
            return False
        head = {"no_answer_above": min(max(threshold, 0.0), 1.0)}
        self.config = self.config.changed(model={"head": head})
        self.model.config = self.config.model
        self.directory.save_config(self.config, self.tokenizer)
        self.display.say(f"no answer is given where its probability is above {threshold:.4f}, which was best in validation")
        return True

    @contextmanager
    def best_weights(self) -> Iterator[None]:
        """Put the best weights in place of the last ones while the block runs; in the first process."""
        if self.best is None or (self.best.step == self.trainer.step and not self.best.average):
            yield
            return
        checkpoint = self.store.load_best(on_damaged=self.display.warn)
        is_average = self.best.average and checkpoint.step == self.best.step
        weights = averaged_weights(checkpoint) if is_average else checkpoint.model
        last = {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}
        self.model.load_state_dict(last | weights)
        try:
            yield
        finally:
            self.model.load_state_dict(last)

    def ending(self, *, stopped_by: signal.Signals | None = None, **more: Any) -> TaskOutcome:
        """Draw the loss curve, and return how the run ended."""
        picture = self.record.draw(self.config) if self.record else None
        pictures = (*([picture] if picture else []), *more.pop("pictures", ()))
        trainer, best = self.trainer, self.best and self.best.step
        return TaskOutcome(
            self.directory.path,
            self.is_over,
            trainer.step,
            trainer.seconds,
            best,
            pictures=pictures,
            stopped_by=stopped_by,
            **more,
        )


def _order(best: Best) -> tuple[float, float]:
    return best.loss, best.tie_break


def _loss(score: TaskScore) -> float | None:
    """Return what the training lowers, of a score; None for answers, and where it is not defined."""
    loss = score.metrics.get("nats", score.metrics.get("mse"))
    return None if loss is None or math.isnan(loss) else loss


def _tie_break(score: TaskScore) -> float:
    """Return the lower number for the better of two scores with the same main metric."""
    loss = score.metrics.get("nats", score.metrics.get("mse", 0.0))
    return math.inf if math.isnan(loss) else loss


def _end(run: TaskRun, stopped_by: signal.Signals | None, received: list[int]) -> TaskOutcome:
    """Score the best weights on the validation and test texts, and draw the confusions; or nothing, if a signal came."""
    if stopped_by:
        return run.ending(stopped_by=stopped_by)
    trainer, say = run.trainer, run.display.say
    why = ""
    if trainer.progress < 1:
        why = f", because {run.waiting} validations in a row brought nothing better"
    say(f"finished after {trainer.step:,} steps, {clock(trainer.seconds)} of training{why}")
    found: dict[str, Any] = {}
    number: signal.Signals | None = None
    with run.world.agreed():
        if run.world.first:
            try:
                found = _scored(run, received)
            except StopError as stop:
                (number,) = stop.args
    if number:
        say(f"{number.name}: saved step {trainer.step:,}; score it with: txl finetune --resume --out {run.where}")
        return run.ending(stopped_by=number)
    return run.ending(**found)


def _scored(run: TaskRun, received: list[int]) -> dict[str, Any]:
    say, path = run.display.say, run.directory.path
    pictures: list[Path] = []
    with run.best_weights():
        valid = run.score(run.texts.valid, "scoring", received=received)
        if run.set_threshold(valid):
            valid = run.score(run.texts.valid, "scoring with the threshold of no answer", received=received)
        test = run.score(run.texts.test, "scoring the test texts", received=received) if run.texts.test else None
    if run.best:
        say(f"best weights: those of step {run.best.step:,}{', averaged' if run.best.average else ''}")
    say(f"validation: {valid.in_words()}")
    figures = dict(valid.metrics)
    if test:
        say(f"test: {test.in_words()}")
        figures |= {f"test_{name}": value for name, value in test.metrics.items()}
    if not run.is_noted:
        best = run.best.step if run.best else None
        run.note(
            "final",
            best_step=best,
            loss=_loss(valid),
            bpc=None,
            tokens=run.trainer.tokens,
            seconds=round(run.trainer.seconds, 3),
            **figures,
        )
    if valid.confusion is not None and can_draw():
        try:
            pictures.append(draw_confusion(path / "confusion.png", valid.confusion, run.head.labels, name=path.absolute().name))
        except OSError as error:  # the model matters more
            run.display.warn(f"no picture of confusions: {message_of(error)}")
    return {"valid": valid, "test": test, "pictures": tuple(pictures)}

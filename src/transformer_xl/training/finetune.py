"""Fine-tuning: a model that has read much learns what to say of a text.

It validates by the main metric of its task, ends when patience is used up, and is scored at the end with the weights that were
best.
"""

import hashlib
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch

from transformer_xl.checkpoint.run_directory import load
from transformer_xl.config.model import HeadConfig, TextSettings
from transformer_xl.config.recipes import load_task
from transformer_xl.config.run import RunConfig, merge
from transformer_xl.console import clock
from transformer_xl.data.labelled import (
    DocumentStream,
    LabelledRows,
    LabelledStream,
    LabelledTexts,
    LabelledWords,
    WeightedRows,
)
from transformer_xl.data.labels import balanced_weights, document_borders, labels_of
from transformer_xl.data.layout import Layout
from transformer_xl.data.squad import LabelledWindows, Question, WindowLayout
from transformer_xl.data.task_texts import TaskTexts, read_task
from transformer_xl.errors import CheckpointError, ConfigError, NotFiniteError, TrainingError, counted, shown
from transformer_xl.model.build import make_blueprint
from transformer_xl.model.task_model import TaskModel
from transformer_xl.pictures import can_draw
from transformer_xl.tasks.metrics import TaskScore, tally_of
from transformer_xl.tasks.predict import predictions
from transformer_xl.tokenizers.base import Tokenizer
from transformer_xl.training.display import Display
from transformer_xl.training.loop import Objective, Run, RunOutcome, StopError, conduct
from transformer_xl.training.pictures import MOST_CLASSES, draw_confusion
from transformer_xl.training.start import absolute_base, settings_of_base, settings_with_base, start
from transformer_xl.world import World

Columns = str | Sequence[str] | None

_MANY_EPOCHS = 20
_MOST_NAMED = 12  # classes in a note


@dataclass(frozen=True)
class TaskOutcome(RunOutcome):
    """How a call of `finetune` ended; see `RunOutcome` for the rest.

    Attributes:
        best_step: the step whose weights were best on the validation texts, which `txl.load` and `txl predict` take.
        valid: score of these weights on the validation texts; None if the run did not finish.
        test: the same on the test texts; None without such texts.
        pictures: what was drawn: the loss curve and the confusions.
    """

    best_step: int | None = None
    valid: TaskScore | None = None
    test: TaskScore | None = None
    pictures: tuple[Path, ...] = ()

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
    document: str | None = None,
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
        document: column of the document that a row belongs to, whose rows are read in order and with memory; "files": each file
            of a directory is a document; None: texts stand alone, or as the task says.
        seed: of the order of texts, dropout and the head's first weights; None: that of the task.
        resume: go on with the run in `out`, or start it if there is none.
        display: shows the progress; None: on stderr.

    Returns:
        How it ended.

    Raises:
        TxlError: any of the package's errors, each one line.
        OSError: a file cannot be read or written.
    """
    texts = {
        "text": text,
        "pair": pair,
        "document": document,
        "label": (label,) if isinstance(label, str) else label and tuple(label),
    }
    columns = {name: value for name, value in (texts | {"data": data and str(data)}).items() if value is not None}
    objective = FineTuning(None if source is None else str(source), task, list(overrides), columns, seed)
    with start(objective, out=out, resume=resume, display=display) as run:
        return conduct(run)


@dataclass
class FineTuning(Objective[TaskOutcome]):
    """To say of texts what their labels say; its fields are arguments of `finetune`."""

    base: str | None
    task: str | None
    overrides: list[str]
    columns: dict[str, Any]  # settings of the task, which count more than overrides
    seed: int | None
    texts: TaskTexts = field(init=False)
    rows: LabelledRows = field(init=False)  # the texts to learn from
    steps_per_epoch: int = field(init=False)  # of the first epoch

    command = "finetune"
    noun = "task"
    scoring_command = "finetune --resume --out"
    text = "the text to learn from or to validate on"

    def __post_init__(self) -> None:
        self.base = None if self.base is None else absolute_base(self.base)

    @property
    def begins(self) -> bool:
        return self.base is not None

    def recipe_name(self) -> str | None:
        return self.task and load_task(self.task)["name"]

    def new_settings(self) -> RunConfig:
        if self.base is None:
            raise ConfigError(
                "which model is to learn the task? give a run, an exported directory or a hub id, or go on with a run by "
                "--resume --out RUN"
            )
        if self.task is None:
            raise ConfigError("--task is missing, such as --task classification; docs/finetuning.md lists the tasks")
        theirs = settings_of_base(self.base)
        kept = {key: theirs[key] for key in ("model", "tokenizer", "data") if key in theirs}
        values = merge(merge(kept, {"model": {"head": None}}), load_task(self.task))
        return self.changed(settings_with_base(self.base, merge(values, {"task": {"base": self.base}}), self.overrides))

    def changed(self, config: RunConfig) -> RunConfig:
        config = config.changed(task=self.columns, train={} if self.seed is None else {"seed": self.seed})
        if config.task and not config.task.data:
            raise ConfigError("--data is missing: a file of texts with labels, or a directory of such files")
        return config

    def read(self, config: RunConfig, tokenizer: Tokenizer | None, *, fresh: bool) -> RunConfig:
        assert config.task is not None and tokenizer is not None
        known_labels = () if fresh or config.model.head is None else config.model.head.labels
        self.tokenizer, self.texts = tokenizer, read_task(config.task, seed=config.train.seed, known_labels=known_labels)
        if not fresh and config.model.head and config.model.head.labels != self.texts.labels:
            labels = " and ".join(shown(each)[1:-1] for each in (config.model.head.labels, self.texts.labels))
            raise CheckpointError(
                f"{self.text} is not the one that the run has read so far, because their labels differ: {labels}; restore it, "
                "or start another run with another --out"
            )
        config = with_head(config, self.texts) if fresh else config
        self.rows = rows_of(config, self.texts, tokenizer)
        self.steps_per_epoch = self._stream(config).segments_per_epoch
        config = within_epoch(config, self.steps_per_epoch) if fresh else config
        self.sizes = {"train": len(self.texts.train), "valid": len(self.texts.valid), "test": len(self.texts.test or ())}
        self.checksum = _checksum(self.rows, self.texts.valid)
        return config

    def stream(self, config: RunConfig, world: World) -> LabelledStream:
        if config.train.parallel == "fsdp" and not world.alone:
            raise ConfigError("train.parallel (fsdp) divides a model, which fine-tuning scores whole; use ddp")
        return self._stream(config, rank=world.rank, world_size=world.size)

    def _stream(self, config: RunConfig, **process: int) -> LabelledStream:
        sizes = {"batch_size": config.train.batch_size, "seed": config.train.seed}
        if config.model.head and config.model.head.in_documents:
            return DocumentStream(self.rows, document_borders(self.texts.train), **sizes, **process)
        return LabelledStream(self.rows, **sizes, **process)

    def contents(self, config: RunConfig) -> str:
        return f"{counted(self.sizes['train'], 'text')} to learn from, {self.sizes['valid']:,} to validate on"

    def notes(self, config: RunConfig) -> Iterator[str]:
        task, head, rows, valid = config.task, config.model.head, self.rows, self.texts.valid
        assert task is not None and head is not None
        yield from self.texts.notes
        if head.max_len is not None and task.max_len is None:
            yield (
                f"this model has no memory, so {head.max_len} tokens of a text are read; --set model.mem_len={head.max_len} "
                "reads all"
            )
        if head.kind in ("classification", "tokens"):
            unit = "texts" if head.kind == "classification" else "words"
            counts = Counter(label for each in valid for label in ([str(each.label)] if unit == "texts" else each.label))
            (label, n), *_ = counts.most_common(1)
            yield f"always saying {label!r} would be right for {n / counts.total():.1%} of the {unit} to validate on"
        if isinstance(rows, WeightedRows):
            weights = [f"{name} {weight:.3g}" for name, weight in zip(head.labels, rows.weights.tolist(), strict=True)]
            more = f" and {len(weights) - _MOST_NAMED:,} more" if len(weights) > _MOST_NAMED else ""
            yield f"weights of the classes ({task.class_weights}): {', '.join(weights[:_MOST_NAMED])}{more}"
        epochs = (config.train.max_steps or 0) / self.steps_per_epoch
        if epochs > _MANY_EPOCHS and task.patience is None:
            yield (
                f"{config.train.max_steps:,} steps are {epochs:.0f} passes over these texts; --set task.patience=5 ends "
                f"sooner, or --task {task.kind if task.kind != 'span' else 'squad'}, which is for fewer texts"
            )
        if isinstance(rows, LabelledWindows) and rows.n_lost:
            yield f"{rows.n_lost:,} answers begin or end inside of a token, so no prediction can be exactly one of them"

    def validate(self, run: Run[TaskOutcome]) -> list[tuple[float, float]]:
        """Score the weights in the first process, by the main metric and then by what the training lowers."""
        model, average, valid = cast("TaskModel", run.trainer.model), run.trainer.average, self.texts.valid
        scores: list[TaskScore] = []
        with run.world.agreed():
            try:
                if run.world.first:
                    scores.append(_score(run, model, valid, "validation"))
                    if average.count:
                        with average.in_place_of(model):
                            scores.append(_score(run, model, valid, "validating averaged weights"))
            except NotFiniteError:
                raise TrainingError(
                    f"diverged: scores of the validation texts are not finite numbers after step {run.trainer.step}; the "
                    "checkpoints before are intact, resume with a lower optim.lr"
                ) from None
        if scores:
            score, averaged = scores[0], scores[1:]
            figures = {f"average_{each.main_name}": each.main for each in averaged}
            run.note("valid", loss=_loss(score), bpc=None, **score.metrics, **figures)
            of_average = "".join(f"; averaged weights: {each.in_words()}" for each in averaged)
            run.display.say(f"step {run.trainer.step:,}: {score.in_words()}{of_average}")
        losses: list[list[float]] = run.world.from_first([[-each.main, _loss(each) or 0.0] for each in scores])
        return [(loss, tie_break) for loss, tie_break in losses]

    def conclude(self, run: Run[TaskOutcome], received: list[int]) -> TaskOutcome:
        """Score the best weights, which `load` takes, on the validation and test texts, and draw the confusions."""
        trainer = run.trainer
        why = f", because {run.since_best} validations in a row brought nothing better" if trainer.progress < 1 else ""
        did = f"{counted(trainer.step, 'step')}, {clock(trainer.seconds)} of training{why}"
        finished = trainer.step == run.began
        run.display.say(
            f"finished already: {did}; to train longer: {run.resume_command}" if finished else f"finished after {did}"
        )
        scores: dict[str, TaskScore] = {}
        with run.world.agreed():
            if run.world.first:
                scores = self._final_scores(run, received)
        outcome, path, head = self.outcome(run), run.directory.path, run.config.model.head
        pictures, confusion = outcome.pictures, scores["valid"].confusion if scores else None
        if confusion is not None and head is not None and len(head.labels) <= MOST_CLASSES and can_draw():
            pictures += (draw_confusion(path / "confusion.png", confusion, head.labels, name=path.absolute().name),)
        return replace(outcome, **scores, pictures=pictures)

    def _final_scores(self, run: Run[TaskOutcome], received: list[int]) -> dict[str, TaskScore]:
        """Return the scores of the best weights by the name of the texts, said and noted."""
        say, best = run.display.say, run.best
        model = load(run.directory.path, on_damaged=run.display.warn)[0].to(run.trainer.device)
        scores = {"valid": _score(run, model, self.texts.valid, "scoring", received)}
        if _set_threshold(run, model, scores["valid"]):
            scores["valid"] = _score(run, model, self.texts.valid, "scoring with the threshold of no answer", received)
        if self.texts.test:
            scores["test"] = _score(run, model, self.texts.test, "scoring the test texts", received)
        if best:
            say(f"best weights: those of step {best.step:,}{', averaged' if best.average else ''}")
        for name, score in scores.items():
            say(f"{'validation' if name == 'valid' else name}: {score.in_words()}")
        if remark := scores["valid"].remark:
            run.display.warn(remark)
        tested = scores["test"].metrics if "test" in scores else {}
        figures = scores["valid"].metrics | {f"test_{name}": value for name, value in tested.items()}
        run.note("final", best_step=best and best.step, loss=_loss(scores["valid"]), bpc=None, **figures)
        return scores

    def outcome(self, run: Run[TaskOutcome], stopped_by: signal.Signals | None = None) -> TaskOutcome:
        picture, best = run.curve(), run.best and run.best.step
        return TaskOutcome(**run.facts(stopped_by), best_step=best, pictures=(picture,) if picture else ())


def with_head(config: RunConfig, texts: TaskTexts) -> RunConfig:
    """Return the settings of a new run with those of its head."""
    task, train = config.task, config.train
    assert task is not None
    learned, in_documents = make_blueprint(config.model).learned_length, task.document is not None
    tgt_len = train.tgt_len if learned is None else min(train.tgt_len, learned)
    reading = {name: getattr(task, name) for name in TextSettings.model_fields}
    is_short = task.max_len is None and task.summary == "last" and task.kind != "span" and not in_documents
    if config.model.mem_len == 0 and is_short:
        reading["max_len"] = tgt_len
    head = HeadConfig(kind=task.kind, labels=texts.labels, tgt_len=tgt_len, in_documents=in_documents, **reading)
    return config.changed(model={"head": head.model_dump()})


def within_epoch(config: RunConfig, n_step: int) -> RunConfig:
    """Return settings with intervals no longer than an epoch, which has `n_step` steps."""
    train = config.train
    intervals = {name: min(getattr(train, name), n_step) for name in ("eval_interval", "checkpoint_interval")}
    intervals["log_interval"] = min(train.log_interval, max(1, intervals["eval_interval"] // 2))
    return config.changed(train=intervals)


def rows_of(config: RunConfig, texts: TaskTexts, tokenizer: Tokenizer) -> LabelledRows:
    """Return the training texts as rows of ids."""
    head = config.model.head
    assert head is not None
    if head.kind == "span":
        return LabelledWindows(texts.train, WindowLayout.of(config.model, tokenizer))
    kind = LabelledWords if head.kind == "tokens" else LabelledTexts
    rows = kind(texts.train, Layout.of(config.model, tokenizer), head)
    if config.task is None or config.task.class_weights is None:
        return rows
    # one long sentence lengthens no others
    parts = [[each] for each in texts.train] if head.kind == "tokens" else [texts.train]
    labels = torch.cat([labels_of(head, part).flatten() for part in parts])
    return WeightedRows(rows, balanced_weights(labels, len(head.labels)))


def _checksum(rows: LabelledRows, valid: Sequence[Any]) -> str:
    """Return a hash of what is learned from and validated on, wherever it lies: scores of other texts cannot be compared."""
    digest = hashlib.sha256(f"{rows.checksum}".encode())
    for each in valid:
        digest.update(repr(replace(each, place="")).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def _score(run: Run[TaskOutcome], model: TaskModel, texts: Sequence[Any], what: str, received: Sequence[int] = ()) -> TaskScore:
    """Score a model, in this process alone; one of the `received` signals ends it.

    Raises:
        StopError: one has.
    """
    show = run.display.scoring(what, len(texts), unit="texts")
    assert model.config.head is not None
    tally = tally_of(model.config.head.kind, model.config.head.labels)
    examples = [text.example if isinstance(text, Question) else text for text in texts]
    how: dict[str, Any] = {"batch_size": run.config.eval.batch_size, "precision": run.trainer.precision}
    for prediction in predictions(model, run.objective.tokenizer, examples, **how):
        tally.add(prediction)
        show(1)
        if received and run.world.alone:
            raise StopError(signal.Signals(received[0]))
    return tally.score()


def _loss(score: TaskScore) -> float | None:
    """Return what the training lowers, of a score; None for answers."""
    return score.metrics.get("nats", score.metrics.get("mse"))


def _set_threshold(run: Run[TaskOutcome], model: TaskModel, score: TaskScore) -> bool:
    """Take over the threshold of no answer that was best, and return whether it changed."""
    threshold, head = score.metrics.get("best_f1_threshold"), model.config.head
    if threshold is None or head is None or threshold == head.no_answer_above:
        return False
    run.config = run.config.changed(model={"head": {"no_answer_above": min(max(threshold, 0.0), 1.0)}})
    model.config = run.config.model
    run.directory.save_config(run.config, run.objective.tokenizer)
    run.display.say(f"no answer is given where its probability is above {threshold:.4f}, which was best in validation")
    return True

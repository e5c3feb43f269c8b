"""The parts of a training run, its counts, and how it ends."""

import shlex
import signal
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from transformer_xl.checkpoint.run_directory import RunDirectory
from transformer_xl.checkpoint.store import CheckpointStore
from transformer_xl.config.run import RunConfig
from transformer_xl.data.prepare import PreparedCorpus
from transformer_xl.errors import CheckpointError, TrainingError
from transformer_xl.reading.evaluation import Score
from transformer_xl.tokenizers.base import Tokenizer
from transformer_xl.training.display import Display
from transformer_xl.training.record import Record
from transformer_xl.training.trainer import StepResult, Trainer
from transformer_xl.world import World


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
    predicts: str = "token"  # what the scores count, see `RunConfig.predicts`


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


class StopError(Exception):
    """A signal, its argument, ends the final scoring."""


@dataclass(frozen=True)
class ValidationScores:
    """How well a model predicts the validation split, or its beginning."""

    plain: Score  # with memory
    average: Score | None = None  # of averaged weights, with memory
    without_memory: Score | None = None


@dataclass
class Run(ABC):
    """The parts of a run, and its counts; a subclass says what it learns from and how it is scored."""

    directory: RunDirectory
    config: RunConfig
    tokenizer: Tokenizer
    text: str  # name of what the training reads
    training_sha256: str  # of it
    trainer: Trainer
    world: World
    display: Display
    record: Record | None  # None in processes other than the first
    checkpoint_bytes: int
    interval: Interval = field(default_factory=Interval)
    best: Best | None = None
    waiting: int = 0  # validations since the best one; only tasks with `task.patience` count them

    command: ClassVar[str]
    """The command that begins and resumes such runs."""

    @abstractmethod
    def validate(self) -> Best | None:
        """Score the validation split; return the score if it is the best so far."""

    def take_final(self, entry: dict[str, Any] | None) -> None:  # noqa: B027 - most runs keep nothing of it
        """Take the final entry of the log, which a process wrote that finished the run; None: there is none."""

    @property
    def is_over(self) -> bool:
        """Whether the budget is used up, or the patience."""
        patience = self.config.task and self.config.task.patience
        return self.trainer.progress >= 1 or bool(patience and self.waiting >= patience)

    @property
    def store(self) -> CheckpointStore:
        """The run's checkpoints."""
        return self.directory.store(keep=self.config.train.keep_checkpoints)

    @property
    def where(self) -> str:
        """Its directory, quoted for a shell."""
        return shlex.quote(str(self.directory.path))

    def note(self, kind: str, **values: Any) -> None:
        """Write an entry of the log."""
        if self.record:
            self.record.write(kind, self.trainer.step, **values)

    def stopped_by(self, received: list[int]) -> signal.Signals | None:
        """Return the signal that stops the run, in any process; all call this."""
        own = received[0] if received else signal.SIGPIPE if self.display.is_lost else None
        return next((signal.Signals(number) for number in self.world.exchange(own) if number is not None), None)

    def draw_failed(self, error: TrainingError) -> None:
        """Draw the loss curve of a run that an error ends, and say where it is."""
        if self.record:
            with suppress(CheckpointError, OSError):  # the other error matters more
                if picture := self.record.draw(self.config, end=str(error).partition(":")[0]):
                    self.display.say(f"loss curve: {picture}")


@dataclass
class TextRun(Run):
    """A run that trains on a text, and predicts another part of it."""

    corpus: PreparedCorpus = field(kw_only=True)
    validated: ValidationScores | None = None  # by the last validation of this process
    recorded: ValidationScores | None = None  # by the process that finished the run

    command: ClassVar[str] = "train"

    def outcome(self, scores: ValidationScores | None = None, *, stopped_by: signal.Signals | None = None) -> Outcome:
        """Draw the loss curve, and return how the run ended."""
        picture = self.record.draw(self.config) if self.record else None
        trainer = self.trainer
        return Outcome(
            self.directory.path,
            self.is_over,
            trainer.step,
            trainer.tokens,
            trainer.seconds,
            scores and scores.plain,
            scores and scores.without_memory,
            picture,
            scores and scores.average,
            stopped_by,
            self.config.predicts,
        )

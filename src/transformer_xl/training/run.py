"""What the loop of a training run works with, and what it counts."""

from dataclasses import dataclass, field

from transformer_xl.checkpoint.run_directory import RunDirectory
from transformer_xl.config import RunConfig
from transformer_xl.data.prepare import PreparedCorpus
from transformer_xl.data.tokenizers import Tokenizer
from transformer_xl.training.display import Display
from transformer_xl.training.record import Record
from transformer_xl.training.trainer import StepResult, Trainer
from transformer_xl.world import World


@dataclass
class Interval:
    """Sums since the last line of the log; part of the state, so that a resumed run logs the same lines.

    Attributes:
        nats: summed loss of the steps that were not skipped.
        tokens: their tokens.
        skipped: steps skipped.
        seconds: time that all steps took.
        scored: tokens that the loss is of.
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
class Best:
    """The best validation so far: its loss in nats per token, and the step after which it was found."""

    loss: float
    step: int
    average: bool = False  # the averaged weights have this loss, not the plain ones


@dataclass
class Run:
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
    best: Best | None = None

    def __post_init__(self) -> None:
        self.store = self.directory.store(keep=self.config.train.keep_checkpoints)

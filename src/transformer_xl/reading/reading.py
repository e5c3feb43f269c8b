"""`Reading`: how a text is read to score it; the one place that says which options of reading there are."""

from dataclasses import dataclass, replace
from typing import Any, Self

from transformer_xl.config.model import ModelConfig
from transformer_xl.config.run import RunConfig
from transformer_xl.errors import ConfigError
from transformer_xl.kernels.device import PrecisionName
from transformer_xl.model.base import LanguageModel


def memory_in_words(config: ModelConfig, mem_len: int | None) -> str:
    """Return with what memory a model of these settings reads if it has this many positions, in two to four words."""
    mem_len = config.mem_len if mem_len is None else mem_len
    if not mem_len or config.remembers == "nothing":
        return "no memory"
    return "a state carried on" if config.remembers == "state" else f"memory of {mem_len:,}"


@dataclass(frozen=True)
class Reading:
    """How a text is read to score it.

    Attributes:
        tgt_len: tokens per segment.
        mem_len: positions of memory; None: the model's; 0: none.
        ext_len: tokens before each segment that are read again with it instead of being remembered (the authors' extended
            context); their states are as new as the segment's, but they are computed twice.
        batch_size: lanes, or texts, read side by side, at most; fewer lanes where they would be too short to warm up the next.
        same_length: the same number of keys for every query; None: as the model does. Not used without memory.
        clamp_len: largest distance told apart; None: as the model does.
        precision: of the matrix products, and of keys and values; int8 rounds the weights, auto takes what the device
            multiplies natively.

    Raises:
        ConfigError: sizes below 1, or `ext_len` below 0.

    Example:
        >>> Reading(mem_len=128).without_memory() == Reading(mem_len=0)
        True
    """

    tgt_len: int = 128
    mem_len: int | None = None
    ext_len: int = 0
    batch_size: int = 1
    same_length: bool | None = None
    clamp_len: int | None = None
    precision: PrecisionName = "fp32"

    def __post_init__(self) -> None:
        if self.tgt_len < 1 or self.batch_size < 1 or self.ext_len < 0:
            raise ConfigError(
                f"tgt_len ({self.tgt_len}) and batch_size ({self.batch_size}) must be at least 1, and ext_len "
                f"({self.ext_len}) at least 0"
            )

    @classmethod
    def of_run(cls, config: RunConfig, **changes: Any) -> Self:
        """Return how `txl eval` reads for a run, with changed attributes; those that are None are the run's own."""
        own = cls(
            tgt_len=config.eval_tgt_len,
            mem_len=config.eval_mem_len,
            ext_len=config.eval.ext_len,
            batch_size=config.eval.batch_size,
            same_length=config.eval.same_length,
            clamp_len=config.eval.clamp_len,
            precision="auto",
        )
        return replace(own, **{name: value for name, value in changes.items() if value is not None})

    @property
    def length(self) -> int:
        """Positions before a segment that its tokens may see: the attention length."""
        return (self.mem_len or 0) + self.ext_len

    def context(self, config: ModelConfig) -> int:
        """Return how many tokens the last one of a segment sees, itself included, or with `same_length` each of them.

        Example:
            >>> from transformer_xl.config.model import TransformerXLConfig
            >>> Reading(tgt_len=16, mem_len=128).context(TransformerXLConfig())
            144
        """
        same_length = getattr(config, "same_length", False) if self.same_length is None else self.same_length
        if same_length and self.mem_len:
            return self.mem_len + getattr(config, "same_length_besides_self", 0)
        return self.length + self.tgt_len

    def in_words(self, config: ModelConfig) -> str:
        """Return how a model of these settings is read, in words.

        Example:
            >>> from transformer_xl.config.model import LstmConfig
            >>> Reading(tgt_len=16, mem_len=1).in_words(LstmConfig())
            'segments of 16, a state carried on'
            >>> Reading(tgt_len=16, mem_len=0, ext_len=48).in_words(LstmConfig())
            'segments of 16, 48 read again before each, no memory'
        """
        again = f", {self.ext_len:,} read again before each" if self.ext_len else ""
        return f"segments of {self.tgt_len:,}{again}, {memory_in_words(config, self.mem_len)}"

    def without_memory(self) -> Self:
        """Return the same without memory."""
        return replace(self, mem_len=0)

    def view(self, model: LanguageModel) -> LanguageModel:
        """Return the model with these lengths; ConfigError if it cannot be read with them."""
        same_length = False if self.mem_len == 0 else self.same_length
        return model.with_context(mem_len=self.mem_len, clamp_len=self.clamp_len, same_length=same_length, ext_len=self.ext_len)

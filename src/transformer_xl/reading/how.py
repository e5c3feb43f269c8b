"""How a text is read to score it: in segments of what length, after what memory, with what read again."""

from dataclasses import dataclass, replace
from typing import Any, Self

from transformer_xl.config import RunConfig
from transformer_xl.errors import ConfigError
from transformer_xl.model.language_model import LanguageModel


@dataclass(frozen=True)
class Reading:
    """How a text is read; `evaluate(model, ids, **vars(reading))` reads it so.

    Attributes:
        tgt_len: tokens per segment.
        mem_len: positions of memory.
        ext_len: tokens before each segment that are read again with it instead of being remembered.
        batch_size: lanes read side by side.
        same_length: the same number of keys for every query, which there is none of without memory; None: as the model does.
        clamp_len: largest distance told apart; None: as the model does.

    Example:
        >>> Reading(tgt_len=64, mem_len=128, same_length=True).without_memory()
        Reading(tgt_len=64, mem_len=0, ext_len=0, batch_size=1, same_length=False, clamp_len=None)
    """

    tgt_len: int
    mem_len: int
    ext_len: int = 0
    batch_size: int = 1
    same_length: bool | None = None
    clamp_len: int | None = None

    def __post_init__(self) -> None:
        if not self.mem_len:
            object.__setattr__(self, "same_length", False)

    @classmethod
    def of_run(cls, config: RunConfig, **changes: Any) -> Self:
        """Return how `txl eval` reads for a run.

        Args:
            config: of the run.
            changes: attributes that are other ones; None: the run's own.
        """
        own = {
            "tgt_len": config.eval_tgt_len,
            "mem_len": config.eval_mem_len,
            "ext_len": config.eval.ext_len,
            "batch_size": config.eval.batch_size,
            "same_length": config.eval.same_length,
            "clamp_len": config.eval.clamp_len,
        }
        return cls(**own | {name: value for name, value in changes.items() if value is not None})

    @property
    def length(self) -> int:
        """Positions before a segment that its tokens may see: the attention length."""
        return self.mem_len + self.ext_len

    def __str__(self) -> str:
        """Return it in words.

        Example:
            >>> print(Reading(tgt_len=16, mem_len=0, ext_len=48))
            segments of 16, 48 read again before each, no memory
        """
        again = f", {self.ext_len:,} read again before each" if self.ext_len else ""
        memory = f"memory of {self.mem_len:,}" if self.mem_len else "no memory"
        return f"segments of {self.tgt_len:,}{again}, {memory}"

    def without_memory(self) -> Self:
        """Return the same without memory."""
        return replace(self, mem_len=0)

    def view(self, model: LanguageModel) -> LanguageModel:
        """Return the model reading so.

        Raises:
            ConfigError: lengths that the model cannot be read with.
        """
        if self.tgt_len < 1:
            raise ConfigError(f"tgt_len ({self.tgt_len}) must be at least 1")
        return model.with_context(
            mem_len=self.mem_len, clamp_len=self.clamp_len, same_length=self.same_length, ext_len=self.ext_len
        )

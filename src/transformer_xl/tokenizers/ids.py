"""Ids as their own text, which needs no vocabulary but its size."""

import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Literal

import numpy as np

from transformer_xl.errors import TokenizerError, shown
from transformer_xl.tokenizers.base import PieceTokenizer, require

MOST_IDS = 2**31 - 1
"""The largest vocabulary."""

PadId = int | Literal["auto"] | None


class _Numbers(Sequence[bytes]):
    """The pieces, made when they are asked for, because a vocabulary may be large."""

    def __init__(self, n: int) -> None:
        self._n = n

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, index: int) -> bytes:  # pyright: ignore[reportIncompatibleMethodOverride] - no slices
        return b"%d " % index


class IdTokenizer(PieceTokenizer):
    r"""Ids that come from elsewhere. Their text is decimal numbers, each followed by a space.

    Args:
        vocab_size: the number of ids.
        pad_id: what fills up rows of files at their ends, and is no text; None: nothing; auto: nobody has said.

    Example:
        >>> tokenizer = IdTokenizer(100)
        >>> tokenizer.encode("12 7\n9").tolist(), tokenizer.decode([12, 7, 9])
        ([12, 7, 9], '12 7 9 ')
    """

    kind = "ids"

    def __init__(self, vocab_size: int, pad_id: PadId = "auto") -> None:
        require(pad_id in (None, "auto") or type(pad_id) is int, "pad_id is no integer")
        require(0 < vocab_size <= MOST_IDS, "vocab_size is not from 1 to 2,147,483,647")
        super().__init__(_Numbers(vocab_size))
        self.pad_id: PadId = pad_id

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in super().to_dict().items() if value != "auto"}

    @cached_property
    def counts(self) -> str:
        return "id"

    def begins_word(self) -> np.ndarray:
        return np.ones(self.vocab_size, bool)

    def encode(self, text: str) -> np.ndarray:
        return self.encode_with_offsets(text)[0]

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        numbers = list(re.finditer(r"\S+", text))
        for match in numbers:
            number = match.group()
            if not (number.isascii() and number.isdigit() and len(number) < 20 and int(number) < self.vocab_size):
                raise TokenizerError(
                    f"{shown(number)} at character {match.start()} is no id of this vocabulary (0 … {self.vocab_size - 1}); "
                    "write numbers with spaces between them"
                )
        ids, starts, ends = np.array([(int(match.group()), *match.span()) for match in numbers], np.int64).reshape(-1, 3).T
        return ids, starts, ends

"""`MemoryCache`: the memory, where transformers keeps keys and values while it generates."""

import torch
from torch import Tensor
from transformers import Cache

from transformer_xl.model.memory import Mems


class MemoryCache(Cache):
    """A memory that transformers' `generate` carries from token to token; its size is fixed, however much was read.

    `mems` is the memory now, or None. It is replaced and never changed in place, so a reference to it is a snapshot.
    """

    def __init__(self, mems: Mems | None = None) -> None:
        super().__init__(layers=[])
        self.mems = mems
        self._n_read = 0

    def advance(self, mems: Mems, n_tokens: int) -> None:
        """Take the memory after `n_tokens` more tokens, padding included, as transformers counts."""
        self.mems = mems
        self._n_read += n_tokens

    def __len__(self) -> int:
        return 0 if self.mems is None else len(self.mems.hidden)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._n_read

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.mems is not None:
            self.mems = self.mems.select(indices.to(self.mems.n_valid.device))

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.mems is not None:
            self.batch_select_indices(torch.arange(self.mems.batch_size).repeat_interleave(repeats))

    def reset(self) -> None:
        self.mems, self._n_read = None, 0

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise ValueError(f"a memory cannot unread tokens ({tokens_to_remove}); read again from the beginning")

    @property
    def batch_size(self) -> int:
        return -1 if self.mems is None else self.mems.batch_size

    @property
    def is_initialized(self) -> bool:
        return self.mems is not None

    @property
    def is_linear(self) -> list[bool]:
        return [False]  # so of ids that begin with what was read, `generate` reads only the rest

    @property
    def is_croppable(self) -> bool:
        return False

"""Whether token ids are ids of the vocabulary."""

import numpy as np
from torch import Tensor

from transformer_xl.errors import TokenizerError


def check_ids(ids: Tensor | np.ndarray, *, vocab_size: int) -> None:
    """Refuse ids that a model has no vector for.

    Args:
        ids: integers of any shape; may be none.
        vocab_size: V; ids are 0 … V - 1.

    Raises:
        TokenizerError: one that lies outside.
    """
    if 0 in ids.shape:
        return
    for extreme in (int(ids.min()), int(ids.max())):
        if not 0 <= extreme < vocab_size:
            raise TokenizerError(f"token id {extreme} is outside the vocabulary ({vocab_size}); is this the model's tokenizer?")

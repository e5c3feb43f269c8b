"""Ids of the vocabulary are let through, others are not."""

import numpy as np
import pytest
import torch

from transformer_xl.errors import TokenizerError
from transformer_xl.model.token_ids import check_ids


@pytest.mark.parametrize("kind", [torch.tensor, np.array])
def test_ids_are_those_from_0_to_the_size(kind) -> None:
    check_ids(kind([[0, 12], [3, 4]]), vocab_size=13)
    check_ids(kind([]), vocab_size=13)
    for wrong in (-1, 13, 2**40):
        with pytest.raises(TokenizerError, match=rf"^token id {wrong} is outside the vocabulary \(13\); is this the model's"):
            check_ids(kind([[5, wrong], [0, 1]]), vocab_size=13)

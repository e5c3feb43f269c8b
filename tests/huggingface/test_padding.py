"""Padding at either side of a text becomes padding at its left."""

import pytest
import torch

pytest.importorskip("transformers", reason="the extra 'hf' is not installed")

from transformer_xl.huggingface.padding import Padding


def test_rows_turn_and_turn_back() -> None:
    real = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]]).bool()
    padding = Padding.of(real)
    assert padding is not None
    assert padding.n_pad.tolist() == [2, 2, 4, 0] and padding.shift.tolist() == [2, 1, 0, 0]
    x = torch.randn(4, 4, 3)
    assert padding.turn(x)[0, 2:].equal(x[0, :2]) and padding.turn_back(padding.turn(x)).equal(x)

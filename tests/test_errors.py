"""A lack of memory becomes a one-line error; other errors stay as they are."""

import pytest
import torch

from transformer_xl.errors import ConfigError, room_for


@pytest.mark.parametrize("n", [10**14, 10**18, 10**19, 10**30])
def test_what_cannot_be_allocated(n: int) -> None:
    with (
        pytest.raises(ConfigError, match=r"^not enough memory for a table; lower --rows$"),
        room_for("a table", "lower --rows"),
    ):
        torch.zeros(n, 16, 4)


@pytest.mark.parametrize("error", [MemoryError(), OverflowError(), torch.OutOfMemoryError("CUDA out of memory. Tried")])
def test_errors_of_memory(error: Exception) -> None:
    with pytest.raises(ConfigError), room_for("a table", "lower --rows"):
        raise error


@pytest.mark.parametrize(
    "error", [RuntimeError("an illegal memory access"), TypeError("of a wrong type"), ValueError("overflow")]
)
def test_other_errors_stay_what_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, room_for("a table", "lower --rows"):
        raise error
    assert caught.value is error

"""A lack of memory becomes a one-line error; other errors stay as they are."""

import pytest
import torch

from transformer_xl.errors import ConfigError, one_line, room_for


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


def test_a_message_is_one_line_of_bounded_length() -> None:
    assert one_line(ConfigError("a\n  b")) == "a b"
    with pytest.raises(ValueError) as digits:
        int("9" * 5000)
    assert one_line(digits.value) == "a number has thousands of digits"
    text = one_line(ConfigError(f"'{'n' * 5000}' is wrong; choose another"))
    assert len(text) < 700
    assert text.startswith("'nnn")
    assert text.endswith("nnn' is wrong; choose another")

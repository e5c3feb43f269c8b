"""Settings of any kind: frozen, checked, and every mistake in one line."""

from typing import Any

import pytest
from pydantic import Field

from transformer_xl.config.settings import Natural, Positive, Probability, Settings
from transformer_xl.errors import ConfigError


class Inner(Settings):
    width: Positive = 3


class Toy(Settings):
    n: Natural = 0
    p: Probability = 0.5
    inner: Inner = Field(default_factory=Inner)


def test_settings_are_frozen_and_equal_by_value() -> None:
    toy = Toy(n=2)
    assert toy == Toy(n=2) != Toy(n=3)
    with pytest.raises(Exception, match="frozen"):
        toy.n = 3


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"n": -1}, "n (-1) must be greater than or equal to 0"),
        ({"p": 1}, "p (1) must be less than 1"),
        ({"p": float("nan")}, "p (nan) must be a finite number"),
        ({"n": -1, "p": 2}, "n (-1) must be greater than or equal to 0; p (2) must be less than 1"),
        ({"m": 1}, "unknown key 'm'; known: inner, n, p"),
        ({"iner": {}}, "unknown key 'iner'; did you mean 'inner'?"),
        ({"inner": {"width": 0}}, "inner: width (0) must be greater than or equal to 1"),
        ({"inner": {"widht": 1}}, "inner: unknown key 'widht'; did you mean 'width'?"),
    ],
)
def test_every_mistake_is_told_in_one_line(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Toy(**values)
    assert str(caught.value) == message

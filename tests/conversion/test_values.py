"""Foreign settings are read strictly, and values of other types are refused in few words."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transformer_xl.conversion.values import integer, integers, number, one_of, truth, truths
from transformer_xl.errors import ConfigError, shown

ENORMOUS = 10**5000


WRONG: list[tuple[Any, Any]] = [
    (integer, True),
    (integer, 2.0),
    (integer, "2"),
    (integer, None),
    (integer, [2]),
    (integer, 2**63),
    (integer, -ENORMOUS),
    (number, True),
    (number, "0.1"),
    (number, ENORMOUS),
    (truth, 2),
    (truth, 1.0),
    (truth, "true"),
    (truth, None),
    (integers, 3),
    (integers, "12"),
    (integers, [1, [2]]),
    (integers, [True]),
    (integers, [1] * 101),
    (integers, {"1": 1}),
]


@pytest.mark.parametrize(("read", "value"), WRONG, ids=lambda case: getattr(case, "__name__", type(case).__name__))
def test_values_of_other_types_are_refused_in_few_words(read, value):
    with pytest.raises(ConfigError) as error:
        read({"size": value}, "size")
    assert str(error.value).startswith("size ")
    assert len(str(error.value)) < 250


def test_values_of_the_right_types_are_taken():
    values = {"n": -3, "x": 2, "y": 0.5, "yes": 1, "no": False, "sizes": (1, 2), "flags": [True, 0], "kind": "a"}
    assert integer(values, "n") == -3
    assert [number(values, name) for name in ("x", "y")] == [2.0, 0.5]
    assert [truth(values, name) for name in ("yes", "no")] == [True, False]
    assert integers(values, "sizes") == (1, 2)
    assert truths(values, "flags", length=3) == (True, False, False)
    assert truths(values, "flags", length=1) == (True,)
    assert one_of(values, "kind", ("b", "a")) == "a"
    with pytest.raises(ConfigError, match=r"kind \('a'\) must be 'b' or 'c'"):
        one_of(values, "kind", ("b", "c"))
    with pytest.raises(ConfigError, match=r"yes \(1\) must be True"):
        one_of(values, "yes", (True,))
    with pytest.raises(ConfigError, match="gone is missing"):
        number(values, "gone")


@given(
    st.recursive(
        st.text(max_size=300) | st.integers() | st.floats() | st.none(), lambda inner: st.lists(inner) | st.tuples(inner)
    )
)
def test_what_messages_show_is_one_short_line(value):
    text = shown(value)
    assert text.isprintable()
    assert len(text) < 2000
    assert shown(ENORMOUS) == "an enormous integer"

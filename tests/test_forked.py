"""The server that forks processes for tests still answers after errors."""

import pytest

from tests.forked import run_forked


def test_mistakes_and_late_answers_are_told_and_forgotten() -> None:
    (outcome,) = run_forked("operator:nothing_of_that_name", 1)
    assert outcome["type"] == "AttributeError"
    assert run_forked("operator:add", 1, 1, 2) == [3]
    with pytest.raises(ValueError, match="Expecting value"):
        run_forked("no_such_module:add", 1)
    with pytest.raises(TimeoutError, match=r"no answer within 0\.5 seconds"):
        run_forked("time:sleep", 1, 2, timeout=0.5)
    assert run_forked("operator:add", 2, 1, 2) == [3, 3]

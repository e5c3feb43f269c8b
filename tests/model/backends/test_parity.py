"""Every backend against the equation: outputs, and the gradients of queries, keys, values, position keys, u and v."""

import pytest
import torch

from tests.helpers import assert_close
from tests.model.backends.attention_case import Case
from transformer_xl.model.attention.equation import relative_attention
from transformer_xl.model.backends import choose_backend

CPU = torch.device("cpu")
SHAPES = {
    "odd sizes": {"B": 2, "T": 7, "M": 6, "N": 3, "H": 5},
    "no memory": {"B": 2, "T": 7, "M": 0, "N": 2, "H": 4},
    "one token": {"B": 3, "T": 1, "M": 5, "N": 1, "H": 4},
    "long memory": {"B": 2, "T": 3, "M": 40, "N": 1, "H": 8},
    "one row's ages for all": {"B": 2, "T": 5, "M": 4, "N": 2, "H": 4, "ages": "equal"},
    "full memory": {"B": 2, "T": 5, "M": 4, "N": 2, "H": 4, "ages": "full"},
    "documents": {"B": 2, "T": 19, "M": 5, "N": 2, "H": 4, "ages": "documents"},
    "window": {"B": 2, "T": 9, "M": 7, "N": 2, "H": 4, "window": 4},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["matmul", "sdpa"])
def test_backend_equals_the_equation(name, shape):
    case = Case.draw(**SHAPES[shape])
    expected = case.run(relative_attention)
    for what, actual in case.run(choose_backend(name, CPU)).items():
        assert_close(f"{what} of {name}", actual, expected[what], 1e-5)


@pytest.mark.parametrize("name", ["equation", "matmul", "sdpa"])
def test_dropout_keeps_the_mean(name):
    case = Case.draw(B=1, T=3, M=3, N=2, H=4)
    attend = choose_backend(name, CPU)
    with torch.no_grad():
        drawn = torch.stack([case.attend(attend, dropatt=0.4) for _ in range(2000)])
        kept = case.attend(attend)
    assert not torch.equal(drawn[0], drawn[1])
    error = drawn.std(0) / len(drawn) ** 0.5
    assert ((drawn.mean(0) - kept).abs() <= 5 * error + 1e-6).all()


@pytest.mark.parametrize("name", ["equation", "matmul", "sdpa"])
def test_dropout_drops_the_share_asked_for(name):
    """Values that are the unit vectors show the weights."""
    S = 60
    case = Case.draw(B=20, T=1, M=S - 1, N=2, H=S, ages="full")
    case.inputs["v"] = torch.eye(S)[:, None].expand(20, S, 2, S)
    with torch.no_grad():
        dropped = case.attend(choose_backend(name, CPU), dropatt=0.4) == 0
        assert not (case.attend(choose_backend(name, CPU)) == 0).any()
    assert dropped.double().mean().item() == pytest.approx(0.4, abs=0.05)

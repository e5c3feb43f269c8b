"""Every backend against the equation: outputs, and the gradients of queries, keys, values, and all parts of positions."""

import pytest
import torch

from tests.helpers import assert_close
from tests.kernels.attention_case import Case
from transformer_xl.kernels import cpu_attention, cpu_linear
from transformer_xl.kernels.choose import choose_backend
from transformer_xl.kernels.equation import relative_attention

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
@pytest.mark.parametrize("parts", ["uvr", "urb", "b", ""])  # of the paper, of Shaw, of ALiBi, and by content alone
def test_backend_equals_the_equation(name, shape, parts):
    case = Case.draw(**SHAPES[shape], parts=parts)
    expected = case.run(relative_attention)
    for what, actual in case.run(choose_backend(name, CPU)).items():
        assert_close(f"{what} of {name}", actual, expected[what], 1e-5)


@pytest.mark.parametrize("has_onednn", [False, True])
@pytest.mark.parametrize("n_rows", [1, 2, 6])
@pytest.mark.parametrize("parts", ["uvr", "urb", "b"])
def test_groups_of_rows_and_heads_are_the_equation(monkeypatch, parts, n_rows, has_onednn):
    """Some rows of a head at a time, or some heads of all rows, by either of PyTorch's libraries."""
    monkeypatch.setattr(cpu_attention, "_CACHED_BYTES", n_rows * 7 * 13 * 8)
    monkeypatch.setattr(cpu_linear, "_LEAST_WORK", 1)
    monkeypatch.setattr(cpu_linear, "_prefers_onednn", lambda: has_onednn and hasattr(torch.ops.mkldnn, "_linear_pointwise"))
    case = Case.draw(B=3, T=7, M=6, N=3, H=5, parts=parts)
    expected = case.run(relative_attention)
    for what, actual in case.run(choose_backend("matmul", CPU)).items():
        assert_close(what, actual, expected[what], 1e-5)


def test_a_bias_may_lie_by_heads(monkeypatch):
    """Of a single query and of some heads it is a part of its memory, which is not copied by itself."""
    monkeypatch.setattr(cpu_attention, "_CACHED_BYTES", 7 * 8)
    case = Case.draw(B=1, T=1, M=6, N=3, H=5, parts="b")
    case.inputs["b"] = case.inputs["b"].T.contiguous().T
    assert_close("output", case.attend(choose_backend("matmul", CPU)), case.attend(relative_attention), 1e-5)


@pytest.mark.parametrize("name", ["equation", "matmul", "sdpa"])
def test_dropout_keeps_the_mean_and_drops_the_share_asked_for(name):
    """Values that are the unit vectors show the weights."""
    S = 6
    case = Case.draw(B=2, T=3, M=S - 3, N=2, H=S)
    case.inputs["values"] = torch.eye(S)[:, None].expand(2, S, 2, S)
    attend = choose_backend(name, CPU)
    with torch.no_grad():
        kept = case.attend(attend)
        drawn = torch.stack([case.attend(attend, dropatt=0.4) for _ in range(1000)])
    assert not torch.equal(drawn[0], drawn[1])
    assert (drawn[:, kept > 0] == 0).double().mean().item() == pytest.approx(0.4, abs=0.01)
    error = drawn.std(0) / len(drawn) ** 0.5
    assert ((drawn.mean(0) - kept).abs() <= 5 * error + 1e-6).all()

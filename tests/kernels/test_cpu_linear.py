"""Products by oneDNN are those of `F.linear`, with every gradient, and only where both can be chosen."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.helpers import assert_close
from transformer_xl.kernels import cpu_linear as products
from transformer_xl.kernels.cpu_linear import linear

pytestmark = pytest.mark.skipif(not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="this PyTorch has no oneDNN")


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Prefer oneDNN whatever the processor, for products of any size; list what it multiplies."""
    calls: list[Tensor] = []
    apply = products._Product.apply

    def counted(*arguments: Tensor) -> Tensor:
        calls.append(arguments[0])
        return apply(*arguments)

    monkeypatch.setattr(products, "_LEAST_WORK", 1)
    monkeypatch.setattr(products, "_prefers_onednn", lambda: True)
    monkeypatch.setattr(products._Product, "apply", counted)
    return calls


@pytest.mark.parametrize("shape", [(5, 7), (2, 3, 7), (2, 3, 4, 7), (1, 7)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_and_gradients_are_those_of_linear(chosen: list[Tensor], shape: tuple[int, ...], has_bias: bool) -> None:
    x, weight = torch.randn(shape, requires_grad=True), torch.randn(9, 7, requires_grad=True)
    bias = torch.randn(9, requires_grad=True) if has_bias else None
    inputs = [y for y in (x, weight, bias) if y is not None]
    found = []
    for function in (linear, F.linear):
        out = function(x, weight, bias)
        first = torch.autograd.grad(out.sin().sum(), inputs, create_graph=True)
        second = torch.autograd.grad(sum((g.cos().sum() for g in first), torch.zeros(())), inputs)
        found.append([out, *first, *second])
    assert len(chosen) >= 3
    for actual, expected in zip(*found, strict=True):
        assert_close("product or gradient", actual, expected, 1e-5)


def test_parts_of_weights_and_of_inputs_are_multiplied_as_they_lie(chosen: list[Tensor]) -> None:
    x, weight = torch.randn(4, 6, 10)[:, 1:5, 2:9], torch.randn(20, 7)
    for part in (weight[5:16], torch.randn(7, 9).T):
        assert_close("product", linear(x, part), F.linear(x, part), 1e-5)
    assert len(chosen) == 2


def test_weights_with_gaps_between_rows_are_left_to_the_library(chosen: list[Tensor]) -> None:
    """oneDNN takes 250 times as long for them."""
    x, weight = torch.randn(4, 7), torch.randn(20, 14)
    for part in (weight[:, :7], weight.split(7, dim=1)[1], weight[::2, :7]):
        assert_close("product", linear(x, part), F.linear(x, part), 1e-5)
    assert not chosen


def test_all_else_is_left_to_the_library(chosen: list[Tensor]) -> None:
    for dtype in (torch.float64, torch.bfloat16):
        assert linear(torch.ones(2, 3, dtype=dtype), torch.ones(4, 3, dtype=dtype)).dtype == dtype
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(torch.ones(2, 3), torch.ones(4, 3)).dtype == torch.bfloat16
    assert linear(torch.ones(2, 3, device="meta"), torch.ones(4, 3, device="meta")).shape == (2, 4)
    assert linear(torch.ones(3), torch.ones(4, 3)).shape == (4,)
    assert not chosen

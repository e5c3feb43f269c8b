"""LAMB against its formula in float64, at the edges of its trust ratio, and through a resumed run."""

import math

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.helpers import assert_close
from transformer_xl.training.lamb import Lamb


def by_formula(weight: np.ndarray, gradients: list[np.ndarray], *, lr, betas, eps, weight_decay) -> np.ndarray:
    """The formula of the module's docstring, written as it stands there."""
    m, v, w = np.zeros_like(weight), np.zeros_like(weight), weight.copy()
    for g in gradients:
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g**2
        r = m / (np.sqrt(v) + eps) + weight_decay * w
        w_norm, r_norm = min(math.sqrt((w**2).sum()), 10.0), math.sqrt((r**2).sum())
        ratio = 1.0 if w_norm == 0 or r_norm == 0 else w_norm / (r_norm + eps)
        w = w - lr * ratio * r
    return w


def steps(weight: torch.Tensor, gradients: list[torch.Tensor], **settings) -> torch.Tensor:
    parameter = nn.Parameter(weight.clone())
    optimizer = Lamb([parameter], **settings)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach()


@given(
    scale=st.sampled_from([0.0, 1e-3, 1.0, 30.0]),
    lr=st.floats(1e-4, 0.5),
    beta1=st.sampled_from([0.0, 0.9]),
    eps=st.sampled_from([1e-6, 0.1]),
    weight_decay=st.sampled_from([0.0, 0.3]),
    seed=st.integers(0, 99),
)
def test_formula(scale: float, lr: float, beta1: float, eps: float, weight_decay: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(3, 4, generator=generator, dtype=torch.float64) * scale
    gradients = [torch.randn(3, 4, generator=generator, dtype=torch.float64) for _ in range(3)]
    settings = {"lr": lr, "betas": (beta1, 0.99), "eps": eps, "weight_decay": weight_decay}
    expected = by_formula(weight.numpy(), [g.numpy() for g in gradients], **settings)
    assert_close("weight", steps(weight, gradients, **settings), torch.from_numpy(expected), 1e-12)


def test_zero_gradients_leave_all_as_it_is() -> None:
    for weight in (torch.ones(2), torch.zeros(2)):
        assert torch.equal(steps(weight, [torch.zeros(2)], lr=0.1), weight)


def test_each_tensor_has_a_ratio_of_its_own_and_one_without_gradient_stays() -> None:
    small, large, frozen = nn.Parameter(torch.full((4,), 0.1)), nn.Parameter(torch.full((4,), 2.0)), nn.Parameter(torch.ones(4))
    small.grad, large.grad = torch.ones(4), torch.ones(4)
    optimizer = Lamb([small, large, frozen], lr=0.1)
    optimizer.step()
    assert_close("small", small.detach(), torch.full((4,), 0.09), 1e-6)
    assert_close("large", large.detach(), torch.full((4,), 1.8), 1e-6)
    assert torch.equal(frozen, torch.ones(4))
    assert frozen not in optimizer.state

import pytest
import torch
from torch import nn

from transformer_xl.model.dropout import Dropout, apply_mask, keep_mask


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1,), (3, 5, 7), (0, 4), (2, 2)])
def test_zeros_or_scaled_values_in_the_same_shape_and_type(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.full(shape, 3.0, dtype=dtype)
    out = Dropout(0.25).train()(x)
    assert (out.shape, out.dtype) == (x.shape, dtype)
    assert set(out.unique().tolist()) <= {0.0, 4.0}


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_share_dropped_and_the_mean_kept(p: float) -> None:
    out = Dropout(p)(torch.ones(400_000))
    dropped = (out == 0).double().mean().item()
    deviation = (p * (1 - p) / 400_000) ** 0.5
    assert abs(dropped - p) < 5 * deviation
    assert out.mean().item() == pytest.approx(1.0, abs=5 * deviation / (1 - p))


def test_neighbours_are_decided_independently() -> None:
    """Four elements share one 64-bit draw, each with 16 bits of its own."""
    kept = keep_mask(torch.empty(400_000), 0.5)[0].view(-1, 4).double()
    correlation = torch.corrcoef(kept.T) - torch.eye(4)
    assert correlation.abs().max() < 0.02
    assert (kept.mean(0) - 0.5).abs().max() < 0.01


def test_the_mean_is_exact_for_probabilities_between_levels() -> None:
    keep, factor = keep_mask(torch.empty(10), 0.3)
    assert keep.dtype == torch.uint8
    assert factor == pytest.approx(1 / 0.7, rel=1e-4)


@pytest.mark.parametrize("p", [1e-9, 0.999999])
def test_probabilities_at_the_ends_are_finite(p: float) -> None:
    out = Dropout(p)(torch.ones(1000))
    assert torch.isfinite(out).all()
    assert (out == 0).sum() == (0 if p < 0.5 else 1000) or p > 0.5


def test_evaluation_and_zero_probability_do_nothing() -> None:
    x = torch.randn(4, 5)
    state = torch.get_rng_state()
    assert Dropout(0.5).eval()(x) is x
    assert Dropout(0.0).train()(x) is x
    assert torch.equal(torch.get_rng_state(), state)


def test_the_gradient_goes_where_the_values_went() -> None:
    x = torch.randn(50, 3, dtype=torch.float64, requires_grad=True)
    out = Dropout(0.4)(x)
    weight = torch.randn(50, 3, dtype=torch.float64)
    (out * weight).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, weight * (out / x.detach()).detach())
    assert out.grad_fn is not None


def test_the_mask_follows_the_seed() -> None:
    x = torch.ones(100)
    drop = Dropout(0.5)
    masks = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        masks.append(drop(x))
    assert torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[0], masks[2])


def test_the_input_is_not_changed() -> None:
    x = torch.ones(20)
    keep, factor = keep_mask(x, 0.5)
    apply_mask(x, keep, factor)
    assert torch.equal(x, torch.ones(20))


def test_it_prints_its_probability() -> None:
    assert repr(nn.Sequential(Dropout(0.25))[0]) == "Dropout(p=0.25)"

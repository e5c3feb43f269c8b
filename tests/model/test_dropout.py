from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from transformer_xl.kernels.seeds import keep_mask
from transformer_xl.model.dropout import DropConnectLinear, Dropout, WordDropout


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1,), (3, 5, 7), (0, 4), (2, 2)])
def test_zeros_or_scaled_values_in_the_same_shape_and_type(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.full(shape, 3.0, dtype=dtype)
    out = Dropout(0.25).train()(x)
    assert (out.shape, out.dtype) == (x.shape, dtype)
    assert set(out.unique().tolist()) <= {0.0, 4.0}


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize(
    "drop",
    [
        lambda p: Dropout(p)(torch.ones(400_000)),
        lambda p: Dropout(p, locked=True)(torch.ones(400, 2, 1000))[:, 0],
        lambda p: WordDropout(p, vocab_size=400_000)(torch.ones(1, 400_000, 1), torch.arange(400_000).view(1, -1)),
    ],
    ids=["elements", "features", "words"],
)
def test_the_share_dropped_and_the_mean_kept(drop: Callable[[float], Tensor], p: float) -> None:
    out = drop(p)
    dropped = (out < 0.5).double().mean().item()  # of a word a millionth is left
    deviation = (p * (1 - p) / 400_000) ** 0.5
    assert abs(dropped - p) < 5 * deviation
    assert out.mean().item() == pytest.approx(1.0, abs=5 * deviation / (1 - p))


def test_neighbours_are_decided_independently() -> None:
    """Four elements share one 64-bit draw, each with 16 bits of its own."""
    kept = keep_mask(torch.empty(400_000), 0.5)[0].view(-1, 4).double()
    correlation = torch.corrcoef(kept.T) - torch.eye(4)
    assert correlation.abs().max() < 0.02
    assert (kept.mean(0) - 0.5).abs().max() < 0.01


@pytest.mark.parametrize("p", [1e-9, 0.999999])
def test_probabilities_at_the_ends_are_finite(p: float) -> None:
    out = Dropout(p)(torch.ones(1000))
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("locked", [False, True])
def test_the_gradient_goes_where_the_values_went(locked: bool) -> None:
    x = torch.randn(4, 9, 5, dtype=torch.float64, requires_grad=True)
    out = Dropout(0.4, locked=locked)(x)
    weight = torch.randn(4, 9, 5, dtype=torch.float64)
    (out * weight).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, weight * (out / x.detach()).detach())
    assert (x.grad == 0).any()


def n_bytes_saved(function: Callable[[], Tensor]) -> int:
    """Bytes that `function` keeps for the backward pass, each storage counted once."""
    saved: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = function()  # its graph owns what it saved: storages do not share addresses
    assert out.requires_grad
    return sum(saved.values())


@pytest.mark.parametrize("shape", [(3, 50, 40), (50, 40), (2, 3, 50, 40)])
def test_a_locked_mask_is_one_for_all_positions(shape: tuple[int, ...]) -> None:
    out = Dropout(0.25, locked=True)(torch.full(shape, 3.0))
    assert torch.equal(out, out[..., :1, :].expand(shape))
    assert set(out.unique().tolist()) == {0.0, 4.0}
    if len(shape) == 3:
        assert not torch.equal(out[0], out[1]), "rows have masks of their own"


def test_locked_values_in_bf16_are_scaled_before_they_are_rounded() -> None:
    x = (1 + torch.arange(256) / 256).bfloat16().view(1, 256, 1).expand(64, 256, 8)
    out = Dropout(0.3, locked=True)(x)
    factor = keep_mask(torch.empty(1), 0.3)[1]
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out[out != 0], (x.float() * factor).bfloat16()[out != 0], rtol=0, atol=0)


def test_locked_dropout_draws_and_keeps_a_mask_without_time() -> None:
    """At 500 positions, independent masks would draw and keep 500 times as much."""
    x = torch.randn(4, 500, 64, requires_grad=True)
    torch.manual_seed(0)
    Dropout(0.5, locked=True)(x)
    drawn = torch.get_rng_state()
    torch.manual_seed(0)
    keep_mask(torch.empty(4, 1, 64), 0.5)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert n_bytes_saved(lambda: Dropout(0.5, locked=True)(x)) == 4 * 64 * 4
    assert n_bytes_saved(lambda: Dropout(0.5)(x)) == 4 * 500 * 64


def test_a_word_is_dropped_wherever_it_stands() -> None:
    ids = torch.randint(500, (6, 700))
    embedded = torch.full((6, 700, 3), 3.0)
    out = WordDropout(0.25, vocab_size=500)(embedded, ids)
    assert sorted(out.unique().tolist()) == pytest.approx([4e-6, 4.0])
    fate = torch.full((500, 3), -1.0)
    fate[ids] = out
    assert torch.equal(fate[ids], out), "one fate per word, for all features"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_millionth_of_a_dropped_word_is_left_in_every_type(dtype: torch.dtype) -> None:
    out = WordDropout(0.5, vocab_size=40)(torch.ones(1, 40, 3, dtype=dtype), torch.arange(40).view(1, -1))
    assert 0 < out.min() < 3e-6
    assert set(out.unique().tolist()) == {out.min().item(), 2.0}


def test_the_vectors_of_dropped_words_get_a_millionth_of_a_gradient() -> None:
    table = torch.randn(40, 3, dtype=torch.float64, requires_grad=True)
    ids = torch.arange(40).view(2, 20)
    out = WordDropout(0.5, vocab_size=40)(table[ids], ids)
    out.sum().backward()
    assert table.grad is not None
    scale = out.detach().view(40, 3) / table.detach()
    torch.testing.assert_close(table.grad, scale)
    assert (scale < 3e-6).all(1).any()
    assert (scale > 1.9).all(1).any()


def test_words_are_not_copied() -> None:
    """The matrix of a large vocabulary is many times larger than the vectors looked up in it."""
    embedded, ids = torch.randn(2, 5, 8, requires_grad=True), torch.randint(10_000, (2, 5))
    assert n_bytes_saved(lambda: WordDropout(0.5, vocab_size=10_000)(embedded, ids)) == 2 * 5 * 4


def drawn_weights(linear: DropConnectLinear, width: int) -> Tensor:
    """The weights of one call without biases, computed from its output."""
    return (linear(torch.eye(width, dtype=linear.weight.dtype)) - (0 if linear.bias is None else linear.bias)).T


def test_weights_are_dropped_one_by_one_and_biases_stay() -> None:
    linear = DropConnectLinear(300, 200, dropweight=0.25).double()
    with torch.no_grad():
        linear.weight.fill_(3.0)
        linear.bias.copy_(torch.arange(200))
    left = drawn_weights(linear, 300)
    assert set(left.unique().tolist()) == {0.0, 4.0}
    assert (left == 0).double().mean().item() == pytest.approx(0.25, abs=0.01)
    assert (left == 0).double().mean(0).std() < 0.1, "elements, not columns"
    assert not torch.equal(left, drawn_weights(linear, 300)), "a mask for each call"
    assert torch.equal(linear(torch.zeros(1, 300).double())[0], linear.bias)


def test_only_weights_that_were_left_get_a_gradient() -> None:
    linear = DropConnectLinear(7, 5, dropweight=0.5).double()
    x = torch.randn(3, 7, dtype=torch.float64)
    torch.manual_seed(0)
    kept = (linear.drawn_weight() / linear.weight).detach()
    torch.manual_seed(0)
    linear(x).sum().backward()
    assert linear.weight.grad is not None
    torch.testing.assert_close(linear.weight.grad, kept * x.sum(0))
    assert set(kept.unique().tolist()) == {0.0, 2.0}


def test_nothing_is_dropped_in_evaluation_nor_drawn() -> None:
    x, ids = torch.randn(2, 4, 5), torch.randint(9, (2, 4))
    linear = DropConnectLinear(5, 3, dropweight=0.5).eval()
    state = torch.get_rng_state()
    for locked in (False, True):
        assert Dropout(0.5, locked=locked).eval()(x) is x
        assert Dropout(0.0, locked=locked)(x) is x
    assert WordDropout(0.5, vocab_size=9).eval()(x, ids) is x
    assert WordDropout(0.0, vocab_size=9)(x, ids) is x
    assert torch.equal(linear(x), nn.functional.linear(x, linear.weight, linear.bias))
    assert torch.equal(torch.get_rng_state(), state)


def test_they_print_their_probabilities() -> None:
    assert repr(nn.Sequential(Dropout(0.25))[0]) == "Dropout(p=0.25)"
    assert repr(nn.Sequential(Dropout(0.25, locked=True))[0]) == "Dropout(p=0.25, locked=True)"
    assert repr(nn.Sequential(WordDropout(0.25, vocab_size=9))[0]) == "WordDropout(p=0.25, vocab_size=9)"

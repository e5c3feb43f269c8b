"""Weights that are bf16 for a step: the numbers of autocast, and weights that stay what they were."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers import assert_close, random_weights
from tests.training.helpers import bits, differing, tiny_model, tiny_trainer
from transformer_xl.model import products
from transformer_xl.model.call import Execution
from transformer_xl.model.dropout import DropConnectLinear
from transformer_xl.model.sequence_model import SequenceModel
from transformer_xl.training.narrow import NarrowWeights


@pytest.mark.parametrize("changes", [{}, {"model": {"pre_lnorm": True}}, {"train": {"accumulate": 2, "tbptt_segments": 2}}])
def test_copies_give_the_numbers_of_autocast(changes: dict[str, Any]) -> None:
    narrow, usual = (tiny_trainer(precision="bf16", **changes) for _ in range(2))
    narrow._narrow = NarrowWeights(narrow.model, torch.bfloat16)
    own = dict(narrow.model.named_parameters())
    for _ in range(5):
        one, other = narrow.train_step(), usual.train_step()
        assert one.nats == pytest.approx(other.nats, rel=1e-3)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=2e-2)
    assert all(parameter is own[name] for name, parameter in narrow.model.named_parameters())
    assert {parameter.dtype for parameter in own.values()} == {torch.float32}


def test_a_first_step_has_the_bits_of_autocast() -> None:
    """Where each weight is used once, nothing is added in another order."""
    changes: dict[str, Any] = {"model": {"mem_len": 0}}
    narrow, usual = (tiny_trainer(precision="bf16", **changes) for _ in range(2))
    narrow._narrow = NarrowWeights(narrow.model, torch.bfloat16)
    for _ in range(3):
        narrow.train_step()
        usual.train_step()
    assert differing(bits(narrow), bits(usual)) == []


def test_a_failing_step_leaves_the_weights_in_their_places() -> None:
    trainer = tiny_trainer()
    narrow = NarrowWeights(trainer.model, torch.bfloat16)
    own = dict(trainer.model.named_parameters())
    with pytest.raises(KeyboardInterrupt), narrow.in_place():
        raise KeyboardInterrupt
    assert all(parameter is own[name] for name, parameter in trainer.model.named_parameters())


class Products(TorchDispatchMode):
    """Counts products of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))

    @property
    def numbers(self) -> tuple[int, int]:
        """Of single products, and of batched ones."""
        return self.counts["mm"], self.counts["bmm"]


def learned(
    model: SequenceModel, narrow: NarrowWeights | None = None, *, again: bool = False
) -> tuple[dict[str, Tensor], tuple[int, int]]:
    """Return every gradient of a loss in bf16, and how many products were made after the backward pass."""
    torch.manual_seed(3)
    ids = torch.randint(0, 11, (4, 6))
    model.zero_grad(set_to_none=True)
    narrow, after = narrow or NarrowWeights(model, torch.bfloat16), Products()
    with narrow.in_place():
        with torch.autocast("cpu", torch.bfloat16):
            execution = Execution("matmul", checkpoint_layers=again)
            out = model(ids[:, :-1], labels=ids[:, 1:], execution=execution)
        out.nll.mean().backward()
        with after:
            narrow.collect()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, after.numbers


def early(monkeypatch: pytest.MonkeyPatch, model: SequenceModel) -> dict[str, Tensor]:
    """Return the gradients that autograd computes, product by product."""
    with monkeypatch.context() as patch:
        patch.setattr(products, "_MOST_LATE_ROWS", -1)
        gradients, after = learned(model)
    assert after == (0, 0)
    return gradients


def check(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert_close(name, gradient, expected[name], 2**-8, least=1e-3)


@pytest.mark.parametrize(
    ("changes", "after"),
    [
        ({}, (0, 4)),  # keys of positions, the output of attention, both maps of the feed-forward network
        ({"n_layer": 1}, (4, 0)),
        ({"n_layer": 5, "kind": "vanilla"}, (0, 4)),  # queries, keys and values are one product
        ({"pre_lnorm": True, "activation": "gelu"}, (0, 4)),
        ({"gate": "gru", "pre_lnorm": True}, (0, 6)),  # the candidate's map is as large as the output's
        ({"shift": "conv"}, (0, 4)),
        ({"attention": "rotary", "d_head": 4}, (0, 3)),
    ],
)
def test_gradients_of_all_layers_are_computed_together(
    changes: dict[str, Any], after: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random_weights(tiny_model(**changes)).train()
    found, counted = learned(model)
    assert counted == after
    check(found, early(monkeypatch, model))
    assert set(found) == {name for name, _ in model.named_parameters()}
    check(learned(model, again=True)[0], found)


def test_large_products_are_not_kept_for_later(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_weights(tiny_model()).train()
    expected = early(monkeypatch, model)
    monkeypatch.setattr(products, "_MOST_LATE_ROWS", 20)
    assert learned(model)[1] == (0, 4)
    monkeypatch.setattr(
        products, "_MOST_LATE_WEIGHTS", 36
    )  # the output of attention and keys of positions are 6 x 6, others 6 x 9
    found, after = learned(model)
    assert after == (0, 2)
    check(found, expected)
    monkeypatch.setattr(products, "_MOST_LATE_ROWS", 19)
    assert learned(model)[1] == (0, 1)  # keys of positions, of which there are 5


def test_frozen_weights_get_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_weights(tiny_model(n_layer=3)).train()
    layers: Any = model.layers
    layers[0].requires_grad_(requires_grad=False)
    layers[1].feed_forward.outer.weight.requires_grad_(requires_grad=False)
    found, after = learned(model)
    assert after == (1, 3)
    assert not any("layers.0." in name or name == "layers.1.feed_forward.outer.weight" for name in found)
    assert "layers.1.feed_forward.outer.bias" in found
    check(found, early(monkeypatch, model))


def test_a_weight_that_layers_share_gets_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    apart = random_weights(tiny_model()).train()
    layers: Any = apart.layers
    layers[1].attention.o_net.weight.data.copy_(layers[0].attention.o_net.weight.data)
    expected = early(monkeypatch, apart)
    expected["layers.0.attention.o_net.weight"] += expected.pop("layers.1.attention.o_net.weight")
    layers[1].attention.o_net.weight = layers[0].attention.o_net.weight
    check(learned(apart)[0], expected)


def test_a_failing_backward_pass_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_weights(tiny_model(n_layer=3)).train()
    layers: Any = model.layers
    narrow, late = NarrowWeights(model, torch.bfloat16), []

    def fail(*_: Any) -> None:
        late.extend(factors for factors in narrow._late if factors)
        raise KeyboardInterrupt

    listening = layers[0].register_full_backward_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        learned(model, narrow)
    assert len(late) == 4 * 3
    assert not any(narrow._late)
    assert all(copy.grad is None for copy in narrow._copies)
    listening.remove()
    check(learned(model, narrow)[0], early(monkeypatch, model))


class Maps(nn.Module):
    """Linear maps that need not be read in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([DropConnectLinear(8, 8) for _ in range(3)])

    def gradients(self, order: list[int]) -> list[Tensor]:
        """Of weights and biases, zeros where there is none; five rows are read."""
        self.zero_grad(set_to_none=True)
        narrow = NarrowWeights(self, torch.bfloat16)
        x = torch.linspace(-1, 1, 40).view(5, 8)
        with narrow.in_place():
            with torch.autocast("cpu", torch.bfloat16):
                outputs = [self.layers[i](x) for i in order]
            torch.autograd.backward(outputs, [torch.ones_like(y) for y in outputs])
            narrow.collect()
        return [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters()]


def test_the_order_in_which_layers_are_read_changes_no_bit() -> None:
    maps = Maps()
    one, other = maps.gradients([0, 1, 2]), maps.gradients([2, 0, 1])
    for first, second in zip(one, other, strict=True):
        assert torch.equal(first, second)


def test_uses_of_one_weight_are_added() -> None:
    maps = Maps()
    once, twice = maps.gradients([0, 1]), maps.gradients([0, 1, 1])
    for factor, gradient, expected in zip((1, 1, 2, 2, 0, 0), twice, once, strict=True):
        torch.testing.assert_close(gradient, factor * expected)
    assert maps.layers[2].weight.grad is None


def test_late_gradients_are_added_to_those_that_weights_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of other groups of lanes, and of products that are too large to be late."""
    maps = Maps()
    layer: Any = maps.layers[0]
    narrow = NarrowWeights(maps, torch.bfloat16)
    own, x = layer.weight, torch.linspace(-1, 1, 40).view(5, 8)
    for rows in (5, 2, 5):
        monkeypatch.setattr(products, "_MOST_LATE_ROWS", rows)
        with narrow.in_place():
            with torch.autocast("cpu", torch.bfloat16):
                (layer(x).sum() + layer(x[:2]).sum()).backward()
            assert len(narrow._late[0]) == (2 if rows == 5 else 1)
            narrow.collect()
    expected = 3 * (x.bfloat16().float().sum(0) + x[:2].bfloat16().float().sum(0))
    torch.testing.assert_close(own.grad, expected.expand(8, 8), rtol=2**-6, atol=2**-6)

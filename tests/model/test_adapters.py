"""Low-rank adapters: what they add, what learns, and that merged weights are those of the adapted model."""

import pytest
import torch

from tests.training.helpers import tiny_model
from transformer_xl.model.adapters import add_adapters, merged
from transformer_xl.model.base import SequenceModel
from transformer_xl.model.build import make_model


def adapted(kind: str) -> tuple[SequenceModel, SequenceModel]:
    """A model, and its copy with adapters."""
    plain = tiny_model(kind=kind)
    model = make_model(plain.config)
    model.load_state_dict(plain.state_dict())
    assert add_adapters(model, rank=2, scale=3.0)
    return plain, model


@pytest.mark.parametrize("kind", ["transformer_xl", "vanilla"])
def test_an_adapted_model_begins_as_it_was_and_only_its_adapters_learn(kind: str) -> None:
    plain, model = adapted(kind)
    ids = torch.randint(11, (3, 6))
    a, b = (each.eval()(ids[:, :-1], labels=ids[:, 1:]) for each in (plain, model))
    torch.testing.assert_close(b.nll, a.nll, rtol=0, atol=0)
    b.nll.sum().backward()
    learned = {name for name, p in model.named_parameters() if p.grad is not None}
    assert learned == {name for name, _ in model.named_parameters() if name.endswith(("weight.0.a", "weight.0.b"))}
    assert len(learned) >= 2 * 2 * 3  # two layers of at least three maps


@pytest.mark.parametrize("kind", ["transformer_xl", "vanilla"])
def test_merged_weights_compute_what_the_adapted_model_does(kind: str) -> None:
    plain, model = adapted(kind)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("weight.0.b"):
                p.normal_()
    before = {name: weight.clone() for name, weight in plain.state_dict().items()}
    plain.load_state_dict(merged(model.state_dict(), scale=3.0))
    ids = torch.randint(11, (3, 6))
    a, b = (each.eval()(ids[:, :-1], labels=ids[:, 1:]) for each in (plain, model))
    torch.testing.assert_close(a.nll, b.nll)
    name = (
        "layers.0.attention.qkv_net" if kind == "transformer_xl" else next(n for n in before if "qkv" in n)[: -len(".weight")]
    )
    own = dict(model.named_parameters())
    product = own[f"{name}.parametrizations.weight.0.b"] @ own[f"{name}.parametrizations.weight.0.a"]
    torch.testing.assert_close(plain.state_dict()[f"{name}.weight"], before[f"{name}.weight"] + 3 * product)

"""What a model shows of itself while it reads: the states and the attention weights of its layers."""

from typing import Any

import pytest
import torch

from tests.helpers import tokens
from tests.training import helpers as training_helpers
from transformer_xl.errors import ConfigError
from transformer_xl.model.base import LanguageModel
from transformer_xl.model.memory import Mems
from transformer_xl.model.transformer_xl import TransformerXL

pytestmark = pytest.mark.usefixtures("double_precision")


@pytest.mark.parametrize(
    "options",
    [{}, {"kind": "vanilla"}, {"kind": "lstm"}],
    ids=str,
)
def test_hidden_states_are_those_of_the_memory_and_the_softmax_reads_the_last(options: dict[str, Any]) -> None:
    model = training_helpers.tiny_model(**options).eval()
    assert isinstance(model, LanguageModel)
    first, ids = torch.randint(11, (2, 3, 4)).unbind()
    mems = model(first).mems
    states, new = model.hidden_states(ids, mems=mems)
    out = model(ids, mems=mems)
    assert len(states) == model.config.n_layer + 1
    torch.testing.assert_close(model.softmax.logits(states[-1], model.embedding), out.logits)
    for name, x in out.mems.state_dict().items():
        torch.testing.assert_close(new.state_dict()[name], x)
    if isinstance(new, Mems) and isinstance(model, TransformerXL):
        for h, kept in zip(states, new.hidden, strict=False):  # the memory keeps what each layer reads
            torch.testing.assert_close(h, kept[:, -4:])
    assert not any(layer._forward_pre_hooks for layer in model.layers)


@pytest.mark.parametrize("options", [{}, {"kind": "vanilla"}], ids=str)
def test_attention_weights_are_of_each_layer_and_the_model_reads_on(options: dict[str, Any]) -> None:
    model = training_helpers.tiny_model(**options).eval()
    assert isinstance(model, LanguageModel)
    first, ids = torch.randint(11, (2, 3, 4)).unbind()
    mems = model(first).mems
    weights, new = model.attention_weights(ids, mems=mems)
    kept, _ = model.attention_weights(ids, mems=mems, keep=lambda layer, weight: (layer, weight.clone()))
    assert [layer for layer, _ in kept] == list(range(model.config.n_layer))
    for layer, weight in enumerate(weights):
        assert weight.shape == (3, model.attention_blocks()[0].n_head, 4, 4 if options else 8)
        torch.testing.assert_close(weight.sum(-1), torch.ones_like(weight[..., 0]))
        assert torch.equal(weight, kept[layer][1]) and not weight.requires_grad
    for name, x in model(ids, mems=mems).mems.state_dict().items():
        torch.testing.assert_close(new.state_dict()[name], x)
    assert not any(block._forward_pre_hooks for block in model.attention_blocks())


def test_a_model_that_does_not_attend_has_no_attention_weights() -> None:
    model = training_helpers.tiny_model(kind="lstm")
    assert isinstance(model, LanguageModel)
    with pytest.raises(ConfigError, match="a model of kind 'lstm' has no attention weights, because its layers do not attend"):
        model.attention_weights(tokens(1, 3))

"""The body on vectors: it computes what the whole model does with its embedding, and steps equal windows."""

from typing import Any

import pytest
import torch
from torch import nn

from transformer_xl.batch import Rows
from transformer_xl.config.model import TransformerXLConfig
from transformer_xl.errors import ConfigError
from transformer_xl.model.body import TransformerXLBody
from transformer_xl.model.build import make_model
from transformer_xl.model.transformer_xl import TransformerXL

SIZES: dict[str, Any] = {"n_layer": 2, "d_model": 8, "n_head": 2, "d_head": 4, "d_inner": 12, "mem_len": 5, "init_std": 0.3}
KINDS: list[dict[str, Any]] = [
    {},
    {"gate": "gru", "pre_lnorm": True, "final_norm": True},
    {"shift": "averages"},
    {"attention": "rotary"},
]


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_it_reads_as_the_whole_model_does_behind_its_embedding(options: dict[str, Any]) -> None:
    config = TransformerXLConfig(**SIZES | options)
    whole = make_model(config.model_copy(update={"vocab_size": 7})).double().eval()
    assert isinstance(whole, TransformerXL)
    body = TransformerXLBody(config, d_input=7).double().eval()
    layers = {name: x for name, x in whole.state_dict().items() if not name.startswith(("embedding", "softmax"))}
    assert not body.model.load_state_dict(layers, strict=False).unexpected_keys
    with torch.no_grad():  # a one-hot vector times this matrix is the vector of a token
        linear = body.model.embedding
        assert isinstance(linear, nn.Linear)
        linear.weight.copy_(whole.embedding(torch.arange(7)[None])[0].T)
        linear.bias.zero_()
    ids = torch.randint(7, (3, 9))
    starts = torch.zeros(3, 9, dtype=torch.bool)
    starts[1, 4] = starts[2, 0] = True
    own, theirs = body.init_mems(3), whole.init_mems(3)
    for piece in (slice(0, 4), slice(4, 9)):
        rows = Rows(document_starts=starts[:, piece])
        x = nn.functional.one_hot(ids[:, piece], 7).double()
        y, own = body(x, mems=own, rows=rows)
        h, theirs = whole.read(ids[:, piece], mems=theirs, rows=rows)
        torch.testing.assert_close(y, h)
        for name, state in theirs.state_dict().items():
            torch.testing.assert_close(own.state_dict()[name], state)


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_with_the_same_length_acting_step_by_step_is_learning_from_windows(options: dict[str, Any]) -> None:
    body = TransformerXLBody(TransformerXLConfig(**SIZES | options, same_length=True), d_input=3).double().eval()
    x, starts = torch.randn(4, 23, 3, dtype=torch.float64), torch.rand(4, 23) < 0.2
    acting, steps, kept = body.init_mems(4), [], []
    for t in range(23):
        kept.append(acting)
        y, acting = body(x[:, t : t + 1], mems=acting, rows=Rows(document_starts=starts[:, t : t + 1]))
        steps.append(y)
    window, _ = body(x[:, 7:], mems=kept[7], rows=Rows(document_starts=starts[:, 7:]))
    torch.testing.assert_close(window, torch.cat(steps[7:], dim=1))


def test_steps_that_are_none_are_not_read() -> None:
    body = TransformerXLBody(TransformerXLConfig(**SIZES), d_input=3).eval()
    x = torch.randn(2, 4, 3)
    y, _ = body(x, rows=Rows(n_pad=torch.tensor([0, 3])))
    torch.testing.assert_close(y[0], body(x[:1])[0][0])
    torch.testing.assert_close(y[1, 3:], body(x[1:, 3:])[0][0])


def test_every_parameter_learns() -> None:
    body = TransformerXLBody(TransformerXLConfig(**SIZES, gate="gru", pre_lnorm=True), d_input=3)
    y, mems = body(torch.randn(2, 4, 3))
    y2, _ = body(torch.randn(2, 4, 3), mems=mems)
    (y2.square().sum() + y.square().sum()).backward()
    assert [name for name, p in body.named_parameters() if p.grad is None] == []


def test_vectors_of_the_models_own_width_go_in_as_they_are() -> None:
    body = TransformerXLBody(TransformerXLConfig(**SIZES))
    assert body(torch.randn(2, 4, 8))[0].shape == (2, 4, 8)
    assert not [name for name, _ in body.named_parameters() if "embedding" in name]


def test_what_is_for_tokens_is_refused_and_so_are_other_shapes() -> None:
    with pytest.raises(ConfigError, match=r"ngram_rows \(\(9,\)\) is for tokens"):
        TransformerXLBody(TransformerXLConfig(**SIZES, ngram_rows=(9,)), d_input=3)
    with pytest.raises(ConfigError, match=r"dropemb \(0.1\) is for tokens"):
        TransformerXLBody(TransformerXLConfig(**SIZES, dropemb=0.1), d_input=3)
    body = TransformerXLBody(TransformerXLConfig(**SIZES), d_input=3)
    with pytest.raises(ValueError, match=r"document_starts \(2, 3\) must have shape \(2, 4\)"):
        body(torch.zeros(2, 4, 3), rows=Rows(document_starts=torch.zeros(2, 3, dtype=torch.bool)))
    with pytest.raises(ValueError, match=r"n_pad \(1,\) must have shape \(2,\)"):
        body(torch.zeros(2, 4, 3), rows=Rows(n_pad=torch.zeros(1, dtype=torch.int64)))
    for shape in ((2, 3), (2, 4, 4), (2, 0, 3)):
        with pytest.raises(ValueError, match=r"must have shape \(batch, steps, 3\)"):
            body(torch.zeros(shape))
    with pytest.raises(ValueError, match="a memory of 3 rows must fit ids of 2 rows"):
        body(torch.zeros(2, 4, 3), mems=body.init_mems(3))

"""XLNet: what no query may see, rows and memory, types, first weights. The equation itself: tests/reference/test_xlnet.py."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.helpers import assert_close, default_dtype, tiny_xlnet, tokens
from tests.reference.test_xlnet import random_order
from transformer_xl.batch import Order
from transformer_xl.config.model import XLNetConfig
from transformer_xl.errors import ConfigError
from transformer_xl.model.call import Execution
from transformer_xl.model.memory import Mems
from transformer_xl.model.xlnet import XLNet

pytestmark = pytest.mark.usefixtures("double_precision")


def test_sizes_are_those_of_the_published_models() -> None:
    large: dict[str, Any] = {"n_layer": 24, "d_model": 1024, "n_head": 16, "d_inner": 4096}
    with torch.device("meta"):
        models = [XLNet(XLNetConfig(vocab_size=32_000, **sizes)) for sizes in ({}, large)]
    assert [sum(p.numel() for p in model.parameters()) for model in models] == [116_750_336, 360_300_800]


def test_first_weights_are_drawn_as_the_authors_draw_them() -> None:
    model = XLNet(XLNetConfig(vocab_size=500, n_layer=2, d_model=200, n_head=4, d_head=50, d_inner=300))
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            assert (parameter == 1).all(), name
        elif name.endswith(".bias"):
            assert (parameter == 0).all(), name
        elif name == "mask_emb":
            limit = (6 / 201) ** 0.5
            assert 0.9 * limit < parameter.abs().max() <= limit
        else:
            assert abs(parameter.std().item() / 0.02 - 1) < 0.15, name
    assert model.embedding.scale == 1.0


def test_a_prediction_does_not_depend_on_what_its_query_does_not_see() -> None:
    """Hidden tokens, that of the target itself among them, may be anything, also seen through other tokens in all layers."""
    model = tiny_xlnet(n_layer=3)
    ids = tokens(1, 8)
    # in the order 5, 2, 6; the others are seen by all
    order = Order(
        rank=torch.tensor([[-1, -1, 1, -1, -1, 0, 2, -1]]),
        sees=torch.tensor([[0, 0, 1, 0, 0, 0, 2, 0]]),
        targets=torch.tensor([[5, 2, 6]]),
    )
    before = model(ids, order=order).logits[0]
    for place, changes in ((5, [False, True, True]), (2, [False, False, True]), (6, [False, False, False]), (0, [True] * 3)):
        other = ids.clone()
        other[0, place] = (other[0, place] + 1) % 13
        after = model(other, order=order).logits[0]
        assert [not torch.equal(x, y) for x, y in zip(before, after, strict=True)] == changes


def test_memory_does_not_know_what_stands_after_reuse_len() -> None:
    """Its states see nothing of the second half if ranks say so, so predictions of the next segment cannot either."""
    model = tiny_xlnet(reuse_len=4)
    ids, rank, sees = tokens(1, 8), torch.full((1, 8), -1), torch.zeros(1, 8, dtype=torch.int64)
    rank[:, 4:] = 7
    sees[:, 4:] = 8
    order = Order(rank, sees, targets=torch.zeros(1, 0, dtype=torch.int64))
    first = model(ids, order=order).mems
    ids[:, 4:] = (ids[:, 4:] + 1) % 13
    second = model(ids, order=order).mems
    assert first.length == 4
    assert all(torch.equal(x, y) for x, y in zip(first.hidden, second.hidden, strict=True))


def test_a_query_that_sees_nothing_gathers_zeros_and_has_gradients() -> None:
    model = tiny_xlnet(n_layer=1)
    order = Order(rank=torch.tensor([[0, 1]]), sees=torch.tensor([[0, 1]]), targets=torch.tensor([[0, 1]]))
    one, other = (model(ids, order=order).logits for ids in (torch.tensor([[3, 4]]), torch.tensor([[5, 4]])))
    assert torch.equal(one[0, 0], other[0, 0])
    assert not torch.equal(one[0, 1], other[0, 1])
    model(torch.tensor([[3, 4]]), order=order, labels=torch.tensor([[3, 4]])).nll.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_without_memory_a_row_read_backward_is_the_reversed_row_read_forward() -> None:
    model = tiny_xlnet(mem_len=0)
    ids, order = tokens(2, 6), random_order(2, 6)
    reverse = Order(order.rank.flip(1), order.sees.flip(1), targets=5 - order.targets)
    forward = model(ids, order=order).logits
    backward = model(ids.flip(1), order=reverse, is_backward=torch.tensor([True, True])).logits
    assert_close("logits", backward, forward, 1e-12)
    neither = model(ids.flip(1), order=reverse).logits
    assert not torch.allclose(neither, forward)


@pytest.mark.parametrize(("n_row", "backward"), [(1, [False]), (2, [False, True]), (3, [False, False, True])])
def test_settings_say_what_is_read_backward_unless_a_call_does(n_row: int, backward: list[bool]) -> None:
    plain = tiny_xlnet()
    model = tiny_xlnet(backward_half=True)
    model.load_state_dict(plain.state_dict())
    ids, order = tokens(n_row, 6), random_order(n_row, 6)
    rows = torch.tensor(backward)
    assert torch.equal(model.read(ids)[0], plain.read(ids, is_backward=rows)[0])
    assert torch.equal(model(ids, order=order).logits, plain(ids, order=order, is_backward=rows).logits)
    assert torch.equal(model.read(ids, is_backward=~rows)[0], plain.read(ids, is_backward=~rows)[0])


@pytest.mark.parametrize("reuse_len", [None, 3])
def test_rows_of_other_ages_and_padding_are_rows_alone(reuse_len: int | None) -> None:
    model = tiny_xlnet(reuse_len=reuse_len)
    past, lengths = [tokens(1, 7), tokens(1, 2), None], [6, 3, 5]
    segments = [tokens(1, n) for n in lengths]
    starts = [model.init_mems(1) if ids is None else model.read(ids, mems=model.init_mems(1))[1] for ids in past]
    n_pad = torch.tensor([6 - n for n in lengths])
    padded = torch.cat([torch.nn.functional.pad(ids, (6 - ids.shape[1], 0)) for ids in segments])
    together, mems = model.read(padded, mems=Mems.concatenate(starts), n_pad=n_pad)
    again, _ = model.read(padded[:, :4], mems=mems)
    for b, (ids, start) in enumerate(zip(segments, starts, strict=True)):
        alone, own = model.with_context(ext_len=0 if reuse_len is None else 3).read(ids, mems=start)
        assert_close("states", together[b : b + 1, 6 - lengths[b] :], alone, 1e-12)
        if reuse_len is None:
            after, _ = model.read(padded[b : b + 1, :4], mems=own)
            assert_close("states after", again[b : b + 1], after, 1e-12)


def test_texts_only_differ_or_do_not() -> None:
    model = tiny_xlnet()
    ids, texts = tokens(2, 6), torch.tensor([[0, 0, 1, 1, 2, 2], [4, 4, 4, 4, 4, 4]])
    named, renamed = (model.read(ids, segments=s)[0] for s in (texts, 5 - texts))
    assert_close("other names", renamed, named, 1e-12)
    assert_close("one text is no text", named[1:], model.read(ids[1:])[0], 1e-12)
    assert not torch.allclose(named[:1], model.read(ids[:1])[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_narrow_types_compute_about_the_same(dtype: torch.dtype) -> None:
    model = tiny_xlnet()
    ids, order = tokens(3, 6), random_order(3, 6)
    labels = ids.gather(1, order.targets)
    facts: dict[str, Any] = {
        "order": order,
        "labels": labels,
        "segments": tokens(3, 6) % 3,
        "is_backward": torch.tensor([True, False, True]),
    }
    exact = model(ids, **facts, mems=model.init_mems(3))
    model = model.to(dtype)
    out = model(ids, **facts, mems=model.init_mems(3))
    assert out.mems.hidden[0].dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 0.1
    assert_close("nll", out.nll.double(), exact.nll, tolerance)
    out.nll.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_autocast_keeps_states_and_memory_in_fp32() -> None:
    with default_dtype(torch.float32):
        model = tiny_xlnet()
        ids, order = tokens(2, 6), random_order(2, 6)
        exact = model(ids, order=order, labels=ids.gather(1, order.targets))
        with torch.autocast("cpu", torch.bfloat16):
            out = model(ids, order=order, labels=ids.gather(1, order.targets))
        assert out.mems.hidden[1].dtype == torch.float32
        assert_close("nll", out.nll, exact.nll, 0.1)


def test_recomputed_layers_have_the_same_gradients_with_dropout() -> None:
    model = tiny_xlnet(dropout=0.3, dropatt=0.3).train()
    ids, order = tokens(2, 6), random_order(2, 6)
    found = []
    for execution in (Execution(), Execution(checkpoint_layers=True)):
        torch.manual_seed(1)
        model.zero_grad()
        model(ids, order=order, labels=ids.gather(1, order.targets), execution=execution).nll.sum().backward()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


def test_what_does_not_fit_is_named() -> None:
    model = tiny_xlnet()
    ids, order = tokens(2, 6), random_order(2, 6)
    with pytest.raises(ValueError, match=r"labels \(2, 2\) must have the shape of targets \(2, 3\)"):
        model(ids, order=order, labels=tokens(2, 2))
    with pytest.raises(ValueError, match=r"order.rank \(2, 5\) must have the shape of ids \(2, 6\)"):
        model(ids, order=replace(order, rank=order.rank[:, 1:]))
    with pytest.raises(ValueError, match=r"order.targets \(1, 3\) must have a row for each of the 2 rows"):
        model(ids, order=replace(order, targets=order.targets[:1]))
    with pytest.raises(ValueError, match=r"segments \(2, 1\) must have the shape of ids"):
        model.read(ids, segments=ids[:, :1])
    with pytest.raises(ValueError, match=r"a memory of 3 rows must fit ids of 2 rows"):
        model.read(ids, mems=model.init_mems(3))
    with pytest.raises(ConfigError, match="same_length"):
        model.with_context(same_length=True)
    with pytest.raises(ConfigError, match="one vector of width d_model"):
        XLNetConfig(vocab_size=13, cutoffs=(4,))
    with pytest.raises(ConfigError, match="even"):
        XLNetConfig(vocab_size=13, d_model=9)

"""Memory: rows are reset, selected, joined and saved."""

import pytest
import torch

from tests.helpers import assert_close, tiny_model
from transformer_xl.model.memory import Mems, join


@pytest.fixture(autouse=True)
def double_precision():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def tokens(*shape):
    return torch.randint(13, shape)


def test_reset_of_one_row_is_a_fresh_row_and_leaves_the_other_alone():
    model = tiny_model()
    mems = model(tokens(2, 6), mems=model.init_mems(2)).mems
    reset = mems.reset(torch.tensor([True, False]))
    ids = tokens(2, 3)
    out = model(ids, mems=reset)
    assert_close("fresh row", out.logits[:1], model(ids[:1]).logits, 1e-12)
    assert_close("other row", out.logits[1:], model(ids[1:], mems=mems.select(slice(1, 2))).logits, 1e-12)
    assert all(h[0].abs().max() == 0 for h in reset.hidden), "the old text must be gone, not only masked"


def test_reset_gives_a_row_the_first_memory_that_the_model_was_trained_with():
    model = tiny_model(zero_first_memory=True)
    mems = model(tokens(2, 6)).mems.reset(torch.tensor([True, False]), valid=True)
    ids = tokens(2, 3)
    assert_close("fresh row", model(ids, mems=mems).logits[:1], model(ids[:1]).logits, 1e-12)
    assert not torch.allclose(model(ids).logits, tiny_logits(model, ids))


def tiny_logits(model, ids):
    """What the model says when it may not attend to the zeros that it begins with."""
    return model(ids, mems=model.init_mems(2).reset(torch.tensor([True, True]))).logits


def test_reset_heals_a_row_that_went_wrong():
    model = tiny_model()
    mems = model(tokens(2, 6), mems=model.init_mems(2)).mems
    mems.hidden[0][0] = float("nan")
    assert torch.isfinite(model(tokens(2, 3), mems=mems.reset(torch.tensor([True, False]))).logits).all()


def test_select_concatenate_and_state_dict_keep_rows():
    model = tiny_model()
    mems = model(tokens(3, 4)).mems
    again = Mems.concatenate([mems.select(slice(0, 1)), mems.select(torch.tensor([1, 2]))])
    restored = Mems.from_state_dict(again.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(restored.hidden, mems.hidden, strict=True))
    assert torch.equal(restored.n_valid, mems.n_valid)


def test_join_moves_memory_up_to_the_first_token_of_a_padded_row():
    past, present = torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor([[7, 8], [0, 9]])
    assert join(past, present, torch.tensor([0, 1])).tolist() == [[1, 2, 3, 7, 8], [4, 4, 5, 6, 9]]

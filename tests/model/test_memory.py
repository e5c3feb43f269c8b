"""Memory: rows are reset, selected, joined and saved."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.helpers import assert_close, tiny_model, tokens
from transformer_xl.model.memory import Mems, join

pytestmark = pytest.mark.usefixtures("double_precision")


def test_reset_of_one_row_is_a_fresh_row_and_leaves_the_other_alone():
    model = tiny_model()
    mems = model(tokens(2, 6), mems=model.init_mems(2)).mems
    reset = mems.reset(torch.tensor([True, False]))
    ids = tokens(2, 3)
    out = model(ids, mems=reset)
    assert_close("fresh row", out.logits[:1], model(ids[:1]).logits, 1e-12)
    assert_close("other row", out.logits[1:], model(ids[1:], mems=mems.select(slice(1, 2))).logits, 1e-12)
    assert all(h[0].abs().max() == 0 for h in reset.hidden), "the old text must be gone, not only masked"


@pytest.mark.parametrize(
    "options", [{}, {"attention": "shaw", "max_klen": 16}, {"attention": "vaswani"}, {"untie_r": True, "same_length": True}]
)
@pytest.mark.parametrize("mem_len", [3, 8])
def test_reset_gives_a_row_the_first_memory_that_the_model_was_trained_with(options: dict[str, Any], mem_len: int) -> None:
    model = tiny_model(zero_first_memory=True, mem_len=mem_len, **options)
    used = model(tokens(3, 6)).mems
    restored = type(used).from_state_dict(used.state_dict())
    ids = tokens(3, 4)
    fresh, kept = model(ids), model(ids, mems=used)
    for mems in (used, restored, type(used).concatenate([used.select(slice(0, 1)), used.select(slice(1, None))])):
        out = model(ids, mems=mems.reset(torch.tensor([True, False, True])))
        assert_close("fresh rows", out.logits[::2], fresh.logits[::2], 1e-12)
        assert_close("other row", out.logits[1], kept.logits[1], 1e-12)
        then = model(ids, mems=out.mems)
        assert_close("fresh rows later", then.logits[::2], model(ids, mems=fresh.mems).logits[::2], 1e-12)
    assert not torch.allclose(fresh.logits, model(ids, mems=Mems(used.hidden, used.n_valid).reset(torch.ones(3).bool())).logits)


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


def _of_another_class() -> tuple[Any, Any]:
    return tiny_model(), tiny_model(zero_first_memory=True).init_mems(2)


def _longer() -> tuple[Any, Any]:
    return tiny_model(mem_len=5), tiny_model(mem_len=9).init_mems(2)


def _of_a_shift_and_ngrams() -> tuple[Any, Any]:
    return tiny_model(), tiny_model(shift="averages", ngram_rows=(8, 8)).init_mems(2)


def _with_fractions() -> tuple[Any, Any]:
    model = tiny_model()
    mems = model.init_mems(2)
    return model, Mems(mems.hidden, torch.tensor([1.5, 0.5]))


@pytest.mark.xfail(reason="such memories are read as if they were the model's own", strict=True)
@pytest.mark.parametrize("case", [_of_another_class, _longer, _of_a_shift_and_ngrams, _with_fractions])
def test_a_memory_that_cannot_be_the_models_is_refused(case: Callable[[], tuple[Any, Any]]) -> None:
    model, mems = case()
    with pytest.raises(ValueError, match="mem"):
        model(tokens(2, 3), mems=mems)

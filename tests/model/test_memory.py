"""Memory: rows are reset, selected, joined and saved."""

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch

from tests.helpers import assert_close, tiny_model, tiny_xlnet, tokens
from transformer_xl.config.model import LstmConfig, TransformerXLConfig
from transformer_xl.model.base import LanguageModel
from transformer_xl.model.build import make_blueprint, make_model
from transformer_xl.model.memory import Memory, Mems, join
from transformer_xl.model.xlnet import XLNet

pytestmark = pytest.mark.usefixtures("double_precision")


def test_reset_of_one_row_is_a_fresh_row_and_leaves_the_other_alone():
    model = tiny_model()
    mems = model(tokens(2, 6), mems=model.init_mems(2)).mems
    mems.hidden[0][0] = float("nan")  # a row that went wrong
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


def lstm(**changes: Any) -> LanguageModel:
    model = make_model(LstmConfig(vocab_size=13, n_layer=2, d_model=8, **changes))
    assert isinstance(model, LanguageModel)
    return model


FOREIGN: dict[str, Callable[[], tuple[LanguageModel, Memory]]] = {
    "class": lambda: (tiny_model(), tiny_model(zero_first_memory=True).init_mems(2)),
    "length": lambda: (tiny_model(mem_len=5), tiny_model(mem_len=9).init_mems(2)),
    "view": lambda: ((model := tiny_model(mem_len=5)), model.with_context(mem_len=9).init_mems(2)),
    "layers": lambda: (tiny_model(), tiny_model(n_layer=3).init_mems(2)),
    "fewer layers": lambda: (tiny_model(n_layer=3), tiny_model(n_layer=2).init_mems(2)),
    "width": lambda: (tiny_model(d_model=16), tiny_model(d_model=8).init_mems(2)),
    "dtype": lambda: (tiny_model(), tiny_model().float().init_mems(2)),
    "tokens": lambda: (tiny_model(), tiny_model(ngram_rows=(8, 8)).init_mems(2)),
    "no tokens": lambda: (tiny_model(ngram_rows=(8,)), tiny_model().init_mems(2)),
    "fractions": lambda: ((model := tiny_model()), Mems(cast(Mems, model.init_mems(2)).hidden, torch.tensor([1.5, 0.5]))),
    "rows": lambda: ((model := tiny_model()), Mems(cast(Mems, model.init_mems(3)).hidden, torch.zeros(2).long())),
    "uneven": lambda: (tiny_model(mem_len=5), Mems((torch.zeros(2, 3, 10), torch.zeros(2, 2, 10)), torch.zeros(2).long())),
    "lstm": lambda: (lstm(), tiny_model(mem_len=1, d_model=16).init_mems(2)),
    "of an lstm": lambda: (tiny_model(mem_len=1, d_model=16), lstm().init_mems(2)),
    "no state": lambda: (lstm(), lstm(mem_len=0).init_mems(2)),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_a_memory_that_cannot_be_the_models_is_refused(case: str) -> None:
    model, mems = FOREIGN[case]()
    for read in (model, model.hidden_states):
        with pytest.raises(ValueError, match=r"^mems [^\n]*; use model.init_mems\(2\)$"):
            read(tokens(2, 3), mems=cast(Any, mems))


def test_plain_states_fit_a_model_whose_texts_begin_with_zeros() -> None:
    model = tiny_model(zero_first_memory=True).eval()
    ids, mems = tokens(2, 3), model(tokens(2, 7)).mems
    plain = Mems(mems.hidden, mems.n_valid, mems.tokens)
    assert torch.equal(model(ids, mems=plain).logits, model(ids, mems=mems).logits)


def test_it_is_refused_by_its_description_alone() -> None:
    """No number is looked at: memories without numbers are compared too, and wrong numbers pass."""
    nowhere = make_blueprint(TransformerXLConfig(vocab_size=13, n_layer=2, d_model=8, n_head=2, d_head=4, d_inner=8, mem_len=5))
    nowhere.check_memory(nowhere.init_mems(2), 2)
    nowhere.check_memory(nowhere.init_mems(2, length=3), 2)
    with pytest.raises(ValueError, match=r"^mems of another model: hidden.0 is "):
        nowhere.check_memory(nowhere.with_context(mem_len=6).init_mems(2), 2)
    model = tiny_model()
    mems = model.init_mems(2)
    model.check_memory(Mems(mems.hidden, mems.n_valid + 100), 2)


@pytest.mark.parametrize("make", [tiny_model, tiny_xlnet, lstm])
def test_what_is_no_memory_or_no_batch_is_refused_in_one_line(make: Callable[[], Any]) -> None:
    model = make()
    read = model.read if isinstance(model, XLNet) else model
    for mems in (torch.zeros(2, 5, 10), [torch.zeros(5, 2, 10)] * 2, (torch.zeros(5, 2, 10),), {}):
        with pytest.raises(
            TypeError, match=r"^mems must be what a call returned, or model.init_mems\(2\), not a (Tensor|list|tuple|dict)$"
        ):
            read(tokens(2, 3), mems=cast(Any, mems))
    for ids in ([[1, 2]], np.array([[1, 2]]), "text", None):
        with pytest.raises(
            TypeError, match=r"^ids must be an int64 tensor of shape \(batch, tgt_len\), not a \w+; use torch.tensor\(\["
        ):
            read(cast(Any, ids))
    for dtype in (torch.float32, torch.bool, torch.uint8):
        with pytest.raises(TypeError, match=rf"^ids must be an int64 tensor of shape \(batch, tgt_len\), not {dtype}$"):
            read(torch.zeros(2, 3, dtype=dtype))
    if not isinstance(model, XLNet):
        assert model(torch.zeros(2, 3, dtype=torch.int32)).logits is not None
    for shape in ((0, 3), (3, 0), (3,), (1, 2, 3)):
        with pytest.raises(ValueError, match=r"^ids \([0-9, ]*\) must have shape \(batch, tgt_len\), none of them 0$"):
            read(torch.zeros(shape, dtype=torch.int64))


def test_a_memory_is_shown_in_one_line() -> None:
    mems = tiny_model(mem_len=5).init_mems(2)
    assert repr(mems) == "Mems(rows=2, layers=2, positions=5, width=10, dtype=torch.float64, device=cpu)"
    assert repr(lstm(d_hidden=12).init_mems(3)).startswith("LstmState(rows=3, layers=2, positions=1, width=24/16, dtype=")

"""Which row an n-gram has, and which tokens stand before a segment; the loops of the equation test the rest."""

import itertools

import pytest
import torch

from tests.helpers import assert_close, tiny_model
from transformer_xl.batch import Rows
from transformer_xl.inference.reader import Reader
from transformer_xl.model.memory import Mems
from transformer_xl.model.ngrams import codes, earlier_tokens


@pytest.mark.parametrize("n", [2, 3])
def test_every_ngram_has_a_row_of_its_own_where_there_are_enough(n: int) -> None:
    grams = torch.tensor(list(itertools.product(range(5), repeat=n)))
    assert sorted(codes(grams.unbind(1), 5, 5**n).tolist()) == list(range(5**n))


@pytest.mark.parametrize("n_row", [255, 256, 257, 300, 1000, 1024, 4000, 10_000])
def test_no_table_is_blind_to_a_token(n_row: int) -> None:
    """With c = 257 and 257 rows, only the last token would count; with c = 1,000,003 and 1,000 rows, neighbors share theirs."""
    last, before = torch.arange(257).repeat(257), torch.arange(257).repeat_interleave(257)
    row = codes([last, before], 257, n_row).view(257, 257)
    for of_one in (row[3], row[:, 3]):
        assert len(of_one.unique()) >= 0.9 * min(n_row, 257)
    assert (row.flatten().bincount(minlength=n_row) > 0.8 * 257 * 257 / n_row).all()


@pytest.mark.parametrize("ext_len", [0, 1, 2, 5])
def test_a_segment_that_begins_with_the_end_of_the_last_one(ext_len: int) -> None:
    text = torch.arange(1, 21).view(2, 10)
    before, at, K = torch.zeros(2, 3, dtype=torch.int64), 0, 3
    while at + 6 <= 10:
        ids = text[:, at : at + 6]
        earlier, before = earlier_tokens(before, ids, Rows(), ext_len=ext_len)
        for k in range(1, K + 1):
            expected = [[row[at + t - k] + 1 if at + t >= k else 0 for t in range(6)] for row in text.tolist()]
            assert earlier[k - 1].tolist() == expected
        at += 6 - ext_len


def test_where_more_is_read_again_than_a_padded_row_has_nothing_is_left() -> None:
    ids, rows = torch.tensor([[0, 0, 7], [4, 5, 6]]), Rows(n_pad=torch.tensor([2, 0]))
    _, last = earlier_tokens(torch.tensor([[8, 9], [8, 9]]), ids, rows, ext_len=2)
    assert last.tolist() == [[0, 8], [9, 5]]  # 9 and 7 of the first row, 5 and 6 of the second are read again


def test_the_tokens_of_an_earlier_document_are_not_kept() -> None:
    starts = torch.tensor([[False, True, False], [True, False, False], [False, False, False]])
    earlier, last = earlier_tokens(torch.full((3, 2), 9), torch.full((3, 3), 4), Rows(document_starts=starts))
    assert earlier[0].tolist() == [[9, 0, 5], [0, 5, 5], [9, 5, 5]]
    assert earlier[1].tolist() == [[9, 0, 0], [0, 0, 5], [9, 9, 5]]
    assert last.tolist() == [[5, 5]] * 3
    starts = torch.tensor([[False, False, True]])
    assert earlier_tokens(torch.full((1, 2), 9), torch.full((1, 3), 4), Rows(document_starts=starts))[1].tolist() == [[0, 5]]


def test_a_memory_keeps_the_tokens_of_its_rows() -> None:
    model = tiny_model(ngram_rows=(40, 50))
    mems = model(torch.tensor([[1, 2, 3], [4, 5, 6]])).mems
    assert mems.tokens.tolist() == [[3, 4], [6, 7]]
    again = Mems.from_state_dict(mems.state_dict())
    assert again.tokens is not None and torch.equal(again.tokens, mems.tokens)
    assert mems.reset(torch.tensor([True, False])).tokens.tolist() == [[0, 0], [6, 7]]
    joined = Mems.concatenate([mems.select(slice(1, 2)), mems])
    assert joined.tokens is not None and joined.tokens.tolist() == [[6, 7], [3, 4], [6, 7]]


def test_without_memory_each_segment_begins_anew() -> None:
    model = tiny_model(ngram_rows=(40,), mem_len=0)
    ids = torch.tensor([[1, 2, 3]])
    assert_close("logits", model(ids, mems=model(ids).mems).logits, model(ids).logits, 0.0)


def test_a_memory_of_other_ngrams_is_refused() -> None:
    model, other = tiny_model(ngram_rows=(40, 50)), tiny_model(ngram_rows=(40,))
    with pytest.raises(ValueError, match=r"tokens is torch.int64 \(1, 1\)"):
        model(torch.tensor([[1]]), mems=other.init_mems(1))
    with pytest.raises(ValueError, match="hold 1 tokens"):
        Reader(model, tgt_len=4).from_mems(other.init_mems(1))

"""The nats that an XLNet gives each token, against the loops of `tests/reference/xlnet_loops.py`."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers import tiny_xlnet
from tests.reference.xlnet_loops import read_row
from tests.tokenizers.cases import TOKENIZERS
from transformer_xl.errors import TokenizerError, TrainingError
from transformer_xl.model.xlnet import XLNet
from transformer_xl.reading.gaps import gap_nats
from transformer_xl.reading.reading import Reading
from transformer_xl.tokenizers.unigram import SentencePieceTokenizer

TOKENIZER = TOKENIZERS["unigram"]
assert isinstance(TOKENIZER, SentencePieceTokenizer)
TEXTS = [TOKENIZER.encode(text) for text in ("the cat sat", "", "it's on", "a cat, naïve x", "the cat", "the mat", "sat")]


def nats_by_loops(model: XLNet, ids: np.ndarray) -> list[float]:
    """One reading for each token, in which nothing sees it."""
    tokenizer, config = TOKENIZER, model.config
    assert isinstance(tokenizer, SentencePieceTokenizer)
    row, n, nats = [*ids.tolist(), tokenizer.id_of("<sep>"), tokenizer.id_of("<cls>")], len(ids), []
    weights = {name: parameter.detach().double() for name, parameter in model.named_parameters()}
    for place in range(n):
        sees = [[j != place for j in range(n + 2)]] * (n + 2)
        empty: list[list[Any]] = [[] for _ in range(config.n_layer)]
        _, (log_probabilities,), _ = read_row(row, sees, [place], [0] * (n + 1) + [2], False, empty, weights, config)
        nats.append(-float(log_probabilities[row[place]]))
    return nats


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("changes", [{}, {"mem_len": 0}, {"backward_half": True, "zero_first_memory": True, "reuse_len": 2}])
def test_each_token_is_predicted_with_all_others_in_sight(changes: dict[str, Any]) -> None:
    model = tiny_xlnet(vocab_size=TOKENIZER.vocab_size, **changes)
    scored = list(gap_nats(model, iter(TEXTS), TOKENIZER, Reading(batch_size=4)))
    assert [len(nats) for nats in scored] == [len(ids) for ids in TEXTS]
    for ids, nats in zip(TEXTS, scored, strict=True):
        assert nats.tolist() == pytest.approx(nats_by_loops(model, ids), rel=1e-5)


def test_a_text_gets_the_same_whatever_is_read_beside_it_and_before_it() -> None:
    model = tiny_xlnet(vocab_size=TOKENIZER.vocab_size).train()
    whole = list(gap_nats(model, iter(TEXTS), TOKENIZER, Reading(batch_size=2)))
    again = list(gap_nats(model, iter(TEXTS), TOKENIZER, Reading(batch_size=2), skip=2))
    assert model.training
    assert np.isnan(np.concatenate(again[:2])).all()
    for one, other in zip(whole[2:], again[2:], strict=True):
        assert np.array_equal(one, other)
    for ids, nats in zip(TEXTS, whole, strict=True):
        (alone,) = gap_nats(model, iter([ids]), TOKENIZER, Reading(batch_size=64))
        assert np.allclose(alone, nats, rtol=1e-5)


def test_what_cannot_be_scored_is_refused() -> None:
    model = tiny_xlnet(vocab_size=TOKENIZER.vocab_size)
    with pytest.raises(TokenizerError, match="outside"):
        next(gap_nats(model, [np.array([TOKENIZER.vocab_size])], TOKENIZER, Reading()))
    with torch.no_grad():
        model.mask_emb.fill_(torch.nan)
    with pytest.raises(TrainingError, match="nats in fp32 are not finite numbers"):
        next(gap_nats(model, [np.array([1])], TOKENIZER, Reading()))

"""Nats are those of `evaluate` however a text is divided, and those of a text alone however many are read together."""

import errno
from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers import tiny_model
from tests.reading.test_stream import KINDS, model_of
from transformer_xl.config.model import LstmConfig
from transformer_xl.errors import CorpusError, TokenizerError, TrainingError
from transformer_xl.generation.decoder import Decoder
from transformer_xl.model.base import LanguageModel
from transformer_xl.model.lstm import Lstm
from transformer_xl.reading.evaluation import evaluate, write_token_nats
from transformer_xl.reading.reading import Reading
from transformer_xl.reading.texts import Ending, Nats, nats, score_answers
from transformer_xl.tokenizers.kinds import ByteTokenizer
from transformer_xl.world import World

TEXTS = [np.array([(7 * i * i + 3 * i + n) % 13 for i in range(n)], np.int64) for n in (1, 2, 30, 5, 9, 2, 17, 4)]


@pytest.mark.parametrize("kind", ["transformer_xl", "lstm", "al_rfou", "no memory", "zero_first_memory", "pairs"])
@pytest.mark.parametrize("ext_len", [0, 3])
def test_parts_of_a_text_have_the_bits_of_the_whole(kind: str, ext_len: int) -> None:
    model, ids = model_of(kind), np.concatenate(TEXTS * 2)
    reading = Reading(tgt_len=6, ext_len=ext_len)
    whole = evaluate(model, ids, reading, per_token=True)
    assert whole.token_nats is not None
    for cuts in ([], [1], [0, 3, 3, 50], list(range(len(ids)))):
        parts = np.split(ids, cuts)
        found = [each.tokens for each in nats(model, iter(parts), reading, carried=True)]
        assert list(map(len, found)) == list(map(len, parts))
        first, *others = np.concatenate(found)
        assert np.isnan(first) and np.array_equal(others, whole.token_nats)
    (alone,) = nats(model, [ids[:1]], reading, carried=True)
    assert np.isnan(alone.tokens).tolist() == [True] and not list(nats(model, [], reading, carried=True))


def test_parts_are_given_back_as_soon_as_a_segment_is_read_and_none_is_held() -> None:
    """A text may be without end; between parts, the model is in its own mode and gradients are on."""
    model, n_read = deepcopy(model_of("transformer_xl")).train(), 0

    def endless() -> Iterator[np.ndarray]:
        nonlocal n_read
        while True:
            n_read += 3
            yield np.arange(3)

    found = nats(model, endless(), Reading(tgt_len=6), carried=True)
    for n_given in range(3, 300, 3):
        assert len(next(found).tokens) == 3
        assert n_read <= n_given + 6 + 3
        assert model.training and torch.is_grad_enabled()


@pytest.mark.parametrize("carried", [False, True])
def test_a_model_in_training_is_read_without_dropout(carried: bool) -> None:
    model = Lstm(LstmConfig(vocab_size=13, n_layer=2, d_model=10, dropout=0.5)).eval()
    expected = list(nats(model, TEXTS, Reading(tgt_len=6), carried=carried))
    for one, other in zip(nats(model.train(), TEXTS, Reading(tgt_len=6), carried=carried), expected, strict=True):
        assert np.array_equal(one.tokens, other.tokens, equal_nan=True) and model.training


def test_nats_that_are_no_numbers_are_refused() -> None:
    """And not taken for tokens that nothing predicts."""
    model = deepcopy(model_of("transformer_xl"))
    with torch.no_grad():
        next(model.parameters()).fill_(torch.nan)
    for carried in (False, True):
        with pytest.raises(TrainingError, match="nats in fp32 are not finite numbers; use --precision fp32"):
            list(nats(model, TEXTS, Reading(tgt_len=6, batch_size=3), carried=carried))


@pytest.mark.parametrize("kind", ["transformer_xl", "lstm", "al_rfou"])
def test_answers_are_scored_document_by_document(kind: str) -> None:
    """As each alone is, from its first separator on; without memory, only that separator stands before an answer."""
    model, ids = model_of(kind), np.concatenate(TEXTS)
    starts = np.cumsum([0, *map(len, TEXTS[:-1])])
    reading = Reading(tgt_len=6, batch_size=2)
    answers = [(text, int((text == 4).argmax())) for text in TEXTS if 4 in text[:-1]]
    assert 2 < len(answers) < len(TEXTS) and any((text[n + 1 :] == 4).any() for text, n in answers)
    expected = alone(model, [Ending(text, len(text) - n - 1) for text, n in answers], reading)
    n_read: list[int] = []
    score = score_answers(model, ids, starts, reading, separator=4, on_tokens=n_read.append)
    assert score.nats == pytest.approx(sum(float(each.tokens.sum()) for each in expected), abs=1e-4)
    assert score.tokens == sum(len(each.tokens) for each in expected) == score.n_characters
    assert n_read == list(map(len, TEXTS)) and score.share == 1
    of_some = score_answers(model, ids, starts, reading, separator=4, limit=4)
    assert of_some.tokens == sum(len(text) - n - 1 for text, n in answers if any(text is each for each in TEXTS[:3]))
    assert of_some.share == len(np.concatenate(TEXTS[:3])) / len(ids)
    parts = [score_answers(model, ids, starts, reading, separator=4, world=Apart(rank, 2)) for rank in range(2)]
    assert sum(part.tokens for part in parts) == score.tokens
    assert sum(part.nats for part in parts) == pytest.approx(score.nats, abs=1e-4)
    if model.mem_len:
        without = score_answers(model, ids, starts, reading.without_memory(), separator=4)
        each_alone = alone(model, [text[n:] for text, n in answers], reading.without_memory())
        assert without.nats == pytest.approx(sum(float(each.tokens.sum()) for each in each_alone), abs=1e-4)
        assert without.tokens == score.tokens
    with pytest.raises(CorpusError, match="no document of the text has an answer; write each as question, tab, answer"):
        score_answers(model, ids, starts, reading, separator=99)


class Apart(World):
    """A process that does not hear of the others."""

    def sum(self, *values: float) -> tuple[float, ...]:
        return values


def alone(model: LanguageModel, texts: Iterable[np.ndarray | Ending], reading: Reading, **looks: Any) -> list[Nats]:
    """Each text in a call of its own."""
    return [one for text in texts for one in nats(model, [text], replace(reading, batch_size=1), **looks)]


@pytest.mark.parametrize("kind", KINDS)
def test_texts_side_by_side_are_each_alone(kind: str) -> None:
    """As a `Decoder` scores them, if keys can be kept; else as segments."""
    model, reading = model_of(kind), Reading(tgt_len=6, batch_size=3)
    together = list(nats(model, TEXTS, reading, likeliest=True))
    for text, found, one in zip(TEXTS, together, alone(model, TEXTS, reading, likeliest=True), strict=True):
        np.testing.assert_allclose(found.tokens, one.tokens, atol=1e-5)
        assert found.likeliest is not None and one.likeliest is not None
        assert found.likeliest.tolist() == one.likeliest.tolist() and len(found.tokens) == len(text) - 1
        if len(text) == 1:
            continue
        if (model.keeps_keys and model.mem_len) or kind == "lstm":
            expected = Decoder(model).score([text])[0][1:].numpy()
        else:
            score = evaluate(model, text, tgt_len=6, per_token=True)
            assert score.token_nats is not None
            expected = score.token_nats
        np.testing.assert_allclose(found.tokens, expected, atol=1e-5)


def test_only_the_last_tokens_are_scored_if_only_they_are_asked_for() -> None:
    model, reading = model_of("transformer_xl"), Reading(tgt_len=6, batch_size=3)
    endings = [Ending(text, max(len(text) - 3, 0)) for text in TEXTS]
    for ending, one, whole in zip(endings, nats(model, endings, reading), nats(model, TEXTS, reading), strict=True):
        assert len(one.tokens) == ending.n_scored
        np.testing.assert_allclose(one.tokens, whole.tokens[len(whole.tokens) - ending.n_scored :], atol=1e-5)


def test_nothing_is_read_again_of_texts_alone() -> None:
    """Every token sees exactly the memory before it anyway."""
    model = model_of("transformer_xl")
    for one, other in zip(*(nats(model, TEXTS, Reading(tgt_len=6, ext_len=n)) for n in (0, 3)), strict=True):
        assert np.array_equal(one.tokens, other.tokens)


def test_texts_at_the_beginning_can_be_left_unread() -> None:
    """The others are read in the same windows, and get the same bits."""
    model, reading = model_of("transformer_xl"), Reading(tgt_len=6, batch_size=2)
    whole, rest = (list(nats(model, TEXTS, reading, skip=n)) for n in (0, 3))
    assert [len(each.tokens) for each in rest] == [len(text) - 1 for text in TEXTS]
    assert all(np.isnan(each.tokens).all() for each in rest[:2])  # the first window; the third text shares one with others
    assert all(np.array_equal(one.tokens, other.tokens) for one, other in zip(whole[2:], rest[2:], strict=True))


def test_the_likeliest_token_is_that_of_all_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformer_xl.reading.texts._MOST_SCORES", 40)  # a few tokens at once
    model, text = model_of("transformer_xl"), TEXTS[2]
    (found,) = nats(model, [text], Reading(tgt_len=6), likeliest=True)
    decoder, best = Decoder(model), []
    for token in text[:-1].tolist():
        best.append(int(decoder.feed(torch.tensor([[token]])).argmax()))
    assert found.likeliest is not None and found.likeliest.tolist() == (np.array(best) == text[1:]).tolist()
    assert 0 < found.likeliest.sum() < len(text) - 1


@pytest.mark.parametrize("kind", ["transformer_xl", "lstm", "adaptive"])
def test_an_event_has_the_probability_of_its_tokens_together(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the nats of each token, which stay what they are."""
    monkeypatch.setattr("transformer_xl.inference.softmax._CHUNK_ELEMENTS", 40)
    model = tiny_model(cutoffs=(3, 8), div_val=2) if kind == "adaptive" else model_of(kind)
    ids, event, reading = np.concatenate(TEXTS), np.array([1, 4, 12]), Reading(tgt_len=6, batch_size=3)
    plain, beside = (list(nats(model, TEXTS, reading, carried=True, event=asked)) for asked in (None, event))
    one, other = (np.concatenate([each.tokens for each in some]) for some in (plain, beside))
    np.testing.assert_allclose(one, other, atol=1e-6)
    given = np.concatenate([each.event for each in beside if each.event is not None])
    assert np.isnan(given[0]) and all(each.event is None for each in plain)
    for n in (1, 7, 30, len(ids) - 1):
        each = [evaluate(model, np.append(ids[:n], token), tgt_len=6, per_token=True).token_nats for token in event]
        assert given[n] == pytest.approx(-np.logaddexp.reduce([-own[-1] for own in each if own is not None]), abs=1e-5)
    for text, scored in zip(TEXTS, nats(model, TEXTS, reading, event=event), strict=True):
        np.testing.assert_allclose(scored.tokens, alone(model, [text], reading)[0].tokens, atol=1e-5)
        assert scored.event is not None and len(scored.event) == len(text) - 1
        for n in {1, len(text) // 2, len(text) - 1} & set(range(1, len(text))):  # what follows the first n tokens
            each = alone(model, [Ending(np.append(text[:n], token), 1) for token in event], reading)
            expected = -np.logaddexp.reduce(-np.concatenate([one.tokens for one in each]))
            assert scored.event[n - 1] == pytest.approx(expected, abs=1e-5)


def test_ids_of_another_vocabulary_are_refused() -> None:
    for carried in (False, True):
        with pytest.raises(TokenizerError, match="token id 13 is outside the vocabulary"):
            list(nats(model_of("transformer_xl"), [np.array([13, 1])], Reading(), carried=carried))


@pytest.mark.parametrize("name", ["nats.tsv", "nats.npy"])
def test_a_full_disk_is_named_by_the_file_and_leaves_none(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("numpy.save", full)
    monkeypatch.setattr(ByteTokenizer, "decode", full)
    with pytest.raises(OSError, match=rf"No space left on device: '.*{name}'"):
        write_token_nats(tmp_path / name, np.arange(3), np.ones(2, np.float32), ByteTokenizer())
    assert not list(tmp_path.iterdir())

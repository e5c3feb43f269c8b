"""Nats are those of `evaluate` however a text is divided, and those of a text alone however many are read together."""

import errno
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.helpers import tiny_model
from tests.reading.test_stream import KINDS, model_of
from transformer_xl.data.tokenizers import ByteTokenizer
from transformer_xl.errors import ConfigError, CorpusError, TrainingError
from transformer_xl.generation.decoder import Decoder
from transformer_xl.reading.evaluation import Reading, evaluate, write_token_nats
from transformer_xl.reading.token_nats import SideBySide, nats_in_parts, score_answers

TEXTS = [np.array([(7 * i * i + 3 * i + n) % 13 for i in range(n)], np.int64) for n in (1, 2, 30, 5, 9, 2, 17, 4)]


@pytest.mark.parametrize("kind", ["transformer_xl", "lstm", "al_rfou", "no memory", "zero_first_memory", "pairs"])
def test_parts_of_a_text_have_the_bits_of_the_whole(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformer_xl.reading.token_nats._BLOCK", 12)
    model, ids = model_of(kind), np.concatenate(TEXTS * 2)
    reading = Reading(tgt_len=6, mem_len=model.mem_len)
    whole = evaluate(model, ids, **vars(reading), per_token=True)
    assert whole.token_nats is not None
    for cuts in ([], [1], [0, 3, 3, 50], list(range(len(ids)))):
        parts = np.split(ids, cuts)
        found = [nats.tokens for nats in nats_in_parts(model, iter(parts), reading)]
        assert list(map(len, found)) == list(map(len, parts))
        first, *others = np.concatenate(found)
        assert np.isnan(first) and np.array_equal(others, whole.token_nats)
    ((alone, _),) = nats_in_parts(model, [ids[:1]], reading)
    assert np.isnan(alone).tolist() == [True] and not list(nats_in_parts(model, [], reading))


def test_nats_that_are_no_numbers_are_refused() -> None:
    """And not taken for tokens that nothing predicts."""
    model = deepcopy(model_of("transformer_xl"))
    with torch.no_grad():
        next(model.parameters()).fill_(torch.nan)
    with pytest.raises(TrainingError, match="nats in fp32 are not finite numbers; use --precision fp32"):
        list(nats_in_parts(model, TEXTS, Reading(tgt_len=6, mem_len=model.mem_len)))
    with pytest.raises(TrainingError, match="nats in fp32 are not finite numbers; use --precision fp32"):
        SideBySide(model, batch_size=3, tgt_len=6).score(TEXTS)


@pytest.mark.parametrize("kind", ["transformer_xl", "lstm", "al_rfou"])
def test_answers_are_scored_document_by_document(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As each alone is, from its first separator on; without memory, only that separator stands before an answer."""
    monkeypatch.setattr("transformer_xl.reading.token_nats._DOCUMENTS", 3)
    model, ids = model_of(kind), np.concatenate(TEXTS)
    starts = np.cumsum([0, *map(len, TEXTS[:-1])])
    reading = Reading(tgt_len=6, mem_len=model.mem_len, batch_size=2)
    answers = [(text, int((text == 4).argmax())) for text in TEXTS if 4 in text[:-1]]
    assert 2 < len(answers) < len(TEXTS) and any((text[n + 1 :] == 4).any() for text, n in answers)
    expected = [SideBySide(model, batch_size=1, tgt_len=6).score([text], n_asked=[len(text) - n - 1])[0] for text, n in answers]
    n_read: list[int] = []
    score = score_answers(model, ids, starts, separator=4, reading=reading, on_tokens=n_read.append)
    assert score.nats == pytest.approx(sum(float(each.nats.sum()) for each in expected), abs=1e-4)
    assert score.tokens == sum(len(each.nats) for each in expected) == score.n_characters
    assert sum(n_read) == len(ids) and len(n_read) == 3 and score.share == 1
    of_some = score_answers(model, ids, starts, separator=4, reading=reading, limit=4)
    assert of_some.tokens == sum(len(text) - n - 1 for text, n in answers if any(text is each for each in TEXTS[:3]))
    assert of_some.share == len(np.concatenate(TEXTS[:3])) / len(ids)
    if model.mem_len:
        without = score_answers(model, ids, starts, separator=4, reading=reading.without_memory())
        view = reading.without_memory().view(model)
        alone = [SideBySide(view, batch_size=1, tgt_len=6).score([text[n:]])[0] for text, n in answers]
        assert without.nats == pytest.approx(sum(float(each.nats.sum()) for each in alone), abs=1e-4)
        assert without.tokens == score.tokens
    with pytest.raises(CorpusError, match="no document of the text has an answer; write each as question, tab, answer"):
        score_answers(model, ids, starts, separator=99, reading=reading)


@pytest.mark.parametrize("kind", KINDS)
def test_texts_side_by_side_are_each_alone(kind: str) -> None:
    """As a `Decoder` scores them, if keys can be kept; else as segments."""
    model = model_of(kind)
    together = SideBySide(model, batch_size=3, tgt_len=6).score(TEXTS, likeliest=True)
    for text, found in zip(TEXTS, together, strict=True):
        (alone,) = SideBySide(model, batch_size=1, tgt_len=6).score([text], likeliest=True)
        np.testing.assert_allclose(found.nats, alone.nats, atol=1e-5)
        assert found.likeliest.tolist() == alone.likeliest.tolist() and len(found.nats) == len(text) - 1
        if len(text) == 1:
            continue
        if (model.keeps_keys and model.mem_len) or kind == "lstm":
            expected = Decoder(model).score([text])[0][1:].numpy()
        else:
            score = evaluate(model, text, tgt_len=6, per_token=True)
            assert score.token_nats is not None
            expected = score.token_nats
        np.testing.assert_allclose(found.nats, expected, atol=1e-5)


def test_only_the_last_tokens_are_scored_if_only_they_are_asked_for() -> None:
    scorer = SideBySide(model_of("transformer_xl"), batch_size=3, tgt_len=6)
    n_asked = [max(len(text) - 3, 0) for text in TEXTS]
    for n, one, whole in zip(n_asked, scorer.score(TEXTS, n_asked=n_asked), scorer.score(TEXTS), strict=True):
        assert len(one.nats) == n
        np.testing.assert_allclose(one.nats, whole.nats[len(whole.nats) - n :], atol=1e-5)


def test_the_likeliest_token_is_that_of_all_scores() -> None:
    model, text = model_of("transformer_xl"), TEXTS[2]
    (found,) = SideBySide(model, batch_size=1, tgt_len=6).score([text], likeliest=True)
    decoder, best = Decoder(model), []
    for token in text[:-1].tolist():
        best.append(int(decoder.feed(torch.tensor([[token]])).argmax()))
    assert found.likeliest.tolist() == (np.array(best) == text[1:]).tolist()
    assert 0 < found.likeliest.sum() < len(text) - 1


@pytest.mark.parametrize("kind", ["transformer_xl", "lstm", "adaptive"])
def test_an_event_has_the_probability_of_its_tokens_together(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the nats of each token, which stay what they are."""
    monkeypatch.setattr("transformer_xl.reading.token_nats._BLOCK", 12)
    monkeypatch.setattr("transformer_xl.inference.softmax._CHUNK_ELEMENTS", 40)
    model = tiny_model(cutoffs=(3, 8), div_val=2) if kind == "adaptive" else model_of(kind)
    ids, event = np.concatenate(TEXTS), np.array([1, 4, 12])
    reading = Reading(tgt_len=6, mem_len=model.mem_len)
    plain, beside = (list(nats_in_parts(model, TEXTS, reading, event=asked)) for asked in (None, event))
    np.testing.assert_allclose(*(np.concatenate([nats.tokens for nats in some]) for some in (plain, beside)), atol=1e-6)
    given = np.concatenate([nats.event for nats in beside if nats.event is not None])
    assert np.isnan(given[0]) and all(nats.event is None for nats in plain)
    for n in (1, 7, 30, len(ids) - 1):
        each = [evaluate(model, np.append(ids[:n], token), **vars(reading), per_token=True).token_nats for token in event]
        assert given[n] == pytest.approx(-np.logaddexp.reduce([-nats[-1] for nats in each if nats is not None]), abs=1e-5)
    with pytest.raises(ConfigError, match="an event goes with neither a temperature"):
        evaluate(model, ids, event=event, temperature=2.0)
    scorer = SideBySide(model, batch_size=3, tgt_len=6)
    for text, scored in zip(TEXTS, scorer.score(TEXTS, event=event), strict=True):
        np.testing.assert_allclose(scored.nats, scorer.score([text])[0].nats, atol=1e-5)
        assert scored.event is not None and len(scored.event) == len(text) - 1
        for n in range(1, len(text)):  # what follows the first n tokens
            each = [scorer.score([np.append(text[:n], token)], n_asked=[1])[0].nats for token in event]
            assert scored.event[n - 1] == pytest.approx(-np.logaddexp.reduce(-np.concatenate(each)), abs=1e-5)


@pytest.mark.parametrize("name", ["nats.tsv", "nats.npy"])
def test_a_full_disk_is_named_by_the_file_and_leaves_none(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("numpy.save", full)
    monkeypatch.setattr(ByteTokenizer, "decode", full)
    with pytest.raises(OSError, match=rf"No space left on device: '.*{name}'"):
        write_token_nats(tmp_path / name, np.arange(3), np.ones(2, np.float32), ByteTokenizer())
    assert not list(tmp_path.iterdir())

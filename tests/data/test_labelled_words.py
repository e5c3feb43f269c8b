"""Rows of words: which token stands for each, in vocabularies of all kinds; batches of words and their labels."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.tokenizers.test_unigram import GOLDENS
from transformer_xl.batch import NOT_SCORED
from transformer_xl.config.model import HeadConfig
from transformer_xl.config.run import TokenizerConfig
from transformer_xl.data.labelled import DocumentStream, LabelledStream, LabelledWords, WeightedRows
from transformer_xl.data.labels import Example, balanced_weights, labels_of
from transformer_xl.data.layout import Layout
from transformer_xl.errors import CorpusError, TokenizerError
from transformer_xl.tokenizers.kinds import ByteTokenizer, CharTokenizer, train_tokenizer
from transformer_xl.tokenizers.unigram import read_spiece

TEXT = "the cat sat on the mat and the dög sat on the cat ; 1,000 cats sat !"
WORDS = ("the", "dög", "sat", ",", "on", "1,000", "mats", "the", "cat", "!")
HEAD = HeadConfig(kind="tokens", labels=("O", "B-X", "I-X"))
XLNET = Layout(read_spiece(GOLDENS / "xlnet.model"), "xlnet")
KINDS = ("byte", "char", "word", "bpe", "unigram")


def _tokenizer(kind: str):
    sizes = {"bpe": 280, "unigram": 300}
    config = {"kind": kind, "vocab_size": sizes.get(kind), "byte_fallback": kind in ("char", "unigram")}
    return train_tokenizer(TokenizerConfig.model_validate(config), [f"{TEXT}\n" * 30])


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_sees_the_past_reads_a_word_to_its_last_token(kind):
    layout = Layout(_tokenizer(kind), "transformer_xl")
    row = layout.row_of_words(Example("", words=WORDS, place="here"))
    text = " ".join(WORDS)
    ids, starts, ends = layout.tokenizer.encode_with_offsets(text)
    assert row.ids.tolist() == [*ids.tolist(), *layout.sep.tolist()]
    begin, expected = 0, []
    for word in WORDS:  # the last piece that has a character of the word
        expected.append(max(i for i in range(len(ids)) if starts[i] < begin + len(word) and ends[i] > begin))
        begin += len(word) + 1
    assert row.words.tolist() == expected
    assert len(set(expected)) == len(WORDS)
    if kind in ("byte", "char"):
        assert [layout.tokenizer.piece(int(row.ids[i]))[-1:] for i in row.words] == [word.encode()[-1:] for word in WORDS]
    assert layout.row_of_words(Example("", words=WORDS)).words.tolist() == expected


def test_an_xlnet_has_the_token_in_which_a_word_begins():
    row = XLNET.row_of_words(Example("", words=("The", "line\nend", "``", "1990,")))
    _, _, ends = XLNET.encode_with_offsets("The line\nend `` 1990,")
    assert row.ids[-2:].tolist() == [*XLNET.sep, *XLNET.end]
    assert row.words.tolist() == [int(np.argmax(ends > begin)) for begin in (0, 4, 13, 16)]


def test_words_of_one_piece_share_it_and_a_dropped_one_has_the_next():
    """SentencePiece may join words; XLNet's rules drop accents that stand alone."""
    layout = Layout(read_spiece(GOLDENS / "phrases.model", normalization="none"), "lstm")
    words = ["of", "the"] * 3
    row = layout.row_of_words(Example("", words=tuple(words)))
    assert len(row.words) == 6 and (np.diff(row.words) >= 0).all() and len(set(row.words.tolist())) < 6
    dropped = XLNET.row_of_words(Example("", words=("the", "\u0301", "the", "\u0301")))
    assert dropped.words[1] == dropped.words[2] and dropped.words[3] == len(dropped.ids) - 3


def test_what_cannot_be_read_is_said_with_its_place():
    example = Example("", words=("some", "words"), place="'a' line 7")
    with pytest.raises(CorpusError, match=r"^'a' line 7: this sentence of 2 words has 11 tokens, but 10 are read at most"):
        Layout(ByteTokenizer(), "lstm", max_len=10).row_of_words(example)
    assert len(Layout(ByteTokenizer(), "lstm", max_len=11).row_of_words(example).ids) == 11
    with pytest.raises(TokenizerError, match=r"^'a' line 7: character s \(U\+0073\)"):
        Layout(CharTokenizer("abc "), "lstm").row_of_words(example)
    with pytest.raises(CorpusError, match=r"^'a' line 7: nothing of .* can be encoded; leave it out"):
        XLNET.row_of_words(Example("", words=("\u0301",), place="'a' line 7"))


def _sentences(n: int) -> list[Example]:
    """Each of its own words, with labels that say how many and which."""
    found = []
    for i in range(n):
        words = tuple(f"{i}w{j}" for j in range(i % 4 + 1))
        found.append(Example(" ".join(words), label=("B-X", *("I-X",) * (i % 4 - 1), "O")[: len(words)], words=words))
    return found


def test_batches_hold_the_words_of_each_row_and_their_labels():
    sentences, layout = _sentences(9), Layout(ByteTokenizer(), "lstm")
    texts = LabelledWords(sentences, layout, HEAD)
    assert texts.lengths.tolist() == [len(each.text) + 1 for each in sentences] and len(texts) == 9
    batch = texts.batch(np.array([3, 0, 6]), np.array([True, True, False]), 20)
    assert batch.ids.shape == (3, 20) and batch.texts.words is not None
    assert batch.labels.tolist() == [[1, 2, 2, 0], [1, NOT_SCORED, NOT_SCORED, NOT_SCORED], [NOT_SCORED] * 4]
    assert (batch.n_scored, batch.per_row) == (5, False)
    for i, index in enumerate((3, 0, 6)):
        for place, word in zip(batch.texts.words[i].tolist(), sentences[index].words, strict=False):
            assert bytes(batch.ids[i, place + 1 - len(word) : place + 1].tolist()) == word.encode()
    weights = balanced_weights(labels_of(HEAD, sentences), 3)
    weighted = WeightedRows(texts, weights).batch(np.array([3]), np.array([True]), 20).texts.weights
    assert weighted is not None and torch.equal(weighted, weights[torch.tensor([[1, 2, 2, 0]])])


@pytest.mark.parametrize("in_documents", [False, True])
def test_a_stream_deals_out_every_word_once(in_documents):
    texts = LabelledWords(_sentences(7), Layout(ByteTokenizer(), "lstm"), HEAD)
    borders: dict[str, Any] = {"documents": np.array([0, 3, 7])} if in_documents else {}
    stream, n = (DocumentStream if in_documents else LabelledStream)(texts, **borders, batch_size=2, seed=1), 0
    for _ in range(stream.segments_per_epoch):
        batch = stream.read()
        n += batch.n_scored
        assert (batch.rows.document_starts is not None) == in_documents and batch.texts.words is not None
    assert n == sum(len(each.words) for each in _sentences(7))
    *others, last = _sentences(7)
    other = [*others, replace(last, label=("B-X", "O", "O"))]
    assert texts.checksum != LabelledWords(other, Layout(ByteTokenizer(), "lstm"), HEAD).checksum

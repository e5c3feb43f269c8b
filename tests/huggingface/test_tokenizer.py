"""Our tokenizers behind transformers' interface: the same ids and text, padding, and files that both sides read."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.huggingface.conftest import TEXT, Saved
from transformer_xl.config.run import TokenizerConfig
from transformer_xl.errors import TokenizerError
from transformer_xl.tokenizers.kinds import WordTokenizer, load_tokenizer, train_tokenizer

transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")

from transformers import AutoTokenizer  # noqa: E402

from transformer_xl.huggingface import TransformerXLTokenizer  # noqa: E402

KINDS = ["byte", "char", "word", "bpe", "unigram"]
TOKENIZERS = {kind: train_tokenizer(TokenizerConfig(kind=kind, vocab_size=None), [TEXT]) for kind in ("byte", "char", "word")}
TOKENIZERS |= {kind: train_tokenizer(TokenizerConfig(kind=kind, vocab_size=270), [TEXT]) for kind in ("bpe", "unigram")}
WRAPPED = {kind: TransformerXLTokenizer(tokenizer=tokenizer) for kind, tokenizer in TOKENIZERS.items()}


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.text(alphabet=[*sorted(set(TEXT)), "<", ">"], max_size=40))
def test_ids_and_text_are_ours(kind: str, text: str) -> None:
    native, hf = TOKENIZERS[kind], WRAPPED[kind]
    text = text.translate({ord("<"): None, ord(">"): None}) if kind == "char" else text
    ids = native.encode(text).tolist()
    assert hf(text)["input_ids"] == ids
    assert hf(text)["attention_mask"] == [1] * len(ids)
    for skip in (False, True):
        assert hf.decode(ids, skip_special_tokens=skip) == native.decode(ids)
    tokens = hf.convert_ids_to_tokens(ids)
    assert hf.convert_tokens_to_ids(tokens) == ids
    assert hf.convert_tokens_to_string(tokens) == native.decode(ids)


@pytest.mark.parametrize("kind", KINDS)
def test_every_id_has_a_name_of_its_own(kind: str) -> None:
    native, hf = TOKENIZERS[kind], WRAPPED[kind]
    vocabulary = hf.get_vocab()
    assert sorted(vocabulary.values()) == [*range(native.vocab_size + 1)]
    assert (hf.vocab_size, hf.pad_token_id, len(hf)) == (native.vocab_size, native.vocab_size, native.vocab_size + 1)
    assert hf.all_special_ids == [native.vocab_size]
    assert hf.convert_ids_to_tokens(hf.bos_token_id) is None, "libraries ask for it"


def test_names_of_bytes_and_of_words_that_look_like_them() -> None:
    assert WRAPPED["byte"].convert_ids_to_tokens([65, 0xC3]) == ["A", "<195>"]
    words = TransformerXLTokenizer(tokenizer=WordTokenizer(["<unk>", "<eos>", "<3>", "\ufffd"]))
    assert words.convert_ids_to_tokens([1, 2, 3]) == ["\n", "<3>", "<<3>>"]


def test_padding_stands_at_the_left_and_is_not_text() -> None:
    hf = WRAPPED["char"]
    batch = hf(["hello", "a"], padding=True, return_tensors="np")
    pad = hf.pad_token_id
    assert batch["input_ids"][1].tolist() == [pad] * 4 + hf("a")["input_ids"]
    assert batch["attention_mask"].tolist() == [[1] * 5, [0] * 4 + [1]]
    assert hf.batch_decode(batch["input_ids"], skip_special_tokens=True) == ["hello", "a"]
    assert hf.decode(batch["input_ids"][1]) == "<pad>" * 4 + "a"
    assert WRAPPED["byte"]("<pad>")["input_ids"] == list(b"<pad>"), "text is never taken for padding"


@pytest.mark.parametrize("kind", KINDS)
def test_saved_and_loaded(kind: str, save: Callable[..., Saved], tmp_path: Path) -> None:
    saved = save(kind)
    first = AutoTokenizer.from_pretrained(saved.path)
    assert isinstance(first, TransformerXLTokenizer)
    first.save_pretrained(tmp_path / "again")
    saved.model.save_pretrained(tmp_path / "again")
    again = AutoTokenizer.from_pretrained(tmp_path / "again")
    assert load_tokenizer(tmp_path / "again" / "tokenizer.json").fingerprint == saved.tokenizer.fingerprint
    for hf in (first, again, TransformerXLTokenizer.from_pretrained(tmp_path / "again")):
        assert hf.native.fingerprint == saved.tokenizer.fingerprint
        assert hf(TEXT)["input_ids"] == saved.tokenizer.encode(TEXT).tolist()
        assert (hf.pad_token_id, hf.padding_side, len(hf)) == (hf.vocab_size, "left", hf.vocab_size + 1)


def test_a_word_named_pad_is_the_padding() -> None:
    hf = TransformerXLTokenizer(tokenizer=WordTokenizer(["<unk>", "<eos>", "<pad>", "a"]))
    assert (hf.pad_token_id, len(hf)) == (2, 4)
    assert hf.decode([2, 3], skip_special_tokens=True) == "a"
    assert hf(["a a", "a"], padding=True)["input_ids"] == [[3, 3], [2, 3]]


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.text(alphabet=sorted(set(TEXT)), max_size=40), side=st.sampled_from(["left", "right"]))
def test_places_of_tokens_are_ours(kind: str, text: str, side: str) -> None:
    hf = WRAPPED[kind]
    ids, starts, ends = TOKENIZERS[kind].encode_with_offsets(text)
    expected = list(zip(starts.tolist(), ends.tolist(), strict=True))
    found = hf(text, return_offsets_mapping=True)
    assert (found["input_ids"], found["offset_mapping"]) == (ids.tolist(), expected)
    batch = hf([text, "hello"], return_offsets_mapping=True, padding=True, padding_side=side, return_tensors="np")
    plain = hf([text, "hello"], padding=True, padding_side=side, return_tensors="np")
    assert np.array_equal(batch["input_ids"], plain["input_ids"])
    real = batch["attention_mask"][0] == 1
    assert batch["offset_mapping"][0][real].tolist() == [list(place) for place in expected]
    assert not batch["offset_mapping"][0][~real].any()


def test_truncation_keeps_places_and_has_a_length_to_go_by(saved: Saved) -> None:
    hf = AutoTokenizer.from_pretrained(saved.path, model_max_length=3)
    found = hf("hello", truncation=True, return_offsets_mapping=True, return_overflowing_tokens=True)
    assert (found["offset_mapping"], found["overflowing_tokens"]) == ([(0, 1), (1, 2), (2, 3)], hf("lo")["input_ids"])
    hf.truncation_side = "left"
    assert hf("hello", truncation=True, return_offsets_mapping=True)["offset_mapping"] == [(2, 3), (3, 4), (4, 5)]
    whole = AutoTokenizer.from_pretrained(saved.path)
    for options in ({}, {"max_length": whole.model_max_length}):
        assert whole(["hello", "a"], truncation=True, **options)["input_ids"] == whole(["hello", "a"])["input_ids"]


def test_only_texts_have_places() -> None:
    for is_split, words in ((False, [1, 2]), (True, ["hello", "text"])):
        with pytest.raises(TokenizerError, match="return_offsets_mapping gives places in texts; give texts, not ids or words"):
            WRAPPED["byte"](words, return_offsets_mapping=True, is_split_into_words=is_split)  # pyright: ignore[reportArgumentType]
    moses = TransformerXLTokenizer(tokenizer=WordTokenizer(["<unk>", "<eos>"], moses="en"))
    with pytest.raises(TokenizerError, match="does not keep the place of its tokens"):
        moses("hello", return_offsets_mapping=True)


def test_errors_are_one_line(saved: Saved) -> None:
    hf = WRAPPED["char"]
    with pytest.raises(TokenizerError, match=r"character Q \(U\+0051\) is not in the tokenizer's alphabet"):
        hf("Q")
    with pytest.raises(TokenizerError, match="token id 99 is outside the vocabulary"):
        hf.decode([99])
    with pytest.raises(TokenizerError, match="token id 99 is outside the vocabulary"):
        hf.convert_ids_to_tokens(99)
    with pytest.raises(TokenizerError, match="'ab' is not one token of this tokenizer"):
        hf.convert_tokens_to_ids(["ab"])
    (saved.path / "tokenizer.json").unlink()
    with pytest.raises(TokenizerError, match=r"has no tokenizer\.json; give a saved tokenizer"):
        AutoTokenizer.from_pretrained(saved.path)


def test_ids_of_any_integer_type_are_decoded() -> None:
    ids = TOKENIZERS["char"].encode("hello")
    assert WRAPPED["char"].decode(np.asarray(ids, np.int32)) == "hello"
    assert WRAPPED["char"].decode(int(ids[0])) == "h"


def test_a_directory_without_a_model(tmp_path: Path) -> None:
    WRAPPED["word"].save_pretrained(tmp_path)
    again = TransformerXLTokenizer.from_pretrained(tmp_path)
    assert again.native.fingerprint == TOKENIZERS["word"].fingerprint

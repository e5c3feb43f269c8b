"""Ids and texts are those of the authors' code and of Hugging Face, saved by tests/parity/make_goldens_tokenization.py."""

import json
from pathlib import Path

import pytest

from transformer_xl.config.run import TokenizerConfig
from transformer_xl.conversion.vocabulary import from_vocab_state, from_vocab_txt, to_vocab_state
from transformer_xl.errors import TokenizerError
from transformer_xl.tokenizers.kinds import (
    ByteTokenizer,
    CharTokenizer,
    SymbolTokenizer,
    WordTokenizer,
    train_tokenizer,
)

GOLDENS = Path(__file__).parents[1] / "parity" / "goldens" / "tokenization"
AUTHORS = json.loads((GOLDENS / "authors.json").read_text(encoding="ascii"))
HUGGING_FACE = json.loads((GOLDENS / "huggingface.json").read_text(encoding="ascii"))

authors_cases = pytest.mark.parametrize("case", AUTHORS, ids=lambda case: case["name"])
hugging_face_cases = pytest.mark.parametrize("case", HUGGING_FACE, ids=lambda case: case["name"])


@authors_cases
@pytest.mark.parametrize("named", [True, False])
def test_ids_are_the_authors(case, named: bool) -> None:
    dataset = case["dataset"] if named else None
    tokenizer = from_vocab_state(case["state"], dataset=dataset)
    compared = 0
    for text, ids in zip(case["texts"], case["ids"], strict=True):
        if ids is None:
            continue
        compared += len(ids)
        data = text.encode("latin-1" if case["name"] == "enwik8" else "utf-8")
        assert tokenizer.encode_bytes(data).tolist() == _as_the_authors(tokenizer, text, ids)
    assert compared >= 20


def _as_the_authors(tokenizer, text: str, ids: list[int]) -> list[int]:
    """Leave out the end of a last line that has no line end, which only the authors' code ends."""
    if isinstance(tokenizer, WordTokenizer) and not text.endswith("\n"):
        assert ids[-1] == tokenizer.words.index(tokenizer.line_end)
        return ids[:-1]
    return ids


@authors_cases
def test_state_and_back(case) -> None:
    tokenizer = from_vocab_state(case["state"], dataset=case["dataset"])
    state = to_vocab_state(tokenizer)
    assert from_vocab_state(state).fingerprint == tokenizer.fingerprint
    assert state["idx2sym"] == case["state"]["idx2sym"]
    if "unk_idx" in case["state"]:
        assert state["unk_idx"] == case["state"]["unk_idx"]
    by_word = {word: index for index, word in enumerate(state["idx2sym"])}
    assert from_vocab_state(state | {"idx2sym": [], "sym2idx": by_word}).fingerprint == tokenizer.fingerprint


@hugging_face_cases
def test_ids_are_hugging_faces(case) -> None:
    pytest.importorskip("sacremoses")
    tokenizer = from_vocab_state(case["state"])
    assert (
        tokenizer.fingerprint
        == from_vocab_txt(
            case["vocab_txt"], lower_case=case["state"]["lower_case"], moses=case["state"]["language"]
        ).fingerprint
    )
    assert to_vocab_state(tokenizer)["never_split"] == case["state"]["never_split"]
    for row in case["rows"]:
        assert tokenizer.encode(row["text"]).tolist() == row["ids"], row["text"]
        assert tokenizer.encode(row["text"] + "\n").tolist() == [*row["ids"], 0]


@hugging_face_cases
def test_writes_what_hugging_face_writes(case) -> None:
    tokenizer = from_vocab_state(case["state"])
    compared = 0
    for row in case["rows"]:
        ids = [index for index in row["ids"] if index != 0]  # <eos>: they write it out, we end the line
        if len(ids) == len(row["ids"]):
            compared += len(ids)
            assert tokenizer.decode(ids) == row["written"], row["text"]
    assert compared > 40 or case["name"] == "german"


def test_missing_sacremoses_is_named(monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "sacremoses", None)
    tokenizer = from_vocab_txt("<eos>\nthe\n", moses="en")
    with pytest.raises(TokenizerError, match=r"needs the sacremoses package; in a clone: pip install -e '\.\[moses\]'"):
        tokenizer.encode("the")
    assert tokenizer.decode([1]) == "the"


def test_what_a_line_begins_and_ends_with() -> None:
    def lines(words: list[str], dataset: str | None = None) -> tuple:
        tokenizer = from_vocab_state({"idx2sym": words}, dataset=dataset)
        assert isinstance(tokenizer, WordTokenizer)
        return tokenizer.line_start, tokenizer.line_end

    assert lines(["<S>", "</S>", "<UNK>", "the"]) == ("<S>", "<S>")
    assert lines(["<S>", "<eos>", "the"]) == (None, "<eos>")
    assert lines(["<S>", "<eos>", "the"], "lm1b") == ("<S>", "<S>")
    assert lines(["<eos>", "1", "2"], "wt103") == (None, "<eos>")
    assert lines(["the", "cat"]) == (None, None)
    assert lines(["<eos>", "the"], "enwik8") == (None, None)
    with pytest.raises(TokenizerError, match=r"line_end \('<eos>'\) is not one of its words"):
        lines(["the"], "wt103")


def test_what_the_symbols_are() -> None:
    for words, unit, blank in ((["32", "10"], "byte", None), (["a", "_"], "char", "_")):
        tokenizer = from_vocab_state({"idx2sym": [*words, "<unk>"], "lower_case": True})
        assert isinstance(tokenizer, SymbolTokenizer)
        assert (tokenizer.unit, tokenizer.blank, tokenizer.unknown) == (unit, blank, "<unk>")
    assert isinstance(from_vocab_state({"idx2sym": ["<eos>", "32", "10"]}, dataset="ptb"), WordTokenizer)
    assert isinstance(from_vocab_state({"idx2sym": ["32", "256"]}), WordTokenizer)


def test_unknown_words_are_found_as_hugging_face_finds_them() -> None:
    def unknown(words: list[str], **state) -> str | None:
        tokenizer = from_vocab_state({"idx2sym": words, **state})
        assert isinstance(tokenizer, WordTokenizer)
        return tokenizer.unknown

    assert unknown(["<UNK>", "<unk>", "oov"]) == "<unk>"
    assert unknown(["<UNK>", "<unk>", "oov"], unk_idx=2) == "oov"
    assert unknown(["<UNK>", "oov"]) == "<UNK>"
    assert unknown(["oov"]) is None
    with pytest.raises(TokenizerError, match=r"word 'cat' is not in the vocabulary of 2 words"):
        from_vocab_txt("<eos>\nthe\n").encode("the cat\n")


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"idx2sym": [], "EOT": 50256}, "NVIDIA's OpenAIVocab"),
        ({"idx2sym": ["a"], "delimiter": "\t"}, r"separated by '\\t'"),
        ({"idx2sym": ["a", "a"]}, "a word occurs twice"),
        ({"sym2idx": {"a": 0, "b": 2}}, r"ids are not 0 … 1, each once"),
        ({"idx2sym": ["a"], "language": "../en"}, "not a language code"),
    ],
)
def test_states_that_cannot_be_used(state, message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        from_vocab_state(state)


def test_words_of_a_file_are_the_first_of_each_line() -> None:
    tokenizer = from_vocab_txt("<S> 12 a\r\nthe\n<UNK>\nthe\n cat\n")
    assert tokenizer.to_dict()["words"] == ["<S>", "the", "<UNK>", "cat"]


def test_own_tokenizers_have_counterparts() -> None:
    text = "the cat\n the dog sat\n"
    word = train_tokenizer(TokenizerConfig(kind="word", vocab_size=4), [text])
    assert isinstance(word, WordTokenizer)
    for own in (word, ByteTokenizer()):
        again = from_vocab_state(to_vocab_state(own))
        assert again.encode(text).tolist() == own.encode(text).tolist()
    with pytest.raises(TokenizerError, match="kind 'char' has no counterpart in other programs"):
        to_vocab_state(CharTokenizer("ab"))
    with pytest.raises(TokenizerError, match="no vocabulary with these words for line ends"):
        to_vocab_state(WordTokenizer(["a", "."], line_end=".", unknown=None))

import math
import subprocess
import sys
from itertools import product

import numpy as np
import pytest

from tests.data.tokenizer_cases import TEXT
from transformer_xl.config import TokenizerConfig
from transformer_xl.data import unigram_training
from transformer_xl.data.tokenizers import train_tokenizer
from transformer_xl.data.unigram import CONTROL, UNKNOWN, USER_DEFINED, UnigramTokenizer
from transformer_xl.data.unigram_training import _codes, _digamma, _Lattice, _seeds
from transformer_xl.errors import TokenizerError


def train(text: str = TEXT, **settings) -> UnigramTokenizer:
    tokenizer = train_tokenizer(TokenizerConfig(kind="unigram", **{"vocab_size": 120, **settings}), [text])
    assert isinstance(tokenizer, UnigramTokenizer)
    return tokenizer


def test_special_pieces_come_first() -> None:
    tokenizer = train()
    assert tokenizer.pieces[:17] == (UNKNOWN, *CONTROL, *USER_DEFINED)
    assert tokenizer.pieces[:9] == ("<unk>", "<s>", "</s>", "<cls>", "<sep>", "<pad>", "<mask>", "<eod>", "<eop>")
    assert list(tokenizer.scores[17:]) == sorted(tokenizer.scores[17:], reverse=True)
    assert math.isclose(sum(map(math.exp, tokenizer.scores[17:])), 1, abs_tol=0.2)
    assert 50 < tokenizer.vocab_size <= 120


def test_the_same_text_gives_the_same_pieces() -> None:
    """In another process, too, where sets have another order."""
    code = (
        "import sys; from transformer_xl.config import TokenizerConfig\n"
        "from transformer_xl.data.tokenizers import train_tokenizer\n"
        "print(train_tokenizer(TokenizerConfig(kind='unigram', vocab_size=120), [sys.argv[1]]).fingerprint)"
    )
    environment = {"PYTHONHASHSEED": "1", "PYTHONPATH": ":".join(sys.path)}
    other = subprocess.run([sys.executable, "-c", code, TEXT], env=environment, check=True, capture_output=True, text=True)
    assert other.stdout == f"{train(TEXT).fingerprint}\n"


def test_frequent_words_become_pieces_and_others_do_not() -> None:
    tokenizer = train("the cat sat on the mat\n" * 50 + "once zyx.\n", vocab_size=50)
    assert {"▁the", "▁cat", "▁sat", "▁on", "▁mat"} <= set(tokenizer.pieces)
    assert "zyx" not in tokenizer.pieces
    assert tokenizer.encode("the cat sat").tolist() == [tokenizer.pieces.index(piece) for piece in ("▁the", "▁cat", "▁sat")]


def test_what_is_cut_out_of_text_is_in_no_piece() -> None:
    pieces = train("a.b (c) - x<eop>y\n" * 50).pieces[17:]
    assert pieces
    assert not any(character in piece for piece in pieces for character in '.()"-–£€')
    assert all("▁" not in piece[1:] for piece in pieces)


def test_rare_characters_get_no_piece_but_bytes() -> None:
    text = "the cat sat on the mat " * 5000 + "東"
    assert "東" not in train(text).pieces
    tokenizer = train(text, byte_fallback=True, vocab_size=400)
    assert tokenizer.decode(tokenizer.encode("the 東\n")) == "the 東\n"
    assert len(tokenizer.encode("東")) == 4


def test_control_characters_get_no_piece() -> None:
    tokenizer = train("the \x01cat\x01 " * 100)
    assert 0 in tokenizer.encode("\x01")
    assert {"▁cat", "▁the"} & set(tokenizer.pieces)


def test_settings_of_normalization_are_those_of_the_tokenizer() -> None:
    tokenizer = train("Ünïcode ``quoted'' TEXT " * 50, normalization="xlnet", lower_case=True)
    assert tokenizer.decode(tokenizer.encode("Ünïcode ``quoted''")) == 'unicode "quoted"'
    kept = train("Ünïcode text " * 50, normalization="xlnet", keep_accents=True)
    assert kept.decode(kept.encode("Ünïcode")) == "Ünïcode"


@pytest.mark.parametrize(
    ("settings", "text", "message"),
    [
        ({}, "", "no words to learn pieces from"),
        ({}, " \n ", "no words to learn pieces from"),
        ({"vocab_size": 2**18 + 1}, TEXT, r"must be at most 262,144 for unigram; lower it"),
        ({"vocab_size": 30}, TEXT, r"vocab_size \(30\) must be at least 48 here, for 17 special pieces and 31 characters"),
        ({"lower_case": True}, TEXT, "need tokenizer.normalization=xlnet"),
        ({"keep_accents": True}, TEXT, "need tokenizer.normalization=xlnet"),
    ],
)
def test_training_errors(settings: dict, text: str, message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        train(text, **settings)


def test_long_words_and_nothing_else() -> None:
    assert train("x" * 100 + "\n", vocab_size=40).decode([0]) != ""


def ways(word: str, pieces: list[str]) -> list[list[str]]:
    """Every way to cut a word, by brute force."""
    found = []
    for borders in product([False, True], repeat=len(word) - 1):
        parts = "".join(a + " " * b for a, b in zip(word, [*borders, False], strict=True)).split(" ")
        if set(parts) <= set(pieces):
            found.append(parts)
    return found


def test_expectations_are_those_of_all_ways_to_cut() -> None:
    counts, alphabet = {"banana": 3.0, "ana": 2.0, "nab": 1.0}, ["a", "b", "n"]
    codes, weights = _codes(list(counts), alphabet), np.array(list(counts.values()))
    trie, pieces, frequencies = _seeds(codes, weights, alphabet)
    assert dict(zip(pieces, frequencies.tolist(), strict=True)) | {"ana": 8.0, "banana": 3.0} == dict(
        zip(pieces, frequencies.tolist(), strict=True)
    )
    probabilities = np.random.default_rng(0).uniform(0.1, 1, len(pieces))
    of = dict(zip(pieces, probabilities.tolist(), strict=True))
    expected = dict.fromkeys(pieces, 0.0)
    best = []
    for word, count in counts.items():
        likely = [(math.prod(of[part] for part in parts), parts) for parts in ways(word, pieces)]
        total = sum(each for each, _ in likely)
        for each, parts in likely:
            for part in parts:
                expected[part] += count * each / total
        best.append(math.log(max(each for each, _ in likely)))
    lattice = _Lattice.of(codes, weights, trie)
    assert np.allclose(lattice.expected(probabilities), list(expected.values()), rtol=1e-12)
    assert np.allclose(lattice.best(np.log(probabilities)), best, rtol=1e-12)
    parts = _Lattice.of(_codes(pieces, alphabet), np.ones(len(pieces)), trie).without_whole_words()
    others = [[way for way in ways(piece, pieces) if len(way) > 1 or len(piece) == 1] for piece in pieces]
    second = [max(math.log(math.prod(of[part] for part in way)) for way in each) for each in others]
    assert np.allclose(parts.best(np.log(probabilities)), second, rtol=1e-12)


def test_digamma() -> None:
    known = {0.5: -1.9635100260214235, 1.0: -0.5772156649015329, 2.5: 0.7031566406452432, 100.0: 4.600161852738087}
    assert np.allclose(_digamma(np.array([*known])), [*known.values()], rtol=1e-9)


def test_only_the_beginning_of_a_text_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unigram_training, "UNIGRAM_TRAINING_BYTES", 2300)
    tokenizer = train_tokenizer(
        TokenizerConfig(kind="unigram", vocab_size=50), ["the cat sat on the mat\n" * 100, "zzz " * 1000]
    )
    assert isinstance(tokenizer, UnigramTokenizer)
    assert "z" not in tokenizer.pieces

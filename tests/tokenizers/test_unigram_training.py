import subprocess
import sys

import pytest

from tests.tokenizers.cases import TEXT
from transformer_xl.config.run import TokenizerConfig
from transformer_xl.errors import TokenizerError
from transformer_xl.tokenizers import unigram
from transformer_xl.tokenizers.kinds import train_tokenizer
from transformer_xl.tokenizers.unigram import SentencePieceTokenizer


def train(text: str = TEXT, **settings) -> SentencePieceTokenizer:
    tokenizer = train_tokenizer(TokenizerConfig(kind="unigram", **{"vocab_size": 120, **settings}), [text])
    assert isinstance(tokenizer, SentencePieceTokenizer)
    return tokenizer


def test_the_same_text_gives_the_same_pieces() -> None:
    """In another process, too, where sets have another order."""
    code = (
        "import sys; from transformer_xl.config.run import TokenizerConfig\n"
        "from transformer_xl.tokenizers.kinds import train_tokenizer\n"
        "print(train_tokenizer(TokenizerConfig(kind='unigram', vocab_size=120), [sys.argv[1]]).fingerprint)"
    )
    environment = {"PYTHONHASHSEED": "1", "PYTHONPATH": ":".join(sys.path)}
    other = subprocess.run([sys.executable, "-c", code, TEXT], env=environment, check=True, capture_output=True, text=True)
    assert other.stdout == f"{train(TEXT).fingerprint}\n"


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


@pytest.mark.parametrize("normalization", ["spaces", "xlnet"])
def test_lines_that_the_library_would_skip_are_learned_from(normalization: str) -> None:
    """Those of more than 4,192 bytes, and those with the character that stands for unknown ones in it."""
    long = "".join(f"the zebra {n} " for n in range(1000))
    assert "▁zebra" in train(f"{long}\n", normalization=normalization).pieces
    assert "東" in train("東" * 5000 + "\n", normalization=normalization).pieces
    assert "▁zebra" in train("".join(f"{n} \u2585 zebra\n" for n in range(50)), normalization=normalization).pieces


def test_settings_of_normalization_are_those_of_the_tokenizer() -> None:
    tokenizer = train("Ünïcode ``quoted'' TEXT " * 50, normalization="xlnet", lower_case=True)
    assert tokenizer.decode(tokenizer.encode("Ünïcode ``quoted''")) == 'unicode "quoted"'
    kept = train("Ünïcode text " * 50, normalization="xlnet", keep_accents=True)
    assert kept.decode(kept.encode("Ünïcode")) == "Ünïcode"


@pytest.mark.parametrize(
    ("settings", "text", "message"),
    [
        ({}, "", "no words to learn pieces from"),
        ({"vocab_size": 300_001}, TEXT, r"must be at most 300,000 for unigram; lower it"),
        ({"vocab_size": 30}, TEXT, r"vocab_size \(30\): there are 17 special pieces, and 31 characters"),
        ({}, "\u2581\u2581", "sentencepiece learns no pieces from this text"),
        ({}, "a\ud800", "lone surrogate is not Unicode; use tokenizer.kind=byte"),
        ({"lower_case": True}, TEXT, "need tokenizer.normalization=xlnet"),
    ],
)
def test_training_errors(settings: dict, text: str, message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        train(text, **settings)


def test_only_the_beginning_of_a_text_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unigram, "LEARNING_BYTES", 2299)
    tokenizer = train_tokenizer(
        TokenizerConfig(kind="unigram", vocab_size=50), ["the cat sat on the mat\n" * 100, "zzz " * 1000]
    )
    assert isinstance(tokenizer, SentencePieceTokenizer)
    assert "z" not in tokenizer.pieces

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tokenizers.cases import LETTERS, TOKENIZERS, WITH_SURROGATES
from transformer_xl.config.run import TokenizerConfig
from transformer_xl.errors import TokenizerError
from transformer_xl.tokenizers.kinds import ByteTokenizer, SymbolTokenizer, train_tokenizer


@pytest.mark.parametrize("kind", ["byte", "char"])
@given(text=WITH_SURROGATES)
def test_lone_surrogates_survive(kind: str, text: str) -> None:
    assert TOKENIZERS[kind].decode(TOKENIZERS[kind].encode(text)) == text


@given(data=st.binary())
def test_bytes_take_any_bytes(data: bytes) -> None:
    assert bytes(ByteTokenizer().encode_bytes(data).tolist()) == data


def test_alphabet_is_sorted_and_unseen_characters_are_named() -> None:
    tokenizer = train_tokenizer(TokenizerConfig(kind="char"), ["né", "an"])
    assert tokenizer.to_dict()["alphabet"] == "ané"
    message = (
        r"^character 東 \(U\+6771\) is not in the tokenizer's alphabet of 3 characters; add it by txl train TEXT --from RUN "
        r"--grow, or train with tokenizer.byte_fallback=true"
    )
    with pytest.raises(TokenizerError, match=message):
        tokenizer.encode("n東")


@pytest.mark.parametrize("without", ["10", "13", "<eos>"])
def test_bytes_that_claim_to_lose_nothing_lose_nothing(without: str) -> None:
    symbols = [symbol for symbol in [*map(str, range(256)), "<eos>", "a"] if symbol != without]
    tokenizer, data = SymbolTokenizer(symbols, unit="byte"), bytes({*range(256)} - {13})
    ids = tokenizer.encode_bytes(data)
    assert tokenizer.loses == ("Line ends." if without == "10" else "")
    assert b"".join(map(tokenizer.piece, ids.tolist())) == (data.replace(b"\n", b"") if tokenizer.loses else data)


def test_bytes_and_letters() -> None:
    assert TOKENIZERS["bytes"].encode("a\né").tolist() == [255 - value for value in "a\né".encode()]
    assert TOKENIZERS["bytes"].encode_bytes(b"\xff\x00").tolist() == [0, 255]
    assert TOKENIZERS["bytes"].decode([255 - 0xC3, 256, 255 - 65]) == "\ufffd<eos>A"
    no_lines = TOKENIZERS["bytes without line ends"]
    assert no_lines.decode(no_lines.encode("a\nb\r\n")) == "ab\r"
    assert no_lines.encode("\t").tolist() == [0]
    letters = TOKENIZERS["letters"]
    assert letters.decode(letters.encode(" The \t\nSea\u2003é_É ")) == " the sea" + "é é "
    assert letters.encode("Σ").tolist() == [LETTERS.index("σ")]  # its usual form, because each character is folded alone
    characters = TOKENIZERS["characters"]
    assert characters.decode(characters.encode("  the sea\t\n \r\nso ")) == "the sea\n\nso"


def test_only_bytes_need_no_utf8() -> None:
    any_bytes = [name for name, tokenizer in TOKENIZERS.items() if tokenizer.reads_bytes]
    assert any_bytes == ["byte", "bytes", "bytes without line ends"]
    with pytest.raises(TokenizerError, match=r"byte 0 \(0xff\) is not UTF-8"):
        TOKENIZERS["letters"].encode_bytes(b"\xff")

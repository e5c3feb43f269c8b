"""Models of SentencePiece. `tests/parity/make_goldens_sentencepiece.py` wrote them, and what the library makes of 200 lines."""

import json
import os
import unicodedata
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.helpers import examples
from tests.parity.make_goldens_sentencepiece import xlnet_ids, xlnet_text
from tests.tokenizers.cases import TOKENIZERS, UNICODE, check_stream, unigram
from transformer_xl.errors import TokenizerError
from transformer_xl.tokenizers.kinds import load_tokenizer, tokenizer_from_dict
from transformer_xl.tokenizers.unigram import SPACE, SentencePieceTokenizer, read_spiece, xlnet_aligned
from transformer_xl.tokenizers.unigram import xlnet_text as read_as_xlnet
from transformer_xl.tokenizers.unigram_files import _field as field

GOLDENS = Path(__file__).resolve().parents[1] / "parity" / "goldens" / "sentencepiece"
NAMES = ("xlnet", "bytes", "phrases")
SETTINGS: dict[str, dict[str, Any]] = {
    "ids": {"normalization": "none"},
    "xlnet": {},
    "lower": {"lower_case": True},
    "accents": {"keep_accents": True},
}
MODELS = pytest.mark.parametrize(("name", "setting"), [("bytes", "ids"), ("phrases", "ids"), *product(["xlnet"], SETTINGS)])
MIXED = st.text(st.sampled_from("ab 1,0e\u0301▁é.(`'\t\x00ﬁ½\xad東\n")) | UNICODE

PIECES = {
    "<unk>": 0.0,
    "▁": -2.0,
    "▁the": -1.0,
    "a": -3.0,
    "t": -3.0,
    "at": -4.0,
    "<eop>": 0.0,
    "<s>": 0.0,
    "1,": -1.0,
    "▁1": -2.0,
    "1": -5.0,
    ",": -5.0,
}


def few(**others: Any) -> SentencePieceTokenizer:
    return unigram(
        **{"pieces": [*PIECES], "scores": [*PIECES.values()], "control": ["<s>"], "user_defined": ["<eop>"], **others}
    )


def rows(name: str) -> list[dict[str, Any]]:
    return json.loads((GOLDENS / f"{name}.json").read_bytes())


@cache
def model(name: str, setting: str = "ids") -> SentencePieceTokenizer:
    return read_spiece(GOLDENS / f"{name}.model", **SETTINGS[setting])


@cache
def library(name: str) -> Any:
    return sentencepiece.SentencePieceProcessor(model_file=str(GOLDENS / f"{name}.model"))


@MODELS
def test_ids_are_those_of_the_library(name: str, setting: str, tmp_path: Path) -> None:
    tokenizer = model(name, setting)
    tokenizer.save(tmp_path / "tokenizer.json")
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    assert loaded.fingerprint == tokenizer.fingerprint
    for row in rows(name):
        assert tokenizer.encode(row["text"]).tolist() == row[setting], row["text"]
        assert tokenizer.encode_with_offsets(row["text"])[0].tolist() == row[setting], row["text"]
        assert loaded.encode(row["text"]).tolist() == row[setting]


@pytest.mark.parametrize("name", NAMES)
def test_text_is_written_as_the_library_does(name: str) -> None:
    for row in rows(name):
        assert model(name).decode(row["ids"]) == row["written"]
        check_stream(model(name), row["ids"])


@pytest.mark.parametrize("name", NAMES)
def test_places_are_those_of_the_library_without_spaces(name: str) -> None:
    """Of pieces that share a character, it gives only the last one its place."""
    for row in rows(name):
        _, starts, ends = (each.tolist() for each in model(name).encode_with_offsets(row["text"]))
        for start, end, following, (begin, stop) in zip(starts, ends, [*starts, 10**6][1:], row["places"], strict=True):
            assert begin <= start <= end
            assert end <= stop or following < end, "it shares a character with the next one"
            assert not row["text"][begin:start].strip(f"{SPACE} \t\xa0\u2003\u2028\u3000\u200b\xad\x01\x7f\ufeff")


@settings(max_examples=examples(300))
@given(text=MIXED, lower=st.booleans(), accents=st.booleans())
def test_lines_are_read_as_xlnet_reads_them(text: str, lower: bool, accents: bool) -> None:
    tokenizer = read_spiece(GOLDENS / "xlnet.model", lower_case=lower, keep_accents=accents)
    changed = [xlnet_text(line, lower=lower, keep_accents=accents) for line in text.split("\n")]
    assert tokenizer.encode(text).tolist() == [token_id for line in changed for token_id in xlnet_ids(library("xlnet"), line)]


@pytest.mark.data
def test_the_published_vocabulary() -> None:
    path = Path(os.environ.get("TXL_DATA", "no such directory")) / "third-party" / "xlnet" / "spiece.model"
    if not path.exists():
        pytest.skip(f"'{path}' does not exist; set TXL_DATA to a directory with the published vocabulary of XLNet")
    tokenizer, text = read_spiece(path), "Hello, my dog is cute"
    assert tokenizer.vocab_size == 32_000
    assert tokenizer.encode(text).tolist() == [17, 11368, 19, 94, 2288, 27, 10920]
    assert tokenizer.decode(tokenizer.encode(text)) == text
    *_, starts, ends = tokenizer.encode_with_offsets(f"  {text}")
    assert [f"  {text}"[start:end] for start, end in zip(starts, ends, strict=True)][1:] == ["Hello", ",", *text.split()[1:]]


def test_unknown_characters_side_by_side_are_one() -> None:
    assert few().encode("東京 the 東").tolist() == [1, 0, 2, 1, 0]
    assert few().encode("<s>").tolist() == [1, 0], "text never becomes a control piece"
    assert few(normalization="xlnet").encode("a<s>").tolist() == [1, 3, 7], "XLNet looks up every piece"
    assert few().encode("a<eop>").tolist() == [1, 3, 6]


def test_pieces_are_found_by_name() -> None:
    tokenizer = TOKENIZERS["unigram"]
    assert isinstance(tokenizer, SentencePieceTokenizer)
    assert [tokenizer.id_of(piece) for piece in ("<cls>", "<sep>", "<pad>", "<mask>", "<eod>")] == [3, 4, 5, 6, 7]
    with pytest.raises(TokenizerError, match=r"piece '<seq>' is not in the vocabulary; did you mean '<sep>'\?"):
        tokenizer.id_of("<seq>")


def test_line_ends_are_pieces_if_asked() -> None:
    assert few().encode("the\n\nthe\n").tolist() == [2, 2]
    tokenizer = few(line_end="<eop>")
    assert tokenizer.encode("the\n\n the\n").tolist() == [2, 6, 6, 2, 6]
    assert tokenizer.decode([2, 6, 6, 2, 2, 6, 7, 3]) == "the\n\nthe the\na"
    _, starts, ends = tokenizer.encode_with_offsets("the\n\n the\n")
    assert list(zip(starts.tolist(), ends.tolist(), strict=True)) == [(0, 3), (3, 4), (4, 5), (6, 9), (9, 10)]


def test_a_comma_after_a_digit_is_cut_off_as_in_xlnet() -> None:
    plain, xlnet, text = few(), few(normalization="xlnet"), "a1, 1,"
    assert [plain.pieces[i] for i in plain.encode(text)] == ["▁", "a", "1,", "▁", "1,"]
    # the 1 in the middle of a word is cut at the beginning of a line, and loses the mark that it got there
    assert [xlnet.pieces[i] for i in xlnet.encode(text)] == ["▁", "a", "1", ",", "▁", "1", ","]
    assert list(zip(*(each.tolist() for each in xlnet.encode_with_offsets(text)[1:]), strict=True))[2:4] == [(1, 2), (2, 3)]


def test_what_text_is_lost_is_said() -> None:
    assert few(line_end="<eop>", remove_extra_whitespaces=False).loses.startswith("Characters outside")
    assert "line ends" in few().loses
    xlnet = few(normalization="xlnet", lower_case=True).loses
    assert xlnet.endswith("the amount and kind of space between words, accents and other forms of the same characters, case.")


# --- places -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokenizer", "text", "places"),
    [
        (few(), "  the   the", [(2, 5), (8, 11)]),  # after the space
        (model("bytes"), "x 東", [(0, 0), (0, 1), (1, 2), (2, 3), (2, 3), (2, 3)]),  # pieces of one character have its place
        (model("xlnet"), "\xad½", [(0, 2), (1, 2), (1, 2)]),  # a piece that ends inside of a character, too
    ],
)
def test_places(tokenizer: SentencePieceTokenizer, text: str, places: list[tuple[int, int]]) -> None:
    _, starts, ends = tokenizer.encode_with_offsets(text)
    assert list(zip(starts.tolist(), ends.tolist(), strict=True)) == places


@settings(max_examples=examples(300))
@given(text=MIXED, setting=st.sampled_from(sorted(SETTINGS)), name=st.sampled_from(NAMES))
def test_places_are_in_the_original(text: str, setting: str, name: str) -> None:
    tokenizer = model(name, setting)
    ids, starts, ends = tokenizer.encode_with_offsets(text)
    assert np.array_equal(ids, tokenizer.encode(text))
    assert np.all((starts >= 0) & (starts <= ends) & (ends <= len(text)))
    assert np.all(np.diff(starts) >= 0)
    assert np.all(np.diff(ends) >= 0)
    for token_id, start, end in zip(ids.tolist(), starts.tolist(), ends.tolist(), strict=True):
        piece = tokenizer.pieces[token_id].strip(SPACE)
        if not piece or token_id == 0 or tokenizer._library.is_byte(token_id):
            continue
        changed = [library(name).normalize(tokenizer._changed(line)) for line in text[start:end].split("\n")]
        again = "".join(changed).lower().replace("σ", "ς")
        assert set(piece.lower().replace("σ", "ς")) & set(again), "it is made of characters of its place"


# --- decoding ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", SETTINGS)
@settings(max_examples=examples(300))
@given(data=st.data())
def test_stream_decoder_agrees_with_decode(setting: str, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(NAMES))
    tokenizer = model(name, setting)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1)))
    check_stream(tokenizer, ids)
    if name != "bytes":  # a control piece inside of a character ends it there
        assert tokenizer.decode(ids) == library(name).decode(ids)


# --- foreign bytes ----------------------------------------------------------------------------------------------------


def piece(text: str | bytes, score: float = -1.0, kind: int = 1) -> bytes:
    return field(1, field(1, text) + field(2, score) + field(3, kind))


SMALL = (
    field(2, b"") + field(3, field(1, "x")) + piece("<unk>", 0.0, 2) + piece("▁", -2.0) + piece("a", -1.5) + piece("▁a", -3.0)
)


def read(data: bytes, tmp_path: Path) -> SentencePieceTokenizer:
    (tmp_path / "spiece.model").write_bytes(data)
    return read_spiece(tmp_path / "spiece.model", normalization="none")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "unk is not defined"),
        (b"\x80\x04\x95 a pickle", "damaged, or of another kind"),
        (SMALL[:-1], "damaged, or of another kind"),
        (piece("<unk>", 0.0, 2) + piece("a") + field(2, b""), "it ends before its settings"),
        (SMALL + piece("a"), "a is already defined"),
        (SMALL + piece(b"\xed\xa0\x80"), "utf-8"),
        (SMALL + piece("b", float("nan")), "score is NaN or Inf"),
        (field(3, field(2, b"\x04\0\0\0\0")) + SMALL, "Trie data size exceeds"),
        (field(3, field(5, False)) + SMALL, "only models with a mark before words"),
    ],
)
def test_what_is_no_such_model_is_refused(data: bytes, message: str, tmp_path: Path, capfd: Any) -> None:
    with pytest.raises(TokenizerError, match=message) as error:
        read(data, tmp_path)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith("unusable tokenizer: ")
    assert capfd.readouterr().err == "", "the library says nothing by itself"


@settings(max_examples=examples(300), deadline=None)
@given(data=st.data())
def test_any_damage_is_an_error_or_a_model(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    content = bytearray((GOLDENS / "xlnet.model").read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "damaged.model"
    path.write_bytes(content)
    try:
        tokenizer = read_spiece(path)
        ids, *_ = tokenizer.encode_with_offsets("the first e\u0301 1,000, ﬁ")
    except TokenizerError as error:
        assert "\n" not in str(error)
    else:
        assert tokenizer.decode(ids) is not None


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_file_of_0_2_is_saved_as_one_of_0_3(tmp_path: Path) -> None:
    tokenizer = few(normalization="xlnet", line_end="<eop>", unknown_text="?")
    assert tokenizer.decode([2, 0]) == "the?"
    tokenizer.save(tmp_path / "tokenizer.json")
    assert load_tokenizer(tmp_path / "tokenizer.json").fingerprint == tokenizer.fingerprint
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a"]
    tokenizer = few(pieces=pieces, scores=[-1.0] * 259, control=[], user_defined=[], byte_fallback=True)
    assert tokenizer.encode("aé").tolist() == [257, 258, 1 + 0xC3, 1 + 0xA9]
    assert few(remove_extra_whitespaces=False).encode("the  a").tolist() == [2, 1, 1, 3]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pieces": []}, "zip"),
        ({"scores": ["a"] * 12}, "damaged tokenizer: could not convert string to float"),
        ({"rules": "é"}, "damaged tokenizer: .* ASCII"),
        ({"lower_case": True}, "lower_case and keep_accents need 'xlnet'"),
        ({"line_end": "<unk>"}, "line_end stands for unknown text"),
        ({"more": 1}, "unexpected keyword argument 'more'"),
    ],
)
def test_inconsistent_values_of_0_2(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        few(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": 1}, "damaged tokenizer: .*not .int"),
        ({"model": "é"}, "sentencepiece cannot read it"),
        ({"normalization": "nfkc"}, "is not one of none, spaces, xlnet"),
        ({"line_end": ["<unk>"]}, "is not one of its pieces"),
    ],
)
def test_inconsistent_values(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        tokenizer_from_dict(model("phrases").to_dict() | changes)


# --- how XLNet changes text -------------------------------------------------------------------------------------------

LINES = st.text(
    st.sampled_from("ab A\t\n\u2028\xa0`'\"éÅﬁ½İΣσς\u0301\u0345\u0308가ㄱ\u1100\u1161ｶﾞ東🙂\u2581…")
    | st.characters(exclude_categories=("Cs",))
)


@pytest.mark.parametrize("lower_case", [False, True])
@pytest.mark.parametrize("keep_accents", [False, True])
@settings(max_examples=examples(500))
@given(text=LINES)
@example(text="aİb")  # its lower case has two characters
def test_xlnet_reads_a_text_as_its_own_code_does(text: str, lower_case: bool, keep_accents: bool) -> None:
    expected = " ".join(text.strip().split()).replace("``", '"').replace("''", '"')
    if not keep_accents:
        marks = unicodedata.normalize("NFKD", expected)
        expected = "".join(character for character in marks if not unicodedata.combining(character))
    expected = expected.lower() if lower_case else expected
    assert read_as_xlnet(text, lower_case=lower_case, keep_accents=keep_accents) == expected
    changed, starts, ends = xlnet_aligned(text, lower_case=lower_case, keep_accents=keep_accents)
    assert changed == expected
    for character, start, end in zip(changed, starts, ends, strict=True):
        source = text[start:end]
        written = read_as_xlnet(f"x{source}x", lower_case=lower_case, keep_accents=keep_accents)[1:-1]
        assert character in written or (character in "σς" and written in ("σ", "ς")), "the end of a word decides which"

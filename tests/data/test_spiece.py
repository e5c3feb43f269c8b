"""Models of SentencePiece. `tests/parity/make_goldens_sentencepiece.py` wrote them, and what the library makes of 200 lines."""

import json
import os
import struct
import subprocess
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.tokenizer_cases import UNICODE, check_stream
from tests.helpers import examples
from transformer_xl.data.normalization import SPACE
from transformer_xl.data.spiece import read_spiece
from transformer_xl.data.tokenizers import load_tokenizer
from transformer_xl.data.unigram import UnigramTokenizer
from transformer_xl.errors import TokenizerError

ROOT = Path(__file__).resolve().parents[2]
GOLDENS = ROOT / "tests" / "parity" / "goldens" / "sentencepiece"
PEER = Path(os.environ.get("TXL_PEER_PYTHON", ROOT / ".venv-peer" / "bin" / "python"))
NAMES = ("xlnet", "bytes", "phrases")
SETTINGS: dict[str, dict[str, Any]] = {
    "ids": {"normalization": "none"},
    "xlnet": {},
    "lower": {"lower_case": True},
    "accents": {"keep_accents": True},
}


def rows(name: str) -> list[dict[str, Any]]:
    return json.loads((GOLDENS / f"{name}.json").read_bytes())


@cache
def model(name: str, setting: str = "ids") -> UnigramTokenizer:
    return read_spiece(GOLDENS / f"{name}.model", **SETTINGS[setting])


MODELS = pytest.mark.parametrize(("name", "setting"), [("bytes", "ids"), ("phrases", "ids"), *product(["xlnet"], SETTINGS)])


@MODELS
def test_ids_are_those_of_the_library(name: str, setting: str) -> None:
    tokenizer = model(name, setting)
    for row in rows(name):
        assert tokenizer.encode(row["text"]).tolist() == row[setting], row["text"]
        assert tokenizer.encode_with_offsets(row["text"])[0].tolist() == row[setting], row["text"]


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


@MODELS
def test_saved_and_loaded_it_is_the_same(name: str, setting: str, tmp_path: Path) -> None:
    tokenizer = model(name, setting)
    tokenizer.save(tmp_path / "tokenizer.json")
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    assert loaded.fingerprint == tokenizer.fingerprint
    assert all(np.array_equal(loaded.encode(row["text"]), tokenizer.encode(row["text"])) for row in rows(name)[::5])


def test_special_pieces_have_the_ids_of_xlnet() -> None:
    pieces = ["<unk>", "<s>", "</s>", "<cls>", "<sep>", "<pad>", "<mask>", "<eod>", "<eop>", *'.()"-–£€']
    assert list(model("xlnet").pieces[:17]) == pieces
    assert model("xlnet").starts_word()[:17].tolist() == [True] * 14 + [False] * 3


@settings(max_examples=examples(300))
@given(text=st.text(st.sampled_from("ab 1,0e\u0301▁é.(`'\t\x00ﬁ\xad東")) | UNICODE, name=st.sampled_from(NAMES))
def test_the_text_before_never_matters_but_in_ties(text: str, name: str) -> None:
    """A word that is cut in the cache's way is cut as in one search through the whole line."""
    tokenizer = model(name)
    for line in text.split("\n"):
        changed = tokenizer._spacing.text(line)
        if changed:
            cut = [each for ids in tokenizer._paths(changed) for each in ids]
            assert cut == list(tokenizer._best(changed, 0.0).ids)


def test_sums_of_long_lines_begin_again() -> None:
    tokenizer = model("xlnet")
    line = "00 000 1,000 the e1 " * 4000
    assert max(map(abs, tokenizer.scores)) * len(line) > 2e5
    changed = tokenizer._spacing.text(line)
    assert [ids for ids in tokenizer._paths(changed)] == [tokenizer._best(changed, 0.0).ids]


@pytest.mark.parity
def test_ids_are_those_of_the_library_on_any_text(tmp_path: Path) -> None:
    """A thousand lines of random text, long lines among them, by the library itself with its own full table of characters."""
    if not PEER.exists():
        pytest.skip(f"{PEER} is missing; `make parity` makes this environment of the peer")
    draw = np.random.default_rng(1)
    letters = list("the of 1,0.-'e\u0301▁é(`\t\x00ﬁ\xad東ㄱ\u1100\u1161") + [chr(i) for i in draw.integers(0x20, 0xD7FF, 200)]
    lines = ["".join(draw.choice(letters, draw.integers(60))) for _ in range(1000)]
    lines += ["".join(draw.choice(letters, 30_000)), "00 000 1,000 the e1 " * 4000]
    for name in ("full", *NAMES):
        (tmp_path / f"{name}.model").write_bytes(b"" if name == "full" else (GOLDENS / f"{name}.model").read_bytes())
    (tmp_path / "lines.json").write_text(json.dumps(lines))
    train = (
        "import sys, sentencepiece; from pathlib import Path\n"
        "text = [line for path in sorted(Path(sys.argv[1]).glob('*.md')) for line in path.read_text().split(chr(10))]\n"
        "sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(text), model_writer=open(sys.argv[2], 'wb'),"
        " vocab_size=1000, minloglevel=2)"
    )
    subprocess.run([PEER, "-c", train, ROOT / "docs", tmp_path / "full.model"], check=True)
    script = ROOT / "tests" / "parity" / "make_goldens_sentencepiece.py"
    answer = subprocess.run([PEER, script, "--models", tmp_path, tmp_path / "lines.json"], check=True, capture_output=True)
    for name, answers in json.loads(answer.stdout).items():
        for setting, options in SETTINGS.items():
            tokenizer = read_spiece(tmp_path / f"{name}.model", **options)
            for line, each in zip(lines, answers, strict=True):
                assert tokenizer.encode(line).tolist() == each[setting], (name, setting, line[:200])


# --- foreign bytes ----------------------------------------------------------------------------------------------------


def field(number: int, value: bytes | int | float | str) -> bytes:
    """Write one field of a message."""
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def varint(value: int) -> bytes:
    data = b""
    while value >= 0x80:
        data, value = data + bytes([value & 0x7F | 0x80]), value >> 7
    return data + bytes([value])


def piece(text: str | bytes, score: float = -1.0, kind: int = 1) -> bytes:
    return field(1, field(1, text) + field(2, score) + field(3, kind))


SMALL = field(2, b"") + field(3, b"") + piece("<unk>", 0.0, 2) + piece("▁", -2.0) + piece("a", -1.5) + piece("▁a", -3.0)


def read(data: bytes, tmp_path: Path, **options: Any) -> UnigramTokenizer:
    (tmp_path / "spiece.model").write_bytes(data)
    return read_spiece(tmp_path / "spiece.model", **options)


def test_a_model_written_by_hand(tmp_path: Path) -> None:
    tokenizer = read(SMALL + field(2, field(3, 1)), tmp_path, normalization="none")
    assert tokenizer.encode("a  aa b").tolist() == [3, 3, 2, 1, 0]
    assert tokenizer.decode([3, 3, 2, 1, 0]) == "a aa  \u2047 "


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "it has no pieces"),
        (SMALL[4:], "it ends before its settings"),
        (b"\x80\x04\x95 a pickle", "is no usable spiece.model"),
        (SMALL[:-1], "is cut short, or no field"),
        (b"\xff" * 20, "has no end"),
        (b"\x0a", "has no end"),
        (b"\x0b", "or no field"),
        (varint(3) + b"\0", "or no field"),
        (b"\x0a" + varint(2**62), "is cut short"),
        (field(2, field(3, 2)) + SMALL, "its model is BPE, not unigram"),
        (field(2, field(3, 3)) + SMALL, "its model is word, not unigram"),
        (field(2, field(3, 77)) + SMALL, "its model is number 77, not unigram"),
        (field(2, field(3, b"x")) + SMALL, "should be an integer is none"),
        (field(2, 5) + SMALL, "should be text or a message is none"),
        (field(2, field(24, 1)) + SMALL, "only models with a mark before words"),
        (field(3, field(5, 0)) + SMALL, "only models with a mark before words"),
        (field(5, field(2, b"x")) + SMALL, "changes text when decoding"),
        (SMALL + piece("<other>", 0.0, 2), "it has 2 pieces for unknown text"),
        (piece("a"), "it has 0 pieces for unknown text"),
        (SMALL + piece("a"), "a word occurs twice"),
        (SMALL + piece(""), "is empty or has more than 128"),
        (SMALL + piece("b" * 129), "is empty or has more than 128"),
        (SMALL + piece("b\n"), "has a control character"),
        (SMALL + piece("b\x85"), "has a control character"),
        (SMALL + piece(b"\xff"), "utf-8"),
        (SMALL + piece(b"\xed\xa0\x80"), "utf-8"),
        (SMALL + piece("b", float("nan")), "a score is no number within"),
        (SMALL + piece("b", -float("inf")), "a score is no number within"),
        (SMALL + piece("b", 1e7), "a score is no number within"),
        (SMALL + field(1, field(1, "b") + field(2, b"abcd")), "the score of a piece is no number"),
        (SMALL + field(1, field(1, "b") * 20), "more than 16 fields"),
        (SMALL + piece("<0x00>", 0.0, 6), "its pieces for bytes do not fit"),
        (field(2, field(35, 1)) + SMALL, "its pieces for bytes do not fit"),
        (field(3, field(2, b"\x04\0\0\0\0")) + SMALL, "table of characters is cut short"),
        (SMALL * 100_000, "more than 300,000 fields"),
    ],
)
def test_what_is_no_such_model_is_refused(data: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=message) as error:
        read(data, tmp_path)
    assert "\n" not in str(error.value)
    assert "spiece.model" in str(error.value)


def test_a_huge_file_is_refused_unread(tmp_path: Path) -> None:
    with (tmp_path / "spiece.model").open("wb") as file:
        file.truncate(17 << 20)
    with pytest.raises(TokenizerError, match="17,825,792 bytes; 16,777,216 is the most"):
        read_spiece(tmp_path / "spiece.model")


@settings(max_examples=examples(1000), deadline=None)
@given(data=st.data())
def test_any_damage_is_an_error_or_a_model(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    content = bytearray((GOLDENS / "xlnet.model").read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "damaged.model"
    path.write_bytes(content)
    try:
        tokenizer = read_spiece(path)
    except TokenizerError as error:
        assert "\n" not in str(error)
    else:
        assert tokenizer.decode(tokenizer.encode("the first e\u0301 1,000, ﬁ")) is not None

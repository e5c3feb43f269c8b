import unicodedata
from base64 import b64decode
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.test_spiece import GOLDENS
from tests.helpers import examples
from transformer_xl.data.normalization import SPACE, CharacterMap, Spacing, spaced_aligned, xlnet_aligned, xlnet_text
from transformer_xl.data.spiece import read_spiece

TEXT = st.text(
    st.sampled_from("ab A\t\n\u2028\xa0`'\"éÅﬁ½İΣσς\u0301\u0345\u0308가ㄱ\u1100\u1161ｶﾞ東🙂\u2581…")
    | st.characters(exclude_categories=("Cs",))
)


@cache
def spacing(name: str) -> Spacing:
    return read_spiece(GOLDENS / f"{name}.model", normalization="none")._spacing


@pytest.mark.parametrize("lower_case", [False, True])
@pytest.mark.parametrize("keep_accents", [False, True])
@settings(max_examples=examples(500))
@given(text=TEXT)
def test_xlnet_reads_a_text_as_its_own_code_does(text: str, lower_case: bool, keep_accents: bool) -> None:
    expected = " ".join(text.strip().split()).replace("``", '"').replace("''", '"')
    if not keep_accents:
        marks = unicodedata.normalize("NFKD", expected)
        expected = "".join(character for character in marks if not unicodedata.combining(character))
    expected = expected.lower() if lower_case else expected
    assert xlnet_text(text, lower_case=lower_case, keep_accents=keep_accents) == expected
    found = xlnet_aligned(text, lower_case=lower_case, keep_accents=keep_accents)
    assert found.text == expected
    for character, start, end in zip(found.text, found.starts, found.ends, strict=True):
        source = text[start:end]
        written = xlnet_text(f"x{source}x", lower_case=lower_case, keep_accents=keep_accents)[1:-1]
        assert character in written or (character in "σς" and written in ("σ", "ς")), "the end of a word decides which"


@given(text=TEXT)
def test_spaces_alone(text: str) -> None:
    found = spaced_aligned(text)
    assert found.text == " ".join(text.split())
    assert all(text[start:end] == character or text[start:end].isspace() for character, start, end in zip(*found, strict=True))


@pytest.mark.parametrize("name", ["xlnet", "bytes", "phrases"])
@settings(max_examples=examples(500))
@given(text=TEXT)
def test_places_belong_to_the_characters_that_are_written(name: str, text: str) -> None:
    change = spacing(name)
    found = change.aligned(text)
    assert found.text == change.text(text)
    assert len(found.starts) == len(found.ends) == len(found.text)
    assert found.starts == sorted(found.starts)
    assert found.ends == sorted(found.ends)
    for character, start, end in zip(found.text, found.starts, found.ends, strict=True):
        source = text[start:end]
        written = Spacing(change._rules, (), add_dummy_prefix=False, remove_extra_whitespaces=False).text(source)
        assert character in written or (character == SPACE and start == end), "a space before the text is nowhere"


def test_what_the_user_defined_is_not_changed() -> None:
    rules = spacing("xlnet")._rules
    assert rules is not None
    kept = Spacing(rules, ["ﬁ"], add_dummy_prefix=False, remove_extra_whitespaces=True)
    assert kept.text("  ﬁ ﬂ ") == f"ﬁ{SPACE}fl"
    assert spacing("xlnet").text("ﬁ") == f"{SPACE}fi"


def test_the_longest_rule_is_applied() -> None:
    rules = spacing("xlnet")._rules
    assert rules is not None
    assert rules.longest("e\u0301x", 0) == ("é", 2)
    assert rules.longest("ex", 0) is None
    assert rules.longest("x\u200b", 1) == ("", 2)
    assert rules.longest("\0", 0) is None


@settings(max_examples=examples(2000), deadline=None)
@given(data=st.data())
def test_a_damaged_table_is_refused_or_harmless(data: st.DataObject) -> None:
    table = bytearray(table_of("xlnet"))
    for _ in range(data.draw(st.integers(1, 4))):
        table[data.draw(st.integers(0, len(table) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.sampled_from([0, 0, 0, 1, 5, len(table) - 3]))
    try:
        rules = CharacterMap(bytes(table[: len(table) - cut]))
    except ValueError as error:
        assert "\n" not in str(error)
        return
    change = Spacing(rules, (), add_dummy_prefix=True, remove_extra_whitespaces=True)
    text = data.draw(TEXT) + "é\u0301\u0308ﬁ" * 5
    assert len(change.text(text)) <= 32 * len(text) + 1


@cache
def table_of(name: str) -> bytes:
    return b64decode(read_spiece(GOLDENS / f"{name}.model").rules)


def unit(*, label: int = 0, offset: int = 0, ends: bool = False) -> bytes:
    return (offset << 10 | ends << 8 | label).to_bytes(4, "little")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (b"\0" * 5, "is cut short"),
        ((8).to_bytes(4, "little") + unit() * 2, "is cut short"),
        ((6).to_bytes(4, "little") + unit() * 3 + b"\0", "is cut short"),
        (bytes(5 << 20), "5,242,880 bytes; 4,194,304 is the most"),
        ((4).to_bytes(4, "little") + unit() + b"a", "writes more than 32 characters"),
        ((4).to_bytes(4, "little") + unit() + b"a" * 200 + b"\0", "writes more than 32 characters"),
        ((4).to_bytes(4, "little") + unit(offset=9, ends=True) + b"a\0", "leads out of itself"),
        ((8).to_bytes(4, "little") + unit(offset=1, ends=True) + (9).to_bytes(4, "little") + b"a\0", "leads to no text"),
        ((8).to_bytes(4, "little") + unit(offset=1, ends=True) + unit(label=1) + "é\0".encode(), "leads to no text"),
        ((4).to_bytes(4, "little") + unit() + b"\xff\0", "utf-8"),
    ],
)
def test_an_impossible_table_is_refused(table: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CharacterMap(table)


def test_a_circle_in_a_table_ends() -> None:
    # the child of the root for the byte 1 is at 1, and leads back to itself for the same byte
    rules = CharacterMap((8).to_bytes(4, "little") + unit() + unit(label=1) + b"a\0")
    assert rules.longest("\x01" * 10_000, 0) is None

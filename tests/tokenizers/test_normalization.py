import unicodedata

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.helpers import examples
from transformer_xl.tokenizers.normalization import xlnet_aligned, xlnet_text

TEXT = st.text(
    st.sampled_from("ab A\t\n\u2028\xa0`'\"éÅﬁ½İΣσς\u0301\u0345\u0308가ㄱ\u1100\u1161ｶﾞ東🙂\u2581…")
    | st.characters(exclude_categories=("Cs",))
)


@pytest.mark.parametrize("lower_case", [False, True])
@pytest.mark.parametrize("keep_accents", [False, True])
@settings(max_examples=examples(500))
@given(text=TEXT)
@example(text="aİb")  # its lower case has two characters
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

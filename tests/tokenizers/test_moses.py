from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers import examples
from transformer_xl.tokenizers.moses import JOINS, MosesSpacing, PlainSpacing

SIGNS = ["'", '"', "``", "''", "„", "“", "`", ",", ".", "?!", ")", "(", "[", "$", "£", "¿", "%", "...", "-", "'s", "n't", "'t"]
WORDS = ["the", "dogs", "is", "5", "000", "isn", "東京", "は", "한국", "É", "…", "<unk>", "@", "a'", "'5"]


@cache
def detokenizer(language: str) -> Any:
    return pytest.importorskip("sacremoses", reason="the extra 'moses' is not installed").MosesDetokenizer(language)


def written(spacing: PlainSpacing, words: list[str]) -> str:
    return "".join(map(spacing.push, words))


@pytest.mark.parametrize("language", ["en", "de", "ko"])
@settings(max_examples=examples(1000))
@given(words=st.lists(st.sampled_from(SIGNS + WORDS)))
def test_spacing_is_that_of_sacremoses(language: str, words: list[str]) -> None:
    expected = detokenizer(language).detokenize(words)
    assert written(MosesSpacing(language), words) == expected


@given(st.lists(st.tuples(st.sampled_from(["1", "the", "東京", "dogs"]), st.sampled_from(["", "@-@", "@,@", "@.@"]))))
def test_joins_are_those_of_hugging_face(parts: list[tuple[str, str]]) -> None:
    words = [word for part in parts for word in part if word] + ["end"]
    expected = detokenizer("en").detokenize(words)
    for join in ("@,@", "@.@"):
        expected = expected.replace(f" {join} ", JOINS[join])
    assert written(MosesSpacing("en"), words) == expected


@pytest.mark.parametrize(
    ("words", "plain", "moses"),
    [
        ("1 @,@ 000 @.@ 5 , well @-@ known", "1,000.5 , well-known", "1,000.5, well-known"),
        ("@-@ a @,@ @-@ b @.@", "-a,-b.", "-a,-b."),
        ("$ 5 @.@ 50 ( it 's )", "$ 5.50 ( it 's )", "$5.50 (it's)"),
        ("\" The Jones ' house \" , ' so '", "\" The Jones ' house \" , ' so '", "\"The Jones' house\", 'so'"),
        ("„ so “ and “ so ”", "„ so “ and “ so ”", "„so“ and “so ”"),
        ("東京 は 5 は", "東京 は 5 は", "東京は 5 は"),
    ],
)
def test_what_is_written(words: str, plain: str, moses: str) -> None:
    assert written(PlainSpacing(), words.split()) == plain
    assert written(MosesSpacing("en"), words.split()) == moses

"""Prompts from lines that are no JSON."""

from pathlib import Path

import pytest

from transformer_xl.cli import prompts
from transformer_xl.data.tokenizers import ByteTokenizer, IdTokenizer
from transformer_xl.errors import CorpusError


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"prompt": "a", "seed": ' + "9" * 5000 + "}", "a number has thousands of digits"),
        ('{"prompt": ' + "[" * 100_000 + "]" * 100_000 + "}", "it is nested too deep"),
    ],
    ids=["digits", "nested"],
)
def test_a_first_line_that_begins_as_json_is_no_text(line: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text(f'{line}\n{{"prompt": "b"}}\n')
    with pytest.raises(CorpusError) as refused:
        prompts.many(path, ByteTokenizer())
    assert str(refused.value) == f'\'{path}\', line 1: it is not JSON ({problem}); write {{"prompt": "text"}}'


def test_braces_alone_make_no_json(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("{curly} text\nmore\n")
    assert len(prompts.many(tmp_path / "prompts.txt", ByteTokenizer())) == 2


def test_ids_begin_with_the_first() -> None:
    assert prompts.beginning(IdTokenizer(3)).ids.tolist() == [0]

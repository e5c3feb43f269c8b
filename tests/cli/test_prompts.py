"""Prompts from lines that are no JSON."""

from pathlib import Path

import pytest

from transformer_xl.cli import prompts
from transformer_xl.errors import CorpusError
from transformer_xl.tokenizers.kinds import ByteTokenizer, IdTokenizer


def test_a_first_line_that_begins_as_json_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text('{"prompt": "a", "seed": }\n{"prompt": "b"}\n')
    with pytest.raises(CorpusError, match=r"prompts.txt', line 1: it is not JSON \(.*\); write "):
        prompts.many(path, ByteTokenizer())


@pytest.mark.parametrize("line", ['{"prompt": "a"}', ' { "prompt" : "a" }', '{\t"prompt": "a"}'])
def test_json_may_have_spaces(tmp_path: Path, line: str) -> None:
    (tmp_path / "prompts.txt").write_text(line + "\n")
    assert [prompt.origin for prompt in prompts.many(tmp_path / "prompts.txt", ByteTokenizer())] == [{"prompt": "a"}]


def test_braces_alone_make_no_json(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("{curly} text\nmore\n")
    assert len(prompts.many(tmp_path / "prompts.txt", ByteTokenizer())) == 2


def test_ids_begin_with_the_first() -> None:
    assert prompts.beginning(IdTokenizer(3)).ids.tolist() == [0]

"""Prompts from pipes and from lines that are no JSON."""

import os
import threading
import time
from pathlib import Path

import pytest

from transformer_xl.cli import prompts
from transformer_xl.data.tokenizers import ByteTokenizer, IdTokenizer
from transformer_xl.errors import CorpusError


@pytest.mark.parametrize("late", [False, True], ids=["in time", "late"])
def test_a_pipe_is_read_whole_whenever_its_writer_comes(late: bool, tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)

    def write() -> None:
        time.sleep(0.3 if late else 0)
        with path.open("w") as file:
            time.sleep(0.2)  # nothing yet
            file.write("one\n")
            file.flush()
            time.sleep(0.2)
            file.write("two\n" * 20_000)

    writer = threading.Thread(target=write)
    writer.start()
    found = prompts.many(path, ByteTokenizer())
    writer.join()
    assert len(found) == 20_001
    assert bytes(found[0].ids.tolist()) == b"one"


def test_a_pipe_that_nobody_writes_to_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "_PATIENCE", 0.1)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(
        CorpusError, match=r"^nobody writes to the pipe '.*pipe'; start first what writes to it, or give a file$"
    ):
        prompts.many(tmp_path / "pipe", ByteTokenizer())


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

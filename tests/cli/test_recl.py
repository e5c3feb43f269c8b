"""`txl recl` as a person and a script use it."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cli.conftest import Txl, change_settings, save, train_once
from transformer_xl.analysis.recl import losses
from transformer_xl.checkpoint.run_directory import load

QUICK = ("--delta", "10", "--max-context", "40", "--tokens", "40")


@pytest.fixture(scope="module")
def zoo(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of other kinds and vocabularies than `home`; `halves` divides its text otherwise, `fresh` has no checkpoint."""
    zoo = tmp_path_factory.mktemp("zoo")
    changes = {
        "lstm": ["model.kind=lstm"],
        "vanilla": ["model.kind=vanilla"],
        "char": ["tokenizer.kind=char"],
    }
    for name, settings in changes.items():
        options = [part for each in ["train.max_steps=2", "train.sample_tokens=0", *settings] for part in ("--set", each)]
        train_once(home, "tiny.toml", "text.txt", zoo / name, *options)
    shutil.copytree(zoo / "lstm", zoo / "halves")
    change_settings(zoo / "halves", "data", split=[0.5, 0.25, 0.25])
    shutil.copytree(zoo / "lstm", zoo / "fresh")
    shutil.rmtree(zoo / "fresh" / "checkpoints")
    (zoo / "fresh" / "checkpoints").mkdir()
    return zoo


@pytest.fixture
def runs(zoo: Path, workbench: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them in the working directory, and a cache of one's own for losses."""
    for run in zoo.iterdir():
        (workbench / run.name).symlink_to(run)
    shutil.copytree(os.environ["TXL_CACHE"], workbench / "cache")
    monkeypatch.setenv("TXL_CACHE", str(workbench / "cache"))


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, int, int]]:
    """Of which models losses are computed, at which contexts, in segments of how many tokens."""
    seen: list[tuple[Any, int, int]] = []
    original = losses.context_losses

    def watched(model: Any, *arguments: Any, context: int, tgt_len: int, **options: Any) -> np.ndarray:
        seen.append((model, context, tgt_len))
        return original(model, *arguments, context=context, tgt_len=tgt_len, **options)

    monkeypatch.setattr(losses, "context_losses", watched)
    return seen


pytestmark = pytest.mark.usefixtures("runs")


def test_table(txl: Txl, home: Path, workbench: Path) -> None:
    answer = txl("recl", "run", "lstm", "--group", "run, ./vanilla", *QUICK, "--r", "0.25,1", "--plot", "recl.svg")
    assert (answer.status, answer.err) == (0, "")
    lines = answer.out.splitlines()
    assert lines[0] == (
        f"test split of {home / 'text.txt'}, 40 tokens; context grows by 10 while that gains 1 % of perplexity on the hardest "
        "share r"
    )
    assert [" ".join(line.split()) for line in (lines[2], lines[6])] == [f"group {i} parameters r = 0.25 r = 1" for i in (1, 2)]
    n_parameter = sum(parameter.numel() for parameter in load("run")[0].parameters())
    assert lines[3].split()[:2] == lines[7].split()[:2] == ["run", f"{n_parameter:,}"]
    assert [lines[4].split()[0], lines[8].split()[0]] == ["lstm", "vanilla"]
    picture = (workbench / "recl.svg").read_text()
    assert picture.startswith("<?xml")


def test_json_is_consistent(txl: Txl, home: Path) -> None:
    answer = txl("recl", "run", "lstm", "./vanilla", *QUICK, "--json", "--threshold", "1e-9", "--start", "5")
    assert (answer.status, answer.err) == (0, "")
    result = json.loads(answer.out)
    assert result["text"] == f"test split of {home / 'text.txt'}"
    assert (result["tokens"], result["block"], result["delta"], result["start"], result["max_context"]) == (40, 2, 10, 5, 40)
    (group,) = result["groups"]
    assert [model["run"] for model in group["models"]] == ["run", "lstm", "./vanilla"]
    assert [model["kind"] for model in group["models"]] == ["transformer_xl", "lstm", "vanilla"]
    for model in group["models"]:
        assert set(model["recl"]) == set(model["gains"]) == {"0.1", "0.5", "1"}
        for share, found in model["recl"].items():
            gains = model["gains"][share]
            if model["kind"] != "lstm":  # others read 24 and 5 tokens at most
                assert found["tokens"] <= {"transformer_xl": 24, "vanilla": 5}[model["kind"]]
                continue
            assert found["tokens"] in (5, 15, 25, 35)
            steps = [context for context in (15, 25, 35) if context <= found["tokens"]]
            assert all(gains[str(context)] >= 1e-9 for context in steps)
            assert found["at_least"] == (found["tokens"] == 35)
            assert found["at_least"] or gains[str(found["tokens"] + 10)] < 1e-9
        assert all(np.isfinite(loss) for loss in model["losses"].values())
    vanilla = group["models"][2]["losses"]
    assert len({vanilla[context] for context in vanilla if int(context) >= 5}) == 1  # it reads five tokens at most


def test_what_is_known_is_not_computed_again(txl: Txl, computed: list[tuple[Any, int, int]], workbench: Path) -> None:
    first = txl("recl", "run", "lstm", *QUICK)
    assert {model.config.kind for model, *_ in computed} == {"transformer_xl", "lstm"}
    n = len(computed)
    assert len(computed) == len(set(computed)) == len(list((workbench / "cache" / "recl").iterdir()))
    assert txl("recl", "run", "lstm", *QUICK).out == first.out
    assert len(computed) == n
    file = min((workbench / "cache" / "recl").iterdir())
    file.write_bytes(file.read_bytes()[:-1])
    again = txl("recl", "run", "lstm", *QUICK)
    assert (again.out, again.err) == (first.out, f"warning: '{file}' is damaged; computing it again\n")
    assert len(computed) == n + 1


def test_interrupted_it_shows_what_it_has_and_goes_on(txl: Txl, monkeypatch: pytest.MonkeyPatch) -> None:
    original, stop_at, done = losses.context_losses, 20, []

    def interrupted(*arguments: Any, context: int, **options: Any) -> np.ndarray:
        if context == stop_at:
            raise KeyboardInterrupt
        done.append(context)
        return original(*arguments, context=context, **options)

    monkeypatch.setattr(losses, "context_losses", interrupted)
    command = ("recl", "lstm", *QUICK, "--threshold", "1e-12", "--r", "1")
    answer = txl(*command, "--json")
    assert (answer.status, answer.err.strip()) == (130, "")
    result = json.loads(answer.out)
    assert result["interrupted"]
    assert result["groups"][0]["models"][0]["recl"] == {"1": {"tokens": 10, "at_least": True}}
    answer = txl(*command)
    assert (answer.status, answer.out.splitlines()[-1]) == (
        130,
        "interrupted, so lengths with ≥ are not final; the same command continues from here",
    )
    assert "≥ 10" in answer.out
    stop_at = 0
    assert txl(*command).status == 0
    assert done.count(10) == 1
    stop_at = 10
    assert txl("recl", "vanilla", *QUICK).status == 0  # it reads five tokens, and is never asked for ten


def test_interrupted_before_anything_is_known(txl: Txl, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> np.ndarray:
        raise KeyboardInterrupt

    monkeypatch.setattr(losses, "context_losses", interrupted)
    answer = txl("recl", "run", *QUICK)
    assert (answer.status, answer.out) == (130, "")


def test_reading_is_that_of_the_run_or_as_asked(txl: Txl, computed: list[tuple[Any, int, int]], workbench: Path) -> None:
    def readings() -> set[tuple[Any, ...]]:
        found = {(m.config.kind, m.mem_len, m.clamp_len, m.same_length, tgt_len) for m, _, tgt_len in computed}
        computed.clear()
        return found

    change_settings(workbench / "run", "eval", clamp_len=4, same_length=True, tgt_len=3, mem_len=7)
    txl("recl", "run", "lstm", *QUICK)
    assert readings() == {("transformer_xl", 7, 4, True, 3), ("lstm", 1, None, False, 5)}
    txl("recl", "run", "lstm", *QUICK, "--mem-len", "0", "--tgt-len", "20", "--block", "1")
    assert readings() == {("transformer_xl", 0, 4, False, 20), ("lstm", 1, None, False, 5)}


def test_without_memory_a_segment_is_all_that_is_read_at_once(
    txl: Txl, computed: list[tuple[Any, int, int]], workbench: Path
) -> None:
    """Scored by stride, three tokens after nine that are read again."""
    change_settings(workbench / "run", "eval", tgt_len=3, ext_len=9, mem_len=0)
    txl("recl", "run", *QUICK, "--block", "1")
    assert {(model.mem_len, tgt_len) for model, _, tgt_len in computed} == {(0, 12)}


def test_other_texts(txl: Txl, workbench: Path) -> None:
    save(*load("run"), "exported")
    assert (
        txl("recl", "exported", *QUICK).complaint
        == "'exported' is a model without a corpus of its own; give --file or --corpus"
    )
    assert txl("recl", "exported", "lstm", *QUICK, "--file", "tiny.toml").out.startswith("file tiny.toml, 40 tokens; ")
    assert txl("recl", "run", "halves", *QUICK, "--file", "tiny.toml").status == 0
    assert txl("recl", "run", "lstm", *QUICK, "--corpus", "tiny.toml", "--split", "train").out.startswith("train split of ")
    gaining = ("--delta", "5", "--max-context", "14", "--threshold", "1e-12", "--file", "tiny.toml")
    assert txl("recl", "run", *gaining).out.splitlines()[-1].startswith("≥: still gains at 10 tokens; a larger --max-context ")


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        ("", "name at least one run, such as txl recl runs/mine"),
        ("run --group lstm,", "name at least one run, such as txl recl runs/mine, and in --group runs with commas between"),
        ("run run", "run 'run' is named twice in a group; name it once"),
        ("gone", "'gone' is not a directory of a model"),
        ("run fresh", "no checkpoint in 'fresh/checkpoints'; check the path, or train first"),
        ("run char", "vocabularies differ: 'run' has 256 tokens (byte), 'char' has "),
        (
            "lstm halves",
            "data.split is '(0.9, 0.05, 0.05)' for 'lstm' and '(0.5, 0.25, 0.25)' for 'halves'; the test split of one",
        ),
        (
            "lstm halves --corpus text.txt",
            "for 'halves'; the test split of one may be in the training split of the other, so give --file",
        ),
        (
            "run --max-context 1000",
            "tokens, and a context of 1,000 with 10 to score after it needs 1,010; give a longer text, or a",
        ),
        ("run --max-context 90", "--max-context (90) must be at least 100, one step of 50 after 50"),
        ("run --delta 0", "--delta (0) must be at least 1"),
        ("run --delta 5 --block 6", "--block (6) must be at most --delta (5), or contexts of two steps overlap"),
        ("run --r 0.5;1", "--r '0.5;1' must be shares above 0 and at most 1 with commas between, such as 0.1,0.5,1"),
        ("run --r 0", "--r '0' must be shares above 0"),
        ("run --threshold 1", "--threshold (1) must be above 0 and below 1, such as 0.01"),
        ("run --tokens 0", "--tokens (0) must be at least 1"),
        ("run --start 0", "--start (0) must be at least 1"),
        ("run --mem-len -1", "--mem-len (-1) must be at least 0"),
        (
            "lstm vanilla --mem-len 5",
            "--mem-len is for models that remember positions, and these are lstm, vanilla",
        ),
        ("run --plot recl.txt", "--plot 'recl.txt' must end in .png, .svg, .pdf"),
        ("run --file text.txt --split test", "--file scores a whole file; leave --split and --corpus out"),
        ("run --file gone.txt", "cannot read 'gone.txt': no such file"),
    ],
)
def test_errors_are_one_line(txl: Txl, command: str, complaint: str) -> None:
    answer = txl("recl", *command.split())
    assert (answer.status, answer.out) == (1, "")
    assert complaint in answer.complaint

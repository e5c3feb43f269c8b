"""Models of other kinds go through the same commands: trained, resumed, scored, written with."""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Txl, save, train_once
from tests.training.helpers import differing, run_bits
from transformer_xl.checkpoint.run_directory import load
from transformer_xl.config import model as model_settings

KINDS = {
    "vanilla": ("model.kind=vanilla", "model.intermediate_losses=true", "model.n_target=2"),
    "lstm": ("model.kind=lstm", "model.n_layer=2", "model.dropweight=0.2"),
}


def sets(kind: str, *more: str) -> list[str]:
    return [part for value in (*KINDS[kind], *more) for part in ("--set", value)]


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def trained(home: Path, kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_once(home, "tiny.toml", "text.txt", tmp_path_factory.mktemp(kind) / "run2", *sets(kind, "train.max_steps=4"))


@pytest.fixture
def run2(trained: Path, workbench: Path) -> Path:
    """A run of a kind, an own copy."""
    return shutil.copytree(trained, workbench / "run2")


def train(txl: Txl, kind: str, out: str, *more: str) -> None:
    assert txl("train", "tiny.toml", "--corpus", "text.txt", "--out", out, *sets(kind, *more)).status == 0


def test_resumed_is_uninterrupted(txl: Txl, workbench: Path, kind: str) -> None:
    # auxiliary losses end at a share of the budget, which is another where the budget was raised
    constant = ("optim.schedule=constant", *(("model.intermediate_losses=false",) if kind == "vanilla" else ()))
    constant = (*constant, "train.eval_interval=3")
    train(txl, kind, "whole", *constant, "train.max_steps=8")
    train(txl, kind, "parts", *constant, "train.max_steps=4")
    answer = txl("train", "--resume", "--out", "parts", "--set", "train.max_steps=8")
    assert answer.status == 0, answer.err
    assert "resumed at step 4" in answer.err
    assert differing(run_bits(workbench / "whole"), run_bits(workbench / "parts")) == ["log"]  # one has a score more


def test_scored_and_written_with(txl: Txl, run2: Path, kind: str) -> None:
    final = json.loads((run2 / "metrics.jsonl").read_text().splitlines()[-1])
    assert ("loss_without_memory" in final) == (kind != "vanilla")
    score = json.loads(txl("eval", "run2", "--split", "valid", "--precision", "fp32", "--json").out)
    assert score["loss"] == pytest.approx(final["loss"], abs=1e-6)
    exact = txl("eval", "run2", "--json", *(("--tgt-len", "1", "--ext-len", "4") if kind == "vanilla" else ()))
    assert json.loads(exact.out)["tokens"] == json.loads(txl("eval", "run2", "--json").out)["tokens"]
    save(*load("run2"), "exported")
    written = [
        txl("generate", name, "--prompt", "the cat", "--tokens", "12", "--seed", "1").out for name in ("run2", "exported")
    ]
    assert written[0] == written[1] and written[0].startswith("the cat")


def test_a_session_goes_on(txl: Txl, run2: Path) -> None:
    options = ("--memory", "book.session", "--temperature", "0")
    first = txl("generate", "run2", "--prompt", "the cat", "--tokens", "6", *options)
    assert first.status == 0, first.err
    second = txl("generate", "run2", "--tokens", "6", *options)
    assert second.status == 0, second.err
    at_once = txl("generate", "run2", "--prompt", "the cat", "--tokens", "12", "--temperature", "0")
    assert first.out.rstrip("\n") + second.out.rstrip("\n") == at_once.out.rstrip("\n")


def test_what_a_kind_does_not_have_is_one_line(txl: Txl, run2: Path, kind: str) -> None:
    assert kind in txl("eval", "run2", "--mem-len", "9").complaint
    assert kind in txl("eval", "run2", "--clamp-len", "9").complaint
    assert kind in txl("generate", "run2", "--precision", "int8").complaint
    assert kind in txl("convert", "run2", "out", "--to", "huggingface").complaint
    if kind == "vanilla":
        assert "6 tokens is longer than the 5 positions" in txl("eval", "run2", "--tgt-len", "6").complaint


def test_memory_is_compared_where_there_is_one(txl: Txl, run2: Path, kind: str) -> None:
    answer = txl("eval", "run2", "--compare-memory")
    if kind == "vanilla":
        assert answer.complaint == "--compare-memory: 'run2' is read without memory (mem_len 0) already; leave it out"
    else:
        assert "memory is worth" in answer.out


MINE = """
from typing import ClassVar

from transformer_xl.model.lstm import Lstm
from transformer_xl.config.model import LstmConfig
from transformer_xl.model.kinds import register_model


class MineConfig(LstmConfig):
    kind: ClassVar[str] = "mine"


class Mine(Lstm):
    kind = "mine"


register_model(MineConfig, Mine)
"""


@pytest.fixture
def mine(workbench: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A file that registers a kind, and is not imported."""
    (workbench / "my_kind.py").write_text(MINE)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield "./my_kind.py"
    sys.modules.pop("my_kind", None)
    model_settings.KINDS.pop("mine", None)


@pytest.mark.usefixtures("nothing_drawn")
def test_a_kind_of_ones_own_is_named_by_every_command(txl: Txl, workbench: Path, mine: str) -> None:
    (workbench / "short.txt").write_text("the cat sat on mats " * 4)
    own, kind = ("--import", mine), ("--set", "model.kind=mine", "--set", "model.n_layer=2")
    training = ("train", "tiny.toml", "--corpus", "text.txt", "--out", "run2", *kind)
    assert "'mine' is not registered" in txl(*training).complaint
    assert "my_kind" not in sys.modules

    def forget() -> None:
        sys.modules.pop("my_kind")
        del model_settings.KINDS["mine"]

    for command in (
        (*training, "--set", "train.max_steps=4"),
        ("train", "--resume", "--out", "run2", "--set", "train.max_steps=6"),
        ("eval", "run2"),
        ("generate", "run2", "--prompt", "the", "--tokens", "2"),
        ("plot", "run2", "--json"),
        ("explain", "run2", "short.txt", "--out", "page"),
        ("ablate", "tiny.toml", "--corpus", "text.txt", "--loss", "full", "--steps", "2", "--out", "both", *kind),
        ("ablate", "--out", "both"),
    ):
        without = txl(*command)
        assert "'mine' is not registered" in without.complaint and "--import" in without.complaint
        with_it = txl(*command, *own)
        assert with_it.status == 0, with_it.err
        forget()
    assert json.loads((workbench / "both" / "ablation.json").read_text())["variants"][0]["config"]["model"]["kind"] == "mine"


def test_what_cannot_be_imported_is_one_line(txl: Txl, workbench: Path, mine: str) -> None:
    (workbench / "folder" / "plain").mkdir(parents=True)
    (workbench / "broken.py").write_text("1 / 0\n")
    (workbench / "json.py").write_text("")
    for place, complaint in (
        (
            "no_such_module",
            "--import 'no_such_module' failed: ModuleNotFoundError: No module named 'no_such_module'; a file is given",
        ),
        ("./missing.py", "--import './missing.py' cannot be imported: there is no file '"),
        ("folder/plain", "__init__.py'"),
        ("broken.py", "--import 'broken.py' failed: ZeroDivisionError: division by zero"),
        ("./json.py", "--import './json.py' is called like another module, 'json'; give it another name"),
    ):
        assert complaint in txl("eval", "run", "--import", place).complaint
        assert complaint in txl("train", "tiny.toml", "--import", mine, "--import", place).complaint


def test_no_file_can_say_what_is_imported(txl: Txl, workbench: Path, mine: str) -> None:
    """A recipe that names a file of code, as its kind or in any other way, is refused; the file is not run."""
    for line in ('kind = "my_kind:Mine"', 'kind = "./my_kind.py"', 'kind = "mine"\nimport = "./my_kind.py"'):
        (workbench / "own.toml").write_text(f"[model]\n{line}\n")
        assert "not registered" in txl("train", "own.toml", "--corpus", "text.txt", "--out", "run2").complaint
    assert "my_kind" not in sys.modules


def test_a_run_of_a_kind_is_planned(txl: Txl, kind: str) -> None:
    settings = ("--set", "model.vocab_size=99", *sets(kind))
    said = txl("train", "tiny.toml", "--corpus", "text.txt", "--dry-run", *settings).out
    assert said.startswith(f"tiny: {kind}, 2 layers, ")
    assert txl("plan", "tiny.toml", *settings).out.startswith(f"tiny: {kind}, 2 layers, ")

"""`txl info` says what is there, reads no weights, and names what is damaged."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.conftest import Txl, save
from tests.helpers import TINY
from transformer_xl.checkpoint.run_directory import RunDirectory, load
from transformer_xl.config.model import HeadConfig, TransformerXLConfig, XLNetConfig
from transformer_xl.model.build import make_model
from transformer_xl.tokenizers.kinds import ByteTokenizer
from transformer_xl.training.entries import read_metrics


@pytest.fixture
def info(txl: Txl):
    def info(source: str) -> dict[str, Any]:
        answer = txl("info", source, "--json")
        assert (answer.status, answer.err) == (0, "")
        return json.loads(answer.out)

    return info


def test_a_finished_run(txl: Txl, info: Any) -> None:
    facts, run = info("run"), RunDirectory("run")
    model, config = load("run")[0], run.config()
    assert facts["parameters"] == sum(weight.numel() for weight in model.parameters())
    assert (facts["kind"], facts["n_layer"], facts["d_model"]) == ("transformer_xl", config.model.n_layer, config.model.d_model)
    assert (facts["mem_len"], facts["tgt_len"]) == (config.model.mem_len, config.train.tgt_len)
    assert (facts["recipe"], facts["corpus"], facts["state"]) == ("tiny", config.data.corpus, "finished")
    assert (facts["steps"], facts["budget"]) == (40, {"max_steps": 40})
    valid = [entry for entry in read_metrics(Path("run")) if entry["kind"] == "valid"]
    of_best = next(entry for entry in valid if entry["step"] == run.store().best_step)
    assert (facts["best"]["loss"], facts["last"]["loss"]) == (of_best["loss"], valid[-1]["loss"])
    assert [at["step"] for at in facts["checkpoints"] if at["best"]] == [of_best["step"]]
    assert [at["step"] for at in facts["checkpoints"]] == run.store().steps()
    files = list(Path("run/checkpoints/step-00000040").iterdir())
    assert facts["checkpoints"][-1]["bytes"] == sum(path.stat().st_size for path in files)
    assert facts["trained_with"]["torch"] == torch.__version__
    said = txl("info", "run").out
    for figure in (
        f"{facts['parameters']:,} parameters",
        "40 of 40 steps",
        f"{of_best['loss']:.4f} nats per token, {of_best['bpc']:.3f} bits per character (step {of_best['step']})",
        "256 (byte)",
    ):
        assert figure in said


def test_a_run_of_which_the_newest_checkpoint_is_damaged(info: Any) -> None:
    """The one before tells its settings, as where it is loaded; those beside the checkpoints are for people."""
    before, last = sorted(Path("run/checkpoints").glob("step-*"))[-2:]
    whole = info("run")
    with (last / "model.safetensors").open("r+b") as file:
        file.truncate(100)
    facts = info("run")
    assert [at["damage"] is None for at in facts["checkpoints"]][-2:] == [True, False]
    assert "model.safetensors has 100 bytes" in facts["checkpoints"][-1]["damage"]
    assert facts["parameters"] == whole["parameters"]
    Path("run/config.json").write_text("{}")
    assert info("run")["corpus"] == whole["corpus"]
    config = before / "config.json"
    config.write_bytes(config.read_bytes().replace(b'"tiny"', b'"tinz"'))  # of the same size
    (last / "manifest.json").unlink()
    assert [at["damage"] is None for at in info("run")["checkpoints"]][-2:] == [False, False]


def test_a_run_that_has_just_begun_and_is_being_trained(txl: Txl, info: Any) -> None:
    shutil.rmtree("run/checkpoints")
    Path("run/checkpoints").mkdir()
    Path("run/metrics.jsonl").write_text(
        '{"kind": "train", "step": 3, "loss": 5.0, "tokens": 60, "seconds": 90.0}\n{"kind": "tr'
    )
    with RunDirectory("run").locked():
        assert info("run")["state"] == "being trained"
    facts = info("run")
    assert (facts["state"], facts["steps"], facts["minutes"], facts["parameters"]) == ("not finished", 3, 1.5, None)
    assert (facts["best"], facts["last"], facts["checkpoints"]) == (None, None, [])
    said = txl("info", "run").out
    assert "no checkpoint yet" in said and "parameters" not in said


def test_steps_tokens_and_seconds_are_of_one_moment(info: Any) -> None:
    """A stopped run has a checkpoint of a step after the last line of its log."""
    whole, log = info("run"), Path("run/metrics.jsonl")
    log.write_text("".join(line for line in log.read_text().splitlines(keepends=True) if json.loads(line)["step"] < 40))
    facts = info("run")
    assert (facts["steps"], facts["tokens"], facts["epochs"]) == (40, whole["tokens"], whole["epochs"])
    assert facts["minutes"] == pytest.approx(whole["minutes"], abs=1e-4)


def test_an_exported_model_and_its_task(txl: Txl, info: Any) -> None:
    head = HeadConfig(kind="classification", labels=("good", "bad"), tgt_len=8)
    model = make_model(TransformerXLConfig(**{**TINY, "vocab_size": 256}, head=head))
    save(model, ByteTokenizer(), "tuned")
    facts = info("tuned")
    assert (facts["is_run"], facts["head"]) == (False, {"kind": "classification", "labels": ["good", "bad"]})
    assert facts["parameters"] == sum(weight.numel() for weight in model.parameters())
    assert "classification (good, bad)" in txl("info", "tuned").out


def test_adapters_are_not_counted_twice(txl: Txl, info: Any) -> None:
    settings = ("--set", "train.lora_rank=2", "--set", "train.max_steps=1")
    assert txl("train", "text.txt", "--from", "run", "--out", "adapted", *settings).status == 0
    assert (info("adapted")["parameters"], info("adapted")["base"]) == (info("run")["parameters"], str(Path("run").absolute()))


def test_an_xlnet_is_counted(info: Any) -> None:
    sizes: dict[str, Any] = {
        "vocab_size": 256,
        "n_layer": 1,
        "d_model": 8,
        "n_head": 2,
        "d_head": 4,
        "d_inner": 8,
        "reuse_len": 2,
    }
    model = make_model(XLNetConfig(**sizes, num_predict=1))
    save(model, ByteTokenizer(), "net")
    assert info("net")["parameters"] == sum(weight.numel() for weight in model.parameters())


def test_a_recipe_a_run_and_a_setting_are_told_where_they_are_shown(txl: Txl) -> None:
    assert "txl settings quickstart" in txl("info", "quickstart").complaint
    assert "txl info 'run'" in txl("settings", "run").complaint and "txl info 'run'" in txl("plan", "run").complaint
    assert "txl settings | grep 'train.max_steps'" in txl("settings", "train.max_steps").complaint


@pytest.mark.parametrize("source", ["rum", "text.txt", "half", "cut"])
def test_what_is_no_run_is_one_line(txl: Txl, source: str) -> None:
    Path("half").mkdir()
    save(*load("run"), "cut")
    Path("cut/model.safetensors").write_bytes(b"\xff" * 20)
    answer = txl("info", source)
    assert answer.status == 1 and answer.out == ""
    assert f"'{source}" in answer.complaint


@pytest.mark.parametrize(
    "tensor",
    [
        {"shape": [2], "dtype": 5},
        {"shape": [2], "dtype": None},
        {"shape": [10**4000], "dtype": "F32"},
        {"shape": [-2], "dtype": "F32"},
        {"shape": [1e308, 1e308], "dtype": "F32"},
        None,  # only the size of the header is there: 30 GiB of it
    ],
)
def test_a_forged_header_is_one_line(txl: Txl, tensor: dict[str, Any] | None) -> None:
    save(*load("run"), "forged")
    header = json.dumps({"a": tensor and tensor | {"data_offsets": [0, 8]}}).encode()
    with Path("forged/model.safetensors").open("wb") as file:
        file.write((len(header) if tensor else 30 << 30).to_bytes(8, "little") + header + bytes(8))
        file.truncate(40 << 30 if tensor is None else None)  # it takes no room on the disk
    answer = txl("info", "forged")
    assert (answer.status, answer.out) == (1, "")
    assert answer.complaint.startswith("'forged/model.safetensors' is no sound safetensors file (")


@pytest.mark.parametrize("line", ['{"kind": "valid", "step": 3}', '{"kind": "train", "step": 3, "tokens": null}', "\0"])
def test_a_bad_line_of_the_log_is_named(txl: Txl, line: str) -> None:
    log = Path("run/metrics.jsonl")
    log.write_text(f"{line}\n{log.read_text()}")
    assert txl("info", "run").complaint.startswith("'run/metrics.jsonl', line 1 is no entry of a log (")


def test_only_directories_of_steps_are_checkpoints(info: Any) -> None:
    """A file or a link there, or a name that no step has, is left alone, as where a run goes on."""
    whole, folder = info("run"), Path("run/checkpoints")
    (folder / "step-00000070").touch()
    (folder / "step-00000080").symlink_to("step-00000040")
    (folder / "step-7").mkdir()
    assert info("run") == whole
    manifest = folder / "step-00000040" / "manifest.json"
    manifest.write_text('{"files":')
    damage = info("run")["checkpoints"][-1]["damage"]
    assert damage.startswith(f"'{manifest}' is damaged: ") and not damage.endswith(";")


def test_nothing_heavy_is_imported(workbench: Path) -> None:
    code = "import sys; from transformer_xl.cli import app; app(['info', 'run'], result_action='return_value')"
    code += "; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env={"PYTHONPATH": ":".join(sys.path)})

"""Old `transfo-xl` directories behind the auto classes: what the old classes said, and nothing executed on the way."""

import json
import pickle
import shutil
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import assert_close
from tests.parity.reading import goldens, read_golden
from transformer_xl.checkpoint.run_directory import load
from transformer_xl.errors import CheckpointError, ConfigError

transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")

from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, pipeline  # noqa: E402

from transformer_xl.huggingface import TransformerXLForCausalLM, TransformerXLPretrainedConfig  # noqa: E402

IDS = torch.arange(6).view(2, 3)
GOLDENS = {path.name: path for path in goldens("huggingface")}


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A directory of an old model with its vocabulary and a tokenizer_config.json as the old classes wrote it."""
    path = tmp_path / "old"
    shutil.copytree(GOLDENS["untied_weight"] / "checkpoint", path)
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "TransfoXLTokenizer", "lower_case": False}))
    return path


@pytest.mark.parametrize("name", GOLDENS)
def test_an_old_directory_says_what_the_old_classes_said(name: str) -> None:
    golden = read_golden(GOLDENS[name] / "expected.safetensors")
    model = AutoModelForCausalLM.from_pretrained(GOLDENS[name] / "checkpoint")
    assert isinstance(model, TransformerXLForCausalLM) and model.config.zero_first_memory
    lengths = {key: value for key, value in golden.reading.items() if key != "tgt_len"}
    model.transformer = model.transformer.with_context(**lengths)
    mems = None
    for segment, ids in enumerate(golden.tensors["ids"]):
        out = model(ids, mems=mems)
        mems = out.mems
        assert_close(f"segment {segment}", out.logits.log_softmax(-1), golden.tensors["log_probs"][segment], 1e-5)


def test_model_tokenizer_and_pipeline_of_an_old_directory(old: Path, tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(old)
    assert isinstance(config, TransformerXLPretrainedConfig) and config.zero_first_memory
    model, tokenizer = AutoModelForCausalLM.from_pretrained(old), AutoTokenizer.from_pretrained(old)
    assert model.config.native == config.native
    words = tokenizer.convert_ids_to_tokens([3, 4, 5])
    assert tokenizer(" ".join(words))["input_ids"][:3] == [3, 4, 5]
    (written,) = pipeline("text-generation", model=str(old))(" ".join(words), max_new_tokens=3, do_sample=False)
    assert written["generated_text"].startswith(" ".join(words))
    model.save_pretrained(tmp_path / "new")
    tokenizer.save_pretrained(tmp_path / "new")
    native, same = load(tmp_path / "new")
    assert torch.equal(native(IDS).logits, model(IDS).logits)
    assert same.fingerprint == tokenizer.native.fingerprint


def test_an_old_model_in_a_subfolder_without_a_config_of_its_tokenizer(old: Path) -> None:
    expected, words = AutoModelForCausalLM.from_pretrained(old)(IDS).logits, AutoTokenizer.from_pretrained(old).get_vocab()
    (old / "tokenizer_config.json").unlink()
    model = AutoModelForCausalLM.from_pretrained(old.parent, subfolder="old")
    assert torch.equal(model(IDS).logits, expected)
    assert AutoTokenizer.from_pretrained(old.parent, subfolder="old").get_vocab() == words


def test_it_is_converted_once_and_again_when_it_changes(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformer_xl.conversion.convert as module

    calls = []
    convert = module.convert
    monkeypatch.setattr(module, "convert", lambda *args, **options: calls.append(args) or convert(*args, **options))
    AutoModelForCausalLM.from_pretrained(old)
    AutoTokenizer.from_pretrained(old)
    assert len(calls) == 1
    words = (old / "vocab.txt").read_text().split()
    (old / "vocab.txt").write_text("\n".join([words[1], words[0], *words[2:], ""]))  # of the same size
    AutoTokenizer.from_pretrained(old)
    assert len(calls) == 2


def test_how_it_writes_is_kept(old: Path) -> None:
    (old / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, "max_new_tokens": 7}))
    assert AutoModelForCausalLM.from_pretrained(old).generation_config.eos_token_id == 2


def test_an_old_model_of_the_hub_is_downloaded_without_code(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def snapshot_download(repo: str, *, allow_patterns: list[str], **options: Any) -> str:
        asked.update(repo=repo, patterns=allow_patterns, **options)
        return str(old)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    values = json.loads((old / "config.json").read_text())
    monkeypatch.setattr("transformers.PreTrainedConfig.get_config_dict", lambda *_, **__: (values, {}))
    from transformer_xl.huggingface.legacy import native_source

    assert (Path(native_source("me/old", {"revision": "v1", "mem_len": 3})) / "model.safetensors").is_file()
    assert not any(fnmatch("vocab.py", pattern) for pattern in asked.pop("patterns"))
    assert asked == {"repo": "me/old", "revision": "v1"}


class Danger:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("executed",)


@pytest.mark.parametrize("file", ["pytorch_model.bin", "vocab.pkl"])
def test_nothing_in_it_is_executed(old: Path, file: str, capfd: pytest.CaptureFixture[str]) -> None:
    (old / "vocab.txt").unlink()
    (old / file).write_bytes(pickle.dumps({"idx2sym": Danger()}))
    with pytest.raises(CheckpointError):
        AutoTokenizer.from_pretrained(old)
    assert "executed" not in capfd.readouterr().out


def test_settings_that_the_old_model_does_not_have_are_refused(old: Path) -> None:
    values = json.loads((old / "config.json").read_text())
    (old / "config.json").write_text(json.dumps({**values, "auto_map": "someone/code"}))
    with pytest.raises(ConfigError, match="unknown key 'auto_map'"):
        AutoConfig.from_pretrained(old)

"""What was changed on purpose is accepted by one command, which says what differs."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoint.test_damage import TOKENIZER, export, start
from tests.helpers import without_seal
from transformer_xl.checkpoint.run_directory import RunDirectory, load
from transformer_xl.checkpoint.sealing import seal_again
from transformer_xl.config import TokenizerConfig
from transformer_xl.data.tokenizers import train_tokenizer
from transformer_xl.errors import CheckpointError, TxlError
from transformer_xl.model.transformer_xl import TransformerXL


def change(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_changed_run_is_sealed_again(tmp_path: Path) -> None:
    start(run := tmp_path / "run")
    assert seal_again(run) == []
    values = json.loads((run / "config.json").read_text())
    change(run / "config.json", optim={**values["optim"], "lr": 0.5})
    train_tokenizer(TokenizerConfig(kind="char"), ["bcdefghijklmn"]).save(run / "tokenizer.json")
    with pytest.raises(CheckpointError, match=r"optim.lr is 0.5 \(sealed"):
        load(run)
    assert seal_again(run) == ["optim.lr is 0.5 (sealed: 0.00025)", "tokenizer.json is another tokenizer"]
    assert RunDirectory(run).config().optim.lr == 0.5
    load(run, which="last")


def test_a_changed_model_is_sealed_again(tmp_path: Path) -> None:
    export(tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    assert seal_again(tmp_path) == []
    assert (tmp_path / "model.safetensors").read_bytes() == before
    change(tmp_path / "config.json", mem_len=9)
    change(tmp_path / "tokenizer.json", alphabet="bcdefghijklmn")
    data = bytearray(before)
    data[-2] ^= 1
    (tmp_path / "model.safetensors").write_bytes(data)
    for _ in range(3):
        with pytest.raises(TxlError, match=r"txl seal"):
            load(tmp_path)
    assert seal_again(tmp_path) == [
        "tokenizer.json is another than its checksum says",
        "mem_len is 9 (sealed: 5)",
        "the bytes of model.safetensors are others",
    ]
    model, tokenizer = load(tmp_path)
    assert (model.config.mem_len, tokenizer.encode("b").tolist()) == (9, [0])


def test_a_model_of_another_program_gets_a_seal(tmp_path: Path) -> None:
    export(tmp_path)
    without_seal(tmp_path)
    change(tmp_path / "config.json", mem_len=9)
    assert TransformerXL.from_pretrained(tmp_path).config.mem_len == 9  # it has no seal, so it is not verified
    weights = load_file(tmp_path / "model.safetensors")
    assert seal_again(tmp_path) == ["model.safetensors had no seal"]
    assert all(torch.equal(x, weights[name]) for name, x in load_file(tmp_path / "model.safetensors").items())
    change(tmp_path / "config.json", mem_len=8)
    with pytest.raises(CheckpointError, match=r"config.json' is not as it was saved: mem_len is 8 \(sealed: 9\)"):
        load(tmp_path)


def test_what_does_not_fit_together_is_not_sealed(tmp_path: Path) -> None:
    export(tmp_path / "model")
    change(tmp_path / "model" / "config.json", d_inner=15)
    with pytest.raises(CheckpointError, match="its config asks for"):
        seal_again(tmp_path / "model")
    start(tmp_path / "run")
    train_tokenizer(TokenizerConfig(kind="char"), ["ab"]).save(tmp_path / "run" / "tokenizer.json")
    with pytest.raises(CheckpointError, match=r"has 2 tokens, its config\.json 13"):
        seal_again(tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"config.json' is missing"):
        seal_again(tmp_path)


def test_other_programs_may_write_a_sealed_model_anew(tmp_path: Path) -> None:
    export(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file({name: x.bfloat16() for name, x in load_file(path).items()}, path)
    change(tmp_path / "config.json", mem_len=3)
    model, tokenizer = load(tmp_path)
    assert (model.dtype, model.config.mem_len, tokenizer.fingerprint) == (torch.bfloat16, 3, TOKENIZER.fingerprint)

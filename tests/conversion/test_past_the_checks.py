"""Ways around checks that were once open: settings without tensors, shared bytes."""

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch

from transformer_xl.conversion.convert import convert
from transformer_xl.conversion.export import export
from transformer_xl.conversion.key_maps import huggingface
from transformer_xl.errors import CheckpointError, ConfigError, TxlError

GOLDENS = Path(__file__).parents[1] / "parity" / "goldens"


@pytest.mark.parametrize(
    ("golden", "settings"),
    [
        ("huggingface/plain/checkpoint", {"final_norm": True}),
        ("huggingface/plain/checkpoint", {"vocab_size": None}),
        ("tensorflow/divided", {"mem_len": 5, "tie_weight": False}),
        ("tensorflow/divided", {"mem_len": 5, "attention": "shaw", "max_klen": 5}),
        ("authors/plain/checkpoint", {"untie_r": True}),
    ],
)
def test_settings_that_a_format_does_not_have_are_refused(golden, settings, tmp_path):
    with pytest.raises(TxlError, match=r"the settings call for|its settings|must be a number"):
        convert(GOLDENS / golden, tmp_path / "native", settings=settings)
    assert not list(tmp_path.iterdir())


def test_tensors_may_not_share_bytes_unless_they_are_tied(tmp_path):
    """All tensors as views of the largest: a small file that would make a large one."""
    sizes = {
        "vocab_size": 31,
        "cutoffs": [],
        "div_val": 1,
        "d_model": 64,
        "d_embed": 64,
        "n_head": 2,
        "d_head": 16,
        "n_layer": 4,
    }
    values = {**sizes, "d_inner": 512, "model_type": "transfo-xl"}
    parts = list(huggingface.key_map(huggingface.config_of(values)).parts())
    shared = torch.zeros(max(torch.Size(part.shape).numel() for part in parts))
    torch.save(
        {part.name: shared[: torch.Size(part.shape).numel()].view(part.shape) for part in parts}, tmp_path / "pytorch_model.bin"
    )
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match="they overlap"):
        convert(tmp_path, tmp_path / "native")


def test_words_that_no_file_can_hold_are_refused(tmp_path):
    source = tmp_path / "source"
    shutil.copytree(GOLDENS / "huggingface" / "no_memory" / "checkpoint", source)
    for old in source.glob("vocab.*"):
        old.unlink()
    (source / "vocab.pkl").write_bytes(pickle.dumps({"idx2sym": [*(f"w{i}" for i in range(30)), "\ud800"]}, protocol=2))
    with pytest.raises(CheckpointError, match=r"a word has half of a character"):
        convert(source, tmp_path / "native")


def test_the_authors_arguments_must_be_possible(tmp_path):
    convert(GOLDENS / "authors" / "shaw" / "checkpoint", tmp_path / "shaw", settings={"mem_len": 1000})
    with pytest.raises(ConfigError, match=r"max_klen \(\d+\) - mem_len \(1000\) .* must be at least 1"):
        export(tmp_path / "shaw", tmp_path / "exported", kind="authors")

"""Converted XLNet models compute what Hugging Face's and the authors' compute in float64 (see make_goldens_xlnet*.py)."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity.reading import Convert, compare_head, compare_xlnet, goldens, native_gradients, read_golden
from transformer_xl.conversion.export import load_model
from transformer_xl.conversion.key_maps import xlnet_huggingface, xlnet_tensorflow
from transformer_xl.model.xlnet import XLNet

TOLERANCES = {torch.float64: 1e-13, torch.float32: 5e-6}


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("folder", goldens("xlnet"), ids=lambda folder: folder.name)
def test_models_of_hugging_face(folder: Path, dtype: torch.dtype, converted: Convert) -> None:
    """Predictions, nats, memory and the gradients of all parameters, over all segments."""
    zeros = read_golden(folder / "expected.safetensors").zero_first_memory
    check(folder, converted, dtype, xlnet_huggingface.key_map, {"zero_first_memory": zeros})


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("folder", goldens("xlnet_tensorflow"), ids=lambda folder: folder.name)
def test_models_of_the_authors(folder: Path, dtype: torch.dtype, converted: Convert) -> None:
    """The same of their TensorFlow code; how it is called, no checkpoint says."""
    call = read_golden(folder / "expected.safetensors").hyperparameters
    clamp_len = call["clamp_len"] if call["clamp_len"] > 0 else None
    settings = {"mem_len": call["mem_len"] or 0, "reuse_len": call["reuse_len"], "clamp_len": clamp_len, "head": None}
    check(folder, converted, dtype, xlnet_tensorflow.key_map, settings)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("folder", goldens("xlnet_heads"), ids=lambda folder: folder.name)
def test_fine_tuned_models_of_hugging_face(folder: Path, dtype: torch.dtype, converted: Convert) -> None:
    """Scores, losses and the gradients of all parameters, also of texts of several segments."""
    golden = read_golden(folder / "expected.safetensors")
    max_len = None if golden.hyperparameters["mem_len"] else golden.reading["tgt_len"]
    native = converted(folder / "checkpoint", {"head": {**golden.reading, "max_len": max_len}})
    model, _ = load_model(native, kinds=("xlnet",))
    gradients = native_gradients(xlnet_huggingface.key_map(model.config), model, golden.gradients)
    compare_head(model, golden, gradients, dtype=dtype, tolerance=TOLERANCES[dtype])


def check(folder: Path, converted: Convert, dtype: torch.dtype, key_map: Any, settings: dict[str, Any]) -> None:
    golden = read_golden(folder / "expected.safetensors")
    model = XLNet.from_pretrained(converted(folder / "checkpoint", settings))
    gradients = native_gradients(key_map(model.config), model, golden.gradients)
    compare_xlnet(model, golden, gradients, dtype=dtype, tolerance=TOLERANCES[dtype])

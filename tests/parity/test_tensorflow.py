"""Converted TensorFlow checkpoints against what the authors' TensorFlow code computed (see make_goldens_tensorflow.py)."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers import assert_close, gradients
from transformer_xl.conversion.convert import convert
from transformer_xl.conversion.key_maps.tensorflow import key_map
from transformer_xl.model.call import Execution
from transformer_xl.model.transformer_xl import TransformerXL

GOLDENS = sorted(path for path in (Path(__file__).with_name("goldens") / "tensorflow").iterdir() if path.is_dir())


@pytest.mark.parametrize("backend", ["equation", "matmul"])
@pytest.mark.parametrize("folder", GOLDENS, ids=lambda folder: folder.name)
def test_converted_model_computes_what_the_original_does(folder, backend, converted):
    """Losses in order, memory, and the gradient of every variable, in float64."""
    flags, expected = json.loads((folder / "config.json").read_text()), load_file(folder / "expected.safetensors")
    settings = {
        "mem_len": flags["mem_len"],
        "clamp_len": flags["clamp_len"] if flags["clamp_len"] > 0 else None,
        "same_length": flags["same_length"],
    }
    native = converted(folder, settings)
    torch.set_default_dtype(torch.float64)  # of the sinusoids
    try:
        model = TransformerXL.from_pretrained(native).double()
        read, mems, nll = partial(model, execution=Execution(backend)), None, None
        for s in range(sum(name.startswith("inputs.") for name in expected)):
            out = read(expected[f"inputs.{s}"].long(), mems=mems, labels=expected[f"targets.{s}"].long())
            mems, nll = out.mems, out.nll
            assert nll is not None
            assert_close(f"nats of segment {s}", nll, expected[f"nats.{s}"], 1e-10)
            for layer, hidden in enumerate(mems.hidden):
                assert_close(f"memory of layer {layer} after segment {s}", hidden, expected[f"memory.{s}.{layer}"], 1e-10)
        assert nll is not None
        nll.mean().backward()
    finally:
        torch.set_default_dtype(torch.float32)
    actual = gradients(model)
    names = {name.removeprefix("gradient.") for name in expected if name.startswith("gradient.")}
    assert names == {part.name for part in key_map(model.config).parts()}
    for name in names:
        converted_back = key_map(model.config).foreign(name, actual.__getitem__)
        assert_close(f"gradient of {name}", converted_back, expected[f"gradient.{name}"], 1e-10, least=1e-6)


def test_the_length_of_the_memory_must_be_said(tmp_path):
    from transformer_xl.errors import CheckpointError

    with pytest.raises(CheckpointError, match="does not say how long a memory it was trained with; add --set mem_len="):
        convert(GOLDENS[0], tmp_path / "native")
    assert not list(tmp_path.iterdir())

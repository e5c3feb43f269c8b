"""Converted XLNet models of Hugging Face compute what the originals compute (goldens, see make_goldens_xlnet.py)."""

import pytest
import torch

from tests.parity.reading import compare_xlnet, goldens, native_gradients, read_golden
from transformer_xl.conversion.convert import convert
from transformer_xl.conversion.key_maps import xlnet_huggingface
from transformer_xl.model.xlnet import XLNet

GOLDENS = goldens("xlnet")
TOLERANCES = {torch.float64: 1e-13, torch.float32: 5e-6}


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("folder", GOLDENS, ids=lambda folder: folder.name)
def test_converted_model_computes_the_same(folder, dtype, tmp_path):
    """Predictions, nats, memory and the gradients of all parameters, over all segments."""
    golden = read_golden(folder / "expected.safetensors")
    settings = {"zero_first_memory": golden.zero_first_memory}
    convert(folder / "checkpoint", tmp_path / "native", settings=settings)
    model = XLNet.from_pretrained(tmp_path / "native")
    gradients = native_gradients(xlnet_huggingface.key_map(model.config), model, golden.gradients)
    compare_xlnet(model, golden, gradients, dtype=dtype, tolerance=TOLERANCES[dtype])

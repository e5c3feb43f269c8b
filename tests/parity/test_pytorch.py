"""Converted checkpoints of the PyTorch peers compute what the peers computed (goldens, see golden_writer.py)."""

import pytest

from tests.parity.reading import compare, goldens, native_gradients, read_golden
from transformer_xl.conversion.key_maps import authors, huggingface, nvidia
from transformer_xl.model.transformer_xl import TransformerXL

KEY_MAPS = {"huggingface": huggingface, "authors": authors, "nvidia": nvidia}
EXPECTED = [(peer, path) for peer in KEY_MAPS for golden in goldens(peer) for path in sorted(golden.glob("expected*"))]


@pytest.mark.parametrize(("peer", "path"), EXPECTED, ids=[f"{peer}-{path.parent.name}-{path.stem}" for peer, path in EXPECTED])
def test_converted_model_computes_the_same(peer, path, converted):
    model = TransformerXL.from_pretrained(converted(path.parent / "checkpoint", {}))
    golden = read_golden(path)
    compare(
        model,
        golden,
        native_gradients(KEY_MAPS[peer].key_map(model.config), model, golden.gradients),
        tolerance=1e-10 if path.stem.endswith("64") else 1e-5,
    )

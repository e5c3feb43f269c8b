"""Reading segments by the fused attention of training, in Triton's interpreter or on a GPU: the numbers of the library."""

from typing import Any

import pytest
import torch

from tests.helpers import assert_close, tiny_model
from tests.inference.test_reader import tokens
from transformer_xl.inference.layer import SEGMENT
from transformer_xl.inference.reader import Reader
from transformer_xl.kernels.device import InferencePrecision

pytest.importorskip("triton", reason="the fused kernels are written in Triton, which is not installed")

pytestmark = [
    pytest.mark.usefixtures("true_bf16", "small_tiles"),
    *([pytest.mark.gpu] if torch.cuda.is_available() else []),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES: dict[str, dict[str, Any]] = {
    "same_length, averages": {"same_length": True, "shift": "averages", "d_model": 16, "pre_lnorm": True},
    "zero first memory, three heads": {"zero_first_memory": True, "n_head": 3},
    "wide heads": {"mem_len": 20, "n_layer": 2, "d_head": 17, "clamp_len": 3},
    "short memory": {"mem_len": 3, "clamp_len": 40},
}


def both(precision: InferencePrecision, **changes: Any) -> tuple[Reader, Reader]:
    model = tiny_model(**{"n_layer": 1, "n_head": 1, "mem_len": 20, **changes}).to(DEVICE)
    library, fused = (Reader(model, tgt_len=12, precision=precision) for _ in range(2))
    library.interpret(fused=False)
    fused.interpret(fused=True)
    assert library.segment_way is SEGMENT is not fused.segment_way
    return library, fused


def compare(readers: tuple[Reader, Reader], tolerance: float) -> None:
    """From nothing, around the ring, in rows that stand at other places and with one that begins anew."""
    memories = [reader.empty_memory(2) for reader in readers]
    for i, n in enumerate((12, 12, 1, 12, 3)):
        rows, ids = slice(i % 2, None), tokens(2 - i % 2, n).to(DEVICE)
        states = [reader.read(ids, memory, rows=rows) for reader, memory in zip(readers, memories, strict=True)]
        assert_close(f"segment {i}", states[1], states[0], tolerance)
        for (name, right), found in zip(memories[0].state_dict().items(), memories[1].state_dict().values(), strict=True):
            assert_close(name, found.float(), right.float(), tolerance)
        if i == 2:
            for reader, memory in zip(readers, memories, strict=True):
                reader.reset(memory, torch.tensor([True, False]))
    assert int(memories[1].end[1]) > readers[1].n_slot


@pytest.mark.parametrize("name", CASES)
def test_segments_are_those_of_the_library(name: str) -> None:
    compare(both("fp32", **CASES[name]), 1e-5)


@pytest.mark.parametrize(("precision", "tolerance"), [("bf16", 0.05), ("fp16", 0.01)])
def test_narrow_numbers(precision: InferencePrecision, tolerance: float) -> None:
    compare(both(precision, clamp_len=9, pre_lnorm=True), tolerance)


def test_results_are_the_same_every_time() -> None:
    """Wherever the ring stands, because keys are read in the order of time."""
    _, fused = both("fp32", same_length=True)
    memories = [fused.empty_memory(1, end=end) for end in (0, 13)]
    for n in (12, 12, 5, 7):
        ids = tokens(1, n).to(DEVICE)
        one, other = (fused.read(ids, memory) for memory in memories)
        assert torch.equal(one, other)

"""Reading single tokens by fused kernels, in Triton's interpreter or on a GPU: the numbers of the library's functions."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers import assert_close, tiny_model
from tests.inference.test_reader import OPTIONS, tokens
from transformer_xl.inference.buffer import KeyValueMemory
from transformer_xl.inference.frozen import freeze, product
from transformer_xl.inference.reader import Reader
from transformer_xl.kernels.device import InferencePrecision

pytest.importorskip("triton", reason="the fused kernels are written in Triton, which is not installed")

from transformer_xl.inference import token_kernels as fused_token
from transformer_xl.inference.token_kernels import fused_product

pytestmark = [pytest.mark.usefixtures("true_bf16"), *([pytest.mark.gpu] if torch.cuda.is_available() else [])]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
N_SLOT = 48
CASES: dict[str, dict[str, Any]] = {
    **{name: {**OPTIONS[name], "n_head": 2} for name in ("shaw", "rotary", "alibi")},
    "same_length, averages": {"same_length": True, "shift": "averages", "d_model": 16, "pre_lnorm": True},
    "zero first memory, three heads of two layers": {"zero_first_memory": True, "n_head": 3, "n_layer": 2},
}


class Both:
    """The same rows, read by the library and by fused kernels."""

    def __init__(self, n_row: int, tolerance: float, *, precision: InferencePrecision = "fp32", **changes: Any) -> None:
        model = tiny_model(**{"n_layer": 1, "n_head": 1, "mem_len": 40, **changes}).to(DEVICE)
        self.library, self.fused = (Reader(model, tgt_len=8, precision=precision) for _ in range(2))
        self.library.interpret(fused=False)
        self.fused.interpret(fused=True)
        assert self.library.n_slot == N_SLOT
        self.memories = [self.library.empty_memory(n_row) for _ in range(2)]
        self.tolerance = tolerance

    @property
    def readers(self) -> list[tuple[Reader, KeyValueMemory]]:
        return list(zip((self.fused, self.library), self.memories, strict=True))

    def step(self, *active: bool) -> None:
        ids = tokens(len(active)).to(DEVICE)
        states = [reader.step(ids, memory, active=torch.tensor(active)) for reader, memory in self.readers]
        self.compare("states", states[0], states[1], active)
        heads = [reader.head(h) for (reader, _), h in zip(self.readers, states, strict=True)]
        for found, right in zip(*heads, strict=True):
            self.compare("scores", found, right, active)

    def read(self, n: int, row: int) -> None:
        """Read a segment: what is remembered is what the library would remember."""
        ids = tokens(1, n).to(DEVICE)
        found, right = (reader.read(ids, memory, rows=slice(row, row + 1)) for reader, memory in self.readers)
        self.compare("segment", found, right)

    def reset(self, *rows: bool) -> None:
        for reader, memory in self.readers:
            reader.reset(memory, torch.tensor(rows))

    def compare(self, what: str, found: Tensor, right: Tensor, active: tuple[bool, ...] | None = None) -> None:
        found, right = (x if active is None else x[list(active)] for x in (found, right))
        assert_close(what, found, right, self.tolerance)


def wander(both: Both) -> None:
    """From nothing, once around the ring, with rows that sit out and one that begins anew."""
    both.step(True, True)
    both.step(False, True)
    for n in (8, 8, 8, 8, 8, 6):
        both.read(n, row=1)
    both.step(True, True)  # at the first slot again
    both.reset(True, False)
    both.step(True, True)
    both.step(True, False)
    both.read(3, row=0)


@pytest.mark.parametrize("name", CASES)
def test_steps_are_those_of_the_library(name: str) -> None:
    wander(Both(2, 1e-5, **{**CASES[name], "mem_len": 40}))


@pytest.mark.parametrize(("width", "n_run", "tiles"), [(16, 100, 1), (16, 2, 2), (32, 100, 1), (32, 1, 2)])
def test_slots_are_divided_among_programs(width: int, n_run: int, tiles: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole tiles and parts of one, and runs that end beyond the ring; elsewhere there is a single run."""
    both, launched = Both(2, 1e-5, clamp_len=9), []
    monkeypatch.setattr(fused_token, "_TILE_ELEMENTS", 16 * width)
    monkeypatch.setattr(fused_token, "_MOST_PROGRAMS", n_run * 2 * both.library.config.n_head)
    launch = fused_token.launch

    def noted(kernel: Any, grid: tuple[int, ...], *tensors: Any, **constants: int) -> None:
        launched.append((constants.get("W"), constants.get("TILES")))
        launch(kernel, grid, *tensors, **constants)

    monkeypatch.setattr(fused_token, "launch", noted)
    wander(both)
    assert (width, tiles) in launched


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("bf16", 0.03), ("int8", 0.03), ("fp16", 0.005)])
def test_a_single_row_is_multiplied_by_weights_as_they_lie(precision: InferencePrecision, tolerance: float) -> None:
    both = Both(1, tolerance, precision=precision, cutoffs=(4, 9), div_val=2, pre_lnorm=True, final_norm=True)
    both.step(True)
    both.read(8, row=0)
    both.step(True)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize(("n_in", "n_out"), [(5, 3), (33, 9), (1030, 4)])
def test_products_with_one_row(precision: InferencePrecision, n_in: int, n_out: int) -> None:
    weight, x, bias = (torch.randn(shape, device=DEVICE) for shape in ((n_out, n_in), (1, n_in), (n_out,)))
    matrix = freeze(weight, precision)
    for offset in (None, bias):
        right = product(x, matrix, torch.float32, offset) if precision == "fp32" else x @ dense(matrix).T
        right = right if precision == "fp32" or offset is None else right + offset
        assert_close(precision, fused_product(x, matrix, torch.bfloat16, offset), right, 1e-5)


def dense(matrix: Any) -> Tensor:
    return matrix.weight.float() if matrix.scale is None else matrix.weight * matrix.scale.unsqueeze(1)


def test_results_are_the_same_every_time() -> None:
    both = Both(2, 1e-5)
    wander(both)
    other = KeyValueMemory.concatenate([both.memories[0]])
    ids = tokens(2).to(DEVICE)
    assert torch.equal(both.fused.step(ids, both.memories[0]), both.fused.step(ids, other))

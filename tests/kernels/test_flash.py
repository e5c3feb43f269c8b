"""The fused kernels against the equation: odd sizes, several tiles, every gradient; in Triton's interpreter, or on a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.helpers import assert_close
from tests.kernels.attention_case import Case
from transformer_xl.kernels.cpu_attention import matmul_attention
from transformer_xl.kernels.equation import hidden_keys, relative_attention
from transformer_xl.kernels.fused import n_padded
from transformer_xl.kernels.sdpa import sdpa_attention

pytest.importorskip("triton", reason="the fused kernels are written in Triton, which is not installed")

from transformer_xl.kernels import flash as fused
from transformer_xl.kernels import flash_kernels as fused_kernels
from transformer_xl.kernels.flash import fused_attention
from transformer_xl.kernels.flash_kernels import tiles_of

# where there is a GPU, `make test-gpu` runs the kernels on it
pytestmark = [
    pytest.mark.usefixtures("on_the_gpu", "small_tiles"),
    *([pytest.mark.gpu] if torch.cuda.is_available() else []),
]

SHAPES = {
    "one tile": {"B": 1, "T": 16, "M": 0, "N": 1, "H": 16},
    "whole tiles": {"B": 2, "T": 32, "M": 16, "N": 1, "H": 16},
    "odd sizes": {"B": 2, "T": 19, "M": 23, "N": 2, "H": 5},
    "no memory": {"B": 1, "T": 40, "M": 0, "N": 2, "H": 8},
    "one token": {"B": 3, "T": 1, "M": 3, "N": 1, "H": 8},
    "long memory": {"B": 2, "T": 5, "M": 70, "N": 1, "H": 8},
    "window": {"B": 1, "T": 37, "M": 7, "N": 1, "H": 4, "window": 9},
    "equal ages": {"B": 2, "T": 20, "M": 9, "N": 1, "H": 4, "ages": "equal"},
    "documents": {"B": 2, "T": 37, "M": 5, "N": 1, "H": 4, "ages": "documents"},
    "wide heads": {"B": 1, "T": 17, "M": 3, "N": 1, "H": 41},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_equal_the_equation(shape):
    case = Case.draw(**SHAPES[shape])
    expected = case.run(relative_attention)
    for what, actual in case.run(fused_attention).items():
        assert_close(what, actual, expected[what], 1e-5)


@pytest.mark.parametrize("attend", [fused_attention, relative_attention, matmul_attention, sdpa_attention])
def test_position_keys_may_come_with_the_zeros_that_kernels_read(attend):
    """As a model makes them on a GPU, once for all layers; the zeros have no gradient."""
    case = Case.draw(B=2, T=9, M=4, N=2, H=5)
    expected, r = case.run(relative_attention), case.inputs["r"].detach()
    case.inputs["r"] = F.pad(r, (0, 0, 0, 0, 0, n_padded(13) - 13)).requires_grad_()
    assert len(case.inputs["r"]) == 24
    actual = case.run(attend)
    assert not actual["r"][13:].any()
    for what, found in (actual | {"r": actual["r"][:13]}).items():
        assert_close(what, found, expected[what], 1e-5)


@pytest.mark.parametrize(("n_byte", "n_part"), [(2 * 2 * 9 * 16 * 4, 2), (2 * 9 * 16 * 4, 3), (1, 6)])
def test_rows_and_heads_are_computed_in_parts(n_byte, n_part, monkeypatch):
    """Two rows at a time, one row, and never less than one head of a row."""
    case = Case.draw(B=3, T=9, M=7, N=2, H=5, ages="documents")
    expected = case.run(relative_attention)
    monkeypatch.setattr(fused, "SCRATCH_BYTES", n_byte)
    assert len(list(fused.groups(case.inputs["q"], 16))) == n_part
    for what, actual in case.run(fused_attention).items():
        assert_close(what, actual, expected[what], 1e-5)


@pytest.mark.usefixtures("true_bf16")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_types_are_as_close_as_the_equation_in_them(dtype):
    case = Case.draw(B=2, T=43, M=14, N=2, H=16, dtype=dtype)
    expected, plain = case.to(torch.float32).run(relative_attention), case.run(relative_attention)
    for what, actual in case.run(fused_attention).items():
        error, allowed = ((x.float() - expected[what]).abs().mean() for x in (actual, plain[what]))
        assert actual.dtype == dtype
        assert error <= 1.5 * allowed, what


def test_results_are_the_same_every_time():
    case = Case.draw(B=2, T=18, M=15, N=1, H=4)
    first, second = (case.run(fused_attention) for _ in range(2))
    assert all(torch.equal(first[what], second[what]) for what in first)


@pytest.mark.parametrize("scratch", [1 << 20, 18 * 24 * 4])
def test_dropout_drops_the_same_weights_forward_and_backward(scratch, monkeypatch):
    """Values that are the unit vectors show the weights, and so which of them were dropped."""
    monkeypatch.setattr(fused, "SCRATCH_BYTES", scratch)
    B, T, M, N = 2, 18, 2, 2
    S = T + M
    case = Case.draw(B, T, M, N, S)
    shown = dict(case.inputs, values=torch.eye(S)[:, None].expand(B, S, N, S).requires_grad_())
    torch.manual_seed(3)
    weights_BTNS = Case(shown, case.first_BT, case.grad).attend(fused_attention, dropatt=0.3).detach()
    visible = ~hidden_keys(case.first_BT, S).unsqueeze(2).expand_as(weights_BTNS)
    kept = (weights_BTNS != 0) & visible
    assert 0.6 < kept.sum() / visible.sum() < 0.8
    assert not torch.equal(kept[0], kept[1])
    assert not torch.equal(kept[:, :, 0], kept[:, :, 1])

    def with_the_same_dropped(q, k, v, positions, *, first_BT, dropatt):
        eye = torch.eye(S)[:, None].expand(B, S, N, S)
        weights = relative_attention(q, k, eye, positions, first_BT=first_BT)
        return torch.einsum("btns,bsnh->btnh", weights * kept / (1 - dropatt), v)

    torch.manual_seed(3)
    actual = case.run(fused_attention, dropatt=0.3)
    for what, expected in case.run(with_the_same_dropped, dropatt=0.3).items():
        assert_close(what, actual[what], expected, 1e-5)
    assert not torch.equal(case.attend(fused_attention, dropatt=0.3), actual["out"])


def test_keys_may_lie_farther_apart_than_32_bits_count(tmp_path):
    """Offsets that wrap around would read before what they should."""
    apart, n_before = 2**30, 2**31
    size = n_before + 3 * apart
    if torch.cuda.is_available():
        everything = torch.zeros(size, dtype=torch.float16)
    else:
        with (tmp_path / "sparse").open("wb") as file:
            file.truncate(2 * size)
        everything = torch.from_file(str(tmp_path / "sparse"), shared=True, size=size, dtype=torch.float16)
    far = everything.as_strided((1, 3, 1, 1), (1, apart, 1, 1), n_before)
    case = Case.draw(B=1, T=3, M=0, N=1, H=1, dtype=torch.float16)
    with torch.no_grad():
        expected = case.attend(fused_attention)
        for name in ("k", "values"):
            near = case.inputs[name]
            case.inputs[name] = far.copy_(near)
            assert torch.equal(case.attend(fused_attention), expected)
            case.inputs[name] = near


def test_rows_and_heads_are_counted_where_a_grid_has_room(monkeypatch):
    """A GPU takes 65,535 programs along the second and third axis, and 2^31 along the first."""
    grids = []
    for name in ("query_kernel", "forward_kernel", "key_gradient_kernel", "query_gradient_kernel"):
        monkeypatch.setattr(fused_kernels, name, Noted(grids))
    Case.draw(B=7, T=40, M=20, N=3, H=4).run(fused_attention)
    assert grids == [(63,), (42,), (63,), (42,), (63,)]


class Noted:
    """Stands for a kernel, and notes its grid."""

    def __init__(self, grids):
        self.grids = grids

    def __getitem__(self, grid):
        self.grids.append(grid)
        return lambda *args, **named: None


@pytest.mark.parametrize(("set_as", "expected"), [("tf32", "tf32"), ("ieee", "ieee")])
def test_products_in_fp32_are_as_exact_as_pytorchs(set_as, expected):
    """Whichever property set it: PyTorch's older one cannot be read once the newer one was written."""
    q, before = torch.zeros(1, 1, 1, 1), torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = set_as
    try:
        assert fused.Launcher.of(q, q, 0.0).precision == expected
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


@pytest.mark.filterwarnings("ignore")  # of the compiler, about its own code
def test_a_compiled_layer_calls_the_kernels_as_they_are():
    case = Case.draw(B=1, T=3, M=2, N=1, H=4)
    expected = case.run(fused_attention)
    compiled = torch.compile(lambda q, *rest, **named: fused_attention(q * 1, *rest, **named), backend="aot_eager")
    for what, actual in case.run(compiled).items():
        assert torch.equal(actual, expected[what]), what


LOADING = """
import sys
import torch
from transformer_xl.kernels import flash as fused
from transformer_xl.kernels.equation import Positions
fused.Launcher.__call__ = lambda *_: None  # not every interpreter of Triton knows all that the kernels say
q, u, first = torch.ones(1, 2, 1, 4), torch.zeros(1, 4), torch.zeros(1, 2, dtype=torch.int64)
fused.fused_attention(q, q, q, Positions(u, u, q[0]), first_BT=first)
print("torch._dynamo" in sys.modules)
"""


def test_kernels_do_without_the_compiler_of_layers():
    """It takes a second to load, which whoever scores a text or continues a prompt would wait for."""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-W", "ignore", "-c", LOADING]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_wide_heads_in_fp32_take_smaller_tiles():
    assert tiles_of(128, torch.float32) < tiles_of(64, torch.float32) < tiles_of(64, torch.bfloat16)


@pytest.mark.slow
def test_kernels_compile_for_gpus():
    """The compiler may refuse what the interpreter accepts, and it needs no GPU to do so."""
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    script = Path(__file__).parents[2] / "benchmarks" / "gpu" / "registers.py"
    command = [sys.executable, "-W", "ignore", str(script), "--dtypes", "bf16", "--dropout"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    names = {name for name in dir(fused_kernels) if name.endswith("_kernel")} - {"phase_kernel"}
    assert len(names) == 4
    assert all(name.removesuffix("_kernel") in done.stdout for name in names)

"""A backend is chosen by name or by what works; one that cannot run here says why."""

import sys

import pytest
import torch

from tests.helpers import tiny_model
from transformer_xl.batch import Rows
from transformer_xl.errors import ConfigError
from transformer_xl.kernels import fused
from transformer_xl.kernels.choose import choose_backend
from transformer_xl.kernels.cpu_attention import matmul_attention
from transformer_xl.kernels.equation import relative_attention
from transformer_xl.model.call import Execution

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def compiling(monkeypatch):
    monkeypatch.setattr(fused, "_is_interpreted", lambda: False)


def test_names():
    assert choose_backend("equation", CPU) is relative_attention
    assert choose_backend("auto", CPU) is choose_backend("matmul", CPU) is matmul_attention
    assert choose_backend("auto", CPU, by_keys=False) is matmul_attention
    with pytest.raises(ConfigError, match="unknown attention backend 'tritn'; did you mean 'triton'"):
        choose_backend("tritn", CPU)


@pytest.mark.parametrize(
    ("is_capable_of", "name", "kind", "expected"),
    [
        ((8, 0), "auto", {}, "fused_attention"),
        ((8, 0), "triton", {"d_head": 128}, "fused_attention"),
        ((8, 0), "triton", {"d_head": 256, "dtype": torch.bfloat16}, "fused_attention"),
        ((8, 0), "auto", {"dtype": torch.float64}, "matmul_attention"),
        ((7, 5), "auto", {}, "matmul_attention"),
        ((7, 5), "triton", {}, r"it needs compute capability 8\.0 .* Old GPU is older; use 'auto'"),
        ((8, 0), "auto", {"by_keys": False}, "sdpa_attention"),
        ((8, 0), "triton", {"by_keys": False}, "it computes positions as the paper does, and this kind"),
        ((8, 0), "auto", {"d_head": 129}, "matmul_attention"),
        ((8, 0), "triton", {"d_head": 129}, r".* d_head \(129\) does not fit .*; 128 do"),
        ((8, 0), "auto", {"d_head": 257, "dtype": torch.bfloat16}, "matmul_attention"),
        ((8, 0), "triton", {"d_head": 257, "dtype": torch.bfloat16}, r".* d_head \(257\) does not fit .*; 256 do"),
    ],
)
def test_a_gpu_gets_the_fused_kernels_where_they_run(capability, is_capable_of, name, kind, expected):
    capability[:] = is_capable_of
    if expected.endswith("_attention"):
        assert choose_backend(name, GPU, **kind).__name__ == expected
    else:
        with pytest.raises(ConfigError, match=f"^attention backend 'triton' cannot run here: {expected}"):
            choose_backend(name, GPU, **kind)


def test_other_makers_count_their_capabilities_otherwise(capability, monkeypatch):
    capability[:] = [7, 5]
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert choose_backend("auto", GPU) is choose_backend("triton", GPU)


def test_triton_needs_a_gpu(compiling):
    pytest.importorskip("triton", reason="Triton is not installed")
    with pytest.raises(ConfigError, match="'triton' cannot run here: it is compiled for a GPU, and the model is on cpu"):
        choose_backend("triton", CPU)


def test_triton_is_optional(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(fused, "find_spec", lambda name: None)
    assert choose_backend("auto", GPU) is matmul_attention
    with pytest.raises(ConfigError, match=r"Triton is not installed \(pip install triton\)"):
        choose_backend("triton", GPU)


def test_model_says_how_wide_its_heads_are_and_of_what_type():
    pytest.importorskip("triton", reason="Triton is not installed")
    for model, complaint in ((tiny_model(d_head=130), r"d_head \(130\)"), (tiny_model().double(), "fp32 at most")):
        with pytest.raises(ConfigError, match=complaint):
            model(torch.zeros(1, 2, dtype=torch.int64), execution=Execution("triton"))


@pytest.mark.parametrize("name", ["sdpa", "triton"])
def test_model_reads_with_it(name):
    if name == "triton":
        pytest.importorskip("triton", reason="Triton is not installed")
    model = tiny_model(same_length=True, clamp_len=3)
    ids = torch.randint(13, (2, 21))

    def read(backend):
        mems = model(ids[:, :9], execution=Execution(backend)).mems.reset(torch.tensor([True, False]))
        return model(ids[:, 9:], mems=mems, rows=Rows(n_pad=torch.tensor([0, 3])), execution=Execution(backend)).logits

    with torch.no_grad():
        real = torch.arange(12) >= torch.tensor([[0], [3]])
        assert torch.allclose(read(name)[real], read("equation")[real], atol=1e-5)

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
    with pytest.raises(ConfigError, match="unknown attention backend 'tritn'; did you mean 'triton'"):
        choose_backend("tritn", CPU)


def test_model_says_that_its_backend_is_unknown():
    model = tiny_model()
    with pytest.raises(ConfigError, match="unknown attention backend 'flash'; known: auto, equation, matmul, sdpa, triton"):
        model(torch.zeros(1, 2, dtype=torch.int64), execution=Execution("flash"))


def test_a_gpu_gets_the_fused_kernels(capability):
    from transformer_xl.kernels.flash import fused_attention

    assert choose_backend("auto", GPU) is choose_backend("triton", GPU) is fused_attention


def test_an_old_gpu_or_fp64_gets_matmul(capability):
    assert choose_backend("auto", GPU, dtype=torch.float64) is matmul_attention
    capability[:] = [7, 5]
    assert choose_backend("auto", GPU) is matmul_attention
    with pytest.raises(
        ConfigError, match=r"'triton' cannot run here: it needs compute capability 8\.0 .* Old GPU is older; use 'auto'"
    ):
        choose_backend("triton", GPU)


def test_kinds_with_other_positions_get_no_fused_kernels(capability):
    from transformer_xl.kernels.sdpa import sdpa_attention

    assert choose_backend("auto", GPU, by_keys=False) is sdpa_attention
    assert choose_backend("auto", CPU, by_keys=False) is matmul_attention
    with pytest.raises(ConfigError, match="'triton' cannot run here: it computes positions as the paper does, and this kind"):
        choose_backend("triton", GPU, by_keys=False)


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


def test_triton_has_no_fp64():
    pytest.importorskip("triton", reason="Triton is not installed")
    with pytest.raises(ConfigError, match="fp32 at most"):
        choose_backend("triton", CPU, dtype=torch.float64)


@pytest.mark.parametrize(("dtype", "widest"), [(torch.float32, 128), (torch.bfloat16, 256)])
def test_triton_has_no_room_for_very_wide_heads(capability, dtype, widest):
    choose_backend("triton", GPU, dtype=dtype, d_head=widest)
    with pytest.raises(ConfigError, match=rf"cannot run here: .* d_head \({widest + 1}\) does not fit .*; {widest} do"):
        choose_backend("triton", GPU, dtype=dtype, d_head=widest + 1)
    assert choose_backend("auto", GPU, dtype=dtype, d_head=widest + 1) is matmul_attention


def test_model_says_how_wide_its_heads_are():
    pytest.importorskip("triton", reason="Triton is not installed")
    model = tiny_model(d_head=130)
    with pytest.raises(ConfigError, match=r"d_head \(130\)"):
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

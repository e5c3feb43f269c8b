"""Figures of data sheets, those that the user knows better, and probes: bytes and operations over the time that they took."""

import itertools

import pytest
import torch

from tests.tools.clock import Clock
from transformer_xl.errors import ConfigError
from transformer_xl.tools.hardware import gpu, matmul_rate, memory_bandwidth, with_figures

CPU = torch.device("cpu")


def test_data_sheets_and_what_is_known_better() -> None:
    assert gpu("H100", "auto").precision == "bf16"
    assert gpu("v100", "auto").precision == "fp16"
    assert gpu("a100", "fp32").flops == 19.5e12
    changed = with_figures(gpu("h100", "auto"), flops=500, bandwidth=None, memory=96)
    assert (changed.flops, changed.memory) == (500e12, 96e9)
    assert changed.origin == "data sheet; flops, memory as given"
    assert changed.bandwidth == gpu("h100", "auto").bandwidth
    with pytest.raises(ConfigError, match=r"unknown GPU 'h1000'; did you mean 'h100'\?; or give --flops"):
        gpu("h1000", "auto")


def test_bandwidth_is_bytes_of_the_fastest_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, takes, read = Clock(), iter([3.0, 0.5, 2.0, 0.25, 9.0]), []
    summed = torch.Tensor.sum

    def slow_sum(x: torch.Tensor) -> torch.Tensor:
        clock.pass_(next(takes))
        read.append(x)
        return summed(x)

    monkeypatch.setattr(torch.Tensor, "sum", slow_sum)
    assert memory_bandwidth(CPU, n_bytes=4096, clock=clock) == 4096 / 0.25
    assert next(takes, None) is None
    assert all(x.numel() * 4 == 4096 and (x == 1).all() for x in read)


def test_bandwidth_reads_more_than_caches_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    def no_ones(n: int, device: torch.device) -> torch.Tensor:
        sizes.append(n * 4)
        return torch.zeros(1)

    monkeypatch.setattr(torch, "ones", no_ones)
    memory_bandwidth(CPU)
    assert sizes == [512 * 2**20]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matmul_rate_grows_matrices_until_they_take_a_while(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    clock, shapes = Clock(), []
    takes = {512: 0.001, 1024: 0.002, 2048: 0.02, 4096: 0.001}

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        assert a.shape == b.shape
        assert a.dtype == b.dtype == dtype
        shapes.append(len(a))
        clock.pass_(takes[len(a)])
        return a

    monkeypatch.setattr(torch.Tensor, "__matmul__", product)
    assert matmul_rate(CPU, dtype, clock=clock) == pytest.approx(max(2 * 1024**3 / 0.002, 2 * 2048**3 / 0.02))
    assert [size for size, _ in itertools.groupby(shapes)] == [512, 1024, 2048]

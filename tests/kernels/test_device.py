import contextlib
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from transformer_xl.errors import ConfigError
from transformer_xl.kernels.device import autocast, choose_device, choose_precision

CPU = torch.device("cpu")


def test_auto_takes_a_gpu_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == CPU
    assert choose_device("cpu") == CPU


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("gpu", "unknown device 'gpu'; did you mean 'cuda'?"),
        ("foo", "unknown device 'foo'; known: auto, cpu, cuda, cuda:N, mps"),
        ("cpu:x", "unknown device 'cpu:x'; did you mean 'cpu'?"),
        ("", "unknown device ''; known: auto, cpu, cuda, cuda:N, mps"),
        ("hpu", "this machine cannot compute on device 'hpu'"),
        ("cuda:99", "this machine cannot compute on device 'cuda:99'"),
    ],
)
def test_a_device_that_is_not_here_is_one_short_line(name: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(complaint)) as caught:
        choose_device(name)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 150


OLD = "The NVIDIA driver on your system is too old (found version 11040)"
ADVICE = ". Please update your GPU driver by downloading and installing a new version from the URL: http://www.nvidia.com/x"


def test_auto_says_in_a_line_why_it_takes_no_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Torch warns with a path of its own and tells programmers what to do."""

    def is_available() -> bool:
        warnings.warn(f"CUDA initialization: {OLD}{ADVICE} (Triggered internally at CUDAFunctions.cpp:119.)", stacklevel=1)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    assert choose_device("auto") == CPU
    assert capsys.readouterr().err == (f"warning: the GPU cannot be used ({OLD}), so this computes on the CPU\n")
    monkeypatch.setenv("RANK", "1")  # the first process says it for all
    assert choose_device("auto") == CPU
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("capabilities", "expected", "reason"),
    [
        ({"amx_bf16": True, "avx512_bf16": True}, "bf16", "amx_bf16"),
        ({"avx512_bf16": True}, "bf16", "avx512_bf16"),
        ({"bf16": True}, "bf16", "bf16"),
        ({"avx512_bf16": False}, "fp32", "has no bf16 instructions"),
        ({}, "fp32", "has no bf16 instructions"),
    ],
)
def test_auto_on_a_cpu_is_what_it_multiplies_natively(
    capabilities: dict[str, Any], expected: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    precision, why = choose_precision("auto", CPU)
    assert precision == expected
    assert reason in why


@pytest.mark.parametrize("words", ["flags : fpu avx512_bf16", "Features : fp asimd bf16 i8mm", "flags : fpu avx", None])
def test_linux_says_what_torch_does_not(words: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)  # as in torch 2.10
    monkeypatch.setattr("transformer_xl.kernels.device._CPUINFO", tmp_path / "cpuinfo")
    if words:
        (tmp_path / "cpuinfo").write_text(f"processor : 0\n{words}\n")
    assert choose_precision("auto", CPU)[0] == ("bf16" if words and "bf16" in words else "fp32")


@pytest.mark.parametrize(("capability", "expected"), [((8, 0), "bf16"), ((9, 0), "bf16"), ((7, 5), "fp16")])
def test_auto_on_a_gpu(capability: tuple[int, int], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU X")
    precision, why = choose_precision("auto", torch.device("cuda"))
    assert precision == expected
    assert why.startswith("GPU X multiplies")


def test_auto_elsewhere_and_what_is_asked_for() -> None:
    assert choose_precision("auto", torch.device("mps"))[0] == "fp32"
    for name in ("fp32", "bf16", "fp16"):
        assert choose_precision(name, CPU) == (name, "as set")


def test_products_are_made_in_the_precision_and_nothing_else() -> None:
    assert isinstance(autocast(CPU, "fp32"), contextlib.nullcontext)
    x = torch.ones(2, 2)
    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        with autocast(CPU, precision):  # pyright: ignore[reportArgumentType]
            assert (x @ x).dtype == dtype
            assert (x + x).dtype == torch.float32

"""What tests of kernels share: where they run, with what tiles, and bf16 in Triton's interpreter."""

import os
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def first_product() -> None:
    """Multiply once on the GPU: PyTorch warns where the first product of a process is autograd's, in a thread of its own."""
    if not torch.cuda.is_available():
        return
    with warnings.catch_warnings(action="ignore"):
        one = torch.ones(1, 1, device="cuda", requires_grad=True)
        (one @ one).sum().backward()
        torch.cuda.synchronize()


@pytest.fixture(scope="session", autouse=True)
def patched_once() -> None:
    """Let Triton's interpreter patch its language once; by itself it does so at every launch, which takes half of its time."""
    if os.environ.get("TRITON_INTERPRET") != "1" or find_spec("triton") is None:
        return
    from triton.runtime import interpreter

    patch, patched = interpreter._patch_lang, set[str]()

    def patch_once(function: Any) -> Any:
        module = function.__globals__["__name__"]
        if module not in patched:
            patched.add(module)
            patch(function)
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = patch_once


@pytest.fixture
def on_the_gpu() -> Iterator[None]:
    """Make tensors on the GPU if there is one."""
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        yield


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let short sequences have several tiles."""
    from transformer_xl.kernels import flash as fused
    from transformer_xl.kernels.flash_kernels import Tile, Tiles

    wide, high, square = Tile(16, 32, 4), Tile(32, 16, 4), Tile(16, 16, 4)
    tiles = Tiles(forward=high, queries=square, keys=wide)
    monkeypatch.setattr(fused, "tiles_of", lambda d_head, dtype, **_: tiles)


@pytest.fixture
def capability(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """As if there were a GPU, of the compute capability that this list holds; nothing is sent to it."""
    pytest.importorskip("triton", reason="Triton is not installed")
    capability = [8, 0]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: tuple(capability))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Old GPU")
    return capability


@pytest.fixture
def true_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Triton's interpreter compute with bf16 as a GPU does; by itself it multiplies bits as integers, and cuts them off."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    create_dot, cast_impl = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl

    def widened(self: Any, a: Any, b: Any, *more: Any) -> Any:
        a, b = (self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return create_dot(self, a, b, *more)

    def rounded(self: Any, x: Any, dtype: Any) -> Any:
        if (x.dtype.scalar, dtype.scalar) != (tl.float32, tl.bfloat16):
            return cast_impl(self, x, dtype)
        bits = torch.from_numpy(np.ascontiguousarray(x.data)).bfloat16().view(torch.int16).numpy().view(np.uint16)
        return TensorHandle(bits, tl.bfloat16)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", widened)
    monkeypatch.setattr(InterpreterBuilder, "cast_impl", rounded)

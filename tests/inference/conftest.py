"""Kernels of inference are tested where, and with what, those of training are."""

from tests.kernels.conftest import first_product, on_the_gpu, patched_once, small_tiles, true_bf16

__all__ = ["first_product", "on_the_gpu", "patched_once", "small_tiles", "true_bf16"]

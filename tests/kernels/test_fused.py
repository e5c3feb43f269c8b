"""Keys and values are two halves of one product, also where their gradients are not copied."""

import pytest
import torch

from transformer_xl.kernels import fused
from transformer_xl.kernels.fused import halves


def test_halves_can_be_differentiated_by_functions() -> None:
    x = torch.randn(2, 3, 2, 4, 5)
    found = torch.func.grad(lambda x: sum(i * half.square().sum() for i, half in enumerate(halves(x), 1)))(x)
    torch.testing.assert_close(found, torch.stack([2 * x[:, :, 0], 4 * x[:, :, 1]], 2))


def test_gradients_of_halves_that_lie_side_by_side_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "is_fused", lambda x: True)
    x = torch.randn(2, 3, 2, 4, 5, requires_grad=True)
    for both in (torch.randn(2, 3, 2, 4, 5), torch.randn(2, 2, 3, 4, 5).permute(1, 2, 0, 3, 4)):
        (found,) = torch.autograd.grad(halves(x), x, grad_outputs=both.unbind(2))
        assert torch.equal(found, both)
        assert (found.data_ptr() == both.data_ptr()) == both.is_contiguous()

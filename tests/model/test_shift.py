"""Means over the tokens right before, over several blocks and documents; the loops of the equation test the rest."""

import pytest
import torch
from torch.autograd import gradcheck

from transformer_xl.model.shift import BLOCK, Shift, faded


@pytest.mark.parametrize("n_token", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 7])
@pytest.mark.parametrize("reach", [3, 5])
@pytest.mark.parametrize("documents", [False, True])
def test_means_are_those_of_a_loop(n_token: int, reach: int, documents: bool) -> None:
    h_BLD = torch.randn(2, reach + n_token, 4, dtype=torch.float64)
    first_BT = torch.zeros(2, n_token, dtype=torch.int64)
    if documents:
        first_BT[0, n_token // 2 :] = reach + n_token // 2
        first_BT[1] = 2
    expected = torch.zeros(2, n_token, 4, dtype=torch.float64)
    for b in range(2):
        for t in range(n_token):
            for k in range(1, reach + 1):
                if reach + t - k >= first_BT[b, t]:
                    expected[b, t] += 0.7 * 0.3 ** (k - 1) * h_BLD[b, reach + t - k]
    found = faded(h_BLD, 0.3, first_BT if documents else None, reach=reach)
    torch.testing.assert_close(found, expected)


def test_gradients_of_several_groups_and_blocks() -> None:
    shift = Shift(3)
    h_BLD = torch.randn(1, 3 + BLOCK + 2, 8, dtype=torch.float64, requires_grad=True)
    assert shift(h_BLD).shape == (1, BLOCK + 2, 4)
    assert gradcheck(shift, (h_BLD,), fast_mode=True)


def test_its_kernel_says_what_it_does() -> None:
    shift = Shift(3)
    own, taps = shift.kernel(8)
    h_BLD = torch.randn(1, 4, 8, dtype=torch.float64)
    expected = own * h_BLD[0, -1] + sum(tap * h_BLD[0, -1 - k] for k, tap in enumerate(taps, 1))
    torch.testing.assert_close(shift.mix(h_BLD[:, -1:], shift(h_BLD))[0, 0], expected)

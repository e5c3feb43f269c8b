"""Muon in fp32 is the library's Muon but for the precision of its orthogonalization."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from transformer_xl.training import muon
from transformer_xl.training.muon import Muon, orthogonalized

SETTINGS: dict[str, Any] = {"lr": 0.1, "momentum": 0.8, "weight_decay": 0.5}
SHAPES = [(6, 4), (4, 9), (5, 5), (1, 3)]


def weights(shapes: list[tuple[int, int]] = SHAPES) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def updated(optimizer: torch.optim.Optimizer, parameters: list[Tensor], n_step: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    for step in range(n_step):
        for i, parameter in enumerate(parameters):
            parameter.grad = None if (step, i) == (1, 2) else torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


@pytest.mark.parametrize("in_bf16", [True, False])
def test_it_is_the_library_s(in_bf16: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp32, the library's with its orthogonalization exchanged; in bf16, the library's, bit by bit."""
    ours, theirs = weights(), weights()
    monkeypatch.setattr(muon, "choose_precision", lambda *_: ("bf16" if in_bf16 else "fp32", ""))
    if not in_bf16:
        monkeypatch.setattr("torch.optim._muon._zeropower_via_newtonschulz", lambda update, *_: orthogonalized(update))
    library = torch.optim.Muon(theirs, adjust_lr_fn="match_rms_adamw", **SETTINGS)
    own = Muon(ours, **SETTINGS)
    for one, other in zip(updated(own, ours), updated(library, theirs), strict=True):
        torch.testing.assert_close(one, other, rtol=0 if in_bf16 else 1e-6, atol=0 if in_bf16 else 1e-7)
    assert own.state_dict()["state"].keys() == library.state_dict()["state"].keys()


@pytest.mark.parametrize("shape", SHAPES)
def test_orthogonalized_is_what_the_library_computes_more_exactly(shape: tuple[int, int]) -> None:
    from torch.optim._muon import DEFAULT_A, DEFAULT_B, DEFAULT_C, _zeropower_via_newtonschulz

    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    theirs = _zeropower_via_newtonschulz(matrix, (DEFAULT_A, DEFAULT_B, DEFAULT_C), 5, 1e-7)
    ours = orthogonalized(matrix)
    torch.testing.assert_close(ours, theirs.float(), rtol=0, atol=0.05)
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    singular = u.T @ ours @ v.T  # diagonal: the singular vectors are those of the matrix
    torch.testing.assert_close(singular, torch.diag(singular.diagonal()), rtol=0, atol=1e-4)
    assert 0.6 < float(singular.diagonal().min()) <= float(singular.diagonal().max()) < 1.3


def test_nothing_is_divided_by_zero() -> None:
    assert torch.equal(orthogonalized(torch.zeros(2, 3)), torch.zeros(2, 3))


def test_matrices_multiplied_together_are_the_library_s_within_the_rounding_of_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several shapes and rates."""
    monkeypatch.setattr(muon, "choose_precision", lambda *_: ("bf16", ""))
    shapes = [(12, 8), (8, 12), (5, 5), (8, 12), (1, 3), (12, 8)]
    ours, theirs = weights(shapes), weights(shapes)
    groups: list[dict[str, Any]] = [{"params": ours[:4]}, {"params": ours[4:], "lr": 0.2}]  # as with a rate for each layer
    library = torch.optim.Muon(
        [{"params": theirs[:4]}, {"params": theirs[4:], "lr": 0.2}], adjust_lr_fn="match_rms_adamw", **SETTINGS
    )
    own = Muon(groups, **SETTINGS)
    own.found_inf = torch.zeros(())
    for one, other in zip(updated(own, ours), updated(library, theirs), strict=True):
        # three steps of the lengths lr · 0.2 √max(sides), whose elements are at most 1.3 and rounded to 8 bits about ten times
        torch.testing.assert_close(one, other, rtol=0, atol=3 * 0.2 * 0.2 * math.sqrt(12) * 0.03)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own.state[mine]["momentum_buffer"], library.state[other]["momentum_buffer"])

"""Cross entropy as fused kernels against PyTorch's; in Triton's interpreter, or on a GPU."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="the fused kernels are written in Triton, which is not installed")

from transformer_xl.kernels import nll as fused_nll
from transformer_xl.kernels.nll import FusedNll

pytestmark = [
    pytest.mark.usefixtures("on_the_gpu", "true_bf16"),
    *([pytest.mark.gpu] if torch.cuda.is_available() else []),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n_row", "n_score", "width"), [(5, 37, 16), (3, 64, 64), (1, 1, 16), (4, 129, 4096)])
def test_losses_and_gradients_are_those_of_pytorch(n_row, n_score, width, dtype, monkeypatch):
    monkeypatch.setattr(fused_nll, "_WIDTH", width)
    scores = (torch.randn(n_row, n_score + 3) * 4).to(dtype)[:, :n_score]  # rows lie apart
    labels = torch.randint(n_score, (n_row, 3))[:, 1]  # so do labels
    labels[0] = -100 if n_row > 1 else 0
    weights = torch.randn(n_row)
    found, expected = (scores.detach().clone().requires_grad_() for _ in range(2))
    nats = FusedNll.apply(found, labels)
    right = F.cross_entropy(expected.float(), labels, reduction="none", ignore_index=-100)
    torch.testing.assert_close(nats, right, atol=1e-5, rtol=1e-5)
    (nats * weights).sum().backward()
    (right * weights).sum().backward()
    rounding = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}[dtype]
    torch.testing.assert_close(found.grad, expected.grad, atol=1e-6, rtol=rounding)


@pytest.mark.filterwarnings("ignore:invalid value")  # numpy, in the interpreter
def test_rows_without_a_label_get_no_gradient_whatever_their_scores_are():
    scores = torch.tensor([[1.0, float("inf")], [float("nan"), 0.0], [1.0, 2.0]]).requires_grad_()
    FusedNll.apply(scores, torch.tensor([-100, -100, 0])).sum().backward()
    assert scores.grad is not None
    assert torch.equal(scores.grad[:2], torch.zeros(2, 2))


def test_scores_that_are_minus_infinity_take_no_part():
    """Columns that only fill a product up to a width."""
    scores = torch.randn(3, 9)
    filled = F.pad(scores, (0, 7), value=float("-inf")).bfloat16().requires_grad_()
    nats = FusedNll.apply(filled, torch.tensor([0, 8, 4]))
    torch.testing.assert_close(nats, F.cross_entropy(scores.bfloat16().float(), torch.tensor([0, 8, 4]), reduction="none"))
    nats.sum().backward()
    assert filled.grad is not None
    assert torch.equal(filled.grad[:, 9:], torch.zeros(3, 7, dtype=torch.bfloat16))
    assert filled.grad.isfinite().all()

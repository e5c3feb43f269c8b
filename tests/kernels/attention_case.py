"""Random inputs of an attention function, and its outputs and gradients."""

from dataclasses import dataclass

import torch
from torch import Tensor

from transformer_xl.kernels.choose import Attention


@dataclass
class Case:
    """Arguments of one call; the keys of a row begin where its memory does."""

    inputs: dict[str, Tensor]
    first_BT: Tensor  # noqa: N815
    grad: Tensor

    @classmethod
    def draw(
        cls, B: int, T: int, M: int, N: int, H: int, *, window: int | None = None, ages: str = "unequal", dtype=torch.float32
    ) -> "Case":
        """Draw a case; `ages` of rows: full, equal (one row of `first_BT`), unequal, or documents (begun in the segment)."""
        shapes = {"q": (B, T, N, H), "k": (B, M + T, N, H), "v": (B, M + T, N, H), "r": (M + T, N, H), "u": (N, H), "w": (N, H)}
        inputs = {name: torch.randn(shape).to(dtype).requires_grad_() for name, shape in shapes.items()}
        own_T = torch.arange(M, M + T)
        first_BT = torch.zeros(1 if ages == "equal" else B, T, dtype=torch.int64)
        if ages in ("unequal", "documents"):
            first_BT = first_BT + torch.randint(0, M + 1, (B, 1))
        if ages == "documents":
            first_BT = torch.where(torch.rand(B, T) < 0.2, own_T, first_BT).cummax(1).values
        if window is not None:
            first_BT = torch.maximum(first_BT, own_T - window + 1)
        return cls(inputs, torch.minimum(first_BT, own_T), torch.randn(B, T, N, H).to(dtype))

    def to(self, dtype: torch.dtype) -> "Case":
        """Return the same in another type."""
        inputs = {name: x.detach().to(dtype).requires_grad_() for name, x in self.inputs.items()}
        return Case(inputs, self.first_BT, self.grad.to(dtype))

    def attend(self, attend: Attention, *, dropatt: float = 0.0) -> Tensor:
        """Return the output."""
        x, first_BT = self.inputs, self.first_BT
        positions = {"r_w_bias": x["u"], "r_r_bias": x["w"], "first_BT": first_BT}
        return attend(x["q"], x["k"], x["v"], x["r"], **positions, dropatt=dropatt)

    def run(self, attend: Attention, *, dropatt: float = 0.0) -> dict[str, Tensor]:
        """Return the output and the gradients of all inputs."""
        out = self.attend(attend, dropatt=dropatt)
        grads = torch.autograd.grad(out, list(self.inputs.values()), self.grad)
        return {"out": out.detach(), **dict(zip(self.inputs, grads, strict=True))}

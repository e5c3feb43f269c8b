"""Random inputs of an attention function, and its outputs and gradients."""

from dataclasses import dataclass

import torch
from torch import Tensor

from transformer_xl.kernels.choose import Attention
from transformer_xl.kernels.equation import Positions


@dataclass
class Case:
    """Arguments of one call; the keys of a row begin where its memory does."""

    inputs: dict[str, Tensor]
    first_BT: Tensor  # noqa: N815
    grad: Tensor

    @classmethod
    def draw(
        cls,
        B: int,
        T: int,
        M: int,
        N: int,
        H: int,
        *,
        window: int | None = None,
        ages: str = "unequal",
        dtype=torch.float32,
        parts: str = "rvu",
    ) -> "Case":
        """Draw a case.

        `ages` of rows: full, equal (one row of `first_BT`), unequal, or documents (begun in the segment). `parts`: those of
        `Positions` that it has.
        """
        of_positions = {"r": (M + T, N, H), "u": (N, H), "v": (N, H), "b": (M + T, N)}
        shapes = {"q": (B, T, N, H), "k": (B, M + T, N, H), "values": (B, M + T, N, H)}
        shapes |= {name: of_positions[name] for name in parts}
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
        positions = Positions(x.get("u"), x.get("v"), x.get("r"), x.get("b"))
        return attend(x["q"], x["k"], x["values"], positions, first_BT=first_BT, dropatt=dropatt)

    def run(self, attend: Attention, *, dropatt: float = 0.0) -> dict[str, Tensor]:
        """Return the output and the gradients of all inputs."""
        out = self.attend(attend, dropatt=dropatt)
        grads = torch.autograd.grad(out, list(self.inputs.values()), self.grad)
        return {"out": out.detach(), **dict(zip(self.inputs, grads, strict=True))}

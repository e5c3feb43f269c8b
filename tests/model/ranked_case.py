"""Random inputs of XLNet's attention, and its outputs and gradients."""

from dataclasses import dataclass

import torch
from torch import Tensor

from transformer_xl.kernels.choose import Attention
from transformer_xl.model.attention.two_streams import Sight

UNSEEN = torch.iinfo(torch.int64).max


@dataclass
class Case:
    """Arguments of one call, and the gradient of its result."""

    inputs: dict[str, Tensor]
    sight: Sight
    grad: Tensor

    @classmethod
    def draw(
        cls, B: int, T: int, M: int, K: int, N: int, H: int, *, sees: str = "some", n_text: int = 3, both: bool = True,
        dtype: torch.dtype = torch.float64,
    ) -> "Case":  # fmt: skip
        """Draw a case; `sees` some, all, or for many queries nothing; `both` directions of reading in one batch.

        Half of the memory is padding or unused.
        """
        S, Q = M + T, T + K
        shapes = {"q": (B, Q, N, H), "k": (B, S, N, H), "v": (B, S, N, H), "r": (1 + both, S + T - 1, N, H)}
        shapes |= {"r_w_bias": (N, H), "r_r_bias": (N, H), "r_s_bias": (N, H), "seg_embed": (2, N, H)}
        inputs = {name: torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_() for name, shape in shapes.items()}
        rank, below = torch.randint(-1, 4, (B, S)), torch.randint(-1 if sees == "nothing" else 0, 5, (B, Q))
        rank[:, -1] = -1  # so that those who see anything of a rank below 0 exist
        if sees == "all":
            rank, below = torch.full((B, S), -1), torch.zeros(B, Q, dtype=torch.int64)
        rank[:, : M // 2] = UNSEEN
        place = torch.cat([torch.arange(T).expand(B, T), torch.randint(0, T, (B, K))], dim=1)
        texts = (torch.randint(n_text, (B, Q)) * 3 - 1, torch.randint(n_text, (B, S)) * 3 - 1) if n_text else (None, None)
        is_backward = torch.arange(B) % 3 == 1 if both else None
        return cls(inputs, Sight(place, below, rank, *texts, is_backward), torch.randn(B, Q, N, H).to(dtype))

    def to(self, dtype: torch.dtype) -> "Case":
        """Return the same in another type."""
        inputs = {name: x.detach().to(dtype).requires_grad_() for name, x in self.inputs.items()}
        return Case(inputs, self.sight, self.grad.to(dtype))

    def attend(self, attend: Attention, *, dropatt: float = 0.0) -> Tensor:
        """Return the output."""
        biases = {name: x for name, x in self.inputs.items() if len(name) > 1}
        return attend(*(self.inputs[name] for name in "qkvr"), **biases, sight=self.sight, dropatt=dropatt)

    def run(self, attend: Attention, *, dropatt: float = 0.0) -> dict[str, Tensor]:
        """Return the output, and the gradients of all inputs that have one."""
        out = self.attend(attend, dropatt=dropatt)
        grads = torch.autograd.grad(out, list(self.inputs.values()), self.grad, allow_unused=True)
        found = {name: grad for name, grad in zip(self.inputs, grads, strict=True) if grad is not None}
        return {"out": out.detach(), **found}

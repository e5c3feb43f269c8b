"""Turn transformers' `attention_mask` into rows padded at the left, the only padding that the model knows.

A memory is contiguous in time, so padding can only stand before a row's text. A row padded at the right is turned until its
last token stands at the end, and the model's output for it is turned back.

Shapes: B batch, T tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Padding:
    """Where the text of each row stands."""

    n_pad: Tensor  # int64 (B,), places of a row that hold no token
    shift: Tensor  # int64 (B,), places by which a row turns right to end with its last token

    @classmethod
    def of(cls, real_BT: Tensor) -> "Padding | None":
        """Find the padding of rows from `real_BT`, False at padding; None if there is none, ValueError between tokens."""
        if bool(real_BT.all()):
            return None
        T = real_BT.shape[1]
        place_T = torch.arange(T, device=real_BT.device)
        first_B = torch.where(real_BT, place_T, T).amin(dim=1)
        last_B = torch.where(real_BT, place_T, -1).amax(dim=1)
        n_real_B = real_BT.sum(dim=1)
        holes = (n_real_B > 0) & (last_B - first_B + 1 != n_real_B)
        if bool(holes.any()):
            row = int(holes.nonzero()[0, 0])
            raise ValueError(
                f"row {row} of attention_mask has padding between tokens; pad at the left or at the right of each text only"
            )
        return cls(T - n_real_B, torch.where(n_real_B > 0, T - 1 - last_B, 0))

    def turn(self, x_BT: Tensor) -> Tensor:
        """Turn every row of (B, T, …) right until its last token stands at the end.

        Example:
            >>> padding = Padding.of(torch.tensor([[True, True, False]]))
            >>> padding.turn(torch.tensor([[5, 6, 0]])).tolist()
            [[0, 5, 6]]
            >>> padding.turn_back(torch.tensor([[0, 5, 6]])).tolist()
            [[5, 6, 0]]
        """
        return _turned(x_BT, -self.shift)

    def turn_back(self, x_BT: Tensor) -> Tensor:
        """Undo `turn`."""
        return _turned(x_BT, self.shift)


def _turned(x_BT: Tensor, offset_B: Tensor) -> Tensor:
    if not bool(offset_B.any()):
        return x_BT
    B, T = x_BT.shape[:2]
    source_BT = (torch.arange(T, device=x_BT.device) + offset_B[:, None]) % T
    return x_BT[torch.arange(B, device=x_BT.device)[:, None], source_BT]

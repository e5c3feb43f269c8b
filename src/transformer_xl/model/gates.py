"""Gates in the place of the residual sum, after GTrXL (Parisotto et al. 2019, arXiv 1910.06764, section 3.2).

    y ← ReLU(y)                               what a block found for the states x
    sum:  x + y                               (without the ReLU)
    gru:  r = σ(W_r y + U_r x)    z = σ(W_z y + U_z x - b)    c = tanh(W_c y + U_c (r ⊙ x))
          (1 - z) ⊙ x + z ⊙ c

With b above 0, a layer begins nearly as the identity, which is why agents learn with it where they do not without.

Shapes: D d_model; any number of leading axes.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from transformer_xl.config.model import GateKind
from transformer_xl.kernels.cpu_linear import linear
from transformer_xl.kernels.fused import fused_blocks
from transformer_xl.model.dropout import DropConnectLinear, Dropout

FIRST_BIAS = 2.0
"""b in the beginning; what the paper found best."""

Net = Callable[[Tensor], Tensor]


def gru_gate(x: Tensor, y: Tensor, bias: Tensor, x_net: Net, y_net: Net, candidate_net: Net) -> Tensor:
    """Return a mixture of x and a candidate, (…, D); `y_net` gives W_r y, W_z y, W_c y, `x_net` U_r x, U_z x."""
    r_y, z_y, c_y = y_net(F.relu(y)).chunk(3, dim=-1)
    r_x, z_x = x_net(x).chunk(2, dim=-1)
    z = torch.sigmoid(z_y + z_x - bias)
    candidate = torch.tanh(c_y + candidate_net(torch.sigmoid(r_y + r_x) * x))
    return x + z * (candidate - x)


class Gate(nn.Module):
    """Joins the states of a layer and what a block found for them.

    Args:
        d_model: D.
        dropweight: on its matrices.
    """

    def __init__(self, d_model: int, *, dropweight: float = 0.0) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.full((d_model,), FIRST_BIAS))
        self.x_net = DropConnectLinear(d_model, 2 * d_model, bias=False, dropweight=dropweight)  # U_r and U_z
        self.y_net = DropConnectLinear(d_model, 3 * d_model, bias=False, dropweight=dropweight)
        self.candidate_net = DropConnectLinear(d_model, d_model, bias=False, dropweight=dropweight)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the new states, (…, D)."""
        return gru_gate(x, y, self.bias, self.x_net, self.y_net, self.candidate_net)


def make_gate(kind: GateKind, d_model: int, *, dropweight: float = 0.0) -> Gate | None:
    """Return a gate; None: the residual sum needs none."""
    return None if kind == "sum" else Gate(d_model, dropweight=dropweight)


def block_output(
    h: Tensor, x: Tensor, *, net: DropConnectLinear, drop: Dropout, gate: Gate | None, norm: nn.LayerNorm | None
) -> Tensor:
    """Return what a block ends with, norm(h + dropout(net(x))), or with a gate in the place of the sum.

    Args:
        h: states that entered the block, (…, T, D).
        x: what its last linear map reads.
        net: that map.
        drop: dropout of what it returns.
        gate: None: a sum.
        norm: None: blocks have theirs at the beginning.
    """
    is_usual = norm is None or (type(norm) is nn.LayerNorm and norm.bias is not None)
    modules = (net, drop) if norm is None else (net, drop, norm)
    if gate is None and is_usual and (blocks := fused_blocks(h, *modules)):
        return blocks.added(h, linear(x, net.drawn_weight()), net.bias, p=drop.rate, locked=drop.locked, norm=norm)
    found = drop(net(x))
    output = h + found if gate is None else gate(h, found)
    return output if norm is None else norm(output)

"""xLSTM as a kind of model: the blocks of `xLSTMLarge`, with their states as memory, by the kernels that a CPU can run.

It computes with mlstm_kernels, which has a license of its own, the NXAI Community License: read it before you use this for
anything but measuring.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from rivals.rival import Rival, library
from rivals.settings import XlstmConfig
from transformer_xl.errors import ConfigError
from transformer_xl.model.memory import Memory

_WARM_UP = 512
"""Tokens that a state reads before the part of a stream that it scores, as of our LSTM."""
_NAMES = ("c", "n", "m")


@dataclass(frozen=True)
class States(Memory):
    """The state of every layer: c (B, heads, d_qk, d_v), n (B, heads, d_qk) and m (B, heads, 1)."""

    layers: tuple[tuple[Tensor, Tensor, Tensor], ...]

    def state_dict(self) -> dict[str, Tensor]:
        """Return the tensors of each layer by name."""
        return {f"{name}.{i}": x for i, own in enumerate(self.layers) for name, x in zip(_NAMES, own, strict=True)}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Tensor]) -> "States":
        """Rebuild a memory from `state_dict()`."""
        layers = (tuple(state[f"{name}.{i}"] for name in _NAMES) for i in range(len(state) // len(_NAMES)))
        return cls(cast("tuple[tuple[Tensor, Tensor, Tensor], ...]", tuple(layers)))


class Xlstm(Rival):
    """The blocks and the last norm of `xLSTMLarge`.

    Deviations, the same for all rivals: the softmax is tied to the embedding, has a bias, and does not cap its scores.
    """

    kind = XlstmConfig.kind
    config: XlstmConfig  # pyright: ignore[reportIncompatibleVariableOverride]  # of a frozen attribute, this is safe

    def make_body(self) -> nn.Module:
        """Return an `xLSTMLargeBlockStack`."""
        module, config = library("xlstm.xlstm_large.model"), self.config
        return module.xLSTMLargeBlockStack(
            module.xLSTMLargeConfig(
                embedding_dim=config.d_model,
                num_heads=config.n_head,
                num_blocks=config.n_layer,
                vocab_size=1,  # its own embedding is not used
                ffn_proj_factor=config.d_inner / config.d_model,
                ffn_round_up_to_multiple_of=1,
                chunkwise_kernel="chunkwise--native_custbw",
                sequence_kernel="native_sequence__native",
                step_kernel="native",
                chunk_size=config.chunk_size,
                return_last_states=True,
                autocast_kernel_dtype="float32",
            )
        )

    def register_parts(self) -> None:
        """Register layers and last norm, and apart from the layers the gates of heads, which are no matrices for Muon."""
        self.gates, self.layers = nn.ModuleList(), nn.ModuleList()
        for block in cast("nn.ModuleList", self.body.blocks):
            own = dict(cast("nn.Module", block.mlstm_layer).named_children())
            self.gates.append(nn.ModuleDict({name: own.pop(f"{name[0]}gate_preact") for name in ("input", "forget")}))
            rest = {name: child for name, child in block.named_children() if name != "mlstm_layer"}
            self.layers.append(nn.ModuleDict({**own, **rest}))
        self.final_norm = self.body.out_norm

    def init_embedding(self, weight: Tensor) -> None:
        """Draw as xLSTM's authors do where softmax and embedding are tied; the untied ones have a deviation of 1."""
        library("xlstm.components.init").small_init_init_(weight, dim=weight.shape[1])

    def init_mems(self, batch_size: int, *, length: int | None = None) -> States:
        """Return the states of streams that begin: zeros."""
        layer = cast("Any", self.body.blocks)[0].mlstm_layer
        n_head = self.config.n_head
        d_qk, d_v = layer.qk_dim // n_head, layer.v_dim // n_head
        shapes = ((n_head, d_qk, d_v), (n_head, d_qk), (n_head, 1))
        zeros = tuple(torch.zeros(batch_size, *shape, dtype=self.dtype, device=self.device) for shape in shapes)
        return States((cast("tuple[Tensor, Tensor, Tensor]", zeros),) * self.config.n_layer)

    def reach(self, tgt_len: int) -> int:
        """Return how many tokens a state reads before it scores; approximate, because a state reaches back without limit."""
        return -(-_WARM_UP // tgt_len) * tgt_len if self.mem_len else 0

    def check_context(self) -> None:
        """Refuse a memory of several positions."""
        super().check_context()
        if self.mem_len > 1:
            raise ConfigError(f"mem_len ({self.mem_len}) must be 1 or 0: an xlstm remembers one state")

    def read_rows(self, x_BTD: Tensor, mems: States) -> tuple[Tensor, States]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Read block by block; the library's own loop would write into the states of the caller."""
        old = mems if self.mem_len else self.init_mems(len(x_BTD))
        new = []
        for block, state in zip(cast("Any", self.body.blocks), old.layers, strict=True):
            # training takes whole chunks, and the other way any length, but has no gradients
            block.mlstm_layer.mlstm_backend.config.mode = "train" if torch.is_grad_enabled() else "inference"
            x_BTD, state = block(x_BTD, state)
            new.append(tuple(x.to(self.dtype) for x in state))
        return cast("Any", self.body.out_norm)(x_BTD), States(tuple(new)) if self.mem_len else old

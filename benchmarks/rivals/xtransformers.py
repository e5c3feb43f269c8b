"""x-transformers as a kind of model: its `Decoder`, with the hidden states of the segments before as `mems`."""

import math
from typing import cast

import torch
from torch import Tensor, nn

from rivals.rival import Rival, library
from rivals.settings import XTransformersConfig
from transformer_xl.model.memory import Mems, remembered


class XTransformers(Rival):
    """The layers of a `TransformerWrapper` with `tie_embedding=True`.

    The library divides scores by √D where the softmax is tied. Ours multiplies embedded vectors by √D, which is the same model
    with vectors that are √D times smaller.
    """

    kind = XTransformersConfig.kind
    config: XTransformersConfig  # pyright: ignore[reportIncompatibleVariableOverride]  # of a frozen attribute, this is safe

    def make_body(self) -> nn.Module:
        """Return a `Decoder`."""
        config = self.config
        return library("x_transformers").Decoder(
            dim=config.d_model,
            depth=config.n_layer,
            heads=config.n_head,
            attn_dim_head=config.d_head,
            ff_mult=(config.d_inner + 0.5) / config.d_model,  # which the library multiplies again, and rounds down
            rotary_pos_emb=True,
            ff_relu_squared=True,
            attn_flash=True,  # PyTorch's attention, which is faster; the numbers are the same
            shift_tokens=config.shift_tokens,
        )

    def register_parts(self) -> None:
        """Register layers, last norm and rotary frequencies."""
        self.layers = cast("nn.ModuleList", self.body.layers)
        self.final_norm, self.rotary = self.body.final_norm, self.body.rotary_pos_emb

    def init_embedding(self, weight: Tensor) -> None:
        """Draw as `TransformerWrapper` does, and divide by √D."""
        theirs = library("x_transformers.x_transformers").TokenEmbedding(weight.shape[1], weight.shape[0])
        theirs.init_()
        weight.copy_(theirs.emb.weight / self.config.embedding_scale)

    def reach(self, tgt_len: int) -> int:
        """Return how far back memory goes: each layer adds the memory of the layer below, in whole segments."""
        return self.config.n_layer * math.ceil(self.mem_len / tgt_len) * tgt_len

    def read_rows(self, x_BTD: Tensor, mems: Mems) -> tuple[Tensor, Mems]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Read with `mems`, and with `mem_masks` where rows have not filled them yet."""
        options = {}
        if mems.length:
            options["mems"] = list(mems.hidden)
            place = torch.arange(mems.length, device=x_BTD.device)
            is_valid = place >= mems.length - mems.n_valid[:, None]
            if not is_valid.all():
                options["mem_masks"] = [is_valid] * self.config.n_layer
        h_BTD, seen = self.body(x_BTD, return_hiddens=True, **options)
        new = tuple(
            remembered(old.to(self.dtype), hidden.to(self.dtype), None, mem_len=self.mem_len, ext_len=0, keep_graph=True)
            for old, hidden in zip(mems.hidden, seen.hiddens, strict=True)
        )
        return h_BTD, Mems(new, (mems.n_valid + x_BTD.shape[1]).clamp(max=new[0].shape[1]))

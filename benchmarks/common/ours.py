"""Our side of `train_step.py`, in a process of its own: `ours.py PRECISION`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from safetensors.torch import load_file
from torch import Tensor

import transformer_xl
from common.contestant import Contestant
from common.shapes import Shape
from common.wire import serve
from transformer_xl.config import TransformerXLConfig
from transformer_xl.model.memory import Mems
from transformer_xl.model.precision import autocast, choose_precision
from transformer_xl.model.transformer_xl import TransformerXL

PEER_NAMES = {
    "embedding.weight": "transformer.word_emb.emb_layers.0.weight",
    "softmax.bias": "crit.out_layers.0.bias",
    "r_w_bias": "transformer.r_w_bias",
    "r_r_bias": "transformer.r_r_bias",
}
PEER_LAYER_NAMES = {
    "attention.qkv_net.weight": "dec_attn.qkv_net.weight",
    "attention.r_net.weight": "dec_attn.r_net.weight",
    "attention.o_net.weight": "dec_attn.o_net.weight",
    "attention.layer_norm.weight": "dec_attn.layer_norm.weight",
    "attention.layer_norm.bias": "dec_attn.layer_norm.bias",
    "feed_forward.inner.weight": "pos_ff.CoreNet.0.weight",
    "feed_forward.inner.bias": "pos_ff.CoreNet.0.bias",
    "feed_forward.outer.weight": "pos_ff.CoreNet.3.weight",
    "feed_forward.outer.bias": "pos_ff.CoreNet.3.bias",
    "feed_forward.layer_norm.weight": "pos_ff.layer_norm.weight",
    "feed_forward.layer_norm.bias": "pos_ff.layer_norm.bias",
}

CPU = torch.device("cpu")


def peer_names(n_layer: int) -> dict[str, str]:
    """Map our parameters' names to the peer's."""
    layers = {
        f"layers.{i}.{name}": f"transformer.layers.{i}.{peer_name}"
        for i in range(n_layer)
        for name, peer_name in PEER_LAYER_NAMES.items()
    }
    return PEER_NAMES | layers


class Ours(Contestant):
    def __init__(self, precision: str) -> None:
        super().__init__()
        self.precision, self.reason = choose_precision(precision, CPU)

    def versions(self) -> dict[str, str]:
        return {
            "transformer_xl": transformer_xl.__version__,
            "torch": torch.__version__,
            "python": sys.version.split()[0],
            "precision": self.precision,
            "reason": self.reason,
        }

    def _build(self, shape: Shape, weights: str) -> None:
        config = TransformerXLConfig(
            vocab_size=shape.vocab_size,
            n_layer=shape.n_layer,
            d_model=shape.d_model,
            n_head=shape.n_head,
            d_head=shape.d_head,
            d_inner=shape.d_inner,
            mem_len=shape.mem_len,
            dropout=shape.dropout,
        )
        self.model: TransformerXL = TransformerXL(config)
        theirs = load_file(weights)
        names = peer_names(shape.n_layer)
        self.model.load_state_dict(
            {name: theirs[names[name]].view_as(parameter) for name, parameter in self.model.named_parameters()}
        )

    def _zero_mems(self, shape: Shape) -> Mems:
        empty = self.model.init_mems(shape.batch_size)
        return Mems(empty.hidden, torch.full_like(empty.n_valid, shape.mem_len))  # the peer attends to the zeros it starts with

    def _loss(self, ids: Tensor) -> Tensor:
        labels = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)  # the peer, too, leaves the last position unscored
        with autocast(CPU, self.precision):
            out = self.model(ids, mems=self.mems, labels=labels)
        self.mems = out.mems
        return out.nll.sum() / ids[:, 1:].numel()

    def _peer_named_gradients(self) -> dict[str, Tensor]:
        names = peer_names(self.model.config.n_layer)
        gradients = {names[name]: p.grad for name, p in self.model.named_parameters()}
        return {name: gradient[0] if name in PEER_BIASES else gradient for name, gradient in gradients.items()}


PEER_BIASES = {PEER_NAMES["r_w_bias"], PEER_NAMES["r_r_bias"]}
"""Those that have one more axis with us, for `untie_r`."""


if __name__ == "__main__":
    serve(Ours(sys.argv[1]))

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
from transformer_xl.config.model import TransformerXLConfig
from transformer_xl.conversion.key_maps.huggingface import key_map
from transformer_xl.kernels.device import Precision, autocast, choose_precision
from transformer_xl.model.memory import Mems
from transformer_xl.model.transformer_xl import TransformerXL

CPU = torch.device("cpu")


class Ours(Contestant[TransformerXL]):
    def __init__(self, precision: str) -> None:
        super().__init__()
        self.precision: Precision
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
            zero_first_memory=True,  # the peer attends to the zeros it starts with
        )
        self.model = TransformerXL(config)
        self.key_map = key_map(config)
        theirs = load_file(weights)
        shapes = {name: tuple(parameter.shape) for name, parameter in self.model.named_parameters()}
        self.model.load_state_dict({name: self.key_map.native(name, shapes, lambda part: theirs[part.name]) for name in shapes})

    def _zero_mems(self, shape: Shape) -> Mems:
        return self.model.init_mems(shape.batch_size)

    def _loss(self, ids: Tensor) -> Tensor:
        labels = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)  # the peer, too, leaves the last position unscored
        with autocast(CPU, self.precision):
            out = self.model(ids, mems=self.mems, labels=labels)
        self.mems = out.mems
        return out.nll.sum() / ids[:, 1:].numel()

    def _peer_named_gradients(self) -> dict[str, Tensor]:
        gradients = {name: parameter.grad for name, parameter in self.model.named_parameters() if parameter.grad is not None}
        return {part.name: self.key_map.foreign(part.name, gradients.__getitem__) for part in self.key_map.parts()}


if __name__ == "__main__":
    serve(Ours(sys.argv[1]))

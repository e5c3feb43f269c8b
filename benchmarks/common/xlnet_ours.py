"""Our side of `xlnet.py`, in a process of its own: `xlnet_ours.py PRECISION`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from safetensors.torch import load_file
from torch import Tensor

import transformer_xl
from common.wire import serve
from common.xlnet_shapes import XLNetShape
from common.xlnet_side import XLNetSide
from transformer_xl.batch import Order
from transformer_xl.config.model import XLNetConfig
from transformer_xl.conversion.key_maps.xlnet_huggingface import key_map
from transformer_xl.kernels.device import Precision, activation_dtype, autocast, choose_precision
from transformer_xl.model.memory import Mems
from transformer_xl.model.xlnet import XLNet

CPU = torch.device("cpu")


class Ours(XLNetSide[XLNet]):
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

    def _build(self, shape: XLNetShape, weights: str) -> None:
        config = XLNetConfig(
            vocab_size=shape.vocab_size,
            n_layer=shape.n_layer,
            d_model=shape.d_model,
            n_head=shape.n_head,
            d_head=shape.d_model // shape.n_head,
            d_inner=shape.d_inner,
            mem_len=shape.mem_len,
            reuse_len=shape.reuse_len if self._part == "pretrain" else None,  # all of a document is remembered
            dropout=shape.dropout,
            dropatt=shape.dropout,
            zero_first_memory=True,  # the peer attends to the zeros that it is given first
        )
        self.model = XLNet(config)
        self.key_map = key_map(config)
        theirs = load_file(weights)
        shapes = {name: tuple(parameter.shape) for name, parameter in self.model.named_parameters()}
        self.model.load_state_dict({name: self.key_map.native(name, shapes, lambda part: theirs[part.name]) for name in shapes})
        if self._part == "document":
            self.model.to(activation_dtype(self.precision, torch.float32))

    def _zero_mems(self, shape: XLNetShape) -> Mems:
        return self.model.init_mems(shape.rows[self._part])

    def _nll(self, rows: dict[str, Tensor]) -> Tensor:
        ids, targets = rows["ids"], rows["targets"]
        is_backward = torch.arange(len(ids)) >= len(ids) // 2  # as the peer does
        order, labels = Order(rows["rank"], rows["sees"], targets), ids.gather(1, targets)
        with autocast(CPU, self.precision):
            out = self.model(ids, order=order, labels=labels, mems=self.mems, segments=rows["texts"], is_backward=is_backward)
        self.mems = out.mems
        assert out.nll is not None
        return out.nll.mean()

    def _states(self, rows: dict[str, Tensor]) -> Tensor:
        with autocast(CPU, self.precision):
            return self.model.read(rows["ids"], mems=self.model.init_mems(len(rows["ids"]), length=0), segments=rows["texts"])[
                0
            ]

    def _read(self, ids: Tensor) -> None:
        mems = self.mems
        for segment in ids.split(self._shape.cut, dim=1):
            _, mems = self.model.read(segment, mems=mems)

    def _peer_named_gradients(self) -> dict[str, Tensor]:
        gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in self.model.named_parameters()}
        return {part.name: self.key_map.foreign(part.name, gradients.__getitem__) for part in self.key_map.parts()}


if __name__ == "__main__":
    serve(Ours(sys.argv[1]))

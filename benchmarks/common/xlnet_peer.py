"""The peer's side of `xlnet.py`, in a process and an environment of its own: `xlnet_peer.py fp32|bf16`.

Hugging Face transformers 4.35.2, `XLNetLMHeadModel`. In bf16 it runs under autocast: converted to bf16, its two streams raise.
"""

import contextlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor
from transformers import XLNetConfig, XLNetLMHeadModel

from common.wire import serve
from common.xlnet_shapes import XLNetShape
from common.xlnet_side import XLNetSide

SEED = 0


class Peer(XLNetSide[XLNetLMHeadModel]):
    def __init__(self, precision: str) -> None:
        super().__init__()
        self.precision = precision

    def versions(self) -> dict[str, str]:
        return {"transformers": transformers.__version__, "torch": torch.__version__, "python": sys.version.split()[0]}

    def _build(self, shape: XLNetShape, weights: str) -> None:
        config = XLNetConfig(
            vocab_size=shape.vocab_size,
            d_model=shape.d_model,
            n_layer=shape.n_layer,
            n_head=shape.n_head,
            d_inner=shape.d_inner,
            ff_activation="gelu_new",  # the original's
            dropout=shape.dropout,
            mem_len=shape.mem_len,
            reuse_len=shape.reuse_len,
            bi_data=self._part == "pretrain",
        )
        torch.manual_seed(SEED)
        self.model = XLNetLMHeadModel(config)
        if self.precision == "fp32":
            save_file({name: p.detach().contiguous() for name, p in self.model.named_parameters()}, weights)

    def _zero_mems(self, shape: XLNetShape) -> list[Tensor]:
        return [torch.zeros(shape.mem_len, shape.rows[self._part], shape.d_model) for _ in range(shape.n_layer)]

    def _nll(self, rows: dict[str, Tensor]) -> Tensor:
        ids, targets = rows["ids"], rows["targets"]
        hidden = (rows["rank"].unsqueeze(1) >= rows["sees"].unsqueeze(2)).float()
        mapping = torch.nn.functional.one_hot(targets, ids.shape[1]).float()
        given = {"perm_mask": hidden, "target_mapping": mapping, "token_type_ids": rows["texts"]}
        with self._autocast():
            out = self.model(ids, **given, labels=ids.gather(1, targets), mems=self.mems, use_mems=True)
        self.mems = out.mems
        return out.loss

    def _states(self, rows: dict[str, Tensor]) -> Tensor:
        with self._autocast():
            return self.model.transformer(rows["ids"], token_type_ids=rows["texts"], use_mems=False).last_hidden_state

    def _read(self, ids: Tensor) -> None:
        with self._autocast():
            self.model.transformer(ids, use_mems=False)

    def _peer_named_gradients(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}

    def _autocast(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if self.precision == "fp32" else torch.autocast("cpu", dtype=torch.bfloat16)


if __name__ == "__main__":
    serve(Peer(sys.argv[1]))

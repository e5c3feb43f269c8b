"""The peer's side of `train_step.py`, in a process and an environment of its own: `peer.py`.

Hugging Face transformers 4.35.2, `TransfoXLLMHeadModel`, in fp32. Its memory is time-major, of constant length, and starts as
zeros that are attended to; labels are shifted by the model.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor
from transformers import TransfoXLConfig, TransfoXLLMHeadModel

from common.contestant import Contestant
from common.shapes import Shape
from common.wire import serve

SEED = 0


class Peer(Contestant[TransfoXLLMHeadModel]):
    def versions(self) -> dict[str, str]:
        return {
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "python": sys.version.split()[0],
            "precision": "fp32",
            "reason": "the only one in which it trains on a CPU",
        }

    def _build(self, shape: Shape, weights: str) -> None:
        config = TransfoXLConfig(
            vocab_size=shape.vocab_size,
            n_layer=shape.n_layer,
            d_model=shape.d_model,
            d_embed=shape.d_model,
            n_head=shape.n_head,
            d_head=shape.d_head,
            d_inner=shape.d_inner,
            mem_len=shape.mem_len,
            dropout=shape.dropout,
            dropatt=0.0,
            cutoffs=[],
            div_val=1,
            clamp_len=-1,
            same_length=False,
            untie_r=False,
            attn_type=0,
        )
        torch.manual_seed(SEED)
        self.model = TransfoXLLMHeadModel(config)
        # each parameter once, under the first of its names: u and v belong to the model and to every layer
        save_file({name: p.detach().contiguous() for name, p in self.model.named_parameters()}, weights)

    def _zero_mems(self, shape: Shape) -> list[Tensor]:
        return self.model.init_mems(shape.batch_size)

    def _loss(self, ids: Tensor) -> Tensor:
        out = self.model(ids, mems=self.mems, labels=ids)
        self.mems = out.mems
        return out.loss

    def _peer_named_gradients(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self.model.named_parameters()}

    def bf16_failure(self, segment: list[list[int]]) -> str | None:
        """Try a step under bf16 autocast and return why it fails; None if it does not."""
        try:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = self._loss(torch.tensor(segment))
            loss.backward()
        except RuntimeError as error:
            return str(error).splitlines()[0]
        finally:
            self.model.zero_grad(set_to_none=True)
        return None


if __name__ == "__main__":
    serve(Peer())

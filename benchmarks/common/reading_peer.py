"""The peer's side of `decode.py` and `evaluate.py`, in a process and an environment of its own: `reading_peer.py`.

Hugging Face transformers 4.35.2, `TransfoXLLMHeadModel`, in fp32, used as its own generation uses it: one token, or one
segment, with the memory that the last call returned. Its memory is of constant length and starts as zeros that are attended to.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor
from transformers import TransfoXLConfig, TransfoXLLMHeadModel

from common.reading import ScoringSide
from common.wire import serve

SEED = 0


class ReadingPeer(ScoringSide):
    def versions(self) -> dict[str, str]:
        return {
            "name": f"transformers {transformers.__version__} TransfoXLLMHeadModel",
            "torch": torch.__version__,
            "python": sys.version.split()[0],
        }

    def _build(self, weights: str) -> None:
        shape = self.shape
        config = TransfoXLConfig(
            vocab_size=shape.vocab_size,
            n_layer=shape.n_layer,
            d_model=shape.d_model,
            d_embed=shape.d_model,
            n_head=shape.n_head,
            d_head=shape.d_head,
            d_inner=shape.d_inner,
            mem_len=shape.mem_len,
            clamp_len=shape.clamp_len,
            same_length=True,
            cutoffs=list(shape.cutoffs),
            div_val=shape.div_val,
            untie_r=shape.untie_r,
            proj_share_all_but_first=shape.proj_share_all_but_first,
            attn_type=0,
            init_std=shape.init_std,
            proj_init_std=shape.init_std,
        )
        torch.manual_seed(SEED)
        self.model: TransfoXLLMHeadModel = TransfoXLLMHeadModel(config).eval()
        # each parameter once, under the first of its names
        save_file({name: p.detach().contiguous() for name, p in self.model.named_parameters()}, weights)

    def _start(self) -> None:
        self.mems = self.model.init_mems(1)

    def _read_piece(self, ids: Tensor) -> None:
        self._hidden(ids)

    def _read_token(self, ids: Tensor) -> Tensor:
        out = self.model(ids.unsqueeze(0), mems=self.mems)
        self.mems = out.mems
        return out.logits[0, -1]

    def _choose(self, ids: Tensor) -> int:
        return int(self._read_token(ids).argmax())

    def _segment_nats(self, ids: Tensor, labels: Tensor) -> float:
        """Score all of a segment; with `labels=`, the model itself would leave its first token unscored."""
        hidden = self._hidden(ids)
        # the softmax drops the last state and the first label
        states, targets = torch.cat([hidden, hidden[:, -1:]], dim=1), torch.cat([labels[:, :1], labels], dim=1)
        return self.model.crit(states, targets).double().sum().item()

    def _hidden(self, ids: Tensor) -> Tensor:
        out = self.model.transformer(ids, mems=self.mems)
        self.mems = out.mems
        return out.last_hidden_state


if __name__ == "__main__":
    serve(ReadingPeer())

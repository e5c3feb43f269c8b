"""What stands in for the peer where `--quick` tries a benchmark out: our plain model, whose memory is hidden states.

It writes and names its weights as the peer does, so that a trial run takes every step of a real one but the other program.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from safetensors.torch import save_file
from torch import Tensor

import transformer_xl
from common.reading import ScoringSide
from common.reading_ours import config_of
from common.wire import serve
from transformer_xl.conversion.key_maps.huggingface import key_map
from transformer_xl.model.call import ModelOutput
from transformer_xl.model.transformer_xl import TransformerXL

SEED = 0


class StandIn(ScoringSide):
    def versions(self) -> dict[str, str]:
        return {
            "name": f"NOT the peer but transformer_xl {transformer_xl.__version__} with hidden states as memory",
            "torch": torch.__version__,
            "python": sys.version.split()[0],
        }

    def _build(self, weights: str) -> None:
        config = config_of(self.shape)
        torch.manual_seed(SEED)
        self.model = TransformerXL(config).eval()
        native, names = dict(self.model.named_parameters()), key_map(config)
        theirs = {part.name: names.foreign(part.name, lambda name: native[name].detach()) for part in names.parts()}
        save_file({name: tensor.contiguous() for name, tensor in theirs.items()}, weights)

    def _start(self) -> None:
        self.mems = self.model.init_mems(1)

    def _read_piece(self, ids: Tensor) -> None:
        self._forward(ids)

    def _read_token(self, ids: Tensor) -> Tensor:
        logits = self._forward(ids.unsqueeze(0)).logits
        assert logits is not None
        return logits[0, -1]

    def _choose(self, ids: Tensor) -> int:
        return int(self._read_token(ids).argmax())

    def _segment_nats(self, ids: Tensor, labels: Tensor) -> float:
        nll = self._forward(ids, labels).nll
        assert nll is not None
        return nll.double().sum().item()

    def _forward(self, ids: Tensor, labels: Tensor | None = None) -> ModelOutput:
        out = self.model(ids, mems=self.mems, labels=labels)
        self.mems = out.mems
        return out


if __name__ == "__main__":
    serve(StandIn())

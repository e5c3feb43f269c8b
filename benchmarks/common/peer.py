"""Hugging Face transformers 4.35.2 in an environment of its own: `peer.py train`, `peer.py read` or `peer.py xlnet fp32|bf16`.

`TransfoXLLMHeadModel` in fp32, with the memory that its last call returned; that is time-major, of constant length, and starts
as zeros that are attended to. `XLNetLMHeadModel` in fp32 or under bf16 autocast: converted to bf16, its two streams raise.
"""

import contextlib
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor
from transformers import TransfoXLConfig, TransfoXLLMHeadModel, XLNetConfig, XLNetLMHeadModel

from common.side import ReadingSide, Side, TrainingSide, states_loss
from common.wire import serve


class Peer(Side):
    kind: Any = TransfoXLLMHeadModel
    config_kind: Any = TransfoXLConfig
    precision = "fp32"

    def versions(self) -> dict[str, str]:
        name = f"transformers {transformers.__version__} {self.kind.__name__}, Python {sys.version.split()[0]}"
        return {"name": name, "torch": torch.__version__, "precision": self.precision}

    def _build(self, weights: str) -> None:
        torch.manual_seed(0)
        self.model = self.kind(self.config_kind(**self.config)).eval()
        if self.precision == "fp32":  # each parameter once, under the first of its names: u and v belong to every layer, too
            save_file({name: p.detach().contiguous() for name, p in self.model.named_parameters()}, weights)


class TrainingPeer(Peer, TrainingSide):
    def _zero_mems(self, n_row: int) -> list[Tensor]:
        return self.model.init_mems(n_row)

    def _loss(self, batch: dict[str, Tensor]) -> Tensor:
        out = self.model(batch["ids"], mems=self.mems, labels=batch["ids"])  # the model shifts labels
        self.mems = out.mems
        return out.loss

    def bf16_failure(self, batch: dict[str, Any]) -> str | None:
        """Try a step under bf16 autocast and return why it fails; None if it does not."""
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.failure(batch)


class XLNetPeer(Peer, TrainingSide):
    kind, config_kind = XLNetLMHeadModel, XLNetConfig

    def __init__(self, precision: str) -> None:
        super().__init__()
        self.precision = precision

    def _zero_mems(self, n_row: int) -> list[Tensor]:
        config = self.model.config
        return [torch.zeros(config.mem_len, n_row, config.d_model) for _ in range(config.n_layer)]

    def _loss(self, batch: dict[str, Tensor]) -> Tensor:
        bf16 = self.precision == "bf16"
        with torch.autocast("cpu", dtype=torch.bfloat16) if bf16 else contextlib.nullcontext():
            if "targets" not in batch:
                read = self.model.transformer(batch["ids"], token_type_ids=batch["texts"], use_mems=False)
                return states_loss(read.last_hidden_state)
            ids, targets = batch["ids"], batch["targets"]
            hidden = (batch["rank"].unsqueeze(1) >= batch["sees"].unsqueeze(2)).float()
            mapping = torch.nn.functional.one_hot(targets, ids.shape[1]).float()
            given = {"perm_mask": hidden, "target_mapping": mapping, "token_type_ids": batch["texts"]}
            out = self.model(ids, **given, labels=ids.gather(1, targets), mems=self.mems, use_mems=True)
        self.mems = out.mems
        return out.loss


class ReadingPeer(Peer, ReadingSide):
    def score(self, ids: list[int], tgt_len: int) -> dict[str, list[float]]:
        """Score a new stream segment by segment, every token but the first; return nats and seconds of each segment."""
        self._start()
        nats, seconds = [], []
        inputs, labels = torch.tensor([ids[:-1]]), torch.tensor([ids[1:]])
        for segment, label in zip(inputs.split(tgt_len, 1), labels.split(tgt_len, 1), strict=True):
            begin = time.perf_counter()
            nats.append(self._segment_nats(segment, label))
            seconds.append(time.perf_counter() - begin)
        return {"nats": nats, "seconds": seconds}

    def _start(self) -> None:
        self.mems = self.model.init_mems(1)

    def _read_piece(self, ids: Tensor) -> None:
        self._hidden(ids)

    def _read_token(self, ids: Tensor) -> Tensor:
        out = self.model(ids.unsqueeze(0), mems=self.mems)
        self.mems = out.mems
        return out.logits[0, -1]

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
    serve({"train": TrainingPeer, "read": ReadingPeer, "xlnet": XLNetPeer}[sys.argv[1]](*sys.argv[2:]))

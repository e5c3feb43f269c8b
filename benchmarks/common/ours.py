"""Our side of a comparison with a peer: `ours.py train|xlnet PRECISION` or `ours.py read PRECISION [compiled]`."""

import itertools
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from safetensors import safe_open
from torch import Tensor

import transformer_xl
from common.side import ReadingSide, Side, TrainingSide, states_loss
from common.wire import serve
from transformer_xl.batch import Order
from transformer_xl.config.model import TransformerXLConfig
from transformer_xl.conversion.key_maps import huggingface, xlnet_huggingface
from transformer_xl.generation.decoder import Decoder
from transformer_xl.kernels.device import Precision, autocast, choose_precision
from transformer_xl.model.memory import Mems
from transformer_xl.model.pretrained import build
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.model.xlnet import XLNet
from transformer_xl.reading.evaluation import evaluate

CPU = torch.device("cpu")
N_WARM_UP = 3


class Ours(Side):
    kind: Any = TransformerXL
    conversion: Any = huggingface

    def __init__(self, precision: str) -> None:
        super().__init__()
        self.precision: Precision
        self.precision, self.reason = choose_precision(precision, CPU)

    def versions(self) -> dict[str, str]:
        name = f"transformer_xl {transformer_xl.__version__}, Python {sys.version.split()[0]}"
        return {"name": name, "torch": torch.__version__, "precision": f"{self.precision}: {self.reason}"}

    def _build(self, weights: str) -> None:
        """Make a model of the peer's settings and weights."""
        config = self.conversion.config_of(self.config)
        if self.kind is XLNet:
            config = config.model_copy(update={"zero_first_memory": True})  # the peer attends to the zeros that it is given
        with torch.device("meta"):
            shapes = {name: tuple(parameter.shape) for name, parameter in self.kind(config).named_parameters()}
        self._names = self.conversion.key_map(config)
        with safe_open(weights, framework="pt") as theirs:
            # copies, one at a time: what is a view of the file would keep all of it in memory, beside what is changed
            native = {n: self._names.native(n, shapes, lambda part: theirs.get_tensor(part.name)).clone() for n in shapes}
        self.model = build(self.kind, config, native, weights)


class OurTraining(Ours, TrainingSide):
    def _zero_mems(self, n_row: int) -> Mems:
        return self.model.init_mems(n_row)

    def _loss(self, batch: dict[str, Tensor]) -> Tensor:
        ids = batch["ids"]
        labels = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)  # the peer, too, leaves the last position unscored
        with autocast(CPU, self.precision):
            out = self.model(ids, mems=self.mems, labels=labels)
        self.mems = out.mems
        return out.nll.sum() / ids[:, 1:].numel()

    def _gradients(self) -> dict[str, Tensor]:
        own = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in self.model.named_parameters()}
        return {part.name: self._names.foreign(part.name, own.__getitem__) for part in self._names.parts()}


class OurXLNet(OurTraining):
    kind, conversion, least_norm = XLNet, xlnet_huggingface, 1e-3

    def _loss(self, batch: dict[str, Tensor]) -> Tensor:
        ids, texts = batch["ids"], batch["texts"]
        with autocast(CPU, self.precision):
            if "targets" not in batch:
                return states_loss(self.model.read(ids, mems=self.model.init_mems(len(ids), length=0), segments=texts)[0])
            targets = batch["targets"]
            is_backward = torch.arange(len(ids)) >= len(ids) // 2  # as the peer does
            order = Order(batch["rank"], batch["sees"], targets)
            given = {"order": order, "labels": ids.gather(1, targets), "segments": texts, "is_backward": is_backward}
            out = self.model(ids, mems=self.mems, **given)
        self.mems = out.mems
        return out.nll.mean()


class OurReading(Ours, ReadingSide):
    """Reads with a `Decoder`, which `open` makes, or by `evaluate`."""

    def __init__(self, precision: str, *compiled: str) -> None:
        load_libraries(precision)
        super().__init__("auto")
        self.chosen: Any = precision
        self.compiled = bool(compiled)
        self.decoders: dict[int, Decoder] = {}

    def open(self, rows: list[int], mem_len: int | None = None) -> float:
        """Make a decoder of each number of rows, ready to read; return the seconds this took, compiling included."""
        begin = time.perf_counter()
        for n in rows:
            decoder = Decoder(self.model, batch_size=n, mem_len=mem_len, precision=self.chosen, compile=self.compiled)
            self.decoders[n] = decoder
            for _ in range(N_WARM_UP):
                decoder.step(torch.zeros(n, dtype=torch.int64)).top(1)
        return time.perf_counter() - begin

    def steps(self, rows: int, n: int) -> float:
        """Read `n` random tokens of each row, finding the likeliest next ones, and return the mean seconds of a step."""
        decoder, tokens = self.decoders[rows], torch.randint(self.config["vocab_size"], (n, rows))
        begin = time.perf_counter()
        for ids in tokens:
            decoder.step(ids).top(1)
        return (time.perf_counter() - begin) / n

    def model_mb(self) -> float:
        """Return the MB of the model's parameters."""
        return sum(parameter.nbytes for parameter in self.model.parameters()) / 1e6

    def score(self, ids: list[int], tgt_len: int) -> dict[str, list[float]]:
        """Score a stream in one call; return nats and seconds of each segment.

        What a call prepares is done before the first segment: the seconds of this, less those of the others, are that.
        """
        stamps, config = [time.perf_counter()], self.model.config
        score = evaluate(
            self.model,
            torch.tensor(ids),
            tgt_len=tgt_len,
            mem_len=config.mem_len,
            same_length=True,
            clamp_len=config.clamp_len,
            precision=self.chosen,
            per_token=True,
            on_tokens=lambda _: stamps.append(time.perf_counter()),
        )
        assert score.token_nats is not None
        nats = [segment.sum().item() for segment in torch.from_numpy(score.token_nats).double().split(tgt_len)]
        return {"nats": nats, "seconds": [end - begin for begin, end in itertools.pairwise(stamps)]}

    def _start(self) -> None:
        self.decoders[1].reset()

    def _read_piece(self, ids: Tensor) -> None:
        self.decoders[1].feed(ids)

    def _read_token(self, ids: Tensor) -> Tensor:
        return self.decoders[1].step(ids).full()[0]

    def _choose(self, ids: Tensor) -> int:
        return int(self.decoders[1].step(ids).top(1)[1])


def load_libraries(precision: Any) -> None:
    """Read with a model of a few numbers, so that an idle process has loaded what any model needs."""
    config = TransformerXLConfig(vocab_size=2, n_layer=1, d_model=16, n_head=1, d_head=16, d_inner=16, mem_len=1)
    with torch.device("meta"):
        TransformerXL(config)
    decoder = Decoder(TransformerXL(config), precision=precision)
    decoder.feed(torch.tensor([[0, 1]]))
    decoder.step(torch.tensor([0])).top(1)


if __name__ == "__main__":
    serve({"train": OurTraining, "xlnet": OurXLNet, "read": OurReading}[sys.argv[1]](*sys.argv[2:]))

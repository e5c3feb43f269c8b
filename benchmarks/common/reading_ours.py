"""Our side of `decode.py` and `evaluate.py`, in a process of its own: `reading_ours.py PRECISION [compiled]`."""

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
from common.reading import ReadingSide
from common.reading_shapes import ReadingShape
from common.wire import serve
from transformer_xl.config.model import TransformerXLConfig
from transformer_xl.conversion.key_maps import huggingface
from transformer_xl.generation.decoder import Decoder
from transformer_xl.kernels.device import choose_precision
from transformer_xl.model.pretrained import build
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.reading.evaluation import evaluate

CPU = torch.device("cpu")
N_WARM_UP = 3


def load_libraries(precision: Any) -> None:
    """Read with a model of a few numbers, so that an idle process has loaded what any model needs."""
    sizes: dict[str, Any] = {"n_layer": 1, "d_model": 16, "n_head": 1, "d_head": 16, "d_inner": 16, "mem_len": 1}
    config = TransformerXLConfig(vocab_size=2, **sizes)
    with torch.device("meta"):
        TransformerXL(config)
    decoder = Decoder(TransformerXL(config), precision=precision)
    decoder.feed(torch.tensor([[0, 1]]))
    decoder.step(torch.tensor([0])).top(1)


def config_of(shape: ReadingShape) -> TransformerXLConfig:
    """Return what a conversion of the peer's model would set."""
    return huggingface.config_of(
        {
            "vocab_size": shape.vocab_size,
            "n_layer": shape.n_layer,
            "d_model": shape.d_model,
            "d_embed": shape.d_model,
            "n_head": shape.n_head,
            "d_head": shape.d_head,
            "d_inner": shape.d_inner,
            "mem_len": shape.mem_len,
            "clamp_len": shape.clamp_len,
            "same_length": True,
            "cutoffs": list(shape.cutoffs),
            "div_val": shape.div_val,
            "untie_r": shape.untie_r,
            "proj_share_all_but_first": shape.proj_share_all_but_first,
            "init_std": shape.init_std,
            "proj_init_std": shape.init_std,
        }
    )


class ReadingOurs(ReadingSide):
    def __init__(self, precision: str, compiled: bool) -> None:
        load_libraries(precision)
        super().__init__()
        self.precision: Any = precision
        self.compiled = compiled
        self.decoders: dict[int, Decoder] = {}

    def versions(self) -> dict[str, str]:
        return {
            "name": f"transformer_xl {transformer_xl.__version__}",
            "torch": torch.__version__,
            "python": sys.version.split()[0],
            "auto": ": ".join(choose_precision("auto", CPU)),
        }

    def _build(self, weights: str) -> None:
        config = config_of(self.shape)
        with torch.device("meta"):
            shapes = {name: tuple(parameter.shape) for name, parameter in TransformerXL(config).named_parameters()}
        names = huggingface.key_map(config)
        with safe_open(weights, framework="pt") as theirs:
            # copies, one at a time: what is a view of the file would keep all of it in memory, beside what is changed
            native = {name: names.native(name, shapes, lambda part: theirs.get_tensor(part.name)).clone() for name in shapes}
        self.model: TransformerXL = build(TransformerXL, config, native, weights)

    def open(self, rows: list[int], mem_len: int | None = None) -> float:
        """Make a decoder of each number of rows, ready to read; return the seconds this took, compiling included."""
        begin = time.perf_counter()
        for n in rows:
            decoder = Decoder(self.model, batch_size=n, mem_len=mem_len, precision=self.precision, compile=self.compiled)
            self.decoders[n] = decoder
            for _ in range(N_WARM_UP):
                decoder.step(torch.zeros(n, dtype=torch.int64)).top(1)
        return time.perf_counter() - begin

    def steps(self, rows: int, n: int) -> list[float]:
        """Read `n` random tokens of each row, finding the likeliest next ones, and return the seconds of each step."""
        decoder, seconds = self.decoders[rows], []
        for ids in torch.randint(self.shape.vocab_size, (n, rows)):
            begin = time.perf_counter()
            decoder.step(ids).top(1)
            seconds.append(time.perf_counter() - begin)
        return seconds

    def model_mb(self) -> float:
        """Return the MB of the model's parameters."""
        return sum(parameter.nbytes for parameter in self.model.parameters()) / 1e6

    def score(self, ids: list[int]) -> dict[str, Any]:
        """Score a stream in one call; return nats and seconds of each segment, and the seconds before the first.

        What a call prepares is done before the first segment: the seconds of this, less those of the others, are that.
        """
        shape, stamps = self.shape, [time.perf_counter()]
        score = evaluate(
            self.model,
            torch.tensor(ids),
            tgt_len=shape.tgt_len,
            mem_len=shape.mem_len,
            same_length=True,
            clamp_len=shape.clamp_len,
            precision=self.precision,
            per_token=True,
            on_tokens=lambda _: stamps.append(time.perf_counter()),
        )
        assert score.token_nats is not None
        nats = torch.from_numpy(score.token_nats).double().split(shape.tgt_len)
        return {
            "nats": [segment.sum().item() for segment in nats],
            "seconds": [end - begin for begin, end in itertools.pairwise(stamps)],
        }

    def _start(self) -> None:
        self.decoders[1].reset()

    def _read_piece(self, ids: Tensor) -> None:
        self.decoders[1].feed(ids)

    def _read_token(self, ids: Tensor) -> Tensor:
        return self.decoders[1].step(ids).full()[0]

    def _choose(self, ids: Tensor) -> int:
        return int(self.decoders[1].step(ids).top(1)[1])


if __name__ == "__main__":
    serve(ReadingOurs(sys.argv[1], sys.argv[2:] == ["compiled"]))

"""Write the golden of labml's annotated Transformer-XL: a tiny random model, and what it computes in float64.

Environment and command, from the root of the repository (--no-deps: labml-nn asks for packages that its Transformer-XL does not
need):

    python -m venv .venv-peer && .venv-peer/bin/pip install --no-deps -r tests/parity/requirements-labml.txt
    .venv-peer/bin/pip install torch==2.13.0
    .venv-peer/bin/python tests/parity/make_goldens_labml.py

Their `TransformerXL` is imported and runs as it is, but that its tracker is asked for a method (`debug`) that the last labml no
longer has. Embedding, scores and the memory's length belong to their experiment, which the last labml-nn can no longer import
(`SimpleStateModule`), so they are written out here. Two things are set: the tables of positions have 2 x 32 rows instead of
2 x 4096, because no segment here uses more, and the biases of the maps of values and of attention's output are zero, because a
model of this project has none.
"""

import shutil
from pathlib import Path
from typing import Any

import golden_writer
import torch
from labml import tracker
from labml_nn.transformers.feed_forward import FeedForward
from labml_nn.transformers.xl import RelativeMultiHeadAttention, TransformerXL, TransformerXLLayer
from safetensors.torch import save_file
from torch import Tensor, nn

FOLDER = Path(__file__).parent / "goldens" / "labml"
PEER = "labml-nn 0.5.1 transformers.xl"
SIZES: dict[str, Any] = {"n_vocab": 31, "n_layers": 2, "heads": 2, "d_model": 8, "d_ff": 10, "mem_len": 6}
N_ROW = 32


class Model(nn.Module):
    """Tokens in, scores out, as in their experiment."""

    def __init__(self) -> None:
        super().__init__()
        d_model = SIZES["d_model"]
        attention: Any = RelativeMultiHeadAttention(SIZES["heads"], d_model, 0.0)
        attention.P = N_ROW
        for name in ("key_pos_embeddings", "key_pos_bias"):
            setattr(attention, name, nn.Parameter(getattr(attention, name)[: 2 * N_ROW].detach().clone()))
        feed_forward = FeedForward(d_model, SIZES["d_ff"], 0.0)
        layer = TransformerXLLayer(d_model=d_model, self_attn=attention, feed_forward=feed_forward, dropout_prob=0.0)
        self.src_embed = nn.Embedding(SIZES["n_vocab"], d_model)
        self.transformer = TransformerXL(layer, SIZES["n_layers"])
        self.generator = nn.Linear(d_model, SIZES["n_vocab"])

    def forward(self, x: Tensor, mem: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        T, M = len(x), len(mem[0]) if mem else 0
        mask = torch.ones(T, M + T, dtype=torch.bool).tril(M).unsqueeze(-1)
        states, entered = self.transformer(self.src_embed(x), mem, mask)
        joined = [torch.cat(pair) for pair in zip(mem, entered, strict=True)] if mem else entered
        return self.generator(states), [m[-SIZES["mem_len"] :] for m in joined]


def main() -> None:
    """Write it anew."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    torch.set_default_dtype(torch.float64)
    tracker.debug = lambda *_: None
    model = Model().eval()
    golden_writer.randomize(model, 0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith((".output.bias", ".value.linear.bias")):
                parameter.zero_()
    state = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def read(ids: Tensor, labels: Tensor, mems: Any) -> tuple[Tensor, list[Tensor], Any]:
        logits, mems = model(ids.t(), mems or [])
        return logits.transpose(0, 1).log_softmax(-1), [m.transpose(0, 1) for m in mems], mems

    ids, labels = golden_writer.stream(SIZES["n_vocab"], n_segment=3, batch_size=2, tgt_len=5, seed=0)
    tensors = golden_writer.expectations(model, read, ids, labels)
    golden_writer.check_all_learn(tensors)
    about: dict[str, Any] = {"peer": PEER, "hyperparameters": SIZES, "first_memory": "empty", "aliases": {}}
    golden_writer.save_expected(FOLDER / "plain" / "expected64.safetensors", tensors, **about)
    (FOLDER / "plain" / "checkpoint").mkdir()
    save_file(state, FOLDER / "plain" / "checkpoint" / "model.safetensors")
    golden_writer.check_sizes(FOLDER)


if __name__ == "__main__":
    main()

"""Write the goldens of labml's annotated Transformer-XL: tiny random models as it saves them, and what they compute in float64.

Environment and command, from the root of the repository (--no-deps: labml-nn asks for packages that its Transformer-XL does not
need):

    python -m venv .venv-peer && .venv-peer/bin/pip install --no-deps -r tests/parity/requirements-labml.txt
    .venv-peer/bin/pip install torch==2.13.0
    .venv-peer/bin/python tests/parity/make_goldens_labml.py

The model and the memory's length are those of their experiment, and their `experiment.save_checkpoint` writes the files. These
are the last versions in which all of that works: labml 0.5 saves nothing, and the experiment of labml-nn 0.5 cannot be imported
(`SimpleStateModule`). One thing is set: the tables of positions have 2 x 32 rows instead of 2 x 4096, because no segment here
uses more. In `plain` the biases of the maps of values and of attention's output are zero, because a model of this project has
none; in `trained` they are not, as after training.
"""

import os
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import golden_writer
import torch
from torch import Tensor, nn

FOLDER = Path(__file__).parent / "goldens" / "labml"
PEER = "labml-nn 0.4.136 transformers.xl"
SIZES: dict[str, Any] = {"n_vocab": 31, "n_layers": 2, "heads": 2, "d_model": 8, "d_ff": 10, "mem_len": 6}
N_ROW = 32


def make_model() -> nn.Module:
    """Build the model as `autoregressive_model` of their experiment does."""
    from labml_nn.transformers.feed_forward import FeedForward
    from labml_nn.transformers.xl import RelativeMultiHeadAttention, TransformerXL, TransformerXLLayer
    from labml_nn.transformers.xl.experiment import AutoregressiveModel

    d_model = SIZES["d_model"]
    attention: Any = RelativeMultiHeadAttention(SIZES["heads"], d_model, 0.0)
    attention.P = N_ROW
    for name in ("key_pos_embeddings", "key_pos_bias"):
        setattr(attention, name, nn.Parameter(getattr(attention, name)[: 2 * N_ROW].detach().clone()))
    feed_forward = FeedForward(d_model, SIZES["d_ff"], 0.0)
    layer = TransformerXLLayer(d_model=d_model, self_attn=attention, feed_forward=feed_forward, dropout_prob=0.0)
    return AutoregressiveModel(SIZES["n_vocab"], d_model, TransformerXL(layer, SIZES["n_layers"])).eval()


@torch.no_grad()
def without_biases(model: nn.Module) -> None:
    """Leave out what this project has no place for."""
    for name, parameter in model.named_parameters():
        if name.endswith((".output.bias", ".value.linear.bias")):
            parameter.zero_()


@torch.no_grad()
def as_trained(model: nn.Module) -> None:
    """Let the weights of norms lie around 1, as they do in a model that was trained."""
    for name, parameter in model.named_parameters():
        if name.endswith(("norm.weight", "norm_ff.weight", "norm_self_attn.weight")):
            parameter.add_(1)


def write(name: str, model: nn.Module) -> None:
    """Save a model, let it read, and note what it says."""
    from labml import experiment
    from labml_nn.transformers.xl.experiment import Configs

    def read(ids: Tensor, labels: Tensor, mems: Any) -> tuple[Tensor, list[Tensor], Any]:
        logits, entered = model(ids.t(), mems or [])
        mems = Configs.merge_memory(SimpleNamespace(mem_len=SIZES["mem_len"]), mems, entered)
        return logits.transpose(0, 1).log_softmax(-1), [m.transpose(0, 1) for m in mems], mems

    ids, labels = golden_writer.stream(SIZES["n_vocab"], n_segment=3, batch_size=2, tgt_len=5, seed=0)
    tensors = golden_writer.expectations(model, read, ids, labels)
    golden_writer.check_all_learn(tensors)
    about: dict[str, Any] = {"peer": PEER, "hyperparameters": SIZES, "first_memory": "empty", "aliases": {}}
    golden_writer.save_expected(FOLDER / name / "expected64.safetensors", tensors, **about)
    experiment.create(name=name, python_file=str(Path("experiment.py").absolute()), writers=set())
    experiment.add_pytorch_models({"model": model})
    with experiment.start():
        experiment.save_checkpoint()
    (written,) = Path("logs", name).glob("*/checkpoints/*")
    shutil.copytree(written, FOLDER / name / "checkpoint")


def main() -> None:
    """Write them anew."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    os.chdir(tempfile.mkdtemp())  # labml writes its logs here, looks for its settings, and writes some at home
    os.environ["HOME"] = str(Path.cwd())
    Path("experiment.py").touch()
    Path(".labml.yaml").write_text("check_repo_dirty: false\nweb_api: ''\n")
    torch.set_default_dtype(torch.float64)
    for name, change in {"plain": without_biases, "trained": as_trained}.items():
        model = make_model()
        golden_writer.randomize(model, 0)
        change(model)
        write(name, model)
    golden_writer.check_sizes(FOLDER)


if __name__ == "__main__":
    main()

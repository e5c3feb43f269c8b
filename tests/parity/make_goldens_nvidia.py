"""Write the goldens of NVIDIA's PyTorch code: tiny random models as their train.py saves them, and what they compute.

Environment and command, from the root of the repository:

    git clone https://github.com/NVIDIA/DeepLearningExamples CHECKOUT && git -C CHECKOUT checkout 729963dd
    python -m venv .venv-peer && .venv-peer/bin/pip install -r tests/parity/requirements-authors.txt
    .venv-peer/bin/python tests/parity/make_goldens_nvidia.py --checkout CHECKOUT

Their code is imported from the checkout and runs as it is; what it imports for logging, Moses and GPU affinity is replaced by
nothing. Their `main` needs a GPU, so the model is built and saved here as it does: `MemTransformerLM(**model_config)`, one
training step, `save_checkpoint`. The checkpoint of the step lies beside what the stepped model computes.

A stream begins with an empty memory. As with the authors, every token is made a target in turn to get full log-probabilities.
"""

import argparse
import importlib
import shutil
import sys
import tempfile
from contextlib import chdir
from pathlib import Path
from typing import Any
from unittest import mock

import golden_writer
import torch
from torch import Tensor

FOLDER = Path(__file__).parent / "goldens" / "nvidia"
CODE = "PyTorch/LanguageModeling/Transformer-XL/pytorch"
PEER = "NVIDIA/DeepLearningExamples 729963dd MemTransformerLM"
NOT_NEEDED = ("dllogger", "pynvml", "sacremoses")
BASE: dict[str, Any] = {
    "n_token": 31, "n_layer": 2, "n_head": 2, "d_model": 8, "d_head": 3, "d_inner": 10, "dropout": 0.0, "dropatt": 0.0,
    "dtype": None, "tie_weight": True, "d_embed": 8, "div_val": 1, "tie_projs": [False], "pre_lnorm": False, "tgt_len": 5,
    "ext_len": 0, "mem_len": 6, "cutoffs": [], "same_length": False, "attn_type": 0, "clamp_len": -1, "sample_softmax": -1,
}  # fmt: skip
ONE_LAYER = {"n_layer": 1}  # where only tokens in and out are at stake
SIZES: dict[str, Any] = {"n_segment": 3, "batch_size": 2}
TWO, THREE = [11, 23], [7, 16, 25]

# name: hyperparameters that differ from BASE, whether expectations are written in float64 too
VARIANTS: dict[str, tuple[dict[str, Any], bool]] = {
    "plain": ({}, True),
    "untied_weight_narrow_embedding": (ONE_LAYER | {"tie_weight": False, "d_embed": 6}, False),
    "cutoffs_shared_projection": (ONE_LAYER | {"cutoffs": TWO, "tie_projs": [False, True, True], "d_embed": 6}, False),
    "cutoffs_own_projections": (ONE_LAYER | {"cutoffs": TWO, "tie_projs": [False] * 3, "d_embed": 6}, False),
    "div_val_2_three_tails": (ONE_LAYER | {"cutoffs": THREE, "tie_projs": [False, True, True, True], "div_val": 2}, False),
    "div_val_2_nothing_shared": (
        ONE_LAYER | {"cutoffs": TWO, "tie_projs": [False] * 3, "div_val": 2, "tie_weight": False},
        False,
    ),
    "same_length_clamp_len": ({"same_length": True, "clamp_len": 3}, False),
    "shaw": ({"attn_type": 1, "clamp_len": 4}, False),
    "vaswani": ({"attn_type": 2, "clamp_len": 8}, False),
    "al_rfou": ({"attn_type": 3, "d_head": 4}, False),
}


def main() -> None:
    """Write all goldens anew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, required=True, help="a checkout of NVIDIA/DeepLearningExamples")
    code = parser.parse_args().checkout.resolve() / CODE
    shutil.rmtree(FOLDER, ignore_errors=True)
    sys.path[:0] = [str(code)]
    sys.modules.update({name: mock.MagicMock() for name in NOT_NEEDED})
    for seed, (name, (changes, fp64)) in enumerate(VARIANTS.items()):
        write(FOLDER / name, BASE | changes, seed, fp64=fp64)
    golden_writer.check_sizes(FOLDER)


def write(golden: Path, model_config: dict[str, Any], seed: int, *, fp64: bool) -> None:
    """Write one golden."""
    torch.manual_seed(seed)
    model = importlib.import_module("mem_transformer").MemTransformerLM(**model_config).eval()
    golden_writer.randomize(model, seed)
    ids, labels = golden_writer.stream(
        model_config["n_token"], tgt_len=model_config["tgt_len"], cutoffs=model_config["cutoffs"], seed=seed, **SIZES
    )
    save_after_step(model, model_config, ids, labels, golden / "checkpoint", optim="adam" if seed == 0 else "sgd")
    about: dict[str, Any] = {
        "peer": PEER,
        "hyperparameters": model_config,
        "first_memory": "empty",
        "aliases": golden_writer.aliases(model),
    }
    tensors = expect(model, ids, labels)
    golden_writer.check_all_learn(tensors)
    golden_writer.save_expected(golden / "expected.safetensors", tensors, **about)
    if fp64:
        with golden_writer.in_double(model, model.pos_emb):
            tensors = expect(model, ids, labels)
        golden_writer.save_expected(golden / "expected64.safetensors", tensors, **about)


def save_after_step(
    model: Any, model_config: dict[str, Any], ids: Tensor, labels: Tensor, checkpoint: Path, *, optim: str
) -> None:
    """Make one step of training and save everything with their `save_checkpoint`. Adam's state is large: one golden has it."""
    train: Any = importlib.import_module("train")
    with mock.patch.object(sys, "argv", ["train.py", "--optim", optim, "--eval_tgt_len", "1", "--mem_len", "1"]):
        args = train.parse_args()
    values = model_config | {"tied": model_config["tie_weight"], "not_tied": not model_config["tie_weight"]}
    values["adaptive"] = bool(model_config["cutoffs"])
    vars(args).update({name: value for name, value in values.items() if name in vars(args)}, n_token=model_config["n_token"])
    if optim == "adam":
        optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=args.mom)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.max_step)
    loss, mems = model(ids[0].t().contiguous(), labels[0].t().contiguous(), None)
    loss.mean().backward()
    optimizer.step()
    scheduler.step()
    checkpoint.mkdir(parents=True)
    train.save_checkpoint(
        args=args, model=model, mems=[mems], model_config=model_config, optimizer=optimizer, scheduler=scheduler, scaler=None,
        vocab=vocabulary(model_config["n_token"]), epoch=1, batch=0, last_iter=0, train_step=1, best_val_loss=None,
        is_best=False, work_dir=str(checkpoint), device=torch.device("cpu"),
    )  # fmt: skip


def vocabulary(n_token: int) -> Any:
    """Build their vocabulary of `n_token` types, as for WikiText-103."""
    vocab: Any = importlib.import_module("utils.vocabulary").Vocab(special=["<eos>"], lower_case=False)
    with tempfile.TemporaryDirectory() as temporary, chdir(temporary):
        Path("train.txt").write_text("".join(f" Word{i} \n" for i in range(n_token - 1)))
        vocab.count_file("train.txt")
    vocab.build_vocab()
    assert len(vocab) == n_token
    return vocab


def expect(model: Any, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Take the expectations from the model."""
    model.crit.keep_order = True

    def read(ids: Tensor, labels: Tensor, mems: Tensor | None) -> tuple[Tensor, list[Tensor], Any]:
        data, target = ids.t().contiguous(), labels.t().contiguous()
        first = model.init_mems() if mems is None else mems
        own = model(data, target, first.clone())[0]  # kinds 2 and 3 add positions to the memory that they are given
        hidden, new_mems = model._forward(data, mems=first.clone())
        log_probs = every_log_prob(model, hidden.flatten(0, 1)).unflatten(0, target.shape).transpose(0, 1)
        torch.testing.assert_close(own.t(), -log_probs.gather(-1, labels[..., None]).squeeze(-1))
        return log_probs, [layer.transpose(0, 1) for layer in new_mems], new_mems

    return golden_writer.expectations(model, read, ids, labels)


def every_log_prob(model: Any, hidden: Tensor) -> Tensor:
    """Return log-probabilities (N, V) of every token after each of N hidden states (N, D)."""
    targets = torch.arange(model.n_token).repeat(len(hidden))
    return -model.crit(hidden.repeat_interleave(model.n_token, dim=0), targets).view(len(hidden), model.n_token)


if __name__ == "__main__":
    main()

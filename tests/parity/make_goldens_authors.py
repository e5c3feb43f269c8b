"""Write the goldens of the authors' PyTorch code: tiny random models as their train.py saves them, and what they compute.

Environment and command, from the root of the repository:

    git clone https://github.com/kimiyoung/transformer-xl CHECKOUT && git -C CHECKOUT checkout 44781ed
    python -m venv .venv-peer && .venv-peer/bin/pip install -r tests/parity/requirements-authors.txt
    .venv-peer/bin/python tests/parity/make_goldens_authors.py --checkout CHECKOUT

Their code is imported from the checkout and runs as it is, but for what today's torch refuses: it asks for a CUDA version when
imported, masks with bytes, and unpickles whole modules. No code of theirs is kept: torch's old file format would store the
source of every class, so a placeholder stands there.

A stream begins with an empty memory. They give nats of targets only, so every token of the vocabulary is made a target in turn,
with keep_order; the model's own loss is compared with what comes of it. Their memory has one tensor more than there are layers.
"""

import argparse
import functools
import importlib
import os
import runpy
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import golden_writer
import torch
from torch import Tensor, nn

FOLDER = Path(__file__).parent / "goldens" / "authors"
PEER = "kimiyoung/transformer-xl 44781ed MemTransformerLM"
BASE: dict[str, Any] = {
    "n_token": 31, "n_layer": 2, "n_head": 2, "d_model": 8, "d_head": 3, "d_inner": 10, "dropout": 0.0, "dropatt": 0.0,
    "tie_weight": True, "d_embed": 8, "div_val": 1, "tie_projs": [False], "pre_lnorm": False, "tgt_len": 5, "ext_len": 0,
    "mem_len": 6, "cutoffs": [], "same_length": False, "attn_type": 0, "clamp_len": -1, "sample_softmax": -1,
}  # fmt: skip
SIZES: dict[str, Any] = {"n_segment": 3, "batch_size": 2}
ONE_LAYER = {"n_layer": 1}  # where only tokens in and out are at stake
TWO, THREE = [11, 23], [7, 16, 25]
TIED_TWO, TIED_THREE = [False, True, True], [False, True, True, True]
AL_RFOU = {"attn_type": 3, "d_head": 4}  # positions of width n_head x d_head are added to states of width d_model
VASWANI = {"attn_type": 2, "mem_len": 0}

# name: hyperparameters that differ from BASE, then what differs in the files, and in `reading` what eval.py changes
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {"fp64": True}),
    "untied_weight": (ONE_LAYER | {"tie_weight": False}, {"legacy": True}),
    "narrow_embedding": (ONE_LAYER | {"d_embed": 6}, {"legacy": True, "corpus": "enwik8"}),
    "cutoffs_own_projections": (ONE_LAYER | {"cutoffs": TWO, "tie_projs": [False] * 3, "d_embed": 6}, {}),
    "cutoffs_shared_projection": (ONE_LAYER | {"cutoffs": TWO, "tie_projs": TIED_TWO, "d_embed": 6}, {"legacy": True}),
    "div_val_2_two_tails": ({"cutoffs": TWO, "tie_projs": TIED_TWO, "div_val": 2}, {"fp64": True, "corpus": "wt103"}),
    "div_val_2_three_tails": (ONE_LAYER | {"cutoffs": THREE, "tie_projs": TIED_THREE, "div_val": 2}, {"legacy": True}),
    "div_val_2_nothing_shared": (
        ONE_LAYER | {"cutoffs": THREE, "tie_projs": [False] * 4, "div_val": 2, "tie_weight": False},
        {"corpus": "lm1b"},
    ),
    "div_val_1_three_tails": (ONE_LAYER | {"cutoffs": THREE, "tie_projs": TIED_THREE}, {}),
    "pre_lnorm": ({"pre_lnorm": True}, {"corpus": "ptb", "legacy": True}),
    "same_length": ({"same_length": True}, {}),
    "same_length_clamp_len_of_eval": (
        {"tgt_len": 7},
        {"reading": {"tgt_len": 4, "mem_len": 9, "same_length": True, "clamp_len": 3}, "corpus": "text8"},
    ),
    "clamp_len": ({"clamp_len": 3}, {}),
    "ext_len": ({"ext_len": 2}, {}),
    "ext_len_no_memory": ({"ext_len": 3, "mem_len": 0}, {}),
    "half_data_parallel": (ONE_LAYER, {"half": True}),
    "shaw": ({"attn_type": 1}, {"fp64": True}),
    "shaw_longer_than_learned": ({"attn_type": 1, "mem_len": 3}, {"reading": {"mem_len": 9}, "legacy": True}),
    "shaw_pre_lnorm_clamp_len": ({"attn_type": 1, "pre_lnorm": True, "clamp_len": 4}, {}),
    "vaswani": (VASWANI, {"fp64": True}),
    "vaswani_pre_lnorm_clamp_len": (VASWANI | {"pre_lnorm": True, "clamp_len": 2}, {"legacy": True}),
    "al_rfou": (AL_RFOU, {"fp64": True}),
    "al_rfou_longer_than_learned": (AL_RFOU | {"mem_len": 3}, {"reading": {"mem_len": 9}, "legacy": True}),
    "al_rfou_pre_lnorm": (AL_RFOU | {"pre_lnorm": True}, {}),
    "al_rfou_no_memory": (AL_RFOU | {"mem_len": 0}, {}),
}
TRAINED = "trained"  # not one of VARIANTS: a whole run of train.py


def main() -> None:
    """Write all goldens anew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, required=True, help="a checkout of kimiyoung/transformer-xl")
    code = parser.parse_args().checkout.resolve() / "pytorch"
    shutil.rmtree(FOLDER, ignore_errors=True)
    with on_current_torch(), chdir(code):
        sys.path[:0] = [str(code)]
        for seed, (name, (changes, options)) in enumerate(VARIANTS.items()):
            write(FOLDER / name, BASE | changes, options, seed)
        train(code, FOLDER / TRAINED)
    golden_writer.check_sizes(FOLDER)


@contextmanager
def on_current_torch() -> Iterator[None]:
    """Give the authors' code the torch that it expects."""
    with (
        mock.patch.object(torch.version, "cuda", "10.0"),
        mock.patch.object(torch.Tensor, "byte", torch.Tensor.bool),
        mock.patch.object(torch, "load", functools.partial(torch.load, weights_only=False)),
        golden_writer.without_sources(),
    ):
        yield


def write(golden: Path, hyperparameters: dict[str, Any], options: dict[str, Any], seed: int) -> None:
    """Write one golden."""
    model = importlib.import_module("mem_transformer").MemTransformerLM(**hyperparameters).eval()
    golden_writer.randomize(model, seed)
    if options.get("half"):
        save_half(model, golden / "checkpoint")
    else:
        save(model, golden / "checkpoint", legacy=options.get("legacy", False))
    if "corpus" in options:
        write_corpus(golden / "checkpoint", options["corpus"], hyperparameters["n_token"])
    ids, labels = golden_writer.stream(
        hyperparameters["n_token"],
        tgt_len=options.get("reading", {}).get("tgt_len", hyperparameters["tgt_len"]),
        cutoffs=hyperparameters["cutoffs"],
        seed=seed,
        **SIZES,
    )
    write_expected(golden, model, hyperparameters, options, ids, labels)


def save(model: nn.Module, checkpoint: Path, *, legacy: bool) -> None:
    """Write the whole module, as train.py does; in the file format of 2019 or in today's."""
    checkpoint.mkdir(parents=True)
    with (checkpoint / "model.pt").open("wb") as file:
        torch.save(model, file, _use_new_zipfile_serialization=not legacy)


def save_half(model: nn.Module, checkpoint: Path) -> None:
    """Write the module in half precision, as train.py --fp16 does, and keep its rounded weights.

    It is wrapped for several GPUs, as scripts made after train.py save it; train.py itself saves what is inside. The
    frequencies of the sinusoids are rounded in the file too, which nobody means; the model keeps the right ones.
    """
    frequencies = model.get_buffer("pos_emb.inv_freq").clone()
    save(nn.DataParallel(model.half(), dim=1), checkpoint, legacy=True)
    model.float().get_buffer("pos_emb.inv_freq").copy_(frequencies)


def write_corpus(checkpoint: Path, dataset: str, n_token: int) -> None:
    """Put their cache.pt of a tiny text with `n_token` types beside the model; they keep it in the directory of the text."""
    n_word = n_token - {"wt103": 1, "ptb": 1, "lm1b": 2}.get(dataset, 0)  # <eos>; <S>, <UNK>
    words = [str(33 + i) if dataset in ("enwik8", "text8") else f"Word{i}" for i in range(n_word)]
    with tempfile.TemporaryDirectory() as temporary, chdir(temporary):
        for split in ("train", "valid", "test"):
            Path(f"{split}.txt").write_text("".join(f" {' '.join(words[i : i + 9])} \n" for i in range(0, n_word, 9)))
        Path("1b_word_vocab.txt").write_text("".join(f"{word} {i}\n" for i, word in enumerate(["<S>", "<UNK>", *words])))
        corpus = importlib.import_module("data_utils").get_lm_corpus("", dataset)
        assert len(corpus.vocab) == n_token, f"{dataset}: {len(corpus.vocab)} types"
        shutil.copy("cache.pt", checkpoint)


def write_expected(
    golden: Path, model: nn.Module, hyperparameters: dict[str, Any], options: dict[str, Any], ids: Tensor, labels: Tensor
) -> None:
    """Read the stream in float32, and in float64 if asked for, and write what comes of it."""
    about = {
        "peer": PEER,
        "hyperparameters": hyperparameters,
        "reading": options.get("reading", {}),
        "first_memory": "empty",
        "aliases": golden_writer.aliases(model),
    }
    tensors = expect(model, ids, labels, about["reading"])
    golden_writer.check_all_learn(tensors)
    golden_writer.save_expected(golden / "expected.safetensors", tensors, **about)
    if options.get("fp64"):
        with golden_writer.in_double(model, getattr(model, "pos_emb", None)):
            tensors = expect(model, ids, labels, about["reading"])
        golden_writer.save_expected(golden / "expected64.safetensors", tensors, **about)


def expect(model: Any, ids: Tensor, labels: Tensor, reading: dict[str, Any]) -> dict[str, Tensor]:
    """Take the expectations from the model, with the lengths that eval.py would set."""
    mem_len = reading.get("mem_len", model.mem_len)
    model.reset_length(ids.shape[-1], model.ext_len, mem_len)
    model.clamp_len = reading.get("clamp_len", model.clamp_len)
    model.same_length = reading.get("same_length", model.same_length)
    model.crit.keep_order = True

    def read(ids: Tensor, labels: Tensor, state: Any) -> tuple[Tensor, list[Tensor], Any]:
        mems, extended = state or (None, ids[:, :0])
        data = torch.cat([extended, ids], dim=1).t().contiguous()  # they read ext_len tokens again, as part of the segment
        target = labels.t().contiguous()
        own = model(data, target, *copies(mems))[0]
        hidden, new_mems = model._forward(data, mems=copies(mems) or model.init_mems())
        hidden = hidden[-len(target) :]
        log_probs = every_log_prob(model, hidden.flatten(0, 1)).unflatten(0, target.shape).transpose(0, 1)
        torch.testing.assert_close(own.t(), -log_probs.gather(-1, labels[..., None]).squeeze(-1))
        memory = [layer.transpose(0, 1) for layer in new_mems or []]
        n_extended = min(model.ext_len, data.shape[0])
        return log_probs, memory, (new_mems, data.t()[:, data.shape[0] - n_extended :])

    return golden_writer.expectations(model, read, ids, labels)


def copies(mems: list[Tensor] | None) -> list[Tensor]:
    """Copy a memory: attention types 2 and 3 add positions to the caller's tensors."""
    return [layer.clone() for layer in mems or []]


def every_log_prob(model: Any, hidden: Tensor) -> Tensor:
    """Return log-probabilities (N, V) of every token after each of N hidden states (N, D)."""
    targets = torch.arange(model.n_token).repeat(len(hidden))
    return -model.crit(hidden.repeat_interleave(model.n_token, dim=0), targets).view(len(hidden), model.n_token)


def train(code: Path, golden: Path) -> None:
    """Let their train.py make a run of three steps, and keep its directory but for the copies of their code."""
    settings = (
        "--dataset enwik8 --n_layer 2 --n_head 2 --d_head 3 --d_model 8 --d_inner 10 --tgt_len 5 --mem_len 6 --eval_tgt_len 4 "
        "--batch_size 4 --max_step 3 --eval-interval 3 --log-interval 1 --init_std 0.3 --lr 0.5 --optim sgd --dropout 0.1"
    )
    with tempfile.TemporaryDirectory() as temporary, chdir(temporary):
        shutil.copytree(code, "pytorch")
        os.chdir("pytorch")
        numbers = [str(33 + i * i % 37) for i in range(80)]
        Path("data").mkdir()
        for split in ("train", "valid", "test"):
            Path("data", f"{split}.txt").write_text(" ".join(numbers))
        with (
            mock.patch.object(sys, "argv", ["train.py", "--data", "data", "--work_dir", "run", *settings.split()]),
            mock.patch("time.strftime", return_value="20190109-120000"),
        ):
            run = runpy.run_path("train.py")
        model: Any = run["model"].eval()
        work_dir = Path(run["args"].work_dir)
        shutil.rmtree(work_dir / "scripts")
        shutil.copy("data/cache.pt", work_dir)
        shutil.copytree(work_dir, golden / "checkpoint")
    hyperparameters = {name: getattr(run["args"], name) for name in BASE if hasattr(run["args"], name)}
    ids, labels = golden_writer.stream(model.n_token, tgt_len=5, seed=0, **SIZES)
    write_expected(golden, model, hyperparameters | {"cutoffs": [], "tie_projs": [False], "tie_weight": True}, {}, ids, labels)


if __name__ == "__main__":
    main()

"""Write the goldens of Hugging Face's TransfoXL: tiny random models as it saves them, and what it computes with them.

Environment and command, from the root of the repository:

    python -m venv .venv-peer && .venv-peer/bin/pip install -r tests/parity/requirements-huggingface.txt
    .venv-peer/bin/python tests/parity/make_goldens_huggingface.py

It reads a stream from a full memory of zeros, which it attends to. Its own losses are shifted inside each segment and, with
cutoffs, out of order; nats are therefore gathered from its full log-probabilities, and the two are compared as sets.
"""

import shutil
import tempfile
from pathlib import Path
from typing import Any

import golden_writer
import peer_huggingface
import torch
from transformers import TransfoXLTokenizer

FOLDER = Path(__file__).parent / "goldens" / "huggingface"
BASE: dict[str, Any] = {
    "vocab_size": 31, "cutoffs": [], "div_val": 1, "d_model": 8, "d_embed": 8, "n_layer": 2, "n_head": 2, "d_head": 3,
    "d_inner": 10, "mem_len": 6, "clamp_len": -1, "same_length": False, "untie_r": True, "proj_share_all_but_first": True,
}  # fmt: skip
SIZES: dict[str, Any] = {"n_segment": 3, "batch_size": 2, "tgt_len": 5}
ONE_LAYER = {"n_layer": 1}  # where only tokens in and out are at stake
TWO, THREE = [11, 23], [7, 16, 25]

# name: hyperparameters that differ from BASE, then what differs in the files (weights, vocabulary, fp64) and in the stream
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {"fp64": True, "vocabulary": "pkl"}),
    "tied_r": ({"untie_r": False}, {"weights": "safetensors"}),
    "narrow_embedding": ({"d_embed": 6, "untie_r": False}, {"weights": "legacy", "vocabulary": "bin"}),
    "untied_weight": (ONE_LAYER | {"tie_word_embeddings": False}, {"vocabulary": "txt"}),
    "cutoffs": (ONE_LAYER | {"cutoffs": TWO}, {"weights": "legacy"}),
    "cutoffs_shared_projection": (ONE_LAYER | {"cutoffs": TWO, "d_embed": 6}, {"weights": "safetensors"}),
    "cutoffs_own_projections": (ONE_LAYER | {"cutoffs": TWO, "d_embed": 6, "proj_share_all_but_first": False}, {}),
    "div_val_2_two_tails": ({"cutoffs": TWO, "div_val": 2}, {}),
    "div_val_2_three_tails": (ONE_LAYER | {"cutoffs": THREE, "div_val": 2, "proj_share_all_but_first": False}, {}),
    "div_val_4_two_tails": (ONE_LAYER | {"cutoffs": TWO, "div_val": 4, "d_embed": 16}, {"weights": "safetensors"}),
    "div_val_4_three_tails": (ONE_LAYER | {"cutoffs": THREE, "div_val": 4, "d_embed": 64, "tie_word_embeddings": False}, {}),
    "div_val_2_nothing_shared": (
        {"cutoffs": TWO, "div_val": 2, "tie_word_embeddings": False, "proj_share_all_but_first": False, "untie_r": False},
        {"weights": "safetensors"},
    ),
    "pre_lnorm": ({"pre_lnorm": True}, {}),
    "same_length": ({"same_length": True, "cutoffs": TWO, "div_val": 2}, {"fp64": True}),
    "clamp_len": ({"clamp_len": 3}, {}),
    "no_memory": ({"mem_len": 0}, {}),
    "odd_sizes": (
        {"vocab_size": 53, "mem_len": 5, "n_head": 3, "d_head": 5, "d_inner": 7, "d_model": 10, "d_embed": 10, "clamp_len": 4}
        | {"same_length": True, "layer_norm_epsilon": 1e-3},
        {"tgt_len": 7, "batch_size": 3},
    ),
}


def main() -> None:
    """Write all goldens anew."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    for seed, (name, (changes, options)) in enumerate(VARIANTS.items()):
        write(FOLDER / name, BASE | changes, options, seed)
    golden_writer.check_sizes(FOLDER)


def write(golden: Path, hyperparameters: dict[str, Any], options: dict[str, Any], seed: int) -> None:
    """Write one golden."""
    model = peer_huggingface.build(hyperparameters, seed)
    sizes = {key: options.get(key, value) for key, value in SIZES.items()}
    ids, labels = golden_writer.stream(hyperparameters["vocab_size"], seed=seed, cutoffs=hyperparameters["cutoffs"], **sizes)
    golden_writer.save(model, golden / "checkpoint", options.get("weights", "bin"))
    if "vocabulary" in options:
        write_vocabulary(golden / "checkpoint", options["vocabulary"], hyperparameters["vocab_size"])
    about: dict[str, Any] = {
        "peer": peer_huggingface.PEER,
        "hyperparameters": hyperparameters,
        "first_memory": "zeros",
        "aliases": golden_writer.aliases(model),
    }
    tensors = peer_huggingface.expect(model, ids, labels)
    golden_writer.check_all_learn(tensors)
    golden_writer.save_expected(golden / "expected.safetensors", tensors, **about)
    if options.get("fp64"):
        with golden_writer.in_double(model, model.transformer.pos_emb):
            tensors = peer_huggingface.expect(model, ids, labels)
        golden_writer.save_expected(golden / "expected64.safetensors", tensors, **about)


def write_vocabulary(checkpoint: Path, kind: str, vocab_size: int) -> None:
    """Put a vocabulary of `vocab_size` words beside a model, in one of the three kinds of file that exist.

    pkl: the tokenizer's whole state pickled, with its Moses objects, as `save_pretrained` does; bin: the state of the authors'
    vocabulary through `torch.save`, as the converter of 2019 wrote it; txt: a word per line, from which the tokenizer is built.
    """
    words = ["<eos>", "<unk>", "<formula>", *(f"word{i}" for i in range(vocab_size - 3))]
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder, "vocab.txt")
        text.write_text("".join(f"{word}\n" for word in words))
        tokenizer = TransfoXLTokenizer(vocab_file=str(text), eos_token="<eos>")
        assert tokenizer.idx2sym == words
        if kind == "txt":
            shutil.copy(text, checkpoint)
        tokenizer.vocab_file = None  # where it was built, which is nobody's business
        tokenizer.init_kwargs.pop("vocab_file", None)
    if kind == "pkl":
        tokenizer.save_pretrained(str(checkpoint))
    if kind == "bin":
        kept = ("counter", "special", "min_freq", "max_size", "lower_case", "delimiter", "vocab_file", "idx2sym", "sym2idx")
        state = {key: tokenizer.__dict__[key] for key in kept} | {"eos_idx": 0}
        torch.save(state, checkpoint / "vocab.bin", _use_new_zipfile_serialization=False)


if __name__ == "__main__":
    main()

"""Write the goldens of Hugging Face's XLNet: tiny random models as it saves them, and what it computes with them in float64.

Environment and command, from the root of the repository:

    python -m venv .venv-peer && .venv-peer/bin/pip install -r tests/parity/requirements-huggingface.txt
    .venv-peer/bin/python tests/parity/make_goldens_xlnet.py

A golden is a directory with `checkpoint/`, what `save_pretrained` writes, and `expected.safetensors` (see peer_xlnet.py, and
for fine-tuned models, in `goldens/xlnet_heads`, peer_xlnet_heads.py). The peer sees all memory, that of padding, too, so padded
rows have none.
"""

import shutil
from pathlib import Path
from typing import Any

import golden_writer
import peer_xlnet
import peer_xlnet_heads

FOLDER = Path(__file__).parent / "goldens" / "xlnet"
HEADS = FOLDER.with_name("xlnet_heads")
BASE: dict[str, Any] = {
    "vocab_size": 13, "d_model": 6, "n_layer": 2, "n_head": 2, "d_inner": 7, "ff_activation": "gelu", "mem_len": 7,
    "reuse_len": 4, "clamp_len": -1, "bi_data": False, "untie_r": True,
}  # fmt: skip
READING: dict[str, Any] = {
    "n_segment": 1, "batch_size": 4, "tgt_len": 6, "n_target": 3, "segments": False, "padding": False, "zeros": 0,
    "weights": "safetensors",
}  # fmt: skip
ONE = {"n_target": 0}
STREAM = {"n_segment": 4}
TEXTS = {"segments": True}
PADDED = {"padding": True, "tgt_len": 7}

# name: hyperparameters that differ from BASE, then what differs in the reading
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "content": ({}, ONE),
    "content_texts_padding": ({"ff_activation": "relu"}, ONE | TEXTS | PADDED),
    "content_memory": ({"ff_activation": "gelu_new"}, ONE | TEXTS | STREAM | {"weights": "bin"}),
    "content_both_directions": ({"bi_data": True, "clamp_len": 4, "reuse_len": None}, ONE | STREAM),
    "two_streams": ({}, {}),
    "two_streams_texts": ({"ff_activation": "relu"}, TEXTS),
    "two_streams_padding": ({"ff_activation": "gelu_new"}, TEXTS | PADDED),
    "memory": ({"ff_activation": "relu", "untie_r": False}, TEXTS | STREAM),
    "memory_longer_than_segments": ({"mem_len": 11, "reuse_len": 5}, STREAM | {"weights": "legacy"}),
    "both_directions": ({"bi_data": True, "ff_activation": "gelu_new"}, TEXTS | STREAM),
    "clamped": ({"clamp_len": 4}, TEXTS | STREAM),
    "clamped_both_directions": ({"clamp_len": 3, "bi_data": True, "ff_activation": "relu"}, TEXTS | STREAM),
    "zeros": ({"mem_len": 5, "reuse_len": None, "ff_activation": "gelu_new"}, TEXTS | STREAM | {"zeros": 5}),
    "untied_softmax": ({"tie_word_embeddings": False, "layer_norm_eps": 1e-3}, TEXTS | {"weights": "bin"}),
    "odd_sizes": ({"d_model": 12, "n_head": 3, "n_layer": 1, "d_inner": 5}, TEXTS | STREAM | {"tgt_len": 5, "n_target": 2}),
}

HEAD: dict[str, Any] = {
    "n_score": 3, "batch_size": 4, "n_choice": 3, "lengths": [7], "padding": True, "weights": "safetensors",
}  # fmt: skip
GELU_NEW: dict[str, Any] = {"ff_activation": "gelu_new", "mem_len": None, "reuse_len": None}
DOCUMENT = {"lengths": [2, 5, 5], "padding": False}
# name: task, hyperparameters that differ from BASE, then what differs in HEAD
HEAD_VARIANTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "classification": ("classification", GELU_NEW, {"weights": "bin"}),
    "classification_without_projection": (
        "classification", {"ff_activation": "relu", "summary_use_proj": False, "summary_activation": None}, {}
    ),
    "classification_of_the_mean": ("classification", {"summary_type": "mean", "layer_norm_eps": 1e-3}, {"padding": False}),
    "classification_of_documents": ("classification", {"mem_len": 6, "reuse_len": None}, DOCUMENT),
    "multilabel": ("multilabel", GELU_NEW, {}),
    "regression": ("regression", {"ff_activation": "relu"}, {"n_score": 1}),
    "choice": ("choice", GELU_NEW, {}),
    "span": ("span", GELU_NEW, {}),
    "span_with_another_epsilon": (
        "span", {"layer_norm_eps": 1e-3, "d_model": 12, "n_head": 3, "n_layer": 1}, {"padding": False}
    ),
    "tokens": ("tokens", GELU_NEW, {}),
    "tokens_of_documents": ("tokens", {"mem_len": 6, "reuse_len": None}, DOCUMENT),
}  # fmt: skip


def main() -> None:
    """Write all goldens anew."""
    for folder in (FOLDER, HEADS):
        shutil.rmtree(folder, ignore_errors=True)
    for seed, (name, (changes, options)) in enumerate(VARIANTS.items()):
        request = READING | options | {"hyperparameters": BASE | changes, "seed": seed}
        peer_xlnet.write(request, FOLDER / name, must_learn=True)
    for seed, (name, (task, changes, options)) in enumerate(HEAD_VARIANTS.items()):
        request = HEAD | options | {"task": task, "hyperparameters": BASE | changes, "seed": seed}
        peer_xlnet_heads.write(request, HEADS / name, must_learn=True)
    for folder in (FOLDER, HEADS):
        golden_writer.check_sizes(folder)


if __name__ == "__main__":
    main()

"""Checkpoints of other programs to convert in tests: copies of the goldens' ones."""

import shutil
from pathlib import Path

import torch
from hypothesis import strategies as st

from tests.conversion.readers.test_tensor_bundle import write_bundle
from transformer_xl.conversion.readers.tensor_bundle import read_bundle
from transformer_xl.conversion.readers.unpickle import Stub

GOLDENS = Path(__file__).parents[1] / "parity" / "goldens"


def copy(golden: str, folder: Path) -> Path:
    """Copy the checkpoint of a golden, without what was computed with it."""
    source = GOLDENS / golden
    return shutil.copytree(source / "checkpoint" if (source / "checkpoint").is_dir() else source, folder / "source")


D = 6
SUMMARY = {"model/sequnece_summary/summary/kernel": (D, D), "model/sequnece_summary/summary/bias": (D,)}
HEADS_OF_THE_AUTHORS = {
    "classification": SUMMARY
    | {"model/classification_mnli/logit/kernel": (D, 3), "model/classification_mnli/logit/bias": (3,)},
    "regression": {"model/regression_sts-b/logit/kernel": (D, 1), "model/regression_sts-b/logit/bias": (1,)},
    "choice": SUMMARY | {"logits/dense/kernel": (D, 1), "logits/dense/bias": (1,)},
    "span": {
        **{"start_logits/dense/kernel": (D, 1), "start_logits/dense/bias": (1,)},
        **{"end_logits/dense_0/kernel": (2 * D, D), "end_logits/dense_0/bias": (D,)},
        **{"end_logits/LayerNorm/gamma": (D,), "end_logits/LayerNorm/beta": (D,)},
        **{"end_logits/dense_1/kernel": (D, 1), "end_logits/dense_1/bias": (1,)},
        **{"answer_class/dense_0/kernel": (2 * D, D), "answer_class/dense_0/bias": (D,), "answer_class/dense_1/kernel": (D, 1)},
    },
}
"""Variables of `run_classifier.py` (of regression without a projection), `run_race.py` and `run_squad.py`, and their shapes."""


def fine_tuned_by_the_authors(kind: str, folder: Path) -> Path:
    """Write an XLNet with one of `HEADS_OF_THE_AUTHORS` as their scripts save it, slots of the optimizer included."""
    source = copy("xlnet_tensorflow/finetuned", folder)
    tensors = {name: tensor.load() for name, tensor in read_bundle(source / "xlnet_model.ckpt").items()}
    backbone = {name: tensor for name, tensor in tensors.items() if "sequnece_summary" not in name and "_sst" not in name}
    head = {name: torch.randn(shape) for name, shape in HEADS_OF_THE_AUTHORS[kind].items()}
    slots = {f"{name}/{slot}": torch.ones_like(tensor) for name, tensor in head.items() for slot in ("adam_m", "adam_v")}
    write_bundle(source / "xlnet_model.ckpt", backbone | head | slots)
    return source


def names(folder: Path) -> list[str]:
    """Return the names in a directory."""
    return sorted(path.name for path in folder.iterdir())


def touch(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).touch()
    return folder


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2**70) | st.floats() | st.text(max_size=4) | st.builds(Stub, st.just("a.b")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)

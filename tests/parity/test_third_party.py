"""TensorFlow 1 checkpoints with memories and outputs that the authors of keras-transformer-xl and keras-xlnet computed.

Nobody of this project wrote or ran them: the files are the test data of those packages, computed by the original code.
"""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from transformer_xl.batch import Order
from transformer_xl.conversion.convert import convert
from transformer_xl.model.memory import Mems
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.model.xlnet import XLNet

DATA = Path(os.environ.get("TXL_DATA", "no such directory"), "third-party")
pytestmark = [pytest.mark.data, pytest.mark.skipif(not DATA.is_dir(), reason=f"'{DATA}' does not exist; set TXL_DATA")]


def load(folder: Path, name: str) -> Tensor:
    array = torch.from_numpy(np.load(folder / f"{name}.npy", allow_pickle=False))
    return array.float() if array.is_floating_point() else array


def worst(mine: Tensor, theirs: Tensor) -> float:
    assert mine.shape == theirs.shape
    return (mine - theirs).abs().max().item()


@torch.no_grad()
@pytest.mark.parametrize(("name", "n_layer"), [("div_1", 2), ("div_2", 2), ("div_2_cutoffs_3", 3)])
def test_transformer_xl(name: str, n_layer: int, tmp_path: Path) -> None:
    """Ten tokens after a memory of ten: probabilities, and what each layer remembers of both."""
    folder = DATA / "transformer-xl" / name
    convert(folder, tmp_path / "native", settings={"mem_len": 10, "clamp_len": 1000})
    model = TransformerXL.from_pretrained(tmp_path / "native").with_context(mem_len=20).eval()
    memory = Mems(tuple(load(folder, f"memory_{i}") for i in range(n_layer)), torch.tensor([10]))
    out = model(load(folder, "tokens"), mems=memory)
    assert worst(out.logits.softmax(-1), load(folder, "softmax")) < 3e-7
    assert len(out.mems.hidden) == n_layer
    for i, hidden in enumerate(out.mems.hidden):
        assert worst(hidden, load(folder, f"new_memory_{i}")) < 3e-6


@torch.no_grad()
@pytest.mark.parametrize("name", ["empty", "pre", "tune"])
def test_xlnet(name: str, tmp_path: Path) -> None:
    """Five tokens, each of which sees those before it: states, predictions of those that are hidden, and memories."""
    folder = DATA / "xlnet" / name
    convert(folder, tmp_path / "native", settings={"mem_len": 5})
    model = XLNet.from_pretrained(tmp_path / "native").eval()
    ids, segments = load(folder, "input_ids"), load(folder, "seg_ids")
    place = torch.arange(5).expand(2, 5)
    has_memory = name != "empty"
    memory = model.init_mems(2, length=0)
    if has_memory:
        memory = Mems((load(folder, "mems_0"), load(folder, "mems_1")), torch.tensor([5, 5]))
    if name == "pre":
        out = model(ids, order=Order(place, place, place), mems=memory, segments=segments)
        hidden = load(folder, "input_query") > 0  # elsewhere, their second stream starts with the token itself
        assert worst(out.logits.softmax(-1)[hidden], load(folder, "pre_output")[hidden]) < 1e-8
        new = out.mems
    else:
        states, new = model.read(ids, order=Order(place, place, place[:, :0]), mems=memory, segments=segments)
        assert worst(states, load(folder, f"{name}_output")) < 1e-6
    for i in range(2 if has_memory else 0):
        assert worst(new.hidden[i], load(folder, f"{name}_new_mems_{i}")) < 1e-6

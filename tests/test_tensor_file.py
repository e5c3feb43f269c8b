"""Tensors of any kind load back from a file bit for bit, and other tools can read the file."""

import json
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tests.checkpoint.helpers import (
    DTYPES,
    assert_same,
    assert_same_tensors,
    numbered,
    only,
    reload,
)
from transformer_xl.checkpoint.store import CheckpointStore


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_no_dimension_load_back(dtype: torch.dtype) -> None:
    model = {"scalar": torch.tensor(1).to(dtype), "empty": torch.empty(0, 3, dtype=dtype), "row": torch.arange(5).to(dtype)}
    assert_same_tensors(reload(only(model)).model, model)


def test_strided_overlapping_and_tied_tensors_load_back_equal_and_apart() -> None:
    weight = torch.arange(12.0).reshape(3, 4)
    model = {
        "embedding": weight,
        "head": weight,
        "transposed": weight.T,
        "slice": weight[:, 1:3],
        "cell": weight[1:2, 1:2],
        "stepped": weight[0, ::4],
        "expanded": torch.ones(1).expand(5),
        "parameter": torch.nn.Parameter(weight[0]),
        "conjugate part": torch.tensor([1 + 2j]).conj().imag,
    }
    loaded = reload(only(model)).model
    assert_same_tensors(loaded, {name: tensor.detach().resolve_neg() for name, tensor in model.items()})
    assert len({tensor.untyped_storage().data_ptr() for tensor in loaded.values()}) == len(model)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tensors_on_a_gpu_load_back_on_the_cpu() -> None:
    weight = torch.randn(7, 5)
    assert_same_tensors(reload(only({"w": weight.cuda()})).model, {"w": weight})


def test_loaded_tensors_do_not_map_the_file(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    path = store.save(numbered(1)) / "model.safetensors"
    loaded = store.load(1)
    with path.open("r+b") as file:
        file.write(b"\xff" * path.stat().st_size)
    assert_same(loaded, numbered(1))


def test_other_tools_read_the_weights(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    path = store.save(numbered(3)) / "model.safetensors"
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert_same_tensors({name: file.get_tensor(name) for name in file.keys()}, numbered(3).model)  # noqa: SIM118


def test_data_is_aligned_for_readers_that_map_the_file() -> None:
    model = {"a": torch.zeros(3, dtype=torch.uint8), "b": torch.zeros(3, dtype=torch.float64), "c": torch.zeros(1)}
    with tempfile.TemporaryDirectory() as directory:
        data = (CheckpointStore(Path(directory)).save(only(model)) / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert length % 8 == 0
    assert all(header[name]["data_offsets"][0] % tensor.element_size() == 0 for name, tensor in model.items())


def test_the_most_tensors_that_can_be_saved_load_back() -> None:
    model = {f"{{{i}": torch.empty(0) for i in range(20_000)} | {str(i): torch.empty(0) for i in range(10_000)}
    assert len(reload(only(model)).model) == 30_000

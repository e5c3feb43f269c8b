"""Tensors of any kind load back from a file bit for bit, and other tools can read the file."""

import json
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tests.checkpoint.helpers import (
    DTYPES,
    assert_same,
    assert_same_tensors,
    numbered,
    only,
    reload,
)
from transformer_xl import tensor_file
from transformer_xl.checkpoint.store import CheckpointStore
from transformer_xl.errors import CheckpointError
from transformer_xl.tensor_file import TensorFile, load_tensors, open_tensors, write_sealed_tensors


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


def test_the_most_tensors_that_can_be_saved_load_back(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tensor_file.MAX_PARTS == 20 * tensor_file.MAX_TENSORS
    monkeypatch.setattr(tensor_file, "MAX_TENSORS", 1_000)
    monkeypatch.setattr(tensor_file, "MAX_PARTS", 20_000)
    model = {f"{{{i}": torch.empty(0) for i in range(700)} | {str(i): torch.empty(0) for i in range(300)}
    assert len(reload(only(model)).model) == 1_000
    with pytest.raises(CheckpointError, match=r"^1001 tensors need a header of \d+ bytes, and 1000 tensors .* is the most"):
        reload(only(model | {"more": torch.empty(0)}))


def test_any_flipped_bit_of_a_sealed_file_is_found(tmp_path: Path) -> None:
    """Only where the name of the hash is spelled, the file looks like one of another program; its numbers are right then."""
    model = {"a": torch.arange(3.0), "b": torch.ones(2, dtype=torch.bfloat16)}
    content = {name: (tensor.dtype, tensor.shape) for name, tensor in model.items()}
    path = tmp_path / "x.safetensors"
    size = write_sealed_tensors(path, content, model.__getitem__, metadata={"note": "x"})
    data = path.read_bytes()
    assert size == len(data)
    assert_same_tensors(load_tensors(path), model)
    assert_same_tensors(load_file(path), model)
    n_silent = 0
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            assert_same_tensors(load_tensors(path), model)
            n_silent += 1
        except CheckpointError as error:
            assert "x.safetensors' " in str(error)
    assert n_silent <= 8 * len("transformer_xl.sha256")
    path.write_bytes(data)
    with open_tensors(path) as file:
        file.verify()
        assert file.metadata["note"] == "x"


def test_a_sealed_file_that_differs_is_named_with_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "a b" / "x.safetensors"
    path.parent.mkdir()
    write_sealed_tensors(path, {"a": (torch.float32, torch.Size([2]))}, lambda _: torch.ones(2), metadata={})
    corrupt_last(path)
    for read in (TensorFile.load, TensorFile.verify):
        with (
            pytest.raises(CheckpointError, match=r"its bytes are not those that were written .* txl seal '.*/a b'$"),
            open_tensors(path) as file,
        ):
            read(file)


def corrupt_last(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)

"""Headers of safetensors files are checked against the file before anything is read."""

import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conversion.hostile import safetensors_file
from transformer_xl.conversion.readers import inert
from transformer_xl.conversion.readers.inert import TensorRef
from transformer_xl.conversion.readers.safetensors_files import read_safetensors
from transformer_xl.errors import CheckpointError
from transformer_xl.tensor_file import MAX_TENSORS


def test_every_type_and_shape(tmp_path):
    tensors = {name: (torch.randn(shape) * 9).abs().to(dtype) for name, dtype in inert.DTYPES.items() for shape in [(3, 4, 2)]}
    tensors |= {"scalar": torch.tensor(3.5), "empty": torch.zeros(0, 3), "line": torch.arange(5.0), "ünï": torch.ones(1, 1)}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    found = read_safetensors(tmp_path / "x.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert isinstance(found[name], TensorRef)
        assert found[name].load().equal(tensor), name
    reference = load_file(tmp_path / "x.safetensors")
    assert all(found[name].shape == tuple(reference[name].shape) for name in reference)


def test_a_file_without_tensors(tmp_path):
    (tmp_path / "x.safetensors").write_bytes(safetensors_file({}))
    assert read_safetensors(tmp_path / "x.safetensors") == {}


def test_numbers_are_where_they_belong(tmp_path):
    header = {
        "b": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
        "a": {"dtype": "I16", "shape": [1, 2], "data_offsets": [8, 12]},
    }
    path = tmp_path / "x.safetensors"
    path.write_bytes(safetensors_file(header, struct.pack("<2f2h", 1.5, -2, 7, -8)))
    found = read_safetensors(path)
    assert (found["b"].load().tolist(), found["a"].load().tolist()) == ([1.5, -2], [[7, -8]])


def many_tensors(n):
    return safetensors_file({f"t{i}": {"dtype": "F32", "shape": [0, 4], "data_offsets": [0, 0]} for i in range(n)})


def test_the_number_of_tensors(tmp_path, monkeypatch):
    (tmp_path / "x.safetensors").write_bytes(many_tensors(50_000))
    assert len(read_safetensors(tmp_path / "x.safetensors")) == MAX_TENSORS == 50_000
    monkeypatch.setattr("transformer_xl.tensor_file.MAX_TENSORS", 50)
    (tmp_path / "x.safetensors").write_bytes(many_tensors(51))
    with pytest.raises(CheckpointError, match="51 tensors; 50 is the most"):
        read_safetensors(tmp_path / "x.safetensors")

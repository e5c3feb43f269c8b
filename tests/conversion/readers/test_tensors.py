"""Tensors of safetensors files are found where the header says."""

import struct

import torch
from safetensors.torch import load_file, save_file

from tests.conversion.hostile import safetensors_file
from transformer_xl.conversion.readers.tensors import DTYPES, read_safetensors


def test_every_type_and_shape(tmp_path):
    tensors = {name: (torch.randn(shape) * 9).abs().to(dtype) for name, dtype in DTYPES.items() for shape in [(3, 4, 2)]}
    tensors |= {"scalar": torch.tensor(3.5), "empty": torch.zeros(0, 3), "line": torch.arange(5.0), "ünï": torch.ones(1, 1)}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    found = read_safetensors(tmp_path / "x.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].load().equal(tensor) and found[name].n_bytes == tensor.nbytes, name
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

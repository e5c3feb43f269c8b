"""Tensors of any kind load back from a file bit for bit, and other tools can read the file."""

import json
import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoint.helpers import (
    DTYPES,
    assert_same,
    assert_same_tensors,
    numbered,
    only,
    reload,
)
from transformer_xl.checkpoint.store import CheckpointStore
from transformer_xl.conversion.readers.tensors import read_safetensors
from transformer_xl.errors import CheckpointError
from transformer_xl.files import record_of, write_file
from transformer_xl.manifest import Manifest
from transformer_xl.tensor_file import TensorFile, encode_tensors, load_tensors


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


ODD = {"scalar": torch.tensor(1.5), "empty": torch.empty(0, 3), "row": torch.arange(5.0)}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_files_are_read_by_the_library_and_its_files_by_us(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in ODD.items()}
    write_file(tmp_path / "ours", encode_tensors(tensors, {"note": "é"}))
    assert_same_tensors(load_file(tmp_path / "ours"), tensors)
    save_file(tensors, tmp_path / "theirs", metadata={"format": "pt", "note": "é"})
    assert_same_tensors(load_tensors(tmp_path / "theirs"), tensors)
    assert TensorFile(tmp_path / "theirs").metadata == TensorFile(tmp_path / "ours").metadata == {"format": "pt", "note": "é"}


def test_any_flipped_bit_is_found_by_a_manifest(tmp_path: Path) -> None:
    model = {"a": torch.arange(3.0), "b": torch.ones(2, dtype=torch.bfloat16), "c": torch.tensor([True]), "d": torch.empty(0)}
    path = tmp_path / "x.safetensors"
    record = write_file(path, encode_tensors(model))
    assert record == record_of(path)
    manifest = Manifest({path.name: record}, {}, "do something")
    data = path.read_bytes()
    assert_same_tensors(load_tensors(path, manifest), model)
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:  # the library reads any byte but 0 as true
            assert_same_tensors(load_tensors(path, manifest), model)
            assert bit // 8 == len(data) - 1
        except CheckpointError as error:
            assert re.search(r"x.safetensors'(:.* not known| is damaged: its sha256 is| is no sound)", str(error))


def test_a_file_that_is_changed_or_cut_after_it_was_opened(tmp_path: Path) -> None:
    """What was read stays as it is, and what was not is an error in one line, and no end of the process."""
    path = tmp_path / "x.safetensors"
    write_file(path, encode_tensors({"a": torch.ones(50_000), "b": torch.ones(50_000)}))
    file = TensorFile(path)
    first = file.load_one("a")
    path.write_bytes(path.read_bytes()[:-4] + bytes(4))
    assert file.load_one("b")[-1] == 0
    os.truncate(path, 300_000)
    with pytest.raises(
        CheckpointError, match=r"x.safetensors' is no sound safetensors file \(Could not read tensor b.*copy or down"
    ):
        file.load_one("b")
    assert torch.equal(first, torch.ones(50_000))


def test_tensors_lie_where_those_of_pytorch_do(tmp_path: Path) -> None:
    """Some libraries sum in an order that depends on it."""
    path = tmp_path / "x.safetensors"
    write_file(path, encode_tensors({"a": torch.ones(3), "b": torch.ones(100)}))
    assert all(tensor.data_ptr() % 64 == 0 for tensor in load_tensors(path).values())


HEADERS = {
    "overlap": ([2], {"a": [0, 8], "b": [4, 12]}),
    "hole": ([2], {"a": [0, 8], "b": [12, 20]}),
    "beyond the end": ([2], {"a": [0, 8], "b": [8, 2**40]}),
    "negative": ([2], {"a": [-8, 0]}),
    "short": ([2], {"a": [0, 4]}),
    "a shape that overflows": ([0, 2**63 - 1, 4], {"a": [0, 0]}),
}


@pytest.mark.parametrize("case", HEADERS)
def test_places_that_cannot_be_are_refused_in_one_line(tmp_path: Path, case: str) -> None:
    shape, places = HEADERS[case]
    text = json.dumps(
        {name: {"dtype": "F32", "shape": shape, "data_offsets": place} for name, place in places.items()}
    ).encode()
    n_byte = 0 if 0 in shape else 20
    (tmp_path / "x").write_bytes(len(text).to_bytes(8, "little") + text + bytes(n_byte))
    for load in (lambda path: TensorFile(path).load(), lambda path: [each.load() for each in read_safetensors(path).values()]):
        with pytest.raises(CheckpointError, match=r"x' is no sound safetensors file \(.*\); copy or down.* again$") as caught:
            load(tmp_path / "x")
        assert "\n" not in str(caught.value)

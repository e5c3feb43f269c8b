"""A hundred damaged files of each format, or a thousand: an error of one line or a well-formed result, and nothing else."""

import collections
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from transformer_xl.conversion.readers.tensors import ForeignTensor, SafeTensor, TensorRef, read_safetensors
from transformer_xl.conversion.readers.unpickle import unpickle
from transformer_xl.errors import CheckpointError


def write(kind: str, path: Path) -> dict[str, torch.Tensor]:
    """Write a sound file; return its tensors."""
    torch.manual_seed(0)
    base = torch.randn(4, 6)
    tensors = {"base": base, "other": torch.arange(9), "half": torch.randn(3).half()}
    if kind == "safetensors":
        save_file(tensors, path)
        return tensors
    tensors |= {"view": base.t(), "row": base[2]}
    extra = {"config": {"n_layer": 2, "lr": 0.5}, "words": ["a", "é", "word"], "counter": collections.Counter("abca")}
    if kind == "pickle":
        path.write_bytes(pickle.dumps(extra | {"set": {1, 2}, "tuple": (None, True, 2**70)}, 2))
        return {}
    torch.save(tensors | extra, path, _use_new_zipfile_serialization=kind == "zip")
    return tensors


def corrupt(data: bytes, rng: random.Random) -> bytes:
    """Return `data` with bits flipped, cut off, with a part moved, left out or replaced by noise."""
    at, n = rng.randrange(len(data)), rng.randint(1, 40)
    match rng.randrange(6):
        case 0:
            changed = bytearray(data)
            for _ in range(rng.randint(1, 4)):
                changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            return bytes(changed)
        case 1:
            return data[:at]
        case 2:
            source = rng.randrange(len(data))
            return data[:at] + data[source : source + n] + data[at:]
        case 3:
            return data[:at] + data[at + n :]
        case 4:
            return data[:at] + rng.randbytes(n) + data[at + n :]
        case _:
            changed = bytearray(data)
            changed[at] = rng.choice(b"\x00\xff\x7f\x80(.QRbcit\x81\x93")
            return bytes(changed)


def tensors_in(found: Any) -> list[ForeignTensor]:
    """Return every tensor of a result."""
    if isinstance(found, TensorRef | SafeTensor):
        return [found]
    children = found.values() if isinstance(found, dict) else found if isinstance(found, (list, tuple)) else ()
    return [tensor for child in children for tensor in tensors_in(child)]


@pytest.mark.parametrize("n", [100, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["zip", "legacy", "pickle", "safetensors"])
def test_damage_is_found_or_harmless(kind: str, n: int, tmp_path: Path) -> None:
    rng, path = random.Random(kind), tmp_path / "file"
    expected = write(kind, path)
    sound, accepted = path.read_bytes(), 0
    for i in range(n):
        path.write_bytes(corrupt(sound, rng))
        try:
            found = read_safetensors(path) if kind == "safetensors" else unpickle(path)
            loaded = [tensor.load() for tensor in tensors_in(found)]
        except CheckpointError as error:
            assert "\n" not in str(error), i
            assert "file'" in str(error), i
            continue
        accepted += 1
        # without checksums, numbers may change unnoticed
        assert kind != "zip" or all(found[key].load().equal(tensor) for key, tensor in expected.items()), i
        assert kind != "safetensors" or len(loaded) == len(found), i
    assert 0 < accepted < n / 2

"""Corrupts files at random and reads them in a process of its own; prints what broke a promise.

Arguments: two numbers of corruptions per format. The first are read as users read them, with a child that parses pickles; the
others are parsed in this process, which may then take 256 MB more memory than it has.
"""

import collections
import io
import json
import pickle
import random
import resource
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from transformer_xl.conversion.readers import pickle_child, pickles, torch_files
from transformer_xl.conversion.readers.inert import TensorRef
from transformer_xl.conversion.readers.safetensors_files import read_safetensors
from transformer_xl.errors import CheckpointError

KINDS = ("zip", "legacy", "pickle", "safetensors")


def parse_inside(path: Path, file: Any, kind: str, start: int, end: int) -> tuple[dict[str, Any], str]:
    """Stand in for `pickles.read_in_child`, without a child."""
    buffered = io.BufferedReader(io.FileIO(file.fileno(), closefd=False))  # as the child opens it
    try:
        header, content = pickle_child.parse(kind, buffered, start, end)
    except (pickle_child.RefusedError, MemoryError) as error:
        raise CheckpointError(f"'{path}' {error}") from error
    return header, json.dumps(content)


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


def tensors_in(found: Any) -> list[TensorRef]:
    """Return every tensor of a result."""
    if isinstance(found, TensorRef):
        return [found]
    children = found.values() if isinstance(found, dict) else found if isinstance(found, (list, tuple)) else ()
    return [tensor for child in children for tensor in tensors_in(child)]


def fuzz(kind: str, n: int, rng: random.Random, path: Path) -> dict[str, Any]:
    """Return what was wrong with how `n` corruptions of a file were read, and how many passed for sound."""
    read = {"pickle": pickles.read_pickle, "safetensors": read_safetensors}.get(kind, torch_files.read_torch)
    wrong, accepted = [], 0
    expected = write(kind, path)
    sound = path.read_bytes()
    for i in range(n):
        path.write_bytes(corrupt(sound, rng))
        try:
            found = read(path)
            loaded = [tensor.load() for tensor in tensors_in(found)]
            accepted += 1
            same = kind != "zip" or all(found[key].load().equal(tensor) for key, tensor in expected.items())
            if not same or (kind == "safetensors" and len(loaded) != len(found)):
                wrong.append(f"{i}: silently wrong")
        except CheckpointError as error:
            if "\n" in str(error) or "file'" not in str(error):
                wrong.append(f"{i}: {error!r}")
        except BaseException as error:
            wrong.append(f"{i}: {error!r}")
    return {"wrong": wrong, "accepted": accepted}


def main() -> None:
    n_child, n_inside = map(int, sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        report = {f"{kind} child": fuzz(kind, n_child, random.Random(f"{kind} child"), path) for kind in KINDS}
        torch_files.read_in_child = pickles.read_in_child = parse_inside
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, used + 2**28))
        report |= {f"{kind} inside": fuzz(kind, n_inside, random.Random(f"{kind} inside"), path) for kind in KINDS}
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()

"""Checkpoints whose content shows their step, and the comparison that all tests of the store use."""

import tempfile
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from transformer_xl.checkpoint.store import Checkpoint, CheckpointStore


def numbered(step: int, *, n_values: int = 64) -> Checkpoint:
    """A checkpoint in which every part contains its step, so that a mixture of two checkpoints is noticed."""
    return Checkpoint(
        step=step,
        model={"embedding": torch.full((n_values,), float(step)), "bias": torch.full((3,), step, dtype=torch.bfloat16)},
        training={"momentum": torch.full((n_values,), float(step)), "rng": torch.full((16,), step % 256, dtype=torch.uint8)},
        state={"step": step, "loss": step + 0.1, "stream": {"offset": step * 7}},
    )


def assert_same(actual: Checkpoint, expected: Checkpoint) -> None:
    assert actual.step == expected.step
    assert_same_tensors(actual.model, expected.model)
    assert_same_tensors(actual.training, expected.training)
    assert spelled(actual.state) == spelled(expected.state)


def assert_same_tensors(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, name
        assert actual[name].shape == tensor.shape, name
        assert as_bytes(actual[name]) == as_bytes(tensor), name


def as_bytes(tensor: Tensor) -> bytes:
    """The bits of a tensor: unlike ==, they differ between -0.0 and 0.0 and between NaNs."""
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).numpy().tobytes()


def spelled(value: Any) -> str:
    """A text that differs if type or value differ, because 1, 1.0 and True are equal in Python."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key!r}: {spelled(value[key])}' for key in sorted(value))}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(spelled, value))}]"
    return repr(value)


def never(message: str) -> NoReturn:
    """An `on_damaged` for stores without damage."""
    raise AssertionError(message)


DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.bool),
]


def only(model: dict[str, Tensor] | None = None, state: dict[str, Any] | None = None) -> Checkpoint:
    return Checkpoint(step=1, model=model or {}, training={}, state=state or {})


def reload(checkpoint: Checkpoint) -> Checkpoint:
    with tempfile.TemporaryDirectory() as directory:
        store = CheckpointStore(Path(directory))
        store.save(checkpoint)
        return store.load(checkpoint.step)


def names(store: CheckpointStore) -> list[str]:
    return sorted(path.name for path in store.directory.iterdir())


def corrupt(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)

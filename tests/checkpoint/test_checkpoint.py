"""A checkpoint loads back unchanged; an error names what is damaged; content that cannot be stored is refused."""

import dataclasses
import hashlib
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.checkpoint.helpers import (
    DTYPES,
    assert_same,
    corrupt,
    names,
    numbered,
    only,
    reload,
)
from tests.helpers import examples
from transformer_xl.checkpoint.store import Checkpoint, CheckpointStore
from transformer_xl.errors import CheckpointError


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Any bits of any dtype, so NaN payloads and denormals too; any shape, with 0 dimensions and with empty ones."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    size = torch.Size(shape).numel() * dtype.itemsize
    data = bytearray(draw(st.binary(min_size=size, max_size=size)))
    if dtype == torch.bool:
        data = bytearray(byte & 1 for byte in data)
    return torch.frombuffer(data, dtype=dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)


tensor_names = st.text(st.characters(exclude_categories=["Cs"])).filter(lambda name: name != "__metadata__")


tensor_dicts = st.dictionaries(tensor_names, tensors(), max_size=5)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda children: st.lists(children) | st.dictionaries(st.text(), children),
    max_leaves=20,
)


@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    step=st.integers(0, 10**18 - 1), model=tensor_dicts, training=tensor_dicts, state=st.dictionaries(st.text(), json_values)
)
def test_every_checkpoint_loads_back_bit_for_bit(
    step: int, model: dict[str, Tensor], training: dict[str, Tensor], state: dict[str, Any]
) -> None:
    checkpoint = Checkpoint(step=step, model=model, training=training, state=state)
    assert_same(reload(checkpoint), checkpoint)


def test_equal_checkpoints_are_equal_files(tmp_path: Path) -> None:
    checkpoint = numbered(5)
    reordered = Checkpoint(
        5, dict(reversed(checkpoint.model.items())), checkpoint.training, dict(reversed(checkpoint.state.items()))
    )
    first, second = (CheckpointStore(tmp_path / name).save(item) for name, item in (("a", checkpoint), ("b", reordered)))
    for path in first.iterdir():
        assert path.read_bytes() == (second / path.name).read_bytes()


def test_files_are_as_readable_as_the_user_wishes(store: CheckpointStore) -> None:
    before = os.umask(0o027)
    try:
        path = store.save(numbered(1))
    finally:
        os.umask(before)
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()} == {0o640}


def rewrite(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_bytes()), **changes}))


def forge(directory: Path, name: str, data: bytes) -> None:
    """Replace a file together with its entry in the manifest, like an attacker."""
    (directory / name).write_bytes(data)
    files = json.loads((directory / "manifest.json").read_bytes())["files"]
    files[name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    rewrite(directory / "manifest.json", files=files)


def safetensors(header: bytes, data: bytes = b"") -> bytes:
    return len(header).to_bytes(8, "little") + header + data


MANIFEST, MODEL, STATE = "manifest.json", "model.safetensors", "state.json"


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda d: (d / MODEL).write_bytes((d / MODEL).read_bytes() + b"\0"), "is no sound safetensors file"),
        (lambda d: corrupt(d / MODEL), "its sha256 is [0-9a-f]{12}… and [0-9a-f]{12}… was written"),
        (lambda d: corrupt(d / MANIFEST), r"is damaged: .* was written \(manifest.json\)"),
        (lambda d: (d / MANIFEST).write_bytes(b"[]"), "it is no manifest"),
        (lambda d: (d / MANIFEST).write_bytes(b"[" * 60_000), "manifest.json' is damaged: it is nested too deep"),
        (lambda d: rewrite(d / MANIFEST, format=3), "has format 3 and this version reads 2; upgrade transformer_xl"),
        (lambda d: rewrite(d / MANIFEST, step=2), "it is of step 2, not 1"),
        (
            lambda d: rewrite(d / MANIFEST, files={"../x": {"size": 1, "sha256": ""}}),
            "it does not list model.safetensors, training.safetensors, state.json",
        ),
        (lambda d: rewrite(d / MANIFEST, files={MODEL: 1}), "it is no manifest"),
        (lambda d: forge(d, STATE, b"\xff"), "state.json' is damaged: .*can't decode"),
        (lambda d: forge(d, MODEL, b""), r"model.safetensors' is no sound safetensors file \(header too small\)"),
        (lambda d: forge(d, MODEL, b"\xff" * 100), r"is no sound safetensors file \(header too large\)"),
        (lambda d: forge(d, MODEL, safetensors(b"{" * 2**20)), "is no sound safetensors file"),
        (
            lambda d: forge(d, MODEL, safetensors(b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}', b"1234")),
            "is no sound safetensors file",
        ),
        (
            lambda d: forge(d, MODEL, safetensors(b'{"w":{"dtype":"F4","shape":[2],"data_offsets":[0,1]}}', b"1")),
            "tensor 'w' has type F4, which is not known here",
        ),
    ],
)
def test_every_damage_is_named_in_one_line(store: CheckpointStore, damage: Callable[[Path], object], reason: str) -> None:
    damage(store.save(numbered(1)))
    with pytest.raises(CheckpointError, match=reason) as caught:
        store.load(1)
    assert "\n" not in str(caught.value)
    assert "step-00000001" in str(caught.value)


def test_a_file_that_is_missing_names_itself(store: CheckpointStore) -> None:
    (store.save(numbered(1)) / MODEL).unlink()
    with pytest.raises(FileNotFoundError, match=r"step-00000001/model\.safetensors"):
        store.load(1)


@pytest.mark.parametrize(
    ("checkpoint", "reason"),
    [
        (only(state={"lr": float("nan")}), "the state cannot be stored as JSON: .*JSON compliant"),
        (only(state={"w": torch.ones(1)}), "the state cannot be stored as JSON: .*Tensor"),
        (only(state={"a": {1: 2}}), "the state cannot be stored as JSON: it would come back changed"),
        (only(state={"betas": (0.9, 0.99)}), "the state cannot be stored as JSON: it would come back changed"),
        (only({"w": torch.ones(2, 2).to_sparse()}), r"tensor 'w' \(torch.float32, torch.sparse_coo, on cpu\) cannot be stored"),
        (only({"w": torch.ones(2, device="meta")}), r"tensor 'w' \(torch.float32, torch.strided, on meta\)"),
        (only({"w": torch.ones(2, dtype=torch.complex64)}), r"tensor 'w' \(torch.complex64, torch.strided, on cpu\)"),
    ],
)
def test_what_cannot_be_stored_is_refused_and_leaves_nothing(
    store: CheckpointStore, checkpoint: Checkpoint, reason: str
) -> None:
    store.save(numbered(1))
    with pytest.raises(CheckpointError, match=reason):
        store.save(checkpoint)
    assert names(store) == ["step-00000001"]
    assert_same(store.load(1), numbered(1))


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.faults)])
@pytest.mark.parametrize("name", ["step-00000001/manifest.json", "step-00000001/config.json", "best.json"])
def test_every_single_bit_of_the_small_files_is_guarded(tmp_path: Path, name: str, every: int) -> None:
    """They have no checksum of their own, but any change shows in a file's SHA-256, in the step, or in what the best is."""
    store = CheckpointStore(tmp_path)
    store.save(dataclasses.replace(numbered(1), copies={"config.json": b'{"name": "x"}'}), best=True)
    sound = (tmp_path / name).read_bytes()
    store.load_best(on_damaged=pytest.fail)
    for bit in range(0, 8 * len(sound), every):
        data = bytearray(sound)
        data[bit // 8] ^= 1 << bit % 8
        (tmp_path / name).write_bytes(data)
        reports: list[str] = []
        try:
            store.load_best(on_damaged=reports.append)
        except CheckpointError as error:
            reports.append(str(error))
        assert any(Path(name).name in report for report in reports), data


def test_settings_and_tokenizer_are_kept_with_the_weights(store: CheckpointStore) -> None:
    copies = {"config.json": b'{"name": "x"}', "tokenizer.json": b"anything"}
    for step in (1, 2, 3):
        store.save(dataclasses.replace(numbered(step), copies=copies if step < 3 else {**copies, "config.json": b"{}"}))
    assert store.load(2).copies == copies
    assert store.newest_copies()["config.json"] == b"{}"
    corrupt(store.directory / "step-00000003" / "config.json")
    assert store.newest_copies() == copies
    with pytest.raises(CheckpointError, match=r"step-00000003/config.json' is damaged: its sha256 is"):
        store.load(3)


def test_settings_are_changed_in_all_sound_checkpoints(store: CheckpointStore) -> None:
    for step in (1, 2):
        store.save(numbered(step), best=step == 1)
    corrupt(store.directory / "step-00000002" / "state.json")
    store.change_copies({"config.json": b"{}"})
    assert (store.load(1).copies, store.best_step, names(store)) == (
        {"config.json": b"{}"},
        1,
        ["best.json", "step-00000001", "step-00000002"],
    )
    assert_same(store.load(1), numbered(1))

"""What the store keeps, finds and refuses; the disk works and nobody kills anything here."""

import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor

from tests.checkpoint.helpers import as_bytes, assert_same, assert_same_tensors, never, numbered
from tests.helpers import examples
from transformer_xl.checkpoint.sealed_json import seal, unseal
from transformer_xl.checkpoint.snapshot import read_snapshot
from transformer_xl.checkpoint.store import Checkpoint, CheckpointStore
from transformer_xl.errors import CheckpointError, ConfigError

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.bool),
]


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints")


def names(store: CheckpointStore) -> list[str]:
    return sorted(path.name for path in store.directory.iterdir())


def only(model: dict[str, Tensor] | None = None, state: dict[str, Any] | None = None) -> Checkpoint:
    return Checkpoint(step=1, model=model or {}, training={}, state=state or {})


def reload(checkpoint: Checkpoint) -> Checkpoint:
    with tempfile.TemporaryDirectory() as directory:
        store = CheckpointStore(Path(directory))
        store.save(checkpoint)
        return store.load(checkpoint.step)


# --- round trips -----------------------------------------------------------------------------------------------------------


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


def test_loaded_tensors_do_not_map_the_file(store: CheckpointStore) -> None:
    path = store.save(numbered(1)) / "model.safetensors"
    loaded = store.load(1)
    with path.open("r+b") as file:
        file.write(b"\xff" * path.stat().st_size)
    assert_same(loaded, numbered(1))


def test_other_tools_read_the_weights(store: CheckpointStore) -> None:
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


# --- which are kept, and which are found -------------------------------------------------------------------------------------


def test_a_store_without_a_directory_is_empty(store: CheckpointStore) -> None:
    store.clean()
    assert store.steps() == []
    assert store.best_step is None
    assert not store.directory.exists()


def test_save_returns_the_directory_with_exactly_four_files(store: CheckpointStore) -> None:
    path = store.save(numbered(1000))
    assert path == store.directory / "step-00001000"
    assert sorted(file.name for file in path.iterdir()) == [
        *("manifest.json", "model.safetensors", "state.json", "training.safetensors")
    ]
    assert names(store) == ["step-00001000"]


def test_the_newest_and_the_best_are_kept(store: CheckpointStore) -> None:
    for step in (10, 20, 30, 40, 50):
        store.save(numbered(step), best=step == 20)
    assert store.steps() == [20, 40, 50]
    assert store.best_step == 20
    assert names(store) == ["best.json", "step-00000020", "step-00000040", "step-00000050"]


def test_a_new_best_releases_the_old_one(store: CheckpointStore) -> None:
    for step in (10, 20, 30, 40, 50):
        store.save(numbered(step), best=step in (10, 40))
    assert store.steps() == [40, 50]
    assert store.best_step == 40


def test_keep_counts_the_newest(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    for step in range(6):
        store.save(numbered(step))
    assert store.steps() == [3, 4, 5]


def test_steps_are_sorted_as_numbers(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=9)
    for step in (100_000_000, 99_999_999, 0):
        store.save(numbered(step))
    assert store.steps() == [0, 99_999_999, 100_000_000]
    assert store.load_newest(on_damaged=never).step == 100_000_000


def test_the_one_just_saved_stays_beside_later_ones(tmp_path: Path) -> None:
    later = CheckpointStore(tmp_path, keep=2)
    later.save(numbered(90))
    later.save(numbered(91))
    resumed = CheckpointStore(tmp_path, keep=1)
    resumed.save(numbered(10))
    assert resumed.steps() == [10, 91]


def test_saving_a_step_again_replaces_it(store: CheckpointStore) -> None:
    store.save(numbered(1), best=True)
    again = Checkpoint(1, model={"w": torch.ones(1)}, training={}, state={"again": True})
    store.save(again)
    assert_same(store.load(1), again)
    assert names(store) == ["best.json", "step-00000001"]


def test_load_newest_and_best(store: CheckpointStore) -> None:
    for step in (1, 2, 3):
        store.save(numbered(step), best=step == 1)
    assert_same(store.load_newest(on_damaged=never), numbered(3))
    assert_same(store.load_best(on_damaged=never), numbered(1))
    assert_same(store.load(2), numbered(2))


def test_foreign_names_are_neither_listed_nor_cleaned(store: CheckpointStore) -> None:
    store.save(numbered(1))
    for name in ("notes.tmp", "step-1", "step-000000000009", "step-00000001.bak", "config.json"):
        (store.directory / name).mkdir()
    (store.directory / "step-00000002").write_text("a file")
    (store.directory / "step-00000003").symlink_to(store.directory / "step-00000001")
    before = names(store)
    store.clean()
    assert store.steps() == [1]
    assert names(store) == before


def test_clean_removes_strays(store: CheckpointStore) -> None:
    store.save(numbered(1), best=True)
    for name in ("step-00000002.tmp", "step-00000001.old.tmp"):
        (store.directory / name / "deep").mkdir(parents=True)
    (store.directory / "best.json.tmp").write_text("{")
    (store.directory / "step-00000003.tmp").symlink_to(store.directory / "step-00000001")
    store.clean()
    assert names(store) == ["best.json", "step-00000001"]
    assert_same(store.load(1), numbered(1))


def test_strays_are_in_nobodys_way(store: CheckpointStore) -> None:
    store.save(numbered(1))
    for name in ("step-00000001.tmp", "step-00000002.tmp", "step-00000001.old.tmp", "step-00000001.old"):
        (store.directory / name / "deep").mkdir(parents=True)
    (store.directory / "best.json.tmp").write_text("{")
    assert store.steps() == [1]
    store.save(numbered(1), best=True)
    store.save(numbered(2))
    store.save(numbered(3), best=True)
    store.save(numbered(4))
    assert names(store) == ["best.json", "step-00000003", "step-00000004"]


def test_a_replacement_cut_short_leaves_the_old_one_readable(store: CheckpointStore) -> None:
    store.save(numbered(7)).rename(store.directory / "step-00000007.old")
    assert store.steps() == [7]
    assert_same(store.load_newest(on_damaged=never), numbered(7))
    store.clean()
    assert names(store) == ["step-00000007"]
    assert_same(store.load(7), numbered(7))


def test_a_replacement_cut_short_is_rotated_out_like_any_other(store: CheckpointStore) -> None:
    store.save(numbered(7)).rename(store.directory / "step-00000007.old")
    for step in (8, 9):
        store.save(numbered(step))
    assert names(store) == ["step-00000008", "step-00000009"]


def test_a_replacement_finished_but_for_the_deletion_is_finished(store: CheckpointStore) -> None:
    store.save(numbered(7)).rename(store.directory / "step-00000007.old")
    again = Checkpoint(7, model={}, training={}, state={"again": True})
    CheckpointStore(store.directory.parent / "other").save(again).rename(store.directory / "step-00000007")
    assert_same(store.load(7), again)
    store.clean()
    assert names(store) == ["step-00000007"]
    assert_same(store.load(7), again)


# --- damaged checkpoints ------------------------------------------------------------------------------------------------


def corrupt(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_newest_falls_back_and_names_the_file(store: CheckpointStore) -> None:
    for step in (1, 2):
        store.save(numbered(step))
    corrupt(store.directory / "step-00000002" / "model.safetensors")
    reports: list[str] = []
    assert_same(store.load_newest(on_damaged=reports.append), numbered(1))
    assert len(reports) == 1
    assert "step-00000002/model.safetensors' is damaged: its sha256 is" in reports[0]
    assert "\n" not in reports[0]


def test_newest_fails_when_none_is_sound(store: CheckpointStore) -> None:
    for step in (1, 2):
        corrupt(store.save(numbered(step)) / "state.json")
    reports: list[str] = []
    with pytest.raises(CheckpointError, match=r"can be loaded \(2 tried\); the first: .*step-00000002/state.json' is damaged"):
        store.load_newest(on_damaged=reports.append)
    assert len(reports) == 2


def test_newest_and_best_fail_when_there_is_none(store: CheckpointStore) -> None:
    for load in (store.load_newest, store.load_best):
        with pytest.raises(CheckpointError, match=r"no checkpoint in '.*/checkpoints'; check the path, or train first"):
            load(on_damaged=never)


@pytest.mark.parametrize(
    ("damage", "report"),
    [
        (lambda store: corrupt(store.directory / "best.json"), r"best\.json' is damaged"),
        (lambda store: (store.directory / "best.json").unlink(), "no best checkpoint is recorded in"),
        (lambda store: (store.directory / "best.json").write_bytes(b"x" * 10**6), r"best\.json' .* more than 65536 bytes"),
        (lambda store: corrupt(store.directory / "step-00000001" / "state.json"), r"step-00000001/state\.json' is damaged"),
        (lambda store: (store.directory / "step-00000001").rename(store.directory / "x"), "no checkpoint of step 1 in"),
        (
            lambda store: (store.directory / "best.json").write_bytes(seal({"format": 2, "step": 1})),
            "is damaged: it is not of format 1",
        ),
        (
            lambda store: (store.directory / "best.json").write_bytes(seal({"format": 1, "step": "/"})),
            "is damaged: it is not of format 1",
        ),
    ],
)
def test_best_falls_back_to_the_newest_and_says_why(
    store: CheckpointStore, damage: Callable[[CheckpointStore], object], report: str
) -> None:
    for step in (1, 2, 3):
        store.save(numbered(step), best=step == 1)
    damage(store)
    with pytest.raises(AssertionError, match=report):
        store.load_best(on_damaged=never)
    reports: list[str] = []
    assert_same(store.load_best(on_damaged=reports.append), numbered(3))
    assert len(reports) == 1


def test_no_damaged_checkpoint_is_tried_twice(store: CheckpointStore) -> None:
    store.save(numbered(1))
    corrupt(store.save(numbered(2), best=True) / "state.json")
    reports: list[str] = []
    assert store.load_best(on_damaged=reports.append).step == 1
    assert len(reports) == 1


def test_nothing_is_deleted_while_the_best_is_unknown(store: CheckpointStore) -> None:
    for step in (1, 2, 3):
        store.save(numbered(step), best=step == 1)
    corrupt(store.directory / "best.json")
    assert store.best_step is None
    store.save(numbered(4))
    assert store.steps() == [1, 2, 3, 4]
    store.save(numbered(5), best=True)
    assert store.steps() == [4, 5]


def test_a_damaged_checkpoint_is_mended_by_saving_it_again(store: CheckpointStore) -> None:
    corrupt(store.save(numbered(1)) / "manifest.json")
    store.save(numbered(1))
    assert_same(store.load(1), numbered(1))


def reseal(path: Path, **changes: object) -> None:
    path.write_bytes(seal({**unseal(path.read_bytes()), **changes}))


def forge(directory: Path, name: str, data: bytes) -> None:
    """Replace a file together with its entry in the manifest, as nobody but an attacker does."""
    (directory / name).write_bytes(data)
    files = unseal((directory / "manifest.json").read_bytes())["files"]
    files[name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    reseal(directory / "manifest.json", files=files)


def safetensors(header: bytes, data: bytes = b"") -> bytes:
    return len(header).to_bytes(8, "little") + header + data


def link(path: Path) -> None:
    path.rename(path.parent.parent / path.name)
    path.symlink_to(path.parent.parent / path.name)


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


MANIFEST, MODEL, STATE = "manifest.json", "model.safetensors", "state.json"


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda d: (d / MODEL).unlink(), "step-00000001' is damaged: model.safetensors missing"),
        (lambda d: (d / MANIFEST).unlink(), "manifest.json missing"),
        (lambda d: (d / ".hidden").touch(), "holds '.hidden', which is not part of a checkpoint"),
        (lambda d: (d / "extra\nline").touch(), r"holds 'extra\\nline'"),
        (lambda d: link(d / MODEL), "model.safetensors' is damaged: it is a link, directory or device"),
        (lambda d: link(d / MANIFEST), "manifest.json' is damaged: it is a link, directory or device"),
        (lambda d: replace_by_pipe(d / STATE), "state.json' is damaged: it is a link, directory or device"),
        (lambda d: replace_by_pipe(d / MANIFEST), "manifest.json' is damaged: it is a link, directory or device"),
        (lambda d: (d / MODEL).write_bytes((d / MODEL).read_bytes() + b"\0"), "bytes and [0-9]+ were written"),
        (lambda d: corrupt(d / MODEL), "its sha256 is [0-9a-f]{12}… and [0-9a-f]{12}… was written"),
        (lambda d: corrupt(d / MANIFEST), "manifest.json' is damaged"),
        (lambda d: (d / MANIFEST).write_bytes(b"[]"), "it holds no JSON object"),
        (lambda d: (d / MANIFEST).write_bytes(b"[" * 60_000), "manifest.json' is damaged"),
        (lambda d: (d / MANIFEST).write_bytes(b'{"a":NaN}'), "manifest.json' is damaged"),
        (lambda d: (d / MANIFEST).write_bytes((d / MANIFEST).read_bytes() + b"\n"), "its checksum does not match its content"),
        (lambda d: (d / MANIFEST).write_bytes(b" " * 70_000), "more than 65536 bytes"),
        (lambda d: reseal(d / MANIFEST, format=2), "has format 2 and this version reads 1; upgrade transformer_xl"),
        (lambda d: reseal(d / MANIFEST, step=2), "it is of step 2, not 1"),
        (
            lambda d: reseal(d / MANIFEST, files={"../x": {}}),
            "it must list model.safetensors, training.safetensors, state.json",
        ),
        (
            lambda d: reseal(d / MANIFEST, files=dict.fromkeys([MODEL, "training.safetensors", STATE], 1)),
            "each file needs a size and a sha256",
        ),
        (lambda d: forge(d, STATE, b"[1]"), "state.json' is damaged: it holds no JSON object"),
        (lambda d: forge(d, STATE, b'{"a":1e999}'), r"state\['a'\] is inf"),
        (lambda d: forge(d, STATE, b"\xff"), "state.json' is damaged: .*can't decode"),
        (lambda d: forge(d, STATE, b'{"a":' + b"[" * 10**5), "state.json' is damaged"),
        (lambda d: forge(d, STATE, b" " * (2**24 + 1)), "more than 16777216 bytes"),
        (lambda d: forge(d, MODEL, b""), "no sound safetensors file"),
        (lambda d: forge(d, MODEL, b"\xff" * 100), r"claims a header of [0-9]+ bytes; 16777216 is the most"),
        (lambda d: forge(d, MODEL, safetensors(b"{" * 60_000)), "claims 59998 tensors; 50000 is the most accepted"),
        (
            lambda d: forge(d, MODEL, safetensors(b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}', b"1234")),
            "no sound safetensors file: .*invalid shape",
        ),
        (
            lambda d: forge(d, MODEL, safetensors(b'{"w":{"dtype":"F4","shape":[2],"data_offsets":[0,1]}}', b"1")),
            "no sound safetensors file",
        ),
    ],
)
def test_every_damage_is_named_in_one_line(store: CheckpointStore, damage: Callable[[Path], object], reason: str) -> None:
    damage(store.save(numbered(1)))
    with pytest.raises(CheckpointError, match=reason) as caught:
        store.load(1)
    assert "\n" not in str(caught.value)
    assert "step-00000001" in str(caught.value)


def test_a_step_that_is_not_there(store: CheckpointStore) -> None:
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 5 in '.*'; it has none"):
        store.load(5)
    store.save(numbered(1))
    store.save(numbered(2))
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 5 in '.*'; it has steps 1, 2"):
        store.load(5)


def test_a_link_in_place_of_a_checkpoint_is_refused(store: CheckpointStore) -> None:
    path = store.save(numbered(1))
    path.with_name("link").symlink_to(path)
    with pytest.raises(CheckpointError, match="link' is damaged: it is a symbolic link, not a directory"):
        read_snapshot(path.with_name("link"), step=1)


def test_a_record_of_the_best_that_the_disk_cannot_read(store: CheckpointStore) -> None:
    store.save(numbered(1))
    (store.directory / "best.json").symlink_to("itself")
    (store.directory / "itself").symlink_to("itself")
    with pytest.raises(AssertionError, match=r"best\.json' is damaged: it is a link"):
        store.load_best(on_damaged=never)


def test_a_file_that_the_disk_cannot_read(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    path = store.save(numbered(1))

    def fail(file: Path) -> None:
        raise OSError(5, "Input/output error", str(file))

    monkeypatch.setattr(Path, "read_bytes", fail)
    with pytest.raises(CheckpointError, match=rf"'{path}/manifest.json' cannot be read \(Input/output error\); check the disk"):
        store.load(1)


# --- what cannot be saved ----------------------------------------------------------------------------------------------------

ITSELF: list[object] = []
ITSELF.append(ITSELF)


@pytest.mark.parametrize(
    ("checkpoint", "reason"),
    [
        (only(state={"lr": float("nan")}), r"state\['lr'\] is nan, which JSON cannot hold; store None or a finite number"),
        (only(state={"a": [{"b": float("-inf")}]}), r"state\['a'\]\[0\]\['b'\] is -inf"),
        (only(state={"betas": (0.9, 0.99)}), r"state\['betas'\] is a tuple, which JSON cannot hold; use a list"),
        (only(state={"w": torch.ones(1)}), r"state\['w'\] is a Tensor, which JSON cannot hold"),
        (only(state={"a": {1: 2}}), r"state\['a'\] has the key 1, and JSON keys are text; write it as '1'"),
        (only(state={"a": ITSELF}), "state cannot be stored: .*; keep to small, plain values"),
        (only(state={"a": 10**5000}), "state cannot be stored: .*digit"),
        (only(state={"a": "x" * 2**24}), "state takes 16777224 bytes as JSON, more than 16777216; put arrays into `training`"),
        (only({"w": 1.0}), "'w' is a float, not a tensor; put it into `state`"),  # type: ignore[dict-item]
        (only({3: torch.ones(1)}), "tensor name 3 cannot be stored"),  # type: ignore[dict-item]
        (only({"\ud800": torch.ones(1)}), r"tensor name '\\ud800' cannot be stored"),
        (only({"__metadata__": torch.ones(1)}), "tensor name '__metadata__' cannot be stored; use text other than"),
        (only({"w": torch.ones(2, 2).to_sparse()}), "tensor 'w' is sparse_coo, without plain data to store; make it dense"),
        (only({"w": torch.ones(2, device="meta")}), "tensor 'w' is meta, without plain data"),
        (only({"w": torch.ones(2, dtype=torch.complex64)}), "'w' has dtype torch.complex64, .* convert it to one of float64,"),
        (only({str(i): torch.empty(0) for i in range(50_001)}), "50001 tensors need a header of .* store fewer tensors"),
        (only({"x" * 2**24: torch.empty(0)}), "1 tensors need a header of .* store fewer tensors or shorter names"),
        (Checkpoint(-1, {}, {}, {}), r"step \(-1\) must be an integer from 0 to 9{18}; count optimizer steps"),
        (Checkpoint(True, {}, {}, {}), r"step \(True\) must be an integer"),
        (Checkpoint(10**18, {}, {}, {}), r"step \(10{18}\) must be an integer"),
    ],
)
def test_what_cannot_be_stored_is_refused_and_leaves_nothing(
    store: CheckpointStore, checkpoint: Checkpoint, reason: str
) -> None:
    store.save(numbered(1))
    with pytest.raises(CheckpointError, match=reason) as caught:
        store.save(checkpoint)
    assert "\n" not in str(caught.value)
    assert names(store) == ["step-00000001"]
    assert_same(store.load(1), numbered(1))


def test_the_most_tensors_that_can_be_saved_load_back() -> None:
    model = {f"{{{i}": torch.empty(0) for i in range(20_000)} | {str(i): torch.empty(0) for i in range(10_000)}
    assert len(reload(only(model)).model) == 30_000


def test_keep_below_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"keep \(0\) must be at least 1"):
        CheckpointStore(tmp_path, keep=0)


def test_bits_matter_to_the_comparison_of_these_tests() -> None:
    assert as_bytes(torch.tensor(-0.0)) != as_bytes(torch.tensor(0.0))
    with pytest.raises(AssertionError):
        assert_same(only(state={"a": 1}), only(state={"a": 1.0}))

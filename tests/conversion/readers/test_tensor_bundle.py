"""TensorFlow checkpoints: read as TensorFlow reads them, and refused when anything about them is wrong."""

import hashlib
import json
import math
import os
import random
import struct
import sys
import time
import tracemalloc
from pathlib import Path

import google_crc32c
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.conversion.readers.test_fuzz import corrupt
from tests.helpers import examples
from transformer_xl.conversion.readers.tensor_bundle import read_bundle
from transformer_xl.errors import CheckpointError

GOLDENS = Path(__file__).parents[2] / "parity" / "goldens" / "tensorflow"
BUNDLES = GOLDENS.with_name("bundles")
KINDS = ("bf16", "shards", "slots")
MAGIC = bytes.fromhex("57fb808b247547db")
CODES = {torch.float32: 1, torch.float64: 2, torch.int64: 9, torch.bool: 10, torch.bfloat16: 14, torch.float16: 19}


# A small writer


def varint(value: int) -> bytes:
    groups = []
    while value >= 0x80:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*groups, value])


def message(*fields: tuple[int, int | bytes]) -> bytes:
    """A protocol buffer message of numbers and nested messages."""
    parts = []
    for number, value in fields:
        kind, data = (0, varint(value)) if isinstance(value, int) else (2, varint(len(value)) + value)
        parts.append(varint(number << 3 | kind) + data)
    return b"".join(parts)


def checksum(data: bytes) -> bytes:
    crc = google_crc32c.value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def block(pairs: list[tuple[bytes, bytes]], restart: int = 16) -> bytes:
    parts, restarts, last = [], [], b""
    for i, (key, value) in enumerate(pairs):
        if i % restart == 0:
            restarts.append(sum(map(len, parts)))
            last = b""
        shared = next((n for n, (a, b) in enumerate(zip(last, key, strict=False)) if a != b), min(len(last), len(key)))
        parts.append(varint(shared) + varint(len(key) - shared) + varint(len(value)) + key[shared:] + value)
        last = key
    return b"".join(parts) + struct.pack(f"<{len(restarts) + 1}I", *restarts, len(restarts))


def table(blocks: list[bytes], compression: int = 0) -> bytes:
    """A table of finished blocks; where a block lies is right, whatever it holds."""
    data, handles = b"", []

    def put(content: bytes) -> bytes:
        nonlocal data
        handle = varint(len(data)) + varint(len(content))
        content += bytes([compression])
        data += content + checksum(content)
        return handle

    for i, content in enumerate(blocks):
        handles.append((b"%08d" % i, put(content)))
    meta = put(block([]))
    footer = meta + put(block(handles, restart=1))
    return data + footer.ljust(40, b"\0") + MAGIC


def raw(tensor: Tensor) -> bytes:
    return tensor.flatten().view(torch.uint8).numpy().tobytes()


def entry(tensor: Tensor, shard: int, offset: int, /, **changes: int | bytes) -> bytes:
    fields: dict[str, int | bytes] = {
        "dtype": CODES[tensor.dtype],
        "shape": message(*((2, message((1, size))) for size in tensor.shape)),
        "shard": shard,
        "offset": offset,
        "size": tensor.numel() * tensor.element_size(),
        **changes,
    }
    numbers = {"dtype": 1, "shape": 2, "shard": 3, "offset": 4, "size": 5, "slices": 7, "unknown": 99}
    return message(*((numbers[name], value) for name, value in fields.items())) + b"\x35" + checksum(raw(tensor))


def header(n_shards: int = 1, *fields: tuple[int, int | bytes]) -> bytes:
    return message((1, n_shards), (3, message((1, 1))), *fields)


def write_bundle(prefix: Path, tensors: dict[str, Tensor], n_shards: int = 1, per_block: int = 99, restart: int = 16) -> Path:
    data = [b""] * n_shards
    pairs = [(b"", header(n_shards))]
    for i, name in enumerate(sorted(tensors, key=str.encode)):
        shard = i % n_shards
        pairs.append((name.encode(), entry(tensors[name], shard, len(data[shard]))))
        data[shard] += raw(tensors[name])
    blocks = [block(pairs[i : i + per_block], restart) for i in range(0, len(pairs), per_block)]
    Path(f"{prefix}.index").write_bytes(table(blocks))
    for shard, content in enumerate(data):
        Path(f"{prefix}.data-{shard:05d}-of-{n_shards:05d}").write_bytes(content)
    return prefix


TENSORS = {"a/kernel": torch.arange(6.0).reshape(2, 3), "a/kernel/Adam": torch.ones(2, 3), "global_step": torch.tensor(123)}


@pytest.fixture
def prefix(tmp_path):
    return write_bundle(tmp_path / "model.ckpt-1", TENSORS)


def write_one(tmp_path: Path, *pairs: tuple[bytes, bytes], data: bytes = b"\0" * 64) -> Path:
    """A checkpoint whose header is sound and whose other entries are what the test says."""
    (tmp_path / "x.index").write_bytes(table([block([(b"", header()), *pairs])]))
    (tmp_path / "x.data-00000-of-00001").write_bytes(data)
    return tmp_path / "x"


def refused(path: Path, *words: str) -> None:
    """Reading it, or loading what it lists, must fail without much work, in one line that says why."""
    start = time.process_time()
    with pytest.raises((CheckpointError, OSError)) as caught:
        for ref in read_bundle(path).values():
            ref.load()
    assert time.process_time() - start < 1
    text = str(caught.value)
    assert text.isprintable() and len(text) < 2000, text
    assert all(word in text for word in words), text


# Right


@pytest.mark.parametrize(
    "folder", [*sorted(GOLDENS.iterdir()), *(BUNDLES / kind for kind in KINDS)], ids=lambda path: path.name
)
def test_reads_what_tensorflow_reads(folder):
    expected = json.loads((folder / "variables.json").read_text())
    refs = read_bundle(folder)
    assert list(refs) == sorted(expected)
    for name, (dtype, shape, digest) in expected.items():
        tensor = refs[name].load()
        assert (str(tensor.dtype), list(tensor.shape)) == (f"torch.{dtype}", shape)
        content = tensor.view(torch.int16) if dtype == "bfloat16" else tensor
        assert hashlib.sha256(content.numpy().tobytes()).hexdigest() == digest


NAMES = st.text(st.characters(categories=["L", "N", "P", "S"]), min_size=1, max_size=8)
SHAPES = st.lists(st.integers(0, 4), max_size=4)


@settings(max_examples=examples(50))
@given(
    shapes=st.dictionaries(NAMES, st.tuples(SHAPES, st.sampled_from(list(CODES))), max_size=12),
    n_shards=st.integers(1, 3),
    per_block=st.integers(1, 5),
    restart=st.integers(1, 4),
)
def test_round_trip(tmp_path_factory, shapes, n_shards, per_block, restart):
    tensors = {name: torch.randint(2, shape).to(dtype) for name, (shape, dtype) in shapes.items()}
    prefix = write_bundle(tmp_path_factory.mktemp("bundle") / "p", tensors, n_shards, per_block, restart)
    refs = read_bundle(prefix)
    assert refs.keys() == tensors.keys()
    for name, ref in refs.items():
        loaded = ref.load()
        assert loaded.dtype == tensors[name].dtype and torch.equal(loaded, tensors[name])


def test_without_its_checksums_nothing_is_read(prefix, monkeypatch):
    monkeypatch.setitem(sys.modules, "google_crc32c", None)
    refused(prefix, r"in a clone: pip install -e '.[tensorflow]'")
    monkeypatch.undo()
    assert list(read_bundle(prefix)) == sorted(TENSORS)


def test_checksum_of_more_than_one_piece(tmp_path):
    tensor = torch.arange(300_000, dtype=torch.float64)
    prefix = write_bundle(tmp_path / "big", {"w": tensor})
    assert torch.equal(read_bundle(prefix)["w"].load(), tensor)
    data = Path(f"{prefix}.data-00000-of-00001")
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)
    refused(prefix, "does not match its checksum", "'w'")


def test_a_directory_or_any_file_names_the_checkpoint(prefix):
    ways = [prefix.parent, *(Path(f"{prefix}{suffix}") for suffix in ("", ".index", ".meta", ".data-00000-of-00001"))]
    assert [list(read_bundle(path)) for path in ways] == [sorted(TENSORS)] * 5
    write_bundle(prefix.parent / "model.ckpt-2", {"other": torch.ones(1)})
    refused(prefix.parent, "2 checkpoints", "'model.ckpt-1.index'")
    names = prefix.parent / "checkpoint"
    for path in ("model.ckpt-2", "/somewhere/else/model.ckpt-2", "../model.ckpt-2", r"C:\\runs\\model.ckpt-2"):
        names.write_text(f'model_checkpoint_path: "{path}"\nall_model_checkpoint_paths: "model.ckpt-1"\n')
        assert list(read_bundle(prefix.parent)) == ["other"]
    names.write_text('model_checkpoint_path: "model.ckpt-3"')
    refused(prefix.parent, "model.ckpt-3.index", "No such file")
    names.write_text("model_checkpoint_path: model.ckpt-2")
    refused(prefix.parent, "names no checkpoint")
    for path in prefix.parent.iterdir():
        path.unlink()
    refused(prefix.parent, "0 checkpoints")


def test_unknown_fields_are_skipped(tmp_path):
    tensor = torch.ones(3)
    fixed64 = varint(98 << 3 | 1) + b"\0" * 8
    prefix = write_one(tmp_path, (b"w", entry(tensor, 0, 0, unknown=5) + fixed64), data=raw(tensor))
    assert torch.equal(read_bundle(prefix)["w"].load(), tensor)


# Wrong


def index_of(*pairs: tuple[bytes, bytes], first: bytes | None = None) -> bytes:
    """An index of a header, sound or not, and other entries."""
    return table([block([(b"", header() if first is None else first), *pairs])])


def index_of_one(**changes: int | bytes) -> bytes:
    return index_of((b"w", entry(torch.ones(2), 0, 0, **changes)))


def index_at(offset: int, size: int) -> bytes:
    """An index whose footer says that its blocks are listed there."""
    footer = (varint(0) + varint(0) + varint(offset) + varint(size)).ljust(40, b"\0")
    return b"\0" + checksum(b"\0") + b"\0" * 100 + footer + MAGIC


ONE = entry(torch.ones(2), 0, 0)
RESTARTS = struct.pack("<I", 0)
FAR = message((2, message((1, 0))), *[(2, message((1, 2**62)))] * 3)
WRONG: list[tuple[bytes, str]] = [
    *((content, "does not end as") for content in (b"", b"text" * 100, MAGIC, table([])[:-1], table([])[1:] + b"\0")),
    (index_of((b"w", ONE), first=header(1, (2, 1))), "big-endian"),
    (index_of((b"w", ONE), first=header(0)), "No such file"),
    (index_of((b"w", ONE), first=message((1, b"\1"))), "wrong kind"),
    (index_of((b"w", ONE), first=b"\x08"), "ends too early"),
    (index_of_one(dtype=7), "'w' as text"),
    (index_of_one(dtype=8), "data type number 8"),
    (index_of_one(dtype=2), "which is not the size"),
    (index_of_one(shape=3), "wrong kind"),
    (index_of_one(shape=FAR, size=0), "which is not the size"),
    (index_of_one(shape=message(*[(2, message((1, 1)))] * 65), size=4), "which is not the size"),
    (index_of_one(shard=1), "No such file"),
    (index_of_one(offset=57), "should end at 65"),
    (index_of_one(size=7), "which is not the size"),
    (index_of_one(slices=b""), "in slices"),
    (index_of((b"\0\1w", ONE)), "in slices"),
    (index_of((b"b", ONE), (b"a", ONE)), "not in order"),
    (index_of((b"a", ONE), (b"a", ONE)), "not in order"),
    (table([block([(b"a", ONE)])]), "no header"),
    (table([]), "no header"),
    (table([varint(0) + varint(5) + b"\0\0" + RESTARTS]), "ends too early"),
    (table([varint(3) + varint(0) + varint(0) + RESTARTS]), "continues a shorter one"),
    (table([varint(0) + varint(2**40) + varint(0) + RESTARTS]), "longer than 1024 bytes"),
    (table([b"\xff" * 9 + b"\x02" + RESTARTS]), "number has no end"),
    (table([])[:-48] + b"\xff" * 40 + MAGIC, "number has no end"),
    (index_at(0, 2**63), "outside the file"),
    (index_at(10**6, 1), "outside the file"),
    (table([block([(b"", header())])], compression=1), "is compressed"),
]


@pytest.mark.parametrize(("index", "words"), WRONG)
def test_what_is_wrong_is_named(tmp_path, index, words):
    (tmp_path / "x.index").write_bytes(index)
    (tmp_path / "x.data-00000-of-00001").write_bytes(b"\0" * 64)
    refused(tmp_path / "x", words)


def test_an_index_too_large_and_data_in_a_pipe(tmp_path):
    with (tmp_path / "x.index").open("wb") as file:
        file.truncate(2**40)
    refused(tmp_path / "x", "larger than any index")
    prefix = write_one(tmp_path, (b"w", entry(torch.ones(2), 0, 0)))
    Path(f"{prefix}.data-00000-of-00001").unlink()
    os.mkfifo(f"{prefix}.data-00000-of-00001")
    refused(prefix, "has 0 bytes, and 'w' should end at 8")


def test_shared_bytes(tmp_path):
    first, second = (b"a", entry(torch.zeros(4), 0, 0)), (b"b", entry(torch.zeros(4), 0, 12))
    refused(write_one(tmp_path, first, second), "'a' and 'b' share bytes")
    read_bundle(write_one(tmp_path, first, (b"b", entry(torch.zeros(4), 0, 16)), (b"c", entry(torch.zeros(0), 0, 8))))


def test_one_block_many_times(tmp_path):
    """Otherwise a small file could take hours."""
    content = block([(b"", header())]) + b"\0"
    data = content + checksum(content)
    meta = varint(len(data)) + varint(8)
    data += block([]).ljust(8, b"\0") + b"\0" + checksum(block([]).ljust(8, b"\0") + b"\0")
    handles = block([(b"%08d" % i, varint(0) + varint(len(content) - 1)) for i in range(1000)], restart=1)
    footer = meta + varint(len(data)) + varint(len(handles))
    data += handles + b"\0" + checksum(handles + b"\0") + footer.ljust(40, b"\0") + MAGIC
    (tmp_path / "x.index").write_bytes(data)
    refused(tmp_path / "x", "blocks overlap")


def test_data_of_a_size_that_no_memory_has(tmp_path):
    """Reading the index allocates nothing for the variables."""
    huge = message((2, message((1, 2**38))))
    prefix = write_one(tmp_path, (b"w", entry(torch.ones(2), 0, 0, shape=huge, size=2**40)))
    os.truncate(f"{prefix}.data-00000-of-00001", 2**40)
    tracemalloc.start()
    assert math.prod(read_bundle(prefix)["w"].shape) == 2**38
    assert tracemalloc.get_traced_memory()[1] < 1e6
    tracemalloc.stop()


# At random


def corrupt_files(directory: Path, n_times: int) -> None:
    """Whatever happens to a file of a checkpoint: an error, or exactly the right tensors."""
    rng = random.Random(0)
    right = {name: ref.load() for name, ref in read_bundle(directory).items()}
    files = {path: path.read_bytes() for path in sorted(directory.iterdir())}
    n_refused = 0
    for _ in range(n_times):
        path = rng.choice(list(files))
        path.write_bytes(corrupt(files[path], rng))
        try:
            loaded = {name: ref.load() for name, ref in read_bundle(directory).items()}
        except (CheckpointError, OSError) as error:
            n_refused += 1
            assert str(error).isprintable()
        else:
            assert loaded.keys() == right.keys()
            assert all(torch.equal(loaded[name], tensor) for name, tensor in right.items())
        path.write_bytes(files[path])
    assert n_refused > 0.8 * n_times


MANY = [pytest.param(1, id="a tenth"), pytest.param(10, id="all", marks=pytest.mark.slow)]


@pytest.mark.parametrize("times", MANY)
def test_random_corruption(tmp_path, times):
    write_bundle(tmp_path / "x", {f"layer_{i}/kernel": torch.randn(2, 3) for i in range(5)}, n_shards=2, per_block=2)
    corrupt_files(tmp_path, 100 * times)


@pytest.mark.parametrize("times", MANY)
def test_random_corruption_under_right_checksums(tmp_path, times):
    """Checksums are not a defense against who can compute them: the same, with damage inside of sound blocks."""
    rng = random.Random(1)
    tensors = {f"layer_{i}/kernel": torch.randn(2, 3) for i in range(5)}
    prefix = write_bundle(tmp_path / "x", tensors)
    index = Path(f"{prefix}.index")
    n_refused = 0
    pairs = [(b"", header()), *((n.encode(), entry(t, 0, 24 * i)) for i, (n, t) in enumerate(tensors.items()))]
    for _ in range(100 * times):
        index.write_bytes(table([corrupt(block(pairs), rng)]))
        try:
            for ref in read_bundle(prefix).values():
                assert ref.load().numel() == math.prod(ref.shape)
        except (CheckpointError, OSError) as error:
            n_refused += 1
            assert str(error).isprintable()
    assert n_refused > 80 * times

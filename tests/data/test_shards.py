from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transformer_xl.data import shards
from transformer_xl.data.encoding import encode_chunks
from transformer_xl.data.shards import Shard, ShardedIds, join_documents, open_documents, write_shards
from transformer_xl.data.text_files import Chunk
from transformer_xl.data.tokenizers import ByteTokenizer
from transformer_xl.errors import CorpusError


@pytest.mark.parametrize("at_once", [1, 2, 100])
def test_a_document_that_begins_at_the_end_of_a_shard_is_counted_once(tmp_path: Path, monkeypatch, at_once: int) -> None:
    """One document starts at the end of a shard, because its first chunk has no token; the last document has no token."""
    monkeypatch.setattr(shards, "_OFFSETS_AT_ONCE", at_once)
    parts = {"train": ([0, 3, 5], 5), "train.1": ([0, 2], 4), "train.2": ([4, 6], 6)}
    for name, (starts, _) in parts.items():
        np.save(tmp_path / f"documents.{name}.npy", np.array(starts, np.int64))
    join_documents(tmp_path, "train", [Shard("", 0, n_tokens, 0, 0, {}) for _, n_tokens in parts.values()])
    assert open_documents(tmp_path, "train", n_tokens=15, n_shards=3).tolist() == [0, 3, 5, 7, 13]


@pytest.mark.parametrize(
    ("sizes", "expected"), [([], [0]), ([3, 3], [6]), ([4, 2, 7, 1, 5], [6, 7, 6]), ([6, 6], [6, 6]), ([1], [1])]
)
def test_a_shard_ends_with_the_chunk_that_reaches_its_size(tmp_path: Path, monkeypatch, sizes, expected) -> None:
    monkeypatch.setattr(shards, "SHARD_BYTES", 6)
    chunks = [Chunk(b"x" * size, True, tmp_path, 0) for size in sizes]
    n_bytes = []
    for _ in range(2):  # the second time, nothing is left to write
        found = write_shards(
            tmp_path,
            "train",
            chunks,
            lambda portion: encode_chunks(portion, ByteTokenizer()),
            tokenizer="byte",
            on_bytes=n_bytes.append,
        )
        assert [shard.n_bytes for shard in found] == expected
    assert sum(n_bytes) == 2 * sum(sizes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("shards")


def _shards(folder: Path, lengths: list[int]) -> tuple[ShardedIds, np.ndarray]:
    whole, begin, paths = np.arange(sum(lengths), dtype="<u2") * 3, 0, []
    for i, length in enumerate(lengths):
        paths.append(folder / f"{i}.bin")
        whole[begin : begin + length].tofile(paths[-1])
        begin += length
    return ShardedIds(paths, lengths, np.dtype("<u2")), whole


@given(st.lists(st.integers(0, 4), min_size=1, max_size=6), st.data())
def test_it_is_the_array(folder: Path, lengths, data) -> None:
    ids, whole = _shards(folder, lengths)
    assert len(ids) == len(whole)
    assert ids.shape == whole.shape
    assert np.array_equal(np.asarray(ids), whole)
    bound = st.none() | st.integers(-len(whole) - 2, len(whole) + 2)
    index = slice(data.draw(bound), data.draw(bound), data.draw(st.sampled_from([None, 1, 2, -1])))
    assert ids[index].tolist() == whole[index].tolist()
    assert ids[index].dtype == whole.dtype
    if len(whole):
        place = st.integers(-len(whole), len(whole) - 1)
        one = data.draw(place)
        assert ids[one] == whole[one]
        table = np.array(data.draw(st.lists(place, min_size=2, max_size=8))).reshape(-1, 1)
        assert np.array_equal(ids[table], whole[table])


def test_places_outside(folder: Path) -> None:
    ids, _ = _shards(folder, [2, 3])
    for place in (5, -6):
        with pytest.raises(IndexError, match="outside 5 ids"):
            ids[place]


def test_a_slice_inside_a_shard_is_a_view(folder: Path) -> None:
    ids, _ = _shards(folder, [4, 4])
    assert ids[4:8].base is not None
    assert np.shares_memory(ids[4:8], ids[5:6])
    assert not np.shares_memory(ids[3:6], ids[3:6])


def test_as_an_array_it_is_copied_when_it_must_be(folder: Path) -> None:
    one, _ = _shards(folder, [4])
    assert np.shares_memory(np.asarray(one), np.asarray(one))
    assert np.asarray(one, copy=False).tolist() == [0, 3, 6, 9]
    assert np.array(one).flags.writeable, "a copy may be written to"
    two, whole = _shards(folder, [2, 2])
    assert np.array_equal(np.array(two), whole)
    assert np.asarray(two, np.int32).dtype == np.int32
    with pytest.raises(ValueError, match="2 shards make one array only by copying"):
        np.asarray(two, copy=False)


def test_few_files_are_open_at_a_time(folder: Path, monkeypatch) -> None:
    monkeypatch.setattr(shards, "OPEN_SHARDS", 2)
    ids, whole = _shards(folder, [1] * 20)
    mapped = []
    monkeypatch.setattr(
        np, "memmap", lambda path, *args, _memmap=np.memmap, **kw: mapped.append(path) or _memmap(path, *args, **kw)
    )
    for _ in range(2):
        assert np.array_equal(ids[:], whole)
    assert len(mapped) == 40
    assert np.array_equal(ids[18:], whole[18:])
    assert len(mapped) == 40


def test_a_shard_that_vanished_while_reading_is_named(folder: Path) -> None:
    ids, _ = _shards(folder, [2, 2])
    (folder / "1.bin").unlink()
    assert ids[:2].tolist() == [0, 3]
    with pytest.raises(CorpusError, match=r"shard '.*1.bin' cannot be read \(.*No such file.*\); restore it, or"):
        ids[1:3]

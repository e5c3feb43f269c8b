from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transformer_xl.data import sharded_ids
from transformer_xl.data.sharded_ids import ShardedIds
from transformer_xl.errors import CorpusError


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
    monkeypatch.setattr(sharded_ids, "OPEN_SHARDS", 2)
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

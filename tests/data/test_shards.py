from pathlib import Path

import numpy as np
import pytest

from transformer_xl.data import shards
from transformer_xl.data.encoding import encode_chunks
from transformer_xl.data.files import Chunk
from transformer_xl.data.shards import Shard, join_documents, open_documents, write_shards
from transformer_xl.data.tokenizers import ByteTokenizer


@pytest.mark.parametrize("at_once", [1, 2, 100])
def test_a_document_that_begins_at_the_end_of_a_shard_is_counted_once(tmp_path: Path, monkeypatch, at_once: int) -> None:
    """Its first chunk gave no token, so that it starts at the end of one shard; the last document has no token at all."""
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

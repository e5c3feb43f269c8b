"""Encoding a stream of chunks in order, in this process or in several."""

import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from io import BytesIO
from multiprocessing import get_all_start_methods, get_context
from pathlib import Path
from typing import NamedTuple

import numpy as np

from transformer_xl.data.ids import PACKED
from transformer_xl.data.text_files import Chunk
from transformer_xl.errors import CorpusError, TokenizerError
from transformer_xl.tokenizers.kinds import Tokenizer, read_tokenizer

BATCH_BYTES = 1 << 20
"""Chunks are encoded in batches of about this size, so that many small documents cost no more than a few large ones."""

_BATCHES_PER_WORKER = 3
_NOTHING = np.empty(0, np.int64)


class EncodedBatch(NamedTuple):
    """The ids of some chunks."""

    ids: bytes  # little-endian, without gaps
    document_starts: np.ndarray  # offsets in tokens from the beginning of the batch, int64
    n_tokens: int
    n_bytes: int  # of the text
    n_characters: int  # code points of the text, or ids


def id_dtype(vocab_size: int) -> np.dtype:
    """Return the smallest type in which ids are stored, always little-endian.

    Example:
        >>> id_dtype(65_536), id_dtype(65_537)
        (dtype('uint16'), dtype('uint32'))
    """
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def encode_chunks(chunks: Iterable[Chunk], tokenizer: Tokenizer, *, n_workers: int = 1) -> Iterator[EncodedBatch]:
    """Encode chunks, read ahead by a few batches only, in order; the ids do not depend on the number of processes."""
    batches = _batches(chunks)
    if n_workers == 1:
        yield from (_encode(batch, tokenizer) for batch in batches)
        return
    # Not fork, because this process may have threads and locks of torch, tokenizers or a notebook.
    method = "forkserver" if "forkserver" in get_all_start_methods() else "spawn"
    pool = ProcessPoolExecutor(n_workers, get_context(method), _start_worker, (tokenizer.to_json(),))
    pending: deque[Future[EncodedBatch]] = deque()
    try:
        for batch in batches:
            pending.append(pool.submit(_encode_in_worker, batch))
            if len(pending) >= n_workers * _BATCHES_PER_WORKER:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool:
        raise CorpusError(
            "an encoding process died, for lack of memory or because the calling script has no "
            "`if __name__ == '__main__':`; use n_workers=1"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _batches(chunks: Iterable[Chunk]) -> Iterator[list[Chunk]]:
    batch: list[Chunk] = []
    size = 0
    for chunk in chunks:
        if batch and size + len(chunk.data) > BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(chunk)
        size += len(chunk.data)
    if batch:
        yield batch


def _encode(batch: list[Chunk], tokenizer: Tokenizer) -> EncodedBatch:
    dtype = id_dtype(tokenizer.vocab_size)
    ids, starts, n_tokens, n_characters = [], [], 0, 0
    for chunk in batch:
        encoded, following = _with_lines(chunk, tokenizer) if chunk.has_lines else (_encode_chunk(chunk, tokenizer), _NOTHING)
        starts += [[n_tokens] if chunk.starts_document else _NOTHING, n_tokens + following]
        ids.append(encoded.astype(dtype).tobytes())
        n_tokens += len(encoded)
        if tokenizer.counts == "id":
            n_characters += len(encoded)
            continue
        # Counts the bytes that begin a code point; for text that is not UTF-8 this is an approximation.
        n_characters += int(np.count_nonzero((np.frombuffer(chunk.data, np.uint8) & 0xC0) != 0x80))
    n_bytes = sum(len(chunk.data) for chunk in batch)
    return EncodedBatch(b"".join(ids), np.concatenate(starts, dtype=np.int64), n_tokens, n_bytes, n_characters)


def _with_lines(chunk: Chunk, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids of a chunk whose lines are documents, and the offsets at which lines begin, without the first."""
    if tokenizer.kind in ("byte", "char"):  # a line end is one id, so all lines can be encoded at once
        encoded = _encode_chunk(chunk, tokenizer)
        if b"\n" not in chunk.data:  # then the alphabet may lack it, too
            return encoded, _NOTHING
        return encoded, np.flatnonzero(encoded[:-1] == tokenizer.encode("\n")[0]) + 1
    lines, offset = [], chunk.offset
    for line in BytesIO(chunk.data):
        lines.append(_encode_chunk(chunk._replace(data=line, offset=offset), tokenizer))
        offset += len(line)
    return np.concatenate(lines), np.cumsum([len(line) for line in lines[:-1]], dtype=np.int64)


def _encode_chunk(chunk: Chunk, tokenizer: Tokenizer) -> np.ndarray:
    if tokenizer.counts == "id":  # read_ids has checked them
        return np.frombuffer(chunk.data, PACKED)
    try:
        if tokenizer.reads_bytes:
            return tokenizer.encode_bytes(chunk.data)
        return tokenizer.encode(chunk.text())
    except TokenizerError as error:
        raise CorpusError(f"'{chunk.path}', from byte {chunk.offset} on: {error}") from None


_worker_tokenizer: Tokenizer


def _start_worker(tokenizer: bytes) -> None:
    global _worker_tokenizer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process per core is enough
    _worker_tokenizer = read_tokenizer(tokenizer, Path())


def _encode_in_worker(batch: list[Chunk]) -> EncodedBatch:
    return _encode(batch, _worker_tokenizer)

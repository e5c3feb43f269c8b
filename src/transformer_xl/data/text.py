"""`Text`: a text as tokens, with its characters and bytes: a split of a corpus, or a file."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from transformer_xl.config.run import DataConfig, RunConfig
from transformer_xl.console import warn
from transformer_xl.data.corpora import CHUNK_BYTES, choose_corpus
from transformer_xl.data.encoding import encode_chunks, id_dtype
from transformer_xl.data.ids import is_array_file, read_ids
from transformer_xl.data.named import SplitName
from transformer_xl.data.padding import find_padding
from transformer_xl.data.prepare import TokenSplit, prepare
from transformer_xl.data.text_files import Chunk, FileRange, kind_of_file, read_chunks
from transformer_xl.errors import CorpusError
from transformer_xl.tokenizers.base import Tokenizer
from transformer_xl.tokenizers.ids import IdTokenizer
from transformer_xl.untrusted import CONVERT


@dataclass(frozen=True)
class Text:
    """A text as tokens. All tokens but the first are predicted."""

    what: str  # a description in words
    ids: np.ndarray  # integers (N,)
    n_characters: int  # of the predicted tokens; of ids, their number
    n_bytes: int | None  # the same in UTF-8; None of ids
    is_whole: bool = True  # a whole split or file, not only its beginning
    document_starts: np.ndarray | None = None  # places of `ids` at which documents start; None: nobody asked for them

    def digest(self) -> str:
        """Return the SHA-256 of the ids. They are read in pieces, because the file that they are mapped from may be large."""
        digest, n = hashlib.sha256(), 1 << 20
        for begin in range(0, len(self.ids), n):
            digest.update(np.ascontiguousarray(self.ids[begin : begin + n]).data)
        return digest.hexdigest()


def split_text(
    config: RunConfig,
    tokenizer: Tokenizer,
    *,
    split: SplitName | None = None,
    corpus: str | None = None,
    limit: int | None = None,
) -> Text:
    """Return a split of a run's corpus, or its beginning of at most `limit` predicted tokens.

    The default split is test, or valid if there is no test split. `corpus` is another corpus, or the directory that holds the
    run's.
    """
    data = choose_corpus(config.data, corpus)
    splits = prepare(data, tokenizer).splits
    name = split or ("test" if len(splits["test"].ids) > 1 else "valid")
    if len(splits[name].ids) < 2:
        raise CorpusError(f"corpus '{data.corpus}' has no {name} split; choose another split or text")
    return beginning(splits[name], tokenizer, limit, what=f"{name} split of {data.corpus}")


def beginning(split: TokenSplit, tokenizer: Tokenizer, limit: int | None = None, *, what: str = "split") -> Text:
    """Return a split, or at most `limit` predicted tokens of it.

    The characters of a part are counted by decoding its tokens. If the tokenizer loses text, they are estimated by proportion.
    """
    n_id = len(split.ids)
    ids = np.asarray(split.ids[: None if limit is None else limit + 1])
    if tokenizer.counts == "id":
        part = "" if len(ids) == n_id else f"first {len(ids) - 1:,} ids of the "
        return Text(f"{part}{what}", ids, len(ids) - 1, None, is_whole=not part)
    if len(ids) == n_id:
        sizes = _predicted(tokenizer, ids, split.n_characters, split.n_bytes)
        return Text(what, ids, *sizes, document_starts=split.document_starts)
    what = f"first {len(ids) - 1:,} tokens of the {what}"
    if tokenizer.loses:
        sizes = (round(size * len(ids) / n_id) for size in (split.n_characters, split.n_bytes))
        return Text(what, ids, *_predicted(tokenizer, ids, *sizes), is_whole=False)
    text = tokenizer.decode(ids.tolist())
    return Text(what, ids, *_predicted(tokenizer, ids, len(text), _n_bytes(text)), is_whole=False)


def file_text(file: Path, tokenizer: Tokenizer, *, separator: str | None = None) -> Text:
    """Return a file, plain or compressed, as one text, encoded chunk by chunk as the text of a training is; or a file of ids.

    Only ids are held, two or four bytes each. `separator` divides it into documents, see `read_chunks`.
    """
    if isinstance(tokenizer, IdTokenizer):
        if tokenizer.pad_id == "auto":
            find_padding([file], str(file), can_leave_out=False)
        return _text_of(file, read_ids(FileRange(file), tokenizer), tokenizer)
    if is_array_file(file):
        raise CorpusError(f"'{file}' holds ids, and this model's tokenizer (kind {tokenizer.kind}) reads text; give a text")
    if tokenizer.reads_bytes:  # others refuse what is not UTF-8
        warn_of_bytes(file)
    return _text_of(file, read_chunks(FileRange(file), CHUNK_BYTES, separator), tokenizer)


def _text_of(file: Path, chunks: Iterable[Chunk], tokenizer: Tokenizer) -> Text:
    packed, n_characters, n_bytes = bytearray(), 0, 0  # grows in place, where a list of arrays would be copied to be joined
    dtype, starts = id_dtype(tokenizer.vocab_size), [np.empty(0, np.int64)]
    for batch in encode_chunks(chunks, tokenizer):
        starts.append(batch.document_starts + len(packed) // dtype.itemsize)
        packed += batch.ids
        n_characters += batch.n_characters
        n_bytes += batch.n_bytes
    ids = np.frombuffer(packed, dtype)
    if len(ids) < 2:
        has = "1 token" if len(ids) == 1 else "no token"
        raise CorpusError(f"'{file}' has {has}; at least 2 are needed, because the first one is not predicted")
    if tokenizer.counts == "id":
        return Text(f"file {file}", ids, len(ids) - 1, None)
    sizes = _predicted(tokenizer, ids, n_characters, n_bytes)
    return Text(f"file {file}", ids, *sizes, document_starts=np.concatenate(starts))


def warn_of_bytes(file: Path) -> None:
    """Warn of a file whose bytes are read as they are, because it is not UTF-8."""
    if (kind := kind_of_file(file)) != "UTF-8":
        warn(f"'{file}' is {'binary' if kind == 'binary' else 'not UTF-8'}, and its bytes are read as they are; {CONVERT}")


def not_scored(tokenizer: Tokenizer) -> str:
    """Return what a score leaves out of a text, and what follows from that, as sentences; empty if it leaves nothing out."""
    if not tokenizer.loses:
        return ""
    what_follows = undivided(tokenizer) or "Compare bits per character and byte with the same vocabulary only."
    return f"Not scored: {tokenizer.loses} {what_follows}"


def undivided(tokenizer: Tokenizer) -> str:
    """Return a warning if the words of a vocabulary are whole lines, else nothing."""
    if tokenizer.counts != "word":
        return ""
    why = "Most words of this vocabulary are whole lines or phrases, because its text has no spaces between words"
    return f"{why}: the model learns them by heart and cannot read others; train with tokenizer.kind=char, unigram or byte."


def text_difference(one: DataConfig, other: DataConfig) -> tuple[str, object, object] | None:
    """Return the first setting in which the texts of two runs differ and both values; None if they are the same.

    Example:
        >>> text_difference(DataConfig(corpus="ptb"), DataConfig(corpus="text8"))
        ('corpus', 'ptb', 'text8')
    """
    for name in ("corpus", "split", "document_separator", "documents"):
        if getattr(one, name) != getattr(other, name):
            return name, getattr(one, name), getattr(other, name)
    return None


def _predicted(tokenizer: Tokenizer, ids: np.ndarray, n_characters: int, n_bytes: int) -> tuple[int, int | None]:
    """Return what a tokenizer counts, and bytes, of a text without its first token, which is not predicted."""
    if tokenizer.counts != "character":
        return len(ids) - 1, None
    first = tokenizer.decode([int(ids[0])])
    return max(1, n_characters - len(first)), max(1, n_bytes - _n_bytes(first))


def _n_bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))

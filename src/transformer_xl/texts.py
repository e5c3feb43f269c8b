"""What is scored: a split of a run's corpus or its beginning, or a file."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from transformer_xl.config import DataConfig, RunConfig
from transformer_xl.data.corpora import choose_corpus
from transformer_xl.data.encoding import encode_file
from transformer_xl.data.named import SplitName
from transformer_xl.data.prepare import TokenSplit, prepare
from transformer_xl.data.tokenizers import Tokenizer
from transformer_xl.errors import CorpusError


@dataclass(frozen=True)
class Text:
    """A text as tokens; nothing predicts the first one."""

    what: str  # in words
    ids: np.ndarray  # integers (N,)
    n_characters: int  # of the predicted tokens
    n_bytes: int  # the same in UTF-8
    is_whole: bool = True  # all of a split or file

    def digest(self) -> str:
        """Return the SHA-256 of the ids, read piece by piece because they may be mapped from a file larger than memory."""
        found, n = hashlib.sha256(), 1 << 20
        for begin in range(0, len(self.ids), n):
            found.update(np.ascontiguousarray(self.ids[begin : begin + n]).data)
        return found.hexdigest()


def split_text(
    config: RunConfig,
    tokenizer: Tokenizer,
    *,
    split: SplitName | None = None,
    corpus: str | None = None,
    limit: int | None = None,
) -> Text:
    """Return a split of a run's corpus, or its beginning of at most `limit` predicted tokens.

    Without `split` it is test, or valid if there is no test split. `corpus` is another corpus, or the directory that holds the
    run's.

    Raises:
        CorpusError: no such split, or a corpus that cannot be read.
    """
    data = choose_corpus(config.data, corpus)
    splits = prepare(data, tokenizer).splits
    name = split or ("test" if len(splits["test"].ids) > 1 else "valid")
    if len(splits[name].ids) < 2:
        raise CorpusError(f"corpus '{data.corpus}' has no {name} split; choose another split or text")
    return beginning(splits[name], tokenizer, limit, what=f"{name} split of {data.corpus}")


def beginning(split: TokenSplit, tokenizer: Tokenizer, limit: int | None = None, *, what: str = "split") -> Text:
    """Return a split, or at most `limit` predicted tokens of it.

    The characters of a part are those that its tokens decode to. If tokens lose text, they are estimated by proportion.
    """
    n_id = len(split.ids)
    ids = np.asarray(split.ids[: None if limit is None else limit + 1])
    first = tokenizer.decode([int(ids[0])])
    if len(ids) == n_id:
        return Text(what, ids, *_predicted(first, split.n_characters, split.n_bytes))
    what = f"first {len(ids) - 1:,} tokens of the {what}"
    if tokenizer.loses:
        sizes = (round(size * len(ids) / n_id) for size in (split.n_characters, split.n_bytes))
        return Text(what, ids, *_predicted(first, *sizes), is_whole=False)
    text = tokenizer.decode(ids.tolist())
    return Text(what, ids, *_predicted(first, len(text), _n_bytes(text)), is_whole=False)


def file_text(file: Path, tokenizer: Tokenizer, *, check: Callable[[bytes], object] | None = None) -> Text:
    """Return a file, plain or compressed, as one text; `check` may refuse its content before it is encoded.

    Raises:
        CorpusError: a file that cannot be read or represented, or of fewer than two tokens.
    """
    ids, data = encode_file(file, tokenizer, check=check)
    if len(ids) < 2:
        raise CorpusError(f"'{file}' has {len(ids)} tokens; at least 2 are needed, for the first is predicted by none")
    first = tokenizer.decode([int(ids[0])])
    return Text(f"file {file}", ids, *_predicted(first, len(data.decode("utf-8", "replace")), len(data)))


def text_difference(one: DataConfig, other: DataConfig) -> tuple[str, object, object] | None:
    """Return the first setting in which the texts of two runs differ, with both values; None if they are the same.

    Example:
        >>> text_difference(DataConfig(corpus="ptb"), DataConfig(corpus="text8"))
        ('corpus', 'ptb', 'text8')
    """
    for name in ("corpus", "split", "document_separator", "documents"):
        if getattr(one, name) != getattr(other, name):
            return name, getattr(one, name), getattr(other, name)
    return None


def _predicted(first: str, n_characters: int, n_bytes: int) -> tuple[int, int]:
    """Return characters and bytes of a text without its first token, which nothing predicts."""
    return max(1, n_characters - len(first)), max(1, n_bytes - _n_bytes(first))


def _n_bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))

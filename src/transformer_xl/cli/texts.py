"""What commands read: a split of a run's corpus, or a file."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    from transformer_xl.config import RunConfig
    from transformer_xl.data.named import SplitName
    from transformer_xl.data.tokenizers import Tokenizer


@dataclass(frozen=True)
class Text:
    """What is scored: in words, as ids, and how many characters and bytes these stand for."""

    what: str
    ids: "np.ndarray"
    n_characters: int
    n_bytes: int


def read_split(config: "RunConfig", corpus: str | None, split: "SplitName | None", tokenizer: "Tokenizer") -> Text:
    """Return a split of a run's corpus.

    Args:
        config: of the run.
        corpus: another corpus, or a directory that holds the run's named one; None: the run's.
        split: train, valid or test; None: test, or valid where there is none.
        tokenizer: of the run.

    Raises:
        CorpusError: no such split, or a corpus that cannot be read.
    """
    from transformer_xl.analysis.reading.scoring import split_of

    what, chosen = split_of(config, tokenizer, split=split, corpus=corpus)
    return Text(what, chosen.ids[:], chosen.n_characters, chosen.n_bytes)


def read_file(file: Path, tokenizer: "Tokenizer") -> Text:
    """Return a text file, plain or compressed, as one text."""
    from transformer_xl.data.encoding import encode_file

    ids, data = encode_file(file, tokenizer)
    return Text(f"file {file}", ids, len(data.decode("utf-8", "replace")), len(data))

"""Finds the vocabularies of other programs, and makes tokenizers from their files."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformer_xl.conversion.readers.files import open_regular, read_at
from transformer_xl.conversion.readers.inert import Stub
from transformer_xl.conversion.readers.pickles import read_pickle
from transformer_xl.conversion.readers.torch_files import read_torch
from transformer_xl.conversion.values import read_json, shown
from transformer_xl.conversion.vocabulary_state import from_vocab_state, from_vocab_txt
from transformer_xl.data.tokenizers import Tokenizer
from transformer_xl.errors import CheckpointError, TokenizerError

MAX_TEXT_BYTES = 64 * 2**20

_NAMES = ("vocab.pkl", "vocab.bin", "vocab.txt", "cache.pt", "cache.pkl")
_WORDS = ("idx2sym", "sym2idx")
_TORCH_STARTS = (b"PK\x03\x04", b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.")  # zip, or the magic number of 2019


def find_tokenizer(
    weights: Path, *, given: Path | None, state: Mapping[str, Any] | None, vocab_size: int | None, moses: str | None
) -> Tokenizer | None:
    """Return the tokenizer of a checkpoint, if there is a vocabulary.

    Args:
        weights: file or directory of the tensors; a vocabulary may lie beside them.
        given: the file of the vocabulary; None: look for one.
        state: attributes of the vocabulary in the checkpoint itself, if it holds one.
        vocab_size: size of the model's vocabulary.
        moses: see `convert`.

    Raises:
        CheckpointError: the vocabulary cannot be read, or has another size.
    """
    folder = weights if weights.is_dir() else weights.parent
    if given is not None:
        tokenizer, origin = read_vocabulary(given, moses=moses, vocab_size=vocab_size), given
    elif state is not None and not state.keys().isdisjoint(_WORDS):  # NVIDIA's copy of GPT-2's does not hold its words
        tokenizer, origin = _of_state(state, weights, moses), weights
    else:
        origin = next((folder / name for name in _NAMES if os.path.lexists(folder / name)), None)
        if origin is None:
            return None
        tokenizer = read_vocabulary(origin, moses=moses, vocab_size=vocab_size)
    if tokenizer.vocab_size != vocab_size:
        raise _misfit(origin, tokenizer.vocab_size, vocab_size)
    return tokenizer


def _misfit(origin: Path, n_token: int, vocab_size: int | None) -> CheckpointError:
    return CheckpointError(
        f"the vocabulary of '{origin}' has {n_token:,} tokens, the model {vocab_size:,}; "
        "they do not belong together, give the right one with --vocabulary"
    )


def read_vocabulary(path: Path, *, moses: str | None = None, vocab_size: int | None = None) -> Tokenizer:
    """Read a foreign vocabulary: cache.pt, cache.pkl, vocab.pkl, vocab.bin, vocab.txt, 1b_word_vocab.txt.

    Files beside it say what it does not: `tokenizer_config.json` (`lower_case`) and `corpus-info.json` (`dataset`).

    Args:
        path: the file.
        moses: see `convert`.
        vocab_size: size of the model's vocabulary; a text file with more lines is refused before its lines are read.
    """
    path = Path(path)
    file, size = open_regular(path)
    with file:
        start = read_at(path, file, 0, min(size, max(map(len, _TORCH_STARTS))))
        if path.suffix == ".txt":
            if size > MAX_TEXT_BYTES:
                raise CheckpointError(f"'{path}' has {size} bytes; {MAX_TEXT_BYTES} is the most that a vocabulary may take")
            data = read_at(path, file, 0, size)
            if vocab_size is not None and data.count(b"\n") > vocab_size:  # checked before each line becomes a string
                raise _misfit(path, data.count(b"\n"), vocab_size)
            return _of_text(data, path, moses)
    tree = read_torch(path) if start.startswith(_TORCH_STARTS) else read_pickle(path)
    if isinstance(tree, Stub) and isinstance(tree.state.get("vocab"), Stub):  # a Corpus
        return _of_state({"dataset": tree.state.get("dataset"), **tree.state["vocab"].state}, path, moses)
    return _of_state(tree.state if isinstance(tree, Stub) else tree, path, moses)


def _of_text(data: bytes, path: Path, moses: str | None) -> Tokenizer:
    lower_case = _beside(path, "tokenizer_config.json", "lower_case", bool) or False
    dataset = _beside(path, "corpus-info.json", "dataset", str)
    return _made(path, lambda: from_vocab_txt(data.decode("utf-8"), lower_case=lower_case, dataset=dataset, moses=moses))


def _of_state(state: Any, path: Path, moses: str | None) -> Tokenizer:
    def make() -> Tokenizer:
        known = _attributes(state)
        if known.get("dataset") is None:
            known["dataset"] = _beside(path, "corpus-info.json", "dataset", str)
        return from_vocab_state(known, moses=moses)

    return _made(path, make)


def _attributes(state: Any) -> dict[str, Any]:
    """Return the attributes of a vocabulary that matter, after a check of their types.

    `language` is not among them, because only the user chooses Moses rules, never a file.
    """
    if not isinstance(state, Mapping):
        raise TokenizerError(f"a vocabulary is a mapping of its attributes, not {shown(state)}")
    known = {name: state[name] for name in (*_TYPES, "EOT", "tokenizer") if state.get(name) is not None}
    for name, (what, is_right) in _TYPES.items():
        if name in known and not is_right(known[name]):
            raise TokenizerError(f"{name} ({shown(known[name])}) must be {what}")
    if "idx2sym" in known:
        known["idx2sym"] = _as_utf8(known["idx2sym"])
    if "sym2idx" in known:
        known["sym2idx"] = dict(zip(_as_utf8(list(known["sym2idx"])), known["sym2idx"].values(), strict=True))
    return known


def _as_utf8(words: Sequence[str]) -> list[str]:
    """Decode words of Python 2, which were read as latin-1: return them as UTF-8 if all of them are."""
    try:
        return [word.encode("latin-1").decode("utf-8") for word in words]
    except UnicodeError:
        return list(words)


def _are_words(value: Any) -> bool:
    # half of a surrogate pair cannot be written to a file
    return isinstance(value, list | tuple) and all(
        isinstance(word, str) and not any("\ud800" <= character <= "\udfff" for character in word) for word in value
    )


def _are_ids(value: Any) -> bool:
    return isinstance(value, Mapping) and _are_words(list(value)) and all(type(id_) is int for id_ in value.values())


_TYPES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "idx2sym": ("a list of words", _are_words),
    "sym2idx": ("the ids of words", _are_ids),
    "lower_case": ("true or false", lambda value: isinstance(value, bool)),
    "delimiter": ("text", lambda value: isinstance(value, str)),
    "unk_idx": ("an id", lambda value: type(value) is int),
    "never_split": ("a list of words", _are_words),
    "dataset": ("text", lambda value: isinstance(value, str)),
}
"""For each attribute that matters, what it must be, and a function that checks it."""


def _beside(path: Path, name: str, key: str, kind: type) -> Any:
    """Return a value from a file of settings beside a vocabulary, or None if there is none of the right type."""
    if not os.path.lexists(path.parent / name):
        return None
    value = read_json(path.parent / name).get(key)
    return value if isinstance(value, kind) else None


def _made(path: Path, make: Callable[[], Tokenizer]) -> Tokenizer:
    try:
        return make()
    except (UnicodeDecodeError, TokenizerError) as error:
        raise CheckpointError(f"vocabulary of '{path}': {error}") from None

"""Vocabularies of other programs: finds and reads their files, turns their attributes into a tokenizer, and back.

The attributes are those of `Vocab` (kimiyoung/transformer-xl and NVIDIA's DeepLearningExamples) and of Hugging Face's
`TransfoXLTokenizer`, which is derived from it. They do not say which words begin and end a line, or whether a word is a byte or
a character. That follows from the corpus of the vocabulary.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from transformer_xl.config.settings import Settings
from transformer_xl.conversion.readers.unpickle import Stub, unpickle
from transformer_xl.errors import CheckpointError, ConfigError, TokenizerError, shown
from transformer_xl.tokenizers.characters import is_byte
from transformer_xl.tokenizers.kinds import ByteTokenizer, CharTokenizer, SymbolTokenizer, Tokenizer, WordTokenizer
from transformer_xl.tokenizers.unigram import read_spiece
from transformer_xl.untrusted import is_unicode, read_json_object

_NAMES = ("vocab.pkl", "vocab.bin", "vocab.txt", "cache.pt", "cache.pkl", "spiece.model")

# corpora whose lines end with <eos>, stand between <S>, or are not units
_LINES_END = ("ptb", "wt2", "wt103")
_SENTENCES = ("lm1b",)
_EVENTS = "nesmdb"  # of LakhNES: events, one a line; <S> stands between pieces
_NO_LINES = ("enwik8", "text8", _EVENTS)
_EOS, _SENTENCE, _BLANK = "<eos>", "<S>", "_"
_UNKNOWN = ("<unk>", "<UNK>")

_MEANING = ("words", "symbols", "unit", "lower_case", "blank", "line_start", "line_end", "unknown", "moses", "never_split")
"""Attributes of a tokenizer that follow from a state."""


def find_tokenizer(
    weights: Path,
    *,
    given: Path | None,
    state: Mapping[str, Any] | None,
    vocab_size: int | None,
    moses: str | None,
    is_text: bool = False,
) -> Tokenizer | None:
    """Return the tokenizer of a checkpoint, if there is a vocabulary.

    Args:
        weights: file or directory of the tensors; a vocabulary may lie beside them.
        given: the file of the vocabulary; None: look for one.
        state: attributes of the vocabulary in the checkpoint itself, if it holds one.
        vocab_size: size of the model's vocabulary.
        moses: see `convert`.
        is_text: `given` is a text, and the vocabulary consists of its characters.

    Raises:
        CheckpointError: the vocabulary cannot be read, or has another size.
    """
    folder = weights if weights.is_dir() else weights.parent
    if given is not None and is_text:
        tokenizer, origin = _characters_of(given), given
    elif given is not None:
        tokenizer, origin = read_vocabulary(given, moses=moses, vocab_size=vocab_size), given
    elif state is not None and ("idx2sym" in state or "sym2idx" in state):  # NVIDIA's copy of GPT-2's has no words
        tokenizer, origin = _of_state(state, weights, moses), weights
    else:
        origin = next((folder / name for name in _NAMES if os.path.lexists(folder / name)), None)
        if origin is None:
            return None
        tokenizer = read_vocabulary(origin, moses=moses, vocab_size=vocab_size)
    if tokenizer.vocab_size != vocab_size:
        raise CheckpointError(
            f"the vocabulary of '{origin}' has {tokenizer.vocab_size:,} tokens, the model {vocab_size:,}; "
            "they do not belong together, give the right one with --vocabulary"
        )
    return tokenizer


def _characters_of(path: Path) -> Tokenizer:
    """Return the tokenizer whose ids are the characters of a text, as labml reads and numbers them."""
    text = _text_of(path)
    with _naming(path):
        return CharTokenizer(text.replace("\r\n", "\n").replace("\r", "\n"))


def _text_of(path: Path) -> str:
    with _naming(path):
        return path.read_bytes().decode("utf-8")


def read_vocabulary(path: Path, *, moses: str | None = None, vocab_size: int | None = None) -> Tokenizer:
    """Read a foreign vocabulary: cache.pt, cache.pkl, vocab.pkl, vocab.bin, vocab.txt, 1b_word_vocab.txt, spiece.model.

    Files beside it say what it does not: `tokenizer_config.json` (`lower_case`, or of a spiece.model `do_lower_case` and
    `keep_accents`) and `corpus-info.json` (`dataset`). `vocab_size` is the model's, see `from_vocab_txt`.
    """
    path = Path(path)
    if path.suffix == ".model":
        beside = ("do_lower_case", "keep_accents")
        lower_case, keep_accents = (_beside(path, "tokenizer_config.json", key, bool) or False for key in beside)
        with _naming(path):
            return read_spiece(path, lower_case=lower_case, keep_accents=keep_accents)
    if path.suffix == ".txt":
        text = _text_of(path)
        lower_case = _beside(path, "tokenizer_config.json", "lower_case", bool) or False
        dataset = _beside(path, "corpus-info.json", "dataset", str)
        with _naming(path):
            return from_vocab_txt(text, lower_case=lower_case, dataset=dataset, moses=moses, vocab_size=vocab_size)
    tree = unpickle(path)
    if isinstance(tree, Stub) and isinstance(tree.state.get("vocab"), Stub):  # a Corpus
        return _of_state({"dataset": tree.state.get("dataset"), **tree.state["vocab"].state}, path, moses)
    return _of_state(tree.state if isinstance(tree, Stub) else tree, path, moses)


def _of_state(state: Any, path: Path, moses: str | None) -> Tokenizer:
    with _naming(path):
        known = _attributes(state)
        if known.get("dataset") is None:
            known["dataset"] = _beside(path, "corpus-info.json", "dataset", str)
        return from_vocab_state(known, moses=moses)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Name the file in errors about its words."""
    try:
        yield
    except (UnicodeDecodeError, ConfigError, TokenizerError) as error:
        raise CheckpointError(f"vocabulary of '{path}': {error}") from None


_Words = Annotated[list[str], Field(strict=False)]


class _Attributes(Settings):
    """The attributes of a vocabulary that matter. Its `language` does not: only the user chooses Moses rules, never a file."""

    idx2sym: _Words | None = None
    sym2idx: dict[str, int] | None = None
    lower_case: bool | None = None
    delimiter: str | None = None
    unk_idx: int | None = None
    never_split: _Words | None = None
    dataset: str | None = None
    EOT: Any = None
    tokenizer: Any = None


def _attributes(state: Any) -> dict[str, Any]:
    if not isinstance(state, Mapping):
        raise TokenizerError(f"a vocabulary is a mapping of its attributes, not {shown(state)}")
    known = _Attributes(**{name: state[name] for name in _Attributes.model_fields if name in state}).model_dump()
    if not is_unicode("".join([*(known["idx2sym"] or ()), *(known["sym2idx"] or ()), *(known["never_split"] or ())])):
        raise TokenizerError("a word has half of a character (a lone surrogate)")
    if known["idx2sym"]:
        known["idx2sym"] = _as_utf8(known["idx2sym"])
    if known["sym2idx"]:
        known["sym2idx"] = dict(zip(_as_utf8(list(known["sym2idx"])), known["sym2idx"].values(), strict=True))
    return {name: value for name, value in known.items() if value is not None}


def _as_utf8(words: Sequence[str]) -> list[str]:
    """Decode words of Python 2, which were read as latin-1: return them as UTF-8 if all of them are."""
    try:
        return [word.encode("latin-1").decode("utf-8") for word in words]
    except UnicodeError:
        return list(words)


def _beside(path: Path, name: str, key: str, kind: type) -> Any:
    """Return a value from a file of settings beside a vocabulary, or None if there is none of the right type."""
    if not os.path.lexists(path.parent / name):
        return None
    value = read_json_object(path.parent / name).get(key)
    return value if isinstance(value, kind) else None


def from_vocab_state(state: Mapping[str, Any], *, dataset: str | None = None, moses: str | None = None) -> Tokenizer:
    r"""Return a tokenizer that gives the same ids as a foreign vocabulary.

    Args:
        state: attributes of a foreign `Vocab` or `TransfoXLTokenizer`, as plain values: `idx2sym` or `sym2idx`, and if there
            are any, `lower_case`, `delimiter`, `unk_idx`, `never_split`, `language`, `dataset`. Others do not matter.
        dataset: its corpus (`Corpus.dataset`), such as "wt103"; None: `state` says it, or else the words do.
        moses: language whose Moses rules split running text, as Hugging Face does; None: the `language` in `state`, which
            Hugging Face's own files have. Without a language, words are separated by spaces.

    Raises:
        TokenizerError: this is not a vocabulary, contradicts itself, or lacks its own pieces (NVIDIA's copy of GPT-2's).

    Example:
        >>> tokenizer = from_vocab_state({"idx2sym": ["<eos>", "cat", "the"], "lower_case": True}, dataset="ptb")
        >>> tokenizer.encode("The cat\n").tolist()
        [2, 1, 0]
    """
    words = _words(state)
    lower_case, delimiter = state.get("lower_case", False), state.get("delimiter")
    dataset = state.get("dataset") if dataset is None else dataset
    unknown = _unknown(state, words)
    if delimiter not in (None, ""):
        raise TokenizerError(
            f"a vocabulary whose words are separated by {delimiter!r} is not supported; only white space (None) and '' are"
        )
    if delimiter == "":
        return SymbolTokenizer(words, unit="char", lower_case=lower_case, unknown=unknown)
    language = state.get("language") if moses is None else moses
    if language is None and dataset not in _LINES_END + _SENTENCES and (unit := _unit(words)):
        characters = unit == "char"
        blank = _BLANK if characters else None
        return SymbolTokenizer(words, unit=unit, lower_case=lower_case and characters, blank=blank, unknown=unknown)
    start, end = _line_words(words, dataset)
    never_split = state.get("never_split")
    if never_split is None:
        never_split = [word for word in (_EOS, "<unk>", "<formula>") if word in words] if language else []
    return WordTokenizer(
        words,
        lower_case=lower_case,
        line_start=start,
        line_end=end,
        unknown=unknown,
        any_line_end=True,
        undo_joins=True,
        moses=language,
        never_split=never_split,
    )


def from_vocab_txt(
    text: str,
    *,
    lower_case: bool = False,
    dataset: str | None = None,
    moses: str | None = None,
    vocab_size: int | None = None,
) -> Tokenizer:
    r"""Return a tokenizer for a file whose lines each begin with a word, in order of id; see `from_vocab_state`.

    Such files are Hugging Face's `vocab.txt`, the authors' `1b_word_vocab.txt` and LakhNES's `vocab.txt`. The last lacks the
    first word of its model, `<S>`, which that program puts before the others; so a file of events that has one word less than
    `vocab_size` gets it.

    Example:
        >>> from_vocab_txt("<S>\nthe 12\n<UNK>\n").encode("the cat\n").tolist()
        [0, 1, 2, 0]
    """
    words: dict[str, None] = {}
    for number, line in enumerate(text.removesuffix("\n").split("\n"), start=1):
        first = line.split(maxsplit=1)[:1]
        if not first:
            raise TokenizerError(f"line {number} of the vocabulary is empty; each line begins with a word")
        words[first[0]] = None
    if len(words) + 1 == vocab_size and not words.keys() & {_SENTENCE, _EOS, *_UNKNOWN}:
        words, dataset = {_SENTENCE: None, **words}, _EVENTS
    return from_vocab_state({"idx2sym": list(words), "lower_case": lower_case}, dataset=dataset, moses=moses)


def to_vocab_state(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return those attributes of a foreign vocabulary with the same ids that matter; `from_vocab_state` reads them back.

    Raises:
        TokenizerError: no such vocabulary means the same as the tokenizer.
    """
    state: dict[str, Any] = {"lower_case": False, "delimiter": None}
    unknown = None
    if isinstance(tokenizer, ByteTokenizer):
        words: Sequence[str] = [str(value) for value in range(256)]
        state |= {"dataset": "enwik8"}
    elif isinstance(tokenizer, SymbolTokenizer):
        words, unknown = tokenizer.symbols, tokenizer.unknown
        spaced = tokenizer.unit == "byte" or tokenizer.blank is not None
        state |= {
            "delimiter": None if spaced else "",
            "dataset": "enwik8" if tokenizer.unit == "byte" else "text8",
            "lower_case": tokenizer.lower_case,
        }
    elif isinstance(tokenizer, WordTokenizer):
        words, unknown = tokenizer.words, tokenizer.unknown
        state |= {
            "lower_case": tokenizer.lower_case,
            "dataset": "lm1b" if tokenizer.line_start is not None else "text8" if tokenizer.line_end is None else "wt103",
        }
        if tokenizer.moses is not None:
            state["language"] = tokenizer.moses
        if tokenizer.moses is not None or tokenizer.never_split:
            state["never_split"] = list(tokenizer.never_split)
    else:
        raise TokenizerError(
            f"a vocabulary of kind '{tokenizer.kind}' has no counterpart in other programs; kinds word, byte and symbols have"
        )
    state["idx2sym"] = list(words)
    if unknown is not None:
        state["unk_idx"] = state["idx2sym"].index(unknown)
    if not _same(state, tokenizer):
        raise TokenizerError("other programs have no vocabulary with these words for line ends, unknown words and specials")
    return state


def _same(state: Mapping[str, Any], tokenizer: Tokenizer) -> bool:
    """Return whether a state means the same as a tokenizer, in the attributes that both have."""
    try:
        again = from_vocab_state(state)
    except TokenizerError:
        return False
    names = [name for name in _MEANING if hasattr(tokenizer, name) and hasattr(again, name)]
    return all(getattr(again, name) == getattr(tokenizer, name) for name in names)


def _words(state: Mapping[str, Any]) -> list[str]:
    words = state.get("idx2sym")
    if words:
        return words
    ids = state.get("sym2idx")  # Hugging Face 4.35.2 keeps nothing else after it has read a vocabulary
    if ids:
        if sorted(ids.values()) != list(range(len(ids))):
            raise TokenizerError(f"the vocabulary's ids are not 0 … {len(ids) - 1}, each once; convert the original file")
        return sorted(ids, key=ids.__getitem__)
    if "EOT" in state or "tokenizer" in state:
        raise TokenizerError(
            "this is NVIDIA's OpenAIVocab: GPT-2's byte-pair encoding filled up to 50,264 ids, whose pieces are not in the "
            "checkpoint; encode the text with GPT-2's vocab.json and merges.txt and give the ids"
        )
    raise TokenizerError("no words in the vocabulary (neither idx2sym nor sym2idx); give the file that the model came with")


def _unknown(state: Mapping[str, Any], words: Sequence[str]) -> str | None:
    index: int | None = state.get("unk_idx")
    if index is None:
        return next((word for word in _UNKNOWN if word in words), None)
    if not 0 <= index < len(words):
        raise TokenizerError(f"unk_idx ({index!r}) is not one of the {len(words):,} ids; convert the original file")
    return words[index]


def _unit(words: Sequence[str]) -> str | None:
    """Return "byte" or "char" if the words are bytes (as in prepared enwik8) or characters (as in prepared text8)."""
    plain = [word for word in words if not (word.startswith("<") and word.endswith(">"))]
    if plain and all(map(is_byte, plain)):
        return "byte"
    return "char" if _BLANK in plain and all(len(word) == 1 for word in plain) else None


def _line_words(words: Sequence[str], dataset: str | None) -> tuple[str | None, str | None]:
    """Return the words that begin and end a line."""
    known = _LINES_END + _SENTENCES + _NO_LINES
    if dataset in _SENTENCES or (dataset not in known and _SENTENCE in words and _EOS not in words):
        return _SENTENCE, _SENTENCE
    if dataset in _NO_LINES or (dataset not in known and _EOS not in words):
        return None, None
    return None, _EOS

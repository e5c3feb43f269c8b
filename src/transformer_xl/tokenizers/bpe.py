"""Byte-level byte-pair encoding by the `tokenizers` library."""

import json
import re
from collections.abc import Iterable
from itertools import chain
from typing import Any

import numpy as np

from transformer_xl.config.run import TokenizerConfig
from transformer_xl.errors import TokenizerError, one_line
from transformer_xl.tokenizers.base import BYTES, LEARNING_BYTES, PieceTokenizer, first_bytes, learned_size, require

# Like GPT-2's, but a run of line ends is a unit of its own, so that no unit reaches across a cut after it.
_UNITS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\n+|[^\S\n]+(?!\S)|[^\S\n]+"

# Words with the space before them. No such unit reaches from non-space to a following space or line end, so segments can be
# encoded one by one, and most are in the cache. Other kinds of space do not end a segment, because the two regex libraries may
# not agree on them.
_SEGMENTS = re.compile(r"\s*+\S++(?:[^\S \n]\s*+\S*+)*+|\s++")
_CACHE_SIZE = 1 << 16
_BATCH = 4096  # the library returns some kilobytes per segment

_PRE_TOKENIZER = {
    "type": "Sequence",
    "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": _UNITS}, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
    ],
}
"""What cuts text into units, in the library's JSON."""

_ABSENT = ("normalizer", "post_processor", "truncation", "padding", "added_tokens")
_UNSET = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")


class BPETokenizer(PieceTokenizer):
    """Byte-level byte-pair encoding by the `tokenizers` library; represents any Unicode text.

    Args:
        library: the library's JSON, as `train_bpe` makes it: units of text are written as bytes and joined to tokens, and
            nothing is dropped, changed or random.
    """

    kind = "bpe"

    def __init__(self, library: dict[str, Any]) -> None:
        import tokenizers

        model, decoder = library["model"], library["decoder"]
        is_ours = model["type"] == "BPE" and decoder["type"] == "ByteLevel" and library["pre_tokenizer"] == _PRE_TOKENIZER
        is_ours = is_ours and not any(map(library.get, _ABSENT)) and not any(map(model.get, _UNSET))
        require(is_ours, "text might not survive it, because its parts are not those of a bpe tokenizer that txl trained")
        try:
            self._model = tokenizers.Tokenizer.from_str(json.dumps(library))
        except Exception as error:  # the library has no class of its own
            raise TokenizerError(f"damaged tokenizer: {one_line(error)}; train it again") from None
        self.library = library
        self._known: dict[str, list[int]] = {}  # ids of recent segments; the library is some ten times slower
        super().__init__(_pieces(self._model.get_vocab(with_added_tokens=False)))

    def encode(self, text: str) -> np.ndarray:
        segments = _SEGMENTS.findall(text)
        if len(self._known) > _CACHE_SIZE:
            self._known.clear()
        unknown = [segment for segment in set(segments) if segment not in self._known]
        for first in range(0, len(unknown), _BATCH):
            batch = unknown[first : first + _BATCH]
            self._known.update(zip(batch, self._encoded(batch), strict=True))
        return np.fromiter(chain.from_iterable(map(self._known.__getitem__, segments)), np.int64)

    def _encoded(self, texts: list[str]) -> list[list[int]]:
        try:
            return [encoding.ids for encoding in self._model.encode_batch_fast(texts, add_special_tokens=False)]
        except (TypeError, UnicodeEncodeError):
            raise TokenizerError("text with a lone surrogate is not Unicode; use tokenizer.kind=byte") from None


def _pieces(vocabulary: dict[str, int]) -> list[bytes]:
    """Return the bytes of each id; the library writes every byte as one printable character."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]  # these are written as they are,
    others = [value for value in range(256) if value not in printable]  # and these as the characters from U+0100 on
    byte_of = {chr(value): value for value in printable} | {chr(0x100 + i): value for i, value in enumerate(others)}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    is_whole = [vocabulary[token] for token in tokens] == list(range(len(tokens)))
    require(is_whole, f"its ids are not 0 … {len(tokens) - 1}, each once")
    require(set("".join(tokens)) <= byte_of.keys(), "a token is not made of bytes")
    pieces = [bytes(map(byte_of.__getitem__, token)) for token in tokens]
    require(set(BYTES) <= set(pieces), "it lacks some of the 256 bytes")
    return pieces


def train_bpe(config: TokenizerConfig, texts: Iterable[str]) -> BPETokenizer:
    """Learn merges from texts: see `train_tokenizer`."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    size = learned_size(config)
    if size < 256:
        raise TokenizerError(f"tokenizer.vocab_size ({size}) must be at least 256 for bpe, one id per byte; raise it")
    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_UNITS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=config.min_frequency,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[],
        show_progress=False,
    )
    model.train_from_iterator(first_bytes(texts, LEARNING_BYTES), trainer)
    return BPETokenizer(json.loads(model.to_str()))

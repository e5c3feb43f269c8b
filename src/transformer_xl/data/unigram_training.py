"""Pieces and their probabilities, learned from a text.

All words are cut at once, in arrays, and every sum is formed in the same order, so the same text gives the same pieces. The
trainer of the library `tokenizers` gives others each time, because it adds in the order of a hash table.

Reference: Kudo 2018, "Subword Regularization", section 3.2: expectation and maximization, then the pieces go that the
likelihood misses least. google/sentencepiece `src/unigram_model_trainer.cc` has the numbers: seeds that occur twice, two rounds
between cuts, a quarter goes, the digamma function.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from transformer_xl.config import TokenizerConfig
from transformer_xl.data.bpe import first_bytes
from transformer_xl.data.normalization import SPACE, Spacing, xlnet_text
from transformer_xl.data.unigram import BYTE_PIECES, CONTROL, LINE_END, UNKNOWN, USER_DEFINED, UnigramTokenizer
from transformer_xl.errors import TokenizerError

DEFAULT_UNIGRAM_SIZE = 8192
"""Vocabulary size of a Unigram tokenizer if the configuration has none."""

UNIGRAM_TRAINING_BYTES = 16 << 20
"""A Unigram tokenizer learns its pieces from this many bytes at the beginning of the text."""

_MOST_PIECES = 2**18
_COVERAGE = 0.99995  # of the text by characters that get a piece, as XLNet's
_LONGEST_PIECE, _LONGEST_WORD = 16, 40  # characters; the probability of a longer word may be too small a number
_SEEDS = 1_000_000
_ROUNDS, _KEPT, _SPARE, _RAREST = 2, 0.75, 1.1, 0.5


def train_unigram(config: TokenizerConfig, texts: Iterable[str]) -> UnigramTokenizer:
    """Learn pieces from texts: see `train_tokenizer`."""
    special = [UNKNOWN, *CONTROL, *USER_DEFINED, *(BYTE_PIECES if config.byte_fallback else ())]
    size = DEFAULT_UNIGRAM_SIZE if config.vocab_size is None else config.vocab_size
    if size > _MOST_PIECES:
        raise TokenizerError(f"tokenizer.vocab_size ({size}) must be at most {_MOST_PIECES:,} for unigram; lower it")
    if config.normalization != "xlnet" and (config.lower_case or config.keep_accents):
        raise TokenizerError("tokenizer.lower_case and keep_accents of unigram need tokenizer.normalization=xlnet; set it")
    counts = _words(config, first_bytes(texts, UNIGRAM_TRAINING_BYTES))
    if not counts:
        raise TokenizerError("no words to learn pieces from; give a corpus that is not empty")
    counts, alphabet = _covered(counts)
    if not alphabet:
        raise TokenizerError("no characters to learn pieces from; give a corpus of text")
    room = size - len(special)
    if room < len(alphabet):
        raise TokenizerError(
            f"tokenizer.vocab_size ({size}) must be at least {len(special) + len(alphabet)} here, for {len(special)} special "
            f"pieces and {len(alphabet)} characters; raise it"
        )
    learned = _learn(counts, alphabet, room)
    return UnigramTokenizer(
        [*special, *learned],
        [*(0.0 for _ in special), *learned.values()],
        control=CONTROL,
        user_defined=USER_DEFINED,
        byte_fallback=config.byte_fallback,
        normalization=config.normalization,
        lower_case=config.lower_case,
        keep_accents=config.keep_accents,
        line_end=LINE_END,
    )


def _words(config: TokenizerConfig, texts: Iterable[str]) -> Counter[str]:
    """Count the words of a text, each with its mark; what the user defined is cut out of them."""
    spacing = Spacing(None, (), add_dummy_prefix=True, remove_extra_whitespaces=True)
    parts = re.compile(f"{SPACE}?[^{SPACE}{re.escape(''.join(piece for piece in USER_DEFINED if len(piece) == 1))}]+|{SPACE}")
    counts: Counter[str] = Counter()
    for text in texts:
        for line in text.replace(LINE_END, " ").split("\n"):
            if config.normalization == "xlnet":
                line = xlnet_text(line, lower_case=config.lower_case, keep_accents=config.keep_accents)
            else:
                line = " ".join(line.split())
            counts.update(parts.findall(spacing.text(line)))
    return counts


def _covered(counts: Counter[str]) -> tuple[Counter[str], list[str]]:
    """Leave out the rarest characters, at which words are cut; return the counts and the others in order of frequency."""
    characters: Counter[str] = Counter()
    for word, count in counts.items():
        for character in word:
            characters[character] += count
    alphabet, left = [], _COVERAGE * characters.total()
    for character, count in sorted(characters.items(), key=lambda item: (-item[1], item[0])):
        if left <= 0:
            break
        left -= count
        if unicodedata.category(character) not in ("Cc", "Cs"):
            alphabet.append(character)
    known = set(alphabet)
    if len(known) == len(characters):
        return counts, alphabet
    rest: Counter[str] = Counter()
    for word, count in counts.items():
        for part in "".join([character if character in known else "\0" for character in word]).split("\0"):
            rest[part] += count
    del rest[""]
    return rest, alphabet


class _Trie:
    """Texts by their characters: a node for each beginning of a text, as the key of its parent and its last character.

    Attributes:
        keys: for each length from 2 on, those of the nodes in ascending order, int64 (n,).
        pieces: for each length from 1 on, the piece of each node, or -1, int64 (n,).
    """

    def __init__(self, n_characters: int) -> None:
        self.base = n_characters + 1
        self.keys: list[np.ndarray] = []
        self.pieces: list[np.ndarray] = [np.arange(-1, n_characters)]

    def occurrences(self, codes: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
        """Yield places, pieces and length of all pieces in a text, codes (N,): characters from 1 on, and 0 between words."""
        places = np.flatnonzero(codes)
        nodes = codes[places]
        yield places, self.pieces[0][nodes], 1
        for length, (keys, pieces) in enumerate(zip(self.keys, self.pieces[1:], strict=True), start=2):
            following = codes[places + length - 1]
            wanted = nodes * self.base + following
            nodes = np.minimum(np.searchsorted(keys, wanted), max(len(keys) - 1, 0))
            there = (following > 0) & (keys[nodes] == wanted) if len(keys) else np.zeros(len(places), bool)
            places, nodes = places[there], nodes[there]
            found = pieces[nodes] >= 0
            yield places[found], pieces[nodes[found]], length


def _learn(counts: Counter[str], alphabet: list[str], size: int) -> dict[str, float]:
    """Return at most `size` pieces, all characters among them, with logarithms of their probabilities, the likeliest first."""
    short = [(word, n) for word, n in counts.items() if len(word) <= _LONGEST_WORD]
    words = sorted(short, key=lambda item: (-item[1], item[0]))
    codes = _codes([word for word, _ in words], alphabet)
    weights = np.array([n for _, n in words], np.float64)
    trie, texts, frequencies = _seeds(codes, weights, alphabet)
    text = _Lattice.of(codes, weights, trie)
    inside = _Lattice.of(_codes(texts, alphabet), np.ones(len(texts)), trie).without_whole_words()
    n, single = len(texts), np.array([len(piece) == 1 for piece in texts])
    alive = np.ones(n, bool)
    frequencies = np.maximum(frequencies, _RAREST)  # a character may occur in words that are too long alone
    scores = np.log(frequencies) - np.log(frequencies.sum())
    expected, n_most = np.zeros(n), max(int(_SPARE * size), int(single.sum()))
    while True:
        for _ in range(_ROUNDS):
            expected = text.expected(np.where(alive, np.exp(scores), 0.0))
            alive &= single | (expected >= _RAREST)
            kept = np.where(alive, np.maximum(expected, _RAREST), 0.0)
            scores = np.where(alive, _digamma(np.where(alive, kept, 1.0)) - _digamma(kept.sum(keepdims=True)), -np.inf)
            text = text.of_pieces(alive)
        if alive.sum() <= n_most:
            break
        inside = inside.of_pieces(alive)
        loss = expected * (np.where(alive, scores, 0.0) - inside.best(scores))
        loss = np.where(single, np.inf, np.where(alive, loss, -np.inf))
        alive[np.argsort(-loss, kind="stable")[max(n_most, int(_KEPT * alive.sum())) :]] = False
        text = text.of_pieces(alive)
        scores[~alive] = -np.inf
    order = sorted(np.flatnonzero(alive).tolist(), key=lambda i: (not single[i], -scores[i], texts[i]))[:size]
    order.sort(key=lambda i: (-scores[i], texts[i]))
    return {texts[i]: float(np.float32(scores[i])) for i in order}


def _codes(words: list[str], alphabet: list[str]) -> np.ndarray:
    """Return the words as numbers of their characters from 1 on, each with a 0 after it, and zeros at the end, int64."""
    points = np.frombuffer("\0".join([*words, ""]).encode("utf-32-le"), "<u4")
    table = np.zeros(max(map(ord, alphabet)) + 1, np.int64)
    table[[ord(character) for character in alphabet]] = np.arange(1, len(alphabet) + 1)
    return np.concatenate([table[points], np.zeros(_LONGEST_PIECE, np.int64)])


def _seeds(codes: np.ndarray, weights: np.ndarray, alphabet: list[str]) -> tuple[_Trie, list[str], np.ndarray]:
    """Return all characters, and texts that occur twice and in which no longer one occurs as often, with their frequencies."""
    trie = _Trie(len(alphabet))
    places = np.flatnonzero(codes)
    weight = weights[np.cumsum(codes == 0)[places]]
    nodes = codes[places]
    n_found = np.bincount(nodes, weight, minlength=trie.base)
    texts, frequencies, firsts = list(alphabet), [n_found[1:]], []
    for length in range(2, _LONGEST_PIECE + 1):
        following = codes[places + length - 1]
        inner = following > 0
        places, weight = places[inner], weight[inner]
        keys, first, nodes = np.unique(nodes[inner] * trie.base + following[inner], return_index=True, return_inverse=True)
        n_parent, n_found = n_found, np.bincount(nodes, weight, minlength=len(keys))
        often = n_found >= 2
        if length > 2:  # a text that is always followed by the same character is not worth a piece of its own
            followed = np.zeros(len(n_parent), bool)
            followed[(keys // trie.base)[n_found == n_parent[keys // trie.base]]] = True
            trie.pieces[-1][followed] = -1
        renumbered = np.cumsum(often) - 1
        firsts.append(places[first[often]])
        trie.keys.append(keys[often])
        trie.pieces.append(np.zeros(int(often.sum()), np.int64))
        frequencies.append(n_found[often])
        inner = often[nodes]
        places, weight, nodes, n_found = places[inner], weight[inner], renumbered[nodes[inner]], n_found[often]
    _number(trie, frequencies)
    letters = np.array(["", *alphabet])
    chosen = [frequencies[0]]
    for length, (pieces, first, each) in enumerate(zip(trie.pieces[1:], firsts, frequencies[1:], strict=True), start=2):
        is_piece = pieces >= 0
        texts += ["".join(row) for row in letters[codes[first[is_piece][:, None] + np.arange(length)]].tolist()]
        chosen.append(each[is_piece])
    return trie, texts, np.concatenate(chosen)


def _number(trie: _Trie, frequencies: list[np.ndarray]) -> None:
    """Number the nodes that are seeds, after the characters; of too many, those that write most of the text."""
    by_length = enumerate(zip(trie.pieces[1:], frequencies[1:], strict=True), start=2)
    worth = np.concatenate([np.where(pieces >= 0, n * length, -1.0) for length, (pieces, n) in by_length])
    chosen = np.zeros(len(worth), bool)
    chosen[np.argsort(-worth, kind="stable")[:_SEEDS]] = True
    chosen &= worth > 0
    numbers = np.where(chosen, np.cumsum(chosen) - 1 + trie.base - 1, -1)
    ends = np.cumsum([len(pieces) for pieces in trie.pieces[1:]])
    trie.pieces[1:] = np.split(numbers, ends[:-1])


@dataclass(frozen=True)
class _Lattice:
    """Every way to cut words into pieces.

    Attributes:
        weights: how often each word occurs, (W,).
        n_places: places of all words, one before each character and one at the end.
        first: the first place of each word, (W,).
        last: its last place, (W,).
        starts: the place at which each piece of a word begins, (E,).
        lengths: of those pieces, (E,).
        pieces: their numbers, (E,).
        depths: characters from the beginning of the word to the end of the piece, in ascending order, (E,).
    """

    weights: np.ndarray
    n_places: int
    first: np.ndarray
    last: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    pieces: np.ndarray
    depths: np.ndarray

    @classmethod
    def of(cls, codes: np.ndarray, weights: np.ndarray, trie: _Trie) -> "_Lattice":
        """Find all pieces in the words of `codes` (see `_codes`)."""
        last = np.flatnonzero(codes == 0)[: len(weights)]
        first = np.concatenate([[0], last + 1])[: len(weights)]
        found = list(trie.occurrences(codes))
        starts = np.concatenate([places for places, *_ in found], dtype=np.int32, casting="same_kind")
        pieces = np.concatenate([pieces for _, pieces, _ in found], dtype=np.int32, casting="same_kind")
        lengths = np.concatenate([np.full(len(places), length, np.int8) for places, _, length in found])
        word = np.cumsum(codes == 0, dtype=np.int32)  # a place after the last character of a word belongs to it
        depths = (starts + lengths - first[word[starts]]).astype(np.int8)
        order = np.argsort(depths, kind="stable")
        return cls(weights, len(codes), first, last, starts[order], lengths[order], pieces[order], depths[order])

    def _where(self, kept: np.ndarray) -> "_Lattice":
        edges = (each[kept] for each in (self.starts, self.lengths, self.pieces, self.depths))
        return _Lattice(self.weights, self.n_places, self.first, self.last, *edges)

    def of_pieces(self, alive: np.ndarray) -> "_Lattice":
        """Return the same without the pieces that are no more."""
        return self._where(alive[self.pieces])

    def without_whole_words(self) -> "_Lattice":
        """Return the same without the pieces that are whole words of several characters."""
        whole = np.zeros(self.n_places, bool)
        whole[self.last] = True
        return self._where((self.lengths == 1) | (self.depths != self.lengths) | ~whole[self.starts + self.lengths])

    def expected(self, probabilities: np.ndarray) -> np.ndarray:
        """Return how often each piece is expected, given the probabilities of all."""
        factors, ends, groups = probabilities[self.pieces], self.starts + self.lengths, self._groups()
        forward, backward = np.zeros(self.n_places), np.zeros(self.n_places)
        forward[self.first] = 1.0
        for group in groups:
            np.add.at(forward, ends[group], forward[self.starts[group]] * factors[group])
        backward[self.last] = self.weights / forward[self.last]
        for group in reversed(groups):  # what begins where these end, ends later
            np.add.at(backward, self.starts[group], backward[ends[group]] * factors[group])
        return np.bincount(self.pieces, forward[self.starts] * factors * backward[ends], minlength=len(probabilities))

    def best(self, scores: np.ndarray) -> np.ndarray:
        """Return the largest sum of scores of a way to cut each word, (W,)."""
        sums = np.full(self.n_places, -np.inf)
        sums[self.first] = 0.0
        for group in self._groups():
            np.maximum.at(sums, (self.starts + self.lengths)[group], sums[self.starts[group]] + scores[self.pieces[group]])
        return sums[self.last]

    def _groups(self) -> list[slice]:
        """Return the pieces whose ends are equally far from the beginning of their words."""
        borders = np.searchsorted(self.depths, np.arange(1, _LONGEST_WORD + 2)).tolist()
        return [slice(*border) for border in pairwise(borders)]


def _digamma(values: np.ndarray) -> np.ndarray:
    """Return the logarithmic derivative of the gamma function of values from 0.5 on."""
    result = np.zeros_like(values)
    values = values.copy()
    for _ in range(7):
        small = values < 7
        result -= np.where(small, 1 / values, 0.0)
        values += small
    values -= 0.5
    inverse = 1 / values**2
    return result + np.log(values) + inverse / 24 - 7 * inverse**2 / 960 + 31 * inverse**3 / 8064 - 127 * inverse**4 / 30720

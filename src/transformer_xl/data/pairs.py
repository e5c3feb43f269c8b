"""Token ids as lanes of rows with two texts, targets and orders: what an XLNet is pretrained on.

Each row of T tokens holds the next tokens of its lane, then two texts A and B:

    [reuse_len tokens][A, <sep>, B, <sep>, <cls>]        len(A) + len(B) = T - reuse_len - 3

A goes on where the reuse_len tokens end. B goes on where A ends; half the time, and where no sentence ends early enough for A,
it is a random place of the lane instead. The longer one of A and B is cut at its end until both fit. In each step a lane moves
on by reuse_len tokens, which are those that a memory keeps. So a text is read once, and parts of it once more as A or B.

With `bi_data` two rows share a lane. Row 2·i reads lane i as it is written; row 2·i + 1 reads it from its end, token by token.
So both kinds of rows are in every process. The special tokens of such a row are in the same places of the array.

Targets, B and orders are drawn from a key: the seed, the epoch, the row and the step. So a position in the stream says all that
comes, any number of processes reads the same rows, and each epoch has other targets.

Sentences. The original reads a sentence a line and keeps one bit a token. Prepared ids have no such bit, so a sentence is
taken to end with a document, and with a token that ends one (`sentence_ends`, such as "." or a line end; the last one of
several). So an abbreviation ends a sentence, too, and a closing quotation mark may begin one. B begins where the sentence at
its random place does, if that is at most T tokens before, or else at this place; the original looks back without a limit. If
nobody says which tokens end sentences, any token may.

The original needs a token behind B and may therefore end an epoch a step early; here all epochs have as many steps.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from transformer_xl.batch import Batch, Order, Pairs
from transformer_xl.data.order import PlainText, Shuffle, ShuffledText
from transformer_xl.data.streams import LaneStream
from transformer_xl.data.targets import Draws, TargetSampler
from transformer_xl.errors import ConfigError, CorpusError

_N_SPECIAL = 3
_TRAINING, _FIXED = 0, 1


class PairStream(LaneStream):
    """Endless iterator over rows of two texts with targets, epoch after epoch.

    Args:
        ids: shape (n_tokens,), any integer type; may be memory-mapped, because only the rows of one step are copied.
        batch_size: rows in all processes together, B.
        tgt_len: tokens of a row, T.
        reuse_len: tokens by which a lane moves on.
        word_starts: (V,) bool, tokens with which a word begins.
        sentence_ends: (V,) bool, tokens with which a sentence ends; None: a sentence may end with any token.
        document_starts: token offsets in `ids` at which documents start, increasing.
        bi_data: half of the rows read their lane from its end.
        fixed_draws: draw the same in every epoch, from a key of their own, for validation.
        rank: index of this process.
        world_size: number of processes, W.
        shuffle: see `SegmentStream`.
        seed: seed of all draws and of random orders of documents.
        **targets: the other arguments of `TargetSampler`.

    Raises:
        ConfigError: lengths or numbers that do not fit.
        CorpusError: fewer ids than one row per lane needs.

    Example:
        >>> starts = np.ones(100, bool)
        >>> layout = {"batch_size": 2, "tgt_len": 12, "reuse_len": 6, "num_predict": 3}
        >>> segment = next(PairStream(np.arange(50), **layout, word_starts=starts, sep=98, cls=99))
        >>> segment.ids[:, :6].tolist(), segment.ids[:, -1].tolist()
        ([[0, 1, 2, 3, 4, 5], [49, 48, 47, 46, 45, 44]], [99, 99])
    """

    _resumed_with = "the same corpus, train.batch_size, train.tgt_len, train.seed, data.shuffle, reuse_len and bi_data"

    def __init__(
        self,
        ids: np.ndarray,
        *,
        batch_size: int,
        tgt_len: int,
        reuse_len: int,
        word_starts: np.ndarray,
        sentence_ends: np.ndarray | None = None,
        document_starts: np.ndarray | None = None,
        bi_data: bool = True,
        fixed_draws: bool = False,
        rank: int = 0,
        world_size: int = 1,
        shuffle: Shuffle = "none",
        seed: int = 0,
        **targets: Any,
    ) -> None:
        super().__init__(
            ids,
            batch_size=batch_size,
            tgt_len=tgt_len,
            document_starts=document_starts,
            rank=rank,
            world_size=world_size,
            shuffle=shuffle,
            seed=seed,
        )
        self._sampler = TargetSampler(tgt_len=tgt_len, reuse_len=reuse_len, word_starts=word_starts, **targets)
        if bi_data and batch_size % 2:
            raise ConfigError(
                f"train.batch_size ({batch_size}) must be even with model.bi_data, as half of the rows are read backwards; "
                f"use train.batch_size={batch_size + 1} or model.bi_data=false"
            )
        self._pair_len = tgt_len - reuse_len - _N_SPECIAL
        if self._pair_len < 2:
            raise ConfigError(
                f"model.reuse_len ({reuse_len}) must be at most train.tgt_len - {_N_SPECIAL + 2} ({tgt_len - _N_SPECIAL - 2}), "
                "so that two texts and three special tokens fit behind it"
            )
        n_lanes = batch_size // 2 if bi_data else batch_size
        self._lane_len = len(ids) // n_lanes
        if self._lane_len < tgt_len:
            raise CorpusError(
                f"text too short: {len(ids):,} tokens, but {n_lanes} lanes of {tgt_len} tokens need {n_lanes * tgt_len:,}; use "
                "a smaller train.batch_size or train.tgt_len"
            )
        self._reuse_len, self._bi_data = reuse_len, bi_data
        self._ends = None if sentence_ends is None else np.asarray(sentence_ends, bool)
        self._fixed = fixed_draws
        self._backward_B = np.array([bi_data and row % 2 == 1 for row in self._rows])

    @property
    def segments_per_epoch(self) -> int:
        return (self._lane_len - self._tgt_len) // self._reuse_len + 1

    def read(self, tgt_len: int | None = None) -> Batch:
        n_row, n_token = len(self._rows), self._tgt_len
        ids_BT = np.empty((n_row, n_token), np.int64)
        segment_BT = np.zeros((n_row, n_token), np.int64)
        is_random_B = np.zeros(n_row, bool)
        sep, cls = self._sampler.functional
        purpose, epoch = (_FIXED, 0) if self._fixed else (_TRAINING, self._epoch)
        draws = [Draws(self._seed, purpose, epoch=epoch, row=row, step=self._n_read) for row in self._rows]
        for i, row in enumerate(self._rows):
            stream, a, b, is_random_B[i] = self._texts(row, draws[i])
            ids_BT[i] = np.concatenate([stream, a, [sep], b, [sep, cls]])
            segment_BT[i, self._reuse_len + len(a) + 1 :] = 1
        segment_BT[:, -1] = 2
        drawn = self._sampler.draw(ids_BT, self._backward_B, draws)
        self._move_on()
        order = Order(*map(torch.from_numpy, (drawn.rank, drawn.sees, drawn.targets)))
        pairs = Pairs(order, *map(torch.from_numpy, (segment_BT, self._backward_B.copy(), is_random_B)))
        return Batch(torch.from_numpy(ids_BT), torch.from_numpy(drawn.labels), extra=pairs)

    def _texts(self, row: int, draws: Draws) -> tuple[np.ndarray, np.ndarray, np.ndarray, bool]:
        """Return the next tokens of the row's lane, A, B, and whether B is at a random place.

        Args:
            row: of all processes.
            draws: used in the order of the original: whether B is random, where A ends, where B begins.
        """
        lane = self._lane(row)
        begin, pair_len = self._n_read * self._reuse_len, self._pair_len
        # It does not matter where farther on a sentence ends: B keeps at most half of the room if A needs as much.
        tokens, sentences = lane.read(begin, min(begin + self._reuse_len + pair_len + pair_len // 2, lane.length))
        stream, tokens, sentences = tokens[: self._reuse_len], tokens[self._reuse_len :], sentences[self._reuse_len :]
        cuts = np.flatnonzero(sentences[1:pair_len]) + 1
        end = _first(sentences, pair_len)
        if is_random := not (len(cuts) and draws.take(1).item() >= 0.5):
            a_len = int(cuts[draws.below(len(cuts))]) if len(cuts) else end
            following, b_len = self._random_text(lane, max(1, pair_len - a_len), draws)
        else:
            a_len = int(cuts[draws.below(len(cuts))])
            following, b_len = tokens[a_len:], end - a_len
        a_len, b_len = shortened(a_len, b_len, pair_len)
        return stream, tokens[:a_len], following[:b_len], is_random

    def _random_text(self, lane: "_Lane", n_least: int, draws: Draws) -> tuple[np.ndarray, int]:
        """Return tokens of a lane from a random place on, widened to whole sentences, and how many of them belong to these."""
        place = draws.below(lane.length - n_least)
        begin = max(place - self._tgt_len, 0)
        tokens, sentences = lane.read(begin, min(place + max(n_least, self._pair_len // 2), lane.length))
        before = np.flatnonzero(sentences[: place - begin + 1])
        first = int(before[-1]) if len(before) else place - begin
        end = min(_first(sentences, place - begin + n_least), lane.length - 1 - begin)  # the original keeps one more to predict
        return tokens[first:], end - first

    def _lane(self, row: int) -> "_Lane":
        lane, odd = divmod(row, 2) if self._bi_data else (row, 0)
        return _Lane(self._epoch_text(), lane * self._lane_len, self._lane_len, odd == 1, self._ends)

    def _layout(self) -> dict[str, int | str]:
        own = {"reuse_len": self._reuse_len, "bi_data": self._bi_data, "seed": self._seed}
        return super()._layout() | own


@dataclass(frozen=True)
class _Lane:
    """The text of a lane, read in one direction; places count from where the reading begins."""

    text: PlainText | ShuffledText
    begin: int
    length: int
    backward: bool
    ends: np.ndarray | None  # (V,) bool, tokens with which a sentence ends

    def read(self, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens at places begin … end - 1, and at which of them a sentence begins, bool; one does at place 0."""
        first = max(begin - 1, 0)  # a border lies between two tokens
        start = self.begin + (self.length - end if self.backward else first)
        tokens, documents = self.text.read(start, start + end - first)
        if self.ends is None:
            borders = np.ones(len(tokens) - 1, bool)
        else:
            is_end = self.ends[tokens]
            borders = is_end[:-1] & ~is_end[1:]
            borders[documents[documents > 0] - 1] = True
        if self.backward:
            tokens, borders = tokens[::-1], borders[::-1]
        return (tokens[1:], borders) if begin else (tokens, np.append(True, borders))


def shortened(a_len: int, b_len: int, most: int) -> tuple[int, int]:
    """Return the lengths of A and B once the longer one, or else B, has been shortened until both together have `most` tokens.

    Example:
        >>> shortened(9, 2, 7), shortened(2, 9, 7), shortened(9, 9, 7)
        ((5, 2), (2, 5), (4, 3))
    """
    half = most // 2
    if a_len <= most - half:
        return a_len, most - a_len
    return most - min(b_len, half), min(b_len, half)


def _first(sentences: np.ndarray, place: int) -> int:
    """Return the first place from `place` on at which a sentence begins, or else the end."""
    found = np.flatnonzero(sentences[place:])
    return place + int(found[0]) if len(found) else len(sentences)

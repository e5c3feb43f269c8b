"""Sentences whose words have labels, which a `LabelledStream` deals out."""

import zlib
from collections.abc import Sequence

import numpy as np
from torch import from_numpy, full

from transformer_xl.batch import NOT_SCORED, Batch
from transformer_xl.config.model import HeadConfig
from transformer_xl.data.labelled import LabelledTexts, Row, batch_of
from transformer_xl.data.labels import Example, labels_of


class LabelledWords(LabelledTexts):
    """Sentences encoded once and held: 5 bytes a token, and 16 a word."""

    def _encode(self, examples: Sequence[Example], head: HeadConfig) -> None:
        self._sentences = [self._layout.row_of_words(example) for example in examples]
        self._word_labels = [labels_of(head, [example])[0].numpy() for example in examples]
        self.lengths = np.array([len(row.ids) for row in self._sentences], np.int64)
        self.checksum = 0
        for row, labels in zip(self._sentences, self._word_labels, strict=True):
            for held in (row.ids, row.words, labels):
                self.checksum = zlib.crc32(held.tobytes(), self.checksum)

    def rows(self, index: int) -> tuple[Row, ...]:
        return (self._sentences[index],)

    def batch(self, chosen: np.ndarray, is_scored: np.ndarray, length: int) -> Batch:
        own = [self._word_labels[index] for index in chosen]
        labels = full((len(chosen), max(map(len, own))), NOT_SCORED)
        for row, numbers, is_known in zip(labels, own, is_scored, strict=True):
            if is_known:
                row[: len(numbers)] = from_numpy(numbers)
        return batch_of([self.rows(index) for index in chosen], labels, length=length)

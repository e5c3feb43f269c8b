"""What a bag of words makes of labelled sentences, in the peer's environment: scikit-learn's logistic regression.

    .venv-peer/bin/python benchmarks/common/bag_of_words.py TRAIN DEV TEST      (text<TAB>label, may be compressed by xz)

Prints a JSON object. Words or words and pairs of them, and the strength of regularization, are chosen on DEV.
"""

import json
import lzma
import sys
from pathlib import Path

from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline


def main() -> None:
    train, dev, test = map(read, sys.argv[1:])
    candidates = [(n_gram, strength) for n_gram in (1, 2) for strength in (0.03, 0.1, 0.3, 1.0, 3.0)]
    fitted = [(fit(train, n_gram=n, strength=c), n, c) for n, c in candidates]
    best, n_gram, strength = max(fitted, key=lambda each: each[0].score(*dev))
    print(json.dumps({"dev": best.score(*dev), "test": best.score(*test), "n_gram": n_gram, "C": strength}))


def read(path: str) -> tuple[list[str], list[str]]:
    """Return the texts and the labels of a file."""
    data = Path(path).read_bytes()
    lines = (lzma.decompress(data) if path.endswith(".xz") else data).decode().splitlines()
    texts, labels = zip(*(line.split("\t") for line in lines), strict=True)
    return list(texts), list(labels)


def fit(data: tuple[list[str], list[str]], *, n_gram: int, strength: float):
    """Return a classifier of texts by their words and runs of up to `n_gram` words."""
    words = CountVectorizer(ngram_range=(1, n_gram), binary=True, token_pattern=r"\S+")
    return make_pipeline(words, LogisticRegression(C=strength, max_iter=1000)).fit(*data)


if __name__ == "__main__":
    main()

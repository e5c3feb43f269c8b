"""Labelled texts that benchmarks make: passages of books, and texts with a mark somewhere in them."""

import json
import lzma
import random
from pathlib import Path

from transformer_xl.tokenizers.base import Tokenizer

MARKS = ("north", "south")
_FILLERS = ("the", "of", "and", "to", "a", "in", "that", "it", "was", "he", "for", "his", "with", "as", "I", "on")


def passages(books: Path, tokenizer: Tokenizer, directory: Path, *, n_book: int, n_piece: int, most: int, seed: int) -> None:
    """Write train.jsonl, dev.jsonl and test.jsonl: passages of `n_piece` pieces, labelled by their book.

    The longest `n_book` books are taken. Each is cut into passages; the first 70 % of them are for training, the next 10 % for
    validation, the last for the test, so neighbors are apart. `most` is the most passages of a book.
    """
    text = lzma.decompress((books / "train.txt.xz").read_bytes())
    index = [json.loads(line) for line in (books / "index.jsonl").read_text(encoding="utf-8").splitlines()]
    longest = sorted((each for each in index if each["split"] == "train"), key=lambda each: -each["bytes"])[:n_book]
    rows: dict[str, list[dict[str, str]]] = {"train": [], "dev": [], "test": []}
    for book in longest:
        ids = tokenizer.encode(text[book["offset"] : book["offset"] + book["bytes"]].decode())
        n = min(len(ids) // n_piece, most)
        for i in range(n):
            split = "train" if i < 0.7 * n else "dev" if i < 0.8 * n else "test"
            passage = tokenizer.decode(ids[i * n_piece : (i + 1) * n_piece].tolist())
            rows[split].append({"text": passage, "label": str(book["gutenberg_id"])})
    for split, of_split in rows.items():
        random.Random(seed).shuffle(of_split)
        _write(directory / f"{split}.jsonl", of_split)


def marked(directory: Path, *, name: str, n: int, length: int, back: tuple[int, int], seed: int) -> None:
    """Write a file of `n` texts of `length` words; one word, as many words before the end as `back` allows, is the label."""
    draw = random.Random(f"{name} {seed}")
    rows = []
    for _ in range(n):
        words, mark = [draw.choice(_FILLERS) for _ in range(length)], draw.choice(MARKS)
        words[length - draw.randint(*back)] = mark
        rows.append({"text": " ".join(words), "label": mark})
    _write(directory / f"{name}.jsonl", rows)


def _write(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

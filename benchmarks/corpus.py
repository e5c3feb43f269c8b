"""How much memory a large text takes: to become token ids with each tokenizer, and to be read as training does.

Writes words by Zipf's law from a million into a temporary directory: one file, prepared with each of `--kind` in a process of
its own, whose memory is summed with that of its children (proportional set size: a page shared by n processes counts 1/n in
each); preparing it a second time only opens it. Then many files, each line a document, prepared as bytes and read for one
epoch, in order and with all lines shuffled.
"""

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from common.harness import COMMON, command, parse, run
from common.watch import run_watched

from transformer_xl.console import say, table

KINDS = ("byte", "word", "bpe")
SHUFFLES = ("none", "documents")
N_BLOCKS = 16
FILE_MB = 250
N_WORDS = 1_000_000
WORDS_PER_DRAW = 200_000
WORDS_PER_LINE = 12
CONSONANTS, VOWELS = "bcdfghjklmnprstvz", "aeiouyéö"


def prepare(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Prepare one file twice with each tokenizer, print a table, and return the figures."""
    text, figures = folder / "text.txt", []
    rows = [["tokenizer", "peak MB", "seconds", "MB/s", "tokens", "second run s"]]
    write(text, options.mb, paragraphs())
    for kind in options.kind:
        say(f"preparing with a {kind} tokenizer")
        line = child("prepare", kind, text, folder / "prepared")
        done, again = (run_watched(line, f"preparing with a {kind} tokenizer") for _ in range(2))
        found = json.loads(done.output) | {"kind": kind, "peak_mb": done.peak_mb, "again": json.loads(again.output)["seconds"]}
        rate, n_token = options.mb / found["seconds"], found["tokens"]
        rows.append(
            [kind, f"{done.peak_mb:,.0f}", f"{found['seconds']:.1f}", f"{rate:.1f}", f"{n_token:,}", f"{found['again']:.2f}"]
        )
        figures.append(found)
    print(f"\n{table(rows)}")
    return figures


def stream(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Prepare many files and read them in each order, print a table, and return the figures."""
    text, cache, figures = folder / "text", folder / "prepared", []
    rows = [["shuffle", "peak MB", "grew MB", "seconds", "first s", "MB/s", "tokens"]]
    say(f"writing {options.mb:,} MB of text")
    text.mkdir()
    blocks = itertools.cycle(list(itertools.islice(paragraphs(), N_BLOCKS)))  # again and again: new ones take longer
    for i, begin in enumerate(range(0, options.mb, FILE_MB)):
        write(text / f"part-{i:05}.txt", min(FILE_MB, options.mb - begin), blocks)
    done = run_watched(child("prepare", "byte", text, cache), "preparing")
    print(f"\nprepared, each line a document: {done.peak_mb:,.0f} MB at most, {options.mb / done.seconds:.1f} MB/s")
    for shuffle in options.shuffle:
        say(f"to read an epoch (shuffle {shuffle})")
        # not watched: looking at many mapped pages over and over would slow it down
        said = subprocess.run(
            child("stream", "byte", text, cache, shuffle), stdout=subprocess.PIPE, text=True, check=True
        ).stdout
        found = {"shuffle": shuffle, **json.loads(said)}
        peaks = [f"{found['peak_mb']:,.0f}", f"{found['peak_mb'] - found['start_mb']:,.1f}"]
        speed = [f"{found['seconds']:.1f}", f"{found['first']:.1f}", f"{found['mb'] / found['seconds']:.1f}"]
        rows.append([shuffle, *peaks, *speed, f"{found['tokens']:,}"])
        figures.append(found)
    print(f"\n{table(rows)}")
    return figures


PARTS = {"prepare": prepare, "stream": stream}


def measure(part: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure one part in a temporary directory."""
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        return PARTS[part](options, Path(folder))


def child(action: str, kind: str, text: Path, cache: Path, *shuffle: str) -> list[str]:
    """Return the command of a process of its own."""
    return [sys.executable, str(COMMON / "corpus_child.py"), action, kind, str(text), str(cache), *shuffle]


def write(path: Path, n_mb: int, blocks: Iterator[bytes]) -> None:
    """Write so many MB of a text."""
    with path.open("wb") as file:
        while (left := n_mb * 1_000_000 - file.tell()) > 0:
            file.write(next(blocks)[:left])


def paragraphs() -> Iterator[bytes]:
    """Yield blocks of lines without end, the same ones in every run; ASCII and not."""
    words = np.array([spell(rank) for rank in range(N_WORDS)], dtype=object)
    generator = np.random.default_rng(0)
    while True:
        # the exponential of a uniform number: the word of rank r comes with a probability proportional to 1/r
        ranks = np.exp(generator.uniform(0, np.log(N_WORDS), WORDS_PER_DRAW)).astype(np.int64) - 1
        drawn = words[ranks].tolist()
        lines = (" ".join(drawn[i : i + WORDS_PER_LINE]) for i in range(0, WORDS_PER_DRAW, WORDS_PER_LINE))
        yield (".\n".join(lines) + ".\n\n").encode()


def spell(rank: int) -> str:
    """Return a word of its own for each rank, the shorter the more common."""
    syllables = []
    while True:
        rank, syllable = divmod(rank, len(CONSONANTS) * len(VOWELS))
        syllables.append(CONSONANTS[syllable % len(CONSONANTS)] + VOWELS[syllable // len(CONSONANTS)])
        if rank == 0:
            return "".join(syllables)
        rank -= 1


if __name__ == "__main__":
    parser = command(__doc__)
    parser.add_argument("--parts", choices=PARTS, nargs="+", default=list(PARTS), help="default: both")
    parser.add_argument("--mb", type=int, default=1000, help="size of the text (default: %(default)s)")
    parser.add_argument("--kind", choices=KINDS, nargs="+", default=["byte", "word"], help="tokenizers (default: byte word)")
    parser.add_argument("--shuffle", choices=SHUFFLES, nargs="+", default=list(SHUFFLES), help="orders of reading (both)")
    parser.add_argument("--directory", type=Path, help="where the temporary directory is made; needs about 5 times the text")
    options = parse(parser)
    run(options, measure, options.parts, text=f"{options.mb:,} MB, words by Zipf's law from {N_WORDS:,}")

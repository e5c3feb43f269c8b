"""How much memory it takes to turn a large text file into token ids, and how long; and how long it takes to open them again.

Writes a text file to a temporary directory and prepares it in a process of its own, whose memory is summed with that of its
children (proportional set size: a page shared by n processes counts 1/n in each). Preparing it a second time only opens it.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from common.machine import describe
from common.report import facts
from common.watch import run_watched

from transformer_xl.console import say, table

CHILD = Path(__file__).parent / "common" / "prepare_child.py"
KINDS = ("byte", "word", "bpe")
N_WORDS = 1_000_000
WORDS_PER_DRAW = 200_000
WORDS_PER_LINE = 12
CONSONANTS, VOWELS = "bcdfghjklmnprstvz", "aeiouyéö"


@dataclass(frozen=True)
class Preparation:
    """What one call of `prepare` took.

    Attributes:
        seconds: of the call, without starting Python.
        peak_mb: of the process and its children together.
        n_tokens: in the train split.
    """

    seconds: float
    peak_mb: float
    n_tokens: int


def main() -> None:
    options = parse_arguments()
    print(facts({**describe(), "text": f"{options.mb:,} MB, words by Zipf's law from {N_WORDS:,}, one file"}) + "\n")
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        text = Path(folder, "text.txt")
        write_text(text, options.mb)
        rows = [measure_kind(kind, text, Path(folder, "prepared")) for kind in options.kind]
    print(table([["tokenizer", "peak MB", "seconds", "MB/s", "tokens", "second run s"], *rows]))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=1000, help="size of the text (default: %(default)s)")
    parser.add_argument("--kind", choices=KINDS, nargs="+", default=KINDS, help="tokenizers (default: all)")
    parser.add_argument("--directory", type=Path, help="where the temporary directory is made; needs about 5 times the text")
    options = parser.parse_args()
    if options.mb < 1:
        parser.error("--mb must be at least 1")
    return options


def write_text(path: Path, n_mb: int) -> None:
    """Write lines of words, common and rare ones as in a language, in paragraphs."""
    say(f"writing {n_mb:,} MB of text")
    written = 0
    with path.open("wb") as file:
        for block in paragraphs():
            written += file.write(block[: n_mb * 1_000_000 - written])
            if written == n_mb * 1_000_000:
                break


def paragraphs() -> Iterator[bytes]:
    """Yield blocks of text without end, the same ones in every run; ASCII and not."""
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


def measure_kind(kind: str, text: Path, cache: Path) -> list[str]:
    """Prepare a text twice and return the row of the table."""
    say(f"preparing with a {kind} tokenizer")
    first, second = (prepare_apart(kind, text, cache) for _ in range(2))
    megabytes = text.stat().st_size / 1e6
    return [
        kind,
        f"{first.peak_mb:,.0f}",
        f"{first.seconds:.1f}",
        f"{megabytes / first.seconds:.1f}",
        f"{first.n_tokens:,}",
        f"{second.seconds:.2f}",
    ]


def prepare_apart(kind: str, text: Path, cache: Path) -> Preparation:
    """Prepare in a fresh process and watch its memory."""
    command = [sys.executable, str(CHILD), kind, str(text), str(cache)]
    done = run_watched(command, f"preparing with a {kind} tokenizer")
    seconds, n_tokens = json.loads(done.output)
    return Preparation(seconds, done.peak_mb, n_tokens)


if __name__ == "__main__":
    main()

"""Whether a text larger than memory is prepared and read at a flat memory, and how fast.

Writes many text files to a temporary directory, prepares them, each line a document, and reads one epoch as training does: in
order, and with all lines shuffled. Each is a process of its own.
"""

import argparse
import itertools
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from common.machine import describe
from common.report import facts
from common.watch import run_unwatched, run_watched
from prepare_memory import KINDS, paragraphs

from transformer_xl.console import say, table

CHILD = Path(__file__).parent / "common" / "large_corpus_child.py"
N_BLOCKS = 16
FILE_MB = 250
SHUFFLES = ("none", "documents")


def main() -> None:
    options = parse_arguments()
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        text, cache = Path(folder, "text"), Path(folder, "prepared")
        n_files = write_files(text, options.mb)
        print(facts({**describe(), "text": f"{options.mb:,} MB in {n_files} files, each line a document"}) + "\n")
        rows = [measure_preparation(options.kind, text, cache, options.mb)]
        rows += [measure_stream(options.kind, text, cache, shuffle) for shuffle in options.shuffle]
    print(table([["what", "peak MB", "grew MB", "seconds", "first s", "MB/s", "tokens", "documents"], *rows]))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=10_000, help="size of the text (default: %(default)s)")
    parser.add_argument("--kind", choices=KINDS, default="byte", help="tokenizer (default: %(default)s)")
    parser.add_argument("--shuffle", choices=SHUFFLES, nargs="*", default=SHUFFLES, help="orders of reading (default: all)")
    parser.add_argument("--directory", type=Path, help="where the temporary directory is made; needs about 4 times the text")
    options = parser.parse_args()
    if options.mb < 1:
        parser.error("--mb must be at least 1")
    return options


def write_files(folder: Path, n_mb: int) -> int:
    """Write files of lines and return their number; the same few blocks again and again, for writing new ones takes longer."""
    say(f"writing {n_mb:,} MB of text")
    folder.mkdir()
    blocks = itertools.cycle(list(itertools.islice(paragraphs(), N_BLOCKS)))
    sizes = [min(FILE_MB, n_mb - begin) for begin in range(0, n_mb, FILE_MB)]
    for i, size in enumerate(sizes):
        with (folder / f"part-{i:05}.txt").open("wb") as file:
            while (left := size * 1_000_000 - file.tell()) > 0:
                file.write(next(blocks)[:left])
    return len(sizes)


def measure_preparation(kind: str, text: Path, cache: Path, n_mb: int) -> list[str]:
    """Return the row of preparing; its peak is that of all its processes, files that they have mapped included."""
    say(f"to prepare (kind {kind})")
    done = run_watched(child("prepare", kind, text, cache, "none"), "preparing")
    return row(f"prepare, {kind}", done.peak_mb, None, json.loads(done.output), n_mb)


def measure_stream(kind: str, text: Path, cache: Path, shuffle: str) -> list[str]:
    """Return the row of reading an epoch; its peak is what the child says of itself."""
    say(f"to read an epoch (shuffle {shuffle})")
    found = json.loads(run_unwatched(child("stream", kind, text, cache, shuffle), "reading"))
    return row(f"stream, {shuffle}", found["peak_mb"], found["peak_mb"] - found["start_mb"], found, found["mb"])


def child(action: str, kind: str, text: Path, cache: Path, shuffle: str) -> list[str]:
    """Return the command of a process of its own."""
    return [sys.executable, str(CHILD), action, kind, str(text), str(cache), shuffle]


def row(what: str, peak_mb: float, grew_mb: float | None, found: dict[str, Any], n_mb: float) -> list[str]:
    """Return the cells of a row."""
    grew, first = ("" if value is None else f"{value:,.1f}" for value in (grew_mb, found.get("first")))
    numbers = f"{found['seconds']:.1f}", first, f"{n_mb / found['seconds']:.1f}"
    say(f"{what}: {peak_mb:,.0f} MB at most, {found['seconds']:.1f} s")  # the table comes an hour later
    return [what, f"{peak_mb:,.0f}", grew, *numbers, f"{found['tokens']:,}", f"{found['documents']:,}"]


if __name__ == "__main__":
    main()

"""Commands that answer many texts: where their lines come from, and where the answers go, line by line."""

import os
import select
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cyclopts import Parameter

from transformer_xl.cli.options import Flag, Json
from transformer_xl.cli.printers import show
from transformer_xl.console import Bar, Unit, progress, say, warn
from transformer_xl.errors import ConfigError, CorpusError, counted
from transformer_xl.files import check_file, check_new
from transformer_xl.process import is_alone

if TYPE_CHECKING:
    from transformer_xl.checkpoint.open_run import Opened
    from transformer_xl.tokenizers.base import Tokenizer

STDIN = Path("-")
"""The name of standard input."""

_BLOCK = 1 << 16  # bytes


def check_alone(command: str) -> None:
    """Refuse several processes, as of torchrun."""
    if not is_alone():
        raise ConfigError(f"{command} works in one process; start it without torchrun, and divide the texts yourself")


def warn_of_unknown(tokenizer: "Tokenizer", n: int) -> None:
    """Say that a model reads so many words or pieces of its texts as one and the same."""
    if n and tokenizer.unknown_id is not None:
        what, name = counted(n, "word" if tokenizer.kind == "word" else "piece"), tokenizer.decode([tokenizer.unknown_id])
        warn(f"the vocabulary lacks {what} of the text; the model reads {name.strip()} instead")


@Parameter(name="*")
@dataclass(frozen=True)
class LineOutput:
    """Where lines go.

    Args:
        out: write to this file instead of standard output; --resume can then continue it.
        resume: continue an unfinished file; the lines in it are kept.
        quiet: show no progress, only warnings and errors.
        json_: write JSON lines, and figures as one object.
    """

    out: Path | None = None
    resume: Flag = False
    quiet: Flag = False
    json_: Json = False

    def __post_init__(self) -> None:
        if self.out is not None:
            check_file(self.out, option="out")
            if not self.resume:
                check_new(self.out)  # before the model and the texts are read
        elif self.resume:
            raise ConfigError("--resume goes on with a file; name it with --out")

    @property
    def as_objects(self) -> bool:
        """Whether the lines are JSON."""
        return self.json_ or (self.out is not None and self.out.suffix in (".jsonl", ".ndjson"))

    def write(
        self,
        lines: Callable[[int, Bar], Iterator[str]],
        opened: "Opened",
        texts: Path | None,
        how: str,
        *,
        what: str,
        total: int | None = None,
        unit: Unit = "texts",
    ) -> None:
        """Write each line as soon as it is known, so that whatever ends this process costs at most a window of texts.

        Args:
            lines: returns the lines after the first n, which are there already, and advances a bar.
            opened: the model that they come from.
            texts: the file that they come from; None: it cannot be compared, because it is no file.
            how: what else decides them.
            what: name of the work, which the bar shows.
            total: how many units there are.
            unit: what the bar counts.
        """
        if self.out is None:
            with progress(what, total, unit=unit, hidden=self.quiet or sys.stdout.isatty()) as bar:
                for line in lines(0, bar):
                    show(line)
            return
        from transformer_xl.tasks.lines import origin_of, prediction_file

        origin = origin_of(opened.source, opened.any_model, texts, how, json=self.as_objects)
        begin, n_done = time.perf_counter(), 0
        with prediction_file(self.out, origin, resume=self.resume) as (file, n_kept):
            try:
                with progress(unit=unit, hidden=self.quiet) as bar:
                    bar.begin(what, total, done=n_kept if unit == "texts" else 0)
                    for line in lines(n_kept, bar):
                        file.write(line.encode("utf-8", "replace"))
                        file.flush()
                        n_done += 1
            except KeyboardInterrupt:
                there = f"'{self.out}' has {counted(n_kept + n_done, 'line')}"
                say(f"\ninterrupted; {there}; go on with the same command and --resume", quiet=self.quiet)
                sys.exit(130)
        seconds = time.perf_counter() - begin
        rate = f" in {seconds:.1f} s ({n_done / seconds:,.0f} lines/s)" if n_done else ""
        kept = f" after {n_kept:,} that were there" if n_kept else ""
        say(f"{counted(n_done, 'line')}{rate} written to '{self.out}'{kept}", quiet=self.quiet)


def arriving(file: Path | None, *, instead: str = "a file", quiet: bool = False) -> "Arriving | None":
    """Return the lines of standard input (no file, or `-`) or of a named pipe; None: another file, which is read as a whole.

    If there is no standard input, `instead` is what to give.
    """
    if file is not None and file != STDIN:
        return Arriving(open_pipe(file)) if file.is_fifo() else None
    if sys.stdin is None:
        raise CorpusError(f"standard input is closed; give {instead}")
    if is_typed := sys.stdin.isatty():
        say("type a text and Enter; Ctrl-D ends", quiet=quiet)
    return Arriving(sys.stdin.fileno(), skip_blank=is_typed)


def open_pipe(path: Path) -> int:
    """Open a named pipe, such as the shell's `<(…)`; one that nobody writes to is empty, and not waited for."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(descriptor, True)
    return descriptor


class Arriving(Iterator[bytes]):
    """Lines that somebody writes, with their ends, each as soon as it is there; the last one need not end.

    Args:
        descriptor: of an open file.
        skip_blank: leave out lines without text, as people type them.
    """

    def __init__(self, descriptor: int, *, skip_blank: bool = False) -> None:
        self._descriptor, self._skip_blank = descriptor, skip_blank
        self._lines: deque[bytes] = deque()
        self._begun = bytearray()
        self._ended = False

    def __next__(self) -> bytes:
        while not self._lines:
            if self._ended:
                raise StopIteration
            self._read()
        return self._lines.popleft()

    def is_ready(self) -> bool:
        """Return whether the next line, or that there is none, is known without waiting."""
        while not (self._lines or self._ended) and select.select([self._descriptor], [], [], 0)[0]:
            self._read()
        return bool(self._lines) or self._ended

    def _read(self) -> None:
        block = os.read(self._descriptor, _BLOCK)
        self._ended = not block
        *whole, rest = block.split(b"\n")
        for line in whole:
            self._begun += line + b"\n"
            self._end_line()
        self._begun += rest
        if self._begun and self._ended:
            self._end_line()

    def _end_line(self) -> None:
        if not (self._skip_blank and self._begun.isspace()):
            self._lines.append(bytes(self._begun))
        self._begun.clear()

"""Lines of a pipe or a terminal, as they arrive."""

import os
import select
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from transformer_xl.console import say
from transformer_xl.errors import CorpusError

_BLOCK = 1 << 16  # bytes


def lines_of_stdin(*, instead: str = "a file", quiet: bool) -> "Arriving":
    """Return what is piped in, or typed; if there is no standard input, `instead` is what to give."""
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

"""Plain text tables on stdout, progress on stderr."""

import sys
from collections.abc import Mapping, Sequence


def progress(message: str) -> None:
    """Say what is going on, where it does not mix with the figures."""
    print(message, file=sys.stderr, flush=True)


def facts(pairs: Mapping[str, str]) -> str:
    """Lay out names and values in two columns."""
    width = max(map(len, pairs))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in pairs.items())


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lay out rows under a header; the first column is flush left, the others flush right."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        first, *others = (cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
        return "  ".join([cells[0].ljust(len(first)), *others]).rstrip()

    return "\n".join([line(header), "  ".join("-" * width for width in widths), *map(line, rows)])

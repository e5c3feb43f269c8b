"""Reads hostile files in a process of its own and reports what happened, what it took, and whether anything changed.

Arguments: a JSON file with a list of [name, path, reader]; a destination for conversions. The report goes to standard output.
"""

import importlib
import json
import os
import resource
import sys
import time
from pathlib import Path

from tests.conversion.hostile import VARIABLE
from transformer_xl.conversion.readers.pickles import read_pickle
from transformer_xl.conversion.readers.safetensors_files import read_safetensors
from transformer_xl.conversion.readers.torch_files import read_torch

READERS = {"torch": read_torch, "pickle": read_pickle, "safetensors": read_safetensors}


def attempt(path: Path, reader: str, destination: Path) -> str:
    """Return what reading raised, or that it did not."""
    try:
        if reader == "convert":
            importlib.import_module("transformer_xl.conversion.convert").convert(path, destination)
        else:
            READERS[reader](path)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def processor_time() -> float:
    """Return seconds that this process and its children computed: what a file costs, however busy the machine is."""
    return sum(os.times()[:4])


def peak() -> int:
    """Return the most memory this process ever held (kilobytes)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> None:
    cases, destination = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    attempt(Path(__file__), "pickle", destination)  # imports and buffers are not the files' doing
    before = dict(os.environ)
    report = []
    for i, (name, path, reader) in enumerate(cases):
        start, seconds, memory = time.perf_counter(), processor_time(), peak()
        outcome = attempt(Path(path), reader, destination / str(i))
        report.append((name, outcome, processor_time() - seconds, time.perf_counter() - start, peak() - memory))
    same = dict(os.environ) == before and VARIABLE not in os.environ
    json.dump({"report": report, "environment": same}, sys.stdout)


if __name__ == "__main__":
    main()

"""Opens hostile files in a process of its own and reports what happened, what it took, and whether anything changed.

Arguments: a JSON file with `warm`, a list of [path, reader] that is not reported, and `cases`, a list of [name, path, reader];
a destination for conversions. The report goes to standard output.
"""

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.conversion.hostile import VARIABLE
from transformer_xl import load
from transformer_xl.cli import prompts
from transformer_xl.config.recipes import load_recipe
from transformer_xl.config.run import DataConfig, TaskConfig
from transformer_xl.conversion.convert import convert
from transformer_xl.conversion.readers.tensors import read_safetensors
from transformer_xl.conversion.readers.unpickle import unpickle
from transformer_xl.data.prepare import prepare
from transformer_xl.data.task_texts import read_task
from transformer_xl.tokenizers.kinds import ByteTokenizer, load_tokenizer

MAX_BYTES = 8 * 2**30

TEXT_FILE = "text.txt"
"""Beside a prepared corpus: its text."""


def _prepare(text: Path, cache: Path | None = None) -> None:
    prepare(DataConfig(corpus=str(text)), ByteTokenizer(), cache=cache, progress=False, n_workers=1)


READERS: dict[str, Callable[[Path], object]] = {
    "unpickle": unpickle,
    "safetensors": read_safetensors,
    "load": load,
    "tokenizer": load_tokenizer,
    "recipe": lambda path: load_recipe(str(path)),
    "prompts": lambda path: prompts.many(path, ByteTokenizer()),
    "corpus": _prepare,
    "task": lambda path: read_task(TaskConfig(kind="classification", data=str(path)), seed=0),
    "prepared": lambda path: _prepare(path.parent / TEXT_FILE, path),
}


def attempt(path: Path, reader: str, destination: Path) -> str:
    """Return what reading raised, or that it did not."""
    try:
        if reader == "convert":
            convert(path, destination)
        else:
            READERS[reader](path)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def processor_time() -> float:
    """Return seconds that this process and its children computed: what a file costs, however busy the machine is."""
    return sum(os.times()[:4])


def memory(name: str) -> int:
    """Return what Linux says of this process's memory (kilobytes): `VmRSS`, now, or `VmHWM`, the most since `reset_peak`.

    `getrusage` would begin with what the parent process held.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


def reset_peak() -> None:
    """Let `VmHWM` begin anew."""
    Path("/proc/self/clear_refs").write_text("5")


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))  # what fills the memory fails, instead of the machine
    plan, destination = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    for path, reader in [(__file__, "unpickle"), *plan["warm"]]:  # imports and buffers are not the files' doing
        attempt(Path(path), reader, destination)
    before = dict(os.environ)
    report = []
    for i, (name, path, reader) in enumerate(plan["cases"]):
        reset_peak()
        start, seconds, held = time.perf_counter(), processor_time(), memory("VmRSS")
        # beside one another where the process stands: a parent that is missing would be refused before any file is read
        outcome = attempt(Path(path), reader, destination.with_name(f"{destination.name}{i}"))
        report.append((name, outcome, processor_time() - seconds, time.perf_counter() - start, memory("VmHWM") - held))
    same = dict(os.environ) == before and VARIABLE not in os.environ
    json.dump({"report": report, "environment": same}, sys.stdout)


if __name__ == "__main__":
    main()

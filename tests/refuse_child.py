"""Opens hostile files in a process of its own and reports what happened, what it took, and whether anything changed.

Arguments: a JSON file with `warm`, a list of [path, reader] that is not reported, and `cases`, a list of [name, path, reader];
a destination for conversions. The report goes to standard output.
"""

import json
import os
import resource
import sys
import time
import warnings
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from tests.conversion.hostile import VARIABLE
from transformer_xl import TransformerXL, load
from transformer_xl.analysis.ablation.ablation import Ablation
from transformer_xl.analysis.ablation.table import as_markdown, make_table
from transformer_xl.cli import prompts
from transformer_xl.config import DataConfig, RunConfig, TaskConfig, load_recipe
from transformer_xl.conversion.convert import convert
from transformer_xl.conversion.readers.pickles import read_pickle
from transformer_xl.conversion.readers.safetensors_files import read_safetensors
from transformer_xl.conversion.readers.torch_files import read_torch
from transformer_xl.data.prepare import prepare
from transformer_xl.data.spiece import read_spiece
from transformer_xl.data.task_texts import read_task
from transformer_xl.data.tokenizers import ByteTokenizer, load_tokenizer
from transformer_xl.generation.decoder import Decoder
from transformer_xl.generation.session import TextSession
from transformer_xl.opening import file_text
from transformer_xl.training.environment import write_environment
from transformer_xl.training.record import Record, _identity

MAX_BYTES = 8 * 2**30

TEXT_FILE = "text.txt"
"""Beside a prepared corpus: its text."""

MODEL_FOLDER = "sound-export"
"""Beside the folder of a session: its model."""


def _warning(message: str) -> None:
    warnings.warn(message, stacklevel=2)


def _read(path: Path) -> None:
    model, _ = load(path, on_damaged=_warning)
    decoder = Decoder(model)
    decoder.read([[1, 2, 3]])


def _log(path: Path) -> None:
    """Resume a run as far as its log goes."""
    device = torch.device("cpu")
    write_environment(path, seed=1, device=device, warn=_warning)
    _identity(path, "wandb", _warning)
    record = Record(path, warn=_warning)
    record.rewind(10)
    record.draw(RunConfig())


def _ablation(path: Path) -> None:
    ablation = Ablation.open(path)
    ablation.stored_paces()
    as_markdown(make_table(ablation))


def _huggingface(path: Path) -> None:
    from transformers import AutoTokenizer

    from transformer_xl.huggingface import TransformerXLForCausalLM

    TransformerXLForCausalLM.from_pretrained(path)
    AutoTokenizer.from_pretrained(path)


def _generate(path: Path) -> None:
    from transformers import AutoModelForCausalLM

    import transformer_xl.huggingface  # noqa: F401  registers its classes

    model: Any = AutoModelForCausalLM.from_pretrained(path)
    model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=1)


@cache
def _decoder(folder: Path) -> tuple[Decoder, Any]:
    model, tokenizer = load(folder)
    return Decoder(model), tokenizer


def _session(path: Path) -> None:
    TextSession(*_decoder(path.parents[1] / MODEL_FOLDER)).load(path)


def _prepare(text: Path, cache: Path | None = None) -> None:
    prepare(DataConfig(corpus=str(text)), ByteTokenizer(), cache=cache, progress=False, n_workers=1)


READERS: dict[str, Callable[[Path], object]] = {
    "torch": read_torch,
    "pickle": read_pickle,
    "safetensors": read_safetensors,
    "load": partial(load, on_damaged=_warning),
    "read": _read,
    "from_pretrained": TransformerXL.from_pretrained,
    "huggingface": _huggingface,
    "huggingface read": _generate,
    "tokenizer": load_tokenizer,
    "spiece": read_spiece,
    "session": _session,
    "recipe": lambda path: load_recipe(str(path)),
    "prompts": lambda path: prompts.many(path, ByteTokenizer()),
    "prompt": lambda path: prompts.from_file(path, ByteTokenizer()),
    "text": lambda path: file_text(path, ByteTokenizer()),
    "corpus": _prepare,
    "task": lambda path: read_task(TaskConfig(kind="classification", data=str(path)), seed=0),
    "choices": lambda path: read_task(TaskConfig(kind="choice", data=str(path)), seed=0),
    "prepared": lambda path: _prepare(path.parent / TEXT_FILE, path),
    "log": _log,
    "ablation": _ablation,
}


def attempt(path: Path, reader: str, destination: Path) -> str:
    """Return what reading raised, or that it did not and of what it warned."""
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            if reader == "convert":
                convert(path, destination)
            else:
                READERS[reader](path)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "; ".join(["accepted", *(str(each.message) for each in warned)])


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
    for path, reader in [(__file__, "pickle"), *plan["warm"]]:  # imports and buffers are not the files' doing
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

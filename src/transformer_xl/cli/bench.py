"""`txl bench decode|eval`: how fast a model is on this machine, beside what the machine allows."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cyclopts import App

from transformer_xl.cli.options import Json, Natural, Opening, Positive, names_of, numbers_of
from transformer_xl.console import progress, warn
from transformer_xl.errors import ConfigError, CorpusError, message_of

if TYPE_CHECKING:
    import numpy as np
    import torch

    from transformer_xl.checkpoint.open_run import Opened
    from transformer_xl.cost.bench import DecoderMode, Findings, ScoringMode
    from transformer_xl.cost.display import Figures
    from transformer_xl.kernels.device import InferencePrecision
    from transformer_xl.model.base import LanguageModel

app = App(name="bench", help="Measure how fast a model is, compared with what this machine allows.", help_format="plaintext")

_PRECISIONS = ("fp32", "bf16", "fp16", "int8")


@app.command
def decode(
    run: str,
    /,
    *,
    precision: str | None = None,
    compile: bool | None = None,
    rows: str = "1",
    tokens: Positive = 100,
    mem_len: Natural | None = None,
    file: Path | None = None,
    opening: Opening = Opening(),
    json_: Json = False,
) -> None:
    """Measure how fast a model generates with a full memory, compared with the speed of this machine's memory.

    Ctrl-C stops and prints what was measured so far. Other programs on the same cores distort the times.

    Common uses:
        txl bench decode runs/mine
        txl bench decode runs/mine --rows 1,4,16 --precision fp32,int8
        txl bench decode runs/mine --mem-len 2048 --no-compile --json

    Args:
        run: directory of a run, of an exported model, or a hub id.
        precision: one or several, with commas between. Default: fp32,bf16,int8, and fp16 on a GPU.
        compile: compiled code alone, or none. Default: both.
        rows: texts written side by side, with commas between.
        tokens: how many tokens of each row are timed.
        mem_len: positions of memory. Default: as in training.
        file: text to read. Default: the run's validation split, or random tokens.
        opening: how the run is opened.
        json_: print one JSON object.
    """
    numbers = numbers_of("rows", rows)
    names = None if precision is None else names_of("precision", precision, _PRECISIONS)
    subject = _open(run, opening, file)
    model = subject.opened.model.with_context(mem_len=mem_len, same_length=False if mem_len == 0 else None)
    precisions = _precisions(names, model.device)
    codes = [False, True] if compile is None else [compile]

    from transformer_xl.cost.bench import Findings, bench_decoders
    from transformer_xl.cost.display import decoding_table
    from transformer_xl.cost.hardware import memory_bandwidth
    from transformer_xl.generation.fastest import keep_compiled_code

    keep_compiled_code()
    found = Findings()
    modes: list[DecoderMode] = [(name, code, n_row) for name in precisions for code in codes for n_row in numbers]
    with progress(total=1 + len(modes), unit=None) as bar:
        bar.next("how fast memory is read")
        bandwidth = memory_bandwidth(model.device)
        with found.until_interrupted():
            bench_decoders(found, model, subject.ids, modes, n_token=tokens, bandwidth=bandwidth, bar=bar)
    speed = f"memory is read at {bandwidth / 1e9:.1f} GB/s"
    subject.report(model, {"bandwidth": bandwidth}, speed, decoding_table, found, json_=json_)


@app.command(name="eval")
def eval_(
    run: str,
    /,
    *,
    tgt_len: str = "32,64,128,256",
    batch_size: str = "1",
    precision: str = "fp32,auto",
    tokens: Positive = 2000,
    mem_len: Natural | None = None,
    file: Path | None = None,
    opening: Opening = Opening(),
    json_: Json = False,
) -> None:
    """Measure how fast a model scores segments, compared with the speed of this machine's matrix products.

    Ctrl-C stops and prints what was measured so far. Other programs on the same cores distort the times.

    Common uses:
        txl bench eval runs/mine
        txl bench eval runs/mine --tgt-len 64,512 --batch-size 1
        txl bench eval runs/mine --precision fp32,bf16,int8 --json

    Args:
        run: directory of a run, of an exported model, or a hub id.
        tgt_len: tokens per segment, with commas between.
        batch_size: lanes read side by side, with commas between; all but the first must warm up, which takes time.
        precision: fp32, bf16, fp16, int8, or auto for what the processor does fast; with commas between.
        tokens: how many tokens are timed, at least.
        mem_len: positions of memory. Default: as in training.
        file: text to read. Default: the run's validation split, or random tokens.
        opening: how the run is opened.
        json_: print one JSON object.
    """
    lengths, sizes = numbers_of("tgt-len", tgt_len), numbers_of("batch-size", batch_size)
    names = names_of("precision", precision, (*_PRECISIONS, "auto"))
    subject = _open(run, opening, file)
    precisions = _precisions(names, subject.opened.device)
    model = subject.opened.reading(mem_len=mem_len, ext_len=0).view(subject.opened.model)

    from transformer_xl.cost.bench import Findings, bench_scoring
    from transformer_xl.cost.display import scoring_table
    from transformer_xl.cost.hardware import matmul_rate
    from transformer_xl.kernels.device import activation_dtype
    from transformer_xl.process import keep_freed_memory

    keep_freed_memory()  # as txl eval does
    found = Findings()
    modes: list[ScoringMode] = [(name, size, length) for name in precisions for size in sizes for length in lengths]
    with progress(total=1 + len(modes), unit=None) as bar:
        bar.next("how fast matrices are multiplied")
        rates: dict[InferencePrecision, float] = {
            name: matmul_rate(model.device, activation_dtype(name, model.dtype)) for name in precisions
        }
        with found.until_interrupted():
            bench_scoring(found, model, subject.ids, modes, n_token=tokens, rates=rates, bar=bar)
    speed = "multiplies " + ", ".join(f"{rate / 1e9:,.0f} GFLOP/s in {name}" for name, rate in rates.items())
    subject.report(model, {"matmul_rates": rates}, speed, scoring_table, found, json_=json_)


@dataclass(frozen=True)
class _Subject:
    """A model to measure, the text that it reads, and the machine."""

    opened: "Opened"
    machine: dict[str, str | float]
    text: str  # in words
    ids: "np.ndarray"

    def report(
        self,
        model: "LanguageModel",
        rates: dict[str, Any],
        speed: str,
        table: "Callable[[Sequence[Figures]], str]",
        found: "Findings",
        *,
        json_: bool,
    ) -> None:
        """Print facts and figures of the model as it was measured: as JSON, or two lines, a table and what is missing in it."""
        from transformer_xl.cost.display import machine_line

        run, n_parameter = self.opened.source, self.opened.n_parameter
        if json_:
            facts = {"run": run, "parameters": n_parameter, "mem_len": model.mem_len, "text": self.text}
            print(json.dumps(facts | {"machine": self.machine} | rates | vars(found)))
        else:
            print(f"{run}: {n_parameter:,} parameters, {model.mem_len:,} positions of memory; reads {self.text}")
            print(f"{machine_line(self.machine)}; {speed}\n\n{table(found.figures)}")
            if found.skipped:
                print("\n" + "\n".join(f"not measured: {what}: {why}" for what, why in found.skipped.items()))
        if found.interrupted:
            raise KeyboardInterrupt


def _open(run: str, opening: Opening, file: Path | None) -> _Subject:
    """Open a run with a file, its validation split, or random tokens."""
    import numpy as np

    from transformer_xl.cost.hardware import describe

    opened = opening.open(run)
    machine = describe(opened.device)  # before this program adds to the load
    if file is not None:
        text = opened.text(file=file)
        return _Subject(opened, machine, text.what, text.ids)
    if opened.is_run:
        try:
            ids = opened.text(split="valid").ids
            return _Subject(opened, machine, f"validation split of {opened.config.data.corpus}", ids)
        except (CorpusError, OSError) as error:
            warn(f"random tokens are read, because the run's text cannot be: {message_of(error)}")
    random = np.random.default_rng(0).integers(0, opened.tokenizer.vocab_size, 1 << 16)
    return _Subject(opened, machine, "random tokens", random)


def _precisions(names: list[str] | None, device: "torch.device") -> "list[InferencePrecision]":
    from transformer_xl.kernels.device import precision_of_segments

    if names is None:
        names = [name for name in _PRECISIONS if name != "fp16" or device.type == "cuda"]
    if "fp16" in names and device.type == "cpu":
        raise ConfigError("precision fp16 is for GPUs, a processor multiplies it very slowly; use bf16")
    return list(dict.fromkeys(precision_of_segments(name, device) for name in names))

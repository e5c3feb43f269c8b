"""`txl bench decode|eval`: how fast a model is on this machine, beside what the machine allows."""

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from cyclopts import App, Parameter

from transformer_xl.cli.options import check_least, names_of, numbers_of
from transformer_xl.console import warn
from transformer_xl.pictures import check_picture

if TYPE_CHECKING:
    import numpy as np
    import torch

    from transformer_xl.config import RunConfig
    from transformer_xl.data.tokenizers import Tokenizer
    from transformer_xl.model.frozen import InferencePrecision
    from transformer_xl.model.language_model import LanguageModel
    from transformer_xl.speed.display import ProgressBar
    from transformer_xl.speed.figures import Figures

    _DecoderMode = tuple[InferencePrecision, bool, int]  # precision, compiled, rows
    _ScoringMode = tuple[InferencePrecision, int, int]  # precision, batch_size, tgt_len

app = App(name="bench", help="Measure a model on this machine, beside what the machine allows.", help_format="plaintext")

_PRECISIONS = ("fp32", "bf16", "fp16", "int8")


@app.command
def decode(
    run: str,
    /,
    *,
    precision: str | None = None,
    compile: bool | None = None,
    rows: str = "1",
    tokens: int = 100,
    mem_len: int | None = None,
    loss: int | None = None,
    file: Path | None = None,
    plot: Path | None = None,
    device: str = "auto",
    checkpoint: Literal["best", "last", "average"] = "best",
    json_: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> None:
    """Measure how fast a model writes, token by token with full memory, beside the speed of this machine's memory.

    Ctrl-C ends it and prints what was measured so far. Other programs that use the processor disturb it.

    Common uses:
        txl bench decode runs/mine
        txl bench decode runs/mine --rows 1,4,16 --plot speed.png
        txl bench decode runs/mine --precision fp32,int8 --loss 5000
        txl bench decode runs/mine --mem-len 2048 --no-compile --json

    Args:
        run: directory of a run, of an exported model, or a hub id.
        precision: which, with commas between. Default: fp32,bf16,int8, and fp16 on a GPU.
        compile: compiled code alone, or none. Default: both.
        rows: texts written side by side, with commas between.
        tokens: how many are timed, of each row.
        mem_len: positions of memory. Default: as in training.
        loss: also say what each precision costs: its loss on this many tokens.
        file: text to read. Default: the run's validation split, or random tokens.
        plot: draw the figures into this file, such as speed.png.
        device: auto, cpu, cuda, cuda:N or mps.
        checkpoint: of a run: the one with the best validation loss, the last, or the last average (train.average).
        json_: print one JSON object.
    """
    numbers = numbers_of("rows", rows)
    check_least({"tokens": (tokens, 1), "mem-len": (mem_len, 0), "loss": (loss, 1)})
    names = None if precision is None else names_of("precision", precision, _PRECISIONS)
    check_picture(plot)
    bench = _open(run, device=device, checkpoint=checkpoint, file=file, needs_text=loss is not None)
    model = bench.model.with_context(mem_len=mem_len, same_length=False if mem_len == 0 else None)
    precisions = _precisions(names, bench.device)
    codes = [False, True] if compile is None else [compile]

    from transformer_xl.speed.display import decoding_tables, draw, loss_table, progress_bar
    from transformer_xl.speed.figures import compare_with_one_row
    from transformer_xl.speed.machine import memory_bandwidth

    found = _Found()
    modes: list[_DecoderMode] = [(name, code, n_row) for name in precisions for code in codes for n_row in numbers]
    with progress_bar(1 + len(modes) + (loss is not None)) as progress:
        progress.next("how fast memory is read")
        bandwidth = memory_bandwidth(bench.device)
        with found.until_interrupted():
            _measure_decoders(found, model, bench.ids, modes, tokens, bandwidth, progress)
            if loss is not None:
                progress.next("loss")
                _measure_losses(found, model, bench.ids[: loss + 1], precisions)
    compare_with_one_row(found.figures)
    found.check()
    if plot:
        facts = bench.machine
        machine = f"{facts.get('gpu', facts['processor'])}, {facts['threads']} threads"
        draw(plot, found.figures, title=f"{run}, {model.mem_len:,} positions of memory", machine=machine)
    if json_:
        print(json.dumps(bench.as_dict(model) | {"bandwidth": bandwidth} | found.as_dict()))
    else:
        losses = [loss_table(found.losses)] if found.losses else []
        speed = f"memory is read at {bandwidth / 1e9:.1f} GB/s"
        print("\n\n".join([bench.describe(model, speed), decoding_tables(found.figures), *losses, *found.complaints]))
    found.finish()


@app.command(name="eval")
def eval_(
    run: str,
    /,
    *,
    tgt_len: str = "32,64,128,256",
    batch_size: str = "1",
    precision: str = "fp32,auto",
    tokens: int = 2000,
    mem_len: int | None = None,
    file: Path | None = None,
    device: str = "auto",
    checkpoint: Literal["best", "last", "average"] = "best",
    json_: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> None:
    """Measure how fast a model is scored, segment by segment, beside the speed at which this machine multiplies.

    Ctrl-C ends it and prints what was measured so far. Other programs that use the processor disturb it.

    Common uses:
        txl bench eval runs/mine
        txl bench eval runs/mine --tgt-len 64,512 --batch-size 1
        txl bench eval runs/mine --precision fp32,bf16,int8 --json

    Args:
        run: directory of a run, of an exported model, or a hub id.
        tgt_len: tokens per segment, with commas between.
        batch_size: lanes read side by side, with commas between; each but the first warms up, which takes its time.
        precision: fp32, bf16, fp16, int8, or auto for what the processor does fast; with commas between.
        tokens: how many are timed, at least.
        mem_len: positions of memory. Default: as in training.
        file: text to read. Default: the run's validation split, or random tokens.
        device: auto, cpu, cuda, cuda:N or mps.
        checkpoint: of a run: the one with the best validation loss, the last, or the last average (train.average).
        json_: print one JSON object.
    """
    lengths, sizes = numbers_of("tgt-len", tgt_len), numbers_of("batch-size", batch_size)
    check_least({"tokens": (tokens, 1), "mem-len": (mem_len, 0)})
    names = names_of("precision", precision, (*_PRECISIONS, "auto"))
    bench = _open(run, device=device, checkpoint=checkpoint, file=file)
    precisions = _precisions(names, bench.device)
    model = _as_evaluated(bench, mem_len)

    from transformer_xl.allocator import keep_freed_memory
    from transformer_xl.model.frozen import activation_dtype
    from transformer_xl.speed.display import progress_bar, scoring_table
    from transformer_xl.speed.machine import matmul_rate

    keep_freed_memory()  # as txl eval does
    found = _Found()
    modes: list[_ScoringMode] = [(name, size, length) for name in precisions for size in sizes for length in lengths]
    with progress_bar(1 + len(modes)) as progress:
        progress.next("how fast matrices are multiplied")
        rates: dict[InferencePrecision, float] = {
            name: matmul_rate(bench.device, activation_dtype(name, model.dtype)) for name in precisions
        }
        with found.until_interrupted():
            _measure_scoring(found, model, bench.ids, modes, tokens, rates, progress)
    found.check()
    if json_:
        print(json.dumps(bench.as_dict(model) | {"matmul_rates": rates} | found.as_dict()))
    else:
        speed = "multiplies " + ", ".join(f"{rate / 1e9:,.0f} GFLOP/s in {name}" for name, rate in rates.items())
        print("\n\n".join([bench.describe(model, speed), scoring_table(found.figures), *found.complaints]))
    found.finish()


@dataclass(frozen=True)
class _Bench:
    """A model, what it reads, and the machine."""

    run: str
    model: "LanguageModel"
    config: "RunConfig | None"
    device: "torch.device"
    machine: dict[str, str | float]
    text: str
    ids: "np.ndarray"

    @property
    def n_parameter(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    def as_dict(self, model: "LanguageModel") -> dict[str, Any]:
        """Return what figures belong to; the model is the one that was measured."""
        facts = {"run": self.run, "parameters": self.n_parameter, "mem_len": model.mem_len, "text": self.text}
        return facts | {"machine": self.machine}

    def describe(self, model: "LanguageModel", speed: str) -> str:
        """Return the same in two lines."""
        facts = self.machine
        names = ", ".join(str(facts[name]) for name in ("processor", "gpu") if name in facts)
        load = f", load {facts['load']}" if "load" in facts else ""
        return (
            f"{self.run}: {self.n_parameter:,} parameters, {model.mem_len:,} positions of memory; reads {self.text}\n"
            f"{names}; {facts['cores']} cores, {facts['threads']} threads{load}; torch {facts['torch']}; {speed}"
        )


@dataclass
class _Found:
    """What was measured so far, and what could not be and why."""

    figures: "list[Figures]" = field(default_factory=list)
    losses: "list[Figures]" = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    interrupted: bool = False

    @contextlib.contextmanager
    def skipping(self, what: str) -> Iterator[None]:
        """Leave out what cannot work with this model."""
        from transformer_xl.errors import ConfigError

        try:
            yield
        except ConfigError as error:
            self.skipped[what] = str(error)

    @contextlib.contextmanager
    def until_interrupted(self) -> Iterator[None]:
        """End early on Ctrl-C, if there is something to show."""
        try:
            yield
        except KeyboardInterrupt:
            if not self.figures:
                raise
            self.interrupted = True

    def check(self) -> None:
        """Complain if there is nothing to show."""
        from transformer_xl.errors import ConfigError

        if not self.figures:
            raise ConfigError(f"nothing could be measured: {next(iter(self.skipped.values()))}")

    def finish(self) -> None:
        """Exit as an interrupted program does, if it was."""
        if self.interrupted:
            raise KeyboardInterrupt

    @property
    def complaints(self) -> list[str]:
        """Say what is missing, in a paragraph, or not at all."""
        lines = [f"not measured: {what}: {why}" for what, why in self.skipped.items()]
        return ["\n".join(lines)] if lines else []

    def as_dict(self) -> dict[str, Any]:
        rest = {"losses": self.losses} if self.losses else {}
        return {"figures": self.figures, **rest, "skipped": self.skipped, "interrupted": self.interrupted}


def _measure_decoders(
    found: _Found,
    model: "LanguageModel",
    ids: "np.ndarray",
    modes: "list[_DecoderMode]",
    n_token: int,
    bandwidth: float,
    progress: "ProgressBar",
) -> None:
    from transformer_xl.model.compiled import cannot_compile
    from transformer_xl.speed.display import mode_name
    from transformer_xl.speed.figures import decoding_figures
    from transformer_xl.speed.measure import measure_decoding

    no_compiler = cannot_compile(model.device) if any(compiled for _, compiled, _ in modes) else None
    for precision, compiled, n_row in modes:
        what = mode_name({"precision": precision, "compiled": compiled, "rows": n_row})
        progress.next(what)
        if compiled and no_compiler:
            found.skipped["compiled"] = no_compiler
            continue
        with found.skipping(what):
            measured = measure_decoding(
                model,
                ids,
                precision=precision,
                compile=compiled,
                n_row=n_row,
                n_token=n_token,
                report=progress.report,
            )
            figures = decoding_figures(measured, precision=precision, compiled=compiled, bandwidth=bandwidth)
            found.figures.append(figures)


def _measure_losses(
    found: _Found, model: "LanguageModel", ids: "np.ndarray", precisions: "Sequence[InferencePrecision]"
) -> None:
    """Enter the loss of each precision, and how much more than that in fp32 it is."""
    from transformer_xl.evaluation import evaluate

    for precision in cast("list[InferencePrecision]", list(dict.fromkeys(("fp32", *precisions)))):
        with found.skipping(f"loss in {precision}"):
            score = evaluate(model, ids, precision=precision)
            exact = found.losses[0]["loss"] if found.losses else score.loss
            found.losses.append(
                {"precision": precision, "tokens": score.tokens, "loss": score.loss, "difference": score.loss - exact}
            )


def _measure_scoring(
    found: _Found,
    model: "LanguageModel",
    ids: "np.ndarray",
    modes: "list[_ScoringMode]",
    n_token: int,
    rates: "dict[InferencePrecision, float]",
    progress: "ProgressBar",
) -> None:
    from transformer_xl.speed.figures import scoring_figures
    from transformer_xl.speed.measure import measure_scoring
    from transformer_xl.speed.needs import flops_per_token

    for precision, size, length in modes:
        progress.next(f"{precision}, tgt_len {length}, batch_size {size}")
        with found.skipping(f"{precision} with tgt_len {length}"):
            measured = measure_scoring(
                model,
                ids,
                tgt_len=length,
                batch_size=size,
                precision=precision,
                n_token=n_token,
                report=progress.report,
            )
            flops = flops_per_token(model, ids, tgt_len=length)
            found.figures.append(
                scoring_figures(measured, precision=precision, flops_per_token=flops, matmul_rate=rates[precision])
            )


def _open(
    run: str, *, device: str, checkpoint: Literal["best", "last", "average"], file: Path | None, needs_text: bool = False
) -> _Bench:
    from transformer_xl.checkpoint.run_directory import RunDirectory, load
    from transformer_xl.model.precision import choose_device
    from transformer_xl.speed.machine import describe

    model, tokenizer = load(run, which=checkpoint, on_damaged=warn)
    config = RunDirectory(run).config() if RunDirectory(run).holds_run else None
    torch_device = choose_device(device)
    machine = describe(torch_device)  # before anything loads it
    text, ids = _text(run, config, file, tokenizer, needs_text=needs_text)
    return _Bench(run, model.to(torch_device), config, torch_device, machine, text, ids)


def _text(
    run: str, config: "RunConfig | None", file: Path | None, tokenizer: "Tokenizer", *, needs_text: bool
) -> "tuple[str, np.ndarray]":
    """Return what is read, in words and as ids."""
    import numpy as np

    from transformer_xl.data.corpora import choose_corpus
    from transformer_xl.data.encoding import encode_file
    from transformer_xl.data.prepare import prepare
    from transformer_xl.errors import ConfigError, CorpusError

    if file is not None:
        ids = encode_file(file, tokenizer)[0]
        if len(ids) < 2:
            raise CorpusError(f"'{file}' has {len(ids)} tokens; at least 2 are needed")
        return f"file {file}", ids
    if config is not None:
        data = choose_corpus(config.data, None)
        try:
            ids = prepare(data, tokenizer).splits["valid"].ids
        except CorpusError as error:
            if needs_text:
                raise
            warn(f"random tokens are read, for the run's text cannot be: {error}")
            ids = []
        if len(ids) > 1:
            return f"validation split of {data.corpus}", np.asarray(ids)
    if needs_text:
        raise ConfigError(f"--loss needs text, and '{run}' has no validation split of its own; give --file")
    return "random tokens", np.random.default_rng(0).integers(0, tokenizer.vocab_size, 1 << 16)


def _as_evaluated(bench: _Bench, mem_len: int | None) -> "LanguageModel":
    """Return the model with the context that `txl eval` reads with."""
    from transformer_xl.config import RunConfig
    from transformer_xl.reading import Reading

    config = bench.config or RunConfig(model=bench.model.config)
    return Reading.of_run(config, mem_len=mem_len, ext_len=0).view(bench.model)


def _precisions(names: list[str] | None, device: "torch.device") -> "list[InferencePrecision]":
    from transformer_xl.errors import ConfigError
    from transformer_xl.model.precision_names import precision_of_segments

    if names is None:
        names = [name for name in _PRECISIONS if name != "fp16" or device.type == "cuda"]
    if "fp16" in names and device.type == "cpu":
        raise ConfigError("precision fp16 is for GPUs, a processor multiplies it very slowly; use bf16")
    return list(dict.fromkeys(precision_of_segments(name, device) for name in names))

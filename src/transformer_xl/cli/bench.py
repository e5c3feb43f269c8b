"""`txl bench`: how fast a model generates on this machine, beside what the machine's memory allows."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from transformer_xl.cli.options import Json, Natural, Opening, Positive, names_of, numbers_of
from transformer_xl.console import progress, warn
from transformer_xl.errors import ConfigError, CorpusError, message_of

if TYPE_CHECKING:
    import numpy as np

    from transformer_xl.checkpoint.open_run import Opened
    from transformer_xl.tools.bench import Mode

_PRECISIONS = ("fp32", "bf16", "fp16", "int8")


def bench(
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
        txl bench runs/mine
        txl bench runs/mine --rows 1,4,16 --precision fp32,int8
        txl bench runs/mine --mem-len 2048 --no-compile --json

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
    n_rows = numbers_of("rows", rows)
    names = None if precision is None else names_of("precision", precision, _PRECISIONS)
    from transformer_xl.generation.fastest import keep_compiled_code
    from transformer_xl.kernels.device import InferencePrecision, precision_of_segments
    from transformer_xl.tools.bench import bench_decoders, decoding_table
    from transformer_xl.tools.hardware import describe, memory_bandwidth

    opened = opening.open(run)
    machine = describe(opened.device)  # before this program adds to the load
    text, ids = _text(opened, file)
    model = opened.model.with_context(mem_len=mem_len, same_length=False if mem_len == 0 else None)
    on_gpu = model.device.type == "cuda"
    names = names or [name for name in _PRECISIONS if on_gpu or name != "fp16"]
    if "fp16" in names and model.device.type == "cpu":
        raise ConfigError("precision fp16 is for GPUs, a processor multiplies it very slowly; use bf16")
    precisions: list[InferencePrecision] = [precision_of_segments(name, model.device) for name in names]
    codes = [False, True] if compile is None else [compile]
    modes: list[Mode] = [(name, code, n_row) for name in precisions for code in codes for n_row in n_rows]

    keep_compiled_code()
    with progress(total=1 + len(modes), unit=None) as bar:
        bar.next("how fast memory is read")
        bandwidth = memory_bandwidth(model.device)
        findings = bench_decoders(model, ids, modes, n_token=tokens, bandwidth=bandwidth, bar=bar)
    if json_:
        facts = {"run": opened.source, "parameters": opened.n_parameter, "mem_len": model.mem_len, "text": text}
        print(json.dumps(facts | {"machine": machine, "bandwidth": bandwidth} | vars(findings)))
    else:
        chips = ", ".join(str(machine[name]) for name in ("processor", "gpu") if name in machine)
        state = f"{machine['cores']} cores, {machine['threads']} threads, load {machine['load']}; torch {machine['torch']}"
        print(f"{opened.source}: {opened.n_parameter:,} parameters, {model.mem_len:,} positions of memory; reads {text}")
        print(f"{chips}; {state}; memory is read at {bandwidth / 1e9:.1f} GB/s\n\n{decoding_table(findings.figures)}")
        for what, why in findings.skipped.items():
            print(f"not measured: {what}: {why}")
    if findings.interrupted:
        raise KeyboardInterrupt


def _text(opened: "Opened", file: Path | None) -> "tuple[str, np.ndarray]":
    """Return the tokens of a file, of the run's validation split, or random ones, and before them what they are."""
    import numpy as np

    if file is not None:
        text = opened.text(file=file)
        return text.what, text.ids
    if opened.is_run:
        try:
            return f"validation split of {opened.config.data.corpus}", opened.text(split="valid").ids
        except (CorpusError, OSError) as error:
            warn(f"random tokens are read, because the run's text cannot be: {message_of(error)}")
    return "random tokens", np.random.default_rng(0).integers(0, opened.tokenizer.vocab_size, 1 << 16)

"""`txl compress` and `txl decompress`."""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from transformer_xl.cli.options import Flag, Json, check_run
from transformer_xl.console import clock, in_bytes, progress, say
from transformer_xl.errors import ConfigError
from transformer_xl.files import check_file
from transformer_xl.process import is_alone, stop_signals
from transformer_xl.untrusted import open_regular

if TYPE_CHECKING:
    from transformer_xl.model.language_model import LanguageModel


def compress(
    file: Path,
    out: Path,
    /,
    *,
    model: Path | None = None,
    learn: Flag = False,
    quiet: Flag = False,
    json_: Json = False,
) -> None:
    """Compress any file with a model that learns as it reads.

    Only the same machine with the same versions can decompress the result.
    If you stop it, the same command continues.

    Common uses:
        txl compress book.txt book.txl
        txl compress book.txt book.txl --model runs/mine
        txl compress book.txt book.txl --model runs/mine --learn

    Args:
        file: any file.
        out: where the result goes.
        model: a run or model that reads bytes; decompressing needs it, too. Default: a new model, which it does not need.
        learn: let the model given by --model learn as it reads, like a new one.
        quiet: show no progress, only errors.
        json_: print one JSON object.
    """
    if learn and model is None:
        raise ConfigError("--learn is for a model given by --model; a new one learns anyhow")
    _check(file, out, model)
    from transformer_xl.compression.archive import Setup, compress

    opened = _model(model)
    setup = Setup(opened, opened is None or learn)
    seconds, n = _run(out, quiet, lambda **shown: compress(file, out, setup, **shown))
    size, weights = file.stat().st_size, sum(x.nbytes for x in opened.state_dict().values()) if opened else 0
    if json_:
        print(json.dumps({"bytes": size, "compressed": n, "model_bytes": weights, "seconds": seconds}))
        return
    share = f" ({n / size:.1%}, {8 * n / size:.3f} bits per byte)" if size else ""
    counted = f"; {n + weights:,} with the model's weights" if opened else ""
    print(f"{size:,} bytes -> {n:,}{share} in {clock(seconds)} ({in_bytes(size / seconds)}/s){counted}")


def decompress(file: Path, out: Path, /, *, model: Path | None = None, quiet: Flag = False, json_: Json = False) -> None:
    """Decompress what txl compress wrote, on the same machine with the same versions.

    If you stop it, the same command continues.

    Common uses:
        txl decompress book.txl book.txt
        txl decompress book.txl book.txt --model runs/mine

    Args:
        file: written by txl compress.
        out: where the text goes, whole or not at all.
        model: the --model that the file was compressed with, if any.
        quiet: show no progress, only errors.
        json_: print one JSON object.
    """
    _check(file, out, model)
    from transformer_xl.compression.archive import decompress

    opened = _model(model)
    seconds, size = _run(out, quiet, lambda **shown: decompress(file, out, opened, **shown))
    if json_:
        print(json.dumps({"bytes": size, "compressed": file.stat().st_size, "seconds": seconds}))
    else:
        print(f"{file.stat().st_size:,} bytes -> {size:,} in {clock(seconds)} ({in_bytes(size / seconds)}/s)")


def _check(file: Path, out: Path, model: Path | None) -> None:
    open_regular(file)[0].close()
    check_file(out, option="out")
    for own in (out, *(out.with_name(f"{out.name}.{name}") for name in ("part", "state", "lock"))):
        if own.exists() and own.samefile(file):
            raise ConfigError(f"'{own}' is the file itself; choose another place for the result")
    if not is_alone():
        raise ConfigError("files are compressed in one process; start it without torchrun")
    if model is not None:
        check_run(model)


def _model(run: Path | None) -> "LanguageModel | None":
    """Open a model on the CPU, where numbers are the same each time; refuse one that does not read bytes."""
    if run is None:
        return None
    from transformer_xl.opening import open_run

    opened = open_run(run, device="cpu")
    if opened.tokenizer.kind != "byte":
        raise ConfigError(
            f"'{run}' reads {opened.tokenizer.kind} tokens, and any file has bytes; train one with tokenizer.kind=byte"
        )
    return opened.model


def _run(out: Path, quiet: bool, work: Callable[..., int | None]) -> tuple[float, int]:
    """Return the seconds and what the work returns; where it is stopped, say how to go on, and exit."""
    begin = time.perf_counter()
    with stop_signals(once=True) as received, progress(unit="bytes", hidden=quiet) as bar:
        found = work(bar=bar, stopped=lambda: bool(received))
    if found is None:
        say(f"stopped; the same command goes on from '{out}.state'", quiet=quiet)
        sys.exit(130)
    return time.perf_counter() - begin, found

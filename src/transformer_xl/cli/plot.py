"""`txl plot`."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from transformer_xl.cli.options import Imports, Json, Positive, Split, import_kinds, numbers_of
from transformer_xl.errors import ConfigError
from transformer_xl.pictures import check_picture

if TYPE_CHECKING:
    from transformer_xl.checkpoint.open_run import Opened
    from transformer_xl.data.text import Text
    from transformer_xl.pictures import PlotLine
    from transformer_xl.tools.comparison import ComparedRun, Unit
    from transformer_xl.tools.curves import Against

    Texts = Iterable[tuple[ComparedRun, Opened, Text]]
    Drawing = tuple[list[PlotLine], dict[str, Any]]  # lines, and how `draw` draws them, x times `scale`


def plot(
    *runs: Path,
    against: Literal["tokens", "steps", "seconds", "memory"] = "tokens",
    unit: Literal["nats", "bpc"] = "nats",
    out: Path = Path("plot.png"),
    lengths: str | None = None,
    split: Split | None = None,
    corpus: str | None = None,
    tokens: Positive = 200_000,
    import_: Imports = None,
    json_: Json = False,
) -> None:
    """Plot learning curves of runs, or their loss by memory length.

    Common uses:
        txl plot runs/a runs/b
        txl plot runs/a runs/b --against seconds --unit bpc --out curves.svg
        txl plot runs/a --against memory --lengths 0,128,1024
        txl plot runs/ablate-quickstart/*-seed0 --json

    Tokens, steps and seconds are those of training. Memory scores a split with
    memories of several lengths.

    Args:
        runs: directories of one or more runs.
        against: tokens, steps, seconds or memory.
        unit: nats per token, or bits per character, which can be compared between vocabularies.
        out: the picture, .png, .svg or .pdf.
        lengths: lengths of memory, with commas between. Default: 0, 1/4, 1/2, 1, 2, 4 and 8 times that of training.
        split: split to score. Default: test, or valid if there is none.
        corpus: a corpus other than the runs', or the directory that contains their named one.
        tokens: score at most this many tokens of the split.
        import_: a module that registers your own kinds: its name, or PATH/NAME.py; may be repeated.
        json_: print the drawn numbers as JSON.
    """
    if not runs:
        raise ConfigError("name a run, such as txl plot runs/quickstart; txl train makes one")
    check_picture(out, option="out")
    wanted = None if lengths is None else sorted(numbers_of("lengths", lengths, least=0))
    if wanted and against != "memory":
        raise ConfigError(f"--lengths ({lengths}) are lengths of memory, and --against is {against}; use --against memory")
    import_kinds(import_)
    from transformer_xl.console import warn
    from transformer_xl.pictures import draw
    from transformer_xl.process import keep_freed_memory
    from transformer_xl.tools.comparison import UNITS, check_units, find_runs
    from transformer_xl.tools.curves import open_texts

    keep_freed_memory()
    found = find_runs(runs)
    check_units(found, unit, warn=warn)
    texts = open_texts(found, split=split, corpus=corpus, limit=tokens, warn=warn)
    if against == "memory":
        lines, axes = _by_memory(texts, unit, wanted)
    else:
        lines, axes = _while_training(found, against, unit)
    prefix, scale = "", axes.pop("scale", 1.0)
    if len(found) == 1:
        prefix, axes["title"] = f"{found[0].name}, ", f"{found[0].name}: {axes['title']}"
    shown = [replace(line, name=line.name.removeprefix(prefix), x=[scale * x for x in line.x]) for line in lines]
    draw(shown, out, ylabel=f"loss ({UNITS[unit]})", **axes)
    if json_:
        print(json.dumps({"against": against, "unit": unit, "picture": str(out), "lines": [line.as_dict() for line in lines]}))
    else:
        print(f"picture: {out}")


def _while_training(runs: "Sequence[ComparedRun]", against: "Against", unit: "Unit") -> "Drawing":
    from transformer_xl.console import warn
    from transformer_xl.tools.comparison import check_validations
    from transformer_xl.tools.curves import XLABELS, learning_curves
    from transformer_xl.training.pictures import tokens_axis

    check_validations(runs, warn=warn)
    lines = learning_curves(runs, against=against, unit=unit)
    axes = {"xlabel": XLABELS[against], "title": "loss while training", "from_zero": True}
    if against == "tokens":  # lines are in millions
        axes["xlabel"], n_token = tokens_axis(1e6 * max(x for line in lines for x in line.x))
        axes["scale"] = 1e6 / n_token
    return lines, axes


def _by_memory(texts: "Texts", unit: "Unit", lengths: list[int] | None) -> "Drawing":
    from transformer_xl.console import progress
    from transformer_xl.tools.curves import memory_line, memory_readings

    scored: dict[str, list[PlotLine]] = {}
    for run, opened, text in texts:
        n_token = len(memory_readings(run, lengths)) * (len(text.ids) - 1)
        with progress(run.name, n_token) as bar:
            line = memory_line(run, opened, text, unit=unit, lengths=lengths, on_tokens=bar.advance)
        scored.setdefault(text.what, []).append(line)
    title = "loss and memory"
    if len(scored) == 1:
        ((what, lines),) = scored.items()
        title = f"{title}\n{what}"
    else:
        lines = [replace(line, name=f"{line.name}, {what}") for what, lines in scored.items() for line in lines]
    return lines, {"xlabel": "positions of memory at evaluation", "title": title, "lengths": True}

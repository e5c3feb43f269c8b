"""`txl plot`."""

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from transformer_xl.cli.options import Imports, Json, Positive, Split, import_kinds, numbers_of
from transformer_xl.errors import ConfigError
from transformer_xl.pictures import check_picture

if TYPE_CHECKING:
    from transformer_xl.analysis.lines import PlotLine


def plot(
    *runs: Path,
    against: Literal["tokens", "steps", "seconds", "memory", "position"] = "tokens",
    unit: Literal["nats", "bpc"] = "nats",
    out: Path = Path("plot.png"),
    lengths: str | None = None,
    segments: Positive = 3,
    split: Split | None = None,
    corpus: str | None = None,
    tokens: Positive = 200_000,
    import_: Imports = None,
    json_: Json = False,
) -> None:
    """Plot learning curves of runs, their loss by memory length, or their loss by position in a segment.

    Common uses:
        txl plot runs/a runs/b
        txl plot runs/a runs/b --against seconds --unit bpc --out curves.svg
        txl plot runs/a --against memory --lengths 0,128,1024
        txl plot runs/vanilla runs/ours --against position
        txl plot runs/ablate-quickstart/*-seed0 --json

    Tokens, steps and seconds are those of training. Memory scores a split with
    memories of several lengths. Position shows the mean loss at each place of
    consecutive segments: high where a segment begins, if nothing is remembered.

    Args:
        runs: directories of one or more runs.
        against: tokens, steps, seconds, memory or position.
        unit: nats per token, or bits per character, which can be compared between vocabularies.
        out: the picture, .png, .svg or .pdf.
        lengths: lengths of memory, with commas between. Default: 0, 1/4, 1/2, 1, 2, 4 and 8 times that of training.
        segments: position: how many segments are shown.
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
    from transformer_xl.analysis.comparison import UNITS, check_units, check_validations, find_runs
    from transformer_xl.analysis.curves import (
        XLABELS,
        learning_curves,
        memory_line,
        memory_readings,
        open_texts,
        position_lines,
        segment_readings,
    )
    from transformer_xl.analysis.lines import draw
    from transformer_xl.console import progress, warn
    from transformer_xl.process import keep_freed_memory
    from transformer_xl.training.pictures import tokens_axis

    keep_freed_memory()
    found = find_runs(runs)
    check_units(found, unit, warn=warn)
    lines: list[PlotLine] = []
    labels: dict[str, Any] = {"ylabel": f"loss ({UNITS[unit]})"}
    scored: dict[str, str] = {}  # by run: the text
    scale = 1.0
    texts = open_texts(found, split=split, corpus=corpus, limit=tokens, warn=warn)
    if against == "memory":
        for run, opened, text in texts:
            scored[run.name] = text.what
            n_token = len(memory_readings(run, wanted)) * (len(text.ids) - 1)
            with progress(run.name, n_token) as bar:
                lines.append(memory_line(run, opened, text, unit=unit, lengths=wanted, on_tokens=bar.advance))
        labels |= {"xlabel": "positions of memory at evaluation", "lengths": True, "title": "loss and memory"}
    elif against == "position":
        readings = {run.name: segment_readings(run.config) for run in found}
        longest = max(reading.tgt_len for own in readings.values() for _, reading in own)
        span = segments * longest
        for run, opened, text in texts:
            scored[run.name] = text.what
            with progress(run.name, len(readings[run.name]) * (len(text.ids) - 1)) as bar:
                lines += position_lines(run, opened, text, span=span, unit=unit, on_tokens=bar.advance)
        labels |= {"xlabel": "position in consecutive segments (tokens); band: 95 % confidence"}
        labels |= {"borders": range(0, span + 1, longest), "title": "loss and position in the segment"}
    else:
        check_validations(found, warn=warn)
        lines = learning_curves(found, against=against, unit=unit)
        labels |= {"xlabel": XLABELS[against], "title": "loss while training", "from_zero": True}
        if against == "tokens":  # lines are in millions
            labels["xlabel"], n_token = tokens_axis(1e6 * max(x for line in lines for x in line.x))
            scale = 1e6 / n_token
    if len(set(scored.values())) == 1:
        labels["title"] += f"\n{scored[found[0].name]}"
    elif scored:
        lines = [replace(line, name=f"{line.name}, {scored[line.run]}") for line in lines]
    if len(found) == 1:
        labels["title"] = f"{found[0].name}: {labels['title']}"
    prefix = f"{found[0].name}, " if len(found) == 1 else ""  # the title says it
    draw([replace(line, name=line.name.removeprefix(prefix), x=[scale * x for x in line.x]) for line in lines], out, **labels)
    if json_:
        print(json.dumps({"against": against, "unit": unit, "picture": str(out), "lines": [line.as_dict() for line in lines]}))
    else:
        print(f"picture: {out}")

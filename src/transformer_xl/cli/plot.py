"""`txl plot`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from transformer_xl.cli.options import check_least, numbers_of
from transformer_xl.console import warn
from transformer_xl.errors import ConfigError
from transformer_xl.pictures import check_picture

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformer_xl.analysis.plots.lines import Line
    from transformer_xl.analysis.plots.opened import OpenRun, Unit
    from transformer_xl.model.language_model import LanguageModel
    from transformer_xl.texts import Text


def plot(
    *runs: Path,
    against: Literal["tokens", "steps", "seconds", "memory", "position"] = "tokens",
    unit: Literal["nats", "bpc"] = "nats",
    out: Path = Path("plot.png"),
    lengths: str | None = None,
    segments: int = 3,
    split: Literal["train", "valid", "test"] | None = None,
    corpus: str | None = None,
    tokens: int = 200_000,
    json_: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> None:
    """Draw how runs learn, what a longer memory is worth to them, or where in a segment they lose.

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
        runs: directories of runs, one at least.
        against: tokens, steps, seconds, memory or position.
        unit: nats per token, or bits per character, which can be compared between vocabularies.
        out: the picture, .png, .svg or .pdf.
        lengths: of memory, with commas between. Default: 0, 1/4, 1/2, 1, 2, 4 and 8 times that of training.
        segments: position: how many segments are shown.
        split: that is scored. Default: test, or valid where there is none.
        corpus: another corpus than the runs', or a directory that holds their named one.
        tokens: at most so many of the split are scored.
        json_: print the numbers that are drawn.
    """
    if not runs:
        raise ConfigError("name a run, such as txl plot runs/quickstart; txl train makes one")
    check_least({"tokens": (tokens, 2), "segments": (segments, 1)})
    check_picture(out, option="out")
    wanted = None if lengths is None else sorted(numbers_of("lengths", lengths, least=0))
    if wanted and against != "memory":
        raise ConfigError(f"--lengths ({lengths}) are of memory, and --against is {against}; use --against memory")

    from transformer_xl.allocator import keep_freed_memory
    from transformer_xl.analysis.plots.curves import XLABELS, learning_curves
    from transformer_xl.analysis.plots.lines import draw
    from transformer_xl.analysis.plots.opened import UNITS, check_comparable, check_curves, open_runs

    keep_freed_memory()
    opened = open_runs(runs)
    check_comparable(opened, unit, warn=warn)
    labels: dict[str, Any] = {"ylabel": f"loss ({UNITS[unit]})"}
    if against == "memory":
        lines = _against_memory(opened, unit, wanted, _Texts(split, corpus, tokens))
        labels |= {"xlabel": "positions of memory at evaluation", "lengths": True, "title": "loss and memory"}
    elif against == "position":
        lines, borders = _against_position(opened, unit, segments, _Texts(split, corpus, tokens))
        labels |= {"xlabel": "position in consecutive segments (tokens); band: 95 % confidence", "borders": borders}
        labels |= {"title": "loss and position in the segment"}
    else:
        check_curves(opened, warn=warn)
        lines = learning_curves(opened, against=against, unit=unit)
        labels |= {"xlabel": XLABELS[against], "title": "loss while training"}
    if len(opened) == 1:
        labels["title"] = f"{opened[0].name}: {labels['title']}"
    draw(lines, out, **labels)
    if json_:
        print(json.dumps({"against": against, "unit": unit, "picture": str(out), "lines": [line.as_dict() for line in lines]}))
    else:
        print(f"picture: {out}")


class _Texts:
    """What is scored, as the options say."""

    def __init__(self, split: Literal["train", "valid", "test"] | None, corpus: str | None, limit: int) -> None:
        self._split: Literal["train", "valid", "test"] | None = split
        self._corpus, self._limit = corpus, limit
        self._read: dict[str, bool] = {}

    def load(self, run: "OpenRun") -> "tuple[LanguageModel, Text]":
        """Return a run's model and what it is scored on."""
        from transformer_xl.checkpoint.run_directory import load
        from transformer_xl.texts import split_text

        model, tokenizer = load(run.path, on_damaged=warn)
        text = split_text(run.config, tokenizer, split=self._split, corpus=self._corpus, limit=self._limit)
        self._read |= {tokenizer.fingerprint: text.is_whole}
        if len(self._read) > 1 and not all(self._read.values()):
            warn(
                f"{self._limit:,} tokens of one vocabulary are not as much text as of another; --tokens larger than the split "
                "compares the same text"
            )
            self._read = {tokenizer.fingerprint: True}
        return model, text


def _against_memory(runs: "Sequence[OpenRun]", unit: "Unit", lengths: list[int] | None, texts: _Texts) -> "list[Line]":
    from transformer_xl.analysis.plots.memory import memory_line, n_scored
    from transformer_xl.console import progress

    lines = []
    for run in runs:
        model, text = texts.load(run)
        with progress(run.name, n_scored(run, lengths) * (len(text.ids) - 1)) as bar:
            lines.append(memory_line(run, model, text, unit=unit, lengths=lengths, on_tokens=bar.advance))
    return lines


def _against_position(runs: "Sequence[OpenRun]", unit: "Unit", segments: int, texts: _Texts) -> "tuple[list[Line], list[int]]":
    from transformer_xl.analysis.plots.positions import position_lines, segment_readings
    from transformer_xl.console import progress

    sizes = [reading.tgt_len for run in runs for _, reading in segment_readings(run)]
    span = segments * max(sizes)
    lines: list[Line] = []
    for run in runs:
        model, text = texts.load(run)
        n_line = len(segment_readings(run))
        with progress(run.name, n_line * (len(text.ids) - 1)) as bar:
            lines += position_lines(run, model, text, span=span, unit=unit, on_tokens=bar.advance)
    return lines, list(range(0, span + 1, max(sizes)))

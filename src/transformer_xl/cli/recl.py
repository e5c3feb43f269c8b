"""`txl recl`."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformer_xl.cli.options import Json, Opening, Repeated, TextChoice, check_least, check_run
from transformer_xl.console import progress, warn
from transformer_xl.errors import ConfigError, room_for
from transformer_xl.pictures import check_picture

if TYPE_CHECKING:
    import numpy as np

    from transformer_xl.analysis.recl.losses import Blocks
    from transformer_xl.analysis.recl.measure import Recl
    from transformer_xl.model.language_model import LanguageModel


def recl(
    *runs: str,
    group: Repeated = None,
    r: str = "0.1,0.5,1",
    delta: int = 50,
    threshold: float = 0.01,
    start: int | None = None,
    max_context: int = 1000,
    tokens: int = 10_000,
    block: int | None = None,
    text: TextChoice = TextChoice(),
    tgt_len: int | None = None,
    mem_len: int | None = None,
    batch_size: int = 32,
    plot: Path | None = None,
    opening: Opening = Opening(),
    json_: Json = False,
) -> None:
    """Measure how far back each run of a group uses its context: the paper's relative effective context length.

    Context grows in steps of --delta tokens as long as a step lowers the
    perplexity of the hardest tokens by --threshold. Losses are kept; Ctrl-C
    prints what is known, and the same command continues from there.

    Common uses:
        txl recl runs/mine runs/lstm --plot recl.png
        txl recl runs/mine runs/lstm --r 0.1 --delta 20 --max-context 400
        txl recl runs/mine --mem-len 1600 --max-context 2000
        txl recl --group runs/mine,runs/lstm --group runs/mine,runs/vanilla --json

    Args:
        runs: directories of the runs of a group; with --file or --corpus, also of exported models.
        group: runs of another group, with commas between; may be repeated.
        r: shares of the tokens to look at, the hardest ones, with commas between.
        delta: tokens by which the context grows at each step.
        threshold: least gain of a step, as a share of the perplexity.
        start: first context. Default: --delta.
        max_context: longest context.
        tokens: how many tokens are scored, at most, spread evenly over the text.
        block: tokens scored together, each after one more than the token before; 1 is exact. Default: a fifth of --delta.
        text: which text is read.
        tgt_len: tokens per segment of models that remember positions. Default: as evaluated.
        mem_len: positions of memory of these models. Default: as evaluated.
        batch_size: blocks read side by side.
        plot: draw the gains into this file, such as recl.png.
        opening: how the runs are opened.
        json_: print one JSON object.
    """
    size = max(1, delta // 5) if block is None else block
    first = delta if start is None else start
    limits = {"tokens": (tokens, 1), "batch-size": (batch_size, 1), "tgt-len": (tgt_len, 1), "mem-len": (mem_len, 0)}
    check_least({"delta": (delta, 1), "block": (size, 1), "start": (first, 1), **limits})
    if size > delta:
        raise ConfigError(f"--block ({size}) must be at most --delta ({delta}), or contexts of two steps overlap")
    if max_context < first + delta:
        raise ConfigError(f"--max-context ({max_context}) must be at least {first + delta}, one step of {delta} after {first}")
    if not 0 < threshold < 1:
        raise ConfigError(f"--threshold ({threshold:g}) must be above 0 and below 1, such as 0.01")
    steps = {"shares": _shares(r), "delta": delta, "start": first, "max_context": max_context, "threshold": threshold}
    check_picture(plot)
    groups = _groups(runs, group or [])
    text.check()
    sources = list(dict.fromkeys(name for names in groups for name in names))
    for source in sources:
        check_run(source)

    from transformer_xl.analysis.comparison import check_same_text
    from transformer_xl.analysis.recl.losses import open_reading, remembers_positions, spread_blocks
    from transformer_xl.analysis.recl.report import as_dict, as_text, draw_recl
    from transformer_xl.checkpoint.run_directory import short_names
    from transformer_xl.process import keep_freed_memory

    short = dict(zip(sources, short_names(sources), strict=True))
    by_source = {source: opening.open(source) for source in sources}
    check_same_text(by_source, corpus=text.corpus, from_file=text.file is not None)
    lengths = [option for option, value in {"tgt-len": tgt_len, "mem-len": mem_len}.items() if value is not None]
    if lengths and not any(map(remembers_positions, by_source.values())):
        kinds = ", ".join(sorted({each.config.model.kind for each in by_source.values()}))
        raise ConfigError(f"--{lengths[0]} is for models that remember positions, and these are {kinds}; leave it out")
    opened = {short[source]: each for source, each in by_source.items()}
    groups = [[short[source] for source in names] for names in groups]
    readings = {name: open_reading(each, tgt_len=tgt_len, mem_len=mem_len) for name, each in opened.items()}
    read = text.text(next(iter(opened.values())))
    keep_freed_memory()
    longest = first + (max_context - first) // delta * delta
    blocks = spread_blocks(len(read.ids), longest=longest, n_token=tokens, size=size)
    what = f"contexts of {longest:,} tokens, {batch_size:,} side by side,"
    with room_for(what, "lower --max-context, --mem-len or --batch-size"):
        known, interrupted = _measure(groups, readings, read.ids, blocks, batch_size=batch_size, **steps)
    title = f"{read.what}, {blocks.n_token:,} tokens"
    if plot:
        draw_recl(plot, known, threshold=threshold, title=f"{title}, steps of {delta:,}")
    if json_:
        facts = {"text": read.what, "tokens": blocks.n_token, "block": size, **steps}
        print(json.dumps(facts | {"groups": [as_dict(found, opened) for found in known], "interrupted": interrupted}))
    else:
        print(
            f"{title}; context grows by {delta:,} while that gains {100 * threshold:g} % of perplexity on the hardest share r\n"
        )
        print(as_text(known, opened, n_group=len(groups), longest=longest, interrupted=interrupted))
    if interrupted:
        raise KeyboardInterrupt


def _measure(
    groups: list[list[str]],
    readings: "Mapping[str, tuple[LanguageModel, int]]",
    ids: "np.ndarray",
    blocks: "Blocks",
    *,
    batch_size: int,
    **steps: Any,
) -> "tuple[list[Recl], bool]":
    """Measure all groups; return what is known at the end or when interrupted, and whether it was."""
    from transformer_xl.analysis.recl.losses import CachedLosses
    from transformer_xl.analysis.recl.measure import measure_groups
    from transformer_xl.data.corpora import cache_dir

    known: list[Recl] = []
    with progress() as bar:
        losses = {
            name: CachedLosses(
                view,
                ids,
                blocks,
                tgt_len=length,
                directory=cache_dir() / "recl",
                name=name,
                batch_size=batch_size,
                warn=warn,
                on_begin=lambda context, name=name: bar.begin(f"{name} after {context:,} tokens", blocks.n_token),
                on_tokens=bar.advance,
            )
            for name, (view, length) in readings.items()
        }
        ends = {name: each.longest for name, each in losses.items() if each.longest is not None}
        try:
            for so_far in measure_groups(groups, losses, longest=ends, **steps):
                known = so_far
        except KeyboardInterrupt:
            if not known:
                raise
            return known, True
    return known, False


def _shares(text: str) -> list[float]:
    """Return the values of r, each once."""
    try:
        shares = [float(part) for part in text.split(",")]
    except ValueError:
        shares = [0.0]
    if not all(0 < share <= 1 for share in shares):
        raise ConfigError(f"--r '{text}' must be shares above 0 and at most 1 with commas between, such as 0.1,0.5,1")
    return list(dict.fromkeys(shares))


def _groups(runs: Sequence[str], further: Sequence[str]) -> list[list[str]]:
    """Return the runs of each group."""
    groups = [[name.strip() for name in names] for names in (runs, *(text.split(",") for text in further)) if names]
    if not groups or not all(all(names) for names in groups):
        raise ConfigError("name at least one run, such as txl recl runs/mine, and in --group runs with commas between")
    for names in groups:
        if twice := {name for name in names if names.count(name) > 1}:
            raise ConfigError(f"run '{min(twice)}' is named twice in a group; name it once")
    return groups

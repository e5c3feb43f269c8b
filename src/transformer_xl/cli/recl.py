"""`txl recl`."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from transformer_xl.cli.options import check_least
from transformer_xl.console import warn
from transformer_xl.errors import room_for
from transformer_xl.pictures import check_picture

if TYPE_CHECKING:
    from transformer_xl.analysis.recl.measure import Recl
    from transformer_xl.config import RunConfig
    from transformer_xl.data.tokenizers import Tokenizer
    from transformer_xl.model.language_model import LanguageModel
    from transformer_xl.texts import Text


def recl(
    *runs: str,
    group: Annotated[list[str] | None, Parameter(negative="", consume_multiple=False)] = None,
    r: str = "0.1,0.5,1",
    delta: int = 50,
    threshold: float = 0.01,
    start: int | None = None,
    max_context: int = 1000,
    tokens: int = 10_000,
    block: int | None = None,
    split: Literal["train", "valid", "test"] | None = None,
    corpus: str | None = None,
    file: Path | None = None,
    tgt_len: int | None = None,
    mem_len: int | None = None,
    batch_size: int = 32,
    plot: Path | None = None,
    device: str = "auto",
    checkpoint: Literal["best", "last", "average"] = "best",
    json_: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> None:
    """Measure how far back each run of a group makes use of a text: the paper's relative effective context length.

    Context grows in steps of --delta tokens as long as a step lowers the
    perplexity of the hardest tokens by --threshold. Losses are kept; Ctrl-C
    prints what is known, and the same command goes on from there.

    Common uses:
        txl recl runs/mine runs/lstm --plot recl.png
        txl recl runs/mine runs/lstm --r 0.1 --delta 20 --max-context 400
        txl recl runs/mine --mem-len 1600 --max-context 2000
        txl recl --group runs/mine,runs/lstm --group runs/mine,runs/vanilla --json

    Args:
        runs: directories of the runs of a group, or with --file or --corpus of exported models.
        group: runs of a further group, with commas between; may be repeated.
        r: shares of tokens that are looked at, the hardest ones, with commas between.
        delta: tokens by which the context grows.
        threshold: least gain of a step, as a share of the perplexity.
        start: first context. Default: --delta.
        max_context: longest context.
        tokens: how many are scored, at most, spread evenly over the text.
        block: tokens scored together, the first after exactly that context, the last after so many more. Default: a fifth of
            --delta; 1 is exact and slowest.
        split: train, valid or test. Default: test, or valid where there is none.
        corpus: another corpus than that of the runs, or a directory that holds their named corpus.
        file: score this text file, plain or compressed, instead of a split.
        tgt_len: tokens per segment of transformer_xl runs. Default: as evaluated.
        mem_len: positions of memory of transformer_xl runs. Default: as evaluated.
        batch_size: blocks read side by side.
        plot: draw the gains into this file, such as recl.png.
        device: auto, cpu, cuda, cuda:N or mps.
        checkpoint: of a run: the one with the best validation loss, the last, or the last average (train.average).
        json_: print one JSON object.
    """
    size = max(1, delta // 5) if block is None else block
    first = delta if start is None else start
    limits = {"tokens": (tokens, 1), "batch-size": (batch_size, 1), "tgt-len": (tgt_len, 1), "mem-len": (mem_len, 0)}
    _check(first, delta, size, max_context, limits)
    shares = _shares(r, threshold)
    check_picture(plot)
    groups = _groups(runs, group or [])
    opened = _open(groups, checkpoint, device)
    _check_same(opened, corpus, file)
    _check_memory(opened, {"tgt-len": tgt_len, "mem-len": mem_len})
    opened, groups = _shortened(opened, groups)
    readings = {name: _reading(each, tgt_len, mem_len) for name, each in opened.items()}
    text = _text(next(iter(opened.values())), split, corpus, file)

    from transformer_xl.allocator import keep_freed_memory
    from transformer_xl.analysis.recl.cached_losses import CachedLosses
    from transformer_xl.analysis.recl.context_losses import spread_blocks
    from transformer_xl.analysis.recl.display import misleading_lengths, recl_table
    from transformer_xl.analysis.recl.measure import measure
    from transformer_xl.analysis.recl.plot import draw_recl
    from transformer_xl.console import progress
    from transformer_xl.data.corpora import cache_dir

    keep_freed_memory()
    longest = first + (max_context - first) // delta * delta
    blocks = spread_blocks(len(text.ids), longest=longest, n_token=tokens, size=size)
    known: list[Recl] = []
    interrupted = False
    what = f"contexts of {longest:,} tokens, {batch_size:,} side by side,"
    with progress() as bar, room_for(what, "lower --max-context, --mem-len or --batch-size"):
        losses = {
            name: CachedLosses(
                view,
                text.ids,
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
        steps = {"shares": shares, "delta": delta, "start": first, "max_context": max_context, "threshold": threshold}
        try:
            for i, names in enumerate(groups):
                for found in measure({name: losses[name] for name in names}, longest=ends, **steps):
                    known[i:] = [found]
        except KeyboardInterrupt:
            if not known:
                raise
            interrupted = True
    what = f"{text.what}, {blocks.n_token:,} tokens"
    if plot:
        draw_recl(plot, known, threshold=threshold, title=f"{what}, steps of {delta:,}")
    if json_:
        facts = {"text": text.what, "tokens": blocks.n_token, "block": size, **steps}
        print(json.dumps(facts | {"groups": [_as_dict(found, opened) for found in known], "interrupted": interrupted}))
    else:
        print(
            f"{what}; context grows by {delta:,} while that gains {100 * threshold:g} % of perplexity on the hardest share r\n"
        )
        parameters = {name: each.n_parameter for name, each in opened.items()}
        titles = [f"group {i + 1}" if len(groups) > 1 else "effective context" for i in range(len(groups))]
        print("\n\n".join(recl_table(found, parameters, title=title) for title, found in zip(titles, known, strict=False)))
        for line in dict.fromkeys(line for found in known for line in misleading_lengths(found)):
            print(f"\n{line}")
        if interrupted:
            print("\ninterrupted, so that lengths with ≥ are not known yet; the same command goes on from here")
        elif any(length.at_least for found in known for own in found.lengths.values() for length in own.values()):
            print(f"\n≥: still gains at {longest:,} tokens; a larger --max-context tells how far it goes")
    if interrupted:
        raise KeyboardInterrupt


@dataclass(frozen=True)
class _Opened:
    """A model, and the run that it is of."""

    source: str
    model: "LanguageModel"
    tokenizer: "Tokenizer"
    config: "RunConfig"
    is_run: bool

    @property
    def n_parameter(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())


def _check(start: int, delta: int, size: int, max_context: int, limits: dict[str, tuple[int | None, int]]) -> None:
    from transformer_xl.errors import ConfigError

    check_least({"delta": (delta, 1), "block": (size, 1), "start": (start, 1), **limits})
    if size > delta:
        raise ConfigError(f"--block ({size}) must be at most --delta ({delta}), or contexts of two steps overlap")
    if max_context < start + delta:
        raise ConfigError(f"--max-context ({max_context}) must be at least {start + delta}, one step of {delta} after {start}")


def _shares(text: str, threshold: float) -> list[float]:
    """Return the values of r, each once."""
    from transformer_xl.errors import ConfigError

    if not 0 < threshold < 1:
        raise ConfigError(f"--threshold ({threshold:g}) must be above 0 and below 1, such as 0.01")
    try:
        shares = [float(part) for part in text.split(",")]
    except ValueError:
        shares = [0.0]
    if not all(0 < share <= 1 for share in shares):
        raise ConfigError(f"--r '{text}' must be shares above 0 and at most 1 with commas between, such as 0.1,0.5,1")
    return list(dict.fromkeys(shares))


def _groups(runs: Sequence[str], further: Sequence[str]) -> list[list[str]]:
    """Return the runs of each group."""
    from transformer_xl.errors import ConfigError

    groups = [[name.strip() for name in names] for names in (runs, *(text.split(",") for text in further)) if names]
    if not groups or not all(all(names) for names in groups):
        raise ConfigError("name at least one run, such as txl recl runs/mine, and in --group runs with commas between")
    for names in groups:
        if twice := {name for name in names if names.count(name) > 1}:
            raise ConfigError(f"run '{min(twice)}' is named twice in a group; name it once")
    return groups


def _open(groups: list[list[str]], checkpoint: Literal["best", "last", "average"], device: str) -> dict[str, _Opened]:
    from transformer_xl.checkpoint.run_directory import RunDirectory, load
    from transformer_xl.config import RunConfig
    from transformer_xl.model.precision import choose_device

    torch_device = choose_device(device)
    opened = {}
    for name in dict.fromkeys(name for names in groups for name in names):
        model, tokenizer = load(name, which=checkpoint, on_damaged=warn)
        is_run = RunDirectory(name).holds_run
        config = RunDirectory(name).config() if is_run else RunConfig(model=model.config)
        opened[name] = _Opened(name, model.to(torch_device), tokenizer, config, is_run)
    return opened


def _shortened(opened: dict[str, _Opened], groups: list[list[str]]) -> tuple[dict[str, _Opened], list[list[str]]]:
    """Return runs and groups by the names that tables and pictures have for them."""
    from transformer_xl.checkpoint.run_directory import short_names

    short = dict(zip(opened, short_names(list(opened)), strict=True))
    return {short[name]: each for name, each in opened.items()}, [[short[name] for name in names] for names in groups]


def _check_same(opened: dict[str, _Opened], corpus: str | None, file: Path | None) -> None:
    """Refuse runs whose losses cannot be compared: of other tokens, or of other texts.

    Raises:
        ConfigError: the first difference.
    """
    from transformer_xl.data.corpora import choose_corpus
    from transformer_xl.errors import ConfigError
    from transformer_xl.texts import text_difference

    (one, first), *others = opened.items()
    for name, each in opened.items():
        if not each.is_run and corpus is None and file is None:
            raise ConfigError(f"'{name}' is a model without a corpus of its own; give --file or --corpus")
    for other, each in others:
        if difference := _vocabularies_differ(first.tokenizer, each.tokenizer):
            raise ConfigError(
                f"vocabularies differ: '{one}' has {difference[0]}, '{other}' {difference[1]}; losses of other tokens "
                "cannot be compared"
            )
        if file is not None or not each.is_run:
            continue
        if found := text_difference(*(choose_corpus(run.config.data, corpus) for run in (first, each))):
            raise ConfigError(
                f"corpora differ: data.{found[0]} of '{one}' is '{found[1]}', of '{other}' '{found[2]}'; "
                + (
                    "say with --corpus or --file which text all shall read"
                    if found[0] == "corpus"
                    else "the test of one may be what the other learned from, so give --file"
                )
            )


def _vocabularies_differ(mine: "Tokenizer", theirs: "Tokenizer") -> tuple[str, str] | None:
    """Return what two tokenizers have that differs, in words."""
    if mine.fingerprint == theirs.fingerprint:
        return None
    sizes = [f"{each.vocab_size:,} tokens ({each.kind})" for each in (mine, theirs)]
    if sizes[0] != sizes[1]:
        return sizes[0], sizes[1]
    for i in range(mine.vocab_size):
        if (own := mine.decode([i])) != (other := theirs.decode([i])):
            return f"{own!r} as token {i}", f"{other!r}"
    return f"{sizes[0]} with other rules", "the same number"


def _check_memory(opened: dict[str, _Opened], options: dict[str, int | None]) -> None:
    """Refuse options that none of the runs has a use for."""
    from transformer_xl.errors import ConfigError

    given = [name for name, value in options.items() if value is not None]
    if given and all(each.config.model.kind != "transformer_xl" for each in opened.values()):
        kinds = ", ".join(sorted({each.config.model.kind for each in opened.values()}))
        raise ConfigError(f"--{given[0]} is of transformer_xl runs, and these are {kinds}; leave it out")


def _reading(opened: _Opened, tgt_len: int | None, mem_len: int | None) -> "tuple[LanguageModel, int]":
    """Return the model as `txl eval` reads it, and tokens per segment; the options are for models that remember positions.

    Without memory a segment is all that is read at once, however few tokens of it are scored at a time.
    """
    from transformer_xl.model_config import TransformerXLConfig
    from transformer_xl.reading.how import Reading

    if not isinstance(opened.model.config, TransformerXLConfig):
        tgt_len = mem_len = None
    own = Reading.of_run(opened.config, mem_len=mem_len)
    segment = own.tgt_len if own.mem_len else own.tgt_len + own.ext_len
    return replace(own, ext_len=0).view(opened.model), tgt_len or segment


def _text(first: _Opened, split: Literal["train", "valid", "test"] | None, corpus: str | None, file: Path | None) -> "Text":
    from transformer_xl.errors import ConfigError
    from transformer_xl.texts import file_text, split_text

    if file is None:
        return split_text(first.config, first.tokenizer, split=split, corpus=corpus)
    if split is not None or corpus is not None:
        raise ConfigError("--file scores a whole file; leave --split and --corpus out")
    return file_text(file, first.tokenizer)


def _as_dict(found: "Recl", opened: dict[str, _Opened]) -> dict[str, Any]:
    """Return a group for JSON."""
    return {
        "models": [
            {
                "run": opened[name].source,
                "kind": opened[name].model.config.kind,
                "parameters": opened[name].n_parameter,
                "recl": {f"{r:g}": {"tokens": each.context, "at_least": each.at_least} for r, each in lengths.items()},
                "gains": {
                    f"{r:g}": {str(c): gain for c, gain in sorted(gains.items())} for r, gains in found.gains[name].items()
                },
                "losses": {str(c): loss for c, loss in sorted(found.losses[name].items())},
            }
            for name, lengths in found.lengths.items()
        ]
    }

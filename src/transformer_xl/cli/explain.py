"""`txl explain`."""

import json
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from cyclopts.validators import Number

from transformer_xl.cli.options import FloatPrecision, Json, Natural, Opening, Positive
from transformer_xl.console import progress, say, warn
from transformer_xl.errors import ConfigError

_Top = Annotated[int, Parameter(validator=Number(gte=1, lte=100))]
"""Likely tokens that a page shows of each token: it stores them all."""


def explain(
    run: Path,
    file: Path,
    /,
    *,
    out: Path | None = None,
    top: _Top = 5,
    tgt_len: Positive | None = None,
    mem_len: Natural | None = None,
    most: Positive = 2_000_000,
    token: Positive | None = None,
    contrast: str | None = None,
    attributed: Natural | None = None,
    precision: FloatPrecision = "auto",
    opening: Opening = Opening(),
    json_: Json = False,
) -> None:
    """Show what memory did for each token of a text, on a web page: probabilities, what raised them, where heads looked.

    The page needs no network. Pictures and totals are beside it.

    Common uses:
        txl explain runs/mine letter.txt
        txl explain runs/mine book.txt.xz --out book --mem-len 512
        txl explain runs/mine letter.txt --top 10 --json
        txl explain runs/mine letter.txt --token 1204 --contrast e --json

    Args:
        run: directory of a run or of an exported model.
        file: text file, plain or compressed.
        out: directory for the page; an earlier explanation there is replaced. Default: FILE.explained here.
        top: how many of the likeliest tokens are shown for each token; 100 at most.
        tgt_len: tokens per segment. Default: as txl eval reads.
        mem_len: positions of memory. Default: as txl eval reads.
        most: tokens read from the beginning of the file, at most.
        token: number of a token, as the page counts, to say what raised or lowered its prediction; with --json all nats.
        contrast: text of one token; with --token and --json, why the token and not this one.
        attributed: segments whose tokens get lists of what raised or lowered them; default: about half a minute of them.
        precision: of the matrix products; auto: whichever the processor computes fast.
        opening: how the run is opened.
        json_: print totals as one JSON object.
    """
    from transformer_xl.explain.causes import affordable
    from transformer_xl.explain.explanation import explain as explain_text
    from transformer_xl.explain.explanation import remembers
    from transformer_xl.explain.page import check_output, write_explanation
    from transformer_xl.kernels.device import choose_precision
    from transformer_xl.process import keep_freed_memory

    if contrast is not None and not (token and json_):
        raise ConfigError("--contrast needs --token and --json, which gives what raised or lowered the one and not the other")
    out = Path(f"{file.name}.explained") if out is None else out
    check_output(out)
    opened = opening.open(run)
    text = opened.text(file=file)
    chosen, _ = choose_precision(precision, opened.device)
    reading = opened.reading(tgt_len=tgt_len, mem_len=mem_len)
    if len(text.ids) > most:
        warn(f"only the first {most:,} of {len(text.ids):,} tokens are explained; --most says how many")
    other = [None] if contrast is None else opened.tokenizer.encode(contrast).tolist()
    if len(other) != 1:
        raise ConfigError(f"--contrast {contrast!r} is {len(other)} tokens of this vocabulary; give the text of one")
    unknown = opened.tokenizer.unknown_id
    if contrast and unknown is not None and other == [unknown] and contrast.encode() != opened.tokenizer.piece(unknown):
        raise ConfigError(f"--contrast {contrast!r} is not in the vocabulary")
    if token and other == text.ids[token - 1 : token].tolist():
        raise ConfigError(f"--contrast {contrast!r} is token {token} itself; name another one")
    n, attributed = min(len(text.ids), most) - 1, affordable(opened.model, reading) if attributed is None else attributed
    keep_freed_memory()
    with progress("reading", n * (2 if remembers(opened.model, reading) else 1)) as bar:
        named = {"name": file.name, "run": run.resolve().name, "n_characters": text.n_characters}
        how = {"top": top, "most": most, "precision": chosen, "attributed": attributed, "token": token}
        calls = {"on_tokens": bar.advance, "on_attributing": lambda n: bar.begin("attributing", n)}
        explanation = explain_text(opened.model, opened.tokenizer, text.ids, reading, **named, **how, **calls)
    path = write_explanation(explanation, out)
    figures, unit = explanation.totals, opened.tokenizer.counts
    if json_:
        figures |= dict.fromkeys(name for name in figures if unit == "word" and ("bpc" in name or name == "n_characters"))
        view = reading.view(opened.model)
        figures |= {"attribution": _attribution(view, explanation.ids, token, other[0], reading.tgt_len)} if token else {}
        print(json.dumps({"run": str(run), "file": str(file), "page": str(path), "precision": chosen, **figures}))
        return
    print(f"{figures['tokens']:,} tokens of {file}: {figures['loss']:.4f} nats per token, {figures['bpc']:.4f} bits per {unit}")
    if "memory_is_worth_bpc" in figures:
        worth = figures["memory_is_worth_bpc"]
        print(f"without memory {figures['bpc_without_memory']:.4f}: memory is worth {worth:z.4f} bits per {unit}")
    else:
        print("this model is read without memory, so there is nothing to compare with")
    if opened.tokenizer.loses:
        say(f"not shown: {opened.tokenizer.loses}")
    print(f"open {path}" + (f"#t{token}" if token else ""))


def _attribution(model: Any, ids: Any, token: int, contrast: int | None, tgt_len: int) -> dict[str, Any]:
    """Return all that raised or lowered the prediction of a token; tokens are numbered from 1."""
    from transformer_xl.explain.attribution import attribute

    row: dict[str, Any] = {"token": token, "contrast": contrast}
    for method in ("gradient", "leave-out") if model.attention_blocks() else ("gradient",):
        found = attribute(model, ids, token - 1, contrast=contrast, method=method, tgt_len=tgt_len)
        row |= {"log_p": found.log_p, "without": found.without, "tokens": (found.places + 1).tolist()}
        row[method] = found.nats.tolist()
    return row

"""`txl explain`."""

import json
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from transformer_xl.cli.options import FloatPrecision, Json, Natural, Opening, Positive
from transformer_xl.console import progress, say, warn

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
    precision: FloatPrecision = "auto",
    opening: Opening = Opening(),
    json_: Json = False,
) -> None:
    """Show what memory did for each token of a text, on a web page: probabilities, and where each head looked.

    The page needs no network. Pictures and totals are beside it.

    Common uses:
        txl explain runs/mine letter.txt
        txl explain runs/mine book.txt.xz --out book --mem-len 512
        txl explain runs/mine letter.txt --top 10 --json

    Args:
        run: directory of a run or of an exported model.
        file: text file, plain or compressed.
        out: directory for the page; an earlier explanation there is replaced. Default: FILE.explained here.
        top: how many of the likeliest tokens are shown for each token; 100 at most.
        tgt_len: tokens per segment. Default: as txl eval reads.
        mem_len: positions of memory. Default: as txl eval reads.
        most: tokens read from the beginning of the file, at most.
        precision: of the matrix products; auto: whichever the processor computes fast.
        opening: how the run is opened.
        json_: print totals as one JSON object.
    """
    from transformer_xl.explain.explanation import explain as explain_text
    from transformer_xl.explain.explanation import remembers
    from transformer_xl.explain.page import check_output, write_explanation
    from transformer_xl.kernels.device import choose_precision
    from transformer_xl.process import keep_freed_memory

    out = Path(f"{file.name}.explained") if out is None else out
    check_output(out)
    opened = opening.open(run)
    text = opened.text(file=file)
    chosen, _ = choose_precision(precision, opened.device)
    reading = opened.reading(tgt_len=tgt_len, mem_len=mem_len)
    if len(text.ids) > most:
        warn(f"only the first {most:,} of {len(text.ids):,} tokens are explained; --most says how many")
    n_read = (min(len(text.ids), most) - 1) * (2 if remembers(opened.model, reading) else 1)
    keep_freed_memory()
    with progress("reading", n_read) as bar:
        named = {"name": file.name, "run": run.resolve().name, "n_characters": text.n_characters}
        how = {"top": top, "most": most, "precision": chosen, "on_tokens": bar.advance}
        explanation = explain_text(opened.model, opened.tokenizer, text.ids, reading, **named, **how)
    path = write_explanation(explanation, out)
    figures = explanation.totals
    if json_:
        print(json.dumps({"run": str(run), "file": str(file), "page": str(path), "precision": chosen, **figures}))
        return
    unit = opened.tokenizer.counts
    print(f"{figures['tokens']:,} tokens of {file}: {figures['loss']:.4f} nats per token, {figures['bpc']:.4f} bits per {unit}")
    if "memory_is_worth_bpc" in figures:
        worth = figures["memory_is_worth_bpc"]
        print(f"without memory {figures['bpc_without_memory']:.4f}: memory is worth {worth:z.4f} bits per {unit}")
    else:
        print("this model is read without memory, so there is nothing to compare with")
    if opened.tokenizer.loses:
        say(f"not shown: {opened.tokenizer.loses}")
    print(f"open {path}")

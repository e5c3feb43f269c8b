"""`txl explain`."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from transformer_xl.cli.options import check_least
from transformer_xl.console import warn
from transformer_xl.errors import room_for

if TYPE_CHECKING:
    from transformer_xl.data.tokenizers import Tokenizer
    from transformer_xl.texts import Text

_MOST_TOP = 100
"""Likely tokens that a page can be asked for: it stores them for every token, and shows them as a list."""


def explain(
    run: Path,
    file: Path,
    /,
    *,
    out: Path | None = None,
    top: int = 5,
    tgt_len: int | None = None,
    mem_len: int | None = None,
    most: int = 2_000_000,
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto",
    device: str = "auto",
    checkpoint: Literal["best", "last", "average"] = "best",
    json_: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> None:
    """Show what memory does to a text: a page for a browser with every token's probabilities and where each head looked.

    The page needs no network. Pictures and totals lie beside it.

    Common uses:
        txl explain runs/mine letter.txt
        txl explain runs/mine book.txt.xz --out book --mem-len 512
        txl explain runs/mine letter.txt --top 10 --json

    Args:
        run: directory of a run or of an exported model.
        file: text file, plain or compressed.
        out: directory for the page; an earlier explanation there is replaced. Default: FILE.explained here.
        top: tokens shown that the model found most likely, for each token; 100 at most.
        tgt_len: tokens per segment. Default: as txl eval reads.
        mem_len: positions of memory. Default: as txl eval reads.
        most: tokens read from the beginning of the file, at most.
        precision: of the matrix products; auto takes what the processor does fast.
        device: auto, cpu, cuda, cuda:N or mps.
        checkpoint: the one with the best validation loss, the last, or the last average (train.average).
        json_: print totals as one JSON object.
    """
    from transformer_xl.allocator import keep_freed_memory
    from transformer_xl.analysis.explain.explanation import explain as explain_text
    from transformer_xl.analysis.explain.facts import remembers
    from transformer_xl.analysis.explain.output import check_output, write_explanation
    from transformer_xl.checkpoint.run_directory import RunDirectory, load
    from transformer_xl.config import RunConfig
    from transformer_xl.console import progress
    from transformer_xl.errors import ConfigError
    from transformer_xl.model.precision import choose_device, choose_precision
    from transformer_xl.reading.how import Reading

    check_least({"top": (top, 1), "tgt-len": (tgt_len, 1), "mem-len": (mem_len, 0), "most": (most, 2)})
    if top > _MOST_TOP:
        raise ConfigError(f"--top ({top}) must be at most {_MOST_TOP}: so many likely tokens are stored for every token")
    out = Path(f"{file.name}.explained") if out is None else out
    check_output(out)
    model, tokenizer = load(run, which=checkpoint, on_damaged=warn)
    config = RunDirectory(run).config() if RunDirectory(run).holds_run else RunConfig(model=model.config)
    text = _read(file, tokenizer)
    torch_device = choose_device(device)
    chosen, _ = choose_precision(precision, torch_device)
    reading = Reading.of_run(config, tgt_len=tgt_len, mem_len=mem_len)
    model = model.to(torch_device)
    if len(text.ids) > most:
        warn(f"only the first {most:,} of {len(text.ids):,} tokens are explained; --most says how many")
    n_read = (min(len(text.ids), most) - 1) * (2 if remembers(model, reading) else 1)
    what = f"segments of {reading.tgt_len:,} tokens and a memory of {reading.mem_len:,}"
    remedy = "lower --mem-len, --tgt-len, --top or --most"
    keep_freed_memory()
    with progress("reading", n_read, hidden=json_) as bar, room_for(what, remedy):
        explanation = explain_text(
            model,
            tokenizer,
            text.ids,
            reading,
            name=file.name,
            run=run.resolve().name,
            top=top,
            most=most,
            n_characters=text.n_characters,
            precision=chosen,
            on_tokens=bar.advance,
        )
    path = write_explanation(explanation, out)
    figures = explanation.totals.as_dict()
    if json_:
        print(json.dumps({"run": str(run), "file": str(file), "page": str(path), "precision": chosen, **figures}))
        return
    print(
        f"{figures['tokens']:,} tokens of {file}: {figures['loss']:.4f} nats per token, {figures['bpc']:.4f} bits per character"
    )
    if explanation.totals.nats_without is not None:
        worth = figures["memory_is_worth_bpc"]
        print(f"without memory {figures['bpc_without_memory']:.4f}: memory is worth {worth:.4f} bits per character")
    else:
        print("this model is read without memory, so there is nothing to compare with")
    if tokenizer.loses:
        print(f"not shown: {tokenizer.loses}", file=sys.stderr)
    print(f"open {path}")


def _read(file: Path, tokenizer: "Tokenizer") -> "Text":
    """Return a file of text.

    Raises:
        CorpusError: it cannot be read, is no text, or has fewer than two tokens.
    """
    from transformer_xl.errors import CorpusError
    from transformer_xl.texts import file_text

    def check(data: bytes) -> None:
        if not data:
            raise CorpusError(f"'{file}' is empty; give a text of at least 2 tokens")
        if b"\0" in data or data.decode("utf-8", "replace").count("\ufffd") > len(data) // 10:
            raise CorpusError(f"'{file}' is not text but binary; explain shows text")

    return file_text(file, tokenizer, check=check)

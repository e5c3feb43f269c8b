"""`txl corpus list|get|prepare`."""

import json
from pathlib import Path
from typing import Literal

from cyclopts import App

from transformer_xl.cli.options import Json, Positive
from transformer_xl.console import fitted, table, warn

app = App(name="corpus", help="Find, download and encode texts.", help_format="plaintext")


@app.command(name="list")
def list_(*, json_: Json = False) -> None:
    """List the named corpora: what they are, their terms, and whether they are on this machine.

    Common uses:
        txl corpus list
        txl corpus list --json

    Args:
        json_: print one JSON object per corpus.
    """
    from transformer_xl.data.corpora import describe_corpora

    entries = list(describe_corpora())
    if json_:
        print("\n".join(map(json.dumps, entries)))
        return
    rows = [row for each in entries for row in ([each["name"], each["description"]], ["", f"{each['where']}; {each['terms']}"])]
    print(table(rows, n_left=2))
    print(fitted("\nGet one with txl corpus get NAME, or say where it is with --corpus DIR or TXL_DATA."))


@app.command
def get(name: str, /) -> None:
    """Download a named corpus and check its size and SHA-256; an interrupted download is resumed.

    Common uses:
        txl corpus get enwik8
        TXL_DATA=/big/disk txl corpus get wikitext-103

    Args:
        name: a name that txl corpus list shows. It goes to $TXL_DATA, or to the cache directory.
    """
    from transformer_xl.data.corpora import fetch

    print(fetch(name))


@app.command(usage="Usage: txl corpus prepare [OPTIONS] [CORPUS]")
def prepare(
    corpus: str = "python-stdlib",
    /,
    *,
    tokenizer: Literal["byte", "char", "word", "bpe", "unigram", "ids"] | None = None,
    vocab_size: Positive | None = None,
    documents: Literal["files", "lines"] = "files",
    search: Path | None = None,
    workers: Positive | None = None,
    json_: Json = False,
) -> None:
    """Encode a corpus as training would, so that later runs start at once.

    An interrupted command starts over, but keeps the vocabulary that it learned.

    Common uses:
        txl corpus prepare my.txt
        txl corpus prepare ptb --search /data --tokenizer word
        txl corpus prepare "books/*.txt.xz" --tokenizer bpe --vocab-size 16384
        txl corpus prepare ids.npy

    Args:
        corpus: name, file, directory or glob.
        tokenizer: unit of text. Default: byte, or ids of files of ids (.npy, .npz, .jsonl).
        vocab_size: bpe, unigram: vocabulary size; word: largest size; ids: found if not given.
        documents: what a document is, as data.documents says.
        search: directory to search for a named corpus.
        workers: processes that encode. Default: one per core.
        json_: print one JSON object.
    """
    from transformer_xl.config.run import DataConfig, RunConfig, TokenizerConfig
    from transformer_xl.data.corpora import absolute_corpus, switch_to_ids
    from transformer_xl.data.prepare import prepare as encode
    from transformer_xl.data.text import undivided

    # the corpus has the name that training gives it, so that training finds what is prepared here
    data = DataConfig(corpus=absolute_corpus(corpus), documents=documents, directory=str(search) if search else None)
    asked = TokenizerConfig(kind=tokenizer or "byte", vocab_size=vocab_size)
    given = {"kind": tokenizer, "vocab_size": vocab_size}
    overrides = [f"tokenizer.{name}={value}" for name, value in given.items() if value is not None]
    settings = switch_to_ids(RunConfig(data=data, tokenizer=asked), overrides).tokenizer
    prepared = encode(data, settings, n_workers=workers)
    counts = {}
    for name, split in prepared.splits.items():
        sizes = {"tokens": len(split.ids), "characters": split.n_characters, "bytes": split.n_bytes}
        counts[name] = {**sizes, "documents": len(split.document_starts)}
    vocab_size = prepared.tokenizer.vocab_size
    if json_:
        print(json.dumps({"directory": str(prepared.directory), "vocab_size": vocab_size, "splits": counts}))
        return
    print(f"'{corpus}' is prepared in {prepared.directory}, with a vocabulary of {vocab_size:,} ({settings.kind})")
    if prepared.tokenizer.loses:
        print(f"not kept of a text: {prepared.tokenizer.loses}")
    if warning := undivided(prepared.tokenizer):
        warn(warning)
    for name, count in counts.items():
        if settings.kind == "ids":
            del count["characters"], count["bytes"]
        print(f"  {name:6}" + "  ".join(f"{value:>13,} {unit}" for unit, value in count.items()))

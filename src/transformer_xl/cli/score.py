"""`txl score`."""

import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Literal

from cyclopts import Parameter

from transformer_xl.cli.arriving import Arriving, open_pipe
from transformer_xl.cli.options import Flag, Json, Natural, Opening, Positive, Precision
from transformer_xl.cli.predict import JSON_LINES, check_out
from transformer_xl.cli.printers import show
from transformer_xl.cli.prompts import STDIN
from transformer_xl.console import Bar, progress, say, table
from transformer_xl.errors import ConfigError, CorpusError
from transformer_xl.process import is_alone

if TYPE_CHECKING:
    from transformer_xl.checkpoint.open_run import Opened
    from transformer_xl.reading.reading import Reading
    from transformer_xl.reading.rows import Borders, ScoredLine

_NAMED = ("blimp", "lambada")
_ESCAPED = str.maketrans({"\\": r"\\", "\t": r"\t", "\n": r"\n", "\r": r"\r"})

Per = Literal["line", "word", "char", "token"]
Rows = Iterator[dict[str, Any]]


def score(
    run: Path,
    file: Annotated[Path, Parameter(allow_leading_hyphen=True)],
    /,
    *,
    per: Per | None = None,
    spans: Path | None = None,
    memory: Literal["carried", "reset"] | None = None,
    pairs: Flag = False,
    data: Path | None = None,
    out: Path | None = None,
    resume: Flag = False,
    tgt_len: Positive | None = None,
    mem_len: Natural | None = None,
    batch_size: Positive = 64,
    precision: Precision = "auto",
    opening: Opening = Opening(),
    quiet: Flag = False,
    json_: Json = False,
) -> None:
    """Score each line, word or character of a text by how surprising it is, or say which of two sentences is more probable.

    Each has a row, separated by tabs: number, nats, bits, tokens and text. With
    carried memory the sums are those of txl eval --file, which does not predict the
    first token. With reset memory or --pairs, each text is scored alone, after a
    line end. Nats of a word are those of the whole word and its end; nats_prefix,
    the sum of its tokens, are those of all words that begin so.

    Common uses:
        txl score runs/mine essay.txt
        txl score runs/mine essay.txt --per word
        txl score runs/mine chinese.txt --per char
        txl score runs/mine chinese.txt --spans words.tsv
        txl score runs/mine sentences.txt --memory reset --json
        tail -f log.txt | txl score runs/mine - --memory reset
        txl score runs/mine <(zcat essay.Z)
        txl score runs/mine book.txt.xz --per token --out book.tsv
        txl score runs/mine pairs.tsv --pairs
        txl score runs/mine blimp --data blimp/data
        txl score runs/mine lambada

    Args:
        run: directory of a run or of an exported model, or a hub id.
        file: a text, a pipe, - (standard input), two sentences a line (with --pairs; the better one first), blimp or lambada.
        per: what has a row: line, word, char or token. Default: line.
        spans: score parts of the text instead: a file of lines with start and end, in characters from 0; starts ascend.
        memory: carried through the text, or reset before each line. Default: carried.
        pairs: say how often the better sentence is more probable; ties count half.
        data: directory of the files of blimp or lambada. Default: $TXL_DATA/blimp, $TXL_DATA/lambada.
        out: write rows to this file; --pairs, blimp and lambada write rows only with it.
        resume: continue an unfinished file; the rows in it are kept.
        tgt_len: tokens per segment. Default: as txl eval reads.
        mem_len: positions of memory. Default: as txl eval reads.
        batch_size: lines or sentences read side by side, if memory is not carried.
        precision: of the matrix products; auto: whichever the processor computes fast; int8 rounds the weights.
        opening: how the run is opened.
        quiet: show no progress, only warnings and errors.
        json_: write JSON lines, and figures as one object.
    """
    named = str(file) if str(file) in _NAMED and not file.is_file() else None
    compares = named or ("--pairs" if pairs else None)
    if pairs and named:
        raise ConfigError(f"--pairs reads a file of your own; leave it out with {named}, or give ./{named}")
    if data is not None and not named:
        raise ConfigError(f"--data is for {' and '.join(_NAMED)}; give one of these names instead of '{file}'")
    options = {"per": per, "spans": spans, "memory": memory}
    if compares and (used := [name for name, value in options.items() if value]):
        raise ConfigError(f"--{used[0]} is for the lines of a text; leave it out with {compares}")
    if spans and per:
        raise ConfigError("--spans says itself what has a row; leave out --per")
    check_out(out, resume=resume)
    if not is_alone():
        raise ConfigError("txl score works in one process; start it without torchrun")
    from transformer_xl.data.corpora import benchmark_files
    from transformer_xl.kernels.device import precision_of_segments

    opened = opening.open(run)
    chosen = precision_of_segments(precision, opened.device)
    reading = opened.reading(tgt_len=tgt_len, mem_len=mem_len, batch_size=batch_size, precision=chosen)
    files = benchmark_files(named, data) if named else [file]
    job = _Job(opened, reading, per or "line", spans, memory or "carried", compares, files)
    begin, tally = time.perf_counter(), _Tally()
    _write(job, tally, out, resume=resume, as_json=json_, quiet=quiet)
    if not tally.n:
        raise CorpusError(f"'{spans}' has no spans; give another" if spans else f"'{file}' has no text; give another")
    how = f"{chosen}, {time.perf_counter() - begin:.1f} s"
    if not compares:
        mean = f" ({tally.nats / tally.tokens:.4f} per token)" if tally.tokens else ""
        to = f"; written to '{out}'" if out else ""
        n = f"{tally.n:,} spans" if spans else f"{tally.line:,} lines"
        say(f"{n}, {tally.tokens:,} tokens: {tally.nats:,.1f} nats{mean}, {how}{to}", quiet=quiet)
        return
    figures = tally.figures(is_lambada=named == "lambada")
    n_file, accuracy = len(figures["files"]), f"accuracy {figures['accuracy']:.4f}"
    if json_:
        print(json.dumps({"run": str(run), "text": str(file), "precision": chosen, **figures}))
    elif named == "lambada":
        print(f"{accuracy}, perplexity {figures['ppl']:,.1f} (the last word of {tally.n:,} texts, {how})")
    else:
        if n_file > 1:
            print(table([["file", "accuracy"], *([name, f"{value:.4f}"] for name, value in figures["files"].items())]))
        mean = f"mean of {n_file} files, " if n_file > 1 else ""
        print(f"{accuracy} ({mean}{tally.n:,} pairs, {figures['ties']:,} ties counted half, {how})")


@dataclass(frozen=True)
class _Job:
    """What is scored, and how."""

    opened: "Opened"
    reading: "Reading"
    per: Per
    spans: Path | None
    memory: str
    compares: str | None  # pairs, or a benchmark; None: the lines of a text
    files: Sequence[Path]

    def rows(self, bar: Bar, skip: int) -> Rows:
        """Yield all rows; the first `skip` need not have nats."""
        if self.compares:
            return self._compared(bar)
        from transformer_xl.reading.rows import Borders, read_spans, rows, span_rows, word_rows

        tokenizer = self.opened.tokenizer
        if self.spans or self.per in ("word", "char"):
            tokenizer.encode_with_offsets("")  # says so if it loses places
        if self.spans:
            return span_rows(self._scored(bar), read_spans(self.spans))
        if self.per == "word":
            borders = Borders(tokenizer)
            return word_rows(self._scored(bar, borders=borders), borders)
        return rows(self._scored(bar, skip if self.per == "line" else 0), self.per, tokenizer)

    def _scored(self, bar: Bar, skip: int = 0, borders: "Borders | None" = None) -> "Iterator[ScoredLine]":
        from transformer_xl.data.text import warn_of_bytes
        from transformer_xl.data.text_files import FileRange, read_blocks
        from transformer_xl.reading.surprisal import alone, carried

        (file,) = self.files
        model, tokenizer = self.opened.model, self.opened.tokenizer
        piped = _arriving(file) if _is_piped(file) else None
        blocks, path = piped or read_blocks(FileRange(file)), Path("standard input") if file == STDIN else file
        if not piped and tokenizer.reads_bytes:
            warn_of_bytes(file)
        if self.memory == "reset":
            how = {"skip": skip, "is_ready": piped and piped.is_ready, "borders": borders}
            lines = alone(blocks, path, model, tokenizer, self.reading, **how)
        else:
            lines = carried(blocks, path, model, tokenizer, self.reading, borders=borders)
        for scored in lines:
            yield scored
            bar.advance(len(scored.line.text.encode("utf-8", "surrogateescape")))

    def _compared(self, bar: Bar) -> Rows:
        from transformer_xl.data.examples import read_last_words, read_pairs
        from transformer_xl.reading.surprisal import last_word_rows, pair_rows

        how = (self.opened.model, self.opened.tokenizer, self.reading)
        for file in self.files:
            if self.compares == "lambada":
                rows = last_word_rows(read_last_words(file), *how)
            else:
                source = _arriving(file) if _is_piped(file) else file
                rows = pair_rows(read_pairs(source), *how)
            for row in rows:
                yield {"file": file.name.partition(".")[0] if file != STDIN else "-", **row}
                bar.advance()


def _is_piped(file: Path) -> bool:
    return file == STDIN or file.is_fifo()


def _arriving(file: Path) -> Arriving:
    """Return the lines of standard input or of a named pipe."""
    if file != STDIN:
        return Arriving(open_pipe(file))
    if sys.stdin is None:
        raise CorpusError("standard input is closed; give a file")
    return Arriving(sys.stdin.fileno())


@dataclass
class _Tally:
    """What rows say together."""

    n: int = 0
    line: int = 0
    tokens: int = 0
    nats: float = 0.0
    credits: dict[str, list[float]] = field(default_factory=dict)

    def add(self, row: dict[str, Any]) -> None:
        self.n, self.line = self.n + 1, row.get("line", 0)
        self.tokens += row.get("tokens", 0)
        self.nats += row.get("nats_prefix", row.get("nats")) or 0.0  # of the tokens
        if "credit" in row:
            self.credits.setdefault(row["file"], []).append(row["credit"])

    def figures(self, *, is_lambada: bool) -> dict[str, Any]:
        """Return accuracy, of several files the mean of theirs, and for LAMBADA the perplexity of words."""
        of_file = {name: sum(each) / len(each) for name, each in self.credits.items()}
        if is_lambada:
            own = {"ppl": math.exp(min(self.nats / self.n, 700)), "nats": self.nats}
        else:
            own = {"ties": sum(each.count(0.5) for each in self.credits.values())}
        return {"accuracy": sum(of_file.values()) / len(of_file), "n": self.n, **own, "files": of_file}


def _write(job: _Job, tally: _Tally, out: Path | None, *, resume: bool, as_json: bool, quiet: bool) -> None:
    """Write rows to a file, or those of a text to standard output, each as soon as it is known, and count all."""
    from transformer_xl.data.text_files import COMPRESSED, content_sha256
    from transformer_xl.tasks.lines import origin_of, prediction_file

    file, is_json = job.files[0], as_json or (out is not None and out.suffix in JSON_LINES)
    put, n_line, shows = show, 0, out is not None or not job.compares
    with ExitStack() as stack:
        if out is not None:
            texts = None if _is_piped(file) or len(job.files) > 1 else file
            how = {"json": is_json, "precision": job.reading.precision, "batch_size": job.reading.batch_size}
            origin = origin_of(job.opened.source, job.opened.model, texts, **how)
            what = f"--spans of {content_sha256(job.spans)}" if job.spans else f"--per {job.per}"
            computed = f"{origin['computed']} {what} --memory {job.memory} ({job.reading}, {job.compares})"
            lines, n_line = stack.enter_context(prediction_file(out, {**origin, "computed": computed}, resume=resume))
            put = partial(_append, lines)
        n_kept = n_line if is_json else max(n_line - 1, 0)
        size = None if job.compares or _is_piped(file) or file.suffix in COMPRESSED else file.stat().st_size
        unit = "texts" if job.compares else "bytes"
        bar = stack.enter_context(progress("scoring", size, unit=unit, hidden=quiet or (shows and out is None)))
        try:
            for i, row in enumerate(job.rows(bar, n_kept)):
                tally.add(row)
                if shows and not (is_json or n_line or i):
                    put("\t".join(row) + "\n")
                if shows and i >= n_kept:
                    put((json.dumps(row) if is_json else "\t".join(map(_cell, row.values()))) + "\n")
        except KeyboardInterrupt:
            if out is not None:
                say("\ninterrupted; go on with the same command and --resume", quiet=quiet)
            raise


def _append(file: BinaryIO, line: str) -> None:
    file.write(line.encode("utf-8", "replace"))


def _cell(value: object) -> str:
    r"""Return a value of a TSV; a backslash, tab or line end in a text is written as \\, \t, \n or \r."""
    if isinstance(value, float):
        return f"{value:.9g}"
    return "" if value is None else str(value).translate(_ESCAPED)

"""`txl score`."""

import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from transformer_xl.cli.lines import STDIN, LineOutput, arriving, check_alone
from transformer_xl.cli.options import Flag, Natural, Opening, Positive, Precision
from transformer_xl.console import Bar, progress, say, table
from transformer_xl.errors import ConfigError, CorpusError

if TYPE_CHECKING:
    from transformer_xl.checkpoint.open_run import Opened
    from transformer_xl.reading.reading import Reading
    from transformer_xl.reading.rows import ScoredLine

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
    tgt_len: Positive | None = None,
    mem_len: Natural | None = None,
    batch_size: Positive = 64,
    precision: Precision = "auto",
    output: LineOutput = LineOutput(),
    opening: Opening = Opening(),
) -> None:
    """Score each line, word or character of a text by how surprising it is, or say which of two sentences is more probable.

    Each has a row, separated by tabs: number, nats, bits, tokens and text. With
    carried memory the sums are those of txl eval --file, which does not predict the
    first token. With reset memory or --pairs, each text is scored alone, after a
    line end. Nats of a word are those of the whole word and its end; nats_prefix,
    the sum of its tokens, are those of all words that begin so. --pairs, blimp and
    lambada write rows only to a file (--out).

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
        tgt_len: tokens per segment. Default: as txl eval reads.
        mem_len: positions of memory. Default: as txl eval reads.
        batch_size: lines or sentences read side by side, if memory is not carried.
        precision: of the matrix products; auto: whichever the processor computes fast; int8 rounds the weights.
        output: where rows go.
        opening: how the run is opened.
    """
    named = str(file) if str(file) in _NAMED and not (pairs or file.is_file()) else None
    if data is not None and not named:
        raise ConfigError(f"--data is for {' and '.join(_NAMED)}; give one of these names instead of '{file}'")
    options = {"per": per, "spans": spans, "memory": memory}
    if (named or pairs) and (used := [name for name, value in options.items() if value]):
        raise ConfigError(f"--{used[0]} is for the lines of a text; leave it out with {named or '--pairs'}")
    if spans and per:
        raise ConfigError("--spans says itself what has a row; leave out --per")
    check_alone("txl score")
    from transformer_xl.data.corpora import benchmark_files
    from transformer_xl.kernels.device import precision_of_segments

    opened = opening.open(run)
    chosen = precision_of_segments(precision, opened.device)
    reading = opened.reading(tgt_len=tgt_len, mem_len=mem_len, batch_size=batch_size, precision=chosen)
    begin, tally = time.perf_counter(), _Tally(f"'{spans or file}' has no {'spans' if spans else 'text'}; give another")
    if named or pairs:
        files = benchmark_files(named, data) if named else [file]
        _score_pairs(opened, reading, named, files, tally, output)
        figures = tally.figures(named)
        if output.json_:
            print(json.dumps({"run": str(run), "text": str(file), "precision": chosen, **figures}))
        else:
            _print_accuracy(figures, f"{chosen}, {time.perf_counter() - begin:.1f} s")
        return
    _score_parts(opened, reading, file, spans or per or "line", memory or "carried", tally, output)
    mean = f" ({tally.nats / tally.tokens:.4f} per token)" if tally.tokens else ""
    what = f"{tally.n:,} spans" if spans else f"{tally.line:,} lines"
    sums = f"{tally.tokens:,} tokens: {tally.nats:,.1f} nats{mean}"
    say(f"{what}, {sums}, {chosen}, {time.perf_counter() - begin:.1f} s", quiet=output.quiet)


def _score_parts(
    opened: "Opened", reading: "Reading", file: Path, per: Per | Path, memory: str, tally: "_Tally", output: LineOutput
) -> None:
    """Write a row for each part of a text: line, word, character or token, or the spans of a file."""
    from transformer_xl.data.text import warn_of_bytes
    from transformer_xl.data.text_files import COMPRESSED, FileRange, content_sha256, read_blocks
    from transformer_xl.reading.rows import Borders, read_spans, rows, span_rows, word_rows
    from transformer_xl.reading.surprisal import alone, carried

    piped, tokenizer = arriving(file, quiet=output.quiet), opened.tokenizer
    if isinstance(per, Path) or per in ("word", "char"):
        tokenizer.encode_with_offsets("")  # says so if it loses places
    if not piped and tokenizer.reads_bytes:
        warn_of_bytes(file)

    def scored(n_line: int, bar: Bar) -> "Iterator[ScoredLine]":
        path = Path("standard input") if file == STDIN else file
        text = (piped or read_blocks(FileRange(file)), path, opened.model, tokenizer, reading)
        if memory == "reset":
            skip = max(n_line - 1, 0) if per == "line" else 0
            lines = alone(*text, skip=skip, is_ready=piped and piped.is_ready, borders=borders)
        else:
            lines = carried(*text, borders=borders)
        for line in lines:
            yield line
            bar.advance(len(line.line.text.encode("utf-8", "surrogateescape")))

    def lines(n_line: int, bar: Bar) -> Iterator[str]:
        if isinstance(per, Path):
            parts = span_rows(scored(n_line, bar), read_spans(per))
        elif per == "word":
            assert borders is not None
            parts = word_rows(scored(n_line, bar), borders)
        else:
            parts = rows(scored(n_line, bar), per, tokenizer)
        return tally.lines(parts, n_line, output)

    borders = Borders(tokenizer) if per == "word" else None
    how = f"--spans of {content_sha256(per)}" if isinstance(per, Path) else f"--per {per}"
    how, total = f"{how} --memory {memory} ({reading})", None if piped or file.suffix in COMPRESSED else file.stat().st_size
    output.write(lines, opened, None if piped else file, how, what="scoring", total=total, unit="bytes")


def _score_pairs(
    opened: "Opened", reading: "Reading", named: str | None, files: Sequence[Path], tally: "_Tally", output: LineOutput
) -> None:
    """Score pairs of sentences, or the last words of LAMBADA; their rows are written only to a file."""
    from transformer_xl.data.examples import read_last_words, read_pairs
    from transformer_xl.reading.surprisal import last_word_rows, pair_rows

    how, piped = (opened.model, opened.tokenizer, reading), None if named else arriving(files[0], quiet=output.quiet)

    def rows(bar: Bar) -> Rows:
        for file in files:
            lambada = named == "lambada"
            found = last_word_rows(read_last_words(file), *how) if lambada else pair_rows(read_pairs(piped or file), *how)
            for row in found:
                yield {"file": file.name.partition(".")[0] if file != STDIN else "-", **row}
                bar.advance()

    def lines(n_line: int, bar: Bar) -> Iterator[str]:
        return tally.lines(rows(bar), n_line, output)

    if output.out is None:
        with progress("scoring", unit="texts", hidden=output.quiet) as bar:
            for _ in lines(0, bar):
                pass
    else:
        output.write(lines, opened, None if piped or len(files) > 1 else files[0], f"{named} ({reading})", what="scoring")


@dataclass
class _Tally:
    """Rows as lines, and what they say together."""

    if_empty: str  # the error if there are no rows
    n: int = 0
    line: int = 0
    tokens: int = 0
    nats: float = 0.0
    credits: dict[str, list[float]] = field(default_factory=dict)

    def lines(self, rows: Rows, n_line: int, output: LineOutput) -> Iterator[str]:
        """Count all rows, and yield those as lines that are not among the first `n_line`; of columns their names come first."""
        n_kept = n_line if output.as_objects else n_line - 1
        for row in rows:
            if not (output.as_objects or n_line or self.n):
                yield "\t".join(row) + "\n"
            self._add(row)
            if self.n > n_kept:
                yield (json.dumps(row) if output.as_objects else "\t".join(map(_cell, row.values()))) + "\n"
        if not self.n:
            raise CorpusError(self.if_empty)

    def _add(self, row: dict[str, Any]) -> None:
        self.n, self.line = self.n + 1, row.get("line", 0)
        self.tokens += row.get("tokens", 0)
        self.nats += row.get("nats_prefix", row.get("nats")) or 0.0  # of the tokens
        if "credit" in row:
            self.credits.setdefault(row["file"], []).append(row["credit"])

    def figures(self, named: str | None) -> dict[str, Any]:
        """Return accuracy, of several files the mean of theirs, and for LAMBADA the perplexity of words."""
        of_file = {name: sum(each) / len(each) for name, each in self.credits.items()}
        if named == "lambada":
            own = {"ppl": math.exp(min(self.nats / self.n, 700)), "nats": self.nats}
        else:
            own = {"ties": sum(each.count(0.5) for each in self.credits.values())}
        return {"accuracy": sum(of_file.values()) / len(of_file), "n": self.n, **own, "files": of_file}


def _cell(value: object) -> str:
    r"""Return a value of a TSV; a backslash, tab or line end in a text is written as \\, \t, \n or \r."""
    if isinstance(value, float):
        return f"{value:.9g}"
    return "" if value is None else str(value).translate(_ESCAPED)


def _print_accuracy(figures: dict[str, Any], how: str) -> None:
    files, accuracy, n = figures["files"], f"accuracy {figures['accuracy']:.4f}", figures["n"]
    if "ppl" in figures:
        print(f"{accuracy}, perplexity {figures['ppl']:,.1f} (the last word of {n:,} texts, {how})")
        return
    if len(files) > 1:
        print(table([["file", "accuracy"], *([name, f"{value:.4f}"] for name, value in files.items())]))
    mean = f"mean of {len(files)} files, " if len(files) > 1 else ""
    print(f"{accuracy} ({mean}{n:,} pairs, {figures['ties']:,} ties counted half, {how})")

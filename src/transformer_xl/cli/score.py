"""`txl score`."""

import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from transformer_xl.cli.lines import STDIN, LineOutput, arriving, check_alone, warn_of_unknown
from transformer_xl.cli.options import Flag, Natural, Opening, Positive, Precision
from transformer_xl.console import Bar, progress, say, table
from transformer_xl.errors import ConfigError, CorpusError, counted

if TYPE_CHECKING:
    from transformer_xl.checkpoint.open_run import Opened
    from transformer_xl.model.base import LanguageModel
    from transformer_xl.model.xlnet import XLNet
    from transformer_xl.reading.reading import Reading
    from transformer_xl.reading.rows import ScoredLine
    from transformer_xl.tokenizers.base import Tokenizer

    Scorer = tuple[LanguageModel | XLNet, Tokenizer, Reading]

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
    unigram: Flag = False,
    pairs: Flag = False,
    choices: Flag = False,
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
    lambada write rows only to a file (--out). An XLNet scores each text alone, each
    token with all others in sight.

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
        txl score runs/mine gaps.tsv --choices
        txl score runs/mine blimp --data blimp/data
        txl score runs/mine lambada

    Args:
        run: directory of a run or of an exported model, or a hub id.
        file: a text, a pipe, - (standard input); lines of pairs, the better first, or of a text and choices; blimp or lambada.
        per: what has a row: line, word, char or token. Default: line.
        spans: score parts of the text instead: a file of lines with start and end, in characters from 0; starts ascend.
        memory: carried through the text, or reset before each line. Default: carried; of an XLNet reset.
        unigram: also the nats of each line by the counts of tokens in the run's training text, as SLOR needs them.
        pairs: say how often the better sentence is more probable; ties count half.
        choices: rank what may stand in the gap _ of each text, or else at its end; accuracy, where the file has answers.
        data: directory of the files of blimp or lambada. Default: $TXL_DATA/blimp, $TXL_DATA/lambada.
        tgt_len: tokens per segment. Default: as txl eval reads.
        mem_len: positions of memory. Default: as txl eval reads.
        batch_size: lines or sentences read side by side, if memory is not carried.
        precision: of the matrix products; auto: whichever the processor computes fast; int8 rounds the weights.
        output: where rows go.
        opening: how the run is opened.
    """
    named = str(file) if str(file) in _NAMED and not (pairs or choices or file.is_file()) else None
    if data is not None and not named:
        raise ConfigError(f"--data is for {' and '.join(_NAMED)}; give one of these names instead of '{file}'")
    if pairs and choices:
        raise ConfigError("--pairs and --choices: give one of them")
    compared = named or ("choices" if choices else "pairs" if pairs else None)
    options = {"per": per, "spans": spans, "memory": memory, "unigram": unigram}
    if compared and (used := [name for name, value in options.items() if value]):
        raise ConfigError(f"--{used[0]} is for the lines of a text; leave it out with {named or f'--{compared}'}")
    if spans and per:
        raise ConfigError("--spans says itself what has a row; leave out --per")
    if unigram and (spans or per not in (None, "line")):
        raise ConfigError("--unigram is for lines; leave out --per and --spans")
    check_alone("txl score")
    if file.suffix in (".npy", ".npz"):
        raise CorpusError(f"'{file}' is an array of ids, not lines of text; txl eval --file scores it")
    from transformer_xl.data.corpora import benchmark_files

    opened = opening.open(run, any_model=True)
    model, chosen = _scorer(opened, precision, named or memory)
    reading = opened.reading(tgt_len=tgt_len, mem_len=mem_len, batch_size=batch_size, precision=chosen)
    scorer = (model, opened.tokenizer, reading)
    begin, tally = time.perf_counter(), _Tally(output, f"'{spans or file}' has no {'spans' if spans else 'text'}; give another")
    if compared:
        _score_compared(opened, scorer, compared, benchmark_files(named, data) if named else [file], tally)
        warn_of_unknown(opened.tokenizer, tally.unknown)
        figures = tally.figures(compared)
        said = _accuracy(figures, f"{chosen}, {time.perf_counter() - begin:.1f} s")
        if choices and output.out is None:  # the rows are on standard output
            say(said, quiet=output.quiet)
        else:
            print(json.dumps({"run": str(run), "text": str(file), "precision": chosen, **figures}) if output.json_ else said)
        return
    _score_parts(opened, scorer, file, spans or per or "line", memory, tally, unigram=unigram)
    warn_of_unknown(opened.tokenizer, tally.unknown)
    mean = f" ({tally.nats / tally.tokens:.4f} per token)" if tally.tokens else ""
    what = counted(tally.n, "span") if spans else counted(tally.line, "line")
    sums = f"{counted(tally.tokens, 'token')}: {tally.nats:,.1f} nats{mean}"
    say(f"{what}, {sums}, {chosen}, {time.perf_counter() - begin:.1f} s", quiet=output.quiet)


def _scorer(opened: "Opened", precision: Precision, asked: str | None) -> "tuple[LanguageModel | XLNet, Precision]":
    """Return the model and the precision, or refuse what is `asked` of it."""
    from transformer_xl.kernels.device import precision_of_segments
    from transformer_xl.model.xlnet import XLNet
    from transformer_xl.reading.targets import precision_of_targets

    if not isinstance(model := opened.any_model, XLNet):
        return opened.model, precision_of_segments(precision, opened.device)
    if asked in ("lambada", "carried"):
        what = "lambada" if asked == "lambada" else "--memory carried"
        raise ConfigError(f"{what} needs a model that reads on, and '{opened.source}', an XLNet, fills gaps; leave it out")
    return model, precision_of_targets(precision, opened.device)


def _score_parts(
    opened: "Opened", scorer: "Scorer", file: Path, per: Per | Path, memory: str | None, tally: "_Tally", *, unigram: bool
) -> None:
    """Write a row for each part of a text: line, word, character or token, or the spans of a file."""
    from transformer_xl.data.text import warn_of_bytes
    from transformer_xl.data.text_files import COMPRESSED, FileRange, content_sha256, read_blocks
    from transformer_xl.model.base import LanguageModel
    from transformer_xl.reading.rows import Borders, read_spans, rows, span_rows, unigram_nats, word_rows
    from transformer_xl.reading.surprisal import alone, carried

    (model, tokenizer, reading), output = scorer, tally.output
    piped = arriving(file, quiet=output.quiet)
    if isinstance(per, Path) or per in ("word", "char"):
        tokenizer.encode_with_offsets("")  # says so if it loses places
    if not piped and tokenizer.reads_bytes:
        warn_of_bytes(file)

    def read(n_line: int, bar: Bar) -> "Iterator[ScoredLine]":
        path = Path("standard input") if file == STDIN else file
        blocks = piped or read_blocks(FileRange(file))
        if memory == "carried" and isinstance(model, LanguageModel):
            lines = carried(blocks, path, model, tokenizer, reading, borders=borders)
        else:
            skip = max(n_line - 1, 0) if per == "line" else 0
            lines = alone(blocks, path, *scorer, skip=skip, is_ready=piped and piped.is_ready, borders=borders)
        for line in lines:
            yield line
            tally.unknown += tokenizer.n_unknown(line.line.text, line.line.ids)
            bar.advance(len(line.line.text.encode("utf-8", "surrogateescape")))

    def lines(n_line: int, bar: Bar) -> Iterator[str]:
        if isinstance(per, Path):
            parts = span_rows(read(n_line, bar), read_spans(per))
        elif per == "word":
            assert borders is not None
            parts = word_rows(read(n_line, bar), borders)
        else:
            parts = rows(read(n_line, bar), per, tokenizer, unigram=costs)
        return tally.lines(parts, n_line)

    memory = memory or ("carried" if isinstance(model, LanguageModel) else "reset")
    if unigram and not opened.is_run:
        raise ConfigError(f"'{opened.source}' is a model without a training text, whose tokens --unigram counts; give a run")
    costs = unigram_nats(opened.text(split="train").ids, tokenizer.vocab_size) if unigram else None
    borders = Borders(tokenizer) if per == "word" else None
    how = f"--spans of {content_sha256(per)}" if isinstance(per, Path) else f"--per {per}{' --unigram' * unigram}"
    how, total = f"{how} --memory {memory} ({reading})", None if piped or file.suffix in COMPRESSED else file.stat().st_size
    output.write(lines, opened, None if piped else file, how, what="scoring", total=total, unit="bytes")


def _score_compared(opened: "Opened", scorer: "Scorer", compared: str, files: Sequence[Path], tally: "_Tally") -> None:
    """Score pairs of sentences, choices, or the last words of LAMBADA; of pairs and words, rows are written only to a file."""
    from transformer_xl.data.examples import read_choices, read_last_words, read_pairs
    from transformer_xl.reading.surprisal import choice_rows, last_word_rows, pair_rows

    ways: Any = {"lambada": (read_last_words, last_word_rows), "choices": (read_choices, choice_rows)}
    read, rows_of = ways.get(compared, (read_pairs, pair_rows))
    output, piped = tally.output, None if compared in _NAMED else arriving(files[0], quiet=tally.output.quiet)

    def examples(file: Path) -> Iterator[Any]:
        for example in read(piped or file):
            yield example  # whoever asks for the next one has encoded this one
            texts = example.choices or (example.text, example.pair or "")
            for text in texts if opened.tokenizer.unknown_id is not None else ():
                tally.unknown += opened.tokenizer.n_unknown(text, opened.tokenizer.encode(text))

    def rows(bar: Bar) -> Rows:
        for file in files:
            for row in rows_of(examples(file), *scorer):
                yield {"file": file.name.partition(".")[0] if file != STDIN else "-", **row}
                bar.advance()

    def lines(n_line: int, bar: Bar) -> Iterator[str]:
        return tally.lines(rows(bar), n_line)

    if output.out is None and compared != "choices":
        with progress("scoring", unit="texts", hidden=output.quiet) as bar:
            for _ in lines(0, bar):
                pass
    else:
        output.write(lines, opened, None if piped or len(files) > 1 else files[0], f"{compared} ({scorer[-1]})", what="scoring")


@dataclass
class _Tally:
    """Rows as lines, and what they say together."""

    output: LineOutput
    if_empty: str  # the error if there are no rows
    n: int = 0
    line: int = 0
    tokens: int = 0
    unknown: int = 0
    nats: float = 0.0
    credits: dict[str, list[float]] = field(default_factory=dict)

    def lines(self, rows: Rows, n_line: int) -> Iterator[str]:
        """Count all rows, and yield those as lines that are not among the first `n_line`; of columns their names come first."""
        as_objects = self.output.as_objects
        n_kept = n_line if as_objects else n_line - 1
        for row in rows:
            names = "" if as_objects or n_line or self.n else "\t".join(row) + "\n"
            self._add(row)
            if self.n > n_kept:
                yield names + (json.dumps(row) if as_objects else "\t".join(map(_cell, row.values()))) + "\n"
        if not self.n:
            raise CorpusError(self.if_empty)

    def _add(self, row: dict[str, Any]) -> None:
        self.n, self.line = self.n + 1, row.get("line", 0)
        self.tokens += row.get("tokens", 0)
        self.nats += row.get("nats_prefix", row.get("nats")) or 0.0  # of the tokens
        if row.get("credit") is not None:
            self.credits.setdefault(row["file"], []).append(row["credit"])

    def figures(self, compared: str) -> dict[str, Any]:
        """Return accuracy, of several files the mean of theirs, and for LAMBADA the perplexity of words."""
        of_file = {name: sum(each) / len(each) for name, each in self.credits.items()}
        if compared == "choices":
            answers = sum(map(len, self.credits.values()))
            return {"accuracy": sum(of_file.values()) if answers else None, "answers": answers, "choices": self.n}
        if compared == "lambada":
            own = {"ppl": math.exp(min(self.nats / self.n, 700)), "nats": self.nats}
        else:
            own = {"ties": sum(each.count(0.5) for each in self.credits.values())}
        return {"accuracy": sum(of_file.values()) / len(of_file), "n": self.n, **own, "files": of_file}


def _cell(value: object) -> str:
    r"""Return a value of a TSV; a backslash, tab or line end in a text is written as \\, \t, \n or \r."""
    if isinstance(value, float):
        return f"{value:.9g}"
    return "" if value is None else str(value).translate(_ESCAPED)


def _accuracy(figures: dict[str, Any], how: str) -> str:
    accuracy = "no accuracy" if figures["accuracy"] is None else f"accuracy {figures['accuracy']:.4f}"
    if "choices" in figures:
        return f"{accuracy} ({counted(figures['choices'], 'choice')}, {counted(figures['answers'], 'answer')}, {how})"
    files, n = figures["files"], figures["n"]
    if "ppl" in figures:
        return f"{accuracy}, perplexity {figures['ppl']:,.1f} (the last word of {counted(n, 'text')}, {how})"
    each = table([["file", "accuracy"], *([name, f"{value:.4f}"] for name, value in files.items())]) + "\n"
    mean = f"mean of {len(files)} files, " if len(files) > 1 else ""
    return (
        f"{each if mean else ''}{accuracy} ({mean}{counted(n, 'pair')}, {counted(figures['ties'], 'tie')} counted half, {how})"
    )

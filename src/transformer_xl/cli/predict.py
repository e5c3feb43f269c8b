"""`txl predict`."""

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

from cyclopts import Parameter

from transformer_xl.cli.arriving import lines_of_stdin
from transformer_xl.cli.options import Flag, FloatPrecision, Json, Opening, Positive
from transformer_xl.cli.prompts import STDIN
from transformer_xl.console import progress, say, warn
from transformer_xl.errors import ConfigError, CorpusError
from transformer_xl.files import check_file
from transformer_xl.process import is_alone

if TYPE_CHECKING:
    from transformer_xl.checkpoint.open_run import Opened
    from transformer_xl.data.labels import Example

JSON_LINES = (".jsonl", ".ndjson")


def predict(
    run: Path,
    file: Annotated[Path | None, Parameter(allow_leading_hyphen=True)] = None,
    /,
    *,
    text: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None,
    pair: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None,
    document: str | None = None,
    out: Path | None = None,
    resume: Flag = False,
    batch_size: Positive = 32,
    precision: FloatPrecision = "auto",
    opening: Opening = Opening(),
    quiet: Flag = False,
    json_: Json = False,
) -> None:
    """Predict with a fine-tuned model: labels, numbers, choices, answers.

    It writes a line for each text, separated by tabs: label, probability, and the
    text or its id; with --json or to a .jsonl file, an object with all
    probabilities. An empty line gives an empty row. Words that get labels have a
    line each (word, probability, label), with an empty line after a text.

    Common uses:
        txl predict runs/mood --text "A fine day!"
        txl predict runs/mood reviews.txt
        txl predict runs/mood test.tsv --json > found.jsonl
        tail -f log.txt | txl predict runs/mood
        txl predict runs/mood letters/
        txl predict runs/mood million.txt --out found.tsv
        txl predict runs/mood million.txt --out found.tsv --resume

    Args:
        run: directory of a run of txl finetune, of an exported model, or a hub id.
        file: lines, each a text; TSV, CSV, JSONL, SQuAD, CoNLL; a directory, a text per file. - is standard input, the default.
        text: predict only this text.
        pair: second text to --text, such as a question about it.
        document: column of the document of a row, or files: each file is a document. Default: that of the run.
        out: write to this file instead of standard output; --resume can then continue it.
        resume: continue an unfinished file; the lines in it are kept.
        batch_size: texts read side by side.
        precision: of the matrix products; auto: whichever the processor computes fast.
        opening: how the run is opened.
        quiet: show no progress, only warnings and errors.
        json_: write JSON lines.
    """
    texts = _Texts(file, text, pair, document)
    texts.check()
    check_out(out, resume=resume)
    if not is_alone():
        raise ConfigError("txl predict works in one process; start it without torchrun, and divide the texts yourself")
    from transformer_xl.cli.printers import show
    from transformer_xl.process import keep_freed_memory
    from transformer_xl.tasks.lines import as_json, as_row, origin_of, prediction_file
    from transformer_xl.tasks.metrics import Sameness
    from transformer_xl.tasks.predict import head_of, precision_of_texts, predictions

    opened = opening.open(run, any_model=True)
    head = head_of(opened.any_model, f"'{run}'")
    keep_freed_memory()
    as_objects = json_ or (out is not None and out.suffix in JSON_LINES)
    write = as_json if as_objects else as_row
    n_empty, sameness = 0, Sameness()

    def found(skip: int = 0) -> Iterator[str]:
        nonlocal n_empty
        examples, is_ready = texts.read(opened, quiet=quiet)
        how = {"batch_size": batch_size, "precision": precision, "skip": skip, "is_ready": is_ready}
        for prediction in predictions(opened.any_model, opened.tokenizer, examples, **how):
            if prediction.example.is_empty:
                n_empty += 1
            else:
                sameness.add(prediction)
            yield f"{write(prediction, head.labels)}\n"

    try:
        if out is None:
            for line in found():
                show(line)
        else:
            chosen = precision_of_texts(precision, opened.device)
            origin = origin_of(run, opened.any_model, texts.path, json=as_objects, precision=chosen, batch_size=batch_size)
            total = texts.count(opened)
            with prediction_file(out, origin, resume=resume) as (lines, n_kept):
                if total is not None and n_kept > total:
                    more = f"more than there are texts ({total:,})"
                    raise ConfigError(f"'{out}' has {n_kept:,} lines, {more}; choose another --out")
                write_lines(found(n_kept), lines, out, n_kept=n_kept, total=total, quiet=quiet)
    finally:  # also when Ctrl-C ends a stream
        if n_empty:
            lines = "1 empty line has an empty row" if n_empty == 1 else f"{n_empty:,} empty lines have empty rows"
            say(lines, quiet=quiet)
        if sameness.remark:
            warn(sameness.remark)


def write_lines(
    found: Iterator[str],
    lines: BinaryIO,
    out: Path,
    *,
    n_kept: int,
    total: int | None,
    quiet: bool,
    what: str = "predicting",
) -> None:
    """Write each line as soon as it is known, so that whatever ends this process costs at most a window of texts."""
    begin, n_done = time.perf_counter(), 0
    try:
        with progress(unit="texts", hidden=quiet) as bar:
            bar.begin(what, total, done=n_kept)
            for line in found:
                lines.write(line.encode("utf-8", "replace"))
                lines.flush()
                n_done += 1
                bar.advance()
    except KeyboardInterrupt:
        say(f"\ninterrupted; {n_kept + n_done:,} texts are in '{out}'; go on with the same command and --resume", quiet=quiet)
        sys.exit(130)
    seconds = time.perf_counter() - begin
    kept = f" after {n_kept:,} that were there" if n_kept else ""
    rate = f" in {seconds:.1f} s ({n_done / seconds:,.0f} texts/s)" if n_done else ""
    say(f"{n_done:,} texts{rate} written to '{out}'{kept}", quiet=quiet)


def check_out(out: Path | None, *, resume: bool) -> None:
    """Refuse a file for lines that cannot be written, or is there already and not gone on with."""
    if out is not None:
        check_file(out, option="out")
        if out.exists() and out.stat().st_size and not resume:
            raise ConfigError(f"--out '{out}' is there already; go on with it by --resume, or choose another")
    elif resume:
        raise ConfigError("--resume goes on with a file; name it with --out")


@dataclass(frozen=True)
class _Texts:
    """Where texts come from: a file, standard input (no file or `-`), or the command line."""

    file: Path | None
    typed: str | None
    pair: str | None
    document: str | None

    @property
    def path(self) -> Path | None:
        """The file; None: there is none, because texts come from elsewhere."""
        return None if self.file == STDIN else self.file

    def check(self) -> None:
        if self.typed is not None and self.file is not None:
            raise ConfigError(f"--text is read instead of a file; leave '{self.file}' out")
        for option, typed in (("text", self.typed), ("pair", self.pair)):
            if typed is not None and not typed.strip():
                raise ConfigError(f"--{option} is empty; give a text")
        if self.pair is not None and self.typed is None:
            raise ConfigError("--pair goes with --text; in a file, a tab stands between a text and its pair")

    def read(self, opened: "Opened", *, quiet: bool = False) -> tuple[Iterator["Example"], Callable[[], bool] | None]:
        """Return the texts without labels, and what says whether the next one is there; None: it always is."""
        from transformer_xl.data.labels import Example
        from transformer_xl.tasks.predict import read_texts

        if self.typed is not None:
            return iter([Example(self.typed, self.pair)]), None
        if self.path is not None:
            examples = read_texts(self.path, opened, document=self.document)
            first = next(examples, None)
            if first is None:
                raise CorpusError(f"'{self.path}' holds no text; give another file")
            return chain([first], examples), None
        lines = lines_of_stdin(quiet=quiet)
        return read_texts(lines, opened, document=self.document), lines.is_ready

    def count(self, opened: "Opened") -> int | None:
        """Return how many texts there are, and find all faults of a file before anything is predicted; None if nobody knows."""
        return None if self.path is None else sum(1 for _ in self.read(opened)[0])

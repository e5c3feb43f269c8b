"""`txl predict`."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from transformer_xl.cli.lines import STDIN, LineOutput, arriving, check_alone
from transformer_xl.cli.options import FloatPrecision, Opening, Positive
from transformer_xl.console import Bar, say, warn
from transformer_xl.errors import ConfigError, CorpusError

if TYPE_CHECKING:
    from transformer_xl.data.labels import Example


def predict(
    run: Path,
    file: Annotated[Path | None, Parameter(allow_leading_hyphen=True)] = None,
    /,
    *,
    text: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None,
    pair: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None,
    document: str | None = None,
    batch_size: Positive = 32,
    precision: FloatPrecision = "auto",
    output: LineOutput = LineOutput(),
    opening: Opening = Opening(),
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
        batch_size: texts read side by side.
        precision: of the matrix products; auto: whichever the processor computes fast.
        output: where lines go.
        opening: how the run is opened.
    """
    if text is not None and file is not None:
        raise ConfigError(f"--text is read instead of a file; leave '{file}' out")
    if pair is not None and text is None:
        raise ConfigError("--pair goes with --text; in a file, a tab stands between a text and its pair")
    check_alone("txl predict")
    from transformer_xl.data.labels import Example
    from transformer_xl.process import keep_freed_memory
    from transformer_xl.tasks.lines import as_json, as_row
    from transformer_xl.tasks.metrics import Sameness
    from transformer_xl.tasks.predict import head_of, precision_of_texts, predictions, read_texts

    opened = opening.open(run, any_model=True)
    head, chosen = head_of(opened.any_model, f"'{run}'"), precision_of_texts(precision, opened.device)
    keep_freed_memory()
    piped = arriving(file, quiet=output.quiet) if text is None else None
    path = file if text is None and piped is None else None
    as_line = as_json if output.as_objects else as_row

    def examples() -> Iterator["Example"]:
        if text is not None:
            return iter([Example(text, pair)])
        return read_texts(piped or path or STDIN, opened, document=document)

    def lines(n_kept: int, bar: Bar) -> Iterator[str]:
        n_text, sameness = n_kept, Sameness()
        how = {"batch_size": batch_size, "precision": chosen, "skip": n_kept, "is_ready": piped and piped.is_ready}
        try:
            for prediction in predictions(opened.any_model, opened.tokenizer, examples(), **how):
                n_text += 1
                sameness.add(prediction)
                yield f"{as_line(prediction, head.labels)}\n"
                bar.advance()
        finally:  # also when Ctrl-C ends a stream
            if n := sameness.n_empty:
                say("1 empty line has an empty row" if n == 1 else f"{n:,} empty lines have empty rows", quiet=output.quiet)
            if sameness.remark:
                warn(sameness.remark)
        if path and not n_text:
            raise CorpusError(f"'{path}' holds no text; give another file")

    # which also finds all faults of a file before anything is predicted
    total = sum(1 for _ in examples()) if path and output.out else None
    output.write(lines, opened, path, f"--precision {chosen} --batch-size {batch_size}", what="predicting", total=total)

"""`txl translate`."""

import json
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from transformer_xl.cli.arriving import Arriving, lines_of_stdin
from transformer_xl.cli.options import Flag, FloatPrecision, Json, Opening, Positive
from transformer_xl.cli.predict import JSON_LINES, check_out, write_lines
from transformer_xl.console import progress, say, warn
from transformer_xl.errors import ConfigError, CorpusError
from transformer_xl.process import is_alone

if TYPE_CHECKING:
    from transformer_xl.checkpoint.open_run import Opened
    from transformer_xl.generation.translate import Source


def translate(
    run: Path,
    /,
    *,
    file: Path | None = None,
    reference: Path | None = None,
    out: Path | None = None,
    resume: Flag = False,
    beams: Positive = 4,
    length_penalty: float = 1.0,
    mem_len: Positive | None = None,
    batch_size: Positive = 16,
    precision: FloatPrecision = "auto",
    opening: Opening = Opening(),
    quiet: Flag = False,
    json_: Json = False,
) -> None:
    """Translate lines with a run that learned pairs of source and target.

    Each source is read once and kept as memory, and the target is written from it.
    It writes a line for each source, in order; with --json or to a .jsonl file, an
    object.

    Common uses:
        txl translate runs/translate-en-de --file test.en
        echo "A dog runs." | txl translate runs/translate-en-de
        txl translate runs/translate-en-de --file test.en.xz --out found.de
        txl translate runs/translate-en-de --file test.en --out found.de --resume
        txl translate runs/translate-en-de --file test.en --reference test.de

    Args:
        run: directory of a run, of an exported model, or a hub id.
        file: lines to translate, plain or compressed. Default: standard input.
        reference: reference translations, line by line, which sacreBLEU compares with the model's (pip install sacrebleu).
        out: write to this file instead of standard output; --resume can then continue it.
        resume: continue an unfinished file; the lines in it are kept.
        beams: how many texts are kept at each step; 1 always takes the likeliest token.
        length_penalty: higher values prefer longer targets; 0 compares plain probabilities.
        mem_len: positions of memory, which must hold source and target. Default: as txl eval reads.
        batch_size: lines translated side by side.
        precision: of the matrix products; auto: whichever is faster here.
        opening: how the run is opened.
        quiet: show no progress, only warnings and errors.
        json_: write JSON lines, and figures as one object.
    """
    from transformer_xl.data.text_files import FileRange, read_lines

    check_out(out, resume=resume)
    if reference and not find_spec("sacrebleu"):
        raise ConfigError("--reference needs the sacrebleu package: pip install sacrebleu")
    if not is_alone():
        raise ConfigError("txl translate works in one process; start it without torchrun, and divide the lines yourself")
    total = sum(1 for _ in read_lines(FileRange(file))) if file else None
    references = [line.decode("utf-8", "replace").strip() for line in read_lines(FileRange(reference))] if reference else []
    if reference and total is not None and total != len(references):
        raise CorpusError(f"'{file}' has {total:,} and '{reference}' {len(references):,} lines; give a reference for each")
    from transformer_xl.generation.decoder import Decoder
    from transformer_xl.generation.translate import against_references, translations
    from transformer_xl.process import keep_freed_memory
    from transformer_xl.tasks.lines import origin_of, prediction_file

    opened = opening.open(run)
    vocab_size = opened.tokenizer.vocab_size
    if beams > vocab_size:
        raise ConfigError(f"--beams ({beams}) can be at most {vocab_size:,}, the tokens that '{run}' knows")
    if opened.is_run and opened.config.train.loss != "answer":
        warn(f"'{run}' was not trained on answers alone (train.loss=answer); it may not know that a tab asks for one")
    keep_freed_memory()
    mem_len = opened.reading(mem_len=mem_len).mem_len
    reach = None if opened.model.config.remembers == "state" else mem_len
    as_objects = json_ or (out is not None and out.suffix in JSON_LINES)
    found: list[str] = []

    def lines(skip: int = 0) -> Iterator[str]:
        decoder = Decoder(opened.model, batch_size=batch_size * beams, mem_len=mem_len, precision=precision)
        arriving = None if file else lines_of_stdin(instead="--file", quiet=quiet)
        sources = _sources(opened, file, arriving, reach)
        how = {"beams": beams, "length_penalty": length_penalty, "reach": reach, "skip": skip}
        how["is_ready"] = arriving and arriving.is_ready
        for each in translations(decoder, opened.tokenizer, sources, **how):
            found.append(each.text)
            yield f"{json.dumps(vars(each), ensure_ascii=False) if as_objects else each.text}\n"

    if out is None:
        from transformer_xl.cli.printers import show

        with progress("translating", total, unit="texts", hidden=quiet or sys.stdout.isatty()) as bar:
            for line in lines():
                show(line)
                bar.advance()
    else:
        origin = origin_of(run, opened.model, file, json=as_objects, precision=precision, batch_size=batch_size)
        origin["computed"] += f" --beams {beams} --length-penalty {length_penalty:g} --mem-len {mem_len}"
        with prediction_file(out, origin, resume=resume) as (handle, n_kept):
            kept = [line.decode() for line in read_lines(FileRange(out))] if n_kept else []
            found += [json.loads(line)["text"] if as_objects else line for line in kept]
            write_lines(lines(n_kept), handle, out, n_kept=n_kept, total=total, quiet=quiet, what="translating")
    if reference:
        figures = against_references(found, references)
        if json_:
            print(json.dumps({"run": str(run), **figures}))
            return
        for name, what in (("bleu", "BLEU"), ("chrf", "chrF")):
            said = f"{what} {figures[name]:.2f}  {figures[f'{name}_signature']}"
            print(said) if out else say(said)


def _sources(opened: "Opened", file: Path | None, arriving: Arriving | None, reach: int | None) -> Iterator["Source"]:
    """Yield the sources, and say which are too long for the memory."""
    from transformer_xl.data.text_files import FileRange, read_lines
    from transformer_xl.generation.translate import read_sources

    place, lines = (f"'{file}'", read_lines(FileRange(file))) if file else ("standard input", arriving or iter(()))
    for number, source in enumerate(read_sources(lines, place, opened.tokenizer), start=1):
        if reach is not None and len(source.ids) > reach:
            size = f"{len(source.ids):,} tokens, more than the memory ({reach:,})"
            warn(f"{place}, line {number} has {size}, so its beginning is forgotten; raise --mem-len, or divide the line")
        yield source

"""`txl translate`."""

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from transformer_xl.cli.lines import LineOutput, arriving, check_alone
from transformer_xl.cli.options import FloatPrecision, Opening, Positive
from transformer_xl.console import Bar, say, warn
from transformer_xl.errors import ConfigError, CorpusError

if TYPE_CHECKING:
    from transformer_xl.checkpoint.open_run import Opened
    from transformer_xl.generation.translate import Source


def translate(
    run: Path,
    /,
    *,
    file: Path | None = None,
    reference: Path | None = None,
    beams: Positive = 4,
    length_penalty: float = 1.0,
    mem_len: Positive | None = None,
    batch_size: Positive = 16,
    precision: FloatPrecision = "auto",
    output: LineOutput = LineOutput(),
    opening: Opening = Opening(),
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
        beams: how many texts are kept at each step; 1 always takes the likeliest token.
        length_penalty: higher values prefer longer targets; 0 compares plain probabilities.
        mem_len: positions of memory, which must hold source and target. Default: as txl eval reads.
        batch_size: lines translated side by side.
        precision: of the matrix products; auto: whichever is faster here.
        output: where lines go.
        opening: how the run is opened.
    """
    if reference and not find_spec("sacrebleu"):
        raise ConfigError("--reference needs the sacrebleu package: pip install sacrebleu")
    check_alone("txl translate")
    from transformer_xl.data.text_files import FileRange, read_lines
    from transformer_xl.generation.decoder import Decoder
    from transformer_xl.generation.translate import against_references, translations
    from transformer_xl.process import keep_freed_memory

    opened = opening.open(run)
    if opened.is_run and opened.config.train.loss != "answer":
        warn(f"'{run}' was not trained on answers alone (train.loss=answer); it may not know that a tab asks for one")
    keep_freed_memory()
    piped = arriving(file, instead="--file", quiet=output.quiet)
    path = None if piped else file
    total = sum(1 for _ in read_lines(FileRange(path))) if path else None
    references = [line.strip() for line in _lines(reference)] if reference else []
    if reference and total not in (None, len(references)):
        raise CorpusError(f"'{file}' has {total:,} and '{reference}' {len(references):,} lines; give a reference for each")
    mem_len = opened.reading(mem_len=mem_len).mem_len
    reach = None if opened.model.config.remembers == "state" else mem_len
    targets: list[str] = []

    def lines(n_kept: int, bar: Bar) -> Iterator[str]:
        kept = _lines(output.out) if output.out and n_kept else []
        targets.extend(json.loads(line)["text"] if output.as_objects else line for line in kept)
        decoder = Decoder(opened.model, batch_size=batch_size * beams, mem_len=mem_len, precision=precision)
        sources = _sources(opened, piped or path, reach)
        how = {"beams": beams, "length_penalty": length_penalty, "reach": reach, "skip": n_kept}
        for each in translations(decoder, opened.tokenizer, sources, is_ready=piped and piped.is_ready, **how):
            targets.append(each.text)
            yield f"{json.dumps(vars(each), ensure_ascii=False) if output.as_objects else each.text}\n"
            bar.advance()

    how = f"--precision {precision} --batch-size {batch_size} --beams {beams} --length-penalty {length_penalty:g}"
    output.write(lines, opened, path, f"{how} --mem-len {mem_len}", what="translating", total=total)
    if reference:
        figures = against_references(targets, references)
        if output.json_:
            print(json.dumps({"run": str(run), **figures}))
            return
        show = print if output.out else say  # standard output has the translations
        for name, what in (("bleu", "BLEU"), ("chrf", "chrF")):
            show(f"{what} {figures[name]:.2f}  {figures[f'{name}_signature']}")


def _lines(file: Path) -> list[str]:
    from transformer_xl.data.text_files import FileRange, read_lines

    return [line.decode("utf-8", "replace") for line in read_lines(FileRange(file))]


def _sources(opened: "Opened", source: "Path | Iterator[bytes] | None", reach: int | None) -> Iterator["Source"]:
    """Yield the lines of a file, or of standard input, as sources, and say which are too long for the memory."""
    from transformer_xl.data.text_files import FileRange, read_lines
    from transformer_xl.generation.translate import read_sources

    place, lines = (f"'{source}'", read_lines(FileRange(source))) if isinstance(source, Path) else ("standard input", source)
    for number, each in enumerate(read_sources(lines or (), place, opened.tokenizer), start=1):
        if reach is not None and len(each.ids) > reach:
            size = f"{len(each.ids):,} tokens, more than the memory ({reach:,})"
            warn(f"{place}, line {number} has {size}, so its beginning is forgotten; raise --mem-len, or divide the line")
        yield each

"""`txl eval`."""

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

from transformer_xl.cli.options import Flag, Json, Opening, Precision, TextChoice, check_least, check_run, mind_busy_cores
from transformer_xl.console import progress, warn
from transformer_xl.errors import ConfigError, TrainingError
from transformer_xl.files import check_file

if TYPE_CHECKING:
    from transformer_xl.reading.evaluation import Reading, Score


def evaluate(
    run: Path,
    /,
    *,
    choice: TextChoice = TextChoice(),
    tgt_len: int | None = None,
    mem_len: int | None = None,
    batch_size: int | None = None,
    same_length: bool | None = None,
    clamp_len: int | None = None,
    ext_len: int | None = None,
    precision: Precision = "auto",
    opening: Opening = Opening(),
    compare_memory: Flag = False,
    per_token: Path | None = None,
    quiet: Flag = False,
    json_: Json = False,
) -> None:
    """Score a run on a whole split, read as one stream; every token counts once.

    Common uses:
        txl eval runs/mine
        txl eval runs/mine --compare-memory
        txl eval runs/mine --mem-len 1024 --same-length
        txl eval runs/mine --file other.txt --json
        txl eval runs/mine --per-token nats.tsv

    Args:
        run: directory of a run, or with --file or --corpus of an exported model.
        choice: what is scored.
        tgt_len: tokens per segment. Default: as in training.
        mem_len: positions of memory. Default: as in training.
        batch_size: lanes read side by side; 1 reads strictly from beginning to end. Default: the recipe's.
        same_length: give every query the same number of keys.
        clamp_len: largest distance told apart.
        ext_len: tokens before each segment read again with it instead of remembered.
        precision: of the matrix products; auto takes what the processor does fast, int8 rounds the weights.
        opening: how the run is opened.
        compare_memory: score once more without memory, and say what it is worth.
        per_token: write position, id, nats and text of every token to this file; an array if it ends in .npy.
        quiet: show no progress, only warnings and the score.
        json_: print one JSON object.
    """
    choice.check()
    limits = {"tgt-len": (tgt_len, 1), "mem-len": (mem_len, 0), "batch-size": (batch_size, 1)}
    check_least(limits | {"clamp-len": (clamp_len, 1), "ext-len": (ext_len, 0)})
    check_run(run)
    from transformer_xl.model.precision import precision_of_segments
    from transformer_xl.opening import not_scored
    from transformer_xl.process import keep_freed_memory
    from transformer_xl.reading.evaluation import evaluate as score_stream
    from transformer_xl.reading.evaluation import write_token_nats
    from transformer_xl.world import joined

    with joined() as world:
        with world.agreed():
            if per_token is not None:
                check_file(per_token, option="per-token")
            opened = opening.open(run, on_damaged=lambda message: warn(message, quiet=not world.first))
            reading = opened.reading(
                tgt_len=tgt_len,
                mem_len=mem_len,
                batch_size=batch_size,
                same_length=same_length,
                clamp_len=clamp_len,
                ext_len=ext_len,
            )
            if compare_memory and not reading.mem_len:
                raise ConfigError(f"--compare-memory: '{run}' is read without memory (mem_len 0) already; leave it out")
            chosen = precision_of_segments(precision, opened.device)
            text = choice.text(opened)
            mind_busy_cores(opened, quiet=not world.first)
        if not world.alone:
            model = opened.model.config.model_dump(mode="json")
            world.check_same(model=model, text=text.digest(), precision=chosen)
        keep_freed_memory()

        def measure(reading: "Reading", what: str = "scoring", *, per_token: bool = False) -> "Score":
            with progress(what, (len(text.ids) - 1) // world.size, hidden=quiet or not world.first) as bar:
                return score_stream(
                    opened.model,
                    text.ids,
                    **vars(reading),
                    n_characters=text.n_characters,
                    n_bytes=text.n_bytes,
                    precision=chosen,
                    per_token=per_token,
                    on_tokens=bar.advance,
                    world=world,
                )

        score = measure(reading, per_token=per_token is not None)
        with world.agreed():
            if not math.isfinite(score.loss):
                raise TrainingError(f"the loss of '{run}' in {chosen} is not a finite number; {score.doubt}")
        without = measure(reading.without_memory(), "scoring without memory") if compare_memory else None
    if not world.first:
        return
    if score.doubt:
        warn(score.doubt)
    if per_token is not None and score.token_nats is not None:
        write_token_nats(per_token, text.ids, score.token_nats, opened.tokenizer)
    if json_:
        figures = {"run": str(run), "text": text.what, "precision": chosen, "reading": vars(reading), **score.as_dict()}
        print(json.dumps(figures | ({"without_memory": without.as_dict()} if without else {})))
        return
    _print(score, f"{text.what}, {reading.in_words(opened.model.config)}, {chosen}")
    if left_out := not_scored(opened.tokenizer):
        print(f"  {left_out}")
    if without:
        print(
            f"without memory {without.bpc:.4f} bits per character, with it {score.bpc:.4f}: "
            f"memory is worth {without.bpc - score.bpc:z.4f} bits per character "
            f"({without.loss - score.loss:z.4f} nats per token)"
        )


def _print(score: "Score", what: str) -> None:
    print(f"{what}: {score.tokens:,} tokens in {score.seconds:.1f} s ({score.tokens_per_second:,.0f} tokens/s)")
    rows = [
        ("loss", f"{score.loss:.4f}", "nats per token"),
        ("ppl", f"{score.ppl:.2f}", "perplexity per token"),
        ("bpc", f"{score.bpc:.4f}", "bits per character"),
        ("bpb", f"{score.bpb:.4f}" if score.bpb is not None else "-", "bits per UTF-8 byte"),
        ("nats", f"{score.nats:,.1f}", "in total"),
    ]
    for name, value, unit in rows:
        print(f"  {name:5} {value:>14}  {unit}")

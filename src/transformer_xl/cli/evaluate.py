"""`txl eval`."""

import hashlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from transformer_xl.cli.options import check_least

if TYPE_CHECKING:
    import numpy as np

    from transformer_xl.data.tokenizers import Tokenizer
    from transformer_xl.evaluation import Score


def evaluate(
    run: Path,
    /,
    *,
    split: Literal["train", "valid", "test"] | None = None,
    corpus: str | None = None,
    file: Path | None = None,
    tgt_len: int | None = None,
    mem_len: int | None = None,
    batch_size: int | None = None,
    same_length: bool | None = None,
    clamp_len: int | None = None,
    ext_len: int | None = None,
    precision: Literal["auto", "fp32", "bf16", "fp16", "int8"] = "auto",
    device: str = "auto",
    checkpoint: Literal["best", "last", "average"] = "best",
    compare_memory: Annotated[bool, Parameter(negative="")] = False,
    per_token: Path | None = None,
    json_: Annotated[bool, Parameter(name="--json", negative="")] = False,
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
        split: train, valid or test. Default: test, or valid where there is none.
        corpus: another corpus than the run's, or a directory that holds the run's named corpus.
        file: score this text file, plain or compressed, whole, instead of a split.
        tgt_len: tokens per segment. Default: as in training.
        mem_len: positions of memory. Default: as in training.
        batch_size: lanes read side by side; 1 reads strictly from beginning to end. Default: the recipe's.
        same_length: give every query the same number of keys.
        clamp_len: largest distance told apart.
        ext_len: tokens before each segment read again with it instead of remembered.
        precision: of the matrix products; auto takes what the processor does fast, int8 rounds the weights.
        device: auto, cpu, cuda, cuda:N or mps.
        checkpoint: the one with the best validation loss, the last, or the last average (train.average).
        compare_memory: score once more without memory, and say what it is worth.
        per_token: write position, id, nats and text of every token to this file; an array if it ends in .npy.
        json_: print one JSON object.
    """
    from transformer_xl.allocator import keep_freed_memory
    from transformer_xl.checkpoint.run_directory import RunDirectory, load
    from transformer_xl.config import RunConfig
    from transformer_xl.console import progress
    from transformer_xl.errors import ConfigError
    from transformer_xl.evaluation import evaluate as score_stream
    from transformer_xl.model.precision import choose_device
    from transformer_xl.model.precision_names import precision_of_segments
    from transformer_xl.reading import Reading
    from transformer_xl.texts import file_text, split_text
    from transformer_xl.world import joined

    def warn(message: str) -> None:
        if world.first:
            print(f"warning: {message}", file=sys.stderr)

    with joined() as world:
        with world.agreed():
            if file is not None and (split is not None or corpus is not None):
                raise ConfigError("--file scores a whole file; leave --split and --corpus out")
            check_least(
                {
                    "tgt-len": (tgt_len, 1),
                    "mem-len": (mem_len, 0),
                    "batch-size": (batch_size, 1),
                    "clamp-len": (clamp_len, 1),
                    "ext-len": (ext_len, 0),
                }
            )
            _check_writable(per_token)
            model, tokenizer = load(run, which=checkpoint, on_damaged=warn)
            is_run = RunDirectory(run).holds_run
            if not is_run and file is None and corpus is None:
                raise ConfigError(f"'{run}' is a model without a corpus of its own; give --file or --corpus")
            config = RunDirectory(run).config() if is_run else RunConfig(model=model.config)
            options = {"mem_len": mem_len, "same_length": same_length, "clamp_len": clamp_len, "ext_len": ext_len}
            reading = Reading.of_run(config, tgt_len=tgt_len, batch_size=batch_size, **options)
            if compare_memory and not reading.mem_len:
                raise ConfigError(f"--compare-memory: '{run}' is read without memory (mem_len 0) already; leave it out")
            torch_device = choose_device(device)
            chosen = precision_of_segments(precision, torch_device)
            text = split_text(config, tokenizer, split=split, corpus=corpus) if file is None else file_text(file, tokenizer)
        settings = {"model": model.config.model_dump(mode="json"), "text": hashlib.sha256(text.ids.tobytes()).hexdigest()}
        world.check_same(**settings, precision=chosen)
        keep_freed_memory()

        def measure(reading: Reading, *, per_token: bool = False) -> "Score":
            with progress("scoring", (len(text.ids) - 1) // world.size, hidden=not world.first) as bar:
                return score_stream(
                    model.to(torch_device),
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
        without = measure(reading.without_memory()) if compare_memory else None
    if not world.first:
        return
    if per_token is not None and score.token_nats is not None:
        _write_tokens(per_token, text.ids, score.token_nats, tokenizer)
    if json_:
        figures = {"run": str(run), "text": text.what, "precision": chosen, "reading": vars(reading), **score.as_dict()}
        print(json.dumps(figures | ({"without_memory": without.as_dict()} if without else {})))
        return
    _print(score, f"{text.what}, {reading}, {chosen}")
    if tokenizer.loses:
        print(f"  Not scored: {tokenizer.loses} Compare bits per character and byte with the same vocabulary only.")
    if without:
        print(
            f"without memory {without.bpc:.4f} bits per character, with it {score.bpc:.4f}: "
            f"memory is worth {without.bpc - score.bpc:.4f} bits per character ({without.loss - score.loss:.4f} nats per token)"
        )


def _check_writable(path: Path | None) -> None:
    from transformer_xl.errors import ConfigError

    if path is not None and not path.absolute().parent.is_dir():
        raise ConfigError(f"--per-token '{path}': the directory '{path.absolute().parent}' does not exist; make it first")


def _write_tokens(path: Path, ids: "np.ndarray", nats: "np.ndarray", tokenizer: "Tokenizer") -> None:
    """Write the nats of every predicted token: an array for .npy, else position, id, nats and the token's text in JSON."""
    import numpy as np

    from transformer_xl.errors import CheckpointError

    try:
        if path.suffix == ".npy":
            np.save(path, nats)
            return
        texts: dict[int, str] = {}
        with path.open("w", encoding="utf-8") as file:
            file.write("position\tid\tnats\ttoken\n")
            pairs = zip(ids[1:].tolist(), nats.tolist(), strict=True)
            for position, (token, value) in enumerate(pairs, start=1):
                text = texts.setdefault(token, json.dumps(tokenizer.decode([token]), ensure_ascii=False))
                file.write(f"{position}\t{token}\t{value:.6f}\t{text}\n")
    except OSError as error:
        raise CheckpointError(
            f"cannot write '{path}': {error.strerror}; free disk space or choose another --per-token"
        ) from None


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

"""`txl convert`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from transformer_xl.console import progress, say, warn

if TYPE_CHECKING:
    from transformer_xl.console import Bar
    from transformer_xl.conversion.convert import Converted


def convert(
    source: str,
    destination: Path,
    /,
    *,
    to: Literal["native", "huggingface", "authors", "onnx"] = "native",
    kind: Literal["huggingface", "authors", "nvidia", "tensorflow"] | None = None,
    vocabulary: Path | None = None,
    moses: str | None = None,
    set_: Annotated[list[str] | None, Parameter(name="--set", negative="")] = None,
    tgt_len: int = 128,
    json_: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> None:
    """Convert a checkpoint of another program, or write one for it; nothing in it is executed.

    Recognized are directories and files of Hugging Face (pytorch_model.bin or model.safetensors with config.json), of the
    authors' PyTorch code (model.pt) and TensorFlow code (model.ckpt*), and of NVIDIA (checkpoint_*.pt).

    Common uses:
        txl convert transfo-xl-wt103 models/wt103
        txl convert run/model.pt models/mine --vocabulary data/cache.pt
        txl convert tf_wt103/model models/wt103-tf --set mem_len=1600
        txl convert runs/mine exported --to huggingface

    Args:
        source: directory or file of a checkpoint; with --to, a run, a native directory or a hub id.
        destination: a directory that does not exist yet, or is empty (with --to onnx: a file).
        to: what to write.
        kind: format of the source. Default: recognized.
        vocabulary: file with the vocabulary, such as cache.pt, cache.pkl, vocab.txt. Default: found beside the weights.
        moses: language whose Moses rules split running text into words, such as en. Default: spaces do.
        set_: key=value, settings that hold whatever the checkpoint says, such as mem_len=1600; may be repeated.
        tgt_len: --to onnx: tokens per step; --to authors: their argument of that name.
        json_: print one JSON object.
    """
    from transformer_xl.errors import ConfigError

    if to != "native":
        given = {"--kind": kind, "--vocabulary": vocabulary, "--moses": moses, "--set": set_}
        for option, value in given.items():
            if value is not None:
                raise ConfigError(f"{option} is for checkpoints of other programs; leave it out with --to {to}")
        _write_for_others(source, destination, to, tgt_len, json_)
        return
    from transformer_xl.config import merge, parse_override
    from transformer_xl.conversion.convert import convert as convert_checkpoint
    from transformer_xl.conversion.programs import PROGRAMS

    settings: dict[str, object] = {}
    for override in set_ or []:
        settings = merge(settings, parse_override(override.removeprefix("model.")))
    with progress("converting", unit="bytes") as bar:
        done = convert_checkpoint(
            source,
            destination,
            kind=kind,
            vocabulary=vocabulary,
            moses=moses,
            settings=settings,
            on_progress=_telling(bar),
        )
    if json_:
        print(json.dumps(_figures(done, destination)))
        return
    config = done.config
    print(
        f"{done.kind} checkpoint '{done.weights}': {done.n_parameters:,} parameters, {config.n_layer} layers, vocabulary "
        f"{config.vocab_size:,}, memory {config.mem_len:,}"
        f"{', ' + config.attention if config.attention != 'transformer_xl' else ''}"
    )
    if done.tokenizer is None:
        warn(f"no vocabulary, so '{destination}' has no tokenizer; {PROGRAMS[done.kind].vocabulary}")
        print(f"written to {destination}")
        return
    if done.tokenizer.loses:
        print(f"not kept of a text: {done.tokenizer.loses}")
    print(f"written to {destination}; try: txl eval {destination} --file TEXT, txl generate {destination} --prompt TEXT")


def _telling(bar: "Bar") -> Callable[[int, int], None]:
    """Return what tells a bar of bytes written so far and in all."""
    shown = 0

    def tell(done: int, total: int) -> None:
        nonlocal shown
        if not shown:
            bar.begin("converting", total)
        bar.advance(done - shown)
        shown = done

    return tell


def _figures(done: "Converted", destination: Path) -> dict[str, object]:
    return {
        "kind": done.kind,
        "weights": str(done.weights),
        "parameters": done.n_parameters,
        "bytes": done.n_bytes,
        "tokenizer": None if done.tokenizer is None else done.tokenizer.kind,
        "destination": str(destination),
        "model": done.config.model_dump(mode="json"),
    }


def _write_for_others(
    source: str, destination: Path, to: Literal["huggingface", "authors", "onnx"], tgt_len: int, json_: bool
) -> None:
    if to == "onnx":
        from transformer_xl.conversion.export import load_model
        from transformer_xl.errors import CheckpointError
        from transformer_xl.onnx import describe, export_onnx

        if destination.exists():
            raise CheckpointError(f"'{destination}' exists already; choose another destination, or remove it")
        model = load_model(source)[0]
        export_onnx(model, destination, tgt_len=tgt_len)
        facts = describe(model, tgt_len)
        if json_:
            print(json.dumps({"destination": str(destination), **facts}))
            return
        print(
            f"written to {destination}; {', '.join(f'{name} {value}' for name, value in facts.items())} (in its metadata too)"
        )
        return
    from transformer_xl.conversion.export import export

    done = export(source, destination, kind=to, tgt_len=tgt_len)
    if json_:
        print(json.dumps({"kind": to, "parameters": done.n_parameters, "destination": str(destination), "notes": done.notes}))
        return
    for note in done.notes:
        say(f"note: {note}")
    print(f"{done.n_parameters:,} parameters written to {destination}")

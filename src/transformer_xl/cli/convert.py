"""`txl convert`."""

import json
import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from transformer_xl.cli.options import Json, Overrides, Positive
from transformer_xl.console import progress, say, warn
from transformer_xl.errors import CheckpointError, ConfigError, counted, shown

if TYPE_CHECKING:
    from transformer_xl.conversion.convert import Converted


def convert(
    source: str,
    destination: Path,
    /,
    *,
    to: Literal["native", "huggingface", "authors", "onnx"] = "native",
    kind: Literal["huggingface", "authors", "nvidia", "tensorflow", "labml"] | None = None,
    vocabulary: Path | None = None,
    moses: str | None = None,
    set_: Overrides = None,
    tgt_len: Positive | None = None,
    json_: Json = False,
) -> None:
    """Convert a checkpoint from another program, or export a model; nothing in a checkpoint is executed.

    It recognizes directories and files of Hugging Face (pytorch_model.bin or
    model.safetensors with config.json), the authors' PyTorch code (model.pt)
    and TensorFlow code (model.ckpt*), NVIDIA (checkpoint_*.pt), and labml
    (model.pth with info.json); for XLNet, those of Hugging Face and the
    authors (xlnet_model.ckpt* with xlnet_config.json). From a run, it writes
    the best weights to a directory that you can share, with a model card.

    Common uses:
        txl convert transfo-xl-wt103 models/wt103
        txl convert run/model.pt models/mine --vocabulary data/cache.pt
        txl convert tf_wt103/model models/wt103-tf --set mem_len=1600
        txl convert xlnet_cased_L-12_H-768_A-12 models/xlnet-base
        txl convert runs/mine mine
        txl convert runs/mine exported --to huggingface

    Args:
        source: directory or file of a checkpoint, or a run; with --to, also a native directory or a hub id.
        destination: a directory that does not exist yet, or is empty (with --to onnx: a file).
        to: what to write.
        kind: format of the source. Default: recognized by its files.
        vocabulary: file of the vocabulary: cache.pt, vocab.txt, spiece.model… (labml: a text). Default: found with the weights.
        moses: language whose Moses rules split running text into words, such as en. Default: split at spaces.
        set_: key=value, overrides a setting of the checkpoint, such as mem_len=1600; may be repeated.
        tgt_len: --to onnx: tokens per step (128). Otherwise: those of a training segment (the run's).
        json_: print one JSON object.
    """
    from transformer_xl.checkpoint.run_directory import RunDirectory

    if to != "native" or RunDirectory(source).holds_run:
        for option, value in {"kind": kind, "vocabulary": vocabulary, "moses": moses, "set": set_}.items():
            if value is not None:
                where = f"--to {to}" if to != "native" else f"the run '{source}'"
                raise ConfigError(f"--{option} is for checkpoints of other programs; leave it out with {where}")
        write = _write_onnx if to == "onnx" else partial(_write_checkpoint, kind=to)
        write(source, destination, tgt_len=tgt_len, json_=json_)
        return
    from transformer_xl.config.recipes import parse_override
    from transformer_xl.config.run import merge
    from transformer_xl.conversion.convert import convert as convert_checkpoint

    settings: dict[str, object] = {}
    for override in set_ or []:
        settings = merge(settings, parse_override(override.removeprefix("model.")))
    with progress("converting", unit="bytes") as bar:

        def advance(done: int, total: int) -> None:
            bar.total = total
            bar.advance(done - bar.done)

        given = {"kind": kind, "vocabulary": vocabulary, "moses": moses, "settings": settings}
        converted = convert_checkpoint(source, destination, **given, on_progress=advance)
    _print_converted(converted, destination, json_=json_)


def _print_converted(converted: "Converted", destination: Path, *, json_: bool) -> None:
    from transformer_xl.conversion.programs import vocabulary_hint

    config, tokenizer = converted.config, converted.tokenizer
    if json_:
        facts = {
            "kind": converted.kind,
            "weights": str(converted.weights),
            "parameters": converted.n_parameters,
            "bytes": converted.n_bytes,
            "tokenizer": None if tokenizer is None else tokenizer.kind,
            "tgt_len": converted.tgt_len,
            "notes": converted.notes,
            "destination": str(destination),
            "model": config.model_dump(mode="json"),
        }
        print(json.dumps(facts))
        return
    attention = getattr(config, "attention", config.kind)
    other = "" if attention == config.kind else f", {attention}"
    print(
        f"{converted.kind} checkpoint '{converted.weights}': {converted.n_parameters:,} parameters, "
        f"{counted(config.n_layer, 'layer')}, "
        f"vocabulary {config.vocab_size:,}, memory {config.mem_len:,}{other}"
    )
    if config.head is not None:
        labels = [*map(shown, config.head.labels[:9]), *(["…"] if len(config.head.labels) > 9 else [])]
        print(f"fine-tuned: {config.head.kind}{' as ' if labels else ''}{', '.join(labels)}")
    for note in converted.notes:
        say(f"note: {note}")
    where, advice = shlex.quote(str(destination)), ""
    if tokenizer is None:
        warn(f"no vocabulary, so '{destination}' has no tokenizer; {vocabulary_hint(converted.kind, config)}")
    elif config.head is not None:
        advice = f"; try: txl predict {where} FILE"
    elif config.predicts != "token":
        advice = f"; try, in Python: model, tokenizer = transformer_xl.load({str(destination)!r})"
    else:
        segments = "" if converted.tgt_len is None else f" --tgt-len {converted.tgt_len}"  # as it was trained
        advice = f"; try: txl eval {where} --file TEXT{segments}, txl generate {where} --prompt TEXT"
    if tokenizer is not None and tokenizer.loses:
        print(f"not kept of a text: {tokenizer.loses}")
    print(f"written to {destination}{advice}")


def _write_checkpoint(
    source: str,
    destination: Path,
    *,
    kind: Literal["native", "huggingface", "authors"],
    tgt_len: int | None,
    json_: bool,
) -> None:
    from transformer_xl.conversion.export import export

    exported = export(source, destination, kind=kind, tgt_len=tgt_len)
    if json_:
        facts = {"kind": kind, "parameters": exported.n_parameters, "destination": str(destination), "notes": exported.notes}
        print(json.dumps(facts))
        return
    for note in exported.notes:
        say(f"note: {note}")
    print(f"{exported.n_parameters:,} parameters written to {destination}")


def _write_onnx(source: str, destination: Path, *, tgt_len: int | None, json_: bool) -> None:
    from transformer_xl.conversion.export import load_model
    from transformer_xl.onnx import describe, export_onnx

    if destination.exists():
        raise CheckpointError(f"'{destination}' exists already; choose another destination, or remove it")
    model, tgt_len = load_model(source)[0], tgt_len or 128
    export_onnx(model, destination, tgt_len=tgt_len)
    facts = describe(model, tgt_len)
    if json_:
        print(json.dumps({"destination": str(destination), **facts}))
    else:
        print(
            f"written to {destination}; {', '.join(f'{name} {value}' for name, value in facts.items())} (in its metadata too)"
        )

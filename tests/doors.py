"""Hostile files at the doors of the library other than `txl convert`: one for each kind of attack and file that is opened."""

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import save_file

from tests.conversion.hostile import CANARIES, Hostile, call, name, value, whole
from tests.helpers import TINY, tiny_model
from tests.refuse_child import TEXT_FILE
from transformer_xl.config.run import DataConfig
from transformer_xl.data.prepare import prepare
from transformer_xl.tokenizers.kinds import ByteTokenizer

Write = Callable[[Path], object]  # writes the one hostile file


def make_doors(folder: Path) -> tuple[list[Hostile], list[Hostile]]:
    """Write hostile files below `folder / "files"`, and a prepared corpus in `folder / "writable"`.

    Returns:
        The hostile cases, and for each door a sound one, which must be accepted.
    """
    files, writable = folder / "files", folder / "writable"
    for each in (files, files / CANARIES, writable):
        each.mkdir()
    export = files / "export"
    config = _export(export)
    lines = {
        "recipe": ("x.toml", "[model]\nn_layer = 1\n"),
        "prompts": ("x.jsonl", '{"prompt": "a"}\n'),
        "corpus": ("x.txt", "some text\n" * 100),
        "task": ("y.jsonl", '{"text": "a", "label": 1}\n{"text": "b", "label": 0}\n' * 50),
    }
    sound = {"load": export, "tokenizer": export / "tokenizer.json"}
    for reader, (file, text) in lines.items():
        sound[reader] = files / file
        sound[reader].write_text(text)
    (writable / TEXT_FILE).write_text("some text\n" * 100)
    prepared = sound["prepared"] = writable / "cache"
    prepare(DataConfig(corpus=str(writable / TEXT_FILE)), ByteTokenizer(), cache=prepared, progress=False)

    nested = "[" * 100_000 + "]" * 100_000
    hostile: list[tuple[str, str, Write, str]] = [
        ("load", "config.json", _text(json.dumps(config | {"n_layer": 10**9})), "fill the memory"),
        ("load", "config.json", _text(json.dumps(config | {"dropout": math.nan})), "poison the model"),
        ("load", "model.safetensors", os.mkfifo, "wait forever"),
        ("tokenizer", "x.json", _text(json.dumps({"kind": "../../escape", "format": 1})), "read another file"),
        ("recipe", "y.toml", _text("a = " + nested), "overflow the stack"),
        ("task", "z.jsonl", _text('{"text": "a", "label": ' + nested + "}"), "overflow the stack"),
    ]
    cases = []
    for i, (reader, inside, write, effect) in enumerate(hostile):
        path = files / f"{i}-{inside}"
        if reader == "load":
            path = Path(shutil.copytree(export, files / f"export-{i}"))
            (path / inside).unlink()
        write(path / inside if reader == "load" else path)
        cases.append(Hostile(f"{reader}: {inside} ({i})", path, effect, reader))
    attacked = Path(shutil.copytree(prepared, writable / "attacked"))
    header = b"\x93NUMPY\x01\x00\x46\x00" + b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }".ljust(69) + b"\n"
    attack = call(name("os", "system"), value(f"touch '{files / CANARIES / 'numpy'}'"))
    for path in attacked.rglob("*"):
        if path.is_file() and path.suffix != ".json":
            path.write_bytes(header + whole(attack))
    cases.append(Hostile("prepared: a pickle", attacked, "run a shell", "prepared", "the text is prepared again"))
    return cases, [Hostile(f"{reader}: sound", path, "", reader, "it is sound") for reader, path in sound.items()]


def _export(path: Path) -> dict[str, object]:
    """Write a model as another program would; return its config."""
    path.mkdir()
    model = tiny_model(**{**TINY, "vocab_size": 256})
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, path / "model.safetensors")
    values = {"model_type": model.kind, **model.config.model_dump(mode="json")}
    (path / "config.json").write_text(json.dumps(values))
    ByteTokenizer().save(path / "tokenizer.json")
    return values


def _text(content: str) -> Write:
    return lambda path: path.write_text(content)

"""Hostile files at the doors of the library other than `txl convert`: every file that a command or `txl.load` opens.

Each case is a sound directory or file with one thing changed. `sound_doors` says which; all of them must be accepted.
"""

import gzip
import hashlib
import json
import lzma
import math
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.conversion.hostile import CANARIES, Hostile, payloads, safetensors_files, whole
from tests.data.test_spiece import GOLDENS as SPIECE
from tests.data.test_spiece import field, piece
from tests.data.tokenizer_cases import SAVED_UNIGRAM, TOKENIZERS
from tests.helpers import TINY, tiny_model, tiny_xlnet
from tests.refuse_child import MODEL_FOLDER, TEXT_FILE
from transformer_xl.analysis.ablation.ablation import Ablation
from transformer_xl.analysis.ablation.plan import AblationPlan, Variant
from transformer_xl.checkpoint.checkpoint import MANIFEST_FILE, MODEL_FILE, STATE_FILE
from transformer_xl.checkpoint.run_directory import SEAL_FILE, RunDirectory
from transformer_xl.checkpoint.store import Checkpoint
from transformer_xl.config import DataConfig, RunConfig
from transformer_xl.data.prepare import prepare
from transformer_xl.data.tokenizers import ByteTokenizer
from transformer_xl.generation.decoder import Decoder
from transformer_xl.generation.session import TextSession
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.seals import seal
from transformer_xl.training.record import Record

MODEL = TINY | {"vocab_size": 256}
BOMB = bytes(32 * 2**20)
TOML = "[model]\nn_layer = 1\n[train]\nmax_steps = 2\n"

Write = Callable[[Path], object]  # writes the one hostile file

WRONG: dict[type, list[Any]] = {
    bool: ["true", 1, 0.0, None, [], {}],
    int: ["2", 2.0, True, None, [], {}, 10**18, -1, math.nan, "../../escape"],
    float: ["0.1", True, None, [], {}, math.nan, math.inf, -1.0, 10**400],
    str: [1, True, None, [], {}, "\ud800", "../../escape", "a\0b"],
    list: ["[]", 1, None, {}, [None], [[[]]], [10**18]],
    dict: ["{}", 1, None, [], [[]], {"__class__": "os.system"}],
    type(None): ["null", [], {}, True, -1, math.nan],
}
"""Values that a field of each type must not have; some fields may have some of them (`FITTING`)."""

EVIL = {"__class__": "os.system", "_target_": "os.system", "auto_map": {"AutoModel": "evil--x.Y"}, "../../escape": 1}


class Doors:
    """Collects cases below a folder, all or every n-th."""

    def __init__(self, folder: Path, every: int) -> None:
        self.files, self.writable, self._every = folder / "files", folder / "writable", every
        self.cases: list[Hostile] = []
        self._n = 0

    def sound(self, name: str, *, written: bool = False) -> Path:
        """Return where a sound directory or file lies."""
        return (self.writable if written else self.files) / name

    def add(
        self, reader: str, base: Path, inside: str, case: str, write: Write, *, effect: str = "confuse", harmless: str = ""
    ) -> None:
        """Copy a directory, and let `write` replace the file `inside` of it; without a base, the file stands alone."""
        self._n += 1
        if self._n % self._every:
            return
        number = self._n
        name = f"{base.name}-{number}" if inside else f"{number}-{base.name}"
        path = base.parent / name
        if inside:
            shutil.copytree(base, path)
        target = path / inside if inside else path
        _remove(target)
        write(target)
        self.cases.append(Hostile(f"{reader}: {inside or base.suffix}, {case} ({number})", path, effect, reader, harmless))


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def data(content: bytes | str) -> Write:
    """Return what writes a file."""
    return lambda path: path.write_bytes(content if isinstance(content, bytes) else content.encode())


def as_json(value: Any) -> Write:
    """Return what writes JSON, NaN and lone surrogates included; a function is called for the value."""
    return lambda path: path.write_text(json.dumps(value() if callable(value) else value))


def two_links(path: Path) -> None:
    """Write two links that lead to each other."""
    other = path.with_name(f".{path.name}.other")
    path.symlink_to(other.name)
    other.symlink_to(path.name)


def overlapping(path: Path) -> None:
    """Write a header of tensors that share the same 4 GB, which take no room."""
    names = (f"layers.{i}.attention.qkv.weight" for i in range(100))
    header = {name: {"dtype": "F32", "shape": [2**30], "data_offsets": [0, 2**32]} for name in names}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + 2**32)


def sparse(path: Path) -> None:
    """Write 300 MB that take no room."""
    with path.open("wb") as file:
        file.truncate(300 * 2**20)


@cache
def special_files() -> dict[str, Write]:
    """Return what is no regular file, or a huge one."""
    return {
        "pipe": os.mkfifo,
        "device": lambda path: path.symlink_to("/dev/zero"),
        "folder": Path.mkdir,
        "lost link": lambda path: path.symlink_to("nothing"),
        "circular link": lambda path: path.symlink_to(path.name),
        "two links": two_links,
        "socket": lambda path: os.mknod(path, stat.S_IFSOCK | 0o600),
        "300 MB": sparse,
    }


def bad_json(folder: Path) -> dict[str, Write]:
    """Return what stands in place of a JSON object."""
    attack = whole(payloads(folder)["os.system"][0])
    return special_files() | {
        "missing": lambda path: None,
        "empty": data(b""),
        "NUL": data(bytes(64)),
        "cut": data(b'{"a": 1'),
        "not UTF-8": data(b'{"\xff": 1}'),
        "nested": data("[" * 100_000),
        "nested and closed": data('{"a":' * 50_000 + "1" + "}" * 50_000),
        "key twice": data('{"format": 1, "format": 1}'),
        "list": data("[]"),
        "null": data("null"),
        "a million digits": data('{"a": ' + "9" * 1_000_000 + "}"),
        "1e999": data('{"a": 1e999}'),
        "commas": data("[" + "0," * 500_000 + "0]"),
        "classes": as_json(EVIL),
        "lone surrogate": data('{"\\ud800": "\\udfff"}'),
        "pickle": data(attack),
    }


def changed(values: dict[str, Any], *, n_each: int) -> Iterator[tuple[str, Any]]:
    """Yield a name and a copy of `values` for each field, of tables in it too, with some of the wrong values of its type."""
    for number, (key, value) in enumerate(values.items()):
        if isinstance(value, dict) and 0 < len(value) < 100:  # not a vocabulary
            for name, inner in changed(value, n_each=n_each):
                yield f"{key}.{name}", values | {key: inner}
        wrong = WRONG[type(value)]
        for i in range(min(n_each, len(wrong))):
            new = wrong[(number + i) % len(wrong)]
            yield f"{key}={str(new)[:20]!a}", values | {key: new}
    yield "with classes", values | EVIL


FITTING = {
    "train.max_bad_steps=": "a large number is a number",
    "eval.max_tokens=": "a large number is a number",
    "train.attention=": "a training looks up the name of a backend",
    "manifest.json, sealed, with classes": "no other names in a manifest are looked up",
    "pace.json, a.with classes": "no other names in it are looked up",
    "seed0.json, with classes": "no other names in it are looked up",
    "seed0.json, text=": "it is only compared and shown",
    "unknown_text='../": "it is only written",
    "line_end='None'": "a line end then has no id",
    "seed0.json, tokenizer=": "it is only compared",
    "optim.clip='None'": "gradients are then not clipped",
}


def _unused(case: str) -> str:
    """Return why a changed value may be accepted; empty: it must not."""
    return next((why for part, why in FITTING.items() if part in case), "")


# --- sound files ------------------------------------------------------------------------------------------------------


def export(path: Path, *, tokenizer: Any = None, make: Callable[..., Any] = tiny_model, **changes: Any) -> dict[str, Any]:
    """Write a model as another program would, without a seal; return its config."""
    path.mkdir(parents=True)
    model = make(**{**MODEL, **changes})
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, path / "model.safetensors")
    values = {"model_type": model.kind, **model.config.model_dump(mode="json")}
    (path / "config.json").write_text(json.dumps(values))
    (tokenizer or ByteTokenizer()).save(path / "tokenizer.json")
    return values


def run_directory(path: Path) -> RunConfig:
    """Write a run with one checkpoint and a log."""
    model = tiny_model(**MODEL)
    config = RunConfig(model=model.config)
    path.mkdir(parents=True)
    run = RunDirectory(path)
    with run.locked():
        run.create(config, ByteTokenizer())
    state = {"record": {"best": {"step": 1, "loss": 1.0, "average": False}}}
    run.store().save(Checkpoint(1, model.state_dict(), {"average.x": torch.ones(2)}, state), best=True)
    record = Record(path)
    record.write("train", 1, loss=2.0, tokens=100, seconds=1.0)
    return config


def sealed_config(values: dict[str, Any]) -> Write:
    """Return what writes the settings of a run and seals them, as an attacker would."""

    def write(path: Path) -> None:
        as_json(values)(path)
        with suppress(ValueError):  # NaN, which cannot be sealed
            (path.parent / SEAL_FILE).write_bytes(seal({"configs": [values], "tokenizer": ByteTokenizer().fingerprint}))

    return write


def sealed_again(folder: Path, name: str, content: bytes) -> None:
    """Replace a file of a checkpoint, and make its manifest say so, as an attacker would."""
    (folder / name).write_bytes(content)
    manifest = json.loads((folder / MANIFEST_FILE).read_bytes())
    del manifest["checksum"]
    manifest["files"][name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (folder / MANIFEST_FILE).write_bytes(seal(manifest))


def ablation(path: Path) -> None:
    """Write an ablation of one run, which is done."""
    plan = AblationPlan((Variant("a", "quickstart", {}, RunConfig()),), seeds=1)
    found = Ablation(path, plan)
    found.begin()
    (path / "pace.json").write_text(json.dumps({"a": {"seconds": 0.5, "median": 0.5}}))
    score = {"reading": {"length": 5}, "score": {"loss": 2.0, "bpc": 3.0}}
    facts = {"run": "a-seed0", "variant": "a", "parameters": 100, "steps": 10, "tokens": 100, "seconds": 1.0}
    about = {"text": "test split", "tokenizer": "0" * 64, "unit": "byte", "loses": ""}
    found.save_result(plan.trials[0], facts | about | {"scores": [score], "done": True})


def session(path: Path, model: Path) -> None:
    """Write what a decoder has read."""
    path.parent.mkdir()
    opened = TextSession(Decoder(TransformerXL.from_pretrained(model)), ByteTokenizer())
    opened.decoder.read([[1, 2, 3]])
    opened.save(path)


# --- doors ------------------------------------------------------------------------------------------------------------


def make_doors(folder: Path, *, every: int = 1) -> tuple[list[Hostile], list[Hostile]]:
    """Write every n-th case below a folder.

    Returns:
        The hostile cases, and for each door a sound one, which must be accepted.
    """
    doors = Doors(folder.resolve(), every)
    doors.files.mkdir()
    (doors.files / CANARIES).mkdir()
    doors.writable.mkdir()
    sound = [
        maker(doors)
        for maker in (_exports, _xlnets, _runs, _tokenizers, _spiece, _sessions, _recipes, _prompts, _corpora, _tasks)
    ]
    sound += [_prepared(doors), _logs(doors), _ablations(doors)]
    opened = [Hostile(f"{reader}: sound", path, "", reader, "it is sound") for each in sound for reader, path in each.items()]
    return doors.cases, opened


def _exports(doors: Doors) -> dict[str, Path]:
    base = doors.sound(MODEL_FOLDER)
    values = export(base)
    for case, write in bad_json(doors.files).items():
        doors.add("load", base, "config.json", case, write)
        doors.add("huggingface", base, "config.json", case, write)
    for case, config in changed(values, n_each=3):
        doors.add("load", base, "config.json", case, as_json(config))
    for case, config in changed(values, n_each=1):
        doors.add("huggingface", base, "config.json", case, as_json(config))
    huge: dict[str, Any] = {"n_layer": 10**9, "d_head": 10**18, "d_model": 10**12, "vocab_size": 10**18, "model_type": ["a"]}
    for key, value in huge.items():
        for reader in ("load", "from_pretrained", "huggingface"):
            doors.add(reader, base, "config.json", f"{key}={value}", as_json(values | {key: value}), effect="fill the memory")
    clamped = as_json(values | {"clamp_len": 10**9})
    doors.add("read", base, "config.json", "clamp_len", clamped, effect="fill the memory", harmless="no distance is as large")
    for change in ({"mem_len": 10**9}, {"mem_len": 10**18, "clamp_len": 3}, {"mem_len": 10**12, "zero_first_memory": True}):
        long = as_json(values | change)
        doors.add("read", base, "config.json", str(change), long, effect="fill the memory")
        grows = "" if "zero_first_memory" in change else "its memory grows with the text"
        doors.add("huggingface read", base, "config.json", str(change), long, effect="fill the memory", harmless=grows)
    weights = {name: torch.zeros_like(tensor) for name, tensor in tiny_model(**MODEL).state_dict().items()}
    first = next(iter(weights))
    others = {
        "integers": weights | {first: weights[first].int()},
        "booleans": weights | {first: weights[first].bool()},
        "a missing tensor": {name: tensor for name, tensor in weights.items() if name != first},
        "another tensor": weights | {"../../escape": torch.zeros(1)},
        "NaN": weights | {first: torch.full_like(weights[first], math.nan)},
        "infinity in bf16": weights | {first: torch.full_like(weights[first], -math.inf).bfloat16()},
        "an empty tensor": weights | {first: torch.zeros(0)},
        "a flat tensor": weights | {first: weights[first].flatten()},
    }
    for case, tensors in others.items():
        doors.add("load", base, "model.safetensors", case, lambda path, tensors=tensors: save_file(tensors, path))
    for case, (content, effect) in safetensors_files().items():
        doors.add("from_pretrained", base, "model.safetensors", case, data(content), effect=effect)

    def millions(path: Path) -> None:
        empty = {f"t{i:07}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(550_000)}
        text = json.dumps(empty).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text)

    for reader in ("load", "from_pretrained", "huggingface"):
        doors.add(reader, base, "model.safetensors", "33 MB of empty tensors", millions, effect="fill the memory")
        doors.add(reader, base, "model.safetensors", "4 GB a hundred times", overlapping, effect="fill the memory")
        for case, write in special_files().items():
            if reader != "huggingface" or case == "300 MB":  # of the others transformers says that there is no file
                doors.add(reader, base, "model.safetensors", case, write)
    bpe = TOKENIZERS["bpe"].to_dict()

    def with_fields(fields: dict[str, Any]) -> dict[str, Any]:
        return bpe | {"library": bpe["library"] | {"model": bpe["library"]["model"] | fields}}

    for case, make in {
        "a million merges": lambda: with_fields({"merges": [["a", "b"]] * 10**6}),
        "a million pieces": lambda: with_fields({"vocab": {f"{i:x}": i for i in range(10**6)}}),
    }.items():
        doors.add("load", base, "tokenizer.json", case, as_json(make), effect="fill the memory")
    return dict.fromkeys(("load", "read", "from_pretrained", "huggingface", "huggingface read"), base)


def _xlnets(doors: Doors) -> dict[str, Path]:
    base = doors.sound("sound-xlnet")
    values = export(base, make=tiny_xlnet)
    for case, config in changed(values, n_each=2):
        doors.add("load", base, "config.json", case, as_json(config))
    huge: dict[str, Any] = {"n_layer": 10**9, "d_head": 10**18, "d_model": 10**12, "vocab_size": 10**18, "model_type": ["a"]}
    for key, value in huge.items():
        doors.add("load", base, "config.json", f"{key}={value}", as_json(values | {key: value}), effect="fill the memory")
    theirs = {"model_type": "xlnet", "ff_activation": "gelu", "n_layer": 2, "architectures": ["XLNetLMHeadModel"]}
    doors.add("load", base, "config.json", "of Hugging Face", as_json(theirs), effect="be taken for ours")
    doors.add("load", base, "config.json", "other kind", as_json(values | {"model_type": "transformer_xl"}))
    return {"load": base}


def _runs(doors: Doors) -> dict[str, Path]:
    base = doors.sound("run")
    config = run_directory(base)
    values = config.model_dump(mode="json")
    for name in ("config.json", "tokenizer.json", SEAL_FILE):
        for case, write in bad_json(doors.files).items():
            if (name, case) != ("config.json", "missing"):  # then it is an export
                doors.add("load", base, name, case, write)
    for case, changes in changed(values, n_each=1):
        doors.add("load", base, "config.json", case, sealed_config(changes), harmless=_unused(case))
    step = "checkpoints/step-00000001"
    for name in (MANIFEST_FILE, STATE_FILE, MODEL_FILE):
        for case, write in bad_json(doors.files).items():
            doors.add("load", base, f"{step}/{name}", case, write)
    manifest = json.loads((base / step / MANIFEST_FILE).read_bytes())
    del manifest["checksum"]
    for case, content in changed(manifest, n_each=3):
        try:
            sealed = data(seal(content))
            doors.add(
                "load",
                base,
                f"{step}/{MANIFEST_FILE}",
                f"sealed, {case}",
                sealed,
                harmless=_unused(f"{MANIFEST_FILE}, sealed, {case}"),
            )
        except ValueError:  # NaN cannot be sealed
            doors.add("load", base, f"{step}/{MANIFEST_FILE}", case, as_json(content))
    for case, content in changed({"record": {"best": {"step": 1, "average": False}}}, n_each=4):
        text = json.dumps(content).encode()
        unused = "a broken record only means that the weights are not averaged ones"
        doors.add(
            "load",
            base,
            f"{step}/{STATE_FILE}",
            f"sealed, {case}",
            lambda path, text=text: sealed_again(path.parent, STATE_FILE, text),
            harmless="" if "NaN" in text.decode() else unused,
        )
    for case, write in bad_json(doors.files).items():
        doors.add("load", base, "checkpoints/best.json", case, write, harmless="a warning says that the best is unknown")
    return {}


def _tokenizers(doors: Doors) -> dict[str, Path]:
    folder = doors.sound("tokenizers")
    folder.mkdir()
    base = folder
    for kind, tokenizer in TOKENIZERS.items():
        base = folder / f"{kind}.json"
        tokenizer.save(base)
        for case, changes in changed(tokenizer.to_dict(), n_each=2):  # without the checksum, which would refuse them all
            same = "library." in case and ("with classes" in case or "decoder='None'" in case)
            harmless = "the library ignores what it does not know, and the text survives" if same else _unused(case)
            doors.add("tokenizer", base, "", case, as_json(changes), harmless=harmless)
        doors.add("tokenizer", base, "", "checksum of null", as_json(tokenizer.to_dict() | {"checksum": None}))
    for case, write in bad_json(doors.files).items():
        doors.add("tokenizer", base, "", case, write)
    bpe = TOKENIZERS["bpe"].to_dict()
    pieces = bpe["library"]["model"]
    for case, fields in {
        "a million merges": {"merges": [["a", "b"]] * 10**6},
        "a million merges as texts": {"merges": ["a b"] * 10**6},
    }.items():
        many = as_json(bpe | {"library": bpe["library"] | {"model": pieces | fields}})
        doors.add("tokenizer", base, "", case, many, effect="fill the memory")
    for text in ("\ud800", "a\ud800b", "\udfff\ud800"):
        words = {"kind": "word", "format": 1, "words": ["<unk>", text], "unknown": "<unk>"}
        doors.add("tokenizer", base, "", f"word {text!a}", as_json(words))
    for case, fields in {
        "300,000 pieces": {"pieces": [f"{i:x}" for i in range(300_000)], "scores": [0.0] * 300_000},
        "a table of 8 MB": {"pieces": ["<unk>"], "scores": [0.0], "rules": "A" * (8 << 20)},
    }.items():
        doors.add("tokenizer", base, "", case, as_json(SAVED_UNIGRAM | fields), effect="fill the memory")
    return {"tokenizer": base}


def _spiece(doors: Doors) -> dict[str, Path]:
    folder = doors.sound("sentencepiece")
    folder.mkdir()
    base = folder / "spiece.model"
    sound = (SPIECE / "xlnet.model").read_bytes()
    base.write_bytes(sound)
    for case, write in bad_json(doors.files).items():
        doors.add("spiece", base, "", case, write)
    for at in range(1, len(sound), len(sound) // 10):
        doors.add("spiece", base, "", f"cut at {at}", data(sound[:at]))
    pieces, unknown = piece("a"), field(2, b"") + field(3, b"") + piece("<unk>", 0.0, 2)
    table = field(2, b"\xff\xff\xff\x7f" + bytes(100))
    contents = {
        "a length beyond the end": unknown + b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\x7f",
        "a table beyond the end": unknown + pieces + field(3, table),
        "a table that writes 3 MB": unknown + pieces + field(3, field(2, b"\x04\0\0\0" + bytes(4) + b"a" * (3 << 20) + b"\0")),
        "NaN": unknown + piece("a", math.nan),
        "a piece twice": unknown + pieces + pieces,
        "a surrogate": unknown + piece(b"\xed\xa0\x80"),
    }

    def many(path: Path) -> None:
        path.write_bytes(unknown + b"".join(piece(f"{i:x}") for i in range(10**6)))

    doors.add("spiece", base, "", "a million pieces", many, effect="fill the memory")
    for case, content in contents.items():
        doors.add("spiece", base, "", case, data(content), effect="fill the memory")
    return {"spiece": base}


def _sessions(doors: Doors) -> dict[str, Path]:
    base = doors.sound("sessions") / "x.session"
    session(base, doors.sound(MODEL_FOLDER))
    sealed = base.read_bytes()
    for case, write in bad_json(doors.files).items():
        doors.add("session", base, "", case, write)
    for case, (content, effect) in safetensors_files().items():
        doors.add("session", base, "", case, data(content), effect=effect)
        doors.add("session", base, "", f"hashed, {case}", data(hashed(content)), effect=effect)
    for at in range(0, len(sealed), len(sealed) // 10):
        doors.add("session", base, "", f"cut at {at}", data(sealed[:at]))
    return {"session": base}


def hashed(content: bytes) -> bytes:
    """Return a session with the hash that its bytes need."""
    return content[:-32] + hashlib.sha256(content[:-32]).digest()


def _recipes(doors: Doors) -> dict[str, Path]:
    folder = doors.sound("recipes")
    folder.mkdir()
    base = folder / "x.toml"
    base.write_text(TOML)
    for case, write in special_files().items():
        doors.add("recipe", base, "", case, write)
    contents: dict[str, bytes | str] = {
        "NUL": bytes(64),
        "not UTF-8": b"name = '\xff'",
        "nested": "a = " + "[" * 100_000,
        "nested and closed": "a = " + "[" * 100_000 + "]" * 100_000,
        "nested tables": "a = " + "{b = " * 50_000 + "1" + "}" * 50_000,
        "dotted": "a" + ".a" * 100_000 + " = 1",
        "dotted a thousand times": "".join(f"a{'.a' * 500}.b{i} = 1\n" for i in range(900)),
        "tables": "".join(f"[a{i}.b.c]\n" for i in range(70_000)),
        "key twice": "name = 'a'\nname = 'b'",
        "a million digits": "seed = " + "9" * 1_000_000,
        "a long text": f"name = '{'a' * 900_000}'",
        "JSON": json.dumps({"name": "x"}),
        "pickle": whole(payloads(doors.files)["os.system"][0]),
        "date": "[model]\nn_layer = 1979-05-27",
        "NaN": "[optim]\nlr = nan",
        "infinite": "[optim]\nlr = inf",
        "table as a number": "model = 1",
        "number as a table": "[model.n_layer]\na = 1",
        "list of tables": "[[model]]\nn_layer = 1",
        "class": "[model]\n__class__ = 'os.system'",
        "target": "_target_ = 'os.system'",
        "kind upwards": "[model]\nkind = '../../escape'",
        "kind as a list": "[model]\nkind = ['transformer_xl']",
        "boolean": "[model]\nn_layer = true",
        "text": "[model]\nn_layer = '2'",
        "float": "[model]\nn_layer = 2.0",
        "minus one": "[model]\nn_layer = -1",
        "name with line ends": 'name = "a\\nb"\nx = 1',
    }
    for case, content in contents.items():
        doors.add("recipe", base, "", case, data(content))
    return {"recipe": base}


@cache
def compressed() -> dict[str, bytes]:
    """Return files that grow to 32 MB, and their like, by name endings."""
    import zstandard

    small = gzip.compress(b"text\n" * 100)
    return {
        ".gz": gzip.compress(BOMB, 6),
        ".xz": lzma.compress(BOMB, preset=0),
        ".zst": zstandard.compress(BOMB),
        ".cut.gz": small[:-6],
        ".tail.gz": small + b"tail",
        ".checksum.gz": small[:-8] + bytes(8),
        ".plain.xz": b"text",
        ".window.zst": b"\x28\xb5\x2f\xfd\x00\xff" + bytes(16),
        ".dictionary.xz": lzma.compress(b"text", format=lzma.FORMAT_RAW, filters=[{"id": lzma.FILTER_LZMA2}]),
        ".empty.gz": b"",
        ".empty.zst": b"",
    }


def _prompts(doors: Doors) -> dict[str, Path]:
    folder = doors.sound("prompts")
    folder.mkdir()
    base = folder / "x.jsonl"
    base.write_text('{"prompt": "a"}\n')
    for reader in ("prompts", "prompt", "text"):
        for case, write in special_files().items():
            if (case, reader) != ("300 MB", "text"):  # a text may have any size
                doors.add(reader, base, "", case, write)
        for suffix, content in compressed().items():
            harmless = "" if content else "it is an empty text"
            path = base.with_suffix(suffix)
            doors.add(reader, path, "", "compressed", data(content), effect="fill the memory", harmless=harmless)
    seeds: list[Any] = ["1", 1.0, True, [], {}, -1, 2**64, 10**400]
    lines: dict[str, bytes | str] = {
        "empty": b"",
        "blank": b"\n\n\n",
        "NUL": b'{"prompt": 1}' + bytes(64),
        "not UTF-8": b'{"prompt": "\xff"}',
        "nested": "[" * 100_000,
        "nested prompt": '{"prompt": ' + "[" * 100_000 + "]" * 100_000 + "}",
        "list": "[]",
        "null": "null",
        "number": '{"prompt": 1}',
        "empty prompt": '{"prompt": ""}',
        "no prompt": "{}",
        "classes": json.dumps({"prompt": "a"} | EVIL),
        "prompt twice": '{"prompt": "a", "prompt": "b"}',
        "seed twice": '{"prompt": "a", "seed": 1, "seed": 2}',
        **{f"seed {seed!a}": json.dumps({"prompt": "a", "seed": seed}) for seed in seeds},
        "NaN": '{"prompt": "a", "seed": NaN}',
        "digits": '{"prompt": "a", "seed": ' + "9" * 1_000_000 + "}",
        "pickle": whole(payloads(doors.files)["os.system"][0]),
    }
    for case, content in lines.items():
        doors.add("prompts", base, "", case, data(content))
    surrogate = data('{"prompt": "\\ud800"}')
    doors.add("prompts", base, "", "lone surrogate", surrogate, harmless="bytes represent any text")
    return dict.fromkeys(("prompts", "prompt", "text"), base)


def _corpora(doors: Doors) -> dict[str, Path]:
    folder = doors.sound("corpora")
    folder.mkdir()
    base = folder / "x.txt"
    base.write_text("some text\n" * 100)
    for case, write in special_files().items():
        if case not in ("folder", "300 MB"):
            doors.add("corpus", base, "", case, write)
    doors.add("corpus", base, "", "folder", Path.mkdir)
    doors.add("corpus", base, "", "empty", data(b""))
    for suffix, content in compressed().items():
        doors.add("corpus", base.with_suffix(suffix), "", "compressed", data(content), effect="fill the disk")
    directory = folder / "directory"
    directory.mkdir()
    (directory / "a.txt").write_text("some text\n" * 100)
    for case, write in special_files().items():
        doors.add("corpus", directory, "b.txt", case, write, harmless="what is no text file is left out")
    inside = {
        "circle": lambda path: path.symlink_to(".."),
        "upwards": lambda path: path.symlink_to("/"),
        "name with a line end": lambda path: (path.parent / "b\nb.txt").write_text("x\n"),
        "name that is not UTF-8": lambda path: Path(os.fsdecode(os.fsencode(path.parent) + b"/\xff.txt")).write_text("x\n"),
        "name of an option": lambda path: (path.parent / "--set").write_text("x\n"),
    }
    for case, write in inside.items():
        doors.add("corpus", directory, "b", case, write, harmless="it is text, or it is not followed")
    return {"corpus": base}


def _tasks(doors: Doors) -> dict[str, Path]:
    folder = doors.sound("tasks")
    folder.mkdir()
    table, lines, choices = folder / "x.tsv", folder / "x.jsonl", folder / "y.jsonl"
    table.write_text("a\t1\nb\t0\n" * 50)
    lines.write_text('{"text": "a", "label": 1}\n{"text": "b", "label": 0}\n' * 50)
    choices.write_text('{"text": "a", "options": ["b", "c"], "label": 1}\n' * 50)
    for base, reader in ((table, "task"), (lines, "task"), (choices, "choices")):
        for case, write in special_files().items():
            doors.add(reader, base, "", case, write)
        for suffix, content in compressed().items():
            what, _, kind = suffix.rpartition(".")
            path = base.with_name(f"{base.stem}{what}{base.suffix}.{kind}")
            doors.add(reader, path, "", "compressed", data(content), effect="fill the memory")
    good = '{"text": "a", "label": 1}\n'
    bad: dict[str, bytes | str] = {
        "empty": b"",
        "blank": b"\n\n\n",
        "NUL": good.encode() + bytes(64),
        "not UTF-8": good.encode() + b'{"text": "\xff", "label": 0}',
        "nested": good + "[" * 100_000,
        "nested label": good + '{"text": "a", "label": ' + "[" * 100_000 + "]" * 100_000 + "}",
        "list": good + "[]",
        "number": good + '{"text": 1, "label": 0}',
        "no text": good + '{"label": 0}',
        "classes": good + json.dumps({"text": "a"} | EVIL),
        "text twice": good + '{"text": "a", "text": "b", "label": 0}',
        "digits": good + '{"text": "a", "label": ' + "9" * 1_000_000 + "}",
        "NaN": good + '{"text": "a", "label": NaN}',
        "pickle": whole(payloads(doors.files)["os.system"][0]),
    }
    for case, content in bad.items():
        doors.add("task", lines, "", case, data(content))
        doors.add("task", table, "", case, data(content))
    good = '{"article": "a", "questions": ["b"], "options": [["c", "d"]], "answers": ["A"]}\n'
    worse = {
        "options": '{"article": "a", "questions": ["b"], "options": {"0": 1}, "answers": ["A"]}',
        "answers": '{"article": "a", "questions": ["b"], "options": [["c", "d"]], "answers": ["A", "B"]}',
        "digits": '{"article": "a", "questions": ["b"], "options": [["c", "d"]], "answers": ["' + "9" * 1_000_000 + '"]}',
        "types": '{"article": [], "questions": [[]], "options": [[[], {}]], "answers": [{}]}',
        "no choices": '{"article": "a", "questions": ["b"], "options": [[]], "answers": ["A"]}',
    }
    for case, content in worse.items():
        doors.add("choices", choices, "", case, data(good + content))
    return {"task": table, "choices": choices}


def _prepared(doors: Doors) -> dict[str, Path]:
    folder = doors.sound("prepared", written=True)
    folder.mkdir()
    base = folder / "cache"
    (folder / TEXT_FILE).write_text("some text\n" * 100)
    prepare(DataConfig(corpus=str(folder / TEXT_FILE)), ByteTokenizer(), cache=base, progress=False)
    (directory,) = [path.name for path in base.iterdir() if path.is_dir()]
    again = "the text is prepared again"
    files = sorted(path.name for path in (base / directory).iterdir())
    for name in files:
        for case, write in (bad_json(doors.files) if name == "manifest.json" else special_files()).items():
            doors.add("prepared", base, f"{directory}/{name}", case, write, harmless=again)
    values = json.loads((base / directory / "manifest.json").read_text())
    for case, changes in changed(values, n_each=1):
        doors.add("prepared", base, f"{directory}/manifest.json", case, as_json(changes), harmless=again)
    attack = b"\x93NUMPY\x01\x00\x46\x00" + b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }".ljust(69) + b"\n"
    pickled = data(attack + whole(payloads(doors.files)["os.system"][0]))
    doors.add("prepared", base, f"{directory}/documents.train.npy", "pickle", pickled, harmless=again)
    return {"prepared": base}


def _logs(doors: Doors) -> dict[str, Path]:
    base = doors.sound("run", written=True)
    run_directory(base)
    for name in ("metrics.jsonl", "environment.json", "loggers.json"):
        for case, write in bad_json(doors.files).items():
            harmless = "what is damaged is named and set aside, and the run goes on"
            if name == "metrics.jsonl" and case in special_files():
                harmless = ""
            if (name, case) == ("metrics.jsonl", "300 MB"):  # a log may be long, and is read line by line
                continue
            doors.add("log", base, name, case, write, harmless=harmless)
    return {"log": base}


def _ablations(doors: Doors) -> dict[str, Path]:
    base = doors.sound("ablation")
    ablation(base)
    result = next((base / "results").iterdir()).relative_to(base)
    for name in ("ablation.json", "pace.json", str(result)):
        for case, write in bad_json(doors.files).items():
            absent = case in ("missing", "lost link", "circular link", "two links") and name != "ablation.json"
            harmless = "it is not there yet" if absent else ""
            doors.add("ablation", base, name, case, write, harmless=harmless)
        values = json.loads((base / name).read_text())
        for case, changes in changed(values, n_each=2):
            doors.add("ablation", base, name, case, as_json(changes), harmless=_unused(f"{name}, {case}"))
    values = json.loads((base / "ablation.json").read_text())
    (variant,) = values["variants"]
    for case, change in changed(variant, n_each=1):
        plan = as_json(values | {"variants": [change]})
        doors.add(
            "ablation",
            base,
            "ablation.json",
            f"variant, {case}",
            plan,
            harmless=_unused(case),
        )
    upwards = as_json(values | {"variants": [variant | {"name": "../../escape"}]})
    doors.add("ablation", base, "ablation.json", "variant upwards", upwards, effect="write outside")
    return {"ablation": base}

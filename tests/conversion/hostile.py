"""Files that attack whoever reads them, one of each kind. Every payload that ran would leave a trace in `canary/`.

`make_hostile(folder)` writes them all; nothing here ever loads one.
"""

import io
import itertools
import json
import math
import os
import pickle
import pickletools
import shutil
import struct
import zipfile
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

MAGIC = 0x1950A86A20F9469CFC6C
CANARIES = "canary"
VARIABLE = "TXL_CANARY"


@dataclass(frozen=True)
class Hostile:
    """A file or directory that must be refused, or do no harm.

    Attributes:
        name: of the case.
        path: of the file or directory.
        effect: what it would do to a careless reader.
        reader: "unpickle", "safetensors", or "convert" for directories that only a conversion reads; others see
            `tests/refuse_child.py`.
        harmless: why it may be accepted all the same; empty: it must not.
    """

    name: str
    path: Path
    effect: str
    reader: str
    harmless: str = ""


def make_hostile(folder: Path) -> list[Hostile]:
    """Write every hostile file.

    Args:
        folder: an existing, empty directory.

    Returns:
        What was written. A payload that runs creates a file in `folder / "canary"` or sets the variable `VARIABLE`.
    """
    folder = folder.resolve()
    (folder / CANARIES).mkdir()
    makers = (_pickles, _torch_pickles, _zips, _legacies, _safetensors, _specials, _directories)
    return list(itertools.chain.from_iterable(maker(folder) for maker in makers))


# --- assembling pickles by hand ---------------------------------------------------------------------------------------


def value(content: Any) -> bytes:
    """Return opcodes that push a plain value, without touching the memo."""
    return pickletools.optimize(pickle.dumps(content, protocol=2))[2:-1]


def name(module: str, attribute: str) -> bytes:
    """Return opcodes that push a global."""
    return f"c{module}\n{attribute}\n".encode()


def dotted(module: str, attribute: str) -> bytes:
    """Return opcodes that push a global whose name protocol 4 may dot."""
    return value(module) + value(attribute) + b"\x93"


def tuple_of(*parts: bytes) -> bytes:
    """Return opcodes that push a tuple of what the parts push."""
    return b"(" + b"".join(parts) + b"t"


def call(function: bytes, *args: bytes) -> bytes:
    """Return opcodes that call a function."""
    return function + tuple_of(*args) + b"R"


def whole(body: bytes, protocol: int = 2) -> bytes:
    """Return a pickle of its opcodes."""
    return b"\x80" + bytes([protocol]) + body + b"."


def entry(key: str, body: bytes) -> bytes:
    """Return opcodes that push {key: what the body pushes}."""
    return b"}" + value(key) + body + b"s"


def storage(*, kind: bytes = name("torch", "FloatStorage"), key: Any = "0", size: Any = 4, view: bytes = b"") -> bytes:
    """Return opcodes that push a storage of `torch.save`."""
    return tuple_of(value("storage"), kind, value(key), value("cpu"), value(size), view) + b"Q"


NO_HOOKS = call(name("collections", "OrderedDict"))


def tensor(
    *, of: bytes | None = None, offset: Any = 0, shape: Any = (4,), stride: Any = (1,), hooks: bytes = NO_HOOKS
) -> bytes:
    """Return opcodes that push a tensor of `torch.save`."""
    parts = [of or storage(), *map(value, (offset, shape, stride, False)), hooks]
    return call(name("torch._utils", "_rebuild_tensor_v2"), *parts)


# --- payloads -----------------------------------------------------------------------------------------------------------


def payloads(folder: Path) -> dict[str, tuple[bytes, str]]:
    """Return opcodes that would do harm, and what harm, by name."""

    def canary(case: str) -> str:
        return str(folder / CANARIES / case)

    def shell(case: str) -> bytes:
        return value(f"touch '{canary(case)}'")

    def python(case: str) -> bytes:
        return value(f"__import__('pathlib').Path({canary(case)!r}).touch()")

    nested = whole(call(name("os", "system"), shell("nested")))
    script = folder / "script.py"
    script.write_text(f"open({canary('script')!r}, 'w')\n")
    importer = call(name("builtins", "__import__"), value("os"))
    load = name("torch.storage", "_load_from_bytes")
    function, state = name("torch._utils", "_rebuild_tensor_v2"), {"__defaults__": (1, 2), "__code__": 1}
    return {
        "os.system": (call(name("os", "system"), shell("os.system")), "run a shell"),
        "getattr": (call(call(name("builtins", "getattr"), importer, value("system")), shell("getattr")), "find a shell"),
        "dotted method": (call(dotted("pathlib", "Path.touch"), value(canary("touch"))), "write a file"),
        "module in a name": (call(dotted("torch.nn.modules", "module.os.system"), shell("dotted")), "run a shell"),
        "os.environ": (call(dotted("os", "environ.__setitem__"), value(VARIABLE), value("1")), "change the environment"),
        "torch.hub.load": (call(name("torch.hub", "load"), value(str(folder)), value("model")), "run hubconf.py"),
        "_load_from_bytes": (call(load, data(legacy_file(nested, {}))), "unpickle nested bytes"),
        "inst": (b"(" + shell("inst") + b"ios\nsystem\n", "run a shell"),
        "reconstructor": (call(name("copyreg", "_reconstructor"), name("subprocess", "Popen"), value(1), value(2)), "run"),
        "extension": (b"\x82\x01" + tuple_of(shell("extension")) + b"R", "call a registered function"),
        "attributes of a function": (function + value((None, state)) + b"b", "change the reader"),
    }


def data(content: bytes) -> bytes:
    """Return an opcode that pushes bytes, as protocol 3 does."""
    return b"B" + struct.pack("<L", len(content)) + content


def bombs() -> dict[str, tuple[bytes, str]]:
    """Return opcodes that would take memory, time or the stack, by name."""
    load, ordered = name("torch.storage", "_load_from_bytes"), name("collections", "OrderedDict")
    pairs = value([(i, i) for i in range(10_000)]) + b"q\x00"
    storages = legacy_file(whole(storage(), 2), {"0": bytes(16)})
    return {
        "nested tuples as a key": (b"}" + b")" + b"\x85" * 200_000 + b"K\x01s", "overflow the stack of the interpreter"),
        "billion laughs": (b"]" + b"".join(b"q\x00]" + b"h\x00a" * 10 for _ in range(40)), "grow to 10**40 objects"),
        "three million dicts": (b"(" + b"}" * 3_000_000 + b"l", "grow to 400 MB"),
        "three million memo entries": (b"N" + b"\x94" * 3_000_000, "grow to 400 MB"),
        "copies of a long list": (
            pairs + b"](" + (ordered + b"h\x00\x85R") * 10_000 + b"e",
            "grow to 80 GB",
        ),
        "keys that collide": (
            b"}(" + b"".join(value(i * (2**61 - 1)) + b"N" for i in range(30_000)) + b"u",
            "compare for ever",
        ),
        "memo of 2**31": (value(1) + b"r\x00\x00\x00\x80", "fill the memory"),
        "number of 100,000 bytes": (b"\x8b" + struct.pack("<i", 100_000) + b"\x01" * 100_000, "take hours to print"),
        "bytes of 2**63 bytes": (b"\x8e" + struct.pack("<Q", 2**63) + b"x", "fill the memory"),
        "bytearray of a terabyte": (call(name("builtins", "bytearray"), value(10**12)), "fill the memory"),
        "storages in storages": (
            data(storages) + b"q\x00](" + (load + b"h\x00\x85R") * 10**4 + b"e",
            "read the same bytes for ever",
        ),
    }


_HARMLESS = {
    "bytearray of a terabyte": "it becomes an object that does nothing",
    "memo of 2**31": "its memo has one entry",
}


def _pickles(folder: Path) -> list[Hostile]:
    cases = payloads(folder) | bombs()
    return [
        replace(_write(folder, f"{case}.pkl", whole(body, 4), effect, "unpickle"), harmless=_HARMLESS.get(case, ""))
        for case, (body, effect) in cases.items()
    ]


def _write(folder: Path, file: str, data: bytes, effect: str, reader: str) -> Hostile:
    path = folder / "".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in f"{reader}-{file}")
    assert not path.exists(), path
    path.write_bytes(data)
    return Hostile(f"{reader}: {file}", path, effect, reader)


# --- files of torch.save ------------------------------------------------------------------------------------------------


def _torch_pickles(folder: Path) -> list[Hostile]:
    """Return pickles that only make sense within `torch.save`, and payloads in unusual places."""
    attack = call(name("os", "system"), value(f"touch '{folder / CANARIES / 'torch'}'"))
    bodies = {
        "attack as a storage": (entry("w", tensor(hooks=attack, of=storage(kind=name("os", "system")))), "run a shell"),
        "id of another kind": (tuple_of(value("file"), value("/etc/passwd")) + b"Q", "read another file"),
        "id that is no tuple": (value(7) + b"Q", "confuse the reader"),
        "storage key upwards": (entry("w", tensor(of=storage(key="../../../../etc/passwd"))), "read another file"),
        "storage of 2**61": (entry("w", tensor(of=storage(size=2**61))), "fill the memory"),
        "negative offset": (entry("w", tensor(offset=-4)), "read before a storage"),
        "negative stride": (entry("w", tensor(stride=(-1,))), "read before a storage"),
        "stride of zero": (entry("w", tensor(shape=(10**6, 10**6), stride=(0, 0))), "fill the memory when copied"),
    }
    return [
        _write(folder, f"{case}.pt", zip_file({"data.pkl": whole(body), "data/0": bytes(16)}), effect, "unpickle")
        for case, (body, effect) in bodies.items()
    ]


def zip_file(entries: dict[str, bytes], folder: str = "archive") -> bytes:
    """Return a plain zip file; `zipfile` writes it, so that only what a case changes is unusual."""
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive:
        for file, data in entries.items():
            archive.writestr(zipfile.ZipInfo(f"{folder}/{file}" if folder else file), data)
    return target.getvalue()


def legacy_file(body: bytes, storages: dict[str, bytes], *, item: int = 4, keys: Any = None) -> bytes:
    """Return a file as `torch.save` wrote it until 2020."""
    system = {"protocol_version": 1001, "little_endian": True, "type_sizes": {"short": 2, "int": 4, "long": 4}}
    head = b"".join(pickle.dumps(part, 2) for part in (MAGIC, 1001, system))
    listed = pickle.dumps(sorted(storages) if keys is None else keys, 2)
    data = [struct.pack("<q", len(content) // item) + content for _, content in sorted(storages.items())]
    return head + body + listed + b"".join(data)


SOUND = whole(entry("w", tensor()))


def _zips(folder: Path) -> list[Hostile]:
    sound = zip_file({"data.pkl": SOUND, "byteorder": b"little", "data/0": bytes(16)})
    central, end = sound.index(b"PK\x01\x02"), sound.index(b"PK\x05\x06")
    files = {
        "zip bomb": (_compressed({"archive/data.pkl": SOUND, "archive/data/0": bytes(10**8)}), "grow to 100 MB"),
        "two names alike": (
            raw_zip([("archive/data.pkl", SOUND), *[("archive/data/0", bytes(16))] * 2]),
            "differ between readers",
        ),
        "overlapping entries": (_overlapping(), "use bytes twice"),
        "entry outside": (_patched(sound, central + 42, struct.pack("<L", 2**31)), "read beyond the file"),
        "directory of 2 GB": (_patched(sound, end + 12, struct.pack("<L", 2**31)), "fill the memory"),
        "cut": (sound[:-1], "confuse the reader"),
        "TorchScript": (
            zip_file({"data.pkl": SOUND, "data/0": bytes(16), "constants.pkl": b"", "code/x.py": b"import os"}),
            "run code",
        ),
        "wrong checksum": (sound.replace(b"cpu", b"cpv", 1), "load another pickle"),
    }
    return [_write(folder, f"{case}.pt", data, effect, "unpickle") for case, (data, effect) in files.items()]


def _patched(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]


def _compressed(entries: dict[str, bytes]) -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for file, data in entries.items():
            archive.writestr(file, data)
    return target.getvalue()


def raw_zip(files: list[tuple[str, bytes]], *, inside: str = "") -> bytes:
    """Return a zip file of any names; `inside` also lists an entry that lies within the data of the last."""
    body, central = b"", b""
    for file, data in files:
        header, content = _local(file, data)
        central += _record(file, data, len(body))
        if inside and file == files[-1][0]:
            central += _record(inside, bytes(16), len(body) + len(header))
        body += header + content
    n = len(files) + bool(inside)
    return body + central + struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, n, n, len(central), len(body), 0)


def _overlapping() -> bytes:
    """Return a zip file whose two storages share bytes: the second, header and all, lies within the first's data."""
    outer = b"".join(_local("archive/data/1", bytes(16)))
    body = whole(entry("w", tensor(of=storage(size=len(outer) // 4))))
    return raw_zip([("archive/data.pkl", body), ("archive/data/0", outer)], inside="archive/data/1")


def _local(file: str, data: bytes) -> tuple[bytes, bytes]:
    fields = (b"PK\x03\x04", 20, 0, 0, 0, 0, zlib.crc32(data), len(data), len(data), len(file.encode()), 0)
    return struct.pack("<4s5H3L2H", *fields) + file.encode(), data


def _record(file: str, data: bytes, at: int) -> bytes:
    fields = (b"PK\x01\x02", 20, 20, 0, 0, 0, 0, zlib.crc32(data), len(data), len(data), len(file.encode()), 0, 0, 0, 0, 0, at)
    return struct.pack("<4s6H3L5H2L", *fields) + file.encode()


def _legacies(folder: Path) -> list[Hostile]:
    attack = whole(call(name("os", "system"), value(f"touch '{folder / CANARIES / 'legacy'}'")))
    sound = legacy_file(SOUND, {"0": bytes(16)})
    magic, protocol = pickle.dumps(MAGIC, 2), pickle.dumps(1001, 2)
    files = {
        "attack as keys": (magic + protocol + pickle.dumps({"little_endian": True}, 2) + SOUND + attack, "run a shell"),
        "negative count": (_patched(sound, len(sound) - 24, struct.pack("<q", -1)), "read before a storage"),
        "cut": (sound[:-1], "read beyond the file"),
    }
    return [_write(folder, f"legacy, {case}.pt", data, effect, "unpickle") for case, (data, effect) in files.items()]


# --- safetensors, special files, directories --------------------------------------------------------------------------


def safetensors_file(header: Any, data: bytes = b"") -> bytes:
    """Return a safetensors file with any header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def _span(first: Any, end: Any, *, dtype: Any = "F32", shape: Any = (4,)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape if isinstance(shape, (str, dict)) else list(shape), "data_offsets": [first, end]}


def safetensors_files() -> dict[str, tuple[bytes, str]]:
    """Return safetensors files, and what harm they would do, by name."""
    return {
        "header of 2**63": (struct.pack("<Q", 2**63) + b"{}", "fill the memory"),
        "nested lists": (safetensors_file(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"), "overflow the stack"),
        "overlap": (safetensors_file({"a": _span(0, 16), "b": _span(8, 24)}, bytes(24)), "use bytes twice"),
        "beyond the file": (safetensors_file({"a": _span(0, 16)}, bytes(12)), "read beyond the file"),
    }


def _safetensors(folder: Path) -> list[Hostile]:
    files = safetensors_files()
    return [_write(folder, f"{case}.safetensors", data, effect, "safetensors") for case, (data, effect) in files.items()]


def _specials(folder: Path) -> list[Hostile]:
    fifo, device = folder / "fifo", folder / "device"
    os.mkfifo(fifo)
    device.symlink_to("/dev/zero")
    return [Hostile("pipe", fifo, "wait forever", "unpickle"), Hostile("device", device, "fill the memory", "unpickle")]


TINY = {
    "model_type": "transfo-xl",
    "vocab_size": 11,
    "cutoffs": [4, 8],
    "d_model": 8,
    "d_embed": 8,
    "n_head": 2,
    "d_head": 4,
    "d_inner": 16,
    "div_val": 1,
    "n_layer": 1,
    "mem_len": 4,
    "clamp_len": -1,
    "same_length": True,
}
"""A configuration of Hugging Face's format; the directories below change one thing each."""


def _directories(folder: Path) -> list[Hostile]:
    made = []
    configs: dict[str, tuple[Any, str]] = {
        "10**9 layers": (TINY | {"n_layer": 10**9}, "fill the memory"),
        "NaN dropout": (TINY | {"dropout": math.nan}, "poison the model"),
        "auto_map": (TINY | {"auto_map": {"AutoModel": "evil--module.Model"}}, "run code"),
    }
    weights = {"transformer.word_emb.emb_layers.0.weight": torch.zeros(11, 8)}
    weights |= {f"transformer.layers.0.x{i}": torch.zeros(1) for i in range(20)}  # enough for the number of layers
    for case, (config, effect) in configs.items():
        path = folder / f"hf-{''.join(filter(str.isalnum, case))}"
        path.mkdir()
        (path / "config.json").write_text(json.dumps(config))
        torch.save(weights, path / "pytorch_model.bin")
        made.append(Hostile(f"directory: {case}", path, effect, "convert"))
    path = folder / "hf-shards"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(TINY))
    save_file(weights, folder / "outside.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights, "../outside.safetensors")}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    made.append(Hostile("directory: shards elsewhere", path, "read another file", "convert"))
    sound = Path(__file__).parents[1] / "parity" / "goldens" / "xlnet_tensorflow" / "pretraining" / "checkpoint"
    path = shutil.copytree(sound, folder / "tensorflow-flipped")
    numbers = path / "xlnet_model.ckpt.data-00000-of-00001"
    flipped = bytearray(numbers.read_bytes())
    flipped[20] ^= 1  # of the first weight; nobody reads the slots of optimizers
    numbers.write_bytes(flipped)
    return [*made, Hostile("TensorFlow: a bit flipped", path, "load other numbers", "convert")]

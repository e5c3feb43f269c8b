"""Files that attack whoever reads them, or are merely broken. Every payload that ran would leave a trace in `canary/`.

`make_hostile(folder)` writes them all; nothing here ever loads one.
"""

import io
import itertools
import json
import marshal
import math
import os
import pickle
import pickletools
import shutil
import struct
import zipfile
import zlib
from dataclasses import dataclass
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
        reader: "torch", "pickle", "safetensors", or "convert" for directories that only a conversion reads; others see
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
    makers = (_pickles, _torch_pickles, _zips, _legacies, _safetensors, _specials, _directories, _xlnets)
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

    code = marshal.dumps(compile(f"open({canary('marshal')!r}, 'w')", "x", "exec")).decode("latin-1")
    hidden = call(name("_codecs", "encode"), value(code), value("latin1"))
    script = folder / "script.py"
    script.write_text(f"open({canary('script')!r}, 'w')\n")
    hub = folder / "hubconf.py"
    hub.write_text(f"open({canary('hub')!r}, 'w')\ndef model(): pass\n")
    nested = folder / "nested.npy"
    nested.write_bytes(whole(call(name("os", "system"), shell("nested"))))
    system = call(dotted("os", "system"), shell("stack_global"))
    importer = call(name("builtins", "__import__"), value("os"))
    return {
        "os.system": (call(name("os", "system"), shell("os.system")), "run a shell"),
        "posix.system": (call(name("posix", "system"), shell("posix.system")), "run a shell"),
        "nt.system": (call(name("nt", "system"), shell("nt.system")), "run a shell"),
        "os.popen": (call(name("os", "popen"), shell("os.popen")), "run a shell"),
        "os.execv": (call(name("os", "execv"), value("/bin/touch"), value(["touch", canary("execv")])), "start a program"),
        "eval": (call(name("builtins", "eval"), python("eval")), "run Python"),
        "exec": (call(name("builtins", "exec"), python("exec")), "run Python"),
        "eval of Python 2": (call(name("__builtin__", "eval"), python("eval2")), "run Python"),
        "execfile of Python 2": (call(name("__builtin__", "execfile"), value(str(script))), "run Python"),
        "subprocess.Popen": (call(name("subprocess", "Popen"), value(["touch", canary("Popen")])), "start a program"),
        "subprocess.run": (call(name("subprocess", "run"), value(["touch", canary("run")])), "start a program"),
        "getattr": (call(call(name("builtins", "getattr"), importer, value("system")), shell("getattr")), "find a shell"),
        "__import__": (importer, "import anything"),
        "importlib": (call(name("importlib", "import_module"), value("this")), "import anything"),
        "open": (call(name("builtins", "open"), value(canary("open")), value("w")), "write a file"),
        "io.open": (call(name("io", "open"), value(canary("io.open")), value("w")), "write a file"),
        "dotted method": (call(dotted("pathlib", "Path.touch"), value(canary("touch"))), "write a file"),
        "os.environ": (call(dotted("os", "environ.__setitem__"), value(VARIABLE), value("1")), "change the environment"),
        "os.putenv": (call(name("os", "putenv"), value(VARIABLE), value("1")), "change the environment"),
        "shutil.copy": (call(name("shutil", "copy"), value(str(script)), value(canary("copy"))), "write a file"),
        "shutil.rmtree": (call(name("shutil", "rmtree"), value(str(folder / CANARIES))), "delete files"),
        "os.unlink": (call(name("os", "unlink"), value(str(script))), "delete a file"),
        "socket": (call(name("socket", "create_connection"), value(("127.0.0.1", 9))), "connect to a host"),
        "urllib": (call(name("urllib.request", "urlopen"), value("http://127.0.0.1:9/")), "fetch an address"),
        "torch.hub.load": (call(name("torch.hub", "load"), value(str(folder)), value("model")), "run hubconf.py"),
        "torch.load": (call(name("torch.serialization", "load"), value(str(nested))), "unpickle another file"),
        "torch.storage": (
            call(name("torch.storage", "_load_from_bytes"), call(name("_codecs", "encode"), value("x"), value("latin1"))),
            "unpickle nested bytes",
        ),
        "numpy.load": (call(name("numpy", "load"), value(str(nested)), value(None), value(True)), "unpickle another file"),
        "numpy runstring": (call(name("numpy.testing._private.utils", "runstring"), python("numpy"), value({})), "run Python"),
        "marshal": (call(name("marshal", "loads"), hidden), "make code"),
        "code object": (call(name("types", "CodeType"), value(0)), "make code"),
        "function": (call(name("types", "FunctionType"), value(0), value({})), "make a function"),
        "runpy": (call(name("runpy", "run_path"), value(str(script))), "run Python"),
        "timeit": (call(name("timeit", "timeit"), python("timeit")), "run Python"),
        "cProfile": (call(name("cProfile", "run"), python("cProfile")), "run Python"),
        "pickle.loads": (call(name("pickle", "loads"), value("x")), "unpickle again"),
        "partial": (call(call(name("functools", "partial"), name("os", "system"), shell("partial"))), "run a shell"),
        "attrgetter": (call(call(name("operator", "attrgetter"), value("system")), importer), "find a shell"),
        "map": (call(name("builtins", "map"), name("os", "system"), value(["x"])), "run a shell"),
        "module in a module": (call(dotted("torch.nn.modules.module", "os.system"), shell("dotted1")), "run a shell"),
        "module in a name": (call(dotted("torch.nn.modules", "module.os.system"), shell("dotted2")), "run a shell"),
        "dotted dunder": (call(dotted("collections", "OrderedDict.__class__.__subclasses__")), "find classes"),
        "stack_global": (system, "run a shell"),
        "name from memo": (
            value("os") + b"q\x00" + value("system") + b"q\x01h\x00h\x01\x93" + tuple_of(shell("memo")) + b"R",
            "run a shell",
        ),
        "name that is a number": (value(1) + value(2) + b"\x93", "confuse the reader"),
        "name with a line break": (dotted("os\nsystem", "x\ny"), "confuse messages"),
        "name of 10,000 letters": (name("a" * 10_000, "b"), "flood messages"),
        "inst": (b"(" + shell("inst") + b"ios\nsystem\n", "run a shell"),
        "obj": (b"(" + name("subprocess", "Popen") + value(["touch", canary("obj")]) + b"o", "start a program"),
        "newobj": (name("subprocess", "Popen") + tuple_of(value(["touch", canary("newobj")])) + b"\x81", "start a program"),
        "newobj_ex": (
            name("subprocess", "Popen") + value(()) + value({"args": ["touch", canary("newobj_ex")]}) + b"\x92",
            "start a program",
        ),
        "reconstructor": (call(name("copyreg", "_reconstructor"), name("subprocess", "Popen"), value(1), value(2)), "run"),
        "add_extension": (call(name("copyreg", "add_extension"), value("os"), value("system"), value(1)), "register a name"),
        "ext1": (b"\x82\x01", "use a registered name"),
        "ext4": (b"\x84\xff\xff\xff\x7f", "use a registered name"),
        "bytes of a terabyte": (call(name("builtins", "bytes"), value(10**12)), "fill the memory"),
        "bytearray of a terabyte": (call(name("builtins", "bytearray"), value(10**12)), "fill the memory"),
        "list of a range": (call(name("builtins", "list"), call(name("builtins", "range"), value(10**12))), "fill the memory"),
        "dict of a number": (call(name("collections", "OrderedDict"), value(7)), "confuse the reader"),
        "called object": (call(call(name("argparse", "Namespace"))), "confuse the reader"),
        "method of a list": (value([]) + value((1, 2)) + b"b", "confuse the reader"),
        "attributes of a class": (name("argparse", "Namespace") + value({"__setstate__": 1}) + b"b", "change a class"),
        "items of a class": (name("argparse", "Namespace") + b"(" + value(1) + b"e", "change a class"),
    }


def bombs() -> dict[str, tuple[bytes, str]]:
    """Return opcodes that would take memory, time or the stack, by name."""
    return {
        "nested lists": (b"]" * 100_000 + b"a" * 99_999, "overflow the stack"),
        "nested tuples as a key": (b"}" + b")" + b"\x85" * 200_000 + b"K\x01s", "overflow the stack of the interpreter"),
        "nested objects": (name("argparse", "Namespace") + b"q\x00" + b"h\x00(" * 5_000 + b"tR" * 5_000, "overflow the stack"),
        "itself": (b"]q\x00h\x00a", "make a reader run in circles"),
        "billion laughs": (b"]" + b"".join(b"q\x00]" + b"h\x00a" * 10 for _ in range(40)), "grow to 10**40 objects"),
        "long text a million times": (value("x" * 100_000) + b"q\x00](" + b"h\x00" * 300_000 + b"e", "grow to 30 GB"),
        "ten million lists": (b"](" + b"]" * 1000 + b"e" + b"q\x00](" + b"h\x00" * 10_000 + b"e", "grow to 1 GB"),
        "three million dicts": (b"(" + b"}" * 3_000_000 + b"l", "grow to 400 MB"),
        "three million lists": (b"(" + b"]" * 3_000_000 + b"l", "grow to 300 MB"),
        "keys that collide": (
            b"}(" + b"".join(value(i * (2**61 - 1)) + b"N" for i in range(30_000)) + b"u",
            "compare for ever",
        ),
        "memo of 2**31": (value(1) + b"r\x00\x00\x00\x80", "fill the memory"),
        "memo of 2**27": (value(1) + b"r\x00\x00\x00\x08", "fill the memory"),
        "number of 2**30 bytes": (b"\x8b\x00\x00\x00\x40" + b"\x01" * 20, "fill the memory"),
        "number of 100,000 bytes": (b"\x8b" + struct.pack("<i", 100_000) + b"\x01" * 100_000, "take hours to print"),
        "number of negative length": (b"\x8b\xff\xff\xff\xff", "confuse the reader"),
        "number of 100,000 digits": (b"L" + b"9" * 100_000 + b"L\n", "take time to read"),
        "text of 2**60 bytes": (b"\x8d" + struct.pack("<Q", 2**60) + b"x", "fill the memory"),
        "bytes of 2**63 bytes": (b"\x8e" + struct.pack("<Q", 2**63) + b"x", "confuse signs"),
        "bytearray of 2**40 bytes": (b"\x96" + struct.pack("<Q", 2**40) + b"x", "fill the memory"),
        "frame of 2**60 bytes": (b"\x95" + struct.pack("<Q", 2**60) + b"N", "fill the memory"),
        "buffer from nowhere": (b"\x97", "use memory that is not there"),
        "empty stack": (b"0000", "read below the stack"),
        "text that is not text": (b"X\x02\x00\x00\x00\xff\xff", "confuse decoding"),
        "unknown opcode": (b"\xee", "confuse the reader"),
    }


def _pickles(folder: Path) -> list[Hostile]:
    made = []
    for case, (body, effect) in (payloads(folder) | bombs()).items():
        made.append(_write(folder, f"{case}.pkl", whole(body, 4), effect, "pickle"))
    made += [
        _write(folder, "empty.pkl", b"", "nothing", "pickle"),
        _write(folder, "protocol 9.pkl", b"\x80\x09N.", "confuse the reader", "pickle"),
        _write(folder, "no end.pkl", b"\x80\x02]", "confuse the reader", "pickle"),
        _write(folder, "tail.pkl", whole(value({})) + b"tail", "hide data", "pickle"),
        _write(folder, "torch.pkl", whole(value(MAGIC)) + whole(value(1001)), "be taken for a number", "pickle"),
        _write(folder, "storage.pkl", whole(entry("x", storage())), "refer to what is not there", "pickle"),
        _write(folder, "text id.pkl", b"Pabc\n.", "refer to what is not there", "pickle"),
    ]
    return made


def _write(folder: Path, file: str, data: bytes, effect: str, reader: str) -> Hostile:
    path = folder / "".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in f"{reader}-{file}")
    assert not path.exists(), path
    path.write_bytes(data)
    return Hostile(f"{reader}: {file}", path, effect, reader)


# --- files of torch.save ------------------------------------------------------------------------------------------------


def _torch_pickles(folder: Path) -> list[Hostile]:
    """Return both formats of pickles that only make sense within `torch.save`, and payloads in unusual places."""
    attack = call(name("os", "system"), value(f"touch '{folder / CANARIES / 'torch'}'"))
    floats = name("torch", "FloatStorage")
    bodies = {
        "in the state": (entry("w", attack), "run a shell"),
        "in a key": (b"}" + attack + value(1) + b"s", "run a shell"),
        "in hooks": (entry("w", tensor(hooks=attack)), "run a shell"),
        "in a storage size": (tuple_of(value("storage"), floats, value("0"), value("cpu"), attack) + b"Q", "run a shell"),
        "in a storage type": (storage(kind=name("os", "system")), "run a shell"),
        "in a module": (tuple_of(value("module"), name("os", "system"), value(""), value("")) + b"Q", "run a shell"),
        "in a module's source": (tuple_of(value("module"), attack, value("x.py"), value("import os")) + b"Q", "run source"),
        "in a type": (call(name("torch._tensor", "_rebuild_from_type_v2"), name("os", "system"), *[value(())] * 3), "run"),
        "in a parameter": (call(name("torch._utils", "_rebuild_parameter"), attack), "run a shell"),
        "id of nothing": (tuple_of() + b"Q", "confuse the reader"),
        "id of a number": (value(7) + b"Q", "confuse the reader"),
        "id of another kind": (tuple_of(value("file"), value("/etc/passwd")) + b"Q", "read another file"),
        "id that is short": (tuple_of(value("storage"), floats) + b"Q", "confuse the reader"),
        "storage that is a dict": (storage(kind=name("collections", "OrderedDict")), "confuse the reader"),
        "storage key upwards": (entry("w", tensor(of=storage(key="../../../../etc/passwd"))), "read another file"),
        "storage key that is a number": (entry("w", tensor(of=storage(key=3))), "confuse the reader"),
        "storage of 2**61": (entry("w", tensor(of=storage(size=2**61))), "fill the memory"),
        "storage of 2**70": (entry("w", tensor(of=storage(size=2**70))), "overflow"),
        "storage of -1": (entry("w", tensor(of=storage(size=-1))), "read before the file"),
        "storage twice": (tuple_of(tensor(), tensor(of=storage(size=8))), "read beyond a storage"),
        "storage of two sizes": (tuple_of(tensor(), tensor(of=storage(size=2), shape=(2,))), "differ between readers"),
        "storage as other type": (
            tuple_of(tensor(), tensor(of=storage(kind=name("torch", "LongStorage"), size=2), shape=(2,))),
            "mix types",
        ),
        "storage of two types": (tuple_of(tensor(), tensor(of=storage(kind=name("torch", "LongStorage")))), "mix types"),
        "part outside": (entry("w", tensor(of=storage(view=value(("1", 3, 4))))), "read beyond a storage"),
        "quantized": (entry("w", tensor(of=storage(kind=name("torch", "QInt8Storage")))), "confuse the reader"),
        "negative offset": (entry("w", tensor(offset=-4)), "read before a storage"),
        "offset beyond": (entry("w", tensor(offset=1)), "read beyond a storage"),
        "offset of 2**64": (entry("w", tensor(offset=2**64)), "overflow"),
        "offset that is text": (entry("w", tensor(offset="0")), "confuse the reader"),
        "negative stride": (entry("w", tensor(stride=(-1,))), "read before a storage"),
        "huge stride": (entry("w", tensor(shape=(2,), stride=(2**61,))), "overflow"),
        "stride of zero": (entry("w", tensor(shape=(10**6, 10**6), stride=(0, 0))), "fill the memory when copied"),
        "overlapping strides": (entry("w", tensor(shape=(2, 3), stride=(1, 1))), "fill the memory when copied"),
        "other number of strides": (entry("w", tensor(shape=(2, 2), stride=(1,))), "confuse the reader"),
        "negative size": (entry("w", tensor(shape=(-4,))), "overflow"),
        "size of 2**63": (entry("w", tensor(shape=(2**63,))), "overflow"),
        "sizes that overflow": (entry("w", tensor(shape=(2**31, 2**31, 4, 0), stride=(0, 0, 0, 0))), "overflow"),
        "size that is NaN": (entry("w", tensor(shape=(math.nan,))), "confuse the reader"),
        "a thousand sizes": (entry("w", tensor(shape=(1,) * 1000, stride=(1,) * 1000)), "confuse the reader"),
        "tensor without storage": (call(name("torch._utils", "_rebuild_tensor_v2"), *[value(0)] * 6), "confuse the reader"),
        "tensor of nothing": (call(name("torch._utils", "_rebuild_tensor_v2")), "confuse the reader"),
        "sparse": (call(name("torch._utils", "_rebuild_sparse_tensor"), value(0), value(0)), "use unchecked indices"),
    }
    made = []
    for case, (body, effect) in bodies.items():
        made.append(_write(folder, f"zip, {case}", zip_file({"data.pkl": whole(body), "data/0": bytes(16)}), effect, "torch"))
        made.append(_write(folder, f"legacy, {case}", legacy_file(whole(body), {"0": bytes(16)}), effect, "torch"))
    return made


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
    late = zip_file({"data.pkl": SOUND, "data/0": bytes(16), "byteorder": b"little"})
    central, end = sound.index(b"PK\x01\x02"), sound.index(b"PK\x05\x06")
    bomb = _compressed({"archive/data.pkl": SOUND, "archive/data/0": bytes(16), "archive/data/1": bytes(10**8)})
    local = sound.index(b"PK\x03\x04", 4)  # of byteorder
    files = {
        "zip bomb": (bomb, "grow to 100 MB"),
        "compressed pickle": (_compressed({"archive/data.pkl": bytes(10**8)}), "grow to 100 MB"),
        "name upwards": (zip_file({"data.pkl": SOUND, "data/0": bytes(16), "../../escape": b"x"}), "write outside"),
        "name upwards from the top": (zip_file({"../escape": b"x"}, ""), "write outside"),
        "absolute name": (zip_file({"/tmp/escape": b"x", "archive/data.pkl": SOUND}, ""), "write outside"),
        "name of Windows": (zip_file({"data.pkl": SOUND, "data/0": bytes(16), "..\\..\\escape": b"x"}), "write outside"),
        "name of a drive": (zip_file({"C:/escape": b"x", "archive/data.pkl": SOUND}, ""), "write outside"),
        "name with a line break": (zip_file({"data.pkl": SOUND, "data/0": bytes(16), "a\nb": b""}), "confuse messages"),
        "two names alike": (raw_zip([(file, SOUND) for file in ["archive/data.pkl"] * 2]), "differ between readers"),
        "two folders": (sound.replace(b"archive/byteorder", b"another/byteorder"), "differ between readers"),
        "overlapping entries": (_overlapping(), "use bytes twice"),
        "entry outside": (_patched(sound, central + 42, struct.pack("<L", 2**31)), "read beyond the file"),
        "size beyond": (_patched(sound, central + 20, struct.pack("<2L", 2**30, 2**30)), "read beyond the file"),
        "size of 2**63": (_patched(sound, central + 20, struct.pack("<2L", 2**32 - 1, 2**32 - 1)), "overflow"),
        "encrypted": (_patched(sound, central + 8, b"\x01\x00"), "confuse the reader"),
        "other name inside": (_patched(sound, local + 30, b"archive/nameorder"), "differ between readers"),
        "a million entries": (_patched(sound, end + 8, struct.pack("<2H", 65_534, 65_534)), "fill the memory"),
        "directory of 2 GB": (_patched(sound, end + 12, struct.pack("<L", 2**31)), "fill the memory"),
        "directory outside": (_patched(sound, end + 16, struct.pack("<L", 2**31)), "read beyond the file"),
        "zip64 without a record": (_patched(sound, end + 16, b"\xff" * 4), "read beyond the file"),
        "comment": (_patched(sound, end + 20, b"\x04\x00") + b"abcd", "hide another directory"),
        "no directory": (sound[:central], "confuse the reader"),
        "cut": (sound[:-1], "confuse the reader"),
        "only a signature": (b"PK\x03\x04", "confuse the reader"),
        "no pickle": (zip_file({"data/0": bytes(16)}), "confuse the reader"),
        "no storage": (zip_file({"data.pkl": SOUND}), "read what is not there"),
        "long storage": (zip_file({"data.pkl": SOUND, "data/0": bytes(20)}), "hide data"),
        "uncounted entry": (_patched(late, late.index(b"PK\x05\x06") + 8, struct.pack("<2H", 2, 2)), "differ between readers"),
        "short storage": (zip_file({"data.pkl": SOUND, "data/0": bytes(12)}), "read beyond a storage"),
        "big-endian": (zip_file({"data.pkl": SOUND, "data/0": bytes(16), "byteorder": b"big"}), "load other numbers"),
        "TorchScript": (
            zip_file({"data.pkl": SOUND, "data/0": bytes(16), "constants.pkl": b"", "code/x.py": b"import os"}),
            "run code",
        ),
        "wrong checksum": (sound.replace(b"cpu", b"cpv", 1), "load another pickle"),
        "pickle cut": (zip_file({"data.pkl": SOUND[:-5], "data/0": bytes(16)}), "confuse the reader"),
        "pickle with a tail": (zip_file({"data.pkl": SOUND + b"tail", "data/0": bytes(16)}), "hide data"),
        "empty pickle": (zip_file({"data.pkl": b"", "data/0": bytes(16)}), "confuse the reader"),
        "zip of a zip": (zip_file({"data.pkl": sound, "data/0": bytes(16)}), "confuse the reader"),
    }
    return [_write(folder, f"{case}.pt", data, effect, "torch") for case, (data, effect) in files.items()]


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
    return raw_zip([("archive/data.pkl", SOUND), ("archive/data/0", outer)], inside="archive/data/1")


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
    at = sound.index(b"little_endian") + len(b"little_endian")
    wrong = sound[at : at + 3].replace(b"\x88", b"\x89")  # True to False, behind the memo of the name
    assert wrong != sound[at : at + 3]
    files = {
        "attack as magic": (attack + sound, "run a shell"),
        "attack as protocol": (magic + attack, "run a shell"),
        "attack as system": (magic + protocol + attack, "run a shell"),
        "attack as keys": (magic + protocol + pickle.dumps({"little_endian": True}, 2) + SOUND + attack, "run a shell"),
        "other magic": (pickle.dumps(1, 2) + sound, "confuse the reader"),
        "other protocol": (magic + pickle.dumps(1002, 2) + sound, "confuse the reader"),
        "big-endian": (sound.replace(b"little_endian" + sound[at : at + 3], b"little_endian" + wrong), "load other numbers"),
        "other count": (_patched(sound, len(sound) - 24, struct.pack("<q", 5)), "read beyond a storage"),
        "negative count": (_patched(sound, len(sound) - 24, struct.pack("<q", -1)), "read before a storage"),
        "tail": (sound + b"x", "hide data"),
        "cut": (sound[:-1], "read beyond the file"),
        "cut in the pickle": (sound[:120], "read beyond the file"),
        "no keys": (legacy_file(SOUND, {"0": bytes(16)}, keys=[]), "leave tensors without data"),
        "keys twice": (legacy_file(SOUND, {"0": bytes(16)}, keys=["0", "0"]) + sound[-24:], "differ between readers"),
        "keys that are numbers": (legacy_file(SOUND, {"0": bytes(16)}, keys=[0]), "confuse the reader"),
        "tar": (b"storages".ljust(100, b"\0") + b"0000644\0".ljust(157, b"0") + b"ustar".ljust(255, b"\0"), "write files"),
    }
    return [_write(folder, f"legacy, {case}.pt", data, effect, "torch") for case, (data, effect) in files.items()]


# --- safetensors, special files, directories --------------------------------------------------------------------------


def safetensors_file(header: Any, data: bytes = b"") -> bytes:
    """Return a safetensors file with any header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def _span(first: Any, end: Any, *, dtype: Any = "F32", shape: Any = (4,)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape if isinstance(shape, (str, dict)) else list(shape), "data_offsets": [first, end]}


def safetensors_files() -> dict[str, tuple[bytes, str]]:
    """Return safetensors files, and what harm they would do, by name."""
    sound = safetensors_file({"w": _span(0, 16)}, bytes(16))
    text = json.dumps(_span(0, 16)).encode()
    many = {f"t{i}": _span(0, 0, shape=(0,)) for i in range(50_001)}
    return {
        "header of 2**63": (struct.pack("<Q", 2**63) + b"{}", "fill the memory"),
        "header of 17 MB": (safetensors_file(b"{}" + b" " * (17 * 2**20)), "fill the memory"),
        "50,001 tensors": (safetensors_file(many), "fill the memory"),
        "millions of lists": (safetensors_file(b'{"a":[' + b"[]," * 5_000_000 + b"[]]}"), "fill the memory"),
        "nested lists": (safetensors_file(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"), "overflow the stack"),
        "number of a million digits": (safetensors_file(b'{"a":' + b"9" * 1_000_000 + b"}"), "take time to read"),
        "overlap": (safetensors_file({"a": _span(0, 16), "b": _span(8, 24)}, bytes(24)), "use bytes twice"),
        "same bytes": (safetensors_file({"a": _span(0, 16), "b": _span(0, 16)}, bytes(16)), "use bytes twice"),
        "hole": (safetensors_file({"a": _span(0, 16), "b": _span(20, 36)}, bytes(36)), "hide data"),
        "hole in front": (safetensors_file({"a": _span(4, 20)}, bytes(20)), "hide data"),
        "beyond the file": (safetensors_file({"a": _span(0, 16)}, bytes(12)), "read beyond the file"),
        "tail": (sound + b"tail", "hide data"),
        "backwards": (safetensors_file({"a": _span(16, 0)}, bytes(16)), "overflow"),
        "negative": (safetensors_file({"a": _span(-16, 0)}, bytes(16)), "read the header as numbers"),
        "place of 2**64": (safetensors_file({"a": _span(2**64, 2**64 + 16)}, bytes(16)), "overflow"),
        "place that is a float": (safetensors_file({"a": _span(0.0, 16.0)}, bytes(16)), "confuse the reader"),
        "place that is NaN": (safetensors_file({"a": _span(math.nan, 16)}, bytes(16)), "confuse the reader"),
        "place that is true": (safetensors_file({"a": _span(False, True, dtype="U8", shape=(1,))}, bytes(1)), "confuse"),
        "size of 2**62": (safetensors_file({"a": _span(0, 16, shape=(2**62, 4))}, bytes(16)), "overflow"),
        "sizes that overflow to 4": (safetensors_file({"a": _span(0, 16, shape=(2**32, 2**32, 4))}, bytes(16)), "overflow"),
        "other size": (safetensors_file({"a": _span(0, 16, shape=(5,))}, bytes(16)), "read beyond a tensor"),
        "smaller size": (safetensors_file({"a": _span(0, 16, shape=(3,))}, bytes(16)), "hide data"),
        "negative size": (safetensors_file({"a": _span(0, 16, shape=(-4,))}, bytes(16)), "overflow"),
        "text as sizes": (safetensors_file({"a": _span(0, 16, shape="4")}, bytes(16)), "confuse the reader"),
        "unknown type": (safetensors_file({"a": _span(0, 16, dtype="PICKLE")}, bytes(16)), "run code"),
        "no type": (safetensors_file({"a": {"shape": [4], "data_offsets": [0, 16]}}, bytes(16)), "confuse the reader"),
        "extra key": (safetensors_file({"a": _span(0, 16) | {"code": "import os"}}, bytes(16)), "run code"),
        "same name twice": (safetensors_file(b'{"a":%b,"a":%b}' % (text, text), bytes(16)), "differ between readers"),
        "NaN": (safetensors_file(b'{"a":NaN}'), "confuse the reader"),
        "metadata that is not text": (safetensors_file({"__metadata__": {"a": [1]}, "w": _span(0, 16)}, bytes(16)), "confuse"),
        "list": (safetensors_file([]), "confuse the reader"),
        "null": (safetensors_file(b"null"), "confuse the reader"),
        "no JSON": (safetensors_file(b"{'a': 1}"), "confuse the reader"),
        "no text": (safetensors_file(b'{"\xff\xff": 1}'), "confuse the reader"),
        "cut": (sound[:-1], "read beyond the file"),
        "cut in the header": (sound[:20], "read beyond the file"),
        "seven bytes": (sound[:7], "read beyond the file"),
        "empty": (b"", "nothing"),
        "pickle": (SOUND, "be taken for safetensors"),
    }


def _safetensors(folder: Path) -> list[Hostile]:
    files = safetensors_files()
    return [_write(folder, f"{case}.safetensors", data, effect, "safetensors") for case, (data, effect) in files.items()]


def _specials(folder: Path) -> list[Hostile]:
    made = []
    for reader in ("torch", "pickle", "safetensors"):
        fifo, device, lost, loop = (folder / f"{reader}-{case}" for case in ("fifo", "device", "lost", "loop"))
        os.mkfifo(fifo)
        device.symlink_to("/dev/zero")
        lost.symlink_to(folder / "nothing")
        loop.symlink_to(loop)
        (folder / f"{reader}-folder").mkdir()
        made += [
            Hostile(f"{reader}: pipe", fifo, "wait forever", reader),
            Hostile(f"{reader}: device", device, "fill the memory", reader),
            Hostile(f"{reader}: lost link", lost, "nothing", reader),
            Hostile(f"{reader}: circular link", loop, "run in circles", reader),
            Hostile(f"{reader}: folder", folder / f"{reader}-folder", "nothing", reader),
            Hostile(f"{reader}: missing", folder / f"{reader}-missing", "nothing", reader),
            Hostile(f"{reader}: NUL in the name", Path(f"{folder}/a\0b"), "differ between readers", reader),
        ]
    return made


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


TINY_XLNET = {
    "model_type": "xlnet",
    "vocab_size": 11,
    "d_model": 8,
    "n_layer": 1,
    "n_head": 2,
    "d_head": 4,
    "d_inner": 16,
    "ff_activation": "gelu",
    "mem_len": 4,
    "reuse_len": None,
    "clamp_len": -1,
}
"""The same of an XLNet."""


def _xlnets(folder: Path) -> list[Hostile]:
    """Return directories of XLNets of Hugging Face and of its authors, with one thing changed in each."""
    made = []
    at_hugging_face: dict[str, tuple[Any, str]] = {
        "10**9 layers": (TINY_XLNET | {"n_layer": 10**9}, "fill the memory"),
        "10**18 words": (TINY_XLNET | {"vocab_size": 10**18}, "fill the memory"),
        "model of 10**12": (TINY_XLNET | {"d_model": 10**12, "d_head": 10**12 // 2}, "fill the memory"),
        "heads of 2**63": (TINY_XLNET | {"n_head": 2**63}, "overflow"),
        "no heads": (TINY_XLNET | {"n_head": 0}, "divide by zero"),
        "NaN layers": (TINY_XLNET | {"n_layer": math.nan}, "confuse the reader"),
        "NaN dropout": (TINY_XLNET | {"dropout": math.nan}, "poison the model"),
        "infinite epsilon": (TINY_XLNET | {"layer_norm_eps": math.inf}, "poison the model"),
        "text as size": (TINY_XLNET | {"d_inner": "8; import os"}, "run code"),
        "list as activation": (TINY_XLNET | {"ff_activation": ["gelu"]}, "confuse the reader"),
        "activation elsewhere": (TINY_XLNET | {"ff_activation": "os.system"}, "run code"),
        "memory of 10**4000": (TINY_XLNET | {"mem_len": 10**4000}, "overflow"),
        "text as direction": (TINY_XLNET | {"bi_data": "os.system"}, "confuse the reader"),
        "auto_map": (TINY_XLNET | {"auto_map": {"AutoModel": "evil--module.Model"}}, "run code"),
        "path as key": (TINY_XLNET | {"../../escape": 1}, "write outside"),
        "only left to right": (TINY_XLNET | {"attn_type": "uni"}, "be taken for another model"),
        "other shapes": (TINY_XLNET, "read beyond tensors"),
    }
    fine_tuned = TINY_XLNET | {"architectures": ["XLNetForSequenceClassification"]}
    at_hugging_face |= {
        "10**12 labels": (fine_tuned | {"num_labels": 10**12}, "fill the memory"),
        "labels without order": (fine_tuned | {"id2label": {"0": "a", "9": "b"}}, "call a label by another name"),
        "two labels of a name": (fine_tuned | {"id2label": {"0": "a", "1": "a"}}, "call a label by another name"),
        "list as label": (fine_tuned | {"id2label": {"0": ["a"], "1": {}}}, "confuse the reader"),
        "code as summary": (fine_tuned | {"summary_activation": "__import__('os').system('x')"}, "run code"),
        "NaN dropout of a head": (fine_tuned | {"summary_last_dropout": math.nan}, "poison the model"),
        "labels of other shapes": (fine_tuned, "read beyond tensors"),
    }
    weights = {"transformer.word_embedding.weight": torch.zeros(11, 8), "logits_proj.weight": torch.zeros(5, 8)}
    weights |= {f"classifier.\x1b[2J{i}": torch.zeros(1) for i in range(20)}  # enough for the number of layers
    for case, (config, effect) in at_hugging_face.items():
        path = folder / f"xlnet-{''.join(filter(str.isalnum, case))}"
        path.mkdir()
        (path / "config.json").write_text(json.dumps(config))
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
        made.append(Hostile(f"xlnet of Hugging Face: {case}", path, effect, "convert"))
    sound = Path(__file__).parents[1] / "parity" / "goldens" / "xlnet_tensorflow" / "pretraining" / "checkpoint"
    values = json.loads((sound / "xlnet_config.json").read_text())
    of_the_authors: dict[str, tuple[Any, str]] = {
        "10**9 layers": (values | {"n_layer": 10**9}, "fill the memory"),
        "one layer more": (values | {"n_layer": 3}, "leave layers at random values"),
        "10**18 words": (values | {"n_token": 10**18}, "fill the memory"),
        "heads of 10**12": (values | {"d_head": 10**12}, "fill the memory"),
        "NaN width": (values | {"d_model": math.nan}, "confuse the reader"),
        "infinite width": (values | {"d_inner": math.inf}, "overflow"),
        "true as size": (values | {"n_head": True}, "confuse the reader"),
        "code as activation": (values | {"ff_activation": "__import__('os').system('x')"}, "run code"),
        "text as truth": (values | {"untie_r": "yes"}, "confuse the reader"),
        "shared biases": (values | {"untie_r": False}, "read beyond tensors"),
        "no words": ({name: value for name, value in values.items() if name != "n_token"}, "confuse the reader"),
        "nothing": ({}, "confuse the reader"),
        "list": ([values], "confuse the reader"),
        "nested": (None, "overflow the stack"),
        "unknown key": (values | {"checkpoint": "../../escape"}, "read another file"),
    }
    for case, (config, effect) in of_the_authors.items():
        path = shutil.copytree(sound, folder / f"xlnet-tf-{''.join(filter(str.isalnum, case))}")
        text = json.dumps(config) if config is not None else "[" * 100_000 + "]" * 100_000
        (path / "xlnet_config.json").write_text(text)
        made.append(Hostile(f"xlnet of the authors: {case}", path, effect, "convert"))
    links: dict[str, str] = {"device": "/dev/zero", "lost link": "nothing", "circular link": "xlnet_config.json"}
    for case, target in links.items():
        path = shutil.copytree(sound, folder / f"xlnet-tf-{case.replace(' ', '')}")
        (path / "xlnet_config.json").unlink()
        (path / "xlnet_config.json").symlink_to(target)
        made.append(Hostile(f"xlnet of the authors: {case}", path, "fill the memory", "convert"))
    data = "xlnet_model.ckpt.data-00000-of-00001"
    flipped = bytearray((sound / data).read_bytes())
    flipped[20] ^= 1  # of the first weight; nobody reads the slots of optimizers
    for case, content in {"a bit flipped": bytes(flipped), "cut": bytes(flipped[:-100]), "no data": b""}.items():
        path = shutil.copytree(sound, folder / f"xlnet-tf-{''.join(filter(str.isalnum, case))}")
        (path / data).write_bytes(content)
        made.append(Hostile(f"xlnet of the authors: {case}", path, "load other numbers", "convert"))
    return made


def _directories(folder: Path) -> list[Hostile]:
    made = []
    configs: dict[str, tuple[Any, str]] = {
        "10**9 layers": (TINY | {"n_layer": 10**9}, "fill the memory"),
        "10**18 words": (TINY | {"vocab_size": 10**18}, "fill the memory"),
        "model of 10**12": (TINY | {"d_model": 10**12, "d_embed": 10**12}, "fill the memory"),
        "heads of 2**63": (TINY | {"n_head": 2**63}, "overflow"),
        "-1 layers": (TINY | {"n_layer": -1}, "confuse the reader"),
        "NaN layers": (TINY | {"n_layer": math.nan}, "confuse the reader"),
        "NaN dropout": (TINY | {"dropout": math.nan}, "poison the model"),
        "infinite epsilon": (TINY | {"layer_norm_epsilon": math.inf}, "poison the model"),
        "text as size": (TINY | {"d_model": "8; import os"}, "run code"),
        "list as size": (TINY | {"d_model": [8]}, "confuse the reader"),
        "cutoffs backwards": (TINY | {"cutoffs": [8, 4]}, "use wrong rows"),
        "cutoffs beyond": (TINY | {"cutoffs": [4, 10**9]}, "fill the memory"),
        "a million cutoffs": (TINY | {"cutoffs": list(range(1, 200_000))}, "fill the memory"),
        "auto_map": (TINY | {"auto_map": {"AutoModel": "evil--module.Model"}}, "run code"),
        "custom pipelines": (TINY | {"custom_pipelines": {"x": {"impl": "evil.Pipeline"}}}, "run code"),
        "unknown key": (TINY | {"_attn_implementation_internal": "evil/kernel"}, "run code"),
        "path as key": (TINY | {"../../escape": 1}, "write outside"),
        "other model": (TINY | {"model_type": "gpt2"}, "be taken for another model"),
        "list": ([TINY], "confuse the reader"),
        "nested": (None, "overflow the stack"),
        "other shapes": (TINY | {"d_inner": 32}, "read beyond tensors"),
        "other layers": (TINY | {"n_layer": 2}, "leave layers at random values"),
    }
    weights = {"transformer.word_emb.emb_layers.0.weight": torch.zeros(11, 8)}
    weights |= {f"transformer.layers.0.x{i}": torch.zeros(1) for i in range(20)}  # enough for the number of layers
    for case, (config, effect) in configs.items():
        for suffix in ("bin", "safetensors"):
            path = folder / f"hf-{suffix}-{''.join(filter(str.isalnum, case))}"
            path.mkdir()
            text = json.dumps(config) if config is not None else "[" * 100_000 + "]" * 100_000
            (path / "config.json").write_text(text)
            if suffix == "bin":
                torch.save(weights, path / "pytorch_model.bin")
            else:
                save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
            made.append(Hostile(f"directory: {case} ({suffix})", path, effect, "convert"))
    for case, (body, effect) in payloads(folder).items():
        if case in ("os.system", "eval", "torch.hub.load", "numpy.load"):
            for file in ("pytorch_model.bin", "vocab.pkl", "vocab.bin"):
                path = folder / f"hf-{file}-{''.join(filter(str.isalnum, case))}"
                path.mkdir()
                (path / "config.json").write_text(json.dumps(TINY))
                torch.save(weights, path / "pytorch_model.bin")
                (path / file).write_bytes(whole(body) if file == "vocab.pkl" else legacy_file(whole(body), {}))
                made.append(Hostile(f"directory: {case} in {file}", path, effect, "convert"))
    return made + _shards(folder, weights)


def _shards(folder: Path, weights: dict[str, torch.Tensor]) -> list[Hostile]:
    """Return directories whose index names files elsewhere."""
    made = []
    save_file(weights, folder / "outside.safetensors")
    for i, target in enumerate(("../outside.safetensors", str(folder / "outside.safetensors"), "a/../../outside.safetensors")):
        path = folder / f"hf-shards-{i}"
        path.mkdir()
        (path / "config.json").write_text(json.dumps(TINY))
        index = {"metadata": {}, "weight_map": dict.fromkeys(weights, target)}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
        made.append(Hostile(f"directory: shard {i} elsewhere", path, "read another file", "convert"))
    return made

"""Reads pickles and files of `torch.save` as data: nothing that a file names is imported, looked up or called.

A name becomes a `Name`, which nothing can call. Those in `_KNOWN` stand for functions of this file, those of known families for
objects that do nothing, and all others are refused. Operations that no checkpoint needs are left out. What is built takes some
50 bytes for each byte of a pickle at most; tensors stay in the file.

Reference: https://docs.python.org/3/library/pickle.html and `pickletools`; the formats of `torch.save` since 1.6 and before.
Known deviation: the interpreter is not `pickle.Unpickler`, but the same one written in Python. The one in C reserves memory for
whatever length or memo entry a file claims, and hashes keys however deep they are nested, until the stack is full.
"""

import io
import pickle
import re
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import torch

from transformer_xl.conversion.readers.tensors import DTYPES, Storage, TensorRef, crc32, place
from transformer_xl.errors import CheckpointError, counted, one_line, shown
from transformer_xl.untrusted import open_regular

MAX_DEPTH = 100
"""Most containers within containers. A pickled model of the authors nests about 30 deep."""
FREE_PARTS, BYTES_PER_PART = 2**16, 4
"""Most containers, objects and memo entries. An entry of Python 2's OrderedDict may be 4 of them in 16 bytes."""
FREE_TEXT, TEXT_PER_BYTE = 2**19, 2
"""Most characters and values, each counted as often as it is referred to. Real files refer to a word three times."""
MAX_TEXT = 2**20
"""Bytes of a text. A longer one must be the content of an array, which is skipped."""
MAX_KEY = 2**16
"""Characters of a key, because equal ones take time to compare."""
MAX_DIRECTORY = 4 * 2**20
"""Bytes of a zip file's directory, which takes about 90 for a storage. A cached lm1b has 12,000."""

_MAGIC, _PROTOCOL = 0x1950A86A20F9469CFC6C, 1001  # files of `torch.save` before 1.6 start with these two numbers
_ZIP = b"PK\x03\x04"

_STORAGES = {
    **{"Double": "float64", "Float": "float32", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64", "Int": "int32"},
    **{"Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool", "Untyped": "uint8"},
}
_TYPES = "bool|u?int(8|16|32|64)|b?float16|float32|float64|half|float|double|long|int|short"
_AUTHORS = "mem_transformer|proj_adaptive_softmax|adaptive_softmax|log_uniform_sampler|data_parallel|vocabulary|data_utils"

FAMILIES = re.compile(
    # modules of PyTorch and their wrappers; modules from before 2019 refer to `torch.nn.backends`
    r"torch\.nn\.(modules|parallel|backends|functional)(\.\w+)?\.\w+"
    # the authors' and NVIDIA's files, in any folder; their module is __main__ if they ran as a script
    rf"|(\w+\.)*({_AUTHORS}|mem_transformer_jit|mem_transformer_base_jit|proj_adaptive_softmax_jit)\.\w+"
    r"|__main__\.(Corpus|Vocab|OpenAIVocab|MemTransformerLM)"
    # tokenizers and configurations of Hugging Face, and the classes of their attributes
    r"|(transformers|pytorch_transformers|pytorch_pretrained_bert)(\.models)?(\.deprecated)?(\.transfo_xl)?"
    r"\.(configuration|modeling|tokenization)_\w+\.\w+"
    r"|sacremoses\.(tokenize|normalize|truecase)\.\w+|tokenizers\.AddedToken"
    r"|re\._compile|(regex\.)?(_regex|_regex_core|regex)\.(_?compile|Pattern)"
    # settings, states of optimizers, arrays, and types
    r"|argparse\.Namespace|apex(\.\w+)*\.(\w*Loss[sS]caler|FP16_\w+)|torch\.optim(\.\w+)*\.\w+"
    rf"|torch\.(device|Generator|{_TYPES})|torch\.(cuda\.)?\w+Tensor"
    rf"|torch\.((cuda|storage)\.)?({'|'.join(_STORAGES)})Storage"
    r"|numpy\.(_?core\.(multiarray\.(_reconstruct|scalar)|numeric\._frombuffer)|ndarray|dtype)|_codecs\.encode"
    r"|pathlib\.(Pure)?(Posix|Windows)?Path"
    r"|(builtins|__builtin__)\.(object|int|float|bool|str|unicode|long|complex|slice|range|xrange|bytes|bytearray)",
    re.ASCII,
)
"""Names of classes and functions that become objects which do nothing."""


class _RefusedError(Exception):
    """A file is refused. The message continues a sentence that begins with the file's name."""


@dataclass(frozen=True)
class Name:
    """The name of a class or function, with its module."""

    text: str


@dataclass
class Stub:
    """An object of a foreign class, as data."""

    name: str  # of its class, with the module
    state: dict[str, Any] = field(default_factory=dict)  # its `__dict__`, or under "" the argument of its `__setstate__`


@dataclass(frozen=True)
class PickledBytes:
    """Bytes that a pickle holds: where they lie in the file, and how many."""

    offset: int
    size: int


@dataclass(frozen=True)
class _View:
    """A storage as a pickle sees it: a part of it, and the type of its elements."""

    storage: Storage
    dtype: torch.dtype
    start: int  # bytes
    size: int  # bytes


def unpickle(path: Path) -> Any:
    """Read a pickle of any protocol, or a file of `torch.save` in either of its formats; return plain values.

    Objects of foreign classes become `Stub`s, names of classes and functions `Name`s, bytes `PickledBytes`, and tensors and
    parameters `TensorRef`s, which are known to lie in the file. Dicts of any class become dict, sets become list, and what an
    object holds besides its attributes is left out. Texts of Python 2 are decoded as latin-1, so `text.encode("latin-1")`
    gives their bytes, which may be UTF-8.

    Raises:
        CheckpointError: the file is missing, damaged, hostile, or refers to names that no Transformer-XL needs.
    """
    raw, size = open_regular(path)
    with io.BufferedReader(raw, 2**17) as file:
        try:
            if file.read(len(_ZIP)) == _ZIP:
                return _read_zip(path, file, size)
            file.seek(0)
            return _read_stream(path, file, size, room=size)
        except _RefusedError as error:
            raise CheckpointError(f"'{path}' {error}") from None
        except Exception as error:  # a damaged pickle can raise nearly anything: TypeError, IndexError, struct.error ...
            reason = ascii(one_line(f"{type(error).__name__} {error}"))[1:-1][:150]
            raise CheckpointError(
                f"'{path}' holds a damaged pickle, or is not a checkpoint: {reason}; copy or download it again"
            ) from error


# --- the formats ------------------------------------------------------------------------------------------------------


def _read_zip(path: Path, file: BinaryIO, size: int) -> Any:
    entries = _entries(path, file, size)
    folders = {name.split("/")[0] for name in entries}  # one, which has the file's name when it was saved
    folder = folders.pop() if len(folders) == 1 else ""
    body, order = entries.get(f"{folder}/data.pkl"), entries.get(f"{folder}/byteorder")
    if body is None:
        raise _RefusedError("is a zip file, but none of torch.save")
    if f"{folder}/constants.pkl" in entries:
        raise _RefusedError("is TorchScript, which holds code; save the state_dict of the model instead")
    if order is not None and next(_blocks(file, order), b"") != b"little":
        raise _RefusedError("was written by a machine of another byte order; save it again on this one")
    if body.verify and (complaint := body.verify(_blocks(file, body))):
        raise _RefusedError(f"is damaged: {complaint}; copy or download it again")
    file.seek(body.offset)
    reader = _Reader(path, file, body.offset + body.size, lambda key, size: entries.get(f"{folder}/data/{key}"), room=size)
    content = reader.next()
    reader.check_end()
    return content


def _entries(path: Path, file: BinaryIO, size: int) -> dict[str, Storage]:
    """Return the entries of a zip file by name; they lie within the file and do not overlap."""
    with zipfile.ZipFile(_Directory(file)) as archive:  # pyright: ignore[reportArgumentType]
        listed = archive.infolist()
    checked = any(each.CRC for each in listed)  # PyTorch can write files without checksums
    entries = {}
    for each in listed:
        if each.compress_type or each.flag_bits & 1 or each.compress_size != each.file_size:
            raise _RefusedError("has a compressed or encrypted entry; torch.save writes none, save it again")
        file.seek(each.header_offset)
        head = file.read(30)
        if head[:4] != _ZIP or each.filename in entries:
            raise _RefusedError(f"is not a sound zip file: entry {shown(each.filename)} is missing, or occurs twice")
        start = each.header_offset + 30 + int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
        entries[each.filename] = Storage(path, each.file_size, start, crc32(each.CRC) if checked else None)
    spans = [*sorted((entry.offset, entry.offset + entry.size) for entry in entries.values()), (size, size)]
    if any(end > following for (_, end), (following, _) in pairwise(spans)):
        raise _RefusedError("is not a sound zip file: its entries overlap, or lie outside of it; copy or download it again")
    return entries


class _Directory:
    """A file as `zipfile` sees it, which reads the whole directory at once and keeps a kilobyte for each entry."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.seek, self.tell = file, file.seek, file.tell

    def read(self, size: int = -1) -> bytes:
        if size > MAX_DIRECTORY:
            raise _RefusedError(f"is a zip file with a directory of {size:,} bytes; {MAX_DIRECTORY:,} is the most accepted")
        return self._file.read(size)


def _blocks(file: BinaryIO, storage: Storage) -> Iterator[bytes]:
    file.seek(storage.offset)
    for left in range(storage.size, 0, -(2**20)):
        yield file.read(min(left, 2**20))


def _read_stream(path: Path, file: BinaryIO, end: int, *, room: int) -> Any:
    """Read from where the file stands a plain pickle, or what torch.save wrote before 1.6: five pickles, then the storages."""
    reader = _Reader(path, file, end, lambda key, size: Storage(path, size), room=room)
    content = reader.next()
    if content == _MAGIC:
        protocol, system, content, keys = (reader.next() for _ in range(4))
        if protocol != _PROTOCOL or not isinstance(system, dict) or system.get("little_endian") is not True:
            raise _RefusedError("is of another format of torch.save, or was written by a machine of another byte order")
        if not isinstance(keys, list) or sorted(map(str, keys)) != sorted(reader.storages):
            raise _RefusedError("lists other storages than its tensors need")
        for key in keys:
            view = reader.storages[key]
            if int.from_bytes(file.read(8), "little") * view.dtype.itemsize != view.size:
                raise _RefusedError(f"has another number of elements in storage {shown(key)}; copy or download it again")
            view.storage.offset = file.tell()
            file.seek(view.size, io.SEEK_CUR)
    elif reader.storages:
        raise _RefusedError("refers to storages, which a plain pickle cannot hold")
    reader.check_end()
    return content


# --- the pickle -------------------------------------------------------------------------------------------------------


_Interpreter: Any = pickle._Unpickler


class _Reader(_Interpreter):
    """Python's interpreter of pickles with the names, containers and limits of this file.

    Args:
        path: of the file.
        file: stands where the pickle begins.
        end: byte at which the pickle or file ends.
        find: returns the storage of a key, which should have so many bytes.
        room: bytes that files within the pickle may have all together.
    """

    def __init__(self, path: Path, file: BinaryIO, end: int, find: Callable[[str, int], Storage | None], *, room: int) -> None:
        super().__init__(file, encoding="latin1")
        self.path, self.file, self.end, self.room = path, file, end, room
        self.storages: dict[str, _View] = {}
        self.skipped = 0  # bytes
        self._find, self._start, self._n_parts = find, file.tell(), 0

    def next(self) -> Any:
        """Return the content of the next pickle, which is small enough to be listed and printed."""
        self.memo = {}
        content = self.load()
        most = FREE_TEXT + TEXT_PER_BYTE * self._n_read
        level, cost = [content], 0
        for _ in range(MAX_DEPTH):
            cost += len(level) + sum(len(value) for value in level if type(value) is str)
            parts = [part for value in level for part in _parts(value)]
            if cost + sum(map(len, parts)) > most:
                raise _RefusedError(f"repeats its parts until they make more than {most:,} characters; it is no checkpoint")
            if not parts:
                return content
            level = [value for part in parts for value in part]
        raise _RefusedError(f"is nested more than {MAX_DEPTH} deep, or holds itself")

    def check_end(self) -> None:
        """Refuse a file that is too short, or in which something follows."""
        if n := self.end - self.file.tell():
            what = f"ends {counted(-n, 'byte')} too early" if n < 0 else f"has {counted(n, 'byte')} too many at its end"
            raise _RefusedError(f"{what}; copy or download it again")

    def count(self, n: int) -> None:
        """Count parts that were made; refuse more than a file of this size may have."""
        self._n_parts += n
        if self._n_parts > FREE_PARTS and (self._n_parts - FREE_PARTS) * BYTES_PER_PART > self._n_read:
            raise _RefusedError(f"makes {self._n_parts:,} objects of {self._n_read:,} bytes; it is no checkpoint")

    @property
    def _n_read(self) -> int:
        return self.file.tell() - self._start - self.skipped

    def find_class(self, module_name: str, global_name: str) -> Name:
        name = f"{module_name}.{global_name}"
        if not global_name.isidentifier() or (name not in _KNOWN and (len(name) > 200 or not FAMILIES.fullmatch(name))):
            raise _RefusedError(f"refers to {shown(name)}, which no Transformer-XL needs")
        return Name(name)

    def persistent_load(self, pid: Any) -> Any:
        match pid:
            case ("module", Name() as name, _, _):  # with its source
                return name
            case ("storage", Name(kind), str(key), _, int(n)) | ("storage", Name(kind), str(key), _, int(n), None):
                start, n_part = 0, n
            case ("storage", Name(kind), str(key), _, int(n), (_, int(start), int(n_part))):
                pass
            case _:
                raise _RefusedError("refers to something outside of itself that is not a storage")
        dtype = DTYPES.get(_STORAGES.get(kind.rpartition(".")[2].removesuffix("Storage"), ""))
        if dtype is None or min(n, start, n_part) < 0 or start + n_part > n:
            raise _RefusedError(f"refers to storage {shown(key)} as something that it cannot be")
        size = n * dtype.itemsize
        storage = self.storages[key].storage if key in self.storages else self._find(key, size)
        if storage is None or storage.size != size:
            raise _RefusedError(f"has no storage {shown(key)} of {shown(n)} elements; copy or download it again")
        if self.storages.setdefault(key, _View(storage, dtype, 0, size)).dtype != dtype:
            raise _RefusedError(f"refers to storage {shown(key)} as two types")
        return _View(storage, dtype, start * dtype.itemsize, n_part * dtype.itemsize)

    def call(self, name: Name, args: tuple[Any, ...]) -> Any:
        """Return what stands for the object that a class or function of this name would make."""
        function = _KNOWN.get(name.text)
        return function(self, *args) if function else Stub(name.text)


def _parts(value: Any) -> tuple[Any, ...]:
    if type(value) is Stub:
        return (value.state.keys(), value.state.values())
    return (value.keys(), value.values()) if type(value) is dict else (value,) if type(value) in (list, tuple) else ()


# What stands for functions and classes of other programs: its arguments are the reader, then theirs


def _dict(reader: _Reader, content: Any = ()) -> Any:
    if type(content) is dict:
        return content
    reader.count(len(content))
    return _fill({}, [part for key, value in content for part in (key, value)])


def _tensor(reader: _Reader, view: _View, offset: Any, shape: Any, stride: Any, *others: Any) -> TensorRef:
    kind = others[2] if len(others) > 2 else None
    dtype = DTYPES[kind.text.removeprefix("torch.")] if type(kind) is Name else view.dtype
    is_possible = all(type(size) is int and size >= 0 for size in (offset, *shape, *stride))
    start, end = view.start + offset * dtype.itemsize if is_possible else -1, view.start + view.size
    tensor = place(view.storage, dtype, start, end, tuple(shape), tuple(stride)) if is_possible else None
    if tensor is None:
        raise _RefusedError(
            f"holds a tensor of shape {shown(shape)} and strides {shown(stride)} that does not fit into its storage"
        )
    return tensor


def _storage(reader: _Reader, span: PickledBytes) -> Any:
    """Read a storage that was pickled without torch.save: bytes that are a file of torch.save."""
    if type(span) is not PickledBytes:
        raise _RefusedError("holds tensors pickled by a protocol below 3; save it again by torch.save")
    if span.size > reader.room:  # so none is read again and again, and none holds another
        raise _RefusedError("holds more files within itself than it has bytes")
    reader.room -= span.size
    at = reader.file.tell()
    reader.file.seek(span.offset)
    storage = _read_stream(reader.path, reader.file, span.offset + span.size, room=0)
    reader.file.seek(at)
    return storage


def _named(modules: str, names: str, function: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    return {f"{module}.{name}": function for module in modules.split() for name in names.split()}


_KNOWN = {
    **_named("collections", "OrderedDict Counter", _dict),
    **_named("collections", "defaultdict", lambda reader, factory=None, content=(): _dict(reader, content)),
    **_named("builtins __builtin__", "dict", _dict),
    **_named("builtins __builtin__", "list tuple set frozenset", lambda reader, content=(): content or []),
    **_named("torch", "Size", lambda reader, content=(): content),
    **_named("copyreg copy_reg", "_reconstructor", lambda reader, kind, _, x: reader.call(kind, () if x is None else (x,))),
    **_named("torch._utils", "_rebuild_tensor _rebuild_tensor_v2 _rebuild_tensor_v3", _tensor),
    **_named("torch._utils", "_rebuild_parameter _rebuild_parameter_with_state", lambda reader, tensor, *_: tensor),
    **_named("torch.nn.parameter", "Parameter Buffer", lambda reader, tensor, *_: tensor),
    **_named("torch._tensor", "_rebuild_from_type_v2", lambda reader, function, _, args, state: reader.call(function, args)),
    **_named("torch.storage", "_load_from_bytes", _storage),
}
"""Names that mean something in a checkpoint, and what is called instead of them."""


# --- the operations ---------------------------------------------------------------------------------------------------


def _reduce(self: _Reader) -> None:
    args = self.stack.pop()
    self.stack[-1] = self.call(self.stack[-1], args)


def _build(self: _Reader) -> None:
    state = self.stack.pop()
    target = self.stack[-1]
    if type(target) not in (dict, Stub):
        raise _RefusedError("fills an object that has no attributes")
    for piece in state if type(state) is tuple and len(state) == 2 else (state,):  # a pair is of attributes and slots
        if type(target) is Stub and type(piece) is dict:
            self.count(len(piece))
            target.state.update(piece)
        elif type(target) is Stub and piece is not None:
            target.state[""] = state


def _put(self: _Reader) -> None:
    number = int(self.readline()[:-1])
    if not 0 <= number < 2**32:  # others can be chosen to collide
        raise _RefusedError("numbers its parts as no pickle does")
    self.memo[number] = self.stack[-1]


def _mark(self: _Reader) -> None:
    if len(self.metastack) > 2 * MAX_DEPTH:
        raise _RefusedError(f"is nested more than {MAX_DEPTH} deep")
    self.load_mark()


def _append(target: Any, items: list[Any]) -> None:
    """Add items to a list. Those of other objects are left out, here and below."""
    if type(target) not in (list, Stub):
        raise _RefusedError("adds items to something that holds none")
    if type(target) is list:
        target.extend(items)


def _fill(target: Any, items: list[Any]) -> Any:
    """Add keys and values, which take turns, to a dict."""
    if type(target) not in (dict, Stub) or not all(map(_is_key, items[::2])):
        raise _RefusedError("holds a dictionary with keys that no checkpoint has")
    if type(target) is dict:
        target.update(zip(items[::2], items[1::2], strict=True))
    return target


def _is_key(key: Any) -> bool:
    """Return whether it is a text, a few of them, or an integer of few enough bits: others can be chosen to collide."""
    if type(key) is int:
        return abs(key) < 2**60
    parts = key if type(key) is tuple and len(key) <= 4 else (key,)
    return all(type(part) is str and len(part) <= MAX_KEY for part in parts)


def _long(width: int, *decoding: str) -> Callable[[_Reader], None]:
    """Return an operation that reads a text, or leaves bytes where they are; their number comes first."""

    def load(self: _Reader) -> None:
        size = int.from_bytes(self.read(width), "little")
        if decoding and size <= MAX_TEXT:
            self.append(str(self.read(size), *decoding))
            return
        self.append(Stub("builtins.str") if decoding else PickledBytes(self.file.tell(), size))
        self.skipped += size
        self.file.seek(size, io.SEEK_CUR)  # what leads beyond the end is noticed there

    return load


def _counted(operation: Callable[[_Reader], None]) -> Callable[[_Reader], None]:
    def load(self: _Reader) -> None:
        self.count(1)
        operation(self)

    return load


def _marked_dict(self: _Reader) -> None:
    items = self.pop_mark()
    self.append(_fill({}, items))


_PLAIN = (
    "NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 FLOAT BINFLOAT STRING SHORT_BINSTRING UNICODE SHORT_BINUNICODE"
)
_PLAIN += " EMPTY_TUPLE PROTO GLOBAL STACK_GLOBAL BINPERSID POP POP_MARK DUP GET BINGET LONG_BINGET STOP"
_COUNTED = "TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST EMPTY_DICT LIST BINPUT LONG_BINPUT MEMOIZE"
_OPERATIONS: dict[str, Callable[[Any], Any]] = {
    **{name: _Interpreter.dispatch[getattr(pickle, name)[0]] for name in _PLAIN.split()},
    **{name: _counted(_Interpreter.dispatch[getattr(pickle, name)[0]]) for name in _COUNTED.split()},
    "EMPTY_SET": _counted(_Interpreter.load_empty_list),
    "FROZENSET": _counted(_Interpreter.load_list),
    "DICT": _counted(_marked_dict),
    "REDUCE": _counted(_reduce),
    "NEWOBJ": _counted(_reduce),
    "PUT": _counted(_put),
    "BUILD": _build,
    "MARK": _mark,
    "APPEND": lambda self: _append(items=[self.stack.pop()], target=self.stack[-1]),
    "APPENDS": lambda self: _append(items=self.pop_mark(), target=self.stack[-1]),
    "ADDITEMS": lambda self: _append(items=self.pop_mark(), target=self.stack[-1]),
    "SETITEM": lambda self: _fill(items=[self.stack.pop(-2), self.stack.pop()], target=self.stack[-1]),
    "SETITEMS": lambda self: _fill(items=self.pop_mark(), target=self.stack[-1]),
    "BINSTRING": _long(4, "latin-1"),
    "BINUNICODE": _long(4, "utf-8", "surrogatepass"),
    "BINUNICODE8": _long(8, "utf-8", "surrogatepass"),
    "SHORT_BINBYTES": _long(1),
    "BINBYTES": _long(4),
    "BINBYTES8": _long(8),
    "BYTEARRAY8": _long(8),
    "FRAME": lambda self: self.read(8),  # it only says how much may be read ahead
}
"""All operations that a checkpoint needs."""

_Reader.dispatch = {getattr(pickle, name)[0]: operation for name, operation in _OPERATIONS.items()}

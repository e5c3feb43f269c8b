"""Reads a pickle as data, in a separate process. It never imports, looks up or calls anything that the file names.

This is the only file of the package that unpickles. `pickles.py` runs it as a script, in an interpreter that sees none of our
other files. So it needs only the standard library, and it starts in hundredths of a second. It reads the pickle from standard
input and writes JSON.

The file's parts, in order: stand-ins for foreign classes, the unpickler, `Window` (which bounds what the unpickler reads), the
encoder to JSON, and the limits of the process.

Reference: https://docs.python.org/3/library/pickle.html, "Restricting Globals"; the formats of `torch.save`.
"""

import copyreg
import gc
import io
import json
import os
import re
import resource
import signal
import struct
import sys
from collections.abc import Callable
from pickle import Unpickler
from typing import Any, BinaryIO, NamedTuple

MAX_DEPTH = 100
"""Most containers within containers, because the encoder is recursive. A pickled model of the authors nests about 30 deep."""
MAX_OUTPUT = 256 * 2**20
"""Most characters of the result: five times what an lm1b vocabulary takes as list, dict and Counter."""
MIN_OUTPUT, OUTPUT_PER_BYTE = 2**20, 16
"""The result may have a million characters, and 16 more per byte of pickle. Sharing makes real files three times smaller."""
MAX_TEXT = 2**20
"""Characters of a text. A longer one is an array or other bulk data, so only its length is returned."""
MAX_LINE = 2**20
"""Bytes of one line of a textual pickle."""
MAX_NAME = 200
"""Characters of a class name with its module."""
MAX_INTEGER_BITS = 256
"""Real files hold 100 bits (1e30 for "no limit"). An integer of many thousand bits takes long to print."""
MAX_STORAGES = 100_000
"""Storages of a file. A model has hundreds; a cached lm1b has one for each test sentence, about 12,000."""

MARK = "\0"
"""A JSON object that stands for something other than a dict has one key, which starts with this character."""

MAGIC = 0x1950A86A20F9469CFC6C
PROTOCOL = 1001
"""Files of `torch.save` before version 1.6 start with these two numbers."""

STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "UntypedStorage": "uint8",
}
"""Storage classes of PyTorch, and the types of their elements."""

_DTYPES = "bool|u?int(8|16|32|64)|b?float16|float32|float64|half|float|double|long|int|short"
_AUTHORS = "mem_transformer|proj_adaptive_softmax|adaptive_softmax|log_uniform_sampler|data_parallel|vocabulary|data_utils"

FAMILIES = re.compile(
    # modules of PyTorch and their wrappers; modules from before 2019 refer to `torch.nn.backends`
    r"torch\.nn\.(modules|parallel|backends|parameter|functional)(\.\w+)?\.\w+"
    # the authors' and NVIDIA's files, in any folder; their module is __main__ if they ran as a script
    rf"|(\w+\.)*({_AUTHORS}|mem_transformer_jit|mem_transformer_base_jit|proj_adaptive_softmax_jit)\.\w+"
    r"|__main__\.(Corpus|Vocab|OpenAIVocab|MemTransformerLM)"
    # tokenizers and configurations of Hugging Face, and the classes of their attributes
    r"|(transformers|pytorch_transformers|pytorch_pretrained_bert)(\.models)?(\.deprecated)?(\.transfo_xl)?"
    r"\.(configuration|modeling|tokenization)_\w+\.\w+"
    r"|sacremoses\.(tokenize|normalize|truecase)\.\w+|tokenizers\.AddedToken"
    r"|re\._compile|(regex\.)?(_regex|_regex_core|regex)\.(_?compile|Pattern)"
    # settings, and states of optimizers
    r"|argparse\.Namespace|apex(\.\w+)*\.(\w*Loss[sS]caler|FP16_\w+)|torch\.optim(\.\w+)*\.\w+"
    r"|torch\.(device|Generator)|torch\.(cuda\.)?\w+Tensor"
    r"|pathlib\.(Pure)?(Posix|Windows)?Path"
    r"|(builtins|__builtin__)\.(object|int|float|bool|str|unicode|long|complex|slice|range|xrange)",
    re.ASCII,
)
"""Names of classes and functions that become objects which do nothing. All other names are refused, to be safe."""


class RefusedError(Exception):
    """A file is refused. The message continues a sentence that begins with the file's name."""


class _Inert:
    """Base of the classes that stand for foreign classes. They record what the pickle gives them, and do nothing."""

    __slots__ = ("args", "items", "states")
    name = ""
    args: tuple[Any, ...]
    items: list[Any]
    states: list[Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> "_Inert":
        self = object.__new__(cls)
        self.args = (*args, kwargs) if kwargs else args
        self.items, self.states = [], []
        return self

    def __setstate__(self, state: Any) -> None:
        self.states.append(state)

    def append(self, item: Any) -> None:
        self.items.append(item)

    def add(self, item: Any) -> None:
        self.items.append(item)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items.append((key, value))


class _Dict(dict):
    """Stands for OrderedDict and Counter. It keeps their items and ignores their state, which is attributes."""

    __slots__ = ()

    def __init__(self, *args: Any) -> None:
        content = args[0] if args else ()
        if not isinstance(content, (dict, list, tuple)):
            raise RefusedError("holds a dictionary made of something that has no keys")
        super().__init__(content)

    def __setstate__(self, state: Any) -> None:
        pass


class _DefaultDict(_Dict):
    """Stands for defaultdict; its first argument, the factory of missing values, is ignored."""

    __slots__ = ()

    def __init__(self, *args: Any) -> None:
        super().__init__(*args[1:])


class _Fixed:
    """Base of the objects that the unpickler makes after checks. A file must not change them afterwards."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        raise RefusedError("fills an object that has no attributes")


class _Bulk(_Fixed):
    """Bytes or a text so long that it must be the content of an array; only its length is kept."""

    __slots__ = ("kind", "size")

    def __init__(self, kind: str, size: int) -> None:
        self.kind, self.size = kind, size


class _StorageType(_Fixed):
    __slots__ = ("dtype", "untyped")

    def __init__(self, name: str) -> None:
        self.dtype, self.untyped = STORAGES[name], name == "UntypedStorage"


class _Storage(_Fixed):
    """A storage, or the `size` elements of it that begin at `start`."""

    __slots__ = ("dtype", "key", "size", "start", "untyped")

    def __init__(self, key: str, dtype: str, start: int, size: int, untyped: bool) -> None:
        self.key, self.dtype, self.start, self.size, self.untyped = key, dtype, start, size, untyped


class _Tensor(_Fixed):
    __slots__ = ("dtype", "offset", "shape", "storage", "stride")

    def __init__(self, storage: _Storage, dtype: str, offset: int, shape: list[int], stride: list[int]) -> None:
        self.storage, self.dtype, self.offset, self.shape, self.stride = storage, dtype, offset, shape, stride


class _Array(_Inert):
    """A NumPy array: its shape and type, without its content."""

    __slots__ = ()
    name = "numpy.ndarray"

    def describe(self) -> tuple[Any, str]:
        shape, dtype = self.args
        if self.states:  # version, shape, dtype, order, bytes
            state = self.states[-1]
            if not (isinstance(state, tuple) and len(state) == 5):
                raise RefusedError("holds a NumPy array without shape and type")
            shape, dtype = state[1:3]
        return tuple(_sizes(shape, "NumPy array")), dtype.text if isinstance(dtype, _Dtype) else "unknown"


class _Dtype(_Inert):
    __slots__ = ()
    name = "numpy.dtype"

    @property
    def text(self) -> str:
        code = self.args[0] if self.args else None
        state = self.states[-1] if self.states else None
        order = state[1] if isinstance(state, tuple) and len(state) > 1 else "|"
        if not (isinstance(code, str) and isinstance(order, str) and len(code) < 16 and len(order) == 1):
            raise RefusedError("holds a NumPy type that is not a plain number")
        return order + code


def _is_integer(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**62


def _sizes(value: Any, what: str) -> list[int]:
    if isinstance(value, (tuple, list)) and len(value) <= 64 and all(map(_is_integer, value)):
        return list(value)
    raise RefusedError(f"holds a {what} with impossible sizes or strides")


def _check_arguments(args: tuple[Any, ...], least: int, what: str) -> None:
    if len(args) < least:
        raise RefusedError(f"holds a {what} with {len(args)} arguments instead of {least}")


def _tensor(*args: Any) -> _Tensor:
    """Stands for `torch._utils._rebuild_tensor` and `_rebuild_tensor_v2`."""
    _check_arguments(args, 4, "tensor")
    storage, offset, shape, stride = args[:4]
    if not isinstance(storage, _Storage) or storage.untyped or not _is_integer(offset):
        raise RefusedError("holds a tensor without a storage or with an impossible offset")
    return _Tensor(storage, storage.dtype, offset, _sizes(shape, "tensor"), _sizes(stride, "tensor"))


def _tensor_v3(*args: Any) -> _Tensor:
    """Stands for `torch._utils._rebuild_tensor_v3`, whose storage is untyped: the tensor has the type."""
    _check_arguments(args, 7, "tensor")
    storage, offset, shape, stride, dtype = *args[:4], args[6]
    name = dtype.name.removeprefix("torch.") if isinstance(dtype, _Inert) else ""
    if not isinstance(storage, _Storage) or not _is_integer(offset) or not name:
        raise RefusedError("holds a tensor without a storage or a type")
    return _Tensor(storage, name, offset, _sizes(shape, "tensor"), _sizes(stride, "tensor"))


def _first_tensor(*args: Any) -> _Tensor:
    """Stands for functions that wrap a tensor as a parameter or add attributes to it; returns the tensor."""
    _check_arguments(args, 1, "parameter")
    if not isinstance(args[0], _Tensor):
        raise RefusedError("holds a parameter without a tensor")
    return args[0]


def _typed_tensor(*args: Any) -> _Tensor:
    """Stands for `torch._tensor._rebuild_from_type_v2(function, type, arguments, state)`."""
    _check_arguments(args, 4, "tensor")
    if args[0] not in (_tensor, _tensor_v3, _first_tensor) or not isinstance(args[2], tuple):
        raise RefusedError("holds a tensor made in an unknown way")
    return args[0](*args[2])


class _Parameter(_Inert):
    """A parameter as pickled before 2019. Its tensor is its first argument, or the first part of its state."""

    __slots__ = ()
    name = "torch.nn.parameter.Parameter"

    def tensor(self) -> Any:
        state = self.states[-1] if self.states else ()
        return _first_tensor(*(self.args or (state if isinstance(state, tuple) else ())))


def _encode_text(*args: Any) -> Any:
    """Stands for `_codecs.encode`, which Python 3 writes for bytes in the protocols of Python 2."""
    if len(args) != 2 or not isinstance(args[0], str) or args[1] not in ("latin1", "latin-1"):
        raise RefusedError("encodes text in an unusual way")
    return _Bulk("bytes", len(args[0])) if len(args[0]) > MAX_TEXT else args[0].encode("latin-1")


def _reconstruct(*args: Any) -> Any:
    """Stands for `copyreg._reconstructor(class, base, content)`."""
    if len(args) != 3 or not (isinstance(args[0], type) and issubclass(args[0], (_Inert, _Dict))):
        raise RefusedError("rebuilds an object of no class")
    return args[0]() if args[2] is None else args[0](args[2])


def _members(*args: Any) -> list[Any]:
    """Stands for `list`, `set` and `frozenset`; a set becomes a sorted list."""
    if len(args) > 1 or not isinstance(args[0] if args else (), (list, tuple, set, frozenset)):
        raise RefusedError("holds a set of something that has no members")
    return _sorted(args[0]) if args and isinstance(args[0], (set, frozenset)) else list(args[0] if args else ())


def _sorted(members: Any) -> list[Any]:
    return sorted(members, key=lambda member: (type(member).__name__, member if isinstance(member, (str, int)) else 0))


def _array(*args: Any) -> _Inert:
    """Stands for `numpy.core.multiarray._reconstruct`; the state that follows has shape and type."""
    return _Array((), None)


def _array_from_buffer(*args: Any) -> _Inert:
    """Stands for `numpy.core.numeric._frombuffer(buffer, dtype, shape, order)`."""
    _check_arguments(args, 3, "NumPy array")
    return _Array(args[2], args[1])


_SCALARS = {"f2": "e", "f4": "f", "f8": "d", "b1": "?", **{f"i{n}": c for n, c in zip((1, 2, 4, 8), "bhiq", strict=True)}}
_SCALARS |= {f"u{n}": c for n, c in zip((1, 2, 4, 8), "BHIQ", strict=True)}


def _scalar(*args: Any) -> Any:
    """Stands for `numpy.core.multiarray.scalar(dtype, bytes)`, for example a best loss."""
    _check_arguments(args, 2, "NumPy number")
    dtype, data = args[:2]
    data = data.encode("latin-1") if isinstance(data, str) else data  # Python 2 wrote its bytes as text
    code = _SCALARS.get(dtype.text[1:]) if isinstance(dtype, _Dtype) else None
    if code is None or not isinstance(data, bytes) or len(data) != struct.calcsize("=" + code):
        raise RefusedError("holds a NumPy number of an unknown type or length")
    return struct.unpack((">" if dtype.text[0] == ">" else "<") + code, data)[0]


_BUILTINS: dict[str, Any] = {
    "dict": _Dict,
    "list": _members,
    "tuple": lambda *args: tuple(_members(*args)),
    "set": _members,
    "frozenset": _members,
    "bytes": lambda *args: b"" if not args else _encode_text(*args),
}
KNOWN: dict[str, Any] = {
    "collections.OrderedDict": _Dict,
    "collections.Counter": _Dict,
    "collections.defaultdict": _DefaultDict,
    **{f"{module}.{name}": made for module in ("builtins", "__builtin__") for name, made in _BUILTINS.items()},
    "_codecs.encode": _encode_text,
    "copyreg._reconstructor": _reconstruct,
    "copy_reg._reconstructor": _reconstruct,
    **{f"numpy.{core}.multiarray._reconstruct": _array for core in ("core", "_core")},
    **{f"numpy.{core}.numeric._frombuffer": _array_from_buffer for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray.scalar": _scalar for core in ("core", "_core")},
    "numpy.ndarray": _Array,
    "numpy.dtype": _Dtype,
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_parameter": _first_tensor,
    "torch._utils._rebuild_parameter_with_state": _first_tensor,
    "torch._tensor._rebuild_from_type_v2": _typed_tensor,
    "torch.nn.parameter.Parameter": _Parameter,
    "torch.nn.parameter.Buffer": _Parameter,
    "torch.Size": lambda *args: tuple(_members(*args)),
}
"""What stands for the names that mean something in a checkpoint."""


class InertUnpickler(Unpickler):
    """An unpickler that can call only the functions above, and classes that it makes itself."""

    def __init__(self, file: Any, storages: dict[str, tuple[str, int]]) -> None:
        # Texts of Python 2 have an unknown encoding; latin-1 keeps every byte.
        super().__init__(file, encoding="latin1")
        self._storages = storages
        self._made: dict[str, Any] = {}

    def find_class(self, module_name: str, global_name: str) -> Any:
        """Return the stand-in for a name. The name itself is never looked up."""
        name = f"{module_name}.{global_name}"
        if name in KNOWN:
            return KNOWN[name]
        if name not in self._made:
            self._made[name] = self._make(module_name, global_name, name)
        return self._made[name]

    def _make(self, module: str, short: str, name: str) -> Any:
        if module in ("torch", "torch.cuda", "torch.storage") and short in STORAGES:
            return _StorageType(short)
        dtype = module == "torch" and re.fullmatch(_DTYPES, short) is not None
        if not (dtype or (len(name) <= MAX_NAME and short.isidentifier() and FAMILIES.fullmatch(name))):
            raise RefusedError(f"refers to {_quote(name)}, which no Transformer-XL needs")
        made = type("Made", (_Inert,), {"__slots__": (), "name": name})
        return made() if dtype else made

    def persistent_load(self, pid: Any) -> Any:
        """Return a stand-in for what `torch.save` keeps outside of the pickle: a storage, or a class with its source."""
        if not isinstance(pid, tuple) or not pid or not isinstance(pid[0], str):
            raise RefusedError("refers to something outside of itself that is not a storage")
        if pid[0] == "module" and len(pid) == 4 and isinstance(pid[1], type) and issubclass(pid[1], _Inert):
            return pid[1]
        if pid[0] != "storage" or not 5 <= len(pid) <= 6 or not isinstance(pid[1], _StorageType):
            raise RefusedError("refers to something outside of itself that is not a storage")
        kind, key, _, size, view = [*pid[1:], None][:5]
        view = ("", 0, size) if view is None else view
        if not isinstance(key, str) or not 0 < len(key) <= MAX_NAME or not _is_integer(size):
            raise RefusedError("refers to a storage of impossible name or size")
        if not (isinstance(view, tuple) and len(view) == 3 and all(map(_is_integer, view[1:])) and sum(view[1:]) <= size):
            raise RefusedError(f"refers to a part of storage {_quote(key)} that lies outside of it")
        if self._storages.setdefault(key, (kind.dtype, size)) != (kind.dtype, size):
            raise RefusedError(f"refers to storage {_quote(key)} as two sizes or types")
        if len(self._storages) > MAX_STORAGES:
            raise RefusedError(f"has more than {MAX_STORAGES} storages")
        return _Storage(key, kind.dtype, view[1], view[2], kind.untyped)


class Window:
    """The bytes of a file from `start` to before `end`, as the unpickler reads them.

    It refuses to read beyond the end, so a length that a pickle claims cannot make it allocate memory. `file` is buffered.
    """

    def __init__(self, file: BinaryIO, start: int, end: int) -> None:
        self._file, self.at, self.end = file, start, end
        self.skipped = 0  # bytes
        file.seek(start)

    def _take(self, n: int) -> None:
        if not 0 <= n <= self.end - self.at:
            raise RefusedError("ends in the middle of its pickle")
        self.at += n

    def read(self, n: int) -> bytes:
        """Return n bytes. If only an array can be so long, skip them and return zeros, which take no memory."""
        self._take(n)
        if n > 4 * MAX_TEXT:
            self.skipped += n
            self._file.seek(self.at)
            return bytes(n)
        data = self._file.read(n)
        if len(data) != n:
            raise RefusedError("became shorter while it was read")
        return data

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer. If only an array can be so long, skip its bytes and leave the buffer as it is."""
        n = len(buffer)
        if n > 4 * MAX_TEXT:
            self._take(n)
            self.skipped += n
            self._file.seek(self.at)
        else:
            buffer[:] = self.read(n)
        return n

    def readline(self) -> bytes:
        """Return the bytes up to the end of the line."""
        line = self._file.readline(min(MAX_LINE, self.end - self.at))
        if not line.endswith(b"\n"):
            raise RefusedError("ends in the middle of its pickle, or has a line that is too long")
        self.at += len(line)
        return line

    def peek(self, n: int) -> bytes:
        """Return up to n of the next bytes without moving on."""
        return getattr(self._file, "peek")(n)[: self.end - self.at]  # noqa: B009 - BinaryIO does not know it


def _quote(text: str) -> str:
    return ascii(text if len(text) <= 100 else text[:97] + "...")


def _mark(kind: str, content: Any) -> dict[str, Any]:
    return {MARK + kind: content}


_PLAIN = {str, int, float, bool, type(None)}


class Encoder:
    """Turns the unpickled objects into JSON values of at most `budget` characters.

    An object that occurs twice is encoded once but counted twice. So a small file cannot make a result that is exponentially
    larger.
    """

    def __init__(self, budget: int = MAX_OUTPUT) -> None:
        self._budget = budget
        self._done: dict[int, tuple[_Encoded, Any]] = {}

    def encode(self, value: Any) -> Any:
        """Return JSON scalars, lists and dicts; raise `RefusedError` if `value` is too deep, too large or not data."""
        return self._encode(value, 0).json

    def _encode(self, value: Any, depth: int) -> "_Encoded":
        kind = type(value)
        if kind in _PLAIN:
            return self._scalar(value, kind)
        done, _ = self._done.get(id(value), (None, None))
        if depth + (done.height if done else 0) > MAX_DEPTH:
            raise RefusedError(f"is nested more than {MAX_DEPTH} deep, or holds itself")
        if done is None:
            done = self._compound(value, kind, depth + 1)
            self._done[id(value)] = done, value  # keeping the value alive keeps its id unique
        if done.cost > self._budget:
            raise RefusedError(f"repeats its parts until they make {done.cost} characters, which is not a checkpoint")
        return done

    def _scalar(self, value: Any, kind: type) -> "_Encoded":
        if kind is str:
            return _Encoded(value, len(value) + 4, 0) if len(value) <= MAX_TEXT else _bulk("str", len(value))
        if kind is int and value.bit_length() > MAX_INTEGER_BITS:
            raise RefusedError(f"holds a whole number of {value.bit_length()} bits")
        return _Encoded(value, 8, 0)

    def _compound(self, value: Any, kind: type, depth: int) -> "_Encoded":
        if isinstance(value, dict):
            return self._dict(value, depth)
        if kind in (list, set, frozenset):
            return self._list(value if kind is list else _sorted(value), depth)
        if kind is tuple:
            members = self._list(list(value), depth)
            return members._replace(json=_mark("tuple", members.json))
        if kind is _Tensor:
            return _encode_tensor(value)
        if kind in (bytes, bytearray, memoryview):
            return _bulk("bytes", len(value))
        if kind is _Bulk:
            return _bulk(value.kind, value.size)
        if kind is _Array:
            return self._stub(_Array.name, value.describe(), {}, [], depth)
        if kind is _Dtype:
            return self._stub(_Dtype.name, (value.text,), {}, [], depth)
        if kind is _Parameter:
            return self._encode(value.tensor(), depth)
        if isinstance(value, _Inert):
            return self._stub(value.name, value.args, _attributes(value.states), value.items, depth)
        if isinstance(value, (type, Callable)) or kind is _StorageType:
            return self._stub("builtins.type", (getattr(value, "name", ""),), {}, [], depth)
        raise RefusedError(f"holds a {kind.__name__.strip('_').lower()} where a value belongs")

    def _list(self, values: list[Any], depth: int) -> "_Encoded":
        kinds = set(map(type, values))
        if kinds == {str} and max(map(len, values)) <= MAX_TEXT:  # fast for hundreds of thousands of words
            return _Encoded(values, sum(map(len, values)) + 4 * len(values), 1)
        if kinds == {int} and min(values) >= -(2**63) and max(values) < 2**63:  # and for their ids
            return _Encoded(values, 8 * len(values), 1)
        members = [self._encode(value, depth) for value in values]
        cost = sum(member.cost for member in members) + 8
        return _Encoded([member.json for member in members], cost, 1 + max((member.height for member in members), default=0))

    def _dict(self, value: dict[Any, Any], depth: int) -> "_Encoded":
        if any(type(key) is int and key.bit_length() > 64 for key in value):  # such keys can be chosen to collide
            raise RefusedError("holds a dictionary with keys above 64 bits")
        keys, values = self._list(list(value), depth), self._list(list(value.values()), depth)
        cost, height = keys.cost + values.cost + 8, max(keys.height, values.height)
        if all(type(key) is str and not key.startswith(MARK) for key in keys.json):
            return _Encoded(dict(zip(keys.json, values.json, strict=True)), cost, height)
        return _Encoded(_mark("dict", [keys.json, values.json]), cost, height)

    def _stub(self, name: str, args: tuple[Any, ...], state: Any, items: list[Any], depth: int) -> "_Encoded":
        parts = [self._list(list(args), depth), self._dict(state, depth), self._list(items, depth)]
        cost = sum(part.cost for part in parts) + len(name) + 16
        return _Encoded(_mark("stub", [name, *(part.json for part in parts)]), cost, max(part.height for part in parts))


class _Encoded(NamedTuple):
    json: Any
    cost: int
    height: int


def _bulk(kind: str, size: int) -> _Encoded:
    return _Encoded(_mark("stub", [f"builtins.{kind}", [size], {}, []]), 64, 1)


def _encode_tensor(tensor: _Tensor) -> _Encoded:
    storage = tensor.storage
    place = [storage.key, tensor.dtype, storage.start, storage.size, tensor.offset, tensor.shape, tensor.stride]
    return _Encoded(_mark("tensor", place), 200, 1)


def _attributes(states: list[Any]) -> dict[str, Any]:
    """Merge the states of an object: attributes, a pair (attributes, slots), or under "" what its `__setstate__` would get."""
    attributes: dict[str, Any] = {}
    for state in states:
        pieces = state if isinstance(state, tuple) and len(state) == 2 and _are_attributes(state) else (state,)
        if _are_attributes(pieces):
            for piece in pieces:
                attributes.update(piece or {})
        else:
            attributes[""] = state
    return attributes


def _are_attributes(pieces: Any) -> bool:
    return all(piece is None or (isinstance(piece, dict) and all(type(key) is str for key in piece)) for piece in pieces)


def parse(kind: str, file: BinaryIO, start: int, end: int) -> tuple[dict[str, Any], Any]:
    """Read the pickles of a file; return a header about its storages, and the content as JSON values.

    Args:
        kind: "pickle" (a single pickle), "zip" (a single pickle with tensors) or "legacy" (`torch.save` before 1.6).
        file: open for reading, buffered.
        start: the byte at which the pickle starts.
        end: the byte at which it ends; for "legacy" the end of the file.

    Raises:
        RefusedError: anything at all is wrong.
    """
    window = Window(file, start, end)
    storages: dict[str, tuple[str, int]] = {}
    try:
        if getattr(copyreg, "_extension_cache", None):
            raise RefusedError("cannot be read in a process that knows extension codes")
        if kind == "legacy":
            _check_start(window)
        content = InertUnpickler(window, storages).load()
        n_read = window.at - start - window.skipped
        header: dict[str, Any] = {"storages": storages}
        if kind == "legacy":
            header |= {"order": _read_keys(window, storages), "at": window.at}
        elif window.at != end:
            raise RefusedError(_trailing(content, end - window.at))
        if kind == "pickle" and storages:
            raise RefusedError("refers to storages, which a plain pickle cannot hold")
        budget = MIN_OUTPUT + OUTPUT_PER_BYTE * n_read
        return header, Encoder(min(budget, MAX_OUTPUT)).encode(content)
    except (RefusedError, MemoryError):
        raise
    except Exception as error:
        # A damaged pickle can raise nearly anything: TypeError, AttributeError, IndexError, struct.error ...
        reason = " ".join(ascii(str(error)).split())[:150]
        raise RefusedError(f"holds a damaged pickle, or is not a checkpoint: {reason}; copy or download it again") from error


def _trailing(content: Any, n: int) -> str:
    if content == MAGIC:
        return "was written by torch.save, not by pickle"
    return f"has {n} bytes too many behind its pickle"


def _check_start(window: Window) -> None:
    for expected in (MAGIC, PROTOCOL):
        if InertUnpickler(window, {}).load() != expected:
            raise RefusedError("is not a file of torch.save")
    system = InertUnpickler(window, {}).load()
    if not isinstance(system, dict) or system.get("little_endian") is not True:
        raise RefusedError("was written by a machine of another byte order")


def _read_keys(window: Window, storages: dict[str, tuple[str, int]]) -> list[str]:
    keys = InertUnpickler(window, {}).load()
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise RefusedError("holds no list of its storages")
    if len(set(keys)) != len(keys) or set(keys) != set(storages):
        raise RefusedError("lists other storages than its tensors need")
    return keys


def _limit(megabytes: int, seconds: float) -> None:
    """Limit this process. macOS has no limit of memory; the parent limits the time anyway."""
    try:
        with open("/proc/self/statm") as pages:  # noqa: PTH123
            used = int(pages.read().split()[0]) * resource.getpagesize()
    except (OSError, ValueError):
        used = 0  # not Linux; macOS ignores the limit
    # NOFILE 0: no more files can be opened. FSIZE 0: it can write to pipes only.
    wanted = {"AS": used + megabytes * 2**20, "CPU": int(seconds) + 1, "FSIZE": 0, "NOFILE": 0, "NPROC": 0, "CORE": 0}
    for name, value in wanted.items():
        try:
            number = getattr(resource, f"RLIMIT_{name}")
            hard = resource.getrlimit(number)[1]
            least = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(number, (least, least))
        except (AttributeError, ValueError, OSError):
            continue
    signal.setitimer(signal.ITIMER_PROF, seconds)  # of processor time, more exactly than RLIMIT_CPU


def main() -> None:
    """Read standard input as the arguments say. Write a line of JSON (the error or the storages), then the content as JSON."""
    kind, start, end, megabytes, seconds = sys.argv[1], *map(int, sys.argv[2:5]), float(sys.argv[5])
    file = io.BufferedReader(io.FileIO(0, closefd=False), buffer_size=2**17)
    "".encode("latin-1")  # loads the codec now, because no file can be opened after the next line
    _limit(megabytes, seconds)
    gc.disable()  # it would search millions of small objects, and none is garbage
    try:
        header, content = parse(kind, file, start, end)
        lines = json.dumps(header), json.dumps(content)
    except RefusedError as error:
        lines = json.dumps({"error": str(error)}), ""
    except MemoryError:
        lines = json.dumps({"error": f"needs more than {megabytes} MB to read; is it a checkpoint of a Transformer-XL?"}), ""
    data = "\n".join(lines).encode("ascii")
    view = memoryview(data)
    while view:
        view = view[os.write(1, view) :]
    os._exit(0)  # faster than to free millions of objects one by one


if __name__ == "__main__":
    main()

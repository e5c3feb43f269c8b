"""Pickles come back as data, whatever protocol wrote them; the process that reads them is confined, starts fast, and its
failures are errors of one line."""

import ast
import collections
import io
import json
import math
import os
import pickle
import struct
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conversion.hostile import name, storage, tensor, tuple_of, value, whole
from tests.helpers import examples
from transformer_xl.conversion.readers import pickle_child, pickles
from transformer_xl.conversion.readers.inert import Stub
from transformer_xl.conversion.readers.pickles import read_pickle
from transformer_xl.errors import CheckpointError

PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)


@pytest.fixture
def read(tmp_path):
    """Return what reads an object back from a pickle of a protocol."""

    def read(content, protocol=4):
        path = tmp_path / "x.pkl"
        path.write_bytes(content if isinstance(content, bytes) else pickle.dumps(content, protocol))
        return read_pickle(path)

    return read


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_plain_values(read, protocol):
    content = {
        "none": None,
        "true": [True, False],
        "numbers": [0, -1, 255, 2**31, -(2**40), 2**200, 0.1, math.inf, -0.0],
        "texts": ["", "word", "é😀", "\ud800", "line\nbreak\\", "\0nul"],
        "tuple": (1, (2, (3,)), ()),
        "set": {3, 1, 2},
        "frozen": frozenset(["b"]),
        1: {"nested": {}},
    }
    found = read(content, protocol)
    assert found == content | {"set": [1, 2, 3], "frozen": ["b"]}
    assert math.isnan(read(math.nan, protocol))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_vocabulary(read, protocol, monkeypatch):
    fake = types.ModuleType("vocabulary")
    vocab = type("Vocab", (), {"__module__": "vocabulary"})
    vars(fake)["Vocab"] = vocab
    monkeypatch.setitem(sys.modules, "vocabulary", fake)
    vocabulary = vocab()
    vars(vocabulary).update(
        counter=collections.Counter({"the": 5, "é": 1}),
        sym2idx=collections.OrderedDict([("<eos>", 0), ("the", 1)]),
        min_freq=np.int64(3),
        rate=np.float32(0.5),
    )
    found = read(vocabulary, protocol)
    assert found.name == "vocabulary.Vocab"
    assert found.state["counter"] == {"the": 5, "é": 1}
    assert list(found.state["sym2idx"].items()) == [("<eos>", 0), ("the", 1)]
    assert (found.state["min_freq"], found.state["rate"]) == (3, 0.5)


def test_an_object_of_python_2(read):
    """As cPickle wrote it: texts are bytes, and an OrderedDict is made of lists of two."""
    text = "Zoë".encode()
    items = b"](" + b"](U" + bytes([len(text)]) + text + b"K\x00e" + b"e"
    ordered = name("collections", "OrderedDict") + items + b"\x85R"
    body = name("vocabulary", "Vocab") + b")\x81}(U\x07sym2idx" + ordered + b"U\x03lenK\x01ub"
    found = read(whole(body))
    assert found.name == "vocabulary.Vocab"
    ((word, i),) = found.state["sym2idx"].items()
    assert (word.encode("latin-1").decode(), i) == ("Zoë", 0)
    assert found.state["len"] == 1


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_arrays_are_described(read, protocol):
    array = np.arange(12, dtype=np.int32).reshape(3, 4)
    found = read({"small": array, "text": "after"}, protocol)
    assert found == {"small": Stub("numpy.ndarray", ((3, 4), "<i4")), "text": "after"}


@pytest.mark.parametrize("protocol", [2, 4])
def test_large_arrays_are_skipped(read, protocol):
    array = np.ones(10_000_000, dtype=np.int64)
    described = {"train": Stub("numpy.ndarray", ((10_000_000,), "<i8")), "vocab": ["a"]}
    assert read({"train": array, "vocab": ["a"]}, protocol) == described


def test_long_texts_are_described(read):
    data = whole(b"}" + value("raw") + b"T" + struct.pack("<i", 9_000_000) + b"x" * 9_000_000 + b"s")
    assert read(data) == {"raw": Stub("builtins.str", (9_000_000,))}
    assert read({"raw": b"xyz"}) == {"raw": Stub("builtins.bytes", (3,))}


def test_a_large_vocabulary_fits_the_limits(read):
    words = [f"word{i}{'é' * (i % 3)}" for i in range(200_000)]
    content = {"list": words, "dict": {word: i for i, word in enumerate(words)}, "counter": collections.Counter(words)}
    assert read(content, 2) == content


def test_shared_objects_come_back_equal(read):
    inner = ["x"]
    assert read([inner, inner, {"a": inner}]) == [["x"], ["x"], {"a": ["x"]}]


def test_foreign_containers_keep_their_items(read):
    items = b"(" + value("k") + value(1) + b"u" + b"(" + value(5) + b"e"
    body = name("transformers.tokenization_utils", "Trie") + b")\x81" + items
    assert read(whole(body)) == Stub("transformers.tokenization_utils.Trie", (), {}, [("k", 1), 5])


def test_attributes_in_slots(read):
    body = name("argparse", "Namespace") + b")\x81" + value(({"a": 1}, {"b": 2})) + b"b"
    assert read(whole(body)) == Stub("argparse.Namespace", (), {"a": 1, "b": 2})
    body = name("argparse", "Namespace") + b")\x81" + value((1, 2)) + b"b"
    assert read(whole(body)) == Stub("argparse.Namespace", (), {"": (1, 2)})


def test_deep_and_wide_sharing_within_the_limits(read):
    """Sharing alone is not a attack; depth is counted through objects that were met before."""
    content = ["x"]
    for _ in range(10):
        content = [content, content]
    assert read(content) == content
    for _ in range(10):
        content = [content, content]
    with pytest.raises(CheckpointError, match="repeats its parts"):
        read(content)
    deep = half = ["x"]
    for _ in range(60):
        half = [half]
    deep = half
    for _ in range(60):
        deep = [deep]
    with pytest.raises(CheckpointError, match="nested more than 100 deep"):
        read([half, deep])
    assert read([half, half]) == [half, half]


@pytest.mark.parametrize(
    ("module", "short"),
    [
        ("torch.nn.modules.linear", "Linear"),
        ("utils.proj_adaptive_softmax", "ProjectedAdaptiveLogSoftmax"),
        ("pytorch.mem_transformer", "MemTransformerLM"),
        ("vocabulary", "Vocab"),
        ("__main__", "Corpus"),
        ("pytorch_transformers.tokenization_gpt2", "GPT2Tokenizer"),
        ("transformers.models.transfo_xl.tokenization_transfo_xl", "TransfoXLTokenizer"),
        ("sacremoses.tokenize", "MosesTokenizer"),
        ("apex.fp16_utils.loss_scaler", "DynamicLossScaler"),
        ("pathlib", "PosixPath"),
        ("torch", "device"),
    ],
)
def test_known_names(read, module, short):
    assert read(whole(name(module, short) + b")R")) == Stub(f"{module}.{short}")


@pytest.mark.parametrize(
    ("module", "short"),
    [
        ("os", "system"),
        ("torch", "load"),
        ("torch.nn.modules.module.os", "system"),
        ("torch.nn.modules.os.path", "x"),
        ("transformers", "pipeline"),
        ("sacremoses.os", "system"),
        ("mem_transformer", "os.system"),
        ("__main__", "x"),
        ("argparse", "ArgumentParser"),
        ("pathlib", "Path.touch"),
        ("collections", "namedtuple"),
        ("builtins", "type"),
    ],
)
def test_unknown_names(read, module, short):
    with pytest.raises(CheckpointError, match="no Transformer-XL needs"):
        read(whole(value(module) + value(short) + b"\x93", 4))


def test_every_stand_in_belongs_to_this_package():
    """Nothing that the unpickler may be handed is code of anyone else."""
    for stand_in in pickle_child.KNOWN.values():
        assert stand_in.__module__ == pickle_child.__name__


def containers(inner):
    keys = st.text() | st.integers(-(2**63), 2**63 - 1)  # keys above 64 bits are refused: they can be made to collide
    return st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4) | st.tuples(inner)


LEAVES = st.none() | st.booleans() | st.integers(-(2**200), 2**200) | st.floats(allow_nan=False) | st.text()


@settings(max_examples=examples(20))
@given(
    st.recursive(LEAVES, containers, max_leaves=20),
    st.sampled_from(PROTOCOLS),
)
def test_any_plain_value(tmp_path_factory, content, protocol):
    path = tmp_path_factory.getbasetemp() / "any.pkl"
    path.write_bytes(pickle.dumps(content, protocol))
    assert read_pickle(path) == content


def test_the_number_of_storages(monkeypatch):
    monkeypatch.setattr(pickle_child, "MAX_STORAGES", 3)
    for n in (3, 4):
        data = whole(tuple_of(*(tensor(of=storage(key=f"{i}")) for i in range(n))))
        file = cast(BinaryIO, io.BufferedReader(io.BytesIO(data)))
        if n == 3:
            assert len(pickle_child.parse("zip", file, 0, len(data))[0]["storages"]) == 3
            continue
        with pytest.raises(pickle_child.RefusedError, match="more than 3 storages"):
            pickle_child.parse("zip", file, 0, len(data))


@pytest.mark.parametrize("sign", [1, -1])
def test_the_length_of_numbers(read, sign):
    assert read(sign * (2**256 - 1)) == sign * (2**256 - 1)
    with pytest.raises(CheckpointError, match="whole number of 257 bits"):
        read(sign * 2**256)


# The process that reads them

# What code in the child could do, if there were any: run in an interpreter like the child's, after the same limits.
PROBE = """
import importlib.util, os, sys
spec = importlib.util.spec_from_file_location("child", sys.argv[1])
child = importlib.util.module_from_spec(spec)
spec.loader.exec_module(child)
child._limit(96, 2)
def outcome(action):
    try:
        return repr(action())
    except BaseException as error:
        return type(error).__name__
def burn():
    while True:
        pass
print(outcome(lambda: open(sys.argv[1])), outcome(lambda: open(sys.argv[2], "w")), outcome(lambda: bytearray(10**8)))
print(outcome(lambda: __import__("zipfile")), sorted({"torch", "numpy", "transformer_xl"} & set(sys.modules)), flush=True)
burn()
"""


@pytest.fixture
def sound(tmp_path):
    path = tmp_path / "vocab.pkl"
    path.write_bytes(pickle.dumps({"sym2idx": {"a": 0}}))
    return path


def test_the_child_can_do_nothing(tmp_path):
    command = [sys.executable, "-I", "-S", "-B", "-c", PROBE, pickle_child.__file__, str(tmp_path / "written")]
    start = time.perf_counter()
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    reading, writing, memory, importing, loaded = result.stdout.split()
    assert (reading, writing, memory, importing, loaded) == ("OSError", "OSError", "MemoryError", "OSError", "[]"), result
    assert result.returncode < 0, "it computed for longer than it may"
    assert time.perf_counter() - start < 50
    assert list(tmp_path.iterdir()) == []


def test_the_child_imports_the_standard_library_alone():
    tree = ast.parse(Path(pickle_child.__file__).read_text(encoding="utf-8"))
    modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert len(modules) > 5
    assert {module.split(".")[0] for module in modules} <= sys.stdlib_module_names


def test_a_small_file_takes_little_time(sound):
    before = os.times()
    assert read_pickle(sound) == {"sym2idx": {"a": 0}}
    after = os.times()
    assert sum(after[:4]) - sum(before[:4]) < 0.3


def test_the_child_gets_no_secrets(sound, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    given = {}
    popen = subprocess.Popen

    def spy(*args, **kwargs):
        given.update(kwargs, command=args[0])
        return popen(*args, **kwargs)

    monkeypatch.setattr(subprocess, "Popen", spy)
    read_pickle(sound)
    assert given["command"][1:4] == ["-I", "-S", "-B"], "no code of the user or of installed packages runs"
    assert set(given["env"]) <= {"LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "DYLD_FALLBACK_LIBRARY_PATH", "SYSTEMROOT"}


def colliding(path, n):
    """Write a dict whose keys all have one hash: every new key is compared with all before."""
    keys = b"".join(value(i * (2**61 - 1)) + b"N" for i in range(n))
    path.write_bytes(whole(b"}(" + keys + b"u"))


def test_too_much_time(tmp_path, monkeypatch):
    colliding(tmp_path / "x.pkl", 30_000)
    monkeypatch.setattr(pickles, "MIN_SECONDS", 0.2)
    monkeypatch.setattr(pickles, "SECONDS_PER_MB", 0)
    with pytest.raises(CheckpointError, match=r"x\.pkl' needs more than 0.2 s to read; is it a checkpoint"):
        read_pickle(tmp_path / "x.pkl")


def test_too_much_waiting(sound, monkeypatch):
    monkeypatch.setattr(pickles, "WALL_FACTOR", 0)
    with pytest.raises(CheckpointError, match=r"needs more than 0\.8 s to read"):
        read_pickle(sound)


def test_too_much_memory(tmp_path):
    (tmp_path / "x.pkl").write_bytes(whole(b"]" * 10 + b"r\xff\xff\xff\x01"))
    with pytest.raises(CheckpointError, match="needs more than 32 MB to read"):
        read_pickle(tmp_path / "x.pkl")


def test_too_long_a_reply(tmp_path, monkeypatch):
    (tmp_path / "x.pkl").write_bytes(pickle.dumps(["x" * 1000] * 900))
    monkeypatch.setattr(pickles, "MAX_REPLY", 100_000)
    with pytest.raises(CheckpointError, match="more than 100000 bytes of text"):
        read_pickle(tmp_path / "x.pkl")


def test_no_interpreter(sound, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(CheckpointError, match="no process for it can be started"):
        read_pickle(sound)


def test_a_broken_child(sound, monkeypatch, tmp_path):
    broken = tmp_path / "child.py"
    broken.write_text("raise RuntimeError")
    monkeypatch.setattr(pickles, "_CHILD", broken)
    with pytest.raises(CheckpointError, match=r"breaks the reader \(status 1\)"):
        read_pickle(sound)


@pytest.mark.parametrize(
    "body",
    ['{"\\u0000tensor": ["0"]}', '{"\\u0000stub": []}', '{"\\u0000dict": [[[]], [1]]}', "{", "[" * 100_000],
)
def test_a_lying_child(sound, monkeypatch, body, tmp_path):
    """What the child says is checked, in case a file takes it over."""
    broken = tmp_path / "child.py"
    broken.write_text(f"print({json.dumps({'storages': {}})!r}); print({body!r})")
    monkeypatch.setattr(pickles, "_CHILD", broken)
    with pytest.raises(CheckpointError, match=r"vocab\.pkl"):
        read_pickle(sound)


def test_nothing_is_left_open(sound):
    descriptors = Path("/dev/fd")
    before = len(list(descriptors.iterdir()))
    for _ in range(3):
        read_pickle(sound)
    assert len(list(descriptors.iterdir())) == before

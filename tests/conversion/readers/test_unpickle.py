"""Pickles and files of torch.save come back as data, whatever wrote them, as the authors, NVIDIA and Hugging Face did."""

import argparse
import collections
import math
import pickle
import pickletools
import struct
import sys
import types

import numpy as np
import pytest
import torch

from tests.conversion.hostile import (
    call,
    entry,
    legacy_file,
    name,
    storage,
    tensor,
    tuple_of,
    value,
    whole,
    zip_file,
)
from transformer_xl.conversion.readers import unpickle as reader
from transformer_xl.conversion.readers.tensors import DTYPES, TensorRef
from transformer_xl.conversion.readers.unpickle import PickledBytes, Stub, unpickle
from transformer_xl.errors import CheckpointError

PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)


# Pickles


@pytest.fixture
def read(tmp_path):
    """Return what reads an object back from a pickle of a protocol."""

    def read(content, protocol=4):
        path = tmp_path / "x.pkl"
        path.write_bytes(content if isinstance(content, bytes) else pickle.dumps(content, protocol))
        return unpickle(path)

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
    assert found == content | {"set": list(content["set"]), "frozen": ["b"]}
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
    assert {found.state["min_freq"].name, found.state["rate"].name} <= {
        f"numpy.{core}.multiarray.scalar" for core in ("core", "_core")
    }


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


@pytest.mark.parametrize("protocol", [2, 4])
def test_large_arrays_are_skipped(read, protocol):
    array = np.ones(1_000_000, dtype=np.int64)
    found = read({"train": array, "vocab": ["a"]}, protocol)
    assert (type(found["train"]), found["vocab"]) == (Stub, ["a"])


def test_long_texts_and_bytes_are_left_where_they_are(read, tmp_path):
    data = whole(b"}" + value("raw") + b"T" + struct.pack("<i", 9_000_000) + b"x" * 9_000_000 + b"s")
    assert read(data) == {"raw": Stub("builtins.str")}
    (span,) = read({"raw": b"xyz"}).values()
    assert type(span) is PickledBytes
    assert (tmp_path / "x.pkl").read_bytes()[span.offset : span.offset + span.size] == b"xyz"


def test_a_large_vocabulary_fits_the_limits(read):
    words = [f"word{i}{'é' * (i % 3)}" for i in range(100_000)]
    content = {"list": words, "dict": {word: i for i, word in enumerate(words)}, "counter": collections.Counter(words)}
    assert read(content, 2) == content


def test_a_large_vocabulary_of_python_2_fits_the_limits(read):
    """The shortest entries that there are: words that occurred before, with memo entries of five bytes."""
    words = [f"w{i}" for i in range(50_000)]
    listed = (
        b"](" + b"".join(b"U" + bytes([len(w)]) + w.encode() + b"r" + struct.pack("<i", i) for i, w in enumerate(words)) + b"e"
    )
    pairs = (
        b"]r" + struct.pack("<i", 100_000 + i) + b"(j" + struct.pack("<i", i) + b"M" + struct.pack("<H", i % 60_000) + b"e"
        for i in range(len(words))
    )
    body = (
        entry("idx2sym", listed)[:-1] + b"s" + value("sym2idx") + name("collections", "OrderedDict") + b"](" + b"".join(pairs)
    )
    found = read(whole(body + b"e\x85Rs"))
    assert found["idx2sym"] == words
    assert list(found["sym2idx"]) == words


def test_what_containers_hold_besides_attributes_is_left_out(read):
    items = b"(" + value("k") + value(1) + b"u" + b"(" + value(5) + b"e"
    body = name("transformers.tokenization_utils", "Trie") + b")\x81" + items
    assert read(whole(body)) == Stub("transformers.tokenization_utils.Trie")


def test_attributes_in_slots(read):
    body = name("argparse", "Namespace") + b")\x81" + value(({"a": 1}, {"b": 2})) + b"b"
    assert read(whole(body)) == Stub("argparse.Namespace", {"a": 1, "b": 2})
    body = name("argparse", "Namespace") + b")\x81" + value((1, 2)) + b"b"
    assert read(whole(body)) == Stub("argparse.Namespace", {"": (1, 2)})


def test_deep_and_wide_sharing_within_the_limits(read):
    """Sharing alone is not a attack; depth is counted through objects that were met before."""
    content = ["x"]
    for _ in range(10):
        content = [content, content]
    assert read(content) == content
    for _ in range(12):
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


@pytest.mark.parametrize("known", ["torch.nn.modules.linear.Linear", "__main__.Corpus", "pathlib.PosixPath", "torch.device"])
def test_known_names(read, known):
    assert read(whole(name(*known.rsplit(".", 1)) + b")R")) == Stub(known)


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
    """Nothing that is called instead of a name is code of anyone else, and of Python's operations none looks names up."""
    assert {function.__module__ for function in reader._KNOWN.values()} == {reader.__name__}
    operations = {opcode.name for opcode in pickletools.opcodes} - set(reader._OPERATIONS)
    assert operations == {
        *("EXT1", "EXT2", "EXT4", "PERSID", "LONG4", "INST", "OBJ", "NEWOBJ_EX"),
        *("NEXT_BUFFER", "READONLY_BUFFER"),
    }


@pytest.mark.parametrize("key", [2**60, -(2**60), b"x", 0.5, None, (1, 2), ("a",) * 5, (("a",),), "x" * 70_000])
def test_keys_that_no_checkpoint_has(read, key):
    with pytest.raises(CheckpointError, match="with keys that no checkpoint has"):
        read({key: 1})


def test_tensors_pickled_without_torch_save(read):
    """Python then calls torch.storage._load_from_bytes."""
    content = {"w": torch.arange(6.0).view(2, 3).t(), "p": torch.nn.Parameter(torch.ones(2)), "b": torch.tensor([True, False])}
    found = read(content)
    for key, expected in content.items():
        assert found[key].load().equal(expected)
    with pytest.raises(CheckpointError, match=r"pickled by a protocol below 3; save it again by torch\.save"):
        read(content, 2)  # its bytes are a text


# What does not fit, and what was checked cannot be changed


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (tensor(offset=1), "does not fit into its storage"),
        (tensor(offset="0"), "does not fit into its storage"),
        (tensor(shape=(2, 3), stride=(1, 1)), "does not fit into its storage"),
        (tensor(shape=(2**63,)), "does not fit into its storage"),
        (tensor(shape=(2**31, 2**31, 4, 0), stride=(0, 0, 0, 0)), "does not fit into its storage"),
        (tensor(shape=(math.nan,)), "does not fit into its storage"),
        (tensor(shape=(1,) * 1000, stride=(1,) * 1000), "does not fit into its storage"),
        (tensor(of=storage(view=value(("1", 3, 1))), shape=(2,)), "does not fit into its storage"),
        (tensor(of=storage(view=value(("1", 3, 4)))), "as something that it cannot be"),
        (tensor(of=storage(size=3), shape=(3,)), "has no storage '0' of 3 elements"),
        (tuple_of(tensor(), tensor(of=storage(kind=name("torch", "IntStorage")))), "as two types"),
        (tensor(of=storage(kind=name("torch", "QInt8Storage"))), "refers to 'torch.QInt8Storage', which no"),
        (tensor(of=storage(key=3)), "outside of itself that is not a storage"),
        (b"]" * 200 + b"a" * 199, "nested more than 100 deep"),
        (b"]q\x00h\x00a", "holds itself"),
        (b"]p4611686018427387902\n", "numbers its parts as no pickle does"),
        (b"(" * 1000 + b"N", "nested more than 100 deep"),
        (b"\x8a\xff" + b"\x01" * 255 + b"b", "damaged pickle|has no attributes"),
    ],
)
def test_what_no_checkpoint_holds(body, message, tmp_path):
    path = tmp_path / "model.pt"
    path.write_bytes(zip_file({"data.pkl": whole(body), "data/0": bytes(16)}))
    with pytest.raises(CheckpointError, match=message) as error:
        unpickle(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (zip_file({"data.pkl": whole(tensor()), "data/0": bytes(16), "byteorder": b"big"}), "another byte order"),
        (zip_file({"data.pkl": whole(tensor()) + b"tail", "data/0": bytes(16)}), "4 bytes too many at its end"),
        (legacy_file(whole(tensor()), {"0": bytes(16)}, keys=["0", "0"]), "lists other storages"),
        (legacy_file(whole(tensor()), {"0": bytes(16)}) + b"x", "1 byte too many at its end"),
        (whole(storage()), "which a plain pickle cannot hold"),
        (b"", "damaged pickle, or is not a checkpoint: EOFError"),
        (b"\xdf", "damaged pickle, or is not a checkpoint: KeyError 223; copy or download"),
    ],
)
def test_files_with_something_else_than_torch_save_writes(data, message, tmp_path):
    path = tmp_path / "model.pt"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=message):
        unpickle(path)


def filled(part: bytes, slots: dict[str, object]) -> bytes:
    """BUILD: give an object other attributes than it was made with."""
    return part + b"N" + value(slots) + b"\x86b"


@pytest.mark.parametrize(
    "body",
    [
        tensor(of=storage(kind=filled(name("torch", "FloatStorage"), {"text": "evil"}))),
        tensor(of=filled(storage(), {"size": 10**9})),
        filled(tensor(of=storage()), {"start": 0.0}),
        filled(name("torch._utils", "_rebuild_tensor_v2"), {"__defaults__": (1,)}),
    ],
    ids=["type", "storage", "tensor", "function"],
)
def test_what_was_checked_cannot_be_filled_again(body, tmp_path):
    path = tmp_path / "model.pt"
    path.write_bytes(zip_file({"data.pkl": whole(body), "data/0": bytes(16)}))
    with pytest.raises(CheckpointError, match="fills an object that has no attributes"):
        unpickle(path)


def test_what_is_skipped_earns_no_room(read):
    """A text that is not read must not pay for parts that repeat."""
    empty: list[list[object]] = [[] for _ in range(1000)]
    with pytest.raises(CheckpointError, match="repeats its parts"):
        read(["x" * 4_200_000, [empty] * 8000])


# Files of torch.save


@pytest.fixture(params=["zip", "legacy"])
def save(request, tmp_path):
    """Return what saves an object in a format and gives the path."""

    def save(content):
        path = tmp_path / f"{request.param}.pt"
        torch.save(content, path, _use_new_zipfile_serialization=request.param == "zip")
        return path

    return save


@pytest.fixture
def authors(monkeypatch):
    """Return modules with classes that are pickled by the names that the authors' have."""
    made = {}
    for module, classes in {
        "mem_transformer": {"MemTransformerLM": torch.nn.Module},
        "utils.data_parallel": {"BalancedDataParallel": torch.nn.DataParallel},
        "utils.vocabulary": {"Vocab": object},
        "data_utils": {"Corpus": object},
    }.items():
        fake = types.ModuleType(module)
        for short, base in classes.items():
            made[short] = type(short, (base,), {"__module__": module})
            setattr(fake, short, made[short])
        monkeypatch.setitem(sys.modules, module, fake)
        if "." in module:
            monkeypatch.setitem(sys.modules, "utils", types.ModuleType("utils"))
    return types.SimpleNamespace(**made)


def test_tensors_of_every_type(save):
    tensors = {name: (torch.randn(3, 5) * 50).to(dtype) for name, dtype in DTYPES.items()}
    found = unpickle(save(tensors))
    assert all(isinstance(found[name], TensorRef) and found[name].load().equal(tensor) for name, tensor in tensors.items())


def test_views_share_their_storage(save):
    base = torch.arange(60.0).view(3, 4, 5)
    views = {
        "base": base,
        "same": base,
        "transposed": base.transpose(0, 2),
        "part": base[1:, 2],
        "steps": base[:, ::2, 1::3],
        "scalar": base[2, 3, 4],
        "empty": base[:0],
    }
    found = unpickle(save(views))
    for key, view in views.items():
        assert found[key].shape == view.shape
        assert found[key].load().equal(view), key
    assert found["base"] == found["same"]
    assert found["base"].offset == found["transposed"].offset == found["steps"].offset - 4
    assert found["part"].offset - found["base"].offset == 30 * 4


@pytest.mark.filterwarnings("ignore:Couldn't retrieve source code")
def test_a_pickled_model(save, authors):
    model = authors.MemTransformerLM()
    model.word_emb = torch.nn.Embedding(7, 4)
    model.crit = torch.nn.ModuleList([torch.nn.Linear(4, 7, bias=False)])
    model.crit[0].weight = model.word_emb.weight
    model.r_w_bias = torch.nn.Parameter(torch.randn(2, 2))
    model.n_layer = 3
    wrapped = authors.BalancedDataParallel(torch.nn.DataParallel(model, dim=1))
    found = unpickle(save(wrapped))
    assert found.name == "utils.data_parallel.BalancedDataParallel"
    inner = found.state["_modules"]["module"].state["_modules"]["module"]
    assert inner.name == "mem_transformer.MemTransformerLM"
    assert inner.state["n_layer"] == 3
    embedding = inner.state["_modules"]["word_emb"].state["_parameters"]["weight"]
    softmax = inner.state["_modules"]["crit"].state["_modules"]["0"].state["_parameters"]["weight"]
    assert embedding.load().equal(model.word_emb.weight)
    assert embedding == softmax
    assert inner.state["_parameters"]["r_w_bias"].load().equal(model.r_w_bias)


def test_a_checkpoint_of_nvidia(save, authors):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    vocab = authors.Vocab()
    vocab.idx2sym = ["<eos>", "the"]
    state = {
        "args": argparse.Namespace(n_layer=16, cutoffs=[19997], lr=0.01, amp=None),
        "model_config": {"n_token": 7, "dtype": None, "tie_projs": [False, True]},
        "model_state": model.state_dict(),
        "optimizer_state": optimizer.state_dict(),
        "scheduler_state": scheduler.state_dict(),
        "vocab": vocab,
        "amp_state": None,
        "best_val_loss": 3.5,
        "train_step": 40_000,
    }
    found = unpickle(save(state))
    assert found["args"] == Stub("argparse.Namespace", {"n_layer": 16, "cutoffs": [19997], "lr": 0.01, "amp": None})
    assert found["model_config"] == state["model_config"]
    assert found["model_state"]["weight"].load().equal(model.weight)
    exp_avg = found["optimizer_state"]["state"][0]["exp_avg"]
    assert exp_avg.load().equal(optimizer.state_dict()["state"][0]["exp_avg"])
    assert found["vocab"].state == {"idx2sym": ["<eos>", "the"]}
    assert (found["best_val_loss"], found["train_step"]) == (3.5, 40_000)


def test_what_only_files_of_2019_hold(tmp_path):
    """Classes with their source, storages on a GPU, parts of storages, and modules that refer to a backend."""
    linear = name("torch.nn.modules.linear", "Linear")
    source = tuple_of(value("module"), linear, value("linear.py"), value("class Linear: ...")) + b"Q"
    backend = call(name("torch.nn.backends.thnn", "_get_thnn_function_backend"))
    on_gpu = storage(kind=name("torch.cuda", "FloatStorage"), size=6, view=value(("7", 2, 4)))
    weight = call(name("torch._utils", "_rebuild_parameter"), tensor(of=on_gpu, offset=1, shape=(3,)), value(True), value(None))
    older = call(name("torch.nn.parameter", "Parameter"), tensor(of=on_gpu), value(True))
    oldest = call(name("torch._utils", "_rebuild_tensor"), on_gpu, value(0), value((2, 2)), value((2, 1)))
    state = {"_backend": backend, "weight": weight, "older": older, "oldest": oldest}
    module = source + b")\x81}" + b"".join(value(key) + body + b"s" for key, body in state.items()) + b"b"
    path = tmp_path / "model.pt"
    path.write_bytes(legacy_file(whole(module), {"0": struct.pack("<6f", *range(6))}))
    found = unpickle(path)
    assert found.name == "torch.nn.modules.linear.Linear"
    assert found.state["_backend"] == Stub("torch.nn.backends.thnn._get_thnn_function_backend")
    assert found.state["weight"].load().tolist() == [3, 4, 5]
    assert found.state["older"].load().tolist() == [2, 3, 4, 5]
    assert found.state["oldest"].load().tolist() == [[2, 3], [4, 5]]


def damage(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_damaged_tensors_of_the_zip_format_are_found(tmp_path):
    path = tmp_path / "w.pt"
    base = torch.randn(100)
    torch.save({"whole": base, "part": base[:10], "other": torch.randn(5)}, path)
    found = unpickle(path)
    damage(path, found["whole"].offset + 4 * 50)
    with pytest.raises(CheckpointError, match="checksum"):
        found["whole"].load()
    assert found["other"].load().isfinite().all()


def test_files_without_checksums_are_read(tmp_path):
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"w": torch.ones(3)}, tmp_path / "w.pt")
    finally:
        torch.serialization.set_crc32_options(before)
    found = unpickle(tmp_path / "w.pt")["w"]
    assert found.storage.verify is None
    assert found.load().equal(torch.ones(3))


def test_a_file_that_became_shorter_is_found(save):
    path = save({"w": torch.ones(3000)})
    found = unpickle(path)["w"]
    path.write_bytes(path.read_bytes()[: found.offset + 100])
    with pytest.raises(CheckpointError, match="too early"):
        found.load()


def test_the_content_of_a_dict_survives_its_class(save):
    content = collections.OrderedDict(b=1, a=2)
    vars(content)["extra"] = "lost"
    made = collections.defaultdict(list, {"x": [1]})
    found = unpickle(save({"ordered": content, "default": made, "nul": {"\0stub": 1}, "keys": {("1", "a"): None, 2: 0.5}}))
    assert list(found["ordered"].items()) == [("b", 1), ("a", 2)]
    assert found["default"] == {"x": [1]}
    assert found["nul"] == {"\0stub": 1}
    assert found["keys"] == {("1", "a"): None, 2: 0.5}


def test_wide_fields_of_a_zip_file(tmp_path):
    """As for more than 4 GB, and as PyTorch writes them: in the directory alone, the entry's own header has 4-byte fields."""
    sound = whole(value({"a": 1}))
    head = struct.pack("<4s5H3L2H", b"PK\x03\x04", 45, 0, 0, 0, 0, 0, 0xFFFFFFFF, 0xFFFFFFFF, 10, 0) + b"a/data.pkl"
    wide = struct.pack("<2H3Q", 1, 24, len(sound), len(sound), 0)
    fields = (b"PK\x01\x02", 45, 45, 0, 0, 0, 0, 0, 0xFFFFFFFF, 0xFFFFFFFF, 10, len(wide), 0, 0, 0, 0, 0xFFFFFFFF)
    central = struct.pack("<4s6H3L5H2L", *fields) + b"a/data.pkl" + wide
    at = len(head) + len(sound)
    end64 = struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, 1, 1, len(central), at)
    locator = struct.pack("<4sLQL", b"PK\x06\x07", 0, at + len(central), 1)
    end = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    (tmp_path / "x.pt").write_bytes(head + sound + central + end64 + locator + end)
    assert unpickle(tmp_path / "x.pt") == {"a": 1}

"""Files of torch.save come back as data, in both formats, as the authors, NVIDIA and Hugging Face wrote them."""

import argparse
import collections
import pickle
import struct
import sys
import types

import pytest
import torch

from tests.conversion.hostile import call, entry, legacy_file, name, storage, tensor, tuple_of, value, whole
from transformer_xl.conversion.readers.inert import Stub, TensorRef
from transformer_xl.conversion.readers.torch_files import read_torch
from transformer_xl.errors import CheckpointError

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8]


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


def random(dtype, *shape):
    return (torch.randn(shape) * 50).to(dtype)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.uint8, torch.bool], ids=str)
def test_tensors_of_every_type(save, dtype):
    tensor = random(dtype, 3, 5)
    found = read_torch(save({"w": tensor}))["w"]
    assert isinstance(found, TensorRef)
    assert found.load().equal(tensor)


def test_unsigned_types_of_the_zip_format(tmp_path):
    tensors = {str(dtype): torch.arange(7).to(dtype) for dtype in (torch.uint16, torch.uint32, torch.uint64)}
    torch.save(tensors, tmp_path / "w.pt")
    for key, found in read_torch(tmp_path / "w.pt").items():
        assert found.load().equal(tensors[key])


@pytest.mark.parametrize("at", [2**12 - 4, 2**13 - 4, 2**17 - 4])
def test_a_storage_at_the_end_of_a_buffer(tmp_path, at):
    """The child that parses moves the position of the file, which its parent goes on reading where it had stopped."""

    def file(n):
        body = b"}" + value("pad") + value("x" * n) + b"s" + value("w") + tensor() + b"s"
        return legacy_file(whole(body), {"0": struct.pack("<4f", 1, 2, 3, 4)})

    data = file(1000 + at - len(file(1000)[:-24]))
    assert len(data) == at + 24
    (tmp_path / "w.pt").write_bytes(data)
    assert read_torch(tmp_path / "w.pt")["w"].load().tolist() == [1, 2, 3, 4]


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
    found = read_torch(save(views))
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
    found = read_torch(save(wrapped))
    assert found.name == "utils.data_parallel.BalancedDataParallel"
    inner = found.state["_modules"]["module"].state["_modules"]["module"]
    assert inner.name == "mem_transformer.MemTransformerLM"
    assert inner.state["n_layer"] == 3
    embedding = inner.state["_modules"]["word_emb"].state["_parameters"]["weight"]
    softmax = inner.state["_modules"]["crit"].state["_modules"]["0"].state["_parameters"]["weight"]
    assert embedding.load().equal(model.word_emb.weight)
    assert embedding == softmax
    assert inner.state["_parameters"]["r_w_bias"].load().equal(model.r_w_bias)


def test_a_pickled_corpus(save, authors):
    corpus, corpus.vocab = authors.Corpus(), authors.Vocab()
    corpus.train, corpus.test = torch.arange(9), [torch.arange(2), torch.arange(3)]
    corpus.vocab.counter = collections.Counter("abacé")
    corpus.vocab.sym2idx = collections.OrderedDict(a=0, é=1)
    corpus.vocab.special = {"<eos>", "<unk>"}
    found = read_torch(save(corpus))
    assert found.state["train"].load().equal(torch.arange(9))
    assert [part.load().tolist() for part in found.state["test"]] == [[0, 1], [0, 1, 2]]
    vocabulary = found.state["vocab"].state
    assert vocabulary["counter"] == {"a": 2, "b": 1, "c": 1, "é": 1}
    assert list(vocabulary["sym2idx"].items()) == [("a", 0), ("é", 1)]
    assert sorted(vocabulary["special"]) == ["<eos>", "<unk>"]


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
    found = read_torch(save(state))
    assert found["args"] == Stub("argparse.Namespace", (), {"n_layer": 16, "cutoffs": [19997], "lr": 0.01, "amp": None})
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
    found = read_torch(path)
    assert found.name == "torch.nn.modules.linear.Linear"
    assert found.state["_backend"] == Stub("torch.nn.backends.thnn._get_thnn_function_backend")
    assert found.state["weight"].load().tolist() == [3, 4, 5]
    assert found.state["older"].load().tolist() == [2, 3, 4, 5]
    assert found.state["oldest"].load().tolist() == [[2, 3], [4, 5]]


def test_texts_of_python_2(tmp_path):
    body = b"}U\x03" + "é".encode() + b"x" + tensor() + b"s"
    path = tmp_path / "w.bin"
    path.write_bytes(legacy_file(whole(body), {"0": bytes(16)}))
    (key,) = read_torch(path)
    assert key.encode("latin-1").decode() == "éx"


def test_a_link_is_followed(save, tmp_path):
    path = save({"w": torch.ones(3)})
    (tmp_path / "link.bin").symlink_to(path)
    assert read_torch(tmp_path / "link.bin")["w"].load().equal(torch.ones(3))


def damage(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_damaged_tensors_of_the_zip_format_are_found(tmp_path):
    path = tmp_path / "w.pt"
    base = torch.randn(100)
    torch.save({"whole": base, "part": base[:10], "other": torch.randn(5)}, path)
    found = read_torch(path)
    damage(path, found["whole"].offset + 4 * 50)
    for key in ("whole", "part"):  # a part cannot tell which part is damaged
        with pytest.raises(CheckpointError, match="checksum"):
            found[key].load()
    assert found["other"].load().isfinite().all()


def test_files_without_checksums_are_read(tmp_path):
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"w": torch.ones(3)}, tmp_path / "w.pt")
    finally:
        torch.serialization.set_crc32_options(before)
    found = read_torch(tmp_path / "w.pt")["w"]
    assert found.verify is None
    assert found.load().equal(torch.ones(3))


def test_a_file_that_became_shorter_is_found(save):
    path = save({"w": torch.ones(3000)})
    found = read_torch(path)["w"]
    path.write_bytes(path.read_bytes()[: found.offset + 100])
    with pytest.raises(CheckpointError, match="too early"):
        found.load()


def test_a_plain_pickle_is_no_file_of_torch(tmp_path):
    (tmp_path / "w.bin").write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(CheckpointError, match=r"is not a file of torch\.save"):
        read_torch(tmp_path / "w.bin")


def test_the_content_of_a_dict_survives_its_class(save):
    content = collections.OrderedDict(b=1, a=2)
    vars(content)["extra"] = "lost"
    made = collections.defaultdict(list, {"x": [1]})
    found = read_torch(save({"ordered": content, "default": made, "nul": {"\0stub": 1}, "keys": {(1, "a"): None, 2: 0.5}}))
    assert list(found["ordered"].items()) == [("b", 1), ("a", 2)]
    assert found["default"] == {"x": [1]}
    assert found["nul"] == {"\0stub": 1}
    assert found["keys"] == {(1, "a"): None, 2: 0.5}


def test_an_entry_is_named_in_full(tmp_path):
    (tmp_path / "w.bin").write_bytes(legacy_file(whole(entry("w", call(name("evil.module", "Class")))), {}))
    with pytest.raises(CheckpointError, match=r"w\.bin' refers to 'evil\.module\.Class'"):
        read_torch(tmp_path / "w.bin")

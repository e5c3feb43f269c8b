"""What a foreign checkpoint is, where its parts lie, and what is wrong with it."""

import json
import time
import tracemalloc
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from tests.conversion.examples import GOLDENS, VALUES, copy
from transformer_xl.config.model import TransformerXLConfig
from transformer_xl.conversion import programs
from transformer_xl.conversion.convert import convert
from transformer_xl.conversion.key_maps import authors, huggingface, xlnet_huggingface, xlnet_tensorflow
from transformer_xl.conversion.key_maps.authors import read_module
from transformer_xl.conversion.readers.tensors import TensorRef
from transformer_xl.conversion.readers.unpickle import Stub, unpickle
from transformer_xl.conversion.sources import open_source
from transformer_xl.errors import CheckpointError, ConfigError

CONFIG = {
    "model_type": "transfo-xl",
    **{"vocab_size": 11, "cutoffs": [], "d_model": 8, "d_embed": 8, "n_head": 2, "d_head": 4, "d_inner": 10, "div_val": 1},
    **{"n_layer": 1, "mem_len": 5, "clamp_len": -1, "same_length": False, "tie_projs": [False]},
}


GOLDEN_OF = {
    "huggingface": "huggingface/plain",
    "authors": "authors/pre_lnorm",
    "nvidia": "nvidia/plain",
    "tensorflow": "tensorflow/base",
    "xlnet of huggingface": "xlnet/content_memory",
    "xlnet of tensorflow": "xlnet_tensorflow/pretraining",
}
WEIGHTS = {
    "huggingface": "pytorch_model.bin",
    "authors": "model.pt",
    "nvidia": "checkpoint_last.pt",
    "tensorflow": "model.ckpt-123",
    "xlnet of huggingface": "pytorch_model.bin",
    "xlnet of tensorflow": "xlnet_model.ckpt",
}


def said(kind: str) -> dict[str, Any]:
    return {"mem_len": 6} if kind == "tensorflow" else {}


@pytest.mark.parametrize("example", GOLDEN_OF)
def test_every_way_to_name_a_checkpoint_leads_to_the_same(example, tmp_path):
    kind = example.removeprefix("xlnet of ")
    folder = copy(GOLDEN_OF[example], tmp_path)
    whole = open_source(folder, settings=said(kind))
    file = folder / WEIGHTS[example]
    if kind == "nvidia":
        (file,) = folder.glob("checkpoint_*.pt")
    ways: list[tuple[Path, Any]] = [(folder, kind), (file, None), (file, kind)]
    for source, told in ways:
        again = open_source(source, kind=told, settings=said(kind))
        assert (again.kind, again.config, again.key_map) == (kind, whole.config, whole.key_map)
        assert {n: t.shape for n, t in again.tensors.items()} == {n: t.shape for n, t in whole.tensors.items()}
        assert (again.tokenizer is None) == (whole.tokenizer is None)


def test_a_checkpoint_of_nvidia_needs_no_name(tmp_path):
    folder = copy("nvidia/plain", tmp_path)
    (file,) = folder.glob("checkpoint_*.pt")
    assert open_source(file.rename(folder / "renamed.pt")).kind == "nvidia"
    with pytest.raises(CheckpointError, match=r"renamed.pt' is not a pickled model of the authors'"):
        open_source(folder / "renamed.pt", kind="authors")
    with pytest.raises(CheckpointError, match="lacks model_config or model_state"):
        open_source(GOLDENS / "authors" / "plain" / "checkpoint" / "model.pt", kind="nvidia")


def write_huggingface(folder: Path, tensors: dict[str, torch.Tensor], changes: dict[str, Any]) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    return folder


ABSURD: list[dict[str, Any]] = [
    {"n_layer": 10**9},
    {"n_layer": -1},
    {"d_model": 10**9},
    {"d_model": 10**4000},
    {"n_head": 10**9, "d_head": 10**9},
    {"vocab_size": 12},
    {"cutoffs": list(range(1, 100_000))},
    {"cutoffs": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], "div_val": 2**60},
    {"div_val": 0},
    {"init_std": 1e400},
    {"é\u2028" * 1000: 1},
    {"model_type": ["transfo-xl"]},
]


@pytest.mark.parametrize("changes", ABSURD, ids=lambda changes: next(iter(changes))[:12])
def test_absurd_settings_cost_nothing(changes, tmp_path):
    """Refused in one short line that names the file, before anything large is made."""
    source = write_huggingface(tmp_path / "source", {"transformer.word_emb.emb_layers.0.weight": torch.zeros(11, 8)}, {})
    weights = {f"transformer.layers.{i}.x": torch.zeros(1) for i in range(20)}  # enough for the number of layers
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    (source / "config.json").write_text(json.dumps(CONFIG | changes))
    tracemalloc.start()
    start = time.process_time()
    try:
        with pytest.raises(CheckpointError) as error:
            convert(source, tmp_path / "native")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert time.process_time() - start < 1
    assert peak < 50e6
    message = str(error.value)
    assert "/source" in message
    assert len(message) < 700
    assert message.isprintable()
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1], "holds no weights by name"),
        ({"a": 3}, "holds a int as 'a', where a tensor is expected"),
        ({"a\nb": {"c": torch.zeros(1)}}, r"holds a dict as 'a\\nb', where a tensor is expected"),
    ],
)
def test_files_without_weights(content, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=message):
        open_source(tmp_path)


@pytest.mark.parametrize("file", ["xlnet_config.json", "config.json"])
def test_settings_of_an_xlnet_of_the_authors_lie_beside_it(file, tmp_path):
    """Their archives have the first name, a directory of their training the second."""
    folder = copy("xlnet_tensorflow/pretraining", tmp_path)
    before = open_source(folder).config
    (folder / "xlnet_config.json").rename(folder / file)
    assert open_source(folder).config == open_source(folder / "xlnet_model.ckpt").config == before
    (folder / file).unlink()
    with pytest.raises(
        (CheckpointError, OSError), match=r"xlnet_config.json. cannot be read: No such file|No such file.*xlnet_config.json"
    ):
        open_source(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_layer": 10**9}, "says n_layer = 1,000,000,000, but there are only"),
        ({"n_layer": 3}, r"lacks tensor 'model/transformer/layer_2/rel_attn/q/kernel' \(6, 2, 3\)"),
        ({"untie_r": False}, r"r_w_bias' of .* has shape \(2, 2, 3\), its settings call for \(2, 3\)"),
    ],
)
def test_absurd_settings_of_an_xlnet_of_the_authors(changes, message, tmp_path):
    folder = copy("xlnet_tensorflow/pretraining", tmp_path)
    values = json.loads((folder / "xlnet_config.json").read_text())
    (folder / "xlnet_config.json").write_text(json.dumps(values | changes))
    with pytest.raises(CheckpointError, match=message):
        convert(folder, tmp_path / "native")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    ("golden", "settings", "message"),
    [
        ("huggingface/plain", {"memlen": 3}, "unknown setting 'memlen'; did you mean 'mem_len'"),
        ("huggingface/plain", {"mem_len": -1}, r"^mem_len \(-1\) must be greater than or equal to 0"),
        ("huggingface/plain", {"reuse_len": 3}, "unknown setting 'reuse_len'"),
        ("xlnet/memory", {"attention": "shaw"}, "unknown setting 'attention'"),
    ],
)
def test_settings_of_the_user_that_cannot_be_are_not_laid_to_the_file(golden, settings, message):
    with pytest.raises(ConfigError, match=message):
        open_source(GOLDENS / golden / "checkpoint", settings=settings)


# The authors' pickled module


Change = Callable[[Stub], object]


def children(module: Stub) -> dict[str, Stub]:
    return module.state["_modules"]


def part(module: Stub, name: str) -> Stub:
    for each in name.split("."):
        module = children(module)[each]
    return module


def set_part(name: str, attribute: str, value: Any) -> Change:
    def change(module: Stub) -> None:
        (part(module, name) if name else module).state[attribute] = value

    return change


AUTHORS: list[tuple[Change, str]] = [
    (lambda module: module.state.pop("n_token"), "is not a pickled model of the authors'"),
    (lambda module: children(module).pop("crit"), "was trained with sample_softmax"),
    (lambda module: part(module, "layers.0.dec_attn").state.pop("pre_lnorm"), r"without layers.0.dec_attn.pre_lnorm"),
    (lambda module: children(part(module, "layers.0.dec_attn")).pop("dropatt"), r"without layers.0.dec_attn.dropatt.p"),
    (lambda module: module.state.pop("mem_len"), "mem_len: Field required"),
    (set_part("word_emb", "cutoffs", 3), "has word_emb.cutoffs that are no list"),
    (set_part("word_emb", "cutoffs", list(range(10**6))), r"cutoffs .* should have at most 100 items"),
    (set_part("", "n_layer", 10**9), "says n_layer = 1,000,000,000, but there are only"),
    (set_part("", "n_token", Stub("x")), r"n_token \(Stub"),
]


@pytest.mark.parametrize(("change", "message"), AUTHORS)
def test_modules_that_are_no_model_of_the_authors(change, message, tmp_path, monkeypatch):
    file = copy("authors/plain", tmp_path) / "model.pt"
    tree = unpickle(file)
    change(tree)
    monkeypatch.setattr(programs, "unpickle", lambda path: tree)
    start = time.process_time()
    with pytest.raises(CheckpointError, match=message) as error:
        open_source(file)
    assert time.process_time() - start < 1
    assert "model.pt'" in str(error.value)
    assert len(str(error.value)) < 700


def test_wrapped_models_are_unwrapped():
    file = GOLDENS / "authors" / "plain" / "checkpoint" / "model.pt"
    tree = unpickle(file)
    bare = read_module(tree, file)
    for name in ("torch.nn.parallel.data_parallel.DataParallel", "fp16_opt.FP16_Module"):
        tree = Stub(name, state={"_modules": {"module": tree}})
    assert read_module(tree, file) == bare
    with pytest.raises(CheckpointError, match="is not a pickled model"):
        read_module(Stub("a", state={"_modules": {"b": tree, "c": tree}}), file)


@pytest.mark.parametrize(
    ("golden", "tie_weight", "tie_projs"),
    [
        ("plain", True, [False]),
        ("untied_weight", False, [False]),
        ("cutoffs_shared_projection", True, [False, True, True]),
        ("div_val_2_three_tails", True, [False, True, True, True]),
        ("div_val_2_nothing_shared", False, [False] * 4),
    ],
)
def test_what_is_tied_is_told_by_places(golden, tie_weight, tie_projs):
    file = GOLDENS / "authors" / golden / "checkpoint" / "model.pt"
    flags, tensors = read_module(unpickle(file), file)
    assert (flags["tie_weight"], flags["tie_projs"]) == (tie_weight, tie_projs)
    assert all(isinstance(tensor, TensorRef) for tensor in tensors.values())


def test_learned_positions_keep_their_number_when_lengths_change(monkeypatch):
    """The authors' `reset_length` sets other lengths and leaves the tables."""
    file = GOLDENS / "authors" / "shaw" / "checkpoint" / "model.pt"
    tree = unpickle(file)
    before = tree.state["max_klen"]
    tree.state["mem_len"] += 30
    monkeypatch.setattr(programs, "unpickle", lambda path: tree)
    config = open_source(file).config
    assert isinstance(config, TransformerXLConfig)
    assert (config.max_klen, config.mem_len) == (before, tree.state["mem_len"])


FLAGS = authors.flags_of(TransformerXLConfig(vocab_size=9, n_layer=1), tgt_len=4) | {"max_klen": 5}
HEAD_SETTINGS = (
    "id2label",
    "num_labels",
    "problem_type",
    "architectures",
    "summary_type",
    "summary_use_proj",
    "summary_activation",
)
OF_XLNET = {*xlnet_huggingface.XLNetValues.model_fields, *HEAD_SETTINGS}
SETTINGS = sorted({*huggingface.TransfoXLValues.model_fields, *OF_XLNET})
AUTHORS_OF_XLNET = {
    **{"n_token": 9, "n_layer": 1, "d_model": 4, "n_head": 2, "d_head": 2, "d_inner": 4},
    **{"ff_activation": "gelu", "untie_r": True},
}


@given(changes=st.dictionaries(st.sampled_from(SETTINGS), VALUES, max_size=3))
def test_whatever_settings_hold_they_are_taken_or_refused(changes):
    others = {name: value for name, value in changes.items() if name in OF_XLNET}
    for config_of, values in (
        (huggingface.config_of, CONFIG | changes),
        (authors.config_of, FLAGS | changes),
        (partial(xlnet_huggingface.config_of, names={"logits_proj.weight"}), others),
        (partial(xlnet_tensorflow.config_of, shapes={}), AUTHORS_OF_XLNET | others),
    ):
        try:
            config_of(values)
        except ConfigError as error:
            assert str(error).isprintable()
            assert len(str(error)) < 1000


PLAIN = GOLDENS / "authors" / "plain" / "checkpoint" / "model.pt"


@pytest.fixture(scope="module")
def plain() -> Stub:
    return unpickle(PLAIN)


@given(
    place=st.sampled_from(["", "word_emb", "crit", "layers", "layers.0", "layers.0.dec_attn", "layers.0.pos_ff"]),
    name=st.sampled_from(["_modules", "_parameters", "_buffers", "cutoffs", "div_val", "n_layer", "mem_len", "d_inner"]),
    value=VALUES,
)
def test_whatever_a_module_holds_it_is_taken_or_refused(plain, place, name, value):
    tree = deepcopy(plain)
    set_part(place, name, value)(tree)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "unpickle", lambda path: tree)
        try:
            found = open_source(PLAIN)
            found.key_map.locate({name: tensor.shape for name, tensor in found.tensors.items()}, str(PLAIN))
        except CheckpointError as error:
            assert str(error).isprintable()
            assert len(str(error)) < 1000


def test_the_length_of_a_tensorflow_memory_must_be_said_before_anything_else(tmp_path):
    with pytest.raises(CheckpointError, match=r"does not say how long a memory it was trained with; add --set mem_len=…"):
        open_source(copy("tensorflow/base", tmp_path))
    config = open_source(tmp_path / "source", settings={"mem_len": 7, "clamp_len": 5, "same_length": True}).config
    assert isinstance(config, TransformerXLConfig)
    assert (config.mem_len, config.clamp_len, config.same_length, config.same_length_besides_self) == (7, 5, True, True)

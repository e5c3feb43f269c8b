"""What a foreign checkpoint is, where its parts lie, and what is wrong with it."""

import json
import math
import time
import tracemalloc
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from tests.conversion.examples import GOLDENS, copy
from transformer_xl.conversion import sources
from transformer_xl.conversion.key_maps import authors, huggingface
from transformer_xl.conversion.key_maps.authors import read_module
from transformer_xl.conversion.readers.inert import Stub, TensorRef
from transformer_xl.conversion.readers.torch_files import read_torch
from transformer_xl.conversion.recognize import recognize
from transformer_xl.conversion.sources import open_source
from transformer_xl.conversion.values import MAX_BYTES, read_json
from transformer_xl.conversion.vocabulary import read_vocabulary
from transformer_xl.data.tokenizers import load_tokenizer
from transformer_xl.errors import CheckpointError, ConfigError
from transformer_xl.model_config import TransformerXLConfig

CONFIG = {
    "model_type": "transfo-xl",
    **{"vocab_size": 11, "cutoffs": [], "d_model": 8, "d_embed": 8, "n_head": 2, "d_head": 4, "d_inner": 10, "div_val": 1},
    **{"n_layer": 1, "mem_len": 5, "clamp_len": -1, "same_length": False, "tie_projs": [False]},
}


def touch(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).touch()
    return folder


# Recognizing


@pytest.mark.parametrize(
    ("names", "kind", "file"),
    [
        (["config.json", "pytorch_model.bin"], "huggingface", "pytorch_model.bin"),
        (["config.json", "pytorch_model.bin", "model.safetensors"], "huggingface", "model.safetensors"),
        (["model.pt", "optimizer.pt", "log.txt"], "authors", "model.pt"),
        (["model.pt", "model_2.pt"], "authors", "model.pt"),
        (["model_2.pt"], "authors", "model_2.pt"),
        (["checkpoint_last.pt", "checkpoint_best.pt", "checkpoint_10.pt"], "nvidia", "checkpoint_best.pt"),
        (["checkpoint_last.pt", "checkpoint_10.pt"], "nvidia", "checkpoint_last.pt"),
        (["checkpoint_10.pt"], "nvidia", "checkpoint_10.pt"),
        (["model.ckpt-9.index", "model.ckpt-9.data-00000-of-00001", "checkpoint"], "tensorflow", "."),
    ],
)
def test_directories_are_recognized_by_the_names_in_them(names, kind, file, tmp_path):
    touch(tmp_path, *names)
    assert recognize(tmp_path) == (kind, tmp_path / file)
    assert recognize(tmp_path, kind) == (kind, tmp_path / file)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model.safetensors", "huggingface"),
        ("other.safetensors", "huggingface"),
        ("pytorch_model.bin", "huggingface"),
        ("model.ckpt-9.index", "tensorflow"),
        ("model.ckpt-9.data-00000-of-00002", "tensorflow"),
        ("model.ckpt-9.meta", "tensorflow"),
        ("model.pt", None),
        ("checkpoint_best.pt", None),
    ],
)
def test_files_are_recognized_by_their_names(name, kind, tmp_path):
    touch(tmp_path, name)
    assert recognize(tmp_path / name) == (kind, tmp_path / name)
    assert recognize(tmp_path / name, "nvidia") == ("nvidia", tmp_path / name)


def test_a_prefix_is_a_tensorflow_checkpoint(tmp_path):
    touch(tmp_path, "model.ckpt-9.index")
    assert recognize(tmp_path / "model.ckpt-9") == ("tensorflow", tmp_path / "model.ckpt-9")


@pytest.mark.parametrize(
    ("names", "kind", "message"),
    [
        ([], None, "holds no checkpoint of a known kind: pytorch_model.bin or model.safetensors"),
        (["model.pt"], "nvidia", "holds no checkpoint of kind 'nvidia'; leave the kind out"),
        (["model.pt"], "nvidea", "unknown kind of checkpoint 'nvidea'; did you mean 'nvidia'"),
        (
            ["model.pt", "pytorch_model.bin"],
            None,
            r"checkpoints of several kinds \(huggingface, authors\); say which with --kind",
        ),
        (["model_a.pt", "model_b.pt"], None, r"holds several checkpoints \(model_a.pt, model_b.pt\); give one of them"),
        (["checkpoint_1.pt", "checkpoint_2.pt"], None, r"several checkpoints \(checkpoint_1.pt, checkpoint_2.pt\)"),
        (
            ["model.safetensors.index.json", "model-00001-of-00002.safetensors"],
            None,
            "index.json' means weights in several files",
        ),
        (["pytorch_model.bin.index.json"], "huggingface", "index.json' means weights in several files; join them in one"),
        (["tf_model.h5"], None, "tf_model.h5' means weights of Hugging Face that are not PyTorch's; load them there"),
    ],
)
def test_directories_that_cannot_be_taken(names, kind, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        recognize(touch(tmp_path, *names), kind)


def test_one_of_several_kinds_is_taken_when_told(tmp_path):
    touch(tmp_path, "model.pt", "pytorch_model.bin")
    assert recognize(tmp_path, "authors") == ("authors", tmp_path / "model.pt")


def test_paths_that_lead_nowhere(tmp_path):
    for path in (tmp_path / "none", tmp_path / "none" / "model.pt"):
        with pytest.raises(CheckpointError, match=f"'{path}' does not exist; give the directory or file"):
            recognize(path)
    with pytest.raises(CheckpointError, match="cannot be read: File name too long"):
        recognize(tmp_path / ("x" * 300))


def test_own_models_need_no_conversion(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "transformer_xl"}')
    touch(tmp_path, "model.safetensors")
    for source in (tmp_path, tmp_path / "model.safetensors"):
        with pytest.raises(CheckpointError, match="is a native directory already; txl eval and txl generate take it as it is"):
            recognize(source)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.json").write_text('{"model_type": "transfo-xl"}')
    assert recognize(tmp_path) == ("huggingface", tmp_path / "model.safetensors")  # a folder of that name makes no run
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="is a run; txl eval and txl generate take it as it is, --to writes it"):
        recognize(tmp_path)


# Reading


GOLDEN_OF = {
    "huggingface": "huggingface/plain",
    "authors": "authors/pre_lnorm",
    "nvidia": "nvidia/plain",
    "tensorflow": "tensorflow/base",
}
WEIGHTS = {
    "huggingface": "pytorch_model.bin",
    "authors": "model.pt",
    "nvidia": "checkpoint_last.pt",
    "tensorflow": "model.ckpt-123",
}


def said(kind: str) -> dict[str, Any]:
    return {"mem_len": 6} if kind == "tensorflow" else {}


@pytest.mark.parametrize("kind", GOLDEN_OF)
def test_every_way_to_name_a_checkpoint_leads_to_the_same(kind, tmp_path):
    folder = copy(GOLDEN_OF[kind], tmp_path)
    whole = open_source(folder, settings=said(kind))
    file = folder / WEIGHTS[kind]
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
    with pytest.raises(CheckpointError, match=r"renamed.pt' is no pickled model of the authors'"):
        open_source(folder / "renamed.pt", kind="authors")
    (folder / "renamed.pt").rename(folder / "model.pt")
    with pytest.raises(CheckpointError, match=r"model.pt' is no pickled model of the authors'"):
        open_source(folder)  # a name that says something else


def test_a_model_of_the_authors_is_none_of_nvidia(tmp_path):
    folder = copy("authors/plain", tmp_path)
    with pytest.raises(CheckpointError, match="is no checkpoint of NVIDIA's: it lacks model_config or model_state"):
        open_source(folder / "model.pt", kind="nvidia")


def test_settings_hold_whatever_the_checkpoint_says(tmp_path):
    folder = copy("huggingface/plain", tmp_path)
    before = open_source(folder).config
    after = open_source(folder, settings={"mem_len": 77, "clamp_len": 3, "same_length": True}).config
    assert after == before.model_copy(update={"mem_len": 77, "clamp_len": 3, "same_length": True})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"memlen": 3}, "unknown setting 'memlen'; did you mean 'mem_len'"),
        ({"mem_len": -1}, r"^mem_len \(-1\) must be greater than or equal to 0"),
        ({"same_length": True, "mem_len": 0}, "^same_length .* needs mem_len"),
    ],
)
def test_settings_of_the_user_that_cannot_be_are_not_laid_to_the_file(settings, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        open_source(copy("huggingface/plain", tmp_path), settings=settings)


def test_settings_that_change_shapes_do_not_fit(tmp_path):
    found = open_source(copy("huggingface/plain", tmp_path), settings={"d_inner": 11})
    with pytest.raises(
        CheckpointError, match=r"pos_ff.CoreNet.0.weight' of 'here' has shape \(10, 8\), its settings call for \(11, 8\)"
    ):
        found.key_map.locate({name: tensor.shape for name, tensor in found.tensors.items()}, "here")


def test_settings_count_layers_against_tensors(tmp_path):
    for n_layer, message in (
        (1, None),
        (2, "n_layer = 2, but there are only 14 tensors"),
        (10**9, "n_layer = 1,000,000,000, but"),
    ):
        folder = tmp_path / str(n_layer)
        write_huggingface(folder, {name: torch.zeros(1) for name in "abcdefghijklmn"}, {"n_layer": n_layer})
        if message is None:
            assert open_source(folder).config.n_layer == 1
        else:
            with pytest.raises(CheckpointError, match=rf"config.json' says {message}"):
                open_source(folder)


def write_huggingface(folder: Path, tensors: dict[str, torch.Tensor], changes: dict[str, Any]) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    return folder


ABSURD: list[dict[str, Any]] = [
    {"n_layer": 10**9},
    {"n_layer": 0},
    {"n_layer": -1},
    {"n_layer": True},
    {"n_layer": "2"},
    {"n_layer": 1.0},
    {"d_model": 10**9},
    {"d_model": 2**63},
    {"d_model": 10**4000},
    {"d_embed": 10**12},
    {"n_head": 10**9, "d_head": 10**9},
    {"vocab_size": 12},
    {"vocab_size": 10**18},
    {"vocab_size": None},
    {"cutoffs": list(range(1, 100_000))},
    {"cutoffs": [4, 10**9]},
    {"cutoffs": [[4]]},
    {"cutoffs": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], "div_val": 2**60},
    {"cutoffs": "4"},
    {"div_val": 0},
    {"div_val": -4},
    {"dropout": "0.1"},
    {"dropout": -0.1},
    {"mem_len": [5]},
    {"layer_norm_epsilon": 0},
    {"same_length": "yes"},
    {"untie_r": {"a": 1}},
    {"tie_projs": [[True]]},
    {"init": ["normal"]},
    {"init_std": 1e400},
    {"d_inner": math.nan},
    {"é\u2028" * 1000: 1},
    {"auto_map": {"AutoModel": "evil--module.Model"}},
    {"model_type": ["transfo-xl"]},
    {"n_token": 10},
]


@pytest.mark.parametrize("changes", ABSURD, ids=lambda changes: next(iter(changes))[:12])
def test_absurd_settings_cost_nothing(changes, tmp_path):
    """Refused in one short line that names the file, before anything large is made."""
    from transformer_xl.conversion.convert import convert

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
    ("text", "message"),
    [
        ('{"n_layer": NaN}', "is no sound JSON: NaN is no number; restore"),
        ('{"a": {"b": 1, "b": 2}}', "is no sound JSON: key 'b' occurs twice"),
        ("[1]", "is no JSON object"),
        ("{", "is no sound JSON: "),
        ("[" * 100_000, "is no sound JSON: "),
        ('{"a": "\xff"}'.encode("latin-1"), "is no sound JSON: 'utf-8' codec"),
        (" " * (MAX_BYTES + 1), f"has {MAX_BYTES + 1} bytes; {MAX_BYTES} is the most"),
    ],
)
def test_files_of_settings_are_read_strictly(text, message, tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(CheckpointError, match=message) as error:
        read_json(path)
    assert "config.json'" in str(error.value)


def test_weights_of_hugging_face_need_their_settings(tmp_path):
    folder = copy("huggingface/plain", tmp_path)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config.json' cannot be read: No such file"):
        open_source(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1], "holds no weights by name"),
        ({}, "holds no weights by name"),
        ({1: torch.zeros(1)}, "holds no weights by name"),
        ({"a": 3}, "holds a int as 'a', where a tensor is expected"),
        ({"a\nb": {"c": torch.zeros(1)}}, r"holds a dict as 'a\\nb', where a tensor is expected"),
    ],
)
def test_files_without_weights(content, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=message):
        open_source(tmp_path)


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
    (lambda module: module.state.pop("n_token"), "is no pickled model of the authors'"),
    (lambda module: children(module).pop("crit"), "was trained with sample_softmax"),
    (lambda module: children(module).pop("word_emb"), r"is a model without word_emb.cutoffs; is it the authors'"),
    (lambda module: part(module, "layers.0.dec_attn").state.pop("pre_lnorm"), r"without layers.0.dec_attn.pre_lnorm"),
    (lambda module: children(part(module, "layers.0.dec_attn")).pop("dropatt"), r"without layers.0.dec_attn.dropatt.p"),
    (lambda module: module.state.pop("mem_len"), "mem_len is missing"),
    (set_part("word_emb", "cutoffs", 3), "has word_emb.cutoffs that are no list"),
    (set_part("word_emb", "cutoffs", []), "has word_emb.cutoffs that are no list"),
    (set_part("word_emb", "cutoffs", list(range(10**6))), "has word_emb.cutoffs that are no list of 1 to 100"),
    (set_part("word_emb", "cutoffs", ["a", "b"]), r"cutoffs \('a'\) must be an integer"),
    (set_part("word_emb", "div_val", 0), r"div_val \(0\) must be"),
    (set_part("", "n_layer", 10**9), "says n_layer = 1,000,000,000, but there are only"),
    (set_part("", "n_token", Stub("x")), r"n_token \(Stub"),
    (set_part("", "n_token", True), r"n_token \(True\) must be an integer"),
    (set_part("", "attn_type", 7), r"attn_type \(7\) must be"),
    (set_part("layers.0.pos_ff", "d_inner", "x"), r"d_inner \('x'\) must be an integer"),
    (set_part("", "_modules", None), "is no pickled model|was trained with sample_softmax"),
    (set_part("", "_modules", {"crit": 3}), "was trained with sample_softmax"),
]


@pytest.mark.parametrize(("change", "message"), AUTHORS)
def test_modules_that_are_no_model_of_the_authors(change, message, tmp_path, monkeypatch):
    file = copy("authors/plain", tmp_path) / "model.pt"
    tree = read_torch(file)
    change(tree)
    monkeypatch.setattr(sources, "read_torch", lambda path: tree)
    start = time.process_time()
    with pytest.raises(CheckpointError, match=message) as error:
        open_source(file)
    assert time.process_time() - start < 1
    assert "model.pt'" in str(error.value)
    assert len(str(error.value)) < 700


def test_wrapped_models_are_unwrapped():
    file = GOLDENS / "authors" / "plain" / "checkpoint" / "model.pt"
    tree = read_torch(file)
    bare = read_module(tree, file)
    for name in ("torch.nn.parallel.data_parallel.DataParallel", "fp16_opt.FP16_Module"):
        tree = Stub(name, state={"_modules": {"module": tree}})
    assert read_module(tree, file) == bare
    with pytest.raises(CheckpointError, match="is no pickled model"):
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
    flags, tensors = read_module(read_torch(file), file)
    assert (flags["tie_weight"], flags["tie_projs"]) == (tie_weight, tie_projs)
    assert all(isinstance(tensor, TensorRef) for tensor in tensors.values())


def test_checkpoints_of_nvidia_with_absurd_settings(tmp_path):
    folder = copy("nvidia/plain", tmp_path)
    (file,) = folder.glob("checkpoint_*.pt")
    tree = read_torch(file)
    for name, value, message in (
        ("n_layer", 10**9, "says n_layer = 1,000,000,000, but there are only"),
        ("n_token", None, r"n_token \(None\) must be an integer"),
        ("d_inner", 11, "its settings call for"),
    ):
        changed = {**tree, "model_config": {**tree["model_config"], name: value}}
        with pytest.MonkeyPatch.context() as patch, pytest.raises(CheckpointError, match=message):
            patch.setattr(sources, "read_torch", lambda path, changed=changed: changed)
            found = open_source(file)
            found.key_map.locate({name: tensor.shape for name, tensor in found.tensors.items()}, str(file))


def test_weights_of_hugging_face_by_any_name(tmp_path):
    folder = copy("huggingface/tied_r", tmp_path)
    whole = open_source(folder)
    renamed = open_source((folder / "model.safetensors").rename(folder / "other.safetensors"))
    assert (renamed.kind, renamed.config, renamed.tensors.keys()) == ("huggingface", whole.config, whole.tensors.keys())


def test_learned_positions_keep_their_number_when_lengths_change(monkeypatch):
    """The authors' `reset_length` sets other lengths and leaves the tables."""
    file = GOLDENS / "authors" / "shaw" / "checkpoint" / "model.pt"
    tree = read_torch(file)
    before = tree.state["max_klen"]
    tree.state["mem_len"] += 30
    monkeypatch.setattr(sources, "read_torch", lambda path: tree)
    config = open_source(file).config
    assert (config.max_klen, config.mem_len) == (before, tree.state["mem_len"])


# Vocabularies


def test_a_vocabulary_is_found_beside_the_weights(tmp_path):
    for golden, words in (("huggingface/plain", 31), ("huggingface/narrow_embedding", 31), ("huggingface/untied_weight", 31)):
        tokenizer = open_source(copy(golden, tmp_path / golden.replace("/", "-"))).tokenizer
        assert tokenizer is not None
        assert tokenizer.vocab_size == words


def test_a_vocabulary_is_given_or_missing(tmp_path):
    folder = copy("authors/pre_lnorm", tmp_path)
    (folder / "cache.pt").rename(tmp_path / "elsewhere")
    assert open_source(folder).tokenizer is None
    given = open_source(folder, vocabulary=tmp_path / "elsewhere").tokenizer
    assert given is not None
    assert given.to_dict() == read_vocabulary(tmp_path / "elsewhere").to_dict()


def test_a_given_vocabulary_comes_before_one_in_the_checkpoint_or_beside_it(tmp_path):
    words = [f"w{i}" for i in range(31)]
    (tmp_path / "mine.txt").write_text("\n".join(words))
    for golden in ("nvidia/plain", "huggingface/plain"):
        folder = copy(golden, tmp_path / golden.replace("/", "-"))
        own = open_source(folder).tokenizer
        given = open_source(folder, vocabulary=tmp_path / "mine.txt").tokenizer
        assert own is not None
        assert given is not None
        assert given.to_dict()["words"] == words != own.to_dict()["words"]


def test_a_vocabulary_of_another_model_is_refused(tmp_path):
    folder = copy("huggingface/cutoffs", tmp_path)
    (folder / "vocab.txt").write_text("a\nb\n<unk>\n")
    with pytest.raises(CheckpointError, match=r"vocab.txt' has 3 tokens, the model 31; they do not belong together, give"):
        open_source(folder)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"a\n\nb\n", "vocab.txt': line 2 of the vocabulary is empty"),
        (b"\xff\n", "vocab.txt': 'utf-8' codec can't decode"),
        (b"", "vocab.txt': line 1"),
    ],
)
def test_texts_that_are_no_vocabulary(data, message, tmp_path):
    (tmp_path / "vocab.txt").write_bytes(data)
    with pytest.raises(CheckpointError, match=message):
        read_vocabulary(tmp_path / "vocab.txt")


def test_a_text_that_is_too_large_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr("transformer_xl.conversion.vocabulary.MAX_TEXT_BYTES", 5)
    (tmp_path / "vocab.txt").write_text("a\nb\nc\n")
    with pytest.raises(CheckpointError, match="has 6 bytes; 5 is the most that a vocabulary may take"):
        read_vocabulary(tmp_path / "vocab.txt")


def test_settings_beside_a_vocabulary_say_what_it_leaves_open(tmp_path):
    (tmp_path / "vocab.txt").write_text("<eos>\n<unk>\ncat\n")
    assert read_vocabulary(tmp_path / "vocab.txt").encode("CAT\n").tolist() == [1, 0]
    (tmp_path / "tokenizer_config.json").write_text('{"lower_case": true}')
    assert read_vocabulary(tmp_path / "vocab.txt").encode("CAT\n").tolist() == [2, 0]
    (tmp_path / "tokenizer_config.json").write_text('{"lower_case": "yes"}')  # believed as far as its type
    assert read_vocabulary(tmp_path / "vocab.txt").encode("CAT\n").tolist() == [1, 0]
    (tmp_path / "corpus-info.json").write_text('{"dataset": "text8"}')
    assert read_vocabulary(tmp_path / "vocab.txt").encode("cat\n").tolist() == [2]  # no line ends in text8
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer_config.json' is no sound JSON"):
        read_vocabulary(tmp_path / "vocab.txt")


def test_the_corpus_of_a_vocabulary_is_its_own_before_that_beside_it(tmp_path):
    folder = copy("tensorflow/base", tmp_path)
    before = read_vocabulary(folder / "cache.pkl").to_dict()
    (folder / "corpus-info.json").write_text('{"dataset": "lm1b"}')
    assert read_vocabulary(folder / "cache.pkl").to_dict() == before


def test_the_corpus_of_nvidia_is_among_its_arguments(tmp_path, monkeypatch):
    (file,) = copy("nvidia/plain", tmp_path).glob("checkpoint_*.pt")
    tree = read_torch(file)
    monkeypatch.setattr(sources, "read_torch", lambda path: tree)
    line_ends = {}
    for dataset in ("wt103", "text8"):
        tree["args"].state["dataset"] = dataset
        tokenizer = open_source(file).tokenizer
        assert tokenizer is not None
        line_ends[dataset] = tokenizer.to_dict()["line_end"]
    assert line_ends == {"wt103": "<eos>", "text8": None}


def test_moses_is_asked_for(tmp_path):
    folder = copy("huggingface/plain", tmp_path)
    without, asked = open_source(folder).tokenizer, open_source(folder, moses="en").tokenizer
    assert without is not None
    assert asked is not None
    assert (without.to_dict().get("moses"), asked.to_dict()["moses"]) == (None, "en")


@pytest.mark.parametrize("form", ["pickle", "torch", "torch-legacy"])
def test_what_is_in_a_file_is_told_by_its_content(form, tmp_path):
    import pickle

    state, path = {"sym2idx": {"<eos>": 0, "<unk>": 1, "cat": 2}}, tmp_path / "vocab.bin"
    if form == "pickle":
        path.write_bytes(pickle.dumps(state))
    else:
        torch.save(state, path, _use_new_zipfile_serialization=form == "torch")
    assert read_vocabulary(path).encode("cat\n").tolist() == [2, 0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1, 2], r"vocab.pkl': a vocabulary is a mapping of its attributes, not \[1, 2\]"),
        ({"idx2sym": True}, r"vocab.pkl': idx2sym \(True\) must be a list of words"),
        ({"idx2sym": ["a", 1]}, r"idx2sym \(\['a', 1\]\) must be a list of words"),
        ({"sym2idx": {"a": None}}, r"sym2idx \({'a': None}\) must be the ids of words"),
        ({"idx2sym": ["a"], "lower_case": "yes"}, r"lower_case \('yes'\) must be true or false"),
        ({"idx2sym": ["a"], "delimiter": 3}, r"delimiter \(3\) must be text"),
        ({"idx2sym": ["a"], "unk_idx": True}, r"unk_idx \(True\) must be an id"),
        ({"idx2sym": ["a"], "never_split": "a"}, r"never_split \('a'\) must be a list of words"),
        ({"idx2sym": ["a"], "dataset": ["ptb"]}, r"dataset \(\['ptb'\]\) must be text"),
        ({}, "vocab.pkl': no words in the vocabulary"),
        ({"EOT": 3}, "vocab.pkl': this is NVIDIA's OpenAIVocab"),
    ],
)
def test_pickles_that_are_no_vocabulary(content, message, tmp_path):
    import pickle

    (tmp_path / "vocab.pkl").write_bytes(pickle.dumps(content))
    with pytest.raises(CheckpointError, match=message):
        read_vocabulary(tmp_path / "vocab.pkl")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2**70) | st.floats() | st.text(max_size=4) | st.builds(Stub, st.just("a.b")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
SOME_WORDS = st.lists(st.sampled_from(["a", "b", "<eos>", "<unk>", "<S>", "_", "33", "34", " ", ""]), max_size=6)
ATTRIBUTES: dict[str, st.SearchStrategy[Any]] = {
    "idx2sym": SOME_WORDS | VALUES,
    "sym2idx": SOME_WORDS.map(lambda words: {word: i for i, word in enumerate(words)}) | VALUES,
    "delimiter": st.sampled_from([None, "", ","]) | VALUES,
    "dataset": st.sampled_from(["wt103", "lm1b", "text8", "enwik8"]) | VALUES,
    **dict.fromkeys(["lower_case", "unk_idx", "never_split", "language", "EOT", "special"], VALUES),
}


@given(state=st.fixed_dictionaries({}, optional=ATTRIBUTES) | VALUES)
def test_whatever_a_vocabulary_holds_it_is_taken_or_refused(state, tmp_path_factory):
    folder = tmp_path_factory.mktemp("vocabulary")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformer_xl.conversion.vocabulary.read_pickle", lambda path: state)
        (folder / "vocab.pkl").touch()
        try:
            tokenizer = read_vocabulary(folder / "vocab.pkl")
        except CheckpointError as error:
            assert str(error).isprintable()
            assert len(str(error)) < 1000
        else:
            tokenizer.save(folder / "tokenizer.json")
            assert load_tokenizer(folder / "tokenizer.json").to_dict() == tokenizer.to_dict()


FLAGS = authors.flags_of(TransformerXLConfig(vocab_size=9, n_layer=1), tgt_len=4) | {"max_klen": 5}
SETTINGS = sorted({*huggingface.DEFAULTS, "tie_projs"})


@given(changes=st.dictionaries(st.sampled_from(SETTINGS), VALUES, max_size=3))
def test_whatever_settings_hold_they_are_taken_or_refused(changes):
    for config_of, values in ((huggingface.config_of, CONFIG), (authors.config_of, FLAGS)):
        try:
            config_of({**values, **changes})
        except ConfigError as error:
            assert str(error).isprintable()
            assert len(str(error)) < 1000


PLAIN = GOLDENS / "authors" / "plain" / "checkpoint" / "model.pt"


@pytest.fixture(scope="module")
def plain() -> Stub:
    return read_torch(PLAIN)


@given(
    place=st.sampled_from(["", "word_emb", "crit", "layers", "layers.0", "layers.0.dec_attn", "layers.0.pos_ff"]),
    name=st.sampled_from(["_modules", "_parameters", "_buffers", "cutoffs", "div_val", "n_layer", "mem_len", "d_inner"]),
    value=VALUES,
)
def test_whatever_a_module_holds_it_is_taken_or_refused(plain, place, name, value):
    tree = deepcopy(plain)
    set_part(place, name, value)(tree)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "read_torch", lambda path: tree)
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
    assert (config.mem_len, config.clamp_len, config.same_length, config.same_length_besides_self) == (7, 5, True, True)


def test_words_of_python_2_are_utf8(tmp_path):
    """Its texts are bytes: read as latin-1 and, if all of them are UTF-8, taken for that."""
    start, end = b"\x80\x02}(U\x07idx2sym](U\x05<eos>", b"U\nlower_caseI00\nu."
    path = tmp_path / "cache.pkl"
    path.write_bytes(start + b"U\x05caf\xc3\xa9e" + end)
    assert read_vocabulary(path).encode("café\n").tolist() == [1, 0]
    path.write_bytes(start + b"U\x04caf\xe9U\x02a\xc3e" + end)
    assert read_vocabulary(path).encode("café aÃ\n").tolist() == [1, 2, 0]

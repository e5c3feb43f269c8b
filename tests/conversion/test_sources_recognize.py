"""What format a directory or file has is told by names."""

import shutil

import pytest

import transformer_xl as txl
from tests.conversion.examples import GOLDENS, touch
from tests.helpers import tiny_xlnet
from transformer_xl.conversion.sources import open_source, recognize
from transformer_xl.errors import CheckpointError


@pytest.mark.parametrize(
    ("names", "kind", "file"),
    [
        (["config.json", "pytorch_model.bin"], "huggingface", "pytorch_model.bin"),
        (["config.json", "pytorch_model.bin", "model.safetensors"], "huggingface", "model.safetensors"),
        (["model.pt", "optimizer.pt", "log.txt"], "authors", "model.pt"),
        (["model_2.pt"], "authors", "model_2.pt"),
        (["checkpoint_last.pt", "checkpoint_best.pt", "checkpoint_10.pt"], "nvidia", "checkpoint_best.pt"),
        (["checkpoint_10.pt"], "nvidia", "checkpoint_10.pt"),
        (["model.ckpt-9.index", "model.ckpt-9.data-00000-of-00001", "checkpoint"], "tensorflow", "."),
        (["info.json", "model.pth", "optimizer.pth"], "labml", "model.pth"),
        (["info.json", "xl.pth"], "labml", "xl.pth"),
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
        ("model.pth", None),
    ],
)
def test_files_are_recognized_by_their_names(name, kind, tmp_path):
    touch(tmp_path, name)
    assert recognize(tmp_path / name) == (kind, tmp_path / name)
    assert recognize(tmp_path / name, "nvidia") == ("nvidia", tmp_path / name)


def test_one_of_several_kinds_can_be_named(tmp_path):
    touch(tmp_path, "model.pt", "pytorch_model.bin")
    assert recognize(tmp_path, "authors") == ("authors", tmp_path / "model.pt")


@pytest.mark.parametrize(
    ("names", "kind", "message"),
    [
        ([], None, "holds no checkpoint of a known kind: pytorch_model.bin or model.safetensors"),
        (["model.pt"], "nvidia", "holds no checkpoint of kind 'nvidia'; leave the kind out"),
        (["model.pt", "pytorch_model.bin"], None, r"\(huggingface, authors\); say which with --kind"),
        (["model_a.pt", "model_b.pt"], None, r"\(model_a.pt, model_b.pt\); give one of them"),
        (["model.safetensors.index.json", "model-00001-of-00002.safetensors"], None, "weights in several files"),
        (["pytorch_model.bin.index.json"], "huggingface", "weights in several files"),
        (["tf_model.h5"], None, "not PyTorch's"),
    ],
)
def test_directories_that_cannot_be_taken(names, kind, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        recognize(touch(tmp_path, *names), kind)


@pytest.mark.parametrize("kind", [None, "tensorflow"])
@pytest.mark.parametrize("has_list", [True, False])
@pytest.mark.parametrize("name", ["", "model.ckpt-7", "model.ckpt-7.meta"])
def test_the_first_format_of_tensorflow_is_named(name, has_list, kind, tmp_path):
    """However it is given: by its file, by the file of its graph, by its directory."""
    shutil.copy(GOLDENS / "bundles" / "first_format" / "model.ckpt-7", tmp_path)
    touch(tmp_path, "model.ckpt-7.meta", "graph.pbtxt")
    if has_list:
        shutil.copy(GOLDENS / "bundles" / "first_format" / "checkpoint", tmp_path)
    with pytest.raises(
        CheckpointError, match=r"model.ckpt-7' is a TensorFlow checkpoint of the first format, V1, which is not"
    ):
        open_source(tmp_path / name, kind=kind, settings={"mem_len": 5})


def test_an_xlnet_is_ours_or_hugging_faces(tmp_path):
    """Both call it so."""
    tiny_xlnet().save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="is a native directory already"):
        recognize(tmp_path)
    theirs = GOLDENS / "xlnet" / "memory" / "checkpoint"
    assert recognize(theirs) == ("huggingface", theirs / "model.safetensors")
    for load in (txl.load, txl.XLNet.from_pretrained):
        with pytest.raises(CheckpointError, match=r"config.json' describes a model of another program, or .* \('xlnet'\)"):
            load(theirs)


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

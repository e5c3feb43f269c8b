"""The programs whose checkpoints can be read: `PROGRAMS` has an entry for each."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from transformer_xl.config.model import AttentionConfig, XLNetConfig
from transformer_xl.conversion.key_maps import (
    authors,
    huggingface,
    labml,
    nvidia,
    tensorflow,
    xlnet_huggingface,
    xlnet_tensorflow,
)
from transformer_xl.conversion.key_maps.authors import read_module
from transformer_xl.conversion.key_maps.entries import KeyMap
from transformer_xl.conversion.readers.tensor_bundle import read_bundle
from transformer_xl.conversion.readers.tensors import ForeignTensor, TensorRef, read_safetensors
from transformer_xl.conversion.readers.unpickle import Stub, unpickle
from transformer_xl.errors import CheckpointError, shown
from transformer_xl.untrusted import read_json_object

Kind = Literal["huggingface", "authors", "nvidia", "tensorflow", "labml"]
KINDS: tuple[Kind, ...] = get_args(Kind)
HUGGINGFACE_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
ARGUMENTS = "arguments.json"
"""Beside `model.safetensors`, in what is exported for the authors' code."""


@dataclass(frozen=True)
class Contents:
    """The contents of a checkpoint."""

    kind: Kind
    tensors: Mapping[str, ForeignTensor]  # by foreign name
    settings: Path  # the file that holds them
    config: Callable[[], AttentionConfig]
    key_map: Callable[[Any], KeyMap]  # relates its names and shapes to ours, given the settings
    vocabulary: dict[str, Any] | None = None  # attributes of the vocabulary, if the same file holds them
    tgt_len: int | None = None  # tokens of a training segment, if it says so
    unsaid: str = ""  # why users must say mem_len, if they must
    notes: Callable[[Any], list[str]] = lambda config: []  # what users should know of the model, given the settings
    trained_on_characters: bool = False  # the vocabulary that users give is the text whose characters it is


@dataclass(frozen=True)
class Program:
    """A program whose checkpoints can be read."""

    title: str  # name of the program, for messages
    files: str  # names of its checkpoints, for messages
    find: Callable[[list[str]], list[str]]  # returns the names, of those in a directory, that may be its checkpoints
    read: Callable[[Path], Contents]  # reads a checkpoint
    vocabulary: str  # what users should do if a checkpoint has no vocabulary, for messages


def read_any(weights: Path) -> Contents:
    """Read a file of `torch.save`; its content says which program wrote it."""
    tree = unpickle(weights)
    if isinstance(tree, dict) and labml.EMBEDDING in tree:
        return _labml(tree, weights)
    is_nvidia = isinstance(tree, dict) and "model_state" in tree
    return _nvidia(tree, weights) if is_nvidia else _authors(tree, weights)


def _huggingface(weights: Path) -> Contents:
    settings = weights.parent / "config.json"
    values = read_json_object(settings)
    is_safe = weights.suffix == ".safetensors"
    tensors = read_safetensors(weights) if is_safe else _named_tensors(unpickle(weights), weights)
    if values.get("model_type") == xlnet_huggingface.MODEL_TYPE:
        config = partial(xlnet_huggingface.config_of, values, tensors.keys())
        key_map = partial(xlnet_huggingface.key_map, prefix=xlnet_huggingface.prefix_of(tensors))
        return Contents("huggingface", tensors, settings, config, key_map, notes=partial(xlnet_huggingface.notes_of, values))
    config = partial(huggingface.config_of, values)
    return Contents("huggingface", tensors, settings, config, huggingface.key_map, tgt_len=_segment(values))


def _tensorflow(weights: Path) -> Contents:
    tensors = read_bundle(weights)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    if xlnet_tensorflow.is_xlnet(tensors):
        settings = _xlnet_settings(weights if weights.is_dir() else weights.parent)
        config = partial(xlnet_tensorflow.config_of, read_json_object(settings), shapes)
        key_map = partial(xlnet_tensorflow.key_map, names=shapes)
        return Contents("tensorflow", tensors, settings, config, key_map, notes=xlnet_tensorflow.notes_of)
    config = partial(tensorflow.config_of, shapes, str(weights))
    return Contents("tensorflow", tensors, weights, config, tensorflow.key_map, unsaid=_UNSAID)


_UNSAID = (
    "is a TensorFlow checkpoint, which does not say how long a memory it was trained with; "
    "add --set mem_len=… (and clamp_len, same_length), such as 1600 to score the published wt103 (trained with 384)"
)


def _xlnet_settings(folder: Path) -> Path:
    """Return the file of settings beside the variables of an XLNet."""
    first, other = (folder / name for name in xlnet_tensorflow.SETTINGS_FILES)
    return other if other.exists() and not first.exists() else first


def _authors(tree: Any, weights: Path) -> Contents:
    return _with_flags(*read_module(tree, weights), weights)


def _authors_file(weights: Path) -> Contents:
    if weights.suffix != ".safetensors":
        return _authors(unpickle(weights), weights)
    settings = weights.parent / ARGUMENTS
    return _with_flags(read_json_object(settings), read_safetensors(weights), settings)


def _with_flags(flags: dict[str, Any], tensors: Mapping[str, ForeignTensor], settings: Path) -> Contents:
    return Contents("authors", tensors, settings, partial(authors.config_of, flags), authors.key_map, tgt_len=_segment(flags))


def _nvidia(tree: Any, weights: Path) -> Contents:
    if not isinstance(tree, dict) or not isinstance(tree.get("model_config"), dict) or "model_state" not in tree:
        raise CheckpointError(f"'{weights}' is not a checkpoint of NVIDIA's: it lacks model_config or model_state")
    vocab, arguments = tree.get("vocab"), tree.get("args")
    state = None
    if isinstance(vocab, Stub):
        state = dict(vocab.state)
        if isinstance(arguments, Stub):
            state.setdefault("dataset", arguments.state.get("dataset"))
    tensors = _named_tensors(tree["model_state"], weights)
    return Contents("nvidia", tensors, weights, partial(nvidia.config_of, tree["model_config"]), nvidia.key_map, state)


def _labml(tree: Any, weights: Path) -> Contents:
    tensors = _named_tensors(tree, weights)
    config = partial(labml.config_of, {name: tensor.shape for name, tensor in tensors.items()})
    unsaid = "is labml's, which does not say how long a memory it was trained with; add --set mem_len=… (32 in its experiment)"
    told = {"unsaid": unsaid, "notes": labml.notes_of, "trained_on_characters": True}
    return Contents("labml", tensors, weights, config, labml.key_map, **told)


def _segment(values: dict[str, Any]) -> int | None:
    """Return the length of a training segment; what is none does no harm, because it is only told."""
    length = values.get("tgt_len")
    return length if type(length) is int and 0 < length < 2**31 else None


def _named_tensors(tree: Any, weights: Path) -> dict[str, TensorRef]:
    if not isinstance(tree, dict) or not tree or not all(isinstance(name, str) for name in tree):
        raise CheckpointError(f"'{weights}' holds no weights by name; is it a checkpoint of another kind?")
    for name, tensor in tree.items():
        if not isinstance(tensor, TensorRef):
            raise CheckpointError(f"'{weights}' holds a {type(tensor).__name__} as {shown(name)}, where a tensor is expected")
    return tree


def _named(preferred: tuple[str, ...], pattern: str = "") -> Callable[[list[str]], list[str]]:
    """Return a function that picks the first of the preferred names, or else all names that match a pattern."""
    return lambda names: [n for n in preferred if n in names][:1] or [n for n in names if fnmatchcase(n, pattern)]


def vocabulary_hint(kind: Kind, config: AttentionConfig) -> str:
    """Return what users should do if a checkpoint has no vocabulary that can be read."""
    if config.kind == XLNetConfig.kind:
        return "put its spiece.model beside the weights, or give it with --vocabulary"
    return PROGRAMS[kind].vocabulary


PROGRAMS: dict[Kind, Program] = {
    "huggingface": Program(
        "Hugging Face",
        "pytorch_model.bin or model.safetensors with config.json",
        lambda names: [] if ARGUMENTS in names else _named(HUGGINGFACE_WEIGHTS)(names),
        _huggingface,
        "put vocab.pkl, vocab.bin or vocab.txt beside the weights, or give it with --vocabulary",
    ),
    "authors": Program(
        "the authors' PyTorch",
        "model.pt",
        lambda names: _named(("model.safetensors",) if ARGUMENTS in names else ("model.pt",), "model*.pt")(names),
        _authors_file,
        "give the cache.pt in the directory of their training text with --vocabulary",
    ),
    "nvidia": Program(
        "NVIDIA",
        "checkpoint_*.pt",
        _named(("checkpoint_best.pt", "checkpoint_last.pt"), "checkpoint_*.pt"),
        lambda weights: _nvidia(unpickle(weights), weights),
        "give one with --vocabulary (their byte-pair encoding is GPT-2's, whose pieces no checkpoint of theirs holds)",
    ),
    "tensorflow": Program(
        "the authors' TensorFlow",
        "model.ckpt*.index",
        lambda names: ["."] if any(name.endswith(".index") for name in names) else [],  # its file `checkpoint` says which
        _tensorflow,
        "give the cache.pkl in the directory of their training text with --vocabulary",
    ),
    "labml": Program(
        "labml",
        "model.pth with info.json",
        lambda names: _named(("model.pth",), "*.pth")(names) if "info.json" in names else [],
        lambda weights: _labml(unpickle(weights), weights),
        "give the text that it was trained on with --vocabulary, if its tokens are characters",
    ),
}

"""Foreign checkpoints: their settings, tensors that still lie in their files, and their vocabulary."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from transformer_xl.conversion.key_maps import authors, huggingface, nvidia, tensorflow
from transformer_xl.conversion.key_maps.authors import read_module
from transformer_xl.conversion.key_maps.entries import KeyMap
from transformer_xl.conversion.readers.inert import Stub, TensorRef
from transformer_xl.conversion.readers.safetensors_files import read_safetensors
from transformer_xl.conversion.readers.tensor_bundle import read_bundle
from transformer_xl.conversion.readers.torch_files import read_torch
from transformer_xl.conversion.recognize import Kind, recognize
from transformer_xl.conversion.values import read_json, shown
from transformer_xl.conversion.vocabulary import find_tokenizer
from transformer_xl.data.tokenizers import Tokenizer
from transformer_xl.errors import CheckpointError, ConfigError, did_you_mean
from transformer_xl.model_config import TransformerXLConfig

_KEY_MAPS: dict[Kind, Callable[[TransformerXLConfig], KeyMap]] = {
    "huggingface": huggingface.key_map,
    "authors": authors.key_map,
    "nvidia": nvidia.key_map,
    "tensorflow": tensorflow.key_map,
}
_LEAST_PER_LAYER = 9  # tensors that every layer has in every format


@dataclass(frozen=True)
class Source:
    """A foreign checkpoint that has been read, but for the numbers in its tensors."""

    kind: Kind
    weights: Path  # for TensorFlow the prefix of its files
    config: TransformerXLConfig
    tensors: dict[str, TensorRef]  # by foreign name
    tokenizer: Tokenizer | None  # None: it has no vocabulary
    key_map: KeyMap = field(repr=False)


@dataclass(frozen=True)
class _Contents:
    """What a file of a known kind holds."""

    kind: Kind
    tensors: dict[str, TensorRef]
    settings: Path  # the file that says them
    config: Callable[[], TransformerXLConfig]
    vocabulary: dict[str, Any] | None = None  # its attributes, if they are in the same file


def open_source(
    source: Path,
    *,
    kind: Kind | None = None,
    vocabulary: Path | None = None,
    moses: str | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Source:
    """Recognize and read a foreign checkpoint; the arguments are those of `convert`.

    Raises:
        CheckpointError: nothing that can be recognized, something damaged or hostile, or tensors at odds with the settings.
        ConfigError: `settings` that cannot work.
    """
    changes = dict(settings or {})
    for name in changes:
        if name not in TransformerXLConfig.model_fields:
            raise ConfigError(f"unknown setting '{name}'; {did_you_mean(name, TransformerXLConfig.model_fields)}")
    found, weights = recognize(Path(source), kind)
    contents = _read(found, weights)
    if contents.kind == "tensorflow" and "mem_len" not in changes:
        raise CheckpointError(
            f"'{weights}' is a TensorFlow checkpoint, which does not say how long a memory it was trained with; "
            "add --set mem_len=… (and clamp_len, same_length), such as 1600 to score the published wt103 (trained with 384)"
        )
    config = _settle(contents, changes)
    tokenizer = find_tokenizer(weights, given=vocabulary, state=contents.vocabulary, vocab_size=config.vocab_size, moses=moses)
    return Source(contents.kind, weights, config, contents.tensors, tokenizer, _KEY_MAPS[contents.kind](config))


def _settle(contents: _Contents, settings: Mapping[str, Any]) -> TransformerXLConfig:
    """Return the configuration with the user's settings; refuse one that calls for far more tensors than there are."""
    try:
        config = contents.config()
    except ConfigError as error:
        raise CheckpointError(f"'{contents.settings}': {error}") from None
    config = TransformerXLConfig(**{**config.model_dump(), **settings})
    if config.vocab_size is None:
        raise ConfigError("vocab_size (None) must be a number; leave it out to take the checkpoint's")
    if config.n_layer * _LEAST_PER_LAYER > len(contents.tensors):  # before anything is listed for every layer
        raise CheckpointError(
            f"'{contents.settings}' says n_layer = {config.n_layer:,}, but there are only {len(contents.tensors):,} tensors"
        )
    return config


def _read(kind: Kind | None, weights: Path) -> _Contents:
    """Read a file of a kind, or one of `torch.save` whose content tells."""
    if kind == "huggingface":
        settings = weights.parent / "config.json"
        values = read_json(settings)
        safe = weights.suffix == ".safetensors"
        tensors = read_safetensors(weights) if safe else _named_tensors(read_torch(weights), weights)
        return _Contents(kind, tensors, settings, partial(huggingface.config_of, values))
    if kind == "tensorflow":
        tensors = read_bundle(weights)
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        return _Contents(kind, tensors, weights, partial(tensorflow.config_of, shapes, str(weights)))
    tree = read_torch(weights)
    if kind == "nvidia" or (kind is None and isinstance(tree, dict) and "model_state" in tree):
        return _nvidia(tree, weights)
    flags, tensors = read_module(tree, weights)
    return _Contents("authors", tensors, weights, partial(authors.config_of, flags))


def _nvidia(tree: Any, weights: Path) -> _Contents:
    if not isinstance(tree, dict) or not isinstance(tree.get("model_config"), dict) or "model_state" not in tree:
        raise CheckpointError(f"'{weights}' is no checkpoint of NVIDIA's: it lacks model_config or model_state")
    vocab, arguments = tree.get("vocab"), tree.get("args")
    state = None
    if isinstance(vocab, Stub):
        state = dict(vocab.state)
        if isinstance(arguments, Stub):
            state.setdefault("dataset", arguments.state.get("dataset"))
    tensors = _named_tensors(tree["model_state"], weights)
    return _Contents("nvidia", tensors, weights, partial(nvidia.config_of, tree["model_config"]), state)


def _named_tensors(tree: Any, weights: Path) -> dict[str, TensorRef]:
    if not isinstance(tree, dict) or not tree or not all(isinstance(name, str) for name in tree):
        raise CheckpointError(f"'{weights}' holds no weights by name; is it a checkpoint of another kind?")
    for name, tensor in tree.items():
        if not isinstance(tensor, TensorRef):
            raise CheckpointError(f"'{weights}' holds a {type(tensor).__name__} as {shown(name)}, where a tensor is expected")
    return tree

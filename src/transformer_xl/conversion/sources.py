"""Foreign checkpoints: their settings, tensors that still lie in their files, and their vocabulary."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformer_xl.conversion.key_maps.entries import KeyMap
from transformer_xl.conversion.programs import PROGRAMS, Contents, Kind, read_any
from transformer_xl.conversion.readers.inert import TensorRef
from transformer_xl.conversion.recognize import recognize
from transformer_xl.conversion.vocabulary import find_tokenizer
from transformer_xl.data.tokenizers import Tokenizer
from transformer_xl.errors import CheckpointError, ConfigError, did_you_mean
from transformer_xl.model_config import TransformerXLConfig

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
    contents = read_any(weights) if found is None else PROGRAMS[found].read(weights)
    if contents.kind == "tensorflow" and "mem_len" not in changes:
        raise CheckpointError(
            f"'{weights}' is a TensorFlow checkpoint, which does not say how long a memory it was trained with; "
            "add --set mem_len=… (and clamp_len, same_length), such as 1600 to score the published wt103 (trained with 384)"
        )
    config = _settle(contents, changes)
    tokenizer = find_tokenizer(weights, given=vocabulary, state=contents.vocabulary, vocab_size=config.vocab_size, moses=moses)
    return Source(contents.kind, weights, config, contents.tensors, tokenizer, PROGRAMS[contents.kind].key_map(config))


def _settle(contents: Contents, settings: Mapping[str, Any]) -> TransformerXLConfig:
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

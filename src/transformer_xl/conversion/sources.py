"""Foreign checkpoints: which format they have, their settings, tensors (still in their files) and vocabulary."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformer_xl.checkpoint.run_directory import RunDirectory
from transformer_xl.config.model import AttentionConfig, is_native
from transformer_xl.config.run import merge
from transformer_xl.conversion.key_maps.entries import KeyMap
from transformer_xl.conversion.programs import ARGUMENTS, HUGGINGFACE_WEIGHTS, KINDS, PROGRAMS, Contents, Kind, read_any
from transformer_xl.conversion.readers.tensor_bundle import refuse_first_format
from transformer_xl.conversion.readers.tensors import ForeignTensor
from transformer_xl.conversion.vocabulary import find_tokenizer
from transformer_xl.errors import CheckpointError, ConfigError, did_you_mean
from transformer_xl.model.pretrained import CONFIG_FILE
from transformer_xl.tokenizers.base import Tokenizer
from transformer_xl.untrusted import read_json_object

_TENSORFLOW = re.compile(r".*\.(index|meta|data-\d+-of-\d+)")
_UNREADABLE = {
    r"(model\.safetensors|pytorch_model\.bin)\.index\.json": "weights in several files; join them in one",
    r"(tf_model|flax_model)\..*": "weights of Hugging Face that are not PyTorch's; load them there and save them for PyTorch",
}
_AS_IT_IS = "txl eval and txl generate take it as it is, --to writes it for others"
_LEAST_PER_LAYER = 9  # tensors that every layer has in every format


@dataclass(frozen=True)
class ForeignCheckpoint:
    """A foreign checkpoint that has been read, except for the numbers in its tensors."""

    kind: Kind
    weights: Path  # for TensorFlow the prefix of its files
    config: AttentionConfig
    tensors: Mapping[str, ForeignTensor]  # by foreign name
    tokenizer: Tokenizer | None  # None: it has no vocabulary
    key_map: KeyMap = field(repr=False)
    tgt_len: int | None = None  # tokens of a training segment; None: unknown
    notes: tuple[str, ...] = ()  # what users should know, a line each


def open_source(
    source: Path,
    *,
    kind: Kind | None = None,
    vocabulary: Path | None = None,
    moses: str | None = None,
    settings: Mapping[str, Any] | None = None,
) -> ForeignCheckpoint:
    """Recognize and read a foreign checkpoint; the arguments are those of `convert`."""
    changes = dict(settings or {})
    found, weights = recognize(Path(source), kind)
    contents = read_any(weights) if found is None else PROGRAMS[found].read(weights)
    if contents.unsaid and "mem_len" not in changes:
        raise CheckpointError(f"'{weights}' {contents.unsaid}")
    config = _settle(contents, changes)
    known = {"state": contents.vocabulary, "vocab_size": config.vocab_size, "moses": moses}
    tokenizer = find_tokenizer(weights, given=vocabulary, is_text=contents.trained_on_characters, **known)
    key_map = contents.key_map(config)
    notes = (*contents.notes(config), *key_map.notes(contents.tensors))
    return ForeignCheckpoint(
        contents.kind, weights, config, contents.tensors, tokenizer, key_map, tgt_len=contents.tgt_len, notes=notes
    )


def _settle(contents: Contents, settings: Mapping[str, Any]) -> AttentionConfig:
    """Return the configuration with the user's settings; refuse one with far more layers than there are tensors."""
    try:
        config = contents.config()
    except ConfigError as error:
        raise CheckpointError(f"'{contents.settings}': {error}") from None
    for name in settings:
        if name not in type(config).model_fields:
            raise ConfigError(f"unknown setting '{name}'; {did_you_mean(name, type(config).model_fields)}")
    config = type(config)(**merge(config.model_dump(), dict(settings)))
    if config.vocab_size is None:
        raise ConfigError("vocab_size (None) must be a number; leave it out to take the checkpoint's")
    if config.n_layer * _LEAST_PER_LAYER > len(contents.tensors):  # checked before anything is listed for every layer
        raise CheckpointError(
            f"'{contents.settings}' says n_layer = {config.n_layer:,}, but there are only {len(contents.tensors):,} tensors"
        )
    return config


def recognize(source: Path, kind: Kind | None = None) -> tuple[Kind | None, Path]:
    """Find the format of a checkpoint, and where its tensors are.

    Args:
        source: its directory or file, or the prefix of the files of a TensorFlow checkpoint.
        kind: its format, if that is known.

    Returns:
        The format, or None for a file of `torch.save`, whose content must be read first; and the file of the tensors, or for
        TensorFlow the argument of `read_bundle`.
    """
    return _in_directory(source, kind) if source.is_dir() else _of_file(source, kind)


def _of_file(source: Path, kind: Kind | None) -> tuple[Kind | None, Path]:
    is_prefix = source.with_name(f"{source.name}.index").exists()
    if kind in (None, "tensorflow") and not is_prefix:
        refuse_first_format(source)
    if kind is None and (is_prefix or _TENSORFLOW.fullmatch(source.name)):
        return "tensorflow", source
    if kind is None and (source.name in HUGGINGFACE_WEIGHTS or source.suffix == ".safetensors"):
        _refuse_native(source.parent)
        return "authors" if source.with_name(ARGUMENTS).exists() else "huggingface", source
    if len(source.parts) == 1 and not source.suffix and not source.exists() and not is_prefix:
        raise CheckpointError(
            f"'{source}' is no file or directory; if it is a model of the hub: hf download {source} --local-dir {source}"
        )
    return kind, source


def _in_directory(folder: Path, kind: Kind | None) -> tuple[Kind | None, Path]:
    _refuse_native(folder)
    names = sorted(path.name for path in folder.iterdir())
    kinds: list[Kind] = [each for each in KINDS if kind in (None, each) and PROGRAMS[each].find(names)]
    if not kinds:
        raise CheckpointError(_nothing_in(folder, names, kind))
    if len(kinds) > 1:
        raise CheckpointError(f"'{folder}' holds checkpoints of several kinds ({', '.join(kinds)}); say which with --kind")
    first, *others = PROGRAMS[kinds[0]].find(names)
    if others:
        raise CheckpointError(f"'{folder}' holds several checkpoints ({first}, {', '.join(others[:9])}); give one of them")
    return kinds[0], folder / first


def _refuse_native(folder: Path) -> None:
    try:
        values = read_json_object(folder / CONFIG_FILE)
    except (CheckpointError, OSError):
        return
    if is_native(values):
        raise CheckpointError(f"'{folder}' is a native directory already; {_AS_IT_IS}")


def _nothing_in(folder: Path, names: list[str], kind: Kind | None) -> str:
    refuse_first_format(folder)
    if RunDirectory(folder).holds_run:
        return f"'{folder}' is a run; {_AS_IT_IS}"
    for pattern, problem in _UNREADABLE.items():
        for name in names:
            if re.fullmatch(pattern, name):
                return f"'{folder / name}' means {problem}"
    if kind is not None:
        return f"'{folder}' holds no checkpoint of kind '{kind}'; leave the kind out to have it recognized"
    known = [f"{program.files} ({program.title})" for program in PROGRAMS.values()]
    return f"'{folder}' holds no checkpoint of a known kind: {', '.join(known[:-1])}, or {known[-1]}"

"""Converts a foreign checkpoint to a native directory, one tensor at a time."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transformer_xl.config.model import AttentionConfig
from transformer_xl.conversion.destination import check_free, new_directory
from transformer_xl.conversion.key_maps.entries import Part
from transformer_xl.conversion.programs import Kind
from transformer_xl.conversion.sources import ForeignCheckpoint, open_source
from transformer_xl.errors import CheckpointError
from transformer_xl.files import write_file
from transformer_xl.model.build import make_blueprint
from transformer_xl.model.pretrained import WEIGHTS_FILE, config_values, write_settings
from transformer_xl.tensor_file import TensorSpec, encode_lazily
from transformer_xl.tokenizers.base import Tokenizer


@dataclass(frozen=True)
class Converted:
    """The result of a conversion.

    Attributes:
        kind: format of the source.
        weights: the file that held the tensors; for TensorFlow the prefix or directory.
        config: settings of the model.
        tokenizer: the tokenizer of the source's vocabulary; None: it has no vocabulary.
        n_parameters: numbers in all tensors.
        n_bytes: size of the new weights file.
        tgt_len: tokens of a training segment, with which it should be read; None: the source does not say.
        notes: what users should know, such as tensors that were left out; a line each.
    """

    kind: Kind
    weights: Path
    config: AttentionConfig
    tokenizer: Tokenizer | None
    n_parameters: int
    n_bytes: int
    tgt_len: int | None = None
    notes: tuple[str, ...] = ()


def convert(
    source: str | Path,
    destination: str | Path,
    *,
    kind: Kind | None = None,
    vocabulary: str | Path | None = None,
    moses: str | None = None,
    settings: Mapping[str, Any] | None = None,
    on_progress: Callable[[int, int], object] | None = None,
) -> Converted:
    """Convert a checkpoint of Hugging Face, the authors (PyTorch or TensorFlow), NVIDIA or labml; nothing in it is executed.

    Args:
        source: its directory or file.
        destination: a directory that does not exist yet, or is empty. It is written whole or not at all.
        kind: format of the source; None: recognize it.
        vocabulary: file with the vocabulary; None: look for one in the source and beside it. Without a vocabulary, no tokenizer
            is written.
        moses: language whose Moses rules split running text into words, such as "en", as Hugging Face's tokenizer does; None:
            words are separated by spaces, as in the published corpora.
        settings: fields of the model's settings, such as `mem_len`, which TensorFlow checkpoints lack.
        on_progress: called with the number of bytes written so far and in all.

    Returns:
        What was converted.

    Raises:
        CheckpointError: the source is damaged, hostile or of no known kind, its tensors do not fit its settings, or the
            destination is taken.
        OSError: the source cannot be read, or the destination not written.
        ConfigError: `settings` cannot work.
    """
    target = Path(destination)
    check_free(target)
    words = None if vocabulary is None else Path(vocabulary)
    found = open_source(Path(source), kind=kind, vocabulary=words, moses=moses, settings=settings)
    content, load = _native_tensors(found)
    n_parameters = sum(math.prod(shape) for _, shape in content.values())
    n_bytes = sum(math.prod(shape) * dtype.itemsize for dtype, shape in content.values())

    def chunks() -> Iterator[bytes | memoryview]:
        n_written = 0
        for chunk in encode_lazily(content, load):
            yield chunk
            n_written += len(chunk)
            if on_progress:
                on_progress(min(n_written, n_bytes), n_bytes)

    with new_directory(target) as folder:
        record = write_file(folder / WEIGHTS_FILE, chunks())
        write_settings(folder, config_values(found.config), record, found.tokenizer)
    return Converted(
        found.kind, found.weights, found.config, found.tokenizer, n_parameters, record.size, found.tgt_len, found.notes
    )


def _native_tensors(source: ForeignCheckpoint) -> tuple[dict[str, TensorSpec], Callable[[str], Tensor]]:
    """Check that the source has all native tensors. Return their types and shapes, and a function that makes one of them."""
    origin = str(source.weights)
    names = source.key_map.locate({name: tensor.shape for name, tensor in source.tensors.items()}, origin)
    dtypes = {name: source.tensors[name].dtype for part_names in names.values() for name in part_names}
    for name, dtype in dtypes.items():
        if not dtype.is_floating_point:
            raise CheckpointError(f"tensor '{name}' of '{origin}' has type {dtype}, which weights cannot have")
    # untied tensors that share bytes could turn a small file into a large one
    first_names = [names_of[0] for names_of in names.values()]
    needed = sum(source.tensors[name].n_bytes for name in first_names)
    held = sum(path.stat().st_size for path in {source.tensors[name].path for name in first_names})
    if needed > held:
        raise CheckpointError(f"the tensors of '{origin}' take {needed:,} bytes, but its files hold {held:,}: they overlap")
    dtype = torch.float64 if torch.float64 in dtypes.values() else torch.float32
    shapes = {name: tuple(tensor.shape) for name, tensor in make_blueprint(source.config).state_dict().items()}
    source.key_map.check_native(shapes, origin)

    def read(part: Part) -> Tensor:
        if part.name not in names:  # it is optional
            return torch.zeros(part.shape, dtype=dtype)
        first, *others = names[part.name]
        tensor = source.tensors[first].load().to(dtype)
        for other in others:
            place = source.tensors[other]
            if place != source.tensors[first] and not torch.equal(place.load().to(dtype), tensor):
                raise CheckpointError(f"tensors '{first}' and '{other}' of '{origin}' are tied by its settings, but differ")
        return tensor

    content = {name: TensorSpec(dtype, shape) for name, shape in shapes.items()}
    return content, lambda name: source.key_map.native(name, shapes, read)

"""Seals a run or a saved model again, after somebody has changed its settings or tokenizer on purpose."""

from pathlib import Path

import torch

from transformer_xl.checkpoint.run_directory import RunDirectory, check_tokenizer
from transformer_xl.config import RunConfig
from transformer_xl.data.tokenizers import Tokenizer, load_tokenizer
from transformer_xl.errors import CheckpointError, ConfigError, TokenizerError
from transformer_xl.files import whole_file
from transformer_xl.model.directory import CONFIG_FILE, TOKENIZER_FILE, WEIGHTS_FILE, read_config
from transformer_xl.model.pretrained import blueprint, sealed_differences, sealing
from transformer_xl.model.sequence_model import make_model
from transformer_xl.seals import differences
from transformer_xl.tensor_file import open_tensors, write_sealed_tensors
from transformer_xl.untrusted import read_json_object


def seal_again(path: str | Path) -> list[str]:
    """Accept settings, tokenizer and weights of a run or a saved model as they are on the disk.

    The weights of a run are not touched: its checkpoints have checksums of their own.

    Args:
        path: a run, or the directory of a model, which may come from another program and have no seal yet.

    Returns:
        What differs from what was sealed, in words.

    Raises:
        CheckpointError: there is nothing, or parts do not fit together.
    """
    run = RunDirectory(path)
    return _seal_run(run) if run.holds_run else _seal_model(Path(path))


def _seal_run(run: RunDirectory) -> list[str]:
    values = read_json_object(run.path / CONFIG_FILE)
    try:
        config = RunConfig(**values)
    except ConfigError as error:
        raise CheckpointError(f"'{run.path / CONFIG_FILE}': {error}") from None
    tokenizer, found = _tokenizer(run.path, config.model.vocab_size)
    try:
        sealed = run.read_seal()
    except CheckpointError:
        found.append("there was no sound seal, so nobody knows what was changed")
    else:
        found += differences(sealed.configs[-1] if sealed.configs else {}, values)
        if sealed.tokenizer != tokenizer.fingerprint:
            found.append(f"{TOKENIZER_FILE} is another tokenizer")
    with run.locked():
        if found:
            tokenizer.save(run.path / TOKENIZER_FILE)
        run.save_config(config, tokenizer)
    return found


def _seal_model(folder: Path) -> list[str]:
    config = read_config(folder / CONFIG_FILE)
    path = folder / WEIGHTS_FILE
    found: list[str] = []
    if (folder / TOKENIZER_FILE).exists():
        tokenizer, found = _tokenizer(folder, config.vocab_size)
        if found:
            tokenizer.save(folder / TOKENIZER_FILE)
    with open_tensors(path) as file:
        blueprint(make_model, config, file.tensors, str(path))
        found += sealed_differences(file, folder)
        try:
            file.verify()
        except CheckpointError:
            found.append(f"the bytes of {WEIGHTS_FILE} are others")
        if not file.is_sealed:
            found.append(f"{WEIGHTS_FILE} had no seal")
        elif not found:
            return []
        content = {name: (place.dtype, torch.Size(place.shape)) for name, place in file.tensors.items()}
        metadata = {**file.metadata, **sealing(read_json_object(folder / CONFIG_FILE))}
        try:
            with whole_file(path) as stray:
                write_sealed_tensors(stray, content, file.load_one, metadata=metadata)
        except OSError as error:
            raise CheckpointError(f"cannot write '{path}': {error.strerror or error}; free disk space") from None
    return found


def _tokenizer(folder: Path, vocab_size: int | None) -> tuple[Tokenizer, list[str]]:
    """Return the tokenizer as it is, and what is wrong with its checksum."""
    path = folder / TOKENIZER_FILE
    found: list[str] = []
    try:
        tokenizer = load_tokenizer(path, vocab_size=vocab_size)
    except TokenizerError:
        tokenizer = load_tokenizer(path, vocab_size=vocab_size, verify=False)
        found.append(f"{TOKENIZER_FILE} is another than its checksum says")
    check_tokenizer(tokenizer, vocab_size, str(folder))
    return tokenizer, found

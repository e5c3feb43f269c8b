"""Old `transfo-xl` models, which transformers dropped: their `config.json` shows it, and loading converts them."""

import atexit
import functools
import os
import shutil
import tempfile
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

from transformers import PreTrainedConfig
from transformers.utils import GENERATION_CONFIG_NAME

from transformer_xl.conversion.key_maps.huggingface import MODEL_TYPE, config_of
from transformer_xl.huggingface.config import TransformerXLPretrainedConfig


class TransfoXLConfig(PreTrainedConfig):
    """What `AutoConfig` finds for an old model; it becomes a `TransformerXLPretrainedConfig` at once."""

    model_type: ClassVar[str] = MODEL_TYPE

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        return TransformerXLPretrainedConfig.from_dict(config_of(config_dict).model_dump(mode="json"), **kwargs)


def native_source(source: str | os.PathLike[str], arguments: dict[str, Any]) -> str:
    """Return `source`, or the place of a converted copy if it is an old model.

    This uses the download options among the arguments of `from_pretrained`, and removes `subfolder`, which the copy lacks.
    """
    download = download_arguments(arguments)
    try:
        values, _ = PreTrainedConfig.get_config_dict(source, **download)
    except OSError:  # nothing there (transformers reports that itself), or a tokenizer without a model
        return str(source)
    if values.get("model_type") != MODEL_TYPE:
        return str(source)
    subfolder = download.pop("subfolder", "")
    arguments.pop("subfolder", None)
    if not Path(source).is_dir():
        from huggingface_hub import snapshot_download

        files = ["*.json", "model.safetensors", "pytorch_model.bin", "vocab.pkl", "vocab.bin", "vocab.txt"]
        patterns = [str(PurePosixPath(subfolder, name)) for name in files]
        source = snapshot_download(str(source), allow_patterns=patterns, **download)
    folder = Path(source, subfolder).resolve()
    state = tuple(
        (path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(folder.iterdir()) if path.is_file()
    )
    return str(_converted(folder, state))


def download_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` that say what to download and how."""
    known = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")
    return {key: arguments[key] for key in known if key in arguments}


@functools.lru_cache(maxsize=4)
def _converted(folder: Path, _state: tuple[Any, ...]) -> Path:
    """Convert a directory once per process and content, because separate calls load model and tokenizer."""
    from transformer_xl.conversion.convert import convert

    destination = Path(tempfile.mkdtemp(prefix="transformer_xl."))
    atexit.register(shutil.rmtree, destination, ignore_errors=True)
    convert(folder, destination / "model", kind="huggingface", moses="en")  # as the old tokenizer split text
    if (folder / GENERATION_CONFIG_NAME).is_file():  # how its texts end and are drawn
        shutil.copy(folder / GENERATION_CONFIG_NAME, destination / "model")
    return destination / "model"

"""The directory of a model: its files, and finding them by path or hub id. Torch is not needed to look for them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformer_xl.config.model import KINDS, ModelConfig, model_config
from transformer_xl.errors import CheckpointError, ConfigError, beside, shown
from transformer_xl.hub import download
from transformer_xl.manifest import MANIFEST_FILE
from transformer_xl.untrusted import read_json_object

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
TOKENIZER_FILE = "tokenizer.json"
RUNS = Path("runs")
"""Where `txl train` makes its runs, unless it is told another place."""

TEACH = "teach it a task first: txl finetune RUN --task NAME --data FILE --out DIR"
"""What to do about a model without a head."""


def local_directory(source: str | Path) -> Path | None:
    """Return a local directory, or None for what may be a hub id; refuse what is neither."""
    if Path(source).is_dir():
        return Path(source)
    is_path = Path(source).exists() or str(source).startswith((".", "/", "~")) or Path(source).parent == RUNS
    if is_path or str(source).count("/") != 1:
        what = "a file, and not a directory" if Path(source).is_file() else "not a directory"
        raise CheckpointError(
            f"'{source}' is {what} of a model; give a run, an exported directory or a hub id{_models_near(source)}"
        )
    return None


def resolve(source: str | Path, *, revision: str | None = None, token: str | None = None) -> Path:
    """Return a local directory for a path or a hub id, downloading the latter."""
    if found := local_directory(source):
        return found
    try:
        return download(str(source), [CONFIG_FILE, WEIGHTS_FILE, TOKENIZER_FILE, MANIFEST_FILE], revision=revision, token=token)
    except CheckpointError as error:
        raise CheckpointError(
            f"'{source}' is neither a directory nor a hub id that can be read ({error}; for a hub id "
            f"check spelling and network); give a run or an exported directory{_models_near(source)}"
        ) from None


def read_config(path: Path) -> ModelConfig:
    """Read a model's `config.json`."""
    if not path.exists():
        raise CheckpointError(
            f"'{path}' is missing; is this the directory of a model? txl convert reads those of other programs"
        )
    values = read_json_object(path)
    kind = values.get("model_type")
    if isinstance(kind, str) and kind in KINDS and not is_native(values):
        raise CheckpointError(f"'{path}' describes a model of another program ({kind}); txl convert reads it")
    if not isinstance(kind, str):
        raise CheckpointError(f"'{path}' does not describe a model (model_type); txl convert reads those of other programs")
    if kind not in KINDS:
        raise CheckpointError(
            f"'{path}' describes a model of kind {shown(kind)}, which is not registered; if it is your own, import its module "
            "first; if it is another program's, use txl convert"
        )
    try:
        config = model_config({"kind": values.pop("model_type"), **values})
    except ConfigError as error:
        raise CheckpointError(f"'{path}': {error}") from None
    if config.vocab_size is None:
        raise CheckpointError(f"'{path}': vocab_size is missing; is this the config.json of a saved model?")
    return config


def is_native(values: Mapping[str, Any]) -> bool:
    """Return whether a `config.json` is one of ours; Hugging Face calls its own XLNet by the same name."""
    kind = values.get("model_type")
    return isinstance(kind, str) and kind in KINDS and "ff_activation" not in values


def _models_near(source: str | Path) -> str:
    """Return a clause that proposes runs and models in the directory of `source` and in that where runs are kept."""
    return beside(Path(source), lambda path: (path / CONFIG_FILE).is_file(), also=RUNS)

"""Models as `config.json` + `model.safetensors` + `manifest.json`: found by path or hub id, saved, loaded and uploaded."""

import json
import tempfile
from collections.abc import Callable, Mapping
from functools import reduce
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from transformer_xl.config.model import ModelConfig, read_config
from transformer_xl.errors import CheckpointError, ConfigError, beside, counted, one_line, shown
from transformer_xl.files import FileRecord, make_directories, record_of, replace_file, whole_file, write_file
from transformer_xl.hub import CARD_FILE, download, model_card, upload
from transformer_xl.manifest import MANIFEST_FILE, Manifest, encode_manifest, read_manifest
from transformer_xl.tensor_file import TensorFile, TensorSpec, encode_tensors

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
TOKENIZER_FILE = "tokenizer.json"
RUNS = Path("runs")
"""Where `txl train` makes its runs, unless it is told another place."""

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class PretrainedMixin:
    """`save_pretrained`, `from_pretrained` and `push_to_hub` for a module that has a `config`."""

    kind: ClassVar[str]
    config: ModelConfig

    def save_pretrained(self: Any, directory: str | Path, *, tokenizer: Any = None) -> None:
        """Write the model to a directory, each file completely or not at all, with a manifest of their SHA-256.

        Args:
            directory: created if missing; its `config.json` and `model.safetensors` are replaced.
            tokenizer: written too, so that `txl.load(directory)` works; None: none.
        """
        folder = Path(directory)
        make_directories(folder)
        with whole_file(folder / WEIGHTS_FILE) as stray:
            weights = write_file(stray, encode_tensors(self.state_dict()))
            (folder / MANIFEST_FILE).unlink(missing_ok=True)  # a kill leaves none rather than one of other files
        write_settings(folder, config_values(self.config), weights, tokenizer)

    def push_to_hub(
        self: Any,
        repo_id: str,
        *,
        tokenizer: Any = None,
        private: bool = False,
        token: str | None = None,
        commit_message: str = "Upload a Transformer-XL",
    ) -> str:
        """Upload the model to the Hugging Face hub, with a short model card.

        Args:
            repo_id: `user/name`; created if it does not exist.
            tokenizer: uploaded too, so that `txl.load(repo_id)` works; None: none.
            private: whether a new repository is private.
            token: access token of the hub; None: that of `hf auth login`.
            commit_message: one line.

        Returns:
            The address of the commit.

        Raises:
            CheckpointError: the hub refused, or cannot be reached.
        """
        from_class = f'model = txl.{type(self).__name__}.from_pretrained("{repo_id}")'
        load = from_class if tokenizer is None else f'model, tokenizer = txl.load("{repo_id}")'
        card = model_card(self, name=repo_id.rpartition("/")[2], load=f"import transformer_xl as txl\n\n{load}")
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder, tokenizer=tokenizer)
            (Path(folder) / CARD_FILE).write_text(card, encoding="utf-8")
            return upload(folder, repo_id, private=private, token=token, commit_message=commit_message)

    @classmethod
    def from_pretrained(cls, source: str | Path, *, revision: str | None = None, token: str | None = None) -> Self:
        """Load a model from a directory or a Hugging Face hub id; safetensors only, nothing is executed.

        Args:
            source: a directory with `config.json` and `model.safetensors`, or a hub id such as `user/name`.
            revision: branch, tag or commit of a hub id; None: the newest.
            token: access token of the hub; None: that of `hf auth login`.

        Returns:
            The model in evaluation mode.

        Raises:
            CheckpointError: no such directory or hub id, a damaged file, or weights that do not fit or are not finite.
        """
        folder = resolve(source, revision=revision, token=token)
        config = read_config(folder / CONFIG_FILE)
        cls._check_kind(config, str(source))
        return open_model(cls, config, folder)

    @classmethod
    def _check_kind(cls, config: ModelConfig, source: str) -> None:
        """Refuse settings of a model of another class, which `source` holds."""
        if config.head is not None:
            raise CheckpointError(
                f"'{source}' is fine-tuned ({config.head.kind}), and no {cls.__name__} alone; txl.load gives it as TaskModel, "
                f"whose backbone is a model of kind '{config.kind}'"
            )
        if config.kind != cls.kind:
            raise CheckpointError(f"'{source}' is a model of kind '{config.kind}', no {cls.__name__}; txl.load reads all kinds")


def resolve(source: str | Path, *, revision: str | None = None, token: str | None = None) -> Path:
    """Return a local directory for a path or a hub id, downloading the latter."""
    path = Path(source)
    if (path / CONFIG_FILE).is_file():
        return path
    models = beside(path, lambda other: (other / CONFIG_FILE).is_file(), also=RUNS)
    is_path = path.exists() or str(source).startswith((".", "/", "~")) or path.parent == RUNS
    if is_path or str(source).count("/") != 1:
        missing = f"a directory without {CONFIG_FILE}, and not that" if path.is_dir() else "not a directory"
        what = "a file, and not a directory" if path.is_file() else missing
        raise CheckpointError(f"'{source}' is {what} of a model; give a run, an exported directory or a hub id{models}")
    try:
        return download(str(source), [CONFIG_FILE, WEIGHTS_FILE, TOKENIZER_FILE, MANIFEST_FILE], revision=revision, token=token)
    except CheckpointError as error:
        raise CheckpointError(
            f"'{source}' is neither a directory nor a hub id that can be read ({error}; for a hub id "
            f"check spelling and network); give a run or an exported directory{models}"
        ) from None


def config_values(config: ModelConfig) -> dict[str, Any]:
    """Return what `config.json` holds."""
    return {"model_type": config.kind, **config.model_dump(mode="json")}


def write_settings(folder: Path, values: dict[str, Any], weights: FileRecord, tokenizer: Any) -> None:
    """Write what belongs to the weights of a model: its settings, its tokenizer if it has one, and then their manifest.

    The manifest leaves out the settings: shapes are compared anyway, and people change a length of memory.
    """
    replace_file(folder / CONFIG_FILE, (json.dumps(values, indent=2) + "\n").encode())
    records = {WEIGHTS_FILE: weights}
    if tokenizer is not None:
        tokenizer.save(folder / TOKENIZER_FILE)
    if (folder / TOKENIZER_FILE).exists():  # or one that was saved before
        records[TOKENIZER_FILE] = record_of(folder / TOKENIZER_FILE)
    replace_file(folder / MANIFEST_FILE, encode_manifest(records))


def manifest_of(folder: Path) -> Manifest | None:
    """Read the manifest of a saved model; None if it has none, as those of other programs and of version 0.2."""
    remedy = f"restore it from a copy, or delete {MANIFEST_FILE} if it was changed on purpose"
    try:
        return read_manifest(folder / MANIFEST_FILE, needs=(WEIGHTS_FILE,), remedy=remedy)
    except FileNotFoundError:
        return None


def blueprint(make: Callable[[Any], Any], config: ModelConfig) -> Any:
    """Build a model without memory for its weights.

    Raises:
        ConfigError: see `make_model`; or sizes are too large for PyTorch.
    """
    try:
        with torch.device("meta"):
            return make(config)
    except (RuntimeError, TypeError, OverflowError) as error:  # how PyTorch says that a number does not fit
        raise ConfigError(f"a model of these sizes cannot be built ({one_line(error)[:150]}); lower them") from None


def fitting_blueprint(
    make: Callable[[Any], Any], config: ModelConfig, tensors: Mapping[str, Tensor | TensorSpec], origin: str
) -> Any:
    """Return a model without memory for its weights, after comparing every name, shape and type with those of `tensors`.

    Raises:
        CheckpointError: a tensor is missing, unexpected, or of another shape or type; names it and `origin`.
    """
    if config.n_layer > len(tensors):  # even empty, a billion layers would fill the memory
        raise CheckpointError(
            f"'{origin}' has {len(tensors)} tensors, its config asks for {counted(config.n_layer, 'layer')}; "
            f"not the same model?"
        )
    try:
        model = blueprint(make, config)
    except ConfigError as error:
        raise CheckpointError(f"'{origin}': {error}") from None
    expected: dict[str, Tensor] = model.state_dict()
    for name in sorted(expected.keys() | tensors.keys()):
        want, have = (tuple(x[name].shape) if name in x else None for x in (expected, tensors))
        if want != have:
            raise CheckpointError(
                f"'{origin}': tensor {shown(name)} has shape {have}, its config asks for {want}; not the same model?"
            )
        dtype, stored = expected[name].dtype, tensors[name].dtype
        if stored != dtype and not (dtype.is_floating_point and stored in _FLOATS):
            raise CheckpointError(
                f"'{origin}': tensor {shown(name)} is {stored}, where {dtype} is expected; save the weights in fp32 or bf16"
            )
    return model


def open_model(make: Callable[[Any], Any], config: ModelConfig, folder: Path) -> Any:
    """Build a model of `config` from the weights of its directory; see `build`."""
    file = TensorFile(folder / WEIGHTS_FILE)
    return build(make, config, file, str(file.path), manifest=manifest_of(folder))


def build(
    make: Callable[[Any], Any],
    config: ModelConfig,
    source: TensorFile | Mapping[str, Tensor],
    origin: str,
    *,
    manifest: Manifest | None = None,
) -> Any:
    """Build a model of `config` from the weights of a file or of a checkpoint, which become the model's own memory.

    Nothing is allotted before they are known to fit, and no random weights are drawn.

    Raises:
        CheckpointError: a file is not what its manifest says, tensors do not fit, or numbers are not finite.
    """
    is_file = isinstance(source, TensorFile)
    model = fitting_blueprint(make, config, source.tensors if is_file else source, origin)
    weights = source.load(manifest) if is_file else source
    dtypes = [tensor.dtype for tensor in weights.values() if tensor.is_floating_point()]
    dtype = reduce(torch.promote_types, dtypes)  # products of several types are errors
    model.load_state_dict({name: x.to(dtype) if x.is_floating_point() else x for name, x in weights.items()}, assign=True)
    check_finite(model, origin)
    return model.eval()


def is_finite(x: Tensor) -> bool:
    """Return whether all numbers are finite. A sum shows it ten times as fast as a look at each, unless it overflows itself."""
    return bool(x.sum().isfinite()) or bool(x.isfinite().all())


def check_finite(model: Any, origin: str) -> None:
    """Refuse a model whose weights are not all finite: whatever reads them would give no numbers, or stop much later."""
    named = ((name, parameter.detach()) for name, parameter in model.named_parameters())
    spoiled = [name for name, x in named if not x.is_meta and not is_finite(x)]  # transformers leaves some on the disk
    if spoiled:
        raise CheckpointError(
            f"weights of '{origin}' are not finite numbers: {spoiled[0]}, {len(spoiled)} of its tensors in all; "
            "restore the file, or train again with a lower optim.lr"
        )

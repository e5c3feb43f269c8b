"""Which format a directory or file has, by the names in it."""

import re
from pathlib import Path

from transformer_xl.checkpoint.run_directory import RunDirectory
from transformer_xl.conversion.programs import HUGGINGFACE_WEIGHTS, KINDS, PROGRAMS, Kind
from transformer_xl.conversion.values import read_json
from transformer_xl.errors import CheckpointError, did_you_mean
from transformer_xl.model.pretrained import CONFIG_FILE, MODEL_TYPE

_TENSORFLOW = re.compile(r".*\.(index|meta|data-\d+-of-\d+)")
_UNREADABLE = {
    r"(model\.safetensors|pytorch_model\.bin)\.index\.json": "weights in several files; join them in one",
    r"(tf_model|flax_model)\..*": "weights of Hugging Face that are not PyTorch's; load them there and save them for PyTorch",
}
_AS_IT_IS = "txl eval and txl generate take it as it is, --to writes it for others"


def recognize(source: Path, kind: Kind | None = None) -> tuple[Kind | None, Path]:
    """Find the format of a checkpoint, and where its tensors are.

    Args:
        source: its directory or file, or the prefix of the files of a TensorFlow checkpoint.
        kind: its format, if that is known.

    Returns:
        The format, or None for a file of `torch.save` whose content must tell; and the file that holds the tensors, for
        TensorFlow what `read_bundle` takes.

    Raises:
        CheckpointError: nothing there, nothing known, or several checkpoints.
    """
    if kind is not None and kind not in KINDS:
        raise CheckpointError(f"unknown kind of checkpoint '{kind}'; {did_you_mean(kind, KINDS)}")
    try:
        return _in_directory(source, kind) if source.is_dir() else _of_file(source, kind)
    except OSError as error:
        raise CheckpointError(f"'{source}' cannot be read: {error.strerror}; give a checkpoint that you may read") from None


def _of_file(source: Path, kind: Kind | None) -> tuple[Kind | None, Path]:
    is_prefix = source.with_name(f"{source.name}.index").exists()
    if not is_prefix and not source.exists():
        raise CheckpointError(
            f"'{source}' does not exist; give the directory or file of a checkpoint, downloaded if it is on a hub"
        )
    if kind is None and (is_prefix or _TENSORFLOW.fullmatch(source.name)):
        return "tensorflow", source
    if kind is None and (source.name in HUGGINGFACE_WEIGHTS or source.suffix == ".safetensors"):
        _refuse_native(source.parent)
        return "huggingface", source
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
        model_type = read_json(folder / CONFIG_FILE).get("model_type")
    except CheckpointError:
        return
    if model_type == MODEL_TYPE:
        raise CheckpointError(f"'{folder}' is a native directory already; {_AS_IT_IS}")


def _nothing_in(folder: Path, names: list[str], kind: Kind | None) -> str:
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

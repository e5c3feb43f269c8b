"""A model as an ONNX graph: one segment after the memory of those before it, memory in and memory out.

The program that runs the graph keeps the memory: it begins with zeros and passes each call's `new_…` outputs to the next call.

| input | type | shape | |
|---|---|---|---|
| `ids` | int64 | B, T | token ids |
| `n_pad` | int64 | B | padding at the left of each row, so that texts of any length fit T |
| `n_valid` | int64 | B | valid positions of the memory; 0 at the beginning (`mem_len` for `zero_first_memory`) |
| `mems.0` … | float | B, M, D | memory of each layer, zeros at the beginning |
| `tokens` | int64 | B, K | of a model with n-grams: the last tokens, zeros at the beginning |

| output | type | shape | |
|---|---|---|---|
| `logits` | float | B, T, V | scores of the token after each position; with an adaptive softmax log-probabilities |
| `new_n_valid`, `new_mems.0` …, `new_tokens` | | | for the next call |

Needs the extra `onnx`.
"""

import contextlib
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from transformer_xl.batch import Rows
from transformer_xl.errors import ConfigError
from transformer_xl.files import make_directories, whole_file
from transformer_xl.model.call import Execution
from transformer_xl.model.memory import Mems
from transformer_xl.model.transformer_xl import TransformerXL

_LARGEST_FILE = 1 << 31
"""Bytes that fit in one ONNX file; larger weights go to `PATH.data`."""


def export_onnx(model: TransformerXL, path: str | Path, *, batch_size: int | None = None, tgt_len: int = 128) -> Path:
    """Write a model as an ONNX file.

    Args:
        model: its memory length, see `with_context`, must be at least 1.
        path: the file; replaced. Weights of more than 2 GB go to a second file beside it.
        batch_size: B; None: any.
        tgt_len: T. Export twice, for example with 128 and with 1, to read a prompt fast and then write text fast.
    """
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"export to ONNX needs onnx and onnxscript ({error}); in a clone: pip install -e '.[onnx]'") from None
    if tgt_len < 1 or (batch_size is not None and batch_size < 1):
        raise ConfigError(f"tgt_len ({tgt_len}) and batch_size ({batch_size}) must be at least 1")
    if model.mem_len < 1:
        raise ConfigError("a model without memory (mem_len 0) has no segments to go on from; give it one by with_context")
    path = Path(path)
    program = _trace(model, batch_size, tgt_len)
    program.model.metadata_props.update({name: str(value) for name, value in describe(model, tgt_len).items()})
    _save(program, path, n_bytes=sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values()))
    return path


def describe(model: TransformerXL, tgt_len: int) -> dict[str, int]:
    """Return what a program must know to run the file; it is stored in the file's metadata.

    Returns:
        mem_len and tgt_len: M and T; with a `shift`, M includes the tokens that it reads before the memory. vocab_size: V.
        first_n_valid: `n_valid` of every row when a stream begins; above 0 for models that begin with a memory of zeros and
        attend to it.
    """
    return {
        "mem_len": model.n_kept,
        "tgt_len": tgt_len,
        "vocab_size": model.vocab_size,
        "first_n_valid": model.mem_len if model.config.zero_first_memory else 0,
    }


class _FlatModel(nn.Module):
    """The model with flat inputs and outputs."""

    def __init__(self, model: TransformerXL) -> None:
        super().__init__()
        self.model = model
        self.eval()

    def forward(self, ids: Tensor, n_pad: Tensor, n_valid: Tensor, mems: list[Tensor]) -> tuple[Tensor, ...]:
        # n_pad is always given: without it, the model would look at values to find out whether anything is masked
        execution = Execution(backend="equation")  # the others are written for one processor, not for an exporter
        n_layer = self.model.config.n_layer
        old = self.model.mems_class(tuple(mems[:n_layer]), n_valid, *mems[n_layer:])
        out = self.model(ids, mems=old, rows=Rows(n_pad=n_pad), execution=execution)
        assert out.logits is not None  # no labels are given
        return (out.logits, out.mems.n_valid, *_flat(out.mems))


def _flat(mems: Mems) -> list[Tensor]:
    return [*mems.hidden, *([] if mems.tokens is None else [mems.tokens])]


def _trace(model: TransformerXL, batch_size: int | None, tgt_len: int) -> Any:
    B, was_training = batch_size or 2, model.training
    mems = model.init_mems(B)
    state = [x.clone() for x in _flat(mems)]  # an empty memory is one tensor for all layers, which would be one input
    ids = torch.zeros(B, tgt_len, dtype=torch.int64, device=model.device)
    names = [*(f"mems.{i}" for i in range(len(mems.hidden))), "tokens"][: len(state)]
    any_size = None if batch_size else {0: torch.export.Dim("B")}
    shapes = (any_size, any_size, any_size, [any_size] * len(names))
    try:
        with _quiet(), torch.no_grad():
            return torch.onnx.export(
                _FlatModel(model),
                (ids, torch.zeros_like(mems.n_valid), mems.n_valid, state),
                dynamo=True,
                dynamic_shapes=None if batch_size else shapes,
                input_names=["ids", "n_pad", "n_valid", *names],
                output_names=["logits", "new_n_valid", *(f"new_{name}" for name in names)],
                verbose=False,
            )
    finally:
        model.train(was_training)  # `_FlatModel` holds the caller's model


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide the exporter's remarks about its own internals and about packages that it does not need."""
    levels = {logger: logger.level for logger in map(logging.getLogger, ("torch.onnx", "onnxscript"))}
    for logger in levels:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


def _save(program: Any, path: Path, *, n_bytes: int) -> None:
    """Write beside the final place, then move, so that a crash leaves the old file; large weights are written in place."""
    make_directories(path.parent)
    if n_bytes > 0.9 * _LARGEST_FILE:
        program.save(path, external_data=True)  # the graph names the file of the weights, so it cannot be moved
    else:
        with whole_file(path) as stray:
            program.save(stray, external_data=False)

"""Hidden states of a text on the disk, for probing what a model knows."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from transformer_xl.errors import CheckpointError, ConfigError, system_reason
from transformer_xl.files import whole_file
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.reading.evaluation import Reading
from transformer_xl.reading.stream import scoring


@torch.no_grad()
def write_hidden_states(
    path: Path,
    model: LanguageModel,
    ids: np.ndarray,
    reading: Reading,
    *,
    layer: int | None = None,
    on_tokens: Callable[[int], object] = lambda n: None,
) -> tuple[int, int]:
    """Read a text as one stream, and write the hidden state after each token as an array of NumPy; memory stays constant.

    Args:
        path: of the array, float32 (N, D); an earlier file is replaced when all is written.
        model: in evaluation mode.
        ids: of the text, integers (N,).
        reading: lengths of segments and memory.
        layer: 0 is the embeddings, 1 to n_layer what that layer makes of them; None: the last, with the final norm.
        on_tokens: called with the number of tokens of each segment.

    Returns:
        Shape of the array.

    Raises:
        CheckpointError: the file cannot be written.
        ConfigError: no such layer, or a reading that reads tokens again.
    """
    view, n_layer = reading.view(model), len(model.layers)
    if layer is not None and not 0 <= layer <= n_layer:
        raise ConfigError(f"--layer ({layer}) must be from 0 to {n_layer}: this model has {n_layer} layers")
    if reading.ext_len:
        raise ConfigError(f"ext_len ({reading.ext_len}) reads tokens again, which has no hidden states of its own; set 0")
    mems, written, shape = None, None, (0, 0)
    try:
        with whole_file(path) as partial, scoring(view):
            for begin in range(0, len(ids), reading.tgt_len):
                segment = torch.from_numpy(ids[begin : begin + reading.tgt_len].astype(np.int64))[None].to(model.device)
                states, mems = view.hidden_states(segment, mems=mems)
                state_TD = states[-1 if layer is None else layer][0].float().cpu().numpy()
                if written is None:
                    shape = len(ids), state_TD.shape[1]
                    written = np.lib.format.open_memmap(partial, "w+", np.float32, shape)
                written[begin : begin + len(state_TD)] = state_TD
                on_tokens(len(state_TD))
            if written is not None:
                written.flush()
    except OSError as error:
        raise CheckpointError(f"cannot write '{path}': {system_reason(error, 'choose another file')}") from None
    return shape

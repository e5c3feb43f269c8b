"""The sides of a race: models of equal size that learn and read alike, all made from the recipe of ours.

What the recipe says of text, vocabulary, feed, optimizers and schedule holds for all sides. Rates, decay and dropout begin at
the same values (`START`) and change by the same grid (`GRIDS`). Layers are as wide as makes the numbers of parameters equal.
"""

from bisect import bisect_left
from typing import Any

from transformer_xl.config.run import RunConfig
from transformer_xl.tools.budget import n_parameters

START = {"lr": 1e-2, "adamw_lr": 3e-3, "weight_decay": 0.2}

MODELS: dict[str, dict[str, Any]] = {
    "lstm": {"kind": "lstm", "n_layer": 3, "init": "uniform"},
    "lstm-ngrams": {"kind": "lstm_ngrams", "n_layer": 3, "init": "uniform"},
    "x-transformers": {"kind": "x_transformers", "n_layer": 4, "d_head": 64, "shift_tokens": 1},
    "xlstm": {"kind": "xlstm", "n_layer": 4},
    "mistral": {"kind": "mistral", "n_layer": 4, "d_head": 64},
}
"""The rivals, without the widths that depend on the text."""

SIDES = ("ours", *MODELS)

GRIDS: dict[str, dict[str, tuple[float, ...]]] = {
    "short": {"rates": (1, 1 / 2, 1 / 4), "decay": (1, 1 / 2, 5 / 2), "dropout": (0.0, 0.1), "layers": (0, -1, 1)},
    "long": {"rates": (1, 1 / 2), "decay": (1, 3)},
}
"""What is tried in turn, the best of each step being where the next begins: factors on both rates and on the weight decay,
dropout, and layers more or less. The short budget begins at `START`, a longer one at what the one before it chose."""

_WIDTHS = range(8, 8 * 1024, 8)


def side_of(ours: RunConfig, side: str, *, d_model: int, vocab_size: int) -> RunConfig:
    """Return the settings of a side before anything is tried.

    Args:
        ours: the recipe of ours.
        side: one of `SIDES`.
        d_model: width of the rivals' states, a multiple of 64.
        vocab_size: of the text.
    """
    begun = ours.changed(optim=START, model={"dropout": 0.0})
    if side == "ours":
        return begun
    train, model = ours.train, MODELS[side] | {"d_model": d_model, "dropout": 0.0}
    feed = {"tgt_len": train.tgt_len, "batch_size": train.batch_size}
    if side == "lstm-ngrams":
        model["ngram_rows"] = ours.model.model_dump()["ngram_rows"]
    elif side == "x-transformers":
        model |= {"n_head": d_model // 64, "mem_len": ours.model.mem_len}
    elif side == "xlstm":  # whose kernels compute powers of two at once
        chunk = 1 << (train.tgt_len.bit_length() - 1)
        model |= {"n_head": d_model // 64, "chunk_size": chunk}
        feed = {"tgt_len": chunk, "batch_size": train.batch_size * train.tgt_len // chunk}
    elif side == "mistral":  # it trains on separate segments, so they are as long as segment and memory of the others
        model |= {"n_head": d_model // 64, "mem_len": 2 * train.tgt_len - 1}
        feed = {"tgt_len": 2 * train.tgt_len, "batch_size": train.batch_size // 2}
    values = begun.model_dump() | {"model": model, "name": side}
    rival = RunConfig(**values).changed(train=feed)
    return fitted(rival, n_parameters(ours, vocab_size), vocab_size)


def fitted(config: RunConfig, n: int, vocab_size: int) -> RunConfig:
    """Return a side with layers of the width, a multiple of 8, that brings it nearest to `n` parameters."""
    key = "d_hidden" if config.model.kind.startswith("lstm") else "d_inner"

    def distance(width: int) -> int:
        return n_parameters(config.changed(model={key: width}), vocab_size) - n

    place = bisect_left(_WIDTHS, 0, key=distance)
    near = _WIDTHS[max(place - 1, 0) : place + 1]
    return config.changed(model={key: min(near, key=lambda width: abs(distance(width)))})


def alternatives(config: RunConfig, step: str, budget: str, vocab_size: int) -> list[RunConfig]:
    """Return what one step of the grid of a budget tries, `config` itself among it."""
    optim, values = config.optim, GRIDS[budget][step]
    if step == "rates":
        return [config.changed(optim={"lr": optim.lr * k, "adamw_lr": (optim.adamw_lr or optim.lr) * k}) for k in values]
    if step == "decay":
        return [config.changed(optim={"weight_decay": optim.weight_decay * k}) for k in values]
    if step == "dropout":
        return [config.changed(model={"dropout": k}) for k in values]
    n = n_parameters(config, vocab_size)
    return [deeper(config, int(k), n, vocab_size) for k in values]


def deeper(config: RunConfig, more: int, n: int, vocab_size: int) -> RunConfig:
    """Return a side with more (or fewer) layers, as much narrower (or wider) as keeps its size."""
    return fitted(config.changed(model={"n_layer": config.model.n_layer + more}), n, vocab_size) if more else config


def choice(config: RunConfig) -> dict[str, dict[str, Any]]:
    """Return the settings that a grid chooses."""
    model = config.model.model_dump()
    widths = {key: model[key] for key in ("n_layer", "d_inner", "d_hidden", "dropout") if key in model}
    optim = config.optim
    return {"model": widths, "optim": {"lr": optim.lr, "adamw_lr": optim.adamw_lr, "weight_decay": optim.weight_decay}}

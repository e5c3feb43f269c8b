"""A language model whose vocabulary grows: its tables get rows for new tokens.

Shapes: V tokens of the old vocabulary, W of the new one, E width of a table.
"""

import torch
from torch import Tensor

from transformer_xl.config.model import ModelConfig
from transformer_xl.errors import ConfigError
from transformer_xl.model.base import SequenceModel
from transformer_xl.model.build import make_model


def why_it_cannot_grow(config: ModelConfig) -> str:
    """Return which of a model's other numbers depend on its vocabulary, too; empty: none."""
    if config.cutoffs or config.div_val > 1:
        return "in an adaptive softmax (model.cutoffs), new words would take probability from the rarest ones alone"
    if getattr(config, "ngram_rows", ()):
        return (
            "tables of n-grams (model.ngram_rows) are looked up by ids, which change; only a model that was trained with "
            "--set 'model.ngram_rows=[]' grows"
        )
    return ""


def check_can_grow(config: ModelConfig) -> None:
    """Refuse a model whose other numbers depend on its vocabulary, too."""
    if why := why_it_cannot_grow(config):
        raise ConfigError(f"--grow: {why}; leave --grow out")


def with_rows(model: SequenceModel, origins: Tensor) -> SequenceModel:
    """Return a model of another vocabulary, whose new tokens begin as the mean of the old ones.

    Every table of a row per token, (V, …), becomes one of W rows: x'_w = x_{origin(w)}, or mean_v x_v where w is new. All else
    stays, so the scores of old tokens after old tokens do, too.

    Args:
        model: without adapters.
        origins: int64 (W,), for each new id the old one, or -1.
    """
    check_can_grow(model.config)
    config = type(model.config)(**{**model.config.model_dump(), "vocab_size": len(origins)})
    grown, old = make_model(config), model.state_dict()
    for name, tensor in grown.state_dict().items():
        same = old[name]
        tensor.copy_(same if same.shape == tensor.shape else torch.cat([same, same.mean(0, keepdim=True)])[origins])
    return grown

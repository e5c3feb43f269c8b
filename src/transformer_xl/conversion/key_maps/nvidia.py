"""NVIDIA's PyTorch models (DeepLearningExamples, `PyTorch/LanguageModeling/Transformer-XL/pytorch`): settings and names.

Like the authors', except for names in `crit`, one key more with `same_length`, and tables of positions as wide as the model.
"""

from collections.abc import Mapping
from typing import Any

from transformer_xl.config.model import TransformerXLConfig
from transformer_xl.conversion.key_maps import authors
from transformer_xl.conversion.key_maps.entries import KeyMap, Sizes
from transformer_xl.conversion.key_maps.pytorch import Names, attention_names, positions, shared_entries

_NAMES = Names(
    weights="crit.out_layers_weights.{i}", biases="crit.out_layers_biases.{i}", shared_projections="crit.shared_out_projs.{i}"
)


def key_map(config: TransformerXLConfig) -> KeyMap:
    """Return the table of a model's tensors."""
    sizes, foreign = Sizes(config), attention_names(config)
    entries = [*shared_entries(sizes, _NAMES), *positions(sizes, {**foreign.model, **foreign.nvidia})]
    return KeyMap(tuple(entries), ignored=("pos_emb.inv_freq",))


def config_of(flags: Mapping[str, Any]) -> TransformerXLConfig:
    """Translate the `model_config` of a checkpoint."""
    config = authors.config_of(flags)
    return config.model_copy(update={"same_length_besides_self": True})

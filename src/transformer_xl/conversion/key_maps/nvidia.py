"""NVIDIA's PyTorch models (DeepLearningExamples, `PyTorch/LanguageModeling/Transformer-XL/pytorch`): settings and names.

As the authors', but for the names in `crit`, one key more with `same_length`, and tables of positions as wide as the model.
"""

from collections.abc import Mapping
from typing import Any

from transformer_xl.conversion.key_maps import authors
from transformer_xl.conversion.key_maps.entries import Entry, KeyMap, Part
from transformer_xl.conversion.key_maps.layout import Layout
from transformer_xl.conversion.key_maps.pytorch import embedding, layers, positions, softmax
from transformer_xl.model_config import AttentionKind, TransformerXLConfig


def key_map(config: TransformerXLConfig) -> KeyMap:
    """Return the table of a model's tensors."""
    layout = Layout.of(config)
    projections = [(f"crit.shared_out_projs.{i}",) for i in range(len(layout.sizes))]
    where = positions(layout)
    if layout.attention == AttentionKind.AL_RFOU:
        where = [Entry(("r_emb",), (Part("r_emb", (layout.n_layer, layout.max_klen, layout.d_model)),))]
    entries = [
        *embedding(layout, prefix="", vector_aliases=[], projection_aliases=projections),
        *layers(layout, prefix=""),
        *where,
        *softmax(
            layout,
            vectors="crit.out_layers_weights.{i}",
            biases="crit.out_layers_biases.{i}",
            projections="crit.out_projs.{i}",
            reversed_tails=True,
        ),
    ]
    return KeyMap(tuple(entries), ignored=("pos_emb.inv_freq",))


def config_of(flags: Mapping[str, Any]) -> TransformerXLConfig:
    """Translate the `model_config` of a checkpoint.

    Raises:
        ConfigError: values that cannot work.
    """
    config = authors.config_of(flags)
    return config.model_copy(update={"same_length_besides_self": True})

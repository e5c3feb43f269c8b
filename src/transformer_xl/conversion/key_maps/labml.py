"""labml's annotated Transformer-XL (`labml_nn/transformers/xl`): settings, names, and two biases that no model here has.

Its scores are q·k + u·k + q·r + b, with a table of r and b for each layer, so it is `attention = "shaw"` with pre-norm and a
final norm. The tables have 2P rows; row P is distance 0, row 1 the farthest, and nothing reads the others. Its embeddings are
not scaled. Its maps of values and of attention's output have biases; `without_biases` says where they go.
"""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from transformer_xl.config.model import TransformerXLConfig
from transformer_xl.conversion.key_maps.entries import Entry, KeyMap, Part, Sizes, per_layer
from transformer_xl.errors import CheckpointError, ConfigError

EMBEDDING = "src_embed.weight"
_LAYER = "transformer.layers.{i}."
_FIRST = "transformer.layers.0."
_OF_LAYERS = {
    "feed_forward.layer_norm.weight": [("norm_ff.weight", "D")],
    "feed_forward.layer_norm.bias": [("norm_ff.bias", "D")],
    "feed_forward.inner.weight": [("feed_forward.layer1.weight", "F D")],
    "feed_forward.inner.bias": [("feed_forward.layer1.bias", "F")],
    "feed_forward.outer.weight": [("feed_forward.layer2.weight", "D F")],
    "feed_forward.outer.bias": [("feed_forward.layer2.bias", "D")],
}
_ATTENTION = ("layer_norm.weight", "layer_norm.bias", "qkv_net.weight", "o_net.weight")
_OF_ATTENTION = (
    *(("norm_self_attn.weight", "D"), ("norm_self_attn.bias", "D")),
    *((f"self_attn.{name}.linear.weight", "H D") for name in ("query", "key", "value")),
    *(("self_attn.output.weight", "D H"), ("self_attn.value.linear.bias", "H"), ("self_attn.output.bias", "D")),
)
_TABLES = {"r_emb": ("key_pos_embeddings", "n d"), "r_bias": ("key_pos_bias", "n")}
_WHOLE = {
    "final_norm.weight": ("transformer.norm.weight", "D"),
    "final_norm.bias": ("transformer.norm.bias", "D"),
    "softmax.weight": ("generator.weight", "V D"),
    "softmax.bias": ("generator.bias", "V"),
}
_SMALLEST = 1e-3
"""The least weight of a norm that is divided by, and the largest error of a solution, relative to what is solved for."""


def config_of(shapes: Mapping[str, tuple[int, ...]]) -> TransformerXLConfig:
    """Tell the settings from the shapes of tensors; only the length of memory is not among them."""

    def sizes(name: str, n: int) -> tuple[int, ...]:
        shape = shapes.get(name)
        if shape is None or len(shape) != n:
            raise ConfigError(f"tensor '{name}' of {n} dimensions is missing, which every Transformer-XL of labml has")
        return shape

    vocab_size, d_model = sizes(EMBEDDING, 2)
    n_row, n_head, d_head = sizes(f"{_FIRST}self_attn.key_pos_embeddings", 3)
    return TransformerXLConfig(
        attention="shaw",
        vocab_size=vocab_size,
        n_layer=len({name.split(".")[2] for name in shapes if name.startswith("transformer.layers.")}),
        n_head=n_head,
        d_head=d_head,
        d_model=d_model,
        d_inner=sizes(f"{_FIRST}feed_forward.layer1.bias", 1)[0],
        max_klen=n_row // 2,
        pre_lnorm=True,
        final_norm=True,
        tie_weight=False,
        dropout=0.0,
    )


def notes_of(config: TransformerXLConfig) -> list[str]:
    """Return what users should know of a converted model."""
    return [
        "biases of values and of attention's outputs are worked into the norm and the maps before them; it computes the same"
    ]


def key_map(config: TransformerXLConfig) -> KeyMap:
    """Return the table of a model's tensors."""
    sizes = Sizes(config)
    layers = [_LAYER.format(i=i) for i in range(config.n_layer)]
    entries = per_layer(sizes, _OF_LAYERS, _LAYER)
    for i, layer in enumerate(layers):
        native = tuple(f"layers.{i}.attention.{name}" for name in _ATTENTION)
        parts = tuple(Part(layer + name, sizes.shape(letters)) for name, letters in _OF_ATTENTION)
        entries.append(Entry(native, parts, compute=partial(without_biases, layer)))
    n_row = sizes.shape("K")[0]
    for own, (name, letters) in _TABLES.items():
        parts = tuple(Part(f"{layer}self_attn.{name}", (2 * n_row, *sizes.shape(letters))) for layer in layers)
        entries.append(Entry((own,), parts, compute=lambda tables: [table[1 : n_row + 1] for table in tables]))
    u = tuple(Part(f"{layer}self_attn.query_pos_bias", sizes.shape("n d")) for layer in layers)
    entries.append(Entry(("r_w_bias",), u))
    scale = config.d_model**-0.5  # ours multiplies by its inverse
    embedding = Part(EMBEDDING, sizes.shape("V D"))
    entries.append(Entry(("embedding.weight",), (embedding,), compute=lambda tables: [table * scale for table in tables]))
    entries += [Entry((own,), (Part(name, sizes.shape(letters)),)) for own, (name, letters) in _WHOLE.items()]
    return KeyMap(tuple(entries))


def without_biases(layer: str, tensors: list[Tensor]) -> list[Tensor]:
    """Return the norm and the maps of an attention that computes the same without biases.

    The normalized x̂ sums to zero, so of z = γ·x̂ + β the sum over z/γ is a constant, whatever x is. β is shifted along γ until
    that constant is D. Then each map W can add any constant vector a: W z + a = (W + a/D ⊗ 1/γ) z. Queries and keys take back
    what the shift added to them. Values take it back and add their bias, and what becomes the outputs' bias: weights of
    attention sum to one, so a constant of values arrives whole.

    Args:
        layer: prefix of the names of its tensors, for messages.
        tensors: as listed in `_OF_ATTENTION`.

    Returns:
        Weight and bias of the norm, the joined maps of queries, keys and values, and the map of outputs; as they are if both
        biases are zeros.
    """
    dtype = tensors[0].dtype
    gamma, beta, w_q, w_k, w_v, w_o, bias_v, bias_o = (tensor.double() for tensor in tensors)
    maps = torch.cat([w_q, w_k, w_v])
    if not bias_v.any() and not bias_o.any():
        return [tensor.to(dtype) for tensor in (gamma, beta, maps, w_o)]
    if gamma.abs().min() < _SMALLEST:
        raise CheckpointError(
            f"'{layer}norm_self_attn.weight' is {gamma.abs().min():.1e} somewhere, too near to 0 to work the biases "
            f"'{layer}self_attn.value.linear.bias' and '{layer}self_attn.output.bias' in, which no model here has"
        )
    before_o = torch.linalg.lstsq(w_o, bias_o.unsqueeze(1), driver="gelsd").solution.squeeze(1)
    if (w_o @ before_o - bias_o).abs().max() > _SMALLEST**2 * bias_o.abs().max():
        raise CheckpointError(
            f"'{layer}self_attn.output.bias' is out of reach of '{layer}self_attn.output.weight'; no model here has such a bias"
        )
    D = len(beta)
    shift = (1 - (beta / gamma).mean()) * gamma
    added = torch.cat([torch.zeros(2 * len(bias_v), dtype=torch.float64), bias_v + before_o]) - maps @ shift
    return [tensor.to(dtype) for tensor in (gamma, beta + shift, maps + torch.outer(added / D, 1 / gamma), w_o)]

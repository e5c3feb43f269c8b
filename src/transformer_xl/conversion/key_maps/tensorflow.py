"""The authors' TensorFlow models (`tf/model.py` at 44781ed): names, and the settings that follow from shapes.

A checkpoint holds no settings. The user must say how long the memory was, whether distances were clamped, and whether all
queries saw equally many keys. Layer norms add 1e-12. A stream begins after `mem_len` zero vectors that the model attends to.
With `same_length` a query sees one key more than in PyTorch. Matrices are transposed: (in, out).
"""

import itertools
import re
from collections.abc import Iterator, Mapping

from transformer_xl.config.model import TransformerXLConfig
from transformer_xl.conversion.key_maps.entries import Entry, KeyMap, Part, Shape, Sizes, per_layer
from transformer_xl.errors import CheckpointError

_ROOT = "transformer/"
_IGNORED = ("global_step", "beta[12]_power", r".*/Adam(_1)?", r".*/ExponentialMovingAverage")
_LAYER = {
    "attention.qkv_net.weight": (("rel_attn/qkv/kernel", "D 3H"),),
    "attention.r_net.weight": (("rel_attn/r/kernel", "D H"),),
    "attention.o_net.weight": (("rel_attn/o/kernel", "H D"),),
    "attention.layer_norm.weight": (("rel_attn/LayerNorm/gamma", "D"),),
    "attention.layer_norm.bias": (("rel_attn/LayerNorm/beta", "D"),),
    "feed_forward.inner.weight": (("ff/layer_1/kernel", "D F"),),
    "feed_forward.inner.bias": (("ff/layer_1/bias", "F"),),
    "feed_forward.outer.weight": (("ff/layer_2/kernel", "F D"),),
    "feed_forward.outer.bias": (("ff/layer_2/bias", "D"),),
    "feed_forward.layer_norm.weight": (("ff/LayerNorm/gamma", "D"),),
    "feed_forward.layer_norm.bias": (("ff/LayerNorm/beta", "D"),),
}


def key_map(config: TransformerXLConfig) -> KeyMap:
    """Return the table of a model's tensors."""
    sizes = Sizes(config)
    layers = per_layer(sizes, _LAYER, _ROOT + "layer_{i}/", transposed=True)
    entries = [*_embedding(sizes), *layers, *_softmax(sizes)]
    shape = sizes.shape("L n d" if config.untie_r else "n d")
    entries += [Entry((name,), (Part(_ROOT + name, shape),)) for name in ("r_w_bias", "r_r_bias")]
    return KeyMap(tuple(entries), _IGNORED)


def config_of(shapes: Mapping[str, Shape], origin: str) -> TransformerXLConfig:
    """Derive settings from the shapes of all tensors; `mem_len`, `clamp_len` and `same_length` keep their defaults."""
    tables = _shapes_of(shapes, r"adaptive_embed/(?:cutoff_(\d+)/)?lookup_table", 2, origin)
    (d_model, _), *_ = _shapes_of(shapes, r"layer_(\d+)/rel_attn/qkv/kernel", 2, origin)
    n_layer = len(_shapes_of(shapes, r"layer_(\d+)/rel_attn/qkv/kernel", 2, origin))
    (_, d_inner), *_ = _shapes_of(shapes, r"layer_(\d+)/ff/layer_1/kernel", 2, origin)
    bias = shapes.get(f"{_ROOT}r_w_bias", ())
    if len(bias) not in (2, 3):
        raise CheckpointError(f"tensor '{_ROOT}r_w_bias' of '{origin}' must have 2 or 3 dimensions, not shape {tuple(bias)}")
    sizes = [shape[0] for shape in _shapes_of(shapes, r"adaptive_softmax/(?:cutoff_(\d+)/b|bias)", 1, origin)]
    widths = [shape[1] for shape in tables]
    one_table = f"{_ROOT}adaptive_embed/lookup_table" in shapes
    projects = [f"{_ROOT}adaptive_embed/cutoff_{i}/proj_W" in shapes for i in range(len(widths))]
    div_val = 1 if one_table else 2
    if not one_table and len(widths) > 1:  # the smallest factor that gives the second width; a third allows no other
        div_val = max(2, widths[0] // (widths[1] + 1) + 1)
    owns = [f"{_ROOT}adaptive_softmax/cutoff_{i}/proj" in shapes for i in range(len(sizes))]
    return TransformerXLConfig(
        vocab_size=sum(sizes),
        n_layer=n_layer,
        d_model=d_model,
        n_head=bias[-2],
        d_head=bias[-1],
        d_inner=d_inner,
        d_embed=widths[0],
        cutoffs=tuple(itertools.accumulate(sizes))[:-1],
        div_val=div_val,
        tie_projs=tuple(not own for own in owns),
        proj_same_dim=all(has for has, width in zip(projects, widths, strict=True) if width == d_model),
        untie_r=len(bias) == 3,
        zero_first_memory=True,
        same_length_besides_self=True,
        layer_norm_epsilon=1e-12,
    )


def _shapes_of(shapes: Mapping[str, Shape], pattern: str, n_dim: int, origin: str) -> list[Shape]:
    """Return the shapes of the tensors whose names match a pattern, in the order of the number in it (0, 1, …)."""
    numbered = {}
    for name, shape in shapes.items():
        found = re.fullmatch(_ROOT + pattern, name)
        if found and len(shape) == n_dim and min(shape, default=0) > 0:
            numbered[int(found[1] or 0)] = shape
    if sorted(numbered) != list(range(len(numbered))) or not numbered:
        raise CheckpointError(
            f"'{origin}' is not a checkpoint of a Transformer-XL: no complete set of tensors '{_ROOT}{pattern}'"
        )
    return [numbered[i] for i in range(len(numbered))]


def _embedding(sizes: Sizes[TransformerXLConfig]) -> Iterator[Entry]:
    for i, size in enumerate(sizes.tables):
        scope, table, projection = f"{_ROOT}adaptive_embed/cutoff_{i}/", f"embedding.tables.{i}", f"embedding.projections.{i}"
        if sizes.one_table:
            scope, table, projection = f"{_ROOT}adaptive_embed/", "embedding.weight", "embedding.projection.weight"
        yield Entry((table,), (Part(f"{scope}lookup_table", (size, sizes.clusters.widths[i])),))
        if sizes.clusters.projected[i]:
            yield Entry(
                (projection,), (Part(f"{scope}proj_W", (sizes.clusters.widths[i], sizes.config.d_model)),), "transposed"
            )


def _softmax(sizes: Sizes[TransformerXLConfig]) -> Iterator[Entry]:
    scope, n_tail = f"{_ROOT}adaptive_softmax/", len(sizes.clusters.sizes) - 1
    if sizes.plain:
        yield Entry(("softmax.bias",), (Part(f"{scope}bias", sizes.clusters.sizes),))
        return
    biases = [Part(f"{scope}cutoff_{i}/b", (size,)) for i, size in enumerate(sizes.clusters.sizes)]
    if sizes.one_table:
        yield Entry(("softmax.bias",), tuple(biases))
    else:
        yield from (Entry((f"softmax.biases.{i}",), (part,)) for i, part in enumerate(biases))
    for i, width in enumerate(sizes.clusters.widths):
        if sizes.clusters.projected[i] and not sizes.config.tied_projections[i]:
            part = Part(f"{scope}cutoff_{i}/proj", (width, sizes.config.d_model))
            yield Entry((f"softmax.projections.{i}",), (part,), "transposed")
    if n_tail:
        yield Entry(("softmax.cluster_weight",), (Part(f"{scope}cutoff_0/cluster_W", (n_tail, sizes.clusters.widths[0])),))
        yield Entry(("softmax.cluster_bias",), (Part(f"{scope}cutoff_0/cluster_b", (n_tail,)),))

"""What the three PyTorch formats share: the authors' module names, which Hugging Face and NVIDIA kept."""

from transformer_xl.conversion.key_maps.entries import Entry, Part
from transformer_xl.conversion.key_maps.layout import Layout
from transformer_xl.model_config import AttentionKind


def embedding(
    layout: Layout, *, prefix: str, vector_aliases: list[str], projection_aliases: list[tuple[str, ...]]
) -> list[Entry]:
    """Return the entries of `word_emb`.

    Args:
        layout: sizes.
        prefix: of the model's names.
        vector_aliases: a pattern per further name of table `{i}`.
        projection_aliases: per cluster, further names of its projection.
    """
    D = layout.d_model
    tables = [layout.vocab_size] if layout.one_table else layout.sizes
    entries = []
    for i, size in enumerate(tables):
        native = "embedding.weight" if layout.one_table else f"embedding.tables.{i}"
        aliases = tuple(pattern.format(i=i) for pattern in vector_aliases)
        part = Part(f"{prefix}word_emb.emb_layers.{i}.weight", (size, layout.widths[i]), aliases)
        entries.append(Entry((native,), (part,)))
        if layout.projected[i]:
            native = "embedding.projection.weight" if layout.one_table else f"embedding.projections.{i}"
            part = Part(f"{prefix}word_emb.emb_projs.{i}", (D, layout.widths[i]), projection_aliases[i])
            entries.append(Entry((native,), (part,)))
    return entries


def layers(layout: Layout, *, prefix: str) -> list[Entry]:
    """Return the entries of `layers`."""
    D, heads = layout.d_model, layout.heads
    entries = []
    for i in range(layout.n_layer):
        ours, theirs = f"layers.{i}", f"{prefix}layers.{i}"
        if layout.attention in (AttentionKind.TRANSFORMER_XL, AttentionKind.SHAW):
            qkv = (Part(f"{theirs}.dec_attn.qkv_net.weight", (3 * heads, D)),)
        else:
            q, kv = f"{theirs}.dec_attn.q_net.weight", f"{theirs}.dec_attn.kv_net.weight"
            qkv = (Part(q, (heads, D)), Part(kv, (2 * heads, D)))
        entries.append(Entry((f"{ours}.attention.qkv_net.weight",), qkv))
        same = {
            "attention.o_net.weight": ("dec_attn.o_net.weight", (D, heads)),
            "attention.layer_norm.weight": ("dec_attn.layer_norm.weight", (D,)),
            "attention.layer_norm.bias": ("dec_attn.layer_norm.bias", (D,)),
            "feed_forward.inner.weight": ("pos_ff.CoreNet.0.weight", (layout.d_inner, D)),
            "feed_forward.inner.bias": ("pos_ff.CoreNet.0.bias", (layout.d_inner,)),
            "feed_forward.outer.weight": ("pos_ff.CoreNet.3.weight", (D, layout.d_inner)),
            "feed_forward.outer.bias": ("pos_ff.CoreNet.3.bias", (D,)),
            "feed_forward.layer_norm.weight": ("pos_ff.layer_norm.weight", (D,)),
            "feed_forward.layer_norm.bias": ("pos_ff.layer_norm.bias", (D,)),
        }
        if layout.attention == AttentionKind.TRANSFORMER_XL:
            same["attention.r_net.weight"] = ("dec_attn.r_net.weight", (heads, D))
        entries += [Entry((f"{ours}.{a}",), (Part(f"{theirs}.{b}", shape),)) for a, (b, shape) in same.items()]
    return entries


def softmax(layout: Layout, *, vectors: str, biases: str, projections: str, reversed_tails: bool) -> list[Entry]:
    """Return the entries of `crit`: what the softmax does not borrow from the embedding.

    Args:
        layout: sizes.
        vectors: pattern of the name of output table `{i}`.
        biases: pattern of the name of its biases.
        projections: pattern of the name of its projection.
        reversed_tails: tail i is the i-th class of the head from the end, not from the beginning.
    """
    D, n_cluster = layout.d_model, len(layout.sizes)
    native_weights = tuple(f"softmax.weights.{i}" for i in range(n_cluster))
    native_biases = tuple(f"softmax.biases.{i}" for i in range(n_cluster))
    if layout.plain:
        native_weights, native_biases = ("softmax.weight",), ("softmax.bias",)
    entries = []
    if layout.one_table:  # one foreign table over all clusters
        V = layout.vocab_size
        entries.append(Entry(native_biases, (Part(biases.format(i=0), (V,)),)))
        if not layout.tied:
            entries.append(Entry(native_weights, (Part(vectors.format(i=0), (V, layout.widths[0])),)))
    else:
        for i, (size, width) in enumerate(zip(layout.sizes, layout.widths, strict=True)):
            entries.append(Entry((native_biases[i],), (Part(biases.format(i=i), (size,)),)))
            if not layout.tied:
                entries.append(Entry((native_weights[i],), (Part(vectors.format(i=i), (size, width)),)))
    for i, width in enumerate(layout.widths):
        if layout.projected[i] and not layout.tied_projections[i]:
            part = Part(projections.format(i=i), (D, width))
            if layout.plain:  # ours is a linear map from states to vectors, theirs a matrix for the other direction
                entries.append(Entry(("softmax.projection.weight",), (part,), "transposed"))
            else:
                entries.append(Entry((f"softmax.projections.{i}",), (part,)))
    if layout.n_tail:
        change = "reversed" if reversed_tails else ""
        weight = Part("crit.cluster_weight", (layout.n_tail, layout.widths[0]))
        entries.append(Entry(("softmax.cluster_weight",), (weight,), change))
        entries.append(Entry(("softmax.cluster_bias",), (Part("crit.cluster_bias", (layout.n_tail,)),), change))
    return entries


def positions(layout: Layout) -> list[Entry]:
    """Return the entries of the position parameters that belong to the whole model."""
    n, heads = layout.n_layer, (layout.n_head, layout.d_head)
    match layout.attention:
        case AttentionKind.TRANSFORMER_XL:
            shapes = {"r_w_bias": heads, "r_r_bias": heads}
        case AttentionKind.SHAW:
            shapes = {
                "r_emb": (n, layout.max_klen, *heads),
                "r_bias": (n, layout.max_klen, layout.n_head),
                "r_w_bias": (n, *heads),
            }
        case AttentionKind.AL_RFOU:
            shapes = {"r_emb": (n, layout.max_klen, *heads)}
        case _:
            shapes = {}
    return [Entry((name,), (Part(name, shape),)) for name, shape in shapes.items()]


def shared_projections(layout: Layout, pattern: str) -> list[tuple[str, ...]]:
    """Return, per table of the embedding, the names that the softmax has for its projection.

    With one table, every cluster that shares shares the first projection.
    """
    names = [pattern.format(i=i) if tied else None for i, tied in enumerate(layout.tied_projections)]
    if layout.one_table:
        return [tuple(name for name in names if name)]
    return [(name,) if name else () for name in names]

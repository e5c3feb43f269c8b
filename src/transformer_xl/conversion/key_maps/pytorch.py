"""What the three PyTorch formats share, because Hugging Face and NVIDIA kept the authors' module names."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field

from transformer_xl.config.model import TransformerXLConfig
from transformer_xl.conversion.key_maps.entries import Entry, Part, Sizes, per_layer
from transformer_xl.conversion.values import Clusters, Flag, Values
from transformer_xl.errors import ConfigError


@dataclass(frozen=True)
class Names:
    """Names that differ between the three programs; `{i}` is the cluster."""

    prefix: str = ""  # of all names outside of the softmax
    weights: str = "crit.out_layers.{i}.weight"
    biases: str = "crit.out_layers.{i}.bias"
    projections: str = "crit.out_projs.{i}"
    shared_projections: str | None = None  # None: shared projections have the names of softmax and embedding
    tails_reversed: bool = True  # the last class of the head is the first tail


@dataclass(frozen=True)
class AttentionNames:
    """The names of a kind of attention and its parameters in the authors' code and the programs derived from it.

    Shapes are written in letters: L layers, K max_klen, n heads, d their width, H = n x d, D d_model; "3H" is 3 times H.
    """

    attn_type: int  # the authors' number of the kind
    # for names in `layers.{i}.attention.` here, the names and shapes in `layers.{i}.dec_attn.` there; several of theirs, joined
    # in this order, are one of ours
    layers: Mapping[str, tuple[tuple[str, str], ...]]
    # parameters of the whole model, with the same names here, and their shapes there
    model: Mapping[str, str] = field(default_factory=dict)
    nvidia: Mapping[str, str] = field(default_factory=dict)  # shapes that differ in NVIDIA's code
    begins_memory: bool = True  # the authors' code can begin a memory with it

    @property
    def has_table(self) -> bool:
        """Whether positions are learned: there are K of them."""
        return "r_emb" in self.model


_ONE_MATRIX = {"qkv_net.weight": (("qkv_net.weight", "3H D"),)}
_TWO_MATRICES = {"qkv_net.weight": (("q_net.weight", "H D"), ("kv_net.weight", "2H D"))}

ATTENTION = {
    "transformer_xl": AttentionNames(
        0, {**_ONE_MATRIX, "r_net.weight": (("r_net.weight", "H D"),)}, {"r_w_bias": "n d", "r_r_bias": "n d"}
    ),
    "shaw": AttentionNames(1, _ONE_MATRIX, {"r_emb": "L K n d", "r_bias": "L K n", "r_w_bias": "L n d"}),
    "vaswani": AttentionNames(2, _TWO_MATRICES, begins_memory=False),
    "al_rfou": AttentionNames(3, _TWO_MATRICES, {"r_emb": "L K n d"}, {"r_emb": "L K D"}),
}
"""The kinds of attention that other programs have, too, by their names here."""

_LAYER = {
    "attention.o_net.weight": (("dec_attn.o_net.weight", "D H"),),
    "attention.layer_norm.weight": (("dec_attn.layer_norm.weight", "D"),),
    "attention.layer_norm.bias": (("dec_attn.layer_norm.bias", "D"),),
    "feed_forward.inner.weight": (("pos_ff.CoreNet.0.weight", "F D"),),
    "feed_forward.inner.bias": (("pos_ff.CoreNet.0.bias", "F"),),
    "feed_forward.outer.weight": (("pos_ff.CoreNet.3.weight", "D F"),),
    "feed_forward.outer.bias": (("pos_ff.CoreNet.3.bias", "D"),),
    "feed_forward.layer_norm.weight": (("pos_ff.layer_norm.weight", "D"),),
    "feed_forward.layer_norm.bias": (("pos_ff.layer_norm.bias", "D"),),
}


def shared_entries(sizes: Sizes[TransformerXLConfig], names: Names) -> list[Entry]:
    """Return all entries of a model except those of `positions`."""
    attention = {
        f"attention.{ours}": tuple((f"dec_attn.{name}", letters) for name, letters in theirs)
        for ours, theirs in attention_names(sizes.config).layers.items()
    }
    layers = per_layer(sizes, {**attention, **_LAYER}, names.prefix + "layers.{i}.")
    return [*_embedding(sizes, names), *layers, *_softmax(sizes, names)]


def attention_names(config: TransformerXLConfig) -> AttentionNames:
    """Return the names that the three programs give to the parameters of the model's attention."""
    if config.attention not in ATTENTION:
        raise ConfigError(f"attention ('{config.attention}') is a kind that no other program has; it cannot be converted")
    return ATTENTION[config.attention]


def positions(sizes: Sizes[TransformerXLConfig], shapes: Mapping[str, str]) -> list[Entry]:
    """Return the entries of position parameters that belong to the whole model, not to a layer."""
    return [Entry((name,), (Part(name, sizes.shape(letters)),)) for name, letters in shapes.items()]


def _embedding(sizes: Sizes[TransformerXLConfig], names: Names) -> Iterator[Entry]:
    tied = sizes.config.tied_projections
    for i, size in enumerate(sizes.tables):
        table, projection = f"embedding.tables.{i}", f"embedding.projections.{i}"
        sharing = [i] if tied[i] else []
        if sizes.one_table:  # all clusters that share a projection share this one
            table, projection = "embedding.weight", "embedding.projection.weight"
            sharing = [cluster for cluster, is_tied in enumerate(tied) if is_tied]
        further = (names.weights.format(i=i),) if sizes.config.tie_weight else ()
        projections = tuple(names.projections.format(i=cluster) for cluster in sharing)
        if names.shared_projections:
            further, projections = (), (names.shared_projections.format(i=i),)
        scope = f"{names.prefix}word_emb"
        yield Entry((table,), (Part(f"{scope}.emb_layers.{i}.weight", (size, sizes.clusters.widths[i]), further),))
        if sizes.clusters.projected[i]:
            shape = (sizes.config.d_model, sizes.clusters.widths[i])
            yield Entry((projection,), (Part(f"{scope}.emb_projs.{i}", shape, projections),))


def _softmax(sizes: Sizes[TransformerXLConfig], names: Names) -> Iterator[Entry]:
    """Yield the entries of `crit`, without what the softmax shares with the embedding."""
    n_cluster, tied = len(sizes.clusters.sizes), sizes.config.tied_projections
    for i, size in enumerate(sizes.tables):
        weight, bias = (f"softmax.weights.{i}", f"softmax.biases.{i}")
        if sizes.one_table:
            weight, bias = "softmax.weight", "softmax.bias"
        yield Entry((bias,), (Part(names.biases.format(i=i), (size,)),))
        if not sizes.config.tie_weight:
            yield Entry((weight,), (Part(names.weights.format(i=i), (size, sizes.clusters.widths[i])),))
    for i, width in enumerate(sizes.clusters.widths):
        if sizes.clusters.projected[i] and not tied[i]:
            part = Part(names.projections.format(i=i), (sizes.config.d_model, width))
            if sizes.plain:  # ours maps states to vectors, theirs is a matrix for the other direction
                yield Entry(("softmax.projection.weight",), (part,), "transposed")
            else:
                yield Entry((f"softmax.projections.{i}",), (part,))
    if n_cluster > 1:
        change = "reversed" if names.tails_reversed else ""
        for name, shape in (("cluster_weight", (n_cluster - 1, sizes.clusters.widths[0])), ("cluster_bias", (n_cluster - 1,))):
            yield Entry((f"softmax.{name}",), (Part(f"crit.{name}", shape),), change)


class SameValues(Values):
    """Settings with our names and meanings."""

    n_layer: int
    d_model: int
    n_head: int
    d_head: int
    d_inner: int
    d_embed: int
    div_val: int
    dropout: float
    dropatt: float
    pre_lnorm: Flag
    cutoffs: Clusters


class PyTorchValues(SameValues):
    """Settings that all three programs share."""

    clamp_len: int
    mem_len: int
    same_length: Flag
    tie_projs: Annotated[tuple[Flag, ...] | None, Field(strict=False)] = None

    def fields(self) -> dict[str, Any]:
        """Return them as fields of `TransformerXLConfig`. In a short list of shared projections the rest is false."""
        n_cluster = len(self.cutoffs) + 1
        return {name: getattr(self, name) for name in SameValues.model_fields} | {
            "mem_len": max(self.mem_len, 0),
            "clamp_len": self.clamp_len if self.clamp_len > 0 else None,
            "same_length": self.same_length and self.mem_len > 0,
            "tie_projs": (*(self.tie_projs or ()), *(False,) * n_cluster)[:n_cluster],
        }


def values_of(config: TransformerXLConfig) -> dict[str, Any]:
    """Return `PyTorchValues` of a model, for JSON."""
    return {name: getattr(config, name) for name in SameValues.model_fields} | {
        "d_embed": config.d_embed or config.d_model,
        "cutoffs": list(config.cutoffs),
        "mem_len": config.mem_len,
        "clamp_len": -1 if config.clamp_len is None else config.clamp_len,
        "same_length": config.same_length,
        "tie_projs": list(config.tied_projections),
    }

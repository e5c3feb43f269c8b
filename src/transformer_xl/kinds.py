"""The table of kinds of attention, as settings and others know it.

The code of a kind is imported when a model is built, so looking a kind up does not load torch. A kind of your own is a class of
blocks (see `model/attention/block.py`) and a line of this table, which you add with `register_attention`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from transformer_xl.errors import ConfigError


@dataclass(frozen=True)
class ForeignNames:
    """The names of an attention kind's parameters in the authors' PyTorch code and the programs derived from it.

    Shapes are written in letters: L layers, K max_klen, n heads, d their width, H = n x d, D d_model; "3H" is 3 times H.

    Attributes:
        attn_type: the authors' number of the kind.
        layers: for names in `layers.{i}.attention.` here, the names and shapes in `layers.{i}.dec_attn.` there; several of
            theirs, joined in this order, are one of ours.
        model: parameters of the whole model, with the same names here, and their shapes there.
        nvidia: shapes that differ in NVIDIA's code.
        begins_memory: the authors' code can begin a memory with it.
    """

    attn_type: int
    layers: Mapping[str, tuple[tuple[str, str], ...]]
    model: Mapping[str, str] = field(default_factory=dict)
    nvidia: Mapping[str, str] = field(default_factory=dict)
    begins_memory: bool = True


@dataclass(frozen=True)
class AttentionKind:
    """A kind of attention, which is a way for a query to know where a key stands: a line of the table of kinds.

    Attributes:
        name: its name in settings.
        block: the place of its class, `module:Class`; a subclass of `AttentionBlock`.
        keeps_keys: keys and values of a position stay the same while the text goes on, and the class has a method `frozen`.
        counts_from_end: positions count from the end of the segment that is read.
        learns_positions: it has a learned table of positions, of `max_klen` rows.
        compares_distances: queries are also multiplied by a key of each distance, which the counts of operations must know.
        adds_positions_to_layers: learned positions are added to memory and segment before every layer.
        has_backends: an attention backend computes it, see `choose_backend`.
        heads_fill_model: n_head x d_head must be d_model.
        turns_pairs: queries and keys are turned by their positions, pair by pair, so heads have an even width and all distances
            are told apart.
        biases_heads: each head adds a number of its own to the score of a distance.
        foreign: its parameters in other programs; None: no other program has it.
    """

    name: str
    block: str
    keeps_keys: bool = False
    counts_from_end: bool = False
    learns_positions: bool = False
    compares_distances: bool = False
    adds_positions_to_layers: bool = False
    has_backends: bool = False
    heads_fill_model: bool = False
    turns_pairs: bool = False
    biases_heads: bool = False
    foreign: ForeignNames | None = None

    @property
    def by_content(self) -> bool:
        """Whether `content_attention` computes it: by batched products in training on a CPU, else by PyTorch's own function."""
        return self.turns_pairs or self.biases_heads


_PACKAGE = "transformer_xl.model.attention"
_ONE_MATRIX = {"qkv_net.weight": (("qkv_net.weight", "3H D"),)}
_TWO_MATRICES = {"qkv_net.weight": (("q_net.weight", "H D"), ("kv_net.weight", "2H D"))}

ATTENTION: dict[str, AttentionKind] = {
    kind.name: kind
    for kind in (
        AttentionKind(
            "transformer_xl",
            f"{_PACKAGE}.relative:RelativeAttention",
            keeps_keys=True,
            compares_distances=True,
            has_backends=True,
            foreign=ForeignNames(
                0, {**_ONE_MATRIX, "r_net.weight": (("r_net.weight", "H D"),)}, {"r_w_bias": "n d", "r_r_bias": "n d"}
            ),
        ),
        AttentionKind(
            "shaw",
            f"{_PACKAGE}.shaw:ShawAttention",
            keeps_keys=True,
            learns_positions=True,
            compares_distances=True,
            foreign=ForeignNames(1, _ONE_MATRIX, {"r_emb": "L K n d", "r_bias": "L K n", "r_w_bias": "L n d"}),
        ),
        AttentionKind(
            "vaswani",
            f"{_PACKAGE}.absolute:VaswaniAttention",
            counts_from_end=True,
            foreign=ForeignNames(2, _TWO_MATRICES, begins_memory=False),
        ),
        AttentionKind(
            "al_rfou",
            f"{_PACKAGE}.absolute:AlRfouAttention",
            counts_from_end=True,
            learns_positions=True,
            adds_positions_to_layers=True,
            heads_fill_model=True,
            foreign=ForeignNames(3, _TWO_MATRICES, {"r_emb": "L K n d"}, {"r_emb": "L K D"}),
        ),
        AttentionKind("rotary", f"{_PACKAGE}.rotary:RotaryAttention", keeps_keys=True, turns_pairs=True),
        AttentionKind("alibi", f"{_PACKAGE}.alibi:AlibiAttention", keeps_keys=True, biases_heads=True),
    )
}
"""All kinds by their names: the authors' in the order of their `attn_type`, later ones, then those that were registered."""


def import_class(place: str) -> Any:
    """Return the class at `module:Class`, importing its module."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


def register_attention(kind: AttentionKind) -> None:
    """Add a kind of attention, so that settings may name it.

    Args:
        kind: its line of the table.

    Raises:
        ConfigError: another kind has that name.
    """
    if ATTENTION.setdefault(kind.name, kind) != kind:
        raise ConfigError(f"there is another kind of attention '{kind.name}' already; choose another name")

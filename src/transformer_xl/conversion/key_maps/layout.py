"""Sizes that the tables of all formats speak of, taken from a configuration."""

from dataclasses import dataclass
from typing import Self

from transformer_xl.model.adaptive import cluster_sizes, cluster_widths, is_projected
from transformer_xl.model_config import AttentionKind, TransformerXLConfig


@dataclass(frozen=True)
class Layout:
    """What a model's tensors look like.

    Attributes:
        n_layer, d_model, n_head, d_head, d_inner: as in the configuration.
        attention: kind of it.
        max_klen: rows of learned tables, or 0.
        untied_r: u and v per layer.
        sizes: ids per cluster, head first.
        widths: width of the vectors of each cluster.
        one_table: the embedding is one table over all clusters, with one projection.
        plain: one softmax over the whole vocabulary.
        projected: per cluster, whether vectors and states differ in width, or are projected all the same.
        tied: the softmax uses the embedding's vectors.
        tied_projections: per cluster, whether it uses the embedding's projection.
    """

    n_layer: int
    d_model: int
    n_head: int
    d_head: int
    d_inner: int
    attention: AttentionKind
    max_klen: int
    untied_r: bool
    sizes: tuple[int, ...]
    widths: tuple[int, ...]
    one_table: bool
    plain: bool
    projected: tuple[bool, ...]
    tied: bool
    tied_projections: tuple[bool, ...]

    @classmethod
    def of(cls, config: TransformerXLConfig) -> Self:
        """Take the layout from a configuration whose `vocab_size` is set."""
        assert config.vocab_size is not None
        sizes = cluster_sizes(config.vocab_size, config.cutoffs)
        widths = cluster_widths(len(sizes), d_embed=config.d_embed or config.d_model, div_val=config.div_val)
        projected = tuple(
            is_projected(width, d_model=config.d_model, div_val=config.div_val, proj_same_dim=config.proj_same_dim)
            for width in widths
        )
        return cls(
            n_layer=config.n_layer,
            d_model=config.d_model,
            n_head=config.n_head,
            d_head=config.d_head,
            d_inner=config.d_inner,
            attention=config.attention,
            max_klen=config.max_klen or 0,
            untied_r=config.untie_r,
            sizes=tuple(sizes),
            widths=tuple(widths),
            one_table=config.div_val == 1,
            plain=not config.cutoffs and config.div_val == 1,
            projected=projected,
            tied=config.tie_weight,
            tied_projections=config.tied_projections,
        )

    @property
    def heads(self) -> int:
        """Width of all heads together."""
        return self.n_head * self.d_head

    @property
    def vocab_size(self) -> int:
        """V."""
        return sum(self.sizes)

    @property
    def n_tail(self) -> int:
        """Number of tail clusters."""
        return len(self.sizes) - 1

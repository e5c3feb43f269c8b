"""Sizes that the tables of all formats speak of, taken from a configuration."""

from dataclasses import dataclass
from functools import cached_property

from transformer_xl.model.adaptive import cluster_sizes, cluster_widths, is_projected
from transformer_xl.model_config import TransformerXLConfig


@dataclass(frozen=True)
class Sizes:
    """What the tensors of a model look like; its `vocab_size` is set."""

    config: TransformerXLConfig

    @cached_property
    def clusters(self) -> tuple[int, ...]:
        """Tokens per cluster, head first."""
        assert self.config.vocab_size is not None
        return tuple(cluster_sizes(self.config.vocab_size, self.config.cutoffs))

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Width of the vectors of each cluster."""
        config = self.config
        return tuple(cluster_widths(len(self.clusters), d_embed=config.d_embed or config.d_model, div_val=config.div_val))

    @cached_property
    def projected(self) -> tuple[bool, ...]:
        """Per cluster, whether a projection stands between vectors and states; two of the same width may have one."""
        config = self.config
        given = {"d_model": config.d_model, "div_val": config.div_val, "proj_same_dim": config.proj_same_dim}
        return tuple(is_projected(width, **given) for width in self.widths)

    @property
    def one_table(self) -> bool:
        """The embedding is one table over all clusters, with one projection."""
        return self.config.div_val == 1

    @property
    def tables(self) -> tuple[int, ...]:
        """Tokens per table of the embedding."""
        return (sum(self.clusters),) if self.one_table else self.clusters

    @property
    def plain(self) -> bool:
        """There is one softmax over the whole vocabulary."""
        return self.one_table and not self.config.cutoffs

    def shape(self, letters: str) -> tuple[int, ...]:
        """Return a shape that a table writes in letters, with spaces between them; "3H" is three times H.

        L layers, K learned positions, n heads, d width of one, H width of all together, D states, F inner layer.
        """
        config = self.config
        known = {"L": config.n_layer, "K": config.max_klen or 0, "n": config.n_head, "d": config.d_head}
        known |= {"H": config.n_head * config.d_head, "D": config.d_model, "F": config.d_inner}
        return tuple(int(size[:-1] or 1) * known[size[-1]] for size in letters.split())

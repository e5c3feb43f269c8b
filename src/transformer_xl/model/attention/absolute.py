"""Attention by content alone, where positions were added to the states it reads: once (vaswani) or in every layer (al_rfou).

Positions count from the end of the segment, as in the authors' code: the last token has position 0. States are remembered with
their positions, and get new ones added in the next segment; the original does the same, because it adds them in place. The
original of vaswani fails on an empty memory; with NVIDIA's correction it has one, as here.

Reference: `MultiHeadAttn` (`attn_type` 2 and 3) of the authors' `pytorch/mem_transformer.py`; Vaswani et al. 2017, Al-Rfou et
al. 2018 (arXiv 1808.04444).

Shapes: S keys, D d_model.
"""

from collections.abc import Mapping

from torch import Tensor

from transformer_xl.config.model import TransformerXLConfig
from transformer_xl.errors import ConfigError
from transformer_xl.kernels.equation import Positions, sinusoids
from transformer_xl.model.attention.block import AttentionKind, Distances
from transformer_xl.model.attention.shaw import table_rows, table_size


class AbsoluteAttention(AttentionKind):
    """Attention by content over memory and segment."""

    counts_from_end = True
    normalizes_queries = False  # with pre_lnorm the original normalizes the input of keys and values, but not that of queries


class VaswaniAttention(AbsoluteAttention):
    """Sinusoids of positions are added once, to the embedding and to the memory of the first layer."""

    name = "vaswani"
    drops_positions = True

    @classmethod
    def positions(cls, config: TransformerXLConfig, learned: Mapping[str, Tensor], distances: Distances) -> list[Positions]:
        first = Positions(states=sinusoids(distances.limited, config.d_model, distances.dtype))
        return [first, *[Positions()] * (config.n_layer - 1)]


class AlRfouAttention(AbsoluteAttention):
    """Learned positions are added before every layer; each layer has its own."""

    name = "al_rfou"
    learns_positions = True

    @classmethod
    def check(cls, config: TransformerXLConfig) -> None:
        width = config.n_head * config.d_head
        if width != config.d_model:
            raise ConfigError(
                f"attention '{cls.name}' adds positions of width n_head x d_head ({width}) to states of width d_model "
                f"({config.d_model}); make them equal"
            )

    @classmethod
    def shapes(cls, config: TransformerXLConfig) -> dict[str, tuple[int, ...]]:
        return {"r_emb": (config.n_layer, table_size(config), config.n_head, config.d_head)}

    @classmethod
    def positions(cls, config: TransformerXLConfig, learned: Mapping[str, Tensor], distances: Distances) -> list[Positions]:
        r_LPD = learned["r_emb"].flatten(2)
        rows = table_rows(distances.tokens, n_row=r_LPD.shape[1], clamp_len=None)
        return [Positions(states=r_PD[rows]) for r_PD in r_LPD]

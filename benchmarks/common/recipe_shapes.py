"""The models that are trained on an accelerator: those of recipes, and how many rows fit."""

import math
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from transformer_xl.config.model import TransformerXLConfig
from transformer_xl.config.recipes import load_recipe
from transformer_xl.tools.flops import blueprint_of, count_pass
from transformer_xl.tools.plan import with_vocabulary

N_SEGMENT = 8


@dataclass(frozen=True)
class RecipeShape:
    """A model, and what it reads in one step.

    Attributes:
        recipe: whose model it is.
        rows: B.
        overrides: laid over the recipe.
        tgt_len: T; None: the recipe's.
        mem_len: M; None: the recipe's.
        flops_target: share of the rate of large matrix products that the best way shall reach; None: no target.
        peer_target: how many times faster than the peer the best way shall be; None: no target.
    """

    recipe: str
    rows: int
    overrides: tuple[str, ...] = ()
    tgt_len: int | None = None
    mem_len: int | None = None
    flops_target: float | None = None
    peer_target: float | None = None

    @property
    def T(self) -> int:  # noqa: N802
        return self.tgt_len or load_recipe(self.recipe).train.tgt_len

    @property
    def n_token(self) -> int:
        return self.rows * self.T

    def config(self) -> TransformerXLConfig:
        """Return the settings of the model."""
        changes = [*self.overrides, *([] if self.mem_len is None else [f"model.mem_len={self.mem_len}"])]
        return cast(TransformerXLConfig, with_vocabulary(load_recipe(self.recipe, changes))[0])

    def flops(self) -> float:
        """Count the operations of a step: forward and backward, whatever a backend computes again."""
        return self.n_token * count_pass(blueprint_of(self.config()), rows=self.rows, tgt_len=self.T).flops

    def segments(self, device: torch.device) -> list[Tensor]:
        """Draw segments (B, T + 1) of token ids; the k-th has a frequency proportional to 1/k, as words of a text have."""
        generator = torch.Generator().manual_seed(0)
        size = self.config().vocab_size or 1
        draws = torch.rand(N_SEGMENT, self.rows, self.T + 1, generator=generator, dtype=torch.float64)
        ranks = (draws * math.log(size + 1)).exp().long().clamp(1, size)
        return list((ranks - 1).to(device))

    def __str__(self) -> str:
        model = self.config()
        clusters = f" in clusters from {model.cutoffs}, div_val {model.div_val}" if model.cutoffs else ""
        return (
            f"{self.recipe}: {model.n_layer} layers / {model.d_model} / {model.n_head}x{model.d_head} / {model.d_inner}, "
            f"vocabulary {model.vocab_size:,}{clusters}, B={self.rows} T={self.T} M={model.mem_len}, "
            f"dropout {model.dropout}, dropatt {model.dropatt}"
        )


RECIPE_SHAPES = {
    "E": RecipeShape("enwik8-base", rows=32, overrides=("model.vocab_size=204",)),
    "W": RecipeShape("wt103-large", rows=16, flops_target=0.4),
    "N": RecipeShape("nvidia-wt103-base", rows=32, peer_target=2.5),
    "P": RecipeShape("ptb", rows=10),
    "S": RecipeShape("shakespeare-char", rows=32, overrides=("model.vocab_size=65",)),
    "tiny": RecipeShape(
        "nvidia-wt103-base",
        rows=2,
        overrides=(
            *("model.n_layer=2", "model.d_model=16", "model.n_head=2", "model.d_head=8", "model.d_inner=32"),
            *("model.vocab_size=50", "model.cutoffs=[10, 20]", "model.div_val=2"),
        ),
        tgt_len=8,
        mem_len=8,
    ),
}
"""E and W: the paper's 12-layer enwik8 and 18-layer WikiText-103 models; N: NVIDIA's 16-layer one, with the rows of one of its
8 GPUs; P and S: small ones, of Penn Treebank and Tiny Shakespeare; tiny: for tests of the benchmark."""

"""The neural cache: what followed similar states in the text read so far is likely to follow again; nothing is trained.

    p_cache(w)  ∝  Σ_i 1[w = x_{i+1}] exp(θ h_t · h_i / √D)        over the last n places i < t
    p(w)        =  (1 - λ) p_model(w) + λ p_cache(w)

h_i is the input of the softmax after the model has read x_i. Where nothing is kept yet, p is p_model.

Reference: Grave et al. 2016, "Improving Neural Language Models with a Continuous Cache", arXiv 1612.04426, section 3, equations
2 and 3. Known deviation: the product is divided by √D, so that one θ suits models of every width.

Shapes: B rows, T tokens of a segment, n places kept, D width of a state.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from transformer_xl.batch import NOT_SCORED
from transformer_xl.errors import ConfigError
from transformer_xl.model.room import check_room


@dataclass(frozen=True)
class Cache:
    """Settings of the neural cache of `evaluate`.

    Attributes:
        size: n, how many places are kept.
        weight: λ, the share of the cache in the prediction.
        theta: θ, how much more similar states count than others; 0 counts tokens.

    Raises:
        ConfigError: values out of their range.

    Example:
        >>> Cache(500).weight
        0.1
    """

    size: int = 2000
    weight: float = 0.1
    theta: float = 5.0

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError(f"size of a cache ({self.size}) must be at least 1; to have no cache, leave it out")
        if not 0 < self.weight < 1:
            raise ConfigError(f"weight of a cache ({self.weight:g}) must be between 0 and 1, such as 0.1")
        if not 0 <= self.theta < math.inf:
            raise ConfigError(f"theta of a cache ({self.theta:g}) must be a number of at least 0, such as 5")

    def as_dict(self) -> dict[str, float]:
        """Return the settings for JSON."""
        return {"size": self.size, "weight": self.weight, "theta": self.theta}


class CacheRows:
    """What rows of text keep for the cache: their last states and the tokens that followed. Rows know nothing of each other.

    Args:
        cache: settings.
        batch_size: B.
        d_model: D.
        tgt_len: the largest T.
        dtype: of the states, at least fp32.
        device: of the states.

    Attributes:
        h_BND: the last states, newest last.
        following: int64 (B, n), the token that followed each; -100 where nothing is kept yet.
    """

    def __init__(
        self, cache: Cache, batch_size: int, *, d_model: int, tgt_len: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.cache = cache
        n_bytes = 4 * batch_size * (cache.size + tgt_len) * (2 * d_model + 4 * tgt_len)
        check_room(n_bytes, device, f"a cache of size {cache.size:,} and batch_size {batch_size:,}")
        self.h_BND, self.following = self._empty(batch_size, d_model, dtype=dtype, device=device)

    def mix(self, nats_BT: Tensor, h_BTD: Tensor, labels: Tensor) -> Tensor:
        """Return the nats (B, T) of labels (B, T) with the cache, and keep the segment.

        Args:
            nats_BT: of the model alone; they stay where a label is -100 or nothing is kept.
            h_BTD: states of the segment.
            labels: the tokens that follow.
        """
        n_old = self.h_BND.shape[1]
        self._keep(h_BTD, labels)
        scores = h_BTD.shape[-1] ** -0.5 * self.cache.theta * h_BTD.to(self.h_BND.dtype) @ self.h_BND.mT
        is_kept = self.following != NOT_SCORED
        rank = is_kept.cumsum(1)  # of each place among those kept, from 1 on, so that padding takes no room
        n_before = (rank - is_kept.long())[:, n_old:, None]
        visible = is_kept[:, None] & (rank[:, None] <= n_before) & (rank[:, None] > n_before - self.cache.size)
        scores = scores.masked_fill(~visible, -torch.inf)
        same = scores.masked_fill(self.following[:, None] != labels[:, :, None], -torch.inf)
        cached = same.logsumexp(-1) - scores.logsumexp(-1)
        share = self.cache.weight
        mixed = -torch.logaddexp(math.log1p(-share) - nats_BT, math.log(share) + cached)
        self._forget()
        return torch.where((n_before[:, :, 0] > 0) & (labels != NOT_SCORED), mixed, nats_BT)

    def add(self, h_BTD: Tensor, labels: Tensor) -> None:
        """Keep states of a segment and the tokens that follow them, except where these are -100."""
        self._keep(h_BTD, labels)
        self._forget()

    def prepend(self, n: int) -> None:
        """Put `n` rows that keep nothing before the others."""
        h_BND, following = self._empty(n, self.h_BND.shape[-1], dtype=self.h_BND.dtype, device=self.h_BND.device)
        self.h_BND, self.following = torch.cat([h_BND, self.h_BND]), torch.cat([following, self.following])

    def _keep(self, h_BTD: Tensor, labels: Tensor) -> None:
        self.h_BND = torch.cat([self.h_BND, h_BTD.to(self.h_BND.dtype)], dim=1)
        self.following = torch.cat([self.following, labels], dim=1)

    def _forget(self) -> None:
        is_kept = self.following != NOT_SCORED
        if not is_kept[:, -self.cache.size :].all():  # what is not kept gives way first
            order = is_kept.long().argsort(dim=1, stable=True)
            self.h_BND = self.h_BND.take_along_dim(order[:, :, None], dim=1)
            self.following = self.following.take_along_dim(order, dim=1)
        self.h_BND, self.following = self.h_BND[:, -self.cache.size :], self.following[:, -self.cache.size :]

    def _empty(self, batch_size: int, d_model: int, **kind: Any) -> tuple[Tensor, Tensor]:
        shape = (batch_size, self.cache.size)
        return torch.zeros(*shape, d_model, **kind), torch.full(shape, NOT_SCORED, device=kind["device"])

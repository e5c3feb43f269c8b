"""Choose the next token from its scores."""

from dataclasses import dataclass

import torch
from torch import Tensor

from transformer_xl.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How to draw from the distribution of the next token; filters apply in the order of the fields.

    Attributes:
        temperature: divides the scores; 0 takes the most likely token.
        top_k: keep the k most likely tokens.
        top_p: keep the fewest most likely tokens whose probabilities reach this sum.

    Raises:
        ConfigError: a value out of range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature ({self.temperature}) must be at least 0 and finite; 0 takes the likeliest token")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top_k ({self.top_k}) must be at least 1; leave it out to keep all tokens")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p ({self.top_p}) must be above 0 and at most 1; leave it out to keep all tokens")

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the distribution that is drawn from, fp32 (…, V), for scores (…, V)."""
        logits = logits.float()
        if self.temperature == 0:
            return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).float()
        # the largest score is taken off first, so that dividing by a tiny temperature (not 0 in fp32) cannot give inf - inf
        probabilities = ((logits - logits.amax(-1, keepdim=True)) / max(self.temperature, 1e-30)).softmax(-1)
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            kept = probabilities.topk(self.top_k, dim=-1)
            probabilities = torch.zeros_like(probabilities).scatter(-1, kept.indices, kept.values)
            probabilities = probabilities / probabilities.sum(-1, keepdim=True)
        if self.top_p is not None and self.top_p < 1:
            ordered, index = probabilities.sort(dim=-1, descending=True, stable=True)
            before = ordered.cumsum(-1) - ordered  # the token that crosses the border stays
            ordered = ordered.masked_fill(before >= self.top_p, 0.0)
            probabilities = torch.zeros_like(probabilities).scatter(-1, index, ordered)
            probabilities = probabilities / probabilities.sum(-1, keepdim=True)
        return probabilities

    def choose(self, logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Draw token ids (…,) from scores (…, V), on the CPU so that a seed means the same everywhere."""
        probabilities = self.probabilities(logits.cpu())
        if self.temperature == 0:
            return probabilities.argmax(-1)
        flat = torch.multinomial(probabilities.reshape(-1, probabilities.shape[-1]), 1, generator=generator)
        return flat.view(probabilities.shape[:-1])

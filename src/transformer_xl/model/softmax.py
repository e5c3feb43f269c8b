"""Tokens in and out: the embedding and the plain softmax over the whole vocabulary.

Their adaptive counterparts (clusters of rarer words with narrower vectors) offer the same two methods, so that the model does
not ask which kind it has.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class TokenEmbedding(nn.Module):
    """Vectors of token ids, scaled by sqrt(d_model), and projected where `d_embed` differs from `d_model`.

    Reference: `AdaptiveEmbedding` of the authors' `pytorch/mem_transformer.py` with one cluster.
    """

    def __init__(self, vocab_size: int, *, d_embed: int, d_model: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(vocab_size, d_embed))
        self.projection = nn.Linear(d_embed, d_model, bias=False) if d_embed != d_model else None
        self.scale = d_model**0.5

    def forward(self, ids: Tensor) -> Tensor:
        """Embed ids (B, T) as (B, T, d_model)."""
        embedded = F.embedding(ids, self.weight)
        projected = embedded if self.projection is None else self.projection(embedded)
        return projected.to(self.weight.dtype) * self.scale  # in autocast too: what layers add to and remember stays fp32


class TokenSoftmax(nn.Module):
    """Scores of every token of the vocabulary.

    Reference: `ProjectedAdaptiveLogSoftmax` of the authors' `pytorch/utils/proj_adaptive_softmax.py` without clusters.

    Args:
        vocab_size: V.
        d_embed: width of the output vectors.
        d_model: width of the hidden states.
        tied: use the embedding's weight, given at each call, instead of an own one.
    """

    def __init__(self, vocab_size: int, *, d_embed: int, d_model: int, tied: bool) -> None:
        super().__init__()
        self.weight = None if tied else nn.Parameter(torch.randn(vocab_size, d_embed))
        self.bias = nn.Parameter(torch.zeros(vocab_size))
        self.projection = nn.Linear(d_model, d_embed, bias=False) if d_embed != d_model else None

    def logits(self, h_BTD: Tensor, tied_weight: Tensor) -> Tensor:
        """Return unnormalized scores (B, T, V) of hidden states (B, T, D)."""
        projected = h_BTD if self.projection is None else self.projection(h_BTD)
        return F.linear(projected, tied_weight if self.weight is None else self.weight, self.bias)

    def nll(self, h_BTD: Tensor, labels: Tensor, tied_weight: Tensor) -> Tensor:
        """Return nats per token (B, T) in fp32, in the order of the tokens; 0 where the label is -100."""
        logits = self.logits(h_BTD, tied_weight)
        logits = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=-100).view_as(labels)

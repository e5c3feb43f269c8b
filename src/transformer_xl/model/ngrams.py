"""Vectors of the last two, three, … tokens, added to that of the token.

    e_t = √D (E_1[x_t] + E_2[code(x_{t-1}, x_t)] + E_3[code(x_{t-2}, x_{t-1}, x_t)] + …)

A table has fewer rows than there are n-grams, so some share a row: code = Σ_k x_{t-k} c^k modulo the number of rows R, with c
near R / 1.618, so that tokens with near ids lie far apart. Before the beginning of a text stands a token of its own. Like any
embedding, a table costs no products: a model of the same size that has one reads faster than one without.

Reference: the hashed n-grams of Pagnoni et al. 2024 (Byte Latent Transformer, arXiv 2412.09871), section 3.2.1, there of bytes.

Shapes: B batch, T tokens, K = largest n - 1 tokens before them, D d_model.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from transformer_xl.batch import Rows
from transformer_xl.config.model import TransformerXLConfig
from transformer_xl.model.memory import join
from transformer_xl.model.softmax import drawn, look_up


class NgramEmbedding(nn.Module):
    """Vectors of n-grams of tokens.

    Args:
        vocab_size: V.
        n_rows: of the tables of pairs, triples, and so on.
        d_model: D.
        scale: of vectors.
    """

    def __init__(self, vocab_size: int, n_rows: Sequence[int], *, d_model: int, scale: float) -> None:
        super().__init__()
        self.tables = nn.ParameterList(drawn(n, d_model) for n in n_rows)
        self.vocab_size, self.scale = vocab_size, scale

    def forward(self, earlier: Sequence[Tensor], ids: Tensor) -> Tensor:
        """Return the sum of the vectors of all n-grams that end at each token, (B, T, D).

        Args:
            earlier: for k = 1, …, K the tokens k before each, int64 (B, T), plus 1; 0 where there are none.
            ids: the tokens, int64 (B, T).
        """
        found = [
            look_up(codes([ids + 1, *earlier[: n - 1]], self.vocab_size + 1, len(table)), table)
            for n, table in enumerate(self.tables, start=2)
        ]
        return sum(found[1:], start=found[0]) * self.scale


def make_ngrams(config: TransformerXLConfig) -> NgramEmbedding | None:
    """Return the tables that the settings describe; None: there are none."""
    if not config.ngram_rows:
        return None
    assert config.vocab_size is not None
    return NgramEmbedding(config.vocab_size, config.ngram_rows, d_model=config.d_model, scale=config.embedding_scale)


def codes(tokens: Sequence[Tensor], n_token: int, n_row: int) -> Tensor:
    """Return the row of each n-gram: of its last token, the one before, and so on, each below `n_token`.

    Where there are rows enough, every n-gram has its own.

    Example:
        >>> codes([torch.tensor([2]), torch.tensor([1])], 10, 100).tolist()
        [12]
    """
    factor = n_token if n_token ** len(tokens) <= n_row else _scattering(n_row)
    code = torch.zeros_like(tokens[0])
    for token in reversed(tokens):
        code = (code * factor + token) % n_row
    return code


def _scattering(n_row: int) -> int:
    """Return a factor near the golden section of a number of rows, without a common divisor, so that no token is lost in it."""
    factor = max(round(n_row * (math.sqrt(5) - 1) / 2), 1)
    while math.gcd(factor, n_row) > 1:
        factor += 1
    return factor


def earlier_tokens(before_BK: Tensor, ids: Tensor, rows: Rows, *, ext_len: int = 0) -> tuple[list[Tensor], Tensor]:
    """Return the tokens 1, …, K before each token, (B, T) each, and the last K for the next segment, (B, K).

    All are ids plus 1, and 0 where the document had not begun.

    Args:
        before_BK: the last K tokens before the segment, as returned for the segment before.
        ids: int64 (B, T), the segment.
        rows: padding and beginnings of documents.
        ext_len: tokens at the end of the segment that the next one begins with.

    Example:
        >>> starts = torch.tensor([[False, False, True]])
        >>> (previous,), last = earlier_tokens(torch.tensor([[8]]), torch.tensor([[3, 4, 5]]), Rows(document_starts=starts))
        >>> previous.tolist(), last.tolist()
        ([[8, 4, 0]], [[6]])
    """
    (K, T), n_pad = (before_BK.shape[1], ids.shape[1]), rows.n_pad
    token_BL = join(before_BK, ids + 1, n_pad)
    document_BL = torch.zeros_like(token_BL)
    if rows.document_starts is not None:
        document_BL = join(torch.zeros_like(before_BK), rows.document_starts.cumsum(dim=1), n_pad)
    if n_pad is not None:  # before the moved tokens nothing is left
        token_BL = token_BL.where(torch.arange(K + T, device=ids.device) >= n_pad[:, None], 0)
    earlier = [
        token_BL[:, K - k : K - k + T].where(document_BL[:, K - k : K - k + T] == document_BL[:, K:], 0)
        for k in range(1, K + 1)
    ]
    end = max(K + T - ext_len, 0)
    last, document = (x[:, max(end - K, 0) : end] for x in (token_BL, document_BL))
    return earlier, F.pad(last.where(document == document[:, -1:], 0), (K - last.shape[1], 0))

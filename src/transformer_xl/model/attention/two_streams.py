"""The attention of XLNet (Yang et al. 2019, arXiv 1906.08237, sec. 2.2 to 2.5), in plain code, and as a block.

Keys stand on both sides of a query, a third term compares segments, and what a query sees is a matter of ranks:

    A_ij = (q_i + u)·k_j + (q_i + v)·W_r R_{i-j} + (q_i + s)·e_{same or other segment}

The content stream h and the query stream g share all weights and all keys. So a layer gets both as one tensor: T content
positions, which become keys, and K queries after them, which only look. A query of g stands at the place of its target and
does not see it.

Reference: `two_stream_rel_attn` and `rel_attn_core` of the authors' `modeling.py`. Deviations: batch-first; g has a row for
each target instead of each position; a query that sees nothing gathers zeros (their code gathers the mean of all values, hidden
ones included); only the difference of the two vectors e is added, because a softmax ignores what all keys get equally.

Shapes: B batch, T content positions, K queries of g, Q = T + K queries, M memory, S = M + T keys, P = S + T - 1 distances,
N heads, H d_head, D d_model.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from transformer_xl.kernels.choose import Attention
from transformer_xl.kernels.cpu_linear import linear
from transformer_xl.model.attention.block import AttentionKind
from transformer_xl.model.dropout import DropConnectLinear
from transformer_xl.model.memory import join


@dataclass(frozen=True)
class Sight:
    """Where the queries of a segment stand, and what each sees; the same for all layers.

    A query sees the keys whose rank is below its own number, and itself if it is a content position.

    Attributes:
        place: int64 (B or 1, Q), the position of each query in the segment, 0 … T-1.
        sees: int64 (B, Q), each query sees the keys of lower rank.
        rank: int64 (B, S), the rank of each key.
        query_segment: int64 (B, Q), the text that each query belongs to; None: there is only one text.
        key_segment: int64 (B, S), the same of each key.
        is_backward: bool (B,), rows that are read backward; None: no row is.
    """

    place: Tensor
    sees: Tensor
    rank: Tensor
    query_segment: Tensor | None = None
    key_segment: Tensor | None = None
    is_backward: Tensor | None = None
    _known: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)

    def once(self, key: Hashable, compute: Callable[[], Any]) -> Any:
        """Return what was computed under a key, which the first layer that asks computes for all."""
        if key not in self._known:
            self._known[key] = compute()
        return self._known[key]

    def by_row(self, r_XPNH: Tensor) -> Tensor:
        """Return the position keys of each row, (B, P, N, H), from those for reading forward and backward."""
        if self.is_backward is None:
            return r_XPNH.expand(len(self.rank), -1, -1, -1)
        return r_XPNH[self.is_backward.long()]

    def hidden(self, n_content: int) -> Tensor:
        """Return bool (B, Q, S), True where a query must not see a key; the first `n_content` queries see themselves."""
        hidden_BQS = self.rank.unsqueeze(1) >= self.sees.unsqueeze(2)
        n_key = self.rank.shape[1]
        own_T = torch.arange(n_content, device=hidden_BQS.device)
        hidden_BQS[:, own_T, n_key - n_content + own_T] = False
        return hidden_BQS

    def differs(self) -> Tensor | None:
        """Return bool (B, Q, S), True where a key belongs to another text than the query; None: nowhere."""
        if self.query_segment is None or self.key_segment is None:
            return None
        return self.query_segment.unsqueeze(2) != self.key_segment.unsqueeze(1)


def ranked_attention(
    q_BQNH: Tensor,
    k_BSNH: Tensor,
    v_BSNH: Tensor,
    r_XPNH: Tensor,
    *,
    r_w_bias: Tensor,
    r_r_bias: Tensor,
    r_s_bias: Tensor,
    seg_embed: Tensor,
    sight: Sight,
    dropatt: float = 0.0,
) -> Tensor:
    """Attend to memory and segment, both sides of each query, by content, distance and segment, as far as ranks allow.

    Arguments and result as `relative_attention`, but: the first T = (P + 1 - S) queries stand at the segment's positions and
    are its content; `r_XPNH` are position keys W_r R of the distances S-1, …, -(T-1), for reading forward, and (X = 2) for
    reading backward; `r_s_bias` is s, shape (N, H), and `seg_embed` e, shape (2, N, H), first for keys of the same segment,
    then for the others; `sight` says where queries stand, and what they see.
    """
    T = r_XPNH.shape[1] + 1 - k_BSNH.shape[1]
    scores = ranked_scores(
        q_BQNH, k_BSNH, r_XPNH, r_w_bias=r_w_bias, r_r_bias=r_r_bias, r_s_bias=r_s_bias, seg_embed=seg_embed, sight=sight
    )
    weight_BNQS = visible_softmax(scores, sight.hidden(T).unsqueeze(1))
    weight_BNQS = F.dropout(weight_BNQS, dropatt, training=dropatt > 0)
    return torch.einsum("bnqs,bsnh->bqnh", weight_BNQS.to(v_BSNH.dtype), v_BSNH)


def ranked_scores(
    q_BQNH: Tensor,
    k_BSNH: Tensor,
    r_XPNH: Tensor,
    *,
    r_w_bias: Tensor,
    r_r_bias: Tensor,
    r_s_bias: Tensor,
    seg_embed: Tensor,
    sight: Sight,
) -> Tensor:
    """Return the score of each key for each query, (B, N, Q, S), hidden or not; arguments as of `ranked_attention`."""
    dtype, n_key = q_BQNH.dtype, k_BSNH.shape[1]
    content_score = torch.einsum("bqnh,bsnh->bnqs", q_BQNH + r_w_bias.to(dtype), k_BSNH)
    position_query = q_BQNH + r_r_bias.to(dtype)
    by_distance = torch.einsum("bqnh,bpnh->bnqp", position_query, sight.by_row(r_XPNH))
    score = content_score + at_keys(by_distance, sight.place, n_key)
    differs_BQS = sight.differs()
    if differs_BQS is not None:
        more_BNQ = torch.einsum("bqnh,nh->bnq", q_BQNH + r_s_bias.to(dtype), (seg_embed[1] - seg_embed[0]).to(dtype))
        score = score + more_BNQ.unsqueeze(-1) * differs_BQS.unsqueeze(1)
    return score * q_BQNH.shape[-1] ** -0.5


def at_keys(by_distance_BNQP: Tensor, place_BQ: Tensor, n_key: int) -> Tensor:
    """Return scores of keys, (B, N, Q, S), from scores of the distances S-1, …, -(T-1), for queries at any places.

    Key s lies M + t - s before a query at place t. Its distance is column s + T - 1 - t, so this is `rel_shift` for queries in
    any order, and without entries that mean nothing.

    Example:
        >>> at_keys(torch.tensor([[[[2, 1, 0, -1]]]]), torch.tensor([[0]]), 3)  # S=3, T=2: distances of the first query
        tensor([[[[ 1,  0, -1]]]])
    """
    B, N, Q, P = by_distance_BNQP.shape
    T = P + 1 - n_key
    key_S = torch.arange(n_key, device=place_BQ.device)
    column_BQS = key_S + (T - 1 - place_BQ).unsqueeze(-1)
    return by_distance_BNQP.gather(-1, column_BQS.unsqueeze(1).expand(B, N, Q, n_key))


def visible_softmax(score: Tensor, hidden: Tensor) -> Tensor:
    """Return a softmax over the keys that each query sees; zeros for a query that sees none."""
    weight = score.masked_fill(hidden, torch.finfo(score.dtype).min).softmax(dim=-1)
    return weight.masked_fill(hidden, 0.0)


class TwoStreamAttention(AttentionKind):
    """Multi-head attention of content and queries to memory and content.

    Args:
        d_model: D.
        dropweight: on the weights of the projections.
        block: the other arguments of `AttentionKind`.
    """

    def __init__(self, d_model: int, *, dropweight: float = 0.0, **block: Any) -> None:
        super().__init__(d_model, dropweight=dropweight, **block)
        self.r_net = DropConnectLinear(d_model, self.n_head * self.d_head, bias=False, dropweight=dropweight)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]  # what its queries see is another thing
        self,
        x_BQD: Tensor,
        *,
        mem_BMD: Tensor,
        n_content: int,
        n_pad: Tensor | None,
        r_XPD: Tensor,
        sight: Sight,
        backend: Attention,
        **biases: Tensor,
    ) -> Tensor:
        """Attend from content and queries to memory and content, and add the result.

        Args:
            x_BQD: content, then queries.
            mem_BMD: what the layer remembers.
            n_content: T.
            n_pad: int64 (B,), padding tokens at the left of each row; None: none.
            r_XPD: R of the distances S-1, …, -(T-1), for reading forward, and (X = 2) backward.
            sight: where queries stand, and what they see.
            backend: computes `ranked_attention`.
            **biases: u, v, s and e of the layer, as `ranked_attention` names them.

        Returns:
            The block's output, (B, Q, D).
        """
        q, k, v = self._project_both(x_BQD, mem_BMD, n_content, n_pad)
        r_XPNH = self.r_net(r_XPD).unflatten(-1, (self.n_head, self.d_head))
        dropatt = self.dropatt if self.training else 0.0
        return self.add(x_BQD, backend(q, k, v, r_XPNH, sight=sight, dropatt=dropatt, **biases))

    def position_weights(self) -> list[Tensor]:
        """Return W_r."""
        return [self.r_net.weight]

    def _project_both(
        self, x_BQD: Tensor, mem_BMD: Tensor, n_content: int, n_pad: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries (B, Q, N, H) of both streams, and keys and values (B, S, N, H) of memory and content."""
        heads = (self.n_head, self.d_head)
        x, mem = (self.layer_norm(y) if self.pre_lnorm else y for y in (x_BQD, mem_BMD))
        w_q, w_kv = self.qkv_net.drawn_weight().tensor_split([self.n_head * self.d_head])
        kv = self.drop_qkv(join(linear(mem, w_kv), linear(x[:, :n_content], w_kv), n_pad)).unflatten(-1, (2, *heads))
        return self.drop_qkv(linear(x, w_q)).unflatten(-1, heads), kv[:, :, 0], kv[:, :, 1]

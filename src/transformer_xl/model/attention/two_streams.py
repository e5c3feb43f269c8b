"""The attention of XLNet (Yang et al. 2019, arXiv 1906.08237, sec. 2.2 to 2.5).

Keys stand on both sides of a query, a third term compares segments, and what a query sees is a matter of ranks:

    A_ij = (q_i + u)·k_j + (q_i + v)·W_r R_{i-j} + (q_i + s)·e_{same or other segment}

The content stream h and the query stream g share all weights and all keys. So a layer gets both as one tensor: T content
positions, which become keys, and K queries after them, which only look. A query of g stands at the place of its target and
does not see it.

Reference: `two_stream_rel_attn` and `rel_attn_core` of the authors' `modeling.py`. Deviations: batch-first; g has a row for
each target instead of each position; a query that sees nothing gathers zeros (their code gathers the mean of all values, hidden
ones included); only the difference of the two vectors e is added, because a softmax ignores what all keys get equally.

Shapes: B batch, T content positions, K queries of g, Q = T + K queries, M memory, S = M + T keys, P = S + T distances,
N heads, H d_head, D d_model.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from transformer_xl.kernels.cpu_linear import linear
from transformer_xl.kernels.seeds import keep_mask
from transformer_xl.model.attention.block import AttentionKind
from transformer_xl.model.dropout import DropConnectLinear
from transformer_xl.model.memory import join

_CACHED_BYTES = 4 << 20
"""Rows are computed in groups whose scores take about so much, to stay in a CPU's cache from one product to the next."""

_BLOCK = 192
"""Content queries that are multiplied by the same position keys: a short block needs few more distances than it has keys."""


class Sight(NamedTuple):
    """Where the queries of a segment stand, and what each sees; the same for all layers.

    Content queries stand at the positions 0 … T-1, and those of g, after them, at their targets.

    Attributes:
        targets: int64 (B, K), the position of each query of g.
        hidden: bool (B, Q, S), True where a query must not see a key; or floats, what is added to its score.
        is_backward: bool (B,), rows that are read backward.
        differs: bool (B, Q, S), True where a key belongs to another text than the query; None: there is only one text.
        n_pad: int64 (B,), padding tokens at the left of each row; None: none.
    """

    targets: Tensor
    hidden: Tensor
    is_backward: Tensor
    differs: Tensor | None = None
    n_pad: Tensor | None = None


class Biases(NamedTuple):
    """u, v and s of a layer, (N, H), and its vectors e, (2, N, H), first for keys of the query's text, then for the others."""

    u: Tensor
    v: Tensor
    s: Tensor
    e: Tensor


def hidden_by_rank(rank_BS: Tensor, sees_BQ: Tensor, n_content: int) -> Tensor:
    """Return `Sight.hidden`: a query sees the keys whose rank is below its number, and a content query itself.

    Args:
        rank_BS: int64, the rank of each key, content last.
        sees_BQ: int64, each query sees the keys of lower rank; content first.
        n_content: T.
    """
    hidden_BQS = rank_BS.unsqueeze(1) >= sees_BQ.unsqueeze(2)
    hidden_BQS[:, :n_content, rank_BS.shape[1] - n_content :].diagonal(dim1=1, dim2=2).fill_(False)
    return hidden_BQS


def ranked_attention(
    q_BQNH: Tensor, k_BSNH: Tensor, v_BSNH: Tensor, r_XPNH: Tensor, *, biases: Biases, sight: Sight, dropatt: float = 0.0
) -> Tensor:
    """Attend to memory and segment, both sides of each query, by content, distance and text, as far as `sight` allows.

    Args:
        q_BQNH: queries of content, then of g.
        k_BSNH: keys of memory and content.
        v_BSNH: values of memory and content.
        r_XPNH: position keys W_r R of the distances S, …, -(T-1), for reading forward, and (X = 2) backward.
        biases: of the layer.
        sight: where queries stand, and what they see.
        dropatt: probability of dropping an attention weight.

    Returns:
        Attended values, (B, Q, N, H).
    """
    (B, _, N, H), S, dtype = q_BQNH.shape, k_BSNH.shape[1], q_BQNH.dtype
    scale = H**-0.5  # of queries: scaling scores would cost Q x S products
    u, v, s, e = (x.to(dtype) for x in biases)
    heads = ((q_BQNH + u) * scale, (q_BQNH + v) * scale, k_BSNH, v_BSNH)
    r_BNPH = r_XPNH.to(dtype).transpose(1, 2).index_select(0, sight.is_backward.long())
    rows = [*(x.transpose(1, 2).contiguous() for x in heads), r_BNPH, sight.targets, sight.hidden.unsqueeze(1)]
    if sight.differs is not None:  # a softmax ignores what all keys get, so only the difference of the vectors e counts
        by_text_BQN = torch.einsum("bqnh,nh->bqn", (q_BQNH + s) * scale, e[1] - e[0])
        rows += [by_text_BQN.transpose(1, 2).unsqueeze(-1), sight.differs.unsqueeze(1)]
    block, n_row = r_XPNH.shape[1] - S, B
    if q_BQNH.device.type == "cpu":
        block = min(_BLOCK, block)
        n_row = max(1, _CACHED_BYTES // (N * block * S * dtype.itemsize))
    # split, because its gradient is written once, where those of slices would be added up at full size
    groups = zip(*(x.split(n_row) for x in rows), strict=True)
    return torch.cat([_attend_rows(*group, block=block, dropatt=dropatt) for group in groups]).transpose(1, 2)


def _attend_rows(
    qu_BNQH: Tensor, qv_BNQH: Tensor, k_BNSH: Tensor, v_BNSH: Tensor, r_BNPH: Tensor, targets_BK: Tensor, hidden_B1QS: Tensor,
    *texts: Tensor, block: int, dropatt: float,
) -> Tensor:  # fmt: skip
    """Attend from some rows, block by block of content, then from g; `texts` are (q + s)·e (B, N, Q, 1) and `differs`."""
    S, K = k_BNSH.shape[2], targets_BK.shape[1]
    T = qu_BNQH.shape[2] - K
    # an autograd function of ours would return no gradient for what is added
    attend = products if qu_BNQH.device.type == "cpu" and hidden_B1QS.dtype == torch.bool else sdpa
    attended, first = [], 0
    sizes = [min(block, T - begin) for begin in range(0, T, block)] + [K] * (K > 0)
    for qu, qv, hidden, *text in zip(*(x.split(sizes, dim=2) for x in (qu_BNQH, qv_BNQH, hidden_B1QS, *texts)), strict=True):
        distances = slice(T - first - qu.shape[2], T - first + S) if first < T else slice(None)
        block_sight = BlockSight(hidden, text[1] if text else None, None if first < T else targets_BK)
        by_text = text[0] if text else None
        out = attend(qu, qv, k_BNSH, v_BNSH, r_BNPH[:, :, distances], by_text, block_sight, dropatt)
        unseen = hidden if hidden.dtype == torch.bool else hidden < torch.finfo(hidden.dtype).min / 4
        attended.append(out.masked_fill(unseen.all(-1, keepdim=True), 0.0))
        first += qu.shape[2]
    return torch.cat(attended, dim=2)


class BlockSight(NamedTuple):
    """What n queries see.

    Attributes:
        hidden: bool (B, 1, n, S), see `Sight`.
        differs: bool (B, 1, n, S), see `Sight`.
        targets: int64 (B, n), their positions, and their distances are all; None: they stand in a row, see `at_keys`.
    """

    hidden: Tensor
    differs: Tensor | None
    targets: Tensor | None

    def bias(self, qv: Tensor, r: Tensor, by_text: Tensor | None) -> Tensor:
        """Return (B, N, n, S): (q + v)·r, plus (q + s)·e for keys of other texts, plus what hides keys."""
        by_distance = qv @ r.mT
        position = at_keys(by_distance) if self.targets is None else by_distance.gather(-1, self._columns(qv, r))
        # finite, or a query that sees nothing would get NaN
        low = torch.finfo(qv.dtype).min / 2 if self.hidden.dtype == torch.bool else 1.0
        bias = position + self.hidden.to(qv.dtype) * low
        return bias if by_text is None or self.differs is None else bias.addcmul_(by_text, self.differs.to(qv.dtype))

    def by_distance(self, grad: Tensor, r: Tensor) -> Tensor:
        """Return the gradient with respect to (q + v)·r at all distances, (B, N, n, P), given that of `bias`."""
        moved = grad.new_zeros(*grad.shape[:3], r.shape[2])
        if self.targets is not None:
            return moved.scatter_(-1, self._columns(grad, r), grad)
        at_keys(moved).copy_(grad)
        return moved

    def _columns(self, like: Tensor, r: Tensor) -> Tensor:
        """Return int64 (B, N, n, S), the column of each key's distance: key s lies M + t - s before a query at position t."""
        assert self.targets is not None
        n_key = self.hidden.shape[-1]
        first = r.shape[2] - n_key - self.targets
        columns = torch.arange(n_key, device=first.device) + first[:, None, :, None]
        return columns.expand(-1, like.shape[1], -1, -1)


def at_keys(by_distance: Tensor) -> Tensor:
    """View what n queries in a row have for distances, (…, n, S + n), as what they have for keys, (…, n, S).

    Each query stands one position after the last, so its keys begin one column earlier. Read in rows that are shorter by one
    number, the same numbers begin where they should: `rel_shift` without its copy. The first column is never read.

    Example:
        >>> at_keys(torch.tensor([[0, 1, 0, -1], [0, 1, 0, -1]]))  # distances of two queries to two keys
        tensor([[ 0, -1],
                [ 1,  0]])
    """
    n, n_distance = by_distance.shape[-2:]
    return by_distance.flatten(-2)[..., n:].unflatten(-1, (n, -1))[..., : n_distance - n]


def sdpa(
    qu: Tensor, qv: Tensor, k: Tensor, v: Tensor, r: Tensor, by_text: Tensor | None, sight: BlockSight, dropatt: float
) -> Tensor:
    """Return drop(softmax((q + u)·k + bias)) v, (B, N, n, H), by PyTorch's function, which is slow on a CPU with a bias."""
    bias = sight.bias(qv, r, by_text)
    return F.scaled_dot_product_attention(qu, k, v, attn_mask=bias, dropout_p=dropatt, scale=1.0)


def products(*arguments: Any) -> Tensor:
    """Compute `sdpa` by batched products in one autograd node; the same arguments and result."""
    return _Products.apply(*arguments)


class _Products(torch.autograd.Function):
    """Keeps no tensor of the size of scores but a mask of a byte each, and in bf16 the weights.

    In fp32 these would be the largest tensors kept; 2 of 11 products are computed twice instead.
    """

    @staticmethod
    def forward(ctx: Any, *args: Any, **_: Any) -> Tensor:
        qu, qv, k, v, r, by_text, sight, dropatt = args
        weight = dropped = _weights(qu, qv, k, r, by_text, sight)
        kept, keep, ctx.factor = None if weight.dtype == torch.float32 else weight, None, 1.0
        if dropatt:
            keep, ctx.factor = keep_mask(weight, dropatt)
            dropped = keep.to(weight.dtype).mul_(weight)
        ctx.save_for_backward(qu, qv, k, v, r, by_text, *sight, kept, keep)
        return (dropped @ v).mul_(ctx.factor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        qu, qv, k, v, r, by_text, hidden, differs, targets, weight, keep = ctx.saved_tensors
        sight, (grad,) = BlockSight(hidden, differs, targets), grad_outputs
        weight = _weights(qu, qv, k, r, by_text, sight) if weight is None else weight
        dropped, grad = weight, grad * ctx.factor
        grad_weight = grad @ v.mT
        if keep is not None:
            mask = keep.to(weight.dtype)
            grad_weight.mul_(mask)
            dropped = mask.mul_(weight)
        grad_v = dropped.mT @ grad
        grad_score = torch.ops.aten._softmax_backward_data(grad_weight, weight, -1, weight.dtype)
        grad_text = None if by_text is None else (grad_score * differs).sum(-1, keepdim=True)
        grad_distance = sight.by_distance(grad_score, r)
        grads = (grad_score @ k, grad_distance @ r, grad_score.mT @ qu, grad_v, grad_distance.mT @ qv)
        return *grads, grad_text, None, None


def _weights(qu: Tensor, qv: Tensor, k: Tensor, r: Tensor, by_text: Tensor | None, sight: BlockSight) -> Tensor:
    """Return softmax((q + u)·k + bias), (B, N, n, S)."""
    scores = sight.bias(qv, r, by_text)
    rows = scores.view(-1, *scores.shape[2:]).baddbmm_(qu.flatten(0, 1), k.flatten(0, 1).mT)
    torch.softmax(rows, dim=-1, out=rows)
    return scores


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
        self, x_BQD: Tensor, *, mem_BMD: Tensor, r_XPD: Tensor, sight: Sight, biases: Biases
    ) -> Tensor:
        """Attend from content and queries to memory and content, and add the result.

        Args:
            x_BQD: content, then queries of g.
            mem_BMD: what the layer remembers.
            r_XPD: R of the distances S, …, -(T-1), for reading forward, and (X = 2) backward.
            sight: where queries stand, and what they see.
            biases: u, v, s and e of the layer.

        Returns:
            The block's output, (B, Q, D).
        """
        q, k, v = self._project_both(x_BQD, mem_BMD, sight)
        r_XPNH = self.r_net(r_XPD).unflatten(-1, (self.n_head, self.d_head))
        dropatt = self.dropatt if self.training else 0.0
        return self.add(x_BQD, ranked_attention(q, k, v, r_XPNH, biases=biases, sight=sight, dropatt=dropatt))

    def position_weights(self) -> list[Tensor]:
        """Return W_r."""
        return [self.r_net.weight]

    def _project_both(self, x_BQD: Tensor, mem_BMD: Tensor, sight: Sight) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries (B, Q, N, H) of both streams, and keys and values (B, S, N, H) of memory and content."""
        heads, T = (self.n_head, self.d_head), x_BQD.shape[1] - sight.targets.shape[1]
        x, mem = (self.layer_norm(y) if self.pre_lnorm else y for y in (x_BQD, mem_BMD))
        w_q, w_kv = self.qkv_net.drawn_weight().tensor_split([self.n_head * self.d_head])
        kv = self.drop_qkv(join(linear(mem, w_kv), linear(x[:, :T], w_kv), sight.n_pad)).unflatten(-1, (2, *heads))
        return self.drop_qkv(linear(x, w_q)).unflatten(-1, heads), kv[:, :, 0], kv[:, :, 1]

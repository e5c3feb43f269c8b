"""The attention of XLNet as fused GPU kernels; see `fused_ranked.py` for what surrounds them.

They do what the kernels of `fused_kernels.py` do, and share their steps. What differs:

- Whether a query sees a key is decided from the rank of the key and two numbers of the query. Any key may be visible, so all
  are looked at, except those before the first that anybody in the row sees: padding, and memory that is not used yet.
- Queries stand at any places. So each says in which column the scores of its positions begin, and key s has the s-th after it.
- Keys of another text than the query's get one number more, the query's. Its gradient is the sum of their scores' gradients.

Shapes: B batch, T queries of both streams, S keys, N heads, H d_head, C columns of a score of positions, Q queries and K keys
of a tile, P H rounded up to a power of two. Two int32 tables say what queries and keys are: `queries` (B, 4, T), column, sees,
own key and text; `keys` (B, 2, S), rank and text.
"""

import triton
import triton.language as tl

from transformer_xl.model.backends.fused_kernels import LOG2_E, begun, gathered, jit, load, score_gradient, store


@triton.jit
def _of_queries(table, t, T):
    """Return column, sees, own key and text of queries; those outside see nothing."""
    inside = t < T
    column, sees = tl.load(table + t, mask=inside, other=0), tl.load(table + T + t, mask=inside, other=-2147483648)
    own, text = tl.load(table + 2 * T + t, mask=inside, other=-1), tl.load(table + 3 * T + t, mask=inside, other=0)
    return column, sees, own, text


@triton.jit
def _of_keys(table, s, S):
    """Return rank and text of keys; nobody sees those outside."""
    return tl.load(table + s, mask=s < S, other=2147483647), tl.load(table + S + s, mask=s < S, other=0)


@triton.jit
def _is_visible(rank, s, sees, own):
    """Say which keys each query sees: those of lower rank, and its own."""
    return (rank[None, :] < sees[:, None]) | (s[None, :] == own[:, None])


@triton.jit
def _positions(position, column, batch, head, t0, s, T, C, B, Q: tl.constexpr):
    """Return where the scores of positions of a tile lie, in a tensor (N, B, T, C); within a tile 32 bits count enough."""
    corner = ((head * B + batch) * T + t0) * C
    return position + corner + ((tl.arange(0, Q) * C + column)[:, None] + s[None, :])


@jit
def ranked_forward_kernel(
    qu, k, v, position, more, queries, keys, first, out, log_sum, seed_at,
    q_row, q_head, q_t, k_row, k_head, k_s, v_row, v_head, v_s, sum_row, sum_head,
    T, S, C, B, part, dropatt,
    H: tl.constexpr, P: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, DROPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend with one block of queries of one head; one program each."""
    n_tile = tl.cdiv(T, Q)
    t0, row = tl.program_id(0) % n_tile * Q, tl.program_id(0) // n_tile
    batch, head = (row % B).to(tl.int64), (row // B).to(tl.int64)
    q_at, sum_at = batch * q_row + head * q_head, batch * sum_row + head * sum_head
    k, v = k + batch * k_row + head * k_head, v + batch * v_row + head * v_head
    keys += batch * 2 * S
    t = t0 + tl.arange(0, Q)
    qu_tile = load(qu + q_at, t, T, q_t, H, P)
    column, sees, own, text = _of_queries(queries + batch * 4 * T, t, T)
    more_Q = tl.zeros([Q], tl.float32)
    if more is not None:
        more_Q = tl.load(more + sum_at + t, mask=t < T, other=0.0)
    seed = tl.load(seed_at) + part if DROPS else 0

    highest, total, attended = begun(Q, P)
    for s0 in range(tl.load(first + batch) // K * K, S, K):
        s = s0 + tl.arange(0, K)
        rank, key_text = _of_keys(keys, s, S)
        visible = _is_visible(rank, s, sees, own)
        by_position = tl.load(_positions(position, column, batch, head, t0, s, T, C, B, Q), mask=visible, other=0.0)
        score = tl.dot(qu_tile, tl.trans(load(k, s, S, k_s, H, P)), input_precision=PRECISION) + by_position
        if more is not None:
            score += tl.where(text[:, None] == key_text[None, :], 0.0, more_Q[:, None])
        score = tl.where(visible, score * LOG2_E, float("-inf"))
        v_tile = load(v, s, S, v_s, H, P)
        highest, total, attended = gathered(score, v_tile, highest, total, attended, seed, row, t, s, dropatt, DROPS, PRECISION)
    total = tl.where(total > 0, total, 1.0)  # a query that sees nothing gathered zeros
    store(out + q_at, attended / total[:, None], t, T, q_t, H, P)
    tl.store(log_sum + sum_at + t, highest + tl.log2(total), mask=t < T)


@jit
def ranked_key_gradient_kernel(
    qu, k, v, position, more, queries, keys, first, grad, log_sum, mean, grad_k, grad_v, grad_position, seed_at,
    q_row, q_head, q_t, k_row, k_head, k_s, v_row, v_head, v_s, sum_row, sum_head, grad_k_row, grad_k_head, grad_k_s,
    T, S, C, B, part, dropatt,
    H: tl.constexpr, P: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, DROPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of one block of keys and values of one head, and of all scores of these keys."""
    n_tile = tl.cdiv(S, K)
    s0, row = tl.program_id(0) % n_tile * K, tl.program_id(0) // n_tile
    batch, head = (row % B).to(tl.int64), (row // B).to(tl.int64)
    q_at, sum_at = batch * q_row + head * q_head, batch * sum_row + head * sum_head
    k, v = k + batch * k_row + head * k_head, v + batch * v_row + head * v_head
    qu, grad, log_sum, mean = qu + q_at, grad + q_at, log_sum + sum_at, mean + sum_at
    queries += batch * 4 * T
    a, s = tl.arange(0, Q), s0 + tl.arange(0, K)
    k_tile, v_tile = load(k, s, S, k_s, H, P), load(v, s, S, v_s, H, P)
    rank, key_text = _of_keys(keys + batch * 2 * S, s, S)
    seed = tl.load(seed_at) + part if DROPS else 0
    grad_k_tile, grad_v_tile = tl.zeros([K, P], tl.float32), tl.zeros([K, P], tl.float32)
    n_query = tl.where(s0 + K > tl.load(first + batch), T, 0)
    for t0 in range(0, n_query, Q):
        t = t0 + a
        qu_tile, grad_tile = load(qu, t, T, q_t, H, P), load(grad, t, T, q_t, H, P)
        log_sum_Q = tl.load(log_sum + t, mask=t < T, other=0.0)
        mean_Q = tl.load(mean + t, mask=t < T, other=0.0)
        column, sees, own, text = _of_queries(queries, t, T)
        visible = _is_visible(rank, s, sees, own)
        at = _positions(position, column, batch, head, t0, s, T, C, B, Q)
        score = tl.dot(qu_tile, tl.trans(k_tile), input_precision=PRECISION) + tl.load(at, mask=visible, other=0.0)
        if more is not None:
            more_Q = tl.load(more + sum_at + t, mask=t < T, other=0.0)
            score += tl.where(text[:, None] == key_text[None, :], 0.0, more_Q[:, None])
        score = tl.where(visible, score * LOG2_E, float("-inf"))
        grad_score, dropped = score_gradient(
            score, v_tile, grad_tile, log_sum_Q, mean_Q, seed, row, t, s, dropatt, DROPS, PRECISION
        )
        tl.store(_positions(grad_position, column, batch, head, t0, s, T, C, B, Q), grad_score, mask=visible)
        grad_k_tile = tl.dot(tl.trans(grad_score), qu_tile, grad_k_tile, input_precision=PRECISION)
        grad_v_tile = tl.dot(tl.trans(dropped), grad_tile, grad_v_tile, input_precision=PRECISION)
    own_at = batch * grad_k_row + head * grad_k_head
    store(grad_k + own_at, grad_k_tile, s, S, grad_k_s, H, P)
    store(grad_v + own_at, grad_v_tile, s, S, grad_k_s, H, P)


@jit
def ranked_query_gradient_kernel(
    k, grad_position, queries, keys, first, grad_qu, grad_more, seed_at,
    q_row, q_head, q_t, k_row, k_head, k_s, sum_row, sum_head,
    T, S, C, B, part, dropatt,
    H: tl.constexpr, P: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, DROPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of one block of queries of one head, and of what they add to other texts, from their scores'."""
    n_tile = tl.cdiv(T, Q)
    t0, row = tl.program_id(0) % n_tile * Q, tl.program_id(0) // n_tile
    batch, head = (row % B).to(tl.int64), (row // B).to(tl.int64)
    k += batch * k_row + head * k_head
    keys += batch * 2 * S
    t = t0 + tl.arange(0, Q)
    column, sees, own, text = _of_queries(queries + batch * 4 * T, t, T)
    grad_qu_tile, grad_more_Q = tl.zeros([Q, P], tl.float32), tl.zeros([Q], tl.float32)
    for s0 in range(tl.load(first + batch) // K * K, S, K):
        s = s0 + tl.arange(0, K)
        rank, key_text = _of_keys(keys, s, S)
        visible = _is_visible(rank, s, sees, own)
        at = _positions(grad_position, column, batch, head, t0, s, T, C, B, Q)
        grad_score = tl.load(at, mask=visible, other=0.0)
        grad_qu_tile += tl.dot(grad_score, load(k, s, S, k_s, H, P), input_precision=PRECISION)
        if grad_more is not None:
            grad_more_Q += tl.sum(tl.where(text[:, None] == key_text[None, :], 0.0, grad_score.to(tl.float32)), 1)
    store(grad_qu + batch * q_row + head * q_head, grad_qu_tile, t, T, q_t, H, P)
    if grad_more is not None:
        tl.store(grad_more + batch * sum_row + head * sum_head + t, grad_more_Q, mask=t < T)

"""Attention with scores of positions that are given, as fused GPU kernels; see `fused.py` for what surrounds them.

Content is scored tile by tile, as in flash attention. Scores of positions lie in memory as the library multiplied them, a
column for each distance. So the relative shift is an address: for query t, key s has column s + T - 1 - t. Gradients of these
scores are written to the same place of a second tensor, and the library multiplies them on.

The backward pass computes each weight once more, from the logarithm of its row's sum, in the program of its key; the program
of its query then reads the gradient of its score. There are no atomics, so results are the same every time. Accumulation is in
fp32.

Lengths and counts are not specialized: one compiled kernel serves all lengths, so a short last segment, or a memory that grows,
does not make a run wait for the compiler. Programs are counted along the first axis of the grid, the only one that can be
longer than 65,535. Offsets are 64-bit wherever they are multiplied by a stride.

Shapes: B batch, T tgt_len, M memory, S = M + T keys, N heads, H d_head, C columns of a score of positions, at least S,
W edge of a tile, P H rounded up to a power of two.
"""

import triton
import triton.language as tl

jit = triton.jit(do_not_specialize=["T", "S", "C", "B", "part"])


@triton.jit
def load(matrix, at, n, stride, H: tl.constexpr, P: tl.constexpr):
    """Load the rows `at` of a matrix (n, H), with zeros for those outside."""
    h = tl.arange(0, P)
    inside = (at < n)[:, None] & (h < H)[None, :]
    return tl.load((matrix + at.to(tl.int64) * stride)[:, None] + h[None, :], mask=inside, other=0.0)


@triton.jit
def store(matrix, tile, at, n, stride, H: tl.constexpr, P: tl.constexpr):
    """Store a tile as the rows `at` of a matrix (n, H)."""
    h = tl.arange(0, P)
    inside = (at < n)[:, None] & (h < H)[None, :]
    tl.store((matrix + at.to(tl.int64) * stride)[:, None] + h[None, :], tile.to(matrix.dtype.element_ty), mask=inside)


@triton.jit
def _shifted(position, batch, head, t0, s0, T, C, B, W: tl.constexpr):
    """Return where the scores of positions of a tile lie, in a tensor (N, B, T, C); within a tile 32 bits count enough."""
    a, b = tl.arange(0, W)[:, None], tl.arange(0, W)[None, :]
    corner = ((head * B + batch) * T + t0) * C + s0 + T - 1 - t0
    return position + corner + (a * (C - 1) + b)


@triton.jit
def _is_visible(s, t, lowest, M):
    """Say which keys each query sees: from its lowest one to its own."""
    return (s[None, :] >= lowest[:, None]) & (s[None, :] <= M + t[:, None])


@triton.jit
def _lowest(first, t, T):
    """Load the lowest key that each query sees; queries outside see none, not even those beyond S that fill a tile."""
    return tl.load(first + t, mask=t < T, other=2147483647)


@triton.jit
def _kept(seed, row, t, s, dropatt):
    """Return the factor of each attention weight, 0 where dropped; all kernels get the same one for the same weight."""
    zero = t[:, None] * 0 + s[None, :] * 0
    draw, _, _, _ = tl.philox(seed, zero + s[None, :], zero + t[:, None], zero + row, zero)
    return tl.where(tl.uint_to_uniform_float(draw) >= dropatt, 1 / (1 - dropatt), 0.0)


@triton.jit
def begun(W: tl.constexpr, P: tl.constexpr):
    """Return the highest score, the sum of weights and what was gathered, before any key was looked at."""
    # finite, so that a row that sees nothing in a tile has no NaN
    return tl.full([W], -1e30, tl.float32), tl.zeros([W], tl.float32), tl.zeros([W, P], tl.float32)


@triton.jit
def gathered(score, v_tile, highest, total, attended, seed, row, t, s, dropatt, DROPS: tl.constexpr, PRECISION: tl.constexpr):
    """Go on with the softmax over a tile of keys, whose score is -inf where they are hidden."""
    new_highest = tl.maximum(highest, tl.max(score, 1))
    weight, faded = tl.exp(score - new_highest[:, None]), tl.exp(highest - new_highest)
    total = total * faded + tl.sum(weight, 1)
    if DROPS:
        weight *= _kept(seed, row, t, s, dropatt)
    attended = attended * faded[:, None] + tl.dot(weight.to(v_tile.dtype), v_tile, input_precision=PRECISION)
    return new_highest, total, attended


@triton.jit
def score_gradient(
    score, visible, v_tile, grad_tile, log_sum, mean, seed, row, t, s, dropatt, DROPS: tl.constexpr, PRECISION: tl.constexpr
):
    """Return the gradients of a tile of scores, and the weights with which values were gathered; keys come first in both."""
    weight = tl.exp(tl.where(visible, score - log_sum[None, :], float("-inf")))
    grad_weight = tl.dot(v_tile, tl.trans(grad_tile), input_precision=PRECISION)
    dropped = weight
    if DROPS:
        kept = tl.trans(_kept(seed, row, t, s, dropatt))
        grad_weight, dropped = grad_weight * kept, weight * kept
    return (weight * (grad_weight - mean[None, :])).to(grad_tile.dtype), dropped


@jit
def forward_kernel(
    qu, k, v, position, first, out, log_sum, seed_at,
    q_row, q_head, q_t, k_row, k_head, k_s, v_row, v_head, v_s, sum_row, sum_head, first_row,
    T, S, C, B, part, dropatt,
    H: tl.constexpr, P: tl.constexpr, W: tl.constexpr, DROPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend with one block of queries of one head; one program each."""
    n_tile, M = tl.cdiv(T, W), S - T
    t0, row = tl.program_id(0) % n_tile * W, tl.program_id(0) // n_tile
    batch, head = (row % B).to(tl.int64), (row // B).to(tl.int64)
    q_at = batch * q_row + head * q_head
    k, v = k + batch * k_row + head * k_head, v + batch * v_row + head * v_head
    a = tl.arange(0, W)
    t = t0 + a
    qu_tile = load(qu + q_at, t, T, q_t, H, P)
    lowest = _lowest(first + batch * first_row, t, T)
    seed = tl.load(seed_at) + part if DROPS else 0

    highest, total, attended = begun(W, P)
    for s0 in range(tl.min(lowest) // W * W, tl.minimum(S, M + t0 + W), W):
        s = s0 + a
        visible = _is_visible(s, t, lowest, M)
        by_position = tl.load(_shifted(position, batch, head, t0, s0, T, C, B, W), mask=visible, other=0.0)
        score = tl.dot(qu_tile, tl.trans(load(k, s, S, k_s, H, P)), input_precision=PRECISION) + by_position
        score = tl.where(visible, score, float("-inf"))
        v_tile = load(v, s, S, v_s, H, P)
        highest, total, attended = gathered(score, v_tile, highest, total, attended, seed, row, t, s, dropatt, DROPS, PRECISION)
    total = tl.where(t < T, total, 1.0)
    store(out + q_at, attended / total[:, None], t, T, q_t, H, P)
    tl.store(log_sum + batch * sum_row + head * sum_head + t, highest + tl.log(total), mask=t < T)


@jit
def key_gradient_kernel(
    qu, k, v, position, first, last, grad, log_sum, mean, grad_k, grad_v, grad_position, seed_at,
    q_row, q_head, q_t, k_row, k_head, k_s, v_row, v_head, v_s, sum_row, sum_head, first_row,
    last_row, grad_k_row, grad_k_head, grad_k_s,
    T, S, C, B, part, dropatt,
    H: tl.constexpr, P: tl.constexpr, W: tl.constexpr, DROPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of one block of keys and values of one head, and of all scores of these keys."""
    n_tile, M = tl.cdiv(S, W), S - T
    s0, row = tl.program_id(0) % n_tile * W, tl.program_id(0) // n_tile
    batch, head = (row % B).to(tl.int64), (row // B).to(tl.int64)
    q_at, sum_at = batch * q_row + head * q_head, batch * sum_row + head * sum_head
    k, v = k + batch * k_row + head * k_head, v + batch * v_row + head * v_head
    qu, grad, log_sum, mean = qu + q_at, grad + q_at, log_sum + sum_at, mean + sum_at
    a = tl.arange(0, W)
    s = s0 + a
    k_tile, v_tile = load(k, s, S, k_s, H, P), load(v, s, S, v_s, H, P)
    seed = tl.load(seed_at) + part if DROPS else 0
    grad_k_tile, grad_v_tile = tl.zeros([W, P], tl.float32), tl.zeros([W, P], tl.float32)
    last = tl.load(last + batch * last_row + s0 // W)
    for t0 in range(tl.maximum(s0 - M, 0) // W * W, last, W):
        t = t0 + a
        qu_tile, grad_tile = load(qu, t, T, q_t, H, P), load(grad, t, T, q_t, H, P)
        log_sum_W = tl.load(log_sum + t, mask=t < T, other=0.0)
        mean_W = tl.load(mean + t, mask=t < T, other=0.0)
        # keys come first here, so that the products with queries and gradients below take tiles as they are
        visible = tl.trans(_is_visible(s, t, _lowest(first + batch * first_row, t, T), M))
        by_position = tl.load(tl.trans(_shifted(position, batch, head, t0, s0, T, C, B, W)), mask=visible, other=0.0)
        score = tl.dot(k_tile, tl.trans(qu_tile), input_precision=PRECISION) + by_position
        grad_score, dropped = score_gradient(
            score, visible, v_tile, grad_tile, log_sum_W, mean_W, seed, row, t, s, dropatt, DROPS, PRECISION
        )
        tl.store(tl.trans(_shifted(grad_position, batch, head, t0, s0, T, C, B, W)), grad_score, mask=visible)
        grad_k_tile += tl.dot(grad_score, qu_tile, input_precision=PRECISION)
        grad_v_tile += tl.dot(dropped.to(grad_tile.dtype), grad_tile, input_precision=PRECISION)
    own = batch * grad_k_row + head * grad_k_head
    store(grad_k + own, grad_k_tile, s, S, grad_k_s, H, P)
    store(grad_v + own, grad_v_tile, s, S, grad_k_s, H, P)


@jit
def query_gradient_kernel(
    k, grad_position, first, grad_qu, seed_at,
    q_row, q_head, q_t, k_row, k_head, k_s, first_row,
    T, S, C, B, part, dropatt,
    H: tl.constexpr, P: tl.constexpr, W: tl.constexpr, DROPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of one block of queries of one head, from those of their scores."""
    n_tile, M = tl.cdiv(T, W), S - T
    t0, row = tl.program_id(0) % n_tile * W, tl.program_id(0) // n_tile
    batch, head = (row % B).to(tl.int64), (row // B).to(tl.int64)
    k += batch * k_row + head * k_head
    a = tl.arange(0, W)
    t = t0 + a
    lowest = _lowest(first + batch * first_row, t, T)
    grad_qu_tile = tl.zeros([W, P], tl.float32)
    for s0 in range(tl.min(lowest) // W * W, tl.minimum(S, M + t0 + W), W):
        s = s0 + a
        visible = _is_visible(s, t, lowest, M)
        grad_score = tl.load(_shifted(grad_position, batch, head, t0, s0, T, C, B, W), mask=visible, other=0.0)
        grad_qu_tile += tl.dot(grad_score, load(k, s, S, k_s, H, P), input_precision=PRECISION)
    store(grad_qu + batch * q_row + head * q_head, grad_qu_tile, t, T, q_t, H, P)

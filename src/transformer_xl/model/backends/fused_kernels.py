"""Relative attention with memory as fused GPU kernels: nothing of size (T, S) is ever stored, forward or backward.

Scores are computed tile by tile, as in flash attention. Products with position keys need the relative shift: in a tile of W
queries and W keys, distances differ by b - a from that of the tile's corner, for query a and key b, so they are those of two
neighboring blocks of position keys, `lo` and `hi`. Row a takes its first columns from the end of `lo` and the others from the
beginning of `hi`: one selection and one rotation (`_shift`). From tile to tile `hi` becomes the next `lo`, so that a block of
queries multiplies each position key once. Gradients go the same way back.

    column c of the position keys for query t and key s:    c = s + T - 1 - t        (which is the distance S - 1 - c)
    tile of the queries t0 + a and the keys s0 + b:         c = C + b - a            with C = s0 + T - 1 - t0
    `lo` are the columns C - W … C - 1, `hi` are C … C + W - 1

The gradient of the position keys is summed per diagonal, because all tiles of a diagonal use the same two blocks, and over
diagonals in a fixed order. There are no atomics, so results are the same every time.

Every score is computed again in the backward pass, from the logarithm of its row's sum. Accumulation is in fp32.

Lengths and counts are not specialized: one compiled kernel serves all lengths, so a short last segment, or a memory that grows,
does not make a run wait for the compiler. Programs are counted along the first axis of the grid, the only one that can be
longer than 65,535. Offsets are 64-bit wherever they are multiplied by a stride.

Shapes: B batch, T tgt_len, M memory, S = M + T keys, N heads, H d_head, W edge of a tile, P H rounded up to a power of two.
"""

import triton
import triton.language as tl

_jit = triton.jit(do_not_specialize=["T", "S", "N", "B", "n_part"])


@triton.jit
def _load(matrix, at, n, stride, H: tl.constexpr, P: tl.constexpr):
    """Load the rows `at` of a matrix (n, H), with zeros for those outside."""
    h = tl.arange(0, P)
    inside = ((at >= 0) & (at < n))[:, None] & (h < H)[None, :]
    return tl.load(matrix + at[:, None].to(tl.int64) * stride + h[None, :], mask=inside, other=0.0)


@triton.jit
def _store(matrix, tile, at, n, stride, H: tl.constexpr, P: tl.constexpr):
    """Store a tile as the rows `at` of a matrix (n, H)."""
    h = tl.arange(0, P)
    inside = (at < n)[:, None] & (h < H)[None, :]
    tl.store(matrix + at[:, None].to(tl.int64) * stride + h[None, :], tile.to(matrix.dtype.element_ty), mask=inside)


@triton.jit
def _shift(lo, hi, W: tl.constexpr):
    """Turn products with two blocks of position keys into scores of a tile."""
    a, b = tl.arange(0, W)[:, None], tl.arange(0, W)[None, :]
    return tl.gather(tl.where(a + b < W, hi, lo), (b - a + W) % W, axis=1)


@triton.jit
def _unshift(tile, W: tl.constexpr):
    """Undo `_shift` for a gradient; return those of the products with `lo` and `hi`."""
    a, b = tl.arange(0, W)[:, None], tl.arange(0, W)[None, :]
    turned = tl.gather(tile, (a + b) % W, axis=1)
    return tl.where(a + b < W, 0.0, turned), tl.where(a + b < W, turned, 0.0)


@triton.jit
def _is_visible(s, t, lowest, M):
    """Say which keys each query sees: from its lowest one to its own."""
    return (s[None, :] >= lowest[:, None]) & (s[None, :] <= M + t[:, None])


@triton.jit
def _lowest(first, t, T, S):
    """Load the lowest key that each query sees; queries outside see none."""
    return tl.load(first + t, mask=t < T, other=S)


@triton.jit
def _kept(seed, row, t, s, dropatt):
    """Return the factor of each attention weight, 0 where dropped; all kernels get the same one for the same weight."""
    zero = t[:, None] * 0 + s[None, :] * 0
    draw, _, _, _ = tl.philox(seed, zero + s[None, :], zero + t[:, None], zero + row, zero)
    return tl.where(tl.uint_to_uniform_float(draw) >= dropatt, 1 / (1 - dropatt), 0.0)


@_jit
def forward_kernel(
    qu, qv, k, v, r, first, out, log_sum, seed_at,
    q_row, q_head, q_t, k_row, k_head, k_s, v_row, v_head, v_s, r_head, r_s, first_row,
    T, S, N, dropatt,
    H: tl.constexpr, P: tl.constexpr, W: tl.constexpr, DROPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend with one block of queries of one head; one program each."""
    n_tile, M = tl.cdiv(T, W), S - T
    t0, row = tl.program_id(0) % n_tile * W, tl.program_id(0) // n_tile
    batch, head = (row // N).to(tl.int64), (row % N).to(tl.int64)
    q_at = batch * q_row + head * q_head
    qu, qv, out = qu + q_at, qv + q_at, out + q_at
    k, v, r = k + batch * k_row + head * k_head, v + batch * v_row + head * v_head, r + head * r_head
    a = tl.arange(0, W)
    t = t0 + a
    qu_tile, qv_tile = _load(qu, t, T, q_t, H, P), _load(qv, t, T, q_t, H, P)
    lowest = _lowest(first + batch * first_row, t, T, S)
    seed = tl.load(seed_at) if DROPS else 0

    begin = tl.min(lowest) // W * W
    hi = tl.dot(qv_tile, tl.trans(_load(r, begin + T - 1 - t0 - W + a, S, r_s, H, P)), input_precision=PRECISION)
    highest = tl.full([W], -1e30, tl.float32)  # finite, so that a row that sees nothing in a tile has no NaN
    total = tl.zeros([W], tl.float32)
    attended = tl.zeros([W, P], tl.float32)
    for s0 in range(begin, tl.minimum(S, M + t0 + W), W):
        s, lo = s0 + a, hi
        hi = tl.dot(qv_tile, tl.trans(_load(r, s0 + T - 1 - t0 + a, S, r_s, H, P)), input_precision=PRECISION)
        score = tl.dot(qu_tile, tl.trans(_load(k, s, S, k_s, H, P)), input_precision=PRECISION) + _shift(lo, hi, W)
        score = tl.where(_is_visible(s, t, lowest, M), score, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(score, 1))
        weight, faded = tl.exp(score - new_highest[:, None]), tl.exp(highest - new_highest)
        highest, total = new_highest, total * faded + tl.sum(weight, 1)
        if DROPS:
            weight *= _kept(seed, row, t, s, dropatt)
        v_tile = _load(v, s, S, v_s, H, P)
        attended = attended * faded[:, None] + tl.dot(weight.to(v_tile.dtype), v_tile, input_precision=PRECISION)
    total = tl.where(t < T, total, 1.0)
    _store(out, attended / total[:, None], t, T, q_t, H, P)
    tl.store(log_sum + row.to(tl.int64) * T + t, highest + tl.log(total), mask=t < T)


@triton.jit
def _gradient(
    score,
    s,
    t,
    lowest,
    M,
    log_sum,
    mean,
    grad_tile,
    v_tile,
    seed,
    row,
    dropatt,
    DROPS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return the gradient of a tile of scores, and its weights after dropout."""
    weight = tl.exp(tl.where(_is_visible(s, t, lowest, M), score - log_sum[:, None], float("-inf")))
    grad_weight = tl.dot(grad_tile, tl.trans(v_tile), input_precision=PRECISION)
    dropped = weight
    if DROPS:
        kept = _kept(seed, row, t, s, dropatt)
        grad_weight, dropped = grad_weight * kept, weight * kept
    return weight * (grad_weight - mean[:, None]), dropped


@_jit
def query_gradient_kernel(
    qu, qv, k, v, r, first, grad, log_sum, mean, grad_qu, grad_qv, seed_at,
    q_row, q_head, q_t, k_row, k_head, k_s, v_row, v_head, v_s, r_head, r_s, first_row,
    T, S, N, dropatt,
    H: tl.constexpr, P: tl.constexpr, W: tl.constexpr, DROPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of one block of queries of one head."""
    n_tile, M = tl.cdiv(T, W), S - T
    t0, row = tl.program_id(0) % n_tile * W, tl.program_id(0) // n_tile
    batch, head = (row // N).to(tl.int64), (row % N).to(tl.int64)
    q_at = batch * q_row + head * q_head
    qu, qv, grad, grad_qu, grad_qv = qu + q_at, qv + q_at, grad + q_at, grad_qu + q_at, grad_qv + q_at
    k, v, r = k + batch * k_row + head * k_head, v + batch * v_row + head * v_head, r + head * r_head
    a = tl.arange(0, W)
    t = t0 + a
    qu_tile, qv_tile, grad_tile = _load(qu, t, T, q_t, H, P), _load(qv, t, T, q_t, H, P), _load(grad, t, T, q_t, H, P)
    lowest = _lowest(first + batch * first_row, t, T, S)
    log_sum_W = tl.load(log_sum + row.to(tl.int64) * T + t, mask=t < T, other=0.0)
    mean_W = tl.load(mean + row.to(tl.int64) * T + t, mask=t < T, other=0.0)
    seed = tl.load(seed_at) if DROPS else 0

    begin = tl.min(lowest) // W * W
    r_hi = _load(r, begin + T - 1 - t0 - W + a, S, r_s, H, P)
    hi = tl.dot(qv_tile, tl.trans(r_hi), input_precision=PRECISION)
    grad_hi = tl.zeros([W, W], tl.float32)
    grad_qu_tile, grad_qv_tile = tl.zeros([W, P], tl.float32), tl.zeros([W, P], tl.float32)
    for s0 in range(begin, tl.minimum(S, M + t0 + W), W):
        s, lo, r_lo = s0 + a, hi, r_hi
        r_hi = _load(r, s0 + T - 1 - t0 + a, S, r_s, H, P)
        hi = tl.dot(qv_tile, tl.trans(r_hi), input_precision=PRECISION)
        k_tile = _load(k, s, S, k_s, H, P)
        score = tl.dot(qu_tile, tl.trans(k_tile), input_precision=PRECISION) + _shift(lo, hi, W)
        grad_score, _ = _gradient(
            score,
            s,
            t,
            lowest,
            M,
            log_sum_W,
            mean_W,
            grad_tile,
            _load(v, s, S, v_s, H, P),
            seed,
            row,
            dropatt,
            DROPS,
            PRECISION,
        )
        grad_qu_tile += tl.dot(grad_score.to(k_tile.dtype), k_tile, input_precision=PRECISION)
        grad_lo, next_hi = _unshift(grad_score, W)
        grad_qv_tile += tl.dot((grad_hi + grad_lo).to(r_lo.dtype), r_lo, input_precision=PRECISION)
        grad_hi = next_hi
    grad_qv_tile += tl.dot(grad_hi.to(r_hi.dtype), r_hi, input_precision=PRECISION)
    _store(grad_qu, grad_qu_tile, t, T, q_t, H, P)
    _store(grad_qv, grad_qv_tile, t, T, q_t, H, P)


@_jit
def key_gradient_kernel(
    qu, qv, k, v, r, first, grad, log_sum, mean, grad_k, grad_v, seed_at,
    q_row, q_head, q_t, k_row, k_head, k_s, v_row, v_head, v_s, r_head, r_s, first_row,
    T, S, N, dropatt,
    H: tl.constexpr, P: tl.constexpr, W: tl.constexpr, DROPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of one block of keys and values of one head."""
    n_tile, M = tl.cdiv(S, W), S - T
    s0, row = tl.program_id(0) % n_tile * W, tl.program_id(0) // n_tile
    batch, head = (row // N).to(tl.int64), (row % N).to(tl.int64)
    q_at = batch * q_row + head * q_head
    qu, qv, grad = qu + q_at, qv + q_at, grad + q_at
    k, v, r = k + batch * k_row + head * k_head, v + batch * v_row + head * v_head, r + head * r_head
    a = tl.arange(0, W)
    s = s0 + a
    k_tile, v_tile = _load(k, s, S, k_s, H, P), _load(v, s, S, v_s, H, P)
    seed = tl.load(seed_at) if DROPS else 0
    grad_k_tile, grad_v_tile = tl.zeros([W, P], tl.float32), tl.zeros([W, P], tl.float32)
    for t0 in range(tl.maximum(s0 - M, 0) // W * W, T, W):
        t = t0 + a
        lowest = _lowest(first + batch * first_row, t, T, S)
        if tl.min(lowest) < s0 + W:
            qu_tile, qv_tile, grad_tile = _load(qu, t, T, q_t, H, P), _load(qv, t, T, q_t, H, P), _load(grad, t, T, q_t, H, P)
            column = s0 + T - 1 - t0 + a
            lo = tl.dot(qv_tile, tl.trans(_load(r, column - W, S, r_s, H, P)), input_precision=PRECISION)
            hi = tl.dot(qv_tile, tl.trans(_load(r, column, S, r_s, H, P)), input_precision=PRECISION)
            score = tl.dot(qu_tile, tl.trans(k_tile), input_precision=PRECISION) + _shift(lo, hi, W)
            log_sum_W = tl.load(log_sum + row.to(tl.int64) * T + t, mask=t < T, other=0.0)
            mean_W = tl.load(mean + row.to(tl.int64) * T + t, mask=t < T, other=0.0)
            grad_score, dropped = _gradient(
                score, s, t, lowest, M, log_sum_W, mean_W, grad_tile, v_tile, seed, row, dropatt, DROPS, PRECISION
            )
            grad_k_tile += tl.dot(tl.trans(grad_score.to(qu_tile.dtype)), qu_tile, input_precision=PRECISION)
            grad_v_tile += tl.dot(tl.trans(dropped.to(grad_tile.dtype)), grad_tile, input_precision=PRECISION)
    own = (batch * S * N + head) * H  # gradients are contiguous, whatever the keys and values are
    _store(grad_k + own, grad_k_tile, s, S, N * H, H, P)
    _store(grad_v + own, grad_v_tile, s, S, N * H, H, P)


@_jit
def position_gradient_kernel(
    qu, qv, k, v, r, first, grad, log_sum, mean, partial, seed_at, B, n_part,
    q_row, q_head, q_t, k_row, k_head, k_s, v_row, v_head, v_s, r_head, r_s, first_row,
    T, S, N, dropatt,
    H: tl.constexpr, P: tl.constexpr, W: tl.constexpr, DROPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute what one diagonal of tiles of one head adds to the gradients of `lo` and `hi`, for every n_part-th row."""
    diagonal = tl.program_id(0) - tl.cdiv(T, W) + 1
    head, part, M = tl.program_id(1).to(tl.int64), tl.program_id(2), S - T
    a = tl.arange(0, W)
    r += head * r_head
    column = diagonal * W + T - 1 + a
    r_lo, r_hi = _load(r, column - W, S, r_s, H, P), _load(r, column, S, r_s, H, P)
    seed = tl.load(seed_at) if DROPS else 0
    grad_lo_tile, grad_hi_tile = tl.zeros([W, P], tl.float32), tl.zeros([W, P], tl.float32)
    for b in range(part, B, n_part):
        row, batch = tl.cast(b * N + head, tl.int32), tl.cast(b, tl.int64)
        q_at, k_at, v_at = batch * q_row + head * q_head, batch * k_row + head * k_head, batch * v_row + head * v_head
        for t0 in range(tl.maximum(-diagonal, 0) * W, tl.minimum(T, S - diagonal * W), W):
            t, s0 = t0 + a, t0 + diagonal * W
            s = s0 + a
            lowest = _lowest(first + batch * first_row, t, T, S)
            if tl.min(lowest) < s0 + W:
                qu_tile, qv_tile = _load(qu + q_at, t, T, q_t, H, P), _load(qv + q_at, t, T, q_t, H, P)
                lo = tl.dot(qv_tile, tl.trans(r_lo), input_precision=PRECISION)
                hi = tl.dot(qv_tile, tl.trans(r_hi), input_precision=PRECISION)
                score = tl.dot(qu_tile, tl.trans(_load(k + k_at, s, S, k_s, H, P)), input_precision=PRECISION) + _shift(
                    lo, hi, W
                )
                log_sum_W = tl.load(log_sum + tl.cast(row, tl.int64) * T + t, mask=t < T, other=0.0)
                mean_W = tl.load(mean + tl.cast(row, tl.int64) * T + t, mask=t < T, other=0.0)
                grad_score, _ = _gradient(
                    score, s, t, lowest, M, log_sum_W, mean_W, _load(grad + q_at, t, T, q_t, H, P),
                    _load(v + v_at, s, S, v_s, H, P), seed, row, dropatt, DROPS, PRECISION,
                )  # fmt: skip
                grad_lo, grad_hi = _unshift(grad_score, W)
                grad_lo_tile += tl.dot(tl.trans(grad_lo.to(qv_tile.dtype)), qv_tile, input_precision=PRECISION)
                grad_hi_tile += tl.dot(tl.trans(grad_hi.to(qv_tile.dtype)), qv_tile, input_precision=PRECISION)
    own = (part * tl.num_programs(1) + head) * tl.num_programs(0) + tl.program_id(0)
    partial += own * 2 * W * H
    _store(partial, grad_lo_tile, a, W, H, H, P)
    _store(partial + W * H, grad_hi_tile, a, W, H, H, P)

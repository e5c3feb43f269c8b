"""Attention with scores of positions that are given, as fused GPU kernels: their tiles, the phases of queries, the programs.

`flash.py` multiplies what surrounds them and launches them. Content is scored tile by tile, as in flash attention. Scores of
positions lie in memory as the library multiplied them, with a row for each query and a column for each distance. So the
relative shift is an address: query t, with x = T - 1 - t queries after it, needs for key s the product with position key s + x.

**Phases.** To load and store eight numbers at once, what is read must begin at a multiple of eight, and a shift by x breaks
that. So each x is cut in two, the phase p = x % 8 and the rest, x // 8 * 8. The queries of a phase are multiplied with position
keys from row p on: the product itself has shifted them by p. The rest is a part of the address, a multiple of eight:

    x                  0    1    2  …   7    8    9  …    20    queries from the last one on
    phase p            0    1    2  …   7    0    1  …     4    one product each, with position keys p, p + 1, p + 2, …
    row of the phase   0    0    0  …   0    1    1  …     2    x // 8
    column of key s    s    s    s  …   s   s+8  s+8 …   s+16   there is the product with position key s + 16 + 4 = s + x

Scores have the shape (8, N, B, U, C), for U = ceil(T / 8) queries of a phase. Gradients of these scores are written to the same
places of a second tensor, and the library multiplies them on.

The backward pass computes each weight once more, from the logarithm of its row's sum, in the program of its key; the program
of its query then reads the gradient of its score. There are no atomics, so results are the same every time. Accumulation is in
fp32. Scores are in units of log 2, because a GPU computes powers of two.

Loops are cut in three: only tiles at the edges of what is seen are masked.

Lengths and counts are not specialized: one compiled kernel serves all lengths, so a short last segment, or a memory that grows,
does not make a run wait for the compiler. Programs are counted along the first axis of the grid, the only one that can be
longer than 65,535. Offsets are 64-bit wherever they are multiplied by a stride.

Shapes: B batch, T tgt_len, M memory, S = M + T keys, N heads, H d_head, C columns of a score of positions, at least S and a
multiple of eight, Q queries and K keys of a tile, P H rounded up to a power of two.
"""
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from typing import NamedTuple

import torch
import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
jit = triton.jit(do_not_specialize=["T", "S", "C", "B", "part"])


class Tile(NamedTuple):
    """How the work of a kernel is divided: queries and keys of a tile, the number of warps that share it, tiles under way."""

    queries: int
    keys: int
    warps: int
    stages: int = 3
    registers: int | None = None


class Tiles(NamedTuple):
    """The tiles of the kernels: of the forward pass, and for the gradients of queries, and of keys and values."""

    forward: Tile
    queries: Tile
    keys: Tile


def tiles_of(d_head: int, dtype: torch.dtype, *, drops: bool = False, tgt_len: int = 1024) -> Tiles:
    """Return the tiles for a width of heads, with or without dropout: the largest that spill few registers, of those tried.

    A short segment has few programs; they should all run at once, so each takes fewer registers.

    They are not chosen by timing when a program runs, because other tiles have another order of sums. Wide heads in fp32 take
    smaller tiles, to fit the 99 KB of shared memory of desktop GPUs.
    """
    if dtype == torch.float32:
        width = 16 if d_head > 64 else 32
        usual = Tile(width, width, 8, 2)
        return Tiles(usual, usual, usual._replace(stages=1))
    if d_head <= 64:
        keys = Tile(64, 32, 4, 2) if drops else Tile(64, 64, 4, 3)
        if tgt_len <= 96 and d_head <= 32:
            keys = Tile(32, 64, 4, 2, 168)
        return Tiles(Tile(64, 64, 4, 3, 168), Tile(64, 64, 4, 4), keys)
    if d_head <= 128:
        return Tiles(*[Tile(32, 32, 4)] * 3)
    usual = Tile(32, 32, 8)
    return Tiles(usual, usual, usual._replace(stages=1))


@triton.jit
def load(matrix, at, n, stride, H: tl.constexpr, P: tl.constexpr, MASKED: tl.constexpr = True):
    """Load the rows `at` of a matrix (n, H), with zeros for those outside; unmasked, all are inside."""
    h = tl.arange(0, P)
    places = (matrix + at.to(tl.int64) * stride)[:, None] + h[None, :]
    if MASKED or P != H:  # noqa: SIM108 (the compiler knows no such expression)
        tile = tl.load(places, mask=(at < n)[:, None] & (h < H)[None, :], other=0.0)
    else:
        tile = tl.load(places)
    return tile


@triton.jit
def store(matrix, tile, at, n, stride, H: tl.constexpr, P: tl.constexpr):
    """Store a tile as the rows `at` of a matrix (n, H)."""
    h = tl.arange(0, P)
    inside = ((at >= 0) & (at < n))[:, None] & (h < H)[None, :]
    tl.store((matrix + at.to(tl.int64) * stride)[:, None] + h[None, :], tile.to(matrix.dtype.element_ty), mask=inside)


@triton.jit
def _phase_row(batch, head, t, T, B, N):
    """Return which row of all queries in phases (8, N, B, U) a query is; those outside get another's."""
    after = tl.maximum(T - 1 - t, 0)
    return ((after % 8 * N + head) * B + batch) * tl.cdiv(T, 8) + after // 8


@triton.jit
def _columns(batch, head, t, s, T, C, B, N):
    """Return where the scores of positions of a tile lie in a tensor (8, N, B, U, C), and which are in their row."""
    C = C // 8 * 8  # the same; it tells the compiler that eight scores can be loaded at once
    column = (tl.maximum(T - 1 - t, 0) // 8 * 8)[:, None] + s[None, :]
    return (_phase_row(batch, head, t, T, B, N) * C)[:, None] + column, column < C


@triton.jit
def _is_visible(s, t, lowest, M):
    """Say which keys each query sees: from its lowest one to its own."""
    return (s[None, :] >= lowest[:, None]) & (s[None, :] <= M + t[:, None])


@triton.jit
def _lowest(first, t, T):
    """Load the lowest key that each query sees; queries outside see none, not even those beyond S that fill a tile."""
    return tl.load(first + t, mask=t < T, other=2147483647).to(tl.int32)


@triton.jit
def words_of(seed, row, t):
    """Return a random number for each row, or for each t of one; with them begin the streams that `factor_of` reads."""
    zero = (row + t) * 0
    word, _, _, _ = tl.philox(seed, zero + t, zero + row, zero, zero)
    return word


@triton.jit
def factor_of(word, column, p):
    """Return the factors of elements: 0 where dropped, with probability p, else what preserves the mean.

    The number of an element is its place in a stream of steps of an odd constant, mixed by shifts and products. A generator
    for each element, such as Philox, would take longer than all else that attention does.
    """
    x = word + column.to(tl.uint32) * 0x9E3779B9
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15)) * 0xD35A2D97
    x = x ^ (x >> 15)
    level = (tl.full([], 4294967296.0, tl.float32) * p).to(tl.uint32)
    return tl.where(x >= level, 1 / (1 - p), 0.0)


@triton.jit
def _kept(seed, row, t, s, dropatt):
    """Return the factor of each attention weight, 0 where dropped; all kernels get the same one for the same weight."""
    return factor_of(words_of(seed, row, t)[:, None], s[None, :], dropatt)


@triton.jit
def gathered(score, v_tile, highest, total, attended, seed, row, t, s, dropatt, DROPS: tl.constexpr, PRECISION: tl.constexpr):
    """Go on with the softmax over a tile of keys, whose score is -inf where they are hidden."""
    new_highest = tl.maximum(highest, tl.max(score, 1))
    weight, faded = tl.exp2(score - new_highest[:, None]), tl.exp2(highest - new_highest)
    total = total * faded + tl.sum(weight, 1)
    if DROPS:
        weight *= _kept(seed, row, t, s, dropatt)
    attended = tl.dot(weight.to(v_tile.dtype), v_tile, attended * faded[:, None], input_precision=PRECISION)
    return new_highest, total, attended


@triton.jit
def score_gradient(
    score, v_tile, grad_tile, log_sum, mean, seed, row, t, s, dropatt, DROPS: tl.constexpr, PRECISION: tl.constexpr
):
    """Return the gradients of a tile of scores, -inf where they are hidden, and the weights with which values were gathered."""
    weight = tl.exp2(score - log_sum[:, None])
    grad_weight = tl.dot(grad_tile, tl.trans(v_tile), input_precision=PRECISION)
    dropped = weight
    if DROPS:
        kept = _kept(seed, row, t, s, dropatt)
        grad_weight, dropped = grad_weight * kept, weight * kept
    return (weight * (grad_weight - mean[:, None])).to(grad_tile.dtype), dropped.to(grad_tile.dtype)


@jit
def query_kernel(
    q, u, v, out, grad, first, qu, qv, mean, grad_position, seed_at,
    q_row, q_head, q_t, u_head, v_head, qu_row, qu_head, qu_t, out_row, out_head, out_t, sum_row, sum_head, first_row,
    T, S, C, B, part, dropatt,
    H: tl.constexpr, P: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, DROPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add u and v to a block of queries and scale them; those with v are written in phases, with zeros after the last.

    Before the backward pass, also sum the products of an output and its gradient, and write zeros as the gradients of scores
    that no program of keys writes: those of positions before the first key that a query sees, and after its own.
    """
    n_tile = tl.cdiv(T, Q)  # also of all phases together, because Q is a multiple of eight
    x, row = tl.program_id(0) % n_tile * Q + tl.arange(0, Q), tl.program_id(0) // n_tile
    N = tl.num_programs(0) // (n_tile * B)
    batch, head = (row % B).to(tl.int64), (row // B).to(tl.int64)
    SCALE: tl.constexpr = H**-0.5
    t = T - 1 - x  # negative after the last
    h = tl.arange(0, P)
    inside = (t >= 0)[:, None] & (h < H)[None, :]
    places = (t.to(tl.int64) * q_t)[:, None] + h[None, :]
    query = tl.load(q + batch * q_row + head * q_head + places, mask=inside, other=0.0).to(tl.float32)
    with_u = (query + tl.load(u + head * u_head + h, mask=h < H, other=0.0).to(tl.float32)[None, :]) * (SCALE * LOG2_E)
    with_v = (query + tl.load(v + head * v_head + h, mask=h < H, other=0.0).to(tl.float32)[None, :]) * (SCALE * LOG2_E)
    store(qu + batch * qu_row + head * qu_head, with_u, t, T, qu_t, H, P)
    of_phase = tl.cdiv(T, 8)
    phase, moved = x % 8, x // 8 * 8
    at = ((phase * N + head) * B + batch) * of_phase + x // 8
    mask = (x < of_phase * 8)[:, None] & (h < H)[None, :]
    with_v = tl.where((t >= 0)[:, None], with_v, 0.0)
    tl.store(qv + (at * H)[:, None] + h[None, :], with_v.to(qv.dtype.element_ty), mask=mask)
    if grad is not None:
        places = batch * out_row + head * out_head + (t.to(tl.int64) * out_t)[:, None] + h[None, :]
        products = tl.load(grad + places, mask=inside, other=0.0).to(tl.float32)
        products *= tl.load(out + places, mask=inside, other=0.0).to(tl.float32)
        tl.store(mean + batch * sum_row + head * sum_head + t, tl.sum(products, 1), mask=t >= 0)
        C = C // 8 * 8
        is_query = x < of_phase * 8
        unseen = tl.where(t >= 0, moved + tl.load(first + batch * first_row + t, mask=t >= 0, other=0).to(tl.int32), C)
        # up to a multiple of eight, to store eight at once; the programs of keys write after this one
        unseen = tl.cdiv(tl.where(is_query, tl.minimum(unseen, C), 0), 8) * 8
        rows = grad_position + (at * C)[:, None]
        nothing = tl.zeros([Q, K], grad_position.dtype.element_ty)
        for column in range(0, tl.max(unseen), K):
            c = column + tl.arange(0, K)
            tl.store(rows + c[None, :], nothing, mask=c[None, :] < unseen[:, None])
        c = C - 16 + tl.arange(0, 16)
        after = (c[None, :] > (S - 1 - phase)[:, None]) & (c >= 0)[None, :] & is_query[:, None]
        tl.store(rows + c[None, :], tl.zeros([Q, 16], grad_position.dtype.element_ty), mask=after)


@jit
def forward_kernel(
    qu, k, v, position, first, out, log_sum, seed_at,
    qu_row, qu_head, qu_t, k_row, k_head, k_s, v_row, v_head, v_s, out_row, out_head, out_t, sum_row, sum_head, first_row,
    T, S, C, B, part, dropatt,
    H: tl.constexpr, P: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, DROPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend with one block of queries of one head; one program each."""
    n_tile, M = tl.cdiv(T, Q), S - T
    tile, row = n_tile - 1 - tl.program_id(0) % n_tile, tl.program_id(0) // n_tile  # the longest first
    t0, N = tile * Q, tl.num_programs(0) // (n_tile * B)
    batch, head = (row % B).to(tl.int64), (row // B).to(tl.int64)
    k, v = k + batch * k_row + head * k_head, v + batch * v_row + head * v_head
    b, t = tl.arange(0, K), t0 + tl.arange(0, Q)
    qu_tile = load(qu + batch * qu_row + head * qu_head, t, T, qu_t, H, P)
    first += batch * first_row
    lowest = _lowest(first, t, T)
    seed = tl.load(seed_at) + part if DROPS else 0

    begin, end = tl.min(lowest) // K * K, tl.minimum(S, M + t0 + Q)
    seen_end = tl.maximum((M + t0 + 1) // K * K, begin)
    seen_begin = tl.minimum(tl.cdiv(tl.max(tl.load(first + t, mask=t < T, other=0).to(tl.int32)), K) * K, seen_end)
    # a finite score, so that a row that sees nothing in a tile has no NaN
    highest, total, attended = tl.full([Q], -1e30, tl.float32), tl.zeros([Q], tl.float32), tl.zeros([Q, P], tl.float32)
    for stage in tl.static_range(3):
        low = begin if stage == 0 else (seen_begin if stage == 1 else seen_end)
        high = seen_begin if stage == 0 else (seen_end if stage == 1 else end)
        for s0 in range(low, high, K):
            s = s0 + b
            at, inside = _columns(batch, head, t, s, T, C, B, N)
            by_position = tl.load(position + at, mask=inside, other=0.0)
            k_tile = load(k, s, S, k_s, H, P, stage != 1)
            score = tl.dot(qu_tile, tl.trans(k_tile), input_precision=PRECISION)
            # an addition would become the product's initial value, and its load would not be pipelined
            score = tl.fma(score, 1.0, by_position.to(tl.float32))
            if stage != 1:
                score = tl.where(_is_visible(s, t, lowest, M), score, float("-inf"))
            v_tile = load(v, s, S, v_s, H, P, stage != 1)
            highest, total, attended = gathered(
                score, v_tile, highest, total, attended, seed, row, t, s, dropatt, DROPS, PRECISION
            )
    total = tl.where(t < T, total, 1.0)
    store(out + batch * out_row + head * out_head, attended / total[:, None], t, T, out_t, H, P)
    tl.store(log_sum + batch * sum_row + head * sum_head + t, highest + tl.log2(total), mask=t < T)


@jit
def key_gradient_kernel(
    qu, k, v, position, first, grad, log_sum, mean, grad_k, grad_v, grad_position, seed_at,
    qu_row, qu_head, qu_t, k_row, k_head, k_s, v_row, v_head, v_s, out_row, out_head, out_t, sum_row, sum_head, first_row,
    grad_k_row, grad_k_head, grad_k_s,
    T, S, C, B, part, dropatt,
    H: tl.constexpr, P: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, DROPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of one block of keys and values of one head, and of all scores of these keys."""
    n_tile, M = tl.cdiv(S, K), S - T
    s0, row = tl.program_id(0) % n_tile * K, tl.program_id(0) // n_tile
    N = tl.num_programs(0) // (n_tile * B)
    batch, head = (row % B).to(tl.int64), (row // B).to(tl.int64)
    k, v = k + batch * k_row + head * k_head, v + batch * v_row + head * v_head
    qu, grad = qu + batch * qu_row + head * qu_head, grad + batch * out_row + head * out_head
    log_sum, mean = log_sum + batch * sum_row + head * sum_head, mean + batch * sum_row + head * sum_head
    first += batch * first_row
    a, s = tl.arange(0, Q), s0 + tl.arange(0, K)
    k_tile, v_tile = load(k, s, S, k_s, H, P), load(v, s, S, v_s, H, P)
    seed = tl.load(seed_at) + part if DROPS else 0
    grad_k_tile, grad_v_tile = tl.zeros([K, P], tl.float32), tl.zeros([K, P], tl.float32)

    end, unseen = 0, T  # after the last query that sees any of these keys; the first that does not see all of those before it
    for t0 in range(0, T, 512):
        t = t0 + tl.arange(0, 512)
        lowest = _lowest(first, t, T)
        end = tl.maximum(end, tl.max(tl.where(lowest < s0 + K, t + 1, 0)))
        unseen = tl.minimum(unseen, tl.min(tl.where(lowest > s0, t, T)))
    begin = tl.maximum(s0 - M, 0) // Q * Q
    seen_begin = tl.minimum(tl.cdiv(tl.maximum(s0 + K - 1 - M, 0), Q) * Q, tl.maximum(begin, end))
    seen_end = tl.maximum(tl.minimum(unseen, end) // Q * Q, seen_begin)
    for stage in tl.static_range(3):
        low = begin if stage == 0 else (seen_begin if stage == 1 else seen_end)
        high = seen_begin if stage == 0 else (seen_end if stage == 1 else end)
        for t0 in range(low, high, Q):
            t = t0 + a
            qu_tile, grad_tile = load(qu, t, T, qu_t, H, P, stage != 1), load(grad, t, T, out_t, H, P, stage != 1)
            at, inside = _columns(batch, head, t, s, T, C, B, N)
            by_position = tl.load(position + at, mask=inside, other=0.0)
            log_sum_Q, mean_Q = tl.load(log_sum + t, mask=t < T, other=0.0), tl.load(mean + t, mask=t < T, other=0.0)
            score = tl.dot(qu_tile, tl.trans(k_tile), input_precision=PRECISION) + by_position
            if stage != 1:
                visible = _is_visible(s, t, _lowest(first, t, T), M)
                score = tl.where(visible, score, float("-inf"))
            grad_score, dropped = score_gradient(
                score, v_tile, grad_tile, log_sum_Q, mean_Q, seed, row, t, s, dropatt, DROPS, PRECISION
            )
            grad_k_tile = tl.dot(tl.trans(grad_score), qu_tile, grad_k_tile, input_precision=PRECISION)
            grad_v_tile = tl.dot(tl.trans(dropped), grad_tile, grad_v_tile, input_precision=PRECISION)
            if stage != 1:
                inside = inside & (t < T)[:, None]
                tl.store(grad_position + at, grad_score, mask=inside)
            else:
                tl.store(grad_position + at, grad_score)
    own = batch * grad_k_row + head * grad_k_head
    store(grad_k + own, grad_k_tile * LN_2, s, S, grad_k_s, H, P)
    store(grad_v + own, grad_v_tile, s, S, grad_k_s, H, P)


@jit
def query_gradient_kernel(
    k, grad_position, first, grad_qv, grad_q, grad_biases, seed_at,
    k_row, k_head, k_s, out_row, out_head, out_t, first_row, biases_row, biases_head, biases_t,
    T, S, C, B, part, dropatt,
    H: tl.constexpr, P: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, DROPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of one block of queries of one head, whose sums are those of u and v, from those of the scores."""
    n_tile, M = tl.cdiv(T, Q), S - T
    tile, row = n_tile - 1 - tl.program_id(0) % n_tile, tl.program_id(0) // n_tile
    t0, N = tile * Q, tl.num_programs(0) // (n_tile * B)
    batch, head = (row % B).to(tl.int64), (row // B).to(tl.int64)
    k += batch * k_row + head * k_head
    SCALE: tl.constexpr = H**-0.5
    b, h, t = tl.arange(0, K), tl.arange(0, P), t0 + tl.arange(0, Q)
    begin, end = tl.min(_lowest(first + batch * first_row, t, T)) // K * K, tl.minimum(S, M + t0 + Q)
    grad_qu_tile = tl.zeros([Q, P], tl.float32)
    for s0 in range(begin, end, K):
        s = s0 + b
        at, inside = _columns(batch, head, t, s, T, C, B, N)
        grad_score = tl.load(grad_position + at, mask=inside & (t < T)[:, None], other=0.0)
        grad_qu_tile = tl.dot(grad_score, load(k, s, S, k_s, H, P), grad_qu_tile, input_precision=PRECISION)
    places = (_phase_row(batch, head, t, T, B, N) * H)[:, None] + h[None, :]
    grad_qv_tile = tl.load(grad_qv + places, mask=(t < T)[:, None] & (h < H)[None, :], other=0.0).to(tl.float32)
    store(grad_q + batch * out_row + head * out_head, (grad_qu_tile + grad_qv_tile) * SCALE, t, T, out_t, H, P)
    grad_biases += batch * biases_row + head * biases_head + tile * biases_t + h
    tl.store(grad_biases, tl.sum(grad_qu_tile, 0) * SCALE, mask=h < H)
    tl.store(grad_biases + H, tl.sum(grad_qv_tile, 0) * SCALE, mask=h < H)


@triton.jit(do_not_specialize=["S", "n_row", "C"])
def phase_kernel(by_phase, out, S, n_row, C, H: tl.constexpr, W: tl.constexpr, R: tl.constexpr):
    """Add up the gradients of R position keys of one head from all eight phases, (8, N, C, H), in units of log 2.

    Phase w begins w rows later. Rows from S on become zeros.
    """
    n_tile = tl.cdiv(n_row, R)
    s, head, h = tl.program_id(0) % n_tile * R + tl.arange(0, R), tl.program_id(0) // n_tile, tl.arange(0, W)
    N = tl.num_programs(0) // n_tile
    total = tl.zeros([R, W], tl.float32)
    for phase in tl.static_range(8):
        at = ((phase * N + head) * C + s - phase).to(tl.int64)[:, None] * H + h[None, :]
        inside = ((s >= phase) & (s < S))[:, None] & (h < H)[None, :]
        total += tl.load(by_phase + at, mask=inside, other=0.0).to(tl.float32)
    at = (s * N + head).to(tl.int64)[:, None] * H + h[None, :]
    tl.store(out + at, (total * LN_2).to(out.dtype.element_ty), mask=(s < n_row)[:, None] & (h < H)[None, :])

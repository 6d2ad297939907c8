"""Pieces of the sm_90 forward that returns its weights: key ranges, scores of a tile, P on its way
out, and P V."""

import triton.language as tl

from inductor_gqa.kernels.gluon_tiles import (
    WHY_NOT,
    gl,
    group_barrier,
    hand_back,
    hidden_scores,
    jit,
    mbarrier,
    tma,
    tma_store,
)

if WHY_NOT is None:
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        warpgroup_mma,
        warpgroup_mma_wait,
    )

BM = tl.constexpr(64)  # rows of a group, keys of a streamed tile, and lanes of a head
D = tl.constexpr(64)


@jit
def nearest(x):
    """Nearest tf32 value; of a NaN anything."""
    return ((x.to(gl.int32, bitcast=True) + 0x1000) & -0x2000).to(gl.float32, bitcast=True)


@jit
def nearest_or_nan(x):
    return gl.where(x == x, nearest(x), x)


@jit
def key_tiles(
    row0, S, band_lo, band_hi, ROWS: tl.constexpr, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr
):
    """Range of key tiles that hold all that rows row0 .. row0+ROWS see.

    Bounds are clamped before they are divided: the quotient of a negative number rounds up.
    """
    first = row0 * 0
    end = first + S
    if HAS_HI:
        end = gl.maximum(gl.minimum(end, row0 + ROWS + band_hi), 0)
    if HAS_LO:
        first = gl.minimum(gl.maximum(row0 + band_lo, 0), S) // BM
    return first, gl.maximum(gl.cdiv(end, BM), first)


@jit
def score_tile(
    q_hi, q_lo, ring, bars, item, row0, col0, sizes, PARTS: tl.constexpr, SLOTS: tl.constexpr,
    HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, LAYOUT: tl.constexpr,
):  # fmt: skip
    """Scores of one key tile, -inf where a row does not see a key."""
    S, band_lo, band_hi = sizes[3], sizes[4], sizes[5]
    full, empty = bars
    slot = item % SLOTS
    s = gl.zeros([BM, BM], gl.float32, layout=LAYOUT)
    mbarrier.wait(full.index(slot), (item // SLOTS) & 1)
    hi = ring.index(slot * PARTS).reshape([BM, D]).permute((1, 0))
    if PARTS == 2:
        lo = ring.index(slot * PARTS + 1).reshape([BM, D]).permute((1, 0))
        s = warpgroup_mma(q_lo, hi, s, use_acc=False, is_async=True)
        s = warpgroup_mma(q_hi, lo, s, is_async=True)
        s = warpgroup_mma(q_hi, hi, s, is_async=True)
    else:
        s = warpgroup_mma(q_hi, hi, s, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))
    hand_back(empty.index(slot))
    is_open = col0 + BM <= S
    if HAS_HI:
        is_open = is_open & (col0 + BM - 1 - row0 <= band_hi)
    if HAS_LO:
        is_open = is_open & (col0 - (row0 + BM - 1) >= band_lo)
    if not is_open:
        s = hidden_scores(s, 0, row0, col0, S, band_lo, band_hi, HAS_LO, HAS_HI, HAS_LO, False)
    return s


@jit
def store_weights(weights, staging, p, bh, row0, col0, L, S, P_TMA: tl.constexpr):
    """P of one key tile to memory: by the copy engine, or where it cannot write such rows 128 bytes
    at a time. As they lie in the products, threads would write 32, which took longer than all else.
    """
    desc, ptr = weights
    if P_TMA:
        tma.store_wait(pendings=0)
    group_barrier()
    tile = staging.reshape([BM, BM])
    tile.store(p)
    if P_TMA:
        fence_async_shared()
        group_barrier()
        tma_store(desc, [0, bh, row0, 0, col0], staging)
    else:
        group_barrier()
        SOME: gl.constexpr = 8  # rows at a time, whose addresses registers have room for
        WIDE: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
        rows = gl.arange(0, SOME, layout=gl.SliceLayout(1, WIDE))[:, None]
        cols = gl.arange(0, BM, layout=gl.SliceLayout(0, WIDE))[None, :]
        at = (ptr + (bh.to(gl.int64) * L + row0) * S + col0) + rows * S
        left = L - row0 - rows
        for i in gl.static_range(0, BM, SOME):
            inside = (left > 0) & (cols < S - col0)
            gl.store(at + cols, tile.slice(i, SOME).load(WIDE), mask=inside)
            at += SOME * S
            left -= SOME


@jit
def as_left_operand(p, LAYOUT: tl.constexpr):
    """P as the left operand of tf32 products, its keys in the order of `weights_prepare.paired`: so
    ordered, every number stays with the thread that has it."""
    pairs = p.reshape([BM, BM // 8, 4, 2]).permute((0, 1, 3, 2)).reshape([BM, BM])
    return gl.convert_layout(pairs, LAYOUT)


@jit
def add_values(
    acc, p, ring, bars, item, PARTS: tl.constexpr, SLOTS: tl.constexpr, LAYOUT: tl.constexpr
):
    """acc + P V of one key tile."""
    full, empty = bars
    slot = item % SLOTS
    hi = ring.index(slot * PARTS).reshape([D, BM]).permute((1, 0))
    p_hi = nearest(p)
    left = as_left_operand(p_hi, LAYOUT)
    mbarrier.wait(full.index(slot), (item // SLOTS) & 1)
    if PARTS == 2:
        # Tensor cores truncate as they add. Over thousands of keys that would be all of the error:
        # each tile is summed for itself.
        lo = ring.index(slot * PARTS + 1).reshape([D, BM]).permute((1, 0))
        rest = as_left_operand(nearest(p - p_hi), LAYOUT)
        O_LAYOUT: gl.constexpr = acc.type.layout
        part = gl.zeros([BM, D], gl.float32, layout=O_LAYOUT)
        part = warpgroup_mma(rest, hi, part, use_acc=False, is_async=True)
        part = warpgroup_mma(left, lo, part, is_async=True)
        part = warpgroup_mma(left, hi, part, is_async=True)
        part, left, rest = warpgroup_mma_wait(num_outstanding=0, deps=(part, left, rest))
        acc += part
    else:
        acc = warpgroup_mma(left, hi, acc, is_async=True)
        acc, left = warpgroup_mma_wait(num_outstanding=0, deps=(acc, left))
    hand_back(empty.index(slot))
    return acc


@jit
def store_queries(q, q_ptr, stride_q_l, stride_q_d, n_rows):
    """BM rows of Q into shared memory as they are."""
    LOAD: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    i = gl.arange(0, BM, layout=gl.SliceLayout(1, LOAD))[:, None]
    t = gl.arange(0, D, layout=gl.SliceLayout(0, LOAD))[None, :]
    at = (q_ptr + i * stride_q_l) + t * stride_q_d
    q.store(gl.load(at, mask=(i < n_rows) & (t >= 0), other=0.0))

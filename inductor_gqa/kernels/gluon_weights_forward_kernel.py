"""The forward that returns its weights, fp32, for sm_90: one warp copies, up to three groups of
four warps multiply.

A program owns 64 query rows a group and walks over such tiles. Keys stream twice: for each row's
maximum and sum, then for P, which is written once and normalised, and O = P V. Products are TF32 of
operands rounded to nearest, or (PARTS = 2) three products of operands split into a rounded part and
the rounded rest, as exact as fp32. Assumes K and V prepared, see `weights_prepare`.
"""

import triton.language as tl

from inductor_gqa.kernels.gluon_tiles import (
    WHY_NOT,
    barriers,
    gl,
    group_barrier,
    hand_back,
    hidden_scores,
    jit,
    mbarrier,
    my_tiles,
    softmax_step,
    store_rotated,
    tile_at,
    tma,
    tma_load,
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


@jit
def consumer(
    W: tl.constexpr, given,
    K: tl.constexpr, R: tl.constexpr, GROUPS: tl.constexpr, PARTS: tl.constexpr,
    SLOTS: tl.constexpr, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, ROPE: tl.constexpr,
    P_TMA: tl.constexpr,
):  # fmt: skip
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 1)
    ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    q_smem, ring, bars, out_ptr, weights, lse_ptr, q_rows, tables, sizes, unit = given
    n_tiles, B, L, S, band_lo, band_hi = sizes
    q_ptr, stride_q_b, stride_q_l, stride_q_k, stride_q_r, stride_q_d = q_rows
    staging = q_smem.index(W)  # of P too: Q is in registers by then
    q_tile = staging.reshape([BM, D])
    seen = 0  # streamed tiles so far: names slot and phase
    for i in range(my_tiles(n_tiles)):
        b, hk, r, tile_row = tile_at(i, L, B, K, R, GROUPS * BM)
        first, stop = key_tiles(tile_row, S, band_lo, band_hi, GROUPS * BM, HAS_LO, HAS_HI)
        n = stop - first
        row0 = tile_row + W * BM
        batch = b.to(gl.int64)
        position = row0.to(gl.int64)
        from_q = q_ptr + (batch * stride_q_b + position * stride_q_l
                          + hk.to(gl.int64) * stride_q_k + r.to(gl.int64) * stride_q_r)  # fmt: skip
        if P_TMA:
            tma.store_wait(pendings=0)
        group_barrier()
        if ROPE:
            cos_ptr, sin_ptr, stride_table_b, stride_table_l, stride_table_w = tables
            table = batch * stride_table_b + position * stride_table_l
            store_rotated(
                q_tile, from_q, cos_ptr + table, sin_ptr + table, stride_q_l, stride_q_d,
                stride_table_l, stride_table_w, L - row0, BM, D,
            )  # fmt: skip
        else:
            store_queries(q_tile, from_q, stride_q_l, stride_q_d, L - row0)
        group_barrier()
        q = q_tile.load(LEFT)
        q_hi = nearest_or_nan(q)
        q_lo = q_hi
        if PARTS == 2:
            q_lo = nearest_or_nan(q - q_hi)

        m = gl.full([BM], -float("inf"), gl.float32, layout=ROWS)
        total = gl.full([BM], 0.0, gl.float32, layout=ROWS)
        for t in range(n):
            s = score_tile(
                q_hi, q_lo, ring, bars, seen + t, row0, (first + t) * BM, sizes, PARTS, SLOTS,
                HAS_LO, HAS_HI, LAYOUT,
            )  # fmt: skip
            _, m, total, _ = softmax_step(s, m, total, unit, True)
        seen += n

        # A row without a visible key is 0 / 0, NaN as in eager.
        inverse = 1.0 / total
        origin = gl.where(m == -float("inf"), 0.0, m)
        bh = (b * K + hk) * R + r
        rows = row0 + gl.arange(0, BM, layout=ROWS)
        gl.store(lse_ptr + bh.to(gl.int64) * L + rows, m + gl.log2(total), mask=rows < L)
        if HAS_LO or HAS_HI:
            hidden = gl.zeros([BM, BM], gl.float32, layout=LAYOUT)
            hidden = hidden + gl.where(total > 0, 0.0, inverse * 0.0)[:, None]
            for t in range(first):
                store_weights(weights, staging, hidden, bh, row0, t * BM, L, S, P_TMA)
            for t in range(stop, gl.cdiv(S, BM)):
                store_weights(weights, staging, hidden, bh, row0, t * BM, L, S, P_TMA)

        acc = gl.zeros([BM, D], gl.float32, layout=LAYOUT)
        for t in range(n):
            col0 = (first + t) * BM
            s = score_tile(
                q_hi, q_lo, ring, bars, seen + 2 * t, row0, col0, sizes, PARTS, SLOTS, HAS_LO,
                HAS_HI, LAYOUT,
            )  # fmt: skip
            p = gl.exp2(s * unit - origin[:, None]) * inverse[:, None]
            store_weights(weights, staging, p, bh, row0, col0, L, S, P_TMA)
            acc = add_values(acc, p, ring, bars, seen + 2 * t + 1, PARTS, SLOTS, LEFT)
        seen += 2 * n

        acc = gl.where((total > 0)[:, None], acc, inverse[:, None] * 0.0)
        cols = gl.arange(0, D, layout=gl.SliceLayout(0, LAYOUT))[None, :]
        to = out_ptr + ((batch * L + position) * (K * R) + hk * R + r) * D
        at = (to + (rows - row0)[:, None] * (K * R * D)) + cols
        gl.store(at, acc, mask=(rows < L)[:, None] & (cols >= 0))
    if P_TMA:
        tma.store_wait(pendings=0)


@jit
def producer(
    copied, K: tl.constexpr, R: tl.constexpr, GROUPS: tl.constexpr, PARTS: tl.constexpr,
    SLOTS: tl.constexpr, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr,
):  # fmt: skip
    k_desc, v_desc, ring, bars, sizes = copied
    n_tiles, B, L, S, band_lo, band_hi = sizes
    full, empty = bars
    seen = 0
    for i in range(my_tiles(n_tiles)):
        b, hk, _, row0 = tile_at(i, L, B, K, R, GROUPS * BM)
        first, stop = key_tiles(row0, S, band_lo, band_hi, GROUPS * BM, HAS_LO, HAS_HI)
        n = stop - first
        for j in range(3 * n):
            # Keys alone, then keys and values in turn.
            t = gl.where(j < n, j, (j - n) // 2)
            is_value = (j >= n) & ((j - n) % 2 == 1)
            col0 = (first + t) * BM
            slot = (seen + j) % SLOTS
            bar = full.index(slot)
            # A fresh barrier counts as having completed its odd phase: round one never waits.
            mbarrier.wait(empty.index(slot), (((seen + j) // SLOTS) & 1) ^ 1)
            mbarrier.expect(bar, PARTS * 4 * BM * D)
            for part in gl.static_range(PARTS):
                tile = ring.index(slot * PARTS + part)
                if is_value:
                    tma_load(v_desc, [part, b, 0, hk, col0], bar, tile)
                else:
                    tma_load(k_desc, [part, b, col0, hk, 0], bar, tile)
        seen += 3 * n


@jit(do_not_specialize=["n_tiles", "B", "L", "S", "band_lo", "band_hi"])
def weights_forward_sm90_kernel(
    k_desc, v_desc, p_desc, q_ptr, cos_ptr, sin_ptr, out_ptr, weights_ptr, lse_ptr,
    stride_q_b, stride_q_l, stride_q_k, stride_q_r, stride_q_d,
    stride_table_b, stride_table_l, stride_table_w,
    n_tiles, B, L, S, band_lo, band_hi, unit,
    K: tl.constexpr, R: tl.constexpr, GROUPS: tl.constexpr, PARTS: tl.constexpr,
    SLOTS: tl.constexpr, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, ROPE: tl.constexpr,
    P_TMA: tl.constexpr,
):  # fmt: skip
    # Tiles of K are [keys, lanes] and of V [lanes, keys]: 64 x 64 either way, in one ring.
    ring = gl.allocate_shared_memory(gl.float32, [SLOTS * PARTS, 1, 1, BM, 1, D], k_desc.layout)
    q_smem = gl.allocate_shared_memory(gl.float32, [GROUPS, 1, 1, BM, 1, D], k_desc.layout)
    bars = (barriers(SLOTS, 1), barriers(SLOTS, GROUPS))
    fence_async_shared()
    sizes = (n_tiles, B, L, S, band_lo, band_hi)
    q_rows = (q_ptr, stride_q_b, stride_q_l, stride_q_k, stride_q_r, stride_q_d)
    tables = (cos_ptr, sin_ptr, stride_table_b, stride_table_l, stride_table_w)
    weights = (p_desc, weights_ptr)
    given = (q_smem, ring, bars, out_ptr, weights, lse_ptr, q_rows, tables, sizes, unit)
    copied = (k_desc, v_desc, ring, bars, sizes)
    if GROUPS == 3:
        gl.warp_specialize([
            (consumer, (0, given, K, R, GROUPS, PARTS, SLOTS, HAS_LO, HAS_HI, ROPE, P_TMA)),
            (consumer, (1, given, K, R, GROUPS, PARTS, SLOTS, HAS_LO, HAS_HI, ROPE, P_TMA)),
            (consumer, (2, given, K, R, GROUPS, PARTS, SLOTS, HAS_LO, HAS_HI, ROPE, P_TMA)),
            (producer, (copied, K, R, GROUPS, PARTS, SLOTS, HAS_LO, HAS_HI)),
        ], [4, 4, 1], [160, 160, 24])  # fmt: skip
    elif GROUPS == 2:
        gl.warp_specialize([
            (consumer, (0, given, K, R, GROUPS, PARTS, SLOTS, HAS_LO, HAS_HI, ROPE, P_TMA)),
            (consumer, (1, given, K, R, GROUPS, PARTS, SLOTS, HAS_LO, HAS_HI, ROPE, P_TMA)),
            (producer, (copied, K, R, GROUPS, PARTS, SLOTS, HAS_LO, HAS_HI)),
        ], [4, 1], [240, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (consumer, (0, given, K, R, GROUPS, PARTS, SLOTS, HAS_LO, HAS_HI, ROPE, P_TMA)),
            (producer, (copied, K, R, GROUPS, PARTS, SLOTS, HAS_LO, HAS_HI)),
        ], [1], [24])  # fmt: skip

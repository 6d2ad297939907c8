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
    begin_early,
    gl,
    group_barrier,
    jit,
    mbarrier,
    my_tiles,
    softmax_step,
    store_rotated,
    tile_at,
    tma,
    tma_load,
)
from inductor_gqa.kernels.gluon_weights_forward_tiles import (
    BM,
    D,
    add_values,
    key_tiles,
    nearest_or_nan,
    score_tile,
    store_queries,
    store_weights,
)

if WHY_NOT is None:
    from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared


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
    begin_early()
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

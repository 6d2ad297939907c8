"""dQ for sm_90: holds 2 x 64 query rows and sums over the keys; see `gluon_backward_keys`."""

import triton.language as tl

from inductor_gqa.kernels.gluon_ends import BM, leave, padded_head, padded_rows, turned_back
from inductor_gqa.kernels.gluon_tiles import (
    WHY_NOT,
    barriers,
    begin_early,
    gl,
    hand_back,
    hidden_scores,
    jit,
    keys_of,
    mbarrier,
    my_tiles,
    tile_at,
    tma,
    tma_load,
)

if WHY_NOT is None:
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        warpgroup_mma,
        warpgroup_mma_wait,
    )


@jit
def queries_consumer(
    W: tl.constexpr, q_smem, g_smem, k_smem, v_smem, held, k_bars, v_bars, dq_desc,
    rows_ptr, tables, sizes, unit, scale, K: tl.constexpr, R: tl.constexpr,
    D: tl.constexpr, BN: tl.constexpr, SLOTS: tl.constexpr, HAS_LO: tl.constexpr,
    HAS_HI: tl.constexpr, MASK: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    G_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    A_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, G_LAYOUT, 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    B, L, S, band_lo, band_hi = sizes
    held_full, held_empty = held
    k_full, k_empty = k_bars
    v_full, v_empty = v_bars
    q = q_smem.index(W).reshape([BM, D])
    g = g_smem.index(W).reshape([BM, D])
    zeros = gl.zeros([BM, BN], gl.float32, layout=S_LAYOUT)
    seen = 0
    for i in range(my_tiles(gl.cdiv(L, 2 * BM) * B * K * R)):
        b, hk, r, tile_row = tile_at(i, L, B, K, R, 2 * BM)
        end, n = keys_of(tile_row, L, S, band_lo, band_hi, 2 * BM, BN, HAS_LO, HAS_HI)
        row0 = tile_row + W * BM
        rows = rows_ptr + padded_head(b, hk * R + r, L, K * R) + row0
        lse = gl.load(rows + gl.arange(0, BM, layout=ROWS)) * unit
        delta = gl.load(rows + padded_rows(L) + gl.arange(0, BM, layout=ROWS))
        dq = gl.zeros([BM, D], gl.float32, layout=G_LAYOUT)
        # Nothing yet to multiply in front of the first tile: zeros, with that tile's own keys.
        da = gl.zeros([BM, BN], q_smem.dtype, layout=A_LAYOUT)
        mbarrier.wait(held_full.index(W), i & 1)
        for t in range(n):
            slot = (seen + t) % SLOTS
            last = (seen + gl.maximum(t, 1) - 1) % SLOTS
            full = ((seen + t) // SLOTS) & 1
            col0 = end - (t + 1) * BN
            k = k_smem.index(slot).reshape([BN, D])
            v = v_smem.index(slot).reshape([BN, D])
            mbarrier.wait(k_full.index(slot), full)
            s = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
            mbarrier.wait(v_full.index(slot), full)
            dp = warpgroup_mma(g, v.permute((1, 0)), zeros, use_acc=False, is_async=True)
            before = k_smem.index(last).reshape([BN, D])
            dq = warpgroup_mma(da, before, dq, is_async=True)
            s, dp = warpgroup_mma_wait(num_outstanding=1, deps=(s, dp))
            hand_back(v_empty.index(slot))
            if MASK:
                s = hidden_scores(
                    s, 0, row0, col0, S, band_lo, band_hi, HAS_LO, HAS_HI, True, False
                )
            p = gl.exp2(s * unit - lse[:, None])
            ds = p * (dp - delta[:, None])
            dq, da = warpgroup_mma_wait(num_outstanding=0, deps=(dq, da))
            if t > 0:
                hand_back(k_empty.index(last))
            da = gl.convert_layout(ds.to(q_smem.dtype), A_LAYOUT)
        seen += n
        last = (seen - 1) % SLOTS
        dq = warpgroup_mma(da, k_smem.index(last).reshape([BN, D]), dq, is_async=True)
        dq, da = warpgroup_mma_wait(num_outstanding=0, deps=(dq, da))
        hand_back(k_empty.index(last))
        dq = dq * scale
        if ROPE:
            dq = turned_back(dq, tables, b, row0, L, D)
        leave(dq_desc, [b, row0, hk, r, 0], q_smem.index(W), dq, D)
        tma.store_wait(pendings=0)
        hand_back(held_empty.index(W))


@jit
def queries_producer(
    q_desc, g_desc, k_desc, v_desc, q_smem, g_smem, k_smem, v_smem, held, k_bars, v_bars, sizes,
    K: tl.constexpr, R: tl.constexpr, D: tl.constexpr, BN: tl.constexpr, SLOTS: tl.constexpr,
    HAS_LO: tl.constexpr, HAS_HI: tl.constexpr,
):  # fmt: skip
    B, L, S, band_lo, band_hi = sizes
    held_full, held_empty = held
    k_full, k_empty = k_bars
    v_full, v_empty = v_bars
    seen = 0
    for i in range(my_tiles(gl.cdiv(L, 2 * BM) * B * K * R)):
        b, hk, r, tile_row = tile_at(i, L, B, K, R, 2 * BM)
        end, n = keys_of(tile_row, L, S, band_lo, band_hi, 2 * BM, BN, HAS_LO, HAS_HI)
        for w in gl.static_range(2):
            mbarrier.wait(held_empty.index(w), (i & 1) ^ 1)
            mbarrier.expect(held_full.index(w), 4 * BM * D)
            held_at = [b, tile_row + w * BM, hk, r, 0]
            tma_load(q_desc, held_at, held_full.index(w), q_smem.index(w))
            tma_load(g_desc, held_at, held_full.index(w), g_smem.index(w))
        for t in range(n):
            slot = (seen + t) % SLOTS
            free = (((seen + t) // SLOTS) & 1) ^ 1
            at = [b, end - (t + 1) * BN, hk, 0]
            mbarrier.wait(k_empty.index(slot), free)
            mbarrier.expect(k_full.index(slot), 2 * BN * D)
            tma_load(k_desc, at, k_full.index(slot), k_smem.index(slot))
            mbarrier.wait(v_empty.index(slot), free)
            mbarrier.expect(v_full.index(slot), 2 * BN * D)
            tma_load(v_desc, at, v_full.index(slot), v_smem.index(slot))
        seen += n


@jit(do_not_specialize=["B", "L", "S", "band_lo", "band_hi"])
def queries_sm90_kernel(
    q_desc, g_desc, k_desc, v_desc, dq_desc, rows_ptr,
    cos_ptr, sin_ptr, stride_cos_b, stride_cos_n, stride_sin_b, stride_sin_n,
    B, L, S, band_lo, band_hi, unit, scale, K: tl.constexpr, R: tl.constexpr,
    D: tl.constexpr, BN: tl.constexpr, SLOTS: tl.constexpr, HAS_LO: tl.constexpr,
    HAS_HI: tl.constexpr, MASK: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    DTYPE: gl.constexpr = k_desc.dtype
    q_smem = gl.allocate_shared_memory(DTYPE, [2, 1, BM, 1, 1, D], q_desc.layout)
    g_smem = gl.allocate_shared_memory(DTYPE, [2, 1, BM, 1, 1, D], g_desc.layout)
    k_smem = gl.allocate_shared_memory(DTYPE, [SLOTS, 1, BN, 1, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(DTYPE, [SLOTS, 1, BN, 1, D], v_desc.layout)
    held = (barriers(2, 1), barriers(2, 1))
    k_bars = (barriers(SLOTS, 1), barriers(SLOTS, 2))
    v_bars = (barriers(SLOTS, 1), barriers(SLOTS, 2))
    fence_async_shared()
    begin_early()
    sizes = (B, L, S, band_lo, band_hi)
    tables = (cos_ptr, sin_ptr, stride_cos_b, stride_cos_n, stride_sin_b, stride_sin_n)
    gl.warp_specialize([
        (queries_consumer, (0, q_smem, g_smem, k_smem, v_smem, held, k_bars, v_bars, dq_desc,
                            rows_ptr, tables, sizes, unit, scale, K, R, D, BN, SLOTS,
                            HAS_LO, HAS_HI, MASK, ROPE)),
        (queries_consumer, (1, q_smem, g_smem, k_smem, v_smem, held, k_bars, v_bars, dq_desc,
                            rows_ptr, tables, sizes, unit, scale, K, R, D, BN, SLOTS,
                            HAS_LO, HAS_HI, MASK, ROPE)),
        (queries_producer, (q_desc, g_desc, k_desc, v_desc, q_smem, g_smem, k_smem, v_smem,
                            held, k_bars, v_bars, sizes, K, R, D, BN, SLOTS, HAS_LO, HAS_HI)),
    ], [4, 1], [240, 24])  # fmt: skip

"""The backward kernels for sm_90: a copying warp and two groups of four warps, as in the forward.

Split in two so that no gradient needs atomics: `keys_sm90_kernel` holds 2 x 64 keys and sums dK and
dV over the queries of the whole group, `queries_sm90_kernel` holds 2 x 64 query rows and sums dQ.
P = exp2(s - LSE), dS = P (dP - delta); both are rebuilt in either half. P and dS go from registers
into the products, results leave through the buffers of what was held.
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
    keys_of,
    mbarrier,
    my_tiles,
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

BM = tl.constexpr(64)  # rows of a group, and of a streamed tile


@jit
def key_tile_at(i, S, B, K: tl.constexpr, LONGEST_FIRST: tl.constexpr):
    """Batch, head, first key. Under a causal mask the first keys are seen by most queries."""
    b, k, _, col0 = tile_at(i, S, B, K, 1, 2 * BM)
    if LONGEST_FIRST:
        col0 = (gl.cdiv(S, 2 * BM) - 1) * (2 * BM) - col0
    return b, k, col0


@jit
def padded_head(b, k, r, L, K: tl.constexpr, R: tl.constexpr):
    """Where a head's LSE and delta begin: BM numbers lie in front of them and BM or more behind.

    Tiles may begin before row 0 and end behind row L. Loads without a condition keep one address;
    with conditions the key half spills at D = 128.
    """
    return ((b * K + k) * R + r).to(gl.int64) * ((gl.cdiv(L, BM) + 2) * BM) + BM


@jit
def leave(desc, coordinates, staging, value, D: tl.constexpr):
    """Result of a group out through a buffer that it has finished reading."""
    staging.reshape([BM, D]).store(value.to(staging.dtype))
    fence_async_shared()
    group_barrier()
    tma_store(desc, coordinates, staging)


@jit
def keys_consumer(
    W: tl.constexpr, k_smem, v_smem, q_smem, g_smem, held, q_bars, g_bars, dk_desc, dv_desc,
    lse_ptr, delta_ptr, sizes, unit, scale, K: tl.constexpr, R: tl.constexpr, D: tl.constexpr,
    SLOTS: tl.constexpr, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr,
):  # fmt: skip
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    G_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    A_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, G_LAYOUT, 2)
    COLS: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    n_tiles, B, L, S, band_lo, band_hi = sizes
    held_full, held_empty = held
    q_full, q_empty = q_bars
    g_full, g_empty = g_bars
    k = k_smem.index(W).reshape([BM, D])
    v = v_smem.index(W).reshape([BM, D])
    zeros = gl.zeros([BM, BM], gl.float32, layout=S_LAYOUT)
    per_unit = 1.0 / unit
    seen = 0
    for i in range(my_tiles(n_tiles)):
        b, hk, tile_col = key_tile_at(i, S, B, K, HAS_HI)
        # Queries that see these keys: the band read the other way round.
        end, n = keys_of(tile_col, S, L, -band_hi, -band_lo, 2 * BM, BM, HAS_HI, HAS_LO)
        col0 = tile_col + W * BM
        dk = gl.zeros([BM, D], gl.float32, layout=G_LAYOUT)
        dv = gl.zeros([BM, D], gl.float32, layout=G_LAYOUT)
        mbarrier.wait(held_full.index(W), i & 1)
        for t in range(R * n):
            r = t // n
            row0 = end - (t % n + 1) * BM
            slot = (seen + t) % SLOTS
            full = ((seen + t) // SLOTS) & 1
            head = padded_head(b, hk, r, L, K, R) + row0
            q = q_smem.index(slot).reshape([BM, D])
            g = g_smem.index(slot).reshape([BM, D])
            # s - LSE and dP - delta in one: the sums start from what is subtracted, which then
            # occupies no registers of its own. (The assembler waits for s before it issues dP, as
            # it computes these starting values late; dP still runs during the exponentials.)
            lse = gl.load(lse_ptr + head + gl.arange(0, BM, layout=COLS))
            delta = gl.load(delta_ptr + head + gl.arange(0, BM, layout=COLS))
            s = zeros - (lse * per_unit)[None, :]
            dp = zeros - delta[None, :]
            mbarrier.wait(q_full.index(slot), full)
            s = warpgroup_mma(k, q.permute((1, 0)), s, is_async=True)
            mbarrier.wait(g_full.index(slot), full)
            dp = warpgroup_mma(v, g.permute((1, 0)), dp, is_async=True)
            s = warpgroup_mma_wait(num_outstanding=1, deps=(s,))
            if HAS_LO or HAS_HI:
                s = hidden_scores(
                    s, 0, col0, row0, L, -band_hi, -band_lo, HAS_HI, HAS_LO, True, False
                )
            p = gl.exp2(s * unit)
            pa = gl.convert_layout(p.to(q_smem.dtype), A_LAYOUT)
            dv = warpgroup_mma(pa, g, dv, is_async=True)
            # Products finish in order: dP is there, P^T dO still runs.
            dp = warpgroup_mma_wait(num_outstanding=1, deps=(dp,))
            da = gl.convert_layout((p * dp).to(q_smem.dtype), A_LAYOUT)
            dk = warpgroup_mma(da, q, dk, is_async=True)
            dv, pa, dk, da = warpgroup_mma_wait(num_outstanding=0, deps=(dv, pa, dk, da))
            hand_back(g_empty.index(slot))  # its barrier speaks for both
            mbarrier.arrive(q_empty.index(slot), count=1)
        seen += R * n
        leave(dk_desc, [b, col0, hk, 0], k_smem.index(W), dk * scale, D)
        leave(dv_desc, [b, col0, hk, 0], v_smem.index(W), dv, D)
        tma.store_wait(pendings=0)
        hand_back(held_empty.index(W))


@jit
def keys_producer(
    k_desc, v_desc, q_desc, g_desc, k_smem, v_smem, q_smem, g_smem, held, q_bars, g_bars, sizes,
    K: tl.constexpr, R: tl.constexpr, D: tl.constexpr, SLOTS: tl.constexpr,
    HAS_LO: tl.constexpr, HAS_HI: tl.constexpr,
):  # fmt: skip
    n_tiles, B, L, S, band_lo, band_hi = sizes
    held_full, held_empty = held
    q_full, q_empty = q_bars
    g_full, g_empty = g_bars
    seen = 0
    for i in range(my_tiles(n_tiles)):
        b, hk, tile_col = key_tile_at(i, S, B, K, HAS_HI)
        end, n = keys_of(tile_col, S, L, -band_hi, -band_lo, 2 * BM, BM, HAS_HI, HAS_LO)
        for w in gl.static_range(2):
            mbarrier.wait(held_empty.index(w), (i & 1) ^ 1)
            mbarrier.expect(held_full.index(w), 4 * BM * D)
            held_at = [b, tile_col + w * BM, hk, 0]
            tma_load(k_desc, held_at, held_full.index(w), k_smem.index(w))
            tma_load(v_desc, held_at, held_full.index(w), v_smem.index(w))
        for t in range(R * n):
            slot = (seen + t) % SLOTS
            free = (((seen + t) // SLOTS) & 1) ^ 1
            at = [b, end - (t % n + 1) * BM, hk, t // n, 0]
            mbarrier.wait(q_empty.index(slot), free)
            mbarrier.expect(q_full.index(slot), 2 * BM * D)
            tma_load(q_desc, at, q_full.index(slot), q_smem.index(slot))
            mbarrier.wait(g_empty.index(slot), free)
            mbarrier.expect(g_full.index(slot), 2 * BM * D)
            tma_load(g_desc, at, g_full.index(slot), g_smem.index(slot))
        seen += R * n


@jit(do_not_specialize=["n_tiles", "B", "L", "S", "band_lo", "band_hi"])
def keys_sm90_kernel(
    k_desc, v_desc, q_desc, g_desc, dk_desc, dv_desc, lse_ptr, delta_ptr,
    n_tiles, B, L, S, band_lo, band_hi, unit, scale, K: tl.constexpr, R: tl.constexpr,
    D: tl.constexpr, SLOTS: tl.constexpr, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr,
):  # fmt: skip
    DTYPE: gl.constexpr = k_desc.dtype
    k_smem = gl.allocate_shared_memory(DTYPE, [2, 1, BM, 1, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(DTYPE, [2, 1, BM, 1, D], v_desc.layout)
    q_smem = gl.allocate_shared_memory(DTYPE, [SLOTS, 1, BM, 1, 1, D], q_desc.layout)
    g_smem = gl.allocate_shared_memory(DTYPE, [SLOTS, 1, BM, 1, 1, D], g_desc.layout)
    held = (barriers(2, 1), barriers(2, 1))
    q_bars = (barriers(SLOTS, 1), barriers(SLOTS, 2))
    g_bars = (barriers(SLOTS, 1), barriers(SLOTS, 2))
    fence_async_shared()
    sizes = (n_tiles, B, L, S, band_lo, band_hi)
    gl.warp_specialize([
        (keys_consumer, (0, k_smem, v_smem, q_smem, g_smem, held, q_bars, g_bars,
                         dk_desc, dv_desc, lse_ptr, delta_ptr, sizes, unit, scale,
                         K, R, D, SLOTS, HAS_LO, HAS_HI)),
        (keys_consumer, (1, k_smem, v_smem, q_smem, g_smem, held, q_bars, g_bars,
                         dk_desc, dv_desc, lse_ptr, delta_ptr, sizes, unit, scale,
                         K, R, D, SLOTS, HAS_LO, HAS_HI)),
        (keys_producer, (k_desc, v_desc, q_desc, g_desc, k_smem, v_smem, q_smem, g_smem,
                         held, q_bars, g_bars, sizes, K, R, D, SLOTS, HAS_LO, HAS_HI)),
    ], [4, 1], [240, 24])  # fmt: skip


@jit
def queries_consumer(
    W: tl.constexpr, q_smem, g_smem, k_smem, v_smem, held, k_bars, v_bars, dq_desc,
    lse_ptr, delta_ptr, sizes, unit, scale, K: tl.constexpr, R: tl.constexpr, D: tl.constexpr,
    BN: tl.constexpr, SLOTS: tl.constexpr, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr,
    MASK: tl.constexpr,
):  # fmt: skip
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    G_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    A_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, G_LAYOUT, 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    n_tiles, B, L, S, band_lo, band_hi = sizes
    held_full, held_empty = held
    k_full, k_empty = k_bars
    v_full, v_empty = v_bars
    q = q_smem.index(W).reshape([BM, D])
    g = g_smem.index(W).reshape([BM, D])
    zeros = gl.zeros([BM, BN], gl.float32, layout=S_LAYOUT)
    seen = 0
    for i in range(my_tiles(n_tiles)):
        b, hk, r, tile_row = tile_at(i, L, B, K, R, 2 * BM)
        end, n = keys_of(tile_row, L, S, band_lo, band_hi, 2 * BM, BN, HAS_LO, HAS_HI)
        row0 = tile_row + W * BM
        head = padded_head(b, hk, r, L, K, R) + row0
        lse = gl.load(lse_ptr + head + gl.arange(0, BM, layout=ROWS))
        delta = gl.load(delta_ptr + head + gl.arange(0, BM, layout=ROWS))
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
        leave(dq_desc, [b, row0, hk, r, 0], q_smem.index(W), dq * scale, D)
        tma.store_wait(pendings=0)
        hand_back(held_empty.index(W))


@jit
def queries_producer(
    q_desc, g_desc, k_desc, v_desc, q_smem, g_smem, k_smem, v_smem, held, k_bars, v_bars, sizes,
    K: tl.constexpr, R: tl.constexpr, D: tl.constexpr, BN: tl.constexpr, SLOTS: tl.constexpr,
    HAS_LO: tl.constexpr, HAS_HI: tl.constexpr,
):  # fmt: skip
    n_tiles, B, L, S, band_lo, band_hi = sizes
    held_full, held_empty = held
    k_full, k_empty = k_bars
    v_full, v_empty = v_bars
    seen = 0
    for i in range(my_tiles(n_tiles)):
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


@jit(do_not_specialize=["n_tiles", "B", "L", "S", "band_lo", "band_hi"])
def queries_sm90_kernel(
    q_desc, g_desc, k_desc, v_desc, dq_desc, lse_ptr, delta_ptr,
    n_tiles, B, L, S, band_lo, band_hi, unit, scale, K: tl.constexpr, R: tl.constexpr,
    D: tl.constexpr, BN: tl.constexpr, SLOTS: tl.constexpr, HAS_LO: tl.constexpr,
    HAS_HI: tl.constexpr, MASK: tl.constexpr,
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
    sizes = (n_tiles, B, L, S, band_lo, band_hi)
    gl.warp_specialize([
        (queries_consumer, (0, q_smem, g_smem, k_smem, v_smem, held, k_bars, v_bars, dq_desc,
                            lse_ptr, delta_ptr, sizes, unit, scale, K, R, D, BN, SLOTS,
                            HAS_LO, HAS_HI, MASK)),
        (queries_consumer, (1, q_smem, g_smem, k_smem, v_smem, held, k_bars, v_bars, dq_desc,
                            lse_ptr, delta_ptr, sizes, unit, scale, K, R, D, BN, SLOTS,
                            HAS_LO, HAS_HI, MASK)),
        (queries_producer, (q_desc, g_desc, k_desc, v_desc, q_smem, g_smem, k_smem, v_smem,
                            held, k_bars, v_bars, sizes, K, R, D, BN, SLOTS, HAS_LO, HAS_HI)),
    ], [4, 1], [240, 24])  # fmt: skip

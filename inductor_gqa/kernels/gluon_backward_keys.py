"""dK and dV for sm_90: a copying warp and two groups of four warps, as in the forward.

Here the backward is split in two so that no gradient needs atomics (for one sweep, see
`gluon_backward_sweep`): this half holds 2 x 64 keys and sums over the queries of a group, the other
(`gluon_backward_queries`) holds queries and sums dQ. P = exp2(s - LSE), dS = P (dP - delta); both
are rebuilt in either half. P and dS go from registers into the products. Where groups and key tiles
are few, a group is shared by several programs, whose sums go to memory in fp32 and are added by
`gather_kernel`.
"""

import triton.language as tl

from inductor_gqa.kernels.gluon_ends import BM, leave, padded_head, padded_rows, store_parts
from inductor_gqa.kernels.gluon_tiles import (
    WHY_NOT,
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

# Barriers: held K and V full, then empty, for either group; then, a slot each, Q full, dO full, and
# both empty.
HELD_FULL, HELD_EMPTY, Q_FULL = tl.constexpr(0), tl.constexpr(2), tl.constexpr(4)
LN2 = tl.constexpr(0.6931471805599453)  # unit is scale / ln 2

if WHY_NOT is None:
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        warpgroup_mma,
        warpgroup_mma_wait,
    )


@jit
def key_tile_at(i, S, B, PARTS: tl.constexpr, LONGEST_FIRST: tl.constexpr):
    """Batch, share of a group, first key. Under a causal mask the first keys are seen by most
    queries."""
    b, part, _, col0 = tile_at(i, S, B, PARTS, 1, 2 * BM)
    if LONGEST_FIRST:
        col0 = (gl.cdiv(S, 2 * BM) - 1) * (2 * BM) - col0
    return b, part, col0


@jit
def keys_consumer(
    W: tl.constexpr, held_smem, smem, bars, dk_desc, dv_desc,
    parts_ptr, rows_ptr, sizes, unit: tl.constexpr, K: tl.constexpr,
    R: tl.constexpr, D: tl.constexpr, SLOTS: tl.constexpr, HAS_LO: tl.constexpr,
    HAS_HI: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    PARTS: gl.constexpr = K * SPLIT
    HEADS: gl.constexpr = R // SPLIT
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    G_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    A_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, G_LAYOUT, 2)
    COLS: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    B, L, S, band_lo, band_hi = sizes
    k = held_smem.index(W).reshape([BM, D])
    v = held_smem.index(2 + W).reshape([BM, D])
    zeros = gl.zeros([BM, BM], gl.float32, layout=S_LAYOUT)
    seen = 0
    for i in range(my_tiles(gl.cdiv(S, 2 * BM) * B * PARTS)):
        b, part, tile_col = key_tile_at(i, S, B, PARTS, HAS_HI)
        # Queries that see these keys: the band read the other way round.
        end, n = keys_of(tile_col, S, L, -band_hi, -band_lo, 2 * BM, BM, HAS_HI, HAS_LO)
        col0 = tile_col + W * BM
        dk = gl.zeros([BM, D], gl.float32, layout=G_LAYOUT)
        dv = gl.zeros([BM, D], gl.float32, layout=G_LAYOUT)
        mbarrier.wait(bars.index(HELD_FULL + W), i & 1)
        for j in range(HEADS):
            head = rows_ptr + padded_head(b, part * HEADS + j, L, K * R)
            for t in range(n):
                row0 = end - (t + 1) * BM
                slot = seen % SLOTS
                full = (seen // SLOTS) & 1
                seen += 1
                rows = head + row0
                q = smem.index(slot).reshape([BM, D])
                g = smem.index(SLOTS + slot).reshape([BM, D])
                # s - LSE and dP - delta in one: the sums start from what is subtracted, which then
                # occupies no registers of its own. (The assembler waits for s before it issues dP,
                # as it computes these starts late; dP still runs during the exponentials.)
                lse = gl.load(rows + gl.arange(0, BM, layout=COLS))
                delta = gl.load(rows + padded_rows(L) + gl.arange(0, BM, layout=COLS))
                s = zeros - lse[None, :]
                dp = zeros - delta[None, :]
                mbarrier.wait(bars.index(Q_FULL + slot), full)
                s = warpgroup_mma(k, q.permute((1, 0)), s, is_async=True)
                mbarrier.wait(bars.index(Q_FULL + SLOTS + slot), full)
                dp = warpgroup_mma(v, g.permute((1, 0)), dp, is_async=True)
                s = warpgroup_mma_wait(num_outstanding=1, deps=(s,))
                if HAS_LO or HAS_HI:
                    s = hidden_scores(
                        s, 0, col0, row0, L, -band_hi, -band_lo, HAS_HI, HAS_LO, True, False
                    )
                p = gl.exp2(s * unit)
                pa = gl.convert_layout(p.to(smem.dtype), A_LAYOUT)
                dv = warpgroup_mma(pa, g, dv, is_async=True)
                # Products finish in order: dP is there, P^T dO still runs.
                dp = warpgroup_mma_wait(num_outstanding=1, deps=(dp,))
                da = gl.convert_layout((p * dp).to(smem.dtype), A_LAYOUT)
                dk = warpgroup_mma(da, q, dk, is_async=True)
                dv, pa, dk, da = warpgroup_mma_wait(num_outstanding=0, deps=(dv, pa, dk, da))
                hand_back(bars.index(Q_FULL + 2 * SLOTS + slot))
        if SPLIT > 1:
            store_parts(parts_ptr, b * PARTS + part, col0, S, dk, dv, D)
        else:
            leave(dv_desc, [b, col0, part, 0], held_smem.index(2 + W), dv, D)
            leave(dk_desc, [b, col0, part, 0], held_smem.index(W), dk * (unit * LN2), D)
            tma.store_wait(pendings=0)
        hand_back(bars.index(HELD_EMPTY + W))


@jit
def keys_producer(
    k_desc, v_desc, q_desc, g_desc, held_smem, smem, bars, sizes,
    K: tl.constexpr, R: tl.constexpr, D: tl.constexpr, SLOTS: tl.constexpr,
    HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    PARTS: gl.constexpr = K * SPLIT
    HEADS: gl.constexpr = R // SPLIT
    B, L, S, band_lo, band_hi = sizes
    seen = 0
    for i in range(my_tiles(gl.cdiv(S, 2 * BM) * B * PARTS)):
        b, part, tile_col = key_tile_at(i, S, B, PARTS, HAS_HI)
        end, n = keys_of(tile_col, S, L, -band_hi, -band_lo, 2 * BM, BM, HAS_HI, HAS_LO)
        for w in gl.static_range(2):
            full = bars.index(HELD_FULL + w)
            mbarrier.wait(bars.index(HELD_EMPTY + w), (i & 1) ^ 1)
            mbarrier.expect(full, 4 * BM * D)
            held_at = [b, tile_col + w * BM, part // SPLIT, 0]
            tma_load(k_desc, held_at, full, held_smem.index(w))
            tma_load(v_desc, held_at, full, held_smem.index(2 + w))
        for t in range(HEADS * n):
            h = part * HEADS + t // n
            slot = (seen + t) % SLOTS
            free = (((seen + t) // SLOTS) & 1) ^ 1
            at = [b, end - (t % n + 1) * BM, h // R, h % R, 0]
            mbarrier.wait(bars.index(Q_FULL + 2 * SLOTS + slot), free)
            full = bars.index(Q_FULL + slot)
            mbarrier.expect(full, 2 * BM * D)
            tma_load(q_desc, at, full, smem.index(slot))
            full = bars.index(Q_FULL + SLOTS + slot)
            mbarrier.expect(full, 2 * BM * D)
            tma_load(g_desc, at, full, smem.index(SLOTS + slot))
        seen += HEADS * n


@jit(do_not_specialize=["B", "L", "S", "band_lo", "band_hi"])
def keys_sm90_kernel(
    k_desc, v_desc, q_desc, g_desc, dk_desc, dv_desc, parts_ptr, rows_ptr,
    B, L, S, band_lo, band_hi, unit: tl.constexpr, K: tl.constexpr, R: tl.constexpr,
    D: tl.constexpr, SLOTS: tl.constexpr, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    # As few objects as can be: each that a group knows is a register it lacks.
    DTYPE: gl.constexpr = k_desc.dtype
    held_smem = gl.allocate_shared_memory(DTYPE, [4, 1, BM, 1, D], k_desc.layout)
    smem = gl.allocate_shared_memory(DTYPE, [2 * SLOTS, 1, BM, 1, 1, D], q_desc.layout)
    bars = gl.allocate_shared_memory(gl.int64, [Q_FULL + 3 * SLOTS, 1], mbarrier.MBarrierLayout())
    for j in gl.static_range(Q_FULL + 2 * SLOTS):
        mbarrier.init(bars.index(j), count=1)
    for j in gl.static_range(SLOTS):
        mbarrier.init(bars.index(Q_FULL + 2 * SLOTS + j), count=2)
    fence_async_shared()
    begin_early()
    sizes = (B, L, S, band_lo, band_hi)
    gl.warp_specialize([
        (keys_consumer, (0, held_smem, smem, bars, dk_desc, dv_desc, parts_ptr, rows_ptr,
                         sizes, unit, K, R, D, SLOTS, HAS_LO, HAS_HI, SPLIT)),
        (keys_consumer, (1, held_smem, smem, bars, dk_desc, dv_desc, parts_ptr, rows_ptr,
                         sizes, unit, K, R, D, SLOTS, HAS_LO, HAS_HI, SPLIT)),
        (keys_producer, (k_desc, v_desc, q_desc, g_desc, held_smem, smem, bars, sizes, K, R, D,
                         SLOTS, HAS_LO, HAS_HI, SPLIT)),
    ], [4, 1], [240, 24])  # fmt: skip

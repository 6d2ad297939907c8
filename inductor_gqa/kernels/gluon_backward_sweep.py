"""dK, dV and dQ for sm_90 in one sweep: a copying warp and two groups of four warps.

For D = 64: at 128 registers spill. A program holds 2 x 64 keys and walks over the queries of their
group: five products instead of the seven of two halves (`gluon_backward_keys`,
`gluon_backward_queries`). S and dP are computed with keys as rows, so that P and dS go from
registers into dV and dK; dS also goes through shared memory to the product with K. Each group makes
dQ of 64 queries of a tile from the dS of both, and the copy engine adds it to what other programs
have added in fp32, in an order that differs from run to run: `torch.use_deterministic_algorithms`
keeps to the halves.
"""

import triton.language as tl

from inductor_gqa.kernels.gluon_backward_keys import LN2, key_tile_at
from inductor_gqa.kernels.gluon_ends import BM, leave, store_part
from inductor_gqa.kernels.gluon_tiles import (
    WHY_NOT,
    begin_early,
    gl,
    group_barrier,
    hand_back,
    hidden_scores,
    jit,
    keys_of,
    mbarrier,
    my_tiles,
    tma,
    tma_add,
    tma_load,
)

if WHY_NOT is None:
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        warpgroup_mma,
        warpgroup_mma_wait,
    )

# Barriers: held K and V full, then empty; by group, dS full, dS empty, dQ full, dQ empty; then, a
# slot each, Q with its LSE and delta full, dO full, and both empty.
HELD_FULL, HELD_EMPTY = tl.constexpr(0), tl.constexpr(1)
DS_FULL, DS_EMPTY = tl.constexpr(2), tl.constexpr(4)
DQ_FULL, DQ_EMPTY, Q_FULL = tl.constexpr(6), tl.constexpr(8), tl.constexpr(10)
BQ = tl.constexpr(2 * BM.value)  # queries in a tile, half of them at a time


@jit
def sweep_consumer(
    W: tl.constexpr, held_smem, smem, rows_smem, ds_smem, dq_smem, bars, dk_desc, dv_desc,
    parts_ptr, sizes, unit: tl.constexpr, K: tl.constexpr, R: tl.constexpr, D: tl.constexpr,
    SLOTS: tl.constexpr, HAS_HI: tl.constexpr, SPLIT: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    PARTS: gl.constexpr = K * SPLIT
    HEADS: gl.constexpr = R // SPLIT
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    G_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    A_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, G_LAYOUT, 2)
    B, L, S, band_hi = sizes
    k = held_smem.index(W).reshape([BM, D])
    v = held_smem.index(2 + W).reshape([BM, D])
    k_other = held_smem.index(1 - W).reshape([BM, D])
    # By half of the queries and group of keys; a group makes dQ of the W-th half.
    ds_mine = ds_smem.index(W * 2 + W).permute((1, 0))
    ds_other = ds_smem.index(W * 2 + 1 - W).permute((1, 0))
    zeros = gl.zeros([BM, BM], gl.float32, layout=S_LAYOUT)
    seen = 0
    for i in range(my_tiles(gl.cdiv(S, 2 * BM) * B * PARTS)):
        b, part, tile_col = key_tile_at(i, S, B, PARTS, HAS_HI)
        # Queries that see these keys: the band read the other way round.
        end, n = keys_of(tile_col, S, L, -band_hi, 0, 2 * BM, BQ, HAS_HI, False)
        col0 = tile_col + W * BM
        dk = gl.zeros([BM, D], gl.float32, layout=G_LAYOUT)
        dv = gl.zeros([BM, D], gl.float32, layout=G_LAYOUT)
        mbarrier.wait(bars.index(HELD_FULL), i & 1)
        for t in range(HEADS * n):
            row0 = end - (t % n + 1) * BQ
            slot = seen % SLOTS
            full = (seen // SLOTS) & 1
            rows = rows_smem.index(slot).reshape([2, BQ])
            for sub in gl.static_range(2):
                q = smem.index(slot).reshape([BQ, D]).slice(sub * BM, BM)
                g = smem.index(SLOTS + slot).reshape([BQ, D]).slice(sub * BM, BM)
                if sub == 0:
                    mbarrier.wait(bars.index(Q_FULL + slot), full)
                # s - LSE and dP - delta in one: the sums start from what is subtracted.
                s = zeros - rows.slice(0, 1).slice(sub * BM, BM, 1).load(S_LAYOUT)
                s = warpgroup_mma(k, q.permute((1, 0)), s, is_async=True)
                dp = zeros - rows.slice(1, 1).slice(sub * BM, BM, 1).load(S_LAYOUT)
                if sub == 0:
                    mbarrier.wait(bars.index(Q_FULL + SLOTS + slot), full)
                dp = warpgroup_mma(v, g.permute((1, 0)), dp, is_async=True)
                s = warpgroup_mma_wait(num_outstanding=1, deps=(s,))
                if HAS_HI:
                    s = hidden_scores(
                        s, 0, col0, row0 + sub * BM, L, -band_hi, 0, HAS_HI, False, True, False
                    )  # fmt: skip
                p = gl.exp2(s * unit)
                if EDGE:  # noqa: SIM102
                    # Keys behind the last score 0, which may be far above a row's LSE.
                    if col0 + BM > S:
                        keys = col0 + gl.arange(0, BM, layout=gl.SliceLayout(1, S_LAYOUT))
                        p = gl.where((keys < S)[:, None], p, 0.0)
                pa = gl.convert_layout(p.to(smem.dtype), A_LAYOUT)
                dv = warpgroup_mma(pa, g, dv, is_async=True)
                # Products finish in order: dP is there, P^T dO still runs.
                dp = warpgroup_mma_wait(num_outstanding=1, deps=(dp,))
                ds = (p * dp).to(smem.dtype)
                if sub == 0:
                    mbarrier.wait(bars.index(DS_EMPTY + W), (seen & 1) ^ 1)
                ds_smem.index(sub * 2 + W).store(ds)
                da = gl.convert_layout(ds, A_LAYOUT)
                dk = warpgroup_mma(da, q, dk, is_async=True)
                if sub == 0:
                    dv, pa, dk, da = warpgroup_mma_wait(num_outstanding=0, deps=(dv, pa, dk, da))
            fence_async_shared()
            hand_back(bars.index(DS_FULL + W))
            dq = warpgroup_mma(ds_mine, k, zeros, use_acc=False, is_async=True)
            mbarrier.wait(bars.index(DS_FULL + 1 - W), seen & 1)
            dq = warpgroup_mma(ds_other, k_other, dq, is_async=True)
            dv, pa, dk, da, dq = warpgroup_mma_wait(num_outstanding=0, deps=(dv, pa, dk, da, dq))
            group_barrier()
            mbarrier.arrive(bars.index(Q_FULL + 2 * SLOTS + slot), count=1)
            mbarrier.arrive(bars.index(DS_EMPTY + 1 - W), count=1)
            mbarrier.wait(bars.index(DQ_EMPTY + W), (seen & 1) ^ 1)
            dq_smem.index(W).reshape([BM, BM]).store(dq)
            fence_async_shared()
            hand_back(bars.index(DQ_FULL + W))
            seen += 1
        if SPLIT > 1:
            group_barrier()
            share = (b * PARTS + part) * 2
            store_part(parts_ptr, share + 1, col0, S, dv, D)
            group_barrier()
            store_part(parts_ptr, share, col0, S, dk, D)
        else:
            # V is the group's own; the other one may still read K.
            leave(dv_desc, [b, col0, part, 0], held_smem.index(2 + W), dv, D)
            tma.store_wait(pendings=0)
            group_barrier()
            leave(dk_desc, [b, col0, part, 0], held_smem.index(2 + W), dk * (unit * LN2), D)
            tma.store_wait(pendings=0)
        hand_back(bars.index(HELD_EMPTY))


@jit
def sweep_adder(
    dq_desc, dq_smem, bars, sizes, K: tl.constexpr, R: tl.constexpr, HAS_HI: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """Has the copy engine add what the groups made of dQ."""
    PARTS: gl.constexpr = K * SPLIT
    HEADS: gl.constexpr = R // SPLIT
    B, L, S, band_hi = sizes
    seen = 0
    for i in range(my_tiles(gl.cdiv(S, 2 * BM) * B * PARTS)):
        b, part, tile_col = key_tile_at(i, S, B, PARTS, HAS_HI)
        end, n = keys_of(tile_col, S, L, -band_hi, 0, 2 * BM, BQ, HAS_HI, False)
        for t in range(HEADS * n):
            h = part * HEADS + t // n
            row0 = end - (t % n + 1) * BQ
            for w in gl.static_range(2):
                mbarrier.wait(bars.index(DQ_FULL + w), seen & 1)
                at = [b, row0 + w * BM, h // R, h % R, 0]
                tma_add(dq_desc, at, dq_smem.index(w))
            for w in gl.static_range(2):
                tma.store_wait(pendings=1 - w)
                mbarrier.arrive(bars.index(DQ_EMPTY + w), count=1)
            seen += 1


@jit
def sweep_producer(
    k_desc, v_desc, q_desc, g_desc, rows_desc, held_smem, smem, rows_smem, bars, sizes,
    K: tl.constexpr, R: tl.constexpr, D: tl.constexpr, SLOTS: tl.constexpr, HAS_HI: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    PARTS: gl.constexpr = K * SPLIT
    HEADS: gl.constexpr = R // SPLIT
    B, L, S, band_hi = sizes
    held_full = bars.index(HELD_FULL)
    seen = 0
    for i in range(my_tiles(gl.cdiv(S, 2 * BM) * B * PARTS)):
        b, part, tile_col = key_tile_at(i, S, B, PARTS, HAS_HI)
        end, n = keys_of(tile_col, S, L, -band_hi, 0, 2 * BM, BQ, HAS_HI, False)
        mbarrier.wait(bars.index(HELD_EMPTY), (i & 1) ^ 1)
        mbarrier.expect(held_full, 8 * BM * D)
        for w in gl.static_range(2):
            held_at = [b, tile_col + w * BM, part // SPLIT, 0]
            tma_load(k_desc, held_at, held_full, held_smem.index(w))
            tma_load(v_desc, held_at, held_full, held_smem.index(2 + w))
        for t in range(HEADS * n):
            h = part * HEADS + t // n
            slot = (seen + t) % SLOTS
            free = (((seen + t) // SLOTS) & 1) ^ 1
            row0 = end - (t % n + 1) * BQ
            at = [b, row0, h // R, h % R, 0]
            mbarrier.wait(bars.index(Q_FULL + 2 * SLOTS + slot), free)
            full = bars.index(Q_FULL + slot)
            mbarrier.expect(full, 2 * BQ * D + 8 * BQ)
            tma_load(q_desc, at, full, smem.index(slot))
            tma_load(rows_desc, [b * (K * R) + h, 0, row0 + BM], full, rows_smem.index(slot))
            full = bars.index(Q_FULL + SLOTS + slot)
            mbarrier.expect(full, 2 * BQ * D)
            tma_load(g_desc, at, full, smem.index(SLOTS + slot))
        seen += HEADS * n


@jit(do_not_specialize=["B", "L", "S", "band_hi"])
def sweep_sm90_kernel(
    k_desc, v_desc, q_desc, g_desc, rows_desc, dk_desc, dv_desc, dq_desc, parts_ptr,
    B, L, S, band_hi, unit: tl.constexpr, K: tl.constexpr, R: tl.constexpr, D: tl.constexpr,
    SLOTS: tl.constexpr, HAS_HI: tl.constexpr, SPLIT: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    # As few objects as can be: each that a group knows is a register it lacks.
    DTYPE: gl.constexpr = k_desc.dtype
    DS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BM, BM], DTYPE)
    held_smem = gl.allocate_shared_memory(DTYPE, [4, 1, BM, 1, D], k_desc.layout)
    smem = gl.allocate_shared_memory(DTYPE, [2 * SLOTS, 1, BQ, 1, 1, D], q_desc.layout)
    rows_smem = gl.allocate_shared_memory(gl.float32, [SLOTS, 1, 2, BQ], rows_desc.layout)
    ds_smem = gl.allocate_shared_memory(DTYPE, [4, BM, BM], DS_LAYOUT)
    dq_smem = gl.allocate_shared_memory(gl.float32, [2, 1, BM, 1, 1, BM], dq_desc.layout)
    bars = gl.allocate_shared_memory(gl.int64, [Q_FULL + 3 * SLOTS, 1], mbarrier.MBarrierLayout())
    for j in gl.static_range(Q_FULL + 2 * SLOTS):
        mbarrier.init(bars.index(j), count=2 if j == HELD_EMPTY else 1)
    for j in gl.static_range(SLOTS):
        mbarrier.init(bars.index(Q_FULL + 2 * SLOTS + j), count=2)
    fence_async_shared()
    begin_early()
    sizes = (B, L, S, band_hi)
    gl.warp_specialize([
        (sweep_consumer, (0, held_smem, smem, rows_smem, ds_smem, dq_smem, bars, dk_desc, dv_desc,
                          parts_ptr, sizes, unit, K, R, D, SLOTS, HAS_HI, SPLIT, EDGE)),
        (sweep_consumer, (1, held_smem, smem, rows_smem, ds_smem, dq_smem, bars, dk_desc, dv_desc,
                          parts_ptr, sizes, unit, K, R, D, SLOTS, HAS_HI, SPLIT, EDGE)),
        (sweep_adder, (dq_desc, dq_smem, bars, sizes, K, R, HAS_HI, SPLIT)),
        (sweep_producer, (k_desc, v_desc, q_desc, g_desc, rows_desc, held_smem, smem, rows_smem,
                          bars, sizes, K, R, D, SLOTS, HAS_HI, SPLIT)),
    ], [4, 1, 1], [240, 24, 24])  # fmt: skip

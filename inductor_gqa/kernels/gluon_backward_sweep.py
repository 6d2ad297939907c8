"""dK, dV and dQ for sm_90 in one sweep: a copying warp, two groups of four warps, an adding warp.

A program holds 2 x 64 keys and walks over the queries of their group: five products instead of the
seven of two halves (`gluon_backward_keys`, `gluon_backward_queries`). S and dP are computed with
keys as rows, so that P and dS go from registers into dV and dK; dS also goes through shared memory
to the product with K. Of dQ each group makes 64 x 64 numbers from the dS of both, a tile later:
under the exponentials of the next one, when the other group's dS is there. The copy engine adds it
to what other programs have added in fp32, in an order that differs from run to run:
`torch.use_deterministic_algorithms` keeps to the halves.
"""

import triton.language as tl

from inductor_gqa.kernels.gluon_backward_keys import LN2
from inductor_gqa.kernels.gluon_ends import BM, leave, store_parts
from inductor_gqa.kernels.gluon_sweep_order import query_tiles, unit_at, units
from inductor_gqa.kernels.gluon_tiles import (
    HAS_REINTERPRET,
    WHY_NOT,
    begin_early,
    gl,
    group_barrier,
    hand_back,
    hidden_scores,
    jit,
    mbarrier,
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

# Barriers: held K and V full, then empty; by group and buffer, dS full, dS empty; by group, dQ
# full, dQ empty; then, a slot each, Q with its LSE and delta full, dO full, and both empty.
HELD_FULL, HELD_EMPTY = tl.constexpr(0), tl.constexpr(1)
DS_FULL, DS_EMPTY = tl.constexpr(2), tl.constexpr(6)
DQ_FULL, DQ_EMPTY, Q_FULL = tl.constexpr(10), tl.constexpr(12), tl.constexpr(14)
# Boxes of 4 x 256 numbers in which a group's dQ of a tile leaves: fewer than eight rows lie in
# shared memory one after another, more are swizzled.
PIECES = tl.constexpr(4)


@jit
def queries_of(W: tl.constexpr, held_smem, ds_smem, seen, nil, zeros, D: tl.constexpr):
    """A group's share of dQ of a tile, begun: half of the lanes for all queries, or all lanes for
    half of the queries."""
    SUBS: gl.constexpr = 128 // D
    LANE: gl.constexpr = W * BM * (2 - SUBS)
    k = held_smem.index(W + nil).reshape([BM, D]).slice(LANE, BM, 1)
    k_other = held_smem.index(1 - W + nil).reshape([BM, D]).slice(LANE, BM, 1)
    at = ((seen & 1) * SUBS + W * (SUBS - 1)) * 2
    ds = ds_smem.index(at + W).permute((1, 0))
    dq = warpgroup_mma(ds, k, zeros, use_acc=False, is_async=True)
    ds = ds_smem.index(at + 1 - W).permute((1, 0))
    return warpgroup_mma(ds, k_other, dq, is_async=True)


@jit
def publish(W: tl.constexpr, dq, dq_smem, bars, seen):
    """dQ of a tile to the adder, and its dS back to the group that made it. What a thread holds is
    stored as four numbers at one address at a time; `finish_kernel` puts it in order."""
    group_barrier()
    mbarrier.arrive(bars.index(DS_EMPTY + 2 * (1 - W) + (seen & 1)), count=1)
    mbarrier.wait(bars.index(DQ_EMPTY + W), (seen & 1) ^ 1)
    dq = dq.reshape([4, 2, 8, 8, 4, 2]).permute((3, 0, 2, 4, 1, 5)).reshape([16, 256])
    dq_smem.index(W).store(dq)
    fence_async_shared()
    hand_back(bars.index(DQ_FULL + W))


@jit
def sweep_consumer(
    W: tl.constexpr, held_smem, smem, rows_smem, ds_smem, dq_smem, bars, dk_desc, dv_desc,
    parts_ptr, sizes, unit: tl.constexpr, K: tl.constexpr, R: tl.constexpr, D: tl.constexpr,
    SLOTS: tl.constexpr, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, SPLIT: tl.constexpr,
    PAIR: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    PARTS: gl.constexpr = K * SPLIT
    HEADS: gl.constexpr = R // SPLIT
    SUBS: gl.constexpr = 128 // D  # of 64 queries, in a tile
    BQ: gl.constexpr = BM * SUBS
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    G_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    A_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, G_LAYOUT, 2)
    B, L, S, band_lo, band_hi = sizes
    zeros = gl.zeros([BM, BM], gl.float32, layout=S_LAYOUT)
    seen = 0
    for i in range(units(S, B, PARTS, PAIR)):
        b, part, tile_col = unit_at(i, S, B, PARTS, PAIR)
        end, n = query_tiles(tile_col, L, S, band_lo, band_hi, BQ, HAS_LO, HAS_HI)
        col0 = tile_col + W * BM
        dk = gl.zeros([BM, D], gl.float32, layout=G_LAYOUT)
        dv = gl.zeros([BM, D], gl.float32, layout=G_LAYOUT)
        mbarrier.wait(bars.index(HELD_FULL), i & 1)
        row0 = end
        for t in range(HEADS * n):
            row0 = gl.where(row0 == end - n * BQ, end, row0) - BQ
            slot = seen % SLOTS
            full = (seen // SLOTS) & 1
            buffer = seen & 1
            used = ((seen >> 1) & 1) ^ 1
            rows = rows_smem.index(slot).reshape([2, BQ])
            # Always 0, unknown to the compiler: it would keep what it computes of these addresses.
            nil = seen >> 30
            k = held_smem.index(W + nil).reshape([BM, D])
            v = held_smem.index(2 + W + nil).reshape([BM, D])
            for sub in gl.static_range(SUBS):
                q = smem.index(slot).reshape([BQ, D]).slice(sub * BM, BM)
                g = smem.index(SLOTS + slot).reshape([BQ, D]).slice(sub * BM, BM)
                if sub == 0:
                    mbarrier.wait(bars.index(Q_FULL + slot), full)
                s = warpgroup_mma(k, q.permute((1, 0)), zeros, use_acc=False, is_async=True)
                if sub == 0:
                    # Of the tile before; in front of the first one nothing of meaning.
                    if t > 0:
                        mbarrier.wait(
                            bars.index(DS_FULL + 2 * (1 - W) + 1 - buffer), ((seen - 1) >> 1) & 1
                        )
                    dq = queries_of(W, held_smem, ds_smem, seen - 1, nil, zeros, D)
                lse = rows.slice(0, 1).slice(sub * BM, BM, 1).load(S_LAYOUT)
                # Products finish in order: S is there, dQ of the tile before still runs.
                s = warpgroup_mma_wait(num_outstanding=2 if sub == 0 else 0, deps=(s,))
                x = s * unit - lse
                row = row0 + sub * BM
                is_edge = False
                if HAS_HI:
                    is_edge = row + band_hi < col0 + BM - 1
                if HAS_LO:
                    is_edge = is_edge | (row + BM - 1 + band_lo > col0)
                if EDGE:
                    is_edge = is_edge | (col0 + BM > S)
                if is_edge:
                    if HAS_HI or HAS_LO:
                        x = hidden_scores(
                            x, 0, col0, row, L, -band_hi, -band_lo, HAS_HI, HAS_LO, HAS_HI, False
                        )
                    if EDGE:
                        # Keys behind the last score 0, which may be far above a row's LSE.
                        keys = col0 + gl.arange(0, BM, layout=gl.SliceLayout(1, S_LAYOUT))
                        x = gl.where((keys < S)[:, None], x, -float("inf"))
                p = gl.exp2(x)
                pa = gl.convert_layout(p.to(smem.dtype), A_LAYOUT)
                if sub == 0:
                    dq = warpgroup_mma_wait(num_outstanding=0, deps=(dq,))
                    if t > 0:
                        publish(W, dq, dq_smem, bars, seen - 1)
                # dP - delta: the sums start from what is subtracted.
                dp = zeros - rows.slice(1, 1).slice(sub * BM, BM, 1).load(S_LAYOUT)
                if sub == 0:
                    mbarrier.wait(bars.index(Q_FULL + SLOTS + slot), full)
                dp = warpgroup_mma(v, g.permute((1, 0)), dp, is_async=True)
                dv = warpgroup_mma(pa, g, dv, is_async=True)
                dp = warpgroup_mma_wait(num_outstanding=1, deps=(dp,))
                ds = (p * dp).to(smem.dtype)
                if sub == 0:
                    mbarrier.wait(bars.index(DS_EMPTY + 2 * W + buffer), used)
                ds_smem.index((buffer * SUBS + sub) * 2 + W).store(ds)
                da = gl.convert_layout(ds, A_LAYOUT)
                dk = warpgroup_mma(da, q, dk, is_async=True)
                if sub + 1 == SUBS:
                    fence_async_shared()
                    hand_back(bars.index(DS_FULL + 2 * W + buffer))
                dv, pa, dk, da = warpgroup_mma_wait(num_outstanding=0, deps=(dv, pa, dk, da))
            hand_back(bars.index(Q_FULL + 2 * SLOTS + slot))
            seen += 1
        mbarrier.wait(bars.index(DS_FULL + 2 * (1 - W) + ((seen - 1) & 1)), ((seen - 1) >> 1) & 1)
        dq = queries_of(W, held_smem, ds_smem, seen - 1, 0, zeros, D)
        dq = warpgroup_mma_wait(num_outstanding=0, deps=(dq,))
        publish(W, dq, dq_smem, bars, seen - 1)
        if tile_col < S:
            if SPLIT > 1:
                store_parts(parts_ptr, b * PARTS + part, col0, S, dk, dv, D)
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
    dq_desc, dq_smem, bars, sizes, K: tl.constexpr, R: tl.constexpr, D: tl.constexpr,
    HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, SPLIT: tl.constexpr, PAIR: tl.constexpr,
):  # fmt: skip
    """Has the copy engine add what the groups made of dQ."""
    PARTS: gl.constexpr = K * SPLIT
    HEADS: gl.constexpr = R // SPLIT
    BQ: gl.constexpr = BM * (128 // D)
    B, L, S, band_lo, band_hi = sizes
    seen = 0
    SHAPE: gl.constexpr = [2 * PIECES, 16 // PIECES, 256]
    if HAS_REINTERPRET:
        pieces = dq_smem.reinterpret(gl.float32, SHAPE, dq_desc.layout)
    else:
        pieces = dq_smem._reinterpret(gl.float32, SHAPE, dq_desc.layout)
    for i in range(units(S, B, PARTS, PAIR)):
        b, part, tile_col = unit_at(i, S, B, PARTS, PAIR)
        end, n = query_tiles(tile_col, L, S, band_lo, band_hi, BQ, HAS_LO, HAS_HI)
        for t in range(HEADS * n):
            h = b * (K * R) + part * HEADS + t // n
            # Two blocks of 16 rows a tile.
            block = h * gl.cdiv(L, BQ) + end // BQ - (t % n + 1)
            for w in gl.static_range(2):
                mbarrier.wait(bars.index(DQ_FULL + w), seen & 1)
                for piece in gl.static_range(PIECES):
                    at = [block * 32 + w * 16 + piece * (16 // PIECES), 0]
                    tma_add(dq_desc, at, pieces.index(w * PIECES + piece))
            for w in gl.static_range(2):
                tma.store_wait(pendings=(1 - w) * PIECES)
                mbarrier.arrive(bars.index(DQ_EMPTY + w), count=1)
            seen += 1


@jit
def sweep_producer(
    k_desc, v_desc, q_desc, g_desc, rows_desc, held_smem, smem, rows_smem, bars, sizes,
    K: tl.constexpr, R: tl.constexpr, D: tl.constexpr, SLOTS: tl.constexpr, HAS_LO: tl.constexpr,
    HAS_HI: tl.constexpr, SPLIT: tl.constexpr, PAIR: tl.constexpr,
):  # fmt: skip
    PARTS: gl.constexpr = K * SPLIT
    HEADS: gl.constexpr = R // SPLIT
    BQ: gl.constexpr = BM * (128 // D)
    B, L, S, band_lo, band_hi = sizes
    held_full = bars.index(HELD_FULL)
    seen = 0
    for i in range(units(S, B, PARTS, PAIR)):
        b, part, tile_col = unit_at(i, S, B, PARTS, PAIR)
        end, n = query_tiles(tile_col, L, S, band_lo, band_hi, BQ, HAS_LO, HAS_HI)
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


@jit(do_not_specialize=["B", "L", "S", "band_lo", "band_hi"])
def sweep_sm90_kernel(
    k_desc, v_desc, q_desc, g_desc, rows_desc, dk_desc, dv_desc, dq_desc, parts_ptr,
    B, L, S, band_lo, band_hi, unit: tl.constexpr, K: tl.constexpr, R: tl.constexpr,
    D: tl.constexpr, SLOTS: tl.constexpr, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr,
    SPLIT: tl.constexpr, PAIR: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    # As few objects as can be: each that a group knows is a register it lacks.
    DTYPE: gl.constexpr = k_desc.dtype
    SUBS: gl.constexpr = 128 // D
    BQ: gl.constexpr = BM * SUBS
    LINEAR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    DS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BM, BM], DTYPE)
    held_smem = gl.allocate_shared_memory(DTYPE, [4, 1, BM, 1, D], k_desc.layout)
    smem = gl.allocate_shared_memory(DTYPE, [2 * SLOTS, 1, BQ, 1, 1, D], q_desc.layout)
    rows_smem = gl.allocate_shared_memory(gl.float32, [SLOTS, 1, 2, BQ], rows_desc.layout)
    ds_smem = gl.allocate_shared_memory(DTYPE, [4 * SUBS, BM, BM], DS_LAYOUT)
    dq_smem = gl.allocate_shared_memory(gl.float32, [2, 16, 256], LINEAR)
    bars = gl.allocate_shared_memory(gl.int64, [Q_FULL + 3 * SLOTS, 1], mbarrier.MBarrierLayout())
    for j in gl.static_range(Q_FULL + 2 * SLOTS):
        mbarrier.init(bars.index(j), count=2 if j == HELD_EMPTY else 1)
    for j in gl.static_range(SLOTS):
        mbarrier.init(bars.index(Q_FULL + 2 * SLOTS + j), count=2)
    fence_async_shared()
    begin_early()
    sizes = (B, L, S, band_lo, band_hi)
    gl.warp_specialize([
        (sweep_consumer, (0, held_smem, smem, rows_smem, ds_smem, dq_smem, bars, dk_desc, dv_desc,
                          parts_ptr, sizes, unit, K, R, D, SLOTS, HAS_LO, HAS_HI, SPLIT, PAIR,
                          EDGE)),
        (sweep_consumer, (1, held_smem, smem, rows_smem, ds_smem, dq_smem, bars, dk_desc, dv_desc,
                          parts_ptr, sizes, unit, K, R, D, SLOTS, HAS_LO, HAS_HI, SPLIT, PAIR,
                          EDGE)),
        (sweep_adder, (dq_desc, dq_smem, bars, sizes, K, R, D, HAS_LO, HAS_HI, SPLIT, PAIR)),
        (sweep_producer, (k_desc, v_desc, q_desc, g_desc, rows_desc, held_smem, smem, rows_smem,
                          bars, sizes, K, R, D, SLOTS, HAS_LO, HAS_HI, SPLIT, PAIR)),
    ], [4, 1, 1], [240, 24, 24])  # fmt: skip

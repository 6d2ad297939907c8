"""dQ and delta of 2 x 64 query rows from given weights P, for sm_90, in one sweep over the keys.

dS = P (dP - delta) needs delta = rowsum(P dP) before the first key. But for any c, dS K =
(P (dP - c)) K - (delta - c) P K: both products accumulate side by side and meet when the row sum is
known, so that V, K and P are read once. What is rounded to the dtype of K is P (dP - c), and c, the
mean of a row's dP over the first keys, keeps it as small as dS where all of V have much in common.
"""

import triton.language as tl

from inductor_gqa.kernels.gluon_tiles import (
    WHY_NOT,
    barriers,
    begin_early,
    gl,
    hand_back,
    jit,
    mbarrier,
    tma,
    tma_load,
)
from inductor_gqa.kernels.gluon_weights_tiles import BM, delta_of, leave, tile_of, turned_back, walk

if WHY_NOT is None:
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        warpgroup_mma,
        warpgroup_mma_wait,
    )


@jit
def summed(tile):
    """Sums of a row over the columns that one thread holds, 2 of every 8: no value crosses threads
    until the end of the sweep."""
    parts = tile.reshape([tile.shape[0], tile.shape[1] // 8, 4, 2])
    return gl.sum(gl.sum(parts, 3), 1)


@jit
def consumer(
    W: tl.constexpr, g_smem, k_smem, v_smem, p_smem, held, k_bars, v_bars, dq_desc, delta_ptr,
    tables, sizes, scale, H: tl.constexpr, D: tl.constexpr, SLOTS: tl.constexpr,
    HELD: tl.constexpr, ROPE: tl.constexpr, CENTRED: tl.constexpr,
):  # fmt: skip
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    G_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    A_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, G_LAYOUT, 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    n_tiles, L, S, first = sizes
    held_full, held_empty = held
    k_full, k_empty = k_bars
    v_full, v_empty = v_bars
    zeros = gl.zeros([BM, BM], gl.float32, layout=S_LAYOUT)
    steps = gl.cdiv(S, BM)
    seen = 0
    for turn in range(walk(n_tiles)):
        b, h, row0 = tile_of(turn, L, H)
        row0 += W * BM
        mine = turn % HELD * 2 + W
        g = g_smem.index(mine).reshape([BM, D])
        pk = gl.zeros([BM, D], gl.float32, layout=G_LAYOUT)
        dq = gl.zeros([BM, D], gl.float32, layout=G_LAYOUT)
        centre = gl.zeros([BM], gl.float32, layout=ROWS)
        sum_p = summed(zeros)
        sum_ds = summed(zeros)
        mbarrier.wait(held_full.index(mine), (turn // HELD) & 1)
        for t in range(steps):
            slot = (seen + t) % SLOTS
            full = ((seen + t) // SLOTS) & 1
            k = k_smem.index(slot).reshape([BM, D])
            v = v_smem.index(slot).reshape([BM, D])
            mbarrier.wait(v_full.index(slot), full)  # P comes with V
            dp = warpgroup_mma(g, v.permute((1, 0)), zeros, use_acc=False, is_async=True)
            p = p_smem.index(slot * 2 + W).reshape([BM, BM]).load(S_LAYOUT)
            pa = gl.convert_layout(p, A_LAYOUT)
            mbarrier.wait(k_full.index(slot), full)
            pk = warpgroup_mma(pa, k, pk, is_async=True)
            # Products finish in order: dP is there, P K still runs.
            dp = warpgroup_mma_wait(num_outstanding=1, deps=(dp,))
            hand_back(v_empty.index(slot))
            if CENTRED:
                if t == 0:
                    centre = gl.sum(dp, 1) / gl.minimum(S, BM).to(gl.float32)
                dp -= centre[:, None]
                sum_p += summed(p.to(gl.float32))
            dp = p.to(gl.float32) * dp
            sum_ds += summed(dp)
            da = gl.convert_layout(dp.to(k_smem.dtype), A_LAYOUT)
            dq = warpgroup_mma(da, k, dq, is_async=True)
            pk, pa, dq, da = warpgroup_mma_wait(num_outstanding=0, deps=(pk, pa, dq, da))
            hand_back(k_empty.index(slot))
        seen += steps
        rest = gl.convert_layout(gl.sum(sum_ds, 1), ROWS)
        rest += centre * (gl.convert_layout(gl.sum(sum_p, 1), ROWS) - 1.0)
        rows = row0 + gl.arange(0, BM, layout=ROWS)
        gl.store(delta_ptr + delta_of(b, h, L, H) + rows, rest + centre)
        dq = (dq - pk * gl.convert_layout(rest, gl.SliceLayout(1, G_LAYOUT))[:, None]) * scale
        if ROPE:
            dq = turned_back(dq, tables, b, row0, L, D)
        leave(dq_desc, [b, row0, first + h, 0], g_smem.index(mine), dq, D)
        tma.store_wait(pendings=0)
        hand_back(held_empty.index(mine))


@jit
def producer(
    g_desc, k_desc, v_desc, p_desc, g_smem, k_smem, v_smem, p_smem, held, k_bars, v_bars, sizes,
    H: tl.constexpr, D: tl.constexpr, SLOTS: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    n_tiles, L, S, _ = sizes
    held_full, held_empty = held
    k_full, k_empty = k_bars
    v_full, v_empty = v_bars
    steps = gl.cdiv(S, BM)
    seen = 0
    for turn in range(walk(n_tiles)):
        b, h, row0 = tile_of(turn, L, H)
        for w in gl.static_range(2):
            mine = turn % HELD * 2 + w
            mbarrier.wait(held_empty.index(mine), ((turn // HELD) & 1) ^ 1)
            mbarrier.expect(held_full.index(mine), 2 * BM * D)
            tma_load(g_desc, [b, row0 + w * BM, h, 0], held_full.index(mine), g_smem.index(mine))
        for t in range(steps):
            slot = (seen + t) % SLOTS
            free = (((seen + t) // SLOTS) & 1) ^ 1
            col0 = t * BM
            bar = v_full.index(slot)
            mbarrier.wait(v_empty.index(slot), free)
            mbarrier.expect(bar, 2 * BM * D + 4 * BM * BM)
            tma_load(v_desc, [b, col0, h, 0], bar, v_smem.index(slot))
            for w in gl.static_range(2):
                at = [b, h, row0 + w * BM, col0]
                tma_load(p_desc, at, bar, p_smem.index(slot * 2 + w))
            mbarrier.wait(k_empty.index(slot), free)
            mbarrier.expect(k_full.index(slot), 2 * BM * D)
            tma_load(k_desc, [b, col0, h, 0], k_full.index(slot), k_smem.index(slot))
        seen += steps


@jit(do_not_specialize=["n_tiles", "L", "S", "first"])
def weights_queries_sm90_kernel(
    g_desc, k_desc, v_desc, p_desc, dq_desc, delta_ptr, cos_ptr, sin_ptr,
    stride_cos_b, stride_cos_n, stride_sin_b, stride_sin_n,
    n_tiles, L, S, first, scale, H: tl.constexpr, D: tl.constexpr, SLOTS: tl.constexpr,
    HELD: tl.constexpr, ROPE: tl.constexpr, CENTRED: tl.constexpr,
):  # fmt: skip
    DTYPE: gl.constexpr = k_desc.dtype
    g_smem = gl.allocate_shared_memory(DTYPE, [2 * HELD, 1, BM, 1, D], g_desc.layout)
    k_smem = gl.allocate_shared_memory(DTYPE, [SLOTS, 1, BM, 1, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(DTYPE, [SLOTS, 1, BM, 1, D], v_desc.layout)
    p_smem = gl.allocate_shared_memory(DTYPE, [2 * SLOTS, 1, 1, BM, BM], p_desc.layout)
    held = (barriers(2 * HELD, 1), barriers(2 * HELD, 1))
    k_bars = (barriers(SLOTS, 1), barriers(SLOTS, 2))
    v_bars = (barriers(SLOTS, 1), barriers(SLOTS, 2))
    fence_async_shared()
    begin_early()
    sizes = (n_tiles, L, S, first)
    tables = (cos_ptr, sin_ptr, stride_cos_b, stride_cos_n, stride_sin_b, stride_sin_n)
    gl.warp_specialize([
        (consumer, (0, g_smem, k_smem, v_smem, p_smem, held, k_bars, v_bars, dq_desc, delta_ptr,
                    tables, sizes, scale, H, D, SLOTS, HELD, ROPE, CENTRED)),
        (consumer, (1, g_smem, k_smem, v_smem, p_smem, held, k_bars, v_bars, dq_desc, delta_ptr,
                    tables, sizes, scale, H, D, SLOTS, HELD, ROPE, CENTRED)),
        (producer, (g_desc, k_desc, v_desc, p_desc, g_smem, k_smem, v_smem, p_smem,
                    held, k_bars, v_bars, sizes, H, D, SLOTS, HELD)),
    ], [4, 1], [240, 24])  # fmt: skip

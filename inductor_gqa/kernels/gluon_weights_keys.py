"""dK and dV of 2 x 64 keys from given weights P, for sm_90, summed over the heads of a group.

Each head has its own V, which is held for a sweep over the queries; the sums stay in registers from
head to head. P is read turned, so that P^T and dS^T = P^T (V dO^T - delta) go from registers into
the products. Where groups and key tiles are few, a group is shared by several programs, whose sums
go to memory in fp32 and are added by `gather_kernel`.
"""

import triton
import triton.language as tl

from inductor_gqa.kernels.gluon_tiles import (
    WHY_NOT,
    barriers,
    begin_early,
    gl,
    group_barrier,
    hand_back,
    jit,
    mbarrier,
    tma,
    tma_load,
)
from inductor_gqa.kernels.gluon_weights_tiles import BM, delta_of, leave, tile_of, turned_back, walk
from inductor_gqa.kernels.tiles import store_tile
from inductor_gqa.kernels.weights_tiles import store_turned_back

if WHY_NOT is None:
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        warpgroup_mma,
        warpgroup_mma_wait,
    )


@jit
def store_part(ptr, part, row0, S, value, D: tl.constexpr):
    """A share of a sum, fp32, to rows that are there for whole tiles. Four lanes fill a sector."""
    LAYOUT: gl.constexpr = value.type.layout
    rows = gl.arange(0, BM, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    cols = gl.arange(0, D, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    first = part.to(gl.int64) * (gl.cdiv(S, 2 * BM) * (2 * BM)) + row0
    gl.store(ptr + first * D + (rows * D + cols), value)


@jit
def consumer(
    W: tl.constexpr, v_smem, q_smem, g_smem, p_smem, held, q_bars, g_bars, dk_desc, dv_desc,
    dk_part_ptr, dv_part_ptr, delta_ptr, tables, sizes, scale, H: tl.constexpr,
    HEADS: tl.constexpr, D: tl.constexpr, SLOTS: tl.constexpr, HELD: tl.constexpr,
    ROPE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    G_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    A_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, G_LAYOUT, 2)
    COLS: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    PARTS: gl.constexpr = H // HEADS
    n_tiles, L, S, first_dk, first_dv = sizes
    held_full, held_empty = held
    q_full, q_empty = q_bars
    g_full, g_empty = g_bars
    zeros = gl.zeros([BM, BM], gl.float32, layout=S_LAYOUT)
    steps = gl.cdiv(L, BM)
    seen = 0
    for i in range(walk(n_tiles)):
        turn = i * HEADS
        b, part, col0 = tile_of(i, S, PARTS)
        col0 += W * BM
        dk = gl.zeros([BM, D], gl.float32, layout=G_LAYOUT)
        dv = gl.zeros([BM, D], gl.float32, layout=G_LAYOUT)
        for r in range(HEADS):
            mine = (turn + r) % HELD * 2 + W
            v = v_smem.index(mine).reshape([BM, D])
            sums = delta_ptr + delta_of(b, part * HEADS + r, L, H)
            mbarrier.wait(held_full.index(mine), ((turn + r) // HELD) & 1)
            for t in range(steps):
                slot = (seen + t) % SLOTS
                full = ((seen + t) // SLOTS) & 1
                q = q_smem.index(slot).reshape([BM, D])
                g = g_smem.index(slot).reshape([BM, D])
                delta = gl.load(sums + t * BM + gl.arange(0, BM, layout=COLS))
                mbarrier.wait(g_full.index(slot), full)  # P comes with dO
                dp = warpgroup_mma(v, g.permute((1, 0)), zeros, use_acc=False, is_async=True)
                p = p_smem.index(slot * 2 + W).reshape([BM, BM]).permute((1, 0)).load(S_LAYOUT)
                pa = gl.convert_layout(p, A_LAYOUT)
                dv = warpgroup_mma(pa, g, dv, is_async=True)
                # Products finish in order: dP is there, P^T dO still runs.
                dp = warpgroup_mma_wait(num_outstanding=1, deps=(dp,))
                ds = p.to(gl.float32) * (dp - delta[None, :])
                da = gl.convert_layout(ds.to(q_smem.dtype), A_LAYOUT)
                mbarrier.wait(q_full.index(slot), full)
                dk = warpgroup_mma(da, q, dk, is_async=True)
                dv, pa = warpgroup_mma_wait(num_outstanding=1, deps=(dv, pa))
                hand_back(g_empty.index(slot))
                dk, da = warpgroup_mma_wait(num_outstanding=0, deps=(dk, da))
                hand_back(q_empty.index(slot))
            seen += steps
            if r < HEADS - 1:
                hand_back(held_empty.index(mine))
        mine = (turn + HEADS - 1) % HELD * 2 + W
        if SPLIT > 1:
            store_part(dv_part_ptr, b * PARTS + part, col0, S, dv, D)
            store_part(dk_part_ptr, b * PARTS + part, col0, S, dk, D)
        else:
            leave(dv_desc, [b, col0, first_dv + part, 0], v_smem.index(mine), dv, D)
            dk = dk * scale
            if ROPE:
                dk = turned_back(dk, tables, b, col0, S, D)
            tma.store_wait(pendings=0)
            group_barrier()
            leave(dk_desc, [b, col0, first_dk + part, 0], v_smem.index(mine), dk, D)
            tma.store_wait(pendings=0)
        hand_back(held_empty.index(mine))


@jit
def producer(
    v_desc, q_desc, g_desc, p_desc, v_smem, q_smem, g_smem, p_smem, held, q_bars, g_bars, sizes,
    H: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, SLOTS: tl.constexpr,
    HELD: tl.constexpr,
):  # fmt: skip
    PARTS: gl.constexpr = H // HEADS
    n_tiles, L, S, _, _ = sizes
    held_full, held_empty = held
    q_full, q_empty = q_bars
    g_full, g_empty = g_bars
    steps = gl.cdiv(L, BM)
    seen = 0
    for i in range(walk(n_tiles)):
        turn = i * HEADS
        b, part, col0 = tile_of(i, S, PARTS)
        for r in range(HEADS):
            h = part * HEADS + r
            for w in gl.static_range(2):
                mine = (turn + r) % HELD * 2 + w
                bar = held_full.index(mine)
                mbarrier.wait(held_empty.index(mine), (((turn + r) // HELD) & 1) ^ 1)
                mbarrier.expect(bar, 2 * BM * D)
                tma_load(v_desc, [b, col0 + w * BM, h, 0], bar, v_smem.index(mine))
            for t in range(steps):
                slot = (seen + t) % SLOTS
                free = (((seen + t) // SLOTS) & 1) ^ 1
                row0 = t * BM
                bar = g_full.index(slot)
                mbarrier.wait(g_empty.index(slot), free)
                mbarrier.expect(bar, 2 * BM * D + 4 * BM * BM)
                tma_load(g_desc, [b, row0, h, 0], bar, g_smem.index(slot))
                for w in gl.static_range(2):
                    at = [b, h, row0, col0 + w * BM]
                    tma_load(p_desc, at, bar, p_smem.index(slot * 2 + w))
                mbarrier.wait(q_empty.index(slot), free)
                mbarrier.expect(q_full.index(slot), 2 * BM * D)
                tma_load(q_desc, [b, row0, h, 0], q_full.index(slot), q_smem.index(slot))
            seen += steps


@jit(do_not_specialize=["n_tiles", "L", "S", "first_dk", "first_dv"])
def weights_keys_sm90_kernel(
    v_desc, q_desc, g_desc, p_desc, dk_desc, dv_desc, dk_part_ptr, dv_part_ptr, delta_ptr,
    cos_ptr, sin_ptr, stride_cos_b, stride_cos_n, stride_sin_b, stride_sin_n,
    n_tiles, L, S, first_dk, first_dv, scale, H: tl.constexpr,
    HEADS: tl.constexpr, D: tl.constexpr, SLOTS: tl.constexpr, HELD: tl.constexpr,
    ROPE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    DTYPE: gl.constexpr = v_desc.dtype
    v_smem = gl.allocate_shared_memory(DTYPE, [2 * HELD, 1, BM, 1, D], v_desc.layout)
    q_smem = gl.allocate_shared_memory(DTYPE, [SLOTS, 1, BM, 1, D], q_desc.layout)
    g_smem = gl.allocate_shared_memory(DTYPE, [SLOTS, 1, BM, 1, D], g_desc.layout)
    p_smem = gl.allocate_shared_memory(DTYPE, [2 * SLOTS, 1, 1, BM, BM], p_desc.layout)
    held = (barriers(2 * HELD, 1), barriers(2 * HELD, 1))
    q_bars = (barriers(SLOTS, 1), barriers(SLOTS, 2))
    g_bars = (barriers(SLOTS, 1), barriers(SLOTS, 2))
    fence_async_shared()
    begin_early()
    sizes = (n_tiles, L, S, first_dk, first_dv)
    tables = (cos_ptr, sin_ptr, stride_cos_b, stride_cos_n, stride_sin_b, stride_sin_n)
    gl.warp_specialize([
        (consumer, (0, v_smem, q_smem, g_smem, p_smem, held, q_bars, g_bars, dk_desc, dv_desc,
                    dk_part_ptr, dv_part_ptr, delta_ptr, tables, sizes, scale,
                    H, HEADS, D, SLOTS, HELD, ROPE, SPLIT)),
        (consumer, (1, v_smem, q_smem, g_smem, p_smem, held, q_bars, g_bars, dk_desc, dv_desc,
                    dk_part_ptr, dv_part_ptr, delta_ptr, tables, sizes, scale,
                    H, HEADS, D, SLOTS, HELD, ROPE, SPLIT)),
        (producer, (v_desc, q_desc, g_desc, p_desc, v_smem, q_smem, g_smem, p_smem,
                    held, q_bars, g_bars, sizes, H, HEADS, D, SLOTS, HELD)),
    ], [4, 1], [240, 24])  # fmt: skip


@triton.jit
def gather_kernel(
    dk_part_ptr, dv_part_ptr, dk_ptr, dv_ptr, cos_ptr, sin_ptr,
    stride_cos_b, stride_cos_n, stride_cos_w, stride_sin_b, stride_sin_n, stride_sin_w,
    first_dk, stride_dk_b, stride_dk_s, first_dv, stride_dv_b, stride_dv_s, S, padded, groups,
    scale,
    K: tl.constexpr, SPLIT: tl.constexpr, D: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """dK, turned back, and dV from the shares of a group. Grid: row tiles x groups, for dK then
    dV."""
    tiles = tl.cdiv(S, ROWS)
    row0 = tl.program_id(0) % tiles * ROWS
    bk = tl.program_id(0) // tiles
    is_dk = bk < groups
    bk = tl.where(is_dk, bk, bk - groups)
    b = bk // K
    k = bk % K
    rows = row0 + tl.arange(0, ROWS)
    first = tl.cast(bk, tl.int64) * SPLIT * padded + row0
    at = first * D + tl.arange(0, ROWS)[:, None] * D + tl.arange(0, D)[None, :]
    parts = dk_part_ptr if is_dk else dv_part_ptr
    total = tl.zeros([ROWS, D], tl.float32)
    for part in tl.static_range(SPLIT):
        total += tl.load(parts + at + tl.cast(padded, tl.int64) * part * D)
    if is_dk:
        store_turned_back(
            total * scale, dk_ptr + first_dk + b.to(tl.int64) * stride_dk_b + k * D, rows,
            stride_dk_s, S,
            cos_ptr + b.to(tl.int64) * stride_cos_b, sin_ptr + b.to(tl.int64) * stride_sin_b,
            stride_cos_n, stride_cos_w, stride_sin_n, stride_sin_w, D, D, 0, W, False,
        )  # fmt: skip
    else:
        at_dv = dv_ptr + first_dv + b.to(tl.int64) * stride_dv_b + k * D
        store_tile(at_dv, total, rows, stride_dv_s, S, 0, D, D)


@triton.jit
def pitch_kernel(
    weights_ptr, copy_ptr, stride_weights_b, stride_weights_h, stride_weights_l,
    stride_weights_s, L, S, pitch,
    H: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Weights into rows of whole vectors, which the copy engine wants. Grid: row tiles x heads."""
    tiles = tl.cdiv(L, ROWS)
    bh = tl.program_id(0) // tiles
    b = bh // H
    h = bh % H
    rows = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)[:, None]
    weights_ptr += b.to(tl.int64) * stride_weights_b + h.to(tl.int64) * stride_weights_h
    at = weights_ptr + rows.to(tl.int64) * stride_weights_l
    to = copy_ptr + (bh.to(tl.int64) * L + rows) * pitch
    for col0 in tl.range(0, S, COLS):
        cols = col0 + tl.arange(0, COLS)[None, :]
        x = tl.load(
            at + cols.to(tl.int64) * stride_weights_s, mask=(rows < L) & (cols < S), other=0.0
        )
        tl.store(to + cols, x, mask=(rows < L) & (cols < pitch))

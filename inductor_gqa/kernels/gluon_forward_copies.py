"""What brings tiles to the groups that multiply them in the forward kernel for sm_90: one warp
copies, queries a tile ahead, and four turn these where q is rotated."""

import triton.language as tl

from inductor_gqa.kernels.gluon_tiles import (
    WHY_NOT,
    gl,
    group_barrier,
    hand_back,
    jit,
    keys_of,
    mbarrier,
    my_tiles,
    tile_at,
    tma_load,
    turn_rows,
)

if WHY_NOT is None:
    from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

BM = tl.constexpr(64)  # rows of a group: what one warp group multiplies at a time


@jit
def turner(
    given, K: tl.constexpr, R: tl.constexpr, D: tl.constexpr, Q_SLOTS: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    """Turns the queries of both groups between their copy and their first product: as a register
    operand Q would be loaded again for every product."""
    SOME: gl.constexpr = 2048 // D  # rows at a time
    q_smem, q_raw, q_full, tables, sizes = given
    n_tiles, B, L, _, _, _ = sizes
    cos_ptr, sin_ptr, stride_b, stride_l, stride_w = tables
    for n in range(2 * my_tiles(n_tiles)):
        i = n // 2
        w = n % 2
        b, _, _, tile_row = tile_at(i, L, B, K, R, 2 * BM, HEADS)
        row0 = tile_row + w * (BM // HEADS)
        table = b.to(gl.int64) * stride_b + row0.to(gl.int64) * stride_l
        slot = i % Q_SLOTS * 2 + w
        mbarrier.wait(q_raw.index(slot), (i // Q_SLOTS) & 1)
        q = q_smem.index(slot).reshape([BM, D])
        for first in gl.static_range(0, BM, SOME):
            at = table + first // HEADS * stride_l
            turn_rows(
                q.slice(first, SOME), cos_ptr + at, sin_ptr + at, stride_l, stride_w,
                L - row0 - first // HEADS, D, HEADS,
            )  # fmt: skip
            # Keeps the loads of the next rows, for which there are no registers, below.
            group_barrier()
        fence_async_shared()
        hand_back(q_full.index(slot))


@jit
def copy_queries(
    i, q_desc, q_smem, q_copied, q_empty, B, L,
    K: tl.constexpr, R: tl.constexpr, D: tl.constexpr, Q_SLOTS: tl.constexpr, GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    """Of the i-th tile, for all groups."""
    b, hk, r, row0 = tile_at(i, L, B, K, R, GROUPS * BM, HEADS)
    for w in gl.static_range(GROUPS):
        slot = i % Q_SLOTS * GROUPS + w
        # A fresh barrier counts as having completed its odd phase: round one never waits.
        mbarrier.wait(q_empty.index(slot), ((i // Q_SLOTS) & 1) ^ 1)
        bar = q_copied.index(slot)
        mbarrier.expect(bar, 2 * BM * D)
        tma_load(q_desc, [b, row0 + w * (BM // HEADS), hk, r, 0], bar, q_smem.index(slot))


@jit
def copy_keys(
    number, b, col0, hk, k_desc, v_desc, k_smem, v_smem, k_bars, v_bars,
    D: tl.constexpr, BN: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """A tile of K and V, the so manyth of this program."""
    k_full, k_empty = k_bars
    v_full, v_empty = v_bars
    slot = number % SLOTS
    free = ((number // SLOTS) & 1) ^ 1
    mbarrier.wait(k_empty.index(slot), free)
    mbarrier.expect(k_full.index(slot), 2 * BN * D)
    tma_load(k_desc, [b, col0, hk, 0], k_full.index(slot), k_smem.index(slot))
    mbarrier.wait(v_empty.index(slot), free)
    mbarrier.expect(v_full.index(slot), 2 * BN * D)
    tma_load(v_desc, [b, col0, hk, 0], v_full.index(slot), v_smem.index(slot))


@jit
def producer(
    given, K: tl.constexpr, R: tl.constexpr, D: tl.constexpr, BN: tl.constexpr, SLOTS: tl.constexpr,
    HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, Q_SLOTS: tl.constexpr, GROUPS: tl.constexpr,
    HEADS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Copies, queries a tile ahead."""
    q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, q_copied, q_empty, k_bars, v_bars, sizes = given
    n_tiles, B, L, S, band_lo, band_hi = sizes
    seen = 0
    count = my_tiles(n_tiles)
    if Q_SLOTS > 1:
        copy_queries(0, q_desc, q_smem, q_copied, q_empty, B, L, K, R, D, Q_SLOTS, GROUPS, HEADS)
    for i in range(count):
        b, hk, _, row0 = tile_at(i, L, B, K, R, GROUPS * BM, HEADS)
        end, n = keys_of(
            row0,
            L,
            S,
            band_lo,
            band_hi,
            GROUPS * BM // HEADS,
            BN,
            HAS_LO,
            HAS_HI,
            ALIGNED,
            HEADS,
        )
        if Q_SLOTS == 1:
            copy_queries(
                i, q_desc, q_smem, q_copied, q_empty, B, L, K, R, D, Q_SLOTS, GROUPS, HEADS
            )
        for t in range(n):
            copy_keys(
                seen + t, b, end - (t + 1) * BN, hk, k_desc, v_desc, k_smem, v_smem, k_bars, v_bars,
                D, BN, SLOTS,
            )  # fmt: skip
            if Q_SLOTS > 1:  # noqa: SIM102
                # The first keys go before: no group waits for these queries yet.
                if (t == 0) & (i + 1 < count):
                    copy_queries(
                        i + 1,
                        q_desc,
                        q_smem,
                        q_copied,
                        q_empty,
                        B,
                        L,
                        K,
                        R,
                        D,
                        Q_SLOTS,
                        GROUPS,
                        HEADS,
                    )
        seen += n

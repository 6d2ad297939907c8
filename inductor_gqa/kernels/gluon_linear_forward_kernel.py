"""Y_i = X W_i^T in fp32 for up to three weights with one X, in one persistent launch for sm_90: one
warp copies, four split the weights, two groups of four multiply.

Tensor cores take tf32. The left operand comes from registers, where its group rounds it to nearest;
the right one from shared memory, where the splitting warps do so in place. "ieee" (PARTS = 2) keeps
what rounding took from either, x = hi + lo, and sums lo hi' + hi lo' + hi hi', as exact as fp32.

The two groups own 64 rows each of a tile of 128, or (SHARED) take the steps of its sum in turn and
own half of the terms of 64 rows: where tokens are few, that ends in half the time.
"""

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
    tma_store,
)

if WHY_NOT is None:
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        warpgroup_mma,
        warpgroup_mma_wait,
    )

ROWS = tl.constexpr(64)  # of a group of warps
# From here on rounding to nearest would overflow.
LIMIT = tl.constexpr((2 - 2**-11) * 2.0**127)


@jit
def high_part(x):
    """The nearest tf32 value, or where there is none the truncated one; infinities stay, and NaN
    that arithmetic has made."""
    bits = x.to(gl.int32, bitcast=True)
    bits = gl.where(gl.abs(x) < LIMIT, bits + 0x1000, bits) & -0x2000
    return bits.to(gl.float32, bitcast=True)


@jit
def my_count(n_tiles):
    """How many tiles this program has: every so many-th from its own number on."""
    programs = gl.num_programs(0)
    return (n_tiles - gl.program_id(0) + programs - 1) // programs


@jit
def tile_at(tile, n0, n1, n2, BN: tl.constexpr, SHARED: tl.constexpr):
    """Layer, first row and first column of a tile; columns vary fastest: programs that run together
    share rows of X."""
    end0 = gl.cdiv(n0, BN)
    end1 = end0 + gl.cdiv(n1, BN)
    end2 = end1 + gl.cdiv(n2, BN)
    row = tile // end2 * (ROWS if SHARED else 2 * ROWS)
    at = tile % end2
    layer = gl.where(at < end0, 0, gl.where(at < end1, 1, 2))
    before = gl.where(layer == 0, 0, gl.where(layer == 1, end0, end1))
    return layer, row, (at - before) * BN


@jit
def leave_exact(
    x_ptr, w_ptr, y_ptr, stride_x, stride_w, row, col, T, N, C, BN: tl.constexpr
):  # fmt: skip
    """A group's rows of a tile as sums in fp32 of products one by one, as matmuls compute what is
    not finite: there the parts of a number are infinities of either sign, or NaN."""
    SOME: gl.constexpr = 4  # columns at a time: the kernel has no registers for more
    WIDE: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [4, 1], [1, 0])
    for first in range(col, col + BN, SOME):
        rows = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, WIDE))
        cols = first + gl.arange(0, SOME, layout=gl.SliceLayout(0, WIDE))
        x_row = x_ptr + rows.to(gl.int64) * stride_x
        w_row = w_ptr + cols.to(gl.int64) * stride_w
        acc = gl.zeros([ROWS, SOME], gl.float32, layout=WIDE)
        for c in range(C):
            x = gl.load(x_row + c, mask=rows < T, other=0.0)
            w = gl.load(w_row + c, mask=cols < N, other=0.0)
            acc += x[:, None] * w[None, :]
        at = y_ptr + (rows.to(gl.int64) * N)[:, None] + cols[None, :]
        gl.store(at, acc, mask=(rows < T)[:, None] & (cols < N)[None, :])


@jit
def leave_tile(desc, row, col, staging, acc):
    """By the copy engine; the tile before has left the buffer first."""
    tma.store_wait(pendings=0)
    group_barrier()
    staging.store(acc)
    fence_async_shared()
    group_barrier()
    tma_store(desc, [row, col], staging)


@jit
def leave(
    acc, x_ptr, w_ptr, y_ptr, desc, stride_x, stride_w, row, col, T, N, C, staging,
    PARTS: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """A group's rows of a tile to where they belong."""
    if PARTS == 2:
        if gl.max(gl.max(gl.where(gl.abs(acc) < float("inf"), 0, 1), 1), 0) == 0:
            leave_tile(desc, row, col, staging, acc)
        else:
            leave_exact(x_ptr, w_ptr, y_ptr, stride_x, stride_w, row, col, T, N, C, BN)
    else:
        leave_tile(desc, row, col, staging, acc)


@jit
def finish(
    acc, layer, row, col, staging, y_descs, sources, sizes, PARTS: tl.constexpr, BN: tl.constexpr,
    LAYERS: tl.constexpr,
):  # fmt: skip
    x, w0, w1, w2, y0, y1, y2, stride_x, stride_w0, stride_w1, stride_w2 = sources
    desc0, desc1, desc2 = y_descs
    _, T, C, n0, n1, n2 = sizes
    if layer == 0:
        leave(
            acc, x, w0, y0, desc0, stride_x, stride_w0, row, col, T, n0, C, staging, PARTS, BN
        )  # fmt: skip
    if LAYERS > 1:  # noqa: SIM102
        if layer == 1:
            leave(
                acc, x, w1, y1, desc1, stride_x, stride_w1, row, col, T, n1, C, staging, PARTS, BN
            )  # fmt: skip
    if LAYERS > 2:  # noqa: SIM102
        if layer == 2:
            leave(
                acc, x, w2, y2, desc2, stride_x, stride_w2, row, col, T, n2, C, staging, PARTS, BN
            )  # fmt: skip


@jit
def multiplier(
    W: tl.constexpr, given, PARTS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    SLOTS: tl.constexpr, LAYERS: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 1)
    FIRST: gl.constexpr = W if SHARED else 0
    STRIDE: gl.constexpr = 2 if SHARED else 1
    x_smem, high, low, staging, bars, y_descs, sources, sizes = given
    full, ready, empty, handed, taken = bars
    n_tiles, _, C, n0, n1, n2 = sizes
    steps = gl.cdiv(C, BK)
    seen = 0
    for i in range(my_count(n_tiles)):
        tile = gl.program_id(0) + i * gl.num_programs(0)
        layer, row, col = tile_at(tile, n0, n1, n2, BN, SHARED)
        acc = gl.zeros([ROWS, BN], gl.float32, layout=LAYOUT)
        for t in range(FIRST, steps, STRIDE):
            slot = (seen + t) % SLOTS
            phase = ((seen + t) // SLOTS) & 1
            mbarrier.wait(full.index(slot), phase)
            x = x_smem.index(slot if SHARED else slot * 2 + W).load(LEFT)
            x_hi = high_part(x)
            mbarrier.wait(ready.index(slot), phase)
            w_hi = high.index(slot).permute((1, 0))
            if PARTS == 2:
                x_lo = x - x_hi
                w_lo = low.index(slot).permute((1, 0))
                # Tensor cores truncate as they add: each step is summed for itself.
                part = gl.zeros([ROWS, BN], gl.float32, layout=LAYOUT)
                part = warpgroup_mma(x_lo, w_hi, part, use_acc=False, is_async=True)
                part = warpgroup_mma(x_hi, w_lo, part, is_async=True)
                part = warpgroup_mma(x_hi, w_hi, part, is_async=True)
                part, x_hi, x_lo = warpgroup_mma_wait(num_outstanding=0, deps=(part, x_hi, x_lo))
                hand_back(empty.index(slot))
                acc += part
            else:
                acc = warpgroup_mma(x_hi, w_hi, acc, is_async=True)
                acc, x_hi = warpgroup_mma_wait(num_outstanding=0, deps=(acc, x_hi))
                hand_back(empty.index(slot))
        seen += steps
        if not SHARED:
            finish(
                acc, layer, row + W * ROWS, col, staging.index(W), y_descs, sources, sizes, PARTS,
                BN, LAYERS,
            )  # fmt: skip
        elif W == 1:
            # A fresh barrier counts as having completed its odd phase: tile one never waits.
            mbarrier.wait(taken.index(0), (i & 1) ^ 1)
            staging.index(1).store(acc)
            group_barrier()
            mbarrier.arrive(handed.index(0), count=1)
        else:
            mbarrier.wait(handed.index(0), i & 1)
            acc += staging.index(1).load(LAYOUT)
            hand_back(taken.index(0))
            finish(
                acc, layer, row, col, staging.index(0), y_descs, sources, sizes, PARTS, BN, LAYERS
            )
    tma.store_wait(pendings=0)


@jit
def splitter(
    given, PARTS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SLOTS: tl.constexpr,
    SHARED: tl.constexpr,
):  # fmt: skip
    """Tiles of the weights in parts, where they lie."""
    WIDE: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    high, low, full, ready, sizes = given
    n_tiles, _, C, _, _, _ = sizes
    steps = gl.cdiv(C, BK)
    seen = 0
    for _tile in range(gl.program_id(0), n_tiles, gl.num_programs(0)):
        for t in range(steps):
            slot = (seen + t) % SLOTS
            mbarrier.wait(full.index(slot), ((seen + t) // SLOTS) & 1)
            w = high.index(slot).load(WIDE)
            w_hi = high_part(w)
            high.index(slot).store(w_hi)
            if PARTS == 2:
                low.index(slot).store(w - w_hi)
            fence_async_shared()
            hand_back(ready.index(slot))
        seen += steps


@jit
def fetch(
    x_desc, w_desc, x_smem, high, full, empty, seen, row, col, C, BN: tl.constexpr,
    BK: tl.constexpr, SLOTS: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    GROUPS: gl.constexpr = 1 if SHARED else 2
    for t in range(gl.cdiv(C, BK)):
        slot = (seen + t) % SLOTS
        bar = full.index(slot)
        mbarrier.wait(empty.index(slot), (((seen + t) // SLOTS) & 1) ^ 1)
        mbarrier.expect(bar, 4 * BK * (GROUPS * ROWS + BN))
        tma_load(w_desc, [col, t * BK], bar, high.index(slot))
        for w in gl.static_range(GROUPS):
            tma_load(x_desc, [row + w * ROWS, t * BK], bar, x_smem.index(slot * GROUPS + w))


@jit
def copier(
    given, BN: tl.constexpr, BK: tl.constexpr, SLOTS: tl.constexpr, LAYERS: tl.constexpr,
    SHARED: tl.constexpr,
):  # fmt: skip
    x_desc, w_descs, x_smem, high, full, empty, sizes = given
    w0, w1, w2 = w_descs
    n_tiles, _, C, n0, n1, n2 = sizes
    seen = 0
    for tile in range(gl.program_id(0), n_tiles, gl.num_programs(0)):
        layer, row, col = tile_at(tile, n0, n1, n2, BN, SHARED)
        if layer == 0:
            fetch(x_desc, w0, x_smem, high, full, empty, seen, row, col, C, BN, BK, SLOTS, SHARED)
        if LAYERS > 1:  # noqa: SIM102
            if layer == 1:
                fetch(
                    x_desc, w1, x_smem, high, full, empty, seen, row, col, C, BN, BK, SLOTS, SHARED
                )
        if LAYERS > 2:  # noqa: SIM102
            if layer == 2:
                fetch(
                    x_desc, w2, x_smem, high, full, empty, seen, row, col, C, BN, BK, SLOTS, SHARED
                )
        seen += gl.cdiv(C, BK)


@jit(do_not_specialize=["n_tiles", "T", "C", "n0", "n1", "n2"])
def linear_forward_sm90_kernel(
    x_desc, w0_desc, w1_desc, w2_desc, y0_desc, y1_desc, y2_desc, x_ptr, w0_ptr, w1_ptr, w2_ptr,
    y0_ptr, y1_ptr, y2_ptr, stride_x_t, stride_w0_n, stride_w1_n, stride_w2_n,
    n_tiles, T, C, n0, n1, n2,
    PARTS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SLOTS: tl.constexpr,
    LAYERS: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    GROUPS: gl.constexpr = 1 if SHARED else 2
    x_smem = gl.allocate_shared_memory(gl.float32, [SLOTS * GROUPS, ROWS, BK], x_desc.layout)
    high = gl.allocate_shared_memory(gl.float32, [SLOTS, BN, BK], w0_desc.layout)
    low = high
    if PARTS == 2:
        low = gl.allocate_shared_memory(gl.float32, [SLOTS, BN, BK], w0_desc.layout)
    staging = gl.allocate_shared_memory(gl.float32, [2, ROWS, BN], y0_desc.layout)
    full, ready, empty = barriers(SLOTS, 1), barriers(SLOTS, 1), barriers(SLOTS, GROUPS)
    bars = (full, ready, empty, barriers(1, 1), barriers(1, 1))
    fence_async_shared()
    begin_early()
    sizes = (n_tiles, T, C, n0, n1, n2)
    sources = (
        x_ptr, w0_ptr, w1_ptr, w2_ptr, y0_ptr, y1_ptr, y2_ptr, stride_x_t, stride_w0_n,
        stride_w1_n, stride_w2_n,
    )  # fmt: skip
    y_descs = (y0_desc, y1_desc, y2_desc)
    given = (x_smem, high, low, staging, bars, y_descs, sources, sizes)
    copied = (x_desc, (w0_desc, w1_desc, w2_desc), x_smem, high, full, empty, sizes)
    gl.warp_specialize([
        (multiplier, (0, given, PARTS, BN, BK, SLOTS, LAYERS, SHARED)),
        (multiplier, (1, given, PARTS, BN, BK, SLOTS, LAYERS, SHARED)),
        (splitter, ((high, low, full, ready, sizes), PARTS, BN, BK, SLOTS, SHARED)),
        (copier, (copied, BN, BK, SLOTS, LAYERS, SHARED)),
    ], [4, 4, 1], [200, 80, 24])  # fmt: skip

"""Every gradient of up to three linear layers that share their input, in one persistent launch for
sm_90: a copying warp and two groups of four warps, as in the attention kernels.

Two kinds of tiles of 2 x 64 rows: a *sum* is one of dX = sum over layers of G W, an *outer* one of
a layer's dW = G^T X. Sums go first, as many a program as there are; outer tiles then fill up what
time is left (see `linear_backward.spread`), so that no wave of either kind runs half empty.
"""

from inductor_gqa.kernels.gluon_tiles import (
    WHY_NOT,
    barriers,
    begin_early,
    gl,
    group_barrier,
    hand_back,
    jit,
    mbarrier,
    tl,
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
STEP = tl.constexpr(64)  # of the summed dimension


@jit
def my_share(share):
    """First outer tile of this program, and how many."""
    n_hi, q_hi, extra_hi, q_lo, extra_lo = share
    pid = gl.program_id(0)
    is_hi = pid < n_hi
    place = gl.where(is_hi, pid, pid - n_hi)
    count = gl.where(is_hi, q_hi, q_lo)
    extra = gl.where(is_hi, extra_hi, extra_lo)
    first = gl.where(is_hi, 0, n_hi * q_hi + extra_hi) + place * count + gl.minimum(place, extra)
    return first, count + gl.where(place < extra, 1, 0)


@jit
def steps_of(n):
    return gl.cdiv(n, STEP)


@jit
def sum_at(i, T):
    """First row and the column tile of a sum; rows vary fastest and share the weights in L2."""
    rows = gl.cdiv(T, 2 * ROWS)
    return i % rows * (2 * ROWS), i // rows


@jit
def outer_at(j, n0, n1, n2, C, BN: tl.constexpr, PARTS: tl.constexpr):
    """Layer, first row in its dW, and the column tile."""
    t0 = gl.cdiv(n0, 2 * ROWS)
    t1 = t0
    t2 = t0
    if PARTS > 1:
        t1 = t0 + gl.cdiv(n1, 2 * ROWS)
        t2 = t1
    if PARTS > 2:
        t2 = t1 + gl.cdiv(n2, 2 * ROWS)
    row = j % t2
    layer = gl.where(row < t0, 0, gl.where(row < t1, 1, 2))
    row = row - gl.where(layer == 0, 0, gl.where(layer == 1, t0, t1))
    return layer, row * (2 * ROWS), j // t2


@jit
def summed(
    W: tl.constexpr, a_smem, b_smem, bars, seen, steps, TURNED: tl.constexpr, BN: tl.constexpr,
    SLOTS: tl.constexpr,
):  # fmt: skip
    """The product of a group over `steps` slots, fp32. TURNED: its left operand lies as [summed,
    rows]."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    full, empty = bars
    acc = gl.zeros([ROWS, BN], gl.float32, layout=LAYOUT)
    for t in range(steps):
        slot = (seen + t) % SLOTS
        mbarrier.wait(full.index(slot), ((seen + t) // SLOTS) & 1)
        a = a_smem.index(slot * 2 + W)
        if TURNED:
            a = a.permute((1, 0))
        acc = warpgroup_mma(a, b_smem.index(slot), acc, is_async=True)
        # Products finish in order: the one before this is done, and its slot free.
        acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
        if t > 0:
            hand_back(empty.index((seen + t - 1) % SLOTS))
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    hand_back(empty.index((seen + steps - 1) % SLOTS))
    return acc


@jit
def leave(desc, row, col, staging, acc):
    """A group's result out; the copy of the one before has left the buffer first."""
    tma.store_wait(pendings=0)
    group_barrier()
    staging.store(acc.to(staging.dtype))
    fence_async_shared()
    group_barrier()
    tma_store(desc, [row, col], staging)


@jit
def consumer(
    W: tl.constexpr, a_smem, b_smem, staging, bars, dx_desc, dw_descs, sizes, share,
    PARTS: tl.constexpr, BN: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    T, C, n0, n1, n2, n_sums = sizes
    dw0, dw1, dw2 = dw_descs
    out = staging.index(W)
    seen = 0
    steps = steps_of(n0)
    if PARTS > 1:
        steps += steps_of(n1)
    if PARTS > 2:
        steps += steps_of(n2)
    for i in range(gl.program_id(0), n_sums, gl.num_programs(0)):
        row, col = sum_at(i, T)
        acc = summed(W, a_smem, b_smem, bars, seen, steps, False, BN, SLOTS)
        seen += steps
        leave(dx_desc, row + W * ROWS, col * BN, out, acc)
    first, count = my_share(share)
    steps = steps_of(T)
    for j in range(first, first + count):
        layer, row, col = outer_at(j, n0, n1, n2, C, BN, PARTS)
        acc = summed(W, a_smem, b_smem, bars, seen, steps, True, BN, SLOTS)
        seen += steps
        tma.store_wait(pendings=0)
        group_barrier()
        out.store(acc.to(out.dtype))
        fence_async_shared()
        group_barrier()
        if layer == 0:
            tma_store(dw0, [row + W * ROWS, col * BN], out)
        if PARTS > 1:  # noqa: SIM102
            if layer == 1:
                tma_store(dw1, [row + W * ROWS, col * BN], out)
        if PARTS > 2:  # noqa: SIM102
            if layer == 2:
                tma_store(dw2, [row + W * ROWS, col * BN], out)
    tma.store_wait(pendings=0)


@jit
def fetch(
    a_desc, b_desc, a_smem, b_smem, bars, seen, steps, row, col, TURNED: tl.constexpr,
    BN: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Copies of `steps` slots: 2 x 64 rows of the left operand from `row` on, BN columns of the
    right one from `col` on."""
    full, empty = bars
    for t in range(steps):
        slot = (seen + t) % SLOTS
        bar = full.index(slot)
        mbarrier.wait(empty.index(slot), (((seen + t) // SLOTS) & 1) ^ 1)
        mbarrier.expect(bar, 2 * STEP * (2 * ROWS + BN))
        for w in gl.static_range(2):
            if TURNED:
                tma_load(a_desc, [t * STEP, row + w * ROWS], bar, a_smem.index(slot * 2 + w))
            else:
                tma_load(a_desc, [row + w * ROWS, t * STEP], bar, a_smem.index(slot * 2 + w))
        tma_load(b_desc, [t * STEP, col], bar, b_smem.index(slot))


@jit
def producer(
    g_descs, w_descs, x_desc, a_smem, b_smem, bars, sizes, share,
    PARTS: tl.constexpr, BN: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    T, C, n0, n1, n2, n_sums = sizes
    g0, g1, g2 = g_descs
    w0, w1, w2 = w_descs
    seen = 0
    for i in range(gl.program_id(0), n_sums, gl.num_programs(0)):
        row, col = sum_at(i, T)
        fetch(g0, w0, a_smem, b_smem, bars, seen, steps_of(n0), row, col * BN, False, BN, SLOTS)
        seen += steps_of(n0)
        if PARTS > 1:
            fetch(g1, w1, a_smem, b_smem, bars, seen, steps_of(n1), row, col * BN, False, BN, SLOTS)
            seen += steps_of(n1)
        if PARTS > 2:
            fetch(g2, w2, a_smem, b_smem, bars, seen, steps_of(n2), row, col * BN, False, BN, SLOTS)
            seen += steps_of(n2)
    first, count = my_share(share)
    steps = steps_of(T)
    for j in range(first, first + count):
        layer, row, col = outer_at(j, n0, n1, n2, C, BN, PARTS)
        if layer == 0:
            fetch(g0, x_desc, a_smem, b_smem, bars, seen, steps, row, col * BN, True, BN, SLOTS)
        if PARTS > 1:  # noqa: SIM102
            if layer == 1:
                fetch(g1, x_desc, a_smem, b_smem, bars, seen, steps, row, col * BN, True, BN, SLOTS)
        if PARTS > 2:  # noqa: SIM102
            if layer == 2:
                fetch(g2, x_desc, a_smem, b_smem, bars, seen, steps, row, col * BN, True, BN, SLOTS)
        seen += steps


@jit(
    do_not_specialize=[
        "T",
        "C",
        "n0",
        "n1",
        "n2",
        "n_sums",
        "n_hi",
        "q_hi",
        "extra_hi",
        "q_lo",
        "extra_lo",
    ]
)
def linear_backward_sm90_kernel(
    g0_desc, g1_desc, g2_desc, w0_desc, w1_desc, w2_desc, x_desc, dx_desc, dw0_desc, dw1_desc,
    dw2_desc, T, C, n0, n1, n2, n_sums, n_hi, q_hi, extra_hi, q_lo, extra_lo,
    PARTS: tl.constexpr, BN: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    DTYPE: gl.constexpr = x_desc.dtype
    a_smem = gl.allocate_shared_memory(DTYPE, [SLOTS * 2, ROWS, STEP], g0_desc.layout)
    b_smem = gl.allocate_shared_memory(DTYPE, [SLOTS, STEP, BN], x_desc.layout)
    staging = gl.allocate_shared_memory(DTYPE, [2, ROWS, BN], dx_desc.layout)
    bars = (barriers(SLOTS, 1), barriers(SLOTS, 2))
    fence_async_shared()
    begin_early()
    sizes = (T, C, n0, n1, n2, n_sums)
    share = (n_hi, q_hi, extra_hi, q_lo, extra_lo)
    dws = (dw0_desc, dw1_desc, dw2_desc)
    gl.warp_specialize([
        (consumer, (0, a_smem, b_smem, staging, bars, dx_desc, dws, sizes, share,
                    PARTS, BN, SLOTS)),
        (consumer, (1, a_smem, b_smem, staging, bars, dx_desc, dws, sizes, share,
                    PARTS, BN, SLOTS)),
        (producer, ((g0_desc, g1_desc, g2_desc), (w0_desc, w1_desc, w2_desc), x_desc, a_smem,
                    b_smem, bars, sizes, share, PARTS, BN, SLOTS)),
    ], [4, 1], [240, 24])  # fmt: skip

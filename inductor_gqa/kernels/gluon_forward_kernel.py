"""The forward kernel for sm_90: one warp copies, two groups of four warps multiply.

O = softmax(scale Q K^T) V and LSE_BKRL in base 2. A program owns 2 x 64 query rows of one head at
a time and walks over such tiles. Each group keeps scores, probabilities and accumulator of its 64
rows in registers, and has the next scores multiplied before it turns these into probabilities.
Rules it knows: a band of keys, a key mask, rotation of q. Structure after FlashAttention-3.
"""

import triton.language as tl

from inductor_gqa.kernels.gluon_tiles import (
    WHY_NOT,
    barriers,
    begin_early,
    gl,
    group_barrier,
    hand_back,
    hidden_scores,
    jit,
    keys_of,
    mbarrier,
    my_tiles,
    open_tiles,
    packed_key_mask,
    softmax_step,
    store_rotated,
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

BM = tl.constexpr(64)  # rows of a group: what one warp group multiplies at a time


@jit
def next_tile(
    p, m, total, acc, t, seen, turn, end, b, row0, q, k_smem, v_smem, k_bars, v_bars, token,
    key_mask, sizes, unit, W: tl.constexpr, D: tl.constexpr, BN: tl.constexpr,
    SLOTS: tl.constexpr, PINGPONG: tl.constexpr, MASKED: tl.constexpr,
    HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, CHECK_LO: tl.constexpr, KEY_MASK: tl.constexpr,
    S_LAYOUT: tl.constexpr, O_LAYOUT: tl.constexpr, P_LAYOUT: tl.constexpr,
):  # fmt: skip
    """Scores of key tile t while the probabilities of tile t-1 are multiplied with their values."""
    S, band_lo, band_hi = sizes[3], sizes[4], sizes[5]
    k_full, k_empty = k_bars
    v_full, v_empty = v_bars
    col0 = end - (t + 1) * BN
    slot = (seen + t) % SLOTS
    last = (seen + t - 1) % SLOTS
    no_scores = gl.zeros([BM, BN], gl.float32, layout=S_LAYOUT)
    mbarrier.wait(k_full.index(slot), ((seen + t) // SLOTS) & 1)
    if PINGPONG:
        mbarrier.wait(token.index(W), (turn + t - 1) & 1)
    k = k_smem.index(slot).reshape([BN, D]).permute((1, 0))
    s = warpgroup_mma(q, k, no_scores, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(last), ((seen + t - 1) // SLOTS) & 1)
    acc = warpgroup_mma(p, v_smem.index(last).reshape([BN, D]), acc, is_async=True)
    if PINGPONG:
        mbarrier.arrive(token.index(1 - W), count=1)
    words = 0
    if MASKED and KEY_MASK:
        words = packed_key_mask(key_mask, b, col0, S, BN)
    # Products finish in order: with one outstanding the scores are there, and P V still runs.
    s = warpgroup_mma_wait(num_outstanding=1, deps=(s,))
    hand_back(k_empty.index(slot))
    if MASKED:
        s = hidden_scores(
            s, words, row0, col0, S, band_lo, band_hi, HAS_LO, HAS_HI, CHECK_LO, KEY_MASK
        )
    s, m, total, shrink = softmax_step(s, m, total, unit, MASKED)
    # p is named because its registers feed the running product until here.
    acc, p = warpgroup_mma_wait(num_outstanding=0, deps=(acc, p))
    hand_back(v_empty.index(last))
    # That product used the old maximum: bring it to the new one before the next is added.
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, O_LAYOUT))[:, None]
    p = gl.convert_layout(s.to(k_smem.dtype), P_LAYOUT)
    return p, m, total, acc


@jit
def consumer(
    W: tl.constexpr, q_smem, k_smem, v_smem, o_smem, q_bars, k_bars, v_bars, token,
    o_desc, lse_ptr, q_rows, tables, key_mask, sizes, unit,
    K: tl.constexpr, R: tl.constexpr, D: tl.constexpr, BN: tl.constexpr, SLOTS: tl.constexpr,
    HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, CHECK_LO: tl.constexpr, KEY_MASK: tl.constexpr,
    MASK_FIRST: tl.constexpr, ROPE: tl.constexpr, PINGPONG: tl.constexpr, SHARED_O: tl.constexpr,
):  # fmt: skip
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    n_tiles, B, L, S, band_lo, band_hi = sizes
    q_full, q_empty = q_bars
    k_full, k_empty = k_bars
    v_full, v_empty = v_bars
    q = q_smem.index(W).reshape([BM, D])
    o = o_smem.index(W).reshape([BM, D])
    no_scores = gl.zeros([BM, BN], gl.float32, layout=S_LAYOUT)
    seen = 0  # key tiles so far, over all query tiles: names slot and phase
    for i in range(my_tiles(n_tiles)):
        b, hk, r, tile_row = tile_at(i, L, B, K, R, 2 * BM)
        end, n = keys_of(tile_row, L, S, band_lo, band_hi, 2 * BM, BN, HAS_LO, HAS_HI)
        row0 = tile_row + W * BM
        open_first, open_stop = open_tiles(
            end, n, row0, L, S, band_lo, band_hi, BM, BN, HAS_LO, HAS_HI
        )
        rows = row0 + gl.arange(0, BM, layout=ROWS)
        m = gl.full([BM], -float("inf"), gl.float32, layout=ROWS)
        total = gl.full([BM], 0.0, gl.float32, layout=ROWS)

        if ROPE:
            q_ptr, stride_q_b, stride_q_l, stride_q_k, stride_q_r, stride_q_d = q_rows
            cos_ptr, sin_ptr, stride_table_b, stride_table_l, stride_table_w = tables
            batch = b.to(gl.int64)
            position = row0.to(gl.int64)
            table = batch * stride_table_b + position * stride_table_l
            # To shared memory: as a register operand Q would be loaded again for every product.
            if SHARED_O:
                tma.store_wait(pendings=0)
            group_barrier()
            store_rotated(
                q,
                q_ptr + (batch * stride_q_b + position * stride_q_l
                         + hk.to(gl.int64) * stride_q_k + r.to(gl.int64) * stride_q_r),
                cos_ptr + table, sin_ptr + table,
                stride_q_l, stride_q_d, stride_table_l, stride_table_w, L - row0, BM, D,
            )  # fmt: skip
            fence_async_shared()
            group_barrier()
        else:
            mbarrier.wait(q_full.index(W), i & 1)
        slot = seen % SLOTS
        mbarrier.wait(k_full.index(slot), (seen // SLOTS) & 1)
        k = k_smem.index(slot).reshape([BN, D]).permute((1, 0))
        s = warpgroup_mma(q, k, no_scores, use_acc=False, is_async=True)
        words = 0
        if KEY_MASK:
            words = packed_key_mask(key_mask, b, end - BN, S, BN)
        s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))
        hand_back(k_empty.index(slot))
        if MASK_FIRST:
            s = hidden_scores(
                s, words, row0, end - BN, S, band_lo, band_hi, HAS_LO, HAS_HI, CHECK_LO, KEY_MASK
            )
        s, m, total, _ = softmax_step(s, m, total, unit, MASK_FIRST)
        p = gl.convert_layout(s.to(q_smem.dtype), P_LAYOUT)
        acc = gl.zeros([BM, D], gl.float32, layout=O_LAYOUT)

        turn = seen - i  # tokens taken so far: none for a first tile
        # D = 256 has no registers left for what a second loop keeps alive.
        MASK_ALL: gl.constexpr = KEY_MASK or (D == 256 and (HAS_LO or HAS_HI))
        if MASK_ALL:
            open_first = n
        if MASK_ALL or (HAS_HI and BN < 2 * BM):
            for t in range(1, open_first):
                p, m, total, acc = next_tile(
                    p, m, total, acc, t, seen, turn, end, b, row0, q, k_smem, v_smem, k_bars,
                    v_bars, token, key_mask, sizes, unit, W, D, BN, SLOTS, PINGPONG, True,
                    HAS_LO, HAS_HI, CHECK_LO, KEY_MASK, S_LAYOUT, O_LAYOUT, P_LAYOUT,
                )  # fmt: skip
        if not MASK_ALL:
            for t in range(open_first, open_stop):
                p, m, total, acc = next_tile(
                    p, m, total, acc, t, seen, turn, end, b, row0, q, k_smem, v_smem, k_bars,
                    v_bars, token, key_mask, sizes, unit, W, D, BN, SLOTS, PINGPONG, False,
                    HAS_LO, HAS_HI, CHECK_LO, KEY_MASK, S_LAYOUT, O_LAYOUT, P_LAYOUT,
                )  # fmt: skip
            if CHECK_LO:
                for t in range(open_stop, n):
                    p, m, total, acc = next_tile(
                        p, m, total, acc, t, seen, turn, end, b, row0, q, k_smem, v_smem, k_bars,
                        v_bars, token, key_mask, sizes, unit, W, D, BN, SLOTS, PINGPONG, True,
                        HAS_LO, HAS_HI, CHECK_LO, KEY_MASK, S_LAYOUT, O_LAYOUT, P_LAYOUT,
                    )  # fmt: skip

        seen += n
        if not (ROPE or SHARED_O):
            hand_back(q_empty.index(W))
        last = (seen - 1) % SLOTS
        mbarrier.wait(v_full.index(last), ((seen - 1) // SLOTS) & 1)
        acc = warpgroup_mma(p, v_smem.index(last).reshape([BN, D]), acc, is_async=True)
        acc, p = warpgroup_mma_wait(num_outstanding=0, deps=(acc, p))
        hand_back(v_empty.index(last))

        # A row without a visible key is 0 / 0 here and has LSE = -inf.
        acc = acc / gl.convert_layout(total, gl.SliceLayout(1, O_LAYOUT))[:, None]
        lse_rows = lse_ptr + ((b * K + hk) * R + r).to(gl.int64) * L + rows
        gl.store(lse_rows, m + gl.log2(total), mask=rows < L)
        # The staging buffer is free once the copy of the tile before has read it.
        tma.store_wait(pendings=0)
        group_barrier()
        o.store(acc.to(o_smem.dtype))
        fence_async_shared()
        group_barrier()
        tma_store(o_desc, [b, row0, hk, r, 0], o_smem.index(W))
        if SHARED_O and not ROPE:
            tma.store_wait(pendings=0)
            hand_back(q_empty.index(W))
    tma.store_wait(pendings=0)


@jit
def producer(
    q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, q_bars, k_bars, v_bars, sizes,
    K: tl.constexpr, R: tl.constexpr, D: tl.constexpr, BN: tl.constexpr, SLOTS: tl.constexpr,
    HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    n_tiles, B, L, S, band_lo, band_hi = sizes
    q_full, q_empty = q_bars
    k_full, k_empty = k_bars
    v_full, v_empty = v_bars
    seen = 0
    for i in range(my_tiles(n_tiles)):
        b, hk, r, row0 = tile_at(i, L, B, K, R, 2 * BM)
        end, n = keys_of(row0, L, S, band_lo, band_hi, 2 * BM, BN, HAS_LO, HAS_HI)
        if not ROPE:
            for w in gl.static_range(2):
                # A fresh barrier counts as having completed its odd phase: round one never waits.
                mbarrier.wait(q_empty.index(w), (i & 1) ^ 1)
                mbarrier.expect(q_full.index(w), 2 * BM * D)
                tma_load(q_desc, [b, row0 + w * BM, hk, r, 0], q_full.index(w), q_smem.index(w))
        for t in range(n):
            slot = (seen + t) % SLOTS
            free = (((seen + t) // SLOTS) & 1) ^ 1
            col0 = end - (t + 1) * BN
            mbarrier.wait(k_empty.index(slot), free)
            mbarrier.expect(k_full.index(slot), 2 * BN * D)
            tma_load(k_desc, [b, col0, hk, 0], k_full.index(slot), k_smem.index(slot))
            mbarrier.wait(v_empty.index(slot), free)
            mbarrier.expect(v_full.index(slot), 2 * BN * D)
            tma_load(v_desc, [b, col0, hk, 0], v_full.index(slot), v_smem.index(slot))
        seen += n


@jit(do_not_specialize=["n_tiles", "B", "L", "S", "band_lo", "band_hi"])
def forward_sm90_kernel(
    q_desc, k_desc, v_desc, o_desc, lse_ptr, q_ptr, cos_ptr, sin_ptr, key_mask_ptr,
    stride_q_b, stride_q_l, stride_q_k, stride_q_r, stride_q_d,
    stride_table_b, stride_table_l, stride_table_w,
    stride_key_mask_b, stride_key_mask_s, n_tiles, B, L, S, band_lo, band_hi, unit,
    K: tl.constexpr, R: tl.constexpr, D: tl.constexpr, BN: tl.constexpr, SLOTS: tl.constexpr,
    HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, CHECK_LO: tl.constexpr, KEY_MASK: tl.constexpr,
    MASK_FIRST: tl.constexpr, ROPE: tl.constexpr, PINGPONG: tl.constexpr, SHARED_O: tl.constexpr,
):  # fmt: skip
    DTYPE: gl.constexpr = k_desc.dtype
    q_smem = gl.allocate_shared_memory(DTYPE, [2, 1, BM, 1, 1, D], q_desc.layout)
    o_smem = q_smem
    if not SHARED_O:
        o_smem = gl.allocate_shared_memory(DTYPE, [2, 1, BM, 1, 1, D], o_desc.layout)
    k_smem = gl.allocate_shared_memory(DTYPE, [SLOTS, 1, BN, 1, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(DTYPE, [SLOTS, 1, BN, 1, D], v_desc.layout)
    # Full is announced by the copy engine, empty by the groups that read: both of them for K and V.
    q_bars = (barriers(2, 1), barriers(2, 1))
    k_bars = (barriers(SLOTS, 1), barriers(SLOTS, 2))
    v_bars = (barriers(SLOTS, 1), barriers(SLOTS, 2))
    token = barriers(2, 1)
    fence_async_shared()
    begin_early()
    mbarrier.arrive(token.index(0), count=1)  # the first group goes first
    sizes = (n_tiles, B, L, S, band_lo, band_hi)
    q_rows = (q_ptr, stride_q_b, stride_q_l, stride_q_k, stride_q_r, stride_q_d)
    tables = (cos_ptr, sin_ptr, stride_table_b, stride_table_l, stride_table_w)
    key_mask = (key_mask_ptr, stride_key_mask_b, stride_key_mask_s)
    # The first group runs in the kernel's own warps. Copies need few registers; what the producer
    # gives up lifts both groups to 240.
    gl.warp_specialize([
        (consumer, (0, q_smem, k_smem, v_smem, o_smem, q_bars, k_bars, v_bars, token,
                    o_desc, lse_ptr, q_rows, tables, key_mask, sizes, unit,
                    K, R, D, BN, SLOTS, HAS_LO, HAS_HI, CHECK_LO, KEY_MASK,
                    MASK_FIRST, ROPE, PINGPONG, SHARED_O)),
        (consumer, (1, q_smem, k_smem, v_smem, o_smem, q_bars, k_bars, v_bars, token,
                    o_desc, lse_ptr, q_rows, tables, key_mask, sizes, unit,
                    K, R, D, BN, SLOTS, HAS_LO, HAS_HI, CHECK_LO, KEY_MASK,
                    MASK_FIRST, ROPE, PINGPONG, SHARED_O)),
        (producer, (q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, q_bars, k_bars, v_bars, sizes,
                    K, R, D, BN, SLOTS, HAS_LO, HAS_HI, ROPE)),
    ], [4, 1], [240, 24])  # fmt: skip

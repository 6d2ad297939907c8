"""The forward kernel for sm_90: one warp copies, two or three groups of four warps multiply, and
beside two of them four more turn q where it is rotated, a tile ahead.

O = softmax(scale Q K^T) V and LSE_BKRL in base 2. A program owns 64 query rows for each group at a
time, of one head or of several that share their keys, and walks over such tiles. A group keeps
scores, probabilities and accumulator of its rows in registers, and has the next scores multiplied
before it turns these into probabilities; a finished tile leaves under the first product of the
next. Rules it knows: a band of keys, a key mask, rotation of q. Structure after FlashAttention-3.
"""

import triton.language as tl

from inductor_gqa.kernels.gluon_forward_copies import BM, producer, turner
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
    tile_at,
    tma,
    tma_store,
)

if WHY_NOT is None:
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        warpgroup_mma,
        warpgroup_mma_wait,
    )


@jit
def packed(s, DTYPE: tl.constexpr):
    """Rounded pairs of neighbours, a register each. Loops that carry numbers of 16 bits take them
    apart and together again in every round, as Triton (3.6) spells them."""
    first, second = s.reshape([s.shape[0], s.shape[1] // 2, 2]).split()
    CONVERT: gl.constexpr = "cvt.rn.bf16x2.f32" if gl.bfloat16 == DTYPE else "cvt.rn.f16x2.f32"
    return gl.inline_asm_elementwise(
        CONVERT + " $0, $2, $1;", "=r,f,f", [first, second], gl.int32, True, 1
    )


@jit
def unpacked(pairs, DTYPE: tl.constexpr, LAYOUT: tl.constexpr):
    """What was packed, as the left operand of a product."""
    first, second = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [pairs], (gl.int16, gl.int16), True, 1
    )
    both = gl.join(first.to(DTYPE, bitcast=True), second.to(DTYPE, bitcast=True))
    return gl.convert_layout(both.reshape([pairs.shape[0], 2 * pairs.shape[1]]), LAYOUT)


@jit
def next_tile(
    pairs, m, total, acc, t, seen, turn, end, b, row0, q, k_smem, v_smem, k_bars, v_bars, token,
    key_mask, sizes, unit, W: tl.constexpr, D: tl.constexpr, BN: tl.constexpr,
    SLOTS: tl.constexpr, GROUPS: tl.constexpr, PINGPONG: tl.constexpr, MASKED: tl.constexpr,
    HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, CHECK_LO: tl.constexpr, KEY_MASK: tl.constexpr,
    HEADS: tl.constexpr, S_LAYOUT: tl.constexpr, O_LAYOUT: tl.constexpr, P_LAYOUT: tl.constexpr,
):  # fmt: skip
    """Scores of key tile t while the probabilities of tile t-1 are multiplied with their values."""
    S, band_lo, band_hi = sizes[3], sizes[4], sizes[5]
    k_full, k_empty = k_bars
    v_full, v_empty = v_bars
    col0 = end - (t + 1) * BN
    slot = (seen + t) % SLOTS
    last = (seen + t - 1) % SLOTS
    no_scores = gl.zeros([BM, BN], gl.float32, layout=S_LAYOUT)
    p = unpacked(pairs, k_smem.dtype, P_LAYOUT)
    mbarrier.wait(k_full.index(slot), ((seen + t) // SLOTS) & 1)
    if PINGPONG:
        mbarrier.wait(token.index(W), (turn + t - 1) & 1)
    k = k_smem.index(slot).reshape([BN, D]).permute((1, 0))
    s = warpgroup_mma(q, k, no_scores, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(last), ((seen + t - 1) // SLOTS) & 1)
    acc = warpgroup_mma(p, v_smem.index(last).reshape([BN, D]), acc, is_async=True)
    if PINGPONG:
        mbarrier.arrive(token.index((W + 1) % GROUPS), count=1)
    words = 0
    if MASKED and KEY_MASK:
        words = packed_key_mask(key_mask, b, col0, S, BN)
    # Products finish in order: with one outstanding the scores are there, and P V still runs.
    s = warpgroup_mma_wait(num_outstanding=1, deps=(s,))
    hand_back(k_empty.index(slot))
    if MASKED:
        s = hidden_scores(
            s, words, row0, col0, S, band_lo, band_hi, HAS_LO, HAS_HI, CHECK_LO, KEY_MASK, HEADS
        )
    s, m, total, shrink = softmax_step(s, m, total, unit, MASKED)
    # p is named because its registers feed the running product until here.
    acc, p = warpgroup_mma_wait(num_outstanding=0, deps=(acc, p))
    hand_back(v_empty.index(last))
    # That product used the old maximum: bring it to the new one before the next is added.
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, O_LAYOUT))[:, None]
    return packed(s, k_smem.dtype), m, total, acc


@jit
def leave(
    acc, m, total, i, o_smem, o_desc, lse_ptr, sizes,
    W: tl.constexpr, K: tl.constexpr, R: tl.constexpr, D: tl.constexpr, GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    """A group's rows of the i-th tile to where they belong."""
    _, B, L, _, _, _ = sizes
    b, hk, r, tile_row = tile_at(i, L, B, K, R, GROUPS * BM, HEADS)
    row0 = tile_row + W * (BM // HEADS)
    # A row without a visible key is 0 * inf here, NaN, and has LSE = -inf.
    acc = acc * gl.convert_layout(1.0 / total, gl.SliceLayout(1, acc.type.layout))[:, None]
    numbers = gl.arange(0, BM, layout=m.type.layout)
    rows = row0 + numbers // HEADS
    heads = ((b * K + hk) * R + r) + numbers % HEADS
    gl.store(lse_ptr + heads.to(gl.int64) * L + rows, m + gl.log2(total), mask=rows < L)
    # The staging buffer is free once the copy of the tile before has read it.
    tma.store_wait(pendings=0)
    group_barrier()
    o_smem.reshape([BM, D]).store(acc.to(o_smem.dtype))
    fence_async_shared()
    group_barrier()
    tma_store(o_desc, [b, row0, hk, r, 0], o_smem)


@jit
def consumer(
    W: tl.constexpr, given,
    K: tl.constexpr, R: tl.constexpr, D: tl.constexpr, BN: tl.constexpr, SLOTS: tl.constexpr,
    HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, CHECK_LO: tl.constexpr, KEY_MASK: tl.constexpr,
    MASK_FIRST: tl.constexpr, PINGPONG: tl.constexpr, Q_SLOTS: tl.constexpr, GROUPS: tl.constexpr,
    HEADS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    POSITIONS: gl.constexpr = BM // HEADS  # that the rows of a group cover
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    # With one buffer for Q there is none for O either, which then takes its place.
    SHARED_O: gl.constexpr = Q_SLOTS == 1
    # Three groups have no registers for two tiles.
    LATER: gl.constexpr = not SHARED_O and GROUPS == 2
    q_smem, k_smem, v_smem, o_smem, q_bars, k_bars, v_bars, token, o_desc, lse_ptr, key_mask, \
        sizes, unit = given  # fmt: skip
    n_tiles, B, L, S, band_lo, band_hi = sizes
    q_full, q_empty = q_bars
    k_full, k_empty = k_bars
    v_full, v_empty = v_bars
    no_scores = gl.zeros([BM, BN], gl.float32, layout=S_LAYOUT)
    seen = 0  # key tiles so far, over all query tiles: names slot and phase
    # Of the tile before, which has not left yet.
    acc = gl.zeros([BM, D], gl.float32, layout=O_LAYOUT)
    m = gl.full([BM], -float("inf"), gl.float32, layout=ROWS)
    total = gl.full([BM], 0.0, gl.float32, layout=ROWS)
    count = my_tiles(n_tiles)
    for i in range(count):
        b, _, _, tile_row = tile_at(i, L, B, K, R, GROUPS * BM, HEADS)
        end, n = keys_of(
            tile_row,
            L,
            S,
            band_lo,
            band_hi,
            GROUPS * POSITIONS,
            BN,
            HAS_LO,
            HAS_HI,
            ALIGNED,
            HEADS,
        )
        q_slot = i % Q_SLOTS * GROUPS + W
        mbarrier.wait(q_full.index(q_slot), (i // Q_SLOTS) & 1)
        q = q_smem.index(q_slot).reshape([BM, D])
        slot = seen % SLOTS
        mbarrier.wait(k_full.index(slot), (seen // SLOTS) & 1)
        k = k_smem.index(slot).reshape([BN, D]).permute((1, 0))
        s = warpgroup_mma(q, k, no_scores, use_acc=False, is_async=True)
        if LATER:  # noqa: SIM102
            if i > 0:
                leave(
                    acc, m, total, i - 1, o_smem.index(W), o_desc, lse_ptr, sizes, W, K, R, D,
                    GROUPS, HEADS,
                )  # fmt: skip
        row0 = tile_row + W * POSITIONS
        open_first, open_stop = open_tiles(
            end, n, row0, L, S, band_lo, band_hi, POSITIONS, BN, HAS_LO, HAS_HI
        )
        m = gl.full([BM], -float("inf"), gl.float32, layout=ROWS)
        total = gl.full([BM], 0.0, gl.float32, layout=ROWS)
        words = 0
        if KEY_MASK:
            words = packed_key_mask(key_mask, b, end - BN, S, BN)
        s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))
        hand_back(k_empty.index(slot))
        if MASK_FIRST:
            s = hidden_scores(
                s,
                words,
                row0,
                end - BN,
                S,
                band_lo,
                band_hi,
                HAS_LO,
                HAS_HI,
                CHECK_LO,
                KEY_MASK,
                HEADS,
            )
        s, m, total, _ = softmax_step(s, m, total, unit, MASK_FIRST)
        pairs = packed(s, q_smem.dtype)
        acc = gl.zeros([BM, D], gl.float32, layout=O_LAYOUT)

        turn = seen - i  # tokens taken so far: none for a first tile
        # D = 256 has no registers left for what a second loop keeps alive.
        MASK_ALL: gl.constexpr = KEY_MASK or (D == 256 and (HAS_LO or HAS_HI))
        if MASK_ALL:
            open_first = n
        if MASK_ALL or (HAS_HI and BN < GROUPS * POSITIONS):
            for t in range(1, open_first):
                pairs, m, total, acc = next_tile(
                    pairs, m, total, acc, t, seen, turn, end, b, row0, q, k_smem, v_smem, k_bars,
                    v_bars, token, key_mask, sizes, unit, W, D, BN, SLOTS, GROUPS, PINGPONG, True,
                    HAS_LO, HAS_HI, CHECK_LO, KEY_MASK, HEADS, S_LAYOUT, O_LAYOUT, P_LAYOUT,
                )  # fmt: skip
        if not MASK_ALL:
            for t in range(open_first, open_stop):
                pairs, m, total, acc = next_tile(
                    pairs, m, total, acc, t, seen, turn, end, b, row0, q, k_smem, v_smem, k_bars,
                    v_bars, token, key_mask, sizes, unit, W, D, BN, SLOTS, GROUPS, PINGPONG, False,
                    HAS_LO, HAS_HI, CHECK_LO, KEY_MASK, HEADS, S_LAYOUT, O_LAYOUT, P_LAYOUT,
                )  # fmt: skip
            if CHECK_LO:
                for t in range(open_stop, n):
                    pairs, m, total, acc = next_tile(
                        pairs, m, total, acc, t, seen, turn, end, b, row0, q, k_smem, v_smem,
                        k_bars, v_bars, token, key_mask, sizes, unit, W, D, BN, SLOTS, GROUPS,
                        PINGPONG, True, HAS_LO, HAS_HI, CHECK_LO, KEY_MASK, HEADS, S_LAYOUT,
                        O_LAYOUT, P_LAYOUT,
                    )  # fmt: skip

        seen += n
        if not SHARED_O:
            hand_back(q_empty.index(q_slot))
        last = (seen - 1) % SLOTS
        mbarrier.wait(v_full.index(last), ((seen - 1) // SLOTS) & 1)
        p = unpacked(pairs, q_smem.dtype, P_LAYOUT)
        acc = warpgroup_mma(p, v_smem.index(last).reshape([BN, D]), acc, is_async=True)
        acc, p = warpgroup_mma_wait(num_outstanding=0, deps=(acc, p))
        hand_back(v_empty.index(last))
        if not LATER:
            leave(
                acc, m, total, i, o_smem.index(W), o_desc, lse_ptr, sizes, W, K, R, D, GROUPS,
                HEADS,
            )  # fmt: skip
        if SHARED_O:
            tma.store_wait(pendings=0)
            hand_back(q_empty.index(W))
    if LATER:  # noqa: SIM102
        if count > 0:
            leave(
                acc, m, total, count - 1, o_smem.index(W), o_desc, lse_ptr, sizes, W, K, R, D,
                GROUPS, HEADS,
            )  # fmt: skip
    tma.store_wait(pendings=0)


@jit(do_not_specialize=["n_tiles", "B", "L", "S", "band_lo", "band_hi"])
def forward_sm90_kernel(
    q_desc, k_desc, v_desc, o_desc, lse_ptr, cos_ptr, sin_ptr, key_mask_ptr,
    stride_table_b, stride_table_l, stride_table_w,
    stride_key_mask_b, stride_key_mask_s, n_tiles, B, L, S, band_lo, band_hi, unit,
    K: tl.constexpr, R: tl.constexpr, D: tl.constexpr, BN: tl.constexpr, SLOTS: tl.constexpr,
    HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, CHECK_LO: tl.constexpr, KEY_MASK: tl.constexpr,
    MASK_FIRST: tl.constexpr, ROPE: tl.constexpr, PINGPONG: tl.constexpr, Q_SLOTS: tl.constexpr,
    GROUPS: tl.constexpr, HEADS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    DTYPE: gl.constexpr = k_desc.dtype
    POSITIONS: gl.constexpr = BM // HEADS
    q_smem = gl.allocate_shared_memory(
        DTYPE, [Q_SLOTS * GROUPS, 1, POSITIONS, 1, HEADS, D], q_desc.layout
    )
    o_smem = q_smem
    if Q_SLOTS > 1:
        o_smem = gl.allocate_shared_memory(
            DTYPE, [GROUPS, 1, POSITIONS, 1, HEADS, D], o_desc.layout
        )
    k_smem = gl.allocate_shared_memory(DTYPE, [SLOTS, 1, BN, 1, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(DTYPE, [SLOTS, 1, BN, 1, D], v_desc.layout)
    # Full is announced by the copy engine, empty by the groups that read: both of them for K and V.
    q_full, q_empty = barriers(Q_SLOTS * GROUPS, 1), barriers(Q_SLOTS * GROUPS, 1)
    k_bars = (barriers(SLOTS, 1), barriers(SLOTS, GROUPS))
    v_bars = (barriers(SLOTS, 1), barriers(SLOTS, GROUPS))
    token = barriers(GROUPS, 1)
    fence_async_shared()
    begin_early()
    mbarrier.arrive(token.index(0), count=1)  # the first group goes first
    sizes = (n_tiles, B, L, S, band_lo, band_hi)
    tables = (cos_ptr, sin_ptr, stride_table_b, stride_table_l, stride_table_w)
    key_mask = (key_mask_ptr, stride_key_mask_b, stride_key_mask_s)
    given = (q_smem, k_smem, v_smem, o_smem, (q_full, q_empty), k_bars, v_bars, token, o_desc,
             lse_ptr, key_mask, sizes, unit)  # fmt: skip
    q_raw = q_full
    if ROPE:
        q_raw = barriers(Q_SLOTS * GROUPS, 1)
    copied = (q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, q_raw, q_empty, k_bars, v_bars, sizes)
    turned = (q_smem, q_raw, q_full, tables, sizes)
    # What an argument divides by is known in the kernel's own warps only: those turn, which needs
    # wide loads. Copies need few registers; both groups have 240, or 216 beside the turner.
    if ROPE:
        gl.warp_specialize([
            (turner, (turned, K, R, D, Q_SLOTS, HEADS)),
            (consumer, (0, given, K, R, D, BN, SLOTS, HAS_LO, HAS_HI, CHECK_LO, KEY_MASK,
                        MASK_FIRST, PINGPONG, Q_SLOTS, GROUPS, HEADS, ALIGNED)),
            (consumer, (1, given, K, R, D, BN, SLOTS, HAS_LO, HAS_HI, CHECK_LO, KEY_MASK,
                        MASK_FIRST, PINGPONG, Q_SLOTS, GROUPS, HEADS, ALIGNED)),
            (producer, (copied, K, R, D, BN, SLOTS, HAS_LO, HAS_HI, Q_SLOTS, GROUPS, HEADS,
                        ALIGNED)),
        ], [4, 4, 1], [216, 216, 24])  # fmt: skip
    elif GROUPS == 3:
        gl.warp_specialize([
            (consumer, (0, given, K, R, D, BN, SLOTS, HAS_LO, HAS_HI, CHECK_LO, KEY_MASK,
                        MASK_FIRST, PINGPONG, Q_SLOTS, GROUPS, HEADS, ALIGNED)),
            (consumer, (1, given, K, R, D, BN, SLOTS, HAS_LO, HAS_HI, CHECK_LO, KEY_MASK,
                        MASK_FIRST, PINGPONG, Q_SLOTS, GROUPS, HEADS, ALIGNED)),
            (consumer, (2, given, K, R, D, BN, SLOTS, HAS_LO, HAS_HI, CHECK_LO, KEY_MASK,
                        MASK_FIRST, PINGPONG, Q_SLOTS, GROUPS, HEADS, ALIGNED)),
            (producer, (copied, K, R, D, BN, SLOTS, HAS_LO, HAS_HI, Q_SLOTS, GROUPS, HEADS,
                        ALIGNED)),
        ], [4, 4, 1], [160, 160, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (consumer, (0, given, K, R, D, BN, SLOTS, HAS_LO, HAS_HI, CHECK_LO, KEY_MASK,
                        MASK_FIRST, PINGPONG, Q_SLOTS, GROUPS, HEADS, ALIGNED)),
            (consumer, (1, given, K, R, D, BN, SLOTS, HAS_LO, HAS_HI, CHECK_LO, KEY_MASK,
                        MASK_FIRST, PINGPONG, Q_SLOTS, GROUPS, HEADS, ALIGNED)),
            (producer, (copied, K, R, D, BN, SLOTS, HAS_LO, HAS_HI, Q_SLOTS, GROUPS, HEADS,
                        ALIGNED)),
        ], [4, 1], [240, 24])  # fmt: skip

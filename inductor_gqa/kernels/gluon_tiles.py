"""Pieces of warp-specialised kernels: barriers, work order, key ranges, masks, softmax, rotation.

Gluon is where Triton lets a kernel say which warps copy and which multiply. Where it is missing,
`WHY_NOT` says so, nothing here is compiled and the module still imports.
"""

import triton.language as tl

try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

    WHY_NOT = None
    jit = gluon.jit
    # Names that changed between Triton 3.7 and 3.9.
    tma_load = tl.constexpr(getattr(tma, "async_load", None) or tma.async_copy_global_to_shared)
    tma_store = tl.constexpr(getattr(tma, "async_store", None) or tma.async_copy_shared_to_global)
    group_barrier = tl.constexpr(getattr(gl, "barrier", None) or gl.thread_barrier)
    HAS_REINTERPRET = tl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))

    if hasattr(tma, "async_atomic_add"):
        tma_add = tl.constexpr(tma.async_atomic_add)
    else:  # before Triton 3.8 Gluon has no name for what the compiler knows
        from triton._C.libtriton import ir
        from triton.experimental.gluon.language._core import builtin

        @builtin
        def _add(desc, coordinates, source, _semantic=None):
            at = _semantic._convert_to_ir_values(coordinates, require_i64=False)
            kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
            _semantic.builder.create_async_tma_reduce(kind, desc.handle, at, source.handle)

        tma_add = tl.constexpr(_add)
except (ImportError, AttributeError) as problem:
    WHY_NOT = f"this Triton has no Gluon for sm_90: {problem}"
    gl = mbarrier = tma = tma_load = tma_store = tma_add = group_barrier = HAS_REINTERPRET = None

    def jit(fn=None, **options):
        return fn or (lambda fn: fn)


@jit
def begin_early():
    """The launch before this one may still run, and the next one may begin: see `Launch.is_early`.
    In front of all that touches memory."""
    gdc_launch_dependents()
    gdc_wait()


@jit
def barriers(N: tl.constexpr, COUNT: tl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(N):
        mbarrier.init(bars.index(i), count=COUNT)
    return bars


@jit
def hand_back(bar):
    """Tells the producer that a slot may be overwritten.

    One thread executes the arrive: the barrier in front makes it speak for all four warps.
    """
    group_barrier()
    mbarrier.arrive(bar, count=1)


@jit
def my_tiles(n_tiles):
    """How many tiles this program walks over, see `tile_at`."""
    pid = gl.program_id(0)
    programs = gl.num_programs(0)
    rounds = n_tiles // programs
    place = gl.where(rounds % 2 == 0, pid, programs - 1 - pid)
    return rounds + gl.where(place < n_tiles % programs, 1, 0)


@jit
def tile_at(i, L, B, K: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr = 1):
    """The i-th tile of this program: batch, key head, first query head of its group, first row.

    Last rows first, which is longest first under a causal mask; heads vary fastest, so that a group
    shares K and V in L2. Odd rounds run backwards over the programs: the one that had the longest
    tile of a round gets the shortest of the next. A tile of several HEADS has fewer rows of each:
    as many such tiles as it has heads lie where one head after another would. Some may lie past L.
    """
    pid = gl.program_id(0)
    programs = gl.num_programs(0)
    t = i * programs + gl.where(i % 2 == 0, pid, programs - 1 - pid)
    row0 = (gl.cdiv(L, ROWS) - 1 - t // (B * K * R)) * ROWS
    bh = t % (B * K * R)
    r = bh % R
    if HEADS > 1:
        row0 += (HEADS - 1 - r % HEADS) * (ROWS // HEADS)
        r -= r % HEADS
    return bh // (K * R), bh % (K * R) // R, r, row0


@jit
def keys_of(
    row0, L, S, band_lo, band_hi,
    ROWS: tl.constexpr, BN: tl.constexpr, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr,
    ALIGNED: tl.constexpr = False, HEADS: tl.constexpr = 1,
):  # fmt: skip
    """End of the keys that a query tile visits, and the number of key tiles, counted from the end.

    Tiles end where the last row's band ends, not on a multiple of BN: the diagonal then lies in the
    first tiles visited, whatever the offset, and a last tile that begins before key 0 reads zeros
    there. ALIGNED, they end on multiples, where that keeps the diagonal in one tile. At least one
    tile is visited, of rows past L no more; it is wholly hidden where there is nothing to see, and
    then lies right before key 0 at most: the backward's padding reaches no further.
    """
    end = gl.cdiv(S, BN) * BN
    if HAS_HI:
        end = gl.maximum(gl.minimum(end, row0 + ROWS + band_hi), 0)
        if ALIGNED:
            end = gl.cdiv(end, BN) * BN
    begin = row0 * 0
    if HAS_LO:
        begin = gl.maximum(begin, row0 + band_lo)
    n = gl.maximum(gl.cdiv(gl.maximum(end - begin, 0), BN), 1)
    if HEADS > 1:
        n = gl.where(row0 < L, n, 1)
    return end, n


@jit
def open_tiles(
    end, n, row0, L, S, band_lo, band_hi,
    BM: tl.constexpr, BN: tl.constexpr, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr,
):  # fmt: skip
    """Range of key tiles, the first excepted, that rows row0 .. row0+BM see wholly.

    The bounds are clamped before they are divided: the quotient of a negative number rounds up.
    """
    limit = S - 1
    if HAS_HI:
        limit = gl.minimum(limit, row0 + band_hi)
    first = gl.cdiv(gl.maximum(end - 1 - limit, 0), BN)
    begin = row0 * 0
    if HAS_LO:
        begin = gl.maximum(begin, gl.minimum(row0 + BM, L) - 1 + band_lo)
    stop = gl.maximum(end - begin, 0) // BN
    first = gl.minimum(gl.maximum(first, 1), n)
    return first, gl.maximum(gl.minimum(stop, n), first)


@jit
def packed_key_mask(key_mask, b, col0, S, BN: tl.constexpr):
    """The tile's key mask as eight words: bit t of word c is key col0 + 8 t + c.

    A thread of the product's layout owns two words' columns. Bytes would cost it a register each.
    """
    ptr, stride_b, stride_s = key_mask
    LOAD: gl.constexpr = gl.BlockedLayout([BN // 8, 1], [4, 8], [4, 1], [1, 0])
    eights = gl.arange(0, BN // 8, layout=gl.SliceLayout(1, LOAD))[:, None]
    first = col0 + gl.arange(0, 8, layout=gl.SliceLayout(0, LOAD))[None, :]
    cols = first + eights * 8
    # Eights last: as sums with columns their offsets would be kept over all tiles, and spill.
    row = ptr + b.to(gl.int64) * stride_b
    at = (row + first.to(gl.int64) * stride_s) + (eights.to(gl.int64) * 8) * stride_s
    bits = (gl.load(at, mask=(cols >= 0) & (cols < S), other=0) != 0).to(gl.int32)
    return gl.sum(bits << eights, 0)


@jit
def hidden_scores(
    s, words, row0, col0, S, band_lo, band_hi,
    HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, CHECK_LO: tl.constexpr, KEY_MASK: tl.constexpr,
    HEADS: tl.constexpr = 1,
):  # fmt: skip
    """Scores with -inf where a row does not see a key; HEADS rows follow each other at a position.

    Columns are split as 8 t + c: a thread holds two values of c and every t, so the comparison is
    between a constant and one of four numbers, and no column index occupies a register.
    """
    BM: gl.constexpr = s.shape[0]
    BN: gl.constexpr = s.shape[1]
    split = s.reshape([BM, BN // 8, 8])
    SPLIT: gl.constexpr = split.type.layout
    EDGE: gl.constexpr = gl.SliceLayout(1, SPLIT)
    t = gl.arange(0, BN // 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, SPLIT)))[None, :, None]
    c = col0 + gl.arange(0, 8, layout=gl.SliceLayout(0, EDGE))[None, :]
    row = row0 + gl.arange(0, BM, layout=gl.SliceLayout(1, EDGE))[:, None] // HEADS
    highest = S - 1 - c + row * 0
    if HAS_HI:
        highest = gl.minimum(highest, row + band_hi - c)
    seen = t * 8 <= highest.expand_dims(1)
    if CHECK_LO:
        lowest = row * 0 - c
        if HAS_LO:
            lowest = gl.maximum(lowest, row + band_lo - c)
        seen = seen & (t * 8 >= lowest.expand_dims(1))
    if KEY_MASK:
        word = gl.convert_layout(words, gl.SliceLayout(0, EDGE))[None, :].expand_dims(1)
        seen = seen & (((word >> t) & 1) != 0)
    split = gl.where(seen, split, -float("inf"))
    return gl.convert_layout(split.reshape([BM, BN]), s.type.layout)


@jit
def softmax_step(s, m, total, unit, MASKED: tl.constexpr):
    """Probabilities, new maxima and sums, and the factor that shrinks what was summed before.

    `unit` is scale * log2(e): one multiply-subtract and one exp2 a score. Where scores are masked a
    row may have seen no key yet, and must not subtract its maximum of -inf.
    """
    m_next = gl.maximum(m, gl.max(s, 1) * unit)
    origin = m_next
    if MASKED:
        origin = gl.where(m_next == -float("inf"), 0.0, m_next)
    p = gl.exp2(s * unit - origin[:, None])
    shrink = gl.exp2(m - origin)
    return p, m_next, total * shrink + gl.sum(p, 1), shrink


@jit
def store_rotated(
    q, q_ptr, cos_ptr, sin_ptr, stride_q_l, stride_q_d, stride_table_l, stride_table_w, n_rows,
    BM: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """BM rows of Q into shared memory, turned in fp32 (half layout, all D lanes), rounded once.

    Each thread loads both partners of a pair, so no value crosses threads. Some rows at a time:
    sixteen pairs a thread fit beside what else is alive. Offsets within the tile fit 32 bits.
    """
    ROWS: gl.constexpr = 4096 // D
    LANES: gl.constexpr = D // 16
    LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    half_q = stride_q_d * (D // 2)
    half_table = stride_table_w * (D // 2)
    for first in gl.static_range(0, BM, ROWS):
        i = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LOAD))[:, None]
        t = gl.arange(0, D // 2, layout=gl.SliceLayout(0, LOAD))[None, :]
        inside = (i < n_rows) & (t >= 0)
        # Rows first: sums of row and lane would be hoisted out of the loop over tiles, and spill.
        at_q = (q_ptr + i * stride_q_l) + t * stride_q_d
        at_cos = (cos_ptr + i * stride_table_l) + t * stride_table_w
        at_sin = (sin_ptr + i * stride_table_l) + t * stride_table_w
        x1 = gl.load(at_q, mask=inside, other=0.0)
        x2 = gl.load(at_q + half_q, mask=inside, other=0.0)
        cos = gl.load(at_cos, mask=inside, other=0.0).to(gl.float32)
        sin = gl.load(at_sin, mask=inside, other=0.0).to(gl.float32)
        y1 = (x1.to(gl.float32) * cos - x2.to(gl.float32) * sin).to(q.dtype)
        cos = gl.load(at_cos + half_table, mask=inside, other=0.0).to(gl.float32)
        sin = gl.load(at_sin + half_table, mask=inside, other=0.0).to(gl.float32)
        y2 = (x2.to(gl.float32) * cos + x1.to(gl.float32) * sin).to(q.dtype)
        y = gl.join(y1, y2).permute((0, 2, 1)).reshape([ROWS, D])
        q.slice(first, ROWS).store(y)


@jit
def turn_rows(
    q, cos_ptr, sin_ptr, stride_l, stride_w, n_rows, D: tl.constexpr, HEADS: tl.constexpr
):
    """Rows of Q turned where they lie in shared memory, as `store_rotated` does: D * rows / 256
    pairs a thread. HEADS of them follow each other at a position."""
    ROWS: gl.constexpr = q.shape[0]
    LANES: gl.constexpr = D // 16
    # Repeats after half a row: a thread holds both partners of a pair.
    LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    x1, x2 = q.load(LOAD).reshape([ROWS, 2, D // 2]).permute((0, 2, 1)).split()
    HALF: gl.constexpr = x1.type.layout
    i = gl.arange(0, ROWS, layout=gl.SliceLayout(1, HALF))[:, None] // HEADS
    t = gl.arange(0, D // 2, layout=gl.SliceLayout(0, HALF))[None, :]
    inside = (i < n_rows) & (t >= 0)
    # Rows first: sums of row and lane would be kept over all tiles, and spill.
    at_cos = (cos_ptr + i * stride_l) + t * stride_w
    at_sin = (sin_ptr + i * stride_l) + t * stride_w
    half = stride_w * (D // 2)
    cos = gl.load(at_cos, mask=inside, other=0.0).to(gl.float32)
    sin = gl.load(at_sin, mask=inside, other=0.0).to(gl.float32)
    y1 = (x1.to(gl.float32) * cos - x2.to(gl.float32) * sin).to(q.dtype)
    cos = gl.load(at_cos + half, mask=inside, other=0.0).to(gl.float32)
    sin = gl.load(at_sin + half, mask=inside, other=0.0).to(gl.float32)
    y2 = (x2.to(gl.float32) * cos + x1.to(gl.float32) * sin).to(q.dtype)
    q.store(gl.join(y1, y2).permute((0, 2, 1)).reshape([ROWS, D]))

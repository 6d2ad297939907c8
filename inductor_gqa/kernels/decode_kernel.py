"""Attention of few queries and many keys: (acc, m, total) of each split of the keys, then O and
LSE_BKRL in base 2.

The R * L rows of a key head lie in one tile, so that every K and V is read once for all its query
heads; one program per split of the keys, key head and row tile, then one per row. Row t is query
t // R of head t % R. q is turned here, k is already rotated; any strides. Method after
Flash-Decoding.
"""

import triton
import triton.language as tl

from inductor_gqa.kernels.forward import attend, first_sum
from inductor_gqa.kernels.rotate import lanes, load_lanes
from inductor_gqa.kernels.rules import EMPTY_ROWS, EXACT, KEEP, KEY_MASK, SHIFTED
from inductor_gqa.kernels.tiles import (
    LOG2E,
    head_offset,
    kept,
    keys_of,
    log_sum_exp,
    single,
    stream_tile,
)

MASK_BLOCK = tl.constexpr(8192)


@triton.jit
def load_rows(ptr, positions, r, cols, seen, stride_l, stride_r, stride_d, L):
    """Columns of packed rows; what is not seen, or beyond the last query, reads as zero."""
    at = ptr + (positions.to(tl.int64) * stride_l + r * stride_r)[:, None]
    inside = (positions < L)[:, None] & seen[None, :]
    return tl.load(at + cols.to(tl.int64)[None, :] * stride_d, mask=inside, other=0.0)


@triton.jit
def queries(
    ptr, positions, r, stride_l, stride_r, stride_d, cos, sin, L,
    FIRST: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, START: tl.constexpr,
    W: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Columns FIRST .. FIRST+WIDTH of the packed q, turned in fp32 and rounded once if W > 0."""
    cols = FIRST + tl.arange(0, WIDTH)
    x = load_rows(ptr, positions, r, cols, cols < D, stride_l, stride_r, stride_d, L)
    if W:
        cos_ptr, stride_cos_l, stride_cos_w = cos
        sin_ptr, stride_sin_l, stride_sin_w = sin
        is_turned, partner, sign = lanes(cols, START, W, INTERLEAVED)
        other = load_rows(ptr, positions, r, partner, is_turned, stride_l, stride_r, stride_d, L)
        t = cols - START
        c = load_lanes(cos_ptr, positions, t, is_turned, stride_cos_l, stride_cos_w, L, 1.0)
        s = load_lanes(sin_ptr, positions, t, is_turned, stride_sin_l, stride_sin_w, L, 0.0)
        y = x.to(tl.float32) * c + other.to(tl.float32) * (s * sign[None, :])
        x = y.to(ptr.dtype.element_ty)
    return x


@triton.jit
def seen_keys(ptr, stride, lo, hi, S):
    """The part of [lo, hi) from the first to behind the last key that the key mask shows.

    A cache of fixed length is mostly hidden; this reads a byte a key instead of its K and V. Many
    keys at a time, because every program waits for each load; bounded by S, whose divisibility is
    known, so that a load takes 16 bytes.
    """
    first = hi
    end = lo
    for n0 in tl.range(lo, hi, MASK_BLOCK):
        j = n0 + tl.arange(0, MASK_BLOCK)
        is_seen = (tl.load(ptr + j.to(tl.int64) * stride, mask=j < S, other=0) != 0) & (j < hi)
        first = tl.minimum(first, tl.min(tl.where(is_seen, j, hi), 0))
        end = tl.maximum(end, tl.max(tl.where(is_seen, j + 1, lo), 0))
    return first, end


@triton.jit
def split_kernel(
    q_ptr, cos_q_ptr, sin_q_ptr, k_src, v_src, acc_ptr, m_ptr, total_ptr, bias_ptr, mask_ptr,
    key_mask_ptr, keep_ptr,
    stride_q_b, stride_q_l, stride_q_k, stride_q_r, stride_q_d,
    stride_cos_q_b, stride_cos_q_l, stride_cos_q_w, stride_sin_q_b, stride_sin_q_l, stride_sin_q_w,
    stride_k_b, stride_k_s, stride_k_k, stride_k_d, stride_v_b, stride_v_s, stride_v_k, stride_v_e,
    stride_bias_b, stride_bias_k, stride_bias_r, stride_bias_l, stride_bias_s,
    stride_mask_b, stride_mask_k, stride_mask_r, stride_mask_l, stride_mask_s, stride_key_mask_b,
    stride_key_mask_s,
    stride_keep_b, stride_keep_k, stride_keep_r, stride_keep_l, stride_keep_s,
    B, L, S, scale, unit, softcap, fill, band_lo, band_hi, keep_scale, splits,
    K: tl.constexpr, R: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    E: tl.constexpr, E1: tl.constexpr, E2: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    START: tl.constexpr, W: tl.constexpr, INTERLEAVED: tl.constexpr,
    RULES: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    scale, unit, softcap = single(scale), single(unit), single(softcap)
    fill, keep_scale = single(fill), single(keep_scale)
    # Row tiles of the same keys run side by side, then heads, whose K and V share memory pages.
    pid = tl.program_id(0)
    row_tiles = tl.cdiv(L * R, BM)
    row0 = pid % row_tiles * BM
    bk = pid // row_tiles % (B * K)
    split = pid // (row_tiles * B * K)
    b = bk // K
    k = bk % K
    rows = row0 + tl.arange(0, BM)
    positions = rows // R
    r = rows % R

    q_ptr += head_offset(b, k, k, stride_q_b, stride_q_k, 0)
    cos = (cos_q_ptr + b.to(tl.int64) * stride_cos_q_b, stride_cos_q_l, stride_cos_q_w)
    sin = (sin_q_ptr + b.to(tl.int64) * stride_sin_q_b, stride_sin_q_l, stride_sin_q_w)
    q1 = queries(
        q_ptr, positions, r, stride_q_l, stride_q_r, stride_q_d, cos, sin, L,
        0, D1, D, START, W, INTERLEAVED,
    )  # fmt: skip
    q2 = q1
    if D2:
        q2 = queries(
            q_ptr, positions, r, stride_q_l, stride_q_r, stride_q_d, cos, sin, L,
            D1, D2, D, START, W, INTERLEAVED,
        )  # fmt: skip
    if not TMA:
        k_src += head_offset(b, k, k, stride_k_b, stride_k_k, 0)
        v_src += head_offset(b, k, k, stride_v_b, stride_v_k, 0)
    # One pointer a row, because the rows of a tile belong to several heads.
    bias = (
        bias_ptr + head_offset(b, k, r[:, None], stride_bias_b, stride_bias_k, stride_bias_r),
        stride_bias_l,
        stride_bias_s,
    )
    mask = (
        mask_ptr + head_offset(b, k, r[:, None], stride_mask_b, stride_mask_k, stride_mask_r),
        stride_mask_l,
        stride_mask_s,
    )
    keep = (
        keep_ptr + head_offset(b, k, r[:, None], stride_keep_b, stride_keep_k, stride_keep_r),
        stride_keep_l,
        stride_keep_s,
    )
    key_mask_ptr += b.to(tl.int64) * stride_key_mask_b
    key_mask = (key_mask_ptr, stride_key_mask_s)
    numbers = (L, S, scale, softcap, fill, band_lo, band_hi)

    # The keys that any row of the tile sees, in equal shares of whole tiles.
    end_row = tl.minimum(row0 + BM, L * R)
    lo, _, _, hi = keys_of(row0 // R, (end_row - 1) // R + 1, S, band_lo, band_hi, BN, RULES)
    if KEY_MASK & RULES and not (EXACT & RULES):
        first, hi = seen_keys(key_mask_ptr, stride_key_mask_s, lo, hi, S)
        lo = first // BN * BN
    tiles = tl.cdiv(tl.maximum(hi - lo, 0), BN)
    share = tiles // splits
    larger = tiles % splits
    begin = split * share + tl.minimum(split, larger)
    end = begin + share + (split < larger).to(tl.int32)

    m = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc1 = tl.zeros([BM, E1], tl.float32)
    acc2 = tl.zeros([BM, E2 if E2 else 16], tl.float32)
    # All comparisons in every tile: memory is what limits, and one loop has one pipeline to fill.
    acc1, acc2, m, total = attend(
        acc1, acc2, m, total, q1, q2, k_src, v_src, b, k, positions,
        lo + begin * BN, tl.minimum(lo + end * BN, hi),
        stride_k_s, stride_k_d, stride_v_s, stride_v_e, unit, bias, mask, key_mask, keep, numbers,
        D, D1, D2, E, E1, E2, BN, RULES, 2, PRECISION, TMA,
    )  # fmt: skip

    part = (bk.to(tl.int64) * L * R + rows) * splits + split
    inside = rows < L * R
    tl.store(m_ptr + part, m, mask=inside)
    tl.store(total_ptr + part, total, mask=inside)
    cols = tl.arange(0, E1)
    at = acc_ptr + part[:, None] * E + cols[None, :]
    tl.store(at, acc1, mask=inside[:, None] & (cols < E)[None, :])
    if E2:
        cols = E1 + tl.arange(0, E2)
        at = acc_ptr + part[:, None] * E + cols[None, :]
        tl.store(at, acc2, mask=inside[:, None] & (cols < E)[None, :])


@triton.jit
def merged(acc, acc_ptr, parts, inside, weight, shrink, FIRST: tl.constexpr, WIDTH: tl.constexpr,
           E: tl.constexpr):  # fmt: skip
    cols = FIRST + tl.arange(0, WIDTH)
    seen = inside[:, None] & (cols < E)[None, :]
    x = tl.load(acc_ptr + parts[:, None] * E + cols[None, :], mask=seen, other=0.0)
    return acc * shrink + tl.sum(x * weight[:, None], 0)


@triton.jit
def value_sum(
    v_ptr, b, k, stride_v_s, stride_v_e, position, keep, L, S, end,
    FIRST: tl.constexpr, WIDTH: tl.constexpr, E: tl.constexpr, BN: tl.constexpr,
    RULES: tl.constexpr,
):  # fmt: skip
    """Plain sum of V over the keys [0, end): what a row without a visible key averages."""
    acc = tl.zeros([WIDTH], tl.float32)
    for n0 in tl.range(0, end, BN):
        cols = n0 + tl.arange(0, BN)
        counts = cols < S
        if KEEP & RULES:
            counts = counts & kept(cols * 0 + position, cols, keep, L, S)
        v = stream_tile(
            v_ptr, b, n0, k, stride_v_s, stride_v_e, S, BN, FIRST, WIDTH, E, True, False
        )
        acc += tl.sum(tl.where(counts[:, None], v.to(tl.float32), 0.0), 0)
    return acc


@triton.jit
def combine_kernel(
    acc_ptr, m_ptr, total_ptr, v_ptr, out_ptr, lse_ptr, keep_ptr, sink_ptr,
    stride_v_b, stride_v_s, stride_v_k, stride_v_e,
    stride_keep_b, stride_keep_k, stride_keep_r, stride_keep_l, stride_keep_s,
    stride_sink_k, stride_sink_r,
    L, S, keep_scale, splits,
    K: tl.constexpr, R: tl.constexpr, E: tl.constexpr, E1: tl.constexpr, E2: tl.constexpr,
    BN: tl.constexpr, PARTS: tl.constexpr, RULES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    bk = row // (L * R)
    b = bk // K
    k = bk % K
    position = row % (L * R) // R
    r = row % R
    unit = LOG2E if SHIFTED & RULES else 1.0
    keep_scale = single(keep_scale)

    m, total = first_sum(sink_ptr, k, r, stride_sink_k, stride_sink_r, 1, RULES)
    top = tl.max(m, 0)
    total = tl.sum(total, 0)
    acc1 = tl.zeros([E1], tl.float32)
    acc2 = tl.zeros([E2 if E2 else 16], tl.float32)
    for s0 in tl.range(0, splits, PARTS):
        split = s0 + tl.arange(0, PARTS)
        inside = split < splits
        parts = row.to(tl.int64) * splits + split
        tops = tl.load(m_ptr + parts, mask=inside, other=float("-inf"))
        sums = tl.load(total_ptr + parts, mask=inside, other=0.0)
        top_next = tl.maximum(top, tl.max(tops, 0))
        origin = tl.where(top_next == float("-inf"), 0.0, top_next)
        weight = tl.exp2((tops - origin) * unit)
        shrink = tl.exp2((top - origin) * unit)
        total = total * shrink + tl.sum(sums * weight, 0)
        acc1 = merged(acc1, acc_ptr, parts, inside, weight, shrink, 0, E1, E)
        if E2:
            acc2 = merged(acc2, acc_ptr, parts, inside, weight, shrink, E1, E2, E)
        top = top_next

    lse = log_sum_exp(top, total, RULES)
    if EMPTY_ROWS & RULES:
        is_empty = top == float("-inf")
        end = tl.where(is_empty, S, 0)
        v_ptr += head_offset(b, k, k, stride_v_b, stride_v_k, 0)
        keep = (
            keep_ptr + head_offset(b, k, r, stride_keep_b, stride_keep_k, stride_keep_r),
            stride_keep_l,
            stride_keep_s,
        )
        acc1 += value_sum(
            v_ptr, b, k, stride_v_s, stride_v_e, position, keep, L, S, end, 0, E1, E, BN, RULES
        )
        if E2:
            acc2 += value_sum(
                v_ptr, b, k, stride_v_s, stride_v_e, position, keep, L, S, end, E1, E2, E, BN, RULES
            )
        total = tl.where(is_empty, S, total)
        lse = tl.where(is_empty, float("inf"), lse)

    # A row without a visible key is 0 / 0 here, NaN as in eager, unless EMPTY_ROWS filled it.
    head = (b.to(tl.int64) * L + position) * K * R + k * R + r
    cols = tl.arange(0, E1)
    out = (acc1 / total * keep_scale).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + head * E + cols, out, mask=cols < E)
    if E2:
        cols = E1 + tl.arange(0, E2)
        out = (acc2 / total * keep_scale).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + head * E + cols, out, mask=cols < E)
    tl.store(lse_ptr + (bk.to(tl.int64) * R + r) * L + position, lse)

"""Tile helpers of the attention kernels: addresses, loads, products, scores, one softmax step.

Tiles may lie as [rows, keys] or [keys, rows]: `i` (query positions) and `j` (key positions) come
expanded, e.g. `rows[:, None]` and `cols[None, :]`. bf16 is widened before any arithmetic: only
loads, stores, casts and dots see it, which is also what makes Triton's interpreter right.
"""

# ruff: noqa: RET505, SIM108 (Triton compiles both ways out of a branch only when they are spelt
# out)

import triton
import triton.language as tl

from inductor_gqa.kernels.rules import (
    BAND,
    BAND_HI,
    BAND_LO,
    BIAS,
    EXACT,
    FILL_ADDS,
    FINE_TANH,
    HIDES,
    KEY_MASK,
    MASK,
    SCALED,
    SHIFTED,
    SOFTCAP,
)

LOG2E = tl.constexpr(1.4426950408889634)
# As exact as fp32 and on the tensor cores: six products of operands in three bf16 parts. Tensor
# cores truncate as they add, of bf16 twice as many numbers at a time as of tf32: three products of
# that are off by more and no faster. The interpreter multiplies in fp32.
EXACT_PRODUCT = tl.constexpr("ieee" if triton.knobs.runtime.interpret else "bf16x6")


@triton.jit
def single(number):
    """A launch's float in fp32. Inductor passes fp64, and all that it touches would be fp64."""
    return tl.cast(number, tl.float32)


@triton.jit
def head_offset(b, k, r, stride_b, stride_k, stride_r):
    return b.to(tl.int64) * stride_b + k.to(tl.int64) * stride_k + r.to(tl.int64) * stride_r


@triton.jit
def offsets(i, j, stride_i, stride_j):
    return i.to(tl.int64) * stride_i + j.to(tl.int64) * stride_j


@triton.jit
def load_tile(
    ptr, rows, stride_row, stride_col, n_rows,
    FIRST: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Columns FIRST .. FIRST+WIDTH of the rows; outside n_rows x COLUMNS all reads as zero."""
    cols = FIRST + tl.arange(0, WIDTH)
    at = ptr + offsets(rows[:, None], cols[None, :], stride_row, stride_col)
    return tl.load(at, mask=(rows[:, None] < n_rows) & (cols[None, :] < COLUMNS), other=0.0)


@triton.jit
def stream_tile(
    source, b, row0, head, stride_row, stride_col, n_rows, ROWS: tl.constexpr,
    FIRST: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, CHECK_ROWS: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """Rows row0 .. row0+ROWS of one head: from a 4-D descriptor, or through a pointer to that head.

    Only the tile's first row needs 64 bits; offsets within it are loop invariant and must stay
    narrow to fit registers.
    """
    if TMA:
        return source.load([b, row0, head, FIRST]).reshape(ROWS, WIDTH)
    else:
        first = source + tl.cast(row0, tl.int64) * stride_row
        rows = tl.arange(0, ROWS)
        cols = FIRST + tl.arange(0, WIDTH)
        at = first + (rows[:, None] * stride_row + cols[None, :] * stride_col)
        if CHECK_ROWS and FIRST + WIDTH > COLUMNS:
            return tl.load(
                at, mask=(rows[:, None] < n_rows - row0) & (cols[None, :] < COLUMNS), other=0.0
            )
        elif CHECK_ROWS:
            return tl.load(at, mask=rows[:, None] < n_rows - row0, other=0.0)
        elif FIRST + WIDTH > COLUMNS:
            return tl.load(at, mask=(cols[None, :] < COLUMNS) & (rows[:, None] >= 0), other=0.0)
        else:
            return tl.load(at)


@triton.jit
def store_tile(
    ptr, tile, rows, stride_row, n_rows,
    FIRST: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    cols = FIRST + tl.arange(0, WIDTH)
    inside = (rows[:, None] < n_rows) & (cols[None, :] < COLUMNS)
    tl.store(
        ptr + offsets(rows[:, None], cols[None, :], stride_row, 1),
        tile.to(ptr.dtype.element_ty),
        mask=inside,
    )


@triton.jit
def round_to_tf32(x):
    """Nearest tf32 value: Hopper's tensor cores drop the low 13 bits, which doubles the error."""
    near = ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return tl.where(x == x, near, x)  # the carry would turn the GPU's NaN (0x7fffffff) into -0


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    if PRECISION == "tf32":
        return tl.dot(round_to_tf32(a), round_to_tf32(b), input_precision="tf32")
    elif PRECISION == "ieee":
        return tl.dot(a, b, input_precision=EXACT_PRODUCT)
    elif PRECISION == "tf32x3":
        return tl.dot(a, b, input_precision="tf32x3")
    else:
        return tl.dot(a, b)


@triton.jit
def add_product(acc, a, b, PRECISION: tl.constexpr):
    if PRECISION == "tf32":
        return tl.dot(round_to_tf32(a), round_to_tf32(b), acc, input_precision="tf32")
    elif PRECISION == "ieee":
        return tl.dot(a, b, acc, input_precision=EXACT_PRODUCT)
    elif PRECISION == "tf32x3":
        return tl.dot(a, b, acc, input_precision="tf32x3")
    else:
        return tl.dot(a, b, acc)


@triton.jit
def tanh(x, FINE: tl.constexpr):
    """From exp2, so that it also runs in the interpreter; libdevice does not.

    FINE, for fp32: a series where the exponential form would cancel, and an exponential that
    shrinks instead of growing.
    """
    if FINE:
        e = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
        far = (1.0 - e) / (1.0 + e)
        y = x * x
        tail = -17 / 315 + y * (62 / 2835 + y * (-1382 / 155925 + y * (21844 / 6081075)))
        near = x * (1.0 + y * (-1 / 3 + y * (2 / 15 + y * tail)))
        return tl.where(y < 0.25, near, tl.where(x < 0, -far, far))
    else:
        return 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2E)) + 1.0)


@triton.jit
def softcap_slope(products, scale, softcap, RULES: tl.constexpr):
    """Derivative of softcap * tanh(x / softcap) at the scaled products."""
    t = tanh(products * (scale / softcap), (FINE_TANH & RULES) != 0)
    return 1.0 - t * t


@triton.jit
def visible(i, j, mask, key_mask, numbers, RULES: tl.constexpr, EDGE: tl.constexpr):
    """True where query i sees key j. EDGE: 0 where the tile lies inside the band and S, 1 where it
    may cross the band, 2 where it may also cross the end of the keys."""
    mask_ptr, stride_mask_l, stride_mask_s = mask
    key_mask_ptr, stride_key_mask_s = key_mask
    L, S, _, _, _, band_lo, band_hi = numbers
    # The first comparison is chosen, not added to a constant: one predicate less fits where
    # registers are out.
    if EDGE == 1 and BAND_HI & RULES:
        seen = j - i <= band_hi
    elif EDGE == 1 and BAND_LO & RULES:
        seen = j - i >= band_lo
    else:
        seen = j < S
    if EDGE and BAND_HI & RULES:
        seen = seen & (j - i <= band_hi)
    if EDGE and BAND_LO & RULES:
        seen = seen & (j - i >= band_lo)
    if KEY_MASK & RULES:
        seen = seen & (
            tl.load(key_mask_ptr + j.to(tl.int64) * stride_key_mask_s, mask=j < S, other=0) != 0
        )
    if MASK & RULES:
        at = mask_ptr + offsets(i, j, stride_mask_l, stride_mask_s)
        seen = seen & (tl.load(at, mask=(i < L) & (j < S), other=0) != 0)
    return seen


@triton.jit
def scores(products, i, j, bias, mask, key_mask, numbers, RULES: tl.constexpr, EDGE: tl.constexpr):
    """What the softmax sees, fp32. Without SCALED the factor `scale` is left to the exponential."""
    bias_ptr, stride_bias_l, stride_bias_s = bias
    L, S, scale, softcap, fill, _, _ = numbers
    s = products
    if SOFTCAP & RULES:
        s = softcap * tanh(s * (scale / softcap), (FINE_TANH & RULES) != 0)
    elif SCALED & RULES:
        s = s * scale
    if BIAS & RULES:
        at = bias_ptr + offsets(i, j, stride_bias_l, stride_bias_s)
        s = s + tl.load(at, mask=(i < L) & (j < S), other=0.0).to(tl.float32)
    if EDGE or HIDES & RULES:
        seen = visible(i, j, mask, key_mask, numbers, RULES, EDGE)
        if EXACT & RULES:
            if (HIDES | BAND) & RULES:
                if FILL_ADDS & RULES:
                    s = tl.where(seen, s, s + fill)
                else:
                    s = tl.where(seen, s, fill)
            if EDGE == 2:
                s = tl.where(j < S, s, float("-inf"))
        else:
            s = tl.where(seen, s, float("-inf"))
    return s


@triton.jit
def kept(i, j, keep, L, S):
    keep_ptr, stride_keep_l, stride_keep_s = keep
    at = keep_ptr + offsets(i, j, stride_keep_l, stride_keep_s)
    return tl.load(at, mask=(i < L) & (j < S), other=0) != 0


@triton.jit
def softmax_step(s, m, unit, RULES: tl.constexpr):
    """New row maxima, exponentials of this tile, and the factor that shrinks what was summed
    before.

    `unit` (log2(e), times scale where that is folded) turns scores into powers of two within the
    one multiply-subtract that the exponential needs anyway. A row that has seen no key keeps m =
    -inf and must not subtract it.
    """
    if SHIFTED & RULES:
        m_next = tl.maximum(m, tl.max(s, 1))
        origin = tl.where(m_next == float("-inf"), 0.0, m_next)
        return m_next, tl.exp2((s - origin[:, None]) * LOG2E), tl.exp2((m - origin) * LOG2E)
    else:
        m_next = tl.maximum(m, tl.max(s, 1) * unit)
        origin = tl.where(m_next == float("-inf"), 0.0, m_next)
        return m_next, tl.exp2(s * unit - origin[:, None]), tl.exp2(m - origin)


@triton.jit
def log_sum_exp(m, total, RULES: tl.constexpr):
    """In base 2, so that the backward rebuilds P with one multiply-subtract and one exp2."""
    if SHIFTED & RULES:
        return m * LOG2E + tl.log2(total)
    else:
        return m + tl.log2(total)


@triton.jit
def keys_of(row0, row1, S, band_lo, band_hi, BN: tl.constexpr, RULES: tl.constexpr):
    """Key range of query rows [row0, row1): lo, full_lo, full_hi, hi.

    Tiles in [full_lo, full_hi) are wholly visible to every row as far as the band and S go; those
    in [lo, full_lo) and [full_hi, hi) need the comparison, and outside [lo, hi) all is hidden.
    Bounds are clamped before they are divided: the quotient of a negative number rounds toward zero
    here.
    """
    lo = row0 * 0
    hi = lo + S
    full_lo = lo
    full_hi = S // BN * BN
    if BAND_HI & RULES:
        full_hi = tl.minimum(full_hi, tl.maximum(row0 + band_hi + 1, 0) // BN * BN)
        if not (EXACT & RULES):
            hi = tl.maximum(tl.minimum(hi, row1 + band_hi), 0)
    if BAND_LO & RULES:
        full_lo = tl.maximum(row1 - 1 + band_lo + BN - 1, 0) // BN * BN
        if not (EXACT & RULES):
            lo = tl.minimum(tl.maximum(row0 + band_lo, 0), S) // BN * BN
    full_lo = tl.maximum(tl.minimum(full_lo, hi), lo)
    full_hi = tl.maximum(tl.minimum(full_hi, hi), full_lo)
    return lo, full_lo, full_hi, hi


@triton.jit
def rows_of(col0, col1, L, band_lo, band_hi, BM: tl.constexpr, RULES: tl.constexpr):
    """Range of query rows that see any of the keys [col0, col1), its start a multiple of BM."""
    lo = col0 * 0
    hi = lo + L
    if BAND_HI & RULES and not (EXACT & RULES):
        lo = tl.minimum(tl.maximum(col0 - band_hi, 0), L) // BM * BM
    if BAND_LO & RULES and not (EXACT & RULES):
        hi = tl.maximum(tl.minimum(hi, col1 - band_lo), 0)
    return lo, hi


@triton.jit
def probabilities(s, origin, rest, unit, RULES: tl.constexpr):
    """P from scores and what the forward left: rest is LSE, or with SHIFTED the part of it beyond
    `origin`."""
    if SHIFTED & RULES:
        return tl.exp2((s - origin) * LOG2E - rest)
    else:
        return tl.exp2(s * unit - rest)


@triton.jit
def filled_rows(p, rest, rows, L, S, AXIS: tl.constexpr):
    """P with 1/S in every row that saw no key (LSE = +inf): its scores are all one huge negative
    number."""
    share = tl.where((rest == float("inf")) & (rows < L), 1.0 / S, 0.0)
    return tl.maximum(p, tl.expand_dims(share, AXIS))


@triton.jit
def score_gradient(
    p, dp, delta, products, i, j, mask, key_mask, numbers,
    RULES: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """dS = P (dP - delta), through softcap, and zero where a fill replaced the score."""
    ds = p * (dp - delta)
    if SOFTCAP & RULES:
        ds = ds * softcap_slope(products, numbers[2], numbers[3], RULES)
    if EXACT & RULES and not (FILL_ADDS & RULES) and (EDGE or HIDES & RULES):
        ds = tl.where(visible(i, j, mask, key_mask, numbers, RULES, EDGE), ds, 0.0)
    return ds

"""Y_i = X W_i^T in fp32 on tf32 tensor cores, for up to three weights with one X.

A program computes BM x BN of one Y_i, its columns fastest: programs that run together share rows of
X. "tf32" rounds both operands to nearest. "ieee" splits them into x = hi + lo, both of tf32, and
sums hi lo' + lo hi' + hi hi', which is as exact as fp32. Either is done in registers, or by
`split_kernel` before (READY): what it stores holds hi, then lo as more rows.
"""

# ruff: noqa: RET505 (Triton compiles both ways out of a branch only when they are spelt out)

import triton
import triton.language as tl

# From here on rounding to nearest would overflow.
LIMIT = tl.constexpr((2 - 2**-11) * 2.0**127)


@triton.jit
def high_part(x):
    """The nearest tf32 value, or where there is none the truncated one; NaN and infinity stay. The
    tensor cores would truncate, which doubles the error."""
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where(tl.abs(x) < LIMIT, bits + 0x1000, bits) & -0x2000
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def operand_tile(
    source, row, k, n_rows, C, stride_row, stride_col,
    ROWS: tl.constexpr, BK: tl.constexpr, TMA: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Rows row .. row+ROWS, columns k .. k+BK; outside of n_rows x C all reads as zero."""
    if TMA:
        return source.load([row, k])
    else:
        rows = tl.arange(0, ROWS)[:, None]
        cols = tl.arange(0, BK)[None, :]
        first = source + tl.cast(row, tl.int64) * stride_row + tl.cast(k, tl.int64) * stride_col
        inside = (rows < n_rows - row) & (cols >= 0)
        if not WHOLE:
            inside = inside & (cols < C - k)
        return tl.load(first + (rows * stride_row + cols * stride_col), mask=inside, other=0.0)


@triton.jit
def exact_product(a_hi, a_lo, b_hi, b_lo):
    """The product without lo lo'. An infinity makes lo NaN, and the product is then what hi hi'
    is."""
    small = tl.dot(a_lo, b_hi.T, input_precision="tf32")
    small = tl.dot(a_hi, b_lo.T, small, input_precision="tf32")
    small = tl.where(tl.abs(small) < float("inf"), small, 0.0)
    return tl.dot(a_hi, b_hi.T, small, input_precision="tf32")


@triton.jit
def layer(
    x_src, w_src, y_ptr, row, col, strides_x, strides_w, T, C, N,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TMA: tl.constexpr,
    WHOLE: tl.constexpr, PRECISION: tl.constexpr, READY: tl.constexpr,
):  # fmt: skip
    """The tile of one layer whose first element is [row, col]."""
    stride_xt, stride_xc = strides_x
    stride_wn, stride_wc = strides_w
    # Low parts lie below the high ones, and so do rows that nothing is stored of.
    n_x = T * 2 if READY and PRECISION == "ieee" else T
    n_w = N * 2 if READY and PRECISION == "ieee" else N
    acc = tl.zeros([BM, BN], tl.float32)
    for k in range(0, C, BK):
        a = operand_tile(x_src, row, k, n_x, C, stride_xt, stride_xc, BM, BK, TMA, WHOLE)
        b = operand_tile(w_src, col, k, n_w, C, stride_wn, stride_wc, BN, BK, TMA, WHOLE)
        # A tensor core truncates as it adds: sums for "ieee" are added outside of it.
        if PRECISION == "ieee":
            if READY:
                a_lo = operand_tile(
                    x_src, row + T, k, n_x, C, stride_xt, stride_xc, BM, BK, TMA, WHOLE
                )
                b_lo = operand_tile(
                    w_src, col + N, k, n_w, C, stride_wn, stride_wc, BN, BK, TMA, WHOLE
                )
                acc += exact_product(a, a_lo, b, b_lo)
            else:
                a_hi = high_part(a)
                b_hi = high_part(b)
                acc += exact_product(a_hi, a - a_hi, b_hi, b - b_hi)
        elif READY:
            acc = tl.dot(a, b.T, acc, input_precision="tf32")
        else:
            acc = tl.dot(high_part(a), high_part(b).T, acc, input_precision="tf32")
    rows = row + tl.arange(0, BM)[:, None]
    cols = col + tl.arange(0, BN)[None, :]
    at = y_ptr + rows.to(tl.int64) * N + cols
    tl.store(at, acc, mask=(rows < T) & (cols < N))


@triton.jit
def linear_forward_kernel(
    x_src, w0_src, w1_src, w2_src, y0_ptr, y1_ptr, y2_ptr,
    stride_x_t, stride_x_c, stride_w0_n, stride_w1_n, stride_w2_n, stride_w_c, T, C, n0, n1, n2,
    PARTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TMA: tl.constexpr,
    WHOLE: tl.constexpr, PRECISION: tl.constexpr, READY: tl.constexpr,
):  # fmt: skip
    end0 = tl.cdiv(n0, BN)
    end1 = end0 + tl.cdiv(n1, BN)
    end2 = end1 + tl.cdiv(n2, BN)
    tile = tl.program_id(0)
    row = tile // end2 * BM
    at = tile % end2
    strides_x = (stride_x_t, stride_x_c)
    if TMA:
        # No branch may choose a descriptor.
        if at < end0:
            layer(
                x_src, w0_src, y0_ptr, row, at * BN, strides_x, (stride_w0_n, stride_w_c), T, C,
                n0, BM, BN, BK, TMA, WHOLE, PRECISION, READY,
            )  # fmt: skip
        if PARTS > 1:  # noqa: SIM102
            if (at >= end0) & (at < end1):
                layer(
                    x_src, w1_src, y1_ptr, row, (at - end0) * BN, strides_x,
                    (stride_w1_n, stride_w_c), T, C, n1,
                    BM, BN, BK, TMA, WHOLE, PRECISION, READY,
                )  # fmt: skip
        if PARTS > 2:  # noqa: SIM102
            if at >= end1:
                layer(
                    x_src, w2_src, y2_ptr, row, (at - end1) * BN, strides_x,
                    (stride_w2_n, stride_w_c), T, C, n2,
                    BM, BN, BK, TMA, WHOLE, PRECISION, READY,
                )  # fmt: skip
    else:
        # One loop for all layers: three of them spill on sm_80.
        w_src = w0_src
        y_ptr = y0_ptr
        first = tl.cast(at, tl.int32)
        N = tl.cast(n0, tl.int32)
        stride_w_n = tl.cast(stride_w0_n, tl.int32)
        if PARTS > 1:  # noqa: SIM102
            if at >= end0:
                w_src = w1_src
                y_ptr = y1_ptr
                first = at - end0
                N = tl.cast(n1, tl.int32)
                stride_w_n = tl.cast(stride_w1_n, tl.int32)
        if PARTS > 2:  # noqa: SIM102
            if at >= end1:
                w_src = w2_src
                y_ptr = y2_ptr
                first = at - end1
                N = tl.cast(n2, tl.int32)
                stride_w_n = tl.cast(stride_w2_n, tl.int32)
        layer(
            x_src, w_src, y_ptr, row, first * BN, strides_x, (stride_w_n, stride_w_c), T, C, N,
            BM, BN, BK, TMA, WHOLE, PRECISION, READY,
        )  # fmt: skip


@triton.jit
def split_tile(
    source, out_ptr, row, col, stride_row, stride_col, n_rows, C, pitch,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, HAS_LOW: tl.constexpr,
):  # fmt: skip
    x = operand_tile(
        source, row, col, n_rows, C, stride_row, stride_col, ROWS, COLUMNS, False, False
    )
    rows = row + tl.arange(0, ROWS)[:, None]
    cols = col + tl.arange(0, COLUMNS)[None, :]
    at = out_ptr + rows.to(tl.int64) * pitch + cols
    inside = (rows < n_rows) & (cols < C)
    high = high_part(x)
    tl.store(at, high, mask=inside)
    if HAS_LOW:
        tl.store(at + tl.cast(n_rows, tl.int64) * pitch, x - high, mask=inside)


@triton.jit
def split_kernel(
    x_ptr, w0_ptr, w1_ptr, w2_ptr, x_out_ptr, w0_out_ptr, w1_out_ptr, w2_out_ptr,
    stride_x_t, stride_x_c, stride_w0_n, stride_w1_n, stride_w2_n, stride_w_c, T, C, n0, n1, n2,
    pitch,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, HAS_LOW: tl.constexpr,
):  # fmt: skip
    """High parts of X and of each W_i, below them their low parts; rows at `pitch`."""
    end_x = tl.cdiv(T, ROWS)
    end0 = end_x + tl.cdiv(n0, ROWS)
    end1 = end0 + tl.cdiv(n1, ROWS)
    at = tl.program_id(0)
    col = tl.program_id(1) * COLUMNS
    if at < end_x:
        split_tile(
            x_ptr, x_out_ptr, at * ROWS, col, stride_x_t, stride_x_c, T, C, pitch,
            ROWS, COLUMNS, HAS_LOW,
        )  # fmt: skip
    elif at < end0:
        split_tile(
            w0_ptr, w0_out_ptr, (at - end_x) * ROWS, col, stride_w0_n, stride_w_c, n0, C, pitch,
            ROWS, COLUMNS, HAS_LOW,
        )  # fmt: skip
    elif at < end1:
        split_tile(
            w1_ptr, w1_out_ptr, (at - end0) * ROWS, col, stride_w1_n, stride_w_c, n1, C, pitch,
            ROWS, COLUMNS, HAS_LOW,
        )  # fmt: skip
    else:
        split_tile(
            w2_ptr, w2_out_ptr, (at - end1) * ROWS, col, stride_w2_n, stride_w_c, n2, C, pitch,
            ROWS, COLUMNS, HAS_LOW,
        )  # fmt: skip

"""Tiles of a matrix of attention weights that lies in memory, and gradients turned back on
their way out."""

import triton
import triton.language as tl

from inductor_gqa.kernels.rotate import store_gradient
from inductor_gqa.kernels.tiles import load_tile, store_tile


@triton.jit
def weights_tile(
    source, b, h, row0, col0, stride_l, stride_s, L, S,
    BM: tl.constexpr, BN: tl.constexpr, CHECK: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Rows row0 .. row0+BM and keys col0 .. col0+BN of one head, zero outside L x S: from a
    descriptor of [B, H, L, S], or through a pointer to that head.

    Rows of odd length are aligned to one element only. Such tiles are read element by element,
    which no asynchronous copy can do: a loop must ask for them one step ahead, and should do so
    once.
    """
    if TMA:
        tile = source.load([b, h, row0, col0]).reshape(BM, BN)
    else:
        first = source + tl.cast(row0, tl.int64) * stride_l + tl.cast(col0, tl.int64) * stride_s
        rows = tl.arange(0, BM)[:, None]
        cols = tl.arange(0, BN)[None, :]
        at = first + (rows * stride_l + cols * stride_s)
        if CHECK:
            tile = tl.load(at, mask=(rows < L - row0) & (cols < S - col0), other=0.0)
        else:
            tile = tl.load(at)
    return tile


@triton.jit
def store_row_tile(ptr, tile, row0, col0, pitch, L, BM: tl.constexpr, BN: tl.constexpr):
    """To rows of `pitch` elements, a multiple of 16, and up to the pitch: the comparison is
    then equal within a vector, and the zeros of the tile fill the pad."""
    rows = tl.arange(0, BM)[:, None]
    cols = tl.arange(0, BN)[None, :]
    at = ptr + tl.cast(row0, tl.int64) * pitch + col0 + (rows * pitch + cols)
    tl.store(at, tile.to(ptr.dtype.element_ty), mask=(rows < L - row0) & (cols < pitch - col0))


@triton.jit
def load_half(ptr, rows, stride_row, stride_col, n_rows, FIRST: tl.constexpr, HALF: tl.constexpr):
    return load_tile(ptr, rows, stride_row, stride_col, n_rows, FIRST, HALF, FIRST + HALF).to(
        tl.float32
    )


@triton.jit
def store_turned_back(
    y, y_ptr, rows, stride_y, n_rows, cos_ptr, sin_ptr, stride_cos, stride_cosw, stride_sin,
    stride_sinw,
    D: tl.constexpr, DP: tl.constexpr, START: tl.constexpr, W: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Stores a gradient, turned back first if W > 0.

    A full-width rotation of halves stays in registers: lane t and its partner t + D/2 are one
    thread's in the layout that the tensor cores leave. All others exchange lanes through the
    destination.
    """
    if W == D and D == DP and not INTERLEAVED:
        HALF: tl.constexpr = D // 2
        y1, y2 = tl.split(tl.permute(tl.reshape(y, (y.shape[0], 2, HALF)), (0, 2, 1)))
        cos = load_half(cos_ptr, rows, stride_cos, stride_cosw, n_rows, 0, HALF)
        sin = load_half(sin_ptr, rows, stride_sin, stride_sinw, n_rows, HALF, HALF)
        store_tile(y_ptr, y1 * cos + y2 * sin, rows, stride_y, n_rows, 0, HALF, HALF)
        cos = load_half(cos_ptr, rows, stride_cos, stride_cosw, n_rows, HALF, HALF)
        sin = load_half(sin_ptr, rows, stride_sin, stride_sinw, n_rows, 0, HALF)
        store_tile(y_ptr, y2 * cos - y1 * sin, rows, stride_y, n_rows, HALF, HALF, D)
    else:
        store_gradient(
            y, y, y_ptr, rows, stride_y, n_rows, cos_ptr, sin_ptr, stride_cos, stride_cosw,
            stride_sin, stride_sinw,
            D, DP, 0, START, W, INTERLEAVED,
        )  # fmt: skip

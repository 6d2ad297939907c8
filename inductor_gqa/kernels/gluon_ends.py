"""How results leave the backward kernels for sm_90: turned back in registers, through shared
memory, as one share of a sum in fp32, which `gather_kernel` adds to the others, or as sums that
`finish_kernel` rounds."""

import triton
import triton.language as tl

from inductor_gqa.kernels.gluon_tiles import (
    WHY_NOT,
    gl,
    group_barrier,
    jit,
    tma_store,
)
from inductor_gqa.kernels.tiles import store_tile
from inductor_gqa.kernels.weights_tiles import store_turned_back

if WHY_NOT is None:
    from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

BM = tl.constexpr(64)  # rows of a group, and of a streamed tile


@jit
def padded_head(b, h, L, H: tl.constexpr):
    """Where a head's LSE begin, its deltas follow `padded_rows` later: BM numbers lie in front of
    either and BM or more behind.

    Tiles may begin before row 0 and end behind row L. Loads without a condition keep one address;
    with conditions the key half spills at D = 128.
    """
    return (b * H + h).to(gl.int64) * (2 * padded_rows(L)) + BM


@jit
def padded_rows(L):
    return (gl.cdiv(L, BM) + 2) * BM


@jit
def leave(desc, coordinates, staging, value, D: tl.constexpr):
    """Result of a group out through a buffer that it has finished reading."""
    staging.reshape([BM, D]).store(value.to(staging.dtype))
    fence_async_shared()
    group_barrier()
    tma_store(desc, coordinates, staging)


@jit
def turned_back(y, tables, b, row0, N, D: tl.constexpr):
    """Adjoint of the rotation of halves over all D lanes. Lane t and its partner t + D/2 are one
    thread's in the layout that the tensor cores leave, so that no value crosses threads."""
    cos_ptr, sin_ptr, stride_cos_b, stride_cos_n, stride_sin_b, stride_sin_n = tables
    HALF: gl.constexpr = D // 2
    y1, y2 = y.reshape([BM, 2, HALF]).permute((0, 2, 1)).split()
    LAYOUT: gl.constexpr = y1.type.layout
    rows = gl.arange(0, BM, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    cols = gl.arange(0, HALF, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    batch = b.to(gl.int64)
    position = row0.to(gl.int64)
    inside = (rows < N - row0) & (cols >= 0)
    # Rows first: what is added to them is then a constant within the instruction.
    at_cos = (cos_ptr + batch * stride_cos_b + position * stride_cos_n) + rows * stride_cos_n
    at_sin = (sin_ptr + batch * stride_sin_b + position * stride_sin_n) + rows * stride_sin_n
    cos = gl.load(at_cos + cols, mask=inside, other=0.0).to(gl.float32)
    sin = gl.load(at_sin + (cols + HALF), mask=inside, other=0.0).to(gl.float32)
    z1 = y1 * cos + y2 * sin
    group_barrier()  # keeps the other half's loads, for which there are no registers yet, below
    cos = gl.load(at_cos + (cols + HALF), mask=inside, other=0.0).to(gl.float32)
    sin = gl.load(at_sin + cols, mask=inside, other=0.0).to(gl.float32)
    z2 = y2 * cos - y1 * sin
    return gl.join(z1, z2).permute((0, 2, 1)).reshape([BM, D])


@jit
def store_part(ptr, part, row0, S, value, D: tl.constexpr):
    """A share of a sum, fp32, to rows that are there for whole tiles. Four lanes fill a sector."""
    LAYOUT: gl.constexpr = value.type.layout
    rows = gl.arange(0, BM, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    cols = gl.arange(0, D, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    first = part.to(gl.int64) * (gl.cdiv(S, 2 * BM) * (2 * BM)) + row0
    gl.store((ptr + (first + rows) * D) + cols, value)


@jit
def store_parts(ptr, share, row0, S, dk, dv, D: tl.constexpr):
    """A share of dK, followed in memory by that of dV."""
    group_barrier()
    store_part(ptr, share * 2 + 1, row0, S, dv, D)
    group_barrier()
    store_part(ptr, share * 2, row0, S, dk, D)


@triton.jit
def gather_kernel(
    parts_ptr, dk_ptr, dv_ptr, cos_ptr, sin_ptr,
    stride_cos_b, stride_cos_n, stride_cos_w, stride_sin_b, stride_sin_n, stride_sin_w,
    S, padded, groups, scale,
    K: tl.constexpr, SPLIT: tl.constexpr, D: tl.constexpr, START: tl.constexpr, W: tl.constexpr,
    INTERLEAVED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """dK, turned back, and dV from the shares of a group, each of dK followed by that of dV. Grid:
    row tiles x groups, for dK then dV."""
    tiles = tl.cdiv(S, ROWS)
    row0 = tl.program_id(0) % tiles * ROWS
    bk = tl.program_id(0) // tiles
    is_dk = bk < groups
    bk = tl.where(is_dk, bk, bk - groups)
    b = bk // K
    k = bk % K
    rows = row0 + tl.arange(0, ROWS)
    first = tl.cast(bk * (2 * SPLIT) + tl.where(is_dk, 0, 1), tl.int64) * padded + row0
    at = first * D + tl.arange(0, ROWS)[:, None] * D + tl.arange(0, D)[None, :]
    total = tl.zeros([ROWS, D], tl.float32)
    for part in tl.static_range(SPLIT):
        total += tl.load(parts_ptr + at + tl.cast(padded, tl.int64) * (2 * part) * D)
    to = (b.to(tl.int64) * S * K + k) * D
    if is_dk:
        store_turned_back(
            total * scale, dk_ptr + to, rows, K * D, S,
            cos_ptr + b.to(tl.int64) * stride_cos_b, sin_ptr + b.to(tl.int64) * stride_sin_b,
            stride_cos_n, stride_cos_w, stride_sin_n, stride_sin_w, D, D, START, W, INTERLEAVED,
        )  # fmt: skip
    else:
        store_tile(dv_ptr + to, total, rows, K * D, S, 0, D, D)


@triton.jit
def finish_kernel(
    sums_ptr, dq_ptr, cos_ptr, sin_ptr,
    stride_cos_b, stride_cos_n, stride_cos_w, stride_sin_b, stride_sin_n, stride_sin_w,
    L, scale, H: tl.constexpr, D: tl.constexpr, START: tl.constexpr, W: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """dQ, turned back, from its sums in fp32. Grid: heads x tiles of 16 rows.

    The sums of 64 rows and lanes lie as the registers held them: of each eighth of the lanes 16
    rows after another, of these rows 0 to 7, in each row four pairs of lanes, after each pair that
    of eight rows below. Such blocks fill tiles of 128 * 64 numbers, the lanes before the rows.
    """
    heads = tl.num_programs(0) // tl.cdiv(L, 16)
    bh = tl.program_id(0) % heads
    sixteen = tl.program_id(0) // heads
    rows = sixteen * 16 + tl.arange(0, 16)
    b = (bh // H).to(tl.int64)
    first = (b * L * H + bh % H) * D
    BLOCKS: tl.constexpr = D // 64
    blocks = tl.cdiv(L, 128 * 64 // D) * 2
    block = bh.to(tl.int64) * blocks + sixteen // 4 * BLOCKS
    eighths = tl.arange(0, BLOCKS * 8)[:, None] * 512 + tl.arange(0, 128)[None, :]
    sums = tl.load(sums_ptr + block * 4096 + sixteen % 4 * 128 + eighths)
    sums = tl.reshape(sums, [BLOCKS * 8, 8, 4, 2, 2]).permute(3, 1, 0, 2, 4)
    sums = tl.reshape(sums, [16, D])
    store_turned_back(
        sums * scale, dq_ptr + first, rows, H * D, L,
        cos_ptr + b * stride_cos_b, sin_ptr + b * stride_sin_b,
        stride_cos_n, stride_cos_w, stride_sin_n, stride_sin_w, D, D, START, W, INTERLEAVED,
    )  # fmt: skip

"""What both sm_90 kernels of the backward from given weights share: tiles, rings, ways out."""

import triton.language as tl

from inductor_gqa.kernels.gluon_tiles import (
    WHY_NOT,
    gl,
    group_barrier,
    jit,
    tma_store,
)

if WHY_NOT is None:
    from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

BM = tl.constexpr(64)  # rows of a group, and of a streamed tile


@jit
def walk(n_tiles):
    """How many tiles this program walks over."""
    return gl.cdiv(n_tiles - gl.program_id(0), gl.num_programs(0))


@jit
def tile_of(i, N, HEADS: tl.constexpr):
    """Batch, head and first of 2 x BM rows of this program's i-th tile. Tiles vary fastest: they
    stream the same tensors, which no other head reads."""
    tile = gl.program_id(0) + i * gl.num_programs(0)
    tiles = gl.cdiv(N, 2 * BM)
    bh = tile // tiles
    return bh // HEADS, bh % HEADS, tile % tiles * (2 * BM)


@jit
def delta_of(b, h, L, H: tl.constexpr):
    """Where a head's row sums begin. Every row of every tile has one: a load needs no condition."""
    return (b * H + h).to(gl.int64) * (gl.cdiv(L, 2 * BM) * (2 * BM))


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

"""Which tiles of keys a program of the one-sweep backward takes, and which queries these meet."""

import triton.language as tl

from inductor_gqa.kernels.gluon_ends import BM
from inductor_gqa.kernels.gluon_tiles import gl, jit, keys_of


@jit
def units(S, B, PARTS: tl.constexpr, PAIR: tl.constexpr):
    """How many tiles of keys this program works on, see `unit_at`."""
    all_of_them = gl.cdiv(S, 2 * BM * PAIR) * B * PARTS
    return gl.cdiv(gl.maximum(all_of_them - gl.program_id(0), 0), gl.num_programs(0)) * PAIR


@jit
def unit_at(i, S, B, PARTS: tl.constexpr, PAIR: tl.constexpr):
    """The i-th unit of this program: batch, share of a group, first key.

    As many groups as fill the device after one another: programs that run together read the same
    queries and add to the same sums, which L2 then holds. Of a pair, the first key is as far from
    the first as that of the other from the last, which under a causal mask is as much work for
    every pair; the last may lie behind all keys.
    """
    tiles = gl.cdiv(S, 2 * BM * PAIR)
    groups = B * PARTS
    t = i // PAIR * gl.num_programs(0) + gl.program_id(0)
    together = gl.minimum(gl.cdiv(gl.num_programs(0), tiles), groups)
    first = t // (together * tiles) * together
    t -= first * tiles
    together = gl.minimum(together, groups - first)
    group = first + t % together
    tile = t // together
    if PAIR == 2:
        tile = gl.where(i % 2 == 0, tile, 2 * tiles - 1 - tile)
    return group // PARTS, group % PARTS, tile * (2 * BM)


@jit
def query_tiles(
    tile_col, L, S, band_lo, band_hi,
    BQ: tl.constexpr, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr,
):  # fmt: skip
    """End of the queries that see these keys, a multiple of BQ, and the number of their tiles, one
    at least: the band read the other way round."""
    end, _ = keys_of(tile_col, S, L, -band_hi, -band_lo, 2 * BM, BQ, HAS_HI, HAS_LO)
    end = gl.maximum(gl.minimum(gl.cdiv(end, BQ), gl.cdiv(L, BQ)), 1) * BQ
    begin = tile_col * 0
    if HAS_HI:
        begin = gl.maximum(begin, tile_col - band_hi)
    return end, gl.cdiv(gl.maximum(end - begin, 1), BQ)

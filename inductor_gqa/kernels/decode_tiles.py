"""Tiles and number of splits of the attention of few queries, and when it pays: pure functions of
shapes and device.

Nothing here was measured. Tiles hold about 16 KB of K and of V, so that the copies in flight cover
the latency of the memory; the largest row tiles were chosen by compiling for sm_80, sm_90 and
sm_100 without spills.
"""

import functools

import torch

from inductor_gqa.kernels import rules
from inductor_gqa.kernels.configs import Capability, Tiles
from inductor_gqa.kernels.plan import Attention

FEW_QUERIES = 16
FEWEST_KEYS = 512  # below it a second launch costs more than the splits save (estimate)
FEWEST_TILES = 4  # of a split: less work does not cover its prologue (estimate)
MOST_SPLITS = 128
ENOUGH = 0.9  # of the best use of the device: what a larger number of splits adds is not worth it
# By the width class of max(D, E).
ROWS_16 = {64: Tiles(16, 64, 4, 4), 128: Tiles(16, 64, 4, 3), 256: Tiles(16, 32, 4, 3)}
ROWS_64 = {64: Tiles(64, 64, 4, 3), 128: Tiles(64, 64, 4, 3), 256: Tiles(64, 32, 8, 3)}
ROWS_64_AMPERE = {128: Tiles(64, 64, 8, 3)}
TF32 = {64: Tiles(16, 64, 4, 2), 128: Tiles(16, 32, 4, 2), 256: Tiles(16, 16, 4, 2)}
IEEE = {64: Tiles(16, 64, 4, 2), 128: Tiles(16, 32, 4, 2), 256: Tiles(16, 16, 8, 1)}
SHARED_BYTES = {8: 164 * 1024, 9: 228 * 1024, 10: 228 * 1024}  # of a multiprocessor
BESIDES = 8 * 1024  # of a program: q, P and what the reductions exchange


def tiles_of(attention: Attention) -> Tiles:
    """Row and key tile, warps, stages; capability None means the interpreter."""
    _, L, _, _, R, D, E = attention.sizes
    rows = max(16, 1 << (L * R - 1).bit_length())
    return _tiles(
        rows, D, E, attention.tensors["q"].dtype, attention.capability, attention.precision
    )


@functools.cache
def _tiles(
    rows: int, D: int, E: int, dtype: torch.dtype, capability: Capability, precision: str
) -> Tiles:
    if capability is None:
        return Tiles(min(rows, 32), 16, 4, 1)
    width = 64 if max(D, E) <= 64 else 128 if max(D, E) <= 128 else 256
    if dtype == torch.float32:
        return (TF32 if precision == "tf32" else IEEE)[width]
    if rows <= 16:
        return ROWS_16[width]
    tiles = (ROWS_64 if capability >= (9, 0) else ROWS_64 | ROWS_64_AMPERE)[width]
    return tiles._replace(BM=min(rows, tiles.BM))


def resident_programs(attention: Attention, tiles: Tiles) -> int:
    """Programs that share a multiprocessor, by shared memory."""
    if attention.capability is None:
        return 1
    *_, D, E = attention.sizes
    # Warp group products (64 rows) read a tile in place and keep one more in flight.
    held = tiles.num_stages if tiles.BM == 64 else max(1, tiles.num_stages - 1)
    bytes_held = held * tiles.BN * (D + E) * attention.tensors["k"].dtype.itemsize
    shared = SHARED_BYTES.get(attention.capability[0], SHARED_BYTES[8])
    return max(1, min(4, shared // (bytes_held + BESIDES)))


def row_tiles(attention: Attention, tiles: Tiles) -> int:
    """Programs without any split."""
    B, L, _, K, R, _, _ = attention.sizes
    return B * K * -(-L * R // tiles.BM)


def visible_keys(attention: Attention) -> int:
    """The most keys that a query can see, from the band alone."""
    _, L, S, *_ = attention.sizes
    if attention.rules & rules.EXACT.value:
        return S
    low = max(0, attention.band_lo or 0)
    high = S if attention.band_hi is None else max(0, min(S, L + attention.band_hi))
    span = high - low
    if attention.band_lo is not None and attention.band_hi is not None:
        span = min(span, attention.band_hi - attention.band_lo + L)
    return max(0, span)


@functools.cache
def number_of_splits(programs: int, tiles: int, slots: int) -> int:
    """The fewest splits whose waves use the device almost as well as the best do.

    `programs` without splits, key `tiles` of each, `slots`: programs that run at a time.
    """

    def use(n: int) -> float:
        waves = -(-programs * n // slots)
        return programs * tiles / (waves * slots * -(-tiles // n))

    most = max(1, min(tiles // FEWEST_TILES, MOST_SPLITS))
    best = max(use(n) for n in range(1, most + 1))
    return next(n for n in range(1, most + 1) if use(n) >= ENOUGH * best)


def splits_of(attention: Attention, tiles: Tiles, multiprocessors: int) -> int:
    """How often the keys of one head are split."""
    slots = multiprocessors * resident_programs(attention, tiles)
    key_tiles = max(1, -(-visible_keys(attention) // tiles.BN))
    return number_of_splits(row_tiles(attention, tiles), key_tiles, slots)


def pays(attention: Attention, multiprocessors: int) -> bool:
    """Whether keys are split: few queries, or so few programs that half the device would idle, and
    in both cases enough keys."""
    B, L, _, K, R, _, _ = attention.sizes
    if visible_keys(attention) < FEWEST_KEYS:
        return False
    ordinary_programs = B * K * R * -(-L // 64)
    return L <= FEW_QUERIES or 2 * ordinary_programs <= multiprocessors

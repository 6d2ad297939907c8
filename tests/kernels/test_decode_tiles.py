"""Tiles, splits and choice of the attention of few queries: pure functions of shapes and device."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from inductor_gqa.kernels import decode_tiles
from inductor_gqa.kernels.plan import Attention, Operand
from inductor_gqa.reference import hidden_BKRLS

HOPPER, MULTIPROCESSORS = (9, 0), 132


def attention(B, L, S, K, R, D=128, dtype=torch.bfloat16, capability=HOPPER, **numbers):
    shapes = {"q": (B, L, K, R, D), "k": (B, S, K, D), "v": (B, S, K, D)}
    tensors = {name: Operand.contiguous(shape, dtype) for name, shape in shapes.items()}
    return Attention(tensors, scale=1.0, capability=capability, **numbers)


@given(
    programs=st.integers(1, 600), tiles=st.integers(1, 3000), slots=st.sampled_from((4, 132, 396))
)
def test_splits_use_the_device_almost_as_well_as_any_number_could(programs, tiles, slots):
    def time(n):  # in key tiles, if each program of a wave takes as long as its largest
        return -(-programs * n // slots) * -(-tiles // n)

    most = max(1, min(tiles // decode_tiles.FEWEST_TILES, decode_tiles.MOST_SPLITS))
    n = decode_tiles.number_of_splits(programs, tiles, slots)
    assert 1 <= n <= most
    assert time(n) * decode_tiles.ENOUGH <= min(time(x) for x in range(1, most + 1)) * 1.000001
    assert all(
        time(x) * decode_tiles.ENOUGH > min(time(y) for y in range(1, most + 1)) * 0.999999
        for x in range(1, n)
    )


@pytest.mark.parametrize("B", [1, 8, 64])
@pytest.mark.parametrize("S", [4096, 32768])
def test_one_query_a_head_fills_the_device(B, S):
    subject = attention(B, 1, S, 8, 4)
    tiles = decode_tiles.tiles_of(subject)
    splits = decode_tiles.splits_of(subject, tiles, MULTIPROCESSORS)
    least = min(MULTIPROCESSORS, 8 * B * S // tiles.BN // decode_tiles.FEWEST_TILES)
    assert splits * decode_tiles.row_tiles(subject, tiles) >= least
    assert S // splits >= decode_tiles.FEWEST_TILES * tiles.BN


@pytest.mark.parametrize(("L", "R", "BM"), [(1, 4, 16), (4, 4, 16), (5, 4, 32), (16, 8, 64)])
def test_queries_of_a_key_head_share_a_tile(L, R, BM):
    subject = attention(2, L, 4096, 8, R)
    tiles = decode_tiles.tiles_of(subject)
    assert tiles.BM == BM
    assert decode_tiles.row_tiles(subject, tiles) == 16 * -(-L * R // BM)


@given(
    L=st.integers(1, 12),
    S=st.integers(1, 30),
    lo=st.none() | st.integers(-15, 35),
    hi=st.none() | st.integers(-15, 35),
)
def test_keys_that_a_band_shows_are_counted(L, S, lo, hi):
    counted = decode_tiles.visible_keys(attention(1, L, S, 1, 1, band_lo=lo, band_hi=hi))
    hidden = hidden_BKRLS(L, S, lo, hi, None, None, torch.device("cpu"))
    seen = torch.ones(L, S, dtype=torch.bool) if hidden is None else ~hidden
    columns = seen.any(0).nonzero().flatten()
    reach = int(columns.max() - columns.min() + 1) if len(columns) else 0
    assert counted == reach or (reach == 0 and counted <= L)


def test_a_finite_fill_makes_every_key_count():
    assert decode_tiles.visible_keys(attention(1, 1, 900, 1, 1, band_lo=800, fill=-1e4)) == 900


@pytest.mark.parametrize(
    ("sizes", "is_split"),
    [
        ((8, 1, 32768, 8, 4), True),
        ((8, 16, 32768, 8, 4), True),
        ((8, 17, 32768, 8, 4), False),  # the ordinary grid fills the device
        ((1, 64, 32768, 8, 4), True),  # prefill in chunks: 32 programs of 132
        ((1, 4096, 4096, 8, 4), False),
        ((8, 1, 256, 8, 4), False),
    ],
    ids=str,
)
def test_keys_are_split_for_few_queries_and_for_small_grids(sizes, is_split):
    assert decode_tiles.pays(attention(*sizes), MULTIPROCESSORS) is is_split


def test_a_short_window_of_a_long_cache_is_not_split():
    assert not decode_tiles.pays(
        attention(8, 1, 32768, 8, 4, band_hi=32767, band_lo=32767 - 255), MULTIPROCESSORS
    )

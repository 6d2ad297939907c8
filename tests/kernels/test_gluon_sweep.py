"""In which order programs of the one-sweep backward take tiles of keys, and which queries these
meet; its numbers are held against fp64 on a GPU by test_gluon_gpu.py."""

import itertools

import pytest
from kernels.test_gluon_tiles import Scalars, in_python

from inductor_gqa.kernels import gluon_sweep_order, gluon_tiles

pytestmark = pytest.mark.skipif(gluon_tiles.WHY_NOT is not None, reason=str(gluon_tiles.WHY_NOT))
B, PARTS = 3, 4


def walks(S, programs, pair):
    """Of every program, the units that it works on."""
    for program in range(programs):
        scalars = Scalars(program, programs)
        n = in_python(gluon_sweep_order.units, scalars, BM=64)(S, B, PARTS, pair)
        unit_at = in_python(gluon_sweep_order.unit_at, scalars, BM=64)
        yield [unit_at(i, S, B, PARTS, pair) for i in range(n)]


@pytest.mark.parametrize("pair", [1, 2])
@pytest.mark.parametrize("S", [1, 128, 129, 1000, 4096])
@pytest.mark.parametrize("programs", [1, 7, 132, 1000])
def test_every_tile_of_keys_is_taken_once(programs, S, pair):
    taken = sorted(unit for walk in walks(S, programs, pair) for unit in walk)
    end = -(-S // (128 * pair)) * 128 * pair  # the last of a pair may lie behind all keys
    assert taken == sorted(itertools.product(range(B), range(PARTS), range(0, end, 128)))


@pytest.mark.parametrize("S", [512, 2048, 8192, 16384])
def test_causal_work_is_even_over_programs_that_take_pairs(S):
    loads = [sum(S // 128 - col // 128 for *_, col in walk) for walk in walks(S, 132, 2)]
    assert max(loads) <= sum(loads) / 132 + S // 128 + 1


@pytest.mark.parametrize("S", [512, 2048, 16384])
@pytest.mark.parametrize("pair", [1, 2])
def test_programs_that_run_together_share_groups(pair, S):
    programs, tiles = 132, S // 128 // pair
    first_units = [walk[0] for walk in walks(S, programs, pair) if walk]
    assert len({unit[:2] for unit in first_units}) <= -(-programs // tiles) + 1


@pytest.mark.parametrize("BQ", [64, 128])
def test_tiles_of_queries_hold_every_query_that_sees_a_key(BQ):
    keys_of = in_python(gluon_tiles.keys_of, Scalars())
    query_tiles = in_python(gluon_sweep_order.query_tiles, Scalars(), BM=64, keys_of=keys_of)
    lengths = (1, 63, 64, 129, 300)
    bands = (None, -260, -64, -1, 0, 1, 37, 128, 400)
    for L, S, lo, hi in itertools.product(lengths, lengths, bands, bands):
        for col in range(0, S, 128):
            has_lo, has_hi = lo is not None, hi is not None
            end, n = query_tiles(col, L, S, lo or 0, hi or 0, BQ, has_lo, has_hi)
            # Sums of dQ lie in whole tiles, and none in front of the first.
            assert n >= 1
            assert end % BQ == 0
            assert 0 <= end - n * BQ < end < L + BQ
            see = [
                row
                for row in range(L)
                if (not has_hi or col <= row + hi)
                and (not has_lo or min(col + 128, S) - 1 >= row + lo)
            ]
            if see:
                assert end - n * BQ <= see[0] <= see[-1] < end

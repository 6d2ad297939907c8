"""Device functions of the warp-specialised kernels, run as Python on integers and torch tensors.

Gluon does not run in Triton's interpreter. What is arithmetic is tested by giving the same function
other meanings of Gluon's names; layouts then mean nothing.
"""

import itertools
import math
import types

import pytest
import torch
from kernels.oracle import rotate

from inductor_gqa.kernels import gluon_tiles
from inductor_gqa.kernels.gluon_forward import LARGEST, checks_lower_edge, ends_aligned

pytestmark = pytest.mark.skipif(gluon_tiles.WHY_NOT is not None, reason=str(gluon_tiles.WHY_NOT))
B, K, R = 2, 2, 4


class Scalars:
    """Gluon's names for arithmetic on scalars, in Python; quotients only where they round alike."""

    constexpr = int

    def __init__(self, program=0, programs=1):
        self.program_id, self.num_programs = (lambda axis: program), (lambda axis: programs)

    minimum, maximum = staticmethod(min), staticmethod(max)

    @staticmethod
    def cdiv(x, y):
        assert x >= 0
        return -(-x // y)

    @staticmethod
    def where(condition, x, y):
        return x if condition else y


def in_python(function, scalars, **others):
    """A device function as a Python function on integers; `others`: further names it calls."""
    names = function.fn.__globals__ | {"gl": scalars} | others
    python = function.fn
    return types.FunctionType(python.__code__, names, python.__name__, python.__defaults__)


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("groups", [2, 3])
@pytest.mark.parametrize("BN", [64, 128])
def test_visited_tiles_hold_every_visible_key_and_open_tiles_no_hidden_one(BN, groups, heads):
    keys_of = in_python(gluon_tiles.keys_of, Scalars())
    open_tiles = in_python(gluon_tiles.open_tiles, Scalars())
    lengths = (1, 63, 64, 129, 300)
    bands = (None, -260, -64, -1, 0, 1, 37, 96, 128, 400)
    part = 64 // heads
    for L, S, lo, hi in itertools.product(lengths, lengths, bands, (*bands, LARGEST)):
        has_lo, has_hi = lo is not None, hi is not None
        is_aligned = ends_aligned(hi, heads, part * groups, BN)
        checks_lo = checks_lower_edge(lo, hi, part * groups, BN, is_aligned)
        band = (lo or 0, hi or 0)
        for tile_row in range(0, L, part * groups):
            end, n = keys_of(
                tile_row, L, S, *band, part * groups, BN, has_lo, has_hi, is_aligned, heads
            )
            assert n >= 1
            for row0 in range(tile_row, tile_row + part * groups, part):
                first, stop = open_tiles(end, n, row0, L, S, *band, part, BN, has_lo, has_hi)
                assert 1 <= first <= stop <= n
                # The loops in front and behind exist only in variants that mask there.
                assert first == 1 or (has_hi and part * groups > BN)
                assert stop == n or checks_lo
                rows = range(row0, min(row0 + part, L))
                lowest = [max(0, i + lo if has_lo else 0) for i in rows]
                highest = [min(S - 1, i + hi if has_hi else S - 1) for i in rows]
                seen = [(x, y) for x, y in zip(lowest, highest, strict=True) if x <= y]
                assert all(end - n * BN <= x and y < end for x, y in seen)
                if first < stop and rows:
                    assert end - stop * BN >= max(lowest)
                    assert end - first * BN - 1 <= min(highest)
                if not checks_lo:  # nothing lies below key 0 in any tile
                    assert end - n * BN >= 0


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("programs", [1, 7, 132, 1000])
def test_every_tile_is_walked_once(programs, heads):
    """Tiles of several heads fill what one of as many rows would, past L too."""
    L, n_tiles = 1000, 8 * B * K * R
    walked = []
    for program in range(programs):
        scalars = Scalars(program, programs)
        n = in_python(gluon_tiles.my_tiles, scalars)(n_tiles)
        tile_at = in_python(gluon_tiles.tile_at, scalars)
        walked += [tile_at(i, L, B, K, R, 128, heads) for i in range(n)]
    starts = range(0, R, heads), range(0, 1024, 128 // heads)
    assert sorted(walked) == sorted(itertools.product(range(B), range(K), *starts))


def test_rows_past_the_end_visit_one_tile():
    keys_of = in_python(gluon_tiles.keys_of, Scalars())
    for row0, n in ((96, 8), (128, 1), (160, 1)):
        assert keys_of(row0, 128, 1024, 0, 0, 32, 128, False, False, False, 4)[1] == n
        assert keys_of(row0, 128, 1024, 0, 896, 32, 128, False, True, True, 4)[1] == n


def test_causal_work_is_even_over_programs():
    L, programs = 4096, 132
    n_tiles = L // 128 * B * K * R
    loads = []
    for program in range(programs):
        scalars = Scalars(program, programs)
        n = in_python(gluon_tiles.my_tiles, scalars)(n_tiles)
        tile_at = in_python(gluon_tiles.tile_at, scalars)
        loads.append(sum(tile_at(i, L, B, K, R, 128)[3] // 128 + 1 for i in range(n)))
    assert max(loads) <= 1.1 * sum(loads) / programs + 1


class Tile(torch.Tensor):
    """A tensor with Gluon's methods."""

    @property
    def type(self):
        return types.SimpleNamespace(layout=None)

    @property
    def shape(self):  # pyright: ignore[reportIncompatibleVariableOverride]
        return list(self.size())

    def expand_dims(self, axis):
        return self.unsqueeze(axis)


class Pointer:
    """A flat tensor and offsets into it."""

    def __init__(self, flat, offset=0):
        self.flat, self.offset = flat, offset

    def __add__(self, offset):
        return Pointer(self.flat, self.offset + offset)


class Tensors(Scalars):
    """Gluon's names for tensors."""

    int32, int64, float32 = torch.int32, torch.int64, torch.float32
    join = staticmethod(lambda x, y: torch.stack((x, y), -1))
    static_range = range

    @staticmethod
    def where(condition, x, y):
        return torch.where(condition, x, y)

    @staticmethod
    def minimum(x, y):
        return torch.minimum(x, y)

    @staticmethod
    def maximum(x, y):
        return torch.maximum(x, y)

    @staticmethod
    def sum(x, axis):
        return x.sum(axis, dtype=x.dtype)

    @staticmethod
    def arange(first, last, layout):
        return torch.arange(first, last, dtype=torch.int32).as_subclass(Tile)

    @staticmethod
    def SliceLayout(*args):
        return None

    BlockedLayout = SliceLayout

    @staticmethod
    def convert_layout(x, layout):
        return x

    @staticmethod
    def load(pointer, mask, other):
        mask = mask.expand(pointer.offset.shape)
        at = torch.where(mask, pointer.offset, 0)
        return torch.where(mask, pointer.flat[at.long()], other).as_subclass(Tile)


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("BN", [64, 128])
@pytest.mark.parametrize("has_key_mask", [False, True])
@pytest.mark.parametrize("band", [(None, None), (None, 5), (-30, None), (-30, 5), (-9, -3)])
def test_a_tile_keeps_exactly_the_scores_that_its_rows_see(band, has_key_mask, BN, heads):
    lo, hi = band
    S, b = 150, 1
    has_lo, has_hi = lo is not None, hi is not None
    hidden_scores = in_python(gluon_tiles.hidden_scores, Tensors())
    packed_key_mask = in_python(gluon_tiles.packed_key_mask, Tensors())
    key_mask = torch.rand(2, S, 3) < 0.5
    for row0, col0 in itertools.product((0, 64, 128), (-70, -1, 0, 64, 100)):
        s = torch.randn(64, BN).as_subclass(Tile)
        words = 0
        if has_key_mask:
            pointer = (Pointer(key_mask.flatten()) + 1, 3 * S, 3)
            words = packed_key_mask(pointer, torch.tensor(b), col0, S, BN)
        band_of = (lo or 0, hi or 0)
        flags = (has_lo, has_hi, True, has_key_mask, heads)
        ours = hidden_scores(s, words, row0, col0, S, *band_of, *flags)
        row, col = row0 + torch.arange(64)[:, None] // heads, col0 + torch.arange(BN)[None]
        seen = (col >= 0) & (col < S)
        if has_lo:
            seen = seen & (col - row >= lo)
        if has_hi:
            seen = seen & (col - row <= hi)
        if has_key_mask:
            seen = seen & key_mask[b, col.clamp(0, S - 1), 1]
        assert torch.equal(ours, torch.where(seen, s, -math.inf))


@pytest.mark.parametrize("D", [64, 128])
def test_rows_are_rotated_as_the_contract_says(D):
    """Tables whose columns are all independent; five rows past the end read as zero."""
    stored = torch.zeros(64, D)

    class Buffer:
        dtype = torch.float32

        def slice(self, first, rows):
            return types.SimpleNamespace(store=stored[first : first + rows].copy_)

    x, cos, sin = torch.randn(64, D + 8), torch.randn(64, D), torch.randn(64, D)
    store_rotated = in_python(gluon_tiles.store_rotated, Tensors())
    pointers = (Pointer(x.flatten()), Pointer(cos.flatten()), Pointer(sin.flatten()))
    store_rotated(Buffer(), *pointers, D + 8, 1, D, 1, 59, 64, D)
    true = rotate(x[None, :, None, :D], cos[None], sin[None], 0, False)[0, :, 0]
    true[59:] = 0
    torch.testing.assert_close(stored, true)


class Rows(Tile):
    """Parts of a tile in shared memory, which Gluon splits along the last axis."""

    def split(self):  # pyright: ignore[reportIncompatibleMethodOverride]
        return self[..., 0].as_subclass(Tile), self[..., 1].as_subclass(Tile)

    def load(self, layout):
        return self.clone().as_subclass(Rows)

    def store(self, y):
        self.copy_(y)


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize(("D", "rows"), [(64, 32), (128, 16)])
def test_rows_are_turned_where_they_lie(D, rows, heads):
    """As they are rotated; the last three positions have no row in the tables and become zero."""
    positions = rows // heads
    cos, sin = torch.randn(positions, D + 8), torch.randn(positions, D + 8)
    q = torch.randn(rows, D)
    several = q.reshape(1, positions, heads, D)
    true = rotate(several, cos[None, :, :D], sin[None, :, :D], 0, False)[0]
    true[-3:] = 0
    true = true.flatten(0, 1)
    turned = q.clone().as_subclass(Rows)
    pointers = (Pointer(cos.flatten()), Pointer(sin.flatten()))
    turn_rows = in_python(gluon_tiles.turn_rows, Tensors())
    turn_rows(turned, *pointers, D + 8, 1, positions - 3, D, heads)
    torch.testing.assert_close(turned.as_subclass(torch.Tensor), true)

"""Gradients of linear layers that share their input, by one launch: how its tiles are spread, what
it refuses, that it compiles, and on a Hopper GPU its numbers against fp64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.gluon_reports import compiled, faults, records_of

from inductor_gqa import ops
from inductor_gqa.kernels import linear_backward as joined
from inductor_gqa.kernels.gluon_tiles import WHY_NOT
from inductor_gqa.kernels.linear_backward import NARROW, SLIM, WIDE, Tiling, spread, unusable
from inductor_gqa.kernels.plan import Operand

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
needs_gluon = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
counts = st.integers(0, 3000)
lengths = st.integers(1, 300)


def outer_tiles(share, programs):
    """The outer tiles of every program, as the kernel counts them."""
    for program in range(programs):
        is_hi = program < share.n_hi
        place = program if is_hi else program - share.n_hi
        count = share.q_hi if is_hi else share.q_lo
        extra = share.extra_hi if is_hi else share.extra_lo
        start = 0 if is_hi else share.n_hi * share.q_hi + share.extra_hi
        first = start + place * count + min(place, extra)
        yield range(first, first + count + (place < extra))


@settings(max_examples=300, deadline=None)
@given(n_sums=counts, n_outers=counts, sums=lengths, outers=lengths, programs=st.integers(1, 200))
def test_every_outer_tile_is_computed_once_and_no_program_ends_late(
    n_sums, n_outers, sums, outers, programs
):
    share, end = spread(n_sums, sums, n_outers, outers, programs)
    tiles = list(outer_tiles(share, programs))
    assert [tile for mine in tiles for tile in mine] == list(range(n_outers))
    sum_cost, outer_cost = sums + joined.ENDS, outers + joined.ENDS
    ends = [
        len(range(program, n_sums, programs)) * sum_cost + len(mine) * outer_cost
        for program, mine in enumerate(tiles)
    ]
    assert max(ends) <= end
    mean = sum(ends) / programs
    assert max(ends) <= max(mean + outer_cost, -(-n_sums // programs) * sum_cost)


@pytest.mark.parametrize("tile", [SLIM, NARROW, WIDE])
def test_tiles_cover_every_result(tile):
    tiling = Tiling.of(131, 520, (72, 136), tile)
    across = -(-520 // tile.columns)
    assert tiling.n_sums == 2 * across
    assert tiling.n_outers == (1 + 2) * across
    assert (tiling.sum_steps, tiling.outer_steps) == (2 + 3, 3)


def matrix(rows, columns, pitch=None, dtype=torch.bfloat16, **more):
    return Operand((rows, columns), (columns if pitch is None else pitch, 1), dtype, **more)


def layers(widths=(64, 32), T=40, C=128):
    return [matrix(T, n) for n in widths], [matrix(n, C) for n in widths], matrix(T, C)


def refused(why, change, capability=(9, 0)):
    grads, weights, x = layers()
    if change:
        name, value = change
        grads, weights, x = (
            ([value, *grads[1:]], weights, x)
            if name == "grad"
            else (grads, [value, *weights[1:]], x)
            if name == "weight"
            else (grads, weights, value)
        )
    reason = unusable(grads, weights, x, capability)
    assert reason is not None
    assert why in reason


@needs_gluon
@pytest.mark.parametrize(
    ("why", "change", "capability"),
    [
        ("(8, 0), accepted (9, 0)", None, (8, 0)),
        ("None, accepted (9, 0)", None, None),
        ("torch.float32, accepted", ("x", matrix(40, 128, dtype=torch.float32)), (9, 0)),
        ("torch.float16", ("grad", matrix(40, 64, dtype=torch.float16)), (9, 0)),
        ("strides", ("grad", Operand((40, 64), (1, 40), torch.bfloat16)), (9, 0)),
        ("strides", ("grad", matrix(40, 64, pitch=0)), (9, 0)),
        ("strides", ("weight", matrix(64, 128, pitch=132)), (9, 0)),
        ("strides", ("grad", matrix(40, 64, pitch=192, is_aligned=False)), (9, 0)),
        ("strides", ("weight", matrix(64, 100, pitch=128)), (9, 0)),
        ("shape", ("grad", matrix(0, 64)), (9, 0)),
    ],
)
def test_operands_that_the_kernel_cannot_read_are_refused(why, change, capability):
    refused(why, change, capability)


@needs_gluon
def test_views_of_packed_operands_are_taken():
    packed = [matrix(40, 64, pitch=96), matrix(40, 32, pitch=96)]
    _, weights, x = layers()
    assert unusable(packed, weights, x, (9, 0)) is None


@needs_gluon
def test_more_layers_than_a_launch_takes_are_refused():
    assert "accepted 3" in str(unusable(*layers(widths=(64,) * 4), (9, 0)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_op_on_the_cpu_equals_the_products(dtype):
    grads = [torch.randn(7, n, dtype=dtype) for n in (5, 3)]
    weights = [torch.randn(n, 6, dtype=dtype) for n in (5, 3)]
    x = torch.randn(7, 6, dtype=dtype)
    found = ops.linear_backward(grads, weights, x)
    wanted = truth(grads, weights, x)
    for seen, true, eager in zip(found, wanted, separate(grads, weights, x), strict=True):
        spare = torch.finfo(dtype).eps * true.abs().max()
        assert (seen - true).abs().max() <= (eager - true).abs().max() + spare


def truth(grads, weights, x):
    pairs = zip(grads, weights, strict=True)
    dx = sum(g.double() @ w.double() for g, w in pairs)
    return [dx, *(g.mT.double() @ x.double() for g in grads)]


def separate(grads, weights, x):
    dx = grads[0] @ weights[0]
    for g, w in zip(grads[1:], weights[1:], strict=True):
        dx = dx + g @ w
    return [dx, *(g.mT @ x for g in grads)]


@needs_gluon
@pytest.mark.slow
def test_kernel_compiles_without_faults():
    """Each tile with three layers, of which fewer leave some code out, and the widest with each
    number; dtypes, of which only the name of an instruction depends, alternate."""
    single, double, triple = (5120,), (4096, 1024), (4096, 1024, 1024)

    def records():
        cases = [(tile, triple) for tile in (SLIM, NARROW, WIDE)]
        for j, (tile, widths) in enumerate([*cases, (WIDE, double), (WIDE, single)]):
            dtype = joined.DTYPES[j % len(joined.DTYPES)]
            grads = [matrix(1024, n, dtype=dtype) for n in widths]
            weights = [matrix(n, 4096, dtype=dtype) for n in widths]
            x = matrix(1024, 4096, dtype=dtype)
            plan = joined.plan_linear_backward(grads, weights, x, tile=tile)
            operands = {"x": x} | {f"g{i}": g for i, g in enumerate(grads)}
            operands |= {f"w{i}": w for i, w in enumerate(weights)}
            yield from records_of(f"{tile.columns}-{len(widths)}-{dtype}", plan, operands)

    reports = compiled(records())
    assert len(reports) == 5
    assert [fault for report in reports for fault in faults(report)] == []


@pytest.mark.gpu
@needs_gluon
@pytest.mark.skipif(not IS_HOPPER, reason="no GPU of capability 9.0")
@pytest.mark.parametrize(
    "tile", [SLIM, NARROW, WIDE, None], ids=["slim", "narrow", "wide", "chosen"]
)
@pytest.mark.parametrize("widths", [(72,), (64, 32), (520, 128, 256), (2048, 512, 512)])
@pytest.mark.parametrize("T", [1, 8, 63, 64, 65, 127, 129, 500, 1024])
@pytest.mark.parametrize("is_packed", [False, True], ids=["apart", "packed"])
def test_gradients_on_a_gpu(T, widths, tile, is_packed, monkeypatch):
    dtype = torch.bfloat16 if T % 2 else torch.float16
    torch.manual_seed(T)

    def normal(*shape):
        return torch.randn(shape, device="cuda").to(dtype)

    if is_packed:  # beyond the views lies what must not be read
        packed = normal(T + 1, sum(widths) + 8)
        packed[T:] = packed[:, sum(widths) :] = math.nan
        grads = list(packed[:T].split([*widths, 8], 1)[: len(widths)])
    else:
        grads = [normal(T, n) for n in widths]
    C = 264
    weights, x = [normal(n, C) / 16 for n in widths], normal(T, C)
    plain = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: plain(*a, **k).fill_(math.nan))
    operands = [[Operand.of(y) for y in found] for found in (grads, weights)]
    assert unusable(*operands, Operand.of(x), (9, 0)) is None
    found = joined.linear_backward(grads, weights, x, tile)
    repeated = joined.linear_backward(grads, weights, x, tile)
    assert all(torch.equal(one, other) for one, other in zip(found, repeated, strict=True))
    wanted = truth(grads, weights, x)
    for seen, true, eager in zip(found, wanted, separate(grads, weights, x), strict=True):
        error, allowed = (seen.double() - true).abs(), (eager.double() - true).abs()
        spare = torch.finfo(dtype).eps * true.abs().max()
        assert error.max() <= allowed.max() + spare / 4
        assert error.square().mean() <= 1.05 * allowed.square().mean() + (spare / 64) ** 2

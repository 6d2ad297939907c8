"""The warp-specialised kernel of fp32 layers with one input: when it is chosen, and on a GPU
against fp64, with few programs so that each has many tiles."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernels.test_linear_forward import EPS, HUGE, assert_not_finite_alike, matrix, nearest

from inductor_gqa.kernels import gluon_linear_forward as sm90
from inductor_gqa.kernels import linear_forward as joined
from inductor_gqa.kernels.gluon_forward import execute_sm90
from inductor_gqa.kernels.gluon_tiles import WHY_NOT
from inductor_gqa.kernels.plan import Operand

gpu = pytest.mark.gpu
KINDS = [(precision, tiles) for precision, known in sm90.TILES.items() for tiles in known]
NAMES = [f"{p}-{t.BN}x{t.BK}-{'shared' if t.is_shared else 'own'}" for p, t in KINDS]
each_kind = pytest.mark.parametrize(("precision", "tiles"), KINDS, ids=NAMES)
needs_gluon = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))


def problem(T, C, widths, seed=0):
    make = torch.Generator().manual_seed(seed)
    noise = lambda *shape: torch.randn(*shape, generator=make).cuda()  # noqa: E731
    return noise(T, C), [noise(n, C) for n in widths]


def launched(x, weights, precision, tiles, programs=132):
    plan = sm90.plan_linear_forward_sm90(
        [Operand.of(w) for w in weights], Operand.of(x), precision, programs, tiles
    )
    tensors = {"q": x, "x": x} | {f"w{i}": w for i, w in enumerate(weights)}
    return execute_sm90(plan, tensors)


def faults(x, weights, precision, ours):
    """As for the other kernel: no further off than fp32 matmuls, or for "tf32" than what tensor
    cores lose on rounded operands, which truncate as they add: 6 to 13 times as much in the norm.
    Of operands that were not rounded it would be hundreds."""
    found = []
    for i, (y, w) in enumerate(zip(ours, weights, strict=True)):
        assert (y.shape, y.dtype) == ((x.shape[0], w.shape[0]), torch.float32)
        a, b = (x, w) if precision == "ieee" else (nearest(x).float(), nearest(w).float())
        true = a.double() @ b.double().mT
        error = (y - true).abs().nan_to_num(math.inf).max().item()
        allowed = (a @ b.mT - true).abs().max().item()
        if precision == "tf32":
            allowed *= 32
        floor = 2 * EPS * (a.double().abs() @ b.double().abs().mT).max().item()
        if not error <= max(allowed, floor):
            found.append(f"y{i}: error is {error:.3g}, fp32 {allowed:.3g}, floor {floor:.3g}")
    return found


@gpu
@each_kind
@given(data=st.data())
def test_any_shape(precision, tiles, data):
    T, C = data.draw(st.integers(1, 300)), 4 * data.draw(st.integers(16, 80))
    widths = data.draw(st.lists(st.integers(1, 70).map(lambda n: 4 * n), min_size=1, max_size=3))
    programs = data.draw(st.sampled_from((1, 3, 132)))
    x, weights = problem(T, C, widths, seed=T * C)
    assert faults(x, weights, precision, launched(x, weights, precision, tiles, programs)) == []


@gpu
@each_kind
def test_views_among_garbage(precision, tiles):
    def amid(y):
        wide = torch.full((y.shape[0] + 2, y.shape[1] + 8), math.nan, device="cuda")
        inner = wide[1:-1, 4:-4]
        inner.copy_(y)
        return inner

    x, weights = problem(77, 204, (132, 36))
    views = amid(x), [amid(w) for w in weights]
    assert sm90.unusable([Operand.of(w) for w in views[1]], Operand.of(views[0]), (9, 0)) is None
    assert faults(*views, precision, launched(*views, precision, tiles)) == []


@gpu
@each_kind
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, HUGE])
@pytest.mark.parametrize("side", ["x", "weight"])
def test_what_is_not_finite_passes_through(precision, tiles, value, side):
    """As through a matmul, in the first tile of a program and in a later one."""
    x, weights = problem(300, 132, (68, 100))
    for row in (3, 290):
        (x if side == "x" else weights[0])[row % (300 if side == "x" else 68), 5] = value
    for matrix_ in (x, *weights):
        matrix_[::2] = matrix_[::2].round()
    if value == HUGE:
        (weights[0] if side == "x" else x)[:, 5] = 0.5
    for y, w in zip(launched(x, weights, precision, tiles, 4), weights, strict=True):
        assert_not_finite_alike(y, (x.double() @ w.double().mT).float(), precision)


@gpu
@each_kind
def test_repeated_calls_give_the_same_bits(precision, tiles):
    x, weights = problem(500, 1024, (256, 64))
    first = launched(x, weights, precision, tiles)
    for _ in range(20):
        again = launched(x, weights, precision, tiles)
        assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


@gpu
@pytest.mark.parametrize("precision", sm90.TILES)
@pytest.mark.parametrize("T", [129, 700])
def test_what_the_op_launches_is_right(precision, T):
    x, weights = problem(T, 1024, (1024, 256, 256))
    assert faults(x, weights, precision, joined.linear_forward(x, weights, precision)) == []


@needs_gluon
@pytest.mark.parametrize(
    ("why", "weights", "x", "capability"),
    [
        ("capability", [matrix(8, 64)], matrix(5, 64), (10, 0)),
        ("capability", [matrix(8, 64)], matrix(5, 64), None),
        ("strides", [matrix(8, 66)], matrix(5, 66), (9, 0)),
        ("strides", [matrix(8, 64, strides=(1, 8))], matrix(5, 64), (9, 0)),
        ("strides", [matrix(8, 64)], matrix(5, 64, strides=(0, 1)), (9, 0)),
        ("strides", [matrix(8, 64)], matrix(5, 64, is_aligned=False), (9, 0)),
        ("6 results", [matrix(8, 64), matrix(6, 64)], matrix(5, 64), (9, 0)),
    ],
)
def test_what_it_cannot_compute_is_left_to_the_other(why, weights, x, capability):
    assert why in str(sm90.unusable(weights, x, capability))
    assert not joined.is_gluon(weights, x, "ieee", capability)


@needs_gluon
@pytest.mark.parametrize("T", [128, 2048])
@pytest.mark.parametrize("precision", sm90.TILES)
def test_the_op_takes_the_kernel_that_is_faster(T, precision):
    operands = [matrix(1024, 1024)], matrix(T, 1024)
    is_chosen = joined.is_gluon(*operands, precision, (9, 0))
    assert is_chosen == (precision == "ieee" or T < 1024)
    plan = joined._planned(tuple(operands[0]), operands[1], precision, (9, 0), 132, ())
    name = plan.launches[-1].kernel.fn.__name__
    assert name == ("linear_forward_sm90_kernel" if is_chosen else "linear_forward_kernel")


@pytest.mark.parametrize("precision", sm90.TILES)
@given(T=st.integers(1, 20000), widths=st.lists(st.integers(1, 6000), min_size=1, max_size=3))
def test_tiles_end_first(precision, T, widths):
    ends = lambda t: -(-sm90._count(T, widths, t) // 132) * t.us  # noqa: E731
    chosen = sm90.tiles_of(T, widths, precision, 132)
    assert ends(chosen) == min(map(ends, sm90.TILES[precision]))
    plan = sm90.plan_linear_forward_sm90([matrix(n, 64) for n in widths], matrix(T, 64), precision)
    (launch,) = plan.launches
    rows = 64 if launch.scalars["SHARED"] else 128
    tiles = -(-T // rows) * sum(-(-n // launch.scalars["BN"]) for n in widths)
    assert (launch.scalars["n_tiles"], launch.grid) == (tiles, (min(tiles, 132),))

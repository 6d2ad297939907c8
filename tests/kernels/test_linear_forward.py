"""Linear layers of fp32 with one input in one launch, against fp64: in the interpreter or on a
GPU."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernels.bounds import checked_addresses
from kernels.compile_claims import assert_compiles

from inductor_gqa import ops
from inductor_gqa.kernels import linear_forward as joined
from inductor_gqa.kernels.linear_forward import (
    LONGEST_STRIDE,
    LinearTiles,
    linear_forward,
    linear_tiles,
    plan_linear_forward,
    unusable,
)
from inductor_gqa.kernels.plan import Operand

EPS = torch.finfo(torch.float32).eps
HUGE = torch.finfo(torch.float32).max
WAYS = {
    "registers": {"is_split_before": False},
    "before": {"is_split_before": True},
}
PRECISIONS = ("ieee", "tf32")


@pytest.fixture(autouse=True)
def _unwritten_is_nan(monkeypatch):
    plain = torch.empty_strided
    monkeypatch.setattr(torch, "empty_strided", lambda *a, **k: plain(*a, **k).fill_(math.nan))


def nearest(x):
    """Each value in the eleven bits of tf32, in fp64; halves away from zero."""
    m, e = torch.frexp(x.double())
    return torch.ldexp((m.abs() * 2048 + 0.5).floor() * m.sign() / 2048, e)


def faults(x, weights, precision, **choices):
    """One sentence for each result that is further off than its precision allows: "ieee" as fp32
    matmuls are, "tf32" as fp32 matmuls of the rounded operands, or two roundings of the sums of
    magnitudes."""
    found = []
    ours = linear_forward(x, weights, precision, **choices)
    for i, (y, w) in enumerate(zip(ours, weights, strict=True)):
        assert (y.shape, y.dtype) == ((x.shape[0], w.shape[0]), torch.float32)
        assert y.is_contiguous()
        a, b = (x, w) if precision == "ieee" else (nearest(x).float(), nearest(w).float())
        true = a.double() @ b.double().mT
        error = (y - true).abs().nan_to_num(math.inf).max().item()
        allowed = (a @ b.mT - true).abs().max().item()
        floor = 2 * EPS * (a.double().abs() @ b.double().abs().mT).max().item()
        if not error <= max(allowed, floor):
            found.append(f"y{i}: error is {error:.3g}, fp32 {allowed:.3g}, floor {floor:.3g}")
    return found


def problem(device, T, C, widths, seed=0):
    """On a GPU C is 64 or more in the tests of the kernel: fewer terms are left to matmuls."""
    make = torch.Generator().manual_seed(seed)
    noise = lambda *shape: torch.randn(*shape, generator=make).to(device)  # noqa: E731
    return noise(T, C), [noise(n, C) for n in widths]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("precision", PRECISIONS)
@given(data=st.data())
def test_any_shape(device, precision, way, data):
    T, C = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 70))
    if device != "cpu":
        C += joined.FEWEST_TERMS
    widths = data.draw(st.lists(st.integers(1, 70), min_size=1, max_size=3))
    use_descriptors = data.draw(st.booleans())
    x, weights = problem(device, T, C, widths, seed=T * C)
    assert faults(x, weights, precision, use_descriptors=use_descriptors, **WAYS[way]) == []


@pytest.mark.parametrize("precision", PRECISIONS)
@given(data=st.data())
def test_any_tiles(device, precision, data):
    sizes = [data.draw(st.sampled_from((16, 32, 64))) for _ in range(3)]
    x, weights = problem(device, 35, 82, (20, 36), seed=1)
    tiles = LinearTiles(*sizes, 4, 2)
    assert faults(x, weights, precision, tiles=tiles) == []


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("use_descriptors", [False, True])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_views_among_garbage(device, precision, use_descriptors, way):
    """What lies beside the operands, in memory that is theirs too, is NaN and is not read."""
    T, C, widths = 19, 76, (33, 8)
    x, weights = problem(device, T, C, widths)

    def amid(y):
        wide = torch.full((y.shape[0] + 2, y.shape[1] + 8), math.nan, device=device)
        inner = wide[1:-1, 4:-4]
        inner.copy_(y)
        return inner

    views = amid(x), [amid(w) for w in weights]
    assert faults(*views, precision, use_descriptors=use_descriptors, **WAYS[way]) == []


@pytest.mark.parametrize("precision", PRECISIONS)
def test_any_strides(device, precision):
    """Columns that are not contiguous, rows that are one."""
    x, weights = problem(device, 19, 140, (33, 33))
    turned = [w.mT.contiguous().mT for w in weights]
    assert faults(x.mT.contiguous().mT, turned, precision) == []
    assert faults(x[:1].expand(19, -1), weights, precision, use_descriptors=True) == []
    assert faults(x[:, ::2], [w[:, ::2] for w in weights], precision, use_descriptors=True) == []
    assert (
        faults(x[:, 1:101], [w[:, 1:101] for w in weights], precision, use_descriptors=True) == []
    )


def assert_not_finite_alike(y, wanted, precision):
    """NaN and infinities are where they are wanted, with their signs, and huge values are near."""
    assert torch.equal(y.isnan(), wanted.isnan())
    assert torch.equal(y.isinf(), wanted.isinf())
    assert torch.equal(y.sign().nan_to_num(7)[wanted.isinf()], wanted.sign()[wanted.isinf()])
    large = wanted.isfinite() & (wanted.abs() > 1e30)
    near = (y[large] / wanted[large] - 1).abs()
    assert bool((near <= (4 * EPS if precision == "ieee" else 2**-10)).all())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, HUGE])
@pytest.mark.parametrize("side", ["x", "weight"])
def test_what_is_not_finite_passes_through(device, precision, way, value, side):
    """As through a matmul: infinities do not become NaN in the products with low parts, and the
    largest numbers not infinite by rounding."""
    x, weights = problem(device, 20, 72, (33, 8))
    (x if side == "x" else weights[0])[3, 5] = value
    # Zeros meet the low parts of infinities, values of few bits have low parts of zero.
    for matrix in (x, *weights):
        matrix[::2] = matrix[::2].round()
    if value == HUGE:
        (weights[0] if side == "x" else x)[:, 5] = 0.5
    ours = linear_forward(x, weights, precision, **WAYS[way])
    for y, w in zip(ours, weights, strict=True):
        assert_not_finite_alike(y, (x.double() @ w.double().mT).float(), precision)


@pytest.mark.parametrize("use_descriptors", [False, True])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_no_address_beyond_the_tensors(precision, use_descriptors, monkeypatch, device):
    if device != "cpu":
        pytest.skip("the interpreter checks addresses")
    x, weights = problem("cpu", 21, 52, (33, 8, 65))
    with checked_addresses() as execute:
        monkeypatch.setattr(joined, "execute", execute)
        assert faults(x, weights, precision, use_descriptors=use_descriptors) == []


@pytest.mark.parametrize("precision", PRECISIONS)
def test_repeated_calls_give_the_same_bits(device, precision):
    x, weights = problem(device, 40, 100, (48, 16))
    pairs = zip(*(linear_forward(x, weights, precision) for _ in range(2)), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def matrix(rows, columns, dtype=torch.float32, **more):
    return Operand((rows, columns), more.pop("strides", (columns, 1)), dtype, **more)


@pytest.mark.parametrize(
    ("why", "weights", "x"),
    [
        ("4 layers", [matrix(8, 16)] * 4, matrix(5, 16)),
        ("0 layers", [], matrix(5, 16)),
        ("torch.float16", [matrix(8, 16), matrix(8, 16, torch.float16)], matrix(5, 16)),
        ("torch.float64", [matrix(8, 16)], matrix(5, 16, torch.float64)),
        ("shape is (0, 16)", [matrix(8, 16)], matrix(0, 16)),
        ("shape is (8, 0)", [matrix(8, 0)], matrix(5, 0)),
        ("column strides", [matrix(8, 16), matrix(8, 16, strides=(1, 8))], matrix(5, 16)),
        ("strides are", [matrix(8, 16, strides=(LONGEST_STRIDE + 1, 1))], matrix(5, 16)),
    ],
)
def test_what_the_kernel_cannot_compute_is_refused(why, weights, x):
    assert why in str(unusable(weights, x, None))


def test_sums_of_few_terms_are_left_to_matmuls_on_a_gpu():
    """There fp32 is nearly exact, and tensor cores truncate."""
    for terms, is_refused in ((63, True), (64, False)):
        operands = [matrix(8, terms)], matrix(5, terms)
        assert (unusable(*operands, (9, 0)) is not None) is is_refused
        assert unusable(*operands, None) is None


def test_what_is_refused_is_multiplied_one_by_one(device):
    x, weights = problem(device, 5, 16, (8, 4, 3, 2))
    for y, w in zip(linear_forward(x, weights, "ieee"), weights, strict=True):
        assert torch.equal(y, x @ w.mT)


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)])
@pytest.mark.parametrize("precision", PRECISIONS)
@given(T=st.integers(1, 20000), widths=st.lists(st.integers(1, 6000), min_size=1, max_size=3))
def test_tiles_occupy_the_device_where_there_are_enough(precision, capability, T, widths):
    chosen = linear_tiles(T, widths, precision, capability, 132)
    known = joined.TILES[precision]
    count = lambda t: -(-T // t.BM) * sum(-(-n // t.BN) for n in widths)  # noqa: E731
    assert chosen in known
    enough = 132 * joined.ROUNDS[precision]
    assert count(chosen) >= enough or chosen == known[-1]
    assert all(count(t) < enough for t in known[: known.index(chosen)])


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("T", [128, 8192])
def test_rows_that_are_not_aligned_have_tiles_of_their_own(precision, T):
    def tiles(C, capability=(9, 0), **more):
        plan = plan_linear_forward(
            [matrix(1024, C)], matrix(T, C, **more), precision, capability, is_split_before=False
        )
        launch = plan.launches[0]
        sizes = (launch.scalars[name] for name in ("BM", "BN", "BK"))
        return LinearTiles(*sizes, launch.num_warps, launch.num_stages)

    assert tiles(1004) == linear_tiles(T, [1024], precision, (9, 0), 132)
    assert tiles(1024, (8, 0)) == tiles(1004)
    assert tiles(1004, (8, 0)) == tiles(1021, (8, 0)) == joined.UNALIGNED[precision]
    assert tiles(1021) == tiles(1004, is_aligned=False) == joined.UNALIGNED[precision]


def test_descriptors_go_by_device_and_strides():
    def is_described(x, capability):
        plan = plan_linear_forward([matrix(64, 36)], x, "ieee", capability)
        return bool(plan.launches[0].descriptors)

    assert is_described(matrix(8, 36), (9, 0))
    assert not is_described(matrix(8, 36), (8, 0))
    assert not is_described(matrix(8, 36, is_aligned=False), (9, 0))
    assert not is_described(matrix(8, 36, strides=(38, 1)), (9, 0))
    assert not is_described(matrix(8, 36, strides=(1, 8)), (9, 0))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_op_on_the_cpu_equals_the_matmuls(precision):
    x, weights = problem("cpu", 7, 6, (5, 3))
    for y, w in zip(ops.linear_forward(x, weights, precision), weights, strict=True):
        assert torch.equal(y, x @ w.mT)


def test_op_keeps_the_rules_of_an_op():
    x, weights = problem("cpu", 7, 6, (5, 3))
    torch.library.opcheck(ops.linear_forward, (x, weights, "ieee"))


def test_flops_are_those_of_the_matmuls():
    from torch.utils.flop_counter import FlopCounterMode

    x, weights = problem("cpu", 7, 6, (5, 3))
    with FlopCounterMode(display=False) as ours:
        ops.linear_forward(x, weights, "ieee")
    with FlopCounterMode(display=False) as theirs:
        _ = [x @ w.mT for w in weights]
    assert ours.get_total_flops() == theirs.get_total_flops() > 0


@pytest.mark.slow
@pytest.mark.parametrize("sm", [80, 90, 100])
def test_kernels_fit_registers_and_shared_memory(sm):
    """Three layers in each tile: one layer takes no more registers or shared memory."""
    cases = []
    for precision, known in joined.TILES.items():
        for tiles in known:
            sizes = "x".join(map(str, tiles))
            cases.append(f"linear-C1024-fp32-T512-{precision}-tiles{sizes}")
        cases.append(f"linear-C1024-fp32-T512-{precision}-ready-tiles128x64x32x8x2")
        cases.append(f"linear-C1021-fp32-T500-{precision}")
    assert_compiles(sm, cases)

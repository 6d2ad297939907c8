"""The sm_90 forward that returns its weights: what it takes, how K and V are prepared for it, its
results on a Hopper GPU."""

import dataclasses

import pytest
import torch
from kernels.weights_cases import errors_of, make_case, results, rounded_case

from inductor_gqa.kernels.forward import collect
from inductor_gqa.kernels.gluon_tiles import WHY_NOT
from inductor_gqa.kernels.gluon_weights_forward import (
    ForwardConfig,
    groups_of,
    plan_weights_forward_sm90,
    turns_queries,
    unusable,
    weights_forward_sm90,
)
from inductor_gqa.kernels.plan import Attention, Operand, Plan, execute
from inductor_gqa.kernels.weights_prepare import preparation

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
gpu = pytest.mark.gpu
hopper = pytest.mark.skipif(not IS_HOPPER, reason="no GPU of capability 9.0")
has_gluon = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
FP32 = torch.float32


def subject(B=1, L=512, S=None, K=4, R=4, D=64, E=64, dtype=FP32, tables=None, **numbers):
    S = S or L
    tensors = {
        "q": Operand.contiguous((B, L, K, R, D), dtype),
        "k": Operand.contiguous((B, S, K, D), dtype),
        "v": Operand.contiguous((B, S, K, E), dtype),
    } | (tables or {})
    numbers = {"precision": "tf32", "capability": (9, 0)} | numbers
    return Attention(tensors, numbers.pop("scale", 1.0), **numbers)


@has_gluon
def test_says_why_it_is_unusable():
    assert unusable(subject(), FP32) is None
    assert unusable(subject(precision="ieee", band_hi=0, band_lo=-9), FP32) is None
    mask = {"mask": Operand.contiguous((1, 4, 4, 512, 512), torch.bool)}
    for refused, dtype, word in (
        (subject(capability=(8, 0)), FP32, "capability"),
        (subject(dtype=torch.bfloat16), FP32, "dtypes"),
        (subject(), torch.bfloat16, "dtypes"),
        (subject(D=128), FP32, "head dim"),
        (subject(E=32), FP32, "head dim"),
        (subject(tables=mask), FP32, "rules"),
        (subject(scale=-1.0), FP32, "rules"),
        (subject(band_hi=0, fill=-1e4), FP32, "rules"),
        (subject(band_hi=-3, fill=-1e38), FP32, "rules"),  # rows without a key are uniform
        (subject(S=2**25), FP32, "lengths"),
    ):
        assert word in str(unusable(refused, dtype))


def test_groups_rotate_queries_where_tables_are_plain():
    table = Operand.contiguous((1, 512, 64), FP32)
    tables = {"cos_q": table, "sin_q": table}
    assert turns_queries(subject(tables=tables))
    assert not turns_queries(subject())
    assert not turns_queries(subject(tables=tables, rope_interleaved=True))
    half = Operand.contiguous((1, 512, 32), FP32)
    assert not turns_queries(subject(tables={"cos_q": half, "sin_q": half}))
    broadcast = dataclasses.replace(table, strides=(0, 64, 1))
    assert not turns_queries(subject(tables={"cos_q": table, "sin_q": broadcast}))
    plan = plan_weights_forward_sm90(subject(tables={"cos_q": half, "sin_q": half}))
    assert "q_prepared" in plan.allocate
    assert "q_prepared" not in plan_weights_forward_sm90(subject(tables=tables)).allocate


def test_programs_are_small_where_there_are_few():
    assert groups_of(subject(L=128), 132) == 1
    assert groups_of(subject(B=4, L=256), 132) == 2
    assert groups_of(subject(B=16, L=4096), 132) == 3
    assert groups_of(subject(B=16, L=4096, S=4097), 132) == 2
    assert groups_of(subject(B=16, L=4096, precision="ieee"), 132) == 2


@pytest.mark.parametrize("precision", ["tf32", "ieee"])
def test_queries_turned_beforehand_keep_all_their_bits(device, precision):
    case = make_case(device, L=40, S=40, D=64, E=64, W=32)
    names = ("cos_q", "sin_q", "cos_k", "sin_k")
    given, attention = collect(
        {"q": case.q, "k": case.k, "v": case.v} | {name: case.keywords[name] for name in names},
        {"scale": 0.3, "precision": precision},
    )
    parts = 1 if precision == "tf32" else 2
    scratch, launch = preparation(attention, dict.fromkeys("qkv", True), True, parts, True)
    (q,) = execute(Plan(scratch, (launch,), ("q_prepared",)), given)
    cos, sin = (case.keywords[f"{x}_q"].double()[:, :, None, None] for x in ("cos", "sin"))
    x = case.q.double()
    turned = torch.cat((-x[..., 16:32], x[..., :16]), -1)
    true = torch.cat((x[..., :32] * cos + turned * sin, x[..., 32:]), -1)
    assert (q.double() - true).abs().max() <= 2.0**-22 * true.abs().max()


@pytest.mark.parametrize("W", [None, 64])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("S", [45, 64])
def test_parts_of_keys_and_values_add_up(device, S, parts, W):
    """The rounded part holds ten bits, the rest makes fp32 of it up to the last two bits."""
    case = make_case(device, S=S, L=S, D=64, E=64, W=W)
    given, attention = collect(
        {"q": case.q, "k": case.k, "v": case.v}
        | {name: x for name, x in case.keywords.items() if name[:4] in ("cos_", "sin_")},
        {"scale": 0.3, "precision": "tf32" if parts == 1 else "ieee"},
    )
    wants = {"q": False, "k": True, "v": True}
    scratch, launch = preparation(attention, wants, True, parts, is_paired=True)
    k, v = execute(Plan(scratch, (launch,), ("k_prepared", "v_prepared")), given)
    B, K = case.v.shape[0], case.v.shape[2]
    assert v.shape == (parts, B, K, 64, 48 if S == 45 else 64)
    assert v.shape[-1] == S or v[..., -1].count_nonzero() == 0
    for x in (k, v):
        assert torch.equal(x, ((x.view(torch.int32) >> 13) << 13).view(torch.float32))
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7], device=device)
    keys = (torch.arange(0, v.shape[-1], 8, device=device)[:, None] + order).flatten()
    unpaired = torch.empty_like(v)
    unpaired[..., keys] = v
    true_k = case.k.double()
    if W:
        cos, sin = (case.keywords[f"{x}_k"].double()[:, :, None] for x in ("cos", "sin"))
        turned = torch.cat((-true_k[..., 32:], true_k[..., :32]), -1)
        true_k = true_k * cos + turned * sin
    true_v = case.v.double().permute(0, 2, 3, 1)
    for x, true in ((k, true_k), (unpaired[..., :S], true_v)):
        size = 2.0**-11 if parts == 1 else 2.0**-22
        floor = 2.0**-22 * true.abs().max()  # of rounding a rotated key to fp32
        assert ((x.double().sum(0) - true).abs() <= size * true.abs() + floor).all()


def ours(case, precision, groups=0, slots=0):
    names = ("cos_q", "sin_q", "cos_k", "sin_k")
    tables = {name: case.keywords.get(name) for name in names}
    numbers = {name: x for name, x in case.keywords.items() if name not in names}
    given, attention = collect(
        {"q": case.q, "k": case.k, "v": case.v} | tables, numbers | {"precision": precision}
    )
    return weights_forward_sm90(attention, given, 132, ForwardConfig(groups, slots))


def faults(case, precision, made):
    """Beside eager; tf32 beside the same with exact sums of rounded operands, and P rounded."""
    if precision == "ieee":
        return errors_of(case, made)
    return errors_of(case, made, 2.0**-11, results(rounded_case(case), torch.float64))


@pytest.fixture
def nan_filled(monkeypatch):
    """Memory that is not written shows."""
    plain = torch.empty

    def empty(*args, **keywords):
        x = plain(*args, **keywords)
        return x.fill_(float("nan")) if x.is_floating_point() else x

    monkeypatch.setattr(torch, "empty", empty)


@gpu
@hopper
@has_gluon
@pytest.mark.usefixtures("nan_filled")
@pytest.mark.parametrize("precision", ["tf32", "ieee"])
class TestOnHopper:
    @pytest.mark.parametrize("W", [None, 64, 32], ids=["bare", "rope", "half"])
    @pytest.mark.parametrize("L", [1, 63, 64, 65, 131, 256, 449])
    def test_equals_fp64_at_any_length(self, L, W, precision):
        case = make_case("cuda", K=4, R=4, L=L, S=L, D=64, E=64, W=W, seed=L)
        assert faults(case, precision, ours(case, precision)) == []

    @pytest.mark.parametrize(
        "rules", [("causal",), ("causal", "window"), ("window",), ("early",)], ids="-".join
    )
    @pytest.mark.parametrize(("L", "S"), [(1, 200), (100, 333), (333, 100), (256, 256)])
    def test_hides_what_a_band_hides(self, L, S, rules, precision):
        case = make_case("cuda", L=L, S=S, D=64, E=64, W=64, rules=rules)
        assert faults(case, precision, ours(case, precision)) == []

    @pytest.mark.parametrize("groups", [1, 2, 3])
    @pytest.mark.parametrize("slots", [2, 4])
    def test_configurations_change_no_bit(self, groups, slots, precision):
        case = make_case("cuda", B=3, K=4, R=4, L=520, S=521, D=64, E=64, W=64)
        first = ours(case, precision)
        assert faults(case, precision, first) == []
        again = ours(case, precision, groups, slots)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))

    @pytest.mark.parametrize("R", [1, 3, 8])
    def test_equals_fp64_over_many_tiles(self, R, precision):
        case = make_case("cuda", B=4, K=8, R=R, L=700, S=900, D=64, E=64, W=64)
        assert faults(case, precision, ours(case, precision)) == []

    def test_twenty_runs_give_the_same_bits(self, precision):
        case = make_case("cuda", B=2, K=4, R=4, L=1024, S=1024, D=64, E=64, W=64)
        first = ours(case, precision)
        for _ in range(20):
            again = ours(case, precision)
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))

    def test_a_nan_stays_in_its_rows(self, precision):
        case = make_case("cuda", L=130, S=130, D=64, E=64)
        case.q[0, 7] = float("nan")
        case.v[1, 9] = float("nan")
        out, weights, _ = ours(case, precision)
        assert out[0, 7].isnan().all()
        assert weights[0, :, :, 7].isnan().all()
        assert out[1].isnan().all()
        keep = [row for row in range(130) if row != 7]
        assert torch.isfinite(out[0, keep]).all()
        assert torch.isfinite(weights[1]).all()

"""The sm_90 backward from given weights: what it takes, its plain kernels, its gradients on a
Hopper GPU."""

import dataclasses
import math

import pytest
import torch
from kernels.compile_claims import assert_compiles
from kernels.test_weights_backward import errors_of, make_case

from inductor_gqa.kernels.gluon_tiles import WHY_NOT
from inductor_gqa.kernels.gluon_weights import (
    Sm90Config,
    plan_weights_backward_sm90,
    split_of,
    unusable,
    weights_backward_sm90,
)
from inductor_gqa.kernels.plan import Operand, Plan, execute
from inductor_gqa.kernels.weights_backward import WeightsBackward, subject_of

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
gpu = pytest.mark.gpu
hopper = pytest.mark.skipif(not IS_HOPPER, reason="no GPU of capability 9.0")
has_gluon = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
ALL = (True, True, True)
NAMES = ("grad_out", "weights", "q", "k", "v")
BF16 = torch.bfloat16


def subject(B=1, L=1024, S=None, H=32, group=4, D=128, **changes):
    S = S or L
    tensors = {
        "grad_out": Operand.contiguous((B, L, H, D), BF16),
        "weights": Operand.contiguous((B, H, L, S), BF16),
        "q": Operand.contiguous((B, L, H, D), BF16),
        "k": Operand.contiguous((B, S, H, D), BF16),
        "v": Operand.contiguous((B, S, H, D), BF16),
    }
    return WeightsBackward(tensors | changes, 0.1, group, capability=(9, 0))


@has_gluon
def test_says_why_it_is_unusable():
    assert unusable(subject(), ALL) is None
    assert unusable(subject(L=691), ALL) is None
    table = Operand.contiguous((1, 1024, 64), BF16)
    near_misses = {
        "capability": dataclasses.replace(subject(), capability=(10, 0)),
        "head dim": subject(D=96),
        "dtypes": subject(weights=Operand.contiguous((1, 32, 1024, 1024), torch.float32)),
        "lanes": subject(cos_k=table, sin_k=table),
        "grad_out: strides": subject(grad_out=Operand((1, 1024, 32, 128), (0, 0, 128, 1), BF16)),
        "q: first byte": subject(
            q=Operand((1, 1024, 32, 128), (32 * 131072, 4096, 128, 1), BF16, is_aligned=False)
        ),
    }
    for words, case in near_misses.items():
        assert words in unusable(case, ALL)
    assert "all three" in unusable(subject(), (True, True, False))


@has_gluon
def test_shares_a_group_where_the_device_would_idle():
    assert [split_of(subject(L=L), 132) for L in (128, 512, 691, 1024, 2048)] == [4, 4, 2, 2, 1]
    assert split_of(subject(group=1, L=512), 132) == 1
    assert split_of(subject(group=3, H=33, L=512), 132) == 1


@has_gluon
def test_copies_only_weights_that_the_copy_engine_cannot_read():
    def copies(case):
        return "copy" in plan_weights_backward_sm90(case).allocate

    assert not copies(subject())
    assert not copies(subject(weights=Operand((1, 32, 1024, 1024), (1, 2**21, 2048, 1), BF16)))
    assert copies(subject(L=691))
    assert copies(subject(weights=Operand((1, 32, 1024, 1024), (2**20, 2**20, 0, 1), BF16)))
    assert copies(subject(weights=Operand((1, 32, 1024, 1024), (2**25, 2**20, 1, 1024), BF16)))


def plain_launch(plan, name, tensors):
    """Results of one launch of a plan, given what the launches before it would have made."""
    (launch,) = (x for x in plan.launches if x.kernel.fn.__name__ == name)
    slots = {**launch.tensors}.values()
    made = {key: x for key, x in plan.allocate.items() if key in slots and key not in tensors}
    part = Plan(made, (launch,), tuple(made))
    return dict(zip(made, execute(part, tensors), strict=True))


@has_gluon
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("has_rope", [False, True])
def test_gathers_shares(device, has_rope, is_packed):
    B, S, H, group, D = 2, 70, 8, 4, 64
    case = make_case(
        device, B=B, H=H, group=group, L=S, S=S, D=D, E=D, dtype="bf16", W=D if has_rope else None
    )
    tensors = dict(zip(NAMES, case.inputs, strict=True))
    tables = {x: case.keywords[x] for x in ("cos_q", "sin_q", "cos_k", "sin_k") if has_rope}
    tensors, whole = subject_of(tensors | tables, 0.3, group)
    plan = plan_weights_backward_sm90(whole, 132, is_packed, Sm90Config(split=2))
    shares = {
        name: torch.randn(B, H // group, 2, 128, D, device=device).flatten(0, 2)
        for name in ("dk_part", "dv_part")
    }
    made = plain_launch(plan, "gather_kernel", tensors | shares)
    dk, dv = (
        x.unflatten(0, (B, H // group, 2)).sum(2)[:, :, :S].transpose(1, 2).double()
        for x in shares.values()
    )
    dk = dk * 0.3
    if has_rope:
        cos, sin = (case.keywords[x].double()[:, :, None] for x in ("cos_k", "sin_k"))
        shared = dk * sin
        half = D // 2
        dk = dk * cos + torch.cat((shared[..., half:], -shared[..., :half]), -1)
    if is_packed:
        K = H // group
        parts = made["packed"].split((H * D, K * D, K * D), -1)
        made = {"dk": parts[1].view(B, S, K, D), "dv": parts[2].view(B, S, K, D)}
    for x, true in ((made["dk"], dk), (made["dv"], dv)):
        assert (x.double() - true).abs().max() <= 2**-8 * true.abs().max()


@has_gluon
@pytest.mark.parametrize("layout", ["BLHD", "one row for all", "wide rows"])
@pytest.mark.parametrize("L", [1, 33, 150])
def test_copied_weights_are_those_given(device, L, layout):
    case = make_case(device, B=2, H=4, group=4, L=L, S=L, D=64, E=64, dtype="bf16", layout=layout)
    tensors, whole = subject_of(dict(zip(NAMES, case.inputs, strict=True)), 0.3, 4)
    plan = plan_weights_backward_sm90(whole)
    made = plain_launch(plan, "pitch_kernel", tensors)["copy"]
    assert torch.equal(made[..., :L], tensors["weights"])


@pytest.mark.slow
@has_gluon
def test_plain_kernels_fit_registers():
    assert_compiles(90, ["backward-D128-bf16-L691-rope-gathered"])


@pytest.fixture
def nan_filled(monkeypatch):
    """A row that a kernel forgets shows."""
    plain = torch.empty

    def empty(*args, **keywords):
        x = plain(*args, **keywords)
        return x.fill_(math.nan) if x.is_floating_point() else x

    monkeypatch.setattr(torch, "empty", empty)


def ours(case, is_packed=False, config=None):
    named = dict(zip(NAMES, case.inputs, strict=True)) | {
        name: x for name, x in case.keywords.items() if name[:4] in ("cos_", "sin_")
    }
    tensors, whole = subject_of(named, case.keywords["scale"], case.keywords["group"])
    return weights_backward_sm90(whole, tensors, is_packed, config)


def wide_case(D=128, dtype="bf16", **sizes):
    return make_case("cuda", D=D, E=D, dtype=dtype, **sizes)


@gpu
@hopper
@has_gluon
@pytest.mark.usefixtures("nan_filled")
class TestOnHopper:
    @pytest.mark.parametrize("D", [64, 128])
    @pytest.mark.parametrize("W", [True, False], ids=["rope", "bare"])
    @pytest.mark.parametrize("L", [1, 63, 64, 65, 128, 131, 256, 449, 1000])
    def test_equals_fp64_at_any_length(self, L, W, D):
        case = wide_case(D, B=2, H=8, L=L, S=L, W=D if W else None, seed=L)
        assert errors_of(case, ours(case)) == []
        assert errors_of(case, ours(case, is_packed=True)) == []

    @pytest.mark.parametrize(("L", "S"), [(1, 1000), (65, 129), (300, 1111), (1111, 300)])
    def test_equals_fp64_where_keys_are_not_queries(self, L, S):
        case = wide_case(B=2, H=8, L=L, S=S, W=128, has_flat_tables=False)
        assert errors_of(case, ours(case)) == []

    @pytest.mark.parametrize("layout", ["BLHD", "BHLD", "one row for all", "wide rows"])
    @pytest.mark.parametrize("L", [256, 300, 301])
    def test_strides_are_free(self, L, layout):
        case = wide_case(B=2, H=8, L=L, S=L, W=128, layout=layout)
        assert errors_of(case, ours(case)) == []

    @pytest.mark.parametrize("split", [1, 2, 4])
    @pytest.mark.parametrize(("slots", "held"), [(3, 2), (4, 1), (2, 2)])
    def test_configurations_change_no_gradient(self, split, slots, held):
        case = wide_case(B=2, H=8, L=520, S=520, W=128)
        assert errors_of(case, ours(case, config=Sm90Config(slots, held, split))) == []

    @pytest.mark.parametrize("group", [1, 2, 3, 8])
    def test_sums_over_groups_of(self, group):
        case = wide_case(B=3, H=2 * group, group=group, L=200, S=200, W=128)
        assert errors_of(case, ours(case)) == []

    def test_equals_fp64_over_many_tiles(self):
        case = wide_case(B=4, H=32, L=700, S=900, W=128)
        assert errors_of(case, ours(case)) == []

    def test_weights_and_values_as_attention_has_them(self):
        """Rows that sum to one, values that have much in common: delta then cancels most of dP."""
        case = wide_case(B=1, H=8, L=512, S=512, W=128)
        g, w, q, k, v = case.inputs
        v = (0.05 * v.float() + 3 * torch.randn(1, 1, 8, 128, device="cuda")).to(BF16)
        case.inputs = (g, w.float().softmax(-1).to(BF16), q, k, v)
        assert errors_of(case, ours(case)) == []

    def test_twenty_runs_give_the_same_bits(self):
        case = wide_case(B=1, H=32, L=1024, S=1024, W=128)
        first = ours(case)
        for _ in range(20):
            assert all(torch.equal(a, b) for a, b in zip(first, ours(case), strict=True))

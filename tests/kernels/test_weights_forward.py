"""The forward that returns its weights against the oracle, in the interpreter or on a GPU."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernels.compile_claims import assert_compiles
from kernels.oracle import Case, attended
from kernels.weights_cases import (
    DTYPES,
    FLOOR_IN_EPS,
    errors_of,
    make_case,
    results,
    rounded,
    slips_of,
)

from inductor_gqa.kernels.configs import Tiles
from inductor_gqa.kernels.plan import Attention, Operand
from inductor_gqa.kernels.weights_forward import plan_weights_forward, weights_forward

WHOLE = Tiles(16, 64, 4, 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("L", [1, 32, 45])
def test_weights_equal_the_oracle(device, dtype, L):
    case = make_case(device, L=L, S=L, dtype=dtype, W=32, seed=L)
    assert errors_of(case, weights_forward(case.q, case.k, case.v, **case.keywords)) == []


def test_the_rule_allows_what_the_rounding_of_rotated_operands_does():
    """Predicted deviations beside those of rotated q and k with relative noise of one rounding."""
    case = make_case("cpu", B=1, K=1, L=6, S=5, W=32, dtype="bf16", seed=3)
    _, _, q, k, _ = attended(case.q, case.k, case.v, dtype=torch.float64, **case.keywords)
    plain = {name: x for name, x in case.keywords.items() if name[:4] not in ("cos_", "sin_")}
    true = results(Case(q, k, case.v, plain), torch.float64)
    noise = torch.Generator().manual_seed(0)
    squares = [torch.zeros_like(x) for x in true]
    for _ in range(1000):
        near = [
            x * (1 + (torch.rand(x.shape, generator=noise) - 0.5) * torch.finfo(torch.bfloat16).eps)
            for x in (q, k)
        ]
        for total, x, y in zip(
            squares, results(Case(*near, case.v, plain), torch.float64), true, strict=True
        ):
            total += (x - y).square() / 1000
    measured = [x.max().sqrt().item() for x in squares]
    assert [4 * x for x in measured] == pytest.approx(slips_of(case), rel=0.1)


RULES = [
    ("causal",), ("causal", "window"), ("early",), ("early", "lowest"), ("causal", "padded"),
    ("causal", "padded", "lowest"), ("causal", "padded", "lowest", "adds"),
    ("causal", "finite", "adds"),
    ("early", "padded", "finite"), ("mask",), ("mask", "causal", "lowest"), ("bias", "causal"),
]  # fmt: skip


@pytest.mark.parametrize("is_whole", [True, False], ids=["whole-rows", "two-passes"])
@pytest.mark.parametrize("rules", RULES, ids="-".join)
def test_hidden_keys_weigh_what_eager_gives_them(device, rules, is_whole):
    case = make_case(device, rules=rules, L=40, S=45)
    tiles = WHOLE if is_whole and device == "cpu" else None
    assert (
        errors_of(case, weights_forward(case.q, case.k, case.v, **case.keywords, tiles=tiles)) == []
    )


@pytest.mark.parametrize("R", [1, 3, 4])
def test_groups_share_keys(device, R):
    case = make_case(device, R=R, L=37, dtype="bf16")
    assert errors_of(case, weights_forward(case.q, case.k, case.v, **case.keywords)) == []


@pytest.mark.parametrize(
    ("W", "start", "is_interleaved"), [(40, 0, True), (16, 8, False), (8, 24, True)]
)
def test_turns_just_the_lanes_it_should(device, W, start, is_interleaved):
    case = make_case(device, D=40, W=W, start=start, is_interleaved=is_interleaved)
    assert errors_of(case, weights_forward(case.q, case.k, case.v, **case.keywords)) == []


def test_weights_come_in_fp32_beside_bf16_inputs(device):
    case = make_case(device, dtype="bf16", rules=("causal",))
    out, weights, lse = weights_forward(
        case.q, case.k, case.v, **case.keywords, weights_dtype=torch.float32
    )
    assert weights.dtype == torch.float32
    assert out.dtype == torch.bfloat16
    assert errors_of(case, (out, weights, lse)) == []
    sums = weights.double().sum(-1)
    assert (sums - 1).abs().max().item() <= FLOOR_IN_EPS * torch.finfo(torch.float32).eps
    assert weights.triu(1).count_nonzero().item() == 0


@pytest.mark.parametrize("rules", [(), ("causal", "padded", "lowest")])
@pytest.mark.parametrize("W", [None, 32])
def test_tf32_rounds_each_operand_to_nearest(device, rules, W):
    """Ten mantissa bits, so at most half of 2**-10 off: a truncating product would fail where
    all inputs lie just below."""
    case = make_case(device, W=W, rules=rules, L=45, S=45)
    ours = weights_forward(case.q, case.k, case.v, **case.keywords, precision="tf32")
    assert errors_of(case, ours, eps=2.0**-9) == []
    if W is None:
        exact = Case(rounded(case.q), rounded(case.k), rounded(case.v), case.keywords)
        lse = results(exact, torch.float64)[2]
        is_clear = torch.isfinite(lse)
        assert (ours[2].double() - lse)[is_clear].abs().max().item() <= 2e-6 * lse[
            is_clear
        ].abs().max().item()


@pytest.mark.parametrize("S", [32, 45])
def test_takes_rounded_operands_and_a_turned_v_as_they_lie(device, S):
    case = make_case(device, L=S, S=S)
    q, k, v = (rounded(x) for x in (case.q, case.k, case.v))
    pad = torch.full((*v.shape[:1], *v.shape[2:], 48), float("nan"), device=device)
    pad[..., :S] = v.permute(0, 2, 3, 1)
    turned = pad[..., :S].permute(0, 3, 1, 2)
    ours = weights_forward(q, k, turned, **case.keywords, precision="tf32", is_rounded=True)
    assert errors_of(Case(q, k, v, case.keywords), ours, eps=2.0**-9) == []
    operands = {name: Operand.of(x) for name, x in (("q", q), ("k", k), ("v", turned))}
    subject = Attention(operands, 0.3, precision="tf32")
    assert len(plan_weights_forward(subject, torch.float32, is_rounded=True).launches) == 1


@pytest.mark.parametrize("D", [80, 128, 160, 256])
def test_few_probabilities_over_many_lanes_are_as_exact_as_eager(device, D):
    """Where two rows see five keys, no other error hides that of a single score. In the mean of
    draws: of so few values eager's own error is by chance at times half its usual size."""
    ours, eager = [], []
    for seed in range(12):
        case = make_case(device, B=1, K=1, R=2, L=2, S=5, D=D, E=16, rules=("causal",), seed=seed)
        _, weights, _ = weights_forward(case.q, case.k, case.v, **case.keywords)
        (_, true, _), (_, near, _) = (results(case, x) for x in (torch.float64, torch.float32))
        ours.append((weights.double() - true).square().mean())
        eager.append((near.double() - true).square().mean())
    error, allowed = (torch.stack(x).mean().sqrt().item() for x in (ours, eager))
    assert error <= 2 * allowed, f"error is {error:.3g}, eager {allowed:.3g}"


@given(data=st.data())
def test_equals_the_oracle_at_any_size(data, device):
    sizes = {
        "B": data.draw(st.integers(1, 2)),
        "K": data.draw(st.integers(1, 2)),
        "R": data.draw(st.integers(1, 3)),
    }
    sizes |= {"L": data.draw(st.integers(1, 70)), "S": data.draw(st.integers(1, 70))}
    sizes |= {
        "D": data.draw(st.sampled_from([16, 24, 32])),
        "E": data.draw(st.sampled_from([16, 40])),
    }
    rules = data.draw(st.sampled_from([(), *RULES]))
    case = make_case(device, **sizes, dtype=data.draw(st.sampled_from(list(DTYPES))), rules=rules)
    assert errors_of(case, weights_forward(case.q, case.k, case.v, **case.keywords)) == []


# Bytes a thread, of exact products; on sm_90 by time, see `weights_forward_tiles`.
KEPT_OUTSIDE = {
    80: {"forward-D96-fp32-L1024-rope": 8},
    90: {
        "forward-D64-fp32-L541-rope": 72,
        "forward-D96-fp32-L1024-rope": 48,
        "forward-D128-fp32-L1024-causal-padded": 72,
    },
    100: {"forward-D64-fp32-L541-rope": 24},
}


@pytest.mark.parametrize("sm", KEPT_OUTSIDE)
def test_kernels_fit_registers_and_shared_memory(sm):
    cases = ["D64-fp32-L1024-rope-tf32", "D64-fp32-L211-rope-tf32", "D64-fp32-L541-rope"]
    cases += ["D64-fp32-L541-tf32-causal-padded-doubles", "D128-bf16-L691-causal-bias"]
    cases += ["D128-fp32-L1024-causal-padded", "D96-fp32-L1024-rope"]
    cases += ["D128-fp32-L1024-rope-tf32", "D96-fp32-L1024-causal-tf32"]
    assert_compiles(sm, [f"forward-{case}" for case in cases], kept_outside=KEPT_OUTSIDE[sm])

"""The warp-specialised kernels on a Hopper GPU against fp64, outputs NaN beforehand."""

import math

import pytest
import torch
from kernels.bounds import deterministic_algorithms
from kernels.oracle import Case, errors_of

from inductor_gqa.kernels.forward import attention_forward
from inductor_gqa.kernels.gluon_backward import attention_backward_sm90
from inductor_gqa.kernels.gluon_forward import Switches, attention_forward_sm90
from inductor_gqa.kernels.gluon_tiles import WHY_NOT

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT)),
    pytest.mark.skipif(not IS_HOPPER, reason="no GPU of capability 9.0"),
]
LENGTHS = (1, 63, 64, 65, 129, 1000)
LOWEST = torch.finfo(torch.bfloat16).min
# Head dims with each number of groups that multiply and of heads in a tile.
TILES = pytest.mark.parametrize(
    ("D", "groups", "heads"),
    [(64, 2, 1), (64, 2, 2), (64, 3, 1), (64, 3, 4), (128, 2, 1), (128, 2, 4), (256, 2, 1)],
)


@pytest.fixture(autouse=True)
def nan_filled(monkeypatch):
    """A row that a kernel forgets shows."""
    plain = torch.empty

    def empty(*args, **keywords):
        x = plain(*args, **keywords)
        return x.fill_(math.nan) if x.is_floating_point() else x

    monkeypatch.setattr(torch, "empty", empty)


def normal(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, device="cuda").to(dtype)


def case_of(B, L, S, K, R, D, dtype=torch.bfloat16, **keywords):
    q, k, v = normal(B, L, K, R, D), normal(B, S, K, D), normal(B, S, K, D)
    keywords = {"scale": D**-0.5} | keywords
    return Case(q.to(dtype), k.to(dtype), v.to(dtype), keywords)


def errors(case, switches=None):
    switches = switches or Switches()
    out, lse = attention_forward_sm90(case.q, case.k, case.v, switches=switches, **case.keywords)
    return errors_of(case, {"out": out, "lse": lse})


def tables(B, N, D, dtype=torch.float32):
    """cos and sin of full width whose halves differ: no column may stand in for another."""
    angles = torch.rand(B, N, D, device="cuda") * 6
    return angles.cos().to(dtype), angles.sin().to(dtype)


@TILES
@pytest.mark.parametrize("band", [{}, {"band_hi": 0}], ids=["all", "causal"])
@pytest.mark.parametrize("L", LENGTHS)
def test_equals_fp64_at_any_length(L, band, D, groups, heads):
    assert errors(case_of(2, L, L, 2, 4, D, **band), Switches(groups=groups, heads=heads)) == []


@TILES
@pytest.mark.parametrize("band", [{}, {"band_hi": 0}], ids=["all", "causal"])
def test_equals_fp64_at_length_4096(band, D, groups, heads):
    assert (
        errors(case_of(1, 4096, 4096, 1, 4, D, **band), Switches(groups=groups, heads=heads)) == []
    )


@TILES
def test_equals_fp64_in_half_precision(D, groups, heads):
    case = case_of(2, 1000, 1000, 2, 4, D, torch.float16, band_hi=0)
    assert errors(case, Switches(groups=groups, heads=heads)) == []


@pytest.mark.parametrize("R", [1, 4, 8])
def test_equals_fp64_for_groups_of(R):
    assert errors(case_of(2, 300, 300, 3, R, 128, band_hi=0)) == []


@TILES
@pytest.mark.parametrize(("L", "S"), [(1, 1000), (65, 129), (129, 1000), (1000, 65), (300, 4096)])
def test_causal_with_offset_equals_fp64(L, S, D, groups, heads):
    """The offset aligns the ends; where L > S the first rows see nothing and are NaN."""
    switches = Switches(groups=groups, heads=heads)
    assert errors(case_of(2, L, S, 2, 4, D, band_hi=S - L), switches) == []
    assert errors(case_of(2, L, S, 2, 4, D), switches) == []


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("width", [1, 17, 128, 200, 5000])
@pytest.mark.parametrize(("L", "S"), [(63, 63), (1000, 1000), (129, 700)])
def test_sliding_window_equals_fp64(L, S, width, D):
    hi = S - L
    assert errors(case_of(2, L, S, 2, 4, D, band_hi=hi, band_lo=hi - width + 1)) == []
    assert errors(case_of(2, L, S, 2, 4, D, band_hi=hi + width, band_lo=hi - width)) == []
    assert errors(case_of(2, L, S, 2, 4, D, band_lo=hi - width)) == []


@pytest.mark.parametrize("fill", [-math.inf, LOWEST], ids=["drop", "absorb"])
@pytest.mark.parametrize("band", [{}, {"band_hi": 0}], ids=["all", "causal"])
@pytest.mark.parametrize("D", [64, 128])
def test_key_mask_equals_fp64(D, band, fill):
    """Left padding empties the first causal rows; one batch is wholly hidden."""
    B, L = 4, 1000
    key_mask = torch.arange(L, device="cuda")[None, :] >= torch.tensor(
        [[0], [130], [517], [L]], device="cuda"
    )
    key_mask[0] = torch.rand(L, device="cuda") < 0.5
    case = case_of(B, L, L, 2, 4, D, key_mask=key_mask, fill=fill, **band)
    assert errors(case) == []
    wide = torch.zeros(B, L, 3, dtype=torch.bool, device="cuda")
    wide[..., 1] = key_mask
    case.keywords["key_mask"] = wide[..., 1]
    assert errors(case) == []


@pytest.mark.parametrize("D", [64, 128])
def test_slices_of_a_merged_projection_equal_fp64(D):
    B, L, K, R = 2, 1000, 2, 4
    merged = normal(B, L, (K * R + 2 * K) * D)
    q, k, v = merged.split([K * R * D, K * D, K * D], dim=-1)
    q, k, v = q.unflatten(-1, (K, R, D)), k.unflatten(-1, (K, D)), v.unflatten(-1, (K, D))
    assert errors(Case(q, k, v, {"scale": D**-0.5, "band_hi": 0})) == []


def test_heads_before_positions_equal_fp64():
    case = case_of(2, 200, 200, 2, 4, 128, band_hi=0)
    case.q = case.q.permute(0, 2, 3, 1, 4).contiguous().permute(0, 3, 1, 2, 4)
    case.k = case.k.transpose(1, 2).contiguous().transpose(1, 2)
    assert errors(case) == []


@TILES
@pytest.mark.parametrize("rotates_q", [True, False], ids=["inside", "launch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotated_attention_equals_fp64(dtype, rotates_q, D, groups, heads):
    B, L = 2, 333
    cos, sin = tables(1, L, D, dtype)
    cos, sin = cos.expand(B, L, D), sin.expand(B, L, D)
    keywords = {"cos_q": cos, "sin_q": sin, "cos_k": cos, "sin_k": sin, "band_hi": 0}
    case = case_of(B, L, L, 2, 4, D, **keywords)
    assert errors(case, Switches(rotates_q=rotates_q, groups=groups, heads=heads)) == []


def test_a_rotated_q_may_have_strides_that_cannot_be_copied():
    B, L, D = 2, 200, 128
    cos, sin = tables(B, L, D)
    case = case_of(B, L, L, 2, 4, D, cos_q=cos, sin_q=sin)
    odd = torch.zeros(B, L, 2, 4, D + 1, device="cuda", dtype=torch.bfloat16)
    odd[..., :D] = case.q
    case.q = odd[..., :D]
    assert errors(case) == []


@pytest.mark.parametrize(("D", "groups"), [(64, 2), (64, 3), (128, 2)])
@pytest.mark.parametrize("has_pingpong", [False, True])
@pytest.mark.parametrize("is_persistent", [False, True])
def test_switches_do_not_change_a_bit(is_persistent, has_pingpong, D, groups):
    case = case_of(2, 2048, 2048, 2, 4, D, band_hi=0 if groups == 2 else None)
    switches = Switches(has_pingpong, is_persistent, groups=groups)
    plain = attention_forward_sm90(case.q, case.k, case.v, **case.keywords)
    other = attention_forward_sm90(case.q, case.k, case.v, switches=switches, **case.keywords)
    assert all(torch.equal(a, b) for a, b in zip(plain, other, strict=True))


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("rules", ["plain", "rope", "padded"])
def test_twenty_runs_give_the_same_bits(rules, D):
    """No atomics: a bit that moves is a race."""
    B, L = 2, 4096
    keywords = {"band_hi": 0}
    if rules == "rope":
        keywords |= dict(zip(("cos_q", "sin_q"), tables(B, L, D), strict=True))
    if rules == "padded":
        keywords["key_mask"] = torch.rand(B, L, device="cuda") < 0.9
    case = case_of(B, L, L, 4, 4, D, **keywords)
    first = attention_forward_sm90(case.q, case.k, case.v, **case.keywords)
    assert not bool(first[1].isnan().any())
    for _ in range(20):
        again = attention_forward_sm90(case.q, case.k, case.v, **case.keywords)
        for a, b in zip(first, again, strict=True):
            assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


@TILES
@pytest.mark.parametrize("band_hi", [222, None])
def test_equals_fp64_over_many_tiles(band_hi, D, groups, heads):
    """Many more tiles than programs: order, slots and phases of the walk."""
    case = case_of(4, 1111, 1333, 4, 8, D, band_hi=band_hi)
    assert errors(case, Switches(groups=groups, heads=heads)) == []


def backward_of(case, **choices):
    inputs = (case.q, case.k, case.v)
    out, lse = attention_forward(*inputs, **case.keywords)
    return attention_backward_sm90(case.grad_out, *inputs, out, lse, **choices, **case.keywords)


def gradient_errors(case, **choices):
    case.grad_out = normal(*case.q.shape).to(case.q.dtype)
    results = backward_of(case, **choices)
    return errors_of(case, dict(zip(("dq", "dk", "dv"), results, strict=True)))


WAYS = pytest.mark.parametrize("sweeps", [False, True], ids=["halves", "sweep"])


@WAYS
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("split", [1, 2, 4])
@pytest.mark.parametrize("width", ["none", "whole", "part", "k alone", "q alone"])
@pytest.mark.parametrize(("L", "S", "band"), [(150, 150, {"band_hi": 0}), (129, 333, {})])
def test_gradients_of_shared_groups_and_of_what_was_turned(L, S, band, width, split, D, sweeps):
    """Programs share a group or not; RoPE of the whole head, of interleaved pairs of its first
    half, of one of q and k."""
    keywords = dict(band)
    W = D // 2 if width == "part" else D
    cos, sin = tables(2, max(L, S), W)
    if width not in ("none", "k alone"):
        keywords |= {"cos_q": cos[:, :L], "sin_q": sin[:, :L]}
    if width not in ("none", "q alone"):
        keywords |= {"cos_k": cos[:, :S], "sin_k": sin[:, :S]}
    keywords |= {"rope_start": 0, "rope_interleaved": width == "part"}
    case = case_of(2, L, S, 2, 4, D, **keywords)
    assert gradient_errors(case, split=split, sweeps=sweeps) == []


@WAYS
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("band", [{}, {"band_hi": 0}], ids=["all", "causal"])
@pytest.mark.parametrize("L", [*LENGTHS, 2048])
def test_gradients_equal_fp64_at_any_length(L, band, D, sweeps):
    assert gradient_errors(case_of(2, L, L, 2, 4, D, **band), sweeps=sweeps) == []


@WAYS
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize(("L", "S"), [(1, 1000), (65, 129), (300, 1111)])
@pytest.mark.parametrize("width", [None, 17, 200])
def test_gradients_within_a_band_equal_fp64(width, L, S, D, sweeps):
    hi = S - L
    band = {"band_hi": hi} | ({} if width is None else {"band_lo": hi - width + 1})
    assert gradient_errors(case_of(2, L, S, 2, 4, D, **band), sweeps=sweeps) == []


@pytest.mark.parametrize("D", [64, 128])
def test_twenty_backward_runs_give_the_same_bits_where_that_is_asked_for(D):
    case = case_of(2, 2048, 2048, 4, 4, D, band_hi=0)
    case.grad_out = normal(*case.q.shape)
    with deterministic_algorithms():
        first, *again = (backward_of(case) for _ in range(21))
    for one in again:
        assert all(torch.equal(a, b) for a, b in zip(first, one, strict=True))


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("split", [None, 1, 2, 8])
@pytest.mark.parametrize(("L", "S"), [(777, 1111), (64, 700), (700, 65)])
@pytest.mark.parametrize("band", ["all", "causal", "behind", "window"])
def test_gradients_of_one_sweep_equal_fp64_over_many_tiles(band, L, S, split, D):
    """Keys behind the last one, more tiles than programs, also in pairs of which one may lie behind
    all keys, keys that no query sees; every query sees a key."""
    keywords = {}
    if band in ("causal", "window"):
        keywords["band_hi"] = 3 if band == "causal" else max(S - L, 0) + 5
    if band in ("behind", "window"):
        keywords["band_lo"] = S - L - 3
    assert gradient_errors(case_of(3, L, S, 4, 8, D, **keywords), split=split, sweeps=True) == []


@pytest.mark.parametrize("D", [64, 128])
def test_keys_behind_the_last_one_weigh_nothing_however_low_the_scores(D):
    case = case_of(1, 256, 130, 1, 4, D)
    case.q, case.k = case.q.abs() * 40, -case.k.abs() * 40
    assert gradient_errors(case, sweeps=True) == []

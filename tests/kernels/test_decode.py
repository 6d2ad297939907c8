"""The attention of few queries against the oracle, in the interpreter or on a GPU."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernels.attentions import DTYPES, cases
from kernels.bounds import checked_addresses, deterministic_algorithms
from kernels.compile_claims import assert_compiles
from kernels.oracle import Case, errors_of

from inductor_gqa.kernels import choice
from inductor_gqa.kernels.configs import Tiles
from inductor_gqa.kernels.decode import Choices, attention_decode, plan_decode
from inductor_gqa.kernels.forward import collect

SMALL = (Tiles(16, 16, 4, 1), Tiles(32, 16, 4, 1), Tiles(16, 32, 4, 1))
LOWEST = torch.finfo(torch.bfloat16).min


def decoded(case, **choices):
    with deterministic_algorithms():
        return attention_decode(case.q, case.k, case.v, choices=Choices(**choices), **case.keywords)


def decode_errors(case, **choices):
    return errors_of(case, dict(zip(("out", "lse"), decoded(case, **choices), strict=True)))


def cached_case(B, L, S, K, R, D, E, dtype, device, **keywords):
    """Keys and values lie as [B, K, S, D], the layout of a cache."""
    q = torch.randn(B, L, K, R, D, device=device).to(dtype)
    k, v = (torch.randn(B, K, S, n, device=device).to(dtype).transpose(1, 2) for n in (D, E))
    return Case(q, k, v, {"scale": D**-0.5} | keywords)


@given(data=st.data())
def test_decode_equals_the_oracle(data, device):
    case = data.draw(cases(device))
    splits = data.draw(st.sampled_from((None, 1, 2, 3, 7, 20)))
    tiles = data.draw(st.sampled_from((None, *SMALL))) if device == "cpu" else None
    assert decode_errors(case, splits=splits, tiles=tiles) == []


@given(data=st.data())
def test_descriptors_compute_what_pointers_compute(data, device):
    case = data.draw(cases(device, widths=(16, 32)))
    if case.q.dtype == torch.float32:
        case = dataclasses.replace(case, q=case.q.half(), k=case.k.half(), v=case.v.half())
    case = dataclasses.replace(case, k=case.k.contiguous(), v=case.v.contiguous())
    assert decode_errors(case, use_descriptors=True, splits=3) == []


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is needed")
@given(data=st.data())
def test_no_address_lies_outside_of_the_tensors(data):
    """With the tiles that a GPU gets."""
    case = data.draw(cases("cpu", widths=(64, 72, 80, 96), longest=80))
    tensors = {"q": case.q, "k": case.k, "v": case.v, **case.keywords}
    numbers = {n: x for n, x in case.keywords.items() if not isinstance(x, torch.Tensor)}
    tensors = {n: x for n, x in tensors.items() if isinstance(x, torch.Tensor)}
    tensors, attention = collect(tensors, numbers)
    attention = dataclasses.replace(attention, capability=(9, 0))
    options = (Choices(), Choices(splits=3, use_descriptors=True))
    plan = plan_decode(attention, choices=data.draw(st.sampled_from(options)))
    with checked_addresses() as execute:
        execute(plan, tensors)


@pytest.mark.parametrize("fill", [-math.inf, LOWEST, -1e4])
@pytest.mark.parametrize(("L", "S"), [(1, 1), (1, 200), (4, 129), (16, 97), (40, 7)])
def test_every_query_sees_the_cache_up_to_its_own_key(L, S, fill, device):
    case = cached_case(2, L, S, 2, 4, 16, 32, torch.bfloat16, device, band_hi=S - L, fill=fill)
    assert decode_errors(case, splits=4) == []


@pytest.mark.parametrize("splits", [1, 3, 64])
def test_window_is_split_evenly_and_not_the_cache(splits, device):
    """The keys outside the window's tiles are NaN, so that reading them shows."""
    case = cached_case(1, 2, 300, 1, 4, 16, 16, torch.float32, device, band_hi=298, band_lo=250)
    case.k[:, : 250 // 16 * 16] = case.v[:, : 250 // 16 * 16] = math.nan
    got = decoded(case, splits=splits, tiles=SMALL[0] if device == "cpu" else Tiles(16, 16, 4, 2))
    case.k.nan_to_num_()
    case.v.nan_to_num_()
    assert errors_of(case, dict(zip(("out", "lse"), got, strict=True))) == []


@pytest.mark.parametrize("fill", [-math.inf, LOWEST])
def test_keys_beyond_those_that_the_mask_shows_are_not_read(fill, device):
    """Filled to 70 and from 33 to 100, and in two places far apart; the rest is NaN."""
    key_mask = torch.zeros(3, 9000, dtype=torch.bool, device=device)
    key_mask[0, :70] = key_mask[1, 33:100] = True
    key_mask[2, 8900] = key_mask[2, 8003] = True
    case = cached_case(
        3, 1, 9000, 1, 4, 16, 16, torch.float32, device, key_mask=key_mask, fill=fill
    )
    read = torch.zeros_like(key_mask)
    read[0, :80] = read[1, 32:112] = read[2, 8000:8912] = True  # whole tiles of 16
    case.k[~read], case.v[~read] = math.nan, math.nan
    got = decoded(case, splits=3, tiles=Tiles(16, 16, 4, 1 if device == "cpu" else 2))
    case.k.nan_to_num_()
    case.v.nan_to_num_()
    assert errors_of(case, dict(zip(("out", "lse"), got, strict=True))) == []


@pytest.mark.parametrize("fill", [-math.inf, LOWEST])
def test_one_batch_that_sees_nothing_leaves_the_others_alone(fill, device):
    key_mask = torch.zeros(2, 150, dtype=torch.bool, device=device)
    key_mask[0, 100:] = True
    case = cached_case(
        2, 1, 150, 2, 2, 16, 24, torch.bfloat16, device, key_mask=key_mask, fill=fill
    )
    assert decode_errors(case, splits=4) == []
    out, lse = decoded(case, splits=4)
    if fill == LOWEST:
        mean = case.v[1].float().mean(0)[None, :, None].expand(1, 2, 2, 24)
        torch.testing.assert_close(out[1], mean.to(out.dtype))
        assert (lse[1] == math.inf).all()
    else:
        assert out[1].isnan().all()
    assert not out[0].isnan().any()


@pytest.mark.parametrize("key", [40, 300, 600])
@pytest.mark.parametrize("splits", [3, 40])
def test_scores_of_one_split_may_dwarf_those_of_the_others(key, splits, device):
    """40 splits are combined in three steps, of which each may hold the largest score."""
    case = cached_case(1, 1, 640, 1, 2, 16, 16, torch.float32, device)
    case.k[:, key] = 30 * case.q[:, 0, :, 0]
    assert decode_errors(case, splits=splits) == []


def test_only_keys_and_values_are_prepared_by_a_launch_of_their_own(device):
    case = cached_case(1, 1, 40, 1, 2, 16, 16, torch.float32, device)
    tensors = {"q": case.q, "k": case.k, "v": case.v}
    q_tables = dict.fromkeys(("cos_q", "sin_q"), torch.ones(1, 1, 16, device=device))
    k_tables = dict.fromkeys(("cos_k", "sin_k"), torch.ones(1, 40, 16, device=device))

    def launched(tables):
        _, attention = collect(tensors | tables, {"scale": 1.0})
        return [x.kernel.fn.__name__ for x in plan_decode(attention).launches]

    assert launched(q_tables) == ["split_kernel", "combine_kernel"]
    assert launched(q_tables | k_tables) == ["rotate_kernel", "split_kernel", "combine_kernel"]
    tensors["k"] = tensors["k"].half()[..., :8]  # rows of 16 lanes, half of them read
    tensors["v"] = tensors["v"].half()
    tensors["q"] = tensors["q"].half()[..., :8]
    assert launched({}) == ["split_kernel", "combine_kernel"]
    tensors["k"] = tensors["k"].contiguous()
    assert launched({}) == ["rotate_kernel", "split_kernel", "combine_kernel"]


@pytest.mark.parametrize(("L", "S", "kernel"), [(2, 700, "decode"), (2, 100, "plain")])
def test_few_queries_of_a_long_cache_are_decoded(L, S, kernel, device, monkeypatch):
    monkeypatch.setattr(choice, "HAS_DECODE", True)
    case = cached_case(1, L, S, 1, 4, 16, 16, torch.float32, device, band_hi=S - L)
    calls = []
    monkeypatch.setattr(
        choice.decode,
        "attention_decode",
        lambda *a, **b: calls.append("decode") or attention_decode(*a, **b),
    )
    out, lse = choice.attention_forward(case.q, case.k, case.v, **case.keywords)
    assert errors_of(case, {"out": out, "lse": lse}) == []
    assert (calls or ["plain"]) == [kernel]


COMPILED = {
    80: [
        "D64-bf16-L1-R4-causal-padded-rope",
        "D128-bf16-L1-R4-causal-padded-rope",
        "D128-bf16-L16-R4-exact-mask-sink-rope",
        "D256-bf16-L16-R4-causal-padded-rope",
        "D128-fp32-L1-R4-causal-padded-rope",
        "D256-fp32-L1-R4-padded-rope",
    ],
    90: [
        "D64-bf16-L1-R4-causal-padded-rope",
        "D64-bf16-L16-R4-padded-window-rope-bias-keep-softcap",
        "D96-bf16-L1-R4-bias-softcap-sink",
        "D128-bf16-L1-R4",
        "D128-bf16-L4-R4-causal-softcap-exact-keep-doubles",
        "D128-bf16-L1-R4-causal-padded-rope-descriptors",
        "D128-bf16-L8-R4-causal-rope",
        "D96-bf16-L1-R4-causal-padded-sliced",
        "D128-bf16-L16-R4-exact-mask-sink-rope",
        "D256-bf16-L16-R4-causal-padded-rope",
        "D128-fp32-L1-R4-causal-padded-rope",
        "D256-fp32-L1-R4-padded-rope",
        "D256-fp32-L1-R4-padded-rope-tf32",
    ],
    100: [
        "D64-bf16-L1-R4-causal-padded-rope",
        "D128-bf16-L1-R4-causal-padded-rope",
        "D128-bf16-L16-R4-exact-mask-sink-rope",
        "D256-bf16-L16-R4-causal-padded-rope",
        "D128-fp32-L1-R4-causal-padded-rope",
        "D256-fp32-L1-R4-padded-rope",
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("sm", COMPILED)
def test_decode_compiles_without_spills(sm):
    assert_compiles(sm, COMPILED[sm], "compile_decode.py")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("D", "E"), [(64, 64), (96, 96), (128, 128), (80, 64), (192, 128), (256, 256)]
)
@pytest.mark.parametrize("use_descriptors", [False, True], ids=["pointers", "descriptors"])
def test_decode_equals_the_oracle_at_full_tiles(D, E, dtype, use_descriptors):
    for L, S in ((1, 3000), (3, 1000), (16, 4096), (130, 2048)):
        for band in ({}, {"band_hi": S - L}, {"band_hi": S - L, "band_lo": S - L - 700}):
            case = cached_case(2, L, S, 2, 4, D, E, dtype, "cuda", **band)
            assert decode_errors(case, use_descriptors=use_descriptors) == []


@pytest.mark.gpu
@given(data=st.data())
def test_decode_equals_the_oracle_at_gpu_sizes(data):
    case = data.draw(cases("cuda", widths=(64, 80, 96, 128), longest=400))
    assert decode_errors(case, splits=data.draw(st.sampled_from((None, 1, 3, 20)))) == []


@pytest.mark.gpu
def test_decode_gives_the_same_bits_every_time():
    case = cached_case(4, 1, 8192, 8, 4, 128, 128, torch.bfloat16, "cuda")
    first, *others = [decoded(case) for _ in range(20)]
    assert all(torch.equal(x, y) for other in others for x, y in zip(first, other, strict=True))

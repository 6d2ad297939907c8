"""The forward's launcher and plan against the oracle, in the interpreter or on a GPU."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernels.attentions import DTYPES, cases
from kernels.oracle import Case, errors_of

from inductor_gqa.kernels.forward import attention_forward, collect, plan_forward
from inductor_gqa.kernels.plan import chunks, chunks_of_sums, execute


def forward_errors(case, **forced):
    """What is wrong with out and lse; `forced` goes to the plan."""
    named = {"q": case.q, "k": case.k, "v": case.v}
    tensors = named | {name: x for name, x in case.keywords.items() if isinstance(x, torch.Tensor)}
    numbers = {name: x for name, x in case.keywords.items() if not isinstance(x, torch.Tensor)}
    given_tensors, attention = collect(tensors, numbers)
    out, lse = execute(plan_forward(attention, **forced), given_tensors)
    return errors_of(case, {"out": out, "lse": lse})


def normal_case(B, L, S, K, R, D, E, dtype, device, **keywords):
    shapes = ((B, L, K, R, D), (B, S, K, D), (B, S, K, E), (B, L, K, R, E))
    q, k, v, grad_out = (torch.randn(shape, device=device).to(dtype) for shape in shapes)
    return Case(q, k, v, {"scale": D**-0.5} | keywords, grad_out)


@given(data=st.data())
def test_forward_equals_the_oracle(data, device):
    case = data.draw(cases(device))
    out, lse = attention_forward(case.q, case.k, case.v, **case.keywords)
    assert errors_of(case, {"out": out, "lse": lse}) == []


@given(data=st.data())
def test_descriptors_compute_what_pointers_compute(data, device):
    case = data.draw(cases(device, widths=(16, 32)))
    if case.q.dtype == torch.float32:
        case = dataclasses.replace(case, q=case.q.half(), k=case.k.half(), v=case.v.half())
    case = dataclasses.replace(case, k=case.k.contiguous(), v=case.v.contiguous())
    assert forward_errors(case, use_descriptors=True) == []


@pytest.mark.parametrize("fill", [-math.inf, torch.finfo(torch.bfloat16).min, -1e4])
@pytest.mark.parametrize(("L", "S"), [(1, 1), (1, 33), (17, 33), (33, 16), (40, 7)])
def test_forward_of_a_cache_sees_keys_up_to_its_own(L, S, fill, device):
    case = normal_case(1, L, S, 1, 2, 16, 16, torch.bfloat16, device, band_hi=S - L, fill=fill)
    assert forward_errors(case) == []


def test_row_that_sees_nothing_is_nan_when_hidden_keys_are_left_out(device):
    case = normal_case(1, 20, 20, 1, 1, 16, 16, torch.float32, device, band_hi=-3)
    out, _ = attention_forward(case.q, case.k, case.v, **case.keywords)
    assert out[:, :3].isnan().all()
    assert not out[:, 3:].isnan().any()


def test_row_that_sees_nothing_averages_all_values_when_the_fill_absorbs(device):
    lowest = torch.finfo(torch.float32).min
    case = normal_case(1, 20, 24, 1, 1, 16, 16, torch.float32, device, band_hi=-3, fill=lowest)
    out, lse = attention_forward(case.q, case.k, case.v, **case.keywords)
    torch.testing.assert_close(out[0, 0, 0, 0], case.v[0, :, 0].mean(0))
    assert lse[0, 0, 0].isinf().tolist() == [True] * 3 + [False] * 17


def test_tf32_rounds_to_nearest(device):
    """Operands halfway beyond a tf32 value: truncated, the product would be smaller by one part in
    2^11."""
    case = normal_case(1, 1, 1, 1, 1, 16, 16, torch.float32, device, precision="tf32")
    case.v.fill_(1 + 0.75 * 2**-10)
    out, _ = attention_forward(case.q, case.k, case.v, **case.keywords)
    assert out.unique().tolist() == [1 + 2**-10]


def test_forward_is_one_launch_and_a_rotation(device):
    case = normal_case(1, 8, 8, 1, 2, 16, 16, torch.float32, device)
    tensors = {"q": case.q, "k": case.k, "v": case.v}
    tables = dict.fromkeys(
        ("cos_q", "sin_q", "cos_k", "sin_k"), torch.ones(1, 8, 16, device=device)
    )
    _, plain = collect(tensors, {"scale": 1.0})
    _, turned = collect(tensors | tables, {"scale": 1.0})
    assert [x.kernel.fn.__name__ for x in plan_forward(plain).launches] == ["forward_kernel"]
    assert [x.kernel.fn.__name__ for x in plan_forward(turned).launches] == [
        "rotate_kernel",
        "forward_kernel",
    ]


@given(width=st.integers(2, 32).map(lambda n: 8 * n))
def test_chunks_cover_a_width_with_tiles_that_tensor_cores_take(width):
    first, second = chunks(width)
    assert first + second >= width
    assert all(part & (part - 1) == 0 and part >= 16 for part in (first, second) if part)
    assert first + second <= max(width + 16, 1.34 * width)


@given(width=st.integers(2, 32).map(lambda n: 8 * n))
def test_exact_sums_are_of_half_the_lanes_and_of_no_narrow_chunk(width):
    first, second = chunks_of_sums(width, "ieee")
    assert first == min(64 if width <= 128 else 128, 1 << (width - 1).bit_length())
    assert second in ((0,) if width <= first else (64, 128))
    assert first + second >= width
    assert chunks_of_sums(width, "tf32") == chunks_of_sums(width, "native") == chunks(width)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("D", "E"), [(64, 64), (96, 96), (128, 128), (80, 64), (192, 128), (256, 256)]
)
@pytest.mark.parametrize(
    "keywords",
    [{}, {"band_hi": 0}, {"band_hi": 0, "band_lo": -100}],
    ids=["full", "causal", "window"],
)
def test_forward_equals_the_oracle_at_full_tiles(D, E, dtype, keywords):
    for L, S in ((1, 1000), (63, 63), (1000, 1000), (512, 512)):
        offset = {name: value + S - L for name, value in keywords.items()}
        case = normal_case(2, L, S, 2, 4, D, E, dtype, "cuda", **offset)
        assert forward_errors(case) == []
        assert forward_errors(case, use_descriptors=False) == []


@pytest.mark.gpu
@given(data=st.data())
def test_forward_equals_the_oracle_at_gpu_sizes(data):
    case = data.draw(cases("cuda", widths=(64, 80, 96, 128), longest=400))
    assert forward_errors(case) == []

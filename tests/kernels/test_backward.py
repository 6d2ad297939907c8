"""The backward's launcher and plan against the oracle, in the interpreter or on a GPU."""

import dataclasses
import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernels.attentions import DTYPES, cases
from kernels.oracle import errors_of, has_nan_rows
from kernels.test_forward import normal_case

from inductor_gqa.kernels.backward import attention_backward, plan_backward
from inductor_gqa.kernels.forward import attention_forward, collect
from inductor_gqa.kernels.plan import execute

SUBSETS = [needs for needs in itertools.product((True, False), repeat=3) if any(needs)]


def backward_errors(case, needs=(True, True, True), **forced):
    """What is wrong with the needed gradients; `forced` goes to the plan."""
    out, lse = attention_forward(case.q, case.k, case.v, **case.keywords)
    named = {
        "q": case.q,
        "k": case.k,
        "v": case.v,
        "grad_out": case.grad_out,
        "out": out,
        "lse": lse,
    }
    tensors = named | {name: x for name, x in case.keywords.items() if isinstance(x, torch.Tensor)}
    numbers = {name: x for name, x in case.keywords.items() if not isinstance(x, torch.Tensor)}
    given_tensors, attention = collect(tensors, numbers)
    gradients = execute(plan_backward(attention, needs, **forced), given_tensors)
    named = zip(("dq", "dk", "dv"), gradients, needs, strict=True)
    return errors_of(case, {name: x for name, x, is_needed in named if is_needed})


@given(data=st.data())
def test_backward_equals_the_oracle(data, device):
    case = data.draw(cases(device).filter(lambda case: not has_nan_rows(case)))
    assert backward_errors(case) == []


@given(data=st.data())
def test_only_needed_gradients_are_made(data, device):
    needs = data.draw(st.sampled_from(SUBSETS))
    case = data.draw(cases(device, longest=20, masks=("none", "causal", "lowest_bias")))
    assert backward_errors(case, needs) == []
    out, lse = attention_forward(case.q, case.k, case.v, **case.keywords)
    made = attention_backward(
        case.grad_out, case.q, case.k, case.v, out, lse, **case.keywords, needs=needs
    )
    assert [x.shape == (0,) for x in made] == [not is_needed for is_needed in needs]


@given(data=st.data())
def test_descriptors_compute_what_pointers_compute(data, device):
    case = data.draw(
        cases(device, widths=(16, 32), masks=("none", "causal", "padded")).filter(
            lambda case: not has_nan_rows(case)
        )
    )
    dtype = torch.float16 if case.q.dtype == torch.float32 else case.q.dtype
    names = ("q", "k", "v", "grad_out")
    case = dataclasses.replace(
        case, **{name: getattr(case, name).contiguous().to(dtype) for name in names}
    )
    assert backward_errors(case, use_descriptors=True) == []


@pytest.mark.parametrize("fill_adds", [True, False])
@pytest.mark.parametrize("band_hi", [-3, -40])
def test_row_that_sees_nothing_gives_every_value_an_equal_share(band_hi, fill_adds, device):
    lowest = torch.finfo(torch.float32).min
    keywords = {"band_hi": band_hi, "fill": lowest, "fill_adds": fill_adds}
    case = normal_case(2, 37, 41, 1, 2, 16, 16, torch.float32, device, **keywords)
    assert backward_errors(case) == []


@pytest.mark.parametrize("fill", [-1e4, -1e9])
def test_row_of_equal_huge_scores_has_even_probabilities(fill, device):
    """One fp32 number cannot hold -1e9 plus the logarithm of a count: P was off by a factor of up
    to 2^64."""
    case = normal_case(1, 20, 24, 1, 1, 16, 16, torch.float32, device, band_hi=-5, fill=fill)
    assert backward_errors(case) == []


@pytest.mark.parametrize("is_interleaved", [False, True])
def test_gradient_is_turned_back_across_chunks(is_interleaved, device):
    """Width 48 lies in chunks of 32 and 16; many partners of the half layout sit in the other."""
    tables = {
        name: torch.randn(1, 20, 48, device=device) for name in ("cos_q", "sin_q", "cos_k", "sin_k")
    }
    case = normal_case(
        1, 20, 20, 1, 2, 48, 16, torch.float32, device, rope_interleaved=is_interleaved, **tables
    )
    assert backward_errors(case) == []


def test_gradients_repeat_bit_for_bit(device):
    case = normal_case(1, 40, 40, 1, 3, 16, 16, torch.bfloat16, device, band_hi=0)
    out, lse = attention_forward(case.q, case.k, case.v, **case.keywords)
    runs = [
        attention_backward(case.grad_out, case.q, case.k, case.v, out, lse, **case.keywords)
        for _ in range(2)
    ]
    assert all(torch.equal(first, second) for first, second in zip(*runs, strict=True))


def test_neighbours_of_a_nan_row_keep_their_dq(device):
    case = normal_case(1, 40, 40, 1, 1, 16, 16, torch.float32, device, band_hi=-2, fill=-math.inf)
    out, lse = attention_forward(case.q, case.k, case.v, **case.keywords)
    dq, _, _ = attention_backward(case.grad_out, case.q, case.k, case.v, out, lse, **case.keywords)
    assert not dq[:, 2:].isnan().any()


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
def test_backward_equals_the_oracle_at_full_tiles(D, E, dtype, keywords):
    for L, S in ((63, 63), (1000, 1000), (200, 512)):
        offset = {name: value + S - L for name, value in keywords.items()}
        case = normal_case(2, L, S, 2, 4, D, E, dtype, "cuda", **offset)
        assert backward_errors(case) == []
        assert backward_errors(case, use_descriptors=False) == []


@pytest.mark.gpu
@given(data=st.data())
def test_backward_equals_the_oracle_at_gpu_sizes(data):
    case = data.draw(
        cases("cuda", widths=(64, 80, 96, 128), longest=400).filter(
            lambda case: not has_nan_rows(case)
        )
    )
    assert backward_errors(case) == []


@pytest.mark.gpu
def test_gradients_repeat_bit_for_bit_at_gpu_sizes():
    case = normal_case(2, 2048, 2048, 2, 4, 128, 128, torch.bfloat16, "cuda", band_hi=0)
    out, lse = attention_forward(case.q, case.k, case.v, **case.keywords)
    runs = [
        attention_backward(case.grad_out, case.q, case.k, case.v, out, lse, **case.keywords)
        for _ in range(20)
    ]
    assert all(torch.equal(x, y) for run in runs[1:] for x, y in zip(runs[0], run, strict=True))

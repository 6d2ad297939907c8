"""NaN in keys that a mask hides, as in the unwritten slots of a cache: results that are finite in
eager are finite and right here.

https://github.com/pytorch/pytorch/issues/101967: they came out NaN. NaN in hidden *values* is NaN
in eager too, since 0 * NaN is, and nothing is promised of it. So is NaN beside an added mask.
"""

import math

import pytest
import torch
from kernels.oracle import Case, attention, errors_of, gradients
from kernels.weights_cases import errors_of as weights_errors

from inductor_gqa import ops
from inductor_gqa.kernels import backward, choice, forward
from inductor_gqa.kernels.decode import Choices, attention_decode
from inductor_gqa.kernels.weights_forward import weights_forward

LOWEST = torch.finfo(torch.float32).min
FILLS = [-math.inf, LOWEST, -1e4]
HIDING = ("key_mask", "mask", "causal", "causal, early")


def case_of(hiding, fill, device, L=21, S=27, D=16, H=(2, 2), dtype=torch.float32, bad=math.nan):
    """The last keys are hidden from every query."""
    torch.manual_seed(0)
    B, (K, R) = 2, H
    q, k, v, grad_out = (
        torch.randn(shape, device=device).to(dtype)
        for shape in ((B, L, K, R, D), (B, S, K, D), (B, S, K, D), (B, L, K, R, D))
    )
    is_seen = torch.arange(S, device=device).expand(B, S) < L
    keywords = {"scale": 0.3, "fill": fill}
    if hiding == "key_mask":
        keywords["key_mask"] = is_seen
    elif hiding == "mask":
        keywords["mask"] = is_seen[:, None, None, None].expand(B, K, R, L, S)
    else:
        offset = -8 if "early" in hiding else 0
        keywords["band_hi"] = offset
        is_seen = torch.arange(S, device=device).expand(B, S) < L + offset
    k[~is_seen] = bad
    return Case(q, k, v, keywords, grad_out)


def with_gradients(case, out, lse, dk, dv):
    """What is wrong, dQ apart, which is NaN in eager (0 * NaN); and that eager itself is finite."""
    rows = slice(8, None) if case.keywords["band_hi"] == -8 else slice(None)
    true = gradients(case, torch.float64)
    clean = Case(case.q, case.k.nan_to_num(0, 0, 0), case.v, case.keywords, case.grad_out)
    assert bool(torch.isfinite(true[0][:, rows]).all())
    found = errors_of(clean, {"out": out, "lse": lse})
    if case.keywords["fill"] != -math.inf or rows == slice(None):
        assert bool(torch.isfinite(true[3]).all())
        found += errors_of(clean, {"dk": dk, "dv": dv})
    return found


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("hiding", HIDING)
def test_forward_and_the_gradients_of_k_and_v_are_clean(hiding, fill, bad, device):
    case = case_of(hiding, fill, device, bad=bad)
    case.keywords.setdefault("band_hi", None)
    inputs = (case.q, case.k, case.v)
    out, lse = forward.attention_forward(*inputs, **case.keywords)
    _, dk, dv = backward.attention_backward(case.grad_out, *inputs, out, lse, **case.keywords)
    assert with_gradients(case, out, lse, dk, dv) == []


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("hiding", HIDING)
def test_decode_is_clean(hiding, fill, device):
    case = case_of(hiding, fill, device)
    clean = Case(case.q, case.k.nan_to_num(), case.v, case.keywords)
    for splits in (1, 3):
        choices = Choices(splits=splits)
        out, lse = attention_decode(case.q, case.k, case.v, choices=choices, **case.keywords)
        assert errors_of(clean, {"out": out, "lse": lse}) == []


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("hiding", HIDING)
def test_returned_weights_are_clean(hiding, fill, device):
    case = case_of(hiding, fill, device)
    clean = Case(case.q, case.k.nan_to_num(), case.v, case.keywords)
    assert weights_errors(clean, weights_forward(case.q, case.k, case.v, **case.keywords)) == []


@pytest.mark.parametrize("length", [40, 260], ids=["plain PyTorch", "fused CPU attention"])
@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("hiding", HIDING)
def test_the_ops_on_the_cpu_are_clean(hiding, fill, length):
    case = case_of(hiding, fill, "cpu", L=length, S=length + 9, H=(1, 2))
    named = dict.fromkeys(ops.NAMES) | {"q": case.q, "k": case.k, "v": case.v}
    named |= {"softcap": 0.0, "fill_adds": False, "rope_start": 0, "rope_interleaved": False}
    named |= {"keep_scale": 1.0, "precision": "ieee"} | case.keywords
    named["fill"] = None if fill == -math.inf else fill
    arguments = [named[name] for name in ops.NAMES]
    out, lse = ops.attention(*arguments)
    grads = ops.attention_backward(case.grad_out, out, lse, True, True, True, *arguments)
    true, _ = attention(case.q, case.k, case.v, dtype=torch.float64, **case.keywords)
    clean = Case(case.q, case.k.nan_to_num(), case.v, case.keywords, case.grad_out)
    ours = {"out": out}
    if bool(torch.isfinite(true).all()):
        ours |= {"dk": grads[1], "dv": grads[2]}
    assert errors_of(clean, ours) == []


@pytest.mark.gpu
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("hiding", ["causal", "key_mask"])
def test_the_kernels_that_a_gpu_chooses_are_clean_in_their_output(hiding, D):
    case = case_of(hiding, -math.inf, "cuda", L=300, S=333, D=D, dtype=torch.bfloat16)
    clean = Case(case.q, case.k.nan_to_num(), case.v, case.keywords)
    out, lse = choice.attention_forward(case.q, case.k, case.v, **case.keywords)
    assert errors_of(clean, {"out": out, "lse": lse}) == []

"""The ops on the CPU, by PyTorch's fused attention and by plain PyTorch, against the oracle."""

import itertools
import math

import pytest
import torch
from kernels.oracle import Case, attention, errors_of

from inductor_gqa import ops, reference

LOWEST = torch.finfo(torch.float32).min
HIDING = ("late", "early", "padded", "padded causal", "mask", "mask of a head")


def case_of(hiding, fill, L, dtype):
    """Two batches, two key heads of two; some rows see no key."""
    B, K, R, D = 2, 2, 2, 32
    make = torch.Generator().manual_seed(L)

    def noise(*shape):
        return torch.randn(*shape, generator=make).to(dtype)

    q, k, v = noise(B, L, K, R, D), noise(B, L, K, D), noise(B, L, K, D)
    keywords = {"scale": D**-0.5, "fill": fill}
    if hiding == "late":
        keywords["band_hi"] = -3
    if hiding == "early":
        keywords["band_lo"] = 2
    if "padded" in hiding:
        keywords["key_mask"] = torch.arange(L).expand(B, L) >= torch.tensor([[L], [5]])
    if "causal" in hiding:
        keywords["band_hi"] = 0
    if "mask" in hiding:
        mask = torch.rand(B, K if "head" in hiding else 1, 1, L, L, generator=make) > 0.4
        mask[1, -1, :, L // 2] = False
        keywords["mask"] = mask.expand(B, K, R, L, L)
    return Case(q, k, v, keywords, noise(B, L, K, R, D))


@pytest.mark.parametrize("L", [40, 260], ids=["plain PyTorch", "fused CPU attention"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fill", [-math.inf, LOWEST], ids=["dropped", "finite"])
@pytest.mark.parametrize("hiding", HIDING)
def test_rows_that_see_no_key_are_what_eager_makes_them(hiding, fill, dtype, L):
    """NaN where the fill is infinite, the mean of V where it is not: whichever way is taken."""
    case = case_of(hiding, fill, L, dtype)
    named = dict.fromkeys(ops.NAMES) | {"q": case.q, "k": case.k, "v": case.v}
    named |= {"softcap": 0.0, "fill_adds": False, "rope_start": 0, "rope_interleaved": False}
    named |= {"keep_scale": 1.0, "precision": "ieee"} | case.keywords
    named["fill"] = None if fill == -math.inf else fill
    arguments = [named[name] for name in ops.NAMES]
    true, _ = attention(case.q, case.k, case.v, dtype=torch.float64, **case.keywords)
    assert bool(true.isnan().any()) == (fill == -math.inf)
    out, lse = ops.attention(*arguments)
    ours = {"out": out}
    if fill != -math.inf:
        grads = ops.attention_backward(case.grad_out, out, lse, True, True, True, *arguments)
        ours |= dict(zip(("dq", "dk", "dv"), grads, strict=True))
    assert errors_of(case, ours) == []


def test_a_band_may_hide_a_row_just_where_it_does():
    bounds = (None, *range(-5, 6))
    for L, S, lo, hi in itertools.product(range(1, 5), range(1, 5), bounds, bounds):
        hidden = reference.hidden_BKRLS(L, S, lo, hi, None, None, torch.device("cpu"))
        hides = hidden is not None and bool(hidden.all(-1).any())
        says = reference.may_hide_a_row(L, S, lo, hi, False)
        assert says == hides, (L, S, lo, hi)
        assert reference.may_hide_a_row(L, S, lo, hi, True)

"""The kernels that are chosen compute what the reference says, whichever they are."""

import pytest
import torch

from inductor_gqa import reference
from inductor_gqa.kernels import choice

DEFAULTS = {
    "bias": None,
    "mask": None,
    "key_mask": None,
    "keep": None,
    "sink": None,
    "softcap": 0.0,
    "fill": float("-inf"),
    "fill_adds": False,
    "keep_scale": 1.0,
    "precision": "ieee",
    "band_lo": None,
}


def errors(made, truth):
    return [
        float((x.double() - t).abs().max() / t.abs().max())
        for x, t in zip(made, truth, strict=True)
    ]


@pytest.mark.parametrize("interleaved", [False, True])
def test_adjoint_tables_turn_back_what_the_tables_turned(interleaved):
    cos, sin, g = (torch.randn(2, 7, 16, dtype=torch.float64) for _ in range(3))
    tables = choice._adjoint_tables({"cos_q": cos, "sin_q": sin}, interleaved)
    turned = reference.rotate(g, tables["cos_q"], tables["sin_q"], 0, interleaved)
    assert torch.allclose(turned, reference.unrotate(g, cos, sin, 0, interleaved))


@pytest.mark.gpu
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize(("L", "S"), [(1000, 1000), (129, 129), (300, 811)])
@pytest.mark.parametrize("width", [None, "whole", "part"])
def test_chosen_kernels_equal_the_reference(D, L, S, width):
    torch.manual_seed(0)
    make = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    q, k, v = make(2, L, 2, 4, D), make(2, S, 2, D), make(2, S, 2, D)
    g = make(2, L, 2, 4, D)
    W = {None: 0, "whole": D, "part": D // 2}[width]
    tables = dict.fromkeys(("cos_q", "sin_q", "cos_k", "sin_k"))
    if W:
        cos, sin = make(1, S, W).expand(2, -1, -1), make(1, S, W).expand(2, -1, -1)
        tables = {"cos_q": cos[:, :L], "sin_q": sin[:, :L], "cos_k": cos, "sin_k": sin}
    a = DEFAULTS | tables | {"scale": D**-0.5, "band_hi": S - L, "rope_start": 0}
    a |= {"rope_interleaved": width == "part"}
    out, lse = choice.attention_forward(q, k, v, **a)
    made = (out, *choice.attention_backward(g, q, k, v, out, lse, **a))
    wide = {n: x.double() if isinstance(x, torch.Tensor) else x for n, x in a.items()}
    every = (True, True, True)
    up = [x.double() for x in (q, k, v)]
    truth = reference.attention(*up, wide)[0]
    truth = (truth, *reference.attention_backward(g.double(), *up, wide, every))
    eager = reference.attention(q, k, v, a)[0]
    eager = (eager, *reference.attention_backward(g, q, k, v, a, every))
    for ours, theirs in zip(errors(made, truth), errors(eager, truth), strict=True):
        # The reference keeps in fp32 what eager and the kernels round between the matmuls.
        assert ours <= 2 * theirs + 2 * torch.finfo(torch.bfloat16).eps

"""The kernels that are chosen compute what the reference says, whichever they are."""

import math

import pytest
import torch
from kernels.oracle import Case, errors_of

from inductor_gqa.kernels import choice


@pytest.mark.gpu
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize(("L", "S"), [(1000, 1000), (129, 129), (300, 811)])
@pytest.mark.parametrize("width", ["none", "whole", "part"])
@pytest.mark.parametrize("padding", ["none", "drop", "absorb"])
def test_chosen_kernels_equal_fp64(D, L, S, width, padding):
    """RoPE of the whole head or of interleaved pairs of its first half; causal; padding on the
    right, which leaves no row empty, or on the left, which empties the first rows."""
    torch.manual_seed(0)
    make = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    keywords = {"scale": D**-0.5, "band_hi": S - L}
    if width != "none":
        angles = torch.rand(2, 1, S, D if width == "whole" else D // 2, device="cuda") * 6
        cos, sin = angles[0].cos().expand(2, -1, -1), angles[1].sin().expand(2, -1, -1)
        keywords |= {"cos_q": cos[:, :L], "sin_q": sin[:, :L], "cos_k": cos, "sin_k": sin}
        keywords |= {"rope_start": 0, "rope_interleaved": width == "part"}
    if padding != "none":
        keys = torch.arange(S, device="cuda")[None, :]
        lengths = torch.tensor([[S], [S // 2]], device="cuda")
        is_right = padding == "drop"
        keywords["key_mask"] = keys < lengths if is_right else keys >= S - lengths
        keywords["fill"] = -math.inf if is_right else torch.finfo(torch.bfloat16).min
    q, k, v = make(2, L, 2, 4, D), make(2, S, 2, D), make(2, S, 2, D)
    case = Case(q, k, v, keywords, make(2, L, 2, 4, D))
    out, lse = choice.attention_forward(q, k, v, **keywords)
    made = choice.attention_backward(case.grad_out, q, k, v, out, lse, **keywords)
    ours = {"out": out, "lse": lse} | dict(zip(("dq", "dk", "dv"), made, strict=True))
    assert errors_of(case, ours) == []

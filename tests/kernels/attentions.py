"""Hypothesis strategies for one attention: shapes, dtypes, strides, masks, rotations and what else
changes its scores.

The numbers of a case follow from a drawn seed; shrinking makes the shapes small and the options
few.
"""

import math

import torch
from hypothesis import strategies as st
from kernels.oracle import Case

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MASKS = ("none", "causal", "offset", "window", "padded", "mask", "bias", "lowest_bias", "exact")
ROTATIONS = ("none", "half", "interleaved", "partial", "only_k")


def laid_out(x, layout):
    """Equal values, other strides; what lies between them is NaN."""
    if layout == "permuted":  # batch, heads, positions, lanes in memory
        order = (0, *range(2, x.dim() - 1), 1, x.dim() - 1)
        back = [order.index(d) for d in range(x.dim())]
        return x.permute(order).contiguous().permute(back)
    if layout == "sliced":  # a part of a wider projection
        wide = torch.full(
            (*x.shape[:-1], x.shape[-1] + 8), math.nan, dtype=x.dtype, device=x.device
        )
        wide[..., 8:] = x
        return wide[..., 8:]
    if layout == "strided_lanes":
        wide = torch.full(
            (*x.shape[:-1], 2 * x.shape[-1]), math.nan, dtype=x.dtype, device=x.device
        )
        wide[..., ::2] = x
        return wide[..., ::2]
    if layout == "expanded":  # one batch for all
        return x[:1].expand(x.shape)
    return x


@st.composite
def cases(draw, device="cpu", widths=(16, 24, 32, 40), longest=50, masks=MASKS):
    """An attention with its inputs; rows without a visible key are common where the mask allows
    them."""
    dtype = draw(st.sampled_from(DTYPES))
    B, K, R = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    L, S = draw(st.integers(1, longest)), draw(st.integers(1, longest))
    D, E = draw(st.sampled_from(widths)), draw(st.sampled_from(widths))
    layouts = st.sampled_from(("contiguous", "permuted", "sliced", "strided_lanes", "expanded"))
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))

    def normal(*shape, of=dtype):
        return torch.randn(*shape, generator=random).to(device=device, dtype=of)

    def coin(*shape, p=0.5):
        return (torch.rand(*shape, generator=random) < p).to(device)

    options = {"scale": draw(st.sampled_from((D**-0.5, 1.0, -0.5)))}
    kind = draw(st.sampled_from(masks))
    if kind == "causal":
        options |= {"band_hi": 0}
    elif kind == "offset":
        options |= {"band_hi": S - L}
    elif kind == "window":
        reach = draw(st.integers(0, 40))
        options |= {"band_hi": S - L, "band_lo": S - L - reach}
    elif kind == "padded":
        key_mask = coin(B, S, p=0.7)
        key_mask[0] = key_mask[0] & draw(st.booleans())
        options |= {"key_mask": key_mask, "band_hi": draw(st.sampled_from((None, 0, -3)))}
    elif kind == "mask":
        options |= {"mask": coin(B, K, 1, L, S, p=0.3).expand(B, K, R, L, S)}
    elif kind == "bias":
        bias = normal(1, 1, 1, L, S).masked_fill(coin(L, S, p=0.3), -math.inf)
        bias[..., 0] = 0.0
        options |= {"bias": bias.expand(B, K, R, L, S)}
    elif kind == "lowest_bias":  # one row is wholly hidden: eager spreads it evenly
        bias = normal(B, 1, 1, L, S, of=torch.float32)
        bias[..., draw(st.integers(0, L - 1)), :] = torch.finfo(torch.float32).min
        options |= {"bias": bias.expand(B, K, R, L, S)}
    elif kind == "exact":
        options |= {
            "band_hi": draw(st.sampled_from((0, -2, 3))),
            "fill": draw(st.sampled_from((-1e4, -1e9))),
        }
        options |= {"fill_adds": draw(st.booleans())}
    if kind in ("causal", "offset", "window", "padded", "mask"):
        lowest = torch.finfo(dtype).min if dtype != torch.float16 else -1e30
        options |= {
            "fill": draw(st.sampled_from((lowest, -math.inf))),
            "fill_adds": draw(st.booleans()),
        }
    if draw(st.booleans()):
        options |= {"softcap": draw(st.sampled_from((2.0, 30.0)))}
    if draw(st.integers(0, 3)) == 0:
        options |= {"sink": normal(K, R, of=torch.float32)}
    if draw(st.integers(0, 3)) == 0:
        options |= {"keep": coin(B, K, R, L, S, p=0.8), "keep_scale": 1 / 0.8}
    options |= rotations(draw, normal, B, L, S, D)
    q, k, v, grad_out = (
        normal(B, L, K, R, D),
        normal(B, S, K, D),
        normal(B, S, K, E),
        normal(B, L, K, R, E),
    )
    q, k, v, grad_out = (laid_out(x, draw(layouts)) for x in (q, k, v, grad_out))
    return Case(q, k, v, options, grad_out)


def rotations(draw, normal, B, L, S, D):
    """Tables whose columns are all independent."""
    kind = draw(st.sampled_from(ROTATIONS))
    if kind == "none":
        return {}
    W = D // 2 if kind == "partial" else D
    of = draw(st.sampled_from((torch.float32, torch.bfloat16)))
    names = ("cos_k", "sin_k") if kind == "only_k" else ("cos_q", "sin_q", "cos_k", "sin_k")
    length = {"q": L, "k": S}
    tables = {name: normal(1, length[name[-1]], W, of=of).cos().expand(B, -1, -1) for name in names}
    start = draw(st.sampled_from((0, 4))) if kind == "partial" else 0
    return tables | {"rope_interleaved": kind == "interleaved", "rope_start": start}

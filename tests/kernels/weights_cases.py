"""Cases of the forward that returns its weights, and how its results are judged."""

import math

import torch
from kernels.oracle import Case, attended, attention, score_slip

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LOWEST = torch.finfo(torch.float32).min
FLOOR_IN_EPS = 8  # fp32: sums in another order


def results(case, dtype):
    """out, weights and lse in the computing dtype; the weights as what an identity V collects."""
    B, S, K, _ = case.v.shape
    every_key = torch.eye(S, device=case.v.device)[None, :, None, :].expand(B, S, K, S)
    out, lse, *_ = attention(case.q, case.k, case.v, dtype=dtype, **case.keywords)
    weights, *_ = attention(case.q, case.k, every_key, dtype=dtype, **case.keywords)
    return out, weights.permute(0, 2, 3, 1, 4), lse


def rounded(x):
    """Nearest tf32 values."""
    return ((x.contiguous().view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)


def rounded_case(case):
    """The case as tf32 products see it: q and k rotated (halves, from lane 0 on), all rounded."""
    keywords = {name: x for name, x in case.keywords.items() if name[:4] not in ("cos_", "sin_")}

    def turned(x, side):
        if f"cos_{side}" not in case.keywords:
            return rounded(x)
        cos, sin = (case.keywords[f"{name}_{side}"] for name in ("cos", "sin"))
        W, heads = cos.shape[-1], (1,) * (x.dim() - 3)
        cos, sin = (t.reshape(*t.shape[:2], *heads, W) for t in (cos, sin))
        lanes, rest = x[..., :W], x[..., W:]
        partners = torch.cat((-lanes[..., W // 2 :], lanes[..., : W // 2]), -1)
        return rounded(torch.cat((lanes * cos + partners * sin, rest), -1))

    return Case(turned(case.q, "q"), turned(case.k, "k"), rounded(case.v), keywords)


def slips_of(case):
    """Four standard deviations of what the rounding of rotated q and k does to out, weights and
    lse: softmax moves by P (ds - sum(P ds)). Both sides and all lanes count where either turns."""
    if not any(name in case.keywords for name in ("cos_q", "cos_k")):
        return 0.0, 0.0, 0.0
    out, _, q, k, p = attended(case.q, case.k, case.v, dtype=torch.float64, **case.keywords)
    out, p, s = out.nan_to_num(), p.nan_to_num(), score_slip(case, q, k)
    row = (p * s).square().sum(-1, keepdim=True)  # variance of sum(P ds)
    weights = p.square() * (s.square() * (1 - 2 * p) + row)
    v, mean = case.v.double(), out.permute(0, 2, 3, 1, 4)
    # The sum of (P ds)^2 (v - out)^2, its square taken apart.
    square = (p * s).square()
    of_out = torch.einsum("bkrls,bske->bkrle", square, v.square())
    of_out = of_out - 2 * mean * torch.einsum("bkrls,bske->bkrle", square, v) + mean**2 * row
    largest = (float(x.clamp(min=0).max().sqrt()) for x in (of_out, weights, row))
    of_out, of_weights, of_lse = (4 * x for x in largest)
    return of_out, of_weights, of_lse / math.log(2)


def errors_of(case, ours, eps=None, near=None):
    """One sentence for each result that is further off than twice `near` (eager if None), or than a
    few ulps and what the rounding of rotated operands explains, where that is close."""
    dtype = case.q.dtype
    slips = slips_of(case) if near is None and eps is None else (0.0, 0.0, 0.0)
    eps = eps or max(torch.finfo(dtype).eps, FLOOR_IN_EPS * torch.finfo(torch.float32).eps)
    wrong = []
    claims = zip(
        ("out", "weights", "lse"),
        ours,
        results(case, torch.float64),
        near or results(case, dtype),
        slips,
        strict=True,
    )
    for name, x, true, near, slip in claims:
        x, near = x.double(), near.double()
        same = (x == true) | (x.isnan() & true.isnan())
        if name == "lse":  # -1e38 and -inf are one logarithm in fp32
            same = same | ((true < -1e30) & (x < -1e30))
        is_clear = torch.isfinite(true) & (true.abs() < 1e30)
        if not bool((same | is_clear).all()):
            wrong.append(
                f"{name}: {int((~same & ~is_clear).sum())} values differ where fp64 is not finite"
            )
        error, allowed, largest = (
            torch.where(is_clear, y, 0.0).abs().nan_to_num(math.inf).max().item()
            for y in (x - true, near - true, true)
        )
        floor = eps * largest + slip
        if not error <= max(2 * allowed, floor):
            wrong.append(f"{name}: error is {error:.3g}, eager {allowed:.3g}, floor {floor:.3g}")
    return wrong


def make_case(
    device, *, B=2, K=2, R=2, L=45, S=45, D=32, E=32, dtype="fp32", W=None, start=0,
    is_interleaved=False, rules=(), seed=0,
):  # fmt: skip
    make = torch.Generator().manual_seed(seed)

    def noise(*shape):
        return torch.randn(*shape, generator=make).to(DTYPES[dtype]).to(device)

    q = noise(B, K, R, L, D).permute(0, 3, 1, 2, 4)
    k, v = noise(B, K, S, D).transpose(1, 2), noise(B, S, K, E)
    keywords = {"scale": 0.3}
    if W is not None:
        for name, N in (("cos_q", L), ("sin_q", L), ("cos_k", S), ("sin_k", S)):
            keywords[name] = noise(1, N, W).expand(B, N, W)
        keywords |= {"rope_start": start, "rope_interleaved": is_interleaved}
    if "causal" in rules:
        keywords["band_hi"] = S - L
    if "early" in rules:  # the first rows see nothing
        keywords["band_hi"] = -5
    if "window" in rules:
        keywords["band_lo"] = S - L - 6
    if "padded" in rules:
        keywords["key_mask"] = (
            torch.arange(S, device=device).expand(B, S)
            >= torch.tensor([[7], [0]], device=device)[:B]
        )
    if "mask" in rules:
        keywords["mask"] = (
            (torch.rand(B, 1, 1, L, S, generator=make) > 0.4).to(device).expand(B, K, R, L, S)
        )
    if "bias" in rules:
        keywords["bias"] = noise(1, K, R, 1, S).expand(B, K, R, L, S)
    if "lowest" in rules:
        keywords["fill"] = LOWEST
    if "finite" in rules:
        keywords["fill"] = -1e4
    if "adds" in rules:
        keywords["fill_adds"] = True
    return Case(q, k, v, keywords)

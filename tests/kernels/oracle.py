"""Attention in plain torch, straight from its definition, in any dtype: in fp64 the truth, in the
inputs' dtype eager.

A `Case` is one attention with its tensors. `errors_of` runs a claim's kernels and returns what is
wrong with them, judged by one rule: per result, the largest error against fp64 is at most twice
that of same-dtype eager, or a few ulps of the result's largest value where eager happens to be
exact.
"""

import dataclasses
import math
from typing import Any

import torch

FAR = 1e3  # rows beyond it hold no computed score but a fill or a bias, and keep their origin apart
ABSORBING_FILL = -1e30
TENSORS = ("cos_q", "sin_q", "cos_k", "sin_k", "bias", "mask", "key_mask", "keep", "sink")


@dataclasses.dataclass(repr=False)
class Case:
    """Inputs by the launchers' names: q, k, v and the keywords."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    keywords: dict[str, Any]
    grad_out: torch.Tensor | None = None

    def __repr__(self) -> str:
        """Shapes, strides and options: what a falsifying example is recognised by."""
        tensors = {"q": self.q, "k": self.k, "v": self.v, "grad_out": self.grad_out}
        parts = [str(self.q.dtype)]
        for name, x in (tensors | self.keywords).items():
            is_tensor = isinstance(x, torch.Tensor)
            parts.append(
                f"{name}={list(x.shape)}/{list(x.stride())}" if is_tensor else f"{name}={x}"
            )
        return f"Case({', '.join(parts)})"


def rotate(x, cos, sin, start, is_interleaved):
    """x [B, N, heads.., D], cos and sin [B, N, W]."""
    W = cos.shape[-1]
    between = (1,) * (x.dim() - 3)
    cos = cos.reshape(*cos.shape[:2], *between, W)
    sin = sin.reshape(*sin.shape[:2], *between, W)
    part = x[..., start : start + W]
    if is_interleaved:
        other = torch.stack((-part[..., 1::2], part[..., 0::2]), -1).flatten(-2)
    else:
        other = torch.cat((-part[..., W // 2 :], part[..., : W // 2]), -1)
    return torch.cat((x[..., :start], part * cos + other * sin, x[..., start + W :]), -1)


def attention(q, k, v, *, dtype, **keywords):
    """out_BLKRE in the computing dtype and lse_BKRL in fp64; differentiable in q, k, v."""
    return attended(q, k, v, dtype=dtype, **keywords)[:2]


def attended(
    q, k, v, *, dtype, scale, softcap=0.0, band_lo=None, band_hi=None, fill=-math.inf,
    fill_adds=False, rope_start=0, rope_interleaved=False, keep_scale=1.0, precision="ieee",
    **tensors,
):  # fmt: skip
    """As `attention`, and what lies between: rotated q and k, P_BKRLS before dropout."""
    get = {name: tensors.get(name) for name in TENSORS}
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if get["cos_q"] is not None:
        q = rotate(q, get["cos_q"].to(dtype), get["sin_q"].to(dtype), rope_start, rope_interleaved)
    if get["cos_k"] is not None:
        k = rotate(k, get["cos_k"].to(dtype), get["sin_k"].to(dtype), rope_start, rope_interleaved)
    s = torch.einsum("blkrd,bskd->bkrls", q, k) * scale
    if softcap > 0:
        s = softcap * torch.tanh(s / softcap)
    soft = s.float() if dtype != torch.float64 else s  # eager's softmax runs in fp32
    if get["bias"] is not None:
        soft = soft + get["bias"]
    L, S = s.shape[-2:]
    distance = torch.arange(S, device=q.device)[None, :] - torch.arange(L, device=q.device)[:, None]
    hidden = torch.zeros_like(s, dtype=torch.bool)
    if band_lo is not None:
        hidden = hidden | (distance < band_lo)
    if band_hi is not None:
        hidden = hidden | (distance > band_hi)
    if get["key_mask"] is not None:
        hidden = hidden | ~get["key_mask"][:, None, None, None, :]
    if get["mask"] is not None:
        hidden = hidden | ~get["mask"]
    is_absorbing = fill != -math.inf and fill <= ABSORBING_FILL
    empty = hidden.all(-1, keepdim=True) if is_absorbing and get["sink"] is None else None
    if fill == -math.inf or is_absorbing:
        soft = soft.masked_fill(hidden, -math.inf)
    else:
        soft = (
            torch.where(hidden, soft + fill, soft) if fill_adds else soft.masked_fill(hidden, fill)
        )
    if empty is not None:
        # Uniform, whatever the scores: but an added fill lets the gradient through, a replacing one
        # stops it.
        uniform = (s - s.detach()) if fill_adds else torch.zeros_like(s)
        soft = torch.where(empty, uniform, soft)
    if get["sink"] is not None:
        column = get["sink"].to(soft.dtype)[None, :, :, None, None].expand(*soft.shape[:-1], 1)
        p = torch.softmax(torch.cat((soft, column), -1), -1)[..., :-1]
        lse = torch.logsumexp(torch.cat((soft, column), -1).double(), -1) / math.log(2)
    else:
        p = torch.softmax(soft, -1)
        lse = torch.logsumexp(soft.double(), -1) / math.log(2)
    if empty is not None:
        lse = torch.where(empty[..., 0], math.inf, lse)
    p = used = p.to(dtype)
    if get["keep"] is not None:
        used = p * get["keep"].to(dtype) * keep_scale
    return torch.einsum("bkrls,bske->blkre", used, v), lse, q, k, p


def gradients(case, dtype):
    """out, lse, and dq, dk, dv, in the computing dtype."""
    leaves = [x.detach().to(dtype).clone().requires_grad_() for x in (case.q, case.k, case.v)]
    out, lse = attention(*leaves, dtype=dtype, **case.keywords)
    if case.grad_out is None:
        return [out.detach(), lse.detach()]
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, case.grad_out.to(dtype))]


def score_slip(case: Case, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Standard deviation of what the rounding of rotated q and k does to each score, BKRLS."""
    eps = torch.finfo(case.q.dtype).eps
    products = torch.einsum("blkrd,bskd->bkrls", q.square(), k.square()).sqrt()
    return abs(case.keywords["scale"]) * products * eps / math.sqrt(6)


def floor_of(case: Case, name: str, largest: float) -> float:
    """What rounding alone explains, where eager happens to be exact or lucky (one key, few rows).

    * One rounding of the result in its dtype.
    * The rounding of log-sum-exp to fp32, from which the backward rebuilds P: eps * |LSE| in P.
    * Four standard deviations of what the rounding of rotated q and k does to scores, and that of O
      to delta, carried through to the result.
    """
    eps, tiny = torch.finfo(case.q.dtype).eps, torch.finfo(torch.float32).eps
    scale = abs(case.keywords["scale"])
    out, lse, q, k, p = attended(case.q, case.k, case.v, dtype=torch.float64, **case.keywords)
    out, p = out.nan_to_num(), p.nan_to_num()
    ordinary = lse[torch.isfinite(lse) & (lse.abs() < FAR)]
    steepest = float(ordinary.abs().max()) if ordinary.numel() else 0.0
    floor = largest * max(eps, tiny * max(8.0, steepest))

    score = score_slip(case, q, k)
    slip = (p * score).square()
    if name == "lse":
        return floor + 4 * float(score.max()) / math.log(2)
    if name == "out":
        moved = torch.einsum("bkrls,bske->blkre", slip, case.v.double().square()).sqrt()
        return floor + 4 * float(moved.max())
    grad_out = case.grad_out.double()
    if name == "dv":
        moved = torch.einsum("bkrls,blkre->bske", slip, grad_out.square()).sqrt()
        return floor + 4 * float(moved.max())
    dp = torch.einsum("blkre,bske->bkrls", grad_out.abs(), case.v.double().abs())
    delta = (grad_out * out).square().sum(-1).sqrt().permute(0, 2, 3, 1)[..., None]
    spread = p * (delta * eps / math.sqrt(12) + tiny * dp.amax(-1, keepdim=True))
    if name == "dq":  # one delta for a whole row: its share of every key has the same sign
        moved = torch.einsum("bkrls,bskd->blkrd", spread, k.abs())
        slipped = torch.einsum("bkrls,bskd->blkrd", slip * dp.square(), k.square()).sqrt()
    else:
        moved = torch.einsum("bkrls,blkrd->bskd", spread.square(), q.square()).sqrt()
        slipped = torch.einsum("bkrls,blkrd->bskd", slip * dp.square(), q.square()).sqrt()
    tables = [case.keywords[x] for x in (f"cos_{name[1]}", f"sin_{name[1]}") if x in case.keywords]
    growth = max(1.0, sum(float(x.double().abs().max()) for x in tables))
    return floor + 4 * scale * growth * float((moved + slipped).max())


def errors_of(case: Case, ours: dict[str, torch.Tensor]) -> list[str]:
    """One sentence for every result in `ours` (out, lse, dq, dk, dv) that is further off than the
    rule allows."""
    names = ("out", "lse", "dq", "dk", "dv")
    truth = dict(zip(names, gradients(case, torch.float64), strict=False))
    eager = dict(zip(names, gradients(case, case.q.dtype), strict=False))
    wrong = []
    for name, x in ours.items():
        true, near = truth[name], eager[name].double()
        x = x.double().reshape(true.shape)
        unclear = ~torch.isfinite(true) | ((name == "lse") & (true.abs() > 1e30))
        same = (x == true) | (x.isnan() & true.isnan())
        if name == "lse":  # -1e38 and -inf are one logarithm in fp32
            same = same | ((true < -1e30) & (x < -1e30))
        if not bool(same[unclear].all()):
            wrong.append(
                f"{name}: {int((~same & unclear).sum())} values differ where fp64 is not finite"
            )
        clear = ~unclear
        if not bool(clear.any()):
            continue
        error = (x - true)[clear].abs().nan_to_num(math.inf).max().item()
        allowed = (near - true)[clear].abs().max().item()
        floor = floor_of(case, name, true[clear].abs().max().item())
        if not error <= max(2 * allowed, floor):
            wrong.append(f"{name}: error is {error:.3g}, eager {allowed:.3g}, floor {floor:.3g}")
    return wrong


def has_nan_rows(case: Case) -> bool:
    """Rows that see nothing are NaN in eager and poison its gradients: nothing to compare."""
    out, _ = attention(case.q, case.k, case.v, dtype=torch.float64, **case.keywords)
    return bool(out.isnan().any())

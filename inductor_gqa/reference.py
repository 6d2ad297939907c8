"""What a site means, in plain PyTorch: the one definition that kernels, CPU code, tests and checks
are held against.

Letters: B batch, K key/value heads, R query heads a key/value head, L query length, S key length, D
and E head dims of keys and of values, W rotated width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

LOG2E = math.log2(math.e)
ABSORBING = -1e30  # a fill at or below this swallows every score it is added to


def may_hide_a_row(
    L: int, S: int, band_lo: int | None, band_hi: int | None, is_masked: bool
) -> bool:
    """Whether some row may see no key. band_hi empties the first row first, band_lo the last."""
    return (
        is_masked
        or (band_hi is not None and band_hi < 0)
        or (band_lo is not None and band_lo + L > S)
        or (band_lo is not None and band_hi is not None and band_lo > band_hi)
    )


def rotate(x: Tensor, cos: Tensor, sin: Tensor, start: int, interleaved: bool) -> Tensor:
    """Rotary embedding of the lanes start .. start+W of the last dim; cos and sin broadcast to
    those lanes.

    Computed in the wider of the dtypes (at least fp32), rounded once to x's.
    """
    width = cos.shape[-1]
    wide = torch.promote_types(torch.promote_types(x.dtype, cos.dtype), torch.float32)
    turned = x[..., start : start + width].to(wide)
    if interleaved:
        crossed = torch.stack((-turned[..., 1::2], turned[..., ::2]), -1).flatten(-2)
    else:
        crossed = torch.cat((-turned[..., width // 2 :], turned[..., : width // 2]), -1)
    turned = (turned * cos.to(wide) + crossed * sin.to(wide)).to(x.dtype)
    return torch.cat((x[..., :start], turned, x[..., start + width :]), -1)


def unrotate(g: Tensor, cos: Tensor, sin: Tensor, start: int, interleaved: bool) -> Tensor:
    """The exact adjoint of `rotate`, whatever the halves of the tables are."""
    width = cos.shape[-1]
    wide = torch.promote_types(torch.promote_types(g.dtype, cos.dtype), torch.float32)
    turned = g[..., start : start + width].to(wide)
    swept = turned * sin.to(wide)
    if interleaved:
        crossed = torch.stack((swept[..., 1::2], -swept[..., ::2]), -1).flatten(-2)
    else:
        crossed = torch.cat((swept[..., width // 2 :], -swept[..., : width // 2]), -1)
    turned = (turned * cos.to(wide) + crossed).to(g.dtype)
    return torch.cat((g[..., :start], turned, g[..., start + width :]), -1)


def _beside(table: Tensor, x: Tensor) -> Tensor:
    """[B, N, W] as it broadcasts to x = [B, N, heads..., D]."""
    return table[(slice(None), slice(None), *[None] * (x.dim() - 3))]


def turned(x: Tensor, which: str, a: dict[str, Any]) -> Tensor:
    """x = [B, N, heads..., D] rotated by the tables of "q" or "k", if there are any."""
    cos, sin = a[f"cos_{which}"], a[f"sin_{which}"]
    if cos is None:
        return x
    tables = _beside(cos, x), _beside(sin, x)
    return rotate(x, tables[0], tables[1], a["rope_start"], a["rope_interleaved"])


def turned_back(g: Tensor, which: str, a: dict[str, Any]) -> Tensor:
    """The adjoint of `turned`."""
    cos, sin = a[f"cos_{which}"], a[f"sin_{which}"]
    if cos is None:
        return g
    tables = _beside(cos, g), _beside(sin, g)
    return unrotate(g, tables[0], tables[1], a["rope_start"], a["rope_interleaved"])


def hidden_BKRLS(
    L: int,
    S: int,
    band_lo: int | None,
    band_hi: int | None,
    key_mask: Tensor | None,
    mask: Tensor | None,
    device: torch.device,
) -> Tensor | None:
    """True where a score is hidden, in a shape that broadcasts to [B, K, R, L, S]; None where
    nothing is."""
    hidden: Tensor | None = None
    if band_lo is not None or band_hi is not None:
        distance = torch.arange(S, device=device)[None, :] - torch.arange(L, device=device)[:, None]
        if band_hi is not None:
            hidden = distance > band_hi
        if band_lo is not None:
            low = distance < band_lo
            hidden = low if hidden is None else hidden | low
    if key_mask is not None:
        masked = ~key_mask[:, None, None, None, :]
        hidden = masked if hidden is None else hidden | masked
    if mask is not None:
        hidden = ~mask if hidden is None else hidden | ~mask
    return hidden


def _scores(
    q: Tensor, k: Tensor, a: dict[str, Any], wide: torch.dtype
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(scores as the softmax sees them, derivative of the softcap or None, hidden or None)."""
    q, k = turned(q, "q", a), turned(k, "k", a)
    s = torch.einsum("blkrd,bskd->bkrls", q.to(wide), k.to(wide)) * a["scale"]
    slope = None
    if a["softcap"] > 0:
        bent = torch.tanh(s / a["softcap"])
        s, slope = bent * a["softcap"], 1 - bent * bent
    if a["bias"] is not None:
        s = s + a["bias"].to(wide)
    L, S = s.shape[-2:]
    hidden = hidden_BKRLS(L, S, a["band_lo"], a["band_hi"], a["key_mask"], a["mask"], s.device)
    if hidden is not None:
        if a["fill_adds"] and a["fill"] > ABSORBING:
            s = torch.where(hidden, s + a["fill"], s)
        else:
            # One value for all hidden scores: -inf drops them, an absorbing one leaves a row
            # without a visible key uniform.
            s = s.masked_fill(
                hidden,
                max(a["fill"], torch.finfo(wide).min) if a["fill"] > -math.inf else -math.inf,
            )
    return s, slope, hidden


def _weights(s: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """(softmax over the keys, log2 of its denominator).

    The softmax is not made from the denominator: where all scores are finfo.min, adding a logarithm
    to them changes nothing.
    """
    if sink is None:
        return torch.softmax(s, -1), torch.logsumexp(s, -1) * LOG2E
    with_sink = torch.cat(
        (s, sink.to(s.dtype)[None, :, :, None, None].expand(*s.shape[:-1], 1)), -1
    )
    return torch.softmax(with_sink, -1)[..., :-1], torch.logsumexp(with_sink, -1) * LOG2E


def attention(q: Tensor, k: Tensor, v: Tensor, a: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """(out_BLKRE in v's dtype, lse_BKRL base 2). `a` holds the other arguments of the op by name
    (ops.py)."""
    wide = torch.promote_types(q.dtype, torch.float32)
    s, _, _ = _scores(q, k, a, wide)
    p, lse = _weights(s, a["sink"])
    if a["keep"] is not None:
        p = p * a["keep"] * a["keep_scale"]
    out = torch.einsum("bkrls,bske->blkre", p, v.to(wide))
    return out.to(v.dtype).contiguous(), lse.to(torch.float32).contiguous()


def attention_weights(
    q: Tensor, k: Tensor, v: Tensor, a: dict[str, Any], dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """As `attention`, and the weights_BKRLS in `dtype` between out and lse."""
    wide = torch.promote_types(q.dtype, torch.float32)
    s, _, _ = _scores(q, k, a, wide)
    p, lse = _weights(s, a["sink"])
    out = torch.einsum("bkrls,bske->blkre", p, v.to(wide))
    return (
        out.to(v.dtype).contiguous(),
        p.to(dtype).contiguous(),
        lse.to(torch.float32).contiguous(),
    )


def attention_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, a: dict[str, Any], needs: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v (before rotation), an empty tensor for what is not needed. Recomputes
    the weights."""
    wide = torch.promote_types(q.dtype, torch.float32)
    s, slope, hidden = _scores(q, k, a, wide)
    p, _ = _weights(s, a["sink"])
    g = grad_out.to(wide)
    kept = p if a["keep"] is None else p * a["keep"] * a["keep_scale"]
    dv = torch.einsum("bkrls,blkre->bske", kept, g).to(v.dtype) if needs[2] else v.new_empty(0)
    dp = torch.einsum("blkre,bske->bkrls", g, v.to(wide))
    if a["keep"] is not None:
        dp = dp * a["keep"] * a["keep_scale"]
    if a["sink"] is None and p.shape[-1]:
        # The weights of a row sum to one, so that what its gradients have in common is no part of
        # it. Seen from the largest weight's, nothing large cancels where that is nearly one.
        dp = dp - dp.gather(-1, p.argmax(-1, keepdim=True))
    ds = p * (dp - (p * dp).sum(-1, keepdim=True))
    if hidden is not None and not a["fill_adds"]:
        ds = ds.masked_fill(hidden, 0.0)
    ds = ds * a["scale"] if slope is None else ds * slope * a["scale"]
    dq, dk = q.new_empty(0), k.new_empty(0)
    if needs[0]:
        wide_dq = torch.einsum("bkrls,bskd->blkrd", ds, turned(k, "k", a).to(wide))
        dq = turned_back(wide_dq, "q", a).to(q.dtype).contiguous()
    if needs[1]:
        wide_dk = torch.einsum("bkrls,blkrd->bskd", ds, turned(q, "q", a).to(wide))
        dk = turned_back(wide_dk, "k", a).to(k.dtype).contiguous()
    return dq, dk, dv.contiguous()


def weights_backward(
    grad_out: Tensor,
    weights: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_q: Tensor | None,
    sin_q: Tensor | None,
    cos_k: Tensor | None,
    sin_k: Tensor | None,
    scale: float,
    group: int,
    start: int,
    interleaved: bool,
    *needs: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Backward from given weights_BHLS: q_BLHD, k_BSHD, v_BSHE have all H heads, the gradients of k
    and v are summed over groups of `group` heads; then the adjoint of the rotation that cos and sin
    describe."""
    wide = torch.promote_types(q.dtype, torch.float32)
    g, p = grad_out.to(wide), weights.to(wide)
    dp = torch.einsum("blhe,bshe->bhls", g, v.to(wide))
    ds = scale * p * (dp - (p * dp).sum(-1, keepdim=True))
    out: list[Tensor] = []
    for needed, spelled, left, right, x, cos, sin in (
        (needs[0], "bhls,bshd->blhd", ds, k, q, cos_q, sin_q),
        (needs[1], "bhls,blhd->bshd", ds, q, k, cos_k, sin_k),
        (needs[2], "bhls,blhe->bshe", p, grad_out, v, None, None),
    ):
        if not needed:
            out.append(q.new_empty(0))
            continue
        made = torch.einsum(spelled, left, right.to(wide))
        if x is not q and group > 1:
            made = made.unflatten(2, (-1, group)).sum(3)
        if cos is not None and sin is not None:
            made = unrotate(made, cos[:, :, None], sin[:, :, None], start, interleaved)
        out.append(made.to(x.dtype).contiguous())
    return out[0], out[1], out[2]


def linear_backward(grads: list[Tensor], weights: list[Tensor], x: Tensor) -> list[Tensor]:
    """Gradients of Y_i = X W_i^T: dX [T, C], the sum over the layers, then every dW_i [N_i, C]; G_i
    [T, N_i], W_i [N_i, C] and X [T, C]. The sum is rounded after each of its terms."""
    dx = grads[0] @ weights[0]
    for g, w in zip(grads[1:], weights[1:], strict=True):
        dx = torch.addmm(dx, g, w)
    return [dx, *(g.mT @ x for g in grads)]


def linear_forward(x: Tensor, weights: list[Tensor]) -> list[Tensor]:
    """Every Y_i = X W_i^T [T, N_i] of X [T, C] and W_i [N_i, C], as PyTorch multiplies."""
    return [x @ w.mT for w in weights]

"""The ops on the CPU: PyTorch's own fused CPU attention where it computes the same, else the
reference.

The fused CPU attention never holds more than a strip of scores. It takes an additive mask, one head
dim and no softcap, sink or dropout; what needs those goes to `reference`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import reference

aten = torch.ops.aten
Arguments = dict[str, Any]
SMALL = (
    256 * 256
)  # scores per head up to which memory does not matter and the reference rounds less


def _is_flash(q: Tensor, k: Tensor, v: Tensor, a: Arguments) -> bool:
    """Whether PyTorch's fused attention computes the same, and well.

    It cannot tell a row of finfo.min alone from others (its log-sum-exp swallows the logarithm), so
    no row may be without a visible key unless hidden scores are -inf, and no bias may bring such
    values in. It adds its mask, so that what a hidden key holds must be finite: an unwritten slot
    of a cache may hold NaN.
    """
    L, S = q.shape[1], k.shape[1]
    banded = a["band_lo"] is not None or a["band_hi"] is not None
    hides = banded or a["key_mask"] is not None or a["mask"] is not None
    drops = a["fill"] == -math.inf
    sees = not _may_hide_a_row(L, S, a)
    return (
        q.shape[-1] == v.shape[-1]
        and q.dtype in (torch.float32, torch.bfloat16)
        and not a["softcap"]
        and a["sink"] is None
        and a["keep"] is None
        and a["bias"] is None
        and (not hides or drops or (sees and a["fill"] <= reference.ABSORBING))
        and L * S > SMALL
        and (not hides or bool(torch.isfinite(k).all()))
    )


def _may_hide_a_row(L: int, S: int, a: Arguments) -> bool:
    is_masked = a["key_mask"] is not None or a["mask"] is not None
    return reference.may_hide_a_row(L, S, a["band_lo"], a["band_hi"], is_masked)


def _additive_mask(q: Tensor, k: Tensor, a: Arguments) -> Tensor | None:
    """[B|1, H|1, L, S] in q's dtype, or None."""
    _, L, K, R, _ = q.shape
    S = k.shape[1]
    hidden = reference.hidden_BKRLS(
        L, S, a["band_lo"], a["band_hi"], a["key_mask"], a["mask"], q.device
    )
    mask = a["bias"]
    if hidden is not None:
        fill = max(a["fill"], torch.finfo(q.dtype).min) if a["fill"] > -math.inf else -math.inf
        zero = torch.zeros((), dtype=q.dtype) if mask is None else mask.to(q.dtype)
        mask = torch.where(hidden, zero + fill, zero)
    if mask is None:
        return None
    while mask.dim() < 5:
        mask = mask[None]
    heads = mask.shape[1] if mask.shape[1] == mask.shape[2] == 1 else K * R
    if heads > 1:
        mask = mask.expand(-1, K, R, -1, -1)
    return mask.reshape(mask.shape[0], heads, *mask.shape[-2:]).to(q.dtype).expand(-1, -1, L, S)


def _heads_first(q: Tensor, k: Tensor, v: Tensor, a: Arguments) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated q, k and v as [B, H, length, dim], keys and values repeated."""
    B, L, K, R, D = q.shape
    q, k = reference.turned(q, "q", a), reference.turned(k, "k", a)

    def repeated(x: Tensor) -> Tensor:
        shape = (B, x.shape[1], K, R, x.shape[-1])
        return x[:, :, :, None].expand(shape).reshape(B, x.shape[1], K * R, -1).transpose(1, 2)

    q_BHLD = q.reshape(B, L, K * R, D).transpose(1, 2)
    return _rows(q_BHLD), _rows(repeated(k)), _rows(repeated(v))


def _rows(x: Tensor) -> Tensor:
    """The fused attention reads rows as if they were contiguous, whatever the last stride is."""
    return x if x.stride(-1) == 1 else x.contiguous()


def attention(q: Tensor, k: Tensor, v: Tensor, a: Arguments) -> tuple[Tensor, Tensor]:
    if not _is_flash(q, k, v, a):
        return reference.attention(q, k, v, a)
    B, L, K, R, _ = q.shape
    q_BHLD, k_BHSD, v_BHSE = _heads_first(q, k, v, a)
    mask = _additive_mask(q, k, a)
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        q_BHLD, k_BHSD, v_BHSE, 0.0, False, attn_mask=mask, scale=a["scale"]
    )
    if mask is not None and _may_hide_a_row(L, k.shape[1], a):
        # Of -inf then, see `_is_flash`. Eager has 0 / 0; the fused attention makes those rows zero.
        out = out.masked_fill((mask == -math.inf).all(-1, keepdim=True), math.nan)
    out = out.transpose(1, 2).reshape(B, L, K, R, -1)
    return out.contiguous(), (lse.reshape(B, K, R, L).float() * reference.LOG2E).contiguous()


def attention_backward(
    grad_out: Tensor,
    out: Tensor,
    lse: Tensor,
    needs: Sequence[bool],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Arguments,
) -> tuple[Tensor, Tensor, Tensor]:
    if not _is_flash(q, k, v, a):
        return reference.attention_backward(grad_out, q, k, v, a, needs)
    B, L, K, R, _ = q.shape
    q_BHLD, k_BHSD, v_BHSE = _heads_first(q, k, v, a)
    heads = lambda x: _rows(x.reshape(B, L, K * R, -1).transpose(1, 2))  # noqa: E731
    made = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        heads(grad_out),
        q_BHLD,
        k_BHSD,
        v_BHSE,
        heads(out),
        (lse / reference.LOG2E).reshape(B, K * R, L),
        0.0,
        False,
        attn_mask=_additive_mask(q, k, a),
        scale=a["scale"],
    )
    dq, dk, dv = (x.transpose(1, 2).reshape(B, -1, K, R, x.shape[-1]) for x in made)
    dk, dv = (x.sum(3) if R > 1 else x[:, :, :, 0] for x in (dk, dv))
    dq, dk = reference.turned_back(dq, "q", a), reference.turned_back(dk, "k", a)
    empty = q.new_empty(0)
    return tuple(x.contiguous() if n else empty for x, n in zip((dq, dk, dv), needs, strict=True))  # type: ignore[return-value]

"""A site in plain words, for reports."""

from __future__ import annotations

import math
from typing import Any

from inductor_gqa.site import Mask, Site

from .axes import product, same
from .given import Given


def describe(site: Site) -> str:
    """E.g. "32 query / 8 key-value heads of 128, rotate-half RoPE, causal + key padding"."""
    kv = product(d.size for d in site.kv_heads)
    group = product(d.size for d in site.group)
    heads = f"{kv * group} query / {kv} key-value heads" if group != 1 else f"{kv} heads"
    dims = str(site.head_dim)
    if site.value_dim != site.head_dim:
        dims += f" (values {site.value_dim})"
    parts = [f"{heads} of {dims}", _rotation(site), _mask(site.mask)]
    if site.sink is not None:
        parts.append("sinks")
    if site.keep:
        parts.append("dropout")
    if site.softcap:
        parts.append(f"softcap {site.softcap:g}")
    parts.append("returns the weights" if site.weights else "returns no weights")
    if site.is_sdpa:
        parts.append("scaled_dot_product_attention")
    if site.gradients is not None:
        found = site.gradients
        names = [n for n, t in (("q", found.q), ("k", found.k), ("v", found.v)) if t]
        parts.append("backward of " + ", ".join(names))
    return ", ".join(part for part in parts if part)


def describe_given(given: Given) -> str:
    """E.g. "backward from given weights, 32 query / 8 key-value heads of 128, rotate-half RoPE"."""
    kv = product(d.size for d in given.kv_heads)
    group = product(d.size for d in given.group)
    heads = f"{kv * group} query / {kv} key-value heads" if group != 1 else f"{kv} heads"
    turned = _rotation(given)
    return f"backward from given weights, {heads} of {given.head_dim}, {turned}"


def _rotation(site: Site | Given) -> str:
    turn = site.rotate_q or site.rotate_k
    if turn is None:
        return "no RoPE inside"
    kind = "interleaved" if turn.interleaved else "rotate-half"
    partial = f" on {turn.width} lanes" if turn.width != site.head_dim else ""
    where = ""
    if site.rotate_k is None:
        where = " (q only)"
    elif site.rotate_q is None:
        where = " (k only)"
    return f"{kind} RoPE{partial}{where}"


def _mask(mask: Mask) -> str:
    parts: list[str] = []
    if mask.band_hi is not None:
        parts.append("causal" if same(mask.band_hi, 0) else f"causal shifted by {mask.band_hi}")
    if mask.band_lo is not None:
        parts.append(_window(mask))
    if mask.keys:
        parts.append("key padding")
    if mask.tensors:
        parts.append("boolean mask")
    if mask.bias:
        parts.append("additive mask")
    if parts and mask.hides and -math.inf < mask.fill > -1e30:
        parts.append(f"hidden scores {'plus ' if mask.fill_adds else ''}{mask.fill:g}")
    return " + ".join(parts) or "no mask"


def _window(mask: Mask) -> str:
    width: Any = -mask.band_lo if mask.band_hi is None else mask.band_hi - mask.band_lo + 1
    return f"window {width}"

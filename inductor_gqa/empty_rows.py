"""Makes rows that see no key zero, as `F.scaled_dot_product_attention` does.

The ops know such rows as NaN (hidden scores are -inf) or as uniform (they are one huge negative
number). The second is what is asked of them here, and a boolean per row then takes out the row of
the result and of its gradient; with it nothing of the row is left in any other gradient.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from . import ops
from .emit import Emitter
from .patterns.axes import shape_of
from .site import Mask

aten, prims = torch.ops.aten, torch.ops.prims
Node = torch.fx.Node
LOWEST = torch.finfo(torch.float32).min


def sees(mask: Mask, arguments: list[Any], emit: Emitter) -> Node:
    """[B|1, L|1, K|1, R|1, 1]: whether a row sees a key. Changes the op's arguments so that rows
    that do not are finite."""
    at = {name: k for k, name in enumerate(ops.NAMES)}
    seen: Node | None = None
    for part in (
        arguments[at["mask"]],
        _beside_heads(arguments[at["key_mask"]], emit),
        *_band(mask, arguments, at, emit),
    ):
        if part is not None:
            seen = part if seen is None else emit.call(aten.bitwise_and.Tensor, seen, part)
    bias = arguments[at["bias"]]
    if bias is not None:
        present = emit.call(aten.ne.Scalar, bias, -math.inf)
        seen = present if seen is None else emit.call(aten.bitwise_and.Tensor, seen, present)
    assert seen is not None
    rows = emit.call(aten.any.dim, seen, -1, True)
    if bias is not None:
        zero = _zero(bias, emit)
        arguments[at["bias"]] = emit.call(aten.where.self, rows, bias, zero)
    if mask.hides:
        arguments[at["fill"]] = LOWEST
    return emit.call(aten.permute.default, rows, [0, 3, 1, 2, 4])


def zeroed(x_BLKRE: Node, sees: Node, emit: Emitter) -> Node:
    return emit.call(aten.where.self, sees, x_BLKRE, _zero(x_BLKRE, emit))


def _zero(like: Node, emit: Emitter) -> Node:
    value = like.meta["val"]
    return emit.call(aten.full.default, [], 0.0, dtype=value.dtype, device=value.device)


def _beside_heads(key_mask: Node | None, emit: Emitter) -> Node | None:
    """[B, S] as it broadcasts to the scores."""
    if key_mask is None:
        return None
    for _ in range(3):
        key_mask = emit.call(aten.unsqueeze.default, key_mask, 1)
    return key_mask


def _band(mask: Mask, arguments: list[Any], at: dict[str, int], emit: Emitter) -> list[Node]:
    if mask.band_lo is None and mask.band_hi is None:
        return []
    q, k = arguments[0], arguments[1]
    device = q.meta["val"].device
    i = _positions(emit.size(shape_of(q)[1]), device, emit)
    j = _positions(emit.size(shape_of(k)[1]), device, emit)
    rows = emit.call(aten.unsqueeze.default, i, 1)
    distance = emit.call(aten.sub.Tensor, emit.call(aten.unsqueeze.default, j, 0), rows)
    out: list[Node] = []
    for name, compare in (("band_lo", aten.ge), ("band_hi", aten.le)):
        bound = arguments[at[name]]
        if bound is not None:
            seen = emit.call(compare.Scalar, distance, bound)
            for _ in range(3):
                seen = emit.call(aten.unsqueeze.default, seen, 0)
            out.append(seen)
    return out


def _positions(count: Any, device: torch.device, emit: Emitter) -> Node:
    return emit.call(
        prims.iota.default,
        count,
        start=0,
        step=1,
        dtype=torch.int64,
        device=device,
        requires_grad=False,
    )

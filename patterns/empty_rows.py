"""Reads whether a row of scores may be hidden as a whole, and what becomes of it.

The softmax of such a row is NaN where the graph takes it as it is, and zero in
`F.scaled_dot_product_attention`, whose decomposition says `where(no key is seen, 0, softmax)`.
"""

from __future__ import annotations

import math

import torch

from inductor_gqa.site import Mask

from .axes import Size, same, shape_of
from .values import scalar_value

aten, prims = torch.ops.aten, torch.ops.prims
Node = torch.fx.Node
NOTS = (aten.logical_not.default, aten.bitwise_not.default)
COPIES = (
    aten.alias.default,
    aten.detach.default,
    aten.clone.default,
    prims.convert_element_type.default,
)


def may_be_empty(mask: Mask, L: Size, S: Size) -> bool:
    """Whether all scores of a row may be -inf, as far as the mask can say."""
    if mask.bias:
        return True
    if not mask.hides or mask.fill > -math.inf:
        return False
    if mask.keys or mask.tensors:
        return True
    low, high = mask.band_lo, mask.band_hi
    if not all(bound is None or isinstance(bound, int) for bound in (low, high)):
        return True
    if high is not None and high < 0:  # the first row is the first that it empties
        return True
    if low is None:
        return False
    if high is not None and low > high:
        return True
    if isinstance(L, int) and isinstance(S, int):  # the last row is the first that it empties
        return low + L > S
    return not same(L, S) or low > 0


def zeroed_where_empty(weights: Node, scores: Node, dim: int) -> Node | None:
    """`where(not any(scores != -inf), 0, weights)`, where the graph holds it."""
    todo = [weights]
    while todo:
        node = todo.pop()
        for user in node.users:
            if user.target in COPIES:
                todo.append(user)
            elif _is_zero_or(node, user) and _is_empty(user.args[0], scores, dim):
                return user
    return None


def _is_zero_or(node: Node, user: Node) -> bool:
    return (
        user.target is aten.where.self
        and user.args[2] is node
        and scalar_value(user.args[1]) == 0.0
    )


def _is_empty(condition: object, scores: Node, dim: int) -> bool:
    """`not any(not (scores == -inf))` along the softmax."""
    some = _argument_of(condition, NOTS)
    if some is None or some.target is not aten.any.dim or some.args[2:] != (True,):
        return False
    rank = len(shape_of(some))
    present = _argument_of(some.args[0], NOTS)
    if some.args[1] % rank != dim or present is None:  # type: ignore[operator]
        return False
    if present.target is not aten.eq.Scalar or present.args[1] != -math.inf:
        return False
    return _seen_through(present.args[0]) is _seen_through(scores)


def _argument_of(node: object, ops: tuple[object, ...]) -> Node | None:
    inner = node.args[0] if isinstance(node, Node) and node.target in ops else None
    return inner if isinstance(inner, Node) else None


def _seen_through(node: object) -> object:
    while isinstance(node, Node) and node.target in COPIES:
        node = node.args[0]
    return node

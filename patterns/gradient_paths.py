"""Follows a gradient through the graph: back to the matmul that made it, on to those that take it.

Only rearrangements, casts and pointwise ops are passed; what they compute is proven elsewhere
(derivative.py, finished.py).
"""

from __future__ import annotations

import operator

import torch

from . import operands
from .axes import Place, Position, same, shape_of
from .elements import RULES
from .moves import broadcast, step
from .values import ValueNumbers, scalar_value

aten, prims = torch.ops.aten, torch.ops.prims
Node = torch.fx.Node

FOLLOWED = {
    *RULES,
    *operands.MOVES,
    prims.convert_element_type.default,
    aten.slice.Tensor,
    aten.select.int,
    aten.split_with_sizes.default,
    aten.split.Tensor,
    aten.unbind.int,
    aten.flip.default,
    aten.copy.default,
    aten.view_as_complex.default,
    operator.getitem,
}
LINEAR = {
    aten.neg.default,
    aten.mul.Tensor,
    aten.mul.Scalar,
    aten.div.Tensor,
    aten.div.Scalar,
    aten.where.self,
}


def back_to_matmul(node: Node, position: Position) -> tuple[Node, Position] | None:
    """The matmul behind rearrangements, and behind the zeros that autograd puts beside the gradient
    of a slice."""
    while node.target not in operands.MATMULS:
        back = _step_back(node, position)
        if back is None:
            return None
        node, position = back
    return node, position


def gradient_matmul(
    node: Node, position: Position, values: ValueNumbers
) -> tuple[Node, Position] | None:
    """The matmul behind a gradient that was negated, scaled or masked on its way."""
    while (found := back_to_matmul(node, position)) is None:
        while (back := _step_back(node, position)) is not None:
            node, position = back
        if node.target not in LINEAR:
            return None
        sources = [n for n in node.all_input_nodes if values.comes_from_gradient(n)]
        if len(sources) != 1:
            return None
        node, position = sources[0], broadcast(sources[0], position)
    return found


def _step_back(node: Node, position: Position) -> tuple[Node, Position] | None:
    back = step(node, position)
    if back is None and node.target is aten.slice_scatter.default:
        back = _out_of_zeros(node, position)
    return back


def _out_of_zeros(node: Node, position: Position) -> tuple[Node, Position] | None:
    base, source = node.args[:2]
    args = (*node.args, *(0, None, None, 1)[len(node.args) - 2 :])
    dim, start = args[2] % len(position), args[3] or 0  # type: ignore[operator]
    place = position[dim]
    if not isinstance(source, Node) or scalar_value(base) != 0.0 or args[5] != 1:
        return None
    if not same(place.offset, start) or not same(place.extent, shape_of(source)[dim]):
        return None
    return source, (*position[:dim], Place(place.digits), *position[dim + 1 :])


def reached_matmuls(dp: Node) -> list[tuple[Node, int]]:
    """Matmuls that the gradient of the weights reaches through pointwise ops, with the side that it
    is on."""
    found: dict[tuple[Node, int], None] = {}
    for node in (dp, *reached(dp)):
        for user in node.users:
            if user.target in operands.MATMULS:
                for side, operand in enumerate(operands.operands(user)):
                    if operand is node:
                        found[user, side] = None
    return list(found)


def reached(dp: Node) -> list[Node]:
    todo, seen = [dp], {dp: None}
    while todo:
        for user in todo.pop().users:
            if user.target in FOLLOWED and user not in seen:
                seen[user] = None
                todo.append(user)
    return list(seen)[1:]

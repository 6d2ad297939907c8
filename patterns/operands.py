"""Reads the operands of the two matmuls of an attention down to the tensors that the projections
made.

A matmul is read in the site's axes through the softmax weights, which are known in both. `view`
follows an operand through rearrangements alone: expand + reshape, repeat_interleave, a grouped 5-D
matmul, einsum and a 3-D bmm all end in the same `View`, with the repeat of keys and values gone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from inductor_gqa.site import View

from .axes import Digit, Place, Position, Unread, shape_of, whole
from .moves import step
from .naming import op_of
from .renaming import Renaming
from .values import ValueNumbers

aten = torch.ops.aten
Node = torch.fx.Node

MATMULS = {aten.bmm.default: 0, aten.mm.default: 0, aten.baddbmm.default: 1}


@dataclass(frozen=True)
class Operand:
    """One side of a matmul: its node, its position in the site's axes, and the matmul it belongs
    to."""

    matmul: Node
    node: Node
    position: Position


def matmul_axes(matmul: Node) -> tuple[Position, Position, Position]:
    """Positions of the left operand, the right operand and the result in axes n, l, c (contracted)
    and r."""
    first = MATMULS[matmul.target]
    left, right = shape_of(matmul.args[first]), shape_of(matmul.args[first + 1])  # type: ignore[arg-type]
    rows, inner, columns = (whole("l", left[-2]), whole("c", left[-1]), whole("r", right[-1]))
    batch = () if len(left) == 2 else (whole("n", left[0]),)
    return (*batch, rows, inner), (*batch, inner, columns), (*batch, rows, columns)


def operands(matmul: Node) -> tuple[Node, Node]:
    first = MATMULS[matmul.target]
    return matmul.args[first], matmul.args[first + 1]  # type: ignore[return-value]


def moved_users(node: Node, position: Position, casts: bool = True) -> Iterator[tuple[Node, Node]]:
    """(rearrangement of the node, its user) for every user that is not itself a rearrangement."""
    todo, seen = [node], {node}
    while todo:
        source = todo.pop()
        for user in source.users:
            if is_move(user, source, casts):
                if user not in seen:
                    seen.add(user)
                    todo.append(user)
            else:
                yield source, user


MOVES = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.permute.default,
    aten.t.default,
    aten.transpose.int,
    aten.expand.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.squeeze.default,
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
    aten.contiguous.default,
}


def is_move(user: Node, source: Node, casts: bool = True) -> bool:
    if user.op != "call_function" or not user.args or user.args[0] is not source:
        return False
    cast = torch.ops.prims.convert_element_type.default
    return user.target in MOVES or (
        casts and user.target is cast and user.meta["val"].dtype.is_floating_point
    )


def view(node: Node, position: Position, stops: frozenset[Node] = frozenset()) -> View:
    """The tensor behind an operand, following rearrangements that keep its dtype."""
    while node not in stops and (back := step(node, position, casts=False)) is not None:
        node, position = back
    return View(node, position)


def origin(node: Node, position: Position) -> View:
    """As `view`, through casts between floats as well."""
    while (back := step(node, position)) is not None:
        node, position = back
    return View(node, position)


def back_to(node: Node, position: Position, goal: Node, values: ValueNumbers) -> Position | None:
    """The position of the element in `goal`, if `node` is a rearrangement (casts allowed) of it."""
    goal = values.first(goal)
    while values.first(node) is not goal:
        back = step(node, position)
        if back is None:
            return None
        node, position = back
    return position


def unrounded(node: Node, goal: Node) -> None:
    """Raises Unread if a value is rounded to a narrower dtype on its way from `goal` to `node`.

    A cast to the dtype that either end has anyway is how mixed precision is written; a narrower one
    is a rounding that the model asks for (as fake quantization does), and the ops would leave it
    out.
    """
    known: dict[Node, bool] = {goal: True}
    casts: list[Node] = []

    def on_the_way(n: Node) -> bool:
        if n not in known:
            known[n] = False
            earlier = n < goal  # in the graph: no way leads there
            for m in () if earlier else n.all_input_nodes:  # all: each way may hold a cast
                known[n] = on_the_way(m) or known[n]
            if known[n] and n.target is torch.ops.prims.convert_element_type.default:
                casts.append(n)
        return known[n]

    on_the_way(node)
    for cast in casts:
        if _step_of(cast) > max(_step_of(node), _step_of(goal)):
            dtype = cast.meta["val"].dtype
            raise Unread(f"a value is rounded to {dtype} on the way, accepted no rounding")


def reaches(node: Node, goal: Node) -> bool:
    """Whether `node` is a rearrangement of `goal`, casts allowed."""
    while node is not goal:
        if node.op != "call_function" or not node.args or not isinstance(node.args[0], Node):
            return False
        node = node.args[0]
    return True


def _step_of(node: Node) -> float:
    """The relative step between neighbours of the node's dtype."""
    dtype = node.meta["val"].dtype
    return torch.finfo(dtype).eps if dtype.is_floating_point else 0.0


def in_site_axes(position: Position, names: Renaming) -> Position:
    return names.apply(position)


def renaming(
    node: Node, position: Position, goal: Node, canonical: Position, values: ValueNumbers
) -> Renaming:
    """How the axes of a matmul are called in the site, learned from an operand (or result) known in
    both."""
    seen = back_to(node, position, goal, values)
    if seen is None:
        raise Unread(
            f"{op_of(node)} is not a rearrangement of {op_of(goal)}, "
            "accepted views, permutes and casts between them"
        )
    names = Renaming()
    names.learn(seen, canonical)
    return names


def free_axis(name: str, size: object, called: str, names: Renaming) -> None:
    """Gives an axis that the softmax weights do not have (the head dim) its name in the site."""
    place = whole(name, size)
    if place.digits:
        names.rules.append((Digit(name, 1, size), Digit(called, 1, size)))


def fixed_lanes(position: Position, axis: str, lanes: Place) -> Position:
    """The position with the named axis replaced by known lanes."""
    return tuple(
        lanes
        if len(place.digits) == 1 and isinstance(d := place.digits[0], Digit) and d.axis == axis
        else place
        for place in position
    )

"""Reads what the weights of an attention are multiplied with: its values.

A backward written by hand may compute the weights once more and leave out their product with the
values. These are then known from the gradient of the weights, dP = dO V^T, that the weights are
multiplied with.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from inductor_gqa.site import View

from . import operands
from .axes import Position, Size, Unread, axes_in, shape_of, whole
from .candidates import detour
from .gradient_paths import back_to_matmul
from .moves import broadcast
from .renaming import Renaming
from .values import ValueNumbers, scalar_value

aten = torch.ops.aten
Node = torch.fx.Node


@dataclass(frozen=True)
class Values:
    """v, its head dim, and the matmul with the weights and the position of its result; None where
    the graph has no such matmul."""

    v: View
    dim: Size
    product: tuple[Node, Position] | None

    def unrounded(self, used: Node, weights: Node) -> None:
        """Raises Unread if the weights are rounded to a narrower dtype before the matmul."""
        for operand in operands.operands(self.product[0]) if self.product else ():
            if operands.reaches(operand, used):
                operands.unrounded(operand, weights)


def read(weights: Node, canonical: Position, values: ValueNumbers) -> Values:
    """The values of `weights` at `canonical`; raises Unread."""
    matmul = _matmul(weights, canonical, values)
    if matmul is not None:
        return _operand(matmul, weights, canonical, values)
    found = beside_gradient(weights, canonical, values)
    if found is None:
        raise Unread("0 matmuls sum the weights over the keys, accepted 1")
    return found


def _matmul(weights: Node, canonical: Position, values: ValueNumbers) -> Node | None:
    """The one matmul that sums weights times values over the keys, or None; other users of the
    weights are checked elsewhere."""
    found: dict[Node, None] = {}
    for moved, user in operands.moved_users(weights, canonical):
        if user.op != "call_function" or user.target not in operands.MATMULS:
            continue
        if values.comes_from_gradient(user):
            continue
        first = operands.MATMULS[user.target]
        left, right, _ = operands.matmul_axes(user)
        for k, position in ((first, left), (first + 1, right)):
            if user.args[k] is not moved:
                continue
            at = operands.back_to(moved, position, weights, values)
            if at is not None and axes_in(at[-1:]) == {"c"}:
                found[user] = None
    if not found and (other := detour(weights, values)) is not None:
        raise Unread(f"the weights pass through {other} before the values, accepted dropout")
    if len(found) > 1:
        raise Unread(f"{len(found)} matmuls sum the weights over the keys, accepted 1")
    return next(iter(found), None)


def _operand(matmul: Node, weights: Node, canonical: Position, values: ValueNumbers) -> Values:
    left, right, result = operands.matmul_axes(matmul)
    a, b = operands.operands(matmul)
    if matmul.target is aten.baddbmm.default and scalar_value(matmul.args[0]) != 0.0:
        raise Unread(
            "something is added to the product of weights and values, accepted the product alone"
        )
    for p, at_p, v, at_v, free in ((a, left, b, right, "r"), (b, right, a, left, "l")):
        if operands.back_to(p, at_p, weights, values) is not None:
            names = operands.renaming(p, at_p, weights, canonical, values)
            dim = shape_of(v)[-1 if free == "r" else -2]
            operands.free_axis(free, dim, "e", names)
            return Values(operands.view(v, names.apply(at_v)), dim, (matmul, names.apply(result)))
    raise Unread(
        "the weights are no operand of their product with the values, accepted the first operand"
    )


def beside_gradient(weights: Node, canonical: Position, values: ValueNumbers) -> Values | None:
    """The operand of dP that varies by key, where P dP is computed."""
    for moved, user in operands.moved_users(weights, canonical):
        if user.target is not aten.mul.Tensor or values.comes_from_gradient(user):
            continue  # autograd's gradient has a forward to be read from
        own = tuple(whole(f"x{d}", n) for d, n in enumerate(shape_of(user)))
        for other in user.all_input_nodes:
            gradient = None if other is moved else back_to_matmul(other, broadcast(other, own))
            if gradient is None:
                continue
            matmul, at = gradient
            to_site = operands.renaming(moved, broadcast(moved, own), weights, canonical, values)
            left, right, result = operands.matmul_axes(matmul)
            names = Renaming()
            names.learn(result, to_site.apply(at))
            sides = operands.operands(matmul)
            dim = shape_of(sides[0])[-1]
            operands.free_axis("c", dim, "e", names)
            for node, place in zip(sides, (left, right), strict=True):
                view = operands.view(node, names.apply(place))
                if axes_in(view.position) >= {"j"} and not axes_in(view.position) >= {"i"}:
                    return Values(view, dim, None)
    return None

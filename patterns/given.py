"""Reads an attention backward that stands alone, with the weights given as a tensor.

Written by hand, or left over where a graph holds no forward:

    dP = dO V^T;  dS = scale * P (dP - rowsum(P dP));  dQ = dS K;  dK = dS^T Q;  dV = P^T dO

followed by a sum over the heads of a group and by the adjoint of a rotation. Nothing is assumed
about P: it need not be a softmax of q and k, and the heads of a group may each have keys and values
of their own. The rotation of the gradients may be spelled with the sine taken before or after the
halves are swapped; which one it is decides which sine each lane gets.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from inductor_gqa.site import Rotation, Target, View

from . import derivative, gradient_paths, gradients, operands, terms
from .attention import arrangements, canonical_position
from .axes import Digit, Place, Position, Size, Unread, shape_of
from .candidates import comes_from_product
from .elements import Elements
from .given_results import Result, followed
from .moves import step
from .naming import op_of
from .renaming import Renaming, atoms_of, covered
from .values import ValueNumbers

CAST = torch.ops.prims.convert_element_type.default
aten = torch.ops.aten
Node = torch.fx.Node


@dataclass
class Given:
    """A backward from given weights. Axes and letters as in `Site`; every query head has keys and
    values of its own."""

    anchor: Node
    weights: View
    grad_out: View
    q: View | None
    k: View | None
    v: View
    batch: tuple[Digit, ...]
    kv_heads: tuple[Digit, ...]
    group: tuple[Digit, ...]
    query_length: Size
    key_length: Size
    head_dim: int
    value_dim: int
    scale: float
    scale_tensor: Node | None = None  # 0-d, multiplies scale
    rotate_q: Rotation | None = None
    rotate_k: Rotation | None = None
    q_targets: tuple[Target, ...] = ()
    k_targets: tuple[Target, ...] = ()
    v_targets: tuple[Target, ...] = ()


@dataclass
class _Found:
    views: dict[str, View] = field(default_factory=dict)
    results: dict[str, Result] = field(default_factory=dict)
    scale: tuple[float, Node | None] | None = None


def read_given(total: Node, values: ValueNumbers) -> Given:
    """The backward around `total` = sum(P * dP, -1); raises Unread."""
    product = total.args[0]
    assert isinstance(product, Node)
    canonical = canonical_position(shape_of(product))
    weights, dp, dp_position = _sides(product, canonical)
    grad_out, v_view, value_dim = _operands(dp, dp_position)
    found = _Found()
    head_dim = _score_gradients(weights, dp, dp_position, found, values)
    _value_gradient(weights, canonical, grad_out, found, values)
    sums = {r.summed for role, r in found.results.items() if role in "kv"}
    if len(sums) > 1:
        raise Unread("the gradients of k and v are summed over different heads, accepted the same")
    group_set = next(iter(sums), frozenset())
    atoms = [d for place in canonical[:-2] for d in place.digits if isinstance(d, Digit)]
    batch, heads, group = _split(atoms, group_set, found)
    results = found.results
    scale, scale_tensor = found.scale or (1.0, None)
    return Given(
        anchor=total,
        weights=weights,
        grad_out=grad_out,
        q=found.views.get("q"),
        k=found.views.get("k"),
        v=v_view,
        batch=batch,
        kv_heads=heads,
        group=group,
        query_length=shape_of(product)[-2],
        key_length=shape_of(product)[-1],
        head_dim=head_dim,
        value_dim=value_dim,
        scale=scale,
        scale_tensor=scale_tensor,
        rotate_q=results["q"].turn if "q" in results else None,
        rotate_k=results["k"].turn if "k" in results else None,
        **{
            f"{role}_targets": arrangements(results[role].node, results[role].position, values)
            for role in "qkv"
            if role in results
        },
    )


def _sides(product: Node, canonical: Position) -> tuple[View, Node, Position]:
    """(P, the matmul dP, position of its result) of P * dP."""
    a, b = product.args
    for p, g in ((a, b), (b, a)):
        if not isinstance(p, Node) or not isinstance(g, Node):
            continue
        found = gradient_paths.back_to_matmul(g, canonical)
        if found is None:
            continue
        node, position = p, canonical
        while (back := step(node, position)) is not None:
            node, position = back
        if node.target not in operands.MATMULS:
            return View(node, position), *found
    for factor in (a, b):
        between = _between(factor)
        if between is not None:
            raise Unread(
                f"the gradient of the weights passes through {op_of(between)} before its row sum, "
                "as in dropout, accepted P dP alone"
            )
    raise Unread("no product of given weights and a matmul, accepted P dP")


def _between(node: object) -> Node | None:
    """The op other than a rearrangement that a factor of P dP has passed through behind a matmul;
    None where there is none."""
    while isinstance(node, Node) and node.target in (*operands.MOVES, CAST):
        node = node.args[0]
    if isinstance(node, Node) and node.target in gradient_paths.LINEAR and comes_from_product(node):
        return node
    return None


def _operands(dp: Node, position: Position) -> tuple[View, View, int]:
    """dO and V of dP = dO V^T, and the head dim of V."""
    names = Renaming()
    left, right, result = operands.matmul_axes(dp)
    names.learn(result, position)
    a, b = operands.operands(dp)
    width = shape_of(a)[-1]
    if not isinstance(width, int):
        raise Unread(f"the head dim is {width}, accepted a static one")
    operands.free_axis("c", width, "e", names)
    views = [operands.view(n, names.apply(at)) for n, at in ((a, left), (b, right))]
    if not _varies(views[0], "i"):
        views.reverse()
    return views[0], views[1], width


def _varies(view: View, axis: str) -> bool:
    return any(
        isinstance(d, Digit) and d.axis == axis for place in view.position for d in place.digits
    )


def _score_gradients(
    weights: View,
    dp: Node,
    dp_position: Position,
    found: _Found,
    values: ValueNumbers,
) -> int:
    head_dim = 0
    for matmul, side in gradient_paths.reached_matmuls(dp):
        left, right, result = operands.matmul_axes(matmul)
        a, b = operands.operands(matmul)
        z, at_z, x, at_x, free = (a, left, b, right, "r") if side == 0 else (b, right, a, left, "l")
        names, scale = _proven(weights, z, at_z, dp, dp_position, values)
        if found.scale not in (None, scale):
            raise Unread(
                f"dQ and dK are scaled by {_shown(found.scale)} and {_shown(scale)}, accepted equal"
            )
        found.scale = scale
        dim = shape_of(x)[-1 if free == "r" else -2]
        if not isinstance(dim, int):
            raise Unread(f"the head dim is {dim}, accepted a static one")
        head_dim = dim
        operands.free_axis(free, dim, "d", names)
        view = operands.view(x, names.apply(at_x))
        role, other = ("q", "k") if _varies(view, "j") else ("k", "q")
        if role in found.results:
            raise Unread(f"there are two gradients of {role}, accepted one")
        found.views[other] = view
        found.results[role] = followed(matmul, names.apply(result), dim, values)
    if not found.results:
        raise Unread("the gradient of the scores reaches no matmul, accepted dS K and dS^T Q")
    return head_dim


def _proven(
    weights: View,
    z: Node,
    position: Position,
    dp: Node,
    dp_position: Position,
    values: ValueNumbers,
) -> tuple[Renaming, tuple[float, Node | None]]:
    """The names of a matmul's axes, and the number and the 0-d tensor that its operand is P (dP -
    rowsum(P dP)) times."""
    reader = Elements(values, [weights.node, dp], algebra=True)
    first = values.first(weights.node)
    places = {
        atom.position
        for atoms in reader.at(z, position)
        for atom in atoms
        if atom.kind == "load" and atom.node is first
    }
    if len(places) != 1:
        raise Unread(
            "the operand of a gradient matmul is not made of the weights alone, "
            "accepted P (dP - rowsum(P dP)) times a number"
        )
    names = Renaming()
    names.learn(places.pop(), weights.position)
    seen = reader.at(z, names.apply(position))
    wanted = derivative.softmax_derivative(reader, weights, reader.load(dp, dp_position))
    operands.unrounded(z, dp)
    scale = _scale(seen, wanted)
    if scale is None:
        raise Unread(
            "the operand of a gradient matmul is not that of a softmax, "
            "accepted P (dP - rowsum(P dP)) times a number"
        )
    return names, scale


def _scale(seen: terms.Terms, wanted: terms.Terms) -> tuple[float, Node | None] | None:
    """The number, and the one element of a tensor without dims, that `wanted` is multiplied by."""
    number = terms.ratio(seen, wanted)
    if number is not None:
        return number, None
    common = set.intersection(*(set(atoms) for atoms in seen)) if seen else set()
    for atom in common:
        if atom.kind == "load" and atom.node is not None and atom.node.meta["val"].dim() == 0:
            number = terms.ratio(seen, terms.multiply(wanted, terms.one(atom)))
            if number is not None:
                return number, atom.node
    return None


def _shown(scale: tuple[float, Node | None]) -> str:
    number, tensor = scale
    return f"{number:g}{'' if tensor is None else ' times a tensor'}"


def _value_gradient(
    weights: View, canonical: Position, grad_out: View, found: _Found, values: ValueNumbers
) -> None:
    users = operands.moved_users(weights.node, weights.position)
    for moved, user in users:
        if user.target not in operands.MATMULS:
            continue
        left, right, result = operands.matmul_axes(user)
        a, b = operands.operands(user)
        for p, at_p, g, at_g, free in ((a, left, b, right, "r"), (b, right, a, left, "l")):
            if p is not moved:
                continue
            names = operands.renaming(p, at_p, weights.node, weights.position, values)
            operands.free_axis(free, shape_of(g)[-1 if free == "r" else -2], "e", names)
            view = operands.view(g, names.apply(at_g))
            if not gradients.same_view(view, grad_out, values) or "v" in found.results:
                raise Unread(
                    "the weights are multiplied by something that is not the gradient of the "
                    "output, accepted P^T dO"
                )
            dim = shape_of(g)[-1 if free == "r" else -2]
            found.results["v"] = followed(user, names.apply(result), int(dim), values)


def _split(
    atoms: list[Digit], group: frozenset[Digit], found: _Found
) -> tuple[tuple[Digit, ...], tuple[Digit, ...], tuple[Digit, ...]]:
    """The batch axes cut into batch, key/value heads and the heads that are summed over."""
    fine = [a for d in atoms for a in atoms_of(d, [tuple(Place((g,)) for g in group)])]
    inside = covered(tuple(Place((g,)) for g in group), fine)
    rest = [a for a in fine if a not in inside]
    turned: set[Digit] = set()
    for result in found.results.values():
        if result.turn is not None:
            for table in (result.turn.cos, result.turn.sin):
                for view in table.views:
                    turned |= covered(view.position, fine)
    cut = len(rest)
    if rest and rest[-1] not in turned and (len(rest) > 1 or rest[0].axis != "0"):
        cut -= 1
    if any(a in turned for a in rest[cut:]) or turned & inside:
        raise Unread("a rotation table varies by head, accepted one for all heads")
    return tuple(rest[:cut]), tuple(rest[cut:]), tuple(a for a in fine if a in inside)

"""Reads an attention backward that stands alone, with the weights given as a tensor.

Written by hand, or left over where a graph holds no forward:

    dP = dO V^T;  dS = scale * P (dP - rowsum(P dP));  dQ = dS K;  dK = dS^T Q;  dV = P^T dO

followed by a sum over the heads of a group and by the adjoint of a rotation. Nothing is assumed
about P: it need not be a softmax of q and k, and the heads of a group may each have keys and values
of their own. The rotation of the gradients may be spelled with the sine taken before or after the
halves are swapped; which one it is decides which sine each lane gets.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import torch

from inductor_gqa.site import Rotation, Table, Target, View

from . import derivative, gradient_paths, gradients, operands, rotation, terms
from .attention import arrangements, canonical_position
from .axes import (
    Digit,
    Fixed,
    Place,
    Position,
    Renaming,
    Size,
    Unread,
    covered,
    quotient,
    shape_of,
    whole,
)
from .candidates import comes_from_product
from .elements import Elements, by_lane
from .moves import step
from .naming import op_of
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
class _Result:
    """The furthest node that is still one gradient, summed over `summed` and turned by `turn`."""

    node: Node
    position: Position
    summed: frozenset[Digit] = frozenset()
    turn: Rotation | None = None


@dataclass
class _Found:
    views: dict[str, View] = field(default_factory=dict)
    results: dict[str, _Result] = field(default_factory=dict)
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
        found.results[role] = _followed(matmul, names.apply(result), dim, values)
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
            found.results["v"] = _followed(user, names.apply(result), int(dim), values)


def _followed(start: Node, position: Position, width: int, values: ValueNumbers) -> _Result:
    """Follows a gradient as far as it is only moved, summed over heads, and turned."""
    best = _Result(start, position)
    heap: list[tuple[int, int, Node]] = [(values.order[start], 0, start)]
    waiting = {start}
    while heap:
        _, _, node = heapq.heappop(heap)
        waiting.discard(node)
        if not waiting and node is not start:
            further = _classified(node, start, position, width, values)
            if further is not None:
                best = further
        followed = [user for user in node.users if user.target in gradient_paths.FOLLOWED]
        if len(followed) != len(node.users):
            if waiting or node is not best.node:
                # Something else is computed on the way: only what lies before it is this gradient.
                return best
            break
        for user in followed:
            if user not in waiting:
                waiting.add(user)
                heapq.heappush(heap, (values.order[user], len(heap), user))
    return best


def _classified(
    node: Node, start: Node, position: Position, width: int, values: ValueNumbers
) -> _Result | None:
    val = node.meta.get("val")
    if not isinstance(val, torch.Tensor) or not val.dtype.is_floating_point:
        return None
    shape = shape_of(node)
    own = tuple(whole(f"x{d}", n) for d, n in enumerate(shape))
    try:
        read = Elements(values, [start]).at(node, own)
        if len(read) == 1:
            ((atoms, factor),) = read.items()
            if len(atoms) == 1 and factor == 1.0:
                names, summed = _names(atoms[0], start, position, values)
                return _Result(node, names.apply(own), summed)
    except Unread:
        pass
    for dim in reversed(range(len(shape))):
        heads = quotient(shape[dim], width)
        if heads is not None:
            try:
                return _turned(node, own, dim, heads, start, position, width, values)
            except Unread:
                continue
    return None


def _names(
    atom: terms.Atom, start: Node, position: Position, values: ValueNumbers
) -> tuple[Renaming, frozenset[Digit]]:
    sums: tuple[str, ...] = ()
    if atom.kind == "sum":
        sums, inside = atom.inner
        if len(inside) != 1:
            raise Unread("a gradient is a sum of products, accepted of one factor")
        atom = inside[0]
    if atom.kind != "load" or atom.node is not values.first(start):
        raise Unread("a gradient is made of another tensor, accepted its matmul alone")
    names = Renaming()
    names.learn(atom.position, position)
    summed = frozenset(y for x, y in names.rules if x.axis in sums)
    if any(d.axis in ("i", "j", "d", "e") for d in summed):
        raise Unread("a gradient is summed over positions, accepted over heads")
    return names, summed


def _turned(
    node: Node,
    own: Position,
    dim: int,
    heads: Size,
    start: Node,
    position: Position,
    count: int,
    values: ValueNumbers,
) -> _Result:
    outer = tuple(Digit(f"x{dim}", count, d.size) for d in whole("h", heads).digits)
    place = Place((*outer, Fixed(tuple(range(count)), count)))
    at = (*own[:dim], place, *own[dim + 1 :])
    reader = Elements(values, [start])
    fixed = operands.fixed_lanes(position, "d", Place())
    forms: list[list[rotation.Term]] = [[] for _ in range(count)]
    sources: dict[terms.Atom, tuple[Renaming, frozenset[Digit]]] = {}
    for group, read in by_lane(reader, node, at, count):
        for s in rotation.strands(read, len(group)):
            if s.data not in sources:
                sources[s.data] = _names(s.data, start, fixed, values)
            for lane, term in zip(group, s.terms(), strict=True):
                forms[lane].append(term)
    if len(sources) != 1:
        raise Unread(f"the lanes come from {len(sources)} tensors, accepted one")
    ((names, summed),) = sources.values()
    found = rotation.Lanes(View(start, fixed), 0, 0, [tuple(form) for form in forms])
    turn, order = rotation.rotation(found)
    if order != tuple(range(count)):
        raise Unread("the lanes change their order, accepted their own")
    names.rules.append((Digit("w", 1, turn.width), Digit("w", 1, turn.width)))
    names.rules.append((Digit("w", 1, turn.width // 2), Digit("w", 1, turn.width // 2)))
    names.rules.append((Digit(f"x{dim}", 1, count), Digit("d", 1, count)))
    cos, sin = (_renamed(table, names) for table in (turn.cos, turn.sin))
    renamed = Rotation(cos, sin, turn.start, turn.width, turn.interleaved, turn.sign)
    return _Result(node, names.apply(own), summed, renamed)


def _renamed(table: Table, names: Renaming) -> Table:
    view = View(table.view.node, names.apply(table.view.position))
    return Table(view, table.spread, tuple(_renamed(t, names) for t in table.times))


def _split(
    atoms: list[Digit], group: frozenset[Digit], found: _Found
) -> tuple[tuple[Digit, ...], tuple[Digit, ...], tuple[Digit, ...]]:
    """The batch axes cut into batch, key/value heads and the heads that are summed over."""
    from .axes import atoms_of

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

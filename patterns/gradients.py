"""Reads the backward of a site by role, from what its matmuls multiply.

    dV = P^T dO    dP = dO V^T    dS = P (dP - rowsum(P dP))    dQ = scale dS K    dK = scale dS^T Q

Nothing is matched as a template: the operand of the gradient matmuls is read as terms (elements.py)
and compared with the derivative of the scores that were read forward, mask and softcap included;
the gradients are then followed through the group sum and the inverse rotation, which must be the
adjoint of the forward's, lane by lane. Gradients that the graph does not hold (frozen projections,
LoRA on some of them) are not missed.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Iterable
from typing import Any

import torch

from inductor_gqa.site import Gradients, Site, Target, View

from . import operands, rotation, terms
from .attention import Forward, arrangements
from .axes import (
    Digit,
    Fixed,
    Place,
    Position,
    Renaming,
    Unread,
    covered,
    quotient,
    same,
    shape_of,
    whole,
)
from .elements import RULES, Elements, by_lane, flagged
from .moves import broadcast, step
from .naming import op_of, use
from .terms import Atom, Terms
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
MULTIPLIES = {aten.mul.Tensor, prims.fma.default, aten.view_as_real.default}
SHAPE_ONLY = {aten.new_empty_strided.default, aten.new_empty.default}


def read_gradients(forward: Forward, values: ValueNumbers) -> Gradients | None:
    """The gradients of a site; None where the graph holds none. Raises Unread where it holds some
    that do not read."""
    dv_products = _value_gradients(forward, values)
    dp = _weights_gradient(forward, values)
    if not dv_products and dp is None:
        return None
    grads_out = [view for _, _, view, _ in dv_products] + ([dp[2]] if dp else [])
    first = grads_out[0]
    if any(not same_view(first, other, values) for other in grads_out):
        raise Unread(
            "the gradients of the weights and of the values start from different tensors, "
            "accepted one gradient of the output"
        )
    v_targets = [
        target
        for matmul, position, _, over in dv_products
        for target in finished_targets(
            forward.site, matmul, position, None, _unsummed(forward, over), values
        )
    ]
    q_targets: list[Target] = []
    k_targets: list[Target] = []
    if dp is not None:
        for matmul, position, role, ratio, over in _score_gradients(forward, dp[0], dp[1], values):
            lanes = forward.q_lanes if role == "q" else forward.k_lanes
            summed = () if role == "q" else _unsummed(forward, over)
            found = finished_targets(forward.site, matmul, position, lanes, summed, values, ratio)
            (q_targets if role == "q" else k_targets).extend(found)
    sinks = () if dp is None else _sink_gradient(forward, dp[0], dp[1], values)
    return Gradients(first, tuple(q_targets), tuple(k_targets), tuple(v_targets), sinks)


def same_view(a: View, b: View, values: ValueNumbers) -> bool:
    return values.first(a.node) is values.first(b.node) and a.position == b.position


def _value_gradients(
    forward: Forward, values: ValueNumbers
) -> list[tuple[Node, Position, View, Place]]:
    """(matmul, position of its result, dO, what it sums over) for every matmul of the weights over
    the queries."""
    out: list[tuple[Node, Position, View, Place]] = []
    weights, canonical = forward.dropped.node, forward.dropped.position
    seen: set[Node] = set()
    for moved, user in operands.moved_users(weights, canonical):
        if user.target not in operands.MATMULS or user is forward.product or user in seen:
            continue
        seen.add(user)
        left, right, result = operands.matmul_axes(user)
        a, b = operands.operands(user)
        sides = ((a, left, b, right, "r"), (b, right, a, left, "l"))
        for p, at_p, g, at_g, free in sides:
            if p is not moved:
                continue
            names = operands.renaming(p, at_p, weights, canonical, values)
            summed = operands.back_to(p, at_p, weights, values)
            if summed is None or not _is_axis(summed[-2], "c"):
                raise Unread(
                    "the weights are multiplied by something that is no value or gradient, "
                    "accepted the values or the gradient of the output"
                )
            dim = shape_of(g)[-1 if free == "r" else -2]
            operands.free_axis(free, dim, "e", names)
            grad = operands.view(g, names.apply(at_g))
            (over,) = names.apply(left[-1:])
            out.append((user, names.apply(result), grad, over))
    return out


def _is_axis(place: Place, axis: str) -> bool:
    return all(isinstance(d, Digit) and d.axis == axis for d in place.digits)


def _weights_gradient(forward: Forward, values: ValueNumbers) -> tuple[Node, Position, View] | None:
    """(the matmul dP = dO V^T, position of its result, dO), found beside the weights in the
    softmax's gradient."""
    position = forward.softmax.position
    reader = Elements(values, [forward.softmax.node], algebra=True, softmax=forward.anchor)
    for moved, user in _beside_weights(forward, values):
        if not _is_proportional(reader.at(moved, position), forward, values):
            continue
        for other in user.args:
            if other is moved or not isinstance(other, Node):
                continue
            found = _gradient_matmul(other, broadcast(other, position), values)
            if found is None or found[0] in (forward.product, forward.softmax.node):
                continue
            matmul, at = found
            names = Renaming()
            left, right, result = operands.matmul_axes(matmul)
            names.learn(result, at)
            a, b = operands.operands(matmul)
            contracted = shape_of(a)[-1]
            operands.free_axis("c", contracted, "e", names)
            views = [operands.view(n, names.apply(place)) for n, place in ((a, left), (b, right))]
            for value, grad in (views, views[::-1]):
                if same_view(value, forward.site.v, values):
                    return matmul, at, grad
    return None


def _beside_weights(forward: Forward, values: ValueNumbers) -> Iterable[tuple[Node, Node]]:
    """(weights, or their exponentials, or a quotient of these, in their shape; a product with
    it)."""
    rank = len(forward.softmax.position)
    todo = [forward.softmax.node, forward.anchor.exponentials]
    seen = set(todo)
    while todo:
        node = todo.pop()
        for moved, user in operands.moved_users(node, ()):
            if user.target is aten.mul.Tensor and len(shape_of(moved)) == rank:
                yield moved, user
            divides = user.target is aten.div.Tensor and user.args[0] is moved
            forwards = user.target is aten.mul.Tensor and not values.comes_from_gradient(user)
            if (divides or forwards) and user not in seen:
                seen.add(user)
                todo.append(user)


def _is_proportional(read: Terms, forward: Forward, values: ValueNumbers) -> bool:
    """Whether it is the weight times something that all keys share."""
    if len(read) != 1:
        return False
    (atoms,) = read
    own = [atom for atom in atoms if terms.depends(atom, ("j",))]
    return own == [
        Atom("load", values.first(forward.softmax.node), forward.softmax.position)
    ] and all(atom in own or atom.kind in ("load", "inverse") for atom in atoms)


def _gradient_matmul(
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


def _score_gradients(
    forward: Forward, dp: Node, dp_position: Position, values: ValueNumbers
) -> list[tuple[Node, Position, str, float, Place]]:
    """(matmul, position of its result, "q" or "k", factor that is missing, what it sums over) for
    every matmul of the gradient of the scores."""
    out: list[tuple[Node, Position, str, float, Place]] = []
    plain = {
        role: operands.view(operand.node, operand.position)
        for role, operand in (("q", forward.q), ("k", forward.k))
    }
    for matmul, side in reached_matmuls(dp):
        left, right, result = operands.matmul_axes(matmul)
        a, b = operands.operands(matmul)
        z, at_z, x, at_x, free = (a, left, b, right, "r") if side == 0 else (b, right, a, left, "l")
        names, ratio = _proven(forward, z, at_z, dp, dp_position, values)
        dim = shape_of(x)[-1 if free == "r" else -2]
        operands.free_axis(free, dim, "d", names)
        view = operands.view(x, names.apply(at_x))
        for role, other in (("q", "k"), ("k", "q")):
            if same_view(view, plain[other], values):
                (over,) = names.apply(left[-1:])
                out.append((matmul, names.apply(result), role, ratio, over))
                break
        else:
            raise Unread(
                f"the gradient of the scores is multiplied by {op_of(view.node)}, not by q or k, "
                "accepted q or k"
            )
    return out


def reached_matmuls(dp: Node) -> list[tuple[Node, int]]:
    """Matmuls that the gradient of the weights reaches through pointwise ops, with the side that it
    is on."""
    found: dict[tuple[Node, int], None] = {}
    for node in (dp, *_reached(dp)):
        for user in node.users:
            if user.target in operands.MATMULS:
                for side, operand in enumerate(operands.operands(user)):
                    if operand is node:
                        found[user, side] = None
    return list(found)


def _reached(dp: Node) -> list[Node]:
    todo, seen = [dp], {dp: None}
    while todo:
        for user in todo.pop().users:
            if user.target in FOLLOWED and user not in seen:
                seen[user] = None
                todo.append(user)
    return list(seen)[1:]


def _proven(
    forward: Forward,
    z: Node,
    position: Position,
    dp: Node,
    dp_position: Position,
    values: ValueNumbers,
) -> tuple[Renaming, float]:
    """The names of a matmul's axes, once its operand is proven to be the derivative of the scores,
    but for a factor.

    The factor is what remains to be multiplied later, as where a scale is the matmul's own (baddbmm
    with alpha).
    """
    softmax = forward.softmax
    reader = _algebra(forward, dp, values)
    read = reader.at(z, position)
    first_weights = values.first(softmax.node)
    places = {
        atom.position
        for atoms in read
        for atom in atoms
        if atom.kind == "load" and atom.node is first_weights
    }
    if len(places) != 1:
        raise Unread(
            "the operand of a gradient matmul is not a gradient of this softmax, "
            "accepted P (dP - rowsum(P dP))"
        )
    names = Renaming()
    names.learn(places.pop(), softmax.position)
    seen = reader.at(z, names.apply(position))
    operands.unrounded(z, dp)
    wanted = _derivative(forward, reader, dp, dp_position)
    ratio = terms.ratio(wanted, seen)
    if ratio is None:
        raise Unread(
            f"{op_of(z)} is not the derivative of the scores that were read forward, "
            "accepted their derivative"
        )
    return names, ratio


def _algebra(forward: Forward, dp: Node, values: ValueNumbers) -> Elements:
    stops = [forward.softmax.node, dp, forward.scores.matmul]
    softmax = None if forward.site.zeros_empty_rows else forward.anchor  # sums to one
    return Elements(values, stops, algebra=True, softmax=softmax)


def _sink_gradient(
    forward: Forward, dp: Node, dp_position: Position, values: ValueNumbers
) -> tuple[Target, ...]:
    """Nodes that hold the gradient of the sink: -sum over batch and queries of P_sink rowsum(P
    dP)."""
    site = forward.site
    if site.sink is None:
        return ()
    reader = _algebra(forward, dp, values)
    column = Place((), 0 if same(forward.softmax.position[-1].offset, 1) else site.key_length)
    at_sink = (*forward.softmax.position[:-1], column)
    gradient = _weight_gradient(forward.site, reader, dp, dp_position)
    ((total, share),) = row_total(reader, forward.softmax, gradient).items()
    for node in _reached(dp):
        if node.target is not aten.sum.dim_IntList:
            continue
        own = tuple(whole(f"x{d}", n) for d, n in enumerate(shape_of(node)))
        read = reader.at(node, own)
        if len(read) != 1:
            continue
        ((atoms, factor),) = read.items()
        if len(atoms) != 1 or atoms[0].kind != "sum" or not terms.near(factor, -share):
            continue
        axes, inside = atoms[0].inner
        softmax = values.first(forward.softmax.node)
        loads = [a for a in inside if a.kind == "load" and a.node is softmax]
        if len(loads) != 1 or loads[0].position[-1] != column:
            continue
        names = Renaming()
        try:
            names.learn(loads[0].position, at_sink)
            summed = {y for x, y in names.rules if x.axis in axes}
            rest = [_renamed(a, names) for a in inside if a is not loads[0]]
            at = names.apply(own)
        except Unread:
            continue
        heads = (*site.kv_heads, *site.group)
        over_heads = covered(at, list(heads)) == set(heads)
        if (
            rest == list(total)
            and over_heads
            and not any(_is_part(d, h) for d in summed for h in heads)
        ):
            return arrangements(node, at, values)
    return ()


def _renamed(atom: Atom, names: Renaming) -> Atom:
    """A sum's atoms with all but the summed axis in the site's names."""
    if atom.kind != "sum":
        return atom
    axes, inside = atom.inner
    own = Renaming()
    own.rules = list(names.rules)
    for a in inside:
        for place in a.position:
            own.rules += [
                (d, Digit("~0.0", d.stride, d.size))
                for d in place.digits
                if isinstance(d, Digit) and d.axis in axes
            ]
    moved = [Atom(a.kind, a.node, own.apply(a.position), a.inner) for a in inside]
    return Atom("sum", inner=(("~0.0",), tuple(sorted(moved, key=lambda a: a.order))))


def softmax_derivative(reader: Elements, weights: View, gradient: Terms) -> Terms:
    """P (dP - rowsum(P dP)) at one score; gradient is dP there, key "j"."""
    p = reader.at(weights.node, weights.position)
    total = row_total(reader, weights, gradient)
    return terms.add(terms.multiply(p, gradient), terms.multiply(p, total), -1.0)


def row_total(reader: Elements, weights: View, gradient: Terms) -> Terms:
    """rowsum(P dP)"""
    product = terms.multiply(reader.load(weights.node, weights.position), gradient)
    try:
        return terms.summed(product, ("j",), reader.sums_to_one)
    except ArithmeticError as why:  # one key: there is no axis to sum over
        raise Unread("the softmax runs over a single key, accepted 2 or more") from why


def _weight_gradient(site: Site, reader: Elements, dp: Node, position: Position) -> Terms:
    """dP at one weight, as dropout leaves it."""
    out = reader.load(dp, position)
    for view, positive in site.keep:
        kept = flagged(reader, view.node, view.position, "where" if positive else "unless")
        assert kept is not None
        out = terms.multiply(out, kept)
    return terms.scaled(out, site.keep_scale)


def _derivative(forward: Forward, reader: Elements, dp: Node, dp_position: Position) -> Terms:
    """scale * P (dP - rowsum(P dP)), with what the mask and the softcap make of it."""
    gradient = _weight_gradient(forward.site, reader, dp, dp_position)
    out = softmax_derivative(reader, forward.softmax, gradient)
    read = forward.scores
    for view, keeps, _ in read.filled:
        flag = flagged(reader, view.node, view.position, "where" if keeps else "unless")
        if flag is None:
            raise Unread(f"the scores are filled by {op_of(view.node)}, accepted a boolean")
        out = terms.multiply(out, flag)
    if read.capped is not None:
        bent = reader.at(read.capped.node, read.capped.position)
        slope = terms.add(terms.number(1.0), terms.multiply(bent, bent), -1.0)
        out = terms.multiply(out, slope)
    if read.scale_tensor is not None:
        out = terms.multiply(out, reader.at(read.scale_tensor, ()))
    return terms.scaled(out, read.scale)


def _unsummed(forward: Forward, over: Place) -> tuple[Digit, ...]:
    """The parts of the group that a matmul does not sum over itself (it does where heads are folded
    into its rows)."""
    inside = covered((over,), list(forward.site.group))
    return tuple(d for d in forward.site.group if d not in inside)


def finished_targets(
    site: Site,
    start: Node,
    position: Position,
    lanes: rotation.Lanes | None,
    summed: tuple[Digit, ...],
    values: ValueNumbers,
    ratio: float = 1.0,
) -> tuple[Target, ...]:
    """The nodes that hold the finished gradient: summed over the rest of the group, rotated
    back."""
    if lanes is None and not summed and ratio == 1.0:
        end, at = start, position
    else:
        end, at = _finished(site, start, position, lanes, summed, values, ratio)
    targets = arrangements(end, at, values)
    for target in targets:
        operands.unrounded(target.node, start)
    return targets


def _finished(
    site: Site,
    start: Node,
    position: Position,
    lanes: rotation.Lanes | None,
    summed: tuple[Digit, ...],
    values: ValueNumbers,
    ratio: float,
) -> tuple[Node, Position]:
    """Follows the gradient to the node where its paths have met again and it is what the site's
    result is."""
    open_: list[tuple[int, int, Node]] = [(values.order[start], 0, start)]
    waiting = {start}
    is_turned = False  # what no table was multiplied with has no rotation undone
    while open_:
        _, _, node = heapq.heappop(open_)
        waiting.discard(node)
        is_turned = is_turned or node.target in MULTIPLIES
        if not waiting and node is not start and (lanes is None or is_turned):
            at = _as_result(site, node, start, position, lanes, summed, values, ratio)
            if at is not None:
                return node, at
        for user in node.users:
            if user.target in SHAPE_ONLY:
                continue
            if user.target not in FOLLOWED:
                raise Unread(
                    f"a gradient is {use(user)} before it is complete, accepted no other use"
                )
            if user not in waiting:
                waiting.add(user)
                heapq.heappush(open_, (values.order[user], len(open_), user))
    raise Unread("a gradient ends before it is complete, accepted one that reaches q, k or v")


def _as_result(
    site: Site,
    node: Node,
    start: Node,
    position: Position,
    lanes: rotation.Lanes | None,
    summed: tuple[Digit, ...],
    values: ValueNumbers,
    ratio: float,
) -> Position | None:
    """The node's dims in the site's axes, if the node is the finished gradient."""
    val = node.meta.get("val")
    if not isinstance(val, torch.Tensor) or not val.dtype.is_floating_point:
        return None
    shape = shape_of(node)
    own = tuple(whole(f"x{d}", n) for d, n in enumerate(shape))
    try:
        if lanes is None:
            return _moved_result(node, own, start, position, summed, values, ratio)
        for dim in reversed(range(len(shape))):
            heads = quotient(shape[dim], site.head_dim)
            if heads is None:
                continue
            at = _turned_result(
                node, own, dim, heads, start, position, lanes, summed, values, ratio
            )
            if at is not None:
                return at
    except Unread:
        return None
    return None


def _moved_result(
    node: Node,
    own: Position,
    start: Node,
    position: Position,
    summed: tuple[Digit, ...],
    values: ValueNumbers,
    ratio: float,
) -> Position | None:
    read = terms.gathered(Elements(values, [start]).at(node, own))
    if len(read) != 1:
        return None
    ((atoms, factor),) = read.items()
    if len(atoms) != 1 or not terms.near(factor, ratio):
        return None
    names = _names_of(atoms[0], start, position, summed, values)
    return None if names is None else names.apply(own)


def _names_of(
    atom: Atom, start: Node, position: Position, summed: tuple[Digit, ...], values: ValueNumbers
) -> Renaming | None:
    """Site names for the axes of a reading of `start`, if exactly the group is summed over."""
    sums: tuple[str, ...] = ()
    if atom.kind == "sum":
        sums, inside = atom.inner
        if len(inside) != 1:
            return None
        atom = inside[0]
    if atom.kind != "load" or atom.node is not values.first(start):
        return None
    names = Renaming()
    names.learn(atom.position, position)
    over = [y for x, y in names.rules if x.axis in sums]
    if not all(any(_is_part(y, d) for d in summed) for y in over):
        return None
    for digit in summed:
        parts = [y for y in over if _is_part(y, digit)]
        total = 1
        for part in parts:
            total = total * part.size
        if not same(total, digit.size):
            return None
    return names


def _is_part(a: Digit, b: Digit) -> bool:
    return (
        a.axis == b.axis
        and quotient(a.stride, b.stride) is not None
        and quotient(b.stride * b.size, a.stride * a.size) is not None
    )


def _turned_result(
    node: Node,
    own: Position,
    dim: int,
    heads: object,
    start: Node,
    position: Position,
    lanes: rotation.Lanes,
    summed: tuple[Digit, ...],
    values: ValueNumbers,
    ratio: float,
) -> Position | None:
    """As `_moved_result`, with the rotation undone along the innermost part of `dim`."""
    count = len(lanes.forms)
    outer = whole(f"x{dim}", heads).digits
    outer = tuple(Digit(d.axis, count, d.size) for d in outer if isinstance(d, Digit))
    place = Place((*outer, Fixed(tuple(range(count)), count)))
    at = (*own[:dim], place, *own[dim + 1 :])
    wanted = lanes.adjoint
    reader = Elements(values, [start], row_tables=lanes.scales_by_row)
    fixed = operands.fixed_lanes(position, "d", Place())
    names: Renaming | None = None
    known: dict[object, object] = {}
    bare: dict[View, View] = {}  # tables in the site's axes
    seen: list[dict[Any, float]] = [{} for _ in range(count)]
    for group, read in by_lane(reader, node, at, count):
        for strand in rotation.strands(terms.gathered(read), len(group)):
            if strand.data not in known:
                known[strand.data] = _names_of(strand.data, start, fixed, summed, values)
            found = known[strand.data]
            if not isinstance(found, Renaming):
                return None
            names = names or found
            for table, _, _ in strand.tables:
                if table not in bare:
                    bare[table] = View(table.node, names.apply(table.position))
            for lane, term in zip(group, strand.terms(), strict=True):
                table = None if term.table is None else bare[term.table]
                beside = tuple(e._replace(table=bare[e.table]) for e in term.beside)
                key = rotation.key(table, term.column, beside, term.lane)
                seen[lane][key] = seen[lane].get(key, 0.0) + strand.factor
    if not all(_times(have, want, ratio) for have, want in zip(seen, wanted, strict=True)):
        return None
    if names is None:
        return None
    names.rules.append((Digit(f"x{dim}", 1, count), Digit("d", 1, count)))
    return names.apply(own)


def _times(have: dict[Any, float], want: dict[Any, float], ratio: float) -> bool:
    if ratio == 1.0 and have == want:
        return True
    return have.keys() == want.keys() and all(
        terms.near(have[key], ratio * want[key]) for key in want
    )

"""Reads the backward of a site by role, from what its matmuls multiply.

    dV = P^T dO    dP = dO V^T    dS = P (dP - rowsum(P dP))    dQ = scale dS K    dK = scale dS^T Q

Nothing is matched as a template: the operand of the gradient matmuls is read as terms (elements.py)
and compared with the derivative of the scores that were read forward, mask and softcap included;
the gradients are then followed through the group sum and the inverse rotation, which must be the
adjoint of the forward's, lane by lane. Gradients that the graph does not hold (frozen projections,
LoRA on some of them) are not missed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from inductor_gqa.site import Gradients, Target, View

from . import operands, terms
from .attention import Forward
from .axes import Digit, Place, Position, Unread, shape_of
from .derivative import algebra, derivative
from .elements import Elements
from .finished import Finished
from .gradient_paths import gradient_matmul, reached_matmuls
from .moves import broadcast
from .naming import op_of
from .renaming import Renaming, covered
from .sink_gradient import sink_gradient
from .terms import Atom, Terms
from .values import ValueNumbers

aten = torch.ops.aten
Node = torch.fx.Node


@dataclass(frozen=True)
class Start:
    """A gradient where its matmul makes it: the position of the matmul's result, what the matmul
    sums over, and the factor that is missing."""

    role: str  # "q", "k" or "v"
    matmul: Node
    position: Position
    over: Place
    ratio: float = 1.0


@dataclass(frozen=True)
class Backward:
    """The gradients of a site before they are summed over the group and rotated back."""

    grad_out: View
    starts: tuple[Start, ...]
    weights: tuple[Node, Position] | None  # dP, where the graph has it
    finished: Finished


def read_backward(forward: Forward, values: ValueNumbers) -> Backward | None:
    """Where the gradients of a site start; None where the graph holds none. Raises Unread where it
    holds some that do not read."""
    of_values = _value_gradients(forward, values)
    dp = _weights_gradient(forward, values)
    if not of_values and dp is None:
        return None
    grads_out = [grad for _, grad in of_values] + ([dp[2]] if dp else [])
    first = grads_out[0]
    if any(not same_view(first, other, values) for other in grads_out):
        raise Unread(
            "the gradients of the weights and of the values start from different tensors, "
            "accepted one gradient of the output"
        )
    starts = [start for start, _ in of_values]
    if dp is not None:
        starts += _score_gradients(forward, dp[0], dp[1], values)
    finished = Finished(forward.site.head_dim, values)
    return Backward(first, tuple(starts), dp and dp[:2], finished)


def read_gradients(forward: Forward, backward: Backward, values: ValueNumbers) -> Gradients:
    """The gradients of a site as it sees q, k and v; raises Unread."""
    lanes = {"q": forward.lanes[0], "k": forward.lanes[1], "v": None}
    found: dict[str, list[Target]] = {"q": [], "k": [], "v": []}
    for start in backward.starts:
        role = start.role
        summed = () if role == "q" else _unsummed(forward, start.over)
        found[role] += backward.finished.targets(
            start.matmul, start.position, lanes[role], summed, start.ratio
        )
    dp = backward.weights
    sinks = () if dp is None else sink_gradient(forward, *dp, values)
    return Gradients(backward.grad_out, *(tuple(found[role]) for role in "qkv"), sinks)


def same_view(a: View, b: View, values: ValueNumbers) -> bool:
    return values.first(a.node) is values.first(b.node) and a.position == b.position


def _value_gradients(forward: Forward, values: ValueNumbers) -> list[tuple[Start, View]]:
    """The gradient of the values with dO for every matmul of the weights over the queries."""
    out: list[tuple[Start, View]] = []
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
            out.append((Start("v", user, names.apply(result), over), grad))
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
            found = gradient_matmul(other, broadcast(other, position), values)
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


def _score_gradients(
    forward: Forward, dp: Node, dp_position: Position, values: ValueNumbers
) -> list[Start]:
    """The gradient of q or k for every matmul of the gradient of the scores."""
    out: list[Start] = []
    plain = {
        role: operands.view(operand.node, operand.position)
        for role, operand in (("q", forward.q), ("k", forward.k))
    }
    proven: dict[Node, tuple[Position, float]] = {}
    for matmul, side in reached_matmuls(dp):
        left, right, result = operands.matmul_axes(matmul)
        a, b = operands.operands(matmul)
        z, at_z, x, at_x, free = (a, left, b, right, "r") if side == 0 else (b, right, a, left, "l")
        operands.unrounded(z, dp)
        # q and k have their gradients from one gradient of the scores, which is read once.
        source = operands.origin(z, at_z)
        if source.node not in proven:
            proven[source.node] = _proven(forward, source, dp, dp_position, values)
        at_source, ratio = proven[source.node]
        names = Renaming()
        names.learn(source.position, at_source)
        dim = shape_of(x)[-1 if free == "r" else -2]
        operands.free_axis(free, dim, "d", names)
        view = operands.view(x, names.apply(at_x))
        for role, other in (("q", "k"), ("k", "q")):
            if same_view(view, plain[other], values):
                (over,) = names.apply(left[-1:])
                out.append(Start(role, matmul, names.apply(result), over, ratio))
                break
        else:
            raise Unread(
                f"the gradient of the scores is multiplied by {op_of(view.node)}, not by q or k, "
                "accepted q or k"
            )
    return out


def _proven(
    forward: Forward, z: View, dp: Node, dp_position: Position, values: ValueNumbers
) -> tuple[Position, float]:
    """The position of an operand of a matmul in the site's axes, once it is proven to be the
    derivative of the scores, but for a factor.

    The factor is what remains to be multiplied later, as where a scale is the matmul's own (baddbmm
    with alpha).
    """
    softmax = forward.softmax
    reader = algebra(forward, dp, values)
    read = reader.at(z.node, z.position)
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
    position = names.apply(z.position)
    seen = reader.at(z.node, position)
    wanted = derivative(forward, reader, dp, dp_position)
    ratio = terms.ratio(wanted, seen)
    if ratio is None:
        raise Unread(
            f"{op_of(z.node)} is not the derivative of the scores that were read forward, "
            "accepted their derivative"
        )
    return position, ratio


def _unsummed(forward: Forward, over: Place) -> tuple[Digit, ...]:
    """The parts of the group that a matmul does not sum over itself (it does where heads are folded
    into its rows)."""
    inside = covered((over,), list(forward.site.group))
    return tuple(d for d in forward.site.group if d not in inside)

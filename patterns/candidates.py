"""Finds what is almost an attention and says which assumption it breaks, so that it is reported.

Three kinds: weights that something else is made of on their way to the values (`softmax(s) ** 2 @
v`), exponentials of scores that are divided by another number than their sum or shifted by another
one than their maximum, and a backward from given weights that does not read. Each is told from a
classifier, a router or a norm by the matmuls on both of its sides, of which the first is a batched
one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from . import dropout
from .anchors import Softmax, maximised, seen_through
from .axes import shape_of
from .moves import COPIES, VIEWS
from .operands import MATMULS, MOVES
from .values import ValueNumbers, scalar_value

aten, prims = torch.ops.aten, torch.ops.prims
Node = torch.fx.Node

BATCHED = {aten.bmm.default, aten.baddbmm.default}
REARRANGES = {
    *MOVES,
    aten.slice.Tensor,
    aten.select.int,
    aten.slice_scatter.default,
    aten.select_scatter.default,
    aten.index_put.default,
    aten.scatter.src,
    aten.scatter.value,
    aten.scatter_add.default,
    aten.cumsum.default,
    aten.flip.default,
    prims.rev.default,
    aten.roll.default,
    aten.index.Tensor,
    aten.index_select.default,
    aten.gather.default,
    aten.cat.default,
    aten.copy.default,
    aten.constant_pad_nd.default,
    prims.convert_element_type.default,
}
PICKS = {aten.topk.default, aten.sort.default}  # values, and where they were


@dataclass(frozen=True)
class NearMiss:
    """Exponentials of scores, on their way to the values, that are no softmax."""

    exponentials: Node
    reason: str


def detour(weights: Node, values: ValueNumbers) -> str | None:
    """The first op, other than dropout, that the weights of an attention pass through, elementwise
    or moved, before a matmul takes them; None where there is none, or where the scores come from no
    batched matmul."""
    way = way_to_matmul(weights, values)
    if not way or not comes_from_product(weights):
        return None
    inside = {*dropout.STEPS, aten.native_dropout.default}
    return next((str(node.target) for node in way if node.target not in inside), None)


def near_misses(
    graph: torch.fx.Graph, softmaxes: Iterable[Softmax], values: ValueNumbers
) -> list[NearMiss]:
    """Exponentials of scores that reach a matmul and belong to none of the softmaxes."""
    known = {values.first(softmax.exponentials) for softmax in softmaxes}
    found: list[NearMiss] = []
    for node in graph.find_nodes(op="call_function", target=aten.exp.default):
        if values.first(node) in known or values.comes_from_gradient(node):
            continue
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.device.type == "meta":
            continue  # nothing is computed there
        way = way_to_matmul(node, values, projections=False)
        if way is not None and comes_from_product(node):
            found.append(NearMiss(node, _why(node, way, values)))
    return found


def is_backward(total: Node, values: ValueNumbers) -> bool:
    """Whether `total` = sum(P * dP, -1) stands in the backward of an attention whose weights are an
    input of the graph, not in that of a norm: dP comes from a batched matmul and goes to one."""
    product = total.args[0]
    assert isinstance(product, Node)
    for weights, gradient in (product.args, product.args[::-1]):
        if not isinstance(weights, Node) or not isinstance(gradient, Node):
            continue
        is_given = _source(weights).op != "call_function"
        if not is_given or shape_of(weights) != shape_of(gradient):
            continue
        way = way_to_matmul(gradient, values, backward=True)
        if way is not None and comes_from_product(gradient):
            return True
    return False


def _source(node: Node) -> Node:
    """The node behind rearrangements and casts."""
    while node.target in (*MOVES, prims.convert_element_type.default):
        node = node.args[0]  # type: ignore[assignment]
    return node


def comes_from_product(node: Node) -> bool:
    """Whether a node is made of the result of a batched matmul, elementwise or moved."""
    return any(n.target in BATCHED for n in _up_to(node))


def _up_to(node: Node) -> list[Node]:
    """The node and all before it, as far as they are made of each other elementwise or moved; the
    first that are not are part of it."""
    todo, seen = [node], {node}
    for reached in todo:
        if reached.op == "call_function" and _is_elementwise(reached):
            todo += [n for n in reached.all_input_nodes if n not in seen]
            seen.update(reached.all_input_nodes)
    return todo


def _is_elementwise(node: Node) -> bool:
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags or node.target in REARRANGES


def way_to_matmul(
    start: Node, values: ValueNumbers, backward: bool = False, projections: bool = True
) -> list[Node] | None:
    """The ops between a node and a matmul that takes what became of it, of the forward unless the
    backward is asked for; None where there is none. Another softmax, or a gate that makes more
    elements, ends the way. projections: whether a matmul with a parameter is such a matmul."""
    before: dict[Node, Node | None] = {start: None}
    todo = [start]
    for node in todo:
        for user in node.users:
            if user in before or user.op != "call_function":
                continue
            if not backward and values.comes_from_gradient(user):
                continue
            if user.target in MATMULS and (projections or _takes_values(user, node, values)):
                return _path(node, before)
            if user.target in PICKS:
                before[user] = node
                picked = [n for n in user.users if n.target is operator.getitem and n.args[1] == 0]
                before.update(dict.fromkeys(picked, user))
                todo += picked
                continue
            grows = len(shape_of(node)) < 2 or _is_larger(user, node)
            if _is_elementwise(user) and user.target is not aten.exp.default and not grows:
                before[user] = node
                todo.append(user)
    return None


def _takes_values(matmul: Node, weights: Node, values: ValueNumbers) -> bool:
    """Whether a matmul is batched, or has another operand that a matmul made, as no parameter
    is."""
    others = [n for n in matmul.all_input_nodes if n is not weights]
    return matmul.target in BATCHED or any(values.comes_from_matmul(n) for n in others)


def _path(node: Node, before: dict[Node, Node | None]) -> list[Node]:
    out: list[Node] = []
    found: Node | None = node
    while found is not None and before[found] is not None:
        out.append(found)
        found = before[found]
    return out[::-1]


def _is_larger(user: Node, node: Node) -> bool:
    """Whether an elementwise op spreads a node over more elements than it has."""
    value = user.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return True
    is_moved = user.target in REARRANGES
    return not is_moved and shape_of(user) != shape_of(node)


def _why(exponentials: Node, way: list[Node], values: ValueNumbers) -> str:
    """Which part of exp(s - max s) / sum exp(s - max s) is another one."""
    quotient = next((node for node in way if _divisor(node, exponentials) is not None), None)
    if quotient is None:
        return "the exponentials of the scores are not divided by their sum, accepted a softmax"
    divisor = _divisor(quotient, exponentials)
    assert divisor is not None
    total = _behind(divisor)
    if total.target is not aten.sum.dim_IntList:
        return (
            f"the exponentials of the scores are divided by the result of {total.target}, "
            "accepted their sum as it is"
        )
    source, dims = total.args[:2]
    rank = len(shape_of(exponentials))
    if values.first(_behind(source)) is not values.first(_behind(exponentials)):
        return (
            "the exponentials of the scores are divided by the sum of something else, accepted "
            "their own sum"
        )
    over = [d % rank for d in dims]  # type: ignore[union-attr]
    if over != [rank - 1]:
        return (
            f"the exponentials of the scores are divided by their sum over dims {over} of {rank}, "
            "accepted the last"
        )
    return _why_shifted(exponentials)


def _why_shifted(exponentials: Node) -> str:
    shifted = exponentials.args[0]
    assert isinstance(shifted, Node)
    rank = len(shape_of(shifted))
    accepted = "accepted their maximum over the last dim, below which nothing overflows"
    if shifted.target is not aten.sub.Tensor or not isinstance(shifted.args[1], Node):
        return f"no maximum is subtracted from the scores before the exponential, {accepted}"
    source, shift = shifted.args[:2]
    if isinstance(source, Node) and maximised(shift, rank - 1, shape_of(shifted)) is seen_through(
        source
    ):
        return (
            "the exponentials of the scores or their sum are copied before they are divided, "
            "accepted a quotient whose parts have their gradients"
        )
    return (
        f"{_behind(shift).target} is subtracted from the scores before the exponential, {accepted}"
    )


def _divisor(node: Node, exponentials: Node) -> Node | None:
    """What a node on the way divides by, as a quotient or a product with a reciprocal."""
    if node.target is aten.div.Tensor:
        return node.args[1] if isinstance(node.args[1], Node) else None
    if node.target is not aten.mul.Tensor:
        return None
    for factor in node.args:
        if isinstance(factor, Node) and factor.target is aten.reciprocal.default:
            source = factor.args[0]
            if source is not exponentials and scalar_value(source) is None:
                return source  # type: ignore[return-value]
    return None


def _behind(node: object) -> Node:
    """The node behind views and copies."""
    found = node
    moves: set[Callable[..., object]] = {*VIEWS, *COPIES, *MOVES}
    while isinstance(found, Node) and found.target in moves:
        found = found.args[0]
    assert isinstance(found, Node)
    return found

"""Finds softmaxes, the one idiom that no spelling of attention avoids, with Inductor's pattern
matcher.

Only the matcher's small stable core is used, and only here: `PatternMatcherPass`,
`register_graph_pattern`, `CallFunction`, `Arg`, `MULTIPLE`. An anchor says where to look; what is
computed there the readers find out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch._inductor.pattern_matcher import (
    MULTIPLE,
    Arg,
    CallFunction,
    Match,
    PatternMatcherPass,
    register_graph_pattern,
)

from .axes import Place, Size, shape_of, whole
from .empty_rows import zeroed_where_empty
from .moves import broadcast, step

aten = torch.ops.aten
Node = torch.fx.Node


@dataclass(frozen=True)
class Softmax:
    """weights = softmax(scores, dim) = exponentials / total; dim counted from the front.

    is_guarded: rows whose scores are all -inf are zero (empty_rows.py), not NaN.
    """

    scores: Node
    weights: Node
    dim: int
    exponentials: Node
    total: Node
    is_guarded: bool = False


def _total_pattern(*more: Arg) -> CallFunction:
    """sum(exp(x - y)), a part of every decomposed softmax; what y is gets checked afterwards."""
    shifted = CallFunction(aten.sub.Tensor, Arg(), Arg(), _users=MULTIPLE)
    exponentials = CallFunction(aten.exp.default, shifted, _users=MULTIPLE)
    return CallFunction(aten.sum.dim_IntList, exponentials, Arg(), *more, _users=MULTIPLE)


def softmaxes(graph: torch.fx.Graph) -> list[Softmax]:
    """Every softmax of a float tensor in the graph, in graph order."""
    found: list[Softmax] = []
    anchors = PatternMatcherPass(pass_name="inductor_gqa_anchors")

    def record(match: Match, *args: Any, **kwargs: Any) -> None:
        found.extend(_softmaxes_of(match.output_node()))

    for pattern in (_total_pattern(), _total_pattern(Arg())):
        register_graph_pattern(pattern, pass_dict=anchors)(record)
    anchors.apply(graph)
    order = {node: number for number, node in enumerate(graph.nodes)}
    return sorted(found, key=lambda softmax: order[softmax.weights])


def row_sums(graph: torch.fx.Graph) -> list[Node]:
    """Every sum of a product over the last dim, kept or not, as in the gradient of a softmax; in
    graph order."""
    found: list[Node] = []
    anchors = PatternMatcherPass(pass_name="inductor_gqa_row_sums")
    product = CallFunction(aten.mul.Tensor, Arg(), Arg(), _users=MULTIPLE)

    def record(match: Match, *args: Any, **kwargs: Any) -> None:
        total = match.output_node()
        rank = len(shape_of(total.args[0]))  # type: ignore[arg-type]
        if [d % rank for d in total.args[1]] == [rank - 1]:  # type: ignore[union-attr]
            found.append(total)

    for keeps in ((), (Arg(),)):
        pattern = CallFunction(aten.sum.dim_IntList, product, Arg(), *keeps, _users=MULTIPLE)
        register_graph_pattern(pattern, pass_dict=anchors)(record)
    anchors.apply(graph)
    order = {node: number for number, node in enumerate(graph.nodes)}
    return sorted(found, key=lambda node: order[node])


def _softmaxes_of(total: Node) -> list[Softmax]:
    """Quotients of the exponentials and their total; autograd writes the same one once more."""
    exponentials, dims = total.args[:2]
    assert isinstance(exponentials, Node)
    scores, shift = exponentials.args[0].args[:2]  # type: ignore[union-attr]
    if not isinstance(scores, Node) or not isinstance(shift, Node) or len(dims) != 1:  # type: ignore[arg-type]
        return []
    shape = shape_of(exponentials)
    dim = dims[0] % len(shape)  # type: ignore[index]
    # Any shift that all keys share leaves the softmax as it is, but with another one than the
    # maximum eager may overflow where we would not.
    if maximised(shift, dim, shape) is not seen_through(scores):
        return []
    quotients: dict[Any, Node] = {}
    for user in exponentials.users:
        a, b = (*user.args, None, None)[:2]
        divides = user.target is aten.div.Tensor and a is exponentials
        if user.target is aten.mul.Tensor:
            b = b if a is exponentials else a
            divides = isinstance(b, Node) and b.target is aten.reciprocal.default
            b = b.args[0] if divides else None  # type: ignore[union-attr]
        if (
            divides
            and isinstance(b, Node)
            and shape_of(user) == shape
            and _reduced(b, dim, shape, _summed) is exponentials
        ):
            quotients.setdefault((user.target, user.args), user)
    found: list[Softmax] = []
    for made in quotients.values():
        guarded = zeroed_where_empty(made, scores, dim)
        is_guarded = guarded is not None
        found.append(Softmax(scores, guarded or made, dim, exponentials, total, is_guarded))
    return found


Reduction: TypeAlias = tuple[Node, list[int], bool]  # (of what, over which dims, kept or not)


def _summed(node: Node) -> Reduction | None:
    if node.target is not aten.sum.dim_IntList:
        return None
    source, dims, keeps = (*node.args, False)[:3]
    return source, list(dims), bool(keeps)  # type: ignore[return-value, arg-type]


def _maximised(node: Node) -> Reduction | None:
    if node.target is aten.amax.default:
        source, dims, keeps = (*node.args, False)[:3]
        return seen_through(source), list(dims), bool(keeps)  # type: ignore[arg-type]
    made = node.args[0] if getattr(node.target, "__name__", "") == "getitem" else None
    if not isinstance(made, Node) or made.target is not aten.max.dim or node.args[1] != 0:
        return None
    source, dim, keeps = (*made.args, False)[:3]
    return seen_through(source), [dim], bool(keeps)  # type: ignore[arg-type, list-item]


def maximised(node: Node, dim: int, shape: tuple[Size, ...]) -> Node | None:
    """The tensor of the shape whose maximum over `dim` the node is, spread over the shape again."""
    return _reduced(node, dim, shape, _maximised)


def _reduced(
    node: Node, dim: int, shape: tuple[Size, ...], reduction: Callable[[Node], Reduction | None]
) -> Node | None:
    """What was reduced over `dim` and then spread over the shape again; None where it was not."""
    own = tuple(whole(str(d), n) for d, n in enumerate(shape))
    position = broadcast(node, own)
    while (found := reduction(node)) is None:
        back = step(node, position, casts=False)
        if back is None:
            return None
        node, position = back
    source, dims, keeps = found
    is_over = [d % len(shape) for d in dims] == [dim]
    at = (*own[:dim], *[Place()] * keeps, *own[dim + 1 :])
    return source if is_over and position == at and len(shape_of(source)) == len(own) else None


def seen_through(node: Any) -> Node:
    """The node behind copies that leave every element where it is."""
    copies = (aten.alias.default, aten.detach.default, aten.clone.default, aten.expand.default)
    while node.target in copies and shape_of(node) == shape_of(node.args[0]):
        node = node.args[0]
    return node

"""Finds softmaxes, the one idiom that no spelling of attention avoids, with Inductor's pattern
matcher.

Only the matcher's small stable core is used, and only here: `PatternMatcherPass`,
`register_graph_pattern`, `CallFunction`, `Arg`, `MULTIPLE`. An anchor says where to look; what is
computed there the readers find out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch._inductor.pattern_matcher import (
    MULTIPLE,
    Arg,
    CallFunction,
    Match,
    PatternMatcherPass,
    register_graph_pattern,
)

from .axes import shape_of

aten, prims = torch.ops.aten, torch.ops.prims


@dataclass(frozen=True)
class Softmax:
    """weights = softmax(scores, dim); dim counted from the front."""

    scores: torch.fx.Node
    weights: torch.fx.Node
    dim: int


def _softmax_pattern() -> CallFunction:
    """exp(x - y) / sum(exp(x - y)), the shape of every decomposed softmax; what y is gets checked
    afterwards."""
    shifted = CallFunction(aten.sub.Tensor, Arg(), Arg(), _users=MULTIPLE)
    exponentials = CallFunction(aten.exp.default, shifted, _users=MULTIPLE)
    total = CallFunction(aten.sum.dim_IntList, exponentials, Arg(), Arg(), _users=MULTIPLE)
    return CallFunction(aten.div.Tensor, exponentials, total, _users=MULTIPLE)


def softmaxes(graph: torch.fx.Graph) -> list[Softmax]:
    """Every softmax of a float tensor in the graph, in graph order."""
    found: list[Softmax] = []
    anchors = PatternMatcherPass(pass_name="inductor_gqa_anchors")

    def record(match: Match, *args: Any, **kwargs: Any) -> None:
        softmax = _checked(match.output_node())
        if softmax is not None:
            found.append(softmax)

    register_graph_pattern(_softmax_pattern(), pass_dict=anchors)(record)
    anchors.apply(graph)
    order = {node: number for number, node in enumerate(graph.nodes)}
    return sorted(found, key=lambda softmax: order[softmax.weights])


def row_sums(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    """Every sum of a product over the last dim that keeps it, as in the gradient of a softmax; in
    graph order."""
    found: list[torch.fx.Node] = []
    anchors = PatternMatcherPass(pass_name="inductor_gqa_row_sums")
    product = CallFunction(aten.mul.Tensor, Arg(), Arg(), _users=MULTIPLE)
    pattern = CallFunction(aten.sum.dim_IntList, product, Arg(), Arg(), _users=MULTIPLE)

    def record(match: Match, *args: Any, **kwargs: Any) -> None:
        total = match.output_node()
        dims = [d % len(shape_of(total)) for d in total.args[1]]  # type: ignore[union-attr]
        if dims == [len(shape_of(total)) - 1] and total.args[2] is True:
            found.append(total)

    register_graph_pattern(pattern, pass_dict=anchors)(record)
    anchors.apply(graph)
    order = {node: number for number, node in enumerate(graph.nodes)}
    return sorted(found, key=lambda node: order[node])


def _checked(weights: torch.fx.Node) -> Softmax | None:
    exponentials, total = weights.args
    assert isinstance(exponentials, torch.fx.Node)
    assert isinstance(total, torch.fx.Node)
    scores, shift = exponentials.args[0].args  # type: ignore[union-attr]
    dims, keeps = total.args[1], total.args[2] if len(total.args) > 2 else False
    if not isinstance(scores, torch.fx.Node) or not keeps or len(dims) != 1:  # type: ignore[arg-type]
        return None
    rank = len(shape_of(weights))
    dim = dims[0] % rank  # type: ignore[index]
    if not _is_constant_along(shift, scores, dim):
        return None
    return Softmax(scores, weights, dim)


def _is_constant_along(shift: Any, scores: torch.fx.Node, dim: int) -> bool:
    """Subtracting anything that does not vary along the softmax leaves it as it is; the maximum is
    the usual choice.

    Only the maximum is accepted: with another shift, eager may overflow where we would not.
    """
    if not isinstance(shift, torch.fx.Node):
        return False
    shift, scores = _seen_through(shift), _seen_through(scores)
    rank = len(shape_of(scores))
    keeps = shift.args[2] if len(shift.args) > 2 else shift.kwargs.get("keepdim", False)
    if shift.target is aten.amax.default:
        dims = [d % rank for d in shift.args[1]]  # type: ignore[union-attr]
        return bool(keeps) and dims == [dim] and _seen_through(shift.args[0]) is scores  # type: ignore[arg-type]
    if getattr(shift.target, "__name__", "") == "getitem" and shift.args[1] == 0:
        made = shift.args[0]
        return (
            isinstance(made, torch.fx.Node)
            and made.target is aten.max.dim
            and made.args[1] % rank == dim  # type: ignore[operator]
            and made.args[2:] == (True,)
            and _seen_through(made.args[0]) is scores  # type: ignore[arg-type]
        )
    return False


def _seen_through(node: torch.fx.Node) -> torch.fx.Node:
    """The node behind aliases that leave every element as it is."""
    while node.target in (aten.alias.default, aten.detach.default, aten.clone.default):
        node = node.args[0]  # type: ignore[assignment]
    return node

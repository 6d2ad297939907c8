"""Tells whether the scores of an attention are needed beside their softmax, and as what.

In a joint graph their gradient then has a second part, so that the backward does not read; the
reason lies in the forward.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from .attention import Forward
from .operands import MOVES
from .values import ValueNumbers

aten = torch.ops.aten
Node = torch.fx.Node


def escapes(forward: Forward, values: ValueNumbers) -> str | None:
    """What is returned beside the softmax, if an output of the forward is made of the scores by a
    way that does not pass through it: "scores are" or what else of them is."""
    if not any(values.comes_from_gradient(n) for n in forward.anchor.weights.graph.nodes):
        return None  # a backward by hand: what it computes of the scores is no forward's output
    anchor = forward.anchor
    stops = {anchor.exponentials, anchor.total, anchor.weights}
    made = [n for n in _made_of(forward.scores.matmul, stops) if not values.comes_from_gradient(n)]
    is_returned = any(user.op == "output" for node in made for user in node.users)
    return _what(made, anchor.scores) if is_returned else None


def returned(forward: Forward, replaced: Iterable[Node]) -> str:
    """The same of scores that are known to be needed although `replaced` are no more."""
    return _what(_made_of(forward.scores.matmul, replaced), forward.anchor.scores)


def _what(made: list[Node], scores: Node) -> str:
    is_summed = any(_is_log_of_sum(node, scores) for node in made)
    return "log-sum-exp of the scores is" if is_summed else "scores are"


def _made_of(start: Node, stops: Iterable[Node]) -> list[Node]:
    """The node and all that is made of it by ways past none of `stops`."""
    todo, seen = [start], {start, *stops}
    for node in todo:
        for user in node.users:
            if user.op != "output" and user not in seen:
                seen.add(user)
                todo.append(user)
    return todo


def _is_log_of_sum(node: Node, scores: Node) -> bool:
    """log(sum(exp(scores - shift)))"""
    found = node
    for op in (aten.log.default, aten.sum.dim_IntList, aten.exp.default, aten.sub.Tensor):
        found = _source(found)
        if found.target is not op or not isinstance(found.args[0], Node):
            return False
        found = found.args[0]
    return _source(found) is _source(scores)


def _source(node: Node) -> Node:
    """The node behind rearrangements and casts."""
    while node.target in (*MOVES, torch.ops.prims.convert_element_type.default):
        node = node.args[0]  # type: ignore[assignment]
    return node

"""Tells whether the scores of an attention are needed beside their softmax, and as what.

In a joint graph their gradient then has a second part, so that the backward does not read; the
reason lies in the forward.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from .attention import Forward
from .values import ValueNumbers

aten = torch.ops.aten
Node = torch.fx.Node


def escapes(forward: Forward, values: ValueNumbers) -> str | None:
    """What else becomes of the scores, as a sentence, if an output of the forward is made of them
    by a way that does not pass through the softmax."""
    if not any(values.comes_from_gradient(n) for n in forward.anchor.weights.graph.nodes):
        return None  # a backward by hand: what it computes of the scores is no forward's output
    anchor = forward.anchor
    stops = {anchor.exponentials, anchor.total, anchor.weights}
    for way in _ways_out(forward.scores.matmul, stops):
        if not any(values.comes_from_gradient(node) for node in way):
            return _sentence(way)
    return None


def returned_as(scores: Node, replaced: Iterable[Node]) -> str:
    """The same of scores that are known to be needed although `replaced` are no more."""
    return _sentence(next(_ways_out(scores, replaced), []))


def _sentence(way: list[Node]) -> str:
    what = "log-sum-exp of the scores is" if any(map(_is_log_of_sum, way)) else "scores are"
    return f"the {what} returned as well, accepted scores that only the softmax needs"


def _ways_out(start: Node, stops: Iterable[Node]) -> Iterable[list[Node]]:
    """For every node that is made of `start` and returned, a way to it past none of `stops`."""
    before: dict[Node, Node | None] = {start: None, **dict.fromkeys(stops)}
    todo = [start]
    for node in todo:
        for user in node.users:
            if user.op == "output":
                yield _back(node, before)
            elif user not in before:
                before[user] = node
                todo.append(user)


def _back(end: Node, before: dict[Node, Node | None]) -> list[Node]:
    out: list[Node] = []
    node: Node | None = end
    while node is not None:
        out.append(node)
        node = before[node]
    return out


def _is_log_of_sum(node: Node) -> bool:
    if node.target is not aten.log.default:
        return False
    summed = node.args[0]
    while isinstance(summed, Node) and summed.target in (
        aten.view.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
    ):
        summed = summed.args[0]
    return isinstance(summed, Node) and summed.target is aten.sum.dim_IntList

"""Tells whether the scores of an attention are needed beside their softmax.

In a joint graph their gradient then has a second part, so that the backward does not read; the
reason lies in the forward.
"""

from __future__ import annotations

import torch

from .attention import Forward
from .values import ValueNumbers

Node = torch.fx.Node


def escapes(forward: Forward, values: ValueNumbers) -> bool:
    """Whether an output of the forward is made of the scores by a way that does not pass through
    the softmax."""
    if not any(values.comes_from_gradient(n) for n in forward.anchor.weights.graph.nodes):
        return False  # a backward by hand: what it computes of the scores is no output of a forward
    anchor = forward.anchor
    stops = {anchor.exponentials, anchor.total, anchor.weights}
    todo, seen = [forward.scores.matmul], {forward.scores.matmul}
    for node in todo:
        for user in node.users:
            if user.op == "output":
                if not values.comes_from_gradient(node):
                    return True
            elif user not in seen | stops and not values.comes_from_gradient(user):
                seen.add(user)
                todo.append(user)
    return False

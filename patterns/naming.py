"""What a node of the graph is called in a reason: its op, not the name that tracing gave it."""

from __future__ import annotations

import torch

Node = torch.fx.Node


def op_of(node: object) -> str:
    """E.g. "aten.mul.Tensor", "an input", "0.5"."""
    if not isinstance(node, Node):
        return str(node)
    if node.op == "call_function":
        target = node.target
        is_op = isinstance(target, torch._ops.OpOverload)
        return str(target) if is_op else getattr(target, "__name__", "a call")
    return "a constant" if node.op == "get_attr" else "an input"


def use(user: Node) -> str:
    """What is done with a value that something else needs as well."""
    return "returned" if user.op == "output" else f"used by {op_of(user)}"

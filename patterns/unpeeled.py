"""Says what became of the scores of an attention in an op that is no scale, softcap or mask."""

from __future__ import annotations

import torch

from .axes import shape_of
from .operands import MATMULS

aten, prims = torch.ops.aten, torch.ops.prims
Node = torch.fx.Node

CHAIN = {
    aten.mul.Tensor,
    aten.mul.Scalar,
    aten.div.Tensor,
    aten.div.Scalar,
    aten.add.Tensor,
    aten.sub.Tensor,
    aten.where.self,
    aten.tanh.default,
    aten.neg.default,
    aten.view.default,
    aten._unsafe_view.default,
    aten.permute.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.expand.default,
    aten.clone.default,
    aten.alias.default,
    prims.convert_element_type.default,
}


def leads_to_matmul(node: Node) -> bool:
    """Whether a chain of score ops starts at a matmul."""
    todo, seen = [node], set()
    while todo:
        n = todo.pop()
        if n in seen or n.op != "call_function":
            continue
        seen.add(n)
        if n.target in MATMULS:
            return True
        if n.target in CHAIN:
            todo += n.all_input_nodes
    return False


def what_became(node: Node) -> str:
    """What became of the scores in an op that cannot be peeled off."""
    if node.op != "call_function":
        return f"the scores are an input of the graph ({node.name})"
    factors = [n for n in node.args[:2] if isinstance(n, Node)]
    from_matmul = [n for n in factors if leads_to_matmul(n)]
    if node.target is aten.mul.Tensor:
        if len(from_matmul) == 2:
            return "the scores are multiplied by themselves or by another product"
        others = [n for n in factors if n not in from_matmul]
        sizes = list(shape_of(others[0])) if others else []
        return f"the scores are multiplied by a tensor of sizes {sizes}"
    if node.target is aten.div.Tensor:
        if factors and factors[0].target is aten.exp.default:
            return "the scores are a softmax themselves"
        return f"the scores are divided by {factors[-1].target}"
    if node.target is aten.sub.Tensor:
        rank = len(shape_of(node))
        if len(factors) == 2 and factors[1].target in (aten.amax.default, aten.amin.default):
            dims = factors[1].args[1]
            return f"{factors[1].target} over dims {dims} of {rank} is subtracted from the scores"
        return "the scores stand on one side of a difference of tensors"
    if node.target is aten.where.self:
        return "the scores are chosen from two tensors, neither of which is a number"
    if node.target is aten.reciprocal.default:
        return "the scores are what a number is divided by"
    return f"the scores pass through {node.target}"

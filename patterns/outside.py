"""Says why a rotation stays outside a site, and whether there is one at all.

An attention without rotary embedding reads as one whose lanes are not turned, or come from several
tensors; that is worth a sentence only where something between the projection and the scores is
multiplied by a table over the positions.
"""

from __future__ import annotations

import torch

from .axes import Digit, Size, product, same, shape_of
from .operands import MATMULS, Operand
from .values import ValueNumbers, is_float

aten = torch.ops.aten
Node = torch.fx.Node


def outside(why: str, names: list[str]) -> str:
    """The sentence for a rotation that was met and is not part of the site."""
    whose = "" if len(names) != 1 else f" of {names[0]}"
    return f"rotation{whose} stays outside the kernel: {why}"


def looks_turned(operand: Operand, row: str, values: ValueNumbers) -> bool:
    """Whether between the last matmul and the operand something is multiplied by a table over the
    positions `row`, as a rotation does."""
    digits = [d for place in operand.position for d in place.digits if isinstance(d, Digit)]
    length = product(d.size for d in digits if d.axis == row)
    todo, seen = [operand.node], {operand.node}
    while todo:
        node = todo.pop()
        if node.target is aten.view_as_real.default:
            return True
        if node.target is aten.mul.Tensor and any(
            isinstance(x, Node) and _is_over_positions(x, length, values) for x in node.args
        ):
            return True
        for source in node.all_input_nodes:
            if source not in seen and source.target not in MATMULS:
                seen.add(source)
                todo.append(source)
    return False


def _is_over_positions(node: Node, length: Size, values: ValueNumbers) -> bool:
    if not is_float(node) or values.comes_from_matmul(node):
        return False
    shape = shape_of(node)
    wide = [n for n in shape if not same(n, 1)]
    has_lanes = bool(shape) and not same(shape[-1], 1)  # which the scale of a norm has not
    return has_lanes and len(wide) > 1 and any(same(n, length) for n in wide)

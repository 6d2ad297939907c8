"""Reads what stands between q k^T and the softmax: scale, softcap, masks, bias.

Spellings seen in the wild: `* scale`, `/ sqrt(d)`, a scale that arrives as a 0-d tensor (dynamic
shapes), `cap * tanh(s / cap)`, `+ mask`, `masked_fill`, `where(keep, s, fill)`, casts anywhere, `s
- s.max()` before the softmax. Refused: a mask inside the softcap, a factor outside the mask, two
matmuls that feed the scores, anything that varies otherwise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from inductor_gqa.site import View

from .anchors import maximised, seen_through
from .axes import Place, Position, Size, Unread, axes_in, same, shape_of
from .moves import broadcast, step
from .operands import MATMULS
from .unpeeled import leads_to_matmul, what_became
from .values import ValueNumbers, scalar_value

aten, prims = torch.ops.aten, torch.ops.prims
Node = torch.fx.Node


@dataclass
class Scores:
    """scores = mask(softcap * tanh(scale * qk / softcap)); without softcap scale * qk."""

    matmul: Node
    position: Position  # of the score in the matmul's result, in the site's axes
    scale: float = 1.0
    scale_tensor: Node | None = None
    softcap: float = 0.0
    capped: View | None = None  # the tanh
    sink: View | None = None  # a column of the softmax that is no key
    added: list[tuple[View, float]] = field(default_factory=list)  # each with its factor
    filled: list[tuple[View, bool, float]] = field(default_factory=list)


@dataclass(frozen=True)
class _Stage:
    kind: str
    factor: float = 1.0
    tensor: View | None = None
    keeps: bool = True


def read(scores: Node, position: Position, values: ValueNumbers) -> Scores:
    """Follows the scores back to the matmul; raises Unread with the reason."""
    stages: list[_Stage] = []
    node = scores
    while not (node.op == "call_function" and node.target in MATMULS):
        found = _outer(node, position, stages, values)
        if found is None:
            raise Unread(f"{what_became(node)}, accepted scale, softcap, mask")
        node, position = found
    out = Scores(node, position)
    if node.target is aten.baddbmm.default:
        _baddbmm(node, position, stages)
    _interpret(stages, out)
    for view, _ in out.added:
        if values.comes_from_matmul(view.node) and _is_made_of(view.node, out.matmul, values):
            raise Unread(
                f"{view.node.target} of the scores is added to them or subtracted, accepted their "
                "maximum over the keys"
            )
    return out


def _is_made_of(node: Node, source: Node, values: ValueNumbers) -> bool:
    todo, seen = [node], {node}
    for reached in todo:
        if reached is source:
            return True
        for n in reached.all_input_nodes:
            if n not in seen and values.comes_from_matmul(n):
                seen.add(n)
                todo.append(n)
    return False


def _outer(
    node: Node, position: Position, stages: list[_Stage], values: ValueNumbers
) -> tuple[Node, Position] | None:
    """Peels one op off the scores and notes what it did."""
    if node.op != "call_function":
        return None
    op, args = node.target, node.args
    if op in (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar):
        return _scaled(node, position, stages)
    if op in (aten.add.Tensor, aten.sub.Tensor):
        return _added(node, position, stages, values)
    if op is aten.where.self:
        return _filled(node, position, stages)
    if op is aten.tanh.default:
        stages.append(_Stage("tanh", tensor=View(node, position)))
        return args[0], position  # type: ignore[return-value]
    if op is aten.cat.default:
        return _beside_sink(node, position, stages)
    if op is aten.neg.default:
        stages.append(_Stage("scale", -1.0))
        return args[0], position  # type: ignore[return-value]
    return step(node, position)


def _beside_sink(
    node: Node, position: Position, stages: list[_Stage]
) -> tuple[Node, Position] | None:
    """`cat((scores, sink), -1)`, either way round: the scores' part, at the keys' positions."""
    parts: list[Node] = list(node.args[0])  # type: ignore[call-overload]
    dim = (node.args[1] if len(node.args) > 1 else 0) % len(position)  # type: ignore[operator]
    if dim != len(position) - 1 or len(parts) != 2:
        return None
    sizes = [shape_of(part)[dim] for part in parts]
    starts: list[Size] = [0, sizes[0]]
    place = position[dim]
    for k, (part, size, start) in enumerate(zip(parts, sizes, starts, strict=True)):
        other = 1 - k
        if same(place.offset, start) and same(place.extent, size) and same(sizes[other], 1):
            beside = (*position[:dim], Place())
            stages.append(_Stage("sink", tensor=View(parts[other], beside)))
            return part, (*position[:dim], Place(place.digits))
    return None


def _scaled(node: Node, position: Position, stages: list[_Stage]) -> tuple[Node, Position] | None:
    a, b = node.args[0], node.args[1]
    divides = node.target in (aten.div.Tensor, aten.div.Scalar)
    for value, other in ((b, a), (a, b)):
        if not isinstance(other, Node):
            continue
        number = scalar_value(value)
        if number is not None:
            if divides and (value is a or number == 0.0):
                return None
            stages.append(_Stage("scale", 1.0 / number if divides else number))
            return other, broadcast(other, position)
        if isinstance(value, Node) and value.meta["val"].dim() == 0 and not divides:
            stages.append(_Stage("scale_tensor", tensor=View(value, ())))
            return other, broadcast(other, position)
        if divides:
            break
    return None


def _added(
    node: Node, position: Position, stages: list[_Stage], values: ValueNumbers
) -> tuple[Node, Position] | None:
    a, b = node.args[0], node.args[1]
    subtracts = node.target is aten.sub.Tensor
    if (
        subtracts
        and isinstance(a, Node)
        and isinstance(b, Node)
        and _is_max_of(b, a)
        and "j" not in axes_in(broadcast(b, position))
    ):
        stages.append(_Stage("shift"))
        return a, broadcast(a, position)
    leading = [n for n in (a, b) if isinstance(n, Node) and leads_to_matmul(n)]
    if len(leading) == 2:
        raise Unread("two matmuls feed the scores, accepted one")
    times = node.kwargs.get("alpha", 1)  # what b is multiplied by
    if len(leading) != 1 or not isinstance(times, int | float):
        return None
    times = -float(times) if subtracts else float(times)
    is_first = leading[0] is a
    other, factor = (b, times) if is_first else (a, 1.0)
    number = scalar_value(other)
    if number is not None and math.isfinite(number):
        stages.append(_Stage("shift"))
    elif number is None and isinstance(other, Node):
        stages.append(_Stage("add", factor, View(other, broadcast(other, position))))
    else:
        return None
    if not is_first and times != 1.0:
        stages.append(_Stage("scale", times))
    return leading[0], broadcast(leading[0], position)


def _is_max_of(value: Node, scores: Node) -> bool:
    shape = shape_of(scores)
    found = len(shape_of(value)) <= len(shape) and maximised(value, len(shape) - 1, shape)
    return found is seen_through(scores)


def _filled(node: Node, position: Position, stages: list[_Stage]) -> tuple[Node, Position] | None:
    condition, a, b = node.args
    if not isinstance(condition, Node):
        return None
    view = View(condition, broadcast(condition, position))
    for kept, other, keeps in ((a, b, True), (b, a, False)):
        fill = scalar_value(other)
        if fill is not None and isinstance(kept, Node) and scalar_value(kept) is None:
            stages.append(_Stage("fill", fill, view, keeps))
            return kept, broadcast(kept, position)
    return None


def _baddbmm(node: Node, position: Position, stages: list[_Stage]) -> None:
    """beta * input + alpha * (a b)"""
    beta, alpha = node.kwargs.get("beta", 1), node.kwargs.get("alpha", 1)
    if not isinstance(beta, int | float) or not isinstance(alpha, int | float):
        raise Unread("baddbmm with alpha or beta that are not numbers, accepted numbers")
    given = node.args[0]
    assert isinstance(given, Node)
    if beta != 0 and scalar_value(given) != 0.0:
        if beta != 1:
            raise Unread(f"baddbmm with beta {beta}, accepted 0 and 1")
        stages.append(_Stage("add", tensor=View(given, broadcast(given, position))))
    stages.append(_Stage("scale", float(alpha)))


def _interpret(stages: list[_Stage], out: Scores) -> None:
    """Stages come outermost first."""
    outer = 1.0
    capped = False
    for stage in stages:
        if stage.kind == "scale":
            if capped or not any(s.kind == "tanh" for s in stages):
                out.scale *= stage.factor
            outer *= stage.factor
            if not capped and any(s.kind == "tanh" for s in stages):
                out.softcap = outer
        elif stage.kind == "scale_tensor":
            if out.scale_tensor is not None or (
                not capped and any(s.kind == "tanh" for s in stages)
            ):
                raise Unread("the scores are multiplied by two tensors, accepted one")
            assert stage.tensor is not None
            out.scale_tensor = stage.tensor.node
        elif stage.kind == "shift":  # the same for all keys, so the softmax does not change by it
            if (
                capped or out.sink is not None
            ):  # read inwards: a sink that was met lies outside this shift
                raise Unread(
                    "the scores are shifted inside the softcap or beside a sink, "
                    "accepted shifts outside both"
                )
        elif stage.kind == "sink":
            if out.sink is not None or outer != 1.0 or capped or out.added or out.filled:
                raise Unread("a sink column that is scaled or masked, accepted one as it is")
            out.sink = stage.tensor
        elif stage.kind == "tanh":
            if capped:
                raise Unread("two softcaps, accepted one")
            capped = True
            out.softcap, out.capped = outer, stage.tensor
            if not outer > 0:
                raise Unread(f"softcap is {outer}, accepted positive")
        else:
            assert stage.tensor is not None
            if capped:
                raise Unread("a mask inside the softcap, accepted a mask after it")
            if outer != 1.0 or out.scale_tensor is not None:
                raise Unread(
                    f"the scores are multiplied by {outer} after the mask, accepted before"
                )
            if stage.kind == "add":
                out.added.append((stage.tensor, stage.factor))
            else:
                if out.added and stage.factor != -math.inf:
                    # Where the bias is -inf for all keys that are seen, eager goes on with the
                    # filled ones.
                    raise Unread(
                        "a bias is added after the scores were filled, "
                        "accepted a bias before the mask"
                    )
                out.filled.append((stage.tensor, stage.keeps, stage.factor))
    if capped:
        out.scale *= out.softcap

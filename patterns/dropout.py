"""Reads what is done to the weights between the softmax and the values: dropout.

Spellings seen in the wild: `F.dropout` and `nn.Dropout` (decomposed to `rand > p`, a product with
that mask and one with `1 / (1 - p)`; a `native_dropout` where random numbers are eager's), a mask
of `torch.rand_like` or `torch.bernoulli`, `where(keep, w, 0)`, a mask that is given. All read as a
boolean that keeps a weight, times one number. The mask stays the graph's own, so that it is the one
that would have been drawn without us. Refused: a mask of the weights' own values, a number without
a mask, factors that are no booleans.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from inductor_gqa.site import Mask, View

from .axes import Position, Unread, product, same, shape_of, whole
from .moves import broadcast, step
from .naming import op_of
from .operands import MATMULS, MOVES
from .renaming import Renaming
from .values import ValueNumbers, is_float, scalar_value

aten, prims = torch.ops.aten, torch.ops.prims
Node = torch.fx.Node

STEPS = {
    *MOVES,
    prims.convert_element_type.default,
    aten.mul.Tensor,
    aten.mul.Scalar,
    aten.div.Tensor,
    aten.div.Scalar,
    aten.where.self,
}


@dataclass(frozen=True)
class Dropped:
    """The weights as they are multiplied with the values: `result` is weights * keep * factor,
    position in the site's axes.

    keep: booleans; a `native_dropout` whose mask nothing needs stands for it. drawn: random ops
    that take the weights for their shape alone. chooses: whether weights are replaced by 0, not
    multiplied by it.
    """

    result: View
    keep: tuple[tuple[View, bool], ...] = ()
    factor: float = 1.0
    drawn: tuple[Node, ...] = ()
    chooses: bool = False

    def check(self, matmul: Node, mask: Mask) -> None:
        """Raises Unread for a mask that needs the scores, and for a choice between a weight and 0
        that might hide the NaN of a row without a key, which a product with 0 would not."""
        for view, _ in self.keep:
            if _mask_depends(view.node, matmul):
                raise Unread(
                    "the dropout mask depends on the scores, accepted random numbers alone"
                )
        if self.chooses and (mask.bias or (mask.hides and mask.fill == -math.inf)):
            raise Unread(
                "weights are replaced by 0 where a row may have no key, accepted a product"
            )


def read(weights: Node, canonical: Position, values: ValueNumbers) -> Dropped:
    """What becomes of the weights on their way to the values; raises Unread where that is more than
    dropout."""
    ends = results(weights, values)
    if len(ends) != 1 or ends[0] is weights:
        return Dropped(View(weights, canonical))
    (node,) = ends
    own = tuple(whole(f"x{d}", n) for d, n in enumerate(shape_of(node)))
    seen, keep, factor, chooses = _peeled(node, own, weights)
    names = Renaming()
    names.learn(seen, canonical)
    if not keep:
        raise Unread(f"the weights are multiplied by {factor:g}, accepted a factor with dropout")
    for view, _ in keep:
        if _mask_depends(view.node, weights):
            raise Unread("the dropout mask depends on the weights, accepted random numbers alone")
    named = tuple((View(v.node, names.apply(v.position)), positive) for v, positive in keep)
    drawn = tuple(n for v, _ in keep for n in _drawn_like(v.node, weights))
    result = View(node, names.apply(own))
    return Dropped(result, named, factor, tuple(dict.fromkeys(drawn)), chooses)


def results(weights: Node, values: ValueNumbers) -> list[Node]:
    """The weights, or what was computed from them pointwise, wherever it goes into a matmul of the
    forward; without the rearrangements before the matmul."""
    todo, seen, ends = [weights], {weights}, dict[Node, None]()
    while todo:
        node = todo.pop()
        for user in node.users:
            if values.comes_from_gradient(user) or user in seen:
                continue
            if user.target in MATMULS:
                ends[_unmoved(node, weights)] = None
            elif user.target is aten.native_dropout.default or _is_weight_wise(user, weights):
                seen.add(user)
                todo.append(user)
    return list(ends)


def _is_weight_wise(user: Node, weights: Node) -> bool:
    """Whether each of its elements is made of one weight."""
    if user.target not in STEPS and not _is_dropout_output(user):
        return False
    return same(product(shape_of(user)), product(shape_of(weights)))


def _unmoved(node: Node, weights: Node) -> Node:
    cast = prims.convert_element_type.default
    while node is not weights and (node.target in MOVES or node.target is cast):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _is_dropout_output(node: Node) -> bool:
    return _output_of_dropout(node) == 0


def _output_of_dropout(node: Node) -> int | None:
    """0: the result of a `native_dropout`, 1: its mask."""
    made = node.args[0] if getattr(node.target, "__name__", "") == "getitem" else None
    if not isinstance(made, Node) or made.target is not aten.native_dropout.default:
        return None
    return node.args[1]  # type: ignore[return-value]


def _peeled(
    node: Node, position: Position, weights: Node
) -> tuple[Position, list[tuple[View, bool]], float, bool]:
    """(position of the weights' element, what keeps it, factor, whether by a choice)."""
    keep: list[tuple[View, bool]] = []
    factor, chooses = 1.0, False
    while node is not weights:
        back = step(node, position)
        if back is not None:
            node, position = back
            continue
        if _is_dropout_output(node):
            made: Node = node.args[0]  # type: ignore[assignment]
            share = made.args[1]
            if not isinstance(share, float) or not share < 1:
                raise Unread(f"dropout drops {share} of the weights, accepted less than 1")
            mask = next((n for n in made.users if _output_of_dropout(n) == 1), made)
            keep.append((View(mask, position), True))
            node, factor = made.args[0], factor / (1 - share)  # type: ignore[assignment]
            continue
        chooses |= node.target is aten.where.self
        node, position, number = _inner(node, position, weights, keep)
        factor *= number
    return position, keep, factor, chooses


def _inner(
    node: Node, position: Position, weights: Node, keep: list[tuple[View, bool]]
) -> tuple[Node, Position, float]:
    """One product or choice back towards the weights; a mask that is met is noted."""
    sources = [n for n in node.all_input_nodes if _depends(n, weights)]
    if len(sources) != 1:
        raise Unread(f"{op_of(node)} is made of the weights more than once, accepted dropout")
    (source,) = sources
    at = broadcast(source, position)
    if node.target is aten.where.self:
        condition, a, b = node.args
        other = b if source is a else a
        if source is condition or scalar_value(other) != 0.0:
            shown = op_of(other) if scalar_value(other) is None else scalar_value(other)
            raise Unread(f"the weights are replaced by {shown}, accepted 0")
        keep.append((_mask(condition, position), source is a))  # type: ignore[arg-type]
        return source, at, 1.0
    divides = node.target in (aten.div.Tensor, aten.div.Scalar)
    other = node.args[1] if node.args[0] is source else node.args[0]
    number = scalar_value(other)
    if number is None and isinstance(other, Node) and not divides:
        number = _flag_times(other, broadcast(other, position), keep)
    if not number or (divides and other is node.args[0]):
        raise Unread(f"the weights are multiplied by {op_of(other)}, accepted a mask and a number")
    return source, at, 1.0 / number if divides else number


def _flag_times(node: Node, position: Position, keep: list[tuple[View, bool]]) -> float | None:
    """A mask as it is, made a number, and scaled: its number; the mask is noted."""
    number = 1.0
    while node.meta["val"].dtype is not torch.bool:
        back = step(node, position)
        source = node.args[0] if node.args else None
        if back is not None:
            node, position = back
        elif node.target is prims.convert_element_type.default and isinstance(source, Node):
            if is_float(source):
                return None
            node, position = source, broadcast(source, position)
        elif node.target in (aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar, aten.div.Scalar):
            factor = scalar_value(node.args[1])
            if not factor or not isinstance(source, Node):
                return None
            number *= factor if node.target in (aten.mul.Tensor, aten.mul.Scalar) else 1.0 / factor
            node, position = source, broadcast(source, position)
        else:
            return None
    keep.append((_mask(node, position), True))
    return number


def _mask(node: Node, position: Position) -> View:
    if node.meta["val"].dtype is not torch.bool:
        raise Unread(f"the dropout mask is {node.meta['val'].dtype}, accepted booleans")
    position = broadcast(node, position)
    while (back := step(node, position)) is not None:
        node, position = back
    return View(node, position)


def _depends(node: Node, weights: Node) -> bool:
    """Whether the values of the weights, not their shape alone, go into `node`."""
    return weights in _ancestors(node, stop_at_shapes=True)


def _mask_depends(mask: Node, node: Node) -> bool:
    return mask.target not in DRAWN_LIKE and _depends(mask, node)


def _drawn_like(node: Node, weights: Node) -> list[Node]:
    """The random ops behind a mask that take the weights for their shape."""
    above = {node} | _ancestors(node, stop_at_shapes=True)
    drawn = [n for n in above if n.target in DRAWN_LIKE]
    return [n for n in drawn if weights in _ancestors(n, stop_at_shapes=False)]


def _ancestors(node: Node, stop_at_shapes: bool) -> set[Node]:
    todo, seen = [node], {node}
    while todo:
        n = todo.pop()
        if stop_at_shapes and (n.target is aten.rand_like.default or _is_drawn_mask(n)):
            # Drawn in the shape of its operand, whatever that holds.
            seen |= {m for m in (n, *n.all_input_nodes) if m.target in DRAWN_LIKE}
            continue
        todo += [m for m in n.all_input_nodes if m not in seen]
        seen.update(n.all_input_nodes)
    return seen


DRAWN_LIKE = {aten.native_dropout.default, aten.rand_like.default}


def _is_drawn_mask(node: Node) -> bool:
    return _output_of_dropout(node) == 1

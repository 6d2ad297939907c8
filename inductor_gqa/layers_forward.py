"""Joins the fp32 linear layers around a fused attention: those of q, k and v, which share their
input, and the output projection become one `inductor_gqa::linear_forward` each.

Runs after the sites of a graph are written. Looks from their forward ops only; what it does not
recognise (a bias, a weight stored as [C, N], symbolic sizes), and what was not measured to gain,
stays as the matmuls that it is.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from . import decide, ops, rewrite
from .emit import Emitter
from .layers import VIEWS, Matrix, depends, matrix_of

aten = torch.ops.aten
Node = torch.fx.Node
FORWARDS = (ops.attention, ops.attention_weights)
# Between a layer and its attention stands nothing but these, which compute nothing.
MOVES = VIEWS | {
    aten.clone.default,
    aten.expand.default,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    operator.getitem,
}
PRECISION = ops.NAMES.index("precision")
# Layers that differ in these belong to different parts of the program, as to what is recomputed.
PARTS = ("recompute", "ac_graph_id", "partitioner_tag")


@dataclass(frozen=True)
class Layer:
    """Y = X W^T. `group`: what layers of one op have in common, as X [T, C] and the precision;
    `weight` is the transposed view of W [N, C]."""

    group: Hashable
    weight: Matrix


def join(graph: torch.fx.Graph) -> int:
    """Rewrites all layers of the graph that pay, before it is sorted; returns how many ops it
    wrote."""
    matrices: dict[Node, Matrix | None] = {}
    precisions: dict[Hashable, str] = {}
    groups: dict[Hashable, dict[Matrix, list[Node]]] = {}
    for node in graph.nodes:
        if node.target not in FORWARDS or node.meta["val"][0].dtype is not torch.float32:
            continue
        for mm in _around(node):
            layer = _layer(mm, matrices)
            if layer is not None:
                precisions[layer.group] = node.args[PRECISION]
                groups.setdefault(layer.group, {})[layer.weight] = []
    if not groups:
        return 0
    # All that multiply the same: as matmuls they would become one.
    for mm in graph.find_nodes(op="call_function", target=aten.mm.default):
        layer = _layer(mm, matrices)
        if layer is not None and layer.weight in groups.get(layer.group, ()):
            groups[layer.group][layer.weight].append(mm)
    written = 0
    for group, found in groups.items():
        equals = list(found.values())
        for first in range(0, len(equals), decide.JOINED_FORWARD_LAYERS):
            chosen = equals[first : first + decide.JOINED_FORWARD_LAYERS]
            written += _write(chosen, precisions[group])
    return written


def _around(forward: Node) -> Iterator[Node]:
    """The matmuls that make q, k and v, and those that take the output."""
    yield from _matmuls(forward.args[:3], lambda node: node.all_input_nodes[:1])
    for made in forward.users:
        if made.target is operator.getitem and made.args[1] == 0:
            for mm in _matmuls(made.users, lambda node: node.users):
                if _begins_at(mm.args[0], made):
                    yield mm


def _matmuls(starts: Iterable[Any], onward: Callable[[Node], Iterable[Node]]) -> Iterator[Node]:
    """The matmuls that paths of moves from these nodes on meet first."""
    todo = list(dict.fromkeys(starts))
    for node in todo:
        if node.target is aten.mm.default:
            yield node
        elif node.target in MOVES:
            todo += [other for other in onward(node) if other not in todo]


def _begins_at(node: Any, start: Node) -> bool:
    """Whether nothing but moves lies between the nodes."""
    while node is not start and node.target in MOVES:
        node = node.args[0]
    return node is start


def _layer(mm: Node, matrices: dict[Node, Matrix | None]) -> Layer | None:
    """The layer that the matmul is, if its weight is a matrix [N, C] with contiguous rows."""
    x_node, w_node = mm.args
    x, weight = (matrix_of(node, matrices) for node in (x_node, w_node))  # type: ignore[arg-type]
    if x is None or weight is None or weight.strides != (1, weight.shape[0]):
        return None
    values = [node.meta["val"] for node in (x_node, w_node, mm)]  # type: ignore[union-attr]
    # The strides of a matrix are those beside a contiguous source; a weight may be none.
    if values[1].stride(0) != 1 or any(x.dtype is not torch.float32 for x in values):
        return None
    return Layer((x, *(mm.meta.get(name) for name in PARTS)), weight)


def _write(equals: list[list[Node]], precision: str) -> int:
    """The op in front of a matmul that it replaces (the graph is sorted afterwards), with one layer
    for matmuls that are equal; returns 1, or 0 where it would not pay or one of the operands needs
    one of the results."""
    mms = [same[0] for same in equals]
    # Read here: what another op has replaced is replaced in the arguments too.
    x: Any = mms[0].args[0]
    transposed: list[Any] = [mm.args[1] for mm in mms]
    if depends([x, *transposed], [mm for same in equals for mm in same]):
        return 0
    if not decide.joins_forward(transposed, x, precision):
        return 0
    emit = Emitter(mms[0], mms[0])
    weights = [_turned(weight, emit) for weight in transposed]
    made = emit.call(ops.linear_forward, x, weights, precision)
    for n, same in enumerate(equals):
        result = emit.call(operator.getitem, made, n)
        for mm in same:
            shown = emit.laid_out_as(result, mm) if rewrite.shows_layout(mm) else result
            mm.replace_all_uses_with(shown)
    return 1


def _turned(node: Node, emit: Emitter) -> Node:
    """The [N, C] matrix of which a node is the transposed view."""
    if node.target is aten.permute.default and node.args[1] == [1, 0]:
        return node.args[0]  # type: ignore[return-value]
    return emit.call(aten.permute.default, node, [1, 0])

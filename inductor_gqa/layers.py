"""Joins the gradients of the linear layers around a fused attention: those of q, k and v, which
share their input, and those of the output projection become one `inductor_gqa::linear_backward`
each.

Runs after the sites of a graph are written. Looks from their backward ops only; what it does not
recognise, and what was not measured to gain, stays as the matmuls that it is.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from . import decide, ops, rewrite
from .emit import Emitter

aten = torch.ops.aten
Node = torch.fx.Node
VIEWS = {
    aten.view.default,
    aten.permute.default,
    aten.select.int,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
}
BACKWARDS = (ops.attention_backward, ops.weights_backward)


@dataclass(frozen=True)
class Matrix:
    """What a chain of views shows of `source`: `strides` and `start` count the elements of a
    contiguous one. Equal matrices hold equal numbers."""

    source: Node
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int = 0

    @property
    def mT(self) -> Matrix:
        return Matrix(self.source, self.shape[::-1], self.strides[::-1], self.start)


@dataclass(frozen=True)
class Layer:
    """The gradients of Y = X W^T: `grad_x` is mm(G, W), `grad_w` is mm(G^T, X), or mm(X^T, G) where
    `is_turned`."""

    grad: Node
    weight: Node
    x: Matrix
    x_node: Node
    grad_x: Node
    grad_w: Node
    is_turned: bool


def join(graph: torch.fx.Graph) -> int:
    """Rewrites all layers of the graph that pay, before it is sorted; returns how many ops it
    wrote."""
    matrices: dict[Node, Matrix | None] = {}
    layers: dict[Node, Layer] = {}
    for node in graph.nodes:
        if node.target in BACKWARDS and node.users:
            for grad in dict.fromkeys(_gradients_around(node, matrices)):
                layer = _layer(grad, matrices)
                if layer is not None:
                    layers[layer.grad_x] = layer
    groups: dict[Matrix, list[Layer]] = {}
    for layer in layers.values():
        groups.setdefault(layer.x, []).append(layer)
    written = 0
    for group in groups.values():
        for found in _sums(group):
            if decide.joins([layer.weight for layer in found.layers], found.layers[0].x_node):
                written += _write(found)
    return written


def matrix_of(node: Node, known: dict[Node, Matrix | None]) -> Matrix | None:
    """What a node shows of the first node above it that is not a view; None where sizes are
    symbolic."""
    if node not in known:
        known[node] = _matrix_of(node)
    return known[node]


def _matrix_of(node: Node) -> Matrix | None:
    chain: list[Node] = []
    source: Any = node
    while source.target in VIEWS and isinstance(source.args[0], Node):
        if any(isinstance(n, Node) for n in source.all_input_nodes[1:]):
            break
        chain.append(source)
        source = source.args[0]
    value = source.meta.get("val")
    if not isinstance(value, torch.Tensor) or not _is_static(value):
        return None
    seen = torch.empty(tuple(value.shape), device="meta")
    try:
        for view in reversed(chain):
            seen = view.target(seen, *view.args[1:], **view.kwargs)  # type: ignore[operator]
    except (RuntimeError, ValueError):  # no view of a contiguous source; the latter in a fake mode
        return None
    return Matrix(source, tuple(seen.shape), seen.stride(), int(seen.storage_offset()))


def _is_static(value: torch.Tensor) -> bool:
    sizes: tuple[Any, ...] = tuple(value.shape)
    return all(isinstance(n, int) for n in sizes)


def _gradients_around(backward: Node, known: dict[Node, Matrix | None]) -> Iterator[Node]:
    """Nodes whose views are the G of a layer: what comes of the op's results before any product,
    and the gradient of the output projection's result."""
    for mm in _first_matmuls(backward):
        matrix = matrix_of(mm.args[0], known)  # type: ignore[arg-type]
        if matrix is not None:
            yield matrix.source
    for mm in _last_matmuls(backward.args[0]):  # type: ignore[arg-type]
        matrix = matrix_of(mm.args[0], known)  # type: ignore[arg-type]
        if matrix is not None:
            yield matrix.source


def _first_matmuls(start: Node) -> Iterator[Node]:
    """The matmuls that paths from a node meet first."""
    todo, seen = [start], {start}
    while todo:
        for user in todo.pop().users:
            if user.target is aten.mm.default:
                yield user
            elif user not in seen and user.op == "call_function" and user.target not in BACKWARDS:
                seen.add(user)
                todo.append(user)


def _last_matmuls(end: Node) -> Iterator[Node]:
    """The matmuls of which a node is made by views, copies and pointwise ops."""
    todo, seen = [end], {end}
    while todo:
        node = todo.pop()
        if node.target is aten.mm.default:
            yield node
        elif node.target in VIEWS or torch.Tag.pointwise in getattr(node.target, "tags", ()):
            above = [n for n in node.all_input_nodes if n not in seen]
            seen.update(above)
            todo += above


def _matmuls(source: Node) -> Iterator[Node]:
    """The matmuls of views of the source."""
    todo, seen = [source], {source}
    while todo:
        for user in todo.pop().users:
            if user.target is aten.mm.default:
                yield user
            elif user.target in VIEWS and user not in seen:
                seen.add(user)
                todo.append(user)


def _layer(source: Node, matrices: dict[Node, Matrix | None]) -> Layer | None:
    """The layer whose gradient G is views of the source, all of it."""
    found = [
        (mm, matrix_of(mm.args[0], matrices), matrix_of(mm.args[1], matrices))  # type: ignore[arg-type]
        for mm in dict.fromkeys(_matmuls(source))
    ]
    for grad_x, grad, weight in found:
        if grad is None or weight is None or grad.source is not source:
            continue
        # Read by columns, G^T X would be a gradient of X with weights X just as well.
        if grad.strides[1] != 1:
            continue
        for grad_w, left, right in found:
            if left == grad.mT and right is not None:
                x_node, x, is_turned = grad_w.args[1], right, False
            elif right == grad and left is not None and grad_w is not grad_x:
                x_node, x, is_turned = grad_w.args[0], left.mT, True
            else:
                continue
            nodes = (grad_x.args[0], grad_x.args[1], x_node)
            if x.shape == (grad.shape[0], weight.shape[1]) and _same_dtype(*nodes, grad_x, grad_w):
                g_node, w_node, _ = nodes
                return Layer(g_node, w_node, x, x_node, grad_x, grad_w, is_turned)  # type: ignore[arg-type]
    return None


def _same_dtype(*nodes: Any) -> bool:
    return len({node.meta["val"].dtype for node in nodes}) == 1


@dataclass(frozen=True)
class Sum:
    """`end` is the sum of some layers' gradients of their input, and of whatever else."""

    end: Node
    layers: tuple[Layer, ...]


def _sums(group: list[Layer]) -> Iterator[Sum]:
    """The group by the sums that its gradients of the input go into."""
    ends: dict[Node, list[Layer]] = {}
    for layer in group:
        ends.setdefault(_end(layer.grad_x), []).append(layer)
    for end, layers in ends.items():
        if len(layers) == 1:
            end = layers[0].grad_x
        yield Sum(end, tuple(layers[: decide.JOINED_LAYERS]))


def _end(tip: Node) -> Node:
    """The last node that is nothing but a sum with `tip` in it."""
    while len(tip.users) == 1 and _is_sum(next(iter(tip.users)), tip):
        (tip,) = tip.users
    return tip


def _is_sum(node: Node, tip: Node) -> bool:
    """Whether the node is a view of `tip`, its dims merged or split, or adds one of its kind."""
    if node.target is aten.view.default:
        return True
    if node.target is not aten.add.Tensor or node.kwargs or len(node.args) != 2:
        return False
    one, other = node.args
    if one is other or not isinstance(one, Node) or not isinstance(other, Node):
        return False
    values = [x.meta["val"] for x in (one, other, tip, node)]
    return len({(tuple(x.shape), x.dtype) for x in values}) == 1


def _write(found: Sum) -> int:
    """The op in front of the first matmul that it replaces (the graph is sorted afterwards);
    returns 1, or 0 where one of its operands needs one of its results."""
    layers = found.layers
    tips = [layer.grad_x for layer in layers]
    operands = [n for layer in layers for n in (layer.grad, layer.weight, layer.x_node)]
    if depends(operands, [*tips, found.end, *(layer.grad_w for layer in layers)]):
        return 0
    emit = Emitter(tips[0], tips[0])
    x = layers[0].x_node
    if layers[0].is_turned:
        x = emit.call(aten.permute.default, x, [1, 0])
    made = emit.call(
        ops.linear_backward,
        [layer.grad for layer in layers],
        [layer.weight for layer in layers],
        x,
    )
    grad_x = emit.call(operator.getitem, made, 0)
    shape = [int(n) for n in found.end.meta["val"].shape]
    if grad_x.meta["val"].shape != torch.Size(shape):
        grad_x = emit.call(aten.view.default, grad_x, shape)
    rest = _without(found.end, set(tips), emit)
    pairs = [(found.end, grad_x if rest is None else emit.call(aten.add.Tensor, rest, grad_x))]
    for n, layer in enumerate(layers, 1):
        result = emit.call(operator.getitem, made, n)
        if layer.is_turned:
            result = emit.call(aten.permute.default, result, [1, 0])
        pairs.append((layer.grad_w, result))
    for old, new in pairs:
        if rewrite.shows_layout(old):
            new = emit.laid_out_as(new, old)
        old.replace_all_uses_with(new)
    return 1


def _without(end: Node, tips: set[Node], emit: Emitter) -> Node | None:
    """The sum without these addends, the others added in their order; None where nothing is
    left."""
    if end in tips:
        return None
    if end.target is aten.view.default:
        source = end.args[0]
        left = _without(source, tips, emit) if _holds(source, tips) else source  # type: ignore[arg-type]
        if left is source:
            return end
        return None if left is None else emit.call(aten.view.default, left, end.args[1])
    parts: list[Any] = [_without(x, tips, emit) if _holds(x, tips) else x for x in end.args]  # type: ignore[arg-type]
    if parts == list(end.args):
        return end
    kept = [part for part in parts if part is not None]
    if len(kept) == 2:
        return emit.call(aten.add.Tensor, *kept)
    return kept[0] if kept else None


def _holds(node: Node, tips: set[Node]) -> bool:
    """Whether one of the addends is in the sum that ends here."""
    todo = [node]
    while todo:
        node = todo.pop()
        if node in tips:
            return True
        if len(node.users) == 1 and node.target in (aten.view.default, aten.add.Tensor):
            todo += node.all_input_nodes
    return False


def depends(operands: Iterable[Node], results: list[Node]) -> bool:
    """Whether one of the operands is made from one of the results, or is one."""
    todo = list(operands)
    seen = set(todo)
    while todo:
        node = todo.pop()
        if node in results:
            return True
        for above in node.all_input_nodes:
            if above not in seen:
                seen.add(above)
                todo.append(above)
    return False

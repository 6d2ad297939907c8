"""Replaces a site by our ops. Everything that can fail fails in `Plan.check` or `write`'s views;
see passes.py for the order.

The forward op stands where the product of weights and values stood, the backward op where the first
gradient matmul stood. Old nodes are not erased: they die with their last user, which `leftover`
makes sure of beforehand.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any

import torch

from . import asserts, empty_rows, ops, tables
from .emit import Emitter
from .patterns.axes import Digit, Place, Size, same, size_of
from .patterns.operands import MATMULS
from .reference import LOG2E
from .site import Mask, Site, Target, View

aten = torch.ops.aten
Node = torch.fx.Node
Groups = tuple[tuple[Digit, ...], ...]


def leftover(site: Site, softmax: Node) -> Node | None:
    """A node that would keep the softmax alive although the site is replaced; None where nothing
    does."""
    return survivor(softmax, *replaced(site), *site.drawn)


def replaced(site: Site) -> list[Node]:
    return [target.node for target in targets(site)]


def survivor(node: Node, *replaced: Node) -> Node | None:
    """A node that needs `node` by a way that does not pass through one of `replaced`; None where
    there is none. What is computed and used by nothing, as export leaves behind, needs nothing."""
    todo, seen = [node], {*replaced}
    while todo:
        reached = todo.pop()
        if reached in seen:
            continue
        seen.add(reached)
        if asserts.is_needed(reached):
            return reached
        todo += reached.users
    return None


def targets(site: Site) -> Iterable[Target]:
    """What the op's results replace."""
    yield from (*site.outputs, *site.weights)
    if site.gradients is not None:
        found = site.gradients
        yield from (*found.q, *found.k, *found.v, *found.sink)


class Axes:
    """The groups of site axes that make up each tensor of the ops."""

    def __init__(self, site: Site) -> None:
        def axis(name: str, size: Size) -> tuple[Digit, ...]:
            return () if same(size, 1) else (Digit(name, 1, size),)

        self.batch, self.heads, self.group = site.batch, site.kv_heads, site.group
        self.i, self.j = axis("i", site.query_length), axis("j", site.key_length)
        self.d, self.e = axis("d", site.head_dim), axis("e", site.value_dim)

    @property
    def q(self) -> Groups:
        return self.batch, self.i, self.heads, self.group, self.d

    @property
    def k(self) -> Groups:
        return self.batch, self.j, self.heads, self.d

    @property
    def v(self) -> Groups:
        return self.batch, self.j, self.heads, self.e

    @property
    def out(self) -> Groups:
        return self.batch, self.i, self.heads, self.group, self.e

    @property
    def scores(self) -> Groups:
        return self.batch, self.heads, self.group, self.i, self.j


def write(site: Site, precision: str) -> list[tuple[Node, Node]]:
    """Inserts the ops; returns what is to be replaced, each with its replacement."""
    axes = Axes(site)
    if site.outputs:
        forward_point = first(target.node for target in site.outputs)
        product = _product_before(forward_point, site.anchor)
    else:  # only the backward needs the op: the pass sorts the graph afterwards
        product = first(target.node for target in targets(site))
    emit = Emitter(product, product)
    arguments = _arguments(site, axes, emit, precision)
    sees = None
    if site.zeros_empty_rows:
        sees = empty_rows.sees(site.mask, arguments, emit)
    replacements: list[tuple[Node, Node]] = []
    if site.weights:
        dtypes = {target.node.meta["val"].dtype for target in site.weights}
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
        made = emit.call(ops.attention_weights, *arguments, dtype)
        weights = emit.call(operator.getitem, made, 1)
        # At the product, not at the targets, which may stand before it: the pass sorts the graph
        # afterwards.
        replacements += results(site.weights, weights, axes.scores, product, product)
    else:
        made = emit.call(ops.attention, *arguments)
    out = emit.call(operator.getitem, made, 0)
    lse = emit.call(operator.getitem, made, 2 if site.weights else 1)
    shown = out if sees is None else empty_rows.zeroed(out, sees, emit)
    replacements += results(site.outputs, shown, axes.out, product)
    if site.gradients is not None:
        replacements += _write_backward(site, axes, arguments, out, lse, sees)
    return replacements


def detach(site: Site) -> None:
    """Frees the random ops of a site that is replaced from the weights."""
    for node in site.drawn:
        _detach_from_weights(node)


def _detach_from_weights(drawn: Node) -> None:
    """Gives a random op that takes the weights for their shape an empty tensor of that shape and
    layout, on which the numbers that it draws may depend."""
    weights: Node = drawn.args[0]  # type: ignore[assignment]
    emit = Emitter(drawn, drawn)
    value = weights.meta["val"]
    sizes, strides = ([emit.size(size_of(n)) for n in x] for x in (value.shape, value.stride()))
    options = {"dtype": value.dtype, "device": value.device}
    empty = emit.call(aten.empty_strided.default, sizes, strides, **options)
    drawn.replace_input_with(weights, empty)


def _kept(site: Site, axes: Axes, emit: Emitter) -> Node | None:
    views: list[tuple[View, bool]] = []
    for view, positive in site.keep:
        node = view.node
        if node.target is aten.native_dropout.default:  # nothing else needs its mask
            node = emit.call(operator.getitem, node, 1)
        views.append((View(node, view.position), positive))
    return _all_of(tuple(views), axes.scores, emit)


def tensors(site: Site) -> set[Node]:
    """The nodes of the graph that the ops will read."""
    mask = site.mask
    views = [site.q, site.k, site.v]
    views += [view for view, _ in (*mask.bias, *mask.keys, *mask.tensors, *site.keep)]
    for turn in (site.rotate_q, site.rotate_k):
        if turn is not None:
            views += [*turn.cos.views, *turn.sin.views]
    if site.sink is not None:
        views.append(site.sink)
    if site.gradients is not None:
        views.append(site.gradients.grad_out)
    return {view.node for view in views}


def first(nodes: Iterable[Node]) -> Node:
    order = {}
    chosen: Node | None = None
    for node in nodes:
        if not order:
            order = {n: k for k, n in enumerate(node.graph.nodes)}
        if chosen is None or order[node] < order[chosen]:
            chosen = node
    assert chosen is not None
    return chosen


def _product_before(node: Node, anchor: Node) -> Node:
    """The matmul whose result the node is an arrangement of, or the result of a call."""
    while node is not anchor and node.target not in MATMULS:
        node = node.args[0]  # type: ignore[assignment]
    return node


def _arguments(site: Site, axes: Axes, emit: Emitter, precision: str) -> list[Any]:
    wide = _widest(site)
    q, k, v = (
        emit.cast(emit.arrange(view, groups, expand=True), wide)
        for view, groups in ((site.q, axes.q), (site.k, axes.k), (site.v, axes.v))
    )
    cos_q, sin_q = tables.forward(site.rotate_q, axes.batch, axes.i, emit)
    cos_k, sin_k = tables.forward(site.rotate_k, axes.batch, axes.j, emit)
    turn = site.rotate_q or site.rotate_k
    mask = site.mask
    # AOTInductor's packages hold arguments as JSON, which has no infinity.
    fill, adds = None if mask.fill == -math.inf else mask.fill, mask.fill_adds
    return [
        q,
        k,
        v,
        cos_q,
        sin_q,
        cos_k,
        sin_k,
        _bias(mask, axes, emit),
        _all_of(mask.tensors, axes.scores, emit),
        _all_of(mask.keys, (axes.batch, axes.j), emit),
        _kept(site, axes, emit),
        _sink(site, axes, emit),
        site.scale_tensor,
        site.scale,
        site.softcap,
        None if mask.band_lo is None else emit.size(mask.band_lo),
        None if mask.band_hi is None else emit.size(mask.band_hi),
        fill,
        adds,
        turn.start if turn else 0,
        turn.interleaved if turn else False,
        site.keep_scale,
        precision,
    ]


def _sink(site: Site, axes: Axes, emit: Emitter) -> Node | None:
    if site.sink is None:
        return None
    node = emit.arrange(site.sink, (axes.heads, axes.group), expand=True)
    return emit.cast(node, torch.promote_types(_widest(site), torch.float32))


def _widest(site: Site) -> torch.dtype:
    wide = site.q.dtype
    for view in (site.k, site.v):
        wide = torch.promote_types(wide, view.dtype)
    return wide


def _all_of(views: tuple[tuple[View, bool], ...], groups: Groups, emit: Emitter) -> Node | None:
    total: Node | None = None
    for view, positive in views:
        node = emit.arrange(view, groups)
        if not positive:
            node = emit.call(aten.bitwise_not.default, node)
        total = node if total is None else emit.call(aten.bitwise_and.Tensor, total, node)
    return total


def _bias(mask: Mask, axes: Axes, emit: Emitter) -> Node | None:
    total: Node | None = None
    for view, factor in mask.bias:
        node = emit.arrange(view, axes.scores)
        if factor != 1.0:
            wide = torch.promote_types(view.dtype, torch.float32)
            node = emit.call(aten.mul.Tensor, emit.cast(node, wide), factor)
        if total is None:
            total = node
        else:
            wide = [emit.cast(n, torch.float32) for n in (total, node)]
            total = emit.call(aten.add.Tensor, *wide)
    return total


def results(
    targets: tuple[Target, ...],
    made: Node,
    groups: Groups,
    origin: Node,
    point: Node | None = None,
) -> list[tuple[Node, Node]]:
    """(old node, its replacement) for each target, as views of the op's result."""
    source = View(made, tuple(Place(group) for group in groups))
    out: list[tuple[Node, Node]] = []
    for target in targets:
        emit = Emitter(point or target.node, origin)
        wanted = [
            tuple(d for d in place.digits if isinstance(d, Digit)) for place in target.position
        ]
        node = emit.cast(emit.arrange(source, wanted), target.node.meta["val"].dtype)
        if shows_layout(target.node):
            node = emit.laid_out_as(node, target.node)
        out.append((target.node, node))
    return out


def shows_layout(node: Node) -> bool:
    """Whether the order of its dims in memory can be seen: by who gets it, or in the numbers that a
    random op draws for a tensor of its layout, which pointwise ops hand on."""
    if any(user.op == "output" or user.target is aten.as_strided.default for user in node.users):
        return True
    todo, seen = [node], {node}
    while todo:
        for user in todo.pop().users:
            if user in seen or user.target in MATMULS or user.op == "output":
                continue
            if torch.Tag.nondeterministic_seeded in getattr(user.target, "tags", ()):
                return True
            seen.add(user)
            todo.append(user)
    return False


def _write_backward(
    site: Site, axes: Axes, arguments: list[Any], out: Node, lse: Node, sees: Node | None
) -> list[tuple[Node, Node]]:
    found = site.gradients
    assert found is not None
    every = [target.node for target in (*found.q, *found.k, *found.v, *found.sink)]
    if not every:
        return []
    point = first(every)
    emit = Emitter(point, point)
    grad = emit.arrange(found.grad_out, axes.out, expand=True)
    grad = emit.cast(grad, arguments[2].meta["val"].dtype)
    if sees is not None:
        grad = empty_rows.zeroed(grad, sees, emit)
    needs = [bool(found.q), bool(found.k), bool(found.v)]
    made = emit.call(ops.attention_backward, grad, out, lse, *needs, *arguments)
    pairs: list[tuple[Node, Node]] = []
    for index, (targets, groups) in enumerate(
        ((found.q, axes.q), (found.k, axes.k), (found.v, axes.v))
    ):
        if targets:
            result = emit.call(operator.getitem, made, index)
            pairs += results(targets, result, groups, point)
    if found.sink:
        summed = _sink_gradient(grad, out, lse, arguments[ops.NAMES.index("sink")], emit)
        pairs += results(found.sink, summed, (axes.heads, axes.group), point)
    return pairs


def _sink_gradient(grad: Node, out: Node, lse: Node, sink: Node, emit: Emitter) -> Node:
    """-sum over batch and queries of P_sink rowsum(dO * O), in fp32 as [K, R]."""
    dtype = torch.promote_types(out.meta["val"].dtype, torch.float32)
    wide = [emit.cast(n, dtype) for n in (grad, out)]
    delta = emit.call(aten.sum.dim_IntList, emit.call(aten.mul.Tensor, *wide), [-1])  # [B, L, K, R]
    delta = emit.call(aten.permute.default, delta, [0, 2, 3, 1])
    bits = emit.call(aten.mul.Tensor, sink, LOG2E)
    bits = emit.call(aten.unsqueeze.default, bits, -1)
    share = emit.call(aten.exp2.default, emit.call(aten.sub.Tensor, bits, lse))
    total = emit.call(aten.sum.dim_IntList, emit.call(aten.mul.Tensor, share, delta), [0, 3])
    return emit.call(aten.neg.default, total)

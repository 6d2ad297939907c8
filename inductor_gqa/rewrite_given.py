"""Replaces a backward from given weights (patterns/given.py) by
`inductor_gqa::weights_backward`."""

from __future__ import annotations

import operator
from typing import Any

import torch

from . import ops, rewrite, tables
from .emit import Emitter
from .patterns.axes import Digit, Size, product, same
from .patterns.given import Given

Node = torch.fx.Node


def write(given: Given, precision: str) -> list[tuple[Node, Node]]:
    """Inserts the op before the first gradient it replaces; returns what is to be replaced, each
    with its replacement."""

    def axis(name: str, size: Size) -> tuple[Digit, ...]:
        return () if same(size, 1) else (Digit(name, 1, size),)

    batch, heads, group = given.batch, given.kv_heads, given.group
    i, j = axis("i", given.query_length), axis("j", given.key_length)
    d, e = axis("d", given.head_dim), axis("e", given.value_dim)
    every = (*heads, *group)
    targets = (given.q_targets, given.k_targets, given.v_targets)
    point = rewrite.first(target.node for found in targets for target in found)
    emit = Emitter(point, given.anchor)
    dtype = given.grad_out.dtype

    def arranged(view: Any, *groups: tuple[Digit, ...]) -> Node:
        return emit.cast(emit.arrange(view, groups, expand=True), dtype)

    v = arranged(given.v, batch, j, every, e)
    grad_out = arranged(given.grad_out, batch, i, every, e)
    # A gradient that the graph does not hold needs no operand of its own.
    q = grad_out if given.q is None else arranged(given.q, batch, i, every, d)
    k = v if given.k is None else arranged(given.k, batch, j, every, d)
    turn = given.rotate_q or given.rotate_k
    made = emit.call(
        ops.weights_backward,
        grad_out,
        arranged(given.weights, batch, every, i, j),
        q,
        k,
        v,
        *tables.adjoint(given.rotate_q, batch, i, emit),
        *tables.adjoint(given.rotate_k, batch, j, emit),
        given.scale_tensor,
        given.scale,
        product(a.size for a in group),
        turn.start if turn else 0,
        turn.interleaved if turn else False,
        precision,
        *(bool(found) for found in targets),
    )
    shapes = (
        (batch, i, every, d),
        (batch, j, heads, d),
        (batch, j, heads, e),
    )
    pairs: list[tuple[Node, Node]] = []
    for index, (found, groups) in enumerate(zip(targets, shapes, strict=True)):
        if found:
            result = emit.call(operator.getitem, made, index)
            pairs += rewrite.results(found, result, groups, given.anchor)
    return pairs


def leftover(given: Given) -> Node | None:
    """A node that would keep the old backward alive; None where nothing does."""
    targets = (*given.q_targets, *given.k_targets, *given.v_targets)
    return rewrite.survivor(given.anchor, *(target.node for target in targets))


def tensors(given: Given) -> set[Node]:
    """The nodes of the graph that the op will read."""
    views = [given.weights, given.grad_out, given.v]
    views += [view for view in (given.q, given.k) if view is not None]
    return {view.node for view in views}

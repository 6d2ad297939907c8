"""Finds the gradient of a sink, a logit per head beside the scores."""

from __future__ import annotations

import torch

from inductor_gqa.site import Target

from . import terms
from .attention import Forward, arrangements
from .axes import Digit, Place, Position, Unread, same, shape_of, whole
from .derivative import algebra, row_total, weight_gradient
from .gradient_paths import reached
from .renaming import Renaming, covered, is_part
from .terms import Atom
from .values import ValueNumbers

aten = torch.ops.aten
Node = torch.fx.Node


def sink_gradient(
    forward: Forward, dp: Node, dp_position: Position, values: ValueNumbers
) -> tuple[Target, ...]:
    """Nodes that hold the gradient of the sink: -sum over batch and queries of P_sink rowsum(P
    dP)."""
    site = forward.site
    if site.sink is None:
        return ()
    reader = algebra(forward, dp, values)
    column = Place((), 0 if same(forward.softmax.position[-1].offset, 1) else site.key_length)
    at_sink = (*forward.softmax.position[:-1], column)
    gradient = weight_gradient(forward.site, reader, dp, dp_position)
    ((total, share),) = row_total(reader, forward.softmax, gradient).items()
    for node in reached(dp):
        if node.target is not aten.sum.dim_IntList:
            continue
        own = tuple(whole(f"x{d}", n) for d, n in enumerate(shape_of(node)))
        read = reader.at(node, own)
        if len(read) != 1:
            continue
        ((atoms, factor),) = read.items()
        if len(atoms) != 1 or atoms[0].kind != "sum" or not terms.near(factor, -share):
            continue
        axes, inside = atoms[0].inner
        softmax = values.first(forward.softmax.node)
        loads = [a for a in inside if a.kind == "load" and a.node is softmax]
        if len(loads) != 1 or loads[0].position[-1] != column:
            continue
        names = Renaming()
        try:
            names.learn(loads[0].position, at_sink)
            summed = {y for x, y in names.rules if x.axis in axes}
            rest = [_renamed(a, names) for a in inside if a is not loads[0]]
            at = names.apply(own)
        except Unread:
            continue
        heads = (*site.kv_heads, *site.group)
        over_heads = covered(at, list(heads)) == set(heads)
        if (
            rest == list(total)
            and over_heads
            and not any(is_part(d, h) for d in summed for h in heads)
        ):
            return arrangements(node, at, values)
    return ()


def _renamed(atom: Atom, names: Renaming) -> Atom:
    """A sum's atoms with all but the summed axis in the site's names."""
    if atom.kind != "sum":
        return atom
    axes, inside = atom.inner
    own = Renaming()
    own.rules = list(names.rules)
    for a in inside:
        for place in a.position:
            own.rules += [
                (d, Digit("~0.0", d.stride, d.size))
                for d in place.digits
                if isinstance(d, Digit) and d.axis in axes
            ]
    moved = [Atom(a.kind, a.node, own.apply(a.position), a.inner) for a in inside]
    return Atom("sum", inner=(("~0.0",), tuple(sorted(moved, key=lambda a: a.order))))

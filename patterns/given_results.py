"""Follows a gradient of a backward from given weights as far as it is only moved, summed over the
heads of a group, and turned back."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import torch

from inductor_gqa.site import Rotation, Table, View

from . import operands, rotation, terms
from .axes import Digit, Fixed, Place, Position, Size, Unread, quotient, shape_of, whole
from .elements import Elements, by_lane
from .gradient_paths import FOLLOWED
from .lanes import Lanes, Term, strands
from .renaming import Renaming
from .values import ValueNumbers

Node = torch.fx.Node


@dataclass
class Result:
    """The furthest node that is still one gradient, summed over `summed` and turned by `turn`."""

    node: Node
    position: Position
    summed: frozenset[Digit] = frozenset()
    turn: Rotation | None = None


def followed(start: Node, position: Position, width: int, values: ValueNumbers) -> Result:
    """Follows a gradient as far as it is only moved, summed over heads, and turned."""
    best = Result(start, position)
    heap: list[tuple[int, int, Node]] = [(values.order[start], 0, start)]
    waiting = {start}
    while heap:
        _, _, node = heapq.heappop(heap)
        waiting.discard(node)
        if not waiting and node is not start:
            further = _classified(node, start, position, width, values)
            if further is not None:
                best = further
        onward = [user for user in node.users if user.target in FOLLOWED]
        if len(onward) != len(node.users):
            if waiting or node is not best.node:
                # Something else is computed on the way: only what lies before it is this gradient.
                return best
            break
        for user in onward:
            if user not in waiting:
                waiting.add(user)
                heapq.heappush(heap, (values.order[user], len(heap), user))
    return best


def _classified(
    node: Node, start: Node, position: Position, width: int, values: ValueNumbers
) -> Result | None:
    val = node.meta.get("val")
    if not isinstance(val, torch.Tensor) or not val.dtype.is_floating_point:
        return None
    shape = shape_of(node)
    own = tuple(whole(f"x{d}", n) for d, n in enumerate(shape))
    try:
        read = Elements(values, [start]).at(node, own)
        if len(read) == 1:
            ((atoms, factor),) = read.items()
            if len(atoms) == 1 and factor == 1.0:
                names, summed = _names(atoms[0], start, position, values)
                return Result(node, names.apply(own), summed)
    except Unread:
        pass
    for dim in reversed(range(len(shape))):
        heads = quotient(shape[dim], width)
        if heads is not None:
            try:
                return _turned(node, own, dim, heads, start, position, width, values)
            except Unread:
                continue
    return None


def _names(
    atom: terms.Atom, start: Node, position: Position, values: ValueNumbers
) -> tuple[Renaming, frozenset[Digit]]:
    sums: tuple[str, ...] = ()
    if atom.kind == "sum":
        sums, inside = atom.inner
        if len(inside) != 1:
            raise Unread("a gradient is a sum of products, accepted of one factor")
        atom = inside[0]
    if atom.kind != "load" or atom.node is not values.first(start):
        raise Unread("a gradient is made of another tensor, accepted its matmul alone")
    names = Renaming()
    names.learn(atom.position, position)
    summed = frozenset(y for x, y in names.rules if x.axis in sums)
    if any(d.axis in ("i", "j", "d", "e") for d in summed):
        raise Unread("a gradient is summed over positions, accepted over heads")
    return names, summed


def _turned(
    node: Node,
    own: Position,
    dim: int,
    heads: Size,
    start: Node,
    position: Position,
    count: int,
    values: ValueNumbers,
) -> Result:
    outer = tuple(Digit(f"x{dim}", count, d.size) for d in whole("h", heads).digits)
    place = Place((*outer, Fixed(tuple(range(count)), count)))
    at = (*own[:dim], place, *own[dim + 1 :])
    reader = Elements(values, [start])
    fixed = operands.fixed_lanes(position, "d", Place())
    forms: list[list[Term]] = [[] for _ in range(count)]
    tables: dict[View, int] = {}
    sources: dict[terms.Atom, tuple[Renaming, frozenset[Digit]]] = {}
    for group, read in by_lane(reader, node, at, count):
        for s in strands(read, len(group), tables):
            if s.data not in sources:
                sources[s.data] = _names(s.data, start, fixed, values)
            for lane, term in zip(group, s.terms(), strict=True):
                forms[lane].append(term)
    if len(sources) != 1:
        raise Unread(f"the lanes come from {len(sources)} tensors, accepted one")
    ((names, summed),) = sources.values()
    found = Lanes(View(start, fixed), 0, 0, tuple(tuple(form) for form in forms), tables)
    turn, order = rotation.rotation(found)
    if order != tuple(range(count)):
        raise Unread("the lanes change their order, accepted their own")
    names.rules.append((Digit("w", 1, turn.width), Digit("w", 1, turn.width)))
    names.rules.append((Digit("w", 1, turn.width // 2), Digit("w", 1, turn.width // 2)))
    names.rules.append((Digit(f"x{dim}", 1, count), Digit("d", 1, count)))
    cos, sin = (_renamed(table, names) for table in (turn.cos, turn.sin))
    renamed = Rotation(cos, sin, turn.start, turn.width, turn.interleaved, turn.sign)
    return Result(node, names.apply(own), summed, renamed)


def _renamed(table: Table, names: Renaming) -> Table:
    view = View(table.view.node, names.apply(table.view.position))
    return Table(view, table.spread, tuple(_renamed(t, names) for t in table.times))

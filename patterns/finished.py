"""Follows the gradient of q, k or v to where it is finished.

By then it is summed over its group, and the rotation is undone; that must be the adjoint of the
forward's, lane by lane.
"""

from __future__ import annotations

import heapq
from typing import Any

import torch

from inductor_gqa.site import Target, View

from . import operands, terms
from .attention import arrangements
from .axes import Digit, Fixed, Place, Position, Unread, quotient, same, shape_of, whole
from .elements import Elements, by_lane
from .gradient_paths import FOLLOWED
from .lanes import Lanes, coefficient, strands
from .naming import use
from .renaming import Renaming, is_part
from .terms import Atom
from .values import ValueNumbers

aten, prims = torch.ops.aten, torch.ops.prims
Node = torch.fx.Node

MULTIPLIES = {aten.mul.Tensor, prims.fma.default, aten.view_as_real.default}
SHAPE_ONLY = {aten.new_empty_strided.default, aten.new_empty.default}


class Finished:
    """Where the gradients of one site are finished. A site that is read with its rotations and then
    without has most of them in common."""

    def __init__(self, head_dim: int, values: ValueNumbers) -> None:
        self.head_dim = head_dim
        self.values = values
        self.known: dict[Any, tuple[Target, ...] | Unread] = {}

    def targets(
        self,
        start: Node,
        position: Position,
        lanes: Lanes | None,
        summed: tuple[Digit, ...],
        ratio: float = 1.0,
    ) -> tuple[Target, ...]:
        """The nodes that hold the finished gradient: summed over the rest of the group, rotated
        back. Raises Unread where there are none."""
        key = (start, position, lanes, summed, ratio)
        if key not in self.known:
            try:
                self.known[key] = self._read(*key)
            except Unread as why:
                self.known[key] = why
        found = self.known[key]
        if isinstance(found, Unread):
            raise found
        return found

    def _read(
        self,
        start: Node,
        position: Position,
        lanes: Lanes | None,
        summed: tuple[Digit, ...],
        ratio: float,
    ) -> tuple[Target, ...]:
        if lanes is None and not summed and ratio == 1.0:
            end, at = start, position
        else:
            end, at = _finished(self.head_dim, start, position, lanes, summed, self.values, ratio)
        targets = arrangements(end, at, self.values)
        for target in targets:
            operands.unrounded(target.node, start)
        return targets


class Joined(Exception):
    """Another gradient was added: what follows is not this site's alone."""


def _finished(
    head_dim: int,
    start: Node,
    position: Position,
    lanes: Lanes | None,
    summed: tuple[Digit, ...],
    values: ValueNumbers,
    ratio: float,
) -> tuple[Node, Position]:
    """Follows the gradient to the node where its paths have met again and it is what the site's
    result is."""
    open_: list[tuple[int, int, Node]] = [(values.order[start], 0, start)]
    waiting = {start}
    is_turned = False  # what no table was multiplied with has no rotation undone
    while open_:
        _, _, node = heapq.heappop(open_)
        waiting.discard(node)
        is_turned = is_turned or node.target in MULTIPLIES
        if not waiting and node is not start and (lanes is None or is_turned):
            try:
                at = _as_result(head_dim, node, start, position, lanes, summed, values, ratio)
            except Joined:
                raise Unread(
                    "another gradient is added to one before it is complete, accepted it alone"
                ) from None
            if at is not None:
                return node, at
        for user in node.users:
            if user.target in SHAPE_ONLY:
                continue
            if user.target not in FOLLOWED:
                raise Unread(
                    f"a gradient is {use(user)} before it is complete, accepted no other use"
                )
            if user not in waiting:
                waiting.add(user)
                heapq.heappush(open_, (values.order[user], len(open_), user))
    raise Unread("a gradient ends before it is complete, accepted one that reaches q, k or v")


def _as_result(
    head_dim: int,
    node: Node,
    start: Node,
    position: Position,
    lanes: Lanes | None,
    summed: tuple[Digit, ...],
    values: ValueNumbers,
    ratio: float,
) -> Position | None:
    """The node's dims in the site's axes, if the node is the finished gradient."""
    val = node.meta.get("val")
    if not isinstance(val, torch.Tensor) or not val.dtype.is_floating_point:
        return None
    shape = shape_of(node)
    own = tuple(whole(f"x{d}", n) for d, n in enumerate(shape))
    try:
        if lanes is None:
            return _moved_result(node, own, start, position, summed, values, ratio)
        for dim in reversed(range(len(shape))):
            heads = quotient(shape[dim], head_dim)
            if heads is None:
                continue
            at = _turned_result(
                node, own, dim, heads, start, position, lanes, summed, values, ratio
            )
            if at is not None:
                return at
    except Unread:
        return None
    return None


def _moved_result(
    node: Node,
    own: Position,
    start: Node,
    position: Position,
    summed: tuple[Digit, ...],
    values: ValueNumbers,
    ratio: float,
) -> Position | None:
    read = terms.gathered(Elements(values, [start]).at(node, own))
    if len(read) != 1:
        return None
    ((atoms, factor),) = read.items()
    if len(atoms) != 1 or not terms.near(factor, ratio):
        return None
    names = _names_of(atoms[0], start, position, summed, values)
    return None if names is None else names.apply(own)


def _names_of(
    atom: Atom, start: Node, position: Position, summed: tuple[Digit, ...], values: ValueNumbers
) -> Renaming | None:
    """Site names for the axes of a reading of `start`, if exactly the group is summed over."""
    sums: tuple[str, ...] = ()
    if atom.kind == "sum":
        sums, inside = atom.inner
        if len(inside) != 1:
            return None
        atom = inside[0]
    if atom.kind != "load" or atom.node is not values.first(start):
        return None
    names = Renaming()
    names.learn(atom.position, position)
    over = [y for x, y in names.rules if x.axis in sums]
    if not all(any(is_part(y, d) for d in summed) for y in over):
        return None
    for digit in summed:
        parts = [y for y in over if is_part(y, digit)]
        total = 1
        for part in parts:
            total = total * part.size
        if not same(total, digit.size):
            return None
    return names


def _turned_result(
    node: Node,
    own: Position,
    dim: int,
    heads: object,
    start: Node,
    position: Position,
    lanes: Lanes,
    summed: tuple[Digit, ...],
    values: ValueNumbers,
    ratio: float,
) -> Position | None:
    """As `_moved_result`, with the rotation undone along the innermost part of `dim`."""
    count = len(lanes.forms)
    outer = whole(f"x{dim}", heads).digits
    outer = tuple(Digit(d.axis, count, d.size) for d in outer if isinstance(d, Digit))
    place = Place((*outer, Fixed(tuple(range(count)), count)))
    at = (*own[:dim], place, *own[dim + 1 :])
    wanted = lanes.adjoint
    reader = Elements(values, [start], row_tables=lanes.scales_by_row)
    fixed = operands.fixed_lanes(position, "d", Place())
    names: Renaming | None = None
    known: dict[object, object] = {}
    tables: dict[View, int] = {}
    numbers: dict[int, int] = {}  # of the tables in the forward's lanes
    seen: list[dict[Any, float]] = [{} for _ in range(count)]
    for group, read in by_lane(reader, node, at, count):
        found_here = strands(terms.gathered(read), len(group), tables)
        _alone(start, [strand.data for strand in found_here], values)
        for strand in found_here:
            if strand.data not in known:
                known[strand.data] = _names_of(strand.data, start, fixed, summed, values)
            found = known[strand.data]
            if not isinstance(found, Renaming):
                return None
            names = names or found
            for number, _, _ in strand.tables:
                if number not in numbers:
                    numbers[number] = _number(list(tables)[number], names, lanes)
            columns = [[(numbers[n], c) for c in at] for n, _, at in strand.tables]
            for lane, source, *entries in zip(group, strand.lanes, *columns, strict=True):
                key = coefficient(entries, source)
                seen[lane][key] = seen[lane].get(key, 0.0) + strand.factor
    if not all(_times(have, want, ratio) for have, want in zip(seen, wanted, strict=True)):
        return None
    if names is None:
        return None
    names.rules.append((Digit(f"x{dim}", 1, count), Digit("d", 1, count)))
    return names.apply(own)


def _number(table: View, names: Renaming, lanes: Lanes) -> int:
    """What the forward's lanes call a table; -1 for one that they do not have."""
    return lanes.tables.get(View(table.node, names.apply(table.position)), -1)


def _alone(start: Node, parts: list[Atom], values: ValueNumbers) -> None:
    """Raises Joined where a lane is a sum of the gradient and of something else."""
    first = values.first(start)
    is_own = {any(a.node is first for a in _loads(part)) for part in parts}
    if len(is_own) > 1:
        raise Joined


def _loads(atom: Atom) -> tuple[Atom, ...]:
    return atom.inner[1] if atom.kind == "sum" else (atom,)


def _times(have: dict[Any, float], want: dict[Any, float], ratio: float) -> bool:
    if ratio == 1.0 and have == want:
        return True
    return have.keys() == want.keys() and all(
        terms.near(have[key], ratio * want[key]) for key in want
    )

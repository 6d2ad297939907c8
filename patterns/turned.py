"""Reads q and k behind their rotations, as far as one rotation describes both.

What does not read stays outside the site, and a sentence says why.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

import torch

from inductor_gqa.site import Rotation, View

from . import operands, rotation
from .axes import Digit, Place, Unread
from .elements import Elements, lane_place
from .lanes import Lanes, lanes_of
from .operands import Operand
from .outside import looks_turned, outside
from .values import ValueNumbers

Node = torch.fx.Node
BothLanes: TypeAlias = tuple[Lanes | None, Lanes | None]


@dataclass(frozen=True)
class Turned:
    """q and k behind their rotations, as far as those were read.

    factor: what both are multiplied by beside the rotation. misses: why a rotation stays outside.
    """

    q: View
    k: View
    turns: tuple[Rotation | None, Rotation | None] = (None, None)
    lanes: BothLanes = (None, None)
    factor: float = 1.0
    misses: tuple[str, ...] = ()


def rotations(q: Operand, k: Operand, head_dim: int, values: ValueNumbers) -> dict[str, Read]:
    """What stands between q and k and their projections, by name."""
    out: dict[str, Read] = {}
    for name, operand, row in (("q", q, "i"), ("k", k, "j")):
        try:
            out[name] = read_rotation(operand, row, head_dim, values)
        except Unread as why:
            out[name] = str(why) if looks_turned(operand, row, values) else None
    return out


def rotated(
    q: Operand, k: Operand, head_dim: int, read: dict[str, Read], turning: str = "qk"
) -> Turned:
    """q and k behind their rotations, those of `turning` at most and where they read, in one order
    of lanes; else as the matmul has them. Last, what they were multiplied by beside."""
    plain = (operands.view(q.node, q.position), operands.view(k.node, k.position))
    if not turning:
        return Turned(*plain)
    found: list[Turn | None] = []
    misses: dict[str, list[str]] = {}
    for name in "qk":
        seen = read[name] if name in turning else None
        found.append(seen if isinstance(seen, Turn) else None)
        if isinstance(seen, str):
            misses.setdefault(seen, []).append(name)
    straight = tuple(range(head_dim))
    orders = [f.order if f else straight for f in found]
    if orders[0] != orders[1]:
        misses[f"{_parting(*orders)}, accepted one order"] = [
            n for n, f in zip("qk", found, strict=True) if f and f.order != straight
        ]
        found = [f if f and f.order == straight else None for f in found]
    if found[0] and found[1] and _shape(found[0].turn) != _shape(found[1].turn):
        seen = [_turning(f.turn) for f in (found[0], found[1])]
        misses[f"q turns {seen[0]}, k {seen[1]}, accepted equal"] = ["k"]
        found[1] = None
    factor = 1.0
    for f in found:
        factor *= f.factor if f else 1.0
    views = [f.view if f else p for f, p in zip(found, plain, strict=True)]
    turns = tuple(f.turn if f else None for f in found)
    lanes = tuple(f.lanes if f else None for f in found)
    sentences = tuple(outside(why, names) for why, names in misses.items())
    return Turned(views[0], views[1], turns, lanes, factor, sentences)  # type: ignore[arg-type]


def _parting(q: tuple[int, ...], k: tuple[int, ...]) -> str:
    """Where two orders of lanes part."""
    first = next(n for n, (a, b) in enumerate(zip(q, k, strict=True)) if a != b)
    return f"lane {first} of q is lane {q[first]} before it turns, that of k lane {k[first]}"


def _turning(turn: Rotation) -> str:
    return f"{turn.width} lanes from {turn.start} in {'pairs' if turn.interleaved else 'halves'}"


def _shape(turn: Rotation) -> tuple[int, int, bool]:
    return turn.start, turn.width, turn.interleaved


def read_lanes(
    operand: Operand,
    row: str | None,
    head_dim: int,
    values: ValueNumbers,
    stops: Iterable[Node] = (),
    row_tables: bool = False,
) -> Lanes:
    """The operand's lanes over the lanes of one tensor."""
    position = operands.fixed_lanes(operand.position, "d", lane_place(0, head_dim, head_dim))
    reader = Elements(values, stops, row_axis=row, width=head_dim, row_tables=row_tables)
    return lanes_of(reader, operand.node, position, head_dim)


@dataclass(frozen=True)
class Turn:
    """A rotation that was read: its input, and the factor and the order of lanes beside it."""

    view: View
    turn: Rotation
    order: tuple[int, ...]
    lanes: Lanes
    factor: float


Read: TypeAlias = Turn | str | None  # a rotation, or why there is none, if it looks like one


def read_rotation(operand: Operand, row: str, head_dim: int, values: ValueNumbers) -> Turn:
    """The rotation of an operand. One that is scaled by position is looked for last: what stands
    before a rotation, such as a gate, may scale by position too, and is no part of it."""
    try:
        return _turn(operand, row, head_dim, values, row_tables=False)
    except Unread as why:
        if not looks_turned(operand, row, values):
            raise
        try:
            return _turn(operand, row, head_dim, values, row_tables=True)
        except Unread:
            raise why from None


def _turn(
    operand: Operand, row: str, head_dim: int, values: ValueNumbers, row_tables: bool
) -> Turn:
    found = read_lanes(operand, row, head_dim, values, row_tables=row_tables)
    wanted = operand.node.meta["val"].dtype
    if found.source.dtype != wanted:  # rounded before it turns, as by a norm in fp32
        stops = _casts_of(found.source.node, wanted)
        found = read_lanes(operand, row, head_dim, values, stops, row_tables)
    factor = rotation.common_factor(found)
    turn, order = rotation.rotation(rotation.divided(found, factor))
    operands.unrounded(operand.node, found.source.node)
    have = found.source.dtype
    if have != wanted:
        raise Unread(f"the rotation takes {have} and the matmul {wanted}, accepted equal")
    return Turn(lane_view(found, head_dim), turn, order, found, factor)


def _casts_of(node: Node, dtype: torch.dtype) -> list[Node]:
    cast = torch.ops.prims.convert_element_type.default
    return [
        user
        for _, user in operands.moved_users(node, (), casts=False)
        if user.target is cast and user.meta["val"].dtype is dtype
    ]


def lane_view(found: Lanes, head_dim: int) -> View:
    """The input of a rotation as a view with head dim "d" along its lanes."""
    place = found.source.position[found.lane_dim]
    lane = Digit("d", 1, head_dim)
    if place.digits:  # heads and lanes in one dim
        digit = place.digits[-1]
        if digit.size != head_dim or found.lane_start:
            raise Unread(
                "the head dim is a part of a wider one within its dim, "
                "accepted a dim or part of its own"
            )
        new = Place((*place.digits[:-1], lane), place.offset)
    else:
        new = Place((lane,), found.lane_start)
    position = found.source.position
    return View(
        found.source.node, (*position[: found.lane_dim], new, *position[found.lane_dim + 1 :])
    )

"""Reads a rotary embedding (RoPE) by what it computes, lane by lane of the head dim.

Spellings seen in the wild, all of which read as the same pairs:

    rotate_half (Llama and most others):
        q * cos + cat((-q[..., h:], q[..., :h]), -1) * sin
    half-width tables (gpt-oss):
        cat((q1 * cos - q2 * sin, q2 * cos + q1 * sin), -1)
    interleaved (GPT-J, Cohere):
        q * cos + stack((-q[..., 1::2], q[..., ::2]), -1).flatten(-2) * sin
    interleaved in, halves out (DeepSeek):
        cat((a * c - b * s, b * c + a * s), -1) with a, b = q[..., ::2], q[..., 1::2]
    partial:
        cat((rotated(q[..., :w]), q[..., w:]), -1)
    scaled by position (xPos, temperatures), the scale before, between or after:
        q * cos * scale + rotate_half(q) * sin * scale

The halves of cos and sin are never assumed to be equal. Refused (the rotation then stays outside,
the attention still fuses): pairs that are neither halves nor neighbours, tables that vary by head,
factors that differ by lane.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from inductor_gqa.site import Rotation, Table, View

from .axes import Digit, Fixed, Place, Position, Unread
from .elements import Elements, by_lane
from .naming import op_of
from .terms import Atom, Terms, near

Node = torch.fx.Node


class Entry(NamedTuple):
    """table[column]; dim None for a table that has one number for all lanes of a position."""

    table: View  # position without its column place, which is dim `dim`
    column: int
    dim: int | None


class Term(NamedTuple):
    """factor * table[column] * beside * x[lane]; table None for a lane that passes. There are
    hundreds of them, so one is a single tuple."""

    factor: float
    table: View | None
    column: int
    dim: int | None  # of the columns in the table, as in `Entry`
    lane: int
    beside: tuple[Entry, ...] = ()

    @property
    def entries(self) -> tuple[Entry, ...]:
        if self.table is None:
            return ()
        return (Entry(self.table, self.column, self.dim), *self.beside)


def key(table: View | None, column: int, beside: tuple[Entry, ...], lane: int) -> Any:
    """A coefficient without its factor, whatever the order of its tables, and the lane it makes."""
    if not beside:
        return table, column, lane
    pairs = [(table, column), *((e.table, e.column) for e in beside)]
    return frozenset(Counter(pairs).items()), lane


@dataclass
class Lanes:
    """Each lane of a rotated operand as terms over the lanes of one tensor."""

    source: View  # position without its lane place (see lane_dim)
    lane_dim: int
    lane_start: int
    forms: list[tuple[Term, ...]]

    @cached_property
    def scales_by_row(self) -> bool:
        """Whether a table has one number for all lanes of a position."""
        terms = (term for form in self.forms for term in form if term.table is not None)
        return any(t.dim is None or any(e.dim is None for e in t.beside) for t in terms)

    @cached_property
    def adjoint(self) -> list[dict[Any, float]]:
        """For each input lane, its gradient as {coefficient and output lane (`key`): factor}."""
        out: list[dict[Any, float]] = [{} for _ in self.forms]
        for k, form in enumerate(self.forms):
            for term in form:
                out[term.lane][key(term.table, term.column, term.beside, k)] = term.factor
        return out


@dataclass(frozen=True)
class Strand:
    """One term of a group of lanes: factor * tables[columns[n]] * data[lanes[n]] in the n-th."""

    factor: float
    tables: tuple[tuple[View, int | None, tuple[int, ...]], ...]  # with dim and columns
    data: Atom  # its lanes set to 0
    data_dim: int
    lanes: tuple[int, ...]

    def terms(self, first: int = 0) -> Iterator[Term]:
        """The terms in the group's order, their lanes counted from `first`."""
        if not self.tables:
            for lane in self.lanes:
                yield Term(self.factor, None, 0, None, lane - first)
            return
        (table, dim, columns), *others = self.tables
        for n, lane in enumerate(self.lanes):
            beside = tuple(Entry(t, at[n], d) for t, d, at in others) if others else ()
            yield Term(self.factor, table, columns[n], dim, lane - first, beside)


def strands(read: Terms, count: int) -> list[Strand]:
    """The terms of a group of lanes; raises Unread where one is not (tables times) one input."""
    out: list[Strand] = []
    for atoms, factor in read.items():
        data = [a for a in atoms if a.kind != "table"]
        if len(data) != 1:
            raise Unread(f"a term of a lane has {len(data)} inputs, accepted 1")
        bare, dim, lanes_ = without_lanes(data[0], count)
        tables = tuple(_columns(a, count) for a in atoms if a.kind == "table")
        out.append(Strand(factor, tables, bare, dim, lanes_))
    return out


def _columns(table: Atom, count: int) -> tuple[View, int | None, tuple[int, ...]]:
    """What a table gives each of a group of lanes."""
    assert table.node is not None
    if all(not isinstance(d, Fixed) for place in table.position for d in place.digits):
        return View(table.node, table.position), None, (0,) * count
    outer, dim, columns = split_lanes(table.position, count)
    return View(table.node, outer), dim, columns


def without_lanes(atom: Atom, count: int) -> tuple[Atom, int, tuple[int, ...]]:
    """(the atom with its lanes set to 0, their dim, the lanes), also of an atom that is summed over
    a group."""
    if atom.kind == "sum":
        axes, inside = atom.inner
        if len(inside) != 1:
            raise Unread(f"a lane sums products of {len(inside)} factors, accepted 1")
        inner, dim, lanes_ = without_lanes(inside[0], count)
        return Atom("sum", inner=(axes, (inner,))), dim, lanes_
    if atom.kind != "load":
        raise Unread(f"a lane depends on {atom.kind}, accepted products and sums")
    outer, dim, lanes_ = split_lanes(atom.position, count)
    return Atom("load", atom.node, outer), dim, lanes_


def lanes(reader: Elements, node: Node, position: Position, count: int) -> Lanes:
    """The lanes of `node` (position has Fixed lanes) over the lanes of the one tensor that they are
    made of."""
    found: list[tuple[tuple[int, ...], Strand]] = []
    sources: dict[tuple[Atom, int], set[int]] = {}
    for group, read in by_lane(reader, node, position, count):
        for s in strands(read, len(group)):
            sources.setdefault((s.data, s.data_dim), set()).update(s.lanes)
            found.append((group, s))
    if len(sources) != 1:
        made_by = " and ".join(dict.fromkeys(op_of(source.node) for source, _ in sources))
        raise Unread(f"the lanes come from {len(sources)} tensors ({made_by}), accepted one")
    (((source, dim), used),) = sources.items()
    start = min(used)
    if used != set(range(start, start + count)) or source.node is None:
        raise Unread(
            f"{len(used)} of the input's lanes from {start} are used, accepted a run of {count}"
        )
    forms: list[list[Term]] = [[] for _ in range(count)]
    for group, s in found:
        for lane, term in zip(group, s.terms(start), strict=True):
            forms[lane].append(term)
    return Lanes(View(source.node, source.position), dim, start, [tuple(f) for f in forms])


def split_lanes(position: Position, count: int) -> tuple[Position, int, tuple[int, ...]]:
    """(position with its lanes set to 0, their dim, the lanes)."""
    found = [
        d for d, place in enumerate(position) if any(isinstance(x, Fixed) for x in place.digits)
    ]
    if len(found) != 1:
        raise Unread(f"the head dim lies in {len(found)} dims of a tensor, accepted 1")
    dim = found[0]
    place = position[dim]
    digit = place.digits[-1]
    rest = place.digits[:-1]
    if not isinstance(digit, Fixed) or any(isinstance(d, Fixed) for d in rest):
        raise Unread(
            f"the head dim is an outer part of dim {dim} of a tensor, accepted the innermost"
        )
    lanes_ = digit.values
    assert len(lanes_) == count
    if not rest:
        lanes_ = tuple(lane + int(place.offset) for lane in lanes_)
        bare = Place()
    else:
        bare = Place((*rest, Fixed((0,), digit.size)), place.offset)
    return (*position[:dim], bare, *position[dim + 1 :]), dim, lanes_


def common_factor(found: Lanes) -> float:
    """The number that every lane is multiplied by, whatever its sign; 1 where they differ."""
    factors = [abs(term.factor) for form in found.forms for term in form]
    first = factors[0] if factors else 1.0
    is_common = all(near(f, first) for f in (min(factors), max(factors))) if factors else False
    return first if first and is_common else 1.0


def divided(found: Lanes, factor: float) -> Lanes:
    """The lanes without a factor that they have in common."""
    if factor == 1.0:
        return found
    ones = [
        tuple(t._replace(factor=math.copysign(1.0, t.factor)) for t in form) for form in found.forms
    ]
    return replace(found, forms=ones)


def rotation(found: Lanes, others: Lanes | None = None) -> tuple[Rotation, tuple[int, ...]]:
    """The rotation that the lanes are, and their order: order[k] is the input lane that output lane
    k belongs to."""
    count = len(found.forms)
    turned = [k for k, form in enumerate(found.forms) if len(form) == 2]
    for k, form in enumerate(found.forms):
        plain = len(form) == 1 and form[0].table is None and form[0].factor == 1.0
        if k not in turned and not plain:
            raise Unread(f"lane {k} has {_form(form)}, accepted two products with tables or itself")
    if not turned:
        raise Unread(f"0 lanes are turned after {op_of(found.source.node)}, accepted 2 or more")
    parts = _sorted_out(found, turned)
    cut = _cut_of_one_table([part for k in turned for part in parts[k]])
    tables: dict[tuple[View | None, bool], list[float]] = {}
    for k in turned:
        for part in parts[k]:
            if abs(part.factor) != 1.0:
                seen = _form(found.forms[k])
                raise Unread(f"turned lane {k} has {seen}, accepted factors 1 and -1")
            tables.setdefault((part.table, part.column >= cut), []).append(part.factor)
    if len(tables) != 2:
        raise Unread(f"the rotation uses {len(tables)} tables, accepted 2")
    cosines = [t for t, factors in tables.items() if len(set(factors)) == 1 and factors[0] == 1.0]
    if len(cosines) != 1:
        raise Unread(
            f"{len(cosines)} tables have one sign in all lanes, accepted 1 as the cosine has"
        )
    cos = cosines[0]
    (sin,) = [t for t in tables if t != cos]
    own: dict[int, tuple[int, Term, Term]] = {}
    order: list[int] = []
    for k, form in enumerate(found.forms):
        if k not in parts:
            order.append(form[0].lane)
            continue
        straight = [p for p in parts[k] if (p.table, p.column >= cut) == cos]
        crossed = [p for p in parts[k] if (p.table, p.column >= cut) == sin]
        if len(straight) != 1 or len(crossed) != 1:
            raise Unread(
                f"turned lane {k} has {len(straight)} terms of the one table and {len(crossed)} of "
                "the other, accepted 1 and 1"
            )
        order.append(straight[0].lane)
        own[straight[0].lane] = (crossed[0].lane, straight[0], crossed[0])
    if sorted(order) != list(range(count)):
        raise Unread(f"the lanes come from {len(set(order))} input lanes, accepted {count}")
    return _paired(own), tuple(order)


def _sorted_out(found: Lanes, turned: list[int]) -> dict[int, tuple[Term, ...]]:
    """The terms of the turned lanes, each with its cosine or sine as the table and beside it what
    all of them share."""
    forms = {k: found.forms[k] for k in turned}
    terms = [term for form in forms.values() for term in form]
    if all(t.table is not None and t.dim is not None and not t.beside for t in terms):
        return forms
    shared: set[View] = set.intersection(*({e.table for e in t.entries} for t in terms))
    if any(all(e.table in shared for e in t.entries) for t in terms):
        # One table of cosines and sines side by side: what is left is the same for all lanes.
        shared = {e.table for t in terms for e in t.entries if e.dim is None}
    return {k: tuple(_own_table(t, k, form, shared) for t in form) for k, form in forms.items()}


def _own_table(term: Term, lane: int, form: tuple[Term, ...], shared: set[View]) -> Term:
    own = [e for e in term.entries if e.table not in shared]
    if len(own) != 1 or own[0].dim is None:
        raise Unread(f"turned lane {lane} has {_form(form)}, accepted a cosine and a sine")
    beside = sorted(
        (e for e in term.entries if e.table in shared),
        key=lambda e: (e.table.node.name, hash(e.table), e.column),
    )
    return Term(term.factor, *own[0], term.lane, tuple(beside))


def _cut_of_one_table(parts: list[Term]) -> float:
    """Where a table that holds cosines and sines side by side (GPT-J) changes from one to the
    other."""
    columns = {part.column for part in parts}
    if len({part.table for part in parts}) != 1:
        return math.inf
    return (min(columns) + max(columns) + 1) / 2


def _paired(own: dict[int, tuple[int, Term, Term]]) -> Rotation:
    start, width = min(own), len(own)
    if sorted(own) != list(range(start, start + width)):
        raise Unread(f"turned lanes are {_some(sorted(own))}, accepted one run")
    lanes_ = range(start, start + width)
    half = all(
        own[x][0] == (x + width // 2 if x < start + width // 2 else x - width // 2) for x in lanes_
    )
    next_to = all(own[x][0] == start + ((x - start) ^ 1) for x in lanes_)
    if width % 2 or not (half or next_to):
        pair = f"{start} with {own[start][0]}"
        raise Unread(f"lane {pair} of {width} turns, accepted halves or neighbours")
    interleaved = not half
    first = [(x - start) % 2 == 0 if interleaved else x < start + width // 2 for x in lanes_]
    signs = {own[x][2].factor * (-1.0 if f else 1.0) for x, f in zip(lanes_, first, strict=True)}
    if len(signs) != 1:
        raise Unread("the two lanes of a pair turn in one direction, accepted opposite ones")
    return Rotation(
        _product([own[x][1] for x in lanes_]),
        _product([own[x][2] for x in lanes_]),
        start,
        width,
        interleaved,
        signs.pop(),
    )


def _product(parts: list[Term]) -> Table:
    """The cosine or the sine of each lane, times what all terms share."""
    if len({tuple(e.table for e in part.beside) for part in parts}) != 1:
        raise Unread("the lanes are scaled by different tables, accepted one product for all")
    table = _table([part.entries[0] for part in parts])
    if not parts[0].beside:
        return table
    beside = zip(*(part.beside for part in parts), strict=True)
    return replace(table, times=tuple(_table(list(entries)) for entries in beside))


def _table(entries: list[Entry]) -> Table:
    """The run of columns that the lanes use, and how: each lane its own ("once"), that of its
    partner ("swapped" halves, "crossed" neighbours), one column for a half or a pair, or columns
    that lie half the table "apart" for the two lanes of a pair."""
    view, _, dim = entries[0]
    if dim is None:
        return Table(view, "all")
    columns = [entry.column for entry in entries]
    start, width = min(columns), len(columns)
    used = [column - start for column in columns]
    half = list(range(width // 2))
    known = (
        ("once", list(range(width))),
        ("swapped", [*range(width // 2, width), *half]),
        ("crossed", [k ^ 1 for k in range(width)]),
        ("halves", half + half),
        ("pairs", [k for k in half for _ in range(2)]),
        ("apart", [k // 2 + (k % 2) * (width // 2) for k in range(width)]),
        ("apart crossed", [k // 2 + (1 - k % 2) * (width // 2) for k in range(width)]),
    )
    spread = next((name for name, pattern in known if used == pattern), None)
    if spread is None:
        names = ", ".join(name for name, _ in known)
        raise Unread(f"table columns are used as {_some(used)}, accepted {names}")
    if view.position[dim].digits:
        raise Unread(
            f"the columns of a rotation table share dim {dim} with another axis, accepted their own"
        )
    column = Place((Digit("w", 1, max(used) + 1),), start)
    return Table(View(view.node, (*view.position[:dim], column, *view.position[dim + 1 :])), spread)


def _form(form: tuple[Term, ...]) -> str:
    tables = list(dict.fromkeys(e.table for t in form for e in t.entries))
    parts = [
        f"{t.factor:g}{''.join(f' * table {tables.index(e.table)}' for e in t.entries)} "
        f"* lane {t.lane}"
        for t in form[:3]
    ]
    return f"{len(form)} terms ({', '.join(parts)}{', ...' if len(form) > 3 else ''})"


def _some(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:6])) + (", ..." if len(numbers) > 6 else "")

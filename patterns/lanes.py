"""The lanes of the head dim, each as a sum of products of tables with lanes of one tensor.

Rotations are linear in what they turn, with coefficients from cos and sin; so is their gradient.
What the coefficients mean rotation.py reads off.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, TypeAlias

import torch

from inductor_gqa.site import View

from .axes import Fixed, Place, Position, Unread
from .elements import Elements, by_lane
from .naming import op_of
from .terms import Atom, Terms

Node = torch.fx.Node


class Entry(NamedTuple):
    """table[column]; dim None for a table that has one number for all lanes of a position."""

    table: int  # its number in the reading, as in `Lanes.tables`
    column: int
    dim: int | None


class Term(NamedTuple):
    """factor * table[column] * beside * x[lane]; table None for a lane that passes. There are
    hundreds of them, so one is a single tuple."""

    factor: float
    table: int | None
    column: int
    dim: int | None  # of the columns in the table, as in `Entry`
    lane: int
    beside: tuple[Entry, ...] = ()

    @property
    def entries(self) -> tuple[Entry, ...]:
        if self.table is None:
            return ()
        return (Entry(self.table, self.column, self.dim), *self.beside)


Forms: TypeAlias = tuple[tuple[Term, ...], ...]  # of each lane


def coefficient(entries: Sequence[tuple[int, int]], lane: int) -> Any:
    """A coefficient without its factor, as (table, column) of each, whatever their order, and the
    lane it makes."""
    return (tuple(entries) if len(entries) < 2 else tuple(sorted(entries))), lane


@dataclass(eq=False)  # keys of memos, of which only the same reading is meant
class Lanes:
    """Each lane of a rotated operand as terms over the lanes of one tensor."""

    source: View  # position without its lane place (see lane_dim)
    lane_dim: int
    lane_start: int
    forms: Forms
    tables: dict[View, int]  # by number; positions without their column place (see Term.dim)

    @cached_property
    def scales_by_row(self) -> bool:
        """Whether a table has one number for all lanes of a position."""
        terms = (term for form in self.forms for term in form if term.table is not None)
        return any(t.dim is None or any(e.dim is None for e in t.beside) for t in terms)

    @property
    def adjoint(self) -> list[dict[Any, float]]:
        """For each input lane, its gradient as {`coefficient` of an output lane: factor}."""
        return _adjoint(self.forms)


@lru_cache(maxsize=1 << 8)  # q and k, and the layers of a model, are made alike
def _adjoint(forms: Forms) -> list[dict[Any, float]]:
    out: list[dict[Any, float]] = [{} for _ in forms]
    for k, form in enumerate(forms):
        for term in form:
            key = coefficient([entry[:2] for entry in term.entries], k)
            out[term.lane][key] = term.factor
    return out


@dataclass(frozen=True)
class Strand:
    """One term of a group of lanes: factor * tables[columns[n]] * data[lanes[n]] in the n-th."""

    factor: float
    tables: tuple[tuple[int, int | None, tuple[int, ...]], ...]  # number, dim and columns
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


def strands(read: Terms, count: int, tables: dict[View, int]) -> list[Strand]:
    """The terms of a group of lanes, their tables numbered by `tables`; raises Unread where one is
    not (tables times) one input."""
    out: list[Strand] = []
    for atoms, factor in read.items():
        data = [a for a in atoms if a.kind != "table"]
        if len(data) != 1:
            raise Unread(f"a term of a lane has {len(data)} inputs, accepted 1")
        bare, dim, lanes_ = without_lanes(data[0], count)
        used: list[tuple[int, int | None, tuple[int, ...]]] = []
        for atom in atoms:
            if atom.kind == "table":
                table, at, columns = _columns(atom, count)
                used.append((tables.setdefault(table, len(tables)), at, columns))
        out.append(Strand(factor, tuple(used), bare, dim, lanes_))
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


def lanes_of(reader: Elements, node: Node, position: Position, count: int) -> Lanes:
    """The lanes of `node` (position has Fixed lanes) over the lanes of the one tensor that they are
    made of."""
    found: list[tuple[tuple[int, ...], Strand]] = []
    sources: dict[tuple[Atom, int], set[int]] = {}
    tables: dict[View, int] = {}
    for group, read in by_lane(reader, node, position, count):
        for s in strands(read, len(group), tables):
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
    view = View(source.node, source.position)
    return Lanes(view, dim, start, tuple([tuple(f) for f in forms]), tables)


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

"""Reads what an element of a tensor is, by following its position back through the graph.

`Elements.at(node, position)` answers with `Terms` (terms.py). Ops that only move elements change
the position; sums, differences and products combine terms; whatever is not known here ends the
reading at an atom, which is always sound: the atom *is* that element. Nothing is matched as a
template, so a spelling nobody thought of reads like the others as long as its ops are known. Lanes
of the head dim are followed many at a time; where they part (at a `cat`), `Split` says how, and
`by_lane` follows the parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch._inductor.inductor_prims  # pyright: ignore[reportUnusedImport] # registers prims.fma

from . import joined, terms
from .anchors import Softmax
from .axes import (
    Fixed,
    Place,
    Position,
    axes_in,
    same,
    shape_of,
    whole,
)
from .complex_numbers import view_as_real
from .moves import broadcast, step
from .split import Split
from .terms import Atom, Terms
from .values import MATMULS, ValueNumbers, is_float, scalar_value

aten, prims = torch.ops.aten, torch.ops.prims
Node = torch.fx.Node

# What a term of a sum ends at, where that sum is data: a result, or another such sum.
ENDS = MATMULS | {aten.add.Tensor, aten.sub.Tensor}


class Elements:
    """Reads elements of one graph; see the module's text.

    stops: nodes that are always atoms. row_axis: the axis of a rotation's position, which a
    coefficient table must have; None where it is not known yet. algebra: read products of two
    tensors as products (scores and gradients) instead of as data times table (rotations). width:
    of a head; where a wider dim of lanes is joined with another (q, k and v side by side in each
    head), reading ends before it. row_tables: what has one number for all lanes of a position is a
    table as well. softmax: its weights sum to one over their last dim, and its exponentials are
    weights times total.
    """

    def __init__(
        self,
        values: ValueNumbers,
        stops: Iterable[Node] = (),
        row_axis: str | None = None,
        algebra: bool = False,
        softmax: Softmax | None = None,
        width: int | None = None,
        row_tables: bool = False,
    ) -> None:
        self.values = values
        self.stops = set(stops)
        self.row_axis = row_axis
        self.algebra = algebra
        parts = [softmax.weights, softmax.exponentials, softmax.total] if softmax else [None] * 3
        self.softmax, self.exponentials, self.total = (p and values.first(p) for p in parts)
        self.width = width
        self.row_tables = row_tables
        self.depth = 0
        self.known: dict[tuple[Node, Position, int], Terms] = {}

    def at(self, node: Node, position: Position) -> Terms:
        key = (node, position, self.depth)
        if key not in self.known:
            self.known[key] = self._read(node, position)
        return self.known[key]

    def load(self, node: Node, position: Position) -> Terms:
        return terms.one(Atom("load", self.values.first(node), position))

    def _read(self, node: Node, position: Position) -> Terms:
        if node in self.stops or node.op != "call_function":
            return self.load(node, position)
        if self.softmax is not None and self.values.first(node) in (self.exponentials, self.total):
            return self._of_softmax(node, position)
        back = step(node, position)
        if back is not None:
            if self.width is not None and any(_is_wider(p, self.width) for p in back[1]):
                return self.load(node, position)
            return self.at(*back)
        rule = RULES.get(node.target)
        found = rule(self, node, position) if rule else None
        return self.load(node, position) if found is None else found

    def _of_softmax(self, node: Node, position: Position) -> Terms:
        """The exponentials of a softmax written by hand are its weights times its total."""
        if self.values.first(node) is self.total:
            return self.load(node, position)
        assert self.softmax is not None
        assert self.total is not None
        keeps = len(shape_of(self.total)) == len(position)
        total = self.load(self.total, (*position[:-1], Place()) if keeps else position[:-1])
        return terms.multiply(self.load(self.softmax, position), total)

    def operand(self, node: Node, value: Any, position: Position) -> Terms | None:
        """Terms of an operand of a pointwise op, after broadcasting; None if it is not a float
        tensor or a number."""
        if isinstance(value, int | float):
            return terms.number(value)
        if not isinstance(value, Node) or not isinstance(value.meta.get("val"), torch.Tensor):
            return None
        constant = scalar_value(value)
        if constant is not None:
            return terms.number(constant)
        if self.algebra and value.meta["val"].dtype is torch.bool:
            return flagged(self, value, position)
        return self.at(value, broadcast(value, position))

    def sums_to_one(self, atom: Atom, axis: str) -> bool:
        if atom.kind != "load" or atom.node is not self.softmax or self.softmax is None:
            return False
        return atom.position[-1] == whole(axis, shape_of(self.softmax)[-1])

    def table(self, node: Node, position: Position) -> Terms:
        """An element of a coefficient table: only moved, never computed with, so that it keeps its
        dtype."""
        while (back := step(node, position, casts=False)) is not None:
            node, position = back
        return terms.one(Atom("table", self.values.first(node), position))

    def is_table(self, node: Node, position: Position, other: Node, beside: Position) -> bool:
        """A table varies with the position and the lane, and is shared by the heads.

        Where there is only one head and one batch entry the axes cannot tell; then what comes from
        no matmul is the table.
        """
        axes, all_axes = axes_in(position), axes_in(beside)
        has_lanes = any(p.digits and p.is_fixed for p in position)
        if not axes or not (
            has_lanes or (self.row_tables and not self.values.comes_from_matmul(node))
        ):
            return False
        if self.row_axis is not None and self.row_axis not in axes:
            return False
        if axes < all_axes:
            return True
        return axes == all_axes and (
            self.values.comes_from_matmul(other) and not self.values.comes_from_matmul(node)
        )


def _is_wider(place: Place, width: int) -> bool:
    """Whether lanes and another axis share a dim in which the lanes are not one head's."""
    return len(place.digits) > 1 and any(
        isinstance(d, Fixed) and d.size != width for d in place.digits
    )


def _mul(reader: Elements, node: Node, position: Position) -> Terms | None:
    a, b = node.args[0], node.args[1]
    for value, other in ((a, b), (b, a)):
        constant = scalar_value(value)
        if constant is not None:
            read = reader.operand(node, other, position)
            return None if read is None else terms.scaled(read, constant)
    if not isinstance(a, Node) or not isinstance(b, Node):
        return None
    if reader.algebra and is_float(a) != is_float(b):
        flag, value = (b, a) if is_float(a) else (a, b)
        read, chosen = reader.at(value, broadcast(value, position)), flagged(reader, flag, position)
        return None if chosen is None else terms.multiply(read, chosen)
    if not (is_float(a) and is_float(b)):
        return None
    at_a, at_b = broadcast(a, position), broadcast(b, position)
    if reader.algebra:
        return terms.multiply(reader.at(a, at_a), reader.at(b, at_b))
    if reader.is_table(b, at_b, a, at_a):
        return terms.multiply(reader.at(a, at_a), reader.table(b, at_b))
    if reader.is_table(a, at_a, b, at_b):
        return terms.multiply(reader.table(a, at_a), reader.at(b, at_b))
    return None


def _add(reader: Elements, node: Node, position: Position) -> Terms | None:
    alpha = node.kwargs.get("alpha", 1)
    sign = -1.0 if node.target is aten.sub.Tensor else 1.0
    if not isinstance(alpha, int | float):
        return None
    a = reader.operand(node, node.args[0], position)
    b = reader.operand(node, node.args[1], position)
    if a is None or b is None or (not reader.algebra and _are_results(a, b)):
        return None
    return terms.add(a, b, sign * alpha)


def _are_results(a: Terms, b: Terms) -> bool:
    """Whether a sum is of what different matmuls made, as a projection and LoRA's adapter, or has
    a tensor that the graph was given, as a bias: the sum then is what is rotated, not a part of the
    rotation, whose terms have tables."""
    if not a or not b or any(atom.kind != "load" for t in (a, b) for key in t for atom in key):
        return False
    left, right = ({atom.node for key in read for atom in key} for read in (a, b))
    if left == right:
        return False
    return any(_are(ends, ()) for ends in (left, right)) or _are(left | right, ENDS)


def _are(nodes: set[Node | None], targets: Iterable[Any]) -> bool:
    return all(n is not None and (n.op == "placeholder" or n.target in targets) for n in nodes)


def _pow(reader: Elements, node: Node, position: Position) -> Terms | None:
    """A square."""
    if not reader.algebra or scalar_value(node.args[1]) != 2.0:
        return None
    read = reader.operand(node, node.args[0], position)
    return None if read is None else terms.multiply(read, read)


def _neg(reader: Elements, node: Node, position: Position) -> Terms | None:
    return terms.scaled(reader.at(node.args[0], position), -1.0)  # type: ignore[arg-type]


def _div(reader: Elements, node: Node, position: Position) -> Terms | None:
    divisor = scalar_value(node.args[1])
    read = reader.operand(node, node.args[0], position)
    if divisor and read is not None:
        return terms.scaled(read, 1.0 / divisor)
    if not reader.algebra or read is None or not isinstance(node.args[1], Node):
        return None
    if read == {} and not is_float(node.args[1]):
        return {}  # how often the maximum occurs, which is at least once
    inverse = _inverse(reader, node.args[1], broadcast(node.args[1], position))
    return None if inverse is None else terms.multiply(read, inverse)


def _inverse(reader: Elements, node: Node, position: Position) -> Terms | None:
    """1 / the total of the softmax."""
    found = reader.at(node, position) if is_float(node) else {}
    if len(found) != 1 or next(iter(found.values())) != 1.0:
        return None
    (atoms,) = found
    if len(atoms) != 1 or atoms[0].kind != "load" or atoms[0].node is not reader.total:
        return None
    return terms.one(Atom("inverse", atoms[0].node, atoms[0].position))


def _reciprocal(reader: Elements, node: Node, position: Position) -> Terms | None:
    return _inverse(reader, node.args[0], position) if reader.algebra else None  # type: ignore[arg-type]


def _fma(reader: Elements, node: Node, position: Position) -> Terms | None:
    parts = [reader.operand(node, value, position) for value in node.args]
    if not reader.algebra or any(p is None for p in parts):
        return None
    a, b, c = parts
    return terms.add(terms.multiply(a, b), c)  # type: ignore[arg-type]


def _constant(reader: Elements, node: Node, position: Position) -> Terms | None:
    value = scalar_value(node)
    return None if value is None else terms.number(value)


def _where(reader: Elements, node: Node, position: Position) -> Terms | None:
    """`where(c, x, 0)` is the indicator of c times x."""
    condition, chosen, other = node.args
    if not reader.algebra or scalar_value(other) != 0.0 or not isinstance(condition, Node):
        if reader.algebra and scalar_value(chosen) == 0.0 and isinstance(condition, Node):
            kind, value = "unless", other
        else:
            return None
    else:
        kind, value = "where", chosen
    read = reader.operand(node, value, position)
    flag = flagged(reader, condition, position, kind)
    return None if read is None or flag is None else terms.multiply(read, flag)


def flagged(reader: Elements, node: Node, position: Position, kind: str = "where") -> Terms | None:
    """The indicator of a boolean element, wherever it was moved from."""
    if node.meta["val"].dtype is not torch.bool:
        return None
    position = broadcast(node, position)
    while (back := step(node, position)) is not None:
        node, position = back
    return terms.one(Atom(kind, reader.values.first(node), position))


def _cast(reader: Elements, node: Node, position: Position) -> Terms | None:
    """A boolean made a number."""
    source = node.args[0]
    if not reader.algebra or not is_float(node) or not isinstance(source, Node):
        return None
    return flagged(reader, source, position)


def _tanh(reader: Elements, node: Node, position: Position) -> Terms | None:
    if not reader.algebra:
        return None
    inner = terms.frozen(reader.at(node.args[0], position))  # type: ignore[arg-type]
    return terms.one(Atom("tanh", inner=inner))


def _sum(reader: Elements, node: Node, position: Position) -> Terms | None:
    source, dims = node.args[0], node.args[1]
    keep = bool(node.args[2]) if len(node.args) > 2 else bool(node.kwargs.get("keepdim", False))
    if not isinstance(source, Node) or not dims:
        return None
    shape = shape_of(source)
    reduced = sorted(d % len(shape) for d in dims)  # type: ignore[union-attr]
    places = list(position)
    names = []
    for d in reduced:
        name = f"?{reader.depth}.{len(names)}"
        names.append(name)
        inner = whole(name, shape[d])
        if keep:
            places[d] = inner
        else:
            places.insert(d, inner)
    reader.depth += 1
    try:
        read = reader.at(source, tuple(places))
    finally:
        reader.depth -= 1
    used = tuple(n for n, d in zip(names, reduced, strict=True) if not same(shape[d], 1))
    try:
        return terms.summed(read, used, reader.sums_to_one) if used else read
    except ArithmeticError:
        return None


Rule = Callable[[Elements, Node, Position], Terms | None]
RULES: dict[Any, Rule] = {
    aten.mul.Tensor: _mul,
    aten.mul.Scalar: _mul,
    aten.add.Tensor: _add,
    aten.sub.Tensor: _add,
    aten.neg.default: _neg,
    aten.pow.Tensor_Scalar: _pow,
    aten.div.Tensor: _div,
    aten.div.Scalar: _div,
    aten.reciprocal.default: _reciprocal,
    prims.fma.default: _fma,
    aten.cat.default: joined.cat,
    aten.slice_scatter.default: joined.slice_scatter,
    aten.select_scatter.default: joined.select_scatter,
    aten.scatter.src: joined.scatter,
    aten.full.default: _constant,
    aten.scalar_tensor.default: _constant,
    aten.where.self: _where,
    prims.convert_element_type.default: _cast,
    aten.tanh.default: _tanh,
    aten.sum.dim_IntList: _sum,
    aten.view_as_real.default: view_as_real,
}


def by_lane(
    reader: Elements, node: Node, position: Position, count: int
) -> list[tuple[tuple[int, ...], Terms]]:
    """Terms of `count` lanes, as groups of lanes (numbered within the position) that read alike."""
    out: list[tuple[tuple[int, ...], Terms]] = []
    todo = [(tuple(range(count)), position)]
    while todo:
        lanes, place = todo.pop()
        try:
            out.append((lanes, reader.at(node, place)))
        except Split as split:
            for part in split.parts:
                todo.append((tuple(lanes[k] for k in part), _restricted(place, part)))
    return out


def _restricted(position: Position, part: tuple[int, ...]) -> Position:
    return tuple(
        Place(
            tuple(
                Fixed(tuple(d.values[k] for k in part), d.size) if isinstance(d, Fixed) else d
                for d in place.digits
            ),
            place.offset,
        )
        for place in position
    )


def lane_place(start: int, count: int, size: int) -> Place:
    return Place((Fixed(tuple(range(start, start + count)), size),))

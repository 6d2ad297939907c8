"""Reads what hides a score: a predicate over query i and key j, and what a hidden score becomes.

Spellings seen in the wild: `where(keep, 0, finfo.min)` added (Transformers), `masked_fill(triu,
-inf)`, `(1 - mask) * finfo.min`, `torch.triu(torch.full((L, L), -inf), 1)`, `arange[:, None] >=
arange[None]`, cache positions, a sliding window as two comparisons, a padding tensor looked up by
batch and key. All read as a conjunction of comparisons and boolean lookups; what does not is kept
as a tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from .axes import Position
from .integers import (
    COMPARISONS,
    Integers,
    Linear,
    combine,
    compared,
    constant,
    decided,
    indexed,
)
from .moves import broadcast, step
from .values import as_dtype, scalar_value

aten, prims = torch.ops.aten, torch.ops.prims
Node = torch.fx.Node


@dataclass(frozen=True)
class Clause:
    """One part of a conjunction; `positive` is False for the negated part.

    comparison: ("ge" | "eq" | "ne", Linear) where it is one; else the truth is the boolean element
    of `node`.
    """

    node: Node
    position: Position
    positive: bool = True
    comparison: tuple[str, tuple[tuple[object, object], ...]] | None = None

    @property
    def linear(self) -> Linear:
        assert self.comparison is not None
        return dict(self.comparison[1])  # type: ignore[arg-type]


ALWAYS: tuple[Clause, ...] = ()
NEVER = None  # a conjunction that is false everywhere

Conjunction = tuple[Clause, ...] | None

ANDS = {aten.bitwise_and.Tensor, aten.logical_and.default}
ORS = {aten.bitwise_or.Tensor, aten.logical_or.default}
NOTS = {aten.bitwise_not.default, aten.logical_not.default}


def conjunction(
    reader: Integers, node: Node, position: Position, positive: bool = True
) -> Conjunction:
    """The boolean element as a conjunction of clauses; NEVER where it is false whatever the
    position."""
    known = scalar_value(node)
    if known is not None:
        return ALWAYS if bool(known) is positive else NEVER
    if node.op == "call_function":
        if node.target in NOTS:
            return conjunction(reader, node.args[0], position, not positive)  # type: ignore[arg-type]
        if node.target in (ANDS if positive else ORS):
            parts = [
                conjunction(reader, value, broadcast(value, position), positive)  # type: ignore[arg-type]
                for value in node.args
            ]
            if any(part is NEVER for part in parts):
                return NEVER
            return tuple(clause for part in parts for clause in part)  # type: ignore[union-attr]
        if node.target in (ORS if positive else ANDS):
            return _either(reader, node, position, positive)
        if node.target in COMPARISONS:
            return _comparison(reader, node, position, positive)
        if node.target is prims.convert_element_type.default:
            source = node.args[0]
            if isinstance(source, Node) and source.meta["val"].dtype is torch.bool:
                return conjunction(reader, source, position, positive)
            flag = two_valued(reader, source, position)  # type: ignore[arg-type]
            if (
                flag is not None
                and bool(flag.kept) is positive
                and bool(flag.hidden) is not positive
            ):
                return flag.clauses
        if node.target is aten.index.Tensor:
            found = indexed(reader, node, position)
            if found is not None:
                return conjunction(reader, *found, positive)
        if node.target is aten.where.self:
            return _chosen(reader, node, position, positive)
        back = step(node, position)
        if back is not None:
            return conjunction(reader, *back, positive)
    return (Clause(reader.values.first(node), position, positive),)


def _either(reader: Integers, node: Node, position: Position, positive: bool) -> Conjunction:
    """a or b: readable where one side is constant; else it is a clause of its own."""
    parts = [
        conjunction(reader, value, broadcast(value, position), positive)  # type: ignore[arg-type]
        for value in node.args
    ]
    if any(part == ALWAYS for part in parts):
        return ALWAYS
    live = [part for part in parts if part is not NEVER]
    if len(live) < 2:
        return live[0] if live else NEVER
    return (Clause(reader.values.first(node), position, positive),)


def _comparison(reader: Integers, node: Node, position: Position, positive: bool) -> Conjunction:
    read = compared(reader, node, position)
    if read is None:
        truth = _truth_of_flag(reader, node, position, positive)
        return truth if truth is not None else (Clause(node, position, positive),)
    kind, x = read
    known = decided(kind, x)
    if known is not None:
        return ALWAYS if known is positive else NEVER
    clause = Clause(node, position, True, (kind, tuple(x.items())))
    return (clause if positive else negated(clause),)


def _truth_of_flag(reader: Integers, node: Node, position: Position, positive: bool) -> Conjunction:
    """`flag == 0`, `flag != 0`, `flag > 0.5` and the like, where flag is a boolean that was made a
    number."""
    value, bound = node.args[0], scalar_value(node.args[1])
    if not isinstance(value, Node) or bound is None:
        return None
    flag = two_valued(reader, value, broadcast(value, position))
    if flag is None:
        return None
    test = {
        "le": lambda v: v <= bound,
        "lt": lambda v: v < bound,
        "ge": lambda v: v >= bound,
        "gt": lambda v: v > bound,
        "eq": lambda v: v == bound,
        "ne": lambda v: v != bound,
    }[COMPARISONS[node.target]]
    if test(flag.kept) == test(flag.hidden):
        return None
    if test(flag.kept) is not positive:
        flag = flipped(flag)
    return (Clause(node, position, positive),) if flag is None else flag.clauses


def _chosen(reader: Integers, node: Node, position: Position, positive: bool) -> Conjunction:
    """`where(c, a, b)` of booleans, where a or b is constant: `c and a`, `not c and b`."""
    c, a, b = node.args
    whole = (Clause(reader.values.first(node), position, positive),)
    if not isinstance(c, Node):
        return whole
    for flag, other, fixed in ((True, a, scalar_value(b)), (False, b, scalar_value(a))):
        if fixed is None or bool(fixed) is positive:
            continue
        first = conjunction(reader, c, broadcast(c, position), flag)
        if isinstance(other, Node) and scalar_value(other) is None:
            second = conjunction(reader, other, broadcast(other, position), positive)
        else:
            second = ALWAYS if bool(scalar_value(other)) is positive else NEVER
        if first is NEVER or second is NEVER:
            return NEVER
        return (*first, *second)
    return whole


@dataclass(frozen=True)
class TwoValued:
    """`kept` where all clauses hold, `hidden` elsewhere."""

    clauses: tuple[Clause, ...]
    kept: float
    hidden: float


def flipped(flag: TwoValued) -> TwoValued | None:
    """The same element with its two values told apart the other way round; only a single clause can
    be negated."""
    if len(flag.clauses) != 1:
        return None
    (clause,) = flag.clauses
    return TwoValued((negated(clause),), flag.hidden, flag.kept)


def negated(clause: Clause) -> Clause:
    if clause.comparison is None:
        return replace(clause, positive=not clause.positive)
    kind, x = clause.comparison[0], clause.linear
    if kind == "ge":  # not (x >= 0) is -x - 1 >= 0
        x = combine(constant(-1), x, -1)
    else:
        kind = "eq" if kind == "ne" else "ne"
    return replace(clause, positive=not clause.positive, comparison=(kind, tuple(x.items())))


def two_valued(reader: Integers, node: Node, position: Position) -> TwoValued | None:
    """A float (or number) element that takes two values, told apart by a conjunction."""
    constant = scalar_value(node)
    if constant is not None:
        return TwoValued(ALWAYS, constant, constant)
    if node.op != "call_function":
        return None
    val = node.meta["val"]
    if val.dtype is torch.bool:
        read = conjunction(reader, node, position)
        return None if read is NEVER else TwoValued(read, 1.0, 0.0)
    if node.target is aten.where.self:
        return _two_valued_where(reader, node, position)
    if node.target is prims.convert_element_type.default:
        source = node.args[0]
        inner = two_valued(reader, source, position)  # type: ignore[arg-type]
        return None if inner is None else _mapped(inner, lambda v: as_dtype(v, val.dtype))
    if node.target in ARITHMETIC:
        return _two_valued_arithmetic(reader, node, position)
    back = step(node, position)
    return None if back is None else two_valued(reader, *back)


def _mapped(x: TwoValued, change) -> TwoValued:  # type: ignore[no-untyped-def]
    return TwoValued(x.clauses, change(x.kept), change(x.hidden))


ARITHMETIC = {
    aten.mul.Tensor: lambda a, b: a * b,
    aten.add.Tensor: lambda a, b: a + b,
    aten.sub.Tensor: lambda a, b: a - b,
    aten.rsub.Scalar: lambda a, b: b - a,
}


def _two_valued_arithmetic(reader: Integers, node: Node, position: Position) -> TwoValued | None:
    if node.kwargs.get("alpha", 1) != 1:
        return None
    read: list[TwoValued] = []
    for value in node.args[:2]:
        constant = scalar_value(value)
        if constant is not None:
            part = TwoValued(ALWAYS, constant, constant)
        elif isinstance(value, Node):
            found = two_valued(reader, value, broadcast(value, position))
            if found is None:
                return None
            part = found
        else:
            return None
        read.append(part)
    a, b = read
    if a.clauses and b.clauses and a.clauses != b.clauses:
        return None
    op, dtype = ARITHMETIC[node.target], node.meta["val"].dtype
    return TwoValued(
        a.clauses or b.clauses,
        as_dtype(op(a.kept, b.kept), dtype),
        as_dtype(op(a.hidden, b.hidden), dtype),
    )


def _two_valued_where(reader: Integers, node: Node, position: Position) -> TwoValued | None:
    """`where(c, a, b)`; a or b may itself be two-valued if their hidden values agree (masks laid
    over each other)."""
    c, a, b = node.args
    if not isinstance(c, Node):
        return None
    sides: list[TwoValued | None] = []
    for value in (a, b):
        constant = scalar_value(value)
        if constant is not None:
            sides.append(TwoValued(ALWAYS, constant, constant))
        elif isinstance(value, Node):
            sides.append(two_valued(reader, value, broadcast(value, position)))
        else:
            sides.append(None)
    yes, no = sides
    if yes is None or no is None or (yes.clauses and no.clauses):
        return None
    at = broadcast(c, position)
    if no.clauses:
        yes, no, flag = no, yes, False
    else:
        flag = True
    if not yes.clauses and abs(yes.kept) > abs(no.kept):
        yes, no, flag = no, yes, not flag  # the smaller value is the kept one
    condition = conjunction(reader, c, at, flag)
    if condition is NEVER:
        return no
    if {_meaning(c) for c in yes.clauses} <= {_meaning(c) for c in condition}:
        return TwoValued(condition, yes.kept, no.kept)
    if yes.hidden != no.kept:
        return None
    return TwoValued((*condition, *yes.clauses), yes.kept, no.kept)


def _meaning(clause: Clause) -> object:
    """What a clause says, wherever it is computed."""
    if clause.comparison is not None:
        return (clause.comparison[0], frozenset(clause.comparison[1]))
    return (clause.node, clause.position, clause.positive)

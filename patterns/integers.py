"""Reads integer tensors that a mask is made of: positions, cache offsets, document numbers.

An element is a `Linear`: a sum of digits and loaded elements with whole coefficients, e.g. `i - j +
3`. `iota` is its own position, a comparison becomes a predicate (predicates.py), and what is not
known is an element that is loaded.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

from .axes import Chosen, Digit, Fixed, Place, Position, Size, product, same, shape_of, size_of
from .moves import broadcast, step
from .terms import Atom
from .values import ValueNumbers, scalar_value

aten, prims = torch.ops.aten, torch.ops.prims
Node = torch.fx.Node

WIDE = (torch.int64, torch.int32, torch.bool)

Linear: TypeAlias = dict[Any, Size]  # Digit, Atom or () (the constant) -> coefficient


def constant(value: Size) -> Linear:
    return {} if same(value, 0) else {(): value}


def combine(a: Linear, b: Linear, factor: Size = 1) -> Linear:
    out = dict(a)
    for key, coefficient in b.items():
        total = out.get(key, 0) + factor * coefficient
        if same(total, 0):
            out.pop(key, None)
        else:
            out[key] = total
    return out


def equal(a: Linear, b: Linear) -> bool:
    return not combine(a, b, -1)


def is_constant(a: Linear) -> bool:
    return all(key == () for key in a)


def of_place(place: Place) -> Linear:
    """The position that a place means, as a number."""
    out = constant(place.offset)
    digits = place.digits
    for k, digit in enumerate(digits):
        weight = product(d.size for d in digits[k + 1 :])
        if isinstance(digit, Fixed):
            (value,) = set(digit.values)
            out = combine(out, constant(value), weight)
        elif isinstance(digit, Chosen):
            out = combine(out, constant(digit.index), weight)
        else:
            out = combine(out, {digit: weight})
    return out


def to_place(value: Linear, size: Size) -> Place | None:
    """The place that a number means, where it is one digit plus an offset."""
    digits = [key for key in value if key != ()]
    offset = value.get((), 0)
    if not digits:
        return Place() if same(size, 1) else Place((), offset)
    if len(digits) > 1 or not isinstance(digits[0], Digit) or not same(value[digits[0]], 1):
        return None
    return Place((digits[0],), offset)


class Integers:
    """Reads integer (and boolean, as 0 and 1) elements of one graph."""

    def __init__(self, values: ValueNumbers) -> None:
        self.values = values
        self.known: dict[tuple[Node, Position], Linear] = values.known_integers

    def at(self, node: Node, position: Position) -> Linear:
        key = (node, position)
        if key not in self.known:
            self.known[key] = self._read(node, position)
        return self.known[key]

    def operand(self, value: Any, position: Position) -> Linear | None:
        if isinstance(value, bool | int):
            return constant(int(value))
        if not isinstance(value, Node):
            return None
        val = value.meta.get("val")
        if isinstance(val, torch.SymInt):
            return constant(size_of(val))
        if not isinstance(val, torch.Tensor) or val.dtype.is_floating_point:
            return None
        return self.at(value, broadcast(value, position))

    def load(self, node: Node, position: Position) -> Linear:
        return {Atom("load", self.values.first(node), position): 1}

    def _read(self, node: Node, position: Position) -> Linear:
        number = scalar_value(node)
        if number is not None and float(number).is_integer():
            return constant(int(number))
        if node.op != "call_function":
            return self.load(node, position)
        back = step(node, position)
        if back is not None:
            return self.at(*back)
        if node.meta["val"].dtype not in WIDE:
            return self.load(node, position)  # narrower numbers wrap around
        found = self._compute(node, position)
        return self.load(node, position) if found is None else found

    def _compute(self, node: Node, position: Position) -> Linear | None:
        op, args = node.target, node.args
        if op is prims.iota.default:
            start, stride = node.kwargs["start"], node.kwargs["step"]
            first, by = self.operand(start, ()), self.operand(stride, ())
            if first is None or by is None or not is_constant(by):
                return None
            return combine(first, of_place(position[0]), by.get((), 0))
        if op is prims.convert_element_type.default:
            source = args[0]
            val = source.meta.get("val")  # type: ignore[union-attr]
            if isinstance(val, torch.Tensor) and not val.dtype.is_floating_point:
                truth = node.meta["val"].dtype is torch.bool and val.dtype is not torch.bool
                return None if truth else self.at(source, position)  # type: ignore[arg-type]
            return None
        if op in (aten.add.Tensor, aten.sub.Tensor) and node.kwargs.get("alpha", 1) == 1:
            a, b = self.operand(args[0], position), self.operand(args[1], position)
            sign = -1 if op is aten.sub.Tensor else 1
            return None if a is None or b is None else combine(a, b, sign)
        if op is aten.mul.Tensor:
            a, b = self.operand(args[0], position), self.operand(args[1], position)
            if a is None or b is None:
                return None
            a, b = (a, b) if is_constant(b) else (b, a)
            return combine({}, a, b.get((), 0)) if is_constant(b) else None
        if op is aten.neg.default:
            return combine({}, self.at(args[0], position), -1)  # type: ignore[arg-type]
        if op is aten.cat.default:
            return self._cat(node, position)
        if op is aten.index.Tensor:
            found = indexed(self, node, position)
            return None if found is None else self.at(*found)
        if op is aten.cumsum.default:
            zero = self.at(args[0], position)  # type: ignore[arg-type]
            return {} if zero == {} else None
        if op in COMPARISONS:
            truth = compared(self, node, position)
            known = None if truth is None else decided(*truth)
            return None if known is None else constant(int(known))
        return None

    def _cat(self, node: Node, position: Position) -> Linear | None:
        """One formula for all parts, where there is one; a part of one element need only agree at
        its own position."""
        parts: list[Node] = list(node.args[0])  # type: ignore[call-overload]
        dim = (node.args[1] if len(node.args) > 1 else 0) % len(position)  # type: ignore[operator]
        place = position[dim]
        start: Size = 0
        formula: Linear | None = None
        points: list[tuple[Size, Linear]] = []
        for part in parts:
            n = shape_of(part)[dim]
            if same(n, 1):
                at = (*position[:dim], Place(), *position[dim + 1 :])
                points.append((start, self.at(part, at)))
            else:
                moved = Place(place.digits, place.offset - start)
                read = self.at(part, (*position[:dim], moved, *position[dim + 1 :]))
                if formula is not None and not equal(formula, read):
                    return None
                formula = read
            start = start + n
        if formula is None or len(place.digits) != 1 or not isinstance(place.digits[0], Digit):
            return None
        digit = place.digits[0]
        for at, value in points:
            here = {k: c for k, c in formula.items() if k != digit}
            here = combine(here, constant(at - place.offset), formula.get(digit, 0))
            if not equal(here, value) or _mentions(formula, digit):
                return None
        return formula


def _mentions(formula: Linear, digit: Digit) -> bool:
    """Whether a loaded element depends on the digit: then a value at one position says nothing of
    the formula."""
    return any(isinstance(key, Atom) and repr(digit) in repr(key.position) for key in formula)


def indexed(reader: Integers, node: Node, position: Position) -> tuple[Node, Position] | None:
    """`x[index, ...]`: where in x the element lies, if the indices can be read as positions."""
    source, indices = node.args[0], list(node.args[1])  # type: ignore[call-overload]
    shape = shape_of(source)  # type: ignore[arg-type]
    given = [k for k, index in enumerate(indices) if index is not None]
    if not given or given != list(range(given[0], given[-1] + 1)):
        return None
    wide = max(len(shape_of(indices[k])) for k in given)
    head, spread = position[: given[0]], position[given[0] : given[0] + wide]
    tail = position[given[0] + wide :]
    places: list[Place] = []
    for k in given:
        if indices[k].meta["val"].dtype is torch.bool:
            return None
        place = to_place(reader.at(indices[k], broadcast(indices[k], spread)), shape[k])
        if place is None:
            return None
        places.append(place)
    return source, (*head, *places, *tail)  # type: ignore[return-value]


COMPARISONS = {
    aten.le.Tensor: "le",
    aten.le.Scalar: "le",
    aten.lt.Tensor: "lt",
    aten.lt.Scalar: "lt",
    aten.ge.Tensor: "ge",
    aten.ge.Scalar: "ge",
    aten.gt.Tensor: "gt",
    aten.gt.Scalar: "gt",
    aten.eq.Tensor: "eq",
    aten.eq.Scalar: "eq",
    aten.ne.Tensor: "ne",
    aten.ne.Scalar: "ne",
}


def compared(reader: Integers, node: Node, position: Position) -> tuple[str, Linear] | None:
    """("ge" | "eq" | "ne", x): the comparison of whole numbers as x >= 0, x == 0 or x != 0."""
    a = reader.operand(node.args[0], position)
    b = reader.operand(node.args[1], position)
    if a is None or b is None:
        return None
    kind = COMPARISONS[node.target]
    if kind in ("eq", "ne"):
        return kind, combine(a, b, -1)
    low, high = (a, b) if kind in ("le", "lt") else (b, a)
    return "ge", combine(combine(high, low, -1), constant(1 if kind in ("lt", "gt") else 0), -1)


def decided(kind: str, x: Linear) -> bool | None:
    """The truth of a comparison that does not depend on anything."""
    if not is_constant(x) or not isinstance(x.get((), 0), int):
        return None
    value = x.get((), 0)
    return {"ge": value >= 0, "eq": value == 0, "ne": value != 0}[kind]

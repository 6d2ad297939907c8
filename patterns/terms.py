"""What an element is: a sum of products of atoms, with number coefficients.

`Terms` maps a sorted product of atoms to its coefficient: `c0*x0 - s0*x4` is `{(c0, x0): 1, (s0,
x4): -1}`. An atom is an element of a tensor that is not read further (`load`), of a coefficient
table (`table`), or a function of terms (`tanh`, `sum` over an axis, `where` as an indicator). Equal
values have equal terms, whatever the spelling.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from .axes import Chosen, Digit, Place, Position, Size, axes_in, same, shape_of
from .reshapes import parts_of


@dataclass(frozen=True)
class Atom:
    kind: str
    node: torch.fx.Node | None = None
    position: Position = ()
    inner: Any = None
    order: tuple[str, str, int] = field(init=False, compare=False, repr=False, default=("", "", 0))

    def __post_init__(self) -> None:
        name = self.node.name if self.node is not None else ""
        element = hash((self.position, self.inner))
        object.__setattr__(self, "order", (self.kind, name, element))
        object.__setattr__(self, "_hash", hash((self.kind, self.node, element)))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined]


Terms: TypeAlias = dict[tuple[Atom, ...], float]


def number(value: float) -> Terms:
    return {(): float(value)} if value else {}


def one(atom: Atom) -> Terms:
    return {(atom,): 1.0}


def add(a: Terms, b: Terms, sign: float = 1.0) -> Terms:
    out = dict(a)
    for atoms, coefficient in b.items():
        total = out.get(atoms, 0.0) + sign * coefficient
        if total:
            out[atoms] = total
        else:
            out.pop(atoms, None)
    return out


def multiply(a: Terms, b: Terms) -> Terms:
    out: Terms = {}
    for x, p in a.items():
        for y, q in b.items():
            atoms = _cancelled(tuple(sorted(x + y, key=lambda atom: atom.order)))
            out[atoms] = out.get(atoms, 0.0) + p * q
    return {atoms: c for atoms, c in out.items() if c}


def _cancelled(atoms: tuple[Atom, ...]) -> tuple[Atom, ...]:
    """The product without elements that it is also divided by."""
    out = list(atoms)
    for divisor in (atom for atom in atoms if atom.kind == "inverse"):
        divided = Atom("load", divisor.node, divisor.position)
        if divided in out:
            out.remove(divided)
            out.remove(divisor)
    return tuple(out)


def scaled(a: Terms, factor: float) -> Terms:
    return {atoms: c * factor for atoms, c in a.items()} if factor else {}


def frozen(a: Terms) -> tuple[tuple[tuple[Atom, ...], float], ...]:
    return tuple(sorted(a.items(), key=lambda item: tuple(atom.order for atom in item[0])))


def near(a: float, b: float) -> bool:
    """Equal up to the rounding of the numbers themselves (a scale may be split over several
    factors)."""
    return abs(a - b) <= 1e-6 * abs(b)


def ratio(a: Terms, b: Terms) -> float | None:
    """The number that b has to be multiplied by to be a, where there is one."""
    if a.keys() != b.keys() or not b:
        return None
    first = next(iter(b))
    found = a[first] / b[first]
    if not all(near(a[key], found * b[key]) for key in b):
        return None
    return 1.0 if near(found, 1.0) else found


def summed(a: Terms, axes: tuple[str, ...], is_one: Callable[[Atom, str], bool]) -> Terms:
    """The sum of `a` over named axes: what does not depend on them stands outside the sum.

    is_one: whether an atom alone sums to one over an axis, as softmax weights do. A factor `inside`
    (an element that is zero outside a range of the axis) narrows the sum to that range.
    """
    out: Terms = {}
    for atoms, coefficient in a.items():
        narrowed = _narrowed(atoms, axes)
        inside = tuple(atom for atom in narrowed if depends(atom, axes))
        outside = tuple(atom for atom in narrowed if atom not in inside)
        if not inside:
            raise ArithmeticError("a sum over an axis that its operand does not have")
        if len(inside) == 1 and len(axes) == 1 and is_one(inside[0], axes[0]):
            key = outside
        else:
            total = _sum_of(inside, axes)
            key = tuple(sorted((*outside, total), key=lambda atom: atom.order))
        out[key] = out.get(key, 0.0) + coefficient
    return {atoms: c for atoms, c in out.items() if c}


def gathered(read: Terms) -> Terms:
    """Terms that differ only in an index, of which each value occurs, as one sum over an axis: what
    autograd makes of a tensor that was copied by stacking it."""
    for atoms, coefficient in read.items():
        for atom in atoms:
            for axis in _indices(atom):
                others = [(_with(atoms, atom, axis, k), k) for k in range(axis[2].size)]
                if all(read.get(key) == coefficient for key, _ in others):
                    rest = {a: c for a, c in read.items() if a not in [key for key, _ in others]}
                    run = _replaced(atom, axis, Digit("~", 1, axis[2].size))
                    total = _sum_of((run,), ("~",))
                    key = [a for a in atoms if a is not atom]
                    joined = tuple(sorted((*key, total), key=lambda a: a.order))
                    return gathered(add(rest, {joined: coefficient}))
    return read


def _indices(atom: Atom) -> list[tuple[int, int, Chosen]]:
    """(dim, digit, index) for every chosen index of an element."""
    if atom.kind != "load" or atom.node is None:
        return []
    out: list[tuple[int, int, Chosen]] = []
    for dim, (place, size) in enumerate(zip(atom.position, shape_of(atom.node), strict=True)):
        parts = parts_of(place, size) or ()
        out += [(dim, k, d) for k, d in enumerate(parts) if isinstance(d, Chosen) and d.size > 1]
    return out


def _with(
    atoms: tuple[Atom, ...], atom: Atom, axis: tuple[int, int, Chosen], index: int
) -> tuple[Atom, ...]:
    other = _replaced(atom, axis, Chosen(index, axis[2].size))
    return tuple(sorted((other if a is atom else a for a in atoms), key=lambda a: a.order))


def _replaced(atom: Atom, axis: tuple[int, int, Chosen], digit: Digit | Chosen) -> Atom:
    """The element with another digit for the index, written as the place was."""
    dim, k, own = axis
    assert atom.node is not None
    place, size = atom.position[dim], shape_of(atom.node)[dim]
    parts = parts_of(place, size)
    assert parts is not None
    if parts != place.digits and isinstance(digit, Chosen):
        moved = Place(place.digits, place.offset + (digit.index - own.index) * place.extent)
    else:
        moved = Place((*parts[:k], digit, *parts[k + 1 :]))
    position = (*atom.position[:dim], moved, *atom.position[dim + 1 :])
    return Atom(atom.kind, atom.node, position, atom.inner)


def _sum_of(inside: tuple[Atom, ...], axes: tuple[str, ...]) -> Atom:
    """The sum with its axes named by how many sums it holds, so that equal sums are equal wherever
    they stand."""
    height = 1 + max((_height(atom) for atom in inside), default=-1)
    named = {axis: f"~{height}.{n}" for n, axis in enumerate(axes)}
    renamed = tuple(sorted((_renamed(a, named) for a in inside), key=lambda atom: atom.order))
    return Atom("sum", inner=(tuple(named.values()), renamed))


def _height(atom: Atom) -> int:
    if atom.kind != "sum":
        return -1
    return 1 + max((_height(a) for a in atom.inner[1]), default=-1)


def _renamed(atom: Atom, names: dict[str, str]) -> Atom:
    position = tuple(
        Place(
            tuple(
                Digit(names[d.axis], d.stride, d.size)
                if isinstance(d, Digit) and d.axis in names
                else d
                for d in place.digits
            ),
            place.offset,
        )
        for place in atom.position
    )
    inner = atom.inner
    if atom.kind == "sum":
        inner = (inner[0], tuple(_renamed(a, names) for a in inner[1]))
    return Atom(atom.kind, atom.node, position, inner)


def _narrowed(atoms: tuple[Atom, ...], axes: tuple[str, ...]) -> tuple[Atom, ...]:
    for flag in atoms:
        if flag.kind == "inside" and flag.inner[0] in axes:
            axis, start, length = flag.inner
            rest = tuple(_shifted(atom, axis, start, length) for atom in atoms if atom is not flag)
            return tuple(sorted(rest, key=lambda atom: atom.order))
    return atoms


def _shifted(atom: Atom, axis: str, start: Size, length: Size) -> Atom:
    """The atom with the axis running over the range only."""
    position = tuple(
        Place((Digit(axis, 1, length),), place.offset + start)
        if len(place.digits) == 1
        and isinstance(d := place.digits[0], Digit)
        and d.axis == axis
        and not same(d.size, length)
        else place
        for place in atom.position
    )
    return Atom(atom.kind, atom.node, position, atom.inner)


def depends(atom: Atom, axes: tuple[str, ...]) -> bool:
    if axes_in(atom.position) & set(axes):
        return True
    if atom.kind == "inside":
        return atom.inner[0] in axes
    if atom.kind == "sum":
        return any(depends(a, axes) for a in atom.inner[1])
    if atom.kind == "tanh":
        return any(depends(a, axes) for atoms, _ in atom.inner for a in atoms)
    return False

"""What an element is: a sum of products of atoms, with number coefficients.

`Terms` maps a sorted product of atoms to its coefficient: `c0*x0 - s0*x4` is `{(c0, x0): 1, (s0, x4): -1}`. An atom is an
element of a tensor that is not read further (`load`), of a coefficient table (`table`), or a function of terms (`tanh`,
`sum` over an axis, `where` as an indicator). Equal values have equal terms, whatever the spelling.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from .axes import Position, axes_in


@dataclass(frozen=True)
class Atom:
    kind: str
    node: torch.fx.Node | None = None
    position: Position = ()
    inner: Any = None
    order: tuple[str, str, int] = field(init=False, compare=False, repr=False, default=("", "", 0))

    def __post_init__(self) -> None:
        name = self.node.name if self.node is not None else ""
        object.__setattr__(self, "order", (self.kind, name, hash((self.position, self.inner))))


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
            atoms = tuple(sorted(x + y, key=lambda atom: atom.order))
            out[atoms] = out.get(atoms, 0.0) + p * q
    return {atoms: c for atoms, c in out.items() if c}


def scaled(a: Terms, factor: float) -> Terms:
    return {atoms: c * factor for atoms, c in a.items()} if factor else {}


def frozen(a: Terms) -> tuple[tuple[tuple[Atom, ...], float], ...]:
    return tuple(sorted(a.items(), key=lambda item: tuple(atom.order for atom in item[0])))


def close(a: Terms, b: Terms) -> bool:
    """Equal up to the rounding of the numbers themselves (a scale may be split over several factors)."""
    return a.keys() == b.keys() and all(abs(a[k] - b[k]) <= 1e-6 * abs(b[k]) for k in b)


def summed(a: Terms, axes: tuple[str, ...]) -> Terms:
    """The sum of `a` over named axes: what does not depend on them stands outside the sum."""
    out: Terms = {}
    for atoms, coefficient in a.items():
        inside = tuple(atom for atom in atoms if depends(atom, axes))
        if not inside:
            raise ArithmeticError("a sum over an axis that its operand does not have")
        outside = tuple(atom for atom in atoms if atom not in inside)
        total = Atom("sum", inner=(axes, inside))
        key = tuple(sorted((*outside, total), key=lambda atom: atom.order))
        out[key] = out.get(key, 0.0) + coefficient
    return out


def depends(atom: Atom, axes: tuple[str, ...]) -> bool:
    if axes_in(atom.position) & set(axes):
        return True
    if atom.kind == "sum":
        return any(depends(a, axes) for a in atom.inner[1])
    if atom.kind == "tanh":
        return any(depends(a, axes) for atoms, _ in atom.inner for a in atoms)
    return False

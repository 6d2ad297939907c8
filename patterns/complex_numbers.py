"""Reads products of complex numbers as what they are in pairs of lanes.

Spellings seen in the wild, where two neighbouring lanes are one complex number:

    Llama as published, Llama 4, DeepSeek v2, Lumina:
        xc = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        torch.view_as_real(xc * freqs).flatten(-2).type_as(x)
    with `freqs` a table that is given, `torch.polar(ones, angles)`, `torch.complex(cos, sin)` or
    `view_as_complex` of a cache [..., 2], and its conjugate in the backward.

The table's real part is the cosine, its imaginary part the sine. A position in a complex tensor has
one place more than the tensor has dims: 0 is the real part, 1 the imaginary, as in `view_as_real`.
What else is done with complex numbers ends the reading.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from . import terms
from .axes import Place, Position
from .moves import broadcast, numbers, step
from .split import same_owner
from .terms import Atom, Terms

if TYPE_CHECKING:
    from .elements import Elements

aten = torch.ops.aten
Node = torch.fx.Node
CONJUGATES = (aten._conj.default, aten.conj_physical.default)


def is_complex(node: Any) -> bool:
    value = node.meta.get("val") if isinstance(node, Node) else None
    return isinstance(value, torch.Tensor) and value.dtype.is_complex


def view_as_real(reader: Elements, node: Node, position: Position) -> Terms | None:
    place = position[-1]
    if not place.is_fixed or not isinstance(place.offset, int):
        return None
    parts = list(numbers(place)) if place.digits else [place.offset]
    same_owner(parts)
    return _part(reader, node.args[0], position[:-1], parts[0])


def _part(reader: Elements, node: Any, position: Position, which: int) -> Terms | None:
    """The real (0) or imaginary (1) part of an element; None where it cannot be told."""
    if not isinstance(node, Node):
        return None
    if not is_complex(node):
        return reader.at(node, position) if which == 0 else {}
    back = step(node, position)
    if back is not None:
        return _part(reader, *back, which)
    op, args = node.target, node.args
    if op is aten.view_as_complex.default:
        return reader.at(args[0], (*position, Place((), which)))  # type: ignore[arg-type]
    if op is aten.complex.default:
        return reader.operand(node, args[which], position)
    if op in CONJUGATES:
        read = _part(reader, args[0], position, which)
        return terms.scaled(read, -1.0) if which and read is not None else read
    if op is aten.mul.Tensor:
        return _product(reader, args[0], args[1], position, which)
    return terms.one(_atom(reader, "load", node, position, which))


def _product(reader: Elements, a: Any, b: Any, position: Position, which: int) -> Terms | None:
    """Data times a table, either way round."""
    if not is_complex(a) or not is_complex(b):
        return None
    at_a, at_b = broadcast(a, position), broadcast(b, position)
    for data, at_data, table, at_table in ((a, at_a, b, at_b), (b, at_b, a, at_a)):
        if not reader.is_table(table, at_table, data, at_data):
            continue
        x = [_part(reader, data, at_data, k) for k in (0, 1)]
        t = [_table(reader, table, at_table, k) for k in (0, 1)]
        if any(read is None for read in (*x, *t)):
            return None
        first = terms.multiply(x[0], t[which])  # type: ignore[arg-type]
        second = terms.multiply(x[1], t[1 - which])  # type: ignore[arg-type]
        return terms.add(first, second, 1.0 if which else -1.0)
    return None


def _table(reader: Elements, node: Node, position: Position, which: int) -> Terms | None:
    """A part of an element of a coefficient table, from the real tensor that it is made of, where
    there is one."""
    sign = 1.0
    while True:
        back = step(node, position, casts=False)
        if back is not None:
            node, position = back
        elif node.target in CONJUGATES:
            node, sign = node.args[0], -sign if which else sign  # type: ignore[assignment]
        else:
            break
    if node.target is aten.view_as_complex.default:
        read = reader.table(node.args[0], (*position, Place((), which)))  # type: ignore[arg-type]
    elif node.target is aten.complex.default:
        part: Any = node.args[which]
        read = reader.table(part, broadcast(part, position))
    elif node.meta["val"].is_conj():  # no view of it shows the parts
        return None
    else:
        read = terms.one(_atom(reader, "table", node, position, which))
    return terms.scaled(read, sign)


def _atom(reader: Elements, kind: str, node: Node, position: Position, which: int) -> Atom:
    return Atom(kind, reader.values.first(node), (*position, Place((), which)))

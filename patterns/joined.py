"""Elements of tensors that are joined of others or written into: cat, and the scatters that slice
assignment becomes.

As in elements.py, None means that the element is read no further.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from . import terms
from .axes import Digit, Place, Position, Size, same, shape_of
from .moves import fixed, numbers
from .split import same_owner
from .terms import Atom, Terms
from .values import scalar_value

if TYPE_CHECKING:
    from .elements import Elements

Node = torch.fx.Node


def cat(reader: Elements, node: Node, position: Position) -> Terms | None:
    parts: list[Node] = [n for n in node.args[0] if not _is_empty(n)]  # type: ignore[union-attr]
    dim = (node.args[1] if len(node.args) > 1 else 0) % len(position)  # type: ignore[operator]
    place = position[dim]
    sizes = [shape_of(n)[dim] for n in parts]
    if len(parts) == 1:
        return reader.at(parts[0], position)
    if not place.is_fixed or not all(isinstance(n, int) for n in sizes):
        return None
    values = numbers(place) if place.digits else (int(place.offset),)
    ends = [sum(sizes[: k + 1]) for k in range(len(sizes))]
    owners = [next(k for k, end in enumerate(ends) if v < end) for v in values]
    same_owner(owners)
    k = owners[0]
    start = ends[k] - sizes[k]
    inner = (
        fixed(tuple(v - start for v in values), sizes[k])
        if place.digits
        else Place((), values[0] - start)
    )
    if sizes[k] == 1:
        inner = Place()
    return reader.at(parts[k], (*position[:dim], inner, *position[dim + 1 :]))


def _is_empty(node: Node) -> bool:
    return any(same(n, 0) for n in shape_of(node))


def slice_scatter(reader: Elements, node: Node, position: Position) -> Terms | None:
    base, source = node.args[0], node.args[1]
    args = (*node.args, *(0, None, None, 1)[len(node.args) - 2 :])
    rank = len(position)
    dim, stride = args[2] % rank, args[5]  # type: ignore[operator]
    n, start, end = shape_of(node)[dim], args[3] or 0, args[4]
    place = position[dim]
    length = shape_of(source)[dim]  # type: ignore[arg-type]
    if same(length, n):
        return reader.at(source, position)  # type: ignore[arg-type]
    if not place.is_fixed and stride == 1 and isinstance(start, int) and start >= 0:
        return _scattered_run(reader, base, source, position, dim, start, length)
    if not isinstance(n, int) or not isinstance(start, int) or not place.is_fixed:
        return None
    if not (end is None or isinstance(end, int)) or not isinstance(stride, int):
        return None
    taken = range(*slice(start, end, stride).indices(n))
    values = numbers(place) if place.digits else (int(place.offset),)
    same_owner([v in taken for v in values])
    if values[0] not in taken:
        return reader.at(base, position)  # type: ignore[arg-type]
    lanes = tuple(taken.index(v) for v in values)
    inner = fixed(lanes, len(taken)) if place.digits else Place((), lanes[0])
    if len(taken) == 1:
        inner = Place()
    return reader.at(source, (*position[:dim], inner, *position[dim + 1 :]))  # type: ignore[arg-type]


def _scattered_run(
    reader: Elements, base: Any, source: Any, position: Position, dim: int, start: int, length: Size
) -> Terms | None:
    """A run of `source` on a base, along an axis that is no head dim: wholly in the run, or all of
    it on zeros."""
    place = position[dim]
    if same(place.offset, start) and same(place.extent, length):
        return reader.at(source, (*position[:dim], Place(place.digits), *position[dim + 1 :]))
    if not reader.algebra or scalar_value(base) != 0.0 or len(place.digits) != 1:
        return None
    digit = place.digits[0]
    if not isinstance(digit, Digit) or not same(place.extent, shape_of(base)[dim]):
        return None
    run = Place((Digit(digit.axis, 1, length),))
    flag = terms.one(Atom("inside", inner=(digit.axis, start, length)))
    return terms.multiply(reader.at(source, (*position[:dim], run, *position[dim + 1 :])), flag)


def scatter(reader: Elements, node: Node, position: Position) -> Terms | None:
    """`scatter(base, dim, index, src)` where src is zero: the base, wherever the index points."""
    base, dim, _, source = node.args[:4]
    if not reader.algebra or not isinstance(source, Node) or not isinstance(dim, int):
        return None
    dim %= len(position)
    if not same(shape_of(source)[dim], 1):
        return None
    added = reader.at(source, (*position[:dim], Place(), *position[dim + 1 :]))
    return reader.at(base, position) if added == {} else None  # type: ignore[arg-type]


def select_scatter(reader: Elements, node: Node, position: Position) -> Terms | None:
    base, source, dim, index = node.args[:4]
    dim = dim % len(position)  # type: ignore[operator]
    n, place = shape_of(node)[dim], position[dim]
    if not isinstance(n, int) or not isinstance(index, int) or not place.is_fixed:
        return None
    values = numbers(place) if place.digits else (int(place.offset),)
    same_owner([v == index % n for v in values])
    if values[0] != index % n:
        return reader.at(base, position)  # type: ignore[arg-type]
    return reader.at(source, position[:dim] + position[dim + 1 :])  # type: ignore[arg-type]

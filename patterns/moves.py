"""Follows one element back through ops that only move elements: views, permutes, slices, copies.

`step` goes one op back. With `broadcast` it is all that tells where an element of a rearranged
tensor comes from.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from .axes import (
    FIRST,
    Fixed,
    Place,
    Position,
    Size,
    Unread,
    quotient,
    same,
    shape_of,
    size_of,
    sizes_of,
)
from .reshapes import reshaped
from .values import is_float

aten, prims = torch.ops.aten, torch.ops.prims
Node = torch.fx.Node


VIEWS = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}
COPIES = {
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
    aten.contiguous.default,
    aten.lift_fresh_copy.default,
}
DIMS = {aten.unsqueeze.default, *VIEWS}  # what puts a dim where copies are joined
SQUEEZES = {aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default}


Back: TypeAlias = tuple[Node, Position]


def step(node: Node, position: Position, casts: bool = True) -> Back | None:
    """One op back, for ops whose every element is one element of their first operand; None for any
    other op."""
    rule = STEPS.get(node.target)
    if rule is not None:
        source: Any = node.args[0]
        is_tensor = isinstance(source, Node) and isinstance(source.meta.get("val"), torch.Tensor)
        return rule(node, source, position) if is_tensor else None
    if node.target is prims.convert_element_type.default:
        return (node.args[0], position) if casts and _keeps_float(node) else None  # type: ignore[return-value]
    if node.target is aten.cat.default:
        return _step_copies(node, position)
    if node.target is aten.copy.default:
        return _step_copied(node, position, casts)
    return _step_out_of_list(node, position)


def _step_same(node: Node, source: Node, position: Position) -> Back:
    return source, position


def _step_copied(node: Node, position: Position, casts: bool) -> Back | None:
    """What an in-place op leaves: the copied tensor, as far as it is of the same shape."""
    copied = node.args[1]
    if not isinstance(copied, Node) or shape_of(copied) != shape_of(node):
        return None
    same_type = copied.meta["val"].dtype is node.meta["val"].dtype
    return (copied, position) if same_type or (casts and _keeps_float(node)) else None


def _step_view(node: Node, source: Node, position: Position) -> Back | None:
    try:
        return source, reshaped(position, shape_of(node), shape_of(source))
    except Unread:
        return None


def _step_permute(node: Node, source: Node, position: Position) -> Back:
    dims: Any = node.args[1]
    out = list(position)
    for place, dim in zip(position, dims, strict=True):
        out[dim] = place
    return source, tuple(out)


def _step_transpose(node: Node, source: Node, position: Position) -> Back:
    a, b = (0, 1) if node.target is aten.t.default else node.args[1:3]
    out = list(position)
    out[a], out[b] = out[b], out[a]  # type: ignore[index]
    return source, tuple(out)


def _step_unsqueeze(node: Node, source: Node, position: Position) -> Back:
    dim = node.args[1] % len(position)  # type: ignore[operator]
    return source, position[:dim] + position[dim + 1 :]


def _step_squeeze(node: Node, source: Node, position: Position) -> Back:
    return source, _unsqueezed(position, len(position), shape_of(source), node)


def _step_expand(node: Node, source: Node, position: Position) -> Back:
    return source, broadcast(source, position)


def _step_select(node: Node, source: Node, position: Position) -> Back | None:
    dim, index = node.args[1] % (len(position) + 1), node.args[2]  # type: ignore[operator]
    if not isinstance(index, int):
        return None
    n = shape_of(source)[dim]
    if index < 0:
        if not isinstance(n, int):
            return None
        index += n
    place = FIRST if same(n, 1) else Place((), index)
    return source, (*position[:dim], place, *position[dim:])


def _step_flip(node: Node, source: Node, position: Position) -> Back | None:
    shape = shape_of(source)
    dims = [d % len(shape) for d in node.args[1]]  # type: ignore[union-attr]
    if not all(position[d].is_fixed and isinstance(shape[d], int) for d in dims):
        return None
    out = list(position)
    for d in dims:
        out[d] = fixed(tuple(shape[d] - 1 - v for v in numbers(out[d])), shape[d])
    return source, tuple(out)


def _keeps_float(node: Node) -> bool:
    source = node.args[0]
    return isinstance(source, Node) and is_float(source) and is_float(node)


def _step_out_of_list(node: Node, position: Position) -> Back | None:
    """`getitem` of a split, chunk or unbind."""
    made = node.args[0] if node.target is operator.getitem else None
    if not isinstance(made, Node):
        return None
    source, which = made.args[0], node.args[1]
    if not isinstance(source, Node) or not isinstance(which, int):
        return None
    rank = len(source.meta["val"].shape)
    if made.target is aten.unbind.int:
        dim = (made.args[1] if len(made.args) > 1 else 0) % rank  # type: ignore[operator]
        n = shape_of(source)[dim]
        place = FIRST if same(n, 1) else Place((), which)
        return source, (*position[:dim], place, *position[dim:])
    if made.target in (aten.split_with_sizes.default, aten.split.Tensor):
        dim = (made.args[2] if len(made.args) > 2 else 0) % rank  # type: ignore[operator]
        sizes = [sizes_of(v)[dim] for v in made.meta["val"]]
        start: Size = 0
        for n in sizes[:which]:
            start = start + n
        return source, _moved(position, dim, start, 1, shape_of(source)[dim])
    return None


def numbers(place: Place) -> tuple[int, ...]:
    (digit,) = place.digits
    assert isinstance(digit, Fixed)
    return tuple(v + int(place.offset) for v in digit.values)


def fixed(values: tuple[int, ...], size: Size) -> Place:
    return Place((Fixed(values, int(size)),))


def _moved(position: Position, dim: int, start: Size, stride: int, size: Size) -> Position:
    """The position after undoing a slice of `dim` that starts at `start` in steps of `stride`."""
    place = position[dim]
    if place.digits and place.is_fixed and isinstance(start, int) and isinstance(size, int):
        moved = fixed(tuple(v * stride + start for v in numbers(place)), size)
    elif stride == 1:
        moved = Place(place.digits, place.offset + start)
    elif not place.digits:
        moved = Place((), place.offset * stride + start)
    else:
        raise Unread(
            f"a slice in steps of {stride} along an axis that is not the head dim, "
            "accepted steps of 1"
        )
    if not moved.digits and same(size, 1):
        moved = FIRST
    return (*position[:dim], moved, *position[dim + 1 :])


def _step_slice(node: Node, source: Node, position: Position) -> Back | None:
    shape = shape_of(source)
    args = (*node.args, *(0, None, None, 1)[len(node.args) - 1 :])
    dim = args[1] % len(shape)  # type: ignore[operator]
    start = _index(args[2] or 0)
    if start is None or not isinstance(args[4], int):
        return None
    if isinstance(start, int) and start < 0:
        start = shape[dim] + start
    if isinstance(start, int) and isinstance(shape[dim], int):
        start = min(max(start, 0), shape[dim])
    elif not same(start, 0) and not _is_within(start, shape[dim], shape_of(node)[dim]):
        return None
    try:
        return source, _moved(position, dim, start, args[4], shape[dim])
    except Unread:
        return None


def _step_pad(node: Node, source: Node, position: Position) -> Back | None:
    """Only for elements that are not padding; the widths start with the last dim."""
    pads: Any = node.args[1]
    shape = shape_of(source)
    out = list(position)
    for k in range(len(pads) // 2):
        dim, left = len(shape) - 1 - k, _index(pads[2 * k])
        if left is None:
            return None
        place, n = position[dim], shape[dim]
        if place.digits and place.is_fixed and isinstance(left, int) and isinstance(n, int):
            inside = tuple(v - left for v in numbers(place))
            if not all(0 <= v < n for v in inside):
                return None
            out[dim] = fixed(inside, n)
            continue
        start = place.offset - left
        if not same(start, 0) or not same(place.extent, n):
            return None
        out[dim] = Place(place.digits)
    return source, tuple(out)


def _is_within(start: Size, size: Size, length: Size) -> bool:
    """A symbolic start is taken as written only where start + length is the whole size: then
    nothing was clamped."""
    return same(start + length, size)


def _index(value: Any) -> Size | None:
    if isinstance(value, Node):
        value = value.meta.get("val")
    return size_of(value) if isinstance(value, int | torch.SymInt) else None


def _unsqueezed(position: Position, rank: int, shape: tuple[Size, ...], node: Node) -> Position:
    n = len(shape)
    if node.target is aten.squeeze.default:
        dims = {d for d in range(n) if same(shape[d], 1)}
    else:
        given = node.args[1]
        named = [given] if isinstance(given, int) else list(given)  # type: ignore[arg-type]
        dims = {d % n for d in named if same(shape[d % n], 1)}
    places = iter(position)
    return tuple(FIRST if d in dims else next(places) for d in range(n))


def _step_repeat(node: Node, source: Node, position: Position) -> Back | None:
    shape = shape_of(source)
    pad = len(position) - len(shape)
    out: list[Place] = []
    target = shape_of(node)
    for n, p, whole_size in zip(shape, position[pad:], target[pad:], strict=True):
        if same(n, 1):
            out.append(FIRST)
        elif same(n, whole_size):
            out.append(p)
        elif p.is_fixed and p.digits and isinstance(n, int):
            out.append(fixed(tuple(v % n for v in numbers(p)), n))
        else:
            times = quotient(whole_size, n)
            if times is None or not same(p.offset, 0):
                return None
            try:
                out.append(reshaped((p,), (whole_size,), (times, n))[1])
            except Unread:
                return None
    return source, tuple(out)


def _step_copies(node: Node, position: Position) -> Back | None:
    """A concatenation of copies of one tensor, which is its repetition, unless lanes lie along
    it."""
    parts: list[Node] = list(node.args[0])  # type: ignore[call-overload]
    place = position[(node.args[1] if len(node.args) > 1 else 0) % len(position)]  # type: ignore[operator]
    if place.is_fixed or len(parts) < 2 or not all(_alike(part, parts[0]) for part in parts):
        return None
    return _step_repeat(node, parts[0], position)


def _alike(a: Node, b: Node) -> bool:
    return a is b or (a.target in DIMS and (a.target, a.args) == (b.target, b.args))


def broadcast(value: Node, position: Position) -> Position:
    shape = shape_of(value)
    tail = position[len(position) - len(shape) :]
    return tuple([FIRST if same(n, 1) else p for n, p in zip(shape, tail, strict=True)])


Rule: TypeAlias = Callable[[Node, Node, Position], Back | None]
STEPS: dict[Any, Rule] = {
    **dict.fromkeys(COPIES, _step_same),
    **dict.fromkeys(VIEWS, _step_view),
    **dict.fromkeys(SQUEEZES, _step_squeeze),
    aten.permute.default: _step_permute,
    aten.t.default: _step_transpose,
    aten.transpose.int: _step_transpose,
    aten.unsqueeze.default: _step_unsqueeze,
    aten.expand.default: _step_expand,
    aten.slice.Tensor: _step_slice,
    aten.select.int: _step_select,
    aten.constant_pad_nd.default: _step_pad,
    aten.flip.default: _step_flip,
    aten.repeat.default: _step_repeat,
}

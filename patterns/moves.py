"""Follows one element back through ops that only move elements: views, permutes, slices, copies.

`step` goes one op back. With `broadcast` it is all that tells where an element of a rearranged
tensor comes from.
"""

from __future__ import annotations

from typing import Any

import torch

from .axes import Fixed, Place, Position, Size, Unread, quotient, reshaped, same, shape_of, size_of
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


def step(node: Node, position: Position, casts: bool = True) -> tuple[Node, Position] | None:
    """One op back, for ops whose every element is one element of their first operand; None for any
    other op."""
    op, args = node.target, node.args
    if op in COPIES or (casts and op is prims.convert_element_type.default and _keeps_float(node)):
        return args[0], position  # type: ignore[return-value]
    if op is aten.cat.default:
        return _step_copies(node, position)
    if not args or not isinstance(args[0], Node) or "val" not in args[0].meta:
        return None
    source: Node = args[0]
    if (
        op is aten.copy.default
    ):  # what an in-place op leaves: the copied tensor, as far as it is of the same shape
        copied = args[1]
        if not isinstance(copied, Node) or shape_of(copied) != shape_of(node):
            return None
        same_type = copied.meta["val"].dtype is node.meta["val"].dtype
        return (copied, position) if same_type or (casts and _keeps_float(node)) else None
    if not isinstance(source.meta["val"], torch.Tensor):
        return _step_out_of_list(node, position)
    shape = shape_of(source)
    rank = len(shape)
    if op in VIEWS:
        try:
            return source, reshaped(position, shape_of(node), shape)
        except Unread:
            return None
    if op is aten.permute.default:
        out = [Place()] * rank
        for place, dim in zip(position, args[1], strict=True):  # type: ignore[arg-type]
            out[dim % rank] = place
        return source, tuple(out)
    if op in (aten.t.default, aten.transpose.int):
        a, b = (0, 1) if op is aten.t.default else (args[1] % rank, args[2] % rank)  # type: ignore[operator]
        out = list(position)
        out[a], out[b] = out[b], out[a]
        return source, tuple(out)
    if op is aten.unsqueeze.default:
        dim = args[1] % (rank + 1)  # type: ignore[operator]
        return source, position[:dim] + position[dim + 1 :]
    if op in SQUEEZES:
        return source, _unsqueezed(position, len(position), shape, node)
    if op is aten.expand.default:
        tail = position[len(position) - rank :]
        return source, tuple(Place() if same(n, 1) else p for n, p in zip(shape, tail, strict=True))
    if op is aten.slice.Tensor:
        return _step_slice(node, source, shape, position)
    if op is aten.select.int:
        dim, index = args[1] % rank, args[2]  # type: ignore[operator]
        if not isinstance(index, int):
            return None
        n = shape[dim]
        if index < 0:
            if not isinstance(n, int):
                return None
            index += n
        place = Place() if same(n, 1) else Place((), index)
        return source, (*position[:dim], place, *position[dim:])
    if op is aten.constant_pad_nd.default:
        return _step_pad(args[1], source, shape, position)  # type: ignore[arg-type]
    if op is aten.flip.default:
        dims = [d % rank for d in args[1]]  # type: ignore[union-attr]
        if all(position[d].is_fixed and isinstance(shape[d], int) for d in dims):
            out = list(position)
            for d in dims:
                out[d] = fixed(tuple(shape[d] - 1 - v for v in numbers(out[d])), shape[d])
            return source, tuple(out)
    if op is aten.repeat.default:
        return _step_repeat(node, source, shape, position)
    return None


def _keeps_float(node: Node) -> bool:
    source = node.args[0]
    return isinstance(source, Node) and is_float(source) and is_float(node)


def _step_out_of_list(node: Node, position: Position) -> tuple[Node, Position] | None:
    """`getitem` of a split, chunk or unbind."""
    made = node.args[0]
    if getattr(node.target, "__name__", "") != "getitem" or not isinstance(made, Node):
        return None
    source, which = made.args[0], node.args[1]
    if not isinstance(source, Node) or not isinstance(which, int):
        return None
    rank = len(source.meta["val"].shape)
    if made.target is aten.unbind.int:
        dim = (made.args[1] if len(made.args) > 1 else 0) % rank  # type: ignore[operator]
        n = shape_of(source)[dim]
        place = Place() if same(n, 1) else Place((), which)
        return source, (*position[:dim], place, *position[dim:])
    if made.target in (aten.split_with_sizes.default, aten.split.Tensor):
        dim = (made.args[2] if len(made.args) > 2 else 0) % rank  # type: ignore[operator]
        sizes = [shape_of_val(v)[dim] for v in made.meta["val"]]
        start: Size = 0
        for n in sizes[:which]:
            start = start + n
        return source, _moved(position, dim, start, 1, shape_of(source)[dim])
    return None


def shape_of_val(value: torch.Tensor) -> tuple[Size, ...]:
    return tuple([n if type(n) is int else size_of(n) for n in value.shape])


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
        moved = Place()
    return (*position[:dim], moved, *position[dim + 1 :])


def _step_slice(
    node: Node, source: Node, shape: tuple[Size, ...], position: Position
) -> tuple[Node, Position] | None:
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


def _step_pad(
    pads: list[Any], source: Node, shape: tuple[Size, ...], position: Position
) -> tuple[Node, Position] | None:
    """Only for elements that are not padding; `pads` starts with the last dim."""
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
    return tuple(Place() if d in dims else next(places) for d in range(n))


def _step_repeat(
    node: Node, source: Node, shape: tuple[Size, ...], position: Position
) -> tuple[Node, Position] | None:
    pad = len(position) - len(shape)
    out: list[Place] = []
    target = shape_of(node)
    for n, p, whole_size in zip(shape, position[pad:], target[pad:], strict=True):
        if same(n, 1):
            out.append(Place())
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


def _step_copies(node: Node, position: Position) -> tuple[Node, Position] | None:
    """A concatenation of copies of one tensor, which is its repetition, unless lanes lie along
    it."""
    parts: list[Node] = list(node.args[0])  # type: ignore[call-overload]
    place = position[(node.args[1] if len(node.args) > 1 else 0) % len(position)]  # type: ignore[operator]
    if place.is_fixed or len(parts) < 2 or not all(_alike(part, parts[0]) for part in parts):
        return None
    return _step_repeat(node, parts[0], shape_of(parts[0]), position)


def _alike(a: Node, b: Node) -> bool:
    return a is b or (a.target in DIMS and (a.target, a.args) == (b.target, b.args))


def broadcast(value: Node, position: Position) -> Position:
    shape = shape_of(value)
    tail = position[len(position) - len(shape) :]
    return tuple(Place() if same(n, 1) else p for n, p in zip(shape, tail, strict=True))

"""What a view does to a position: runs of dims whose sizes multiply to the same are joined and cut
up anew."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from .axes import (
    FIRST,
    Chosen,
    Fixed,
    Part,
    Place,
    Position,
    Size,
    Unread,
    cut,
    joined,
    product,
    quotient,
    same,
)


def regroup(digits: Sequence[Part], shape: Sequence[Size]) -> list[tuple[Part, ...]]:
    """Row-major digits dealt out to dims of the given sizes, cutting a digit where a dim ends
    inside it."""
    flat = list(digits)
    out: list[tuple[Part, ...]] = []
    for n in shape:
        dim: list[Part] = []
        have: Size = 1
        while not same(have, n):
            if not flat:
                raise Unread(
                    f"a view to {list(shape)} needs more elements than there are, "
                    "accepted whole parts"
                )
            digit = flat.pop(0)
            need = quotient(n, have)
            if need is None:
                raise Unread(f"a view to {list(shape)} ends inside an axis, accepted whole parts")
            if quotient(need, digit.size) is not None:
                dim.append(digit)
                have = have * digit.size
            else:
                low = quotient(digit.size, need)
                if low is None:
                    raise Unread(
                        f"a view cuts an axis of {digit.size} at {need}, accepted whole parts"
                    )
                head, tail = cut(digit, low)
                dim.append(head)
                flat.insert(0, tail)
                have = have * need
        out.append(joined(dim))
    if any(not same(d.size, 1) for d in flat):
        raise Unread(f"a view to {list(shape)} leaves elements over, accepted whole parts")
    return out


@functools.lru_cache(maxsize=1 << 12)  # the layers of a model have the same views
def reshaped(position: Position, shape: tuple[Size, ...], target: tuple[Size, ...]) -> Position:
    """The same element's position after a view from `shape` to `target`.

    Dims that the view does not touch keep their place as it is, offset included; the others must be
    whole.
    """
    out: list[Place] = []
    for real, right in _runs(shape, target):
        wide = [k for k in right if not same(target[k], 1)]
        if len(wide) == 1:
            merged = (
                position[real[0]]
                if len(real) == 1
                else _merged([(position[k], shape[k]) for k in real])
            )
            out += [merged if k == wide[0] else FIRST for k in right]
            continue
        flat: list[Part] = []
        for k in real:
            parts = parts_of(position[k], shape[k])
            if parts is None:
                raise Unread("a view cuts up a sliced dim, accepted a sliced dim as it is")
            flat += parts
        out += [placed(part) for part in regroup(flat, [target[k] for k in right])]
    return tuple(out)


@functools.lru_cache(maxsize=1 << 12)
def _runs(
    shape: tuple[Size, ...], target: tuple[Size, ...]
) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
    """The dims of `shape` but those of size 1, and the dims of `target`, in runs of equal size."""
    out: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    i = j = 0
    while i < len(shape) or j < len(target):
        left, right = [i], [j]
        a: Size = shape[i] if i < len(shape) else 1
        b: Size = target[j] if j < len(target) else 1
        i, j = min(i + 1, len(shape)), min(j + 1, len(target))
        while not same(a, b):
            if i < len(shape) and (j >= len(target) or _shorter(a, b)):
                a, left, i = a * shape[i], [*left, i], i + 1
            elif j < len(target):
                b, right, j = b * target[j], [*right, j], j + 1
            else:
                raise Unread(
                    f"a view from {list(shape)} to {list(target)} does not line up, "
                    "accepted whole parts"
                )
        real = tuple(k for k in left if k < len(shape) and not same(shape[k], 1))
        out.append((real, tuple(k for k in right if k < len(target))))
    return tuple(out)


def _is_whole(place: Place, size: Size) -> bool:
    return same(place.offset, 0) and same(place.extent, size)


def placed(digits: Sequence[Part], offset: Size = 0) -> Place:
    """The place of row-major digits; an index that leads them is written as an offset."""
    digits = tuple(digits)
    while digits and isinstance(first := digits[0], Chosen):
        digits = digits[1:]
        offset = offset + first.index * product(d.size for d in digits)
    return Place(digits, offset)


def parts_of(place: Place, size: Size) -> tuple[Part, ...] | None:
    """The whole dim as digits, if the place is a part of it at a multiple of its own extent."""
    if _is_whole(place, size):
        return place.digits
    if any(isinstance(d, Fixed) for d in place.digits):
        return None
    extent, offset = place.extent, place.offset
    if not (isinstance(extent, int) and isinstance(offset, int) and isinstance(size, int)):
        return None
    if offset % extent or size % extent:
        return None
    return Chosen(offset // extent, size // extent), *place.digits


def _merged(dims: list[tuple[Place, Size]]) -> Place:
    """Many dims viewed as one; a slice or a selected index is possible in the most significant of
    them."""
    if any(isinstance(d, Fixed) for place, _ in dims for d in place.digits) and all(
        place.is_fixed and isinstance(n, int) and isinstance(place.offset, int) for place, n in dims
    ):
        return _merged_lanes(dims)
    digits: tuple[Part, ...] = ()
    offset: Size = 0
    for place, size in dims:
        if digits and not _is_whole(place, size):
            parts = parts_of(place, size)
            if parts is None:
                raise Unread(
                    "a view joins a sliced dim with another, accepted a sliced dim as it is"
                )
            place = Place(parts)
        digits, offset = digits + place.digits, offset * size + place.offset
    return placed(joined(digits), offset)


def _merged_lanes(dims: list[tuple[Place, Size]]) -> Place:
    """As `_merged` where all positions are numbers: lanes beside selected indices."""
    count = next(len(d.values) for place, _ in dims for d in place.digits if isinstance(d, Fixed))
    values, extent = [0] * count, 1
    for place, n in dims:
        lanes = place.lanes(count)
        values = [v * n + lane + place.offset for v, lane in zip(values, lanes, strict=True)]
        extent *= n
    return Place((Fixed(tuple(values), extent),))


def _shorter(a: Size, b: Size) -> bool:
    """Whether the left run of dims is the one to lengthen."""
    if isinstance(a, int) and isinstance(b, int):
        return a < b
    return quotient(b, a) is not None

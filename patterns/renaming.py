"""Compares axes that two readings cut differently, and gives the axes of one the names of the
other."""

from __future__ import annotations

from collections.abc import Sequence

from .axes import Digit, Part, Place, Position, Size, Unread, cut, joined, quotient, same


def atoms_of(digit: Digit, positions: list[Position]) -> list[Digit]:
    """The digit cut wherever some operand cuts it."""
    ends: list[Size] = [1]
    for position in positions:
        for place in position:
            for d in place.digits:
                if isinstance(d, Digit) and d.axis == digit.axis:
                    ends += [d.stride, d.stride * d.size]
    inner = [e for n, e in enumerate(ends) if not any(same(e, f) for f in ends[:n])]
    out: list[Digit] = []
    rest = digit
    for end in sorted((e for e in inner if not same(e, 1)), key=_by_size):
        low = quotient(end, rest.stride)
        if low is None or same(low, 1) or same(low, rest.size) or quotient(rest.size, low) is None:
            continue
        high, part = cut(rest, low)
        assert isinstance(high, Digit)
        assert isinstance(part, Digit)
        out.insert(0, part)
        rest = high
    out.insert(0, rest)
    return out


def covered(position: Position, atoms: list[Digit]) -> set[Digit]:
    """The atoms along which a tensor varies."""
    found: set[Digit] = set()
    for place in position:
        for d in place.digits:
            for a in atoms:
                if isinstance(d, Digit) and d.axis == a.axis and _within(a, d):
                    found.add(a)
    return found


def _within(atom: Digit, digit: Digit) -> bool:
    low, high = (
        quotient(atom.stride, digit.stride),
        quotient(digit.stride * digit.size, atom.stride * atom.size),
    )
    return low is not None and high is not None


def _by_size(n: Size) -> tuple[bool, int, str]:
    """Numbers by size, before symbolic sizes: those are products with them."""
    return (False, n, "") if isinstance(n, int) else (True, len(str(n)), str(n))


class Renaming:
    """Digits of one set of axes written in another, learned from a tensor that is known in both.

    `learn(seen, canonical)` takes two positions of one element; `apply` rewrites any other
    position.
    """

    def __init__(self) -> None:
        self.rules: list[tuple[Digit, Digit]] = []

    def learn(self, seen: Position, canonical: Position) -> None:
        for a, b in zip(seen, canonical, strict=True):
            if not same(a.offset, b.offset) or not same(a.extent, b.extent):
                raise Unread(
                    "two readings of one tensor do not cover the same positions, accepted the same"
                )
            for x, y in _aligned(a.digits, b.digits):
                if isinstance(x, Digit) and isinstance(y, Digit):
                    self.rules.append((x, y))
                elif x != y:
                    raise Unread(
                        "two readings of one tensor differ in their fixed lanes, accepted the same"
                    )

    def apply(self, position: Position) -> Position:
        return tuple(
            Place(joined([e for d in place.digits for e in self._rewrite(d)]), place.offset)
            for place in position
        )

    def _rewrite(self, digit: Part) -> list[Part]:
        if not isinstance(digit, Digit) or same(digit.size, 1):
            return [] if isinstance(digit, Digit) else [digit]
        known = [(x, y) for x, y in self.rules if x.axis == digit.axis]
        out: list[Part] = []
        rest: Digit = digit
        while not same(rest.size, 1):
            end = rest.stride * rest.size
            for x, y in known:
                if same(x.stride * x.size, end):  # the most significant part that a rule covers
                    part = quotient(rest.size, x.size)
                    if part is not None:
                        out.append(y)
                        rest = Digit(rest.axis, rest.stride, part)
                        break
                    low = quotient(x.size, rest.size)
                    if low is not None:  # the digit is only the high part of the rule
                        high, _ = cut(y, low)
                        out.append(high)
                        rest = Digit(rest.axis, rest.stride, 1)
                        break
                elif same(x.stride, rest.stride):
                    high = quotient(x.size, rest.size)
                    if high is not None:  # the digit is only the low part of the rule
                        _, low_part = cut(y, rest.size)
                        out.append(low_part)
                        rest = Digit(rest.axis, rest.stride, 1)
                        break
            else:
                raise Unread(
                    f"axis {digit.axis} has no counterpart of stride {digit.stride}, "
                    "accepted one in the weights"
                )
        return out


def _aligned(a: Sequence[Part], b: Sequence[Part]) -> list[tuple[Part, Part]]:
    """Digits of two equal extents, each cut at the other's boundaries."""
    left, right, out = list(a), list(b), []
    while left and right:
        x, y = left.pop(0), right.pop(0)
        if not same(x.size, y.size):
            if (low := quotient(x.size, y.size)) is not None:
                x, tail = cut(x, low)
                left.insert(0, tail)
            elif (low := quotient(y.size, x.size)) is not None:
                y, tail = cut(y, low)
                right.insert(0, tail)
            else:
                raise Unread(f"an axis of {x.size} meets one of {y.size}, accepted equal sizes")
        out.append((x, y))
    if left or right:
        raise Unread("two readings of one tensor have different axes, accepted the same")
    return out


def is_part(a: Digit, b: Digit) -> bool:
    """Whether a is b or one of the digits that b may be cut into."""
    return (
        a.axis == b.axis
        and quotient(a.stride, b.stride) is not None
        and quotient(b.stride * b.size, a.stride * a.size) is not None
    )

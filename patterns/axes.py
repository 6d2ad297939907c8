"""Which element of a tensor is meant: positions written in named axes.

A position is one `Place` per tensor dim. A place is a row-major product of *digits*: `Digit(axis,
stride, size)` is `(axis // stride) % size` of a named axis, `Fixed(values, size)` is a known
number, one for each lane that is read at the same time, `Chosen(index, size)` is one number for all
of them. A view cuts and joins digits, a permute
reorders places, an expand forgets them; so every spelling of one rearrangement ends in the same
places. Sizes are ints or sympy expressions and are compared as the shape environment knows them,
never by a guess at their values.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import sympy
import torch

Size: TypeAlias = Any  # int, or a sympy expression of symbolic sizes


class Unread(Exception):
    """What could not be read, as a sentence with the value seen and the values accepted."""


class Digit(NamedTuple):
    axis: str
    stride: Size
    size: Size


class Fixed(NamedTuple):
    values: tuple[int, ...]
    size: int


@dataclass(frozen=True)
class Chosen:
    """What a select, or a slice of a whole part, leaves of an axis where a view joins it with
    others."""

    index: int
    size: int


Part: TypeAlias = Digit | Fixed | Chosen


@dataclass(frozen=True, init=False)
class Place:
    """digits, most significant first, plus an offset; `()` is position 0."""

    digits: tuple[Part, ...]
    offset: Size

    def __init__(self, digits: tuple[Part, ...] = (), offset: Size = 0) -> None:
        # Thousands are made in reading one site, and they are keys of every memo of the readers:
        # long lanes are hashed once, and the attributes set at once.
        self.__dict__.update(digits=digits, offset=offset, _hash=hash((digits, offset)))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined]

    @property
    def extent(self) -> Size:
        return product(d.size for d in self.digits)

    @property
    def is_fixed(self) -> bool:
        return all(isinstance(d, Fixed) for d in self.digits)

    def lanes(self, count: int) -> tuple[int, ...]:
        """The position in each of `count` lanes, for a place without named axes."""
        if not self.digits:
            return (0,) * count
        (digit,) = joined(self.digits)
        assert isinstance(digit, Fixed)
        return digit.values


Position: TypeAlias = tuple[Place, ...]
FIRST = Place()  # of any dim, and the only one of a dim of size 1


def size_of(value: Any) -> Size:
    """An int, or the sympy expression behind a symbolic size."""
    if isinstance(value, int):
        return value
    if isinstance(value, torch.SymInt):
        value = value.node.expr
    value = sympy.sympify(value)
    return int(value) if value.is_Integer else value


def shape_of(node: torch.fx.Node) -> tuple[Size, ...]:
    return sizes_of(node.meta["val"])


def sizes_of(value: torch.Tensor) -> tuple[Size, ...]:
    return tuple([n if type(n) is int else size_of(n) for n in value.shape])


def same(a: Size, b: Size) -> bool:
    if a == b:
        return True
    return not (isinstance(a, int) and isinstance(b, int)) and _is_zero(a, b)


@functools.lru_cache(maxsize=1 << 14)
def _is_zero(a: Size, b: Size) -> bool:
    """Whether a - b vanishes; the same few sizes are compared over and over."""
    return bool(sympy.expand(a - b) == 0)


def product(sizes: Any) -> Size:
    out: Size = 1
    for n in sizes:
        out = out * n
    return out


def quotient(a: Size, b: Size) -> Size | None:
    """a / b where it is whole for every value of the symbols, else None."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b and a % b == 0 else None
    return _symbolic_quotient(a, b)


@functools.lru_cache(maxsize=1 << 14)
def _symbolic_quotient(a: Size, b: Size) -> Size | None:
    q = sympy.cancel(sympy.sympify(a) / b)
    if sympy.denom(q) != 1:
        return None
    return int(q) if q.is_Integer else q


def joined(digits: Sequence[Part]) -> tuple[Part, ...]:
    """Neighbours that are parts of one axis become one digit again."""
    if not digits:
        return ()
    out: list[Part] = []
    for d in digits:
        if isinstance(d.size, int) and d.size == 1:
            continue
        last = out[-1] if out else None
        if isinstance(d, Fixed) and isinstance(last, Fixed):
            values = tuple(a * d.size + b for a, b in zip(last.values, d.values, strict=True))
            out[-1] = Fixed(values, last.size * d.size)
        elif isinstance(d, Chosen) and isinstance(last, Chosen):
            out[-1] = Chosen(last.index * d.size + d.index, last.size * d.size)
        elif (
            isinstance(d, Digit)
            and isinstance(last, Digit)
            and last.axis == d.axis
            and same(last.stride, d.stride * d.size)
        ):
            out[-1] = Digit(d.axis, d.stride, last.size * d.size)
        else:
            out.append(d)
    return tuple(out)


def cut(digit: Part, low: Size) -> tuple[Part, Part]:
    """Two digits for one: the high part and the low part of size `low`, which divides it."""
    high = quotient(digit.size, low)
    if high is None:
        raise Unread(f"a view cuts an axis of {digit.size} at {low}, accepted whole parts")
    if isinstance(digit, Fixed):
        return (
            Fixed(tuple(v // low for v in digit.values), high),
            Fixed(tuple(v % low for v in digit.values), low),
        )
    if isinstance(digit, Chosen):
        return Chosen(digit.index // low, high), Chosen(digit.index % low, low)
    return Digit(digit.axis, digit.stride * low, high), Digit(digit.axis, digit.stride, low)


def whole(axis: str, size: Size) -> Place:
    return FIRST if same(size, 1) else Place((Digit(axis, 1, size),))


def axes_in(position: Position) -> set[str]:
    return {d.axis for place in position for d in place.digits if isinstance(d, Digit)}

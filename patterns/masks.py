"""Turns what is added to or filled into the scores into a `Mask`: a band, key padding, boolean
tensors, or a bias.

A band (causal, offset, sliding window) needs no tensor and lets the kernels skip whole blocks; key
padding needs one boolean a key. What is not understood as a predicate is kept as the tensor that
the graph has: exact, only slower.
"""

from __future__ import annotations

import math
from typing import Any

from inductor_gqa.site import Mask, View

from .axes import Digit, Size, Unread, axes_in, same
from .integers import Integers, Linear
from .predicates import NEVER, Clause, TwoValued, conjunction, flipped, two_valued
from .scores import Scores

ABSORBING = -1e30


def read(
    scores: Scores, reader: Integers, batch_axes: frozenset[str], lengths: tuple[Size, Size]
) -> Mask:
    """The mask of a site. batch_axes: axes that key padding may depend on, beside j. lengths: of i
    and j."""
    clauses: list[Clause] = []
    fills: list[tuple[float, bool]] = []
    bias: list[tuple[View, float]] = []
    for view, factor in scores.added:
        read_ = two_valued(reader, view.node, view.position)
        if read_ is not None and factor != 1.0:
            read_ = TwoValued(read_.clauses, read_.kept * factor, read_.hidden * factor)
        if read_ is not None and read_.kept != 0.0 and read_.hidden == 0.0:
            read_ = flipped(read_) or read_
        if read_ is None or read_.kept != 0.0 or not read_.hidden < 0:
            bias.append((view, factor))
        elif read_.clauses:
            clauses += read_.clauses
            fills.append((read_.hidden, True))
        elif read_.hidden != 0.0:
            bias.append((view, factor))
    for view, keeps, fill in scores.filled:
        found = conjunction(reader, view.node, view.position, keeps)
        if found is NEVER:
            raise Unread("the mask hides every score, accepted a mask that leaves some")
        if found:
            clauses += found
            fills.append((fill, False))
    if len(set(fills)) > 1 or (len(fills) > 1 and fills[0][0] != -math.inf):
        return _as_tensors(scores, fills)
    mask = _classified(clauses, batch_axes, lengths)
    fill, adds = fills[0] if fills else (-math.inf, False)
    return Mask(*mask, tuple(bias), fill, adds)


def _as_tensors(scores: Scores, fills: list[tuple[float, bool]]) -> Mask:
    """Several masks with values of their own: the sum matters where all of them hide a key, so keep
    them as they are."""
    if scores.filled:
        raise Unread(
            f"masks with different values {sorted({f for f, _ in fills})}, accepted one value"
        )
    return Mask(bias=tuple(scores.added))


def _classified(
    clauses: list[Clause], batch_axes: frozenset[str], lengths: tuple[Size, Size]
) -> tuple[Size | None, Size | None, Any, Any]:
    low: Size | None = None
    high: Size | None = None
    keys: list[tuple[View, bool]] = []
    tensors: list[tuple[View, bool]] = []
    for clause in dict.fromkeys(clauses):
        band = _band(clause, lengths)
        if band is not None:
            side, bound = band
            if side == "high":
                high = bound if high is None else _tighter(high, bound, min)
            else:
                low = bound if low is None else _tighter(low, bound, max)
            continue
        view = (View(clause.node, clause.position), clause.positive)
        axes = axes_in(clause.position)
        if "i" not in axes and "j" in axes and axes - {"j"} <= batch_axes:
            keys.append(view)
        else:
            tensors.append(view)
    return low, high, tuple(keys), tuple(tensors)


def _tighter(a: Size, b: Size, choose: Any) -> Size:
    if isinstance(a, int) and isinstance(b, int):
        return choose(a, b)
    if same(a, b):
        return a
    raise Unread(
        f"two bounds {a} and {b} on one side of a band, accepted bounds that can be ordered"
    )


def _band(clause: Clause, lengths: tuple[Size, Size]) -> tuple[str, Size] | None:
    """("high", c) for j - i <= c, ("low", c) for j - i >= c."""
    if clause.comparison is None or clause.comparison[0] != "ge":
        return None
    x: Linear = clause.linear
    digits = {key: c for key, c in x.items() if key != ()}
    if not all(isinstance(key, Digit) for key in digits) or len(digits) != 2:
        return None
    by_axis = {key.axis: (key, c) for key, c in digits.items()}
    if set(by_axis) != {"i", "j"}:
        return None
    for axis, length in zip("ij", lengths, strict=True):
        digit = by_axis[axis][0]
        if not same(digit.stride, 1) or not same(digit.size, length):
            return None  # a part of the axis, as in a window of a grid
    ci, cj, rest = by_axis["i"][1], by_axis["j"][1], x.get((), 0)
    if same(ci, 1) and same(cj, -1):  # i - j + rest >= 0
        return "high", rest
    if same(ci, -1) and same(cj, 1):  # j - i + rest >= 0
        return "low", -rest
    return None

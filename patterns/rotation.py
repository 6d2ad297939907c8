"""Reads a rotary embedding (RoPE) by what it computes, lane by lane of the head dim.

Spellings seen in the wild, all of which read as the same pairs:

    rotate_half (Llama and most others):
        q * cos + cat((-q[..., h:], q[..., :h]), -1) * sin
    half-width tables (gpt-oss):
        cat((q1 * cos - q2 * sin, q2 * cos + q1 * sin), -1)
    interleaved (GPT-J, Cohere):
        q * cos + stack((-q[..., 1::2], q[..., ::2]), -1).flatten(-2) * sin
    interleaved in, halves out (DeepSeek):
        cat((a * c - b * s, b * c + a * s), -1) with a, b = q[..., ::2], q[..., 1::2]
    partial:
        cat((rotated(q[..., :w]), q[..., w:]), -1)
    scaled by position (xPos, temperatures), the scale before, between or after:
        q * cos * scale + rotate_half(q) * sin * scale

The halves of cos and sin are never assumed to be equal. Refused (the rotation then stays outside,
the attention still fuses): pairs that are neither halves nor neighbours, tables that vary by head,
factors that differ by lane.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import torch

from inductor_gqa.site import Rotation, Table, View

from .axes import Digit, Place, Unread
from .lanes import Entry, Forms, Lanes, Term
from .naming import op_of
from .terms import near

Node = torch.fx.Node


@dataclass(frozen=True)
class Pairs:
    """Lanes that turn: a run of them in pairs, their terms with the cosine and with the sine, and
    order[k], the input lane that output lane k belongs to."""

    start: int
    interleaved: bool
    sign: float
    cosines: tuple[Term, ...]
    sines: tuple[Term, ...]
    order: tuple[int, ...]


# q and k, and the layers of a model, turn alike: what their lanes are made of is found once.
LIKE = functools.lru_cache(maxsize=1 << 8)


@LIKE
def _common_factor(forms: Forms) -> float:
    factors = [abs(term.factor) for form in forms for term in form]
    first = factors[0] if factors else 1.0
    is_common = all(near(f, first) for f in (min(factors), max(factors))) if factors else False
    return first if first and is_common else 1.0


def common_factor(found: Lanes) -> float:
    """The number that every lane is multiplied by, whatever its sign; 1 where they differ."""
    return _common_factor(found.forms)


def divided(found: Lanes, factor: float) -> Lanes:
    """The lanes without a factor that they have in common."""
    if factor == 1.0:
        return found
    ones = tuple(
        tuple(t._replace(factor=math.copysign(1.0, t.factor)) for t in form) for form in found.forms
    )
    return replace(found, forms=ones)


def rotation(found: Lanes) -> tuple[Rotation, tuple[int, ...]]:
    """The rotation that the lanes are, and their order: order[k] is the input lane that output lane
    k belongs to."""
    pairs = _pairs(found.forms)
    if pairs is None:
        raise Unread(f"0 lanes are turned after {op_of(found.source.node)}, accepted 2 or more")
    tables = list(found.tables)
    turn = Rotation(
        _product(pairs.cosines, tables),
        _product(pairs.sines, tables),
        pairs.start,
        len(pairs.cosines),
        pairs.interleaved,
        pairs.sign,
    )
    return turn, pairs.order


@LIKE
def _pairs(forms: Forms) -> Pairs | None:
    """What turns; None where nothing does."""
    count = len(forms)
    turned = [k for k, form in enumerate(forms) if len(form) == 2]
    for k, form in enumerate(forms):
        plain = len(form) == 1 and form[0].table is None and form[0].factor == 1.0
        if len(form) != 2 and not plain:
            raise Unread(f"lane {k} has {_form(form)}, accepted two products with tables or itself")
    if not turned:
        return None
    parts = _sorted_out({k: forms[k] for k in turned})
    cut = _cut_of_one_table([part for k in turned for part in parts[k]])
    tables: dict[tuple[int | None, bool], list[float]] = {}
    for k in turned:
        for part in parts[k]:
            if abs(part.factor) != 1.0:
                seen = _form(forms[k])
                raise Unread(f"turned lane {k} has {seen}, accepted factors 1 and -1")
            tables.setdefault((part.table, part.column >= cut), []).append(part.factor)
    if len(tables) != 2:
        raise Unread(f"the rotation uses {len(tables)} tables, accepted 2")
    cosines = [t for t, factors in tables.items() if len(set(factors)) == 1 and factors[0] == 1.0]
    if len(cosines) != 1:
        raise Unread(
            f"{len(cosines)} tables have one sign in all lanes, accepted 1 as the cosine has"
        )
    cos = cosines[0]
    (sin,) = [t for t in tables if t != cos]
    own: dict[int, tuple[int, Term, Term]] = {}
    order: list[int] = []
    for k, form in enumerate(forms):
        if k not in parts:
            order.append(form[0].lane)
            continue
        straight = [p for p in parts[k] if (p.table, p.column >= cut) == cos]
        crossed = [p for p in parts[k] if (p.table, p.column >= cut) == sin]
        if len(straight) != 1 or len(crossed) != 1:
            raise Unread(
                f"turned lane {k} has {len(straight)} terms of the one table and {len(crossed)} of "
                "the other, accepted 1 and 1"
            )
        order.append(straight[0].lane)
        own[straight[0].lane] = (crossed[0].lane, straight[0], crossed[0])
    if sorted(order) != list(range(count)):
        raise Unread(f"the lanes come from {len(set(order))} input lanes, accepted {count}")
    return _paired(own, tuple(order))


def _sorted_out(forms: dict[int, tuple[Term, ...]]) -> dict[int, tuple[Term, ...]]:
    """The terms of the turned lanes, each with its cosine or sine as the table and beside it what
    all of them share."""
    terms = [term for form in forms.values() for term in form]
    if all(t.table is not None and t.dim is not None and not t.beside for t in terms):
        return forms
    shared: set[int] = set.intersection(*({e.table for e in t.entries} for t in terms))
    if any(all(e.table in shared for e in t.entries) for t in terms):
        # One table of cosines and sines side by side: what is left is the same for all lanes.
        shared = {e.table for t in terms for e in t.entries if e.dim is None}
    return {k: tuple(_own_table(t, k, form, shared) for t in form) for k, form in forms.items()}


def _own_table(term: Term, lane: int, form: tuple[Term, ...], shared: set[int]) -> Term:
    own = [e for e in term.entries if e.table not in shared]
    if len(own) != 1 or own[0].dim is None:
        raise Unread(f"turned lane {lane} has {_form(form)}, accepted a cosine and a sine")
    beside = sorted((e for e in term.entries if e.table in shared), key=lambda e: e[:2])
    return Term(term.factor, *own[0], term.lane, tuple(beside))


def _cut_of_one_table(parts: list[Term]) -> float:
    """Where a table that holds cosines and sines side by side (GPT-J) changes from one to the
    other."""
    columns = {part.column for part in parts}
    if len({part.table for part in parts}) != 1:
        return math.inf
    return (min(columns) + max(columns) + 1) / 2


def _paired(own: dict[int, tuple[int, Term, Term]], order: tuple[int, ...]) -> Pairs:
    start, width = min(own), len(own)
    if sorted(own) != list(range(start, start + width)):
        raise Unread(f"turned lanes are {_some(sorted(own))}, accepted one run")
    lanes_ = range(start, start + width)
    half = all(
        own[x][0] == (x + width // 2 if x < start + width // 2 else x - width // 2) for x in lanes_
    )
    next_to = all(own[x][0] == start + ((x - start) ^ 1) for x in lanes_)
    if width % 2 or not (half or next_to):
        pair = f"{start} with {own[start][0]}"
        raise Unread(f"lane {pair} of {width} turns, accepted halves or neighbours")
    interleaved = not half
    first = [(x - start) % 2 == 0 if interleaved else x < start + width // 2 for x in lanes_]
    signs = {own[x][2].factor * (-1.0 if f else 1.0) for x, f in zip(lanes_, first, strict=True)}
    if len(signs) != 1:
        raise Unread("the two lanes of a pair turn in one direction, accepted opposite ones")
    cosines, sines = (tuple(own[x][n] for x in lanes_) for n in (1, 2))
    return Pairs(start, interleaved, signs.pop(), cosines, sines, order)


def _product(parts: tuple[Term, ...], tables: list[View]) -> Table:
    """The cosine or the sine of each lane, times what all terms share."""
    if len({tuple(e.table for e in part.beside) for part in parts}) != 1:
        raise Unread("the lanes are scaled by different tables, accepted one product for all")
    table = _table([part.entries[0] for part in parts], tables)
    if not parts[0].beside:
        return table
    beside = zip(*(part.beside for part in parts), strict=True)
    return replace(table, times=tuple(_table(list(entries), tables) for entries in beside))


def _table(entries: list[Entry], tables: list[View]) -> Table:
    """The run of columns that the lanes use, and how: each lane its own ("once"), that of its
    partner ("swapped" halves, "crossed" neighbours), one column for a half or a pair, or columns
    that lie half the table "apart" for the two lanes of a pair."""
    number, _, dim = entries[0]
    view = tables[number]
    if dim is None:
        return Table(view, "all")
    columns = tuple([entry.column for entry in entries])
    start, spread = _spread(columns)
    if view.position[dim].digits:
        raise Unread(
            f"the columns of a rotation table share dim {dim} with another axis, accepted their own"
        )
    column = Place((Digit("w", 1, max(columns) - start + 1),), start)
    return Table(View(view.node, (*view.position[:dim], column, *view.position[dim + 1 :])), spread)


@LIKE
def _spread(columns: tuple[int, ...]) -> tuple[int, str]:
    """The first of the columns that lanes use, and how they use those from there on."""
    start, width = min(columns), len(columns)
    used = [column - start for column in columns]
    half = list(range(width // 2))
    known = {
        "once": list(range(width)),
        "swapped": [*range(width // 2, width), *half],
        "crossed": [k ^ 1 for k in range(width)],
        "halves": half + half,
        "pairs": [k for k in half for _ in range(2)],
        "apart": [k // 2 + (k % 2) * (width // 2) for k in range(width)],
        "apart crossed": [k // 2 + (1 - k % 2) * (width // 2) for k in range(width)],
    }
    for name, pattern in known.items():
        if used == pattern:
            return start, name
    raise Unread(f"table columns are used as {_some(used)}, accepted {', '.join(known)}")


def _form(form: tuple[Term, ...]) -> str:
    tables = list(dict.fromkeys(e.table for t in form for e in t.entries))
    parts = [
        f"{t.factor:g}{''.join(f' * table {tables.index(e.table)}' for e in t.entries)} "
        f"* lane {t.lane}"
        for t in form[:3]
    ]
    return f"{len(form)} terms ({', '.join(parts)}{', ...' if len(form) > 3 else ''})"


def _some(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:6])) + (", ..." if len(numbers) > 6 else "")

"""What was read of a site, spelled out: axes, lanes, scores, mask, results. For the report's page.

A tensor is written as the position of its element: `view_3[(0), (i), (h, r), (d)]` is the element
of node view_3 at batch 0, query i, head h*R + r, lane d. Of an axis that a view cuts, the high
part shows as `i//4`.
"""

from __future__ import annotations

from typing import Any

from .patterns.axes import Chosen, Digit, Place, Position, product
from .patterns.given import Given
from .site import Rotation, Site, Table, Target, View
from .subgraph import kind

Lines = tuple[tuple[str, str], ...]


def lines(site: Site | Given) -> Lines:
    """(what, how it was read), in the order of the computation."""
    out: list[tuple[str, str]] = [("axes", axes(site))]
    for name in ("q", "k", "v"):
        view = getattr(site, name)
        if view is not None:
            out.append((name, tensor(view)))
    for name, turn in (("q turned", site.rotate_q), ("k turned", site.rotate_k)):
        if turn is not None:
            out.append((name, lanes(turn)))
    out += _scores(site) if isinstance(site, Site) else [("weights given", tensor(site.weights))]
    out += [(f"makes {name}", places(targets)) for name, targets in _results(site) if targets]
    return tuple(out)


def axes(site: Site | Given) -> str:
    """The site's letters with their sizes, and which axes of the graph make up B, K and R."""
    groups = (("B", site.batch), ("K", site.kv_heads), ("R", site.group))
    parts = [f"{n}={product(d.size for d in g)} (axes {_axes(g)})" for n, g in groups]
    parts += [f"L={site.query_length} (i)", f"S={site.key_length} (j)", f"D={site.head_dim} (d)"]
    if site.value_dim != site.head_dim:
        parts.append(f"Dv={site.value_dim} (e)")
    return ", ".join(parts)


def lanes(turn: Rotation) -> str:
    """Which lanes turn, in which pairs, and where each finds its cosine and sine."""
    end, half = turn.start + turn.width - 1, turn.width // 2
    pairs = "2t and 2t+1" if turn.interleaved else f"t and t+{half}"
    way = "" if turn.sign > 0 else ", the other way round (the sine is negated)"
    cos, sin = _table(turn.cos), _table(turn.sin)
    return f"lanes {turn.start} to {end}, in pairs of {pairs}{way}; cos {cos}; sin {sin}"


SPREADS = {
    "once": "a column for each lane",
    "swapped": "each lane's column stands in the other half",
    "crossed": "each lane's column stands at its neighbour",
    "halves": "one column for the same lane of both halves",
    "pairs": "one column for the two lanes of a pair",
    "apart": "a column for each lane, those of a pair half the table apart",
    "apart crossed": "a column for each lane, half the table apart, crossed",
    "all": "one number for all lanes",
}


def _table(table: Table) -> str:
    times = "".join(f" times {_table(other)}" for other in table.times)
    return f"{tensor(table.view)} ({SPREADS[table.spread]}){times}"


def tensor(view: View) -> str:
    """Node, dtype, shape, and the position of the element that is meant."""
    made = kind(view.node)
    return f"{view.node.name}{_position(view.position)}{', ' + made if made else ''}"


def _scores(site: Site) -> list[tuple[str, str]]:
    factor = "" if site.scale_tensor is None else f" times {site.scale_tensor.name}"
    out = [("scale", f"{site.scale:g}{factor}")]
    if site.softcap:
        out.append(("softcap", f"{site.softcap:g}"))
    mask = site.mask
    if mask.band_lo is not None or mask.band_hi is not None:
        low = "" if mask.band_lo is None else f"{mask.band_lo} <= "
        high = "" if mask.band_hi is None else f" <= {mask.band_hi}"
        out.append(("visible", f"{low}j - i{high}"))
    for view, positive in (*mask.keys, *mask.tensors):
        out.append(("visible", f"{'' if positive else 'not '}{tensor(view)}"))
    for view, factor in mask.bias:
        out.append(("added", f"{'' if factor == 1.0 else f'{factor:g} times '}{tensor(view)}"))
    if mask.hides:
        out.append(("hidden scores", f"{'plus ' if mask.fill_adds else ''}{mask.fill:g}"))
    if site.sink is not None:
        out.append(("sink", tensor(site.sink)))
    return out


def _results(site: Site | Given) -> list[tuple[str, tuple[Target, ...]]]:
    if isinstance(site, Given):
        return [("dq", site.q_targets), ("dk", site.k_targets), ("dv", site.v_targets)]
    out = [("the output", site.outputs), ("the weights", site.weights)]
    found = site.gradients
    if found is not None:
        out += [("dq", found.q), ("dk", found.k), ("dv", found.v), ("dsink", found.sink)]
    return out


def places(targets: tuple[Target, ...]) -> str:
    return "; ".join(f"{target.node.name}{_position(target.position)}" for target in targets)


def _position(position: Position) -> str:
    return f"[{', '.join(_place(place) for place in position)}]"


def _place(place: Place) -> str:
    digits = ", ".join(_digit(digit) for digit in place.digits)
    offset = "" if place.offset == 0 else f" + {place.offset}"
    return f"({digits or 0}){offset}"


def _digit(digit: Any) -> str:
    if isinstance(digit, Chosen):
        return f"part {digit.index} of {digit.size}"
    if not isinstance(digit, Digit):
        return f"lanes {digit.values[0]}..{digit.values[-1]}"
    return digit.axis if digit.stride == 1 else f"{digit.axis}//{digit.stride}"


def _axes(group: tuple[Any, ...]) -> str:
    named = [_digit(d) for d in group if isinstance(d, Digit)]
    return ", ".join(dict.fromkeys(named)) or "none"

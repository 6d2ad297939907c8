"""A site in sentences, for someone who has not read how reading works.

`reading.py` gives the same facts exactly, as positions in named axes. Here an axis has the name of
what it counts: `mm[batch x query, query head x lane]` is a matrix whose rows run over batch and
query and whose columns run over query head and lane.
"""

from __future__ import annotations

import math
from typing import Any

from .patterns.axes import Chosen, Digit, Place, product, same
from .patterns.given import Given
from .site import Mask, Rotation, Site, View
from .subgraph import kind

AXES = {"i": "query", "j": "key", "d": "lane", "e": "value lane", "w": "column"}


def lines(site: Site | Given) -> tuple[str, ...]:
    """Sentences, in the order of the computation."""
    out = [_heads(site)]
    views = [(name, getattr(site, name)) for name in ("q", "k", "v")]
    out += [f"{name} is {_tensor(view, site)}." for name, view in views if view is not None]
    out += _rotations(site)
    if isinstance(site, Given):
        out.append(f"The weights are given: {_tensor(site.weights, site)}.")
        return (*out, _results_of_given(site))
    out.append(_scores(site))
    out += _hidden(site.mask, site)
    return (*out, *_weights(site), _results(site))


def _heads(site: Site | Given) -> str:
    batch, kv, group = (product(d.size for d in g) for g in (site.batch, site.kv_heads, site.group))
    heads = f"{kv} heads" if group == 1 else f"{kv * group} query heads"
    shared = "" if group == 1 else f"; {group} of them share one of {kv} key-value heads"
    lanes = f"{site.head_dim} lanes"
    if site.value_dim != site.head_dim:
        lanes += f" ({site.value_dim} in the values)"
    return (
        f"Batch {batch}, {heads} of {lanes}{shared}. "
        f"{site.query_length} queries, {site.key_length} keys."
    )


def _tensor(view: View, site: Site | Given) -> str:
    """E.g. "mm[batch x query, query head x lane], float32[128, 32]"."""
    where = ", ".join(_place(place, site) for place in view.position)
    made = kind(view.node)
    return f"{view.node.name}[{where}]{', ' + made if made else ''}"


def _place(place: Place, site: Site | Given) -> str:
    named = [_axis(digit, site) for digit in place.digits]
    words = " x ".join(dict.fromkeys(named)) or "0"
    return words if place.offset == 0 else f"{words} + {place.offset}"


def _axis(digit: Any, site: Site | Given) -> str:
    if isinstance(digit, Chosen):
        return f"part {digit.index} of {digit.size}"
    if not isinstance(digit, Digit):
        return "lane"
    if digit.axis in AXES:
        return AXES[digit.axis]
    groups = {"batch": site.batch, "kv": site.kv_heads, "group": site.group}
    met = {name for name, group in groups.items() if any(_meets(digit, d) for d in group)}
    heads = met & {"kv", "group"}
    names = {"kv": "key-value head", "group": "head of a group"}
    if product(d.size for d in site.group) == 1:  # there is one kind of head
        heads, names = heads - {"group"}, {"kv": "head"}
    words = ["batch"] if "batch" in met else []
    words += ["query head"] if len(heads) == 2 else [names[name] for name in heads]
    return " x ".join(words) or f"axis {digit.axis}"


def _meets(a: Digit, b: Any) -> bool:
    """Whether two parts of axes have something in common; parts of unknown size do if they are of
    one axis."""
    if not isinstance(b, Digit) or a.axis != b.axis:
        return False
    numbers = (a.stride, a.size, b.stride, b.size)
    if not all(isinstance(n, int) for n in numbers):
        return True
    return a.stride < b.stride * b.size and b.stride < a.stride * a.size


def _rotations(site: Site | Given) -> list[str]:
    turns = [(n, t) for n, t in (("q", site.rotate_q), ("k", site.rotate_k)) if t is not None]
    if not turns:
        return ["Nothing is rotated inside."]
    if len(turns) == 2 and _way(turns[0][1], site) == _way(turns[1][1], site):
        turns = [("q and k", turns[0][1])]
    return [f"Of {name}, {_way(turn, site)}." for name, turn in turns]


def _way(turn: Rotation, site: Site | Given) -> str:
    end, half = turn.start + turn.width - 1, turn.width // 2
    pairs = "2t with 2t+1 (neighbours)" if turn.interleaved else f"t with t+{half} (halves)"
    rest = site.head_dim - turn.width
    passing = f", the other {rest} pass" if rest else ""
    back = ", turned backwards" if turn.sign < 0 else ""
    tables = f"the angle's cosine is in {turn.cos.view.node.name}, its sine in "
    return (
        f"lanes {turn.start} to {end} turn in pairs, {pairs}{back}{passing}; "
        f"{tables}{turn.sin.view.node.name}"
    )


def _scores(site: Site) -> str:
    factor = f"{site.scale:g}"
    if site.scale_tensor is not None:
        factor += f" times {site.scale_tensor.name}"
    cap = f", then softly capped at {site.softcap:g}" if site.softcap else ""
    return f"A score is q times k, times {factor}{cap}."


def _hidden(mask: Mask, site: Site) -> list[str]:
    low, high = mask.band_lo, mask.band_hi
    seen: list[str] = []
    if high is not None:
        seen.append("keys up to its own position" if same(high, 0) else f"keys up to i + {high}")
    if low is not None:
        first = f"i - {-low}" if isinstance(low, int) and low <= 0 else f"i + ({low})"
        seen.append(f"keys from {first} on")
    seen += [f"keys that {_tensor(v, site)} {_allows(positive)}" for v, positive in mask.keys]
    seen += [f"what {_tensor(v, site)} {_allows(positive)}" for v, positive in mask.tensors]
    out = [f"Query i sees {' and '.join(seen)}."] if seen else ["Every query sees every key."]
    for view, factor in mask.bias:
        verb = {1.0: "Added to", -1.0: "Subtracted from"}.get(factor, f"Added {factor:g} times to")
        out.append(f"{verb} the scores: {_tensor(view, site)}.")
    if mask.hides and math.isfinite(mask.fill):
        verb = "gets added" if mask.fill_adds else "becomes"
        out.append(f"A hidden score {verb} {mask.fill:g}: a row that sees nothing stays finite.")
    return out


def _allows(positive: bool) -> str:
    return "allows" if positive else "does not forbid"


def _weights(site: Site) -> list[str]:
    out: list[str] = []
    if site.sink is not None:
        out.append(f"A sink joins each softmax: {_tensor(site.sink, site)}.")
    if site.keep:
        out.append(f"Dropout: weights that stay are multiplied by {site.keep_scale:g}.")
    if site.weights:
        names = ", ".join(target.node.name for target in site.weights)
        out.append(f"The weights are needed as well and are written once ({names}).")
    else:
        out.append("The weights are needed nowhere else, so that none is stored.")
    return out


def _results(site: Site) -> str:
    out = f"the output ({', '.join(t.node.name for t in site.outputs)})"
    found = site.gradients
    if found is not None:
        pairs = (("q", found.q), ("k", found.k), ("v", found.v), ("the sink", found.sink))
        names = [name for name, targets in pairs if targets]
        gradients = f"the gradients of {_listed(names)}"
        out = f"{out}, and {gradients}" if site.outputs else gradients
    return f"Replaced: {out}."


def _results_of_given(site: Given) -> str:
    pairs = (("q", site.q_targets), ("k", site.k_targets), ("v", site.v_targets))
    return f"Replaced: the gradients of {_listed([n for n, targets in pairs if targets])}."


def _listed(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)

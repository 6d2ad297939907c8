"""What a site costs as the model writes it: matrices of the scores' size, and matmul FLOPs.

Counted are tensors that no compiler can leave out, since a matmul writes or reads them: the scores
QK^T and the weights P in the forward, dP and dS in the backward. What stands between those two is
one pointwise kernel to Inductor and is not counted. FLOPs are those of the model's own matmuls over
all scores, hidden ones included; recomputing scores in a fused backward is not added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from .decide import UNKNOWN, hint
from .patterns.axes import product, same, shape_of
from .patterns.given import Given
from .patterns.operands import MATMULS
from .site import Mask, Site

Node = torch.fx.Node


@dataclass(frozen=True)
class Costs:
    """score_bytes: of `score_matrices` together. visible: the share of scores that the mask's band
    leaves, 1 without one. Symbolic sizes count as what they were when the graph was traced."""

    score_matrices: int
    score_bytes: int
    flops: int
    visible: float


def costs(site: Site | Given) -> Costs | None:
    """None where a size is not known."""
    heads = product(d.size for d in (*site.batch, *site.kv_heads, *site.group))
    sizes = [hint(n) for n in (heads, site.query_length, site.key_length)]
    if UNKNOWN in sizes:
        return None
    count = sizes[0] * sizes[1] * sizes[2]
    if isinstance(site, Given):
        return _given(site, count)
    wanted = set[str]()
    if site.gradients is not None:
        found = site.gradients
        wanted = {n for n in ("q", "k", "v", "sink") if getattr(found, n)}
    matrices: list[int] = []  # bytes of an element of each
    ends = _matmuls(site)
    if ends is not None:
        scores, weights = ends
        matrices = [scores] if site.weights else [scores, weights]
        if wanted & {"q", "k", "sink"}:
            matrices.append(weights)  # dP has the dtype of the weights that are multiplied
        if wanted & {"q", "k"}:
            matrices.append(scores)
    flops = 2 * count * (site.head_dim + (site.value_dim if site.outputs else 0))
    flops += _backward_flops(count, wanted, site.head_dim, site.value_dim)
    visible = _visible(site.mask, sizes[1], sizes[2]) / (sizes[1] * sizes[2])
    return Costs(len(matrices), count * sum(matrices), flops, visible)


def _given(given: Given, count: int) -> Costs:
    targets = {"q": given.q_targets, "k": given.k_targets, "v": given.v_targets}
    wanted = {name for name, found in targets.items() if found}
    flops = _backward_flops(count, wanted, given.head_dim, given.value_dim)
    matrices = 2 if wanted & {"q", "k"} else 0
    return Costs(matrices, matrices * count * given.grad_out.dtype.itemsize, flops, 1.0)


def _backward_flops(count: int, wanted: set[str], head_dim: int, value_dim: int) -> int:
    """dQ, dK, dV, and dP where something needs it."""
    lanes = head_dim * len(wanted & {"q", "k"})
    lanes += value_dim * (("v" in wanted) + bool(wanted & {"q", "k", "sink"}))
    return 2 * count * lanes


def _visible(mask: Mask, query_length: int, key_length: int) -> int:
    """Scores inside the band. A key-padding or boolean mask may hide more: its values are not
    known."""
    if mask.band_lo is None and mask.band_hi is None:
        return query_length * key_length
    low = -query_length if mask.band_lo is None else hint(mask.band_lo)
    high = key_length if mask.band_hi is None else hint(mask.band_hi)
    rows = range(query_length)
    return sum(max(0, min(key_length, i + high + 1) - max(0, i + low)) for i in rows)


def _matmuls(site: Site) -> tuple[int, int] | None:
    """Bytes of an element of the matmul that makes the scores and of the one that takes the
    weights; None where the graph has no such matmuls, as in a call of a fused attention."""
    ends = site.outputs or (site.gradients.v if site.gradients else ())
    if not ends:
        return None
    takes = _nearest(ends[0].node, lambda node: node.target in MATMULS)
    if takes is None or not _needs(takes, site.anchor):
        return None
    # The weights of a softmax with a sink lack a column of the scores' shape before it.
    shape = product(shape_of(site.anchor))

    def makes_scores(node: Node) -> bool:
        return node.target in MATMULS and same(product(shape_of(node)), shape)

    makes = _nearest(site.anchor, makes_scores)
    if makes is None:
        return None
    return makes.meta["val"].dtype.itemsize, takes.meta["val"].dtype.itemsize


def _nearest(start: Node, wanted: Callable[[Node], bool]) -> Node | None:
    """The first node found going upwards, breadth first."""
    return next((node for node in _upwards(start) if wanted(node)), None)


def _needs(node: Node, other: Node) -> bool:
    return any(found is other for found in _upwards(node))


def _upwards(start: Node) -> Iterator[Node]:
    todo, seen = [start], {start}
    for node in todo:
        yield node
        for source in node.all_input_nodes:
            if source not in seen:
                seen.add(source)
                todo.append(source)

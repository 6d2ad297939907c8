"""Makes the tables of a fused site's rotation cheap: one kernel, in front of all else.

Positions times frequencies are often spelled as a matmul whose sums have one term. As a pointwise
product that is the same number, in fp32 whatever the precision of matmuls, and Inductor makes one
kernel of positions, angles, cosines and sines. In front, it stands between no two launches of ours,
of which the next may begin while the one before it ends.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from . import ops
from .emit import Emitter
from .layers_forward import MOVES

aten = torch.ops.aten
Node = torch.fx.Node
FORWARDS = (ops.attention, ops.attention_weights)
TABLES = [ops.NAMES.index(name) for name in ("cos_q", "sin_q", "cos_k", "sin_k")]
OUTER_PRODUCTS = (aten.bmm.default, aten.mm.default)
PASSED = MOVES | {aten.cat.default, torch.ops.prims.convert_element_type.default}


def write_products(graph: torch.fx.Graph) -> int:
    """Rewrites every such matmul that tables of the graph's ops are made of; returns how many."""
    written = 0
    for node in list(_makers(graph)):
        if node.target in OUTER_PRODUCTS and _has_one_term(node):
            emit = Emitter(node, node)
            made = emit.laid_out_as(emit.call(aten.mul.Tensor, *node.args), node)
            node.replace_all_uses_with(made)
            written += 1
    return written


def move_to_front(graph: torch.fx.Graph) -> None:
    """Moves what the tables are made of in front of all that computes; an order that this breaks is
    for `stable_topological_sort` to mend."""
    makers = {node for node in _makers(graph) if _is_passed(node)}
    first = next(node for node in graph.nodes if node.op not in ("placeholder", "get_attr"))
    for node in [node for node in graph.nodes if node in makers and node is not first]:
        first.prepend(node)


def _is_passed(node: Node) -> bool:
    """Whether a path goes on beyond the node: it is a view, or pointwise and draws no numbers."""
    tags = getattr(node.target, "tags", ())
    is_drawn = torch.Tag.nondeterministic_seeded in tags
    return node.target in PASSED or (torch.Tag.pointwise in tags and not is_drawn)


def _makers(graph: torch.fx.Graph) -> Iterator[Node]:
    """Nodes that tables are made of, as far as views and pointwise ops reach, and what ends each
    path."""
    todo = [
        node.args[n]
        for op in FORWARDS
        for node in graph.find_nodes(op="call_function", target=op)
        for n in TABLES
        if isinstance(node.args[n], Node)
    ]
    seen: set[Node] = set()
    for node in todo:
        if node in seen:
            continue
        seen.add(node)
        yield node
        if _is_passed(node):
            todo += node.all_input_nodes


def _has_one_term(node: Node) -> bool:
    left = node.args[0].meta["val"]  # type: ignore[union-attr]
    terms = left.shape[-1]
    return isinstance(terms, int) and terms == 1 and left.dtype.is_floating_point

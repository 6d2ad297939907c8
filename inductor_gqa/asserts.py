"""Asserts that torch.export leaves behind each cast: `aten._assert_tensor_metadata`.

They have effects in the eyes of a graph, so one on the weights of an attention would keep the whole
score matrix alive. What a trace has proven already holds nothing alive, and goes with the site.
"""

from __future__ import annotations

import torch

aten = torch.ops.aten
Node = torch.fx.Node


def is_proven(node: Node) -> bool:
    """Whether the node asserts what its argument's traced value shows: dtype, device, layout."""
    if node.target is not aten._assert_tensor_metadata.default:
        return False
    names = ("size", "stride", "dtype")
    said = dict(zip(names, node.args[1:], strict=False)) | node.kwargs
    value = node.args[0].meta["val"]  # type: ignore[union-attr]
    have = {"dtype": value.dtype, "device": value.device, "layout": value.layout}
    return all(
        wanted is None or (name in have and have[name] == wanted) for name, wanted in said.items()
    )


def is_needed(node: Node) -> bool:
    """Whether the node stays in a graph though nothing uses it: the output, or an effect that no
    trace has proven."""
    if node.op == "output":
        return True
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace not in ("aten", "prims"):
        return node.is_impure() and not is_proven(node)
    if target not in _impure:
        _impure[target] = node.is_impure()
    return _impure[target] and not is_proven(node)


_impure: dict[object, bool] = {}  # of PyTorch's own ops, by which a site's many users are told


def erase_proven(graph: torch.fx.Graph) -> None:
    for node in list(graph.nodes):
        if is_proven(node):
            graph.erase_node(node)

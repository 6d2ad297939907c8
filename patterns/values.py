"""Facts about nodes that do not depend on a site: equal values, constants, origins.

AOTAutograd has not merged equal expressions yet when our pass runs, so one value may be computed by
many nodes (a mask or a table once a layer). Everything that compares nodes compares the first node
of their value.
"""

from __future__ import annotations

import functools
import math
import struct
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

aten, prims = torch.ops.aten, torch.ops.prims
Node = torch.fx.Node

MATMULS = {
    aten.mm.default,
    aten.bmm.default,
    aten.addmm.default,
    aten.baddbmm.default,
    aten.convolution.default,
    aten.embedding.default,
}


def is_float(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype.is_floating_point


def scalar_value(value: Any) -> float | None:
    """The number that a literal or a constant tensor holds everywhere, else None."""
    if isinstance(value, bool):
        return float(value)
    if isinstance(value, int | float):
        return float(value)
    if isinstance(value, Node) and value.op == "get_attr":
        return _held_number(value)
    if not isinstance(value, Node) or value.op != "call_function":
        return None
    if value.target is aten.full.default and isinstance(value.args[1], int | float | bool):
        return _rounded(value, value.args[1])
    if value.target is aten.scalar_tensor.default and isinstance(value.args[0], int | float | bool):
        return _rounded(value, value.args[0])
    if value.target in (
        aten.expand.default,
        aten.view.default,
        aten.unsqueeze.default,
        aten.clone.default,
        aten.alias.default,
        aten.lift_fresh_copy.default,
        prims.convert_element_type.default,
    ):
        inner = scalar_value(value.args[0])
        return None if inner is None else _rounded(value, inner)
    return None


def _held_number(node: Node) -> float | None:
    """The number in a 0-d tensor that the graph holds, as `torch.tensor(0.0)` in a model leaves
    it."""
    module = node.graph.owning_module
    held = getattr(module, str(node.target), None)
    if not isinstance(held, torch.Tensor) or isinstance(held, FakeTensor) or held.dim() != 0:
        return None
    with _disable_current_modes():
        return float(held.item())


def _rounded(node: Node, number: float) -> float:
    return as_dtype(number, node.meta["val"].dtype)


def as_dtype(number: float, dtype: torch.dtype) -> float:
    """The number as a tensor of the dtype holds it; in plain Python, since a fake tensor mode is
    active in a pass."""
    number = float(number)
    if dtype is torch.bool:
        return float(bool(number))
    if not dtype.is_floating_point:
        return float(int(number)) if math.isfinite(number) else number
    if dtype is torch.float64 or not math.isfinite(number):
        return number
    form = "e" if dtype is torch.float16 else "f"
    try:
        (number,) = struct.unpack(form, struct.pack(form, number))
    except OverflowError:
        return math.copysign(math.inf, number)
    if dtype is not torch.bfloat16:
        return number
    (bits,) = struct.unpack("I", struct.pack("f", number))
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000  # round to nearest, ties to even
    (number,) = struct.unpack("f", struct.pack("I", bits & 0xFFFFFFFF))
    return number


class ValueNumbers:
    """For each node the first node of the graph that holds the same value."""

    def __init__(self, graph: torch.fx.Graph) -> None:
        self._first: dict[Node, Node] = {}
        self._matmul: dict[Node, bool] = {}
        self._gradient: dict[Node, bool] = {}
        self.order: dict[Node, int] = {}
        self.known_integers: dict[Any, Any] = {}  # by integers.py: sites share their masks
        seen: dict[Any, Node] = {}
        for number, node in enumerate(graph.nodes):
            self.order[node] = number
            matmul = node.target in MATMULS
            gradient = node.op == "placeholder" and "tangents" in node.name
            for source in node.all_input_nodes:
                matmul = matmul or self._matmul[source]
                gradient = gradient or self._gradient[source]
            self._matmul[node], self._gradient[node] = matmul, gradient
            key = self._key(node)
            self._first[node] = node if key is None else seen.setdefault(key, node)

    def first(self, node: Node) -> Node:
        return self._first.get(node, node)

    def comes_from_matmul(self, node: Node) -> bool:
        """Whether a matmul, a convolution or an embedding is among the ancestors."""
        return self._matmul.get(node, False)

    def comes_from_gradient(self, node: Node) -> bool:
        """Whether the node belongs to the backward of a joint graph."""
        return self._gradient.get(node, False)

    def _key(self, node: Node) -> Any:
        if node.op != "call_function" or not is_function(node.target):
            return None
        kwargs = node.kwargs
        key = (node.target, self._typed(node.args), self._typed(kwargs) if kwargs else ())
        try:
            hash(key)
        except TypeError:
            return None
        return key

    def _typed(self, value: Any) -> Any:
        if isinstance(value, Node):
            return self._first.get(value, value)
        if isinstance(value, list | tuple):
            return tuple([self._typed(v) for v in value])
        if isinstance(value, dict):
            return tuple((k, self._typed(value[k])) for k in sorted(value))
        return (type(value), value)  # 1, 1.0 and True are equal, but not as arguments


@functools.lru_cache(maxsize=1 << 12)
def is_function(target: Any) -> bool:
    """Whether equal arguments give equal values: an op that neither draws nor writes."""
    return (
        isinstance(target, torch._ops.OpOverload)
        and torch.Tag.nondeterministic_seeded not in target.tags
        and not target._schema.is_mutable
    )

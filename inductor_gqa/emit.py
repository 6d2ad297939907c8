"""Writes nodes into a graph: each with its true fake value and the metadata of the node it stands
in for.

`arrange` is the counterpart of reading: it turns a `View` into a tensor with the wanted axes, by
the fewest view ops.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch.fx.node import map_arg

from .patterns.axes import (
    Chosen,
    Digit,
    Fixed,
    Part,
    Place,
    Size,
    Unread,
    product,
    quotient,
    same,
    shape_of,
    size_of,
)
from .patterns.complex_numbers import is_complex
from .patterns.naming import op_of
from .patterns.renaming import atoms_of, covered
from .site import View

aten, prims = torch.ops.aten, torch.ops.prims
Node = torch.fx.Node

# Without these, activation checkpointing and the partitioner would treat our nodes as strangers.
INHERITED = (
    "nn_module_stack",
    "torch_fn",
    "source_fn_stack",
    "original_aten",
    "recompute",
    "ac_graph_id",
    "has_backward_hook",
    "from_node",
    "custom",
    "partitioner_tag",
    "stack_trace",
    "seq_nr",
)


class Emitter:
    """Inserts before `point`; new nodes inherit the metadata of `origin`."""

    def __init__(self, point: Node, origin: Node) -> None:
        self.graph = point.graph
        self.point = point
        self.sizes: dict[Size, Any] = {}  # nodes before the point that hold a symbolic size
        self.meta = {key: origin.meta[key] for key in INHERITED if key in origin.meta}
        self.fake_mode = getattr(origin.meta["val"], "fake_mode", None)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        value = self._value(target, args, kwargs)
        with self.graph.inserting_before(self.point):
            node = self.graph.call_function(target, args, kwargs)
        node.meta.update(self.meta)
        node.meta["val"] = value
        return node

    def _value(self, target: Any, args: Any, kwargs: Any) -> Any:
        fake = map_arg((args, kwargs), lambda n: n.meta["val"])
        if self.fake_mode is None:
            return target(*fake[0], **fake[1])
        with self.fake_mode:
            return target(*fake[0], **fake[1])

    def size(self, size: Size) -> int | Node:
        """A size as an argument: a number, or the node that holds it."""
        if isinstance(size, int):
            return size
        if size not in self.sizes:
            self.sizes[size] = self._node_of_size(size)
        return self.sizes[size]

    def _node_of_size(self, size: Size) -> Node:
        for node in self.graph.nodes:
            if node is self.point:
                break
            value = node.meta.get("val")
            if isinstance(value, torch.SymInt) and same(size_of(value), size):
                return node
        if isinstance(size, sympy.Symbol):
            return self._size_of_symbol(size)
        parts: Sequence[Any] = ()
        if isinstance(size, sympy.Add | sympy.Mul):
            parts = size.args
        elif isinstance(size, sympy.Pow) and size.exp.is_Integer and size.exp > 0:
            parts = [size.base] * int(size.exp)
        if parts:
            op = operator.add if isinstance(size, sympy.Add) else operator.mul
            total: Any = None
            for part in parts:
                value = self.size(size_of(part))
                total = value if total is None else self.call(op, total, value)
            return total
        raise Unread(f"a size is {size}, accepted sums and products of the sizes of tensors")

    def _size_of_symbol(self, symbol: sympy.Symbol) -> Node:
        for node in self.graph.nodes:
            if node is self.point:
                break
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor):
                for dim, n in enumerate(value.shape):
                    if same(size_of(n), symbol):
                        return self.call(aten.sym_size.int, node, dim)
        raise Unread(f"no tensor has the size {symbol}, accepted a size that an input has")

    def arrange(self, view: View, groups: Sequence[Sequence[Digit]], expand: bool = False) -> Node:
        """The view as a tensor with one dim for each group of axes; a dim that the view lacks has
        size 1, or is expanded."""
        node, flat = self._flat(view)
        wanted = [[a for d in group for a in atoms_of(d, [view.position])] for group in groups]
        flat, node = self._cut(node, flat, [a for group in wanted for a in group])
        order = [a for group in wanted for a in group if a in flat]
        if len(order) != len(flat):
            raise Unread(
                f"{op_of(view.node)} varies along an axis that its role does not have, "
                "accepted none or its own"
            )
        permutation = [flat.index(a) for a in order]
        if permutation != list(range(len(flat))):
            node = self.call(aten.permute.default, node, permutation)
        have = [[a for a in group if a in flat] for group in wanted]
        if any(len(h) not in (0, len(w)) for h, w in zip(have, wanted, strict=True)):
            node = self._expanded(node, [a for g in wanted for a in g], order)
            have = wanted
        node = self.viewed(node, [product(a.size for a in group) for group in have])
        if expand:
            sizes = [product(a.size for a in group) for group in wanted]
            if not all(same(n, m) for n, m in zip(shape_of(node), sizes, strict=True)):
                node = self.call(aten.expand.default, node, [self.size(n) for n in sizes])
        return node

    def _flat(self, view: View) -> tuple[Node, list[Digit]]:
        """The node with selected and sliced dims taken, and one dim per digit."""
        node = view.node
        if is_complex(node):  # its position has a place for the part
            node = self.call(aten.view_as_real.default, node)
        flat: list[Part] = []
        sizes: list[Size] = []
        dim = 0
        for place, n in zip(view.position, shape_of(node), strict=True):
            if any(isinstance(d, Fixed) for d in place.digits):
                raise Unread(f"{op_of(node)} is read at known lanes only, accepted all of them")
            if not place.digits:
                node = self.call(aten.select.int, node, dim, self.size(place.offset))
                continue
            if not (same(place.offset, 0) and same(place.extent, n)):
                start, end = self.size(place.offset), self.size(place.offset + place.extent)
                node = self.call(aten.slice.Tensor, node, dim, start, end)
            flat += place.digits
            sizes += [d.size for d in place.digits]
            dim += 1
        node = self.viewed(node, sizes)
        for dim, digit in reversed(list(enumerate(flat))):
            if isinstance(digit, Chosen):
                node = self.call(aten.select.int, node, dim, digit.index)
        return node, [d for d in flat if isinstance(d, Digit)]

    def _cut(self, node: Node, flat: list[Digit], atoms: list[Digit]) -> tuple[list[Digit], Node]:
        """One dim per atom instead of one per digit."""
        out: list[Digit] = []
        for digit in flat:
            parts = covered((Place((digit,)),), atoms)
            # Most significant first: as many parts lie below it. (A list is empty while it is
            # sorted, so not `ordered.sort`.)
            ordered = sorted(parts, key=lambda a: -sum(_is_below(b, a) for b in parts))
            if not same(product(a.size for a in ordered), digit.size):
                raise Unread(
                    f"{op_of(node)} varies along an axis that its role does not have, "
                    "accepted none or its own"
                )
            out += ordered
        return out, self.viewed(node, [a.size for a in out])

    def _expanded(self, node: Node, wanted: list[Digit], order: list[Digit]) -> Node:
        for k, atom in enumerate(wanted):
            if atom not in order:
                node = self.call(aten.unsqueeze.default, node, k)
        return self.call(aten.expand.default, node, [self.size(a.size) for a in wanted])

    def viewed(self, node: Node, sizes: Sequence[Size]) -> Node:
        if len(sizes) == len(shape_of(node)) and all(
            same(a, b) for a, b in zip(shape_of(node), sizes, strict=True)
        ):
            return node
        symbolic = [k for k, n in enumerate(sizes) if not isinstance(n, int)]
        if len(symbolic) == 1:
            shape: list[Any] = [-1 if k in symbolic else n for k, n in enumerate(sizes)]
        else:
            shape = [self.size(n) for n in sizes]
        try:
            return self.call(aten.view.default, node, shape)
        except (RuntimeError, ValueError):  # strides that no view can join
            node = self.call(aten.clone.default, node, memory_format=torch.contiguous_format)
            return self.call(aten.view.default, node, shape)

    def laid_out_as(self, node: Node, other: Node) -> Node:
        """The node with the order of dims in memory that another has: who gets it may rely on
        it."""
        wanted = [size_of(n) for n in other.meta["val"].stride()]
        have = [size_of(n) for n in node.meta["val"].stride()]
        if all(same(a, b) for a, b in zip(have, wanted, strict=True)):
            return node
        order = _by_stride(wanted)
        back = [order.index(d) for d in range(len(order))]
        node = self.call(aten.permute.default, node, order)
        node = self.call(aten.clone.default, node, memory_format=torch.contiguous_format)
        return self.call(aten.permute.default, node, back)

    def cast(self, node: Node, dtype: torch.dtype) -> Node:
        if node.meta["val"].dtype is dtype:
            return node
        return self.call(prims.convert_element_type.default, node, dtype)


def _is_below(a: Digit, b: Digit) -> bool:
    """Whether a is a less significant part of the axis than b."""
    return a is not b and quotient(b.stride, a.stride * a.size) is not None


def _by_stride(strides: Sequence[Size]) -> list[int]:
    """Dims from the largest stride to the smallest; a symbolic stride is above what divides it."""
    above = lambda a, b: not same(a, b) and quotient(a, b) is not None  # noqa: E731
    rank = [sum(above(other, own) for other in strides) for own in strides]
    return sorted(range(len(strides)), key=lambda d: (rank[d], d))

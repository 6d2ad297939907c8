"""Runs a site against what it replaces, on random numbers in fp64: `enable(verify=True)`.

Both halves are in the graph before anything is replaced: the nodes that the model wrote and the
nodes that would take their place. Both are evaluated on the CPU from the same random q, k, v and
gradient, everything else (tables, masks, scales) from the graph's own inputs. In fp64 the two agree
to many digits or compute something else.

Symbolic lengths are given small values, and so are static ones: each size in the graph is read as a
length or as heads and lanes, by the shapes that it meets. What cannot be run so, or only at a size
that is too large, is left.
"""

from __future__ import annotations

import itertools
import math
import operator
import threading
from typing import Any

import sympy
import torch
from torch.utils._python_dispatch import _disable_current_modes

from .patterns.axes import Unread, product, size_of
from .patterns.values import ValueNumbers
from .site import Site, View

aten, prims = torch.ops.aten, torch.ops.prims
Node = torch.fx.Node
Pairs = list[tuple[Node, Node]]

# fp64 rounds at 1e-16; the ops' log-sum-exp is fp32. A misread site is off in its first digits.
TOLERANCE = 1e-5
MOST_ELEMENTS = 1 << 24  # of one tensor: 128 MiB in fp64
MOST_NODES = 2000
SMALL = 24  # lengths up to which nothing is shrunk
VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
# Where other ops take sizes among their arguments; what is not named is a number that means itself.
SIZED = {
    aten.full.default: (0,),
    aten.empty.memory_format: (0,),
    aten.slice_scatter.default: (3, 4),
    aten.slice_backward.default: (1, 3, 4),
    aten.select_backward.default: (1,),
    aten.new_zeros.default: (1,),
    aten.new_full.default: (1,),
    aten.rand.default: (0,),
    prims.iota.default: (0,),
}
_agreed: set[Any] = set()
_lock = threading.Lock()


def check(site: Any, pairs: Pairs, values: ValueNumbers) -> None:
    """Raises Unread where old and new differ, or cannot be compared; a site whose like was found
    equal before is not run again."""
    cut = _cut(site, values)
    key = signature(pairs, cut, values)
    if key in _agreed:
        return
    try:
        with _disable_current_modes(), torch.no_grad(), torch.random.fork_rng(devices=[]):
            why = difference(site, pairs, cut, values)
    except Unread:
        raise
    except Exception as error:
        raise Unread(f"verify: the site could not be run: {error!r}") from error
    if why is not None:
        raise Unread(f"verify: {why}")
    with _lock:
        _agreed.add(key)


def _cut(site: Any, values: ValueNumbers) -> dict[Node, View]:
    """What the site's matmuls multiply: q, k, v and the gradient, or the given weights."""
    if isinstance(site, Site):
        views = [site.q, site.k, site.v, site.gradients and site.gradients.grad_out]
    else:
        views = [site.q, site.k, site.v, site.grad_out, site.weights]
    return {values.first(view.node): view for view in views if view is not None}


def signature(pairs: Pairs, cut: dict[Node, View], values: ValueNumbers) -> Any:
    """What the pairs compute from the cut, by structure: equal for the layers of a model."""
    number: dict[Node, int] = {}
    rows: list[Any] = []

    def named(value: Any) -> Any:
        if isinstance(value, Node):
            return ("node", visit(value))
        if isinstance(value, list | tuple):
            return tuple(named(v) for v in value)
        if isinstance(value, dict):
            return tuple((k, named(v)) for k, v in sorted(value.items()))
        return (type(value).__name__, str(value))

    def visit(node: Node) -> int:
        node = values.first(node)
        if node not in number:
            if node.op == "call_function" and node not in cut:
                row = (str(node.target), named(node.args), named(node.kwargs))
            else:
                value = node.meta.get("val")
                shape = tuple(map(str, getattr(value, "shape", ())))
                row = ("leaf", str(getattr(value, "dtype", value)), shape)
            number[node] = len(number)
            rows.append(row)
        return number[node]

    for pair in pairs:
        for node in pair:
            rows.append(visit(node))
    return tuple(rows)


def difference(site: Any, pairs: Pairs, cut: dict[Node, View], values: ValueNumbers) -> str | None:
    """One sentence about the first result that differs, or None."""
    run = Run(cut, Sizes(site), values)
    for old, new in pairs:
        expected, found = run.value(old), run.value(new)
        if expected.shape != found.shape:
            shapes = f"{tuple(found.shape)}, the model's is {tuple(expected.shape)}"
            return f"the shape of {old} would be {shapes}"
        finite = torch.isfinite(expected)
        if not finite.any():
            raise Unread(f"verify: {old} has no finite value on random inputs")
        error = (found - expected)[finite].abs().nan_to_num(math.inf).max().item()
        largest = expected[finite].abs().max().item()
        if not error <= TOLERANCE * largest:
            return f"{old} would be off by {error:.3g}, its largest value is {largest:.3g}"
    return None


class Sizes:
    """Small values for the lengths of a site."""

    def __init__(self, site: Any) -> None:
        self.symbols: dict[sympy.Symbol, int] = {}
        self.lengths: dict[int, int] = {}
        both = [site.query_length, site.key_length]
        reach = _band(site)
        smalls = itertools.count(SMALL // 2 + 1, 2)  # distinct, so that mixed up lengths show
        for size in both:
            for symbol in sorted(getattr(size, "free_symbols", ()), key=str):
                if symbol not in self.symbols:
                    self.symbols[symbol] = next(smalls) + reach
        long = sorted({n for n in both if isinstance(n, int) and n > SMALL + reach})
        lanes = {site.head_dim, site.head_dim // 2, site.value_dim, site.value_dim // 2}
        if not lanes & set(long):
            self.lengths = dict(zip(long, itertools.count(SMALL + reach), strict=False))
        axes = (*site.batch, *site.kv_heads, *site.group)
        heads = [d.size for d in axes if isinstance(d.size, int)]
        counts = range(len(heads) + 1)
        some = {math.prod(c) for n in counts for c in itertools.combinations(heads, n)}
        self.plain = {n * m for n in some for m in (1, site.head_dim, site.value_dim)}

    def of(self, size: Any) -> int:
        """A size of the graph as a number."""
        size = size_of(size)
        if isinstance(size, int):
            return self.lengths.get(size, size)
        for symbol in sorted(size.free_symbols, key=str):
            self.symbols.setdefault(symbol, 3)  # a batch
        return int(size.subs(self.symbols))

    def meanings(self, size: Any) -> list[int]:
        """What a size can be once lengths are small: 4096 may be a length, or 32 heads of 128."""
        if not isinstance(size, int):
            return [self.of(size)]
        found = {size: None}
        small = [*self.lengths.items()]
        small += [(a * b, x * y) for a, x in self.lengths.items() for b, y in self.lengths.items()]
        for length, n in small:
            if size % length == 0 and size // length in self.plain:
                found[size // length * n] = None
        return list(found)

    def viewed(self, sizes: Any, shape: Any) -> list[int]:
        """The shape that a view of `shape` gets: as many elements, and dims that end where those of
        `shape` end, wherever that can be."""
        ends = set(itertools.accumulate(shape, operator.mul))
        fit = [
            chosen
            for chosen in itertools.product(*(self.meanings(n) for n in sizes))
            if math.prod(chosen) == math.prod(shape) or -1 in chosen
        ]
        if not fit:
            raise Unread(f"verify: no small shape of a view to {sizes}")
        shared = lambda chosen: len(ends & set(itertools.accumulate(chosen, operator.mul)))  # noqa: E731
        return list(max(fit, key=shared))


def _band(site: Any) -> int:
    """How far a static band reaches: shorter lengths would not show where it ends."""
    if not isinstance(site, Site):
        return 0
    ends = (site.mask.band_lo, site.mask.band_hi)
    return max((abs(n) for n in ends if isinstance(n, int)), default=0)


class Run:
    """Evaluates nodes in fp64 on the CPU; `cut` and the graph's inputs get random values."""

    def __init__(self, cut: dict[Node, View], sizes: Sizes, values: ValueNumbers) -> None:
        self.cut, self.sizes, self.numbering = cut, sizes, values
        self.made: dict[Node, Any] = {}
        self.generator = torch.Generator().manual_seed(0)

    def value(self, wanted: Node) -> Any:
        todo = [wanted]
        while todo:
            node = self.numbering.first(todo[-1])
            if node in self.made:
                todo.pop()
                continue
            is_leaf = node in self.cut or node.op != "call_function" or self._is_number(node)
            missing = [] if is_leaf else [n for n in node.all_input_nodes if not self._has(n)]
            if missing:
                todo += missing
                continue
            if len(self.made) > MOST_NODES:
                raise Unread(f"verify: more than {MOST_NODES} nodes lead to the site")
            made = self._leaf(node) if is_leaf else self._computed(node)
            if isinstance(made, torch.Tensor) and made.numel() > MOST_ELEMENTS:
                raise Unread(_too_large(made.shape))
            self.made[node] = made
            todo.pop()
        return self.made[self.numbering.first(wanted)]

    def _has(self, node: Node) -> bool:
        return self.numbering.first(node) in self.made

    @staticmethod
    def _is_number(node: Node) -> bool:
        return isinstance(node.meta.get("val"), int | torch.SymInt)

    def _leaf(self, node: Node) -> Any:
        value = node.meta["val"] if "val" in node.meta else _held(node)
        if isinstance(value, int | torch.SymInt):
            return self.sizes.of(value)
        if not isinstance(value, torch.Tensor):
            return 0.37 if isinstance(value, float | torch.SymFloat) else value
        if node.op == "get_attr" and value.numel() == 1:
            held = _held(node)
            return held.double() if held.is_floating_point() else held
        shape = self._leaf_shape(node, value)
        if math.prod(shape) > MOST_ELEMENTS:
            raise Unread(_too_large(shape))
        if value.dtype.is_floating_point:
            return torch.randn(shape, generator=self.generator, dtype=torch.float64)
        if value.dtype is torch.bool:
            return torch.rand(shape, generator=self.generator) < 0.7
        return torch.randint(0, 2, shape, generator=self.generator).to(value.dtype)

    def _leaf_shape(self, node: Node, value: torch.Tensor) -> list[int]:
        if node not in self.cut:
            return [self.sizes.of(n) for n in value.shape]
        shape: list[int] = []
        for place, n in zip(self.cut[node].position, value.shape, strict=True):
            size = size_of(n)
            has_length = any(getattr(digit, "axis", "") in ("i", "j") for digit in place.digits)
            small = [m for m in self.sizes.meanings(size) if m != size]
            if has_length and small:
                shape.append(small[0])
            else:
                shape.append(size if isinstance(size, int) else self.sizes.of(size))
        return shape

    def _computed(self, node: Node) -> Any:
        target: Any = node.target
        sized = SIZED.get(target, ())
        args = [self._argument(arg, k in sized) for k, arg in enumerate(node.args)]
        kwargs = {name: self._argument(arg, False) for name, arg in node.kwargs.items()}
        if target in VIEWS:
            args[1] = self.sizes.viewed(args[1], args[0].shape)
        elif target is aten.expand.default:
            args[1] = self._expanded(args[1], args[0].shape)
        elif target is aten.slice.Tensor and len(args) > 3:
            args[3] = self._end(node, *args[:4])
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        out = target(*args, **kwargs)
        if isinstance(out, torch.Tensor) and out.is_floating_point():
            return out.double()
        return out

    def _expanded(self, sizes: list[int], shape: Any) -> list[int]:
        have = [*[1] * (len(sizes) - len(shape)), *shape]
        return [
            m if m != 1 else (n if n in self.sizes.plain else self.sizes.of(n))
            for n, m in zip(sizes, have, strict=True)
        ]

    def _end(self, node: Node, x: torch.Tensor, dim: int, _start: Any, end: Any) -> Any:
        """Where a slice ends: at the end, where the old one did; else at a lane, or a length."""
        old = size_of(node.args[0].meta["val"].shape[dim])  # type: ignore[union-attr]
        if not isinstance(end, int) or (isinstance(old, int) and end >= old):
            return end if end is None else max(end, x.shape[dim])
        return end if dim % x.dim() == x.dim() - 1 else self.sizes.of(end)

    def _argument(self, value: Any, is_size: bool) -> Any:
        if isinstance(value, Node):
            return self.made[self.numbering.first(value)]
        if isinstance(value, list | tuple):
            return [self._argument(v, is_size) for v in value]
        if isinstance(value, torch.SymInt) or (is_size and type(value) is int):
            return self.sizes.of(value)
        if isinstance(value, torch.dtype) and value.is_floating_point:
            return torch.float64
        return value


def _held(node: Node) -> torch.Tensor:
    owner = node.graph.owning_module
    return getattr(owner, str(node.target))


def _too_large(shape: Any) -> str:
    return (
        f"verify: a tensor of {product(shape)} elements would be needed, accepted "
        f"{MOST_ELEMENTS}; dynamic=True lets smaller lengths be checked"
    )

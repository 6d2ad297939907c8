"""Checks what the pass does to a function: how many sites it fuses, what is left of the old graph,
and every number.

All of Inductor's graph passes of our own run and no code is generated, so a check takes well under
a second. `fuses` claims an exact number of fused sites, `leaves` claims a refusal with its reason,
`never_wrong` accepts either, or the one that is named. All three compare outputs and gradients by
one rule, in which fp64 is the truth: the largest error is at most twice that of eager in the same
dtype, or a few roundings of the largest value where eager happens to be exact. What eager makes
infinite or NaN is not compared.

Inductor's own attention patterns stay off: they are wrong on some of the near misses, and this is
not about them.
"""

from __future__ import annotations

import copy
import functools
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
import without_dynamo
from torch import nn
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor.compile_fx import compile_fx
from torch._inductor.fx_passes.post_grad import view_to_reshape
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

import inductor_gqa
from inductor_gqa import report

FORWARD = "inductor_gqa.attention.default"
WITH_WEIGHTS = "inductor_gqa.attention_weights.default"
BACKWARD = "inductor_gqa.attention_backward.default"
GIVEN = "inductor_gqa.weights_backward.default"
FLOOR_IN_EPS = 16  # fp32: a few roundings more than eager, where eager happens to be exact
NARROW = (torch.float16, torch.bfloat16, torch.float32)
WIDENED = {torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16}


@dataclass
class Seen:
    """What a compile did: the records of its sites and the graphs that reached the backend."""

    sites: list[report.Record] = field(default_factory=list)
    graphs: list[torch.fx.GraphModule] = field(default_factory=list)

    @property
    def fused(self) -> int:
        return sum(site.fused for site in self.sites)

    @property
    def reasons(self) -> list[str]:
        return [site.reason for site in self.sites if site.reason is not None]

    @property
    def summary(self) -> str:
        return "; ".join(site.summary for site in self.sites)

    def count(self, *names: str) -> int:
        """Nodes of the graphs whose target is named so."""
        return sum(str(node.target) in names for g in self.graphs for node in g.graph.nodes)

    def node_of(self, name: str) -> torch.fx.Node:
        (node,) = [n for g in self.graphs for n in g.graph.nodes if str(n.target) == name]
        return node

    def argument(self, name: str) -> Any:
        """An argument of the only forward op, by its name in the op."""
        from inductor_gqa.ops import NAMES

        return self.node_of(FORWARD).args[NAMES.index(name)]

    def with_dims(self, *sizes: int) -> list[torch.fx.Node]:
        """Float results that have all these sizes among their dims."""
        found = []
        for graph in self.graphs:
            for node in graph.graph.nodes:
                value = node.meta.get("val")
                if isinstance(value, torch.Tensor) and value.dtype.is_floating_point:
                    missing = Counter(sizes) - Counter(value.shape)
                    if not missing:
                        found.append(node)
        return found

    def text(self) -> str:
        return "\n".join(str(g.graph) for g in self.graphs)


class _Wide(TorchFunctionMode):
    """Every narrower float type that a function asks for becomes fp64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in WIDENED:
            return args[0].double()
        if func is torch.Tensor.type_as:
            args = (args[0], args[1].double() if args[1].dtype in NARROW else args[1])
        if func is torch.finfo:
            return func(*args, **(kwargs or {}))
        widen = lambda x: torch.float64 if isinstance(x, torch.dtype) and x in NARROW else x  # noqa: E731
        return func(*tree_map(widen, args), **tree_map(widen, kwargs or {}))


@contextmanager
def _in_fp64() -> Iterator[None]:
    saved = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Wide():
            yield
    finally:
        torch.set_default_dtype(saved)


def _widened(value: Any) -> Any:
    is_float = isinstance(value, torch.Tensor) and value.dtype in NARROW
    if not is_float:
        return value
    return value.detach().double().requires_grad_(value.requires_grad)


def _leaves(fn: Callable[..., Any], inputs: Sequence[Any]) -> dict[str, torch.Tensor]:
    """Everything that a gradient is asked of, by name."""
    named = {f"input {k}": x for k, x in enumerate(inputs) if isinstance(x, torch.Tensor)}
    if isinstance(fn, nn.Module):
        named |= dict(fn.named_parameters())
    return {name: x for name, x in named.items() if x.requires_grad}


def results(
    run: Callable[..., Any], owner: Callable[..., Any], inputs: Sequence[Any], train: bool
) -> dict[str, torch.Tensor | None]:
    """Every float output of `run` and, in training, every gradient of the inputs and of the
    parameters of `owner`.
    """
    with nullcontext() if train else torch.no_grad():
        made = run(*inputs)
    out: dict[str, torch.Tensor | None] = {}
    roots = []
    for k, value in enumerate(tree_leaves(made)):
        if isinstance(value, torch.Tensor) and value.dtype.is_floating_point:
            out[f"output {k}"] = value.detach()
            if value.requires_grad:
                roots.append(value)
    wanted = _leaves(owner, inputs)
    if train and roots and wanted:
        generator = torch.Generator().manual_seed(7)
        grads = [  # eighths: the same numbers in every dtype
            torch.randint(-16, 17, root.shape, generator=generator).to(root.dtype) / 8
            for root in roots
        ]
        found = torch.autograd.grad(roots, list(wanted.values()), grads, allow_unused=True)
        out |= {f"gradient of {n}": g for n, g in zip(wanted, found, strict=True)}
    return out


def wrong(
    ours: dict[str, torch.Tensor | None],
    eager: dict[str, torch.Tensor | None],
    truth: dict[str, torch.Tensor | None],
) -> list[str]:
    """One sentence for each result that is further off than the rule allows."""
    assert ours.keys() == eager.keys() == truth.keys()
    found: list[str] = []
    for name, near in eager.items():
        x, true = ours[name], truth[name]
        if x is None or near is None or true is None:
            if not (x is None and near is None):
                found.append(f"{name}: there is one in only one of ours and eager")
            continue
        if x.dtype != near.dtype or x.shape != near.shape:
            found.append(
                f"{name}: {x.dtype} {tuple(x.shape)}, eager {near.dtype} {tuple(near.shape)}"
            )
            continue
        eps = max(torch.finfo(near.dtype).eps, FLOOR_IN_EPS * torch.finfo(torch.float32).eps)
        judged = torch.isfinite(near) & torch.isfinite(true)
        x, near, true = x.double()[judged], near.double()[judged], true.double()[judged]
        if not x.numel():
            continue
        error = (x - true).abs().nan_to_num(float("inf")).max().item()
        allowed, largest = (near - true).abs().max().item(), true.abs().max().item()
        if not error <= max(2 * allowed, eps * largest, torch.finfo(torch.float32).tiny):
            found.append(
                f"{name}: error is {error:.3g}, eager {allowed:.3g}, largest {largest:.3g}"
            )
    return found


@contextmanager
def backend(seen: Seen, codegen: bool = False) -> Iterator[Any]:
    """A backend for torch.compile that notes graphs, and the records of the pass, while the block
    runs.
    """

    def without_codegen(gm: torch.fx.GraphModule, _inputs: Any, **_options: Any) -> Any:
        seen.graphs.append(gm)
        view_to_reshape(gm)  # as Inductor does before it generates code
        gm.recompile()
        return make_boxed_func(gm.forward)

    def with_codegen(gm: torch.fx.GraphModule, example_inputs: Any, **options: Any) -> Any:
        from torch._inductor.compile_fx import compile_fx_inner

        seen.graphs.append(copy.deepcopy(gm))
        return compile_fx_inner(gm, example_inputs, **options)

    inner = with_codegen if codegen else without_codegen
    with (
        inductor_config.patch(fx_graph_cache=False, pattern_matcher=codegen),
        functorch_config.patch(enable_autograd_cache=False),
        report.collected() as found,
    ):
        yield functools.partial(compile_fx, inner_compile=inner)
    seen.sites += found.sites


def run(
    fn: Callable[..., Any],
    *inputs: Any,
    train: bool = True,
    dynamic: bool | None = None,
    codegen: bool = False,
    pattern_matcher: bool | None = None,
    more: Sequence[Sequence[Any]] = (),
    compare: bool = True,
    dynamo: bool = False,
) -> Seen:
    """Compiles `fn` with the pass, runs it on the inputs (and on `more`, without a new compile) and
    judges the numbers.

    dynamo: through torch.compile even where the test asks for less by `without_dynamo`.
    """
    torch._dynamo.reset()
    seen = Seen()
    wide = copy.deepcopy(fn).double() if isinstance(fn, nn.Module) else fn
    matcher = {} if pattern_matcher is None else {"pattern_matcher": pattern_matcher}
    with (
        inductor_gqa.enabled(always=True),
        backend(seen, codegen) as chosen,
        inductor_config.patch(**matcher),
    ):
        if dynamo or dynamic or codegen or more or not without_dynamo.is_chosen:
            compiled = torch.compile(fn, backend=chosen, dynamic=dynamic, fullgraph=True)
        else:
            compiled = without_dynamo.compile_directly(fn, chosen)
        graphs = 0
        for k, case in enumerate([inputs, *more]):
            seed = random.Random(0).randrange(1 << 30)
            torch.manual_seed(seed)
            ours = results(compiled, fn, case, train)
            if k == 0:
                graphs = len(seen.graphs)
            assert len(seen.graphs) == graphs, "another length compiled anew"
            if not compare:
                continue
            torch.manual_seed(seed)
            eager = results(fn, fn, case, train)
            with _in_fp64():
                torch.manual_seed(seed)
                truth = results(wide, wide, [_widened(x) for x in case], train)
            faults = wrong(ours, eager, truth)
            assert not faults, "\n".join([*faults, *map(str, seen.sites)])
            assert any(x is not None and bool(torch.isfinite(x).any()) for x in eager.values()), (
                "nothing finite to compare"
            )
    return seen


def fuses(
    fn: Callable[..., Any],
    *inputs: Any,
    sites: int = 1,
    train: bool = True,
    backwards: int | None = None,
    softmaxes: int = 0,
    scores: tuple[int, ...] = (),
    **options: Any,
) -> Seen:
    """Exactly `sites` attentions are fused and none is left, with `backwards` backward ops (in
    training one each).

    softmaxes: how many softmaxes are no attention and stay. scores: sizes, such as a query and a
    key length that nothing else has, of which no float tensor may have all.
    """
    seen = run(fn, *inputs, train=train, **options)
    assert not seen.reasons, f"left: {seen.reasons}"
    assert seen.fused == sites, f"{seen.fused} fused, expected {sites}"
    assert seen.count(FORWARD) == sites
    expected = (sites if train else 0) if backwards is None else backwards
    assert seen.count(BACKWARD) == expected, f"{seen.count(BACKWARD)} backward ops, not {expected}"
    assert seen.count("aten.exp.default") <= softmaxes
    assert seen.count("aten.amax.default") <= softmaxes
    if scores:
        assert not seen.with_dims(*scores), f"left in the graphs: {seen.with_dims(*scores)}"
    return seen


def leaves(
    fn: Callable[..., Any], *inputs: Any, reason_contains: str, train: bool = True, **options: Any
) -> Seen:
    """No attention is fused, one is left, and a reason says why; the numbers are eager's."""
    seen = run(fn, *inputs, train=train, **options)
    assert seen.fused == 0, f"fused as {seen.summary}"
    assert seen.count(FORWARD, BACKWARD, WITH_WEIGHTS) == 0
    assert any(reason_contains in reason for reason in seen.reasons), seen.reasons
    return seen


ANY = "accepted"  # every reason says what is


def never_wrong(
    fn: Callable[..., Any],
    *inputs: Any,
    train: bool = True,
    left: str | None = ANY,
    notes: str | None = None,
    **options: Any,
) -> Seen:
    """With eager's numbers, and every site in the report: fused, or left with a reason that names
    the assumption it breaks.

    left: a piece of that reason, so that something must be left; None: everything must be fused;
    where it is not given, either may be. notes: a piece of what is said of a rotation that stays
    outside a site that is fused; None: anything.
    """
    seen = run(fn, *inputs, train=train, **options)
    assert seen.sites, "the site is not reported"
    assert all(left is not None and left in reason for reason in seen.reasons), seen.reasons
    assert seen.reasons or left in (None, ANY), f"fused as {seen.summary}"
    if left not in (None, ANY):
        assert seen.count(FORWARD, WITH_WEIGHTS) == 0
    if notes is not None:
        said = [note for site in seen.sites for note in site.notes]
        assert said
        assert all(notes in note for note in said), said
    assert seen.count(FORWARD, WITH_WEIGHTS, GIVEN) == seen.fused
    return seen

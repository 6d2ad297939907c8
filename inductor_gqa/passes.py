"""The pass that Inductor runs on every graph: read all attentions, decide, replace.

One site is all or nothing: its forward and the backward that the graph holds are read before
anything is changed. What cannot be read is left exactly as it was, with its reason in the report;
no error leaves the pass outside strict mode.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.pattern_matcher import stable_topological_sort

from . import (
    angles,
    asserts,
    decide,
    layers,
    layers_forward,
    read_site,
    reading,
    report,
    rewrite,
    rewrite_given,
    verify,
    words,
)
from .costs import costs
from .errors import NotFused
from .patterns import dropout
from .patterns.anchors import Softmax, row_sums, softmaxes
from .patterns.attention import without_sink
from .patterns.axes import Unread
from .patterns.candidates import NearMiss, detour, is_backward, near_misses
from .patterns.given import Given
from .patterns.sdpa import Call, calls, discard
from .patterns.summary import describe, describe_given
from .patterns.values import ValueNumbers
from .site import Site
from .subgraph import Change, Watch, abandon, around

log = logging.getLogger("inductor_gqa")


SEARCHING = "searching the graph, so that nothing is fused,"


@dataclass(frozen=True)
class Settings:
    """always: fuse whatever can be read, whether or not it pays. strict: raise `NotFused` if a site
    is left. verify: run each distinct site against what it replaces first."""

    always: bool = False
    strict: bool = False
    verify: bool = False


def matmul_precision() -> str:
    """How fp32 matmuls are computed: "ieee" or "tf32", as PyTorch's settings say at compile
    time."""
    setting = getattr(torch.backends.cuda.matmul, "fp32_precision", "none")
    if setting in ("ieee", "tf32"):
        return setting
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


@functools.cache
def source_digest() -> str:
    """A digest of all sources of the package: readers, rewrite, ops and kernels. Cached graphs are
    valid for one digest."""
    digest = hashlib.sha256()
    root = Path(__file__).resolve().parent
    for folder in (root, (root / "patterns").resolve()):
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.name.encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _hardware() -> tuple[Any, ...]:
    if not torch.cuda.is_available():
        return ()
    return tuple(torch.cuda.get_device_capability(n) for n in range(torch.cuda.device_count()))


class AttentionPass(CustomGraphPass):
    """Runs another pass first, if the user had set one, then ours."""

    def __init__(self, settings: Settings, before: Any = None) -> None:
        self.settings = settings
        self.before = before

    def uuid(self) -> Any:
        own = (source_digest(), self.settings, matmul_precision(), _hardware())
        if self.before is None:
            return own
        passes = self.before if isinstance(self.before, list | tuple) else (self.before,)
        others = []
        for other in passes:
            key = other.uuid() if hasattr(other, "uuid") else None
            if not key:
                return None  # an unknown pass makes the graph uncacheable, with ours or without
            others.append(key)
        return (*own, *others)

    def __call__(self, graph: torch.fx.Graph) -> None:
        if self.before is not None:
            passes = self.before if isinstance(self.before, list | tuple) else (self.before,)
            for other in passes:
                other(graph)
        start = time.perf_counter()
        try:
            left = fuse(graph, self.settings)
        finally:
            report.add_seconds(time.perf_counter() - start)
        if left and self.settings.strict:
            raise NotFused("\n".join(str(record) for record in left))


# A softmax, a call of F.scaled_dot_product_attention, the row sum of a softmax's gradient that
# stands alone, or what is almost one of these.
Anchor = Softmax | Call | torch.fx.Node | NearMiss


def fuse(graph: torch.fx.Graph, settings: Settings) -> list[report.Record]:
    """Replaces every attention of the graph that is read, supported and worth it; returns the
    records of the others."""
    plain: list[Softmax] = _guarded(lambda: softmaxes(graph), SEARCHING) or []
    found: list[Anchor] = [*plain, *(_guarded(lambda: calls(graph), SEARCHING) or [])]
    sums: list[torch.fx.Node] = _guarded(lambda: row_sums(graph), SEARCHING) or []
    exponentials = graph.find_nodes(op="call_function", target=torch.ops.aten.exp.default)
    if not found and not sums and not exponentials:
        return []
    values = ValueNumbers(graph)
    found += _guarded(lambda: near_misses(graph, plain, values), SEARCHING) or []
    plans = [(anchor, *_timed(anchor, values, settings)) for anchor in found]
    if not any(isinstance(site, Site) and site.gradients for _, site, _, _ in plans):
        # The row sums of sites that were read with their backward belong to those.
        plans += [(anchor, *_timed(anchor, values, settings)) for anchor in sums]
    left: list[report.Record] = []
    dead: set[torch.fx.Node] = set()
    for anchor, site, reason, seconds in plans:
        details = _details(site) if report.wants_details() else {}
        watch = Watch(graph) if report.wants_details() else None
        start = time.perf_counter()
        if site is not None and dead and _is_stale(anchor, site, dead):
            # It reads what an earlier site has replaced, as where one attention's output is the
            # next one's values, or an earlier site reads what it would replace.
            site, reason, _ = _timed(anchor, ValueNumbers(graph), settings)
        if site is not None and reason is None:
            try:
                abandon(_write(site, graph, values, settings), dead)
            except Unread as why:
                reason = str(why)
        seconds += time.perf_counter() - start
        record = _record(anchor, site, reason, graph, values, seconds)
        if record is None:
            continue
        if watch is not None:
            record = _detailed(record, anchor, details, watch.change())
        report.add(record)
        if not record.fused:
            left.append(record)
    if dead:
        _guarded(lambda: layers.join(graph), "joining the gradients around an attention")
        _guarded(lambda: layers_forward.join(graph), "joining the layers around an attention")
        _guarded(lambda: angles.write_products(graph), "writing angles as products")
        _guarded(lambda: angles.move_to_front(graph), "moving tables to the front")
        asserts.erase_proven(graph)
        stable_topological_sort(graph)
        graph.eliminate_dead_code()  # lints first
        discard(graph)
        graph.eliminate_dead_code()
    return left


def _is_stale(anchor: Anchor, site: Site | Given, dead: set[torch.fx.Node]) -> bool:
    """Whether sites that were written since this one was read have changed what it reads or who
    needs what it replaces."""
    if isinstance(site, Given):
        return bool(rewrite_given.tensors(site) & dead) or rewrite_given.leftover(site) is not None
    if rewrite.tensors(site) & dead:
        return True
    if isinstance(anchor, Softmax):
        return rewrite.leftover(site, anchor.weights) is not None
    return rewrite.leftover(site, site.anchor) is not None


def _write(
    site: Site | Given, graph: torch.fx.Graph, values: ValueNumbers, settings: Settings
) -> set[torch.fx.Node]:
    """Inserts the ops, checks them if that is asked for, and hands their results to the users of
    what they replace; the graph is as it was if any of it fails."""
    before = set(graph.nodes)
    write = rewrite.write if isinstance(site, Site) else rewrite_given.write
    try:
        pairs = write(site, matmul_precision())  # type: ignore[arg-type]
        if settings.verify:
            verify.check(site, pairs, values)
    except Exception as why:
        for node in reversed([node for node in graph.nodes if node not in before]):
            graph.erase_node(node)
        if isinstance(why, Unread):
            raise
        log.warning("writing the ops failed, the attention is left as it is", exc_info=True)
        raise Unread(f"internal error while writing: {why!r}") from why
    if isinstance(site, Site):
        rewrite.detach(site)
    for old, new in pairs:
        old.replace_all_uses_with(new)
    return {old for old, _ in pairs}


def _timed(
    anchor: Anchor, values: ValueNumbers, settings: Settings
) -> tuple[Site | Given | None, str | None, float]:
    start = time.perf_counter()
    return *_considered(anchor, values, settings), time.perf_counter() - start


def _considered(
    anchor: Anchor, values: ValueNumbers, settings: Settings
) -> tuple[Site | Given | None, str | None]:
    if isinstance(anchor, NearMiss):
        return None, anchor.reason
    try:
        is_row_sum = isinstance(anchor, torch.fx.Node)
        read = read_site.read_alone if is_row_sum else read_site.read
        site = read(anchor, values)  # type: ignore[arg-type]
    except Unread as why:
        return None, str(why)
    # A reader must never break a user's compile; the record says what happened.
    except Exception as why:
        log.warning("reading an attention failed, it is left as it is", exc_info=True)
        return None, f"internal error while reading: {why!r}"
    reason = decide.unsupported(site)
    if reason is None and not settings.always:
        reason = decide.unpackaged() or decide.unprofitable(site, matmul_precision())
    return site, reason


def _record(
    anchor: Anchor,
    site: Site | Given | None,
    reason: str | None,
    graph: torch.fx.Graph,
    values: ValueNumbers,
    seconds: float,
) -> report.Record | None:
    if site is None and not _is_attention(anchor, values):
        return None
    training = any("tangents" in n.name for n in graph.nodes if n.op == "placeholder")
    summary = _guarded(lambda: _described(site), "describing an attention") or ""
    return report.Record(
        report.place_of(_node(anchor)),
        reason is None,
        summary,
        reason,
        "training" if training else "inference",
        isinstance(site, Given) or (site is not None and site.gradients is not None),
        seconds,
        notes=site.notes if isinstance(site, Site) else (),
    )


def _node(anchor: Anchor) -> torch.fx.Node:
    """What stands for the site in the user's code."""
    if isinstance(anchor, torch.fx.Node):
        return anchor
    if isinstance(anchor, NearMiss):
        return anchor.exponentials
    return anchor.weights if isinstance(anchor, Softmax) else anchor.out


def _described(site: Site | Given | None) -> str:
    if site is None:
        return ""
    return describe(site) if isinstance(site, Site) else describe_given(site)


def _details(site: Site | Given | None) -> dict[str, Any]:
    """What a report says of a site beyond its record, taken before the graph is changed."""
    if site is None:
        return {}
    found = _guarded(lambda: costs(site), "counting a site's costs")
    read = _guarded(lambda: reading.lines(site), "telling how a site was read")
    said = _guarded(lambda: words.lines(site), "telling in words how a site was read")
    return {**(vars(found) if found else {}), "reading": read or (), "words": said or ()}


def _detailed(
    record: report.Record, anchor: Anchor, details: dict[str, Any], change: Change
) -> report.Record:
    node = _node(anchor)
    stays = () if record.fused else around(node)
    changed = {"gone": change.gone, "come": change.come, "stays": stays}
    return report.detailed(record, source=report.source_of(node), **changed, **details)


def _is_attention(anchor: Anchor, values: ValueNumbers) -> bool:
    """Whether what did not read is one all the same, not a classifier's or a router's softmax, nor
    a row sum of something else."""
    if isinstance(anchor, torch.fx.Node):
        return bool(_guarded(lambda: is_backward(anchor, values), SEARCHING))
    if not isinstance(anchor, Softmax):
        return True
    weights, _ = without_sink(anchor.weights)
    return bool(dropout.results(weights, values)) or detour(weights, values) is not None


def _guarded(run: Callable[[], Any], doing: str) -> Any:
    try:
        return run()
    except Exception:
        log.warning("%s failed", doing, exc_info=True)
        return None

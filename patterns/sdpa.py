"""Reads a call of `F.scaled_dot_product_attention`, which a graph holds as one op of a backend.

AOTAutograd replaces the call by the op that PyTorch chose for device, dtype and mask:

    aten._scaled_dot_product_flash_attention_for_cpu    CPU
    aten._scaled_dot_product_flash_attention            CUDA, causal or no mask
    aten._scaled_dot_product_efficient_attention        CUDA, any mask
    aten._scaled_dot_product_cudnn_attention            CUDA

and its backward by `..._backward`. Each computes softmax(scale q k^T + mask) v, with query head h
on key/value head h // R, and zeros for a row that sees no key. Where PyTorch takes none of them
(the "math" backend) the graph holds matmuls and a softmax, which attention.py reads. Refused:
dropout, masks that need a gradient, is_causal beside a mask, or over unequal lengths where the
backends differ.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from inductor_gqa.site import Gradients, Mask, Site, Target, View

from . import attention, masks, operands
from .axes import Digit, Place, Position, Size, Unread, axes_in, quotient, same, shape_of, whole
from .empty_rows import may_be_empty
from .finished import Finished
from .integers import Integers
from .moves import broadcast
from .operands import Operand
from .renaming import covered
from .scores import Scores
from .turned import BothLanes, Read, rotated, rotations
from .values import ValueNumbers

aten = torch.ops.aten
Node = torch.fx.Node

FORWARDS = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: (
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    ),
    aten._scaled_dot_product_flash_attention.default: (
        aten._scaled_dot_product_flash_attention_backward.default
    ),
    aten._scaled_dot_product_efficient_attention.default: (
        aten._scaled_dot_product_efficient_attention_backward.default
    ),
    aten._scaled_dot_product_cudnn_attention.default: (
        aten._scaled_dot_product_cudnn_attention_backward.default
    ),
}
# Their own kernels and their fallbacks do not agree on where the diagonal of a rectangle lies.
SQUARE_CAUSAL = {
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
}
BATCH, HEADS = "0", "1"


@dataclass(frozen=True)
class Call:
    """One forward op and the node of its first result."""

    node: Node
    out: Node

    @property
    def given(self) -> dict[str, Any]:
        """Arguments by name, as they are now: an earlier site that is replaced may be one."""
        return bound(self.node)

    @property
    def mask(self) -> Node | None:
        return _mask_of(self.given)


def calls(graph: torch.fx.Graph) -> list[Call]:
    """Every call whose result is used, in graph order."""
    found: list[Call] = []
    for node in graph.nodes:
        if node.op == "call_function" and node.target in FORWARDS:
            out = _result(node, 0)
            if out is not None:
                found.append(Call(node, out))
    return found


def bound(node: Node) -> dict[str, Any]:
    """The arguments of an op by their names in its schema, defaults included."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    given: dict[str, Any] = {a.name: a.default_value for a in schema if a.has_default_value()}
    given |= {a.name: value for a, value in zip(schema, node.args, strict=False)}
    return given | node.kwargs


def _mask_of(given: dict[str, Any]) -> Node | None:
    return given.get("attn_mask", given.get("attn_bias"))


def _result(node: Node, index: int) -> Node | None:
    for user in node.users:
        if user.target is operator.getitem and user.args[1] == index:
            return user
    return None


@dataclass(frozen=True)
class Forward:
    """A call that was read, and what its gradients are read by."""

    call: Call
    site: Site
    canonical: Position
    q: Operand
    k: Operand
    v: Operand
    rotations: dict[str, Read]  # of q and k, in the site or not
    finished: Finished
    lanes: BothLanes = (None, None)  # of q and k where the site has their rotation


def read_call(call: Call, values: ValueNumbers) -> Forward:
    """The attention of a call, q and k as it takes them; raises Unread."""
    given = call.given
    if given["dropout_p"] != 0.0:
        raise Unread(f"dropout_p is {given['dropout_p']:g}, accepted 0")
    if given.get("return_debug_mask"):
        raise Unread("return_debug_mask is True, accepted False")
    q, k, v = (_operand(call, name) for name in ("query", "key", "value"))
    (batch, heads, L, D), S = shape_of(q.node), shape_of(k.node)[2]
    value_dim = shape_of(v.node)[3]
    if not isinstance(D, int) or not isinstance(value_dim, int):
        raise Unread(f"head dims are {D} and {value_dim}, accepted static ones")
    canonical = (*_batched(batch, heads), whole("i", L), whole("j", S))
    mask = _mask(call, canonical, (L, S), values)
    number = given["scale"]
    scale = 1.0 / math.sqrt(D) if number is None else number
    if not isinstance(scale, int | float):
        raise Unread(f"scale is {scale}, accepted a number")
    views = [operands.view(x.node, x.position) for x in (q, k, v)]
    batch_axes, kv_heads, group = attention.grouped(canonical[:2], *views, (None, None), mask)
    at_out = (*canonical[:2], whole("i", L), whole("e", value_dim))
    site = Site(
        anchor=call.out,
        q=views[0],
        k=views[1],
        v=views[2],
        batch=batch_axes,
        kv_heads=kv_heads,
        group=group,
        query_length=L,
        key_length=S,
        head_dim=D,
        value_dim=value_dim,
        scale=float(scale),
        mask=mask,
        outputs=attention.arrangements(call.out, at_out, values),
        is_sdpa=True,
        sdpa_has_mask=call.mask is not None,
        zeros_empty_rows=may_be_empty(mask, L, S),
    )
    for target in site.outputs:
        operands.unrounded(target.node, call.out)
    turns = rotations(q, k, D, values)
    return Forward(call, site, canonical, q, k, v, turns, Finished(D, values))


def turned(forward: Forward, turning: str) -> Forward:
    """The same call with the rotations of `turning` in the site, as far as they read; raises
    Unread."""
    site = forward.site
    made = rotated(forward.q, forward.k, site.head_dim, forward.rotations, turning)
    site = attention.with_rotations(site, made, forward.canonical[:2])
    return replace(forward, site=site, lanes=made.lanes)


def _batched(batch: Size, heads: Size) -> tuple[Place, Place]:
    return whole(BATCH, batch), whole(HEADS, heads)


def _operand(call: Call, name: str) -> Operand:
    """query, key or value at (batch, head, position, lane); a key head serves a run of query
    heads."""
    node = call.given[name]
    shape = shape_of(node)
    if len(shape) != 4:
        raise Unread(f"{name} has {len(shape)} dims, accepted 4")
    batch, heads = shape_of(call.given["query"])[:2]
    if not same(shape[0], batch):
        raise Unread(f"{name} has batch size {shape[0]}, accepted the query's {batch}")
    times = quotient(heads, shape[1])
    if times is None:
        raise Unread(f"{name} has {shape[1]} heads, accepted divisors of the query's {heads}")
    own = Place() if same(shape[1], 1) else Place((Digit(HEADS, times, shape[1]),))
    row, lane = ("i" if name == "query" else "j"), ("e" if name == "value" else "d")
    place = (whole(BATCH, batch), own, whole(row, shape[2]), whole(lane, shape[3]))
    return Operand(call.node, node, place)


def _mask(
    call: Call, canonical: Position, lengths: tuple[Size, Size], values: ValueNumbers
) -> Mask:
    given, node = call.given, call.mask
    if given["is_causal"]:
        if node is not None:
            raise Unread("is_causal is given beside a mask, accepted one of them")
        if call.node.target in SQUARE_CAUSAL and not same(*lengths):
            raise Unread(f"is_causal with lengths {lengths[0]} and {lengths[1]}, accepted equal")
        return Mask(band_hi=0)
    if node is None:
        return Mask()
    scores = Scores(call.node, canonical)
    view = View(node, broadcast(node, canonical))
    if node.meta["val"].dtype is torch.bool:
        scores.filled.append((view, True, -math.inf))
    else:
        scores.added.append((view, 1.0))
    return masks.read(
        scores, Integers(values), frozenset(axes_in(canonical[:2])), (lengths[0], lengths[1])
    )


def survivor(forward: Forward, replaced: Iterable[Node]) -> Node | None:
    """A node that needs the call, or its backward, by a way that does not pass through one of
    `replaced`.

    The ops count as random, so that dead code elimination may leave them: `discard` does not.
    """
    own = {forward.call.node, *_backwards(forward.call)}
    todo, seen = [forward.call.node], {*replaced}
    while todo:
        reached = todo.pop()
        if reached in seen:
            continue
        seen.add(reached)
        if reached.op == "output" or (reached.is_impure() and reached not in own):
            return reached
        todo += reached.users
    return None


def discard(graph: torch.fx.Graph) -> None:
    """Takes fused attention ops that nothing needs any more out of a graph."""
    ours = {*FORWARDS, *FORWARDS.values()}
    for node in reversed(list(graph.nodes)):
        if node.target in ours and not node.users:
            graph.erase_node(node)


def read_call_gradients(forward: Forward, values: ValueNumbers) -> Gradients | None:
    """The gradients of a call; None where the graph holds none. Raises Unread where the op's
    backward is not this call's."""
    backwards = _backwards(forward.call)
    if not backwards:
        return None
    if len(backwards) > 1:
        raise Unread(f"{len(backwards)} backward ops belong to one call, accepted 1")
    (node,) = backwards
    given = bound(node)
    _belongs(given, forward.call, values)
    if _needs_mask_gradient(node, given):
        raise Unread("the mask needs a gradient, accepted masks without")
    grad = given.get("grad_out", given.get("grad_out_"))
    shape = shape_of(grad)
    at_out = (*forward.canonical[:3], whole("e", shape[3]))
    found: list[tuple[Target, ...]] = []
    sides = ((forward.q, forward.lanes[0]), (forward.k, forward.lanes[1]), (forward.v, None))
    for index, (operand, lanes) in enumerate(sides):
        start = _result(node, index)
        if start is None or not start.users:
            found.append(())
            continue
        held = covered(operand.position, list(forward.site.group)) if index else set()
        summed = tuple(d for d in forward.site.group if d in held)  # where k and v were repeated
        found.append(forward.finished.targets(start, operand.position, lanes, summed))
    return Gradients(operands.view(grad, at_out), *found)


def _backwards(call: Call) -> list[Node]:
    """Backward ops that take the call's log-sum-exp."""
    summed = _result(call.node, 1)
    found: dict[Node, None] = {}
    if summed is not None:
        for _, user in operands.moved_users(summed, ()):
            if user.target is FORWARDS[call.node.target]:
                found[user] = None
    return list(found)


def _belongs(given: dict[str, Any], call: Call, values: ValueNumbers) -> None:
    """Raises Unread unless the backward op has the arguments and results of the forward."""
    own = call.given
    pairs = [(name, own[name]) for name in ("query", "key", "value")]
    pairs += [("out", call.out), ("logsumexp", _result(call.node, 1))]
    for name, wanted in pairs:
        if _seen(given[name], values) is not _seen(wanted, values):
            raise Unread(f"the backward's {name} is another one, accepted the forward's")
    mask = _mask_of(given)
    if (mask is None) != (call.mask is None) or (
        mask is not None and _seen(mask, values) is not _seen(call.mask, values)
    ):
        raise Unread("the backward's mask is another one, accepted the forward's")
    for name in ("dropout_p", "is_causal", "scale"):
        if given[name] != own[name]:
            raise Unread(
                f"the backward's {name} is {given[name]}, the forward's {own[name]}, "
                "accepted the same"
            )


def _seen(node: Any, values: ValueNumbers) -> Node:
    """The first node of the value behind aliases."""
    node = values.first(node)
    while node.target in (aten.alias.default, aten.detach.default):
        node = values.first(node.args[0])
    return node


def _needs_mask_gradient(node: Node, given: dict[str, Any]) -> bool:
    needed: Iterable[bool] = given.get("grad_input_mask", ())
    result = _result(node, 3)
    return len(tuple(needed)) == 4 and bool(result is not None and result.users)

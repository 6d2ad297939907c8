"""Reads one attention, from its softmax outwards: weights times values, scores, operands, mask,
rotation.

`read_site` answers with a `Site` (inductor_gqa/site.py) or raises `Unread` with what stood in the
way. Nothing is changed here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from inductor_gqa.site import Rotation, Site, Target, View

from . import dropout, masks, operands, scores, weighted
from .anchors import Softmax
from .axes import Digit, Place, Position, Size, Unread, axes_in, product, same, shape_of, whole
from .empty_rows import may_be_empty
from .integers import Integers
from .operands import Operand
from .renaming import Renaming, atoms_of, covered
from .turned import BothLanes, Read, Turned, rotated, rotations
from .values import ValueNumbers

aten = torch.ops.aten
Node = torch.fx.Node


@dataclass(frozen=True)
class Forward:
    """A site whose forward was read, and what the backward is read by."""

    anchor: Softmax
    site: Site
    canonical: Position  # of the weights, without a sink
    dropped: View  # the weights as they are multiplied with the values
    softmax: (
        View  # the same element in the softmax's own result, which may have a sink column beside
    )
    product: Node | None  # weights times values, where the graph has it
    scores: scores.Scores
    q: Operand
    k: Operand
    rotations: dict[str, Read]  # of q and k, in the site or not
    lanes: BothLanes = (None, None)  # of q and k where the site has their rotation


def read_forward(softmax: Softmax, values: ValueNumbers) -> Forward:
    """The attention around a softmax, q and k as the matmul has them; raises Unread."""
    rank = len(shape_of(softmax.weights))
    if softmax.dim != rank - 1:
        raise Unread(f"the softmax runs over dim {softmax.dim} of {rank}, accepted the last")
    if rank < 2:
        raise Unread(f"the weights have {rank} dims, accepted 2 or more")
    weights, beside = without_sink(softmax.weights)
    shape = shape_of(weights)
    canonical = canonical_position(shape)
    last = canonical[-1]
    at_softmax = (*canonical[:-1], Place(last.digits, last.offset + beside))
    dropped = _dropped(weights, canonical, values)
    used = dropped.result
    found = weighted.read(used.node, used.position, values)
    read = scores.read(softmax.scores, at_softmax, values)
    if (read.sink is None) != (weights is softmax.weights):
        raise Unread(
            "a column of the softmax is dropped that is no sink, accepted a logit per head"
        )
    operands.unrounded(softmax.scores, read.matmul)
    found.unrounded(used.node, softmax.weights)
    try:
        names = score_names(read, canonical)
    except Unread as why:
        raise Unread("the softmax takes a part of the scores, accepted all of them") from why
    q_operand, k_operand = operands.operands(read.matmul)
    left, right, _ = operands.matmul_axes(read.matmul)
    head_dim = shape_of(read.matmul.args[operands.MATMULS[read.matmul.target]])[-1]  # type: ignore[arg-type]
    if not isinstance(head_dim, int) or not isinstance(found.dim, int):
        raise Unread(f"head dims are {head_dim} and {found.dim}, accepted static ones")
    operands.free_axis("c", head_dim, "d", names)
    q = Operand(read.matmul, q_operand, names.apply(left))
    k = Operand(read.matmul, k_operand, names.apply(right))
    if "j" in axes_in(q.position):
        q, k = k, q  # spelled K Q^T
    q_view, k_view = (operands.view(x.node, x.position) for x in (q, k))
    mask = masks.read(
        read,
        Integers(values),
        frozenset(axis for axis in axes_in(canonical[:-2])),
        (shape[-2], shape[-1]),
    )
    dropped.check(read.matmul, mask)
    batch, kv_heads, group = grouped(canonical[:-2], q_view, k_view, found.v, (None, None), mask)
    site = Site(
        anchor=weights,
        q=q_view,
        k=k_view,
        v=found.v,
        batch=batch,
        kv_heads=kv_heads,
        group=group,
        query_length=shape[-2],
        key_length=shape[-1],
        head_dim=head_dim,
        value_dim=found.dim,
        scale=read.scale,
        scale_tensor=read.scale_tensor,
        softcap=read.softcap,
        sink=None if read.sink is None else sink_view(read.sink, heads_only=(*kv_heads, *group)),
        mask=mask,
        keep=dropped.keep,
        keep_scale=dropped.factor,
        drawn=dropped.drawn,
        outputs=() if found.product is None else arrangements(*found.product, values),
        zeros_empty_rows=softmax.is_guarded and may_be_empty(mask, shape[-2], shape[-1]),
    )
    if "i" in axes_in(found.v.position):
        raise Unread("the values vary by query, accepted values over batch, head and key")
    for target in site.outputs:
        operands.unrounded(target.node, found.product[0])  # type: ignore[index]
    whole_softmax = View(softmax.weights, at_softmax)
    product_ = found.product and found.product[0]
    turns = rotations(q, k, head_dim, values)
    return Forward(softmax, site, canonical, used, whole_softmax, product_, read, q, k, turns)


def turned(forward: Forward, turning: str) -> Forward:
    """The same attention with the rotations of `turning` in the site, as far as they read; raises
    Unread."""
    site = forward.site
    made = rotated(forward.q, forward.k, site.head_dim, forward.rotations, turning)
    return replace(
        forward, site=with_rotations(site, made, forward.canonical[:-2]), lanes=made.lanes
    )


def with_rotations(site: Site, made: Turned, batch_places: Iterable[Place]) -> Site:
    batch, kv_heads, group = grouped(batch_places, made.q, made.k, site.v, made.turns, site.mask)
    return replace(
        site,
        q=made.q,
        k=made.k,
        batch=batch,
        kv_heads=kv_heads,
        group=group,
        scale=site.scale * made.factor,
        rotate_q=made.turns[0],
        rotate_k=made.turns[1],
        notes=made.misses,
    )


def _dropped(weights: Node, canonical: Position, values: ValueNumbers) -> dropout.Dropped:
    """The weights as the values take them; as they are, where they meet a gradient alone."""
    try:
        return dropout.read(weights, canonical, values)
    except Unread:
        if weighted.beside_gradient(weights, canonical, values) is None:
            raise
        return dropout.Dropped(View(weights, canonical))


def without_sink(weights: Node) -> tuple[Node, Size]:
    """(the weights of the keys alone, their first column): a slice that drops one column, where
    there is one."""
    n = shape_of(weights)[-1]
    for moved, user in operands.moved_users(weights, ()):
        if user.target is aten.slice.Tensor and user.args[0] is moved:
            rank = len(shape_of(user))
            kept = shape_of(user)[-1]
            if user.args[1] % rank == rank - 1 and same(kept + 1, n):  # type: ignore[operator]
                start = user.args[2] or 0 if len(user.args) > 2 else 0
                if isinstance(start, int) and start in (0, 1):
                    return user, start
    return weights, 0


def sink_view(sink: View, heads_only: tuple[Digit, ...]) -> View:
    """The sink behind its expansion; it may vary by head only."""
    found = operands.view(sink.node, sink.position)
    axes = [d for place in found.position for d in place.digits if isinstance(d, Digit)]
    inside = covered(found.position, list(heads_only))
    if not same(product(d.size for d in axes), product(d.size for d in inside)):
        raise Unread("the sink varies by more than the head, accepted one logit a head")
    return found


def canonical_position(shape: tuple[Size, ...]) -> Position:
    names = [str(d) for d in range(len(shape) - 2)] + ["i", "j"]
    return tuple(whole(name, n) for name, n in zip(names, shape, strict=True))


def score_names(read: scores.Scores, canonical: Position) -> Renaming:
    """Site names of the score matmul's axes n, l and r."""
    del canonical
    names = Renaming()
    names.learn(operands.matmul_axes(read.matmul)[2], read.position)
    return names


def grouped(
    batch_places: Iterable[Place],
    q: View,
    k: View,
    v: View,
    turns: tuple[Rotation | None, Rotation | None],
    mask: masks.Mask,
) -> tuple[tuple[Digit, ...], tuple[Digit, ...], tuple[Digit, ...]]:
    """The batch axes of the weights cut into batch, key/value heads and group.

    What neither k nor v has is the group; of the rest the last is the key/value head, unless key
    padding or a rotation table varies along it.
    """
    atoms: list[Digit] = []
    for place in batch_places:
        for digit in place.digits:
            assert isinstance(digit, Digit)
            atoms += atoms_of(digit, [x.position for x in (q, k, v)])
    has = [covered(x.position, atoms) for x in (k, v)]
    group = tuple(a for a in atoms if not any(a in h for h in has))
    shared = [a for a in atoms if any(a in h for h in has)]
    batch_like: set[Digit] = set()
    for turn in turns:
        if turn is not None:
            for table in (*turn.cos.views, *turn.sin.views):
                batch_like |= covered(table.position, atoms)
    for view, _ in mask.keys:
        batch_like |= covered(view.position, atoms)
    split = len(shared)
    first_axis = shared[0].axis if shared else ""
    if shared and shared[-1] not in batch_like and (len(shared) > 1 or first_axis != "0"):
        split -= 1
    batch, heads = tuple(shared[:split]), tuple(shared[split:])
    if any(a in batch_like for a in (*heads, *group)):
        raise Unread("key padding or a rotation table varies by head, accepted one for all heads")
    return batch, heads, group


def arrangements(start: Node, position: Position, values: ValueNumbers) -> tuple[Target, ...]:
    """The last rearrangements of `start` before something is computed from them, with the site's
    axes in their dims."""
    ends: dict[Node, None] = {}
    for moved, _user in operands.moved_users(start, position, casts=True):
        ends[moved] = None
    out: list[Target] = []
    for node in ends:
        own = tuple(whole(f"x{d}", n) for d, n in enumerate(shape_of(node)))
        names = operands.renaming(node, own, start, position, values)
        out.append(Target(node, names.apply(own)))
    return tuple(out)

"""Reads one attention of a graph in whole: its forward, its rotations where they can be read, the
backward that the graph holds, and whether anything else needs what would be replaced."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch

from . import rewrite, rewrite_given
from .patterns import attention, sdpa
from .patterns.anchors import Softmax
from .patterns.attention import Forward, arrangements
from .patterns.axes import Unread
from .patterns.escapes import escapes, returned
from .patterns.given import Given, read_given
from .patterns.gradients import read_backward, read_gradients
from .patterns.naming import use
from .patterns.operands import moved_users
from .patterns.outside import outside
from .patterns.sdpa import Call
from .patterns.values import ValueNumbers
from .site import Site, Target


def read(anchor: Softmax | Call, values: ValueNumbers) -> Site:
    """The site with its rotations inside if that can be read in whole, else with q's alone, as
    where the turned k is returned as a cache that has a gradient, else without, and with a note
    that says why; raises Unread."""
    read_: Callable[[str], Site] = (
        _softmax(anchor, values) if isinstance(anchor, Softmax) else _call(anchor, values)
    )
    try:
        return read_("qk")
    except Unread as why:
        reason = str(why)
    try:
        site = read_("q")
        if site.rotate_q is not None:
            site.notes = (*site.notes, outside(reason, ["k"]))
            return site
    except Unread:
        pass
    site = read_("")
    site.notes = (outside(reason, []),)
    return site


def _call(call: Call, values: ValueNumbers) -> Callable[[str], Site]:
    """Reads a call, and answers with what reads it with some of its rotations inside."""
    plain = sdpa.read_call(call, values)

    def with_rotations(turning: str) -> Site:
        found = sdpa.turned(plain, turning)
        found.site.gradients = sdpa.read_call_gradients(found, values)
        kept = sdpa.survivor(found, rewrite.replaced(found.site))
        if kept is not None:
            raise Unread(
                f"another result of the call is {use(kept)}, accepted the output and its gradients"
            )
        return found.site

    return with_rotations


def _softmax(softmax: Softmax, values: ValueNumbers) -> Callable[[str], Site]:
    """Reads the attention around a softmax, as `_call`."""
    plain = attention.read_forward(softmax, values)
    with _escaping_scores_named(plain, values):
        backward = read_backward(plain, values)

    def with_rotations(turning: str) -> Site:
        found = attention.turned(plain, turning)
        if backward is not None:
            with _escaping_scores_named(found, values):
                found.site.gradients = read_gradients(found, backward, values)
        _alone(found, values)
        return found.site

    return with_rotations


@contextmanager
def _escaping_scores_named(found: Forward, values: ValueNumbers) -> Generator[None, None, None]:
    """What else becomes of the scores has a gradient of its own: where theirs does not read, that
    is the reason."""
    try:
        yield
    except Unread:
        what = escapes(found, values)
        if what is not None:
            raise Unread(
                f"the {what} returned as well, accepted scores that only the softmax needs"
            ) from None
        raise


def _alone(found: Forward, values: ValueNumbers) -> None:
    """Raises Unread where something else needs what would be replaced; weights that are returned
    become a result of the site."""
    site, softmax = found.site, found.anchor
    if found.product is None and not rewrite.replaced(site):
        raise Unread("0 matmuls sum the weights over the keys, accepted 1")
    kept = rewrite.leftover(site, softmax.weights)
    if kept is not None and not (site.softcap or site.sink or site.keep):
        site.weights = _returned_weights(found, values)
        kept = rewrite.leftover(site, softmax.weights)
    if kept is not None:
        raise Unread(
            f"the attention weights are {use(kept)}, accepted weights that nothing else needs"
        )
    kept = rewrite.leftover(site, found.scores.matmul)
    if kept is not None and kept.op == "output":
        what = returned(found, rewrite.replaced(site))
        raise Unread(f"the {what} returned as well, accepted scores that only the softmax needs")
    if kept is not None:
        raise Unread(
            f"the scores are {use(kept)} as well, accepted scores that only the softmax needs"
        )


def _returned_weights(found: Forward, values: ValueNumbers) -> tuple[Target, ...]:
    """Where the weights are needed beside their product with the values; raises Unread where a
    gradient comes back that way."""
    site = found.site
    done = [target.node for target in rewrite.targets(site)]
    for _, user in moved_users(site.anchor, ()):
        if user.op == "output":
            continue  # returned as they are: no gradient, though it stands beside gradients
        if values.comes_from_gradient(user) and rewrite.survivor(user, *done):
            if not _is_shown(site.anchor, values, done):
                raise Unread(
                    "the gradient of the scores is needed beside those of q, k and v, as for a "
                    "learned scale or bias, accepted those three alone"
                )
            raise Unread("the attention weights are returned with a gradient, accepted without one")
    ends = arrangements(site.anchor, found.canonical, values)
    return tuple(end for end in ends if rewrite.survivor(end.node, *done))


def _is_shown(weights: torch.fx.Node, values: ValueNumbers, done: list[torch.fx.Node]) -> bool:
    """Whether the forward has another result that is made of the weights."""
    todo, seen = [weights], {weights, *done}
    for node in todo:
        for user in node.users:
            if user.op == "output":
                return True
            if user not in seen and not values.comes_from_gradient(user):
                seen.add(user)
                todo.append(user)
    return False


def read_alone(total: torch.fx.Node, values: ValueNumbers) -> Given:
    """The backward that stands alone around this row sum of P dP; raises Unread."""
    given = read_given(total, values)
    kept = rewrite_given.leftover(given)
    if kept is not None:
        raise Unread(
            f"the row sum of P dP is {use(kept)}, accepted one that only the gradients need"
        )
    return given

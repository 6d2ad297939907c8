"""Writes the rotation tables of a site as the ops want them: [batch or 1, length, width], a column
for each turned lane."""

from __future__ import annotations

import torch

from .emit import Emitter
from .patterns.axes import Digit, size_of
from .site import Rotation, Table

aten = torch.ops.aten
Node = torch.fx.Node
Axes = tuple[Digit, ...]


def forward(
    turn: Rotation | None, batch: Axes, row: Axes, emit: Emitter
) -> tuple[Node | None, Node | None]:
    """cos and sin of `turn` as a rotation."""
    if turn is None:
        return None, None
    straight = {spread: spread for spread in SPREADS}
    cos = _product(turn.cos, straight, turn.width, batch, row, emit)
    sin = _product(turn.sin, straight, turn.width, batch, row, emit)
    return cos, _signed(sin, turn.sign, emit)


def adjoint(
    turn: Rotation | None, batch: Axes, row: Axes, emit: Emitter
) -> tuple[Node | None, Node | None]:
    """cos and sin of the rotation whose adjoint `turn` is.

    The adjoint gives lane t the sine of its partner, with the other sign.
    """
    if turn is None:
        return None, None
    swap = "crossed" if turn.interleaved else "swapped"
    partners = {"once": swap, swap: "once", "halves": "halves", "pairs": "pairs", "all": "all"}
    partners |= {"apart": "apart crossed", "apart crossed": "apart"}
    cos = _product(turn.cos, {spread: spread for spread in SPREADS}, turn.width, batch, row, emit)
    sin = _product(turn.sin, partners, turn.width, batch, row, emit)
    return cos, _signed(sin, -turn.sign, emit)


def _signed(node: Node, sign: float, emit: Emitter) -> Node:
    return node if sign > 0 else emit.call(aten.neg.default, node)


SPREADS = ("once", "swapped", "crossed", "halves", "pairs", "apart", "apart crossed", "all")


def _product(
    table: Table, spreads: dict[str, str], width: int, batch: Axes, row: Axes, emit: Emitter
) -> Node:
    """The table times what scales it, in fp32 at least: eager rounds after each product, in the
    type of the data."""
    node = _written(table, spreads[table.spread], width, batch, row, emit)
    for other in table.times:
        wide = torch.promote_types(node.meta["val"].dtype, torch.float32)
        wide = torch.promote_types(other.view.dtype, wide)
        beside = _product(other, spreads, width, batch, row, emit)
        node = emit.call(aten.mul.Tensor, emit.cast(node, wide), emit.cast(beside, wide))
    return node


def _written(table: Table, spread: str, width: int, batch: Axes, row: Axes, emit: Emitter) -> Node:
    if spread == "all":
        return emit.arrange(table.view, (batch, row, ()))
    columns = width // 2 if table.spread in ("halves", "pairs") else width
    node = emit.arrange(table.view, (batch, row, (Digit("w", 1, columns),)))
    half = width // 2
    if spread == "halves":
        return emit.call(aten.cat.default, [node, node], -1)
    if spread == "swapped":
        parts = [
            emit.call(aten.slice.Tensor, node, -1, *ends) for ends in ((half, width), (0, half))
        ]
        return emit.call(aten.cat.default, parts, -1)
    if spread == "once":
        return node
    outer = [size_of(n) for n in node.meta["val"].shape[:-1]]
    if spread == "pairs":
        doubled = emit.call(aten.unsqueeze.default, node, -1)
        doubled = emit.call(aten.expand.default, doubled, [-1, -1, -1, 2])
        return emit.viewed(doubled, [*outer, width])
    if spread.startswith("apart"):
        pairs = emit.call(aten.permute.default, emit.viewed(node, [*outer, 2, half]), [0, 1, 3, 2])
    else:
        pairs = emit.viewed(node, [*outer, half, 2])
    if spread != "apart":
        pairs = emit.call(aten.flip.default, pairs, [-1])
    return emit.viewed(pairs, [*outer, width])

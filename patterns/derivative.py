"""The derivative of the scores as terms: P (dP - rowsum(P dP)), with what dropout, the mask, the
softcap and the scale make of it."""

from __future__ import annotations

import torch

from inductor_gqa.site import Site, View

from . import terms
from .attention import Forward
from .axes import Position, Unread
from .elements import Elements, flagged
from .naming import op_of
from .terms import Terms
from .values import ValueNumbers

Node = torch.fx.Node


def algebra(forward: Forward, dp: Node, values: ValueNumbers) -> Elements:
    stops = [forward.softmax.node, dp, forward.scores.matmul]
    softmax = None if forward.site.zeros_empty_rows else forward.anchor  # sums to one
    return Elements(values, stops, algebra=True, softmax=softmax)


def softmax_derivative(reader: Elements, weights: View, gradient: Terms) -> Terms:
    """P (dP - rowsum(P dP)) at one score; gradient is dP there, key "j"."""
    p = reader.at(weights.node, weights.position)
    total = row_total(reader, weights, gradient)
    return terms.add(terms.multiply(p, gradient), terms.multiply(p, total), -1.0)


def row_total(reader: Elements, weights: View, gradient: Terms) -> Terms:
    """rowsum(P dP)"""
    product = terms.multiply(reader.load(weights.node, weights.position), gradient)
    try:
        return terms.summed(product, ("j",), reader.sums_to_one)
    except ArithmeticError as why:  # one key: there is no axis to sum over
        raise Unread("the softmax runs over a single key, accepted 2 or more") from why


def weight_gradient(site: Site, reader: Elements, dp: Node, position: Position) -> Terms:
    """dP at one weight, as dropout leaves it."""
    out = reader.load(dp, position)
    for view, positive in site.keep:
        kept = flagged(reader, view.node, view.position, "where" if positive else "unless")
        assert kept is not None
        out = terms.multiply(out, kept)
    return terms.scaled(out, site.keep_scale)


def derivative(forward: Forward, reader: Elements, dp: Node, dp_position: Position) -> Terms:
    """scale * P (dP - rowsum(P dP)), with what the mask and the softcap make of it."""
    gradient = weight_gradient(forward.site, reader, dp, dp_position)
    out = softmax_derivative(reader, forward.softmax, gradient)
    read = forward.scores
    for view, keeps, _ in read.filled:
        flag = flagged(reader, view.node, view.position, "where" if keeps else "unless")
        if flag is None:
            raise Unread(f"the scores are filled by {op_of(view.node)}, accepted a boolean")
        out = terms.multiply(out, flag)
    if read.capped is not None:
        bent = reader.at(read.capped.node, read.capped.position)
        slope = terms.add(terms.number(1.0), terms.multiply(bent, bent), -1.0)
        out = terms.multiply(out, slope)
    if read.scale_tensor is not None:
        out = terms.multiply(out, reader.at(read.scale_tensor, ()))
    return terms.scaled(out, read.scale)

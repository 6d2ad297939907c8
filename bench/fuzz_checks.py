"""Runs the kernels on one example and holds what they made, and what they touched, against the
definition in fp64 and eager in the same dtype."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import re
from collections.abc import Generator
from typing import Any

import torch
from kernels import oracle, test_weights_backward, test_weights_forward
from kernels.oracle import Case

from fuzz_families import Example
from inductor_gqa import ops
from inductor_gqa.kernels import backward, choice, decode, forward
from inductor_gqa.kernels.weights_backward import weights_backward
from inductor_gqa.kernels.weights_forward import weights_forward

TABLES = ("cos_q", "sin_q", "cos_k", "sin_k")


MISSED = re.compile(r": error is (\S+), eager (\S+), floor (\S+)$")
DRAWS = 16


def is_narrow(found: list[str]) -> bool:
    """Whether all that is wrong are errors less than twice the allowed one: of few values eager's
    largest error is by chance at times half its usual size."""
    numbers = [[float(x) for x in m.groups()] for m in map(MISSED.search, found) if m]
    return len(numbers) == len(found) and all(
        error < 2 * max(2 * eager, floor) for error, eager, floor in numbers
    )


def wrong(example: Example) -> list[str]:
    """One sentence for every result that is too far off and every byte that was written astray."""
    route = example.family.route
    check = {"weights": _weights, "given": _given, "decode": _decode}.get(route, _attention)
    return [*check(example), *example.memory.wrong()]


def _attention(example: Example) -> list[str]:
    """Forward, and the gradients that the family needs; rows that are NaN in eager have none."""
    case, needs = example.case(), example.family.needs
    assert case.grad_out is not None
    has_backward = not oracle.has_nan_rows(case)
    inputs = (case.q, case.k, case.v)
    with example.memory.guards_results():
        if example.family.route == "op":
            out, lse, grads = _by_op(example, case, needs if has_backward else None)
        else:
            module = choice if example.family.route in ("chosen", "sm90") else None
            run = module or forward
            out, lse = run.attention_forward(*inputs, **case.keywords)
            grads = ()
            if has_backward:
                run = module or backward
                grads = run.attention_backward(
                    case.grad_out, *inputs, out, lse, needs=needs, **case.keywords
                )
    ours = {"out": out, "lse": lse}
    if example.family.route == "op" and not case.q.is_cuda:
        del ours["lse"]  # plain PyTorch marks rows that see nothing in another way
    for name, x, is_needed in zip(("dq", "dk", "dv"), grads, needs, strict=False):
        if is_needed:
            ours[name] = x
    if not has_backward:
        case = dataclasses.replace(case, grad_out=None)
    return oracle.errors_of(case, ours)


def _by_op(
    example: Example, case: Case, needs: tuple[bool, bool, bool] | None
) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]:
    """Through the registered ops, whose arguments broadcast instead of being expanded."""
    named: dict[str, Any] = dict.fromkeys(ops.NAMES)
    named |= {"softcap": 0.0, "fill_adds": False, "rope_start": 0, "rope_interleaved": False}
    named |= {"keep_scale": 1.0, "precision": "ieee", "q": case.q, "k": case.k, "v": case.v}
    for name, x in case.keywords.items():
        named[name] = _unexpanded(x) if isinstance(x, torch.Tensor) else x
    if named["fill"] == -math.inf:
        named["fill"] = None
    if example.draw.random() < 0.5:
        named["scale_tensor"] = torch.tensor(0.25, device=case.q.device)
        named["scale"] *= 4
    arguments = [named[name] for name in ops.NAMES]
    with _fallback_is_an_error():
        out, lse = ops.attention(*arguments)
        if needs is None:
            return out, lse, ()
        return out, lse, ops.attention_backward(case.grad_out, out, lse, *needs, *arguments)


def _unexpanded(x: torch.Tensor) -> torch.Tensor:
    for dim, stride in enumerate(x.stride()):
        if stride == 0:
            x = x.narrow(dim, 0, 1)
    return x


@contextlib.contextmanager
def _fallback_is_an_error() -> Generator[None, None, None]:
    """The ops answer a kernel that fails with a warning and plain PyTorch, which would pass."""

    class Raises(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise RuntimeError(record.getMessage())

    log, handler = logging.getLogger("inductor_gqa"), Raises(logging.WARNING)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


def _decode(example: Example) -> list[str]:
    case, of = example.case(), example.family
    choices = decode.Choices(splits=of.splits, use_descriptors=of.by_box)
    with example.memory.guards_results():
        out, lse = decode.attention_decode(case.q, case.k, case.v, choices=choices, **case.keywords)
    return oracle.errors_of(case, {"out": out, "lse": lse})


def _weights(example: Example) -> list[str]:
    case = example.case()
    with example.memory.guards_results():
        made = weights_forward(case.q, case.k, case.v, **case.keywords)
    return test_weights_forward.errors_of(case, made)


def _given(example: Example) -> list[str]:
    """The backward from weights that are plain noise: neither positive nor summing to one."""
    of, B, L, S = example.family, example.B, example.L, example.S
    H = of.K * of.R
    weights = example.normal(B, H, L, S)
    order, gap = ((0, 1, 2, 3), 3) if of.index % 2 else ((0, 2, 1, 3), 0)
    placed = example.memory.placed(weights, order, gap=gap)
    shapes = ((B, L, H, of.E), (B, L, H, of.D), (B, S, H, of.D), (B, S, H, of.E))
    made = [
        example.laid(example.normal(*shape), layout)
        for shape, layout in zip(shapes, of.layouts, strict=True)
    ]
    keywords: dict[str, Any] = {"scale": 0.3, "group": of.R}
    tables = example.rotated()
    keywords |= {name: tables[name].to(of.dtype) for name in TABLES if name in tables}
    keywords |= {name: x for name, x in tables.items() if name not in TABLES}
    case = test_weights_backward.Case((made[0], placed, *made[1:]), keywords)
    needs = of.needs
    packed = of.by_box and L == S and all(needs)
    with example.memory.guards_results():
        results = weights_backward(*case.inputs, needs=needs, packed=packed, **keywords)
    return test_weights_backward.errors_of(case, results)

"""Compiles a function as torch.compile does, without Dynamo: AOTAutograd traces it directly.

Reading bytecode and making guards is a third of a check, and most tests are about the graph that
comes after: the same either way, which `patterns/test_without_dynamo.py` holds. What Dynamo is
needed for stays with it: sizes that change, graph breaks, functions that close over tensors, and
the line of the user's source that a record names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_unflatten

is_chosen = False


@contextmanager
def chosen() -> Iterator[None]:
    """`fused.run` compiles so where it can."""
    global is_chosen
    is_chosen = True
    try:
        yield
    finally:
        is_chosen = False


class _Flat(nn.Module):
    """Takes the tensors among the arguments of a function and returns its results, in a row."""

    def __init__(self, fn: Callable[..., Any], inputs: tuple[Any, ...]) -> None:
        super().__init__()
        self.fn = fn
        leaves, self.spec = tree_flatten(inputs)
        self.others = {k: x for k, x in enumerate(leaves) if not isinstance(x, torch.Tensor)}
        self.count = len(leaves)
        self.made: Any = None

    def forward(self, *tensors: torch.Tensor) -> tuple[Any, ...]:
        left = iter(tensors)
        leaves = [self.others[k] if k in self.others else next(left) for k in range(self.count)]
        results, self.made = tree_flatten(self.fn(*tree_unflatten(leaves, self.spec)))
        return tuple(results)


def compile_directly(fn: Callable[..., Any], backend: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` compiled by the backend at its first call, for inputs of that call's sizes only."""
    compiled: list[tuple[_Flat, Callable[..., Any]]] = []

    def call(*inputs: Any) -> Any:
        tensors = [x for x in tree_flatten(inputs)[0] if isinstance(x, torch.Tensor)]
        if not compiled:
            flat = _Flat(fn, inputs)
            # Without an environment of shapes all sizes are numbers.
            with tracing(TracingContext(FakeTensorMode())):
                compiled.append((flat, backend(flat, tensors)))
        flat, run = compiled[0]
        return tree_unflatten(list(run(*tensors)), flat.made)

    return call

"""What a rewrite does to a graph, as lists of operations: those that go and those that come."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from .patterns.operands import MATMULS

Node = torch.fx.Node


@dataclass(frozen=True)
class Change:
    """Operations in the order of the graph, one line each."""

    gone: tuple[str, ...]
    come: tuple[str, ...]


class Watch:
    """Remembers a graph as it is, to say later what has changed."""

    def __init__(self, graph: torch.fx.Graph) -> None:
        self.graph = graph
        self.lines = {node: line(node) for node in graph.nodes}
        self.needed = needed(graph)

    def change(self) -> Change:
        """What is needed no more, and what was not there, though neither is erased yet."""
        left = needed(self.graph)
        gone = [text for node, text in self.lines.items() if node in self.needed - left]
        come = [line(n) for n in self.graph.nodes if n in left and n not in self.lines]
        return Change(tuple(gone), tuple(come))


def needed(graph: torch.fx.Graph) -> set[Node]:
    """Nodes that an output or a side effect depends on. The graph's order is not relied on: between
    rewrites it is not sorted."""
    todo = [node for node in graph.nodes if node.op in ("placeholder", "output")]
    todo += [node for node in graph.nodes if node.op == "call_function" and node.is_impure()]
    found = set(todo)
    for node in todo:
        for source in node.all_input_nodes:
            if source not in found:
                found.add(source)
                todo.append(source)
    return found


LARGEST = 80  # of the operations around a softmax: what lies further out belongs to the model


def around(node: Node) -> tuple[str, ...]:
    """The operations between the matmuls before and after a node, these included, as lines in the
    order of the graph."""
    found = {node}
    for neighbours in (lambda n: n.all_input_nodes, lambda n: list(n.users)):
        todo = [node]
        for step in todo:
            if step is not node and (step.op != "call_function" or step.target in MATMULS):
                continue
            for other in neighbours(step):
                if other not in found and other.op == "call_function" and len(found) < LARGEST:
                    found.add(other)
                    todo.append(other)
    return tuple(line(n) for n in node.graph.nodes if n in found)


def line(node: Node) -> str:
    """E.g. "mul: float32[2, 4, 32, 32] = aten.mul.Tensor(bmm, 0.25)"."""
    given = [_text(arg) for arg in node.args]
    given += [f"{name}={_text(arg)}" for name, arg in node.kwargs.items()]
    made = kind(node)
    return f"{node.name}{': ' + made if made else ''} = {_target(node)}({', '.join(given)})"


def kind(node: Node) -> str:
    """dtype and shape of what a node makes, "" where that is no tensor."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return ""
    return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}]"


def _target(node: Node) -> str:
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target)
    return getattr(node.target, "__name__", str(node.target))


def _text(arg: Any) -> str:
    if isinstance(arg, Node):
        return arg.name
    if isinstance(arg, list | tuple):
        return f"[{', '.join(_text(part) for part in arg)}]"
    return str(arg).removeprefix("torch.")


def abandon(nodes: Iterable[Node], dead: set[Node]) -> None:
    """Adds nodes that were replaced to `dead`, and whatever only dead nodes use."""
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if node in dead:
            continue
        dead.add(node)
        todo += [n for n in node.all_input_nodes if all(user in dead for user in n.users)]

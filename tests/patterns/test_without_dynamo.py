"""What `without_dynamo` compiles is what torch.compile compiles: the same operations on the same
shapes, and the same sites."""

from collections import Counter

import pytest
import torch
import without_dynamo
from fused import FORWARD, run
from spellings import GROUPINGS, ROTATIONS, Attention, inputs

SPELLINGS = {f"rotation-{name}": {"rotation": x} for name, x in ROTATIONS.items()}
SPELLINGS |= {f"grouping-{name}": {"grouping": name} for name in sorted(GROUPINGS)[::3]}
REFUSED = {
    "scores-absolute": {"scores": lambda s: s.abs() * 0.3},
    "softmax-over-queries": {"softmax": lambda s: torch.softmax(s, -2)},
    "sum-not-of-the-row": {"softmax": lambda s: s.exp() / s.exp().sum((-2, -1), keepdim=True)},
    "weights-squared": {"softmax": lambda s: torch.softmax(s, -1).square()},
}


VIEWS = {"slice", "reshape", "view", "permute", "expand", "unsqueeze", "squeeze", "split"}


def compiled(seen):
    """Operations of all graphs with the shapes of their results, and what is said of every site.

    A view counts once: whether the backward is given it or makes it again is not for the pass.
    """
    operations = Counter(
        (str(node.target), getattr(node.meta.get("val"), "shape", None))
        for graph in seen.graphs
        for node in graph.graph.nodes
        if node.op == "call_function"
    )
    for target, shape in operations:
        if target.removeprefix("aten.").split(".")[0] in VIEWS:
            operations[target, shape] = 1
    return operations, [(site.summary, site.reason) for site in seen.sites]


def both_ways(make, train):
    """The test's own way, then torch.compile's."""
    for dynamo in (False, True):
        fn, tensors = make()
        with without_dynamo.chosen():
            yield run(fn, *tensors, train=train, dynamo=dynamo, compare=False)


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_spelling_is_the_same_graph(name):
    ours, stock = both_ways(lambda: (Attention(**SPELLINGS[name]), inputs()), train=True)
    assert ours.count(FORWARD) == 1
    assert compiled(ours) == compiled(stock)


@pytest.mark.parametrize("name", REFUSED)
def test_a_near_miss_is_the_same_graph(name):
    ours, stock = both_ways(lambda: (Attention(**REFUSED[name]), inputs()), train=True)
    assert ours.count(FORWARD) == 0
    assert compiled(ours) == compiled(stock)


def test_dynamo_is_left_out_only_where_it_is_asked_for(monkeypatch):
    calls = []
    stock = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *a, **k: calls.append(a) or stock(*a, **k))
    run(Attention(), *inputs(), compare=False)
    assert len(calls) == 1
    with without_dynamo.chosen():
        run(Attention(), *inputs(), compare=False)
        assert len(calls) == 1
        run(Attention(), *inputs(), dynamic=True, compare=False)
        assert len(calls) == 2

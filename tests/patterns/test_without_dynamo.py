"""What AOTAutograd traces directly is what torch.compile gets: the same graph after the pass."""

from collections import Counter

import pytest
import torch
from fused import run
from spellings import (
    GROUPINGS,
    Attention,
    half,
    inputs,
    interleaved,
    partial,
    softmax_by_hand,
    softmax_fp32,
)
from torch import nn
from torch._inductor.custom_graph_pass import CustomGraphPass
from without_dynamo import chosen


@pytest.fixture(autouse=True)
def _directly():
    with chosen():
        yield


def causal(_, s):
    n = s.shape[-1]
    return s.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), float("-inf"))


def capped(s):
    return 5.0 * torch.tanh(s * 0.3 / 5.0)


class Both(nn.Module):
    """Two layers, a residual between them, and a result that is not a tensor."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Attention(mask=causal), Attention(rotation=interleaved)
        self.out = nn.Linear(32, 24)

    def forward(self, x):
        x = x + self.out(self.first(x))
        return {"hidden": x, "last": self.second(x), "length": x.shape[1]}


class OfSomeInputs(nn.Module):
    """A number, nothing, and a pair of tables among the arguments."""

    def __init__(self):
        super().__init__()
        self.attention = Attention(rotation=None, scale=1.0)

    def forward(self, x, scale, nothing, tables):
        assert nothing is None
        return self.attention(x * scale) * tables[0].sum() + tables[1].sum()


SPELLINGS = {
    **{f"grouping {name}": lambda name=name: Attention(grouping=name) for name in GROUPINGS},
    "rotation half": lambda: Attention(rotation=half),
    "rotation interleaved": lambda: Attention(rotation=interleaved),
    "rotation partial": lambda: Attention(rotation=partial),
    "no rotation": lambda: Attention(rotation=None),
    "causal": lambda: Attention(mask=causal),
    "capped": lambda: Attention(scores=capped),
    "softmax in fp32": lambda: Attention(softmax=softmax_fp32, dtype=torch.bfloat16),
    "softmax by hand": lambda: Attention(softmax=softmax_by_hand),
    "permute": lambda: Attention(layout="permute"),
    "unflatten": lambda: Attention(layout="unflatten"),
    "left": lambda: Attention(scores=torch.sin),
    "two layers": Both,
}


def meaning(graph):
    """What every node computes, down to the inputs, which are known by their kind; how many of
    each. Order and names do not matter: Dynamo passes what is used, where it is first used.
    """
    known = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        kind = ""
        if isinstance(value, torch.Tensor):
            kind = (value.dtype, tuple(value.shape), value.stride())
        if node.op == "placeholder":
            known[node] = hash(("input", kind))
        elif node.op == "output":
            known[node] = hash(tuple(sorted(known[x] for x in node.all_input_nodes)))
        else:
            arguments = torch.fx.node.map_arg((node.args, node.kwargs), lambda x: known[x])
            known[node] = hash((str(node.target), repr(arguments), kind))
    return Counter(x for node, x in known.items() if node.op != "placeholder")


class Kept(CustomGraphPass):
    """Notes each graph as it is after all passes on it."""

    def __init__(self):
        self.meanings = []

    def __call__(self, graph):
        self.meanings.append(meaning(graph))

    def uuid(self):
        return None


def both_ways(make, *arguments, train):
    """The records and graphs with Dynamo, and without."""
    found = []
    for dynamo in (True, False):
        torch.manual_seed(0)
        kept = Kept()
        with torch._inductor.config.patch(joint_custom_post_pass=kept):
            seen = run(make(), *arguments, train=train, dynamo=dynamo)
        found.append((seen, kept.meanings))
    return found


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", SPELLINGS)
def test_the_graph_is_the_same_with_dynamo(name, train):
    dtype = torch.bfloat16 if "fp32" in name else torch.float32
    (with_, kept), (without, directly) = both_ways(
        SPELLINGS[name], *inputs(dtype=dtype), train=train
    )
    assert len(kept) == 1
    assert kept == directly
    assert with_.fused == without.fused == {"two layers": 2, "left": 0}.get(name, 1)
    assert [site.summary for site in with_.sites] == [site.summary for site in without.sites]
    assert with_.reasons == without.reasons


def test_arguments_that_are_no_tensors_are_the_same():
    made = (*inputs(), 0.5, None, [torch.ones(2), torch.ones(3)])
    (with_, kept), (without, directly) = both_ways(OfSomeInputs, *made, train=True)
    assert with_.fused == without.fused == 1
    assert kept == directly


def test_another_function_is_another_graph():
    """The comparison tells a scale, a mask and an order of operands apart."""
    meanings = []
    for make in (
        Attention,
        lambda: Attention(scale=0.4),
        lambda: Attention(mask=causal),
        lambda: Attention(rotation=interleaved),
    ):
        (_, kept), _ = both_ways(make, *inputs(), train=True)
        meanings.append(kept)
    assert all(a != b for k, a in enumerate(meanings) for b in meanings[:k])


def test_a_tensor_that_a_function_closes_over_is_refused():
    """It would be a constant of the graph; with Dynamo it is an input."""
    table = torch.ones(24)
    module = Attention()
    with pytest.raises(Exception, match="Fake"):
        run(lambda x: module(x * table), *inputs(), compare=False)
    seen = run(lambda x: module(x * table), *inputs(), compare=False, dynamo=True)
    assert seen.fused == 1

"""Other custom passes: what they do to the graph before ours is read as if the user had written
it."""

import contextlib

import pytest
import torch
import torch._inductor.config as inductor_config
from fused import FORWARD, Seen, backend, results, wrong
from spellings import Attention, inputs
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor.custom_graph_pass import CustomGraphPass

import inductor_gqa

aten = torch.ops.aten


class ClonesEverything(CustomGraphPass):
    """A clone behind each elementwise op, as a debugging pass might insert."""

    def __call__(self, graph):
        for node in list(graph.nodes):
            if node.target in (aten.mul.Tensor, aten.add.Tensor):
                with graph.inserting_after(node):
                    made = graph.call_function(aten.clone.default, (node,))
                made.meta = dict(node.meta)
                others = [user for user in node.users if user is not made]
                node.replace_all_uses_with(made, delete_user_cb=others.__contains__)

    def uuid(self):
        return "clones"


class DoublesScale(CustomGraphPass):
    """Changes the meaning of the graph: what we fuse is what the pass made of it."""

    def __call__(self, graph):
        for node in graph.nodes:
            if node.target is aten.mul.Tensor and node.args[1] == 0.3:
                node.args = (node.args[0], 0.6)

    def uuid(self):
        return "doubles"


class WithoutMeta(CustomGraphPass):
    """Inserts nodes that carry no values, as careless passes do."""

    def __call__(self, graph):
        for node in list(graph.nodes):
            if node.target is aten.mul.Tensor and node.args[1] == 0.3:
                with graph.inserting_after(node):
                    made = graph.call_function(aten.mul.Tensor, (node, 1.0))
                others = [user for user in node.users if user is not made]
                node.replace_all_uses_with(made, delete_user_cb=others.__contains__)

    def uuid(self):
        return "no meta"


def seen_with(other, expected, x, train=True):
    seen = Seen()
    module = Attention()
    with inductor_config.patch(joint_custom_pre_pass=other), backend(seen) as chosen:
        with inductor_gqa.enabled(always=True):
            ours = results(torch.compile(module, backend=chosen), module, [x], train)
        assert inductor_config.joint_custom_pre_pass is other
    eager = results(expected, expected, [x], train)
    wide = expected.double()
    truth = results(wide, wide, [x.detach().double().requires_grad_(train)], train)
    assert not wrong(ours, eager, truth)
    return seen


def test_a_pass_that_adds_clones_hides_nothing():
    seen = seen_with(ClonesEverything(), Attention(), *inputs())
    assert seen.count(FORWARD) == 1


def test_a_pass_that_changes_the_scale_is_obeyed():
    """The gradient's scale is a literal of its own, which the pass changes as well."""
    seen = seen_with(DoublesScale(), Attention(scale=0.6), *inputs())
    assert seen.count(FORWARD) == 1


def test_nodes_without_values_leave_the_graph(caplog):
    """torch itself wants values in training, and from 2.14 on in inference too; where such a graph
    runs it is left, and in either case ours says why it read nothing."""
    given = Attention(), *inputs(grad=False)
    try:
        with torch.no_grad(), inductor_config.patch(joint_custom_pre_pass=WithoutMeta()):
            torch.compile(given[0], fullgraph=True)(*given[1:])
        accepts = contextlib.nullcontext()
    except BackendCompilerFailed:
        accepts = pytest.raises(BackendCompilerFailed, match="val")
    torch._dynamo.reset()
    with accepts:
        seen = seen_with(WithoutMeta(), *given, train=False)
        assert seen.count(FORWARD) == 0
    assert "searching the graph, so that nothing is fused, failed" in caplog.text


def test_a_pass_given_for_one_model():
    """torch.compile(options=...) replaces the setting, and ours with it, for that model."""
    saw = []

    class Own(ClonesEverything):
        def __call__(self, graph):
            saw.append(any("inductor_gqa" in str(n.target) for n in graph.nodes))

    module, args = Attention(), inputs(grad=False)
    with (
        inductor_gqa.enabled(always=True),
        inductor_config.patch(fx_graph_cache=False),
        torch.no_grad(),
    ):
        out = torch.compile(module, options={"joint_custom_pre_pass": Own()})(*args)
        torch.testing.assert_close(out, module(*args))
    assert saw == [False]

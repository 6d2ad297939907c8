"""Regional compilation: one layer compiled once and used by all; nested regions; a graph break
between layers."""

import torch
from fused import BACKWARD, FORWARD, Seen, backend, fuses, results, wrong
from spellings import Attention, inputs
from torch import nn

import inductor_gqa


def causal(module, s):
    i = torch.arange(s.shape[-2], device=s.device)
    return s.masked_fill(i[None, :] > i[:, None], float("-inf"))


class Stack(nn.Module):
    def __init__(self, layers=4, breaks=False):
        super().__init__()
        self.layers = nn.ModuleList(Attention(E=32, mask=causal) for _ in range(layers))
        self.breaks = breaks

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x) / 8  # keeps the scores of later layers as small as the first's
            if self.breaks:
                torch._dynamo.graph_break()
        return x


def judged(module, compiles):
    (x,) = inputs(E=32)
    wide = Stack(len(module.layers)).double()
    seen = Seen()
    with inductor_gqa.enabled(always=True, strict=True), backend(seen) as chosen:
        ours = results(compiles(module, chosen), module, [x], True)
    plain = Stack(len(module.layers))
    eager = results(plain, plain, [x], True)
    truth = results(wide, wide, [x.detach().double().requires_grad_()], True)
    assert not wrong(ours, eager, truth)
    return seen


def test_one_layer_is_compiled_and_all_use_it():
    def compiles(module, chosen):
        for layer in module.layers:
            layer.compile(backend=chosen, fullgraph=True)
        return module

    seen = judged(Stack(), compiles)
    assert (seen.fused, seen.count(FORWARD), seen.count(BACKWARD)) == (1, 1, 1)


def test_all_layers_in_one_graph():
    seen = judged(Stack(), lambda module, chosen: torch.compile(module, backend=chosen))
    assert (seen.fused, seen.count(FORWARD), seen.count(BACKWARD)) == (4, 4, 4)


def test_graph_breaks_between_the_layers():
    module = Stack(2, breaks=True)
    seen = judged(module, lambda module, chosen: torch.compile(module, backend=chosen))
    assert seen.fused == seen.count(FORWARD) == seen.count(BACKWARD) > 0


def test_a_region_compiled_inside_a_compiled_model():
    def compiles(module, chosen):
        module.layers[0].compile(backend=chosen)
        return torch.compile(module, backend=chosen)

    seen = judged(Stack(2), compiles)
    assert seen.count(FORWARD) == seen.count(BACKWARD) == 2


def test_nested_compile_region_gives_the_numbers_of_eager():
    """Its body is a graph of its own, which the pass sees or not, depending on the release."""
    layer = Attention(E=32, mask=causal)

    @torch.compiler.nested_compile_region
    def region(x):
        return layer(x)

    def model(x):
        return region(region(x))

    (x,) = inputs(E=32, grad=False)
    with (
        inductor_gqa.enabled(always=True),
        torch.no_grad(),
        backend(Seen(), codegen=True) as chosen,
    ):
        ours = {"output": torch.compile(model, backend=chosen)(x)}
    eager = {"output": model(x)}
    layer.double()
    assert not wrong(ours, eager, {"output": model(x.double())})


def test_weights_shared_by_two_layers():
    layer = Attention(E=32, mask=causal)
    fuses(lambda x: layer(layer(x)), *inputs(E=32), sites=2, compare=False)

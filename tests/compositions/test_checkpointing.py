"""Activation checkpointing: the forward op is computed again where eager would compute it again,
and saved where the policy says so."""

import copy
import functools

import pytest
import torch
import torch._functorch.config as functorch_config
from fused import BACKWARD, FORWARD, Seen, backend, fuses, results, wrong
from spellings import Attention, inputs
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import inductor_gqa


def causal(module, s):
    i = torch.arange(s.shape[-2], device=s.device)
    return s.masked_fill(i[None, :] > i[:, None], float("-inf"))


class Checkpointed(torch.nn.Module):
    def __init__(self, *layers, **options):
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)
        self.options = options

    def forward(self, x):
        for layer in self.layers:
            out = checkpoint(layer, x, use_reentrant=False, **self.options)
            x = x + out[..., : x.shape[-1]]
        return x


def save_matmuls(ctx, op, *args, **kwargs):
    saved = (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)
    return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE


def save_everything(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE


def forwards(seen):
    """Forward ops in the forward graphs and in the backward graphs."""
    counts = [0, 0]
    for graph in seen.graphs:
        backward = any("tangents" in n.name for n in graph.graph.nodes if n.op == "placeholder")
        counts[backward] += sum(str(n.target) == FORWARD for n in graph.graph.nodes)
    return counts


def judged(module, x):
    seen = Seen()
    wide = copy.deepcopy(module).double()
    with inductor_gqa.enabled(always=True), backend(seen) as chosen:
        compiled = torch.compile(module, backend=chosen, fullgraph=True)
        ours = results(compiled, module, [x], True)
    eager = results(module, module, [x], True)
    truth = results(wide, wide, [x.detach().double().requires_grad_()], True)
    assert not wrong(ours, eager, truth)
    assert not seen.reasons
    return seen


def test_the_forward_op_runs_again_in_the_backward():
    seen = judged(Checkpointed(Attention(mask=causal)), *inputs())
    assert forwards(seen) == [1, 1]
    assert seen.count(BACKWARD) == 1


def test_each_of_two_layers_runs_again():
    seen = judged(Checkpointed(Attention(mask=causal), Attention(mask=causal)), *inputs())
    assert sum(forwards(seen)) >= 3  # the last layer's forward may serve its backward at once
    assert seen.count(BACKWARD) == 2


def test_one_layer_used_twice():
    layer = Attention(mask=causal)
    seen = judged(Checkpointed(layer, layer), *inputs())
    assert seen.count(BACKWARD) == 2


def test_without_checkpointing_the_forward_op_runs_once():
    seen = fuses(Attention(mask=causal), *inputs())
    assert forwards(seen) == [1, 0]


@pytest.mark.parametrize("policy", [save_matmuls, save_everything])
def test_selective_checkpointing_saves_the_op(policy):
    """The op stands in for a saved matmul and inherits that it is saved."""
    context = functools.partial(create_selective_checkpoint_contexts, policy)
    seen = judged(Checkpointed(Attention(mask=causal), context_fn=context), *inputs())
    assert forwards(seen) == [1, 0]
    assert seen.count(BACKWARD) == 1


def test_checkpoint_around_the_compiled_layer():
    """Eager checkpointing runs the compiled forward twice; its backward gets the second's."""
    layer, (x,) = Attention(mask=causal), inputs()
    seen = Seen()
    with inductor_gqa.enabled(always=True), backend(seen) as chosen:
        compiled = torch.compile(layer, backend=chosen, fullgraph=True)
        ours = results(lambda x: checkpoint(compiled, x, use_reentrant=False), layer, [x], True)
    wide = Attention(mask=causal).double()
    eager = results(layer, layer, [x], True)
    truth = results(wide, wide, [x.detach().double().requires_grad_()], True)
    assert not wrong(ours, eager, truth)
    assert seen.count(FORWARD) == seen.count(BACKWARD) == 1


class Residual(Attention):
    def forward(self, x):
        return x + super().forward(x)[..., : x.shape[-1]].sin()


@pytest.mark.parametrize(("budget", "expected"), [(0.0, [1, 1]), (1.0, [1, 0])])
def test_activation_memory_budget(budget, expected):
    """Without room for activations the partitioner runs the op again: it is an op like others."""
    with functorch_config.patch(activation_memory_budget=budget):
        seen = judged(Residual(mask=causal), *inputs())
    assert forwards(seen) == expected
    assert seen.count(BACKWARD) == 1

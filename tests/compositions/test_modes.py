"""The modes of torch.compile with generated code: what they change lies outside the ops."""

import pytest
import torch
from fused import FORWARD, fuses, results, wrong
from spellings import Attention, inputs

import inductor_gqa

MODES = ["reduce-overhead", "max-autotune"]


def causal(module, s):
    i = torch.arange(s.shape[-2], device=s.device)
    return s.masked_fill(i[None, :] > i[:, None], float("-inf"))


@pytest.mark.parametrize("mode", MODES)
def test_mode_on_the_cpu(mode):
    module, (x,) = Attention(mask=causal), inputs()
    wide = Attention(mask=causal).double()
    with inductor_gqa.enabled(always=True, strict=True):
        compiled = torch.compile(module, mode=mode)
        ours = results(compiled, module, [x], True)
    eager = results(module, module, [x], True)
    truth = results(wide, wide, [x.detach().double().requires_grad_()], True)
    assert not wrong(ours, eager, truth)


def test_generated_code_calls_the_ops_and_makes_no_scores():
    seen = fuses(Attention(mask=causal, D=8), *inputs(L=13), codegen=True, scores=(13, 13))
    assert seen.count(FORWARD) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
def test_mode_on_the_gpu_replays(mode):
    """A CUDA graph is recorded in the second or third run and replayed in the others: with other
    values in the same buffers."""
    module = Attention(D=64, E=128, mask=causal, longest=256).cuda()
    wide = Attention(D=64, E=128, mask=causal, longest=256).double().cuda()
    torch.set_float32_matmul_precision("highest")
    with inductor_gqa.enabled(always=True, strict=True):
        compiled = torch.compile(module, mode=mode)
        for seed in range(5):
            (x,) = inputs(L=256, E=128, seed=seed, grad=False)
            x = x.cuda()
            torch.compiler.cudagraph_mark_step_begin()
            with torch.no_grad():
                ours = {"output": compiled(x).clone()}
                eager, truth = {"output": module(x)}, {"output": wide(x.double())}
            assert not wrong(ours, eager, truth)


@pytest.mark.gpu
def test_training_steps_replay_on_the_gpu():
    module = Attention(D=64, E=128, mask=causal, longest=256).cuda()
    plain = Attention(D=64, E=128, mask=causal, longest=256).cuda()
    wide = Attention(D=64, E=128, mask=causal, longest=256).double().cuda()
    torch.set_float32_matmul_precision("highest")
    with inductor_gqa.enabled(always=True, strict=True):
        compiled = torch.compile(module, mode="reduce-overhead")
        for seed in range(5):
            (x,) = inputs(L=256, E=128, seed=seed, grad=False)
            x = x.cuda()
            found = []
            for run, owner, value in (
                (compiled, module, x),
                (plain, plain, x),
                (wide, wide, x.double()),
            ):
                torch.compiler.cudagraph_mark_step_begin()
                owner.zero_grad(set_to_none=True)
                run(value).square().mean().backward()
                found.append({n: p.grad.clone() for n, p in owner.named_parameters()})
            assert not wrong(*found)

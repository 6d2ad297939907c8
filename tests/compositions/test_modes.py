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


def from_positions(module, x, length):
    """Tables that the graph itself makes, from positions that move with every step of decoding."""
    lanes = torch.arange(8, device=x.device, dtype=x.dtype)
    angle = module.positions[:length, None] * 0.5**lanes
    angle = torch.cat((angle, angle), -1)
    return angle.cos(), angle.sin()


@pytest.mark.parametrize("tables", [None, from_positions], ids=["cached", "computed"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_tables_are_those_of_each_replay(device, tables):
    """https://github.com/NVlabs/Fast-dLLM/pull/51: a replay of a CUDA graph saw the rotary cache of
    another; https://github.com/vllm-project/vllm/issues/57890: tables made in the graph."""
    make = lambda: Attention(  # noqa: E731
        D=16, mask=causal, tables=tables, buffers={"positions": torch.arange(64.0)}
    )
    module, wide = make().to(device), make().double().to(device)
    torch.set_float32_matmul_precision("highest")
    with inductor_gqa.enabled(always=True, strict=True), torch.no_grad():
        compiled = torch.compile(module, mode="reduce-overhead")
        kept = []
        for seed in range(6):
            for one in (module, wide):  # in place, as a cache is written
                one.cos.mul_(0.9)
                one.sin.add_(0.1)
                one.positions.add_(1.0)
            (x,) = inputs(L=48, seed=seed, grad=False)
            x = x.to(device)
            torch.compiler.cudagraph_mark_step_begin()
            kept.append({"output": compiled(x).clone()})
            assert not wrong(kept[-1], {"output": module(x)}, {"output": wide(x.double())})
    assert not torch.equal(kept[0]["output"], kept[-1]["output"])

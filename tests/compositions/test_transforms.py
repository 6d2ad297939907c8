"""Other users of autograd: compiled autograd, a second derivative, functorch, nested tensors."""

from contextlib import nullcontext

import pytest
import torch
from fused import BACKWARD, FORWARD, Seen, backend, fuses, results, run, wrong
from spellings import Attention, inputs

import inductor_gqa


def causal(module, s):
    i = torch.arange(s.shape[-2], device=s.device)
    return s.masked_fill(i[None, :] > i[:, None], float("-inf"))


def attention(q, k, v):
    return torch.softmax(q @ k.mT * 0.3, -1) @ v


def qkv(*shape, grad=True):
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(*shape, generator=generator).requires_grad_(grad) for _ in range(3)]


def test_compiled_autograd():
    """The backward graph is captured and compiled a second time, with our op as one of its
    nodes."""
    module, (x,) = Attention(mask=causal), inputs(grad=False)
    wide = Attention(mask=causal).double()

    def step(x):
        module(x).square().sum().backward()

    seen = Seen()
    with (
        inductor_gqa.enabled(always=True),
        backend(seen) as chosen,
        torch._dynamo.config.patch(compiled_autograd=True),
    ):
        torch.compile(step, backend=chosen)(x)
    found = [{n: p.grad for n, p in module.named_parameters()}]
    for owner, value in ((Attention(mask=causal), x), (wide, x.double())):
        owner(value).square().sum().backward()
        found.append({n: p.grad for n, p in owner.named_parameters()})
    assert not wrong(*found)
    assert seen.fused == seen.count(FORWARD) == 1
    assert seen.count(BACKWARD) >= 1


def test_a_second_derivative_is_refused_as_without_us():
    """AOTAutograd compiles no second derivative; its error is the same with the pass."""
    errors = []
    for on in (False, True):
        torch._dynamo.reset()
        tensors = qkv(1, 2, 9, 8)
        seen = Seen()
        with backend(seen) as chosen, inductor_gqa.enabled(always=True) if on else nullcontext():
            out = torch.compile(attention, backend=chosen)(*tensors)
            first = torch.autograd.grad(out.square().sum(), tensors, create_graph=True)
            with pytest.raises(RuntimeError) as caught:
                torch.autograd.grad(first[0].square().sum(), tensors)
        assert seen.count(BACKWARD) == on
        errors.append(str(caught.value))
    assert errors[0] == errors[1]
    assert "double backward" in errors[0]


def test_vmap_inside_the_compiled_function():
    def batched(q, k, v):
        return torch.vmap(attention)(q, k, v)

    fuses(batched, *qkv(3, 2, 11, 8))


def test_vmap_around_the_compiled_function():
    tensors = qkv(3, 2, 11, 8, grad=False)
    with inductor_gqa.enabled(always=True), backend(Seen()) as chosen:
        compiled = torch.compile(attention, backend=chosen)
        ours = {"output": torch.vmap(compiled)(*tensors)}
    truth = {"output": attention(*(x.double() for x in tensors))}
    assert not wrong(ours, {"output": attention(*tensors)}, truth)


def test_functorch_grad_inside_the_compiled_function():
    def gradient(q, k, v):
        return torch.func.grad(lambda *a: attention(*a).square().sum(), argnums=(0, 1, 2))(q, k, v)

    seen = run(gradient, *qkv(1, 2, 11, 8, grad=False), train=False)
    assert all(site.fused or site.reason for site in seen.sites)


def test_functorch_jvp_inside_the_compiled_function():
    def tangent(q, k, v):
        return torch.func.jvp(lambda q: attention(q, k, v), (q,), (v,))

    run(tangent, *qkv(1, 2, 11, 8, grad=False), train=False)


def test_per_sample_gradients():
    def loss(weight, x):
        q = x @ weight
        return attention(q, x, x).square().sum()

    def per_sample(weight, x):
        return torch.vmap(torch.func.grad(loss), (None, 0))(weight, x)

    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(8, 8, generator=generator) / 3
    run(per_sample, weight, torch.randn(3, 11, 8, generator=generator), train=False)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_are_left_alone():
    """Jagged batches have no eager attention but SDPA's, which is no site of ours."""
    parts = [torch.randn(n, 16) for n in (5, 9)]
    x = torch.nested.nested_tensor(parts, layout=torch.jagged)

    def block(x):
        heads = (x * 2).unflatten(-1, (2, 8)).transpose(1, 2)
        out = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)
        return out.transpose(1, 2).flatten(-2).values()

    seen = Seen()
    with inductor_gqa.enabled(always=True), backend(seen) as chosen, torch.no_grad():
        ours = torch.compile(block, backend=chosen)(x)
        torch.testing.assert_close(ours, block(x))
    assert seen.count(FORWARD) == 0


def test_results_of_padded_nested_tensors():
    """Eager attention over a nested batch goes through a padded tensor, which is ordinary."""
    parts = [torch.randn(n, 8) for n in (5, 9)]
    x = torch.nested.nested_tensor(parts, layout=torch.jagged)
    padded = torch.nested.to_padded_tensor(x, 0.0)
    lengths = torch.tensor([5, 9])

    def block(x, lengths):
        s = x @ x.mT * 0.3
        hidden = torch.arange(9)[None, None, :] >= lengths[:, None, None]
        return torch.softmax(s.masked_fill(hidden, float("-inf")), -1) @ x

    fuses(block, padded, lengths, train=False)
    assert results(block, block, [padded, lengths], False)

"""Inductor launches our kernels itself, and they compute the same bits as the ops."""

import math

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from inductor_gqa import lowering, ops
from inductor_gqa.kernels import choice

pytestmark = pytest.mark.gpu
B, L, S, K, R = 2, 130, 200, 2, 3
PLAIN = {"scale": 0.1, "softcap": 0.0, "fill": -math.inf, "fill_adds": False, "rope_start": 0}
PLAIN |= {"rope_interleaved": False, "keep_scale": 1.0, "precision": "ieee"}


def normal(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, device="cuda").to(dtype)


def coin(*shape):
    return torch.rand(shape, device="cuda") < 0.7


def tables(D):
    return {f"{t}_{x}": normal(1, n, D) for t in ("cos", "sin") for x, n in (("q", L), ("k", S))}


RULES = {
    "softcap": lambda D: {"softcap": 20.0},
    "causal": lambda D: {"band_hi": S - L, "softcap": 20.0},
    "rope": lambda D: tables(D) | {"softcap": 20.0},
    "padded": lambda D: {"key_mask": coin(B, S), "softcap": 20.0},
    "one padding for all": lambda D: {"key_mask": coin(1, S), "softcap": 20.0},
    "mask": lambda D: {"mask": coin(1, 1, 1, L, S)},
    "bias": lambda D: {"bias": normal(1, K, R, 1, S)},
    "dropout": lambda D: {"keep": coin(B, K, R, L, S), "keep_scale": 1 / 0.7},
    "sink": lambda D: {"sink": normal(K, R)},
    "lowest": lambda D: {"mask": coin(B, 1, 1, L, S), "fill": torch.finfo(torch.bfloat16).min},
}


def case_of(rule, D):
    torch.manual_seed(0)
    q, k, v = normal(B, L, K, R, D), normal(B, S, K, D), normal(B, S, K, D)
    named = dict.fromkeys(ops.NAMES) | PLAIN | {"q": q, "k": k, "v": v} | RULES[rule](D)
    return [named[name] for name in ops.NAMES]


def assert_lowered(call, *args):
    """Bits of the op, from code that does not call it."""
    torch.compiler.reset()
    lowering.install.cache_clear()
    lowering.install()
    made, (code,) = run_and_get_code(torch.compile(call, fullgraph=True), *args)
    assert "torch.ops.inductor_gqa" not in code
    for ours, theirs in zip(made, call(*args), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("D", [64, 80])
@pytest.mark.parametrize("rule", RULES)
def test_forward_is_launched_by_inductor(rule, D):
    assert_lowered(lambda *args: ops.attention(*args), *case_of(rule, D))


@pytest.mark.parametrize("needs", [(True, True, True), (True, False, True)], ids=["all", "part"])
@pytest.mark.parametrize("D", [64, 80])
@pytest.mark.parametrize("rule", RULES)
def test_backward_is_launched_by_inductor(rule, D, needs):
    args = case_of(rule, D)
    out, lse = ops.attention(*args)
    grad_out = torch.randn_like(out)
    assert_lowered(
        lambda *args: ops.attention_backward(*args[:3], *needs, *args[3:]),
        grad_out,
        out,
        lse,
        *args,
    )


def test_forward_of_few_queries_is_launched_by_inductor(monkeypatch):
    monkeypatch.setattr(choice, "HAS_DECODE", True)
    q, k, v = normal(B, 3, K, R, 64), normal(B, 700, K, 64), normal(B, 700, K, 64)
    turn = {f"{t}_q": normal(1, 3, 64) for t in ("cos", "sin")}
    named = dict.fromkeys(ops.NAMES) | PLAIN | {"q": q, "k": k, "v": v, "band_hi": 697} | turn
    named |= {"key_mask": coin(B, 700), "sink": normal(K, R)}
    assert_lowered(lambda *args: ops.attention(*args), *(named[name] for name in ops.NAMES))


def test_forward_with_weights_is_launched_by_inductor():
    args = case_of("mask", 64)
    call = lambda *args: ops.attention_weights(*args, torch.float32)[:2]  # noqa: E731
    assert_lowered(
        call, *(x.float() if torch.is_tensor(x) and x.is_floating_point() else x for x in args)
    )


def test_backward_from_weights_is_launched_by_inductor():
    H, D = K * R, 64
    grad_out, q, k, v = (
        normal(B, L, H, D),
        normal(B, L, H, D),
        normal(B, S, H, D),
        normal(B, S, H, D),
    )
    weights = normal(B, H, L, S).softmax(-1)
    turn = [normal(1, n, D) for n in (L, L, S, S)]
    rest = (None, 0.1, R, 0, False, "ieee", True, True, True)
    assert_lowered(
        lambda *args: ops.weights_backward(*args, *rest), grad_out, weights, q, k, v, *turn
    )


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
@pytest.mark.parametrize("C", [96, 99])
def test_linear_layers_are_launched_by_inductor(C, precision):
    x, *weights = (normal(n, C, dtype=torch.float32) for n in (B * L, 128, 64, 33))
    call = lambda x, *weights: ops.linear_forward(x, list(weights), precision)  # noqa: E731
    assert_lowered(call, x, *weights)

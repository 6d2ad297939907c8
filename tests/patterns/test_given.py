"""A backward from given weights: what is fused, what is left, and that either is reported."""

import pytest
import torch
from fused import GIVEN, Seen, backend, never_wrong, results, run, wrong

import inductor_gqa

pytestmark = pytest.mark.usefixtures("without_dynamo")


def operands(H=3, L=11, D=8, seed=0):
    """P, which is no softmax of anything, q, k, v and dO."""
    make = torch.Generator().manual_seed(seed)
    p = torch.rand(2, H, L, L, generator=make)
    return p, *(torch.randn(2, H, L, D, generator=make) for _ in range(4))


def softmax_gradient(p, dp):
    return p * (dp - (p * dp).sum(-1, keepdim=True))


def backward(p, q, k, v, grad, scale=0.3, derivative=softmax_gradient):
    ds = derivative(p, grad @ v.mT) * scale
    return ds @ k, ds.mT @ q, p.mT @ grad


def test_fuses_the_backward_and_no_forward():
    seen = never_wrong(backward, *operands(), train=False, left=None)
    assert seen.count(GIVEN) == 1
    assert seen.summary.startswith("backward from given weights, 3 heads of 8")


def grouped(p, q, k, v, grad, scale):
    """Keys and values in two heads of three."""
    dq, dk, dv = backward(p, q, k, v, grad, scale)
    B, H, L, D = dk.shape
    return dq, *(g.reshape(B, 2, H // 2, L, D).sum(2) for g in (dk, dv))


@pytest.mark.parametrize("f", [backward, grouped], ids=lambda f: f.__name__)
def test_a_scale_that_became_a_tensor_is_read(f):
    """Where the scale and the lengths change from call to call, the scale is a 0-d tensor: what
    was computed so had no record in the report."""
    seen = Seen()
    torch._dynamo.reset()
    with inductor_gqa.enabled(always=True), backend(seen) as chosen:
        compiled = torch.compile(f, backend=chosen)
        for L, scale in ((11, 0.3), (13, 0.5), (17, 0.71)):
            given = (*operands(H=6, L=L, seed=L), scale)
            with torch.no_grad():
                ours, eager = compiled(*given), f(*given)
                truth = f(*(x.double() for x in given[:-1]), scale)
            named = [dict(zip("qkv", x, strict=True)) for x in (ours, eager, truth)]
            assert wrong(*named) == []
    assert (len(seen.sites), seen.fused) == (2, 2)
    last = [n for n in seen.graphs[-1].graph.nodes if str(n.target) == GIVEN]
    assert isinstance(last[0].args[9], torch.fx.Node)  # scale_tensor


def test_a_head_dim_that_is_dynamic_is_left_with_a_reason():
    never_wrong(backward, *operands(), 0.3, train=False, dynamic=True, left="the head dim is s")


def test_two_scales_are_left():
    def apart(p, q, k, v, grad, one, other):
        ds = softmax_gradient(p, grad @ v.mT)
        return (ds * one) @ k, (ds * other).mT @ q, p.mT @ grad

    left = "dQ and dK are scaled by 0."
    never_wrong(apart, *operands(), 0.3, 0.4, train=False, left=left)
    tensors = (torch.tensor(0.3), torch.tensor(0.4))
    left = "times a tensor, accepted equal"
    never_wrong(apart, *operands(), *tensors, train=False, left=left)


DERIVATIVES = {
    "no_delta": lambda p, dp: p * dp + (p * dp).sum(-1, keepdim=True) * 0.0,
    "delta_of_dp": lambda p, dp: p * (dp - dp.sum(-1, keepdim=True)) + (p * dp).sum(-1)[..., None],
    "sign": lambda p, dp: p * (dp + (p * dp).sum(-1, keepdim=True)),
    "twice_p": lambda p, dp: p * p * (dp - (p * dp).sum(-1, keepdim=True)),
    "by_key": lambda p, dp: softmax_gradient(p, dp) * torch.arange(p.shape[-1]),
    "added": lambda p, dp: softmax_gradient(p, dp) + 0.1,
    "clamped": lambda p, dp: softmax_gradient(p, dp).clamp(-0.1, 0.1),
}


@pytest.mark.parametrize("name", DERIVATIVES)
def test_another_derivative_is_left_with_a_reason(name):
    def f(*given):
        return backward(*given, derivative=DERIVATIVES[name])

    left = "accepted P (dP - rowsum(P dP)) times a number"
    if name == "clamped":
        left = "the gradient of the scores reaches no matmul"
    never_wrong(f, *operands(), train=False, left=left)


def test_another_gradient_of_the_values_is_left_with_a_reason():
    def f(p, q, k, v, grad, other):
        dq, dk, _ = backward(p, q, k, v, grad)
        return dq, dk, p.mT @ other

    given = (*operands(), torch.randn(2, 3, 11, 8))
    never_wrong(f, *given, train=False, left="not the gradient of the output")


@pytest.mark.parametrize("which", ["gradient", "sum"])
def test_what_else_is_needed_is_right(which):
    """The gradient of the weights is a matmul that is computed again; a row sum is left."""

    def f(p, q, k, v, grad):
        dp = grad @ v.mT
        total = (p * dp).sum(-1, keepdim=True)
        ds = p * (dp - total)
        return ds @ k, ds.mT @ q, p.mT @ grad, dp if which == "gradient" else total

    left = None if which == "gradient" else "the row sum of P dP is returned"
    never_wrong(f, *operands(), train=False, left=left)


ROW_SUMS = {
    "unsqueeze": lambda x: x.sum(-1).unsqueeze(-1),
    "index": lambda x: x.sum(3)[..., None],
    "keepdim": lambda x: torch.sum(x, dim=-1, keepdim=True),
}


@pytest.mark.parametrize("name", ROW_SUMS)
def test_fuses_every_spelling_of_the_row_sum(name):
    def derivative(p, dp):
        return p * dp - p * ROW_SUMS[name](p * dp)

    def f(*given):
        return backward(*given, derivative=derivative)

    seen = never_wrong(f, *operands(), train=False, left=None)
    assert seen.count(GIVEN) == 1


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_the_backward_of_a_norm_is_no_attention(norm):
    """It has the sum of a product over the last dim too."""

    def f(x, w, a, b):
        x = torch.einsum("bhld,bhde->bhle", x, a)
        made = torch.nn.functional.layer_norm if norm == "layer" else torch.nn.functional.rms_norm
        return torch.einsum("bhld,bhde->bhle", made(x, (8,), w), b)

    seen = Seen()
    x, a, b = (torch.randn(2, 3, 8, 8, requires_grad=True) for _ in range(3))
    w = torch.randn(8, requires_grad=True)
    torch._dynamo.reset()
    with inductor_gqa.enabled(always=True), backend(seen) as chosen:
        results(torch.compile(f, backend=chosen), f, (x, w, a, b), train=True)
    assert seen.sites == []


def turned_back(g, cos, sin, way):
    """Four spellings of the backward of a rotation; all but the first need equal halves of sin."""
    a, b = g.chunk(2, -1)
    if way == "products":
        x, y = (g * sin).chunk(2, -1)
        return g * cos + torch.cat((y, -x), -1)
    if way == "negated table":
        return g * cos + torch.cat((-b, a), -1) * (-sin)
    if way == "subtracted":
        return g * cos - torch.cat((-b, a), -1) * sin
    return g * cos + torch.cat((b, -a), -1) * sin


@pytest.mark.parametrize("way", ["products", "negated table", "subtracted", "swapped"])
def test_fuses_every_spelling_of_the_rotation_undone(way):
    def f(*given):
        *rest, cos, sin = given
        dq, dk, dv = backward(*rest)
        return turned_back(dq, cos, sin, way), turned_back(dk, cos, sin, way), dv

    tables = (torch.randn(11, 8), torch.randn(11, 8))
    seen = never_wrong(f, *operands(), *tables, train=False, left=None)
    assert "rotate-half RoPE" in seen.summary


ROUNDINGS = {
    "cast, then scaled": lambda ds, dtype: ds.to(dtype) * 0.3,
    "scaled, then cast": lambda ds, dtype: (ds * 0.3).to(dtype),
    "divided, then cast": lambda ds, dtype: (ds / 8**0.5).to(dtype),
}


@pytest.mark.parametrize("name", ROUNDINGS)
def test_fuses_every_place_of_the_cast(name):
    def f(p, q, k, v, grad):
        dp = (grad @ v.mT).float()
        ds = ROUNDINGS[name](softmax_gradient(p.float(), dp), grad.dtype)
        return ds @ k, ds.mT @ q, p.mT @ grad

    given = [x.bfloat16() for x in operands()]
    never_wrong(f, *given, train=False, left=None)


@pytest.mark.parametrize("kept", ["qk", "q", "k", "v"])
def test_a_part_of_the_gradients_is_fused_or_right(kept):
    def f(*given):
        return [x for name, x in zip("qkv", backward(*given), strict=True) if name in kept]

    if kept == "v":  # one matmul, with no softmax in sight
        assert not run(f, *operands(), train=False).sites
    else:
        never_wrong(f, *operands(), train=False, left=None)


def test_dropout_of_the_weights_is_left_with_a_reason():
    def f(p, q, k, v, grad, keep):
        dp = (grad @ v.mT) * keep / 0.9
        ds = softmax_gradient(p, dp) * 0.3
        return ds @ k, ds.mT @ q

    keep = torch.rand(2, 3, 11, 11) > 0.1
    never_wrong(f, *operands(), keep, train=False, left="P dP")

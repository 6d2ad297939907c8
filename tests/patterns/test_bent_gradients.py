"""Gradients that are not those of the forward: bent on their way, or of a backward by hand."""

import pytest
import torch
from fused import never_wrong
from near_misses import attended, grouped, tables
from spellings import half, repeat_kv, rotate_half


class Bent(torch.autograd.Function):
    """The identity, whose gradient is something else."""

    @staticmethod
    def forward(x, way):
        return x * 1.0

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.way = inputs[1]

    @staticmethod
    def backward(ctx, grad):
        return BENDS[ctx.way](grad), None


BENDS = {
    "doubled": lambda g: g * 2,
    "negated": lambda g: -g,
    "clamped": lambda g: g.clamp(-0.1, 0.1),
    "flipped": lambda g: g.flip(-1),
    "rolled": lambda g: g.roll(1, -2),
    "shifted": lambda g: g + 0.1,
    "zero": torch.zeros_like,
    "of the other heads": lambda g: g.flip(1),
    "squared": lambda g: g * g,
}
PLACES = ["q", "k", "v", "turned q", "turned k", "repeated k", "repeated v", "scores", "weights"]


@pytest.mark.parametrize("bend", BENDS)
@pytest.mark.parametrize("place", [*PLACES, "scaled", "out"])
def test_a_gradient_that_is_bent_on_its_way_is_never_wrong(place, bend):
    def at(where, x):
        return Bent.apply(x, bend) if where == place else x

    def forward(q, k, v):
        cos, sin = tables()
        q, k, v = at("q", q), at("k", k), at("v", v)
        q, k = at("turned q", half(q, cos, sin)), at("turned k", half(k, cos, sin))
        k, v = at("repeated k", repeat_kv(k, 2)), at("repeated v", repeat_kv(v, 2))
        s = at("scaled", at("scores", q @ k.mT) * 0.4)
        return at("out", at("weights", torch.softmax(s, -1)) @ v)

    never_wrong(forward, *grouped())


class Turned(torch.autograd.Function):
    """A rotation with a backward of its own."""

    @staticmethod
    def forward(x, cos, sin, way):
        return half(x, cos, sin)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[1:3])
        ctx.way = inputs[3]

    @staticmethod
    def backward(ctx, g):
        return BACKWARDS[ctx.way](g, *ctx.saved_tensors), None, None, None


def adjoint(g, cos, sin):
    a, b = (g * sin).chunk(2, -1)
    return g * cos + torch.cat((b, -a), -1)


BACKWARDS = {
    "adjoint": adjoint,
    "forward again": half,
    "other half of the sine": lambda g, cos, sin: g * cos - rotate_half(g) * sin,
    "cosine alone": lambda g, cos, sin: g * cos,
    "not undone": lambda g, cos, sin: g,
    "other signs": lambda g, cos, sin: adjoint(g, cos, -sin),
    "exchanged": lambda g, cos, sin: adjoint(g, sin, cos),
    "rows rolled": lambda g, cos, sin: adjoint(g, cos.roll(1, 0), sin.roll(1, 0)),
}


@pytest.mark.parametrize("operand", ["q", "k", "both"])
@pytest.mark.parametrize("way", BACKWARDS)
def test_a_rotation_with_a_backward_of_its_own_is_never_wrong(way, operand):
    def forward(q, k, v):
        cos, sin = tables()
        q = Turned.apply(q, cos, sin, way) if operand != "k" else half(q, cos, sin)
        k = Turned.apply(k, cos, sin, way) if operand != "q" else half(k, cos, sin)
        return attended(q, repeat_kv(k, 2), repeat_kv(v, 2))

    seen = never_wrong(forward, *grouped())
    if way == "adjoint":
        assert "rotate-half RoPE, " in seen.summary

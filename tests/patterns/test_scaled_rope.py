"""Rotations that are scaled by position as well: xPos, whose decay multiplies the tables of q and
divides those of k, and temperatures. Both are read as part of the rotation, wherever they stand.
"""

import pytest
import torch
from fused import FORWARD, fuses, never_wrong
from spellings import (
    Attention,
    angles,
    half,
    half_table,
    inputs,
    interleaved,
    interleaved_in_halves_out,
    rotate_every_two,
    rotate_half,
)

import inductor_gqa
from inductor_gqa import reading, tables

pytestmark = pytest.mark.usefixtures("without_dynamo")


def decay(length, width=8, layout="halves"):
    """A number for each position and pair of lanes, not near to one."""
    powers = (torch.arange(0, width, 2) + 0.4 * width) / (1.4 * width)
    found = powers ** ((torch.arange(length)[:, None] - length // 2) / 12.0)
    if layout == "halves":
        return torch.cat((found, found), -1)
    return found.repeat_interleave(2, -1)


def tables_multiplied(x, cos, sin, scale):
    return half(x, cos * scale, sin * scale)


def products_multiplied(x, cos, sin, scale):
    """x-transformers, rotary-embedding-torch."""
    return x * cos * scale + rotate_half(x) * sin * scale


def pairs_multiplied(x, cos, sin, scale):
    return x * cos * scale + rotate_every_two(x) * sin * scale


def turned_then_multiplied(x, cos, sin, scale):
    return half(x, cos, sin) * scale


def multiplied_then_turned(x, cos, sin, scale):
    return half(x * scale, cos, sin)


def half_tables_multiplied(x, cos, sin, scale):
    return half_table(x, cos, sin) * scale


def neighbours_turned_then_multiplied(x, cos, sin, scale):
    return interleaved(x, cos, sin) * scale


def neighbours_to_halves_then_multiplied(x, cos, sin, scale):
    return interleaved_in_halves_out(x, cos, sin) * scale


def multiplied_by_one_number_a_position(x, cos, sin, scale):
    return half(x, cos, sin) * scale[:, :1]


def multiplied_by_two_tables(x, cos, sin, scale):
    return half(x, cos, sin) * scale * scale[:, :1].sqrt()


def squared(x, cos, sin, scale):
    return half(x, cos, sin) * scale * scale


SCALED = (
    tables_multiplied,
    products_multiplied,
    pairs_multiplied,
    turned_then_multiplied,
    multiplied_then_turned,
    half_tables_multiplied,
    neighbours_turned_then_multiplied,
    neighbours_to_halves_then_multiplied,
    multiplied_by_one_number_a_position,
    multiplied_by_two_tables,
    squared,
)
named = {"ids": lambda f: f.__name__}


class XPos(Attention):
    """The scale of k is one over that of q."""

    def __init__(self, turn, **options):
        super().__init__(rotation=None, **options)
        self.turn = turn

    def attend(self, q, k, v):
        n = q.shape[2]
        scale = decay(n).to(q.dtype)
        cos, sin = self.cos[:n], self.sin[:n]
        q, k = self.turn(q, cos, sin, scale), self.turn(k, cos, sin, 1 / scale)
        return super().attend(q, k, v)


def causal(self, s):
    n = s.shape[-1]
    return s.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -1e30)


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("B", [1, 2], ids="B{}".format)
@pytest.mark.parametrize("turn", SCALED, **named)
def test_fuses_with_the_scale_inside(turn, B, train):
    seen = fuses(XPos(turn, mask=causal), *inputs(B), train=train, scores=(11, 11))
    assert "RoPE, causal" in seen.summary
    assert not seen.sites[0].notes
    for name in ("cos_q", "cos_k"):
        assert seen.argument(name) is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("turn", [products_multiplied, tables_multiplied], **named)
def test_narrow_dtypes(turn, dtype):
    seen = fuses(XPos(turn, dtype=dtype), *inputs(dtype=dtype))
    assert "RoPE" in seen.summary


@pytest.mark.parametrize(
    "turn", [products_multiplied, multiplied_by_one_number_a_position], **named
)
def test_dynamic_lengths(turn):
    seen = fuses(XPos(turn), *inputs(L=11), dynamic=True, more=[inputs(L=7), inputs(L=13)])
    assert "RoPE, no mask" in seen.summary


def test_scale_of_q_alone():
    class Tempered(Attention):
        def attend(self, q, k, v):
            return super().attend(q * decay(q.shape[2])[:, :1], k, v)

    seen = fuses(Tempered(), *inputs())
    assert "rotate-half RoPE, no mask" in seen.summary


def test_scale_of_the_rotated_part_only():
    def turn(x, cos, sin, scale):
        a, b = x.split([4, 4], -1)
        a = products_multiplied(a, cos[:, :4], sin[:, :4], scale[:, :4])
        return torch.cat((a, b), -1)

    assert "rotate-half RoPE on 4 lanes" in fuses(XPos(turn), *inputs()).summary


def test_scale_of_each_batch_entry():
    def attend(q, k, v, cos, sin, scale):
        q, k = (half(x, cos[:, None], sin[:, None]) * scale[:, None] for x in (q, k))
        return torch.softmax(q @ k.mT * 0.3, -1) @ v

    q, k, v = (torch.randn(2, 3, 11, 8, requires_grad=True) for _ in range(3))
    angle = torch.randn(2, 11, 8)
    seen = fuses(attend, q, k, v, angle.cos(), angle.sin(), torch.rand(2, 11, 8) + 0.5)
    assert "rotate-half RoPE" in seen.summary


def test_page_says_what_scales():
    q, k, v = (torch.randn(2, 3, 11, 8) for _ in range(3))
    angle, scale = angles(11, 8), decay(11)

    def attend(q, k, v):
        q = products_multiplied(q, angle.cos(), angle.sin(), scale)
        return torch.softmax(q @ k.mT, -1) @ v

    with torch.no_grad():
        report = inductor_gqa.explain(attend, q, k, v)
    assert "times" in dict(report.sites[0].details.reading)["q turned"]


def test_page_has_a_word_for_every_way_to_use_a_table():
    assert set(reading.SPREADS) == set(tables.SPREADS)


class TestNearMisses:
    def run(self, turn, notes=None):

        class Near(Attention):
            def attend(self, q, k, v):
                n = q.shape[2]
                scale = decay(n)
                q = turn(q, self.cos[:n], self.sin[:n], scale)
                k = turn(k, self.cos[:n], self.sin[:n], 1 / scale)
                return super().attend(q, k, v)

        return never_wrong(Near(rotation=None), *inputs(), left=None, notes=notes)

    def test_scale_beside_the_cosine_only(self):
        seen = self.run(lambda x, c, s, d: half(x, c * d, s))
        assert "RoPE" in seen.summary  # two tables, whatever made them

    def test_scale_of_the_product_with_the_cosine_only(self):
        turn = lambda x, c, s, d: x * c * d + rotate_half(x) * s  # noqa: E731
        self.run(turn, "1 * table 0 * table 1 * lane 0, -1 * table 2 * lane 4")

    def test_two_scales(self):
        turn = lambda x, c, s, d: x * c * d + rotate_half(x) * s * d.sqrt()  # noqa: E731
        self.run(turn, "-1 * table 2 * table 3 * lane 4")

    def test_scale_with_rows_shifted(self):
        self.run(lambda x, c, s, d: half(x, c, s) * d.roll(1, 0))

    def test_scale_over_the_heads(self):
        by_head = lambda x: torch.arange(1.0, x.shape[1] + 1)[:, None, None]  # noqa: E731
        self.run(lambda x, c, s, d: half(x, c, s) * by_head(x), "0 lanes are turned after aten.mul")

    def test_scale_over_the_heads_of_equal_number(self):
        def turn(x, cos, sin, d):
            return half(x, cos, sin) * decay(x.shape[1])[:, None]

        class Square(Attention):
            def attend(self, q, k, v):
                n = q.shape[2]
                q, k = (turn(x, self.cos[:n], self.sin[:n], None) for x in (q, k))
                return super().attend(q, k, v)

        notes = "0 lanes are turned after aten.mul"
        never_wrong(Square(rotation=None, H=4, K=4), *inputs(L=4), left=None, notes=notes)

    def test_lanes_that_pass_are_scaled_too(self):
        def turn(x, cos, sin, d):
            a, b = x.split([4, 4], -1)
            return torch.cat((half(a, cos[:, :4], sin[:, :4]), b), -1) * d[:, :1]

        self.run(turn, "0 lanes are turned after aten.mul")

    def test_a_learned_scale_has_its_gradient(self):
        def attend(q, k, v, cos, sin, scale):
            q, k = half(q, cos, sin) * scale, half(k, cos, sin)
            return torch.softmax(q @ k.mT * 0.3, -1) @ v

        q, k, v = (torch.randn(2, 3, 11, 8, requires_grad=True) for _ in range(3))
        angle, scale = torch.randn(11, 8), torch.rand(11, 1).add(0.5).requires_grad_()
        given = (q, k, v, angle.cos(), angle.sin(), scale)
        never_wrong(attend, *given, left=None, notes="a gradient is ")

    def test_a_gate_before_the_rotation_stays_outside_and_the_rotation_inside(self):
        class Gated(Attention):
            def __init__(self):
                super().__init__()
                self.gate = torch.nn.Parameter(torch.randn(1, 24))

            def forward(self, x):
                self.g = torch.sigmoid(x @ self.gate.T)
                return super().forward(x)

            def rotated(self, x, length):
                return super().rotated(x * self.g[:, None], length)

        assert "rotate-half RoPE" in fuses(Gated(), *inputs()).summary


def test_the_scale_is_in_the_table():
    seen = fuses(XPos(turned_then_multiplied), *inputs(), train=False)
    cos = seen.argument("cos_q")
    assert str(cos.target) == "aten.mul.Tensor"
    assert seen.count(FORWARD) == 1

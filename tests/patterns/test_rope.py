"""Rotary embeddings in the spellings of the wild are fused into the attention, forward and
backward.
"""

import pytest
import torch
from fused import fuses, leaves, never_wrong, run
from spellings import (
    ROTATIONS,
    Attention,
    angles,
    frequencies,
    half,
    half_table,
    inputs,
    interleaved,
    interleaved_in_halves_out,
    partial,
    rotate_half,
)
from torch import nn

pytestmark = pytest.mark.usefixtures("without_dynamo")

KINDS = {
    "half": "rotate-half RoPE,",
    "half_by_chunk": "rotate-half RoPE,",
    "half_in_fp32": "rotate-half RoPE,",
    "half_by_parts": "rotate-half RoPE,",
    "half_table": "rotate-half RoPE,",
    "half_table_other_order": "rotate-half RoPE,",
    "interleaved": "interleaved RoPE,",
    "interleaved_by_repeat": "interleaved RoPE,",
    "interleaved_by_pairs": "interleaved RoPE,",
    "interleaved_by_unbind": "interleaved RoPE,",
    "interleaved_in_halves_out": "interleaved RoPE,",
    "regrouped_then_half": "interleaved RoPE,",  # its pairs lie a half of the table apart
    "partial": "rotate-half RoPE on 4 lanes,",
    "partial_by_split": "interleaved RoPE on 4 lanes,",
    "partial_at_end": "rotate-half RoPE on 4 lanes,",
    "inverse": "rotate-half RoPE,",
    "inverse_by_negated_table": "rotate-half RoPE,",
}


@pytest.mark.parametrize("B", [1, 2], ids="B{}".format)
@pytest.mark.parametrize("name", ROTATIONS)
def test_fuses_rotation_in_training(name, B):
    """The columns of the tables all differ, so a lane with the wrong one is a wrong number."""
    seen = fuses(Attention(rotation=ROTATIONS[name]), *inputs(B=B), scores=(11, 11))
    assert KINDS[name] in seen.summary


@pytest.mark.parametrize("name", ROTATIONS)
def test_fuses_rotation_in_inference(name):
    seen = fuses(Attention(rotation=ROTATIONS[name]), *inputs(B=1, L=13), train=False)
    assert KINDS[name] in seen.summary


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", ["half", "half_in_fp32", "interleaved", "half_table"])
def test_narrow_dtypes_are_as_exact_as_eager(name, dtype):
    module = Attention(rotation=ROTATIONS[name], D=16, dtype=dtype)
    assert KINDS[name] in fuses(module, *inputs(dtype=dtype)).summary


@pytest.mark.parametrize("rotated", ["q", "k"])
@pytest.mark.parametrize("rotation", [half, interleaved], ids=["half", "interleaved"])
def test_fuses_rotation_of_one_operand_only(rotation, rotated):
    module = Attention(rotation=rotation, rotate_q=rotated == "q", rotate_k=rotated == "k")
    assert f"({rotated} only)" in fuses(module, *inputs()).summary


def test_fuses_attention_without_rotation():
    assert "no RoPE inside" in fuses(Attention(rotation=None), *inputs()).summary


@pytest.mark.parametrize("rotated", ["q", "k"])
def test_lanes_reordered_in_one_operand_only_stay_outside(rotated):
    """Pairs turned to halves in q alone change the product; k keeps its own order of lanes."""
    module = Attention(
        rotation=interleaved_in_halves_out, rotate_q=rotated == "q", rotate_k=rotated == "k"
    )
    (site,) = fuses(module, *inputs()).sites
    lanes = ("lane 2", "lane 1") if rotated == "q" else ("lane 1", "lane 2")
    assert f"lane 1 of q is {lanes[0]} before it turns, that of k {lanes[1]}" in site.notes[0]


def test_q_and_k_may_turn_different_lanes():
    class TwoWays(Attention):
        def rotated(self, x, length):
            turn = partial if x.shape[1] == self.H else half
            return turn(x, self.cos[:length], self.sin[:length])

    fuses(TwoWays(), *inputs())


def test_rotation_before_the_transpose():
    class Before(Attention):
        def rotated(self, x, length):
            cos, sin = self.cos[:length, None], self.sin[:length, None]
            return half(x.transpose(1, 2), cos, sin).transpose(1, 2)

    assert "rotate-half RoPE," in fuses(Before(), *inputs(), scores=(11, 11)).summary


def test_rotation_before_the_transpose_when_heads_equal_length():
    class Before(Attention):
        def rotated(self, x, length):
            cos, sin = self.cos[:length, None], self.sin[:length, None]
            return half(x.transpose(1, 2), cos, sin).transpose(1, 2)

    assert "rotate-half RoPE," in fuses(Before(H=4, K=4), *inputs(L=4)).summary


@pytest.mark.parametrize("L", [2, 4, 8], ids="L{}".format)
@pytest.mark.parametrize("B", [1, 2, 8], ids="B{}".format)
def test_equal_sizes_confuse_nothing(B, L):
    """L is the number of key/value heads, of heads, or the head dim."""
    assert "rotate-half RoPE," in fuses(Attention(), *inputs(B=B, L=L)).summary


TABLES = {}


def table(f):
    TABLES[f.__name__] = f
    return f


@table
def expanded(self, x, length):
    shape = (x.shape[0], 1, length, self.D)
    return self.cos[None, None, :length].expand(shape), self.sin[None, None, :length].expand(shape)


@table
def by_batch_and_head_dims(self, x, length):
    return self.cos[:length].view(1, 1, length, -1), self.sin[:length].view(1, 1, length, -1)


@table
def indexed_by_position_ids(self, x, length):
    ids = torch.arange(length)[None] + 5
    return self.cos[ids][:, None], self.sin[ids][:, None]


@table
def of_each_batch_entry(self, x, length):
    ids = torch.arange(length)[None] + torch.arange(x.shape[0])[:, None]
    return self.cos[ids].unsqueeze(1), self.sin[ids].unsqueeze(1)


@table
def gathered_by_embedding(self, x, length):
    ids = torch.arange(length)
    f = nn.functional.embedding
    return f(ids, self.cos), f(ids, self.sin)


@table
def index_select(self, x, length):
    ids = torch.arange(length) * 2
    return self.cos.index_select(0, ids), self.sin.index_select(0, ids)


@table
def outer_product(self, x, length):
    freqs = torch.outer(torch.arange(length).float(), frequencies(self.D))
    both = torch.cat((freqs, freqs), -1)
    return both.cos().to(x.dtype), both.sin().to(x.dtype)


@table
def matmul_of_one_column(self, x, length):
    inv = frequencies(self.D)[None, :, None].expand(x.shape[0], -1, 1)
    ids = torch.arange(length)[None, None, :].expand(x.shape[0], 1, -1).float()
    freqs = (inv @ ids).transpose(1, 2)
    both = torch.cat((freqs, freqs), -1)
    return both.cos().unsqueeze(1).to(x.dtype), both.sin().unsqueeze(1).to(x.dtype)


@table
def einsum_angles(self, x, length):
    freqs = torch.einsum("i,j->ij", torch.arange(length).float(), frequencies(self.D))
    both = torch.cat((freqs, freqs), -1)
    return both.cos().to(x.dtype), both.sin().to(x.dtype)


@table
def doubled_after_cos(self, x, length):
    freqs = torch.outer(torch.arange(length).float(), frequencies(self.D))
    return freqs.cos().repeat(1, 2).to(x.dtype), freqs.sin().repeat(1, 2).to(x.dtype)


@table
def with_attention_scaling(self, x, length):
    return self.cos[:length] * 1.3, self.sin[:length] * 1.3


@table
def stay_in_fp32(self, x, length):
    return self.cos[:length].float(), self.sin[:length].float()


@table
def contiguous_sections(self, x, length):
    """mRoPE: sections of the lanes take their angle from three position grids in turn."""
    cos = torch.stack([self.cos[k : k + length] for k in range(3)])
    sin = torch.stack([self.sin[2 * k : 2 * k + length] for k in range(3)])
    sections = [self.D // 4, self.D // 8, self.D // 8] * 2
    pick = lambda t: torch.cat([m[k % 3] for k, m in enumerate(t.split(sections, -1))], -1)  # noqa: E731
    return pick(cos), pick(sin)


@table
def interleaved_sections(self, x, length):
    """mRoPE by slice assignment with a step."""
    freqs = torch.stack([angles(length, self.D)[:, : self.D // 2] * (k + 1) for k in range(3)])
    mixed = freqs[0].clone()
    for k in (1, 2):
        mixed[..., k::3] = freqs[k, ..., k::3]
    both = torch.cat((mixed, mixed), -1)
    return both.cos().to(x.dtype), both.sin().to(x.dtype)


@table
def axial(self, x, length):
    """Two position grids, one for each half of the frequencies."""
    rows, columns = torch.arange(length) // 3, torch.arange(length) % 3
    inv = frequencies(self.D)[: self.D // 4]
    parts = [torch.outer(p.float(), inv) for p in (rows, columns)]
    both = torch.cat((*parts, *parts), -1)
    return both.cos().to(x.dtype), both.sin().to(x.dtype)


@pytest.mark.parametrize("B", [1, 2], ids="B{}".format)
@pytest.mark.parametrize("name", TABLES)
def test_fuses_rotation_whatever_made_the_tables(name, B):
    seen = fuses(Attention(tables=TABLES[name]), *inputs(B=B), scores=(11, 11))
    assert "rotate-half RoPE," in seen.summary


@pytest.mark.parametrize("name", ["stay_in_fp32", "with_attention_scaling", "outer_product"])
def test_bf16_with_tables_of_any_origin(name):
    module = Attention(tables=TABLES[name], D=16, dtype=torch.bfloat16)
    if name == "stay_in_fp32":  # promotion rotates in fp32, the model casts back
        module.rotation = lambda x, cos, sin: half(x, cos, sin).to(x.dtype)
    assert "rotate-half RoPE," in fuses(module, *inputs(dtype=torch.bfloat16)).summary


def test_fuses_tables_given_as_inputs():
    class Given(Attention):
        def forward(self, x, cos, sin):
            self.given = cos, sin
            return super().forward(x)

    module = Given(tables=lambda self, x, length: self.given)
    table_ = torch.rand(2, 1, 11, 8, generator=torch.Generator().manual_seed(0))
    seen = fuses(module, *inputs(), table_, table_ * 0.5)
    assert "rotate-half RoPE," in seen.summary


def test_gradient_of_learned_tables():
    """Where the tables need a gradient the rotation stays outside, and the gradient is right."""
    module = Attention()
    for name in ("cos", "sin"):
        value = getattr(module, name)
        delattr(module, name)
        module.register_parameter(name, nn.Parameter(value))
    seen = fuses(module, *inputs())
    assert "no RoPE inside" in seen.summary


def test_fuses_interleaved_rotation_with_a_table_of_halves_regrouped():
    def regrouped(t):
        return t.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)

    module = Attention(rotation=lambda x, c, s: interleaved(x, regrouped(c), regrouped(s)))
    assert "interleaved RoPE," in fuses(module, *inputs(), scores=(11, 11)).summary
    seen = fuses(module, *inputs(L=13), dynamic=True, more=[inputs(B=3, L=17, seed=2)])
    assert "interleaved RoPE," in seen.summary


def test_q_and_k_may_use_different_tables():
    class TwoTables(Attention):
        def rotated(self, x, length):
            shift = 7 if x.shape[1] == self.H else 0
            rows = slice(shift, shift + length)
            return half(x, self.cos[rows], self.sin[rows])

    assert "rotate-half RoPE," in fuses(TwoTables(), *inputs()).summary


def test_cross_attention_rotates_each_side_by_its_own_positions():
    seen = fuses(Attention(), *inputs(L=11, S=17), scores=(11, 17))
    assert "rotate-half RoPE," in seen.summary


def test_rotated_twice_is_never_wrong():
    module = Attention(rotation=lambda x, cos, sin: half(half(x, cos, sin), cos, sin))
    never_wrong(module, *inputs())


def test_normalised_before_rotation_fuses_with_it():
    class Normed(Attention):
        def rotated(self, x, length):
            x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
            return super().rotated(x, length)

    assert "rotate-half RoPE," in fuses(Normed(), *inputs()).summary


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", ["half", "half_in_fp32", "interleaved"])
def test_normalised_in_fp32_before_rotation_fuses_with_it(name, dtype):
    """The norm's result is rounded before it turns, and that is what the kernel is given."""

    class Normed(Attention):
        def rotated(self, x, length):
            wide = x.float()
            x = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).type_as(x)
            return super().rotated(x, length)

    module = Normed(rotation=ROTATIONS[name], D=16, dtype=dtype)
    seen = fuses(module, *inputs(dtype=dtype), scores=(11, 11))
    assert KINDS[name] in seen.summary


@pytest.mark.parametrize("rotation", [half, interleaved, partial], ids=lambda f: f.__name__)
def test_scale_beside_the_rotation_goes_into_the_op(rotation):
    module = Attention(rotation=lambda x, cos, sin: rotation(x, cos, sin) * 0.7)
    seen = fuses(module, *inputs(), scores=(11, 11))
    assert " RoPE" in seen.summary
    assert "no RoPE" not in seen.summary
    assert "only" not in seen.summary
    assert seen.argument("scale") == pytest.approx(0.3 * 0.7 * 0.7)


def test_normalised_after_rotation_fuses_without_it():
    class Normed(Attention):
        def rotated(self, x, length):
            x = super().rotated(x, length)
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    assert "no RoPE inside" in fuses(Normed(), *inputs()).summary


def test_decoupled_rotation_of_a_shared_key():
    """MLA: half of the lanes of k are rotated once for all heads, and v has its own head dim."""

    class Decoupled(Attention):
        def forward(self, x):
            B, L, _ = x.shape
            q = self.heads(x @ self.wq.t(), self.H)
            k = self.heads(x @ self.wk.t(), self.K)
            v = self.heads(x @ self.wv.t(), self.K)
            shared = (x @ self.wk.t())[..., None, :4].transpose(1, 2)
            cos, sin = self.cos[:L, :4], self.sin[:L, :4]
            turned = half(shared, cos, sin).expand(B, self.K, L, 4)
            q = torch.cat((q[..., :4], half(q[..., 4:], cos, sin)), -1)
            k = torch.cat((k[..., :4], turned), -1)
            return self.attend(q, k, v)

    fuses(Decoupled(H=4, K=4, value_dim=16), *inputs(), scores=(11, 11))


def test_complex_rotation_is_fused_or_left_outside():
    def as_complex(x, cos, sin):
        h = x.shape[-1] // 2
        turn = torch.complex(cos[..., :h].contiguous(), sin[..., :h].contiguous())
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], h, 2))
        return torch.view_as_real(pairs * turn).flatten(-2).type_as(x)

    # fp64 has a complex type of its own, so the truth needs the module's own casts
    class Complex(Attention):
        def rotated(self, x, length):
            return as_complex(x, self.cos[:length], self.sin[:length])

    never_wrong(Complex(), *inputs())


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("rotation", [half, interleaved, partial], ids=lambda f: f.__name__)
def test_factor_beside_all_lanes_is_part_of_the_scale(rotation, train):
    """A scale may stand on q and k, as in PyTorch's own attention without a fused kernel."""
    module = Attention(rotation=lambda x, c, s: rotation(x, c, s) * 0.7, scale=0.4)
    seen = fuses(module, *inputs(), train=train, scores=(11, 11))
    assert "no RoPE" not in seen.summary
    assert seen.argument("scale") == pytest.approx(0.4 * 0.7 * 0.7)


class Cached(Attention):
    """Keys, turned, and values are returned as well, as for a cache: they have gradients of their
    own. `also`: which operands are returned."""

    also = "kv"

    def attend(self, q, k, v, *extra):
        kept = {"q": q, "k": k, "v": v}
        return super().attend(q, k, v, *extra), *(kept[name] for name in self.also)


@pytest.mark.parametrize("rotation", [half, interleaved, partial], ids=lambda f: f.__name__)
def test_keys_that_are_returned_turned_leave_the_rotation_of_q_inside(rotation):
    seen = fuses(Cached(rotation=rotation), *inputs(), scores=(11, 11))
    assert "RoPE" in seen.summary
    assert "(q only)" in seen.summary
    ((note,),) = (site.notes for site in seen.sites)
    assert "rotation of k stays outside the kernel: " in note


@pytest.mark.parametrize("also", ["q", "qk", "qkv"])
def test_queries_that_are_returned_turned_leave_both_rotations_outside(also):
    module = Cached()
    module.also = also
    seen = fuses(module, *inputs(), scores=(11, 11))
    assert "no RoPE inside" in seen.summary


def test_keys_that_are_returned_turned_and_have_no_gradient_turn_inside():
    seen = fuses(Cached(), *inputs(), train=False, scores=(11, 11))
    assert "RoPE, " in seen.summary
    assert not any(site.notes for site in seen.sites)


class TestNearMisses:
    """Not a rotation that the kernels know: it stays outside, the attention fuses, and a note names
    what is other than in a rotation."""

    @staticmethod
    def outside(rotation, notes, **options):
        module = Attention(rotation=rotation, **options)
        seen = never_wrong(module, *inputs(), left=None, notes=notes)
        assert "no RoPE inside" in seen.summary

    def test_pair_that_turns_in_one_direction(self):
        turn = lambda x, cos, sin: x * cos + torch.cat((x[..., 4:], x[..., :4]), -1) * sin  # noqa: E731
        self.outside(turn, "2 tables have one sign in all lanes")

    def test_two_cosine_tables(self):
        self.outside(
            lambda x, cos, sin: x * cos + x * sin + rotate_half(x) * sin, "lane 0 has 3 terms"
        )

    def test_three_terms(self):
        self.outside(lambda x, cos, sin: x * cos + rotate_half(x) * sin + x, "lane 0 has 3 terms")

    def test_factor_beside_a_part_of_the_lanes(self):
        def scaled(x, cos, sin):
            turned = x * cos + rotate_half(x) * sin
            return torch.cat((turned[..., :4] * 2.0, turned[..., 4:]), -1)

        self.outside(scaled, "2 * table 0 * lane 0")

    def test_factor_that_differs_for_the_two_tables(self):
        self.outside(
            lambda x, cos, sin: x * cos * 2.0 + rotate_half(x) * sin, "accepted factors 1 and -1"
        )

    def test_neither_halves_nor_neighbours(self):
        def quarters(x, cos, sin):
            a, b, c, d = x.chunk(4, -1)
            return x * cos + torch.cat((-b, a, -d, c), -1) * sin

        self.outside(quarters, "accepted halves or neighbours", D=16)

    def test_reversed_lanes(self):
        self.outside(lambda x, cos, sin: x * cos + x.flip(-1) * sin, "prims.rev")

    def test_shift_by_one_lane(self):
        self.outside(lambda x, cos, sin: x * cos + torch.roll(x, 1, -1) * sin, "aten.index")

    def test_something_else_than_x_in_the_second_term(self):
        self.outside(lambda x, cos, sin: x * cos + rotate_half(x.abs()) * sin, "aten.abs")

    def test_table_that_differs_by_head(self):
        def by_head(x, cos, sin):
            heads = torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None, None]
            return x * (cos * heads) + rotate_half(x) * (sin * heads)

        self.outside(by_head, "varies by head")

    def test_bias_after_the_rotation(self):
        self.outside(lambda x, cos, sin: x * cos + rotate_half(x) * sin + cos, "2 tensors (")

    def test_squared_table(self):
        never_wrong(Attention(rotation=lambda x, c, s: x * (c * c) + rotate_half(x) * s), *inputs())


@pytest.mark.parametrize("rotation", [half, half_table, interleaved], ids=lambda f: f.__name__)
def test_sine_with_swapped_halves_is_read_as_it_is(rotation):
    module = Attention(
        rotation=lambda x, c, s: rotation(x, c, torch.cat((s[..., 4:], s[..., :4]), -1))
    )
    never_wrong(module, *inputs())


@pytest.mark.parametrize("rotation", [half, interleaved, partial], ids=lambda f: f.__name__)
def test_dynamic_lengths(rotation):
    more = [inputs(B=3, L=17, seed=2)]
    seen = fuses(Attention(rotation=rotation), *inputs(B=2, L=13), dynamic=True, more=more)
    assert "RoPE" in seen.summary
    assert "no RoPE" not in seen.summary


def test_left_reason_is_about_the_attention_not_the_rotation():
    module = Attention(softmax=lambda s: torch.softmax(s, 2))
    leaves(module, *inputs(), reason_contains="the softmax runs over dim 2 of 4, accepted the last")


def test_real_code_is_generated_and_right():
    seen = run(Attention(rotation=interleaved), *inputs(), codegen=True)
    assert seen.fused == 1


def crossed_in_two_directions(x):
    """Two pairs of lanes turn one way, two turn in one direction."""
    return torch.cat((-x[..., 4:6], x[..., 6:8], x[..., :4]), -1)


@pytest.mark.parametrize("swap", [lambda x: x.roll(4, -1), crossed_in_two_directions])
def test_lanes_that_turn_in_one_direction_stay_outside(swap):
    """Without the minus it is no rotation; the attention around it fuses."""
    seen = fuses(Attention(rotation=lambda x, cos, sin: x * cos + swap(x) * sin), *inputs())
    assert seen.argument("cos_q") is None


class Summed(nn.Module):
    """Self-attention whose q, k and v are sums of what several matmuls make."""

    def __init__(self, add, rotation, dtype=torch.float32):
        super().__init__()
        make = lambda *shape: nn.Parameter((torch.randn(*shape) / 4).to(dtype))  # noqa: E731
        self.weights = nn.ParameterList(make(32, 24) for _ in range(3))
        self.down = nn.ParameterList(make(3, 24) for _ in range(3))
        self.up = nn.ParameterList(make(32, 3) for _ in range(3))
        self.bias = nn.ParameterList(make(32) for _ in range(3))
        self.add, self.rotation = add, rotation
        free = angles(11, 8) + 0.3 * torch.randn(11, 8)
        self.register_buffer("cos", free.cos().to(dtype))
        self.register_buffer("sin", free.sin().to(dtype))

    def forward(self, x):
        parts = zip(self.weights, self.down, self.up, self.bias, strict=True)
        heads = [
            self.add(x @ w.mT, (x @ a.mT) @ b.mT, bias).unflatten(-1, (4, 8)).transpose(1, 2)
            for w, a, b, bias in parts
        ]
        q, k = (self.rotation(y, self.cos, self.sin) for y in heads[:2])
        return torch.softmax(q @ k.mT * 0.3, -1) @ heads[2]


SUMS = {
    "adapter": lambda y, z, bias: y + z,
    "scaled adapter": lambda y, z, bias: y + 2.0 * z,
    "alpha": lambda y, z, bias: torch.add(y, z, alpha=0.5),
    "difference": lambda y, z, bias: y - z,
    "bias": lambda y, z, bias: y + bias,
    "adapter and bias": lambda y, z, bias: y + z * 0.5 + bias,
    "bias and adapter": lambda y, z, bias: (y + bias) - z,
}


@pytest.mark.parametrize("train", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("rotation", [half, interleaved], ids=["half", "interleaved"])
@pytest.mark.parametrize("name", SUMS)
def test_a_sum_of_projections_is_what_turns(name, rotation, train):
    """A LoRA adapter or a bias beside a projection left the rotation outside the kernel: the terms
    of the sum were taken for terms of the rotation."""
    torch.manual_seed(0)
    module = Summed(SUMS[name], rotation)
    seen = fuses(module, *inputs(grad=train), train=train)
    assert "heads of 8, " + ("rotate-half" if rotation is half else "interleaved") in seen.summary
    assert "only" not in seen.summary
    assert seen.count("aten.cat.default") == 0  # by which every rotation here turns


def test_a_sum_of_projections_is_rounded_before_it_turns():
    torch.manual_seed(0)
    module = Summed(SUMS["scaled adapter"], half, torch.bfloat16)
    seen = fuses(module, *inputs(dtype=torch.bfloat16))
    assert "heads of 8, rotate-half RoPE," in seen.summary


@pytest.mark.parametrize("frozen", ["q", "k", "qk"])
def test_a_frozen_projection_beside_a_trained_adapter(frozen):
    torch.manual_seed(0)
    module = Summed(SUMS["adapter"], half)
    for k, name in enumerate("qk"):
        if name in frozen:
            for parameter in (module.weights[k], module.bias[k]):
                parameter.requires_grad_(False)
    seen = fuses(module, *inputs())
    assert "heads of 8, rotate-half RoPE," in seen.summary


@pytest.mark.parametrize("train", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("rotation", [half, interleaved, partial], ids=lambda f: f.__name__)
def test_a_norm_with_a_bias_before_the_rotation(rotation, train):
    """Persimmon: the bias left the rotation outside, as a term of its own."""

    class Normed(Attention):
        def rotated(self, x, length):
            return super().rotated(self.norm(x), length)

    torch.manual_seed(0)
    module = Normed(rotation=rotation)
    module.norm = nn.LayerNorm(8)
    nn.init.normal_(module.norm.bias)
    seen = fuses(module, *inputs(grad=train), train=train)
    kind = "interleaved" if rotation is interleaved else "rotate-half"
    assert f"heads of 8, {kind} RoPE" in seen.summary
    assert not any(site.notes for site in seen.sites)

"""Masks: what reads as a band or as padding needs no tensor; the rest is loaded; all hide what
eager hides.
"""

import pytest
import torch
import torch.nn.functional as F
from fused import fuses, never_wrong, run
from spellings import Attention, inputs, repeat_kv

pytestmark = pytest.mark.usefixtures("without_dynamo")

NEG = float("-inf")
FILLS = {"inf": NEG, "finfo": torch.finfo(torch.float32).min, "1e4": -1e4, "1e9": -1e9}


def causal_by_ones_triu(self, s):
    L, S = s.shape[-2:]
    return s.masked_fill(torch.ones(L, S, dtype=torch.bool).triu(1), self.fill)


def causal_by_ones_tril(self, s):
    L, S = s.shape[-2:]
    return s.masked_fill(torch.ones(L, S).tril() == 0, self.fill)


def causal_by_tril_bool(self, s):
    L, S = s.shape[-2:]
    return torch.where(torch.tril(torch.ones(L, S, dtype=torch.bool)), s, self.fill)


def causal_by_not(self, s):
    L, S = s.shape[-2:]
    return s.masked_fill(~torch.tril(torch.ones(L, S, dtype=torch.bool)), self.fill)


def causal_by_added_triu(self, s):
    L, S = s.shape[-2:]
    return s + torch.triu(torch.full((L, S), self.fill, dtype=s.dtype), diagonal=1)


def causal_by_added_where(self, s):
    L, S = s.shape[-2:]
    keep = torch.arange(L)[:, None] >= torch.arange(S)[None, :]
    return s + torch.where(keep, 0.0, self.fill).to(s.dtype)


def causal_by_arange_le(self, s):
    L, S = s.shape[-2:]
    keep = torch.arange(S) <= torch.arange(L).view(-1, 1)
    return s.masked_fill(keep.logical_not(), self.fill)


def causal_by_arange_lt(self, s):
    L, S = s.shape[-2:]
    return torch.where(torch.arange(L)[:, None] < torch.arange(S)[None], self.fill, s)


def causal_by_difference(self, s):
    L, S = s.shape[-2:]
    distance = torch.arange(S)[None, :] - torch.arange(L)[:, None]
    return s.masked_fill(distance > 0, self.fill)


def causal_by_where_with_tensor(self, s):
    L, S = s.shape[-2:]
    keep = torch.arange(L)[:, None] >= torch.arange(S)[None, :]
    return torch.where(keep, s, torch.full([], self.fill, dtype=s.dtype))


def causal_by_triu_indices_of_full(self, s):
    L, S = s.shape[-2:]
    mask = torch.full((L, S), self.fill, dtype=s.dtype)
    mask = mask * (torch.arange(S) > torch.arange(L).reshape(-1, 1))
    return s + mask[None, None].expand(s.shape[0], 1, -1, -1)


def causal_by_masked_fill_of_zeros(self, s):
    L, S = s.shape[-2:]
    keep = torch.ones(L, S, dtype=torch.bool).tril()
    return s + torch.zeros(L, S, dtype=s.dtype).masked_fill(~keep, self.fill)


def causal_by_masked_fill_chain(self, s):
    L, S = s.shape[-2:]
    m = torch.ones(L, S).triu(1)
    return s + m.masked_fill(m == 1, self.fill).to(s.dtype)


def causal_by_nested_aranges(self, s):
    L, S = s.shape[-2:]
    i = torch.arange(L).unsqueeze(-1).expand(L, S)
    j = torch.arange(S).unsqueeze(0).expand(L, S)
    return s.masked_fill((i < j)[None, None], self.fill)


CAUSAL = {f.__name__: f for n, f in sorted(globals().items()) if n.startswith("causal_by")}


class Masked(Attention):
    def __init__(self, mask, fill=NEG, **options):
        super().__init__(mask=mask, **options)
        self.fill = fill


@pytest.mark.parametrize(
    ("name", "fill"),
    [(name, "inf") for name in CAUSAL if name != "causal_by_triu_indices_of_full"]  # inf * 0 is NaN
    + [(name, "finfo") for name in CAUSAL]
    + [
        (name, fill)
        for name in ("causal_by_ones_triu", "causal_by_added_where")
        for fill in ("1e4", "1e9")
    ],
)
def test_fuses_causal_mask(name, fill):
    fill = FILLS[fill]
    seen = fuses(Masked(CAUSAL[name], fill), *inputs(B=1))
    assert "causal" in seen.summary
    assert seen.argument("bias") is None
    assert seen.argument("mask") is None
    assert seen.argument("band_hi") == 0


@pytest.mark.parametrize("name", ["causal_by_ones_triu", "causal_by_added_where"])
def test_causal_mask_leaves_no_tensor_of_scores_or_mask(name):
    seen = fuses(Masked(CAUSAL[name]), *inputs(L=13), train=False, scores=(13, 13))
    nodes = [node for graph in seen.graphs for node in graph.graph.nodes]
    values = [node.meta.get("val") for node in nodes]
    shapes = [tuple(value.shape) for value in values if isinstance(value, torch.Tensor)]
    assert (13, 13) not in [shape[-2:] for shape in shapes]


@pytest.mark.parametrize(
    "name", ["causal_by_ones_triu", "causal_by_arange_le", "causal_by_added_where"]
)
@pytest.mark.parametrize("grouping", ["Grouped5D", "Bmm", "FoldedRows", "Tiled"])
def test_causal_mask_in_every_grouping(name, grouping):
    assert "causal" in fuses(Masked(CAUSAL[name], grouping=grouping), *inputs(B=2)).summary


@pytest.mark.parametrize("shift", [-3, -1, 1, 2, 11])
def test_shifted_causal_mask_is_read_with_its_offset(shift):
    """Shifted down it hides whole rows, which -1e9 leaves finite."""

    def mask(self, s):
        L, S = s.shape[-2:]
        return s.masked_fill(torch.ones(L, S, dtype=torch.bool).triu(1 + shift), -1e30)

    seen = fuses(Attention(mask=mask), *inputs())
    if shift < 11:
        assert seen.argument("band_hi") == shift


@pytest.mark.parametrize("S", [7, 11, 19], ids="S{}".format)
@pytest.mark.parametrize("offset", ["top", "bottom"])
def test_causal_mask_of_two_lengths(S, offset):
    def mask(self, s):
        L, S = s.shape[-2:]
        shift = 0 if offset == "top" else S - L
        return s.masked_fill(torch.ones(L, S, dtype=torch.bool).tril(shift).logical_not(), -1e4)

    fuses(Attention(mask=mask), *inputs(L=11, S=S))


def test_reversed_causal_mask():
    def mask(self, s):
        L, S = s.shape[-2:]
        return s.masked_fill(torch.arange(S)[None] < torch.arange(L)[:, None], NEG)

    seen = fuses(Attention(mask=mask), *inputs())
    assert (seen.argument("band_lo"), seen.argument("band_hi")) == (0, None)


class Buffered(Attention):
    """A registered lower triangle, sliced (GPT-2)."""

    def __init__(self, **options):
        triangle = torch.tril(torch.ones(32, 32, dtype=torch.bool)).view(1, 1, 32, 32)
        super().__init__(buffers={"triangle": triangle}, **options)


@pytest.mark.parametrize("S", [11, 17], ids="S{}".format)
def test_fuses_sliced_buffer(S):
    def mask(self, s):
        L, S = s.shape[-2:]
        keep = self.triangle[:, :, S - L : S, :S]
        return torch.where(keep, s, torch.full([], torch.finfo(s.dtype).min, dtype=s.dtype))

    fuses(Buffered(mask=mask), *inputs(L=11, S=S))


@pytest.mark.parametrize("width", [1, 3, 20])
@pytest.mark.parametrize("spelling", ["difference", "two_aranges", "triangles", "added"])
def test_fuses_sliding_window(spelling, width):
    def mask(self, s):
        L, S = s.shape[-2:]
        i, j = torch.arange(L)[:, None], torch.arange(S)[None]
        if spelling == "difference":
            keep = (i - j >= 0) & (i - j < width)
        elif spelling == "two_aranges":
            keep = (j <= i).logical_and(j > i - width)
        elif spelling == "triangles":
            ones = torch.ones(L, S, dtype=torch.bool)
            keep = ones.tril() & ones.triu(1 - width)
        else:
            keep = ~((j > i) | (i >= j + width))
            return s + torch.where(keep, 0.0, -1e9)
        return s.masked_fill(~keep, NEG)

    # Of one key alone the gradient of the scores is nothing but rounding.
    seen = fuses(Attention(mask=mask), *inputs(), train=width > 1)
    assert (seen.argument("band_lo"), seen.argument("band_hi")) == (1 - width, 0)
    assert seen.argument("mask") is None


def test_fuses_symmetric_window():
    def mask(self, s):
        L, S = s.shape[-2:]
        distance = torch.arange(S)[None] - torch.arange(L)[:, None]
        return s.masked_fill(distance.abs() > 3, NEG)

    fuses(Attention(mask=mask), *inputs())


@pytest.mark.parametrize("chunk", [3, 4])
def test_fuses_chunked_mask(chunk):
    def mask(self, s):
        L, S = s.shape[-2:]
        i, j = torch.arange(L)[:, None], torch.arange(S)[None]
        return s.masked_fill(~((i // chunk == j // chunk) & (j <= i)), NEG)

    fuses(Attention(mask=mask), *inputs())


def padding(B, L, side):
    """True for a real token; each entry of the batch has its own number of them."""
    counts = torch.arange(B) * 3 + 1
    places = torch.arange(L)[None]
    return places >= counts[:, None] if side == "left" else places < L - counts[:, None]


class Padded(Attention):
    def forward(self, x, keep):
        self.keep = keep
        return super().forward(x)


def by_masked_fill(self, s):
    return s.masked_fill(~self.keep[:, None, None, :], self.fill)


def by_integer_mask(self, s):
    return s.masked_fill(self.keep.long()[:, None, None, :] == 0, self.fill)


def by_one_minus(self, s):
    m = (1.0 - self.keep[:, None, None, :].to(s.dtype)) * self.fill
    return s + m


def by_where(self, s):
    return torch.where(self.keep[:, None, None], s, self.fill)


def by_expanded(self, s):
    m = self.keep[:, None, None, :].expand(s.shape[0], 1, s.shape[-2], s.shape[-1])
    return s.masked_fill(m.logical_not(), self.fill)


PADDINGS = {
    f.__name__: f for f in (by_masked_fill, by_integer_mask, by_one_minus, by_where, by_expanded)
}


@pytest.mark.parametrize("fill", [torch.finfo(torch.float32).min, -1e4], ids=["finfo", "1e4"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", PADDINGS)
def test_fuses_padding(name, side, fill):
    module = Padded(mask=PADDINGS[name])
    module.fill = fill
    seen = fuses(module, *inputs(B=3), padding(3, 11, side))
    assert "key padding" in seen.summary


@pytest.mark.parametrize("fill", FILLS.values(), ids=FILLS.keys())
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("joined", ["and", "two_fills", "two_adds", "fill_and_add"])
def test_causal_mask_with_padding(joined, side, fill):
    """Left padding leaves rows without a visible key."""

    def mask(self, s):
        L, S = s.shape[-2:]
        causal = torch.arange(S)[None] <= torch.arange(L)[:, None]
        keep = self.keep[:, None, None]
        if joined == "and":
            return s.masked_fill(~(causal & keep), fill)
        if joined == "two_fills":
            return s.masked_fill(~causal, fill).masked_fill(~keep, fill)
        if joined == "two_adds":
            return s + torch.where(causal, 0.0, fill) + torch.where(keep, 0.0, fill)
        return s.masked_fill(~keep, fill) + torch.where(causal, 0.0, NEG)

    module = Padded(mask=mask)
    seen = never_wrong(module, *inputs(B=3), padding(3, 11, side))
    if joined == "and":
        assert seen.fused == 1
        assert "causal + key padding" in seen.summary


@pytest.mark.parametrize("fill", [torch.finfo(torch.float32).min, -1e30, -1e38])
@pytest.mark.parametrize("adds", [False, True], ids=["filled", "added"])
@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
def test_rows_without_a_visible_key_average_the_values(fill, adds, train):
    """In eager every score of such a row is the same number; the gradient flows where the mask was
    added.
    """
    keep = torch.ones(2, 11, dtype=torch.bool)
    keep[1] = False

    def mask(self, s):
        hidden = ~self.keep[:, None, None]
        return s + hidden * fill if adds else s.masked_fill(hidden, fill)

    fuses(Padded(mask=mask), *inputs(), keep, train=train)


def test_rows_without_a_visible_key_are_nan_as_in_eager():
    def mask(self, s):
        return s.masked_fill(~self.keep[:, None, None], NEG)

    keep = torch.ones(2, 11, dtype=torch.bool)
    keep[1] = False
    fuses(Padded(mask=mask), *inputs(), keep, train=False)


@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("made_in", [torch.float32, None], ids=["fp32-min", "own-min"])
def test_smallest_number_of_a_wider_type_overflows_as_in_eager(cast, made_in):
    def mask(self, s):
        L, S = s.shape[-2:]
        least = torch.finfo(made_in or s.dtype).min
        m = torch.full((L, S), least, dtype=made_in or s.dtype).triu(1)
        return s + m.to(s.dtype)

    seen = fuses(Attention(mask=mask, D=16, dtype=cast), *inputs(dtype=cast))
    assert "causal" in seen.summary


def test_mask_in_fp32_beside_scores_in_bf16():
    def mask(self, s):
        L, S = s.shape[-2:]
        return s + torch.full((L, S), NEG, dtype=torch.float32).triu(1)

    module = Attention(mask=mask, D=16, dtype=torch.bfloat16)
    module.softmax = lambda s: torch.softmax(s, -1).to(torch.bfloat16)
    fuses(module, *inputs(dtype=torch.bfloat16))


class Documents(Attention):
    def forward(self, x, ids):
        self.ids = ids
        return super().forward(x)


@pytest.mark.parametrize("causal", [False, True])
def test_fuses_document_mask(causal):
    def mask(self, s):
        keep = (self.ids[:, :, None] == self.ids[:, None, :])[:, None]
        if causal:
            L = s.shape[-1]
            keep = keep & torch.ones(L, L, dtype=torch.bool).tril()
        return s.masked_fill(~keep, NEG)

    ids = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 3], [0] * 6 + [1] * 5])
    fuses(Documents(mask=mask), *inputs(), ids)


def test_fuses_prefix_mask():
    def mask(self, s):
        L = s.shape[-1]
        causal = torch.ones(L, L, dtype=torch.bool).tril()
        prefix = torch.arange(L)[None] < self.ids[:, None]
        return s.masked_fill(~(causal | prefix[:, None])[:, None], NEG)

    fuses(Documents(mask=mask), *inputs(), torch.tensor([3, 6]))


class Biased(Attention):
    def forward(self, x, bias):
        self.bias = bias
        return super().forward(x)


def plus_bias(self, s):
    return s + self.bias


@pytest.mark.parametrize(
    "shape", [(2, 4, 11, 11), (1, 4, 11, 11), (4, 11, 11), (2, 1, 11, 11), (11, 11), (4, 1, 11),
              (4, 11, 1), (1, 1, 1, 11), (11,), (2, 1, 1, 11), (1,)],
    ids=str,
)  # fmt: skip
def test_fuses_bias_of_any_shape(shape):
    fuses(Biased(mask=plus_bias), *inputs(), torch.randn(shape))


def test_two_biases_are_added():
    module = Biased(mask=lambda self, s: s + self.bias[0] + self.bias[1])
    fuses(module, *inputs(), torch.randn(2, 11, 11))
    module = Biased(mask=lambda self, s: s + self.bias + self.bias.mT)
    fuses(module, *inputs(), torch.randn(4, 11, 11))


@pytest.mark.parametrize(
    "shape", [(2, 4, 11, 11), (4, 11, 11), (11, 11), (4, 1, 1), (11,)], ids=str
)
def test_bias_that_needs_a_gradient_gets_it(shape):
    never_wrong(Biased(mask=plus_bias), *inputs(), torch.randn(shape, requires_grad=True))


def test_boolean_mask_of_any_pattern():
    def mask(self, s):
        return s.masked_fill(self.bias, -1e30)

    hidden = torch.rand(2, 4, 11, 11, generator=torch.Generator().manual_seed(0)) > 0.6
    fuses(Biased(mask=mask), *inputs(), hidden)
    fuses(Biased(mask=mask, grouping="Grouping"), *inputs(), hidden[:1, :1])


def test_bias_with_causal_mask_keeps_both():
    def mask(self, s):
        L = s.shape[-1]
        return (s + self.bias).masked_fill(torch.ones(L, L, dtype=torch.bool).triu(1), NEG)

    seen = fuses(Biased(mask=mask), *inputs(), torch.randn(4, 11, 11))
    assert "causal + additive mask" in seen.summary


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_fuses_alibi(dtype):
    def mask(self, s):
        H, L, S = s.shape[-3:]
        slopes = 2.0 ** -torch.arange(1, H + 1)
        distance = (torch.arange(S)[None] - torch.arange(L)[:, None]).float()
        return s + (slopes[:, None, None] * distance).to(s.dtype)

    fuses(Attention(mask=mask, D=16, dtype=dtype), *inputs(L=23, dtype=dtype))


def test_fine_bias_in_fp32_beside_bf16_is_not_rounded():
    """The scores are promoted to fp32 by the bias, whose large values bf16 cannot tell apart."""

    def mask(self, s):
        return s.float() + self.bias

    module = Biased(mask=mask, D=16, dtype=torch.bfloat16)
    module.softmax = lambda s: torch.softmax(s, -1).to(torch.bfloat16)
    bias = 300.0 + torch.rand(11, 11, generator=torch.Generator().manual_seed(0))
    never_wrong(module, *inputs(dtype=torch.bfloat16), bias)


def test_filled_scores_below_an_infinite_bias():
    """A hidden score plus -inf is -inf, so it is not as hidden as the others."""

    def mask(self, s):
        filled = s.masked_fill(~self.bias[1][:, None, None], torch.finfo(s.dtype).min)
        return filled + self.bias[0]

    bias = torch.full((11, 11), NEG).triu(1)
    never_wrong(Biased(mask=mask), *inputs(B=3), (bias, padding(3, 11, "left")))


@pytest.mark.parametrize("fill", [0.0, -5.0, 7.0, -60.0, -1e4])
@pytest.mark.parametrize("adds", [False, True], ids=["filled", "added"])
def test_mild_fills_are_exact(fill, adds):
    def mask(self, s):
        L = s.shape[-1]
        hidden = torch.ones(L, L, dtype=torch.bool).triu(1)
        return s + torch.where(hidden, fill, 0.0) if adds else s.masked_fill(hidden, fill)

    fuses(Attention(mask=mask), *inputs())


def test_kept_scores_that_are_shifted_are_never_wrong():
    def mask(self, s):
        L = s.shape[-1]
        hidden = torch.ones(L, L, dtype=torch.bool).triu(1)
        return s + torch.where(hidden, -3.0, 2.0)

    never_wrong(Attention(mask=mask), *inputs())


@pytest.mark.parametrize("kind", [torch.uint8, torch.int8, torch.int32], ids=str)
def test_positions_that_wrap_around_are_never_wrong(kind):
    """In uint8 the difference i - j is never negative."""

    def mask(self, s):
        L, S = s.shape[-2:]
        i, j = torch.arange(L, dtype=kind)[:, None], torch.arange(S, dtype=kind)[None]
        return s.masked_fill(i - j < 0, NEG)

    never_wrong(Attention(mask=mask), *inputs())


def test_positions_in_floats_are_never_wrong():
    def mask(self, s):
        L, S = s.shape[-2:]
        i, j = torch.arange(L).float()[:, None], torch.arange(S).float()[None]
        return s.masked_fill(j * 0.5 > i, NEG)

    never_wrong(Attention(mask=mask), *inputs())


@pytest.mark.parametrize("step", [2, -1])
def test_bands_with_a_slope_are_never_wrong(step):
    def mask(self, s):
        L, S = s.shape[-2:]
        i, j = torch.arange(L)[:, None], torch.arange(S)[None]
        return s.masked_fill(j > i * step + 4, -1e30)

    never_wrong(Attention(mask=mask), *inputs())


def test_positions_given_as_ids_are_no_causal_mask():
    def mask(self, s):
        return s.masked_fill((self.ids[:, None, :] > self.ids[:, :, None])[:, None], NEG)

    ids = torch.stack(
        [torch.randperm(11, generator=torch.Generator().manual_seed(k)) for k in (0, 1)]
    )
    seen = never_wrong(Documents(mask=mask), *inputs(), ids)
    assert "causal" not in seen.summary


def test_mask_that_depends_on_the_activations():
    class Data(Attention):
        def forward(self, x):
            self.score = x.sum(-1)
            return super().forward(x)

    def mask(self, s):
        L = s.shape[-1]
        causal = torch.ones(L, L, dtype=torch.bool).tril()
        keep = causal & (self.score[:, None, None] > -1.0)
        return s.masked_fill(~keep, torch.finfo(s.dtype).min)

    never_wrong(Data(mask=mask), *inputs())


def test_mask_over_queries():
    def mask(self, s):
        return s.masked_fill(~self.keep[:, None, :, None], torch.finfo(s.dtype).min)

    fuses(Padded(mask=mask), *inputs(B=3), padding(3, 11, "left"))


def test_mask_over_heads():
    def mask(self, s):
        hidden = torch.arange(s.shape[1])[:, None, None] > torch.arange(s.shape[-1])
        return s.masked_fill(hidden, NEG)

    never_wrong(Attention(mask=mask), *inputs())


def test_padding_by_head_is_never_wrong():
    def mask(self, s):
        return s.masked_fill(self.bias, -1e30)

    hidden = torch.rand(2, 4, 1, 11, generator=torch.Generator().manual_seed(0)) > 0.6
    never_wrong(Biased(mask=mask), *inputs(), hidden)


def test_mask_that_hides_nothing_or_everything():
    fuses(
        Attention(mask=lambda self, s: s.masked_fill(torch.zeros(11, dtype=torch.bool), NEG)),
        *inputs(),
    )
    fuses(Attention(mask=lambda self, s: s + torch.zeros(11, 11)), *inputs())
    module = Attention(mask=lambda self, s: s.masked_fill(torch.ones(11, dtype=torch.bool), -1e9))
    never_wrong(module, *inputs())


def test_scale_after_the_mask_is_never_wrong():
    def mask(self, s):
        L = s.shape[-1]
        return s.masked_fill(torch.ones(L, L, dtype=torch.bool).triu(1), -7.0) * 0.5

    never_wrong(Attention(mask=mask), *inputs())


def test_clamped_scores_are_never_wrong():
    never_wrong(Attention(mask=lambda self, s: s.clamp(-1, 1)), *inputs())


def test_multiplied_mask_is_never_wrong():
    def mask(self, s):
        L = s.shape[-1]
        return s * torch.ones(L, L).tril()

    never_wrong(Attention(mask=mask), *inputs())


def test_mask_after_the_softmax_is_never_wrong():
    module = Attention()
    module.softmax = lambda s: torch.softmax(s, -1) * torch.ones(11, 11).tril()
    run(module, *inputs())


def test_safe_softmax_gives_zeros_for_rows_without_a_key():
    def forward(q, k, v, keep):
        s = (q @ k.mT * 0.3).masked_fill(~keep, NEG)
        p = torch.softmax(s, -1)
        p = torch.where((s == NEG).all(-1, keepdim=True), 0.0, p)
        return p @ v

    keep = padding(2, 11, "left")[:, None, None] & torch.ones(11, 11, dtype=torch.bool).tril()
    q, k, v = (torch.randn(2, 3, 11, 8) for _ in range(3))
    fuses(forward, q, k, v, keep, train=False)


def test_decomposed_sdpa():
    def forward(q, k, v, keep):
        k, v = repeat_kv(k, 2), repeat_kv(v, 2)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=keep, scale=0.3)

    q, k, v = (torch.randn(2, h, 11, 8, requires_grad=True) for h in (4, 2, 2))
    run(forward, q, k, v, torch.ones(11, 11, dtype=torch.bool).tril())


@pytest.mark.parametrize(
    "name", ["causal_by_ones_triu", "causal_by_arange_le", "causal_by_added_where"]
)
def test_causal_mask_of_dynamic_lengths(name):
    more = [inputs(L=17, seed=2)]
    seen = fuses(Masked(CAUSAL[name]), *inputs(L=13), dynamic=True, more=more)
    assert "causal" in seen.summary


def test_window_of_dynamic_lengths():
    def mask(self, s):
        L, S = s.shape[-2:]
        i, j = torch.arange(L)[:, None] + (S - L), torch.arange(S)[None]
        return s.masked_fill(~((j <= i) & (j > i - 4)), NEG)

    more = [inputs(L=17, S=19, seed=2)]
    fuses(Attention(mask=mask), *inputs(L=13, S=15), dynamic=True, more=more)


def test_padding_of_dynamic_lengths():
    module = Padded(mask=by_masked_fill)
    module.fill = -1e30
    more = [(*inputs(B=3, L=17, seed=2), padding(3, 17, "right"))]
    fuses(module, *inputs(B=3, L=13), padding(3, 13, "right"), dynamic=True, more=more)


def test_a_future_token_moves_no_earlier_output():
    module = Masked(CAUSAL["causal_by_ones_triu"])
    (x,) = inputs(grad=False)
    seen = fuses(module, x, train=False)
    assert seen.argument("band_hi") == 0
    with torch.no_grad():
        import inductor_gqa

        with inductor_gqa.enabled(always=True):
            compiled = torch.compile(module, backend="aot_eager")
            before = compiled(x)
            y = x.clone()
            y[:, -1] += 5.0
            after = compiled(y)
    assert torch.equal(before[:, :-1], after[:, :-1])


def test_real_code_is_generated_and_right():
    module = Masked(CAUSAL["causal_by_added_where"], torch.finfo(torch.float32).min)
    assert run(module, *inputs(), codegen=True).fused == 1


@pytest.mark.parametrize("shifts", [(0, 2), (2, 0), (-1, 1)])
def test_the_tighter_of_two_bands_wins(shifts):
    def both(module, s):
        i, j = torch.arange(s.shape[-2])[:, None], torch.arange(s.shape[-1])[None, :]
        hidden = (j - i > shifts[0]) | (j - i > shifts[1])
        return s.masked_fill(hidden, float("-inf"))

    seen = fuses(Attention(mask=both), *inputs(L=13))
    assert seen.argument("band_hi") == min(shifts)


def test_order_within_the_columns_of_a_grid_is_no_causal_mask():
    """Positions that start again in each row of the grid: only a part of the axis is compared."""

    def mask(module, s):
        column = torch.arange(4)[None, :].expand(3, 4).reshape(12)
        return s.masked_fill(column[None, :] > column[:, None], float("-inf"))

    seen = never_wrong(Attention(mask=mask), *inputs(L=12))
    assert seen.fused == 0 or seen.argument("band_hi") is None

"""Key/value heads shared by groups of query heads, in every arrangement that people write."""

import pytest
import torch
import torch.nn.functional as F
from fused import BACKWARD, FORWARD, fuses, never_wrong, run
from spellings import (
    GROUPINGS,
    Attention,
    Grouping,
    half,
    inputs,
    interleaved,
    partial,
    repeat_kv,
    softmax_fp32,
)
from torch import nn

pytestmark = pytest.mark.usefixtures("without_dynamo")


@pytest.mark.parametrize("B", [1, 2], ids="B{}".format)
@pytest.mark.parametrize("name", GROUPINGS)
def test_fuses_grouping_in_training(name, B):
    """6 heads over 2, so that `h // 3` and `h % 2` differ and no size equals another."""
    seen = fuses(Attention(H=6, K=2, grouping=name), *inputs(B=B), scores=(11, 11))
    assert "6 query / 2 key-value heads of 8" in seen.summary
    assert "rotate-half RoPE," in seen.summary
    assert list(seen.node_of(FORWARD).args[1].meta["val"].shape) == [B, 11, 2, 8]


@pytest.mark.parametrize("R", [2, 3, 4], ids="R{}".format)
@pytest.mark.parametrize("rotation", [half, interleaved, None], ids=["half", "pairs", "none"])
def test_gradient_of_stacked_copies_sums_over_the_group(R, rotation):
    """The sum over their gradients is a chain of additions."""
    module = Attention(H=2 * R, K=2, grouping="StackedCopies", rotation=rotation)
    seen = fuses(module, *inputs(), scores=(11, 11))
    assert f"{2 * R} query / 2 key-value heads of 8" in seen.summary
    assert list(seen.node_of(BACKWARD).meta["val"][1].shape) == [2, 11, 2, 8]


class Copies(Grouping):
    """repeat by a list of copies that `join` puts together."""

    def __init__(self, join):
        self.join = join

    def repeat(self, x, times):
        return self.join([x] * times)


JOINS = {
    "stack_then_flatten": lambda xs: torch.stack(xs, 2).flatten(1, 2),
    "stack_outside": lambda xs: torch.stack(xs, 1).flatten(1, 2),
    "cat": lambda xs: torch.cat(xs, 1),
    "cat_of_unsqueezed": lambda xs: torch.cat([x.unsqueeze(2) for x in xs], 2).flatten(1, 2),
    "hstack": lambda xs: torch.hstack(xs),
    "tile": lambda xs: xs[0].tile(1, len(xs), 1, 1),
}


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", JOINS)
def test_fuses_copies_that_are_joined(name, train):
    module = Attention(H=6, K=2, grouping=Copies(JOINS[name]))
    seen = fuses(module, *inputs(), train=train, scores=(11, 11))
    assert "6 query / 2 key-value heads of 8, rotate-half RoPE," in seen.summary


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("dim", [0, 1, 2, 3])
def test_copies_along_any_dim(dim, train):
    """Of the batch, the heads, the keys or the lanes."""

    def forward(q, k, v):
        k, v = (torch.cat((x, x), dim) if dim < 3 or x is k else x for x in (k, v))
        q = q if dim == 2 else torch.cat((q, q), dim)
        return F.softmax(q @ k.mT * 0.3, -1) @ v

    q, k, v = (torch.randn(2, 3, 11, 8, requires_grad=True) for _ in range(3))
    fuses(forward, q, k, v, train=train)


def test_copies_that_differ_are_no_group():
    """One of the copies is scaled, and one gradient is left out of the sum."""
    scaled = Copies(lambda xs: torch.stack([xs[0], *[2.0 * x for x in xs[1:]]], 2).flatten(1, 2))
    assert "6 query" not in fuses(Attention(H=6, K=2, grouping=scaled), *inputs()).summary
    partly = Copies(lambda xs: torch.stack([xs[0].detach(), *xs[1:]], 2).flatten(1, 2))
    never_wrong(Attention(H=6, K=2, grouping=partly), *inputs())


@pytest.mark.parametrize("name", GROUPINGS)
def test_fuses_grouping_in_inference(name):
    fuses(Attention(H=4, K=2, grouping=name), *inputs(L=9), train=False, scores=(9, 9))


@pytest.mark.parametrize("name", ["Grouping", "Grouped5D", "Tiled", "Einsum"])
@pytest.mark.parametrize(
    "heads", [(4, 1), (4, 4), (8, 4), (1, 1)], ids=lambda h: f"H{h[0]}-K{h[1]}"
)
def test_fuses_one_head_for_all_and_all_heads_alone(name, heads):
    H, K = heads
    fuses(Attention(H=H, K=K, grouping=name), *inputs(B=2))


@pytest.mark.parametrize("L", [2, 3, 6, 8], ids="L{}".format)
@pytest.mark.parametrize("name", ["Grouping", "Tiled", "Grouped5D", "FoldedRows"])
def test_length_equal_to_another_size_confuses_nothing(name, L):
    fuses(Attention(H=6, K=2, grouping=name), *inputs(B=2, L=L))


@pytest.mark.parametrize("layout", ["permute", "contiguous", "unflatten"])
def test_fuses_layout_of_the_heads(layout):
    fuses(Attention(layout=layout), *inputs(), scores=(11, 11))


def test_one_key_head_used_without_repeating():
    class OneHead(Attention):
        def attend(self, q, k, v):
            s = torch.einsum("bhid,bjd->bhij", q, k[:, 0]) * self.scale
            o = torch.einsum("bhij,bje->bhie", softmax_fp32(s), v[:, 0])
            return o.transpose(1, 2).flatten(2)

    fuses(OneHead(H=4, K=1), *inputs(), scores=(11, 11))


def test_one_key_head_by_broadcasting_matmul():
    class OneHead(Attention):
        def attend(self, q, k, v):
            p = softmax_fp32(q @ k.transpose(-1, -2) * self.scale)
            return (p @ v).transpose(1, 2).flatten(2)

    fuses(OneHead(H=4, K=1), *inputs(), scores=(11, 11))


def test_heads_folded_into_rows_of_one_bmm():
    class Folded(Attention):
        def attend(self, q, k, v):
            B, H, L, D = q.shape
            s = torch.bmm(q.reshape(B, H * L, D), k[:, 0].transpose(1, 2)).view(B, H, L, -1)
            p = softmax_fp32(s * self.scale)
            o = torch.bmm(p.view(B, H * L, -1), v[:, 0]).view(B, H, L, -1)
            return o.transpose(1, 2).flatten(2)

    fuses(Folded(H=4, K=1), *inputs())


@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_baddbmm_with_alpha_and_beta(beta):
    class Baddbmm(Attention):
        def attend(self, q, k, v):
            B, H, L, D = q.shape
            k, v = repeat_kv(k, self.H // self.K), repeat_kv(v, self.H // self.K)
            causal = torch.full((L, L), float("-inf"), dtype=q.dtype).triu(1)
            given = causal.expand(B * H, L, L) if beta else torch.zeros(B * H, L, L, dtype=q.dtype)
            q, k, v = (x.reshape(B * H, -1, D) for x in (q, k, v))
            s = torch.baddbmm(given, q, k.transpose(1, 2), beta=beta, alpha=0.4)
            o = torch.bmm(F.softmax(s, -1), v)
            return o.view(B, H, L, D).transpose(1, 2).flatten(2)

    seen = fuses(Baddbmm(), *inputs())
    assert ("causal" in seen.summary) == bool(beta)
    assert seen.argument("scale") == pytest.approx(0.4)


@pytest.mark.parametrize("beta", [0.5, 2.0])
def test_baddbmm_with_a_factor_on_the_mask_is_never_wrong(beta):
    def forward(q, k, v, m):
        return F.softmax(torch.baddbmm(m, q, k.transpose(1, 2), beta=beta, alpha=0.4), -1) @ v

    q, k, v = (torch.randn(6, 11, 8, requires_grad=True) for _ in range(3))
    never_wrong(forward, q, k, v, torch.randn(6, 11, 11))


class Packed(Attention):
    """One projection for q, k and v, cut by `cut`."""

    def __init__(self, cut, bias=False, **options):
        super().__init__(**options)
        self.cut = cut
        self.w = nn.Parameter(torch.cat([self.wq, self.wk, self.wv]).detach().clone())
        self.b = nn.Parameter(torch.linspace(-1, 1, len(self.w))) if bias else None
        del self.wq, self.wk, self.wv

    def forward(self, x):
        L = x.shape[1]
        qkv = F.linear(x, self.w, self.b)
        q, k, v = self.cut(self, qkv)
        if self.rotation is not None:
            q, k = self.rotated(q, L), self.rotated(k, L)
        return self.attend(q, k, v)


def by_split(self, qkv):
    sizes = [self.H * self.D, self.K * self.D, self.K * self.D]
    parts = qkv.split(sizes, -1)
    return [self.heads(x, n) for x, n in zip(parts, (self.H, self.K, self.K), strict=True)]


def by_chunk(self, qkv):
    return [self.heads(x, self.H) for x in qkv.chunk(3, -1)]


def by_unbind(self, qkv):
    B, L, _ = qkv.shape
    return qkv.view(B, L, 3, self.H, self.D).permute(2, 0, 3, 1, 4).unbind(0)


def by_index(self, qkv):
    B, L, _ = qkv.shape
    qkv = qkv.view(B, L, 3, self.H, self.D).permute(2, 0, 3, 1, 4)
    return qkv[0], qkv[1], qkv[2]


def by_slices(self, qkv):
    a, b = self.H * self.D, (self.H + self.K) * self.D
    return (
        self.heads(qkv[..., :a], self.H),
        self.heads(qkv[..., a:b], self.K),
        self.heads(qkv[..., b:], self.K),
    )


def by_head_slices(self, qkv):
    """Cut after the transpose, among the heads (Falcon, Phi)."""
    heads = self.heads(qkv, self.H + 2 * self.K)
    return heads[:, : self.H], heads[:, self.H : -self.K], heads[:, -self.K :]


def by_thirds_of_each_head(self, qkv):
    """q, k and v of each head side by side (GPT-NeoX)."""
    B, L, _ = qkv.shape
    return qkv.view(B, L, self.H, 3 * self.D).transpose(1, 2).chunk(3, -1)


def by_groups(self, qkv):
    """The heads of a group, then its k, then its v (Falcon's new decoder, InternLM)."""
    B, L, _ = qkv.shape
    R = self.H // self.K
    parts = qkv.view(B, L, self.K, R + 2, self.D)
    q = parts[:, :, :, :R].flatten(2, 3)
    return [x.transpose(1, 2) for x in (q, parts[:, :, :, R], parts[:, :, :, R + 1])]


@pytest.mark.parametrize(
    ("cut", "K"),
    [
        (by_split, 2),
        (by_slices, 2),
        (by_head_slices, 2),
        (by_groups, 2),
        (by_chunk, 4),
        (by_unbind, 4),
        (by_index, 4),
        (by_thirds_of_each_head, 4),
    ],
    ids=lambda x: getattr(x, "__name__", f"K{x}"),
)
@pytest.mark.parametrize("rotation", [half, None], ids=["half", "none"])
def test_fuses_packed_projection(cut, K, rotation):
    seen = fuses(Packed(cut, K=K, rotation=rotation), *inputs(), scores=(11, 11))
    assert ("rotate-half RoPE," in seen.summary) == (rotation is not None)


@pytest.mark.parametrize("share", [2, 4], ids="1/{}".format)
def test_fuses_packed_heads_that_are_rotated_in_part(share):
    """GPT-NeoX: q, k and v of a head side by side, and the first lanes of q and k turn."""
    width = 16 // share
    turned = lambda x, cos, sin: partial(x, cos, sin, width)  # noqa: E731
    module = Packed(by_thirds_of_each_head, H=4, K=4, D=16, rotation=turned)
    seen = fuses(module, *inputs(), scores=(11, 11))
    assert f"rotate-half RoPE on {width} lanes," in seen.summary
    fuses(module, *inputs(L=13), dynamic=True, more=[inputs(B=3, L=17, seed=2)])
    fuses(module, *inputs(L=13), train=False)


def test_fuses_packed_projection_with_bias():
    fuses(Packed(by_split, bias=True), *inputs(), scores=(11, 11))


def test_fuses_projections_with_bias():
    class Biased(Attention):
        def __init__(self, **options):
            super().__init__(**options)
            self.b = nn.Parameter(torch.linspace(-1, 1, self.H * self.D))

        def forward(self, x):
            q = self.heads(F.linear(x, self.wq, self.b), self.H)
            k, v = (
                self.heads(F.linear(x, w, self.b[: self.K * self.D]), self.K)
                for w in (self.wk, self.wv)
            )
            return self.attend(self.rotated(q, x.shape[1]), self.rotated(k, x.shape[1]), v)

    fuses(Biased(), *inputs(), scores=(11, 11))


def test_fuses_tensors_that_no_projection_made():
    def forward(q, k, v):
        return softmax_fp32(q @ repeat_kv(k, 2).transpose(2, 3) * 0.3) @ repeat_kv(v, 2)

    q, k, v = (torch.randn(2, h, 11, 8, requires_grad=True) for h in (4, 2, 2))
    fuses(forward, q, k, v, scores=(11, 11))
    seen = fuses(forward, *(x.detach() for x in (q, k, v)), train=False)
    assert "no RoPE inside" in seen.summary


def test_fuses_three_dimensional_operands():
    def forward(q, k, v):
        return F.softmax(torch.bmm(q, k.transpose(1, 2)) * 0.3, -1) @ v

    q, k, v = (torch.randn(6, n, 8, requires_grad=True) for n in (11, 13, 13))
    fuses(forward, q, k, v, scores=(11, 13))


def test_two_dimensional_operands():
    def forward(q, k, v):
        return F.softmax(q @ k.t() * 0.3, -1) @ v

    q, k, v = (torch.randn(n, 8, requires_grad=True) for n in (11, 13, 13))
    never_wrong(forward, q, k, v)


def test_five_and_six_dimensional_batches():
    def forward(q, k, v):
        return F.softmax(q @ k.mT * 0.3, -1) @ v

    q, k, v = (torch.randn(2, 3, 2, n, 8, requires_grad=True) for n in (11, 13, 13))
    never_wrong(forward, q, k, v)
    q, k, v = (torch.randn(2, 1, 3, 2, n, 8, requires_grad=True) for n in (11, 13, 13))
    never_wrong(forward, q, k, v)


def test_strided_tensors():
    def forward(q, k, v):
        return F.softmax(q @ k.mT * 0.3, -1) @ v

    q, k, v = (torch.randn(2, 8, 11, 4).transpose(1, 3).requires_grad_() for _ in range(3))
    fuses(forward, q, k, v)


class Shared(Attention):
    """Two attentions over one k and one v."""

    def forward(self, x):
        L = x.shape[1]
        k = self.rotated(self.heads(F.linear(x, self.wk), self.K), L)
        v = self.heads(F.linear(x, self.wv), self.K)
        q = self.rotated(self.heads(F.linear(x, self.wq), self.H), L)
        y = self.attend(q, k, v)
        q = self.rotated(self.heads(F.linear(y[..., : x.shape[-1]], self.wq), self.H), L)
        return self.attend(q, k, v)


def test_fuses_two_attentions_that_share_keys_and_values():
    fuses(Shared(), *inputs(), sites=2, train=False, scores=(11, 11))


def test_shared_keys_and_values_get_both_gradients():
    seen = never_wrong(Shared(), *inputs())
    assert seen.fused == 2


def test_fuses_cross_attention():
    seen = fuses(Attention(rotation=None), *inputs(L=11, S=17), scores=(11, 17))
    assert seen.count(BACKWARD) == 1


def test_keys_and_values_of_one_projection():
    class Tied(Attention):
        def forward(self, x):
            q = self.heads(F.linear(x, self.wq), self.H)
            k = v = self.heads(F.linear(x, self.wk), self.K)
            return self.attend(q, k, v) + 0.0 * self.wv.sum()

    fuses(Tied(), *inputs())


def test_queries_keys_and_values_of_one_tensor():
    def forward(x):
        return F.softmax(x @ x.transpose(1, 2) * 0.3, -1) @ x

    never_wrong(forward, *inputs())


class Cached(Attention):
    """A step of decoding: k and v are the past and this step's, concatenated."""

    def forward(self, x, past_k, past_v):
        L, P = x.shape[1], past_k.shape[2]
        rows = slice(P, P + L)
        q = half(self.heads(F.linear(x, self.wq), self.H), self.cos[rows], self.sin[rows])
        k = half(self.heads(F.linear(x, self.wk), self.K), self.cos[rows], self.sin[rows])
        k = torch.cat((past_k, k), 2)
        v = torch.cat((past_v, self.heads(F.linear(x, self.wv), self.K)), 2)
        return self.attend(q, k, v)


def causal_after_cache(self, s):
    L, S = s.shape[-2:]
    hidden = torch.arange(S)[None, :] > torch.arange(L)[:, None] + (S - L)
    return s.masked_fill(hidden, float("-inf"))


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
def test_fuses_concatenated_cache(train):
    past = [torch.randn(2, 2, 7, 8, requires_grad=train) for _ in range(2)]
    seen = fuses(Cached(mask=causal_after_cache), *inputs(L=5), *past, train=train)
    assert "(q only)" in seen.summary
    assert "causal shifted by 7" in seen.summary


def test_fuses_one_step_of_decoding():
    past = [torch.randn(2, 2, 7, 8) for _ in range(2)]
    fuses(Cached(mask=causal_after_cache), *inputs(L=1), *past, train=False)


def test_one_query_in_training():
    past = [torch.randn(2, 2, 7, 8, requires_grad=True) for _ in range(2)]
    never_wrong(Cached(mask=causal_after_cache), *inputs(L=1), *past)


def test_fuses_concatenated_cache_of_any_length():
    make = lambda n: [torch.randn(2, 2, n, 8) for _ in range(2)]  # noqa: E731
    more = [(*inputs(L=5), *make(9)), (*inputs(L=6), *make(12))]
    module = Cached(mask=causal_after_cache)
    fuses(module, *inputs(L=4), *make(7), train=False, dynamic=True, more=more)


def test_fuses_static_cache_written_at_a_position():
    class Static(Attention):
        def forward(self, x, cache_k, cache_v, position):
            L, S = x.shape[1], cache_k.shape[2]
            at = position + torch.arange(L)
            cos, sin = self.cos[at], self.sin[at]
            q = half(self.heads(F.linear(x, self.wq), self.H), cos, sin)
            k = half(self.heads(F.linear(x, self.wk), self.K), cos, sin)
            v = self.heads(F.linear(x, self.wv), self.K)
            k, v = cache_k.index_copy(2, at, k), cache_v.index_copy(2, at, v)
            s = self.grouping.scores(q, k) * self.scale
            hidden = torch.arange(S)[None] > at[:, None]
            p = softmax_fp32(s.masked_fill(hidden, torch.finfo(s.dtype).min))
            return self.grouping.out(p, v).transpose(1, 2).flatten(2)

    cache = [torch.randn(2, 2, 16, 8) for _ in range(2)]
    fuses(Static(), *inputs(L=3), *cache, torch.tensor(5), train=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", ["Grouping", "Grouped5D", "Einsum"])
def test_narrow_dtypes_are_as_exact_as_eager(name, dtype):
    fuses(Attention(grouping=name, D=16, dtype=dtype), *inputs(dtype=dtype))


def test_query_and_key_in_fp32_beside_values_in_bf16():
    """As under autocast, where a norm leaves q and k in fp32."""

    class Mixed(Attention):
        def attend(self, q, k, v):
            p = F.softmax(self.grouping.scores(q.float(), k.float()) * self.scale, -1)
            return self.grouping.out(p.to(v.dtype), v).transpose(1, 2).flatten(2)

    never_wrong(Mixed(D=16, dtype=torch.bfloat16), *inputs(dtype=torch.bfloat16))


@pytest.mark.parametrize("V", [4, 16], ids="V{}".format)
def test_values_may_have_a_head_dim_of_their_own(V):
    fuses(Attention(value_dim=V), *inputs())


class TestHeadOrders:
    """k and v may be spread over the query heads in different orders: read as they are, or left."""

    @staticmethod
    def mixed(for_keys, for_values):
        class Mixed(Grouping):
            def scores(self, q, k):
                return GROUPINGS[for_keys].scores(q, k)

            def out(self, p, v):
                return GROUPINGS[for_values].out(p, v)

        return Attention(H=6, K=2, grouping=Mixed())

    def test_tiled_keys_and_grouped_values(self):
        never_wrong(self.mixed("Tiled", "Grouping"), *inputs())

    def test_grouped_keys_and_tiled_values(self):
        never_wrong(self.mixed("Grouping", "Tiled"), *inputs())

    def test_grouped_and_interleaved_are_one_order(self):
        fuses(self.mixed("Grouping", "Interleave"), *inputs())

    def test_reversed_value_heads(self):
        class Reversed(Grouping):
            def out(self, p, v):
                return super().out(p, v.flip(1))

        never_wrong(Attention(grouping=Reversed()), *inputs())

    def test_rolled_key_heads(self):
        class Rolled(Grouping):
            def scores(self, q, k):
                return super().scores(q, k.roll(1, 1))

        never_wrong(Attention(H=4, K=4, grouping=Rolled()), *inputs())

    def test_batch_entries_swapped_in_the_values(self):
        class Swapped(Grouping):
            def out(self, p, v):
                return super().out(p, v.flip(0))

        never_wrong(Attention(grouping=Swapped()), *inputs())


def test_dynamic_lengths_and_batches():
    more = [inputs(B=3, L=17, seed=2), inputs(B=5, L=29, seed=3)]
    fuses(Attention(), *inputs(B=2, L=13), dynamic=True, more=more)


def test_marked_dynamic_length():
    x = inputs(B=2, L=13)[0]
    torch._dynamo.mark_dynamic(x, 1)
    fuses(Attention(), x, more=[inputs(B=2, L=19, seed=2)])


def test_real_code_is_generated_and_right():
    assert run(Attention(H=6, grouping="Tiled"), *inputs(), codegen=True).fused == 1

"""Calls of `F.scaled_dot_product_attention` after eager RoPE, on the CPU and as CUDA graphs hold
them.

The ops that CUDA graphs hold exist there only, but their shapes are known everywhere: such a graph
is traced on the CPU, and once the call is fused it runs there too.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from fused import BACKWARD, FORWARD, Seen, backend, fuses, run
from spellings import Attention, half, inputs, interleaved, partial, repeat_kv
from torch.nn.attention import SDPBackend, sdpa_kernel

import inductor_gqa

aten = torch.ops.aten
FUSED_OPS = [
    f"aten._scaled_dot_product_{name}{way}.default"
    for name in (
        "flash_attention_for_cpu",
        "flash_attention",
        "efficient_attention",
        "cudnn_attention",
    )
    for way in ("", "_backward")
]


def plain(q, k, v, mask=None, causal=False, scale=None):
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=True
    )


def repeated(q, k, v, mask=None, causal=False, scale=None):
    k, v = (repeat_kv(x, q.shape[1] // x.shape[1]) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale)


def tiled(q, k, v, mask=None, causal=False, scale=None):
    k, v = (x.repeat(1, q.shape[1] // x.shape[1], 1, 1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale)


def flash(q, k, v, mask=None, causal=False, scale=None, dropout=0.0):
    if not torch.compiler.is_compiling():
        return plain(q, k, v, mask, causal, scale)
    assert mask is None
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return aten._scaled_dot_product_flash_attention(q, k, v, dropout, causal, scale=scale)[0]


def cudnn(q, k, v, mask=None, causal=False, scale=None):
    if not torch.compiler.is_compiling():
        return plain(q, k, v, mask, causal, scale)
    bias = None if mask is None else additive(mask, q)
    return aten._scaled_dot_product_cudnn_attention(q, k, v, bias, True, 0.0, causal, scale=scale)[
        0
    ]


def efficient(q, k, v, mask=None, causal=False, scale=None):
    """As PyTorch calls it: heads repeated, the bias padded to whole 16-byte rows and expanded."""
    if not torch.compiler.is_compiling():
        return plain(q, k, v, mask, causal, scale)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    if mask is not None:
        mask = additive(mask, q)
        S = k.shape[2]
        mask = F.pad(mask, (0, -S % 16))[..., :S].expand(*q.shape[:3], S)
    return aten._scaled_dot_product_efficient_attention(
        q, k, v, mask, True, 0.0, causal, scale=scale
    )[0]


def additive(mask, q):
    if mask.dtype is not torch.bool:
        return mask
    low = torch.scalar_tensor(-math.inf, dtype=q.dtype)
    return torch.where(mask, torch.scalar_tensor(0.0, dtype=q.dtype), low)


CALLS = [plain, repeated, tiled, flash, efficient, cudnn]
MASKED = [plain, repeated, efficient, cudnn]
named = {"ids": lambda f: f.__name__}


class Called(Attention):
    """`Attention` whose scores, softmax and product are one call."""

    def __init__(self, call=plain, causal=True, visible=None, scale=None, **options):
        super().__init__(**options)
        self.call, self.causal, self.visible, self.given_scale = call, causal, visible, scale

    def attend(self, q, k, v, *extra):
        mask = self.visible(q, k, *extra) if self.visible is not None else None
        out = self.call(q, k, v, mask, self.causal and mask is None, self.given_scale)
        return out.transpose(1, 2).flatten(2)


def is_fused(seen, train):
    assert seen.count(*FUSED_OPS) == 0
    assert "scaled_dot_product_attention" in seen.summary
    assert "no RoPE" not in seen.summary
    assert seen.count(FORWARD) == 1
    assert seen.count(BACKWARD) == int(train)
    return seen


def causal(q, k):
    return torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()


def by_document(q, k):
    """Boolean, by batch entry; the last rows of the second entry see nothing."""
    document = torch.tensor([[0, 0, 1, 1, 1, 2, 2, 2, 2, 3, 3]])
    other = torch.cat((document, document.flip(1)), 0)
    seen = document.expand(2, -1)[:, None, :, None] == other[:, None, None, :]
    return seen & (torch.arange(11) < 8)


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
class TestFuses:
    @pytest.mark.parametrize("call", CALLS, **named)
    def test_is_causal(self, call, train):
        seen = is_fused(fuses(Called(call), *inputs(), train=train), train)
        assert seen.argument("band_hi") == 0
        assert "causal" in seen.summary

    @pytest.mark.parametrize("call", CALLS, **named)
    def test_no_mask_and_a_scale(self, call, train):
        module = Called(call, causal=False, scale=0.2)
        seen = is_fused(fuses(module, *inputs(), train=train), train)
        assert "no mask" in seen.summary
        assert seen.argument("scale") == 0.2

    @pytest.mark.parametrize("call", MASKED, **named)
    def test_boolean_mask_that_is_causal(self, call, train):
        seen = is_fused(fuses(Called(call, visible=causal), *inputs(), train=train), train)
        assert seen.argument("band_hi") == 0
        assert seen.argument("mask") is None

    @pytest.mark.parametrize("call", MASKED, **named)
    def test_additive_mask(self, call, train):
        bias = torch.randn(4, 11, 11, generator=torch.Generator().manual_seed(5))
        module = Called(call, visible=lambda q, k, b: b)
        seen = is_fused(fuses(module, *inputs(), None, bias[None], train=train), train)
        assert "additive mask" in seen.summary

    @pytest.mark.parametrize("call", MASKED, **named)
    def test_rows_that_see_no_key_are_zero(self, call, train):
        module = Called(call, visible=by_document)
        x = inputs()[0]
        assert (module(x)[1, :3] == 0).all() or (module(x)[0, 9:] == 0).all()
        is_fused(fuses(module, x, train=train), train)

    @pytest.mark.parametrize("call", MASKED, **named)
    def test_rows_that_a_bias_hides_are_zero(self, call, train):
        def hidden(q, k):
            bias = torch.sin(torch.arange(121.0)).view(11, 11)
            return bias.masked_fill(torch.arange(11)[:, None] % 3 == 1, -math.inf) * 1.5

        module = Called(call, visible=hidden)
        assert (module(inputs()[0])[:, 1] == 0).all()
        is_fused(fuses(module, *inputs(), train=train), train)

    @pytest.mark.parametrize("call", MASKED, **named)
    def test_causal_and_padded_on_the_left(self, call, train):
        """The rows of padding see only padding."""

        def visible(q, k, padding):
            return causal(q, k) & padding[:, None, None, :]

        padding = torch.arange(11) >= torch.tensor([[0], [4]])
        module = Called(call, visible=visible)
        seen = is_fused(fuses(module, *inputs(), None, padding, train=train), train)
        assert "causal + key padding" in seen.summary

    @pytest.mark.parametrize("rotation", [half, interleaved, partial], **named)
    def test_rotations(self, rotation, train):
        is_fused(fuses(Called(rotation=rotation), *inputs(), train=train), train)

    @pytest.mark.parametrize(("H", "K"), [(4, 4), (4, 1), (6, 3), (1, 1)])
    @pytest.mark.parametrize("call", [plain, repeated, flash], **named)
    def test_head_counts(self, call, H, K, train):
        fuses(Called(call, H=H, K=K), *inputs(), train=train)

    def test_cross_attention(self, train):
        fuses(Called(repeated, causal=False), *inputs(L=11, S=17), train=train)

    def test_causal_rectangle_starts_at_the_top_left(self, train):
        fuses(Called(efficient), *inputs(L=7, S=17), train=train)
        fuses(Called(plain), *inputs(L=17, S=7), train=train)


@pytest.mark.parametrize("call", [plain, repeated, flash, efficient], **named)
def test_dynamic_lengths(call):
    more = [inputs(B=3, L=17, seed=2)]
    is_fused(fuses(Called(call), *inputs(B=2, L=13), dynamic=True, more=more), True)


@pytest.mark.parametrize("L", [1, 2, 63, 257])
@pytest.mark.parametrize("call", [plain, efficient], **named)
def test_odd_lengths(call, L):
    fuses(Called(call, longest=300), *inputs(B=1, L=L), train=L > 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("call", [plain, repeated, flash], **named)
def test_dtypes(call, dtype):
    seen = fuses(Called(call, dtype=dtype, D=16), *inputs(L=33, dtype=dtype))
    assert seen.count(*FUSED_OPS) == 0


@pytest.mark.parametrize("frozen", ["q", "k", "v", "qk", "kv"])
def test_frozen_projections(frozen):
    """Fused backward ops make all gradients; only those that are taken are asked for."""
    module = Called(flash)
    for name in frozen:
        getattr(module, f"w{name}").requires_grad_(False)
    seen = fuses(module, *inputs(grad=False))
    assert seen.node_of(BACKWARD).args[3:6] == tuple(name not in frozen for name in "qkv")


def test_two_layers_with_one_mask():
    class Layers(torch.nn.Module):
        def __init__(self):
            super().__init__()
            calls = (plain, repeated)
            self.layers = torch.nn.ModuleList(Called(c, visible=by_document) for c in calls)

        def forward(self, x):
            for layer in self.layers:
                x = x + layer(x)[..., :24]
            return x

    fuses(Layers(), *inputs(), sites=2)


def test_checkpointed_layer_is_computed_again():
    class Checkpointed(Called):
        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)

    seen = run(Checkpointed(plain), *inputs())
    assert seen.fused == 1
    assert seen.count(*FUSED_OPS) == 0
    assert (seen.count(FORWARD), seen.count(BACKWARD)) == (2, 1)


class TestLeaves:
    """What is left calls an op that does not exist here, so it is compiled and cannot run."""

    @staticmethod
    def left(module, reason, *given):
        torch._dynamo.reset()
        seen = Seen()
        with inductor_gqa.enabled(always=True), backend(seen) as chosen:
            compiled = torch.compile(module, backend=chosen, fullgraph=True)
            with pytest.raises(NotImplementedError, match="Could not run 'aten::_scaled_dot"):
                compiled(*given)
        assert seen.fused == 0
        assert seen.count(*FUSED_OPS) >= 1
        assert seen.count(FORWARD, BACKWARD) == 0
        assert [r for r in seen.reasons if reason in r], seen.reasons

    def test_dropout(self):
        def dropped(q, k, v, mask=None, causal=False, scale=None):
            return flash(q, k, v, mask, causal, scale, dropout=0.1)

        self.left(Called(dropped), "dropout_p is 0.1, accepted 0", *inputs())

    def test_causal_rectangle_of_unequal_lengths(self):
        reason = "is_causal with lengths 11 and 17, accepted equal"
        self.left(Called(flash), reason, *inputs(S=17))
        self.left(Called(cudnn), reason, *inputs(S=17))

    def test_mask_that_needs_a_gradient(self):
        bias = torch.zeros(1, 4, 11, 11).requires_grad_()
        module = Called(efficient, visible=lambda q, k, b: b)
        reason = "the mask needs a gradient, accepted masks without"
        self.left(module, reason, *inputs(), None, bias)

    def test_log_sum_exp_that_is_used(self):
        def with_sum(q, k, v, mask=None, causal=False, scale=None):
            made = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
            return made[0] + made[1][..., None].to(q.dtype)

        self.left(Called(with_sum, K=4), "another result of the call is", *inputs())

    def test_is_causal_beside_a_mask(self):
        def both(q, k, v, mask=None, causal=False, scale=None):
            bias = torch.zeros(*q.shape[:3], k.shape[2])
            return aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.0, True)[0]

        reason = "is_causal is given beside a mask, accepted one of them"
        self.left(Called(both, K=4), reason, *inputs())

    def test_debug_mask(self):
        def debugged(q, k, v, mask=None, causal=False, scale=None):
            return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, True)[0]

        reason = "return_debug_mask is True, accepted False"
        self.left(Called(debugged, K=4), reason, *inputs(grad=False))


def test_left_on_the_cpu_by_default():
    """Ours is PyTorch's own fused attention there."""
    report = inductor_gqa.explain(Called(plain), *inputs(), always=False)
    assert (report.fused, report.left) == (0, 1)
    assert "call on cpu is PyTorch's fused attention" in report.sites[0].reason
    assert inductor_gqa.explain(Called(plain), *inputs(), always=True).fused == 1


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
def test_call_on_the_result_of_a_call(train):
    def twice(q, k, v):
        first = plain(q, k, v)
        return F.scaled_dot_product_attention(first, first, first, is_causal=True)

    q, k, v = (torch.randn(2, h, 11, 8, requires_grad=True) for h in (4, 2, 2))
    assert fuses(twice, q, k, v, sites=2, train=train).count(*FUSED_OPS) == 0


class TestDecomposed:
    """What no backend takes is matmuls and a softmax whose empty rows are zero."""

    @pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
    @pytest.mark.parametrize("visible", [None, causal, by_document], ids=["none", "causal", "rows"])
    def test_fuses(self, visible, train):
        module = Called(plain, causal=False, visible=visible)
        with sdpa_kernel(SDPBackend.MATH):
            seen = fuses(module, *inputs(), train=train, scores=(11, 11) if visible is None else ())
        assert "no RoPE" not in seen.summary
        assert "scaled_dot_product_attention" not in seen.summary

    def test_value_dim_of_its_own(self):
        fuses(Called(plain, value_dim=4), *inputs(), scores=(11, 11))

    def test_empty_rows_need_no_care_where_there_are_none(self):
        with sdpa_kernel(SDPBackend.MATH):
            seen = fuses(Called(plain), *inputs())
        assert seen.count("aten.any.dim") == 0
        with sdpa_kernel(SDPBackend.MATH):
            seen = fuses(Called(plain, visible=by_document), *inputs())
        assert seen.count("aten.any.dim") >= 1

    def test_guard_over_other_scores_is_left(self):
        """Zero where another tensor is -inf is no safe softmax."""

        def other_guard(s):
            empty = ~(s[:, :1] != -math.inf).any(-1, keepdim=True)
            return torch.where(empty, 0.0, torch.softmax(s, -1))

        assert run(Attention(softmax=other_guard), *inputs()).fused == 0

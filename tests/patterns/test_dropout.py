"""Dropout of the weights: fused with the mask that the graph itself draws, so that it is the one
that eager, or stock torch.compile, would have drawn.
"""

import pytest
import torch
import torch.nn.functional as F
from fused import FORWARD, Seen, backend, fuses, leaves, results, run, wrong
from spellings import Attention, inputs, repeat_kv, softmax_fp32
from torch import nn

import inductor_gqa

pytestmark = pytest.mark.usefixtures("without_dynamo")


@pytest.fixture
def random_as_eager():
    with torch._inductor.config.patch(fallback_random=True):
        yield


def causal(self, s):
    return s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))


@pytest.mark.usefixtures("random_as_eager")
@pytest.mark.parametrize("grouping", ["Grouping", "Grouped5D", "Bmm", "FoldedRows"])
def test_fuses_dropout_in_training(grouping):
    module = Attention(H=6, grouping=grouping, softmax=lambda s: F.dropout(softmax_fp32(s), 0.3))
    seen = fuses(module, *inputs(), scores=())
    assert "dropout" in seen.summary
    assert seen.argument("keep_scale") == pytest.approx(1 / 0.7)
    assert list(seen.argument("keep").meta["val"].shape) == [2, 2, 3, 11, 11]


@pytest.mark.usefixtures("random_as_eager")
def test_fuses_dropout_module_in_training():
    class Dropped(Attention):
        def __init__(self, **options):
            super().__init__(**options)
            self.drop = nn.Dropout(0.3)
            self.softmax = lambda s: self.drop(softmax_fp32(s))

    fuses(Dropped(mask=causal).train(), *inputs())
    seen = fuses(Dropped(mask=causal).eval(), *inputs(), scores=(11, 11))
    assert "dropout" not in seen.summary


@pytest.mark.usefixtures("random_as_eager")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("L", [3, 63], ids="L{}".format)
def test_narrow_dtypes_and_odd_lengths(dtype, L):
    module = Attention(D=16, dtype=dtype, softmax=lambda s: F.dropout(softmax_fp32(s), 0.3))
    fuses(module, *inputs(L=L, dtype=dtype))


@pytest.mark.usefixtures("random_as_eager")
def test_dropout_with_softcap_mask_and_one_key_head():
    module = Attention(
        H=4,
        K=1,
        mask=causal,
        scores=lambda s: torch.tanh(s * 0.4 / 5.0) * 5.0,
        softmax=lambda s: F.dropout(softmax_fp32(s), 0.5),
    )
    seen = fuses(module, *inputs(L=13))
    assert "softcap 5" in seen.summary
    assert "causal" in seen.summary


@pytest.mark.usefixtures("random_as_eager")
def test_dropout_of_a_softmax_by_hand():
    def by_hand(s):
        e = torch.exp(s - s.amax(-1, keepdim=True))
        return F.dropout(e / e.sum(-1, keepdim=True), 0.3)

    fuses(Attention(softmax=by_hand), *inputs())


@pytest.mark.usefixtures("random_as_eager")
def test_dropout_beside_sinks():
    class Sinks(Attention):
        def __init__(self, **options):
            super().__init__(**options)
            self.sinks = nn.Parameter(torch.linspace(-1, 1, self.H))

        def attend(self, q, k, v):
            s = self.grouping.scores(q, k) * self.scale
            column = self.sinks.reshape(1, -1, 1, 1).expand(s.shape[0], -1, s.shape[2], -1)
            s = torch.cat([s, column], -1)
            s = s - s.max(-1, keepdim=True).values
            p = F.dropout(F.softmax(s, -1, dtype=s.dtype)[..., :-1], 0.3)
            return self.grouping.out(p, v).transpose(1, 2).flatten(2)

    assert "sinks, dropout" in fuses(Sinks(), *inputs()).summary


@pytest.mark.usefixtures("random_as_eager")
@pytest.mark.parametrize("frozen", ["q", "v", "qk"])
def test_dropout_with_frozen_projections(frozen):
    module = Attention(softmax=lambda s: F.dropout(softmax_fp32(s), 0.3))
    for name in frozen:
        getattr(module, f"w{name}").requires_grad_(False)
    fuses(module, *inputs(grad=False))


@pytest.mark.usefixtures("random_as_eager")
def test_layers_draw_masks_of_their_own():
    class Layers(nn.Module):
        def __init__(self):
            super().__init__()
            softmax = lambda s: F.dropout(softmax_fp32(s), 0.3)  # noqa: E731
            make = lambda: Attention(H=3, K=1, D=8, softmax=softmax)  # noqa: E731
            self.layers = nn.ModuleList(make() for _ in range(2))

        def forward(self, x):
            for layer in self.layers:
                x = F.dropout(x + layer(x), 0.1)
            return x

    fuses(Layers(), *inputs(), sites=2)


@pytest.mark.usefixtures("random_as_eager")
def test_dropout_of_dynamic_lengths():
    module = Attention(softmax=lambda s: F.dropout(softmax_fp32(s), 0.3))
    fuses(module, *inputs(L=13), dynamic=True, more=[inputs(B=3, L=17, seed=2)])


# A mask that is given, so that the truth can be computed in fp64 with the same one.

GIVEN = {
    "product": lambda p, keep: p * keep / 0.7,
    "product_first": lambda p, keep: keep * p * (1 / 0.7),
    "scaled_mask": lambda p, keep: p * (keep / 0.7),
    "float_mask": lambda p, keep: p * keep.to(p.dtype) / 0.7,
    "scaled_float_mask": lambda p, keep: p * (keep.to(p.dtype) * (1 / 0.7)),
    "where": lambda p, keep: torch.where(keep, p, 0.0) / 0.7,
    "filled": lambda p, keep: p.masked_fill(~keep, 0.0) / 0.7,
    "unscaled": lambda p, keep: p * keep,
    "scaled_before": lambda p, keep: (p / 0.7) * keep,
    "of_the_keys": lambda p, keep: p * keep[:, :, :1] / 0.7,
    "of_the_heads": lambda p, keep: p * keep[:, :, :1, :1] / 0.7,
    "two": lambda p, keep: p * keep * keep.flip(-1) / 0.5,
}


class Given(Attention):
    def __init__(self, drop, **options):
        super().__init__(**options)
        self.drop = drop

    def attend(self, q, k, v, keep):
        p = self.softmax(self.grouping.scores(q, k) * self.scale)
        return self.grouping.out(self.drop(p, keep), v).transpose(1, 2).flatten(2)

    def forward(self, x, keep):
        return super().forward(x, None, keep)


def kept(B=2, H=4, L=11, S=11):
    return torch.rand(B, H, L, S, generator=torch.Generator().manual_seed(4)) > 0.3


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", GIVEN)
def test_fuses_dropout_by_a_given_mask(name, train):
    seen = fuses(Given(GIVEN[name]), *inputs(), kept(), train=train)
    assert "dropout" in seen.summary
    assert not any(
        v.dtype.is_floating_point and v.shape[-2:] == (11, 11)
        for g in seen.graphs
        for n in g.graph.nodes
        if isinstance(v := n.meta.get("val"), torch.Tensor)
    )


NOT_DROPOUT = {
    "number": (lambda p, keep: p * 0.9, "multiplied by 0.9"),
    "float": (lambda p, keep: p * keep.cumsum(-1), "accepted a mask and a number"),
    "own_values": (lambda p, keep: p * (p > 0.05), "more than once"),
    "added": (lambda p, keep: p * keep + 0.1, ""),
    "replaced": (lambda p, keep: torch.where(keep, p, 0.1), "replaced by 0.1"),
    "squared": (lambda p, keep: p * p * keep, "accepted a mask and a number"),
    "divided_by": (lambda p, keep: 0.5 / p.clamp_min(1e-3) * keep, ""),
    "plus_identity": (lambda p, keep: (p + torch.eye(11)) * keep, ""),
}


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", NOT_DROPOUT)
def test_leaves_what_is_no_dropout(name, train):
    drop, reason = NOT_DROPOUT[name]
    seen = run(Given(drop), *inputs(), kept(), train=train)
    assert seen.fused == 0
    assert not reason or any(reason in text for text in seen.reasons), seen.reasons


class Crossed(torch.autograd.Function):
    """Another mask in the backward than in the forward."""

    @staticmethod
    def forward(p, keep):
        return p * keep

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx, grad):
        (keep,) = ctx.saved_tensors
        return grad * keep.flip(-1), None


def test_leaves_dropout_with_another_mask_in_the_backward():
    reason = "is not the derivative of the scores"
    leaves(Given(Crossed.apply), *inputs(), kept(), reason_contains=reason)


@pytest.mark.parametrize("drop", ["product", "where"])
def test_rows_without_a_key_are_as_in_eager(drop):
    """A product with 0 keeps their NaN, a choice of 0 does not; the mask is of the rows here."""

    class Rows(Given):
        def attend(self, q, k, v, keep):
            self.mask = lambda self, s: s.masked_fill(~keep, float("-inf"))
            p = self.softmax(self.mask(self, self.grouping.scores(q, k) * self.scale))
            p = self.drop(p, keep.any(-1, keepdim=True))
            return self.grouping.out(p, v).transpose(1, 2).flatten(2)

    keep = torch.ones(11, 11, dtype=torch.bool).tril()
    keep[:3] = False
    module = Rows(GIVEN[drop])
    if drop == "where":
        reason = "replaced by 0 where a row may have no key"
        leaves(module, *inputs(), keep, train=False, reason_contains=reason)
    else:
        fuses(module, *inputs(), keep, train=False)


@pytest.mark.usefixtures("random_as_eager")
def test_leaves_dropped_weights_that_are_returned():
    def forward(q, k, v):
        p = F.dropout(torch.softmax(q @ k.mT * 0.3, -1), 0.3)
        return p @ v, p

    q, k, v = (torch.randn(2, 4, 11, 8, requires_grad=True) for _ in range(3))
    leaves(forward, q, k, v, reason_contains="the attention weights are returned")


def dropped(q, k, v):
    p = F.dropout(torch.softmax(q @ repeat_kv(k, 2).mT * 0.3, -1), 0.3)
    return p @ repeat_kv(v, 2)


def dropped_by_rand(q, k, v):
    p = torch.softmax(q @ repeat_kv(k, 2).mT * 0.3, -1)
    return (p * (torch.rand_like(p) > 0.3) / 0.7) @ repeat_kv(v, 2)


def dropped_by_bernoulli(q, k, v):
    p = torch.softmax(q @ repeat_kv(k, 2).mT * 0.3, -1)
    return (p * torch.bernoulli(torch.full_like(p, 0.7)) / 0.7) @ repeat_kv(v, 2)


@pytest.mark.parametrize("fallback", [False, True], ids=["inductor", "eager"])
@pytest.mark.parametrize(
    "forward", [dropped, dropped_by_rand, dropped_by_bernoulli], ids=lambda f: f.__name__
)
def test_mask_is_that_of_stock_compile(forward, fallback):
    """With generated code and the seed of a run before; the values are one-hot, so that the output
    shows which weights are kept.
    """
    q, k, _ = (torch.randn(2, h, 11, 8, requires_grad=True) for h in (4, 2, 2))
    v = torch.eye(11).expand(2, 2, 11, 11).clone().requires_grad_()
    made = {}
    with torch._inductor.config.patch(fallback_random=fallback, pattern_matcher=False):
        for kind in ("stock", "ours"):
            torch._dynamo.reset()
            seen = Seen()
            with backend(seen, codegen=True) as chosen:
                torch.manual_seed(5)
                if kind == "stock":
                    made[kind] = results(
                        torch.compile(forward, backend=chosen), forward, [q, k, v], True
                    )
                else:
                    with inductor_gqa.enabled(always=True):
                        made[kind] = results(
                            torch.compile(forward, backend=chosen), forward, [q, k, v], True
                        )
    assert seen.fused == 1
    assert seen.count(FORWARD) == 1
    masks = {kind: out["output 0"] != 0 for kind, out in made.items()}
    assert torch.equal(masks["ours"], masks["stock"])
    assert 0 < masks["ours"].float().mean() < 1

    def truth(q, k, v):
        p = torch.softmax(q @ repeat_kv(k, 2).mT * 0.3, -1)
        return (p * masks["ours"] / 0.7) @ repeat_kv(v, 2)

    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    assert not wrong(made["ours"], made["stock"], results(truth, truth, wide, True))


def dropping(q, k, v):
    return F.dropout(torch.softmax(q @ repeat_kv(k, 2).mT * 0.3, -1), 0.3) @ repeat_kv(v, 2)


def its_queries(q, k, v):
    return dropping(dropping(dropping(q, k, v), k, v), v, k)


def its_keys(q, k, v):
    return dropping(q, dropping(q, k, v)[:, ::2], v)


def its_values(q, k, v):
    first = dropping(q, k, v)
    return F.dropout(torch.softmax(q @ first.mT, -1), 0.3) @ first


@pytest.mark.usefixtures("random_as_eager")
@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize(
    ("forward", "sites"),
    [(its_queries, 3), (its_keys, 2), (its_values, 2)],
    ids=["queries", "keys", "values"],
)
def test_attention_of_an_attention(forward, sites, train):
    """Nothing is left of the first: its mask is drawn for a tensor without values."""
    q, k, v = (torch.randn(2, h, 7, 8, requires_grad=True) for h in (4, 2, 2))
    seen = fuses(forward, q, k, v, sites=sites, train=train)
    assert seen.count("aten.bmm.default") == 0


def plain(q, k, v):
    return torch.softmax(q @ repeat_kv(k, 2).mT * 0.3, -1) @ repeat_kv(v, 2)


def called(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


@pytest.mark.usefixtures("random_as_eager")
@pytest.mark.parametrize("attend", [plain, called], ids=["softmax", "call"])
@pytest.mark.parametrize(
    "after",
    [lambda o: F.dropout(o, 0.3), lambda o: F.dropout(torch.tanh(o).transpose(1, 2), 0.3)],
    ids=["at once", "later"],
)
def test_what_is_drawn_for_the_output_is_as_in_eager(attend, after):
    """Random numbers are drawn in the order of memory."""
    q, k, v = (torch.randn(2, h, 7, 8, requires_grad=True) for h in (4, 2, 2))
    fuses(lambda q, k, v: after(attend(q, k, v)), q, k, v)

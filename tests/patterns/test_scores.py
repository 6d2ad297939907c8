"""What stands between q k^T and the weights: scale, softcap, softmax, dropout; and what is done
with the weights.
"""

import math
import operator

import pytest
import torch
import torch.nn.functional as F
from fused import BACKWARD, FORWARD, WITH_WEIGHTS, fuses, leaves, never_wrong, run
from spellings import Attention, inputs, repeat_kv, softmax_fp32
from torch import nn

pytestmark = pytest.mark.usefixtures("without_dynamo")


class Scaled(Attention):
    """`before(q, k)` returns them scaled; `after(s)` scales the scores."""

    def __init__(self, before=None, after=None, **options):
        super().__init__(scores=after or (lambda s: s), **options)
        self.before = before or (lambda q, k: (q, k))

    def attend(self, q, k, v):
        return super().attend(*self.before(q, k), v)


SCALES = {
    "on_q": {"before": lambda q, k: (q * 0.4, k)},
    "on_k": {"before": lambda q, k: (q, k * 0.4)},
    "on_both": {"before": lambda q, k: (q * 0.4**0.5, k * 0.4**0.5)},
    "on_scores": {"after": lambda s: s * 0.4},
    "number_first": {"after": lambda s: 0.4 * s},
    "divided": {"after": lambda s: s / 2.5},
    "divided_q": {"before": lambda q, k: (q / 2.5, k)},
    "everywhere": {"before": lambda q, k: (q * 0.8, k / 2.0), "after": lambda s: s * 1.25 / 1.25},
    "one": {},
    "negative": {"after": lambda s: s * -0.4},
    "negated": {"after": lambda s: -s},
    "whole": {"after": lambda s: s * 2},
    "sqrt": {"after": lambda s: s / math.sqrt(8)},
    "tensor": {"after": lambda s: s * torch.tensor(0.4)},
    "full": {"after": lambda s: s / torch.full([], 8**0.5, dtype=s.dtype)},
    "constant_added": {"after": lambda s: s * 0.4 + 1.5},
}


@pytest.mark.parametrize("name", SCALES)
def test_fuses_scale(name):
    fuses(Scaled(**SCALES[name]), *inputs(), scores=(11, 11))


@pytest.mark.parametrize("name", ["on_q", "on_k", "on_both", "on_scores", "everywhere"])
def test_scale_reaches_the_op_as_one_number(name):
    """Where it is not read it is multiplied outside, which costs a pass over q or k."""
    seen = fuses(Scaled(**SCALES[name]), *inputs(), train=False)
    assert seen.argument("scale") in (pytest.approx(0.4), 1.0)


def test_fuses_scale_on_q_before_rotation():
    class Before(Attention):
        def rotated(self, x, length):
            return super().rotated(x * 0.6, length)

    fuses(Before(), *inputs(), scores=(11, 11))


def test_fuses_scale_that_is_a_tensor_input():
    class Given(Attention):
        def forward(self, x, factor):
            self.factor = factor
            return super().forward(x)

    module = Given()
    module.scores = lambda s: s * module.factor
    never_wrong(module, *inputs(), torch.tensor(0.4), train=False)


def test_scale_that_needs_a_gradient_gets_it():
    def forward(q, k, v, factor):
        return torch.softmax(q @ k.mT * factor, -1) @ v

    q, k, v = (torch.randn(2, 3, 11, 8, requires_grad=True) for _ in range(3))
    never_wrong(forward, q, k, v, torch.tensor(0.4, requires_grad=True))


@pytest.mark.parametrize("shape", [(3, 1, 1), (1,), (2, 1, 1, 1), (11, 1), (11,)], ids=str)
@pytest.mark.parametrize("grad", [False, True], ids=["constant", "learned"])
def test_scale_by_a_tensor_with_dims_is_never_wrong(shape, grad):
    def forward(q, k, v, factor):
        return torch.softmax(q @ k.mT * factor, -1) @ v

    q, k, v = (torch.randn(2, 3, 11, 8, requires_grad=True) for _ in range(3))
    never_wrong(forward, q, k, v, (torch.rand(shape) + 0.5).requires_grad_(grad))


def test_temperature_of_each_query():
    """Llama 4 scales q by a tensor over the positions."""

    class Tempered(Attention):
        def attend(self, q, k, v):
            t = torch.log1p(torch.floor((torch.arange(q.shape[2]).float() + 1) / 4)) * 0.1 + 1
            return super().attend((q * t[None, None, :, None]).to(q.dtype), k, v)

    fuses(Tempered(), *inputs())


def test_number_scale_with_dynamic_shapes():
    """A Python number becomes an fp64 input of the graph."""
    more = [inputs(L=17, seed=2)]
    fuses(Attention(scale=0.37), *inputs(L=13), dynamic=True, more=more)


class Factor(nn.Module):
    """The scale is an attribute, which Dynamo may turn into a symbol."""

    def forward(self, q, k, v, factor):
        return torch.softmax((q @ k.mT) * factor, -1) @ v


def test_number_scale_that_is_an_argument():
    q, k, v = (torch.randn(2, 3, 11, 8, requires_grad=True) for _ in range(3))
    never_wrong(Factor(), q, k, v, 0.41, dynamic=True)


@pytest.mark.parametrize("cap", [0.5, 5.0, 50.0])
@pytest.mark.parametrize("mask", [None, "causal"])
def test_fuses_softcap(cap, mask):
    def hide(self, s):
        L = s.shape[-1]
        return s.masked_fill(torch.ones(L, L, dtype=torch.bool).triu(1), float("-inf"))

    def scores(s):
        return torch.tanh(s * 0.4 / cap) * cap

    module = Attention(scores=scores, mask=hide if mask else None)
    seen = fuses(module, *inputs(), scores=(11, 11))
    assert f"softcap {cap:g}" in seen.summary


def test_fuses_softcap_in_fp32_of_bf16_scores():
    def scores(s):
        return (torch.tanh(s.float() * 0.4 / 5.0) * 5.0).to(s.dtype)

    fuses(Attention(scores=scores, dtype=torch.bfloat16, D=16), *inputs(dtype=torch.bfloat16))


NOT_CAPS = {
    "two_constants": lambda s: torch.tanh(s / 4.0) * 5.0,
    "no_factor": lambda s: torch.tanh(s),
    "negative": lambda s: torch.tanh(s / 4.0) * -4.0,
    "negative_inside": lambda s: torch.tanh(s / -4.0) * 4.0,
    "both_negative": lambda s: torch.tanh(s / -4.0) * -4.0,
    "shifted_inside": lambda s: torch.tanh((s + 3.0) / 4.0) * 4.0,
    "max_subtracted_inside": lambda s: torch.tanh((s - s.amax(-1, keepdim=True)) / 4.0) * 4.0,
    "detached_max_inside": lambda s: (
        torch.tanh((s - s.amax(-1, keepdim=True).detach()) / 4.0) * 4.0
    ),
    "shifted_outside": lambda s: torch.tanh(s / 4.0) * 4.0 + 3.0,
    "twice": lambda s: torch.tanh(torch.tanh(s / 4.0) * 4.0 / 3.0) * 3.0,
    "masked_inside": lambda s: torch.tanh((s + torch.arange(11.0)) / 4.0) * 4.0,
    "sigmoid": lambda s: torch.sigmoid(s / 4.0) * 4.0,
    "squared": lambda s: torch.tanh(s / 4.0) ** 2 * 4.0,
    "times_itself": lambda s: torch.tanh(s / 4.0) * s,
    "scaled_after": lambda s: torch.tanh(s / 4.0) * 4.0 * 0.3,
}


WHY_NOT = {
    "negative": "softcap is -4.0, accepted positive",
    "both_negative": "softcap is -4.0, accepted positive",
    "shifted_inside": "the scores are shifted inside the softcap",
    "max_subtracted_inside": "the scores are shifted inside the softcap",
    "detached_max_inside": "the scores are shifted inside the softcap",
    "twice": "two softcaps, accepted one",
    "masked_inside": "a mask inside the softcap",
    "sigmoid": "the scores pass through aten.sigmoid",
    "squared": "the scores pass through aten.pow",
    "times_itself": "the scores are multiplied by themselves",
}


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", NOT_CAPS)
def test_near_miss_of_a_softcap_is_never_wrong(name, train):
    module = Attention(scores=NOT_CAPS[name])
    never_wrong(module, *inputs(), train=train, left=WHY_NOT.get(name))


# What else may stand between the product and the softmax, where the mask would.
BIASES = {
    "subtracted": lambda s: s - torch.arange(11.0) / 4,
    "subtracted_from": lambda s: torch.arange(11.0) / 4 - s,
    "number_less_scores": lambda s: 1.0 - s,
    "with_alpha": lambda s: torch.add(s, torch.arange(11.0), alpha=-0.25),
    "distances": lambda s: s - 0.5 * (torch.arange(11)[:, None] - torch.arange(11)).abs(),
    "in_place": lambda s: s.sub_(torch.arange(11.0) / 4),
}


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", BIASES)
def test_fuses_a_bias_whatever_its_sign(name, train):
    """Only what was added had been read."""
    fuses(Attention(scores=lambda s: BIASES[name](s * 0.3)), *inputs(), train=train)


def test_a_mask_that_is_subtracted_is_a_mask():
    hidden = torch.ones(11, 11).triu(1)
    module = Attention(scores=lambda s: s * 0.3 - 1e9 * hidden)
    seen = fuses(module, *inputs(), dynamo=True)
    assert "additive mask" in seen.summary  # a constant of the graph: its values are not known

    def causal(s):
        i, j = torch.arange(11)[:, None], torch.arange(11)
        return s * 0.3 - 1e9 * (j > i)

    seen = fuses(Attention(scores=causal), *inputs())
    assert "causal" in seen.summary


def by_hand(s):
    e = torch.exp(s - s.max(-1, keepdim=True).values)
    return e / e.sum(-1, keepdim=True)


def by_hand_with_amax(s):
    e = (s - s.amax(dim=-1, keepdim=True)).exp()
    return e / e.sum(dim=-1, keepdim=True)


def by_hand_detached(s):
    e = torch.exp(s - s.detach().amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True)


def by_hand_times_reciprocal(s):
    e = torch.exp(s - s.amax(-1, keepdim=True))
    return e * e.sum(-1, keepdim=True).reciprocal()


def by_hand_with_dims_put_back(s):
    e = torch.exp(s - s.max(-1)[0].unsqueeze(-1))
    return e / e.sum(-1)[..., None]


def by_hand_in_fp32(s):
    wide = s.float()
    e = torch.exp(wide - wide.amax(-1, keepdim=True))
    return (e / e.sum(-1, keepdim=True)).to(s.dtype)


def by_hand_in_place(s):
    s -= s.detach().amax(-1, keepdim=True)
    e = s.exp()
    return e / e.sum(-1, keepdim=True)


SOFTMAXES = {
    "functional": lambda s: F.softmax(s, -1),
    "fp32_and_back": softmax_fp32,
    "float_first": lambda s: F.softmax(s.float(), -1).type_as(s),
    "method": lambda s: s.softmax(-1),
    "positive_dim": lambda s: torch.softmax(s, dim=3),
    "module": nn.Softmax(dim=-1),
    "max_subtracted": lambda s: F.softmax(s - s.max(-1, keepdim=True).values, -1),
    "detached_max_subtracted": lambda s: F.softmax(s - s.detach().amax(-1, keepdim=True), -1),
    "max_put_back_subtracted": lambda s: F.softmax(s - s.amax(-1).unsqueeze(-1), -1),
} | {
    f.__name__: f
    for f in (
        by_hand,
        by_hand_with_amax,
        by_hand_detached,
        by_hand_times_reciprocal,
        by_hand_with_dims_put_back,
        by_hand_in_fp32,
        by_hand_in_place,
    )
}


@pytest.mark.parametrize("name", SOFTMAXES)
def test_fuses_softmax_in_inference(name):
    fuses(Attention(softmax=SOFTMAXES[name]), *inputs(L=11), train=False, scores=(11, 11))


@pytest.mark.parametrize("name", SOFTMAXES)
def test_fuses_softmax_in_training(name):
    """Written by hand, its gradient is spelled with quotients, and passes through the maximum."""
    fuses(Attention(softmax=SOFTMAXES[name]), *inputs(), scores=(11, 11))


@pytest.mark.parametrize("name", ["by_hand", "by_hand_with_amax"])
def test_softmax_by_hand_with_everything_else(name):
    module = Attention(
        H=6,
        softmax=SOFTMAXES[name],
        scores=lambda s: torch.tanh(s * 0.4 / 5.0) * 5.0,
        mask=lambda self, s: s.masked_fill(
            torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -1e30
        ),
    )
    seen = fuses(module, *inputs(L=13), scores=(13, 13))
    assert "softcap 5" in seen.summary
    assert "causal" in seen.summary
    fuses(module, *inputs(L=13), dynamic=True, more=[inputs(B=3, L=17, seed=2)])


def half_detached(s):
    e = torch.exp(s - s.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True).detach()


def detached_above(s):
    e = torch.exp(s - s.amax(-1, keepdim=True))
    return e.detach() / e.sum(-1, keepdim=True)


def max_shared_by_the_queries(s):
    e = torch.exp(s - s.amax((-1, -2), keepdim=True))
    return e / e.sum(-1, keepdim=True)


def test_leaves_softmax_by_hand_whose_total_is_detached():
    module = Attention(softmax=half_detached)
    leaves(module, *inputs(), reason_contains="is not the derivative of the scores")
    fuses(module, *inputs(), train=False)


@pytest.mark.parametrize(
    ("softmax", "left"),
    [
        (detached_above, "copied before they are divided"),
        (max_shared_by_the_queries, "aten.amax.default is subtracted from the scores"),
        (lambda s: s.exp() / s.exp().sum(-1, keepdim=True), "no maximum is subtracted"),
        (lambda s: F.log_softmax(s, -1).exp(), "not divided by their sum"),
        (lambda s: torch.exp(s - s.logsumexp(-1, keepdim=True)), "not divided by their sum"),
    ],
    ids=["detached", "shared maximum", "no maximum", "log softmax", "logsumexp"],
)
def test_another_softmax_by_hand_is_left_with_its_reason(softmax, left):
    """Its gradient is another, or eager may underflow or overflow where a fused softmax would
    not."""
    never_wrong(Attention(softmax=softmax), *inputs(), left=left)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(
    "name", ["functional", "fp32_and_back", "float_first", "by_hand", "by_hand_in_fp32"]
)
def test_narrow_softmax(name, dtype):
    module = Attention(softmax=SOFTMAXES[name], D=16, dtype=dtype)
    never_wrong(module, *inputs(dtype=dtype))


def test_log_softmax_is_not_taken_for_a_softmax():
    run(Attention(softmax=lambda s: F.log_softmax(s, -1)), *inputs())


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
def test_product_spelled_keys_first_is_never_wrong(train):
    class KeysFirst(Attention):
        def attend(self, q, k, v):
            k, v = repeat_kv(k, self.H // self.K), repeat_kv(v, self.H // self.K)
            p = torch.softmax(k @ q.mT * self.scale, dim=-2)
            return (p.mT @ v).transpose(1, 2).flatten(2)

    never_wrong(KeysFirst(), *inputs(), train=train)
    never_wrong(KeysFirst(rotation=None), *inputs(L=11, S=13), train=train)


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
def test_scores_transposed_before_the_softmax_fuse(train):
    class KeysFirst(Attention):
        def attend(self, q, k, v):
            k, v = repeat_kv(k, self.H // self.K), repeat_kv(v, self.H // self.K)
            p = torch.softmax((k @ q.mT * self.scale).mT, dim=-1)
            return (p @ v).transpose(1, 2).flatten(2)

    fuses(KeysFirst(rotation=None), *inputs(L=11, S=13), train=train, scores=(11, 13))


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_dropout_of_the_weights(p, training):
    """Without effect it leaves no trace."""
    module = Attention()
    module.softmax = lambda s: F.dropout(softmax_fp32(s), p=p, training=training)
    with torch._inductor.config.patch(fallback_random=True):
        seen = fuses(module, *inputs())
    assert ("dropout" in seen.summary) == (p > 0.0 and training)
    assert p > 0.0 or not seen.with_dims(11, 11)


def test_dropout_of_all_weights():
    module = Attention()
    module.softmax = lambda s: F.dropout(softmax_fp32(s), p=1.0)
    run(module, *inputs())


def test_dropout_module():
    class Dropped(Attention):
        def __init__(self, **options):
            super().__init__(**options)
            self.drop = nn.Dropout(0.3)
            self.softmax = lambda s: self.drop(softmax_fp32(s))

    fuses(Dropped().eval(), *inputs(), scores=(11, 11))


def returns_weights(self, q, k, v):
    s = self.grouping.scores(q, k) * self.scale
    p = self.softmax(s)
    return self.grouping.out(p, v).transpose(1, 2).flatten(2), p


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
def test_returned_weights_are_right(train):
    class Returning(Attention):
        attend = returns_weights  # pyright: ignore[reportAssignmentType]

    never_wrong(Returning(), *inputs(), train=train)
    never_wrong(Returning(dtype=torch.bfloat16, D=16), *inputs(dtype=torch.bfloat16), train=train)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_fuses_weights_that_are_needed_without_a_gradient(dtype):
    """As for a statistic of them, or a loss beside the attention that is detached."""

    class Watched(Attention):
        def attend(self, q, k, v):
            out, p = returns_weights(self, q, k, v)
            return out, p.detach().float().amax(-1), p.detach().float().mean(1)

    seen = run(Watched(D=16, dtype=dtype), *inputs(dtype=dtype))
    assert (seen.fused, seen.reasons) == (1, [])
    assert (seen.count(WITH_WEIGHTS), seen.count(BACKWARD)) == (1, 1)
    assert "returns the weights, backward of q, k, v" in seen.summary


@pytest.mark.parametrize(
    "shown",
    [
        lambda p: p.detach(),
        lambda p: p.detach().transpose(1, 2),
        lambda p: p.detach().bfloat16(),
        lambda p: p.detach()[:, :, -1],
    ],
    ids=["as they are", "moved", "cast", "a row"],
)
def test_fuses_weights_that_are_shown_without_a_gradient(shown):
    """The graph's output stands behind gradients too: weights returned as they are were taken for
    weights with a gradient."""

    class Showing(Attention):
        def attend(self, q, k, v):
            out, p = returns_weights(self, q, k, v)
            return out, shown(p)

    seen = run(Showing(), *inputs())
    assert (seen.fused, seen.reasons) == (1, [])
    assert (seen.count(WITH_WEIGHTS), seen.count(BACKWARD)) == (1, 1)


def test_leaves_returned_weights_that_have_a_gradient():
    class Returning(Attention):
        attend = returns_weights  # pyright: ignore[reportAssignmentType]

    leaves(Returning(), *inputs(), reason_contains="weights are returned with a gradient")


def test_returned_weights_with_the_mask_and_groups():
    class Returning(Attention):
        def attend(self, q, k, v):
            s = self.grouping.scores(q, k) * self.scale
            L = s.shape[-1]
            s = s.masked_fill(torch.ones(L, L, dtype=torch.bool).triu(1), float("-inf"))
            p = self.softmax(s)
            return self.grouping.out(p, v).transpose(1, 2).flatten(2), p

    never_wrong(Returning(grouping="Grouped5D"), *inputs(), train=False)
    never_wrong(Returning(), *inputs(), train=False)


def test_mean_of_the_weights_over_heads():
    class Returning(Attention):
        def attend(self, q, k, v):
            out, p = returns_weights(self, q, k, v)
            return out, p.mean(1)

    never_wrong(Returning(), *inputs(), train=False)
    never_wrong(Returning(), *inputs())


def test_scores_that_are_returned_too():
    class Returning(Attention):
        def attend(self, q, k, v):
            s = self.grouping.scores(q, k) * self.scale
            out = self.grouping.out(self.softmax(s), v)
            return out.transpose(1, 2).flatten(2), s

    never_wrong(Returning(), *inputs(), train=False)
    never_wrong(Returning(), *inputs())


FINISHES = {
    "transposed": lambda o: o.transpose(1, 2).contiguous().flatten(2),
    "reshaped": lambda o: o.transpose(1, 2).reshape(o.shape[0], o.shape[2], -1),
    "heads_first": lambda o: o,
    "permuted": lambda o: o.permute(2, 0, 1, 3),
    "flat": lambda o: o.reshape(-1),
    "gated": lambda o: o.transpose(1, 2).flatten(2) * torch.sigmoid(o.transpose(1, 2).flatten(2)),
    "last_query": lambda o: o[:, :, -1],
    "one_head": lambda o: o[:, 1],
    "cast": lambda o: o.double(),
    "several": lambda o: (o.transpose(1, 2), o.sum(-1), o.flatten(1)),
    "half_of_the_lanes": lambda o: o[..., ::2],
    "split_heads": lambda o: o.split([1, 3], 1),
}


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", FINISHES)
def test_fuses_whatever_becomes_of_the_output(name, train):
    fuses(Attention(finish=FINISHES[name]), *inputs(), train=train)


def test_sinks_as_a_concatenated_column():
    """gpt-oss: a logit per head joins the softmax and is dropped."""

    class Sinks(Attention):
        def __init__(self, **options):
            super().__init__(**options)
            self.sinks = nn.Parameter(torch.linspace(-1, 1, self.H))

        def attend(self, q, k, v):
            s = self.grouping.scores(q, k) * self.scale
            column = self.sinks.reshape(1, -1, 1, 1).expand(s.shape[0], -1, s.shape[2], -1)
            s = torch.cat([s, column], -1)
            s = s - s.max(-1, keepdim=True).values
            p = F.softmax(s, -1, dtype=s.dtype)[..., :-1]
            return self.grouping.out(p, v).transpose(1, 2).flatten(2)

    assert "sinks" in fuses(Sinks(), *inputs(), scores=(11, 11)).summary
    assert "sinks" in fuses(Sinks(), *inputs(), train=False, scores=(11, 11)).summary


def test_column_of_zeros_beside_the_scores():
    """softmax1, or a key of zeros."""

    class Zero(Attention):
        def attend(self, q, k, v):
            s = self.grouping.scores(q, k) * self.scale
            p = torch.softmax(F.pad(s, (0, 1)), -1)[..., :-1]
            return self.grouping.out(p, v).transpose(1, 2).flatten(2)

    run(Zero(), *inputs())


def test_weights_renormalised_are_left():
    module = Attention()
    module.softmax = lambda s: (lambda p: p / (p.sum(-1, keepdim=True) + 1e-3))(
        torch.softmax(s, -1)
    )
    run(module, *inputs())


@pytest.mark.parametrize("scale", [3.0, 1e-4])
def test_large_and_tiny_logits_are_as_exact_as_eager(scale):
    fuses(Attention(scale=scale), *inputs())


def test_logits_in_the_hundreds_are_as_exact_as_eager_in_inference():
    fuses(Attention(scale=30.0), *inputs(), train=False)


IN_PLACE = {
    "div_": lambda s: s.div_(2.5),
    "mul_": lambda s: s.mul_(0.4),
    "augmented": lambda s: operator.itruediv(s, 2.5),
    "added": lambda s: (s * 0.4).add_(torch.ones(s.shape[-2:]).triu(1) * -1e9),
    "filled": lambda s: (s / 2.5).masked_fill_(
        torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), float("-inf")
    ),
}


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", IN_PLACE)
def test_fuses_scores_changed_in_place(name, train):
    seen = fuses(Scaled(after=IN_PLACE[name]), *inputs(), train=train, scores=(11, 11))
    assert seen.argument("scale") == pytest.approx(0.4)
    assert ("causal" in seen.summary) == (name in ("added", "filled"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_scale_in_place_of_narrow_scores(dtype):
    module = Scaled(after=lambda s: s.div_(2.5), D=16, dtype=dtype)
    fuses(module, *inputs(L=23, dtype=dtype))


def test_query_scaled_in_place():
    class OnQuery(Attention):
        def attend(self, q, k, v):
            q *= 0.5
            return super().attend(q, k, v)

    fuses(OnQuery(rotation=None), *inputs(), scores=(11, 11))
    fuses(OnQuery(), *inputs(), scores=(11, 11))


def test_logits_in_the_hundreds_are_as_exact_as_eager_in_training():
    fuses(Attention(scale=30.0), *inputs())


def test_equal_logits():
    """All of them, which leaves nothing but rounding of the gradients of q and k, and those of two
    keys each."""
    fuses(Attention(), torch.ones(2, 11, 24), train=False)
    x = inputs(grad=False)[0].repeat_interleave(2, 1).requires_grad_()
    fuses(Attention(rotation=None), x)


def test_left_softmax_over_another_dim_says_which():
    module = Attention(softmax=lambda s: torch.softmax(s, 1))
    leaves(module, *inputs(), reason_contains="dim 1 of 4")


def test_fp64_is_as_exact_as_eager():
    module = Attention(dtype=torch.float64, softmax=lambda s: torch.softmax(s, -1))
    seen = fuses(module, *inputs(dtype=torch.float64))
    assert seen.node_of(FORWARD).args[0].meta["val"].dtype is torch.float64


def test_real_code_is_generated_and_right():
    module = Attention(scores=lambda s: torch.tanh(s * 0.4 / 5.0) * 5.0)
    assert run(module, *inputs(), codegen=True).fused == 1

"""Almost the scores and the weights of an attention: other scales, masks off by one, exponentials
that are nearly a softmax, weights that are changed before they meet the values.
"""

import pytest
import torch
from fused import run
from near_misses import L, NearMisses, tensors

pytestmark = pytest.mark.usefixtures("without_dynamo")

NEG = float("-inf")
near = NearMisses()


# The scores


@near()
def scores_added_to_their_transpose(q, k, v):
    s = q @ k.mT
    return torch.softmax(s + s.mT, -1) @ v


@near()
def scale_of_each_key(q, k, v):
    return torch.softmax(q @ k.mT * torch.linspace(0.1, 1, L), -1) @ v


@near()
def scale_of_each_query(q, k, v):
    return torch.softmax(q @ k.mT * torch.linspace(0.1, 1, L)[:, None], -1) @ v


@near()
def scale_of_each_head(q, k, v):
    return torch.softmax(q @ k.mT * torch.linspace(0.1, 1, 4)[:, None, None], -1) @ v


@near(left=None)
def scale_on_q_and_k_and_the_scores(q, k, v):
    return torch.softmax((q * 0.5) @ (k * 0.6).mT * 1.5 / 0.9, -1) @ v


@near(left=None)
def scale_by_the_length(q, k, v):
    return torch.softmax(q @ k.mT / q.shape[2] ** 0.5, -1) @ v


@near(left="softcap")
def softcap_with_two_numbers_under_a_mask(q, k, v):
    s = (torch.tanh(q @ k.mT / 2) * 3).masked_fill(hidden(lambda i, j: j > i), -2.5)
    return torch.softmax(torch.tanh(s) * 2, -1) @ v


@near(left="mask")
def softcap_of_masked_scores(q, k, v):
    s = (q @ k.mT).masked_fill(hidden(lambda i, j: j > i), -5.0)
    return torch.softmax(torch.tanh(s / 3) * 3, -1) @ v


@near()
def sine_instead_of_a_softcap(q, k, v):
    return torch.softmax(torch.sin(q @ k.mT / 3) * 3, -1) @ v


@near()
def scores_of_two_sets_of_keys(q, k, v):
    s = torch.cat((q @ k.mT, q @ k.flip(1).mT), -1)
    return torch.softmax(s, -1) @ torch.cat((v, v.flip(1)), 2)


@near()
def scores_of_some_keys_replaced(q, k, v):
    s = q @ k.mT
    s = torch.cat((s[..., :4], torch.zeros_like(s[..., 4:6]), s[..., 6:]), -1)
    return torch.softmax(s, -1) @ v


# Masks


def hidden(condition):
    i, j = torch.arange(L)[:, None], torch.arange(L)[None]
    return condition(i, j)


@near(left=None)
def mask_of_the_past(q, k, v):
    return torch.softmax((q @ k.mT).masked_fill(hidden(lambda i, j: j < i), NEG), -1) @ v


@near(left=None)
def window_with_both_ends_off_by_one(q, k, v):
    out = hidden(lambda i, j: (j > i + 1) | (i - j > 4))
    return torch.softmax((q @ k.mT).masked_fill(out, NEG), -1) @ v


@near(left="multiplied")
def mask_multiplied_after_the_softmax(q, k, v):
    keep = hidden(lambda i, j: j <= i)
    return (torch.softmax(q @ k.mT, -1) * (keep * 2.0 - 0.5)) @ v


@near(left="aten.add")
def mask_added_after_the_softmax(q, k, v):
    return (torch.softmax(q @ k.mT, -1) + hidden(lambda i, j: j > i) * -1.0) @ v


@near()
def mask_scaled_with_the_scores(q, k, v):
    s = (q @ k.mT).masked_fill(hidden(lambda i, j: j > i), -3.0)
    return torch.softmax(s * 0.4, -1) @ v


@near()
def mask_of_which_a_row_sees_nothing(q, k, v):
    s = (q @ k.mT).masked_fill(hidden(lambda i, j: j >= i), NEG)
    return torch.softmax(s, -1).nan_to_num() @ v


@near(train=False)
def mask_changed_in_place_before_its_use(q, k, v):
    out = hidden(lambda i, j: j > i).clone()
    s = (q @ k.mT).masked_fill(out, -1e9)
    out.fill_(False)
    return torch.softmax(s.masked_fill(out, -1e9), -1) @ v


@near()
def two_fills_in_another_order(q, k, v):
    s = (q @ k.mT).masked_fill(hidden(lambda i, j: j > i), NEG)
    return torch.softmax(s.masked_fill(hidden(lambda i, j: j > i + 2), -1e4), -1) @ v


# The softmax


@near()
def a_number_subtracted(q, k, v):
    e = torch.exp(q @ k.mT - 3.0)
    return (e / e.sum(-1, keepdim=True)) @ v


@near()
def the_mean_subtracted(q, k, v):
    s = q @ k.mT
    e = torch.exp(s - s.mean(-1, keepdim=True))
    return (e / e.sum(-1, keepdim=True)) @ v


@near()
def the_maximum_over_queries_subtracted(q, k, v):
    s = q @ k.mT
    e = torch.exp(s - s.amax(-2, keepdim=True))
    return (e / e.sum(-1, keepdim=True)) @ v


@near()
def the_maximum_of_other_scores_subtracted(q, k, v):
    s = q @ k.mT
    e = torch.exp(s - (s * 0.5).amax(-1, keepdim=True))
    return (e / e.sum(-1, keepdim=True)) @ v


@near()
def the_sum_and_one(q, k, v):
    s = q @ k.mT
    e = torch.exp(s - s.amax(-1, keepdim=True))
    return (e / (1 + e.sum(-1, keepdim=True))) @ v


@near()
def the_sum_of_the_other_keys(q, k, v):
    s = q @ k.mT
    e = torch.exp(s - s.amax(-1, keepdim=True))
    return (e / (e.sum(-1, keepdim=True) - 0.5 * e[..., :1])) @ v


@near()
def the_sum_of_some_keys(q, k, v):
    s = q @ k.mT
    e = torch.exp(s - s.amax(-1, keepdim=True))
    return (e / e[..., :7].sum(-1, keepdim=True)) @ v


@near()
def exponentials_squared(q, k, v):
    s = q @ k.mT
    e = torch.exp(s - s.amax(-1, keepdim=True)) ** 2
    return (e / e.sum(-1, keepdim=True)) @ v


@near()
def exponentials_used_elsewhere(q, k, v):
    s = q @ k.mT
    e = torch.exp(s - s.amax(-1, keepdim=True))
    return (e / e.sum(-1, keepdim=True)) @ v, e.sum((-1, -2))


@near()
def divided_after_the_values_by_another_sum(q, k, v):
    s = q @ k.mT
    e = torch.exp(s - s.amax(-1, keepdim=True))
    return (e @ v) / e.sum(-2).unsqueeze(-1)


# The weights


@near(left="the weights pass through aten.select_scatter")
def weights_of_the_first_key_zeroed(q, k, v):
    p = torch.softmax(q @ k.mT, -1).clone()
    p[..., 0] = 0
    return p @ v


@near(left="the weights pass through aten.index_put")
def weights_of_some_keys_put(q, k, v):
    p = torch.softmax(q @ k.mT, -1).clone()
    p[..., torch.tensor([1, 4])] = 0.1
    return p @ v


@near(left="the weights pass through aten.topk")
def weights_of_the_largest_alone(q, k, v):
    p = torch.softmax(q @ k.mT, -1)
    top, where = p.topk(3, -1)
    return torch.zeros_like(p).scatter(-1, where, top) @ v


@near(left="the weights pass through aten.cumsum")
def weights_summed_up(q, k, v):
    return torch.softmax(q @ k.mT, -1).cumsum(-1) @ v


@near()
def weights_cut_in_place(q, k, v):
    return torch.softmax(q @ k.mT, -1).clone().tril_() @ v


@near()
def a_score_overwritten(q, k, v):
    s = (q @ k.mT).clone()
    s[..., 3] = 1.0
    return torch.softmax(s, -1) @ v


@near.each()
def test_near_miss_is_never_wrong(name, train):
    near.check(name, train)


def powers_of_two(s):
    e = torch.exp2(s - s.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True)


NO_SOFTMAX = {
    "sigmoids": lambda s: torch.sigmoid(s) / torch.sigmoid(s).sum(-1, keepdim=True),
    "powers of two": powers_of_two,
    "powers of two of a log softmax": lambda s: torch.exp2(torch.log_softmax(s, -1)),
    "squares": lambda s: s.square() / s.square().sum(-1, keepdim=True),
    "linear": lambda s: s,
}


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", NO_SOFTMAX)
def test_what_has_no_exponentials_is_no_attention(name, train):
    def forward(q, k, v):
        return NO_SOFTMAX[name](q @ k.mT) @ v

    assert run(forward, *tensors(), train=train).fused == 0


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
def test_an_exponential_gate_before_a_projection_is_no_attention(train):
    """RecurrentGemma: gates made by one matrix a head, exponentiated, multiply what is projected;
    it was reported as an attention that is left."""

    def forward(x, gates, out):
        gate = torch.exp(-8.0 * torch.sigmoid(torch.bmm(x, gates)))  # [H, L, D]
        return (gate * x).permute(1, 0, 2).flatten(1) @ out

    sizes = ((4, L, 8), (4, 8, 8), (32, 16))
    generator = torch.Generator().manual_seed(5)
    given = [torch.randn(s, generator=generator, requires_grad=True) for s in sizes]
    assert run(forward, *given, train=train).sites == []


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
def test_exponentials_that_take_values_without_a_batch_are_reported(train):
    """One set of values for all heads, as a matmul of two dims takes them."""

    def forward(q, k, x, wv):
        return torch.exp(q @ k.mT * 0.1) @ (x @ wv)

    sizes = ((2, 4, L, 8), (2, 4, L, 8), (L, 16), (16, 8))
    generator = torch.Generator().manual_seed(5)
    given = [torch.randn(s, generator=generator, requires_grad=True) for s in sizes]
    (reason,) = run(forward, *given, train=train).reasons
    assert "not divided by their sum" in reason

"""Near misses: each is almost an attention that the ops compute. Fused or left, but never wrong;
where left, with a reason that names the assumption it breaks.
"""

import pytest
import torch
import torch.nn.functional as F
from fused import Seen, backend, never_wrong, results, run
from spellings import Attention, half, inputs, repeat_kv, rotate_half

import inductor_gqa

pytestmark = pytest.mark.usefixtures("without_dynamo")

NEG = float("-inf")


def tensors(*shapes):
    generator = torch.Generator().manual_seed(11)
    return [torch.randn(s, generator=generator, requires_grad=True) for s in shapes]


def qkv(B=2, H=4, L=11, S=11, D=8):
    return tensors((B, H, L, D), (B, H, S, D), (B, H, S, D))


def square(n=4, D=None):
    """All dims equal, so that sizes tell nothing."""
    D = D or n
    return tensors((n, n, n, D), (n, n, n, D), (n, n, n, D))


NEAR_MISSES = {}


def near(make, left=None):
    """Registers a function of q, k, v. left: a piece of the reason, about the assumption that is
    broken; None: it is no miss, and fused.
    """

    def register(f):
        NEAR_MISSES[f.__name__] = (f, make, left)
        return f

    return register


# The softmax


@near(qkv, left="the softmax runs over dim 2 of 4")
def softmax_over_queries(q, k, v):
    return torch.softmax(q @ k.mT, 2) @ v


@near(qkv, left="the softmax runs over dim 1 of 4")
def softmax_over_heads(q, k, v):
    return torch.softmax(q @ k.mT, 1) @ v


@near(square, left="the softmax runs over dim 0 of 4")
def softmax_over_batch_of_equal_sizes(q, k, v):
    return torch.softmax(q @ k.mT, 0) @ v


@near(qkv, left="the scores are a softmax themselves")
def softmax_twice(q, k, v):
    return torch.softmax(torch.softmax(q @ k.mT, -1), -1) @ v


@near(qkv, left="made of the weights more than once")
def softmax_renormalised(q, k, v):
    p = torch.softmax(q @ k.mT, -1)
    return (p / (p.sum(-1, keepdim=True) + 0.5)) @ v


@near(qkv, left="the weights pass through aten.pow")
def softmax_squared(q, k, v):
    return torch.softmax(q @ k.mT, -1) ** 2 @ v


@near(qkv, left="the weights pass through aten.clamp")
def softmax_clamped(q, k, v):
    return torch.softmax(q @ k.mT, -1).clamp(0.05, 0.5) @ v


@near(qkv, left="the weights are multiplied by 0.9")
def softmax_times_number(q, k, v):
    return (torch.softmax(q @ k.mT, -1) * 0.9) @ v


@near(qkv, left="the weights are multiplied by")
def softmax_times_mask(q, k, v):
    return (torch.softmax(q @ k.mT, -1) * torch.ones(11, 11).tril()) @ v


@near(qkv, left="the weights pass through aten.add")
def softmax_plus_identity(q, k, v):
    return (torch.softmax(q @ k.mT, -1) + torch.eye(11)) @ v


@near(qkv, left="the weights pass through aten.slice")
def softmax_of_part_of_the_keys(q, k, v):
    p = torch.softmax(q @ k.mT, -1)[..., :7]
    return p @ v[:, :, :7]


@near(qkv, left="the weights pass through aten.slice")
def softmax_of_queries_then_some(q, k, v):
    return torch.softmax(q @ k.mT, -1)[:, :, 3:] @ v


@near(qkv, left="the weights pass through prims.rev")
def softmax_flipped(q, k, v):
    return torch.softmax(q @ k.mT, -1).flip(-1) @ v


@near(qkv, left="the weights pass through aten.index")
def softmax_rolled(q, k, v):
    return torch.softmax(q @ k.mT, -1).roll(1, -1) @ v


@near(qkv, left="0 matmuls sum the weights over the keys")
def softmax_transposed(q, k, v):
    return torch.softmax(q @ k.mT, -1).mT @ v


@near(square, left="the values vary by query")
def softmax_transposed_of_equal_sizes(q, k, v):
    return torch.softmax(q @ k.mT, -1).transpose(1, 2) @ v


@near(qkv, left="divided by their sum over dims [2] of 4")
def exponentials_with_another_sum(q, k, v):
    e = torch.exp((s := q @ k.mT) - s.amax(-1, keepdim=True))
    return (e / e.sum(-2, keepdim=True)) @ v


@near(qkv, left="aten.amax.default is subtracted")
def exponentials_with_another_maximum(q, k, v):
    s = q @ k.mT
    e = torch.exp(s - s.amax((-1, -2), keepdim=True))
    return (e / e.sum(-1, keepdim=True)) @ v


@near(qkv, left="aten.amin.default is subtracted")
def exponentials_with_the_minimum(q, k, v):
    s = q @ k.mT
    e = torch.exp(s - s.amin(-1, keepdim=True))
    return (e / e.sum(-1, keepdim=True)) @ v


@near(qkv, left="divided by the result of aten.add")
def exponentials_with_epsilon(q, k, v):
    e = torch.exp((s := q @ k.mT) - s.amax(-1, keepdim=True))
    return (e / (e.sum(-1, keepdim=True) + 1e-1)) @ v


@near(qkv, left="divided by the sum of something else")
def sum_of_other_exponentials(q, k, v):
    s = q @ k.mT
    e = torch.exp(s - s.amax(-1, keepdim=True))
    return (e / torch.exp(s * 0.5 - s.amax(-1, keepdim=True)).sum(-1, keepdim=True)) @ v


# The scores


@near(qkv, left="the scores are returned as well")
def scores_used_elsewhere(q, k, v):
    s = q @ k.mT * 0.3
    return torch.softmax(s, -1) @ v, s.sum()


@near(qkv, left="the scores are returned as well")
def scores_returned(q, k, v):
    s = q @ k.mT * 0.3
    return torch.softmax(s, -1) @ v, s


@near(qkv, left="the log-sum-exp of the scores is returned as well")
def log_sum_exp_returned(q, k, v):
    """As for merging with an attention over other keys."""
    s = q @ k.mT * 0.3
    return torch.softmax(s, -1) @ v, torch.logsumexp(s, -1)


@near(qkv, left="the log-sum-exp of the scores is returned as well")
def output_scaled_by_log_sum_exp(q, k, v):
    """GraniteMoeSWA: a sink that is applied to the output."""
    s = q @ k.mT * 0.3
    return torch.softmax(s, -1) @ v * torch.sigmoid(torch.logsumexp(s, -1) - 0.5)[..., None]


@near(qkv, left="the scores pass through aten.abs")
def scores_absolute(q, k, v):
    return torch.softmax((q @ k.mT).abs(), -1) @ v


@near(qkv, left="the scores pass through aten.clamp")
def scores_clamped(q, k, v):
    return torch.softmax((q @ k.mT).clamp(-2, 2), -1) @ v


@near(qkv, left="the scores pass through aten.pow")
def scores_squared(q, k, v):
    return torch.softmax((q @ k.mT) ** 2, -1) @ v


@near(qkv, left="the scores are multiplied by themselves")
def scores_times_themselves(q, k, v):
    s = q @ k.mT
    return torch.softmax(s * s, -1) @ v


@near(qkv, left="the scores pass through aten.relu")
def scores_under_relu(q, k, v):
    return torch.softmax(torch.relu(q @ k.mT), -1) @ v


@near(qkv, left="the scores are multiplied by a tensor of sizes [11]")
def scores_dropped_out(q, k, v):
    return torch.softmax(q @ k.mT * (torch.arange(11) % 3 > 0), -1) @ v


@near(qkv, left="two matmuls feed the scores")
def scores_of_two_products(q, k, v):
    return torch.softmax(q @ k.mT + v @ k.mT, -1) @ v


@near(qkv, left="two matmuls feed the scores")
def scores_less_a_product(q, k, v):
    return torch.softmax(q @ k.mT - v @ k.mT, -1) @ v


@near(qkv)
def number_less_scores(q, k, v):
    return torch.softmax(1.0 - q @ k.mT, -1) @ v


@near(qkv, left="the scores are what a number is divided by")
def number_over_scores(q, k, v):
    return torch.softmax(1.0 / (q @ k.mT + 100.0), -1) @ v


@near(qkv)
def scores_plus_twice_a_bias(q, k, v):
    return torch.softmax(torch.add(q @ k.mT, torch.ones(11, 11).triu(), alpha=2), -1) @ v


@near(qkv)
def scores_less_a_bias(q, k, v):
    return torch.softmax(q @ k.mT - torch.ones(11, 11).triu(), -1) @ v


@near(qkv, left="a mask inside the softcap")
def scores_masked_inside_the_softcap(q, k, v):
    s = (q @ k.mT).masked_fill(torch.ones(11, 11, dtype=torch.bool).triu(1), -3.0)
    return torch.softmax(torch.tanh(s / 2.0) * 2.0, -1) @ v


@near(qkv, left="shifted inside the softcap")
def scores_shifted_inside_the_softcap(q, k, v):
    return torch.softmax(torch.tanh((q @ k.mT + 1.0) / 2.0) * 2.0, -1) @ v


@near(qkv, left="shifted inside the softcap")
def scores_less_their_maximum_inside_the_softcap(q, k, v):
    s = q @ k.mT
    s = s - s.detach().amax(-1, keepdim=True)
    return torch.softmax(torch.tanh(s / 2.0) * 2.0, -1) @ v


@near(qkv, left="aten.amax.default of the scores is added to them or subtracted")
def scores_less_their_maximum_over_queries(q, k, v):
    s = k @ q.mT
    s = s - s.detach().amax(-1, keepdim=True)
    return torch.softmax(s.mT, -1) @ v


@near(qkv)
def scores_reshaped_before_the_softmax(q, k, v):
    s = (q @ k.mT).reshape(2, 2, 2, 11, 11).transpose(1, 2).reshape(2, 4, 11, 11)
    return torch.softmax(s, -1) @ v


@near(qkv, left="the softmax takes a part of the scores")
def scores_cut_before_the_softmax(q, k, v):
    return torch.softmax((q @ k.mT)[..., :7], -1) @ v[:, :, :7]


@near(qkv, left="the scores pass through aten.constant_pad_nd")
def scores_padded_before_the_softmax(q, k, v):
    return torch.softmax(F.pad(q @ k.mT, (0, 2)), -1) @ F.pad(v, (0, 0, 0, 2))


@near(qkv, left="the scores pass through aten.sum")
def scores_by_broadcast_and_sum(q, k, v):
    return torch.softmax((q[:, :, :, None] * k[:, :, None]).sum(-1), -1) @ v


@near(square)
def product_with_k_as_it_is(q, k, v):
    return torch.softmax(q @ k, -1) @ v


@near(square)
def product_with_k_turned_the_other_way(q, k, v):
    return torch.softmax(q @ k.permute(0, 2, 3, 1), -1) @ v


@near(square)
def product_with_q_turned(q, k, v):
    return torch.softmax(q.mT @ k, -1) @ v


@near(square)
def both_turned(q, k, v):
    return torch.softmax(q.transpose(1, 2) @ k.permute(0, 2, 3, 1), -1) @ v


@near(square)
def values_turned(q, k, v):
    return torch.softmax(q @ k.mT, -1) @ v.mT


@near(square)
def values_of_other_heads(q, k, v):
    return torch.softmax(q @ k.mT, -1) @ v.transpose(0, 1)


@near(lambda: square(8))
def length_and_heads_swapped(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.softmax(q @ k.mT * 0.3, -1) @ v


@near(lambda: square(8))
def batch_and_heads_swapped_in_k(q, k, v):
    return torch.softmax(q @ k.transpose(0, 1).mT * 0.3, -1) @ v


@near(qkv)
def queries_flipped(q, k, v):
    return torch.softmax(q.flip(2) @ k.mT, -1) @ v


@near(qkv)
def keys_flipped_but_not_values(q, k, v):
    return torch.softmax(q @ k.flip(2).mT, -1) @ v


@near(qkv)
def every_other_key(q, k, v):
    return torch.softmax(q @ k[:, :, ::2].mT, -1) @ v[:, :, ::2]


@near(qkv)
def every_other_key_and_the_first_values(q, k, v):
    return torch.softmax(q @ k[:, :, ::2].mT, -1) @ v[:, :, :6]


@near(qkv)
def every_other_lane(q, k, v):
    return torch.softmax(q[..., ::2] @ k[..., ::2].mT, -1) @ v


@near(qkv)
def different_lanes_of_q_and_k(q, k, v):
    return torch.softmax(q[..., :4] @ k[..., 4:].mT, -1) @ v


@near(qkv)
def lanes_reversed_in_k(q, k, v):
    return torch.softmax(q @ k.flip(-1).mT, -1) @ v


@near(qkv)
def head_two_for_all_keys(q, k, v):
    return torch.softmax(q @ k[:, 2:3].expand(2, 4, 11, 8).mT, -1) @ v


@near(qkv)
def negative_index_of_heads(q, k, v):
    return torch.softmax(q @ k[:, -2:].repeat_interleave(2, 1).mT, -1) @ v


@near(qkv)
def strided_heads(q, k, v):
    return torch.softmax(q @ k[:, ::2].repeat_interleave(2, 1).mT, -1) @ v[
        :, 1::2
    ].repeat_interleave(2, 1)


@near(qkv)
def tiled_keys_and_grouped_values(q, k, v):
    return torch.softmax(q @ k[:, :2].repeat(1, 2, 1, 1).mT, -1) @ repeat_kv(v[:, :2], 2)


@near(qkv)
def group_order_inside_out(q, k, v):
    k = k[:, :2, None].expand(2, 2, 2, 11, 8).transpose(1, 2).reshape(2, 4, 11, 8)
    return torch.softmax(q @ k.mT, -1) @ repeat_kv(v[:, :2], 2)


@near(qkv)
def gathered_heads(q, k, v):
    order = torch.tensor([0, 3, 1, 2])
    return torch.softmax(q @ k[:, order].mT, -1) @ v


@near(qkv)
def keys_masked_by_multiplication(q, k, v):
    return torch.softmax(q @ (k * (torch.arange(11) % 2)[:, None]).mT, -1) @ v


# Masks that look causal


def causal(condition):
    i, j = torch.arange(11)[:, None], torch.arange(11)[None]
    return condition(i, j)


@near(qkv)
def causal_shifted_by_one(q, k, v):
    return torch.softmax((q @ k.mT).masked_fill(causal(lambda i, j: j > i + 1), NEG), -1) @ v


@near(qkv)
def causal_without_the_diagonal(q, k, v):
    return torch.softmax((q @ k.mT).masked_fill(causal(lambda i, j: j >= i), -1e30), -1) @ v


@near(qkv)
def causal_of_twice_the_query(q, k, v):
    return torch.softmax((q @ k.mT).masked_fill(causal(lambda i, j: j > 2 * i), NEG), -1) @ v


@near(qkv)
def causal_of_the_sum(q, k, v):
    return torch.softmax((q @ k.mT).masked_fill(causal(lambda i, j: i + j > 10), NEG), -1) @ v


@near(qkv)
def causal_modulo(q, k, v):
    return torch.softmax((q @ k.mT).masked_fill(causal(lambda i, j: j % 7 > i % 5), -1e30), -1) @ v


@near(qkv)
def causal_or_even(q, k, v):
    hidden = causal(lambda i, j: (j > i) & (j % 2 == 1))
    return torch.softmax((q @ k.mT).masked_fill(hidden, NEG), -1) @ v


@near(qkv)
def causal_xor(q, k, v):
    hidden = causal(lambda i, j: (j > i) ^ (j == 2))
    return torch.softmax((q @ k.mT).masked_fill(hidden, -1e30), -1) @ v


@near(qkv)
def causal_in_uint8(q, k, v):
    i = torch.arange(11, dtype=torch.uint8)
    return torch.softmax((q @ k.mT).masked_fill(i[:, None] - i[None] > 3, NEG), -1) @ v


@near(qkv)
def causal_in_a_narrow_integer_that_wraps(q, k, v):
    i = (torch.arange(11) * 50).to(torch.int8)
    return torch.softmax((q @ k.mT).masked_fill(i[None] > i[:, None], -1e30), -1) @ v


@near(qkv)
def causal_by_the_data(q, k, v):
    hidden = v[..., 0].detach()[:, :, None] > q[..., 0].detach()[..., None]
    return torch.softmax((q @ k.mT).masked_fill(hidden, -1e30), -1) @ v


@near(qkv)
def causal_by_sorted_data(q, k, v):
    rank = q.detach()[0, 0, :, 0].argsort()
    return torch.softmax((q @ k.mT).masked_fill(rank[None] > rank[:, None], -1e30), -1) @ v


@near(qkv)
def causal_by_cumulative_sum(q, k, v):
    i = torch.ones(11, dtype=torch.long).cumsum(0)
    return torch.softmax((q @ k.mT).masked_fill(i[None] > i[:, None], NEG), -1) @ v


@near(qkv)
def causal_constant_that_merely_looks_right(q, k, v):
    m = torch.full((11, 11), -0.5).triu(1)
    return torch.softmax(q @ k.mT + m, -1) @ v


@near(qkv)
def causal_of_a_part(q, k, v):
    hidden = torch.zeros(11, 11, dtype=torch.bool)
    hidden[:7, :7] = torch.ones(7, 7, dtype=torch.bool).triu(1)
    return torch.softmax((q @ k.mT).masked_fill(hidden, NEG), -1) @ v


@near(qkv, left="masks with different values [-inf, 0.5]")
def causal_with_another_fill_on_the_diagonal(q, k, v):
    s = (q @ k.mT).masked_fill(causal(lambda i, j: j > i), NEG)
    return torch.softmax(s.masked_fill(causal(lambda i, j: j == i), 0.5), -1) @ v


@near(qkv)
def filled_with_positive_infinity_nowhere(q, k, v):
    return (
        torch.softmax((q @ k.mT).masked_fill(causal(lambda i, j: j > i + 20), float("inf")), -1) @ v
    )


@near(qkv)
def mask_kept_the_other_way(q, k, v):
    return torch.softmax(torch.where(causal(lambda i, j: j > i), q @ k.mT, -1e30), -1) @ v


@near(qkv, left="the scores are chosen from two tensors")
def mask_by_where_of_two_products(q, k, v):
    return torch.softmax(torch.where(causal(lambda i, j: j > i), q @ k.mT, q @ v.mT), -1) @ v


@near(lambda: qkv(B=11, H=11, L=11, S=11))
def mask_over_the_batch(q, k, v):
    hidden = causal(lambda i, j: j > i)[:, :, None, None]
    return torch.softmax((q @ k.mT).masked_fill(hidden, -1e30), -1) @ v


@near(lambda: qkv(B=2, H=11, L=11, S=11))
def mask_over_the_heads_and_keys(q, k, v):
    hidden = causal(lambda i, j: j > i)[:, None, :]
    return torch.softmax((q @ k.mT).masked_fill(hidden, -1e30), -1) @ v


# Values


@near(qkv, left="2 matmuls sum the weights over the keys")
def values_multiplied_twice(q, k, v):
    p = torch.softmax(q @ k.mT, -1)
    return p @ (p @ v)


@near(qkv, left="the weights pass through aten.add")
def weights_of_two_softmaxes(q, k, v):
    p = torch.softmax(q @ k.mT, -1)
    r = torch.softmax(k @ q.mT, -1)
    return (p + r) @ v


@near(qkv, left="the weights pass through aten.sub")
def difference_of_two_attentions(q, k, v):
    a = torch.softmax(q[..., :4] @ k[..., :4].mT, -1)
    b = torch.softmax(q[..., 4:] @ k[..., 4:].mT, -1)
    return (a - 0.4 * b) @ v


@near(qkv, left="something is added to the product of weights and values")
def values_plus_product(q, k, v):
    return torch.baddbmm(
        v.flatten(0, 1), torch.softmax(q @ k.mT, -1).flatten(0, 1), v.flatten(0, 1)
    )


@near(qkv, left="0 matmuls sum the weights over the keys")
def weights_from_the_right(q, k, v):
    return v.mT @ torch.softmax(q @ k.mT, -1)


@near(qkv)
def weights_from_the_right_and_transposed(q, k, v):
    return v.mT @ torch.softmax(q @ k.mT, -1).mT


@near(qkv)
def weights_times_queries(q, k, v):
    return torch.softmax(q @ k.mT, -1) @ q


@near(qkv, left="the weights pass through aten.index")
def weights_indexed(q, k, v):
    return torch.softmax(q @ k.mT, -1)[:, [0, 2, 1, 3]] @ v


# Rotations


def cos_sin(L=11, D=8, seed=5):
    """Tables whose columns all differ, exact in every dtype."""
    places = torch.arange(L * D).view(L, D)
    return ((places * 7 + seed) % 13 - 6) / 8, ((places * 5 + seed) % 11 - 5) / 8


@near(qkv)
def keys_rotated_by_other_tables(q, k, v):
    q, k = half(q, *cos_sin()), half(k, *cos_sin(seed=6))
    return torch.softmax(q @ k.mT, -1) @ v


@near(qkv)
def keys_rotated_the_other_way(q, k, v):
    cos, sin = cos_sin()
    return torch.softmax(half(q, cos, sin) @ half(k, cos, -sin).mT, -1) @ v


@near(qkv)
def sine_and_cosine_swapped_in_k(q, k, v):
    cos, sin = cos_sin()
    return torch.softmax(half(q, cos, sin) @ half(k, sin, cos).mT, -1) @ v


@near(qkv)
def sine_of_the_other_half(q, k, v):
    cos, sin = cos_sin()
    other = torch.cat((sin[:, 4:], sin[:, :4]), -1)
    return torch.softmax(half(q, cos, other) @ half(k, cos, sin).mT, -1) @ v


@near(qkv)
def sine_multiplied_before_the_turn(q, k, v):
    cos, sin = cos_sin()
    q = q * cos + rotate_half(q * sin)
    return torch.softmax(q @ half(k, cos, sin).mT, -1) @ v


@near(qkv)
def turn_with_the_sign_on_the_other_half(q, k, v):
    cos, sin = cos_sin()
    q = q * cos + torch.cat((q[..., 4:], -q[..., :4]), -1) * sin
    return torch.softmax(q @ half(k, cos, sin).mT, -1) @ v


@near(qkv)
def rows_of_the_table_shifted_in_k(q, k, v):
    cos, sin = cos_sin(13)
    q, k = half(q, cos[:11], sin[:11]), half(k, cos[2:], sin[2:])
    return torch.softmax(q @ k.mT, -1) @ v


@near(qkv)
def rows_of_the_table_reversed(q, k, v):
    cos, sin = cos_sin()
    q, k = half(q, cos, sin), half(k, cos.flip(0), sin.flip(0))
    return torch.softmax(q @ k.mT, -1) @ v


@near(lambda: qkv(H=11, L=11, S=11))
def table_over_the_heads(q, k, v):
    cos, sin = (t[:, None] for t in cos_sin())
    return torch.softmax(half(q, cos, sin) @ half(k, cos, sin).mT, -1) @ v


@near(lambda: qkv(B=11))
def table_over_the_batch(q, k, v):
    cos, sin = (t[:, None, None] for t in cos_sin())
    return torch.softmax(half(q, cos, sin) @ half(k, cos, sin).mT, -1) @ v


@near(qkv)
def values_rotated_too(q, k, v):
    cos, sin = cos_sin()
    return torch.softmax(half(q, cos, sin) @ half(k, cos, sin).mT, -1) @ half(v, cos, sin)


@near(qkv)
def rotated_values_are_the_keys(q, k, v):
    cos, sin = cos_sin()
    k = half(k, cos, sin)
    return torch.softmax(half(q, cos, sin) @ k.mT, -1) @ k


@near(lambda: qkv(B=1, H=1))
def one_head_whose_data_could_be_the_table(q, k, v):
    cos, sin = cos_sin()
    return torch.softmax(half(q, cos, sin) @ half(k, cos, sin).mT, -1) @ v


@near(lambda: qkv(B=1, H=1))
def one_head_rotated_by_itself(q, k, v):
    return torch.softmax(half(q, v[0, 0], k[0, 0]) @ half(k, v[0, 0], q[0, 0]).mT, -1) @ v


@near(qkv)
def table_made_of_the_keys(q, k, v):
    cos, sin = k[:, :1].cos(), k[:, :1].sin()
    return torch.softmax(half(q, cos, sin) @ half(k, cos, sin).mT, -1) @ v


def test_there_are_enough_near_misses():
    assert len(NEAR_MISSES) >= 100
    assert sum(left is not None for _, _, left in NEAR_MISSES.values()) >= 40


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_miss_is_never_wrong(name, train):
    f, make, left = NEAR_MISSES[name]
    never_wrong(f, *make(), train=train, left=left)


def test_a_left_site_keeps_the_stock_graph():
    f, make, _ = NEAR_MISSES["scores_absolute"]
    with_pass = run(f, *make(), dynamo=True)
    torch._dynamo.reset()
    assert not inductor_gqa.is_enabled()
    stock, tensors_ = Seen(), make()
    with backend(stock) as chosen:
        results(torch.compile(f, backend=chosen), f, tensors_, train=True)
    assert with_pass.text() == stock.text()


def test_only_the_attention_is_reported_beside_other_softmaxes():
    class Routed(Attention):
        def forward(self, x):
            gate = torch.softmax(x[..., :4], -1)
            return super().forward(x) * gate.sum(-1, keepdim=True), gate

    seen = run(Routed(), *inputs())
    assert len(seen.sites) == 1
    assert seen.fused == 1


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("where", ["q", "k", "v", "scores", "weights", "out"])
def test_a_rounding_that_the_model_asks_for_is_kept(where, dtype, train):
    """Casts there and back were read as if they did nothing."""

    def rounded(name, x):
        return x.to(dtype).float() if name == where else x

    def forward(q, k, v):
        s = rounded("scores", rounded("q", q) @ rounded("k", k).mT * 0.4)
        return rounded("out", rounded("weights", torch.softmax(s, -1)) @ rounded("v", v))

    q, k, v = (torch.randn(2, 4, 11, 8, requires_grad=train) for _ in range(3))
    eager = forward(q, k, v)
    torch._dynamo.reset()
    with inductor_gqa.enabled(always=True), backend(Seen()) as compiler:
        ours = torch.compile(forward, backend=compiler)(q, k, v)
    assert (ours - eager).abs().max() <= 1e-5 * eager.abs().max() + torch.finfo(dtype).eps * (
        where == "out"
    )


def test_outputs_keep_the_order_of_dims_in_memory():
    def forward(q, k, v):
        return torch.softmax(q @ k.mT * 0.4, -1) @ v

    q, k, v = (torch.randn(2, 4, 11, 8) for _ in range(3))
    torch._dynamo.reset()
    with inductor_gqa.enabled(always=True), backend(Seen()) as compiler:
        ours = torch.compile(forward, backend=compiler)(q, k, v)
    assert ours.stride() == forward(q, k, v).stride()
    assert torch.allclose(ours, forward(q, k, v), atol=1e-6)

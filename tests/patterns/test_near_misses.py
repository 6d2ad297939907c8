"""Almost the rotations, groups and tensors of an attention: tables of other positions, lanes of
other pairs, groups of the wrong order or size, tensors changed in place or needed elsewhere.
"""

import pytest
import torch
from fused import never_wrong
from near_misses import L, NearMisses, attended, grouped, tables
from spellings import Attention, angles, half, inputs, repeat_kv, rotate_half

pytestmark = pytest.mark.usefixtures("without_dynamo")

near = NearMisses()


# Rotations


@near()
def no_sign_in_either_half(q, k, v):
    cos, sin = tables()
    turn = lambda x: x * cos + torch.cat((x[..., 4:], x[..., :4]), -1) * sin  # noqa: E731
    return attended(turn(q), turn(k), v)


@near()
def sign_on_both_halves(q, k, v):
    cos, sin = tables()
    turn = lambda x: x * cos + torch.cat((-x[..., 4:], -x[..., :4]), -1) * sin  # noqa: E731
    return attended(turn(q), turn(k), v)


@near(left=None)
def sine_of_later_positions(q, k, v):
    cos, sin = tables()[0], tables(first=1)[1]
    return attended(half(q, cos, sin), half(k, cos, sin), v)


@near(left=None)
def cosines_of_q_and_sines_of_k_exchanged(q, k, v):
    (cos_q, sin_q), (cos_k, sin_k) = tables(), tables(first=5)
    return attended(half(q, cos_q, sin_k), half(k, cos_k, sin_q), v)


@near()
def rows_of_the_table_rolled_in_k(q, k, v):
    cos, sin = tables()
    return attended(half(q, cos, sin), half(k, cos.roll(1, 0), sin.roll(1, 0)), v)


@near()
def columns_of_the_table_rolled_in_k(q, k, v):
    cos, sin = tables()
    return attended(half(q, cos, sin), half(k, cos.roll(1, 1), sin.roll(1, 1)), v)


@near()
def angles_doubled_in_the_sine(q, k, v):
    at = angles(L, 8)
    turn = lambda x: half(x, at.cos(), (2 * at).sin())  # noqa: E731
    return attended(turn(q), turn(k), v)


@near()
def tables_of_the_other_batch_entry_in_k(q, k, v):
    cos, sin = (torch.stack(t)[:, None] for t in zip(tables(), tables(first=9), strict=True))
    return attended(half(q, cos, sin), half(k, cos.flip(0), sin.flip(0)), v)


@near()
def lanes_a_quarter_apart(q, k, v):
    cos, sin = tables()
    turned = lambda x: x * cos + torch.roll(rotate_half(x), 2, -1) * sin  # noqa: E731
    return attended(turned(q), turned(k), v)


@near()
def lanes_that_pass_are_doubled(q, k, v):
    cos, sin = (t[:, :4] for t in tables())
    part = lambda x: torch.cat((half(x[..., :4], cos, sin), x[..., 4:] * 2), -1)  # noqa: E731
    return attended(part(q), part(k), v)


@near()
def lanes_that_pass_are_zero(q, k, v):
    cos, sin = (t[:, :4] for t in tables())
    zero = torch.zeros_like(q[..., 4:])
    part = lambda x: torch.cat((half(x[..., :4], cos, sin), zero), -1)  # noqa: E731
    return attended(part(q), part(k), v)


@near()
def lanes_that_turn_are_taken_twice(q, k, v):
    cos, sin = (t[:, :4] for t in tables())
    part = lambda x: torch.cat((half(x[..., :4], cos, sin), x[..., 2:6]), -1)  # noqa: E731
    return attended(part(q), part(k), v)


@near()
def rest_first_in_k_only(q, k, v):
    cos, sin = (t[:, :4] for t in tables())
    q = torch.cat((half(q[..., :4], cos, sin), q[..., 4:]), -1)
    k = torch.cat((k[..., 4:], half(k[..., :4], cos, sin)), -1)
    return attended(q, k, v)


@near()
def neighbours_in_q_and_halves_in_k(q, k, v):
    cos, sin = tables()
    q = q * cos + torch.stack((-q[..., 1::2], q[..., ::2]), -1).flatten(-2) * sin
    return attended(q, half(k, cos, sin), v)


@near(left=None)
def q_turned_by_the_halves_of_k(q, k, v):
    cos, sin = tables()
    return attended(q * cos + rotate_half(k) * sin, half(k, cos, sin), v)


@near()
def turned_back_after_it_turned(q, k, v):
    cos, sin = tables()
    return attended(half(half(q, cos, sin), cos, -sin), half(k, cos, sin), v)


@near(train=False)
def table_changed_in_place_between_q_and_k(q, k, v):
    cos, sin = (t.clone() for t in tables())
    q = half(q, cos, sin)
    sin.mul_(-1)
    return attended(q, half(k, cos, sin), v)


@near()
def table_that_differs_by_head_of_the_group(q, k, v):
    cos, sin = (torch.stack(t)[:, None] for t in zip(tables(), tables(first=9), strict=True))
    q = half(q.unflatten(1, (2, 2)), cos, sin).flatten(1, 2)
    return attended(q, half(k, cos[0], sin[0]), v)


@near()
def only_the_first_queries_turn(q, k, v):
    cos, sin = tables()
    q = torch.cat((half(q, cos, sin)[:, :, :6], q[:, :, 6:]), 2)
    return attended(q, half(k, cos, sin), v)


@near()
def one_head_does_not_turn(q, k, v):
    cos, sin = tables()
    k = torch.cat((half(k[:, :3], cos, sin), k[:, 3:]), 1)
    return attended(half(q, cos, sin), k, v)


# Groups


@near(grouped, left=None)
def keys_tiled_and_values_grouped(q, k, v):
    return attended(q, k.repeat(1, 2, 1, 1), v.repeat_interleave(2, 1))


@near(grouped)
def heads_repeated_too_often_and_cut(q, k, v):
    return attended(q, k.repeat_interleave(4, 1)[:, :4], v.repeat_interleave(4, 1)[:, 2:6])


@near(grouped)
def heads_repeated_unequally(q, k, v):
    more = lambda x: torch.cat((x[:, :1], x[:, :1], x[:, :1], x[:, 1:]), 1)  # noqa: E731
    return attended(q, more(k), more(v))


@near(grouped)
def heads_repeated_over_the_keys(q, k, v):
    v = v.repeat_interleave(2, 2)[:, :, :L]
    return attended(q, repeat_kv(k, 2), repeat_kv(v, 2))


@near()
def keys_averaged_over_the_group(q, k, v):
    mean = lambda x: x.unflatten(1, (2, 2)).mean(2)  # noqa: E731
    return attended(q, repeat_kv(mean(k), 2), repeat_kv(mean(v), 2))


@near(grouped)
def values_of_the_group_scaled_apart(q, k, v):
    return attended(q, repeat_kv(k, 2), repeat_kv(v, 2) * torch.arange(1.0, 5.0)[:, None, None])


@near(grouped, left=None)
def group_reversed_in_the_values(q, k, v):
    return attended(q, repeat_kv(k, 2), repeat_kv(v.flip(1), 2))


@near(grouped)
def batch_rolled_in_the_values(q, k, v):
    return attended(q, repeat_kv(k, 2), repeat_kv(v.roll(1, 0), 2))


@near(left=None)
def keys_rolled_and_values_not(q, k, v):
    return attended(q, k.roll(1, 2), v)


# Changed in place


@near()
def values_changed_before_their_use(q, k, v):
    v = v.clone()
    p = torch.softmax(q @ k.mT, -1)
    v.mul_(0.5)
    return p @ v


@near()
def values_and_keys_of_one_memory(q, k, v):
    both = torch.cat((k, v), -1)
    k, v = both[..., :8], both[..., 8:]
    p = torch.softmax(q @ k.mT, -1)
    both = both.clone()
    both[..., 8:].add_(1.0)
    return p @ both[..., 8:] + (p @ v).detach()


@near(train=False)
def keys_overwritten_between_scores_and_values(q, k, v):
    k = k.clone()
    p = torch.softmax(q @ k.mT, -1)
    k.copy_(v)
    return p @ k


@near()
def a_query_overwritten(q, k, v):
    q = q.clone()
    q[:, :, 4] = k[:, :, 5]
    return attended(q, k, v)


@near()
def rotated_in_place_in_part(q, k, v):
    cos, sin = (t[:, :4] for t in tables())
    q, k = q.clone(), k.clone()
    for x in (q, k):
        x[..., :4] = half(x[..., :4].clone(), cos, sin)
    return attended(q, k, v)


@near()
def rotated_half_by_half_in_place(q, k, v):
    """The second half turns by the first half that has turned already."""
    cos, sin = (t[:, :4] for t in tables())
    q = q.clone()
    q[..., :4] = q[..., :4] * cos - q[..., 4:] * sin
    q[..., 4:] = q[..., 4:] * cos + q[..., :4] * sin
    return attended(q, k, v)


# Used elsewhere


@near()
def turned_query_is_returned(q, k, v):
    cos, sin = tables()
    q = half(q, cos, sin)
    return attended(q, half(k, cos, sin), v), q


@near()
def a_part_of_the_rotation_is_returned(q, k, v):
    cos, sin = tables()
    part = rotate_half(q) * sin
    return attended(q * cos + part, half(k, cos, sin), v), part


@near()
def repeated_keys_are_values_too(q, k, v):
    k = k * 1.0
    return attended(q, k, k)


@near()
def output_feeds_its_own_values(q, k, v):
    out = attended(q, k, v)
    return attended(q, k, out), out


@near()
def queries_are_the_output_of_another(q, k, v):
    return attended(attended(q, k, v), k, v)


@near.each()
def test_near_miss_is_never_wrong(name, train):
    near.check(name, train)


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
def test_a_query_that_another_layer_reads_is_right(train):
    """The projection of q is the next layer's input too."""

    class Reused(Attention):
        def forward(self, x):
            q = x @ self.wq.t()
            return super().forward(x) + super().forward(x + q[..., : x.shape[-1]])

    never_wrong(Reused(), *inputs(), train=train)


def test_there_are_enough():
    assert len(near.known) >= 40

"""Kinds of bugs that users of other fused attentions have reported, each as a claim about ours; the
link is the report."""

import pytest
import torch
import torch._functorch.config as functorch_config
import torch.nn.functional as F
from fused import BACKWARD, FORWARD, Seen, backend, fuses, results, run
from spellings import Attention, inputs

import inductor_gqa
from inductor_gqa import ops


def causal(module, s):
    i = torch.arange(s.shape[-2], device=s.device)
    return s.masked_fill(i[None, :] > i[:, None], float("-inf"))


def forward_graph(seen):
    (graph,) = [
        g
        for g in seen.graphs
        if not any("tangents" in n.name for n in g.graph.nodes if n.op == "placeholder")
    ]
    return graph


def saved(seen):
    """Shapes of what the forward graph hands over, results and saved tensors."""
    (output,) = forward_graph(seen).graph.find_nodes(op="output")
    values = [n.meta["val"] for n in output.all_input_nodes]
    return [tuple(v.shape) for v in values if isinstance(v, torch.Tensor)]


def test_no_tensor_of_scores_is_saved():
    """https://github.com/pytorch/pytorch/issues/72450"""
    seen = fuses(Attention(mask=causal), *inputs(L=13))
    assert not [shape for shape in saved(seen) if shape[-2:] == (13, 13)]


def test_keys_and_values_are_saved_once_for_their_group():
    """https://github.com/huggingface/transformers/pull/36218: a reshape after expand copies."""
    seen = fuses(Attention(H=8, K=2, D=16, mask=causal), *inputs(L=13))
    wide = 2 * 13 * 8 * 16  # q and the output have as many elements as repeated keys would have
    sizes = [torch.Size(shape).numel() for shape in saved(seen)]
    assert sizes.count(wide) <= 3  # the result, and q and the output for the backward
    assert not seen.with_dims(2, 2, 4, 13, 13)


def test_no_buffer_of_zeros_is_saved():
    """https://github.com/pytorch/pytorch/issues/134468"""
    seen = fuses(Attention(mask=causal), *inputs())
    (output,) = forward_graph(seen).graph.find_nodes(op="output")
    made = {str(n.target) for n in output.all_input_nodes}
    assert not {name for name in made if "full" in name or "zeros" in name or "empty" in name}


def test_a_broadcast_mask_stays_broadcast():
    """https://github.com/tdrussell/diffusion-pipe/pull/546: a padded bias became dense."""

    def bias(module, s, table):
        return s + table

    seen = fuses(Attention(mask=bias), *inputs(L=11), None, torch.randn(1, 1, 11, 11), train=False)
    assert seen.argument("bias").meta["val"].numel() == 11 * 11


def plain_arguments():
    """What the op takes behind q, k and v."""
    given = dict.fromkeys(ops.NAMES) | {"scale": 0.3, "softcap": 0.0, "fill_adds": False}
    given |= {"rope_start": 0, "rope_interleaved": False, "keep_scale": 1.0, "precision": "ieee"}
    return [given[name] for name in ops.NAMES[3:]]


@pytest.mark.parametrize(
    "order", [(0, 1, 2, 3, 4), (0, 2, 3, 1, 4), (3, 2, 1, 0, 4), (0, 1, 4, 2, 3)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_op_promises_the_strides_that_it_returns(order, dtype):
    """https://github.com/pytorch/pytorch/issues/137979,
    https://github.com/NVIDIA/cuEquivariance/issues/223"""
    back = [order.index(d) for d in range(5)]
    shape = (2, 11, 2, 2, 8)
    q = torch.randn([shape[d] for d in order]).permute(back).to(dtype)
    k = torch.randn(2, 2, 8, 11).permute(0, 3, 1, 2).to(dtype)
    v = torch.randn(11, 2, 2, 24)[..., ::3].transpose(0, 1).to(dtype)
    args = [q, k, v, *plain_arguments()]
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(ops.attention, args, test_utils=tests)
    torch.library.opcheck(ops.attention_weights, [*args, torch.float32], test_utils=tests)
    out, lse = ops.attention(*args)
    more = [torch.randn_like(out), out, lse, True, True, True]
    torch.library.opcheck(ops.attention_backward, [*more, *args], test_utils=tests)


def test_no_keys_have_empty_gradients_and_q_has_zeros():
    q, k, v = torch.randn(2, 3, 2, 2, 8), torch.randn(2, 0, 2, 8), torch.randn(2, 0, 2, 8)
    out, lse = ops.attention(q, k, v, *plain_arguments())
    more = [torch.randn_like(out), out, lse, True, True, True]
    dq, dk, dv = ops.attention_backward(*more, q, k, v, *plain_arguments())
    assert torch.equal(dq, torch.zeros_like(q))
    assert (dk.shape, dv.shape) == (k.shape, v.shape)


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
def test_dropout_of_nothing_fuses(train):
    """https://github.com/pytorch/pytorch/pull/108141"""
    module = Attention(softmax=lambda s: F.dropout(torch.softmax(s, -1), 0.0, training=True))
    fuses(module, *inputs(), train=train)
    module = Attention(softmax=lambda s: F.dropout(torch.softmax(s, -1), 0.3, training=False))
    fuses(module, *inputs(), train=train)


def test_a_cache_that_is_written_beside_the_attention():
    """https://github.com/pytorch/pytorch/issues/149879: a write between reading and use."""
    cache = torch.zeros(2, 4, 32, 8)

    def step(q, k, at):
        cache.index_copy_(2, at, k)
        seen = torch.softmax(q @ cache[:, :, :16].mT * 0.3, -1) @ cache[:, :, :16]
        cache.mul_(2.0)
        return seen, cache.sum()

    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 5, 8)
    at = torch.arange(3, 8)
    outs = []
    for compiles in (False, True):
        cache.zero_()
        graphs = Seen()
        with inductor_gqa.enabled(always=True), backend(graphs) as chosen, torch.no_grad():
            made = torch.compile(step, backend=chosen)(q, k, at) if compiles else step(q, k, at)
        outs.append((*made, cache.clone()))
    for ours, eager in zip(*outs[::-1], strict=True):
        torch.testing.assert_close(ours, eager)
    assert graphs.fused == graphs.count(FORWARD) == 1


def test_two_runs_are_bitwise_equal():
    """https://github.com/pytorch/pytorch/issues/186572"""
    module, args = Attention(mask=causal), inputs()
    with inductor_gqa.enabled(always=True), backend(Seen()) as chosen:
        compiled = torch.compile(module, backend=chosen)
        first, second = (results(compiled, module, args, True) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.skipif(
    not hasattr(functorch_config, "enable_complex_wrapper"), reason="torch has no complex wrapper"
)
@pytest.mark.parametrize("wrapper", [False, True])
def test_complex_rotation_with_and_without_the_wrapper(wrapper):
    """https://github.com/pytorch/pytorch/issues/194061"""

    def turned(x, cos, sin):
        h = x.shape[-1] // 2
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], h, 2))
        return torch.view_as_real(pairs * torch.complex(cos[:, :h], sin[:, :h])).flatten(-2)

    with functorch_config.patch(enable_complex_wrapper=wrapper):
        seen = run(Attention(rotation=turned), *inputs(grad=False), train=False)
    assert all(site.fused or site.reason for site in seen.sites)


def test_another_table_object_compiles_nothing():
    """https://github.com/huggingface/diffusers/pull/10959"""

    def block(x, cos, sin):
        from spellings import half

        q = half(x, cos, sin)
        return torch.softmax(q @ q.mT * 0.3, -1) @ x

    more = [(torch.randn(1, 2, 11, 8), torch.randn(11, 8), torch.randn(11, 8)) for _ in range(3)]
    fuses(block, *more[0], train=False, more=more[1:])


def test_table_that_grows_with_the_length():
    """https://github.com/huggingface/transformers/pull/48960: frequencies that depend on it."""

    def tables(module, x, length):
        base = 10.0 * (1.0 + length / 8)
        inverse = base ** (-torch.arange(0, 8, 2) / 8).to(x.dtype)
        angle = torch.outer(torch.arange(length).to(x.dtype), inverse)
        angle = torch.cat((angle, angle), -1)
        return angle.cos(), angle.sin()

    seen = fuses(Attention(tables=tables, mask=causal), *inputs(), train=False)
    assert seen.argument("cos_q") is not None


def test_the_graph_is_sound_after_the_pass():
    """https://github.com/pytorch/pytorch/issues/148751: order broken by a replacement."""
    seen = fuses(Attention(mask=causal), *inputs())
    for graph in seen.graphs:
        graph.graph.lint()
    assert seen.count(FORWARD, BACKWARD) == 2


@torch.library.custom_op("inductor_gqa_tests::turn_in_place", mutates_args=("x",))
def turn_in_place(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    x.copy_(x * cos + torch.cat((-x[..., 4:], x[..., :4]), -1) * sin)


def test_a_custom_op_that_rotates_in_place_stays_before_the_attention():
    """https://github.com/vllm-project/vllm/issues/14703,
    https://github.com/pytorch/pytorch/issues/137229: auto-functionalized ops hid what came next."""

    def attend(q, k, v, cos, sin):
        q, k = q * 1.5, k + 0.5
        turn_in_place(q, cos, sin)
        turn_in_place(k, cos, sin)
        return torch.softmax(causal(None, q @ k.mT * 0.3), -1) @ v

    tensors = [torch.randn(2, 3, 11, 8) for _ in range(3)]
    seen = fuses(attend, *tensors, torch.randn(11, 8), torch.randn(11, 8), train=False)
    assert seen.argument("cos_q") is None
    assert seen.argument("band_hi") == 0

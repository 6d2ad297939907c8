"""Outer products in the angles of a fused site become pointwise products: which, and with what
numbers. On a CPU, Inductor itself decomposes such matmuls before the pass runs, so that graphs are
traced here without that decomposition."""

import pytest
import torch
from fused import WITH_WEIGHTS, run
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.pattern_matcher import stable_topological_sort
from torch.fx.experimental.proxy_tensor import make_fx

from inductor_gqa import angles, ops

B, L, D = 2, 5, 8


def attention(cos, sin, q):
    rest = dict.fromkeys(ops.NAMES[3:])
    rest |= {"cos_q": cos, "sin_q": sin, "cos_k": cos, "sin_k": sin, "scale": 1.0, "softcap": 0.0}
    rest |= {"fill_adds": False, "rope_start": 0, "rope_interleaved": False, "keep_scale": 1.0}
    rest |= {"precision": "ieee"}
    k = q.select(3, 0)
    return ops.attention(q, k, k, *rest.values())[0]


def trace(program, *given):
    table = {
        op: how for op, how in select_decomp_table().items() if op not in angles.OUTER_PRODUCTS
    }
    return make_fx(program, decomposition_table=table, tracing_mode="fake")(*given)


def traced(make_angles, *inputs):
    """The graph of an attention with tables made so, before and after, its inputs."""

    def program(q, *inputs):
        angle = make_angles(*inputs)
        emb = torch.cat((angle, angle), -1)
        return attention(emb.cos() * 1.5, emb.sin(), q)

    given = (torch.randn(B, L, 1, 2, D), *inputs)
    return trace(program, *given), given


def positions():
    return torch.arange(L)[None].expand(B, -1), 0.3 ** torch.arange(D // 2)


def batched(ids, freq):
    expanded = freq[None, :, None].float().expand(B, -1, 1)
    return (expanded @ ids[:, None, :].float()).transpose(1, 2)


def two_dims(ids, freq):
    return (ids[0][:, None].float() @ freq[None]).expand(B, L, D // 2)


def from_the_right(ids, freq):
    return torch.bmm(ids[:, :, None].float(), freq[None, None].expand(B, 1, -1))


@pytest.mark.parametrize("spelling", [batched, two_dims, from_the_right])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_outer_product_becomes_a_product(spelling, dtype):
    graph, given = traced(lambda ids, freq: spelling(ids, freq).to(dtype), *positions())
    matmuls = [n for n in graph.graph.nodes if n.target in angles.OUTER_PRODUCTS]
    expected = graph(*given)
    assert (len(matmuls), angles.write_products(graph.graph)) == (1, 1)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    assert not [n for n in graph.graph.nodes if n.target in angles.OUTER_PRODUCTS]
    torch.testing.assert_close(graph(*given), expected, rtol=0, atol=0)


@pytest.mark.parametrize("spelling", [batched, two_dims, from_the_right])
def test_the_layout_in_memory_stays(spelling):
    graph, _ = traced(spelling, *positions())
    (matmul,) = [n for n in graph.graph.nodes if n.target in angles.OUTER_PRODUCTS]
    users, strides = list(matmul.users), matmul.meta["val"].stride()
    angles.write_products(graph.graph)
    for user in users:
        (made,) = user.all_input_nodes
        assert made.meta["val"].stride() == strides


def test_a_sum_of_more_terms_stays():
    ids, freq = positions()
    two = torch.stack((freq, freq))  # [2, D/2]
    graph, _ = traced(
        lambda ids, two: torch.stack((ids, ids), -1).float() @ two.expand(B, -1, -1), ids, two
    )
    assert angles.write_products(graph.graph) == 0


def test_what_is_no_table_stays():
    def program(q, x):
        table = x.expand(B, L, D)
        return attention(table, table, q), x[:, :1] @ x[:1]

    graph = trace(program, torch.randn(B, L, 1, 2, D), torch.randn(L, D))
    assert angles.write_products(graph.graph) == 0


def test_tables_are_made_before_all_else():
    from test_layers_forward import seeds

    programs = seeds()
    seen = run(programs.forward_075, *programs.inputs_075(1, 24, False, "cpu"), train=False)
    assert seen.count(WITH_WEIGHTS) == 1
    (graph,) = seen.graphs
    order = [str(n.target) for n in graph.graph.nodes if n.op == "call_function"]
    assert max(order.index(f"aten.{name}.default") for name in ("cos", "sin")) < order.index(
        "aten.mm.default"
    )


def test_tables_that_are_made_of_the_data_stay_behind_it():
    """And numbers that are drawn are drawn in their order."""

    def program(q, x):
        noise = torch.rand_like(q)
        table = ((x @ x.mT)[:, :1] + torch.rand_like(x)).expand(B, L, D).cos()
        return attention(table, table, q + noise)

    given = torch.randn(B, L, 1, 2, D), torch.randn(L, D)
    graph = trace(program, *given)
    torch.manual_seed(0)
    expected = graph(*given)
    angles.move_to_front(graph.graph)
    stable_topological_sort(graph.graph)
    graph.graph.lint()
    graph.recompile()
    torch.manual_seed(0)
    assert torch.equal(graph(*given), expected)


@pytest.mark.gpu
def test_the_program_that_returns_its_weights_has_no_matmul_for_its_tables():
    from test_layers_forward import seeds

    programs = seeds()
    seen = run(programs.forward_075, *programs.inputs_075(1, 64, False, "cuda"), train=False)
    assert seen.count(WITH_WEIGHTS) == 1
    assert seen.count("aten.bmm.default") == 0

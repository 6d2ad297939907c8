"""Lengths that change: a static, a dynamic and a marked compile fuse and never compile without
bound."""

import pytest
import torch
from fused import BACKWARD, FORWARD, Seen, backend, fuses, results, run, wrong
from spellings import Attention, inputs

import inductor_gqa

LENGTHS = (*range(5, 24), 63)


def causal(module, s):
    i = torch.arange(s.shape[-2], device=s.device)
    return s.masked_fill(i[None, :] > i[:, None], float("-inf"))


def compiled_for(module, cases, train, **options):
    """Runs the cases through one compiled function; what was seen, with every number judged."""
    seen = Seen()
    wide = Attention(mask=causal).double()
    wide.load_state_dict(module.double().state_dict())
    module.float()
    with inductor_gqa.enabled(always=True), backend(seen) as chosen:
        compiled = torch.compile(module, backend=chosen, fullgraph=True, **options)
        for case in cases:
            ours = results(compiled, module, case, train)
            eager = results(module, module, case, train)
            widened = [x.detach().double().requires_grad_(x.requires_grad) for x in case]
            truth = results(wide, wide, widened, train)
            assert not wrong(ours, eager, truth)
    return seen


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
def test_twenty_lengths_need_one_dynamic_compile(train):
    cases = [inputs(L=L, grad=train) for L in LENGTHS]
    seen = compiled_for(Attention(mask=causal), cases, train, dynamic=True)
    assert (seen.fused, seen.count(FORWARD), seen.count(BACKWARD)) == (1, 1, int(train))


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
def test_twenty_lengths_need_two_automatic_compiles(train):
    """The second length makes the size symbolic; no other compiles again."""
    cases = [inputs(L=L, grad=train) for L in LENGTHS]
    seen = compiled_for(Attention(mask=causal), cases, train)
    assert seen.fused == 2
    assert len(seen.graphs) == 2 * (1 + train)


def test_twenty_lengths_with_a_marked_dim_need_one_compile():
    cases = [inputs(L=L, grad=True) for L in LENGTHS]
    for (x,) in cases:
        torch._dynamo.mark_dynamic(x, 1)
    seen = compiled_for(Attention(mask=causal), cases, True)
    assert (seen.fused, len(seen.graphs)) == (1, 2)


def test_marked_batch_and_length():
    cases = [inputs(B=B, L=L, grad=True) for B, L in ((2, 11), (3, 17), (5, 8))]
    for (x,) in cases:
        torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.mark_dynamic(x, 1)
    seen = compiled_for(Attention(mask=causal), cases, True)
    assert (seen.fused, len(seen.graphs)) == (1, 2)


def test_static_shapes_compile_once_a_length():
    cases = [inputs(L=L, grad=True) for L in (5, 11, 11, 5)]
    seen = compiled_for(Attention(mask=causal), cases, True, dynamic=False)
    assert (seen.fused, len(seen.graphs)) == (2, 4)


@pytest.mark.parametrize("B", [1, 2])
@pytest.mark.parametrize("L", [2, 63])
def test_sizes_that_are_special_to_a_compiler(B, L):
    fuses(Attention(mask=causal), *inputs(B=B, L=L))


@pytest.mark.parametrize("B", [1, 2])
def test_a_single_key_is_no_attention(B):
    """Its softmax is 1 whatever the scores are; there is nothing to fuse and nothing to report."""
    assert run(Attention(mask=causal), *inputs(B=B, L=1)).sites == []

"""Whole programs over many batch sizes and lengths: few compilations, fused in each, eager's
numbers.

The backward written by hand from given weights (bench/seed_programs.py, 003) and the forward that
returns its weights (075), both with few narrow heads; attention with dropout, and calls of
scaled_dot_product_attention.
"""

import importlib
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from fused import BACKWARD, FORWARD, WITH_WEIGHTS, Seen, backend, fuses, wrong
from spellings import Attention, inputs

import inductor_gqa

ROOT = Path(__file__).resolve().parents[2]
GIVEN = "inductor_gqa.weights_backward.default"
SHAPES = [
    (1, 19), (1, 9), (2, 16), (4, 13), (1, 31), (3, 5), (2, 64), (1, 2), (4, 10), (2, 41), (16, 3),
    (1, 47), (8, 9), (5, 21), (1, 64), (2, 7),
]  # fmt: skip
MANY = [shape for shape in SHAPES if shape[0] > 1]
TINY = {
    "HEADS_003": 4, "KV_HEADS_003": 2, "WIDTH_003": 8, "HIDDEN_003": 24, "HEADS_075": 4,
    "KV_HEADS_075": 2, "WIDTH_075": 8, "HIDDEN_075": 24,
}  # fmt: skip


@pytest.fixture
def programs(monkeypatch):
    """bench/seed_programs.py at tiny sizes."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    module = importlib.import_module("seed_programs")
    for name, size in TINY.items():
        monkeypatch.setattr(module, name, size)
    yield module
    sys.modules.pop("seed_programs", None)


@pytest.fixture
def random_as_eager():
    with torch._inductor.config.patch(fallback_random=True):
        yield


def compiled_over(program, made, truth, **options):
    """Runs every input through one compiled function under no_grad; what was seen. Values are
    judged by the rule of fused.py; `truth` takes the same inputs in fp64."""
    torch._dynamo.reset()
    seen = Seen()
    with inductor_gqa.enabled(always=True), backend(seen) as chosen, torch.no_grad():
        compiled = torch.compile(program, backend=chosen, fullgraph=True, **options)
        for values in made:
            ours, eager, true = (
                dict(enumerate(f(*v)))
                for f, v in ((compiled, values), (program, values), (truth, values))
            )
            assert not wrong(ours, eager, true)
    return seen


def case_003(programs, B, L, seed):
    return programs.inputs_003(B, L, TINY["WIDTH_003"] ** -0.5, "cpu", seed)


def case_075(programs, B, L, seed, is_causal):
    return programs.inputs_075(B, L, is_causal, "cpu", seed)


def static(made):
    """Inputs of which only batch and length change: heads and widths are marked as one size for
    good, as they are in a module."""
    L = made[1].shape[1]
    for x in made:
        if not isinstance(x, torch.Tensor) or x.dtype == torch.int64:
            continue
        fixed = {
            1: (0,),
            2: (0, 1),
            3: (2,),
            4: (1,) if x.shape[-1] == L == x.shape[-2] else (1, 3),
        }
        for dim in fixed[x.dim()]:
            torch._dynamo.mark_static(x, dim)
    return made


def check(seen, op, most):
    assert len(seen.graphs) <= most
    assert not seen.reasons
    assert seen.fused == len(seen.graphs) == seen.count(op)


@pytest.mark.parametrize(
    ("shapes", "dynamic", "most"),
    [(SHAPES, True, 2), (MANY, True, 1), (MANY, None, 2)],
    ids=["dynamic", "dynamic-many", "automatic-many"],
)
class TestPrograms:
    """A batch of one is a constant to torch and has a compile of its own; without dynamic=True so
    has the first shape."""

    def test_backward_by_hand(self, programs, shapes, dynamic, most):
        made = [static(case_003(programs, B, L, i))[:-1] for i, (B, L) in enumerate(shapes)]

        def program(*v):  # a scale that is an argument would be a tensor under dynamic=True
            return programs.backward_003(*v, v[8].shape[-1] ** -0.5)

        truth = lambda *v: programs.truth(program, v)  # noqa: E731
        seen = compiled_over(program, made, truth, dynamic=dynamic)
        check(seen, GIVEN, most)

    @pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
    def test_forward_with_weights(self, programs, shapes, dynamic, most, is_causal):
        made = [static(case_075(programs, B, L, i, is_causal)) for i, (B, L) in enumerate(shapes)]
        truth = lambda *v: programs.truth(programs.forward_075, v)  # noqa: E731
        seen = compiled_over(programs.forward_075, made, truth, dynamic=dynamic)
        check(seen, WITH_WEIGHTS, most)


@pytest.mark.parametrize("name", ["003", "075"])
def test_weights_of_symbolic_size_are_left_and_right(programs, name):
    """dynamic=True makes the sizes of all inputs symbolic, the head dim too, and a scale that is an
    argument a tensor."""
    program = programs.backward_003 if name == "003" else programs.forward_075
    make = case_003 if name == "003" else lambda *a: case_075(*a, True)
    made = [make(programs, B, L, i) for i, (B, L) in enumerate(SHAPES[:4])]
    truth = lambda *v: programs.truth(program, v)  # noqa: E731
    seen = compiled_over(program, made, truth, dynamic=True)
    assert seen.count(GIVEN, WITH_WEIGHTS) == 0
    assert all("head dims are" in reason for reason in seen.reasons)


def causal(module, s):
    i = torch.arange(s.shape[-2], device=s.device)
    return s.masked_fill(i[None, :] > i[:, None], float("-inf"))


def softmax_with_dropout(s):
    return F.dropout(torch.softmax(s, -1), 0.3, training=True)


@pytest.mark.usefixtures("random_as_eager")
def test_dropout_in_training_needs_one_dynamic_compile():
    module = Attention(softmax=softmax_with_dropout, mask=causal)
    first, *more = [inputs(B=B, L=L, seed=i) for i, (B, L) in enumerate(MANY)]
    seen = fuses(module, *first, dynamic=True, more=more)
    assert (seen.count(FORWARD), seen.count(BACKWARD)) == (1, 1)
    assert seen.argument("keep") is not None


class Calls(torch.nn.Module):
    """Attention by a call beside attention spelled out, with dropout or without."""

    def __init__(self, dropout):
        super().__init__()
        self.called = Attention()
        self.spelled = Attention(
            mask=causal, **{"softmax": softmax_with_dropout} if dropout else {}
        )

    def forward(self, x):
        a = self.called
        q, k, v = (a.heads(F.linear(x, w), n) for w, n in ((a.wq, a.H), (a.wk, a.K), (a.wv, a.K)))
        made = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.spelled(F.linear(made.transpose(1, 2).flatten(2), a.wq.t()))


@pytest.mark.usefixtures("random_as_eager")
@pytest.mark.parametrize("dropout", [False, True], ids=["plain", "dropout"])
def test_calls_beside_attention_need_one_dynamic_compile(dropout):
    first, *more = [inputs(B=B, L=L, seed=i) for i, (B, L) in enumerate(MANY)]
    seen = fuses(Calls(dropout), *first, sites=2, dynamic=True, more=more)
    assert (seen.count(FORWARD), seen.count(BACKWARD)) == (2, 2)

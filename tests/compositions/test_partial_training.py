"""Training of a part, or of nothing: frozen parameters, LoRA by hand, no_grad, inference_mode,
accumulated gradients."""

import pytest
import torch
import torch.nn.functional as F
from fused import BACKWARD, FORWARD, Seen, backend, fuses, wrong
from spellings import Attention, inputs

import inductor_gqa


def causal(module, s):
    i = torch.arange(s.shape[-2], device=s.device)
    return s.masked_fill(i[None, :] > i[:, None], float("-inf"))


def frozen(*names):
    module = Attention(mask=causal)
    for name in names:
        getattr(module, name).requires_grad_(False)
    return module


@pytest.mark.parametrize(
    ("names", "needs"),
    [
        (("wq",), [False, True, True]),
        (("wk",), [True, False, True]),
        (("wv",), [True, True, False]),
        (("wq", "wk"), [False, False, True]),
        (("wk", "wv"), [True, False, False]),
    ],
)
def test_only_the_gradients_that_are_wanted_are_computed(names, needs):
    seen = fuses(frozen(*names), *inputs(grad=False))
    assert list(seen.node_of(BACKWARD).args[3:6]) == needs


def test_all_frozen_with_an_input_that_has_gradients():
    seen = fuses(frozen("wq", "wk", "wv"), *inputs(grad=True))
    assert list(seen.node_of(BACKWARD).args[3:6]) == [True, True, True]


def test_all_frozen_is_inference():
    fuses(frozen("wq", "wk", "wv"), *inputs(grad=False), backwards=0)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode):
    module, (x,) = Attention(mask=causal), inputs(grad=False)
    seen = Seen()
    with inductor_gqa.enabled(always=True), backend(seen) as chosen, mode():
        ours = {"output": torch.compile(module, backend=chosen)(x)}
        eager = {"output": module(x)}
        truth = {"output": module.double()(x.double())}
    assert not wrong(ours, eager, truth)
    assert (seen.count(FORWARD), seen.count(BACKWARD)) == (1, 0)


def test_gradients_after_inference_compile_a_graph_of_their_own():
    module, (x,) = Attention(mask=causal), inputs()
    seen = Seen()
    with inductor_gqa.enabled(always=True), backend(seen) as chosen:
        compiled = torch.compile(module, backend=chosen)
        with torch.no_grad():
            compiled(x)
        compiled(x).sum().backward()
    assert [site.direction for site in seen.sites] == ["inference", "training"]
    assert seen.count(BACKWARD) == 1


class LowRank(Attention):
    """LoRA on the query and the value projections; the base weights are frozen."""

    def __init__(self, rank=2, factor=0.5):
        super().__init__(mask=causal)
        E, H, K, D = self.wq.shape[1], self.H, self.K, self.D
        make = lambda *shape: torch.nn.Parameter(torch.randn(*shape) * 0.3)  # noqa: E731
        torch.manual_seed(3)
        self.qa, self.qb = make(rank, E), make(H * D, rank)
        self.va, self.vb = make(rank, E), make(K * D, rank)
        self.factor = factor
        for weight in (self.wq, self.wk, self.wv):
            weight.requires_grad_(False)

    def forward(self, x):
        low = lambda a, b: F.linear(F.linear(x, a), b) * self.factor  # noqa: E731
        q = self.heads(F.linear(x, self.wq) + low(self.qa, self.qb), self.H)
        k = self.heads(F.linear(x, self.wk), self.K)
        v = self.heads(F.linear(x, self.wv) + low(self.va, self.vb), self.K)
        q, k = self.rotated(q, x.shape[1]), self.rotated(k, x.shape[1])
        return self.attend(q, k, v)


def test_lora_of_queries_and_values():
    seen = fuses(LowRank(), *inputs(grad=False))
    assert list(seen.node_of(BACKWARD).args[3:6]) == [True, False, True]


def test_lora_inside_a_model_needs_all_three():
    seen = fuses(LowRank(), *inputs(grad=True))
    assert list(seen.node_of(BACKWARD).args[3:6]) == [True, True, True]


def test_accumulated_gradients_add_up():
    module, plain = Attention(mask=causal), Attention(mask=causal)
    wide = Attention(mask=causal).double()
    with inductor_gqa.enabled(always=True), backend(Seen()) as chosen:
        compiled = torch.compile(module, backend=chosen)
        for seed in range(3):
            (x,) = inputs(seed=seed, grad=False)
            for run, value in ((compiled, x), (plain, x), (wide, x.double())):
                run(value).square().sum().backward()
    found = [{n: p.grad for n, p in m.named_parameters()} for m in (module, plain, wide)]
    assert not wrong(*found)
    assert not torch.equal(module.wq.grad, torch.zeros_like(module.wq))


def test_a_training_run_follows_eager():
    """Thirty optimizer steps from the same start end where fp64 does, as near as eager."""
    ends = []
    for kind in ("ours", "eager", "truth"):
        module = Attention(mask=causal)
        module = module.double() if kind == "truth" else module
        (x,) = inputs(grad=False)
        x = x.to(module.wq.dtype)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
        with inductor_gqa.enabled(always=True), backend(Seen()) as chosen:
            run = torch.compile(module, backend=chosen) if kind == "ours" else module
            for _ in range(30):
                optimizer.zero_grad()
                (run(x) - 0.5).square().mean().backward()
                optimizer.step()
        ends.append({n: p.detach() for n, p in module.named_parameters()})
    assert not wrong(*ends)
    start = Attention(mask=causal).wq
    assert (ends[0]["wq"] - start).abs().max() > 1e-3

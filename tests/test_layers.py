"""Gradients of the linear layers around an attention are joined: how many, from which spellings,
and what must stay as it is. Numbers are held against fp64 as those of the attention itself."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from fused import BACKWARD, run
from spellings import half, repeat_kv
from torch import nn

from inductor_gqa import decide

JOINED = "inductor_gqa.linear_backward.default"
rule_of_layers = decide.joins  # before the tests below replace it
B, L, C, H, K, D = 2, 12, 48, 4, 2, 16


@pytest.fixture(autouse=True)
def everywhere(monkeypatch):
    """Joined whatever the device and the size, as nothing else is on a CPU."""
    monkeypatch.setattr(decide, "joins", lambda weights, x: True)


class Block(nn.Module):
    """Attention with RoPE between four linear layers."""

    def __init__(self, bias=False):
        super().__init__()
        torch.manual_seed(1)
        self.q, self.k, self.v = (nn.Linear(C, n * D, bias=bias) for n in (H, K, K))
        self.o = nn.Linear(H * D, C, bias=bias)

    def project(self, x):
        return self.q(x), self.k(x), self.v(x)

    def leave(self, y):
        return self.o(y)

    def forward(self, x, cos, sin):
        q, k, v = (y.view(*x.shape[:2], -1, D).transpose(1, 2) for y in self.project(x))
        q, k = half(q, cos, sin), half(k, cos, sin)
        k, v = repeat_kv(k, H // K), repeat_kv(v, H // K)
        weights = (q @ k.mT * D**-0.5).softmax(-1)
        return self.leave((weights @ v).transpose(1, 2).reshape(*x.shape[:2], -1))


def inputs(dtype=torch.float32, grad=True):
    torch.manual_seed(0)
    angles = torch.randn(L, D // 2).repeat(1, 2)
    x = torch.randn(B, L, C, dtype=dtype, requires_grad=grad)
    return x, angles.cos().to(dtype), angles.sin().to(dtype)


def joined(module, *arguments, count, backwards=1, **options):
    seen = run(module, *arguments, **options)
    assert seen.count(BACKWARD) == backwards
    assert seen.count(JOINED) == count
    return seen


def products(seen):
    return seen.count("aten.mm.default", "aten.addmm.default", "aten.bmm.default")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_four_layers_become_two_ops(dtype, bias):
    seen = joined(Block(bias).to(dtype), *inputs(dtype), count=2)
    assert products(seen) == 4  # of the forward


def test_layers_of_two_blocks_are_joined_by_block():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = Block(), Block()

        def forward(self, x, cos, sin):
            return self.other(x + self.one(x, cos, sin), cos, sin)

    joined(Two(), *inputs(), count=4, backwards=2)


def test_generated_code_runs():
    joined(Block(), *inputs(), count=2, codegen=True)


def test_input_without_a_gradient_leaves_its_layers():
    seen = joined(Block(), *inputs(grad=False), count=1)
    assert products(seen) == 4 + 3


@pytest.mark.parametrize("frozen", ["q", "k", "v", "o"])
def test_frozen_layer_stays_a_product(frozen):
    block = Block()
    getattr(block, frozen).weight.requires_grad_(False)
    joined(block, *inputs(), count=1 if frozen == "o" else 2)


def test_every_layer_frozen():
    joined(Block().requires_grad_(False), *inputs(), count=0)


class Packed(Block):
    """One weight of q, k and v: one product already, and one op of one layer."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(C, (H + 2 * K) * D, bias=False)

    def project(self, x):
        return self.qkv(x).split([H * D, K * D, K * D], -1)


class Views(Packed):
    """Layers whose weights are views of one tensor."""

    def project(self, x):
        return [F.linear(x, w) for w in self.qkv.weight.split([H * D, K * D, K * D])]


class Shared(Block):
    """The input of the layers is read beside them, and a projection by other code."""

    def forward(self, x, cos, sin):
        return super().forward(x, cos, sin) + x.square() + self.q(x).mean(-1, keepdim=True)


class Elsewhere(Block):
    """Another layer reads the input."""

    def forward(self, x, cos, sin):
        other = self.o.weight @ self.q.weight
        return super().forward(x, cos, sin) + F.linear(x, other)


class Apart(Block):
    """Every projection has an input of its own."""

    def project(self, x):
        return self.q(x), self.k(x * 2), self.v(x.sin())


class Turned(Block):
    """x @ W with W as [in, out]: gradients of weights are X^T G."""

    def __init__(self):
        super().__init__()
        self.turned = nn.ParameterList(
            nn.Parameter(layer.weight.detach().mT.contiguous())
            for layer in (self.q, self.k, self.v, self.o)
        )

    def project(self, x):
        return [x @ w for w in self.turned[:3]]

    def leave(self, y):
        return y @ self.turned[3]


class Gated(Block):
    """The output projection reads what a gate has multiplied."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(C, H * D, bias=False)

    def forward(self, x, cos, sin):
        self.gated = torch.sigmoid(self.gate(x))
        return super().forward(x, cos, sin)

    def leave(self, y):
        return self.o(y * self.gated)


class Tied(Block):
    """One weight for k and v."""

    def project(self, x):
        return self.q(x), self.k(x), self.k(x)


class Scaled(Block):
    """The sum of the layers' gradients is not plain."""

    def project(self, x):
        return self.q(x), 0.5 * self.k(x), self.v(x).mul(3)


class LengthFirst(Block):
    """The input comes as [L, B, C], its gradient goes out so; every layer has its own copy of
    it."""

    def forward(self, x, cos, sin):
        return super().forward(x.view(L, B, C).transpose(0, 1), cos, sin)


class Residual(Block):
    """The gradient of the input is that of the block and others, added in between."""

    def project(self, x):
        self.seen = x.sin()
        return self.q(x), self.k(x), self.v(x)

    def forward(self, x, cos, sin):
        return x + super().forward(x, cos, sin) * self.seen


class Four(Block):
    """Values are the sum of two layers."""

    def __init__(self):
        super().__init__()
        self.more = nn.Linear(C, K * D, bias=False)

    def project(self, x):
        return self.q(x), self.k(x), self.v(x) + self.more(x).sin()


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        (Packed, 2), (Views, 2), (Shared, 2), (Elsewhere, 2), (Apart, 4), (Turned, 2), (Gated, 2),
        (Tied, 2), (Scaled, 2), (LengthFirst, 4), (Residual, 2), (Four, 2),
    ],
    ids=lambda x: getattr(x, "__name__", x),
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_spellings(kind, count, dtype):
    joined(kind().to(dtype), *inputs(dtype), count=count)


def test_layers_of_symbolic_sizes_stay():
    joined(Block(), *inputs(), count=0, dynamic=True)


def test_what_does_not_pay_stays(monkeypatch):
    monkeypatch.setattr(decide, "joins", lambda weights, x: False)
    joined(Block(), *inputs(), count=0)


class TestRule:
    """Where layers are joined, against what was measured on the device the rule is for."""

    rule = staticmethod(rule_of_layers)
    path = Path(__file__).parents[1] / "bench" / "results" / "layers-h200.json"
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]

    @pytest.fixture(autouse=True)
    def hopper(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        monkeypatch.setattr(decide, "_unusable", lambda device: None)

    def is_joined(self, problem, tokens, device="cuda", dtype=torch.bfloat16):
        _, columns, *widths = problem.split("-")
        graph = torch.fx.Graph()
        x, *weights = (graph.placeholder(f"x{n}") for n in range(1 + len(widths)))
        with torch._subclasses.FakeTensorMode():
            x.meta["val"] = torch.empty(tokens, int(columns), dtype=dtype, device=device)
            for w, width in zip(weights, widths, strict=True):
                w.meta["val"] = torch.empty(int(width), int(columns), dtype=dtype, device=device)
        return self.rule(weights, x)

    def test_layers_are_joined_only_where_that_was_not_slower(self):
        assert not any(row["wrong"] for row in self.rows)
        joined = [row for row in self.rows if self.is_joined(row["problem"], row["tokens"])]
        assert len(joined) > len(self.rows) / 2
        for row in joined:
            assert row["us"]["chosen"] <= row["us"]["matmuls"], (row["problem"], row["tokens"])

    def test_another_device_or_dtype_stays(self, monkeypatch):
        assert self.is_joined("qkv-4096-4096-1024-1024", 512)
        assert not self.is_joined("qkv-4096-4096-1024-1024", 512, device="cpu")
        assert not self.is_joined("qkv-4096-4096-1024-1024", 512, dtype=torch.float32)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
        assert not self.is_joined("qkv-4096-4096-1024-1024", 512)

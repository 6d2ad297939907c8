"""The fp32 linear layers around a fused attention are joined: how many, from which spellings, and
what must stay as it is. Numbers are held against fp64 as those of the attention itself."""

import contextlib
import importlib.util
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from fused import BACKWARD, FORWARD, WITH_WEIGHTS, run
from test_layers import Block as Plain
from test_layers import C, D, H, L, LengthFirst, Packed, Shared, Tied, Views, inputs
from torch import nn
from torch._subclasses import FakeTensorMode

from inductor_gqa import decide
from inductor_gqa.layers import matrix_of

JOINED = "inductor_gqa.linear_forward.default"
MATMULS = ("aten.mm.default", "aten.addmm.default", "aten.bmm.default")
ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def asked(monkeypatch):
    """Joined whatever the device, as nothing is on a CPU; notes what the rule was asked."""
    seen = []

    def joins(weights, x, precision):
        seen.append((len(weights), precision))
        return True

    monkeypatch.setattr(decide, "joins_forward", joins)
    return seen


def joined(module, *arguments, count, left, train=False, sites=FORWARD, **options):
    """`count` ops are written and `left` matmuls stay."""
    seen = run(module, *arguments, train=train, **options)
    assert seen.count(sites) == 1
    assert seen.count(BACKWARD) == train
    assert seen.count(JOINED) == count
    assert seen.count(*MATMULS) == left
    return seen


def seeds():
    where = ROOT / "bench" / "seed_programs.py"
    spec = importlib.util.spec_from_file_location("seed_programs_of_layers", where)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("setting", "precision"), [("highest", "ieee"), ("high", "tf32"), ("medium", "tf32")]
)
@pytest.mark.parametrize("is_causal", [False, True])
def test_program_that_returns_its_weights(is_causal, setting, precision, asked):
    programs = seeds()
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(setting)
    try:
        arguments = programs.inputs_075(1, 24, is_causal, "cpu")
        seen = joined(programs.forward_075, *arguments, count=2, left=0, sites=WITH_WEIGHTS)
    finally:
        torch.set_float32_matmul_precision(before)
    assert sorted(asked) == [(1, precision), (3, precision)]
    given = [n.args[2] for g in seen.graphs for n in g.graph.nodes if str(n.target) == JOINED]
    assert given == [precision] * 2


def test_four_layers_become_two_ops():
    joined(Plain(), *inputs(), count=2, left=0)


def test_four_layers_of_a_training_step_become_two_ops():
    joined(Plain(), *inputs(), count=2, left=8, train=True)


def test_layers_and_their_gradients_are_joined(monkeypatch):
    monkeypatch.setattr(decide, "joins", lambda weights, x: True)
    seen = joined(Plain(), *inputs(), count=2, left=0, train=True)
    assert seen.count("inductor_gqa.linear_backward.default") == 2


def test_generated_code_runs():
    joined(Plain(), *inputs(), count=2, left=0, codegen=True)


def test_layers_of_two_blocks_are_joined_by_block():
    class Two(nn.Module):
        """The output projection of one block makes the input of the other."""

        def __init__(self):
            super().__init__()
            self.one, self.other = Plain(), Plain()

        def forward(self, x, cos, sin):
            return self.other(self.one(x, cos, sin), cos, sin)

    seen = run(Two(), *inputs(), train=False)
    assert (seen.count(FORWARD), seen.count(JOINED), seen.count(*MATMULS)) == (2, 4, 0)


class Escaping(Plain):
    """Projections are needed beside the attention: returned, and by other code."""

    def forward(self, x, cos, sin):
        q, k, _ = self.project(x)
        return super().forward(x, cos, sin), q, k.transpose(0, 1).square().sum(-1)


class Apart(Plain):
    """Every projection has an input of its own."""

    def project(self, x):
        return self.q(x), self.k(x * 2), self.v(x.sin())


class OneApart(Plain):
    """The values come from another input."""

    def project(self, x):
        return self.q(x), self.k(x), self.v(x.cos())


class Turned(Plain):
    """x @ W with W stored as [in, out]."""

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


class TurnedInMemory(Plain):
    """Weights of shape [N, C] whose columns are contiguous."""

    def __init__(self):
        super().__init__()
        for layer in (self.q, self.k, self.v, self.o):
            layer.weight = nn.Parameter(layer.weight.detach().mT.contiguous().mT)


class TurnedValues(Plain):
    """One of the weights is stored as [in, out]."""

    def __init__(self):
        super().__init__()
        self.turned = nn.Parameter(self.v.weight.detach().mT.contiguous())

    def project(self, x):
        return self.q(x), self.k(x), x @ self.turned


class Pointwise(Plain):
    """Something is computed between projections and attention, and behind it."""

    def project(self, x):
        return self.q(x).sin(), self.k(x), self.v(x).exp()

    def leave(self, y):
        return self.o(y.tanh())


class Square(Plain):
    """A weight that is its own shape when turned, read both ways."""

    def __init__(self):
        super().__init__()
        self.q = nn.Linear(C, C, bias=False)
        self.into = nn.Linear(C, H * D, bias=False)

    def project(self, x):
        y = self.q(x) + x @ self.q.weight
        return self.into(y), self.k(y), self.v(y)


class Chained(Plain):
    """A weight is made from another layer's result."""

    def project(self, x):
        q = self.q(x)
        scale = q.mean()
        return q, self.k(x), F.linear(x, self.v.weight * scale)


class Cross(Plain):
    """Keys and values come from another sequence."""

    def forward(self, x, cos, sin, y):
        self.other = y
        return super().forward(x, cos, sin)

    def project(self, x):
        return self.q(x), self.k(self.other), self.v(self.other)


def test_keys_and_values_of_another_sequence():
    joined(Cross(), *inputs(), torch.randn(2, L, C), count=3, left=0)


@pytest.mark.parametrize(
    ("kind", "count", "left"),
    [
        (Packed, 2, 0), (Views, 2, 0), (Shared, 2, 0), (Tied, 2, 0), (LengthFirst, 4, 0),
        (Escaping, 2, 0), (Apart, 4, 0), (OneApart, 3, 0), (Turned, 0, 4), (TurnedInMemory, 0, 4),
        (TurnedValues, 2, 1), (Pointwise, 1, 3), (Square, 2, 2), (Chained, 1, 3),
    ],
    ids=lambda x: getattr(x, "__name__", x),
)  # fmt: skip
def test_other_spellings(kind, count, left):
    joined(kind(), *inputs(), count=count, left=left)


@pytest.mark.parametrize(("kind", "layers"), [(Tied, 2), (Shared, 3), (Escaping, 3)])
def test_equal_matmuls_are_one_layer(kind, layers):
    seen = joined(kind(), *inputs(), count=2, left=0)
    given = [n.args[1] for g in seen.graphs for n in g.graph.nodes if str(n.target) == JOINED]
    assert sorted(map(len, given)) == [1, layers]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_stay(dtype, asked):
    seen = run(Plain().to(dtype), *inputs(dtype), train=False)
    assert (seen.count(FORWARD), seen.count(JOINED), seen.count(*MATMULS)) == (1, 0, 4)
    assert asked == []


def test_layers_with_a_bias_stay():
    joined(Plain(bias=True), *inputs(), count=0, left=4)


def test_layers_of_symbolic_sizes_stay():
    joined(Plain(), *inputs(), count=0, left=4, dynamic=True)


def test_layers_elsewhere_stay():
    class Beside(Plain):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(C, 64, bias=False), nn.Linear(64, C, bias=False)

        def forward(self, x, cos, sin):
            return super().forward(x, cos, sin) + self.down(self.up(x).sin())

    joined(Beside(), *inputs(), count=2, left=2)


def test_what_does_not_pay_stays(monkeypatch):
    monkeypatch.setattr(decide, "joins_forward", lambda weights, x, precision: False)
    joined(Plain(), *inputs(), count=0, left=4)


class TestRule:
    """The rule itself, of layers with 1536 results of 1024 columns unless said otherwise."""

    rule = staticmethod(decide.joins_forward)

    def nodes(self, device, dtype, tokens, widths, columns=1024):
        graph = torch.fx.Graph()
        x, *weights = (graph.placeholder(f"x{n}") for n in range(1 + len(widths)))
        with torch._subclasses.FakeTensorMode():
            x.meta["val"] = torch.empty(tokens, columns, dtype=dtype, device=device)
            for w, width in zip(weights, widths, strict=True):
                w.meta["val"] = torch.empty(columns, width, dtype=dtype, device=device)
        return weights, x

    def seen(
        self, *, device="cuda", dtype=torch.float32, tokens=512, layers=3, precision="ieee", width=0
    ):
        found = self.nodes(device, dtype, tokens, [width or 1536 // layers] * layers)
        return self.rule(*found, precision)

    @pytest.fixture(autouse=True)
    def hopper(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        monkeypatch.setattr(decide, "_unusable", lambda device: None)

    @pytest.mark.parametrize("precision", decide.JOINED_FORWARD)
    def test_layers_are_joined_only_where_that_was_not_slower(self, precision):
        path = ROOT / "bench" / "results" / f"layers-forward-{precision}-h200.json"
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        assert not any(row["wrong"] for row in rows)
        joined = []
        for row in rows:
            _, columns, *widths = row["problem"].split("-")
            found = self.nodes(
                "cuda", torch.float32, row["tokens"], list(map(int, widths)), int(columns)
            )
            if self.rule(*found, precision):
                joined.append(row)
        assert len(joined) > len(rows) / 4
        for row in joined:
            assert row["us"]["chosen"] <= row["us"]["matmuls"], (row["problem"], row["tokens"])

    @pytest.mark.parametrize("precision", decide.JOINED_FORWARD)
    @pytest.mark.parametrize("layers", [1, 2, 3])
    def test_goes_by_tokens(self, layers, precision):
        fewest, most = decide.JOINED_FORWARD[precision].get(layers, (1, 0))
        tokens = (fewest - 1, fewest, most, most + 1)
        found = [self.seen(tokens=n, layers=layers, precision=precision) for n in tokens]
        assert found == ([False, True, True, False] if most else [False] * 4)

    @pytest.mark.parametrize("precision", decide.JOINED_FORWARD)
    def test_goes_by_the_size_of_the_weights(self, precision):
        least, largest = decide.JOINED_FORWARD_SIZES[precision]
        for elements, is_joined in (
            (least - 12288, False),
            (least + 12288, True),
            (largest - 12288, True),
            (largest + 12288, False),
        ):
            assert self.seen(precision=precision, width=elements // 12288 * 4) is is_joined

    def test_rows_that_the_measured_kernel_does_not_read_stay_matmuls(self):
        assert self.seen(width=512)
        assert not self.seen(width=510)
        for columns, is_joined in ((1020, True), (1022, False)):
            found = self.nodes("cuda", torch.float32, 512, [1024] * 3, columns)
            assert self.rule(*found, "ieee") is is_joined

    def test_needs_device_and_dtype(self, monkeypatch):
        assert self.seen()
        assert not self.seen(device="cpu")
        assert not self.seen(dtype=torch.bfloat16)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
        assert not self.seen()


@pytest.mark.parametrize("mode", [contextlib.nullcontext, FakeTensorMode])
def test_a_view_of_what_is_not_contiguous_is_no_matrix(mode):
    """As of a convolution that leaves channels last; fake tensors refuse by another error."""
    graph = torch.fx.Graph()
    source = graph.placeholder("x")
    source.meta["val"] = torch.empty_strided((2, 64, 12), (768, 1, 64), device="meta")
    turned = graph.call_function(torch.ops.aten.permute.default, (source, [0, 2, 1]))
    rows = graph.call_function(torch.ops.aten.view.default, (turned, [24, 64]))
    with mode():
        assert matrix_of(rows, {}) is None
        assert matrix_of(turned, {}) is not None

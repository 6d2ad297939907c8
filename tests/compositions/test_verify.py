"""`enable(verify=True)` runs each site against what it replaces, and catches readings that are
wrong."""

import dataclasses

import pytest
import torch
from fused import BACKWARD, FORWARD, Seen, backend
from spellings import ROTATIONS, Attention, inputs

import inductor_gqa
from inductor_gqa import read_site, verify
from inductor_gqa.passes import AttentionPass, Settings
from inductor_gqa.patterns.axes import Unread


@pytest.fixture(autouse=True)
def _no_memory():
    verify._agreed.clear()
    torch._dynamo.reset()
    yield
    verify._agreed.clear()
    torch._dynamo.reset()


def causal(module, s):
    i = torch.arange(s.shape[-2], device=s.device)
    return s.masked_fill(i[None, :] > i[:, None], float("-inf"))


def window(module, s):
    i = torch.arange(s.shape[-2], device=s.device)
    distance = i[:, None] - i[None, :]
    return s.masked_fill((distance < 0) | (distance >= 5), torch.finfo(s.dtype).min)


def padded(module, s, keep):
    return causal(module, s).masked_fill(~keep[:, None, None, :], float("-inf"))


def biased(module, s, bias):
    return s + bias


def verified(module, args, train=True, **options):
    seen = Seen()
    with inductor_gqa.enabled(always=True, verify=True), backend(seen) as chosen:
        out = torch.compile(module, backend=chosen, **options)(*args)
        if train:
            out.square().sum().backward()
    return seen


KEEP = torch.tensor([[True] * 11, [True] * 7 + [False] * 4])
TURNS = ("half_table", "interleaved", "partial_at_end", "inverse")
CASES = {
    "plain": (Attention(), inputs()),
    "causal": (Attention(mask=causal), inputs()),
    "window": (Attention(mask=window), inputs()),
    "padded": (Attention(mask=padded), (*inputs(), None, KEEP)),
    "bias": (Attention(mask=biased), (*inputs(), None, torch.randn(11, 11))),
    "cross": (Attention(), inputs(S=17)),
    "bf16": (Attention(dtype=torch.bfloat16, mask=causal), inputs(dtype=torch.bfloat16)),
    "softcap": (Attention(scores=lambda s: torch.tanh(s * 0.1) * 3.0), inputs()),
    "tiled": (Attention(grouping="Tiled"), inputs()),
    **{name: (Attention(rotation=ROTATIONS[name], mask=causal), inputs()) for name in TURNS},
}


@pytest.mark.parametrize("name", CASES)
def test_a_right_reading_agrees(name):
    module, args = CASES[name]
    seen = verified(module, args)
    assert not seen.reasons
    assert (seen.count(FORWARD), seen.count(BACKWARD)) == (1, 1)


@pytest.mark.parametrize("name", ["window", "cross"])
def test_symbolic_lengths_are_verified_at_small_ones(name, monkeypatch):
    module, args = CASES[name]
    shapes = []
    plain = verify.Run.value
    monkeypatch.setattr(
        verify.Run, "value", lambda self, n: shapes.append(plain(self, n).shape) or plain(self, n)
    )
    seen = verified(module, args, dynamic=True)
    assert not seen.reasons
    assert seen.count(FORWARD) == 1
    assert max(max(shape) for shape in shapes) < 64


LONG = {
    "700": {"L": 700},
    "a length that is the width of all heads": {"L": 512, "H": 8, "K": 4, "D": 64},
    "a length that is the width of the keys' heads": {"L": 256, "H": 8, "K": 4, "D": 64},
    "a power of two": {"L": 2048, "H": 8, "K": 2, "D": 16},
}


@pytest.mark.parametrize("name", LONG)
def test_static_lengths_are_shrunk(name, monkeypatch):
    """A site of 2048 keys is run with 24, whatever else its sizes could be read as."""
    options = dict(LONG[name])
    L, made = options.pop("L"), []
    plain = verify.Run.value
    monkeypatch.setattr(
        verify.Run, "value", lambda self, n: made.append(plain(self, n).numel()) or plain(self, n)
    )
    seen = verified(Attention(mask=causal, longest=L, **options), inputs(B=1, L=L))
    assert not seen.reasons
    assert seen.count(BACKWARD) == 1
    assert max(made) <= 24 * 512


@pytest.mark.parametrize("fault", ["offset", "scale", "pairs"])
def test_a_wrong_reading_is_caught_where_lengths_are_shrunk(fault, monkeypatch):
    monkeypatch.setattr(read_site, "read", misread(FAULTS[fault]))
    module = Attention(mask=causal, longest=512, H=8, K=4, D=64)
    seen = verified(module, inputs(B=1, L=512))
    assert "would be off by" in seen.reasons[0]
    assert seen.count(FORWARD) == 0


def test_what_cannot_be_run_is_left():
    """No site is fused unverified: what is too large is named with its size."""
    seen = Seen()
    with inductor_gqa.enabled(always=True, verify=True), backend(seen) as chosen:
        saved, verify.MOST_ELEMENTS = verify.MOST_ELEMENTS, 100
        try:
            torch.compile(Attention(), backend=chosen)(*inputs(grad=False))
        finally:
            verify.MOST_ELEMENTS = saved
    assert seen.count(FORWARD) == 0
    assert "elements would be needed, accepted 100" in seen.reasons[0]


def misread(change):
    """A reader whose sites are changed afterwards."""
    plain = read_site.read

    def read(*args):
        site = plain(*args)
        return dataclasses.replace(site, **change(site))

    return read


def turned(site, **change):
    return {
        "rotate_q": dataclasses.replace(site.rotate_q, **change),
        "rotate_k": dataclasses.replace(site.rotate_k, **change),
    }


FAULTS = {
    "scale": lambda site: {"scale": site.scale * 1.01},
    "sign of q": lambda site: {"rotate_q": dataclasses.replace(site.rotate_q, sign=-1.0)},
    "sign of both": lambda site: turned(site, sign=-1.0),
    "pairs": lambda site: turned(site, interleaved=True),
    "offset": lambda site: {"mask": dataclasses.replace(site.mask, band_hi=1)},
    "window": lambda site: {"mask": dataclasses.replace(site.mask, band_lo=-4)},
    "no mask": lambda site: {"mask": type(site.mask)()},
    "softcap": lambda site: {"softcap": 5.0},
    "table": lambda site: {"rotate_q": dataclasses.replace(site.rotate_q, cos=site.rotate_q.sin)},
    "k as v": lambda site: {"k": dataclasses.replace(site.k, node=site.v.node)},
}


@pytest.mark.parametrize(
    ("fault", "dynamic"),
    [*((fault, False) for fault in FAULTS), ("offset", True), ("scale", True)],
)
def test_a_wrong_reading_is_caught(fault, dynamic, monkeypatch):
    module, args = Attention(mask=causal), inputs()
    stock = Seen()
    with backend(stock) as chosen:
        torch.compile(module, backend=chosen, dynamic=dynamic)(*args).square().sum().backward()
    torch._dynamo.reset()
    monkeypatch.setattr(read_site, "read", misread(FAULTS[fault]))
    seen = verified(module, args, dynamic=dynamic)
    (reason,) = seen.reasons
    assert "verify: " in reason
    assert seen.count(FORWARD, BACKWARD) == 0
    assert seen.text() == stock.text()


def test_a_gradient_that_is_wrong_alone_is_caught(monkeypatch):
    def swapped(site):
        found = site.gradients
        other = dataclasses.replace(found, k=(), q=found.q, v=found.v)
        moved = [dataclasses.replace(t, node=found.k[0].node) for t in found.v]
        return {"gradients": dataclasses.replace(other, v=tuple(moved))}

    monkeypatch.setattr(read_site, "read", misread(swapped))
    seen = verified(Attention(mask=causal), inputs())
    assert "would be off by" in seen.reasons[0]
    assert seen.count(FORWARD) == 0


def test_equal_layers_are_run_once(monkeypatch):
    class Stack(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(Attention(E=32, mask=causal) for _ in range(3))

        def forward(self, x):
            for layer in self.layers:
                x = x + layer(x)
            return x

    ran = []
    plain = verify.difference
    monkeypatch.setattr(verify, "difference", lambda *args: ran.append(1) or plain(*args))
    seen = verified(Stack(), inputs(E=32))
    assert seen.fused == 3
    assert len(ran) == 1


def test_verifying_is_a_setting_of_the_cache():
    assert AttentionPass(Settings(verify=True)).uuid() != AttentionPass(Settings()).uuid()


def test_verifying_draws_no_random_numbers_of_the_user():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    assert verified(Attention(mask=causal), inputs()).count(FORWARD) == 1
    assert torch.equal(torch.rand(3), expected)


def dropped(q, k, v):
    weights = torch.softmax(q @ k.mT * 0.3 + 0.0, -1)
    return torch.dropout(weights, 0.3, True) @ v


def heads(length=7):
    return [torch.randn(2, 3, length, 8, requires_grad=True) for _ in range(3)]


def test_a_site_with_dropout_is_verified():
    seen = verified(dropped, heads(), fullgraph=True)
    assert [site.fused for site in seen.sites] == [True]


def test_a_rejected_site_with_dropout_is_left_as_it_was(monkeypatch):
    def reject(*_):
        raise Unread("rejected")

    monkeypatch.setattr(verify, "check", reject)
    args = heads()
    seen = verified(dropped, args, fullgraph=True)
    assert [site.reason for site in seen.sites] == ["rejected"]
    stock = Seen()
    torch._dynamo.reset()
    with backend(stock) as chosen:
        torch.compile(dropped, backend=chosen)(*args).square().sum().backward()
    assert [[n.target for n in g.graph.nodes if n.op == "call_function"] for g in seen.graphs] == [
        [n.target for n in g.graph.nodes if n.op == "call_function"] for g in stock.graphs
    ]

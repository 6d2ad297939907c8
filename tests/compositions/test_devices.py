"""Devices that no kernel of ours runs on: left with a reason, and never touched by the pass."""

import pytest
import torch
from fused import FORWARD, Seen, backend
from spellings import Attention, inputs
from torch.utils._python_dispatch import TorchDispatchMode

import inductor_gqa
from inductor_gqa import decide, passes


def compiled(module, args):
    seen = Seen()
    with inductor_gqa.enabled(always=True), backend(seen) as chosen, torch.no_grad():
        out = torch.compile(module, backend=chosen)(*args)
    return seen, out


def test_a_model_on_meta_is_left():
    """torch compiles it to empty results, so that there is nothing to read."""
    module = Attention().to("meta")
    (x,) = inputs(grad=False)
    seen, out = compiled(module, [x.to("meta")])
    assert seen.count(FORWARD) == 0
    assert seen.sites == []
    assert out.shape == (2, 11, 32)
    assert out.is_meta


@pytest.mark.parametrize("device", ["xpu", "mps", "hpu"])
def test_a_device_without_kernels_is_left(device):
    """Read as usual, and refused by the name of its device."""
    site = object.__new__(passes.Site)
    site.q = site.k = site.v = None
    site.anchor = type("Anchor", (), {})()
    site.anchor.meta = {"val": type("Value", (), {"device": torch.device(device)})()}
    assert decide.unsupported(site) == f"device is {device}, accepted cpu and cuda"


def test_the_pass_allocates_nothing(monkeypatch):
    """Reading is about fake tensors: no tensor of the model's size is ever made."""
    module, args = Attention(longest=2048), inputs(B=1, L=2048)
    made = []
    plain = passes.fuse

    def watched(graph, settings):
        class Watch(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                out = func(*args, **(kwargs or {}))
                for x in torch.utils._pytree.tree_leaves(out):
                    if isinstance(x, torch.Tensor) and type(x) is torch.Tensor and not x.is_meta:
                        made.append(x.numel())
                return out

        with Watch():
            return plain(graph, settings)

    monkeypatch.setattr(passes, "fuse", watched)
    report = inductor_gqa.explain(module, *args)
    assert report.fused == 1
    assert max(made, default=0) <= 64

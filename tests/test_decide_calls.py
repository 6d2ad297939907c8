"""Which calls of `F.scaled_dot_product_attention` are fused unasked: where that was measured."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from inductor_gqa import decide
from inductor_gqa.patterns.axes import Digit
from inductor_gqa.site import Gradients, Mask, Rotation, Site, Table, View


def call(L=4096, D=128, S=None, training=True, dtype=torch.bfloat16, **changed: Any) -> Site:
    graph = torch.fx.Graph()
    node = graph.placeholder("x")
    node.meta["val"] = torch.empty(1, L, 2, D, dtype=dtype, device="meta")
    view = View(node, ())
    turn = Rotation(Table(view, "once"), Table(view, "once"), 0, D, False, 1.0)
    site = Site(
        anchor=node,
        q=view,
        k=view,
        v=view,
        batch=(),
        kv_heads=(Digit("1", 1, 2),),
        group=(),
        query_length=L,
        key_length=S or L,
        head_dim=D,
        value_dim=D,
        scale=1.0,
        rotate_q=turn,
        rotate_k=turn,
        mask=Mask(band_hi=0),
        gradients=Gradients(view) if training else None,
        is_sdpa=True,
        sdpa_has_mask=True,
    )
    return replace(site, **changed)


@pytest.mark.parametrize(
    ("L", "D", "training"),
    [
        (4096, 128, True),
        (8192, 128, True),
        (1024, 64, True),
        (4096, 128, False),
        (1024, 64, False),
    ],
)
def test_fuses_where_it_was_measured_to_pay(L, D, training):
    assert decide.call_unprofitable(call(L, D, training=training), "cuda", (9, 0)) is None


NOT_MEASURED = {
    "too short": (call(2048), "head dim 128 and lengths 2048 and 2048 in training"),
    "one query": (call(1, S=4096, training=False), "lengths 1 and 4096 in inference"),
    "narrow heads in training": (call(512, 64), "accepted head dim 64 from length 1024"),
    "told that it is causal": (call(sdpa_has_mask=False), "given no mask tensor"),
    "wide heads": (call(D=256), "head dim 256"),
    "half precision": (call(dtype=torch.float16), "torch.float16, accepted torch.bfloat16"),
    "no rotation": (call(rotate_k=None), "without RoPE inside"),
    "no mask": (call(mask=Mask()), "a mask that is not causal or a band"),
    "padding": (
        call(mask=Mask(band_hi=0, keys=((call().q, True),))),
        "a mask that is not causal or a band",
    ),
}


@pytest.mark.parametrize("name", NOT_MEASURED)
def test_leaves_what_was_not_measured(name):
    site, reason = NOT_MEASURED[name]
    found = decide.call_unprofitable(site, "cuda", (9, 0))
    assert found is not None
    assert reason in found
    assert "enable(always=True)" in found


def test_leaves_other_devices():
    assert "compute capability (8, 0), accepted (9, 0)" in str(
        decide.call_unprofitable(call(), "cuda", (8, 0))
    )
    assert "fused attention, which ours is too" in str(
        decide.call_unprofitable(call(), "cpu", None)
    )

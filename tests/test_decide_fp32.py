"""Which attentions of fp32 on a GPU are fused unasked: where that was measured not to be slower."""

from dataclasses import replace

import pytest
import torch
from test_decide_calls import call

from inductor_gqa import decide
from inductor_gqa.site import Mask

CAUSAL, WINDOW, ALL_KEYS = Mask(band_hi=0), Mask(band_hi=0, band_lo=-100), Mask()


def site(D, mask, training, dtype=torch.float32):
    return call(
        2048, D, training=training, dtype=dtype, mask=mask, is_sdpa=False, sdpa_has_mask=False
    )


@pytest.mark.parametrize("mask", [CAUSAL, WINDOW, ALL_KEYS], ids=["causal", "window", "all"])
@pytest.mark.parametrize("D", [32, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_fp32_is_fused_where_it_was_measured_not_to_be_slower(precision, training, D, mask):
    has_band = mask is not ALL_KEYS
    widest = {
        ("ieee", True): 128 * has_band,
        ("tf32", True): 64 * has_band,
        ("ieee", False): 256 if has_band else 128,
        ("tf32", False): 256,
    }
    reason = decide.fp32_unprofitable(site(D, mask, training), precision)
    assert (reason is None) is (widest[precision, training] >= D)


def test_a_reason_says_what_was_seen_and_what_is_accepted():
    reason = decide.fp32_unprofitable(site(256, CAUSAL, True), "ieee")
    assert reason == (
        "head dim 256 in fp32 training with a causal mask or window at matmul precision "
        "'highest', accepted up to 128 (enable(always=True) fuses all)"
    )
    reason = decide.fp32_unprofitable(site(64, ALL_KEYS, True), "tf32")
    assert reason is not None
    assert "without a causal mask or window at matmul precision 'high', accepted none" in reason


def test_a_value_wider_than_its_key_counts():
    wide = replace(site(64, CAUSAL, True), value_dim=128)
    assert decide.fp32_unprofitable(wide, "ieee") is None
    assert decide.fp32_unprofitable(wide, "tf32") is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_not_asked(dtype):
    assert decide.fp32_unprofitable(site(256, ALL_KEYS, True, dtype), "ieee") is None


def test_on_the_cpu_nothing_is_asked():
    """The node of this site is on no GPU, and its size is below none of the limits."""
    on_cpu = site(256, ALL_KEYS, True)
    on_cpu.anchor.meta["val"] = torch.empty(1, 2048, 2, 256, device="cpu")
    assert decide.unprofitable(on_cpu, "ieee") is None

"""Warp-specialised kernels compile for sm_90 without spills and within shared memory."""

import dataclasses
import functools

import pytest
import torch
from kernels.gluon_reports import compiled, faults, records_of

from inductor_gqa.kernels.gluon_backward import plan_backward_sm90
from inductor_gqa.kernels.gluon_forward import Switches, plan_forward_sm90
from inductor_gqa.kernels.gluon_linear_forward import TILES, plan_linear_forward_sm90
from inductor_gqa.kernels.gluon_tiles import WHY_NOT
from inductor_gqa.kernels.gluon_weights import plan_weights_backward_sm90
from inductor_gqa.kernels.gluon_weights_forward import (
    ForwardConfig,
    plan_weights_forward_sm90,
    unusable,
)
from inductor_gqa.kernels.plan import Attention, Operand
from inductor_gqa.kernels.weights_backward import WeightsBackward

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
CASES = (
    "D64-bf16-causal-rope",
    "D64-fp16-window-padded",
    "D64-bf16-three",
    "D64-fp16-causal-rope-three",
    "D128-bf16-causal",
    "D128-bf16-offset-rope-pingpong",
    "D128-bf16-causal-rope",
    "D128-bf16-window-rope",
    "D128-bf16-rope-padded",
    "D128-bf16-causal-padded",
    "D128-fp16-causal-four",
    "D128-bf16-causal-rope-four",
    "D128-fp16-rope-four",
    "D256-bf16-causal",
    "D64-bf16-causal-backward",
    "D64-fp16-window-rope-backward-whole",
    "D64-bf16-backward-sweep-odd",
    "D64-fp16-causal-rope-backward-sweep-whole",
    "D128-bf16-backward-sweep-whole",
    "D128-fp16-causal-backward-sweep-odd",
    "D128-bf16-window-backward-sweep",
    "D128-bf16-window-rope-backward",
    "D128-bf16-window-rope-backward-whole",
    "D128-bf16-given-rope",
    "D128-bf16-given-rope-short",
    "D64-fp32-weights-rope",
    "D64-fp32-weights-odd-causal",
    "D64-fp32-weights-odd-rope-short",
    "linear-ieee-128x32",
    "linear-ieee-32x32",
    "linear-tf32-64x64",
    "linear-tf32-32x64",
)
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))


def attention(case):
    """B2-L1024-K2-R4 with the width, dtype and rules that the case names, and its switches."""
    width, dtype, *names = case.split("-")
    D, dtype = int(width[1:]), DTYPES[dtype]
    B, L, S, K, R = 2, 1024, 1001 if "odd" in names else 1024, 2, 4
    tensors = {
        "q": Operand.contiguous((B, L, K, R, D), dtype),
        "k": Operand.contiguous((B, S, K, D), dtype),
        "v": Operand.contiguous((B, S, K, D), dtype),
    }
    bands = {"causal": (None, 0), "offset": (None, 37), "window": (-200, 0)}
    lo, hi = next((band for name, band in bands.items() if name in names), (None, None))
    if "backward" in names:
        tensors["grad_out"] = tensors["out"] = tensors["q"]
        tensors["lse"] = Operand.contiguous((B, K, R, L), torch.float32)
    if "padded" in names:
        tensors["key_mask"] = Operand.contiguous((B, S), torch.bool)
    if "rope" in names:
        tables = dict.fromkeys(("cos_q", "sin_q"), Operand.contiguous((B, L, D), torch.float32))
        tensors |= tables
    groups, heads = 3 if "three" in names else 2, 4 if "four" in names else 1
    switches = Switches(True if "pingpong" in names else None, groups=groups, heads=heads)
    numbers = {"scale": D**-0.5, "band_lo": lo, "band_hi": hi, "capability": (9, 0)}
    numbers["precision"] = "tf32" if "weights" in names else "ieee"
    return Attention(tensors, **numbers), switches


def given(case):
    """A backward from given weights; a short one shares the sums of a group."""
    width, _, *names = case.split("-")
    D, L, H = int(width[1:]), 1000 if "short" in names else 2048, 32
    weights = Operand.contiguous((1, H, L, -(-L // 16) * 16), torch.bfloat16)
    tensors = {"weights": dataclasses.replace(weights, shape=(1, H, L, L))}
    tensors |= dict.fromkeys(
        ("grad_out", "q", "k", "v"), Operand.contiguous((1, L, H, D), torch.bfloat16)
    )
    if "rope" in names:
        table = Operand.contiguous((1, L, D), torch.float32)
        tensors |= dict.fromkeys(("cos_q", "sin_q", "cos_k", "sin_k"), table)
    return WeightsBackward(tensors, D**-0.5, 4, capability=(9, 0))


def layers(case):
    """Three layers of fp32 with one input."""
    _, precision, sizes = case.split("-")
    tiles = next(t for t in TILES[precision] if f"{t.BN}x{t.BK}" == sizes)
    operands = {f"w{i}": Operand.contiguous((256, 1024), torch.float32) for i in range(3)}
    x = Operand.contiguous((512, 1024), torch.float32)
    plan = plan_linear_forward_sm90(list(operands.values()), x, precision, tiles=tiles)
    return records_of(case, plan, operands | {"x": x})


def records(case):
    """The Gluon launches of a case."""
    if "linear" in case:
        return layers(case)
    if "given" in case:
        subject = given(case)
        plan = plan_weights_backward_sm90(subject)
        assert ("short" in case) == ("dk_part" in plan.allocate)
        return records_of(case, plan, subject.tensors)
    subject, switches = attention(case)
    if "weights" in case:
        # Two groups a program, or one: three, and all of "ieee", spill under some Tritons.
        groups = 1 if "short" in case else 2
        assert unusable(subject, torch.float32) is None
        plan = plan_weights_forward_sm90(subject, config=ForwardConfig(groups))
    elif "grad_out" in subject.tensors:
        # Whole groups a program, or as many programs as fill the device.
        split = 1 if "whole" in case else 4
        plan = plan_backward_sm90(subject, split=split, sweeps="sweep" in case)
        assert ("whole" in case) != ("parts" in plan.allocate)
    else:
        plan = plan_forward_sm90(subject, switches=switches)
    return records_of(case, plan, subject.tensors)


@functools.cache
def reports():
    return compiled(record for case in CASES for record in records(case))


@pytest.mark.slow
def test_gluon_kernels_compile_without_faults():
    assert {x["name"].split()[0] for x in reports()} == set(CASES)
    assert [fault for x in reports() for fault in faults(x)] == []

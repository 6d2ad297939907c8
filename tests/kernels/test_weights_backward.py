"""The weights-given backward against its definition in fp64, in the interpreter or on a GPU."""

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernels.compile_claims import assert_compiles

from inductor_gqa.kernels.plan import Operand
from inductor_gqa.kernels.weights_backward import (
    WeightsBackward,
    plan_weights_backward,
    weights_backward,
    weights_config,
)

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TABLES = ("cos_q", "sin_q", "cos_k", "sin_k")
FLOOR_IN_EPS = 8  # fp32: sums in another order


@dataclasses.dataclass
class Case:
    """Positional inputs [B, N, H, width], weights [B, H, L, S], keywords."""

    inputs: tuple[torch.Tensor, ...]
    keywords: dict[str, Any]


def turned_back(y, cos, sin, start, is_interleaved):
    """Adjoint of the rotation of y [B, N, H, D]: by autograd's definition, products with sin
    before lanes swap."""
    W = cos.shape[-1]
    cos, sin = cos[:, :, None], sin[:, :, None]
    part = y[..., start : start + W]
    shared = part * sin
    if is_interleaved:
        other = torch.stack((shared[..., 1::2], -shared[..., 0::2]), -1).flatten(-2)
    else:
        other = torch.cat((shared[..., W // 2 :], -shared[..., : W // 2]), -1)
    return torch.cat((y[..., :start], part * cos + other, y[..., start + W :]), -1)


def gradients(case, dtype):
    """dq, dk, dv step by step as eager takes them, in the computing dtype; delta and dS in fp32
    or wider."""
    grad_out, weights, q, k, v = (x.to(dtype) for x in case.inputs)
    get = {
        name: case.keywords[name].to(dtype) if name in case.keywords else None for name in TABLES
    }
    group, start = case.keywords["group"], case.keywords.get("rope_start", 0)
    is_interleaved = case.keywords.get("rope_interleaved", False)
    wide = torch.promote_types(dtype, torch.float32)
    dp = torch.einsum("blhe,bshe->bhls", grad_out, v)
    dv = torch.einsum("bhls,blhe->bshe", weights, grad_out)
    delta = (dp.to(wide) * weights.to(wide)).sum(-1, keepdim=True)
    ds = (weights.to(wide) * (dp.to(wide) - delta)).to(dtype) * case.keywords["scale"]
    dq = torch.einsum("bhls,bshd->blhd", ds, k)
    dk = torch.einsum("bhls,blhd->bshd", ds, q)
    dk, dv = (x.unflatten(2, (-1, group)).sum(3) for x in (dk, dv))
    if get["cos_q"] is not None:
        dq = turned_back(dq, get["cos_q"], get["sin_q"], start, is_interleaved)
    if get["cos_k"] is not None:
        dk = turned_back(dk, get["cos_k"], get["sin_k"], start, is_interleaved)
    return dq, dk, dv


def errors_of(case, ours):
    """One sentence for each result that is further off than twice eager, or a few ulps where
    eager is luckily close."""
    dtype = case.inputs[0].dtype
    eps = max(torch.finfo(dtype).eps, FLOOR_IN_EPS * torch.finfo(torch.float32).eps)
    wrong = []
    claims = zip(
        ("dq", "dk", "dv"),
        ours,
        gradients(case, torch.float64),
        gradients(case, dtype),
        strict=True,
    )
    for name, x, true, near in claims:
        if x.numel() == 0:
            continue
        if x.shape != true.shape:
            wrong.append(f"{name}: shape is {tuple(x.shape)}, accepted {tuple(true.shape)}")
            continue
        error = (x.double() - true).abs().nan_to_num(float("inf")).max().item()
        allowed = (near.double() - true).abs().max().item()
        floor = eps * true.abs().max().item()
        if not error <= max(2 * allowed, floor):
            wrong.append(f"{name}: error is {error:.3g}, eager {allowed:.3g}, floor {floor:.3g}")
    return wrong


def make_case(
    device, *, B=1, H=4, group=4, L=45, S=45, D=32, E=32, dtype="fp32", layout="BHLD", W=None,
    start=0, is_interleaved=False, has_flat_tables=True, seed=0,
):  # fmt: skip
    """Weights are plain noise: neither positive nor summing to one. Columns of cos and sin are
    all independent."""
    make = torch.Generator().manual_seed(seed)

    def noise(*shape):
        return torch.randn(*shape, generator=make).to(DTYPES[dtype]).to(device)

    def heads(N, width):
        if layout == "BHLD":
            return noise(B, H, N, width).transpose(1, 2)
        if layout == "wide rows":  # a slice of something larger, poisoned around
            x = torch.full((B, N, H, width + 8), float("nan"), dtype=DTYPES[dtype], device=device)
            x[..., :width] = noise(B, N, H, width)
            return x[..., :width]
        return noise(B, N, H, width)

    weights = noise(B, H, L, S)
    if layout == "one row for all":
        weights = noise(B, H, 1, S).expand(B, H, L, S)
    if layout == "wide rows":
        weights = torch.full((B, H, L, S + 3), float("nan"), dtype=DTYPES[dtype], device=device)
        weights[..., :S] = noise(B, H, L, S)
        weights = weights[..., :S]
    keywords = {"scale": 0.3, "group": group}
    if W is not None:
        for name, N in (("cos_q", L), ("sin_q", L), ("cos_k", S), ("sin_k", S)):
            keywords[name] = noise(1, N, W).expand(B, N, W) if has_flat_tables else noise(B, N, W)
        keywords |= {"rope_start": start, "rope_interleaved": is_interleaved}
    return Case((heads(L, E), weights, heads(L, D), heads(S, D), heads(S, E)), keywords)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("L", [1, 32, 45])
def test_gradients_equal_the_definition(device, dtype, L):
    case = make_case(device, H=3, group=3, L=L, S=L, dtype=dtype, W=32, seed=L)
    assert errors_of(case, weights_backward(*case.inputs, **case.keywords)) == []


@pytest.mark.parametrize("group", [1, 3, 4])
def test_gradients_of_k_and_v_sum_over_the_group(device, group):
    case = make_case(device, H=2 * group, group=group, dtype="bf16", W=32)
    assert errors_of(case, weights_backward(*case.inputs, **case.keywords)) == []


@pytest.mark.parametrize("layout", ["BLHD", "BHLD", "one row for all", "wide rows"])
@pytest.mark.parametrize("stores_ds", [True, False])
@pytest.mark.parametrize("is_turned", [True, False])
def test_strides_are_free_whichever_way_ds_is_made(device, layout, stores_ds, is_turned):
    case = make_case(device, L=37, S=52, E=16, layout=layout, dtype="bf16", W=32)
    capability = torch.cuda.get_device_capability() if device == "cuda" else None
    names = ("grad_out", "weights", "q", "k", "v")
    operands = {name: Operand.of(x) for name, x in zip(names, case.inputs, strict=True)}
    config = weights_config(WeightsBackward(operands, 1.0, 4, capability=capability))
    config = dataclasses.replace(config, ds_bytes=2**40 if stores_ds else 0, is_turned=is_turned)
    assert errors_of(case, weights_backward(*case.inputs, **case.keywords, config=config)) == []


@pytest.mark.parametrize(
    ("W", "start", "is_interleaved"),
    [(32, 0, True), (16, 8, False), (8, 24, True), (None, 0, False)],
)
def test_turns_back_just_the_lanes_that_were_turned(device, W, start, is_interleaved):
    case = make_case(
        device, B=2, D=40, W=W, start=start, is_interleaved=is_interleaved, has_flat_tables=False
    )
    assert errors_of(case, weights_backward(*case.inputs, **case.keywords)) == []


@pytest.mark.parametrize("L", [32, 45])
def test_packed_gradients_are_columns_of_one_buffer(device, L):
    case = make_case(device, B=2, L=L, S=L, dtype="bf16", W=32)
    dq, dk, dv = weights_backward(*case.inputs, **case.keywords, packed=True)
    assert errors_of(case, (dq, dk, dv)) == []
    rows = torch.as_strided(dq, (2, L, 6 * 32), (L * 6 * 32, 6 * 32, 1), dq.storage_offset())
    assert torch.equal(rows, torch.cat([x.flatten(2) for x in (dq, dk, dv)], -1))
    assert (
        dk.untyped_storage().data_ptr()
        == dv.untyped_storage().data_ptr()
        == dq.untyped_storage().data_ptr()
    )


@pytest.mark.parametrize(
    "needs", [(True, False, False), (False, True, False), (False, False, True), (False, True, True)]
)
def test_leaves_out_what_is_not_needed(device, needs):
    case = make_case(device, dtype="bf16", W=32)
    ours = weights_backward(*case.inputs, **case.keywords, needs=needs)
    assert errors_of(case, ours) == []
    assert [x.numel() > 0 for x in ours] == list(needs)


@given(data=st.data())
def test_equals_the_definition_at_any_size(data, device):
    group = data.draw(st.sampled_from([1, 2, 3]))
    D, E = data.draw(st.sampled_from([16, 24, 32])), data.draw(st.sampled_from([16, 40]))
    sizes = {
        "B": data.draw(st.integers(1, 2)),
        "H": group * data.draw(st.integers(1, 2)),
        "group": group,
    }
    sizes |= {
        "L": data.draw(st.integers(1, 70)),
        "S": data.draw(st.integers(1, 70)),
        "D": D,
        "E": E,
    }
    case = make_case(
        device,
        **sizes,
        dtype=data.draw(st.sampled_from(list(DTYPES))),
        W=data.draw(st.sampled_from([None, 16])),
    )
    assert errors_of(case, weights_backward(*case.inputs, **case.keywords)) == []


def test_copies_weights_whose_rows_are_not_whole_vectors():
    def slots(S):
        operands = {"weights": Operand.contiguous((1, 4, S, S), torch.bfloat16)}
        operands |= dict.fromkeys(
            ("grad_out", "q", "k", "v"), Operand.contiguous((1, S, 4, 64), torch.bfloat16)
        )
        return plan_weights_backward(WeightsBackward(operands, 1.0, 4, capability=(9, 0))).allocate

    assert slots(691)["copy"].strides == (4 * 691 * 704, 691 * 704, 704, 1)
    assert "copy" not in slots(1024)


@pytest.mark.parametrize("sm", [80, 90, 100])
def test_kernels_fit_registers_and_shared_memory(sm):
    assert_compiles(
        sm, ["backward-D128-bf16-L1024-rope-again", "backward-D128-bf16-L691-rope-stored-doubles"]
    )

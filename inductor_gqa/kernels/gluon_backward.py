"""Attention backward on sm_90: when the warp-specialised kernels may run, what to launch, launcher.

Knows a band of keys and nothing else. q and k come rotated. Where cos and sin are given, dq and dk
are turned back by them on their way out and are those of the unrotated q and k.
"""

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from inductor_gqa.kernels import rules
from inductor_gqa.kernels.gluon_backward_keys import keys_sm90_kernel
from inductor_gqa.kernels.gluon_backward_queries import queries_sm90_kernel
from inductor_gqa.kernels.gluon_ends import BM, gather_kernel
from inductor_gqa.kernels.gluon_forward import (
    LARGEST,
    box,
    device_facts,
    execute_sm90,
    usable,
    why_not_copied,
)
from inductor_gqa.kernels.plan import LOG2E, Attention, Launch, Operand, Plan, named_strides

ROWS = BM.value
SLOTS = 4
GATHER_ROWS = 16
# What a program costs beside its tiles, and what the sum over the shares of a group costs, in
# tiles of 64 queries (measured on one H200).
ENDS, GATHER = 4, 16
PAD_TENSORS = ("out_ptr", "grad_out_ptr", "lse_ptr", "delta_padded_ptr", "lse_padded_ptr")


def usable_backward(attention: Attention) -> str | None:
    """Why the kernels cannot compute these gradients, or None where they can."""
    reason = usable(attention)
    if reason is not None:
        return reason
    if "key_mask" in attention.tensors:
        return "key_mask is given, accepted none"
    for name in ("q", "k"):
        reason = _why_not_turned_back(attention, name)
        if reason is not None:
            return reason
    if attention.rules & rules.EMPTY_ROWS.value:
        return f"fill is {attention.fill} and rows may see no key, accepted -inf"
    if attention.sizes[5] > 128:
        return f"head dim is {attention.sizes[5]}, accepted 64 or 128"
    return why_not_copied("grad_out", attention.tensors["grad_out"])


def _why_not_turned_back(attention: Attention, name: str) -> str | None:
    """Why the kernels cannot apply the adjoint of a rotation of halves, or None."""
    D = attention.sizes[5]
    for table in (f"cos_{name}", f"sin_{name}"):
        x = attention.tensors.get(table)
        if x is None:
            continue
        if x.shape[-1] != D or attention.rope_start or attention.rope_interleaved:
            return f"{x.shape[-1]} of {D} lanes are turned, accepted halves over all lanes"
        if x.strides[-1] != 1 or x.strides[1] * ROWS >= LARGEST:
            return f"{table}: strides are {x.strides}, accepted 1 at last and short rows"
    return None


def split_of(attention: Attention, multiprocessors: int) -> int:
    """Programs that share a group's sums: what ends first. One that is alone on its multiprocessor
    works for the heads of the group one after another."""
    B, L, S, K, R, *_ = attention.sizes
    tiles, steps = -(-S // (2 * ROWS)) * B * K, -(-L // ROWS)

    def ends(split: int) -> float:
        rounds = -(-tiles * split // multiprocessors)
        return rounds * (steps * R / split + ENDS) + (GATHER if split > 1 else 0)

    return min((n for n in (1, 2, 4, 8) if R % n == 0), key=ends)


@triton.jit
def pad_kernel(
    out_ptr, grad_out_ptr, lse_ptr, delta_padded_ptr, lse_padded_ptr,
    stride_grad_out_b, stride_grad_out_l, stride_grad_out_k, stride_grad_out_r, stride_grad_out_e,
    L, K: tl.constexpr, R: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(dO * O) and LSE of a head with ROWS numbers in front and behind, which make P
    and dS zero there. Grid: heads x tiles, the padding included."""
    bh = tl.program_id(0)
    b = bh // (K * R)
    k = bh % (K * R) // R
    r = bh % R
    rows = (tl.program_id(1) - 1) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, E)
    inside = (rows >= 0) & (rows < L)
    out_rows = ((b.to(tl.int64) * L + rows) * K + k) * R + r
    at_grad_out = b.to(tl.int64) * stride_grad_out_b + k.to(tl.int64) * stride_grad_out_k
    at_grad_out += r.to(tl.int64) * stride_grad_out_r + rows.to(tl.int64) * stride_grad_out_l
    mask = inside[:, None] & (cols >= 0)[None, :]
    out = tl.load(out_ptr + out_rows[:, None] * E + cols[None, :], mask=mask, other=0.0)
    at = grad_out_ptr + at_grad_out[:, None] + cols[None, :] * stride_grad_out_e
    grad_out = tl.load(at, mask=mask, other=0.0)
    delta = tl.sum(out.to(tl.float32) * grad_out.to(tl.float32), 1)
    lse = tl.load(lse_ptr + bh.to(tl.int64) * L + rows, mask=inside, other=float("inf"))
    padded = bh.to(tl.int64) * tl.num_programs(1) * ROWS + rows + ROWS
    tl.store(delta_padded_ptr + padded, delta)
    tl.store(lse_padded_ptr + padded, lse)


def plan_backward_sm90(
    attention: Attention, multiprocessors: int = 132, split: int | None = None
) -> Plan:
    """Launches for a `usable_backward` attention. Results: dq, dk, dv. `split`: programs that share
    a group, None: those that end first."""
    tensors = attention.tensors
    q, k, v, grad_out = (tensors[name] for name in ("q", "k", "v", "grad_out"))
    B, L, S, K, R, D, E = attention.sizes
    split = split or split_of(attention, multiprocessors)
    row_tiles, heads = -(-L // ROWS) + 2, B * K * R
    padded = Operand.contiguous((heads, row_tiles * ROWS), torch.float32)
    results = {
        "dq": Operand.contiguous((B, L, K, R, D), q.dtype),
        "dk": Operand.contiguous((B, S, K, D), k.dtype),
        "dv": Operand.contiguous((B, S, K, E), v.dtype),
    }
    scratch = {"lse_padded": padded, "delta_padded": padded}
    key_tiles = -(-S // (2 * ROWS))
    if split > 1:
        shares = (2 * B * K * split, key_tiles * 2 * ROWS, D)  # of dK, then of dV
        scratch["parts"] = Operand.contiguous(shares, torch.float32)
    has_lo, has_hi = attention.band_lo is not None, attention.band_hi is not None
    numbers: dict[str, Any] = {
        "B": B,
        "L": L,
        "S": S,
        "band_lo": attention.band_lo or 0,
        "band_hi": attention.band_hi or 0,
        "unit": attention.scale * LOG2E,
        "scale": attention.scale,
        "K": K,
        "R": R,
        "D": D,
        "SLOTS": SLOTS,
        "HAS_LO": has_lo,
        "HAS_HI": has_hi,
    }
    boxes = {
        "q_desc": box("q", q, ROWS),
        "g_desc": box("grad_out", grad_out, ROWS),
        "k_desc": box("k", k, ROWS),
        "v_desc": box("v", v, ROWS),
    }
    boxes |= {f"{name}_desc": box(name, x, ROWS) for name, x in results.items()}
    slots = {"lse_ptr": "lse_padded", "delta_ptr": "delta_padded"}
    slots["parts_ptr"] = "parts" if split > 1 else "delta_padded"

    def launch(kernel: Any, tiles: int, side: str, **more: Any) -> Launch:
        tables, strides = _tables(tensors, side)
        named = numbers | strides | more | {"n_tiles": tiles, "ROPE": f"cos_{side}" in tensors}
        names = kernel.arg_names
        return Launch(
            kernel,
            (min(tiles, multiprocessors),),
            {name: slot for name, slot in (slots | tables).items() if name in names},
            {name: named[name] for name in names if name in named},
            4,
            1,
            {name: boxes[name] for name in names if name in boxes},
        )

    is_masked = has_lo or has_hi or S % ROWS != 0
    launches = [
        _pad_launch(attention, row_tiles),
        launch(keys_sm90_kernel, key_tiles * B * K * split, "k", SPLIT=split),
        launch(queries_sm90_kernel, -(-L // (2 * ROWS)) * heads, "q", BN=ROWS, MASK=is_masked),
    ]
    if split > 1:
        launches.append(_gather_launch(attention, split, key_tiles * 2 * ROWS))
    return Plan(results | scratch, tuple(launches), ("dq", "dk", "dv"))


def _pad_launch(attention: Attention, row_tiles: int) -> Launch:
    _, L, _, K, R, _, E = attention.sizes
    grad_out = attention.tensors["grad_out"]
    return Launch(
        pad_kernel,
        (attention.sizes[0] * K * R, row_tiles),
        {name: name.removesuffix("_ptr") for name in PAD_TENSORS},
        named_strides("grad_out", grad_out, "blkre")
        | {"L": L, "K": K, "R": R, "E": E, "ROWS": ROWS},
        num_warps=4,
        num_stages=1,
    )


def _tables(tensors: Mapping[str, Operand], side: str) -> tuple[dict[str, str], dict[str, int]]:
    """Slots and strides of a rotation's tables; what is absent is never read."""
    cos, sin = tensors.get(f"cos_{side}"), tensors.get(f"sin_{side}")
    slots = {f"{table}_ptr": f"{table}_{side}" if cos else side for table in ("cos", "sin")}
    return slots, named_strides("cos", cos, "bnw") | named_strides("sin", sin, "bnw")


def _gather_launch(attention: Attention, split: int, padded: int) -> Launch:
    B, _, S, K, _, D, _ = attention.sizes
    tables, numbers = _tables(attention.tensors, "k")
    numbers |= {
        f"stride_{x}_{dim}": n for x in ("dk", "dv") for dim, n in (("b", S * K * D), ("s", K * D))
    }
    numbers |= {"first_dk": 0, "first_dv": 0, "S": S, "padded": padded, "groups": B * K}
    named: dict[str, Any] = numbers | {"SPLIT": split, "scale": attention.scale, "K": K, "D": D}
    named |= {"W": D if "cos_k" in attention.tensors else 0, "ROWS": GATHER_ROWS}
    slots = {"parts_ptr": "parts", "dk_ptr": "dk", "dv_ptr": "dv"}
    return Launch(gather_kernel, (-(-S // GATHER_ROWS) * B * K * 2,), slots | tables, named, 4, 1)


def attention_backward_sm90(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    tables: Mapping[str, torch.Tensor] | None = None,
    split: int | None = None,
    **numbers: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq_BLKRD, dk_BSKD, dv_BSKE, contiguous; `numbers` are scale, band_lo and band_hi, `tables`
    any of cos_q, sin_q [B, L, D], cos_k and sin_k [B, S, D].

    Raises ValueError with the reason where `usable_backward` gives one.
    """
    tensors = {"q": q, "k": k, "v": v, "grad_out": grad_out, "out": out, "lse": lse}
    tensors |= tables or {}
    capability, multiprocessors = device_facts(q.device) if q.is_cuda else (None, 0)
    operands = {name: Operand.of(x) for name, x in tensors.items()}
    attention = Attention(operands, capability=capability, **numbers)
    reason = usable_backward(attention)
    if reason is not None:
        raise ValueError(f"attention_backward_sm90: {reason}")
    dq, dk, dv = execute_sm90(plan_backward_sm90(attention, multiprocessors, split), tensors)
    return dq, dk, dv

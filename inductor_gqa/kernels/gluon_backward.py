"""Attention backward on sm_90: when the warp-specialised kernels may run, what to launch, launcher.

Knows a band of keys and nothing else; q and k come rotated, and dq and dk are those of the rotated
q and k: `choice` turns them before and after.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from inductor_gqa.kernels import rules
from inductor_gqa.kernels.gluon_backward_kernels import BM, keys_sm90_kernel, queries_sm90_kernel
from inductor_gqa.kernels.gluon_forward import (
    box,
    device_facts,
    execute_sm90,
    usable,
    why_not_copied,
)
from inductor_gqa.kernels.plan import LOG2E, Attention, Launch, Operand, Plan, named_strides

ROWS = BM.value
SLOTS = 4
PAD_TENSORS = ("out_ptr", "grad_out_ptr", "lse_ptr", "delta_padded_ptr", "lse_padded_ptr")


def usable_backward(attention: Attention) -> str | None:
    """Why the kernels cannot compute these gradients, or None where they can."""
    reason = usable(attention)
    if reason is not None:
        return reason
    for name in ("key_mask", "cos_q", "cos_k"):
        if name in attention.tensors:
            return f"{name} is given, accepted none"
    if attention.rules & rules.EMPTY_ROWS.value:
        return f"fill is {attention.fill} and rows may see no key, accepted -inf"
    if attention.sizes[5] > 128:
        return f"head dim is {attention.sizes[5]}, accepted 64 or 128"
    return why_not_copied("grad_out", attention.tensors["grad_out"])


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


def plan_backward_sm90(attention: Attention, multiprocessors: int = 132) -> Plan:
    """Launches for a `usable_backward` attention. Results: dq, dk, dv."""
    tensors = attention.tensors
    q, k, v, grad_out = (tensors[name] for name in ("q", "k", "v", "grad_out"))
    B, L, S, K, R, D, E = attention.sizes
    row_tiles, heads = -(-L // ROWS) + 2, B * K * R
    padded = Operand.contiguous((heads, row_tiles * ROWS), torch.float32)
    allocate = {
        "dq": Operand.contiguous((B, L, K, R, D), q.dtype),
        "dk": Operand.contiguous((B, S, K, D), k.dtype),
        "dv": Operand.contiguous((B, S, K, E), v.dtype),
        "lse_padded": padded,
        "delta_padded": padded,
    }
    has_lo, has_hi = attention.band_lo is not None, attention.band_hi is not None
    scalars: dict[str, Any] = {
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
    pad = Launch(
        pad_kernel,
        (heads, row_tiles),
        {name: name.removesuffix("_ptr") for name in PAD_TENSORS},
        named_strides("grad_out", grad_out, "blkre")
        | {"L": L, "K": K, "R": R, "E": E, "ROWS": ROWS},
        num_warps=4,
        num_stages=1,
    )
    per_row = {"lse_ptr": "lse_padded", "delta_ptr": "delta_padded"}
    boxes = {
        "q_desc": box("q", q, ROWS),
        "g_desc": box("grad_out", grad_out, ROWS),
        "k_desc": box("k", k, ROWS),
        "v_desc": box("v", v, ROWS),
    }
    results = {f"{name}_desc": box(name, allocate[name], ROWS) for name in ("dk", "dv")}
    n_tiles = -(-S // (2 * ROWS)) * B * K
    keys = Launch(
        keys_sm90_kernel,
        (min(n_tiles, multiprocessors),),
        per_row,
        scalars | {"n_tiles": n_tiles},
        4,
        1,
        boxes | results,
    )
    n_tiles = -(-L // (2 * ROWS)) * heads
    is_masked = has_lo or has_hi or S % ROWS != 0
    queries = Launch(
        queries_sm90_kernel,
        (min(n_tiles, multiprocessors),),
        per_row,
        scalars | {"n_tiles": n_tiles, "BN": ROWS, "MASK": is_masked},
        4,
        1,
        boxes | {"dq_desc": box("dq", allocate["dq"], ROWS)},
    )
    return Plan(allocate, (pad, keys, queries), ("dq", "dk", "dv"))


def attention_backward_sm90(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    **numbers: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq_BLKRD, dk_BSKD, dv_BSKE, contiguous; `numbers` are scale, band_lo and band_hi.

    Raises ValueError with the reason where `usable_backward` gives one.
    """
    tensors = {"q": q, "k": k, "v": v, "grad_out": grad_out, "out": out, "lse": lse}
    capability, multiprocessors = device_facts(q.device) if q.is_cuda else (None, 0)
    operands = {name: Operand.of(x) for name, x in tensors.items()}
    attention = Attention(operands, capability=capability, **numbers)
    reason = usable_backward(attention)
    if reason is not None:
        raise ValueError(f"attention_backward_sm90: {reason}")
    dq, dk, dv = execute_sm90(plan_backward_sm90(attention, multiprocessors), tensors)
    return dq, dk, dv

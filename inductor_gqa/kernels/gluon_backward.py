"""Attention backward on sm_90: when the warp-specialised kernels may run, what to launch, launcher.

Launches: the rotation of q and k, LSE and delta with padding, then dK and dV, dQ, or all three in
one sweep that adds up dQ. dQ is turned back by its kernel where it knows the rotation, or where its
sums are rounded; dK where shares of it are summed, or by a launch of its own.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from inductor_gqa.kernels import rules
from inductor_gqa.kernels.gluon_backward_keys import keys_sm90_kernel
from inductor_gqa.kernels.gluon_backward_queries import queries_sm90_kernel
from inductor_gqa.kernels.gluon_backward_sweep import PIECES, sweep_sm90_kernel
from inductor_gqa.kernels.gluon_ends import BM, finish_kernel, gather_kernel
from inductor_gqa.kernels.gluon_forward import (
    LARGEST,
    box,
    device_facts,
    execute_sm90,
    usable,
    why_not_copied,
)
from inductor_gqa.kernels.gluon_rows import pad_launch
from inductor_gqa.kernels.plan import (
    LOG2E,
    Attention,
    Descriptor,
    Launch,
    Operand,
    Plan,
    named_strides,
)
from inductor_gqa.kernels.rotate import plan_adjoint, plan_rotation

ROWS = BM.value
SLOTS = 4
GATHER_ROWS = 16
SMALLEST_SCALE = 1e-20  # LSE over scale must stay finite
# Rows of a share of dK and dV that are written and read in the time of one tile of 64 queries
# (measured on one H200; the same at D = 64 and 128, where both cost half).
SHARED_ROWS = 2500


def usable_backward(attention: Attention) -> str | None:
    """Why the kernels cannot compute these gradients, or None where they can."""
    scratch, _, names = plan_rotation(attention)
    bare = {name: x for name, x in attention.tensors.items() if name[:4] not in ("cos_", "sin_")}
    bare |= {name: scratch[names[name]] for name in ("q", "k") if names[name] in scratch}
    reason = usable(dataclasses.replace(attention, tensors=bare))
    if reason is not None:
        return reason
    if "key_mask" in bare:
        return "key_mask is given, accepted none"
    if attention.rules & rules.EMPTY_ROWS.value:
        return f"fill is {attention.fill} and rows may see no key, accepted -inf"
    if attention.scale < SMALLEST_SCALE:
        return f"scale is {attention.scale}, accepted {SMALLEST_SCALE} or more"
    if attention.sizes[5] > 128:
        return f"head dim is {attention.sizes[5]}, accepted 64 or 128"
    return why_not_copied("grad_out", bare["grad_out"])


def _turns_queries_back(attention: Attention) -> bool:
    """Whether the kernel that sums dQ applies the rotation's adjoint: halves over all lanes."""
    D = attention.sizes[5]
    tables = [attention.tensors.get(name) for name in ("cos_q", "sin_q")]
    return all(
        x is not None
        and x.shape[-1] == D
        and x.strides[-1] == 1
        and x.strides[1] * ROWS < LARGEST
        and not attention.rope_start
        and not attention.rope_interleaved
        for x in tables
    )


def split_of(attention: Attention, multiprocessors: int) -> int:
    """Programs that share a group's sums: what ends first. One that is alone on its multiprocessor
    works for the heads of a group one after another; under a causal mask the first keys are seen by
    twice as many queries as keys are on average, and shares even that out."""
    B, L, S, K, R, *_ = attention.sizes
    lo, hi = attention.band_lo, attention.band_hi
    tiles, steps = -(-S // (2 * ROWS)) * B * K, -(-L // ROWS)
    if lo is not None and hi is not None:
        steps = min(steps, max(hi - lo, 0) // ROWS + 3)
    is_uneven = (lo is None) != (hi is None)

    def ends(split: int) -> float:
        longest, programs = steps * R / split, tiles * split
        if is_uneven:
            time = longest * max(1.0, programs / multiprocessors / 2)
        else:
            time = longest * -(-programs // multiprocessors)
        return time + (B * S * K * split / SHARED_ROWS if split > 1 else 0)

    return min((n for n in (1, 2, 4, 8) if R % n == 0), key=ends)


def plan_backward_sm90(
    attention: Attention,
    multiprocessors: int = 132,
    split: int | None = None,
    sweeps: bool = False,
) -> Plan:
    """Launches for a `usable_backward` attention. Results: dq, dk, dv. `split`: programs that share
    a group, None: those that end first. `sweeps`: all gradients in one launch, in which dQ is
    summed in fp32 in an order that varies."""
    tensors = attention.tensors
    B, L, S, K, R, D, _ = attention.sizes
    split = split or split_of(attention, multiprocessors)
    scratch, rotation, names = plan_rotation(attention)
    operands = {**tensors, **scratch}
    outputs = {
        "dq": Operand.contiguous((B, L, K, R, D), tensors["q"].dtype),
        "dk": Operand.contiguous((B, S, K, D), tensors["k"].dtype),
        "dv": Operand.contiguous((B, S, K, D), tensors["v"].dtype),
    }
    row_tiles, keys = -(-L // ROWS) + 2, -(-S // (2 * ROWS)) * 2 * ROWS
    scratch = scratch | {
        "rows": Operand.contiguous((B * K * R, 2, row_tiles * ROWS), torch.float32)
    }
    if split > 1:
        scratch["parts"] = Operand.contiguous((B * K * split, 2, keys, D), torch.float32)
    # Gradients of rotated tensors that a launch of its own turns back.
    turns_queries = _turns_queries_back(attention)
    left = {
        name: f"d{name}_turned"
        for name, is_done in (("q", turns_queries or sweeps), ("k", split > 1))
        if f"cos_{name}" in tensors and not is_done
    }
    blocks = 0
    if sweeps:
        # Of 64 queries and lanes 4096 numbers, in the order of the registers that sum them.
        blocks = -(-L // (ROWS * 128 // D)) * 2
        scratch["sums"] = Operand.contiguous((B * K * R * blocks * 16, 256), torch.float32)
    scratch |= {slot: outputs[f"d{name}"] for name, slot in left.items()}

    boxes = {
        "q_desc": box(names["q"], operands[names["q"]], ROWS),
        "k_desc": box(names["k"], operands[names["k"]], ROWS),
        "v_desc": box("v", tensors["v"], ROWS),
        "g_desc": box("grad_out", tensors["grad_out"], ROWS),
    }
    for name, x in outputs.items():
        boxes[f"{name}_desc"] = box(left.get(name[1], name), x, ROWS)
    if sweeps:
        queries, rows = ROWS * 128 // D, scratch["rows"]
        boxes |= {
            "q_desc": box(names["q"], operands[names["q"]], queries),
            "g_desc": box("grad_out", tensors["grad_out"], queries),
            "rows_desc": Descriptor("rows", rows.shape, rows.strides, (1, 2, queries)),
            "dq_desc": Descriptor(
                "sums", scratch["sums"].shape, scratch["sums"].strides, (16 // PIECES.value, 256)
            ),
        }
    slots, numbers = _tables(tensors, "q")
    slots |= {"rows_ptr": "rows", "parts_ptr": "parts" if split > 1 else "rows"}
    has_lo, has_hi = attention.band_lo is not None, attention.band_hi is not None
    numbers |= {"B": B, "L": L, "S": S, "K": K, "R": R, "D": D}
    numbers |= {"band_lo": attention.band_lo or 0, "band_hi": attention.band_hi or 0}
    numbers |= {"unit": attention.scale * LOG2E, "scale": attention.scale, "SLOTS": SLOTS}
    numbers |= {"HAS_LO": has_lo, "HAS_HI": has_hi, "SPLIT": split, "BN": ROWS}
    numbers |= {"MASK": has_lo or has_hi or S % ROWS != 0, "ROPE": turns_queries}

    def launch(kernel: Any, tiles: int) -> Launch:
        parameters: list[str] = kernel.arg_names
        return Launch(
            kernel,
            (min(tiles, multiprocessors),),
            {name: slot for name, slot in slots.items() if name in parameters},
            {name: x for name, x in numbers.items() if name in parameters},
            4,
            1,
            {name: x for name, x in boxes.items() if name in parameters},
            is_early=True,
        )

    key_programs = keys // (2 * ROWS) * B * K * split
    if sweeps:
        # Tiles of keys in pairs of equal work, where a program has more than one.
        pair = 2 if has_lo != has_hi and key_programs > multiprocessors else 1
        numbers |= {"SLOTS": 2, "PAIR": pair, "EDGE": S % (2 * ROWS * pair) != 0}
        sums = (launch(sweep_sm90_kernel, key_programs), _finish_launch(attention))
    else:
        sums = (
            launch(keys_sm90_kernel, key_programs),
            launch(queries_sm90_kernel, -(-L // (2 * ROWS)) * B * K * R),
        )
    launches = (*rotation, pad_launch(attention, row_tiles, blocks * 64 // D), *sums)
    if split > 1:
        launches += (_gather_launch(attention, split, keys),)
    if left:
        launches += (plan_adjoint(attention, left, {name: f"d{name}" for name in left}),)
    return Plan(scratch | outputs, launches, ("dq", "dk", "dv"))


def _tables(tensors: Mapping[str, Operand], side: str) -> tuple[dict[str, str], dict[str, Any]]:
    """Slots and strides of a rotation's tables; what is absent is never read."""
    cos, sin = tensors.get(f"cos_{side}"), tensors.get(f"sin_{side}")
    slots = {f"{table}_ptr": f"{table}_{side}" if cos else side for table in ("cos", "sin")}
    return slots, named_strides("cos", cos, "bnw") | named_strides("sin", sin, "bnw")


def _finish_launch(attention: Attention) -> Launch:
    B, L, _, K, R, D, _ = attention.sizes
    slots, named = _tables(attention.tensors, "q")
    slots |= {"sums_ptr": "sums", "dq_ptr": "dq"}
    cos = attention.tensors.get("cos_q")
    named |= {"L": L, "scale": attention.scale, "H": K * R, "D": D}
    named |= {"START": attention.rope_start, "W": cos.shape[-1] if cos else 0}
    named |= {"INTERLEAVED": attention.rope_interleaved}
    return Launch(finish_kernel, (-(-L // 16) * B * K * R,), slots, named, 4, 1)


def _gather_launch(attention: Attention, split: int, padded: int) -> Launch:
    B, _, S, K, _, D, _ = attention.sizes
    slots, named = _tables(attention.tensors, "k")
    slots |= {"parts_ptr": "parts", "dk_ptr": "dk", "dv_ptr": "dv"}
    cos = attention.tensors.get("cos_k")
    named |= {"S": S, "padded": padded, "groups": B * K, "scale": attention.scale, "K": K, "D": D}
    named |= {"SPLIT": split, "START": attention.rope_start, "W": cos.shape[-1] if cos else 0}
    named |= {"INTERLEAVED": attention.rope_interleaved, "ROWS": GATHER_ROWS}
    return Launch(gather_kernel, (-(-S // GATHER_ROWS) * B * K * 2,), slots, named, 4, 1)


def attention_backward_sm90(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    cos_q: torch.Tensor | None = None,
    sin_q: torch.Tensor | None = None,
    cos_k: torch.Tensor | None = None,
    sin_k: torch.Tensor | None = None,
    split: int | None = None,
    sweeps: bool | None = None,
    **numbers: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq_BLKRD, dk_BSKD, dv_BSKE, contiguous; `numbers` are those of
    `backward.attention_backward`. `sweeps`: all gradients in one sweep, None: where
    `torch.use_deterministic_algorithms` does not forbid that dQ differs in its last bits.

    Raises ValueError with the reason where `usable_backward` gives one.
    """
    tensors = {"q": q, "k": k, "v": v, "grad_out": grad_out, "out": out, "lse": lse}
    tables = {"cos_q": cos_q, "sin_q": sin_q, "cos_k": cos_k, "sin_k": sin_k}
    tensors |= {name: x for name, x in tables.items() if x is not None}
    capability, multiprocessors = device_facts(q.device) if q.is_cuda else (None, 0)
    operands = {name: Operand.of(x) for name, x in tensors.items()}
    attention = Attention(operands, capability=capability, **numbers)
    reason = usable_backward(attention)
    if reason is not None:
        raise ValueError(f"attention_backward_sm90: {reason}")
    if sweeps is None:
        sweeps = not torch.are_deterministic_algorithms_enabled()
    dq, dk, dv = execute_sm90(
        plan_backward_sm90(attention, multiprocessors, split, sweeps), tensors
    )
    return dq, dk, dv

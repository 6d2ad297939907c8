"""Backward from given weights on sm_90: when the warp-specialised kernels may run, what to launch,
launcher.

No gradient needs atomics. Weights whose rows the copy engine cannot read are copied first.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from inductor_gqa.kernels.gluon_forward import (
    LARGEST,
    box,
    device_facts,
    execute_sm90,
    why_not_copied,
)
from inductor_gqa.kernels.gluon_tiles import WHY_NOT
from inductor_gqa.kernels.gluon_weights_keys import (
    gather_kernel,
    pitch_kernel,
    weights_keys_sm90_kernel,
)
from inductor_gqa.kernels.gluon_weights_queries import weights_queries_sm90_kernel
from inductor_gqa.kernels.gluon_weights_tiles import BM
from inductor_gqa.kernels.plan import Descriptor, Launch, Operand, Plan, named_strides
from inductor_gqa.kernels.weights_backward import (
    WeightsBackward,
    gradients_in,
    gradients_of,
    outputs_of,
)

TILE_ROWS = 2 * BM.value
GATHER_ROWS = 32
PITCH_TILE = (16, 128)


@dataclasses.dataclass(frozen=True)
class Sm90Config:
    """Streamed tiles in flight, held buffers, programs that share a group's sum (0: as many as fill
    the device best)."""

    slots: int = 3
    held: int = 2
    split: int = 0
    is_centred: bool = True


def unusable(subject: WeightsBackward, needs: tuple[bool, bool, bool]) -> str | None:
    """Why the kernels cannot compute these gradients, or None where they can."""
    tensors = subject.tensors
    B, L, S, _, D, E = subject.sizes
    if WHY_NOT is not None:
        return WHY_NOT
    if subject.capability != (9, 0):
        return f"capability is {subject.capability}, accepted (9, 0)"
    if not all(needs):
        return f"needed are {needs}, accepted all three gradients"
    names = ("grad_out", "weights", "q", "k", "v")
    dtypes = {tensors[name].dtype for name in names}
    if dtypes != {torch.bfloat16}:
        return f"dtypes are {sorted(map(str, dtypes))}, accepted bfloat16"
    if D != E or D not in (64, 128):
        return f"head dim is {D} with values of {E}, accepted equal and 64 or 128"
    if min(B, L, S) == 0 or max(L, S) >= LARGEST:
        return f"lengths are {L} and {S} in {B} batches, accepted 1 to 2**30 each"
    for name in ("grad_out", "q", "k", "v"):
        reason = why_not_copied(name, tensors[name])
        if reason is not None:
            return reason
    for name in ("cos_q", "sin_q", "cos_k", "sin_k"):
        table = tensors.get(name)
        if table is not None and (
            table.shape[-1] != D or subject.rope_start or subject.rope_interleaved
        ):
            return f"{table.shape[-1]} of {D} lanes are turned, accepted halves over all lanes"
        if table is not None and (table.strides[-1] != 1 or table.strides[1] * BM.value >= LARGEST):
            return f"{name}: strides are {table.strides}, accepted 1 at last and short rows"
    return None


def split_of(subject: WeightsBackward, multiprocessors: int) -> int:
    """Programs that share the sum over a group: what leaves the fewest idle in the last round. A
    share costs a way to memory and back, so that it must be worth more than a quarter."""
    B, _, S, H, *_ = subject.sizes
    tiles = -(-S // TILE_ROWS) * B * H // subject.group
    best, least = 1, -(-tiles // multiprocessors)
    for split in (2, 4):
        if subject.group % split == 0:
            time = -(-tiles * split // multiprocessors) / split
            if time < 0.75 * least:
                best, least = split, time
    return best


def plan_weights_backward_sm90(
    subject: WeightsBackward,
    multiprocessors: int = 132,
    is_packed: bool = False,
    config: Sm90Config | None = None,
) -> Plan:
    """Launches for a subject that is not `unusable`. Results: dq, dk, dv, or the packed buffer."""
    tensors = subject.tensors
    B, L, S, H, D, _ = subject.sizes
    K = H // subject.group
    config = config or Sm90Config(slots=3 if D == 128 else 4)
    split = config.split or split_of(subject, multiprocessors)
    rows, keys = (-(-n // TILE_ROWS) * TILE_ROWS for n in (L, S))
    outputs, places = outputs_of(subject, (True, True, True), is_packed)
    scratch = {"delta": Operand.contiguous((B * H, rows), torch.float32)}
    launches: list[Launch] = []
    weights = "weights"
    if why_not_copied("weights", tensors["weights"]) is not None:
        weights = "copy"
        pitch = -(-S // 16) * 16
        scratch["copy"] = Operand.contiguous((B, H, L, pitch), tensors["weights"].dtype)
        launches.append(_pitch_launch(tensors["weights"], pitch))
    if split > 1:
        shares = Operand.contiguous((B * K * split, keys, D), torch.float32)
        scratch |= {"dk_part": shares, "dv_part": shares}
    operands = {**tensors, **scratch}

    P = operands[weights]
    strides = [BM.value if n == 1 else x for n, x in zip(P.shape[:-1], P.strides, strict=False)]
    boxes = {
        "p_desc": Descriptor(weights, (B, H, L, S), (*strides, 1), (1, 1, BM.value, BM.value)),
        "g_desc": box("grad_out", tensors["grad_out"], BM.value),
    }
    boxes |= {f"{name}_desc": box(name, tensors[name], BM.value) for name in ("q", "k", "v")}
    firsts = {}
    for name, (slot, x, first) in gradients_of(subject, is_packed).items():
        boxes[f"{name}_desc"] = box(slot, x, BM.value)
        firsts[name] = first
    shared: dict[str, Any] = {"L": L, "S": S, "scale": float(subject.scale), "H": H, "D": D}
    shared |= {"SLOTS": config.slots, "HELD": config.held}
    tiles = rows // TILE_ROWS * B * H
    launches.append(
        _launch(
            weights_queries_sm90_kernel,
            min(tiles, multiprocessors),
            {"delta_ptr": "delta"},
            shared | {"n_tiles": tiles, "first": firsts["dq"], "CENTRED": config.is_centred},
            boxes,
            tensors,
            "q",
        )
    )
    tiles = keys // TILE_ROWS * B * K * split
    heads = subject.group // split
    some = "dk_part" if split > 1 else "delta"
    launches.append(
        _launch(
            weights_keys_sm90_kernel,
            min(tiles, multiprocessors),
            {
                "delta_ptr": "delta",
                "dk_part_ptr": some,
                "dv_part_ptr": "dv_part" if split > 1 else some,
            },
            shared
            | {"n_tiles": tiles, "HEADS": heads, "SPLIT": split}
            | {"first_dk": firsts["dk"], "first_dv": firsts["dv"]},
            boxes,
            tensors,
            "k",
        )
    )
    if split > 1:
        launches.append(_gather_launch(subject, places, is_packed, split, keys))
    results = ("packed",) if is_packed else ("dq", "dk", "dv")
    return Plan(outputs | scratch, tuple(launches), results)


def _tables(tensors: Mapping[str, Operand], side: str) -> tuple[dict[str, str], dict[str, int]]:
    """Slots and strides of a rotation's tables; what is absent is never read."""
    cos, sin = tensors.get(f"cos_{side}"), tensors.get(f"sin_{side}")
    slots = {f"{table}_ptr": f"{table}_{side}" if cos else side for table in ("cos", "sin")}
    return slots, named_strides("cos", cos, "bnw") | named_strides("sin", sin, "bnw")


def _launch(
    kernel: Any,
    programs: int,
    slots: dict[str, str],
    scalars: dict[str, Any],
    boxes: dict[str, Descriptor],
    tensors: Mapping[str, Operand],
    side: str,
) -> Launch:
    tables, strides = _tables(tensors, side)
    numbers = scalars | strides | {"ROPE": f"cos_{side}" in tensors}
    names = kernel.arg_names
    return Launch(
        kernel,
        (programs,),
        {name: slot for name, slot in (slots | tables).items() if name in names},
        {name: numbers[name] for name in names if name in numbers},
        4,
        1,
        {name: boxes[name] for name in names if name in boxes},
        is_early=True,
    )


def _pitch_launch(weights: Operand, pitch: int) -> Launch:
    B, H, L, S = weights.shape
    rows, cols = PITCH_TILE
    numbers: dict[str, Any] = named_strides("weights", weights, "bhls")
    numbers |= {"L": L, "S": S, "pitch": pitch, "H": H, "ROWS": rows, "COLS": cols}
    slots = {"weights_ptr": "weights", "copy_ptr": "copy"}
    return Launch(pitch_kernel, (-(-L // rows) * B * H,), slots, numbers, 4, 1)


def _gather_launch(
    subject: WeightsBackward, places: dict[str, int], is_packed: bool, split: int, padded: int
) -> Launch:
    B, _, S, H, D, _ = subject.sizes
    K = H // subject.group
    tables, numbers = _tables(subject.tensors, "k")
    numbers |= {name: x for name, x in places.items() if name in gather_kernel.arg_names}
    numbers |= {"S": S, "padded": padded, "groups": B * K, "SPLIT": split}
    numbers |= {"scale": float(subject.scale), "K": K}
    numbers |= {"D": D, "W": D if "cos_k" in subject.tensors else 0, "ROWS": GATHER_ROWS}
    slots = {"dk_part_ptr": "dk_part", "dv_part_ptr": "dv_part"}
    slots |= {f"{x}_ptr": "packed" if is_packed else x for x in ("dk", "dv")}
    grid = (-(-S // GATHER_ROWS) * B * K * 2,)
    return Launch(gather_kernel, grid, slots | tables, numbers, 4, 1)


def weights_backward_sm90(
    subject: WeightsBackward,
    tensors: Mapping[str, torch.Tensor],
    is_packed: bool = False,
    config: Sm90Config | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk, dv as from `weights_backward`. Raises ValueError with the reason where `unusable`
    gives one."""
    reason = unusable(subject, (True, True, True))
    if reason is not None:
        raise ValueError(f"weights_backward_sm90: {reason}")
    _, multiprocessors = device_facts(tensors["q"].device)
    plan = plan_weights_backward_sm90(subject, multiprocessors, is_packed, config)
    return gradients_in(subject, execute_sm90(plan, tensors))

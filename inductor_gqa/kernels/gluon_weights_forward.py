"""The forward that returns its weights, fp32, on sm_90: when the warp-specialised kernel may run,
what to launch, launcher."""

import dataclasses
from typing import Any

import torch

from inductor_gqa.kernels import rules
from inductor_gqa.kernels.gluon_forward import LARGEST, execute_sm90
from inductor_gqa.kernels.gluon_tiles import WHY_NOT
from inductor_gqa.kernels.gluon_weights_forward_kernel import weights_forward_sm90_kernel
from inductor_gqa.kernels.gluon_weights_forward_tiles import BM, D
from inductor_gqa.kernels.plan import (
    LOG2E,
    Attention,
    Descriptor,
    Launch,
    Operand,
    Plan,
    named_strides,
)
from inductor_gqa.kernels.weights_prepare import preparation

KNOWN = rules.BAND_LO.value | rules.BAND_HI.value | rules.FILL_ADDS.value
SMALLER = 2**25  # 64 rows of P span less than 2**31 elements
# What a tile takes by the groups that share it, in the time of one group's (one H200).
COST = {1: 1.0, 2: 1.45, 3: 1.85}


@dataclasses.dataclass(frozen=True)
class ForwardConfig:
    """Groups of four warps, and streamed tiles in flight; 0 for what is expected to be fastest."""

    groups: int = 0
    slots: int = 0


def unusable(attention: Attention, weights_dtype: torch.dtype) -> str | None:
    """Why the kernel cannot compute this forward, or None where it can."""
    tensors = attention.tensors
    B, L, S, _, _, width, value_width = attention.sizes
    if WHY_NOT is not None:
        return WHY_NOT
    if attention.capability != (9, 0):
        return f"capability is {attention.capability}, accepted (9, 0)"
    dtypes = {weights_dtype, *(tensors[name].dtype for name in ("q", "k", "v"))}
    if dtypes != {torch.float32}:
        return f"dtypes are {sorted(map(str, dtypes))}, accepted float32"
    if (width, value_width) != (D.value, D.value):
        return f"head dim is {width} with values of {value_width}, accepted {D.value} for both"
    if attention.rules & ~KNOWN:
        return f"rules are {attention.rules:b}, accepted bands and a positive scale"
    far = max(L, S, abs(attention.band_lo or 0), abs(attention.band_hi or 0))
    if far >= SMALLER or min(B, L, S) == 0:
        return f"lengths are {L} and {S}, the largest band {far}, accepted below 2**25"
    return None


def turns_queries(attention: Attention) -> bool:
    """Whether the groups rotate q themselves: they know halves over all lanes, and tables that lie
    alike."""
    q, cos, sin = (attention.tensors.get(name) for name in ("q", "cos_q", "sin_q"))
    return (
        q is not None
        and cos is not None
        and sin is not None
        and cos.shape[-1] == D.value
        and cos.strides == sin.strides
        and max(q.strides[1], cos.strides[1]) * BM.value < LARGEST
        and attention.rope_start == 0
        and not attention.rope_interleaved
    )


def groups_of(attention: Attention, multiprocessors: int) -> int:
    """Groups that a program has, by which the last program is expected to end first. Three of them
    have no registers for operands in two parts, nor for addresses of P."""
    B, L, S, K, R, *_ = attention.sizes
    is_narrow = attention.dot_precision != "tf32" or S % 4 != 0

    def ends(groups: int) -> float:
        tiles = -(-L // (BM.value * groups)) * B * K * R
        return -(-tiles // multiprocessors) * COST[groups]

    return min((1, 2) if is_narrow else (1, 2, 3), key=ends)


def plan_weights_forward_sm90(
    attention: Attention, multiprocessors: int = 132, config: ForwardConfig = ForwardConfig()
) -> Plan:
    """Launches for an attention that is not `unusable`: preparation, attention. Results: out,
    weights, lse."""
    tensors = attention.tensors
    B, L, S, K, R, *_ = attention.sizes
    parts = 1 if attention.dot_precision == "tf32" else 2
    is_inside = turns_queries(attention)
    wants = {"q": "cos_q" in tensors and not is_inside, "k": True, "v": True}
    scratch, prepared = preparation(attention, wants, True, parts, True, True)
    name = "q_prepared" if wants["q"] else "q"
    q, v = {**tensors, **scratch}[name], scratch["v_prepared"]
    outputs = {
        "out": Operand.contiguous((B, L, K, R, D.value), torch.float32),
        "weights": Operand.contiguous((B, K, R, L, S), torch.float32),
        "lse": Operand.contiguous((B, K, R, L), torch.float32),
    }
    groups = config.groups or groups_of(attention, multiprocessors)
    slots = config.slots or {1: 8, 2: 4}[parts]
    n_tiles = -(-L // (BM.value * groups)) * B * K * R
    scalars: dict[str, Any] = named_strides("q", q, "blkrd")
    scalars |= named_strides("table", tensors["cos_q"] if is_inside else None, "blw")
    scalars |= {"n_tiles": n_tiles, "B": B, "L": L, "S": S}
    scalars |= {"band_lo": attention.band_lo or 0, "band_hi": attention.band_hi or 0}
    scalars |= {"unit": attention.scale * LOG2E, "K": K, "R": R, "GROUPS": groups}
    scalars |= {"PARTS": parts, "SLOTS": slots, "ROPE": is_inside, "P_TMA": S % 4 == 0}
    scalars |= {"HAS_LO": attention.band_lo is not None, "HAS_HI": attention.band_hi is not None}
    pointers = {"q_ptr": name, "out_ptr": "out", "weights_ptr": "weights", "lse_ptr": "lse"}
    pointers |= {f"{x}_ptr": f"{x}_q" if is_inside else name for x in ("cos", "sin")}
    boxes = {
        "k_desc": _box("k_prepared", scratch["k_prepared"], (0, 1, 2, 3, 4)),
        "v_desc": _box("v_prepared", v, (0, 1, 3, 2, 4)),
    }
    # The copy engine writes rows of whole 16 bytes; else the parameter is not used.
    weights = Operand.contiguous((1, B * K * R, L, 1, S), torch.float32)
    boxes["p_desc"] = boxes["k_desc"]
    if S % 4 == 0:
        boxes["p_desc"] = _box("weights", weights, (0, 1, 2, 3, 4))
    grid = (min(n_tiles, multiprocessors),)
    launch = Launch(weights_forward_sm90_kernel, grid, pointers, scalars, 4, 1, boxes, True)
    return Plan(scratch | outputs, (prepared, launch), ("out", "weights", "lse"))


def _box(slot: str, x: Operand, order: tuple[int, ...]) -> Descriptor:
    """Tiles of [rows, 64] of one part, batch and head: the tensor with its dimensions reordered."""
    shape, strides = (tuple(numbers[i] for i in order) for numbers in (x.shape, x.strides))
    return Descriptor(slot, shape, strides, (1, 1, BM.value, 1, D.value))


def weights_forward_sm90(
    attention: Attention,
    tensors: dict[str, torch.Tensor],
    multiprocessors: int,
    config: ForwardConfig = ForwardConfig(),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """out, weights and lse as from `weights_forward`. Raises ValueError with the reason where
    `unusable` gives one."""
    reason = unusable(attention, torch.float32)
    if reason is not None:
        raise ValueError(f"weights_forward_sm90: {reason}")
    plan = plan_weights_forward_sm90(attention, multiprocessors, config)
    out, weights, lse = execute_sm90(plan, tensors)
    return out, weights, lse

"""Attention forward on sm_90: when the warp-specialised kernel may run, what to launch, launcher.

`usable` and `plan_forward_sm90` are pure functions of shapes, strides, dtypes, arguments and
capability, as in `plan`. The kernel itself knows -inf for hidden keys only; where a huge finite
fill makes rows without a visible key average V, a second launch writes those rows.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import torch

from inductor_gqa.kernels import rules
from inductor_gqa.kernels.gluon_empty_rows import filling_launch
from inductor_gqa.kernels.gluon_forward_kernel import BM, forward_sm90_kernel
from inductor_gqa.kernels.gluon_tiles import WHY_NOT, gl
from inductor_gqa.kernels.plan import (
    LOG2E,
    Attention,
    Descriptor,
    Launch,
    Operand,
    Plan,
    named_strides,
)
from inductor_gqa.kernels.rotate import plan_rotation

TILE_ROWS = 2 * BM.value
LARGEST = 2**30  # sums of a position and a band stay within 32 bits
KNOWN = (
    rules.BAND_LO.value
    | rules.BAND_HI.value
    | rules.KEY_MASK.value
    | rules.EMPTY_ROWS.value
    | rules.FILL_ADDS.value
)
UNKNOWN = {
    "scale": (rules.SCALED, "accepted only positive, without softcap, bias and finite fill"),
    "softcap": (rules.SOFTCAP, "accepted 0"),
    "bias": (rules.BIAS, "accepted none"),
    "mask": (rules.MASK, "accepted none"),
    "fill": (rules.EXACT, "accepted -inf or at most -1e30"),
    "keep": (rules.KEEP, "accepted none"),
    "sink": (rules.SINK, "accepted none"),
}


@dataclasses.dataclass(frozen=True)
class Switches:
    """Choices that change speed, not results. None leaves it to the measured default.

    `has_pingpong`: a token decides which group may issue products. `is_persistent`: one program per
    multiprocessor walks over the tiles. `rotates_q`: q is turned by the kernel, not by a launch.
    `groups`: of warps, 2 or at D = 64 also 3, whose registers leave none to turn q. `heads`: query
    heads of a tile, a power of two that divides those of a key head.
    """

    has_pingpong: bool | None = None
    is_persistent: bool = True
    rotates_q: bool = True
    groups: int | None = None
    heads: int | None = None


def keys_per_tile(D: int) -> tuple[int, int]:
    """Keys in a tile and tiles in flight: what fills 227 KB of shared memory beside Q and O."""
    return {64: (128, 4), 128: (128, 2), 256: (64, 2)}[D]


def usable(attention: Attention, switches: Switches = Switches()) -> str | None:
    """Why the kernel cannot compute this attention, or None where it can."""
    tensors = attention.tensors
    _, L, S, _, _, D, E = attention.sizes
    dtypes = {tensors[name].dtype for name in ("q", "k", "v")}
    if WHY_NOT is not None:
        return WHY_NOT
    if attention.capability != (9, 0):
        return f"capability is {attention.capability}, accepted (9, 0)"
    if len(dtypes) > 1 or not dtypes <= {torch.bfloat16, torch.float16}:
        return f"dtypes are {sorted(map(str, dtypes))}, accepted one of bfloat16, float16"
    if D != E or D not in (64, 128, 256):
        return f"head dim is {D} with values of {E}, accepted equal and 64, 128 or 256"
    if D == 256 and (attention.band_lo is not None or "key_mask" in tensors):
        return "band_lo or key_mask is given, accepted with head dims up to 128"
    for name, (rule, accepted) in UNKNOWN.items():
        if attention.rules & rule.value:
            value = getattr(attention, name, "given")
            return f"{name} is {value}, {accepted}"
    far = max(L, S, abs(attention.band_lo or 0), abs(attention.band_hi or 0))
    if far >= LARGEST:
        return f"largest length or band is {far}, accepted below 2**30"
    scratch = plan_rotation(_without_inner_rotation(attention, switches))[0]
    for name in ("q", "k", "v"):
        if f"{name}_rotated" not in scratch:
            reason = why_not_copied(name, tensors[name])
            if reason is not None:
                return reason
    return None


def why_not_copied(name: str, x: Operand) -> str | None:
    """Why the copy engine cannot read a tensor of any rank up to five, a box of rows at a time."""
    if not x.is_aligned:
        return f"{name}: first byte is not on a multiple of 16"
    if x.strides[-1] != 1:
        return f"{name}: last stride is {x.strides[-1]}, accepted 1"
    for size, stride in zip(x.shape[:-1], x.strides[:-1], strict=True):
        if size > 1 and (stride <= 0 or stride * x.dtype.itemsize % 16):
            return f"{name}: strides are {x.strides}, accepted positive multiples of 16 bytes"
    return None


def heads_of(attention: Attention, turns_q: bool) -> int:
    """Query heads in a tile: four of them share the tables of a position, and under a causal mask
    leave less of a tile hidden. By what is faster at D = 128 with 32/8 heads on one H200."""
    _, L, _, _, R, D, _ = attention.sizes
    is_causal = attention.band_hi is not None and attention.band_lo is None
    if D != 128 or R % 4 or "key_mask" in attention.tensors:  # a mask's words take its registers
        return 1
    longest = 1024 if is_causal else 512
    pays = longest >= L if turns_q else is_causal and L >= 2048
    return 4 if pays else 1


def groups_of(attention: Attention, multiprocessors: int) -> int:
    """Groups of warps with which the last program is expected to end first.

    At D = 64 three hide more of each other's softmax. They pay for rows that a tile has too many,
    for tiles on the edge of a band, and for a launch that turns q. Times are in keys that two
    groups visit (fitted to one H200, 16k tokens, S from 1024 to 16k).
    """
    B, L, S, K, R, D, _ = attention.sizes
    tensors, band_hi = attention.tensors, attention.band_hi
    if D != 64 or attention.band_lo is not None or "key_mask" in tensors:
        return 2
    keys = S if band_hi is None else min(S, L // 2 + band_hi + 1)  # that the middle row sees
    if keys < 1024:
        return 2

    def ends(groups: int, cost: float, edge: int, turning: int) -> float:
        rounds = -(-(-(-L // (groups * BM.value)) * B * K * R) // multiprocessors)
        beside = edge * (band_hi is not None)
        return rounds * (cost * (keys + beside) + turning * ("cos_q" in tensors))

    return 3 if ends(3, 1.235, 800, 180) < ends(2, 1.0, 250, 0) else 2


def _turns_q_inside(attention: Attention, switches: Switches) -> bool:
    """The kernel knows the half layout over all lanes, tables that lie alike, and D up to 128."""
    D = attention.sizes[5]
    q, cos, sin = (attention.tensors.get(name) for name in ("q", "cos_q", "sin_q"))
    return (
        switches.rotates_q
        and D <= 128
        and switches.groups != 3
        and cos is not None
        and cos.shape[-1] == D
        and cos.strides == sin.strides
        and cos.strides[1] * TILE_ROWS < LARGEST
        and why_not_copied("q", q) is None
        and attention.rope_start == 0
        and not attention.rope_interleaved
    )


def _without_inner_rotation(attention: Attention, switches: Switches) -> Attention:
    """What is left for the rotation's launch."""
    if not _turns_q_inside(attention, switches):
        return attention
    left = {name: x for name, x in attention.tensors.items() if name not in ("cos_q", "sin_q")}
    return dataclasses.replace(attention, tensors=left)


def box(slot: str, x: Operand, rows: int, heads: int = 1) -> Descriptor:
    """Rows of one head, or of `heads` of the last dimension of heads. The stride of a dimension of
    size one may be anything and is replaced."""
    D = x.shape[-1]
    strides = [D if n == 1 else stride for n, stride in zip(x.shape[:-1], x.strides, strict=False)]
    ones = (1,) * (len(x.shape) - 4)
    return Descriptor(slot, x.shape, (*strides, 1), (1, rows, *ones, heads, D))


def ends_aligned(band_hi: int | None, heads: int, rows: int, BN: int) -> bool:
    """Whether key tiles end on multiples of BN, because that leaves the band's edge in the first
    one that a tile of several heads and `rows` positions visits."""
    return heads > 1 and band_hi is not None and band_hi >= 0 and not (BN % rows or band_hi % rows)


def checks_lower_edge(
    band_lo: int | None, band_hi: int | None, rows: int, BN: int, is_aligned: bool
) -> bool:
    """Whether some scores are of keys below a band or before the first key, where tiles of BN keys
    begin that end with the band of a tile's last row, or on multiples of BN."""
    if band_lo is not None:
        return True
    if band_hi is None or is_aligned:
        return False
    return band_hi % BN != 0 or band_hi < 0 or rows % BN != 0


def plan_forward_sm90(
    attention: Attention, multiprocessors: int = 132, switches: Switches = Switches()
) -> Plan:
    """Launches for a `usable` attention: rotation, attention, empty rows. Results: out, lse."""
    tensors = attention.tensors
    B, L, S, K, R, D, E = attention.sizes
    BN, slots = keys_per_tile(D)
    groups = switches.groups or groups_of(attention, multiprocessors)
    switches = dataclasses.replace(switches, groups=groups)
    turns_q = _turns_q_inside(attention, switches)
    heads = switches.heads or heads_of(attention, turns_q)
    positions = groups * BM.value // heads
    scratch, launches, names = plan_rotation(_without_inner_rotation(attention, switches))
    operands = {**tensors, **scratch}
    q, k, v = operands[names["q"]], operands[names["k"]], tensors["v"]
    outputs = {
        "out": Operand.contiguous((B, L, K, R, E), v.dtype),
        "lse": Operand.contiguous((B, K, R, L), torch.float32),
    }
    bands = attention.band_lo, attention.band_hi
    has_lo, has_hi = (band is not None for band in bands)
    is_aligned = ends_aligned(attention.band_hi, heads, positions, BN)
    band_hi = attention.band_hi or 0
    has_key_mask = "key_mask" in tensors
    n_tiles = -(-L // (groups * BM.value)) * B * K * R
    scalars: dict[str, Any] = named_strides("table", tensors["cos_q"] if turns_q else None, "blw")
    scalars |= named_strides("key_mask", tensors.get("key_mask"), "bs")
    scalars |= {
        "n_tiles": n_tiles,
        "B": B,
        "L": L,
        "S": S,
        "band_lo": attention.band_lo or 0,
        "band_hi": band_hi,
        "unit": attention.scale * LOG2E,
        "K": K,
        "R": R,
        "D": D,
        "BN": BN,
        "SLOTS": slots,
        "HAS_LO": has_lo,
        "HAS_HI": has_hi,
        "CHECK_LO": checks_lower_edge(*bands, positions, BN, is_aligned),
        "KEY_MASK": has_key_mask,
        "MASK_FIRST": has_lo or has_hi or has_key_mask or S % BN != 0,
        "ROPE": turns_q,
        # D = 64 gains 4 to 8 % from the token, D = 128 nothing (H200).
        "PINGPONG": D == 64 if switches.has_pingpong is None else switches.has_pingpong,
        "Q_SLOTS": 1 if D == 256 else 2,
        "GROUPS": groups,
        "HEADS": heads,
        "ALIGNED": is_aligned,
    }
    pointers = {
        "lse_ptr": "lse",
        "cos_ptr": "cos_q" if turns_q else names["q"],
        "sin_ptr": "sin_q" if turns_q else names["q"],
        "key_mask_ptr": "key_mask" if has_key_mask else names["q"],
    }
    boxes = {
        "q_desc": box(names["q"], q, BM.value // heads, heads),
        "k_desc": box(names["k"], k, BN),
        "v_desc": box("v", v, BN),
        "o_desc": box("out", outputs["out"], BM.value // heads, heads),
    }
    grid = min(n_tiles, multiprocessors) if switches.is_persistent else n_tiles
    launches += (Launch(forward_sm90_kernel, (grid,), pointers, scalars, 4, 1, boxes, True),)
    if attention.rules & rules.EMPTY_ROWS.value:
        launches += (filling_launch(attention),)
    return Plan(scratch | outputs, launches, ("out", "lse"))


@functools.cache
def shared_layout(block: tuple[int, ...], dtype: torch.dtype) -> Any:
    """How a box lies in shared memory: rows of 128 bytes, swizzled."""
    element = {
        torch.bfloat16: gl.bfloat16,
        torch.float16: gl.float16,
        torch.float32: gl.float32,
    }[dtype]
    return gl.NVMMASharedLayout.get_default_for(list(block), element)


def execute_sm90(plan: Plan, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """`plan.execute` for descriptors that carry a layout."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    device = tensors["q"].device
    slots = dict(tensors)
    for name, operand in plan.allocate.items():
        slots[name] = torch.empty(operand.shape, dtype=operand.dtype, device=device)
    for launch in plan.launches:
        arguments: dict[str, Any] = {name: slots[slot] for name, slot in launch.tensors.items()}
        for name, box in launch.descriptors.items():
            x = slots[box.slot]
            layout = shared_layout(box.block, x.dtype)
            arguments[name] = TensorDescriptor(
                x, list(box.shape), list(box.strides), list(box.block), layout
            )
        launch.kernel[launch.grid](**arguments, **launch.scalars, **launch.options)
    return tuple(slots[name] for name in plan.results)


@functools.cache
def device_facts(device: torch.device) -> tuple[tuple[int, int], int]:
    """Capability and number of multiprocessors."""
    facts = torch.cuda.get_device_properties(device)
    return (facts.major, facts.minor), facts.multi_processor_count


def attention_forward_sm90(
    q_BLKRD: torch.Tensor,
    k_BSKD: torch.Tensor,
    v_BSKE: torch.Tensor,
    *,
    cos_q: torch.Tensor | None = None,
    sin_q: torch.Tensor | None = None,
    cos_k: torch.Tensor | None = None,
    sin_k: torch.Tensor | None = None,
    key_mask: torch.Tensor | None = None,
    switches: Switches = Switches(),
    **numbers: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out_BLKRE in v's dtype and lse_BKRL (fp32, base 2), both contiguous.

    `numbers` are those of `forward.attention_forward`: scale, band_lo, band_hi, fill and so on.
    Raises ValueError with the reason where `usable` gives one.
    """
    named = {"q": q_BLKRD, "k": k_BSKD, "v": v_BSKE, "key_mask": key_mask}
    named |= {"cos_q": cos_q, "sin_q": sin_q, "cos_k": cos_k, "sin_k": sin_k}
    tensors = {name: x for name, x in named.items() if x is not None}
    capability, multiprocessors = None, 0
    if q_BLKRD.is_cuda:
        capability, multiprocessors = device_facts(q_BLKRD.device)
    operands = {name: Operand.of(x) for name, x in tensors.items()}
    attention = Attention(operands, capability=capability, **numbers)
    reason = usable(attention, switches)
    if reason is not None:
        raise ValueError(f"attention_forward_sm90: {reason}")
    out, lse = execute_sm90(plan_forward_sm90(attention, multiprocessors, switches), tensors)
    return out, lse

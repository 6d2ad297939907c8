"""Attention of few queries and many keys: what to launch, and the launcher.

A rotation of k if there are tables for it, or a copy of what cannot be streamed; a launch over
splits of the keys; one that combines them. A cache holds K rotated and in rows that can be
streamed, so the first is rare; it costs as much as reading K twice more.
"""

import dataclasses
import functools
from typing import Any

import torch

from inductor_gqa.kernels.configs import Tiles
from inductor_gqa.kernels.decode_kernel import combine_kernel, split_kernel
from inductor_gqa.kernels.decode_tiles import row_tiles, splits_of, tiles_of
from inductor_gqa.kernels.forward import collect
from inductor_gqa.kernels.plan import (
    Attention,
    Launch,
    Operand,
    Plan,
    can_describe,
    described,
    execute,
    named_strides,
    score_arguments,
    to_copy,
)
from inductor_gqa.kernels.rotate import plan_rotation

TENSORS = ("cos_q", "sin_q", "cos_k", "sin_k", "bias", "mask", "key_mask", "keep", "sink")
PARTS = 16  # splits that one step of the combination holds in registers


@dataclasses.dataclass(frozen=True)
class Choices:
    """What changes speed, not results. None leaves it to `decode_tiles`; descriptors are used where
    the strides allow it."""

    tiles: Tiles | None = None
    splits: int | None = None
    use_descriptors: bool = False


def plan_decode(
    attention: Attention, multiprocessors: int = 132, choices: Choices = Choices()
) -> Plan:
    """Launches for `attention`, whatever its lengths. Results: out, lse."""
    tensors = attention.tensors
    B, L, _, K, R, _, E = attention.sizes
    only_k = {name: x for name, x in tensors.items() if name not in ("cos_q", "sin_q")}
    copied = to_copy(tensors, ("k", "v"), choices.use_descriptors)
    scratch, launches, names = plan_rotation(dataclasses.replace(attention, tensors=only_k), copied)
    k, v = ({**tensors, **scratch}[names[name]] for name in ("k", "v"))
    tiles = choices.tiles or tiles_of(attention)
    splits = choices.splits or splits_of(attention, tiles, multiprocessors)
    use_descriptors = choices.use_descriptors and can_describe(k, v)

    sources, scalars = score_arguments(attention)
    scalars |= named_strides("q", tensors["q"], "blkrd") | named_strides("k", k, "bskd")
    scalars |= named_strides("v", v, "bske") | named_strides("sink", tensors.get("sink"), "kr")
    for name in ("cos_q", "sin_q"):
        scalars |= named_strides(name, tensors.get(name), "blw")
    scalars |= {
        "splits": splits,
        "START": attention.rope_start,
        "W": tensors["cos_q"].shape[-1] if "cos_q" in tensors else 0,
        "INTERLEAVED": attention.rope_interleaved,
        "BM": tiles.BM,
        "BN": tiles.BN,
        "PARTS": PARTS,
        "TMA": use_descriptors,
    }
    if attention.dot_precision == "ieee":
        # Takes less registers and time to take apart, of which reading leaves none to spare.
        scalars["PRECISION"] = "tf32x3"
    sources |= {"q_ptr": "q", "acc_ptr": "acc", "m_ptr": "m", "total_ptr": "total"}
    sources |= {"v_ptr": names["v"]}
    sources |= {f"{name}_ptr": name if name in tensors else "q" for name in TENSORS}
    sources |= {"out_ptr": "out", "lse_ptr": "lse"}
    streams = {"k_src": (names["k"], k), "v_src": (names["v"], v)}
    boxes = described(streams, tiles.BN) if use_descriptors else {}
    if not use_descriptors:
        sources |= {name: slot for name, (slot, _) in streams.items()}
    launches += (
        Launch(
            split_kernel,
            (splits * row_tiles(attention, tiles),),
            *_taken(split_kernel, sources, scalars),
            tiles.num_warps,
            tiles.num_stages,
            boxes,
        ),
        Launch(
            combine_kernel,
            (B * K * R * L,),
            *_taken(combine_kernel, sources, scalars),
            num_warps=2,
            num_stages=1,
        ),
    )
    rows = (B, K, L, R, splits)
    scratch |= {
        "acc": Operand.contiguous((*rows, E), torch.float32),
        "m": Operand.contiguous(rows, torch.float32),
        "total": Operand.contiguous(rows, torch.float32),
        "out": Operand.contiguous((B, L, K, R, E), v.dtype),
        "lse": Operand.contiguous((B, K, R, L), torch.float32),
    }
    return Plan(scratch, launches, ("out", "lse"))


def _taken(
    kernel: Any, sources: dict[str, str], scalars: dict[str, Any]
) -> tuple[dict[str, str], dict[str, Any]]:
    """What the kernel has parameters for."""
    taken = set(kernel.arg_names)
    return (
        {name: slot for name, slot in sources.items() if name in taken},
        {name: value for name, value in scalars.items() if name in taken},
    )


@functools.cache
def multiprocessors_of(device: torch.device) -> int:
    """Of a GPU; any small number for the interpreter, so that short tests split too."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


def attention_decode(
    q_BLKRD: torch.Tensor,
    k_BSKD: torch.Tensor,
    v_BSKE: torch.Tensor,
    *,
    choices: Choices = Choices(),
    **arguments: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `forward.attention_forward`, with the same arguments."""
    tensors = {"q": q_BLKRD, "k": k_BSKD, "v": v_BSKE}
    tensors |= {name: arguments.pop(name, None) for name in TENSORS}
    given, attention = collect(tensors, arguments)
    plan = plan_decode(attention, multiprocessors_of(q_BLKRD.device), choices)
    out, lse = execute(plan, given)
    return out, lse

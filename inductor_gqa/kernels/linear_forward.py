"""Linear layers of fp32 with one input, in one launch on tensor cores: tiles, plan, launcher.

Y_i = X W_i^T. As matmuls each fills a part of the device only, and under the precision "highest"
they run on CUDA cores.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from inductor_gqa import reference
from inductor_gqa.kernels.decode import multiprocessors_of
from inductor_gqa.kernels.linear_forward_kernel import linear_forward_kernel
from inductor_gqa.kernels.plan import Descriptor, Launch, Operand, Plan, execute

MOST = 3  # layers that one launch takes
EXPLICIT = True  # whether the kernel splits operands itself, or Triton's "tf32x3" does
# Offsets within a tile are of 32 bits.
LONGEST_STRIDE = 2**23


class LinearTiles(NamedTuple):
    """BM tokens, BN columns of a result, BK terms of its sums at a time, warps, pipeline stages."""

    BM: int
    BN: int
    BK: int
    num_warps: int
    num_stages: int


INTERPRETED = LinearTiles(16, 32, 16, 4, 1)
# From large to small: the first is taken of which every multiprocessor gets one, else the last.
TILES = {
    "ieee": (
        LinearTiles(128, 64, 32, 8, 3),
        LinearTiles(64, 64, 32, 4, 3),
        LinearTiles(64, 32, 32, 4, 4),
        LinearTiles(32, 32, 64, 4, 3),
    ),
    "tf32": (
        LinearTiles(128, 128, 32, 8, 3),
        LinearTiles(128, 64, 32, 8, 3),
        LinearTiles(64, 64, 32, 4, 4),
        LinearTiles(64, 32, 64, 4, 4),
        LinearTiles(32, 32, 64, 4, 4),
    ),
}


def unusable(weights: Sequence[Operand], x: Operand) -> str | None:
    """Why the kernel cannot compute these layers, or None. Shapes are [N_i, C] and [T, C]."""
    if not 0 < len(weights) <= MOST:
        return f"{len(weights)} layers share the input, accepted 1 to {MOST}"
    for operand in (*weights, x):
        if operand.dtype != torch.float32:
            return f"dtype is {operand.dtype}, accepted torch.float32"
        if 0 in operand.shape or max(operand.shape) >= 2**30:
            return f"shape is {operand.shape}, accepted sizes from 1 to 2^30"
        if max(operand.strides) > LONGEST_STRIDE:
            return f"strides are {operand.strides}, accepted up to {LONGEST_STRIDE}"
    return None


def linear_tiles(
    tokens: int,
    widths: Sequence[int],
    precision: str,
    capability: tuple[int, int] | None,
    multiprocessors: int,
) -> LinearTiles:
    """The largest tiles that leave no multiprocessor without one. By compiling for sm_80, sm_90 and
    sm_100: none of them spills."""
    if capability is None:
        return INTERPRETED
    for tiles in TILES[precision]:
        programs = -(-tokens // tiles.BM) * sum(-(-n // tiles.BN) for n in widths)
        if programs >= multiprocessors:
            return tiles
    return TILES[precision][-1]


def plan_linear_forward(
    weights: Sequence[Operand],
    x: Operand,
    precision: str,
    capability: tuple[int, int] | None,
    multiprocessors: int = 132,
    use_descriptors: bool | None = None,
    tiles: LinearTiles | None = None,
    is_explicit: bool | None = None,
) -> Plan:
    """One launch. Results: y0, y1, ... [T, N_i], contiguous. Slots of inputs: x, w0, w1, ...

    `use_descriptors` None: where the device and the strides allow it; True overrules the device,
    not the strides.
    """
    tokens, columns = x.shape
    widths = [w.shape[0] for w in weights]
    if tiles is None:
        tiles = linear_tiles(tokens, widths, precision, capability, multiprocessors)
    if use_descriptors is None:
        use_descriptors = capability is not None and capability >= (9, 0)
    slots = {"x": x} | {f"w{i}": w for i, w in enumerate(weights)}
    is_described = use_descriptors and all(map(_is_describable, slots.values()))
    allocate = {f"y{i}": Operand.contiguous((tokens, n), x.dtype) for i, n in enumerate(widths)}

    tensors: dict[str, str] = {}
    boxes: dict[str, Descriptor] = {}
    scalars: dict[str, Any] = {"stride_x_t": x.strides[0], "stride_x_c": x.strides[1]}
    # What is beyond the last layer is never touched.
    named = [("x", "x"), *((f"w{i}", f"w{min(i, len(weights) - 1)}") for i in range(MOST))]
    for name, slot in named:
        operand = slots[slot]
        if is_described:
            block = (tiles.BM if name == "x" else tiles.BN, tiles.BK)
            boxes[f"{name}_src"] = Descriptor(slot, operand.shape, operand.strides, block)
        else:
            tensors[f"{name}_src"] = slot
    for i in range(MOST):
        last = min(i, len(weights) - 1)
        tensors[f"y{i}_ptr"] = f"y{last}"
        scalars[f"stride_w{i}_n"], scalars[f"stride_w{i}_c"] = weights[last].strides
        scalars[f"n{i}"] = widths[i] if i < len(weights) else 0
    scalars |= {"T": tokens, "C": columns, "PARTS": len(weights), "PRECISION": precision}
    scalars |= {"BM": tiles.BM, "BN": tiles.BN, "BK": tiles.BK, "WHOLE": columns % tiles.BK == 0}
    scalars |= {"TMA": is_described, "READY": False}
    scalars |= {"EXPLICIT": EXPLICIT if is_explicit is None else is_explicit}
    programs = -(-tokens // tiles.BM) * sum(-(-n // tiles.BN) for n in widths)
    launch = Launch(
        linear_forward_kernel,
        (programs,),
        tensors,
        scalars,
        tiles.num_warps,
        tiles.num_stages,
        boxes,
    )
    return Plan(allocate, (launch,), tuple(allocate))


def _is_describable(x: Operand) -> bool:
    """Whether the copy engine reads it: aligned, rows of whole 16-byte vectors."""
    rows, columns = x.strides
    return x.is_aligned and columns == 1 and rows > 0 and rows * x.dtype.itemsize % 16 == 0


def linear_forward(
    x_TC: torch.Tensor,
    weights: list[torch.Tensor],
    precision: str = "ieee",
    **choices: Any,
) -> list[torch.Tensor]:
    """Every Y_i = X W_i^T [T, N_i], contiguous, of X [T, C] and W_i [N_i, C], all fp32.

    precision: "ieee" (no less exact than fp32) or "tf32" (operands rounded to nearest). Matmuls
    one by one where the kernel cannot run; see `unusable`.
    """
    w = tuple(Operand.of(y) for y in weights)
    capability = torch.cuda.get_device_capability(x_TC.device) if x_TC.is_cuda else None
    multiprocessors = multiprocessors_of(x_TC.device)
    more = tuple(sorted(choices.items()))
    plan = _planned(w, Operand.of(x_TC), precision, capability, multiprocessors, more)
    if plan is None:
        return reference.linear_forward(x_TC, weights)
    tensors = {"q": x_TC, "x": x_TC} | {f"w{i}": y for i, y in enumerate(weights)}
    return list(execute(plan, tensors))


@functools.lru_cache(maxsize=1024)
def _planned(
    weights: tuple[Operand, ...],
    x: Operand,
    precision: str,
    capability: tuple[int, int] | None,
    multiprocessors: int,
    choices: tuple[tuple[str, Any], ...],
) -> Plan | None:
    """The plan, made once for equal calls, or None where the kernel cannot run."""
    if unusable(weights, x) is not None:
        return None
    return plan_linear_forward(weights, x, precision, capability, multiprocessors, **dict(choices))

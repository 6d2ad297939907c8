"""Linear layers of fp32 with one input, in one launch on tensor cores: tiles, plan, launcher.

Y_i = X W_i^T. As matmuls each fills a part of the device only, and under the precision "highest"
they run on CUDA cores.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from inductor_gqa import reference
from inductor_gqa.kernels import gluon_linear_forward
from inductor_gqa.kernels.decode import multiprocessors_of
from inductor_gqa.kernels.gluon_forward import execute_sm90
from inductor_gqa.kernels.gluon_linear_forward import plan_linear_forward_sm90
from inductor_gqa.kernels.gluon_linear_forward_kernel import linear_forward_sm90_kernel
from inductor_gqa.kernels.linear_forward_kernel import linear_forward_kernel, split_kernel
from inductor_gqa.kernels.plan import Descriptor, Launch, Operand, Plan, execute

MOST = 3  # layers that one launch takes
# Rows and columns that a program of the split before takes.
SPLIT_ROWS, SPLIT_COLUMNS = 16, 128
# Terms of a sum. Tensor cores truncate where fp32 rounds, which fewer terms do not average.
FEWEST_TERMS = 64
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
# From large to small: the first is taken that makes so many programs for each multiprocessor, else
# the last (one H200, 1024 columns: 1.5 to 2.0 times as fast as matmuls for "ieee" and three layers,
# 1.2 to 1.4 times for "tf32" up to 2048 tokens).
TILES = {
    "ieee": (LinearTiles(64, 64, 32, 4, 3), LinearTiles(64, 32, 32, 4, 4)),
    "tf32": (LinearTiles(128, 64, 32, 8, 3), LinearTiles(64, 32, 32, 4, 4)),
}
ROUNDS = {"ieee": 1.5, "tf32": 1.0}
# For what is read number by number: every one has an address of its own then, which other tiles
# spill.
UNALIGNED = {"ieee": LinearTiles(64, 32, 32, 4, 3), "tf32": LinearTiles(64, 64, 32, 4, 3)}


def unusable(
    weights: Sequence[Operand], x: Operand, capability: tuple[int, int] | None
) -> str | None:
    """Why the kernel cannot compute these layers as exactly as matmuls, or None. Shapes are [N_i,
    C] and [T, C]; the interpreter (no capability) has no tensor cores."""
    if not 0 < len(weights) <= MOST:
        return f"{len(weights)} layers share the input, accepted 1 to {MOST}"
    columns = sorted({w.strides[1] for w in weights})
    if len(columns) > 1:
        return f"column strides of the weights are {columns}, accepted equal ones"
    if capability is not None and x.shape[1] < FEWEST_TERMS:
        return f"sums have {x.shape[1]} terms, accepted {FEWEST_TERMS} or more"
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
    """The largest tiles of which every multiprocessor gets enough. By compiling for sm_80, sm_90
    and sm_100: none of them spills."""
    if capability is None:
        return INTERPRETED
    for tiles in TILES[precision]:
        programs = -(-tokens // tiles.BM) * sum(-(-n // tiles.BN) for n in widths)
        if programs >= ROUNDS[precision] * multiprocessors:
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
    is_split_before: bool | None = None,
) -> Plan:
    """One launch, or two where operands are split before. Results: y0, y1, ... [T, N_i],
    contiguous. Slots of inputs: x, w0, w1, ...

    `use_descriptors` None: where the device and the strides allow it; True overrules the device,
    not the strides. `is_split_before` None: where wide tiles of tf32 would round the same again and
    again.
    """
    tokens, columns = x.shape
    widths = [w.shape[0] for w in weights]
    has_descriptors = capability is not None and capability >= (9, 0)
    if use_descriptors is None:
        use_descriptors = has_descriptors
    if is_split_before is None:
        expected = linear_tiles(tokens, widths, precision, capability, multiprocessors)
        is_split_before = precision == "tf32" and has_descriptors and expected == TILES["tf32"][0]
    last = len(weights) - 1
    slots = {"x": x} | {f"w{i}": w for i, w in enumerate(weights)}
    sizes: dict[str, Any] = {"T": tokens, "C": columns}
    sizes |= {f"n{i}": widths[i] if i <= last else 0 for i in range(MOST)}
    results = {f"y{i}": Operand.contiguous((tokens, n), x.dtype) for i, n in enumerate(widths)}
    allocate, launches, prefix = dict(results), [], ""
    if is_split_before:
        prefix = "split_"
        scratch, launch = _split(slots, sizes, has_low=precision == "ieee")
        allocate, launches, slots = scratch | results, [launch], scratch
    is_described = use_descriptors and all(map(_is_describable, slots.values()))
    if tiles is None:
        tiles = linear_tiles(tokens, widths, precision, capability, multiprocessors)
        is_read_in_vectors = is_described or all(map(_is_vectorised, slots.values()))
        if capability is not None and not is_read_in_vectors:
            tiles = UNALIGNED[precision]
    tensors: dict[str, str] = {f"y{i}_ptr": f"y{min(i, last)}" for i in range(MOST)}
    boxes: dict[str, Descriptor] = {}
    for name, slot in _parameters(last):
        operand = slots[prefix + slot]
        if is_described:
            block = (tiles.BM if name == "x" else tiles.BN, tiles.BK)
            box = Descriptor(prefix + slot, operand.shape, operand.strides, block)
            boxes[f"{name}_src"] = box
        else:
            tensors[f"{name}_src"] = prefix + slot
    scalars = sizes | _strides(slots, last, prefix)
    scalars |= {"BM": tiles.BM, "BN": tiles.BN, "BK": tiles.BK, "WHOLE": columns % tiles.BK == 0}
    scalars |= {"PARTS": len(weights), "PRECISION": precision, "TMA": is_described}
    scalars |= {"READY": is_split_before}
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
    return Plan(allocate, (*launches, launch), tuple(results))


def _parameters(last: int) -> list[tuple[str, str]]:
    """Matrices by what a kernel calls them, and whose slot each is: what is beyond the last layer
    is never touched."""
    return [("x", "x"), *((f"w{i}", f"w{min(i, last)}") for i in range(MOST))]


def _strides(slots: dict[str, Operand], last: int, prefix: str = "") -> dict[str, int]:
    """Of rows, and of columns, which the weights have in common."""
    x, w0 = slots[f"{prefix}x"], slots[f"{prefix}w0"]
    found = {"stride_x_t": x.strides[0], "stride_x_c": x.strides[1], "stride_w_c": w0.strides[1]}
    for name, slot in _parameters(last)[1:]:
        found[f"stride_{name}_n"] = slots[prefix + slot].strides[0]
    return found


def _split(
    slots: dict[str, Operand], sizes: dict[str, Any], has_low: bool
) -> tuple[dict[str, Operand], Launch]:
    """Copies of all matrices in tf32, and the launch that makes them. Rows begin on multiples of 16
    bytes."""
    columns, last = sizes["C"], len(slots) - 2
    pitch = -(-columns // 4) * 4
    scratch = {
        f"split_{name}": Operand.contiguous(
            (x.shape[0] * (2 if has_low else 1), columns), x.dtype, pitch
        )
        for name, x in slots.items()
    }
    parameters = _parameters(last)
    tensors = {f"{name}_ptr": slot for name, slot in parameters}
    tensors |= {f"{name}_out_ptr": f"split_{slot}" for name, slot in parameters}
    scalars = sizes | _strides(slots, last) | {"pitch": pitch, "HAS_LOW": has_low}
    scalars |= {"ROWS": SPLIT_ROWS, "COLUMNS": SPLIT_COLUMNS}
    rows = sum(-(-x.shape[0] // SPLIT_ROWS) for x in slots.values())
    grid = (rows, -(-columns // SPLIT_COLUMNS))
    return scratch, Launch(split_kernel, grid, tensors, scalars, 4, 1)


def _is_describable(x: Operand) -> bool:
    """Whether the copy engine reads it: aligned, rows of whole 16-byte vectors."""
    rows, columns = x.strides
    return x.is_aligned and columns == 1 and rows > 0 and rows * x.dtype.itemsize % 16 == 0


def _is_vectorised(x: Operand) -> bool:
    """Whether pointers to it are read 16 bytes at a time. Of a stride Triton knows only whether 16
    divides it, and of a row's end whether a tile passes it."""
    rows, _ = x.strides
    return _is_describable(x) and rows % 16 == 0 and x.shape[1] % 32 == 0


def linear_forward(
    x_TC: torch.Tensor,
    weights: list[torch.Tensor],
    precision: str = "ieee",
    **choices: Any,
) -> list[torch.Tensor]:
    """Every Y_i = X W_i^T [T, N_i], contiguous, of X [T, C] and W_i [N_i, C], all fp32.

    precision: "ieee" (no less exact than fp32) or "tf32" (operands rounded to nearest). `choices`
    are those of `plan_linear_forward`, which then makes the plan. Matmuls one by one where the
    kernel cannot run; see `unusable`.
    """
    w = tuple(Operand.of(y) for y in weights)
    capability = torch.cuda.get_device_capability(x_TC.device) if x_TC.is_cuda else None
    multiprocessors = multiprocessors_of(x_TC.device)
    more = tuple(sorted(choices.items()))
    x = Operand.of(x_TC)
    plan = _planned(w, x, precision, capability, multiprocessors, more)
    if plan is None:
        return reference.linear_forward(x_TC, weights)
    tensors = {"q": x_TC, "x": x_TC} | {f"w{i}": y for i, y in enumerate(weights)}
    is_sm90 = plan.launches[-1].kernel is linear_forward_sm90_kernel
    return list((execute_sm90 if is_sm90 else execute)(plan, tensors))


def is_gluon(
    weights: Sequence[Operand],
    x: Operand,
    precision: str,
    capability: tuple[int, int] | None,
) -> bool:
    """Whether the kernel for sm_90 computes these layers, which are not `unusable`."""
    if gluon_linear_forward.unusable(weights, x, capability) is not None:
        return False
    return gluon_linear_forward.is_faster(x.shape[0], precision)


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
    if unusable(weights, x, capability) is not None:
        return None
    if not choices and is_gluon(weights, x, precision, capability):
        return plan_linear_forward_sm90(weights, x, precision, multiprocessors)
    return plan_linear_forward(weights, x, precision, capability, multiprocessors, **dict(choices))

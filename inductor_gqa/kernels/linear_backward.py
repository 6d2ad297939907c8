"""Every gradient of linear layers that share their input, in one launch on sm_90: when it may run,
what to launch, launcher.

For layers Y_i = X W_i^T with gradients G_i: dX = sum over i of G_i W_i, summed in fp32 and rounded
once, and dW_i = G_i^T X. As separate products each ends in a wave of tiles that fills a part of the
device only, and dX is written and read again between its terms.
"""

import bisect
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from inductor_gqa import reference
from inductor_gqa.kernels.gluon_forward import device_facts, execute_sm90
from inductor_gqa.kernels.gluon_tiles import WHY_NOT
from inductor_gqa.kernels.linear_backward_kernel import ROWS, STEP, linear_backward_sm90_kernel
from inductor_gqa.kernels.plan import Descriptor, Launch, Operand, Plan

MOST = 3  # layers that one launch takes
# What it costs to begin and end a tile, in steps of its sum.
ENDS = 3
DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Tile:
    """Columns of a tile of 128 rows, the steps that are in flight, and the time of a step in those
    of the narrow one (fitted to measurements on one H200)."""

    columns: int
    slots: int
    cost: float


WIDE, NARROW, SLIM = Tile(256, 3, 1.9), Tile(128, 6, 1.0), Tile(64, 8, 0.67)
# Operands of more bytes than this are loaded from memory again for most tiles, which the smaller
# tiles pay for: their steps then take longer by this factor.
IN_L2, BEYOND_L2 = 64 * 2**20, 1.2


def unusable(
    grads: Sequence[Operand], weights: Sequence[Operand], x: Operand, capability: Any
) -> str | None:
    """Why the kernel cannot compute these gradients, or None. Shapes are [T, N_i], [N_i, C] and
    [T, C]."""
    if WHY_NOT is not None:
        return WHY_NOT
    if capability != (9, 0):
        return f"compute capability is {capability}, accepted (9, 0)"
    if len(grads) > MOST:
        return f"{len(grads)} layers share the input, accepted {MOST} at most"
    if x.dtype not in DTYPES:
        return f"dtype is {x.dtype}, accepted {' and '.join(map(str, DTYPES))}"
    for operand in (*grads, *weights, x):
        rows, columns = operand.strides
        if columns != 1 or rows % 8 or rows <= 0 or not operand.is_aligned or operand.shape[1] % 8:
            return f"strides are {operand.strides}, accepted rows of whole 16-byte vectors"
        if operand.dtype != x.dtype:
            return f"dtypes are {operand.dtype} and {x.dtype}, accepted equal ones"
        if max(operand.shape) >= 2**31 or 0 in operand.shape:
            return f"shape is {operand.shape}, accepted sizes from 1 to 2^31"
    return None


class Spread(NamedTuple):
    """Program p computes sums p, p + programs, ...: the first n_hi programs one more than the
    others. These take q_hi outer tiles each and the first extra_hi of them one more, the others
    q_lo and extra_lo."""

    n_hi: int
    q_hi: int
    extra_hi: int
    q_lo: int
    extra_lo: int


def spread(
    n_sums: int, sum_steps: int, n_outers: int, outer_steps: int, programs: int
) -> tuple[Spread, int]:
    """How outer tiles are spread so that the last program ends as early as can be, and when that
    is, in steps."""
    sum_cost, outer_cost = sum_steps + ENDS, outer_steps + ENDS
    fewest, n_hi = divmod(n_sums, programs)
    n_lo, begun = programs - n_hi, fewest * sum_cost

    def room(end: int) -> tuple[int, int]:
        """Outer tiles that programs of either kind finish by then."""
        hi = max(0, end - begun - sum_cost) // outer_cost * n_hi
        return hi, max(0, end - begun) // outer_cost * n_lo

    earliest = begun + (sum_cost if n_hi else 0)
    latest = earliest + n_outers * outer_cost
    end = earliest + bisect.bisect_left(
        range(latest - earliest), n_outers, key=lambda later: sum(room(earliest + later))
    )
    n_outers_hi = min(room(end)[0], n_outers)
    q_lo, extra_lo = divmod(n_outers - n_outers_hi, n_lo)
    q_hi, extra_hi = divmod(n_outers_hi, n_hi) if n_hi else (0, 0)
    return Spread(n_hi, q_hi, extra_hi, q_lo, extra_lo), end


class Tiling(NamedTuple):
    """How many tiles of both kinds there are, and how long each sums, in steps."""

    n_sums: int
    sum_steps: int
    n_outers: int
    outer_steps: int

    @staticmethod
    def of(tokens: int, columns: int, widths: Sequence[int], tile: Tile) -> "Tiling":
        rows, step, across = 2 * ROWS.value, STEP.value, -(-columns // tile.columns)
        return Tiling(
            -(-tokens // rows) * across,
            sum(-(-n // step) for n in widths),
            sum(-(-n // rows) for n in widths) * across,
            -(-tokens // step),
        )


def tile_of(tokens: int, columns: int, widths: Sequence[int], multiprocessors: int) -> Tile:
    """The tile with which the last program is expected to end first."""
    n_bytes = 2 * tokens * (columns + sum(widths))

    def ends(tile: Tile) -> float:
        tiling = Tiling.of(tokens, columns, widths, tile)
        again = BEYOND_L2 if n_bytes > IN_L2 and tile is not WIDE else 1.0
        return again * tile.cost * spread(*tiling, multiprocessors)[1]

    return min((WIDE, NARROW, SLIM), key=ends)


def plan_linear_backward(
    grads: Sequence[Operand],
    weights: Sequence[Operand],
    x: Operand,
    multiprocessors: int = 132,
    tile: Tile | None = None,
) -> Plan:
    """One launch. Results: dx [T, C] and dw0, dw1, ... [N_i, C], contiguous. Slots of inputs: g0,
    ..., w0, ..., x."""
    tokens, columns = x.shape
    widths = [g.shape[1] for g in grads]
    tile = tile or tile_of(tokens, columns, widths, multiprocessors)
    tiling = Tiling.of(tokens, columns, widths, tile)
    programs = min(multiprocessors, tiling.n_sums + tiling.n_outers)
    share, _ = spread(*tiling, programs)
    rows, step, BN = ROWS.value, STEP.value, tile.columns
    allocate = {"dx": Operand.contiguous((tokens, columns), x.dtype)}
    allocate |= {f"dw{i}": Operand.contiguous((n, columns), x.dtype) for i, n in enumerate(widths)}
    slots = {"x": x, **allocate}
    slots |= {f"g{i}": g for i, g in enumerate(grads)} | {f"w{i}": w for i, w in enumerate(weights)}

    def box(slot: str) -> Descriptor:
        operand = slots[slot]
        block = (rows, step) if slot[0] == "g" else (rows, BN)
        return Descriptor(slot, operand.shape, operand.strides, block)

    boxes = {"x_desc": box("x"), "dx_desc": box("dx")}
    for i in range(MOST):  # what is beyond the last layer is never touched
        for name in ("g", "w", "dw"):
            boxes[f"{name}{i}_desc"] = box(f"{name}{min(i, len(grads) - 1)}")
    scalars = {f"n{i}": widths[i] if i < len(widths) else 0 for i in range(MOST)}
    scalars |= {"T": tokens, "C": columns, "n_sums": tiling.n_sums, **share._asdict()}
    scalars |= {"PARTS": len(grads), "BN": BN, "SLOTS": tile.slots}
    launch = Launch(linear_backward_sm90_kernel, (programs,), {}, scalars, 4, 1, boxes, True)
    return Plan(allocate, (launch,), ("dx", *(f"dw{i}" for i in range(len(grads)))))


def linear_backward(
    grads: list[torch.Tensor],
    weights: list[torch.Tensor],
    x: torch.Tensor,
    tile: Tile | None = None,
) -> list[torch.Tensor]:
    """dX [T, C], then every dW_i [N_i, C], from G_i [T, N_i], W_i [N_i, C] and X [T, C], in their
    dtype.

    Products one by one where the kernel cannot run; see `unusable`.
    """
    g, w = (tuple(Operand.of(y) for y in found) for found in (grads, weights))
    facts = device_facts(x.device) if x.is_cuda else (None, 0)
    plan = _planned(g, w, Operand.of(x), *facts, tile)
    if plan is None:
        return reference.linear_backward(grads, weights, x)
    tensors = {"q": x, "x": x} | {f"g{i}": g for i, g in enumerate(grads)}
    tensors |= {f"w{i}": w for i, w in enumerate(weights)}
    return list(execute_sm90(plan, tensors))


@functools.lru_cache(maxsize=1024)
def _planned(
    grads: tuple[Operand, ...],
    weights: tuple[Operand, ...],
    x: Operand,
    capability: tuple[int, int] | None,
    multiprocessors: int,
    tile: Tile | None,
) -> Plan | None:
    """The plan, made once for equal calls, or None where the kernel cannot run."""
    if unusable(grads, weights, x, capability) is not None:
        return None
    return plan_linear_backward(grads, weights, x, multiprocessors, tile)

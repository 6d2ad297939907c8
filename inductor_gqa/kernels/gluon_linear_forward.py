"""Linear layers of fp32 with one input, in one launch on sm_90: when the warp-specialised kernel
may run, what to launch."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from inductor_gqa.kernels.gluon_linear_forward_kernel import ROWS, linear_forward_sm90_kernel
from inductor_gqa.kernels.gluon_tiles import WHY_NOT
from inductor_gqa.kernels.plan import Descriptor, Launch, Operand, Plan

MOST = 3  # layers that one launch takes
# Tokens from which on the other kernel is faster (one H200, 1024 columns, 1536 results): L2 then
# limits both, of which that one asks less.
MOST_TOKENS = {"ieee": 2**31, "tf32": 768}


class Tiles(NamedTuple):
    """Columns of a tile, terms of a step, steps in flight, whether the two groups of warps share
    the sums of 64 rows or own 64 each, and the time of a tile of 1024 terms in us (one H200, of
    many tiles)."""

    BN: int
    BK: int
    slots: int
    is_shared: bool
    us: float

    @property
    def rows(self) -> int:
        return ROWS.value if self.is_shared else 2 * ROWS.value


TILES = {
    "tf32": (
        Tiles(128, 32, 4, False, 21.3),
        Tiles(64, 64, 4, False, 13.3),
        Tiles(64, 64, 6, True, 8.3),
        Tiles(32, 64, 8, True, 6.0),
    ),
    "ieee": (
        Tiles(128, 32, 3, False, 36.6),
        Tiles(64, 32, 6, False, 21.6),
        Tiles(64, 32, 8, True, 13.8),
        Tiles(32, 32, 12, True, 9.7),
    ),
}


def unusable(
    weights: Sequence[Operand], x: Operand, capability: tuple[int, int] | None
) -> str | None:
    """Why the kernel cannot compute these layers, or None; shapes are [N_i, C] and [T, C]. What
    `linear_forward.unusable` refuses, it refuses for both."""
    if WHY_NOT is not None:
        return WHY_NOT
    if capability != (9, 0):
        return f"compute capability is {capability}, accepted (9, 0)"
    for operand in (*weights, x):
        rows, columns = operand.strides
        if columns != 1 or rows % 4 or rows <= 0 or not operand.is_aligned:
            return f"strides are {operand.strides}, accepted rows of whole 16-byte vectors"
    for weight in weights:
        if weight.shape[0] % 4:
            return f"a layer has {weight.shape[0]} results, accepted multiples of 4"
    return None


def is_faster(tokens: int, precision: str) -> bool:
    """Whether it beats the kernel for any device."""
    return tokens <= MOST_TOKENS[precision]


def tiles_of(tokens: int, widths: Sequence[int], precision: str, multiprocessors: int) -> Tiles:
    """The tiles with which the last program is expected to end first."""

    def ends(tiles: Tiles) -> float:
        return -(-_count(tokens, widths, tiles) // multiprocessors) * tiles.us

    return min(TILES[precision], key=ends)


def _count(tokens: int, widths: Sequence[int], tiles: Tiles) -> int:
    return -(-tokens // tiles.rows) * sum(-(-n // tiles.BN) for n in widths)


def plan_linear_forward_sm90(
    weights: Sequence[Operand],
    x: Operand,
    precision: str,
    multiprocessors: int = 132,
    tiles: Tiles | None = None,
) -> Plan:
    """One launch. Results: y0, y1, ... [T, N_i], contiguous. Slots of inputs: x, w0, w1, ..."""
    tokens, terms = x.shape
    widths = [w.shape[0] for w in weights]
    tiles = tiles or tiles_of(tokens, widths, precision, multiprocessors)
    n_tiles, last = _count(tokens, widths, tiles), len(weights) - 1
    results = {f"y{i}": Operand.contiguous((tokens, n), x.dtype) for i, n in enumerate(widths)}
    slots = {"x": x} | {f"w{i}": w for i, w in enumerate(weights)} | results
    blocks = {"x": (ROWS.value, tiles.BK), "w": (tiles.BN, tiles.BK), "y": (ROWS.value, tiles.BN)}
    # What is beyond the last layer is never touched.
    named = {"x": "x"} | {f"{x}{i}": f"{x}{min(i, last)}" for x in "wy" for i in range(MOST)}
    boxes = {
        f"{name}_desc": Descriptor(slot, slots[slot].shape, slots[slot].strides, blocks[name[0]])
        for name, slot in named.items()
    }
    pointers = {f"{name}_ptr": slot for name, slot in named.items()}
    scalars: dict[str, Any] = {"n_tiles": n_tiles, "T": tokens, "C": terms}
    scalars |= {f"n{i}": widths[i] if i <= last else 0 for i in range(MOST)}
    scalars |= {"stride_x_t": x.strides[0]}
    scalars |= {f"stride_w{i}_n": weights[min(i, last)].strides[0] for i in range(MOST)}
    scalars |= {"PARTS": 2 if precision == "ieee" else 1, "LAYERS": len(weights)}
    scalars |= {"BN": tiles.BN, "BK": tiles.BK, "SLOTS": tiles.slots, "SHARED": tiles.is_shared}
    grid = (min(n_tiles, multiprocessors),)
    launch = Launch(linear_forward_sm90_kernel, grid, pointers, scalars, 4, 1, boxes, True)
    return Plan(results, (launch,), tuple(results))

"""Rotary embedding: y = x * cos + sign * partner(x) * sin, in fp32, rounded once. Grid: query
tiles, then key tiles.

One launch writes rotated q_BLKRD and k_BSKD in the order of their indices, so that the attention
kernels read both straight into the tensor cores: a q that is rotated in the attention's prologue
becomes a register operand of every product and costs 5 to 20 % there (H200). The same launch copies
tensors whose strides keep them from being streamed. The adjoint at the end of the file is applied
by the backward kernels to what they still hold in registers.
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import triton
import triton.language as tl

from inductor_gqa.kernels.plan import Attention, Launch, Operand, named_strides
from inductor_gqa.kernels.tiles import head_offset, load_tile, offsets, store_tile


@triton.jit
def lanes(cols, START: tl.constexpr, W: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Per column: is it turned, which column is its partner, the sign of the partner's share."""
    t = cols - START
    is_turned = (t >= 0) & (t < W)
    if INTERLEAVED:
        is_first = t % 2 == 0
        partner = tl.where(is_first, cols + 1, cols - 1)
    else:
        is_first = t < W // 2
        partner = tl.where(is_first, cols + W // 2, cols - W // 2)
    return is_turned, partner, tl.where(is_first, -1.0, 1.0)


@triton.jit
def load_lanes(ptr, rows, cols, seen, stride_row, stride_col, n_rows, OTHER: tl.constexpr):
    at = ptr + offsets(rows[:, None], cols[None, :], stride_row, stride_col)
    return tl.load(at, mask=(rows[:, None] < n_rows) & seen[None, :], other=OTHER).to(tl.float32)


@triton.jit
def rotated_tile(
    x_ptr, cos_ptr, sin_ptr, y_ptr, rows, n_rows,
    stride_x, stride_xd, stride_cos, stride_cosw, stride_sin, stride_sinw, stride_y,
    START: tl.constexpr, W: tl.constexpr, INTERLEAVED: tl.constexpr, ADJOINT: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One head's rows. The partner is read once more: it hits L1, and no register moves. The
    adjoint takes the partner's sine, negated."""
    cols = tl.arange(0, WIDTH)
    is_turned, partner, sign = lanes(cols, START, W, INTERLEAVED)
    x = load_tile(x_ptr, rows, stride_x, stride_xd, n_rows, 0, WIDTH, D).to(tl.float32)
    other = load_lanes(x_ptr, rows, partner, is_turned, stride_x, stride_xd, n_rows, 0.0)
    cos = load_lanes(cos_ptr, rows, cols - START, is_turned, stride_cos, stride_cosw, n_rows, 1.0)
    if ADJOINT:
        cols_sin, sign = partner, -sign
    else:
        cols_sin = cols
    sin = load_lanes(
        sin_ptr, rows, cols_sin - START, is_turned, stride_sin, stride_sinw, n_rows, 0.0
    )
    y = x * cos + other * (sin * sign[None, :])
    inside = (rows[:, None] < n_rows) & (cols < D)[None, :]
    tl.store(
        y_ptr + offsets(rows[:, None], cols[None, :], stride_y, 1),
        y.to(y_ptr.dtype.element_ty),
        mask=inside,
    )


@triton.jit
def rotate_kernel(
    q_ptr, cos_q_ptr, sin_q_ptr, q_out_ptr, k_ptr, cos_k_ptr, sin_k_ptr, k_out_ptr,
    stride_q_b, stride_q_l, stride_q_k, stride_q_r, stride_q_d,
    stride_cos_q_b, stride_cos_q_l, stride_cos_q_w, stride_sin_q_b, stride_sin_q_l, stride_sin_q_w,
    stride_k_b, stride_k_s, stride_k_k, stride_k_d,
    stride_cos_k_b, stride_cos_k_s, stride_cos_k_w, stride_sin_k_b, stride_sin_k_s, stride_sin_k_w,
    B, L, S, query_programs,
    K: tl.constexpr, R: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    START: tl.constexpr, W_Q: tl.constexpr, W_K: tl.constexpr, INTERLEAVED: tl.constexpr,
    ADJOINT: tl.constexpr, ROWS: tl.constexpr, PITCH: tl.constexpr,
):  # fmt: skip
    # Heads vary fastest: neighbours share the rows of cos and sin in L2.
    pid = tl.program_id(0)
    if pid < query_programs:
        b = pid // (K * R) % B
        k = pid % (K * R) // R
        r = pid % R
        rows = pid // (K * R) // B * ROWS + tl.arange(0, ROWS)
        rotated_tile(
            q_ptr + head_offset(b, k, r, stride_q_b, stride_q_k, stride_q_r),
            cos_q_ptr + b.to(tl.int64) * stride_cos_q_b,
            sin_q_ptr + b.to(tl.int64) * stride_sin_q_b,
            q_out_ptr + (b.to(tl.int64) * L * K * R + k * R + r) * PITCH, rows, L,
            stride_q_l, stride_q_d, stride_cos_q_l, stride_cos_q_w, stride_sin_q_l, stride_sin_q_w,
            K * R * PITCH,
            START, W_Q, INTERLEAVED, ADJOINT, D, WIDTH,
        )  # fmt: skip
    else:
        pid -= query_programs
        b = pid // K % B
        k = pid % K
        rows = pid // K // B * ROWS + tl.arange(0, ROWS)
        rotated_tile(
            k_ptr + head_offset(b, k, k, stride_k_b, stride_k_k, 0),
            cos_k_ptr + b.to(tl.int64) * stride_cos_k_b,
            sin_k_ptr + b.to(tl.int64) * stride_sin_k_b,
            k_out_ptr + (b.to(tl.int64) * S * K + k) * PITCH, rows, S,
            stride_k_s, stride_k_d, stride_cos_k_s, stride_cos_k_w, stride_sin_k_s, stride_sin_k_w,
            K * PITCH,
            START, W_K, INTERLEAVED, ADJOINT, D, WIDTH,
        )  # fmt: skip


def plan_rotation(
    attention: Attention, copied: Collection[str] = ()
) -> tuple[dict[str, Operand], tuple[Launch, ...], dict[str, str]]:
    """Scratch tensors, at most two launches, and which slots the attention reads for q, k, v and
    grad_out.

    Tensors in `copied` are written anew though nothing turns them, into rows of a multiple of 16.
    """
    tensors = attention.tensors
    turned = [name for name in ("q", "k") if f"cos_{name}" in tensors]
    names = {name: name for name in ("q", "k", "v", "grad_out")}
    scratch: dict[str, Operand] = {}
    launches: tuple[Launch, ...] = ()
    for pair in (("q", "k"), ("grad_out", "v")):
        written = [name for name in pair if name in turned or name in copied]
        if not written:
            continue
        names |= {name: f"{name}_rotated" if name in turned else f"{name}_copy" for name in written}
        made = {names[name]: _row_major(tensors[name]) for name in written}
        launches += (
            _launch(attention, pair, turned, names, next(iter(made.values())).strides[-2]),
        )
        scratch |= made
    return scratch, launches, names


def plan_adjoint(
    attention: Attention, sources: Mapping[str, str], results: Mapping[str, str]
) -> Launch:
    """Gradients of q and k, or of one of them, from the gradients of what they were turned to:
    contiguous slots in `sources`, written to those of the same names in `results`."""
    tensors = dict(attention.tensors)
    for name in ("q", "k"):
        tensors[name] = Operand.contiguous(tensors[name].shape, tensors[name].dtype)
    twin = dataclasses.replace(attention, tensors=tensors)
    names = {name: results.get(name, name) for name in ("q", "k")}
    launch = _launch(twin, ("q", "k"), list(sources), names, tensors["q"].shape[-1], True)
    slots = {at: sources.get(slot, slot) for at, slot in launch.tensors.items()}
    return dataclasses.replace(launch, tensors=slots)


def _row_major(x: Operand) -> Operand:
    return Operand.contiguous(x.shape, x.dtype, pitch=-(-x.shape[-1] // 16) * 16)


def _launch(
    attention: Attention,
    pair: tuple[str, str],
    turned: list[str],
    names: dict[str, str],
    pitch: int,
    is_adjoint: bool = False,
) -> Launch:
    """Writes those of the pair (a tensor with query heads, one with key heads) that have a slot of
    their own in `names`."""
    tensors = attention.tensors
    rows, query_slot, key_slot = 32, *pair
    B, L, S, K, R, *_ = attention.sizes
    D = tensors[key_slot].shape[-1]
    query_programs = -(-L // rows) * B * K * R if names[query_slot] != query_slot else 0
    key_programs = -(-S // rows) * B * K if names[key_slot] != key_slot else 0
    scalars: dict[str, Any] = named_strides("q", tensors.get(query_slot), "blkrd")
    scalars |= named_strides("k", tensors[key_slot], "bskd")
    given = {name: x for name, x in tensors.items() if name[4:] in turned and name[4:] in pair}
    for name, letters in (("cos_q", "blw"), ("sin_q", "blw"), ("cos_k", "bsw"), ("sin_k", "bsw")):
        scalars |= named_strides(name, given.get(name), letters)
    scalars |= {"B": B, "L": L, "S": S, "query_programs": query_programs, "K": K, "R": R, "D": D}
    scalars |= {"WIDTH": 1 << (D - 1).bit_length(), "ROWS": rows, "PITCH": pitch}
    scalars |= {"START": attention.rope_start, "INTERLEAVED": attention.rope_interleaved}
    scalars |= {"ADJOINT": is_adjoint}
    widths = {x: given[f"cos_{x}"].shape[-1] if f"cos_{x}" in given else 0 for x in ("q", "k")}
    scalars |= {f"W_{x.upper()}": width for x, width in widths.items()}
    # What is absent is never read; a parameter must be some pointer.
    some = key_slot if query_slot not in tensors else query_slot
    slots = {"q_ptr": some, "k_ptr": key_slot}
    slots |= {
        f"{table}_ptr": table if table in given else some
        for table in ("cos_q", "sin_q", "cos_k", "sin_k")
    }
    slots |= {"q_out_ptr": names[query_slot] if query_programs else some}
    slots |= {"k_out_ptr": names[key_slot]}
    grid = (query_programs + key_programs,)
    return Launch(rotate_kernel, grid, slots, scalars, num_warps=4, num_stages=1)


@triton.jit
def turned_back(
    y, y_ptr, rows, stride_y, n_rows, cos_ptr, sin_ptr, stride_cos, stride_cosw, stride_sin,
    stride_sinw,
    FIRST: tl.constexpr, WIDTH: tl.constexpr, START: tl.constexpr, W: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """The rotation's adjoint, columns FIRST .. FIRST+WIDTH; the partners' y is read from y_ptr."""
    cols = FIRST + tl.arange(0, WIDTH)
    is_turned, partner, sign = lanes(cols, START, W, INTERLEAVED)
    other = load_lanes(y_ptr, rows, partner, is_turned, stride_y, 1, n_rows, 0.0)
    cos = load_lanes(cos_ptr, rows, cols - START, is_turned, stride_cos, stride_cosw, n_rows, 1.0)
    sin = load_lanes(
        sin_ptr, rows, partner - START, is_turned, stride_sin, stride_sinw, n_rows, 0.0
    )
    return y * cos - other * (sin * sign[None, :])


@triton.jit
def store_gradient(
    y1, y2, y_ptr, rows, stride_y, n_rows, cos_ptr, sin_ptr, stride_cos, stride_cosw, stride_sin,
    stride_sinw,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, START: tl.constexpr, W: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Stores a gradient, turned back first if W > 0.

    A lane's partner sits in another thread, often in the other chunk. Exchanging them through the
    destination, which stays in L1 and L2, costs no registers and no shared memory; the barriers
    keep a store from overtaking a neighbour's load.
    """
    store_tile(y_ptr, y1, rows, stride_y, n_rows, 0, D1, D)
    if D2:
        store_tile(y_ptr, y2, rows, stride_y, n_rows, D1, D2, D)
    if W:
        tl.debug_barrier()
        x1 = turned_back(
            y1, y_ptr, rows, stride_y, n_rows, cos_ptr, sin_ptr, stride_cos, stride_cosw,
            stride_sin, stride_sinw,
            0, D1, START, W, INTERLEAVED,
        )  # fmt: skip
        x2 = y2
        if D2:
            x2 = turned_back(
                y2, y_ptr, rows, stride_y, n_rows, cos_ptr, sin_ptr, stride_cos, stride_cosw,
                stride_sin, stride_sinw,
                D1, D2, START, W, INTERLEAVED,
            )  # fmt: skip
        tl.debug_barrier()
        store_tile(y_ptr, x1, rows, stride_y, n_rows, 0, D1, D)
        if D2:
            store_tile(y_ptr, x2, rows, stride_y, n_rows, D1, D2, D)

"""Rotary embedding: y = x * cos + sign * partner(x) * sin, in fp32, rounded once. Grid: rows of
some heads of q, then of k. Heads share a program since their tables outweigh each one's rows.

One launch writes rotated q_BLKRD and k_BSKD in the order of their indices, so that the attention
kernels read both straight into the tensor cores: a q that is rotated in the attention's prologue
becomes a register operand of every product and costs 5 to 20 % there (H200). The same launch copies
tensors whose strides keep them from being streamed. The adjoint at the end of the file is applied
by the backward kernels to what they still hold in registers.
"""

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any

import triton
import triton.language as tl

from inductor_gqa.kernels.plan import Attention, Launch, Operand, named_strides
from inductor_gqa.kernels.tiles import offsets, store_tile

HEADS = 4  # of a program, at most
TILE = 1024  # elements of a head that a program takes, at most


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
def load_pairs(
    at, inside, FIRST: tl.constexpr, W: tl.constexpr, stride, HEADS: tl.constexpr,
    ROWS: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Both numbers of every pair in columns FIRST .. FIRST+W, each [HEADS, ROWS, PAIRS]. Addresses
    and `inside` are of rows, [HEADS, ROWS, 1]."""
    if INTERLEAVED:
        cols = tl.arange(0, 2 * PAIRS)[None, None, :]
        both = tl.load(at + offsets_of(FIRST + cols, stride), mask=inside & (cols < W), other=0.0)
        x1, x2 = tl.split(tl.reshape(both, (HEADS, ROWS, PAIRS, 2)))
    else:
        cols = tl.arange(0, PAIRS)[None, None, :]
        inside = inside & (cols < W // 2)
        x1 = tl.load(at + offsets_of(FIRST + cols, stride), mask=inside, other=0.0)
        x2 = tl.load(at + offsets_of(FIRST + W // 2 + cols, stride), mask=inside, other=0.0)
    return x1.to(tl.float32), x2.to(tl.float32)


@triton.jit
def offsets_of(i, stride):
    return i.to(tl.int64) * stride


@triton.jit
def turn_heads(
    x_ptr, cos_ptr, sin_ptr, y_ptr, b, head0, rows, n_rows,
    stride_x_b, stride_x_k, stride_x_r, stride_x, stride_xd, stride_cos, stride_cosw, stride_sin,
    stride_sinw,
    H: tl.constexpr, R: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr, PITCH: tl.constexpr, START: tl.constexpr, W: tl.constexpr,
    PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, ADJOINT: tl.constexpr,
):  # fmt: skip
    """Rows of HEADS heads, which are turned alike: their tables are read once."""
    heads = (head0 + tl.arange(0, HEADS))[:, None, None]
    rows = rows[None, :, None]
    inside = (rows < n_rows) & (heads >= 0)
    from_x = x_ptr + b.to(tl.int64) * stride_x_b + offsets_of(rows, stride_x)
    from_x += offsets_of(heads // R, stride_x_k) + offsets_of(heads % R, stride_x_r)
    to = y_ptr + offsets_of(b.to(tl.int64) * n_rows + rows, H * PITCH) + offsets_of(heads, PITCH)
    if W:
        x1, x2 = load_pairs(from_x, inside, START, W, stride_xd, HEADS, ROWS, PAIRS, INTERLEAVED)
        once = rows < n_rows
        cos1, cos2 = load_pairs(
            cos_ptr + offsets_of(rows, stride_cos), once, 0, W, stride_cosw, 1, ROWS, PAIRS,
            INTERLEAVED,
        )  # fmt: skip
        sin1, sin2 = load_pairs(
            sin_ptr + offsets_of(rows, stride_sin), once, 0, W, stride_sinw, 1, ROWS, PAIRS,
            INTERLEAVED,
        )  # fmt: skip
        if ADJOINT:  # takes the partner's sine, negated
            y1 = x1 * cos1 + x2 * sin2
            y2 = x2 * cos2 - x1 * sin1
        else:
            y1 = x1 * cos1 - x2 * sin1
            y2 = x2 * cos2 + x1 * sin2
        y1, y2 = y1.to(y_ptr.dtype.element_ty), y2.to(y_ptr.dtype.element_ty)
        if INTERLEAVED:
            cols = tl.arange(0, 2 * PAIRS)[None, None, :]
            both = tl.reshape(tl.join(y1, y2), (HEADS, ROWS, 2 * PAIRS))
            tl.store(to + (START + cols), both, mask=inside & (cols < W))
        else:
            cols = tl.arange(0, PAIRS)[None, None, :]
            tl.store(to + (START + cols), y1, mask=inside & (cols < W // 2))
            tl.store(to + (START + W // 2 + cols), y2, mask=inside & (cols < W // 2))
    if W < D:
        cols = tl.arange(0, WIDTH)[None, None, :]
        is_kept = ((cols < START) | (cols >= START + W)) & (cols < D)
        x = tl.load(from_x + offsets_of(cols, stride_xd), mask=inside & is_kept, other=0.0)
        tl.store(to + cols, x.to(y_ptr.dtype.element_ty), mask=inside & is_kept)


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
    ADJOINT: tl.constexpr, ROWS: tl.constexpr, PITCH: tl.constexpr, Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    # Heads vary fastest: neighbours share the rows of cos and sin in L2.
    pid = tl.program_id(0)
    if pid < query_programs:
        PARTS: tl.constexpr = K * R // Q_HEADS
        b = pid // PARTS % B
        turn_heads(
            q_ptr,
            cos_q_ptr + b.to(tl.int64) * stride_cos_q_b,
            sin_q_ptr + b.to(tl.int64) * stride_sin_q_b,
            q_out_ptr, b, pid % PARTS * Q_HEADS, pid // PARTS // B * ROWS + tl.arange(0, ROWS), L,
            stride_q_b, stride_q_k, stride_q_r, stride_q_l, stride_q_d, stride_cos_q_l,
            stride_cos_q_w, stride_sin_q_l, stride_sin_q_w,
            K * R, R, Q_HEADS, ROWS, D, WIDTH, PITCH, START, W_Q, PAIRS, INTERLEAVED, ADJOINT,
        )  # fmt: skip
    else:
        KEY_PARTS: tl.constexpr = K // K_HEADS
        part = pid - query_programs
        b = part // KEY_PARTS % B
        turn_heads(
            k_ptr,
            cos_k_ptr + b.to(tl.int64) * stride_cos_k_b,
            sin_k_ptr + b.to(tl.int64) * stride_sin_k_b,
            k_out_ptr, b, part % KEY_PARTS * K_HEADS,
            part // KEY_PARTS // B * ROWS + tl.arange(0, ROWS), S,
            stride_k_b, stride_k_k, 0, stride_k_s, stride_k_d, stride_cos_k_s, stride_cos_k_w,
            stride_sin_k_s, stride_sin_k_w,
            K, 1, K_HEADS, ROWS, D, WIDTH, PITCH, START, W_K, PAIRS, INTERLEAVED, ADJOINT,
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
    query_slot, key_slot = pair
    B, L, S, K, R, *_ = attention.sizes
    D = tensors[key_slot].shape[-1]
    width = 1 << (D - 1).bit_length()
    rows = max(1, TILE // width)
    heads = {name: math.gcd(n, HEADS) for name, n in (("q", K * R), ("k", K))}
    query_programs = -(-L // rows) * B * K * R // heads["q"]
    key_programs = -(-S // rows) * B * K // heads["k"]
    query_programs *= names[query_slot] != query_slot
    key_programs *= names[key_slot] != key_slot
    scalars: dict[str, Any] = named_strides("q", tensors.get(query_slot), "blkrd")
    scalars |= named_strides("k", tensors[key_slot], "bskd")
    given = {name: x for name, x in tensors.items() if name[4:] in turned and name[4:] in pair}
    for name, letters in (("cos_q", "blw"), ("sin_q", "blw"), ("cos_k", "bsw"), ("sin_k", "bsw")):
        scalars |= named_strides(name, given.get(name), letters)
    scalars |= {"B": B, "L": L, "S": S, "query_programs": query_programs, "K": K, "R": R, "D": D}
    scalars |= {"WIDTH": width, "ROWS": rows, "PITCH": pitch}
    scalars |= {"Q_HEADS": heads["q"], "K_HEADS": heads["k"]}
    scalars |= {"START": attention.rope_start, "INTERLEAVED": attention.rope_interleaved}
    scalars |= {"ADJOINT": is_adjoint}
    widths = {x: given[f"cos_{x}"].shape[-1] if f"cos_{x}" in given else 0 for x in ("q", "k")}
    scalars |= {f"W_{x.upper()}": W for x, W in widths.items()}
    scalars |= {"PAIRS": 1 << (max(*widths.values(), 2) // 2 - 1).bit_length()}
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

"""Operands as the forward that returns its weights streams them: q and k rotated, all of them
rounded to tf32, V turned.

Grid: tiles of 32 rows of q, then of k, then of v. Hopper's tensor cores take tf32 right operands
only with the summed dimension contiguous, so V lies as [B, K, E, keys] here, padded with zeros to
whole vectors; once per call instead of once per tile. SPLIT: what rounding took away follows,
rounded itself, as a second tensor behind the first. PAIRED: see `paired`.
"""

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from inductor_gqa.kernels.plan import Attention, Launch, Operand, named_strides
from inductor_gqa.kernels.rotate import lanes, load_lanes
from inductor_gqa.kernels.tiles import head_offset, load_tile, offsets, round_to_tf32


@triton.jit
def paired(x):
    """Rows in another order within every eight: 0 2 4 6 1 3 5 7. A thread holds scores of keys 2 c
    and 2 c + 1, and of a left operand columns c and c + 4."""
    ROWS: tl.constexpr = x.shape[0]
    COLUMNS: tl.constexpr = x.shape[1]
    pairs = tl.reshape(x, (ROWS // 8, 4, 2, COLUMNS))
    return tl.reshape(tl.permute(pairs, (0, 2, 1, 3)), (ROWS, COLUMNS))


@triton.jit
def prepared_tile(
    x_ptr, cos_ptr, sin_ptr, y_ptr, part, rows, n_rows,
    stride_x, stride_xd, stride_cos, stride_cosw, stride_sin, stride_sinw, stride_y,
    START: tl.constexpr, W: tl.constexpr, INTERLEAVED: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr,
    ROUND: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """One head's rows of q or k."""
    cols = tl.arange(0, DP)
    y = load_tile(x_ptr, rows, stride_x, stride_xd, n_rows, 0, DP, D)
    if W:
        is_turned, partner, sign = lanes(cols, START, W, INTERLEAVED)
        other = load_lanes(x_ptr, rows, partner, is_turned, stride_x, stride_xd, n_rows, 0.0)
        cos = load_lanes(
            cos_ptr, rows, cols - START, is_turned, stride_cos, stride_cosw, n_rows, 1.0
        )
        sin = load_lanes(
            sin_ptr, rows, cols - START, is_turned, stride_sin, stride_sinw, n_rows, 0.0
        )
        y = (y.to(tl.float32) * cos + other * (sin * sign[None, :])).to(y_ptr.dtype.element_ty)
    inside = (rows[:, None] < n_rows) & (cols < D)[None, :]
    store_parts(
        y_ptr + offsets(rows[:, None], cols[None, :], stride_y, 1), part, y, inside, ROUND, SPLIT
    )


@triton.jit
def store_parts(at, part, x, inside, ROUND: tl.constexpr, SPLIT: tl.constexpr):
    """`part`: elements from a rounded number to the rest of it."""
    near = x
    if ROUND:
        near = round_to_tf32(x)
    tl.store(at, near, mask=inside)
    if SPLIT:
        tl.store(at + part, round_to_tf32(x - near), mask=inside)


@triton.jit
def prepare_kernel(
    q_ptr, k_ptr, v_ptr, cos_q_ptr, sin_q_ptr, cos_k_ptr, sin_k_ptr, q_out_ptr, k_out_ptr,
    v_out_ptr,
    stride_q_b, stride_q_l, stride_q_k, stride_q_r, stride_q_d, stride_k_b, stride_k_s, stride_k_k,
    stride_k_d,
    stride_v_b, stride_v_s, stride_v_k, stride_v_e,
    stride_cos_q_b, stride_cos_q_l, stride_cos_q_w, stride_sin_q_b, stride_sin_q_l, stride_sin_q_w,
    stride_cos_k_b, stride_cos_k_s, stride_cos_k_w, stride_sin_k_b, stride_sin_k_s, stride_sin_k_w,
    B, L, S, pitch, query_programs, key_programs, key_part, value_part,
    K: tl.constexpr, R: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr,
    EP: tl.constexpr,
    START: tl.constexpr, W_Q: tl.constexpr, W_K: tl.constexpr, INTERLEAVED: tl.constexpr,
    ROUND_Q: tl.constexpr, ROUND: tl.constexpr, SPLIT: tl.constexpr, PAIRED: tl.constexpr,
    ROWS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """EARLY (sm_90): the launch before this one may still run, and the next may begin."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    # Heads vary fastest: neighbours share the rows of cos and sin in L2.
    pid = tl.program_id(0)
    if pid < query_programs:
        b = pid // (K * R) % B
        k = pid % (K * R) // R
        r = pid % R
        rows = pid // (K * R) // B * ROWS + tl.arange(0, ROWS)
        prepared_tile(
            q_ptr + head_offset(b, k, r, stride_q_b, stride_q_k, stride_q_r),
            cos_q_ptr + b.to(tl.int64) * stride_cos_q_b,
            sin_q_ptr + b.to(tl.int64) * stride_sin_q_b,
            q_out_ptr + (b.to(tl.int64) * L * K * R + k * R + r) * D, 0, rows, L,
            stride_q_l, stride_q_d, stride_cos_q_l, stride_cos_q_w, stride_sin_q_l, stride_sin_q_w,
            K * R * D,
            START, W_Q, INTERLEAVED, D, DP, ROUND_Q, False,
        )  # fmt: skip
    elif pid < query_programs + key_programs:
        part = pid - query_programs
        b = part // K % B
        k = part % K
        rows = part // K // B * ROWS + tl.arange(0, ROWS)
        prepared_tile(
            k_ptr + head_offset(b, k, k, stride_k_b, stride_k_k, 0),
            cos_k_ptr + b.to(tl.int64) * stride_cos_k_b,
            sin_k_ptr + b.to(tl.int64) * stride_sin_k_b,
            k_out_ptr + (b.to(tl.int64) * S * K + k) * D, tl.cast(key_part, tl.int64), rows, S,
            stride_k_s, stride_k_d, stride_cos_k_s, stride_cos_k_w, stride_sin_k_s, stride_sin_k_w,
            K * D,
            START, W_K, INTERLEAVED, D, DP, ROUND, SPLIT,
        )  # fmt: skip
    else:
        part = pid - query_programs - key_programs
        b = part // K % B
        k = part % K
        rows = part // K // B * ROWS + tl.arange(0, ROWS)
        cols = tl.arange(0, EP)
        v = load_tile(
            v_ptr + head_offset(b, k, k, stride_v_b, stride_v_k, 0), rows, stride_v_s, stride_v_e,
            S, 0, EP, E
        )  # fmt: skip
        if PAIRED:
            v = paired(v)
        to = (
            v_out_ptr
            + (b.to(tl.int64) * K + k) * E * pitch
            + offsets(cols[:, None], rows[None, :], pitch, 1)
        )
        inside = (cols < E)[:, None] & (rows < pitch)[None, :]
        store_parts(to, tl.cast(value_part, tl.int64), v.T, inside, ROUND, SPLIT)


def plan_preparation(
    attention: Attention, is_rounded: bool
) -> tuple[dict[str, Operand], tuple[Launch, ...], dict[str, str]]:
    """Scratch tensors, at most one launch, and which slots the attention reads for q, k and v.

    q and k are prepared if they turn, and everything if tf32 is wanted and `is_rounded` does not
    say that it is there. A v whose keys are contiguous is then taken as it is.
    """
    tensors = attention.tensors
    is_tf32 = attention.dot_precision == "tf32"
    wants = {name: f"cos_{name}" in tensors or (is_tf32 and not is_rounded) for name in ("q", "k")}
    wants["v"] = is_tf32 and not (is_rounded and tensors["v"].strides[1] == 1)
    names = {name: f"{name}_prepared" if wants[name] else name for name in wants}
    if not any(wants.values()):
        return {}, (), names
    scratch, launch = preparation(attention, wants, is_tf32)
    return scratch, (launch,), names


def preparation(
    attention: Attention,
    wants: Mapping[str, bool],
    is_rounded: bool,
    parts: int = 0,
    is_paired: bool = False,
    is_early: bool = False,
) -> tuple[dict[str, Operand], Launch]:
    """Writes `x_prepared` for every x of q, k and v that is wanted: [B, L, K, R, D], [B, S, K, D]
    and [B, K, E, pitch], rounded to tf32 or not.

    `parts` 1 or 2 puts a dimension of that size in front of k and v: rounded numbers, and what
    rounding took from them; q is then left to the attention to round. `is_early` as of a `Launch`.
    """
    tensors = attention.tensors
    B, L, S, K, R, D, E = attention.sizes
    pitch = -(-S // 16) * 16
    rows = 32
    programs = {
        "q": -(-L // rows) * B * K * R if wants["q"] else 0,
        "k": -(-S // rows) * B * K if wants["k"] else 0,
        "v": -(-pitch // rows) * B * K if wants["v"] else 0,
    }
    scalars: dict[str, Any] = {"B": B, "L": L, "S": S, "pitch": pitch}
    scalars |= {
        "query_programs": programs["q"],
        "key_programs": programs["k"],
        "key_part": B * S * K * D,
        "value_part": B * K * E * pitch,
        "ROWS": rows,
        "ROUND_Q": is_rounded and parts == 0,
        "ROUND": is_rounded,
        "SPLIT": parts == 2,
        "PAIRED": is_paired,
        "EARLY": is_early,
    }
    scalars |= {
        "K": K,
        "R": R,
        "D": D,
        "E": E,
        "DP": 1 << (D - 1).bit_length(),
        "EP": 1 << (E - 1).bit_length(),
    }
    scalars |= {"START": attention.rope_start, "INTERLEAVED": attention.rope_interleaved}
    layouts = {
        "q": "blkrd",
        "k": "bskd",
        "v": "bske",
        "cos_q": "blw",
        "sin_q": "blw",
        "cos_k": "bsw",
        "sin_k": "bsw",
    }
    for name, letters in layouts.items():
        scalars |= named_strides(name, tensors.get(name), letters)
    scalars |= {
        f"W_{x.upper()}": tensors[f"cos_{x}"].shape[-1] if f"cos_{x}" in tensors else 0
        for x in ("q", "k")
    }
    sources = {f"{name}_ptr": name if name in tensors else "q" for name in layouts}
    sources |= {f"{x}_out_ptr": f"{x}_prepared" if wants[x] else x for x in ("q", "k", "v")}
    grid = (sum(programs.values()),)
    launch = Launch(prepare_kernel, grid, sources, scalars, 4, 1, is_early=is_early)
    in_front = (parts,) if parts else ()
    shapes = {"q": tensors["q"].shape, "k": (*in_front, *tensors["k"].shape)}
    shapes["v"] = (*in_front, B, K, E, pitch)
    scratch = {
        f"{x}_prepared": Operand.contiguous(shapes[x], tensors[x].dtype) for x in shapes if wants[x]
    }
    return scratch, launch

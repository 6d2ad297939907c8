"""Attention forward: O = softmax(scores(scale * Q K^T)) V and LSE_BKRL in base 2; one program per
query tile and head.

Q, the running maximum and sum and the accumulators stay on chip, K and V stream. Widths that are no
power of two lie in two chunks (96 = 64 + 32). Assumes q and k already rotated; any strides. Tiling
and online softmax after FlashAttention-2.
"""

# ruff: noqa: RET505 (Triton compiles both ways out of a branch only when they are spelt out)

from typing import Any

import torch
import triton
import triton.language as tl

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
from inductor_gqa.kernels.rules import BAND_LO, EMPTY_ROWS, KEEP, SHIFTED, SINK
from inductor_gqa.kernels.tiles import (
    LOG2E,
    add_product,
    head_offset,
    kept,
    keys_of,
    load_tile,
    log_sum_exp,
    product,
    scores,
    single,
    softmax_step,
    store_tile,
    stream_tile,
)


@triton.jit
def attend(
    acc1, acc2, m, total, q1, q2, k_src, v_src, b, head, rows, lo, hi,
    stride_k_s, stride_k_d, stride_v_s, stride_v_e, unit, bias, mask, key_mask, keep, numbers,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, E: tl.constexpr, E1: tl.constexpr,
    E2: tl.constexpr,
    BN: tl.constexpr, RULES: tl.constexpr, EDGE: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """Online softmax over the key tiles in [lo, hi)."""
    S = numbers[1]
    for n0 in tl.range(lo, hi, BN):
        cols = n0 + tl.arange(0, BN)
        k1 = stream_tile(k_src, b, n0, head, stride_k_s, stride_k_d, S, BN, 0, D1, D, EDGE, TMA)
        s = product(q1, k1.T, PRECISION)
        if D2:
            k2 = stream_tile(
                k_src, b, n0, head, stride_k_s, stride_k_d, S, BN, D1, D2, D, EDGE, TMA
            )
            s = add_product(s, q2, k2.T, PRECISION)
        s = scores(s, rows[:, None], cols[None, :], bias, mask, key_mask, numbers, RULES, EDGE)
        m, p, shrink = softmax_step(s, m, unit, RULES)
        total = total * shrink + tl.sum(p, 1)
        if KEEP & RULES:
            p = tl.where(kept(rows[:, None], cols[None, :], keep, numbers[0], S), p, 0.0)
        acc1 = acc1 * shrink[:, None]
        v1 = stream_tile(v_src, b, n0, head, stride_v_s, stride_v_e, S, BN, 0, E1, E, EDGE, TMA)
        p = p.to(v1.dtype)
        acc1 = add_product(acc1, p, v1, PRECISION)
        if E2:
            v2 = stream_tile(
                v_src, b, n0, head, stride_v_s, stride_v_e, S, BN, E1, E2, E, EDGE, TMA
            )
            acc2 = add_product(acc2 * shrink[:, None], p, v2, PRECISION)
    return acc1, acc2, m, total


@triton.jit
def add_all_values(
    acc1, acc2, is_empty, v_src, b, head, rows, end, stride_v_s, stride_v_e, keep, L, S,
    E: tl.constexpr, E1: tl.constexpr, E2: tl.constexpr, BN: tl.constexpr,
    RULES: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Adds the plain sum of V to rows that saw no key: eager makes those uniform over all S."""
    for n0 in tl.range(0, end, BN):
        cols = n0 + tl.arange(0, BN)
        counts = is_empty[:, None] & (cols < S)[None, :]
        if KEEP & RULES:
            counts = counts & kept(rows[:, None], cols[None, :], keep, L, S)
        v1 = stream_tile(v_src, b, n0, head, stride_v_s, stride_v_e, S, BN, 0, E1, E, True, TMA)
        p = tl.where(counts, 1.0, 0.0).to(v1.dtype)
        acc1 = add_product(acc1, p, v1, PRECISION)
        if E2:
            v2 = stream_tile(
                v_src, b, n0, head, stride_v_s, stride_v_e, S, BN, E1, E2, E, True, TMA
            )
            acc2 = add_product(acc2, p, v2, PRECISION)
    return acc1, acc2


@triton.jit
def first_sum(
    sink_ptr, k, r, stride_sink_k, stride_sink_r, ROWS: tl.constexpr, RULES: tl.constexpr
):
    """Running maximum and sum before the first key: nothing, or the sink's share."""
    if SINK & RULES:
        sink = tl.load(sink_ptr + k * stride_sink_k + r * stride_sink_r).to(tl.float32)
        if not (SHIFTED & RULES):
            sink = sink * LOG2E
        return tl.zeros([ROWS], tl.float32) + sink, tl.full([ROWS], 1.0, tl.float32)
    else:
        return tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)


@triton.jit
def forward_kernel(
    q_ptr, k_src, v_src, out_ptr, lse_ptr, bias_ptr, mask_ptr, key_mask_ptr, keep_ptr, sink_ptr,
    stride_q_b, stride_q_l, stride_q_k, stride_q_r, stride_q_d,
    stride_k_b, stride_k_s, stride_k_k, stride_k_d, stride_v_b, stride_v_s, stride_v_k, stride_v_e,
    stride_bias_b, stride_bias_k, stride_bias_r, stride_bias_l, stride_bias_s,
    stride_mask_b, stride_mask_k, stride_mask_r, stride_mask_l, stride_mask_s, stride_key_mask_b,
    stride_key_mask_s,
    stride_keep_b, stride_keep_k, stride_keep_r, stride_keep_l, stride_keep_s, stride_sink_k,
    stride_sink_r,
    B, L, S, scale, unit, softcap, fill, band_lo, band_hi, keep_scale,
    K: tl.constexpr, R: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    E: tl.constexpr, E1: tl.constexpr, E2: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    RULES: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    scale, unit, softcap = single(scale), single(unit), single(softcap)
    fill, keep_scale = single(fill), single(keep_scale)
    # Longest first: under a causal mask the last rows carry the most work and must not be what the
    # grid ends on. Heads vary fastest: the query heads of one key head run side by side and share
    # its K and V in L2.
    pid = tl.program_id(0)
    heads = B * K * R
    row0 = (tl.cdiv(L, BM) - 1 - pid // heads) * BM
    bh = pid % heads
    b = bh // (K * R)
    k = bh % (K * R) // R
    r = bh % R
    rows = row0 + tl.arange(0, BM)

    q_ptr += head_offset(b, k, r, stride_q_b, stride_q_k, stride_q_r)
    q1 = load_tile(q_ptr, rows, stride_q_l, stride_q_d, L, 0, D1, D)
    q2 = q1
    if D2:
        q2 = load_tile(q_ptr, rows, stride_q_l, stride_q_d, L, D1, D2, D)
    if not TMA:
        k_src += head_offset(b, k, r, stride_k_b, stride_k_k, 0)
        v_src += head_offset(b, k, r, stride_v_b, stride_v_k, 0)
    bias = (
        bias_ptr + head_offset(b, k, r, stride_bias_b, stride_bias_k, stride_bias_r),
        stride_bias_l,
        stride_bias_s,
    )
    mask = (
        mask_ptr + head_offset(b, k, r, stride_mask_b, stride_mask_k, stride_mask_r),
        stride_mask_l,
        stride_mask_s,
    )
    keep = (
        keep_ptr + head_offset(b, k, r, stride_keep_b, stride_keep_k, stride_keep_r),
        stride_keep_l,
        stride_keep_s,
    )
    key_mask = (key_mask_ptr + b.to(tl.int64) * stride_key_mask_b, stride_key_mask_s)
    numbers = (L, S, scale, softcap, fill, band_lo, band_hi)

    m, total = first_sum(sink_ptr, k, r, stride_sink_k, stride_sink_r, BM, RULES)
    acc1 = tl.zeros([BM, E1], tl.float32)
    acc2 = tl.zeros([BM, E2 if E2 else 16], tl.float32)
    lo, full_lo, full_hi, hi = keys_of(
        row0, tl.minimum(row0 + BM, L), S, band_lo, band_hi, BN, RULES
    )
    if BAND_LO & RULES:
        acc1, acc2, m, total = attend(
            acc1, acc2, m, total, q1, q2, k_src, v_src, b, k, rows, lo, full_lo,
            stride_k_s, stride_k_d, stride_v_s, stride_v_e, unit, bias, mask, key_mask, keep,
            numbers,
            D, D1, D2, E, E1, E2, BN, RULES, 2, PRECISION, TMA,
        )  # fmt: skip
    acc1, acc2, m, total = attend(
        acc1, acc2, m, total, q1, q2, k_src, v_src, b, k, rows, full_lo, full_hi,
        stride_k_s, stride_k_d, stride_v_s, stride_v_e, unit, bias, mask, key_mask, keep, numbers,
        D, D1, D2, E, E1, E2, BN, RULES, 0, PRECISION, TMA,
    )  # fmt: skip
    acc1, acc2, m, total = attend(
        acc1, acc2, m, total, q1, q2, k_src, v_src, b, k, rows, full_hi, hi,
        stride_k_s, stride_k_d, stride_v_s, stride_v_e, unit, bias, mask, key_mask, keep, numbers,
        D, D1, D2, E, E1, E2, BN, RULES, 2, PRECISION, TMA,
    )  # fmt: skip

    lse = log_sum_exp(m, total, RULES)
    if EMPTY_ROWS & RULES:
        is_empty = (m == float("-inf")) & (rows < L)
        end = tl.max(is_empty.to(tl.int32), 0) * S
        acc1, acc2 = add_all_values(
            acc1, acc2, is_empty, v_src, b, k, rows, end, stride_v_s, stride_v_e, keep, L, S,
            E, E1, E2, BN, RULES, PRECISION, TMA,
        )  # fmt: skip
        total = tl.where(is_empty, S, total)
        lse = tl.where(is_empty, float("inf"), lse)

    # A row without a visible key is 0 / 0 here, NaN as in eager, unless EMPTY_ROWS filled it.
    out_ptr += (b.to(tl.int64) * L * K * R + k * R + r) * E
    store_tile(out_ptr, acc1 / total[:, None] * keep_scale, rows, K * R * E, L, 0, E1, E)
    if E2:
        store_tile(out_ptr, acc2 / total[:, None] * keep_scale, rows, K * R * E, L, E1, E2, E)
    tl.store(lse_ptr + bh.to(tl.int64) * L + rows, lse, mask=rows < L)


def plan_forward(attention: Attention, use_descriptors: bool | None = None) -> Plan:
    """Launches for `attention`: a rotation if there are tables, then the forward kernel. Results:
    out, lse.

    `use_descriptors` None: where the device and the strides allow it; True overrules the device,
    not the strides.
    """
    tensors = attention.tensors
    B, L, _, K, R, _, E = attention.sizes
    if use_descriptors is None:
        use_descriptors = attention.has_descriptors
    copied = to_copy(tensors, ("k", "v"), use_descriptors)
    scratch, launches, names = plan_rotation(attention, copied)
    operands = {**tensors, **scratch}
    q, k, v = (operands[names[name]] for name in ("q", "k", "v"))
    use_descriptors = use_descriptors and can_describe(k, v)
    tiles = attention.config("descriptors" if use_descriptors else "pointers").forward
    sources, scalars = score_arguments(attention)
    scalars |= (
        named_strides("q", q, "blkrd")
        | named_strides("k", k, "bskd")
        | named_strides("v", v, "bske")
    )
    scalars |= named_strides("sink", tensors.get("sink"), "kr")
    scalars |= {"BM": tiles.BM, "BN": tiles.BN, "TMA": use_descriptors}
    sources |= {"q_ptr": names["q"], "out_ptr": "out", "lse_ptr": "lse"}
    sources |= {"sink_ptr": "sink" if "sink" in tensors else "q"}
    streams = {"k_src": (names["k"], k), "v_src": (names["v"], v)}
    boxes = described(streams, tiles.BN) if use_descriptors else {}
    pointers = {} if use_descriptors else {name: slot for name, (slot, _) in streams.items()}
    launch = Launch(
        forward_kernel,
        (-(-L // tiles.BM) * B * K * R,),
        sources | pointers,
        scalars,
        tiles.num_warps,
        tiles.num_stages,
        boxes,
    )
    outputs = {
        "out": Operand.contiguous((B, L, K, R, E), v.dtype),
        "lse": Operand.contiguous((B, K, R, L), torch.float32),
    }
    return Plan(scratch | outputs, (*launches, launch), ("out", "lse"))


def collect(
    tensors: dict[str, torch.Tensor | None], numbers: dict[str, Any]
) -> tuple[dict[str, torch.Tensor], Attention]:
    """The tensors that are given, and the same call without its data."""
    given = {name: x for name, x in tensors.items() if x is not None}
    q = given["q"]
    capability = torch.cuda.get_device_capability(q.device) if q.is_cuda else None
    return given, Attention(
        {name: Operand.of(x) for name, x in given.items()}, capability=capability, **numbers
    )


def attention_forward(
    q_BLKRD: torch.Tensor,
    k_BSKD: torch.Tensor,
    v_BSKE: torch.Tensor,
    *,
    cos_q: torch.Tensor | None = None,
    sin_q: torch.Tensor | None = None,
    cos_k: torch.Tensor | None = None,
    sin_k: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    key_mask: torch.Tensor | None = None,
    keep: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    scale: float,
    softcap: float = 0.0,
    band_lo: int | None = None,
    band_hi: int | None = None,
    fill: float = float("-inf"),
    fill_adds: bool = False,
    rope_start: int = 0,
    rope_interleaved: bool = False,
    keep_scale: float = 1.0,
    precision: str = "ieee",
) -> tuple[torch.Tensor, torch.Tensor]:
    """out_BLKRE in v's dtype and lse_BKRL (fp32, base 2), both contiguous.

    Tables are [B, L, W] and [B, S, W], bias, mask and keep [B, K, R, L, S], key_mask [B, S], sink
    [K, R]; strides are free.
    """
    tensors, attention = collect(
        {
            "q": q_BLKRD,
            "k": k_BSKD,
            "v": v_BSKE,
            "cos_q": cos_q,
            "sin_q": sin_q,
            "cos_k": cos_k,
            "sin_k": sin_k,
        }
        | {"bias": bias, "mask": mask, "key_mask": key_mask, "keep": keep, "sink": sink},
        {"scale": scale, "softcap": softcap, "band_lo": band_lo, "band_hi": band_hi, "fill": fill}
        | {"fill_adds": fill_adds, "rope_start": rope_start, "rope_interleaved": rope_interleaved}
        | {"keep_scale": keep_scale, "precision": precision},
    )
    out, lse = execute(plan_forward(attention), tensors)
    return out, lse

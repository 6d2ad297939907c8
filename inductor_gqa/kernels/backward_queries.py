"""dQ of one query tile: dQ = scale * dS K with dS = P (dO V^T - delta). Grid: query tiles x heads,
heads fastest.

Q, dO and the accumulator stay on chip, K and V stream. Assumes q and k already rotated; the
gradient is turned back before it is stored.
"""

import triton
import triton.language as tl

from inductor_gqa.kernels.rotate import store_gradient
from inductor_gqa.kernels.rules import BAND_LO, EMPTY_ROWS, FILL_ADDS, KEEP, SHIFTED
from inductor_gqa.kernels.tiles import (
    add_product,
    filled_rows,
    head_offset,
    kept,
    keys_of,
    load_tile,
    probabilities,
    product,
    score_gradient,
    scores,
    single,
    stream_tile,
)


@triton.jit
def add_keys(
    dq1, dq2, q1, q2, do1, do2, origin, rest, delta, k_src, v_src, b, head, rows, lo, hi,
    stride_k_s, stride_k_d, stride_v_s, stride_v_e, unit, keep_scale, bias, mask, key_mask, keep,
    numbers,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, E: tl.constexpr, E1: tl.constexpr,
    E2: tl.constexpr,
    BN: tl.constexpr, RULES: tl.constexpr, EDGE: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """Adds the share of the key tiles in [lo, hi)."""
    L = numbers[0]
    S = numbers[1]
    i = rows[:, None]
    for n0 in tl.range(lo, hi, BN):
        j = (n0 + tl.arange(0, BN))[None, :]
        k1 = stream_tile(k_src, b, n0, head, stride_k_s, stride_k_d, S, BN, 0, D1, D, EDGE, TMA)
        k2 = k1
        if D2:
            k2 = stream_tile(
                k_src, b, n0, head, stride_k_s, stride_k_d, S, BN, D1, D2, D, EDGE, TMA
            )
        qk = product(q1, k1.T, PRECISION)
        if D2:
            qk = add_product(qk, q2, k2.T, PRECISION)
        s = scores(qk, i, j, bias, mask, key_mask, numbers, RULES, EDGE)
        p = probabilities(s, origin[:, None], rest[:, None], unit, RULES)
        if EMPTY_ROWS & RULES and FILL_ADDS & RULES:
            p = filled_rows(p, rest, rows, L, S, 1)
        v1 = stream_tile(v_src, b, n0, head, stride_v_s, stride_v_e, S, BN, 0, E1, E, EDGE, TMA)
        dp = product(do1, v1.T, PRECISION)
        if E2:
            v2 = stream_tile(
                v_src, b, n0, head, stride_v_s, stride_v_e, S, BN, E1, E2, E, EDGE, TMA
            )
            dp = add_product(dp, do2, v2.T, PRECISION)
        if KEEP & RULES:
            dp = tl.where(kept(i, j, keep, L, S), dp * keep_scale, 0.0)
        ds = score_gradient(p, dp, delta[:, None], qk, i, j, mask, key_mask, numbers, RULES, EDGE)
        ds = ds.to(k1.dtype)
        dq1 = add_product(dq1, ds, k1, PRECISION)
        if D2:
            dq2 = add_product(dq2, ds, k2, PRECISION)
    return dq1, dq2


@triton.jit
def queries_kernel(
    q_ptr, k_src, v_src, grad_out_ptr, dq_ptr, origin_ptr, rest_ptr, delta_ptr,
    bias_ptr, mask_ptr, key_mask_ptr, keep_ptr, cos_ptr, sin_ptr,
    stride_q_b, stride_q_l, stride_q_k, stride_q_r, stride_q_d,
    stride_k_b, stride_k_s, stride_k_k, stride_k_d, stride_v_b, stride_v_s, stride_v_k, stride_v_e,
    stride_grad_out_b, stride_grad_out_l, stride_grad_out_k, stride_grad_out_r, stride_grad_out_e,
    stride_bias_b, stride_bias_k, stride_bias_r, stride_bias_l, stride_bias_s,
    stride_mask_b, stride_mask_k, stride_mask_r, stride_mask_l, stride_mask_s, stride_key_mask_b,
    stride_key_mask_s,
    stride_keep_b, stride_keep_k, stride_keep_r, stride_keep_l, stride_keep_s,
    stride_cos_b, stride_cos_n, stride_cos_w, stride_sin_b, stride_sin_n, stride_sin_w,
    B, L, S, scale, unit, softcap, fill, band_lo, band_hi, keep_scale,
    K: tl.constexpr, R: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    E: tl.constexpr, E1: tl.constexpr, E2: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    START: tl.constexpr, W: tl.constexpr, INTERLEAVED: tl.constexpr,
    RULES: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    scale, unit, softcap = single(scale), single(unit), single(softcap)
    fill, keep_scale = single(fill), single(keep_scale)
    # Longest first, as in the forward.
    pid = tl.program_id(0)
    heads = B * K * R
    row0 = (tl.cdiv(L, BM) - 1 - pid // heads) * BM
    bh = pid % heads
    b = bh // (K * R)
    k = bh % (K * R) // R
    r = bh % R
    rows = row0 + tl.arange(0, BM)

    q_ptr += head_offset(b, k, r, stride_q_b, stride_q_k, stride_q_r)
    grad_out_ptr += head_offset(b, k, r, stride_grad_out_b, stride_grad_out_k, stride_grad_out_r)
    q1 = load_tile(q_ptr, rows, stride_q_l, stride_q_d, L, 0, D1, D)
    do1 = load_tile(grad_out_ptr, rows, stride_grad_out_l, stride_grad_out_e, L, 0, E1, E)
    q2 = q1
    do2 = do1
    if D2:
        q2 = load_tile(q_ptr, rows, stride_q_l, stride_q_d, L, D1, D2, D)
    if E2:
        do2 = load_tile(grad_out_ptr, rows, stride_grad_out_l, stride_grad_out_e, L, E1, E2, E)
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
    at = bh.to(tl.int64) * L + rows
    rest = tl.load(rest_ptr + at, mask=rows < L, other=float("inf"))
    delta = tl.load(delta_ptr + at, mask=rows < L, other=0.0)
    origin = rest
    if SHIFTED & RULES:
        origin = tl.load(origin_ptr + at, mask=rows < L, other=0.0)

    dq1 = tl.zeros([BM, D1], tl.float32)
    dq2 = tl.zeros([BM, D2 if D2 else 16], tl.float32)
    lo, full_lo, full_hi, hi = keys_of(
        row0, tl.minimum(row0 + BM, L), S, band_lo, band_hi, BN, RULES
    )
    if EMPTY_ROWS & RULES and FILL_ADDS & RULES:
        # Rows that saw no key pass gradient to all of them, those outside the band included.
        sees_all = tl.max(((rest == float("inf")) & (rows < L)).to(tl.int32), 0) > 0
        # Then every tile goes to the last loop, which starts on a tile border again.
        lo = tl.where(sees_all, 0, lo)
        full_lo = tl.where(sees_all, 0, full_lo)
        full_hi = tl.where(sees_all, 0, full_hi)
        hi = tl.where(sees_all, S, hi)
    if BAND_LO & RULES:
        dq1, dq2 = add_keys(
            dq1, dq2, q1, q2, do1, do2, origin, rest, delta, k_src, v_src, b, k, rows, lo, full_lo,
            stride_k_s, stride_k_d, stride_v_s, stride_v_e, unit, keep_scale, bias, mask, key_mask,
            keep, numbers,
            D, D1, D2, E, E1, E2, BN, RULES, 2, PRECISION, TMA,
        )  # fmt: skip
    dq1, dq2 = add_keys(
        dq1, dq2, q1, q2, do1, do2, origin, rest, delta, k_src, v_src, b, k, rows, full_lo, full_hi,
        stride_k_s, stride_k_d, stride_v_s, stride_v_e, unit, keep_scale, bias, mask, key_mask,
        keep, numbers,
        D, D1, D2, E, E1, E2, BN, RULES, 0, PRECISION, TMA,
    )  # fmt: skip
    dq1, dq2 = add_keys(
        dq1, dq2, q1, q2, do1, do2, origin, rest, delta, k_src, v_src, b, k, rows, full_hi, hi,
        stride_k_s, stride_k_d, stride_v_s, stride_v_e, unit, keep_scale, bias, mask, key_mask,
        keep, numbers,
        D, D1, D2, E, E1, E2, BN, RULES, 2, PRECISION, TMA,
    )  # fmt: skip
    store_gradient(
        dq1 * scale, dq2 * scale, dq_ptr + (b.to(tl.int64) * L * K * R + k * R + r) * D, rows,
        K * R * D, L,
        cos_ptr + b.to(tl.int64) * stride_cos_b, sin_ptr + b.to(tl.int64) * stride_sin_b,
        stride_cos_n, stride_cos_w, stride_sin_n, stride_sin_w, D, D1, D2, START, W, INTERLEAVED,
    )  # fmt: skip

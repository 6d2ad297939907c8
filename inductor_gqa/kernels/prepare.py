"""What the backward needs of each query row before it starts: delta = rowsum(dO * O), and where
log-sum-exp is too coarse its two parts. Grid: query tiles x heads, heads fastest.

With a bias or a finite fill a row's scores may all be -1e9 or finfo.min: fp32 then cannot hold
maximum + log2(sum) in one number, and P would be off by any factor. Rows so far down get their
maximum and sum again from Q K^T; others cost nothing.
"""

import triton
import triton.language as tl

from inductor_gqa.kernels.forward import first_sum
from inductor_gqa.kernels.tiles import (
    add_product,
    head_offset,
    keys_of,
    load_tile,
    product,
    scores,
    single,
    softmax_step,
    stream_tile,
)

COARSE = tl.constexpr(-64.0)  # below it an ulp of LSE exceeds 4e-6, a visible error of P in fp32


@triton.jit
def delta_kernel(
    out_ptr, grad_out_ptr, delta_ptr,
    stride_grad_out_b, stride_grad_out_l, stride_grad_out_k, stride_grad_out_r, stride_grad_out_e,
    B, L,
    K: tl.constexpr, R: tl.constexpr, E: tl.constexpr, E1: tl.constexpr, E2: tl.constexpr,
    BM: tl.constexpr,
):  # fmt: skip
    heads = B * K * R
    bh = tl.program_id(0) % heads
    b = bh // (K * R)
    k = bh % (K * R) // R
    r = bh % R
    rows = tl.program_id(0) // heads * BM + tl.arange(0, BM)
    out_ptr += (b.to(tl.int64) * L * K * R + k * R + r) * E
    grad_out_ptr += head_offset(b, k, r, stride_grad_out_b, stride_grad_out_k, stride_grad_out_r)
    out = load_tile(out_ptr, rows, K * R * E, 1, L, 0, E1, E).to(tl.float32)
    grad_out = load_tile(grad_out_ptr, rows, stride_grad_out_l, stride_grad_out_e, L, 0, E1, E)
    delta = tl.sum(out * grad_out.to(tl.float32), 1)
    if E2:
        out = load_tile(out_ptr, rows, K * R * E, 1, L, E1, E2, E).to(tl.float32)
        grad_out = load_tile(grad_out_ptr, rows, stride_grad_out_l, stride_grad_out_e, L, E1, E2, E)
        delta += tl.sum(out * grad_out.to(tl.float32), 1)
    tl.store(delta_ptr + bh.to(tl.int64) * L + rows, delta, mask=rows < L)


@triton.jit
def origin_kernel(
    q_ptr, k_ptr, lse_ptr, origin_ptr, rest_ptr, bias_ptr, mask_ptr, key_mask_ptr, keep_ptr,
    sink_ptr,
    stride_q_b, stride_q_l, stride_q_k, stride_q_r, stride_q_d, stride_k_b, stride_k_s, stride_k_k,
    stride_k_d,
    stride_bias_b, stride_bias_k, stride_bias_r, stride_bias_l, stride_bias_s,
    stride_mask_b, stride_mask_k, stride_mask_r, stride_mask_l, stride_mask_s, stride_key_mask_b,
    stride_key_mask_s,
    stride_keep_b, stride_keep_k, stride_keep_r, stride_keep_l, stride_keep_s, stride_sink_k,
    stride_sink_r,
    B, L, S, scale, unit, softcap, fill, band_lo, band_hi, keep_scale,
    K: tl.constexpr, R: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    E: tl.constexpr, E1: tl.constexpr, E2: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    RULES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    scale, unit, softcap = single(scale), single(unit), single(softcap)
    fill, keep_scale = single(fill), single(keep_scale)
    heads = B * K * R
    bh = tl.program_id(0) % heads
    b = bh // (K * R)
    k = bh % (K * R) // R
    r = bh % R
    row0 = tl.program_id(0) // heads * BM
    rows = row0 + tl.arange(0, BM)
    lse = tl.load(lse_ptr + bh.to(tl.int64) * L + rows, mask=rows < L, other=0.0)
    is_coarse = lse < COARSE

    q_ptr += head_offset(b, k, r, stride_q_b, stride_q_k, stride_q_r)
    k_ptr += head_offset(b, k, r, stride_k_b, stride_k_k, 0)
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
    key_mask = (key_mask_ptr + b.to(tl.int64) * stride_key_mask_b, stride_key_mask_s)
    numbers = (L, S, scale, softcap, fill, band_lo, band_hi)
    q1 = load_tile(q_ptr, rows, stride_q_l, stride_q_d, L, 0, D1, D)
    q2 = q1
    if D2:
        q2 = load_tile(q_ptr, rows, stride_q_l, stride_q_d, L, D1, D2, D)
    lo, _, _, hi = keys_of(row0, tl.minimum(row0 + BM, L), S, band_lo, band_hi, BN, RULES)
    hi = tl.where(tl.max(is_coarse.to(tl.int32), 0) > 0, hi, lo)
    m, total = first_sum(sink_ptr, k, r, stride_sink_k, stride_sink_r, BM, RULES)
    for n0 in tl.range(lo, hi, BN):
        k1 = stream_tile(k_ptr, b, n0, k, stride_k_s, stride_k_d, S, BN, 0, D1, D, True, False)
        s = product(q1, k1.T, PRECISION)
        if D2:
            k2 = stream_tile(k_ptr, b, n0, k, stride_k_s, stride_k_d, S, BN, D1, D2, D, True, False)
            s = add_product(s, q2, k2.T, PRECISION)
        cols = n0 + tl.arange(0, BN)
        s = scores(s, rows[:, None], cols[None, :], bias, mask, key_mask, numbers, RULES, 2)
        m, p, shrink = softmax_step(s, m, unit, RULES)
        total = total * shrink + tl.sum(p, 1)
    at = bh.to(tl.int64) * L + rows
    tl.store(origin_ptr + at, tl.where(is_coarse, m, 0.0), mask=rows < L)
    tl.store(rest_ptr + at, tl.where(is_coarse, tl.log2(total), lse), mask=rows < L)

"""dK and dV of one key tile: dV = P^T dO, dK = scale * dS^T Q. Grid: key tiles x key heads, heads
fastest.

Scores lie transposed, [keys, rows]: P^T and dS^T are then left operands straight from registers and
nothing is turned in shared memory. The group's query heads are summed in fp32 accumulators: no
expanded buffers, no atomics, one rounding.
"""

import triton
import triton.language as tl

from inductor_gqa.kernels.rotate import store_gradient
from inductor_gqa.kernels.rules import BAND, BAND_HI, EMPTY_ROWS, FILL_ADDS, KEEP, SHIFTED
from inductor_gqa.kernels.tiles import (
    add_product,
    filled_rows,
    head_offset,
    kept,
    load_tile,
    probabilities,
    product,
    rows_of,
    score_gradient,
    scores,
    single,
    store_tile,
    stream_tile,
)


@triton.jit
def with_empty_rows(lse_ptr, L, lo, hi, BM: tl.constexpr):
    """[lo, hi) widened to the rows that saw no key (LSE = +inf), which every key takes part in."""
    first = lo
    last = hi
    for row0 in tl.range(0, L, 1024):
        rows = row0 + tl.arange(0, 1024)
        is_empty = tl.load(lse_ptr + rows, mask=rows < L, other=0.0) == float("inf")
        first = tl.minimum(first, tl.min(tl.where(is_empty, rows, L), 0))
        last = tl.maximum(last, tl.max(tl.where(is_empty, rows + 1, 0), 0))
    return first // BM * BM, last


@triton.jit
def add_rows(
    dk1, dk2, dv1, dv2, k1, k2, v1, v2, q_src, grad_out_src, origin_ptr, rest_ptr, delta_ptr, b,
    head, cols, lo, hi,
    stride_q_l, stride_q_d, stride_grad_out_l, stride_grad_out_e, unit, keep_scale, bias, mask,
    key_mask, keep, numbers,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, E: tl.constexpr, E1: tl.constexpr,
    E2: tl.constexpr,
    BM: tl.constexpr, RULES: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
    NEED_K: tl.constexpr, NEED_V: tl.constexpr,
):  # fmt: skip
    """Adds the share of query rows [lo, hi) of one head."""
    L = numbers[0]
    S = numbers[1]
    EDGE: tl.constexpr = 1 if BAND & RULES else 0
    for row0 in tl.range(lo, hi, BM):
        rows = row0 + tl.arange(0, BM)
        i = rows[None, :]
        j = cols[:, None]
        # Past L, q and dO read as zero and an infinite LSE makes P zero: those rows need no mask of
        # their own.
        rest = tl.load(rest_ptr + rows, mask=rows < L, other=float("inf"))
        q1 = stream_tile(q_src, b, row0, head, stride_q_l, stride_q_d, L, BM, 0, D1, D, True, TMA)
        q2 = q1
        if D2:
            q2 = stream_tile(
                q_src, b, row0, head, stride_q_l, stride_q_d, L, BM, D1, D2, D, True, TMA
            )
        qk = product(k1, q1.T, PRECISION)
        if D2:
            qk = add_product(qk, k2, q2.T, PRECISION)
        s = scores(qk, i, j, bias, mask, key_mask, numbers, RULES, EDGE)
        origin = rest
        if SHIFTED & RULES:
            origin = tl.load(origin_ptr + rows, mask=rows < L, other=0.0)
        p = probabilities(s, origin[None, :], rest[None, :], unit, RULES)
        used = p
        if EMPTY_ROWS & RULES:
            used = filled_rows(p, rest, rows, L, S, 0)
            if FILL_ADDS & RULES:
                p = used
        do1 = stream_tile(
            grad_out_src, b, row0, head, stride_grad_out_l, stride_grad_out_e, L, BM,
            0, E1, E, True, TMA,
        )  # fmt: skip
        do2 = do1
        if E2:
            do2 = stream_tile(
                grad_out_src, b, row0, head, stride_grad_out_l, stride_grad_out_e, L, BM,
                E1, E2, E, True, TMA,
            )  # fmt: skip
        if NEED_V:
            if KEEP & RULES:
                used = tl.where(kept(i, j, keep, L, S), used * keep_scale, 0.0)
            used = used.to(do1.dtype)
            dv1 = add_product(dv1, used, do1, PRECISION)
            if E2:
                dv2 = add_product(dv2, used, do2, PRECISION)
        if NEED_K:
            dp = product(v1, do1.T, PRECISION)
            if E2:
                dp = add_product(dp, v2, do2.T, PRECISION)
            if KEEP & RULES:
                dp = tl.where(kept(i, j, keep, L, S), dp * keep_scale, 0.0)
            delta = tl.load(delta_ptr + rows, mask=rows < L, other=0.0)
            ds = score_gradient(
                p, dp, delta[None, :], qk, i, j, mask, key_mask, numbers, RULES, EDGE
            )
            ds = ds.to(q1.dtype)
            dk1 = add_product(dk1, ds, q1, PRECISION)
            if D2:
                dk2 = add_product(dk2, ds, q2, PRECISION)
    return dk1, dk2, dv1, dv2


@triton.jit
def keys_kernel(
    q_src, k_ptr, v_ptr, grad_out_src, dk_ptr, dv_ptr, origin_ptr, rest_ptr, delta_ptr,
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
    RULES: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, NEED_K: tl.constexpr,
    NEED_V: tl.constexpr,
):  # fmt: skip
    scale, unit, softcap = single(scale), single(unit), single(softcap)
    fill, keep_scale = single(fill), single(keep_scale)
    # Ascending: under a causal mask the first keys are seen by the most rows, so this is longest
    # first.
    pid = tl.program_id(0)
    b = pid // K % B
    k = pid % K
    col0 = pid // K // B * BN
    cols = col0 + tl.arange(0, BN)
    k_ptr += head_offset(b, k, k, stride_k_b, stride_k_k, 0)
    v_ptr += head_offset(b, k, k, stride_v_b, stride_v_k, 0)
    # Through pointers: a staying left operand that comes from a descriptor is hoisted into
    # registers and spills (H200).
    # Keys that no query sees read as zero: the rows past L that fill the last tile would see them,
    # and what such a slot of a cache holds may be NaN.
    n_keys = S
    if BAND_HI & RULES and not (FILL_ADDS & RULES):
        n_keys = tl.minimum(S, tl.maximum(L + band_hi, 0))
    k1 = load_tile(k_ptr, cols, stride_k_s, stride_k_d, n_keys, 0, D1, D)
    v1 = load_tile(v_ptr, cols, stride_v_s, stride_v_e, S, 0, E1, E)
    k2 = k1
    v2 = v1
    if D2:
        k2 = load_tile(k_ptr, cols, stride_k_s, stride_k_d, n_keys, D1, D2, D)
    if E2:
        v2 = load_tile(v_ptr, cols, stride_v_s, stride_v_e, S, E1, E2, E)
    key_mask = (key_mask_ptr + b.to(tl.int64) * stride_key_mask_b, stride_key_mask_s)
    numbers = (L, S, scale, softcap, fill, band_lo, band_hi)
    dk1 = tl.zeros([BN, D1], tl.float32)
    dk2 = tl.zeros([BN, D2 if D2 else 16], tl.float32)
    dv1 = tl.zeros([BN, E1], tl.float32)
    dv2 = tl.zeros([BN, E2 if E2 else 16], tl.float32)
    lo, hi = rows_of(col0, tl.minimum(col0 + BN, S), L, band_lo, band_hi, BM, RULES)

    for g in tl.range(0, R):
        head = k * R + g
        r = head % R
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
        first_row = (b * (K * R) + head).to(tl.int64) * L
        q_head = q_src
        grad_out_head = grad_out_src
        if not TMA:
            q_head = q_src + head_offset(b, k, r, stride_q_b, stride_q_k, stride_q_r)
            grad_out_head = grad_out_src + head_offset(
                b, k, r, stride_grad_out_b, stride_grad_out_k, stride_grad_out_r
            )  # fmt: skip
        first, last = lo, hi
        if EMPTY_ROWS & RULES:
            first, last = with_empty_rows(rest_ptr + first_row, L, lo, hi, BM)
        dk1, dk2, dv1, dv2 = add_rows(
            dk1, dk2, dv1, dv2, k1, k2, v1, v2, q_head, grad_out_head,
            origin_ptr + first_row, rest_ptr + first_row, delta_ptr + first_row, b, head, cols,
            first, last,
            stride_q_l, stride_q_d, stride_grad_out_l, stride_grad_out_e, unit, keep_scale,
            bias, mask, key_mask, keep, numbers,
            D, D1, D2, E, E1, E2, BM, RULES, PRECISION, TMA, NEED_K, NEED_V,
        )  # fmt: skip

    first_key = b.to(tl.int64) * S * K + k
    # dV leaves first: turning dK back needs the registers.
    if NEED_V:
        store_tile(dv_ptr + first_key * E, dv1, cols, K * E, S, 0, E1, E)
        if E2:
            store_tile(dv_ptr + first_key * E, dv2, cols, K * E, S, E1, E2, E)
    if NEED_K:
        store_gradient(
            dk1 * scale, dk2 * scale, dk_ptr + first_key * D, cols, K * D, S,
            cos_ptr + b.to(tl.int64) * stride_cos_b, sin_ptr + b.to(tl.int64) * stride_sin_b,
            stride_cos_n, stride_cos_w, stride_sin_n, stride_sin_w, D, D1, D2, START, W,
            INTERLEAVED,
        )  # fmt: skip

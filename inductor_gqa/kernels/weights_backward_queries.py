"""dQ of one query tile from given weights P: delta = rowsum(dO * P V), dS = P (dO V^T - delta), dQ
= scale * dS K.

Grid: query tiles x heads, tiles fastest (they share that head's K and V in L2). dO and the
accumulator stay on chip, keys stream twice. The row sum of P * dP is taken as dO . (P V): one
product either way, but P V needs no arithmetic on tiles. Weights whose rows are not whole vectors
are copied on the way to rows that are, for all later readers.
"""

import triton
import triton.language as tl

from inductor_gqa.kernels.tiles import (
    add_product,
    head_offset,
    load_tile,
    product,
    single,
    stream_tile,
)
from inductor_gqa.kernels.weights_tiles import (
    store_row_tile,
    store_turned_back,
    weights_tile,
)


@triton.jit
def weighted_values(
    weights_src, copy_ptr, v_src, b, h, row0, stride_weights_l, stride_weights_s, stride_v_s,
    stride_v_e, pitch, L, S,
    E: tl.constexpr, EP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr, WEIGHTS_TMA: tl.constexpr, COPY: tl.constexpr, CHECK: tl.constexpr,
):  # fmt: skip
    """P V of one query tile, fp32."""
    acc = tl.zeros([BM, EP], tl.float32)
    following = weights_tile(
        weights_src, b, h, row0, 0, stride_weights_l, stride_weights_s, L, S, BM, BN, CHECK,
        WEIGHTS_TMA
    )  # fmt: skip
    for n0 in tl.range(0, S, BN):
        p = following
        if COPY:
            following = weights_tile(
                weights_src, b, h, row0, n0 + BN, stride_weights_l, stride_weights_s, L, S, BM, BN,
                True, WEIGHTS_TMA
            )  # fmt: skip
            store_row_tile(copy_ptr, p, row0, n0, pitch, L, BM, BN)
        else:
            p = weights_tile(
                weights_src, b, h, row0, n0, stride_weights_l, stride_weights_s, L, S, BM, BN,
                CHECK, WEIGHTS_TMA
            )  # fmt: skip
        v = stream_tile(v_src, b, n0, h, stride_v_s, stride_v_e, S, BN, 0, EP, E, CHECK, TMA)
        acc = add_product(acc, p.to(v.dtype), v, PRECISION)
    return acc


@triton.jit
def weights_queries_kernel(
    weights_src, k_src, v_src, grad_out_ptr, dq_ptr, delta_ptr, copy_ptr, ds_ptr, cos_ptr, sin_ptr,
    stride_weights_b, stride_weights_h, stride_weights_l, stride_weights_s,
    stride_k_b, stride_k_s, stride_k_h, stride_k_d, stride_v_b, stride_v_s, stride_v_h, stride_v_e,
    stride_grad_out_b, stride_grad_out_l, stride_grad_out_h, stride_grad_out_e,
    stride_cos_b, stride_cos_n, stride_cos_w, stride_sin_b, stride_sin_n, stride_sin_w,
    stride_dq_b, stride_dq_l, pitch, L, S, scale,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, START: tl.constexpr, W: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, WEIGHTS_TMA: tl.constexpr, COPY: tl.constexpr,
    CHECK: tl.constexpr,
    NEED_Q: tl.constexpr, STORE_DS: tl.constexpr,
):  # fmt: skip
    scale = single(scale)
    pid = tl.program_id(0)
    tiles = tl.cdiv(L, BM)
    row0 = pid % tiles * BM
    bh = pid // tiles
    b = bh // H
    h = bh % H
    rows = row0 + tl.arange(0, BM)

    grad_out_ptr += head_offset(b, h, h, stride_grad_out_b, stride_grad_out_h, 0)
    do = load_tile(grad_out_ptr, rows, stride_grad_out_l, stride_grad_out_e, L, 0, EP, E)
    if not TMA:
        k_src += head_offset(b, h, h, stride_k_b, stride_k_h, 0)
        v_src += head_offset(b, h, h, stride_v_b, stride_v_h, 0)
    if not WEIGHTS_TMA:
        weights_src += head_offset(b, h, h, stride_weights_b, stride_weights_h, 0)

    row_at = bh.to(tl.int64) * L
    copy_ptr += row_at * pitch
    ds_ptr += row_at * pitch
    pv = weighted_values(
        weights_src, copy_ptr, v_src, b, h, row0, stride_weights_l, stride_weights_s, stride_v_s,
        stride_v_e, pitch, L, S,
        E, EP, BM, BN, PRECISION, TMA, WEIGHTS_TMA, COPY, CHECK,
    )  # fmt: skip
    delta = tl.sum(pv * do.to(tl.float32), 1)
    tl.store(delta_ptr + row_at + rows, delta, mask=rows < L)

    if NEED_Q or STORE_DS:
        if COPY:
            tl.debug_barrier()  # the copy is read by other threads than wrote it
        dq = tl.zeros([BM, DP], tl.float32)
        for n0 in tl.range(0, S, BN):
            if COPY:
                p = weights_tile(copy_ptr, b, h, row0, n0, pitch, 1, L, pitch, BM, BN, CHECK, False)
            else:
                p = weights_tile(
                    weights_src, b, h, row0, n0, stride_weights_l, stride_weights_s, L, S, BM, BN,
                    CHECK, WEIGHTS_TMA
                )  # fmt: skip
            v = stream_tile(v_src, b, n0, h, stride_v_s, stride_v_e, S, BN, 0, EP, E, CHECK, TMA)
            dp = product(do, v.T, PRECISION)
            ds = (p.to(tl.float32) * (dp - delta[:, None])).to(do.dtype)
            if STORE_DS:
                store_row_tile(ds_ptr, ds, row0, n0, pitch, L, BM, BN)
            if NEED_Q:
                k = stream_tile(
                    k_src, b, n0, h, stride_k_s, stride_k_d, S, BN, 0, DP, D, CHECK, TMA
                )
                dq = add_product(dq, ds, k, PRECISION)
        if NEED_Q:
            store_turned_back(
                dq * scale, dq_ptr + b.to(tl.int64) * stride_dq_b + h * D, rows, stride_dq_l, L,
                cos_ptr + b.to(tl.int64) * stride_cos_b, sin_ptr + b.to(tl.int64) * stride_sin_b,
                stride_cos_n, stride_cos_w, stride_sin_n, stride_sin_w, D, DP, START, W,
                INTERLEAVED,
            )  # fmt: skip

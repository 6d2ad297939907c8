"""dK and dV of one key tile of one group: dV = sum over its heads of P^T dO, dK = scale * sum over
its heads of dS^T Q.

Grid: key tiles x groups, once for dK and once for dV. Apart they cost no product more than
together, need half the accumulators and give a small problem twice the programs. The group is
summed in fp32 registers. dS comes from memory, or is made again from delta.
"""

import triton
import triton.language as tl

from inductor_gqa.kernels.tiles import (
    add_product,
    head_offset,
    load_tile,
    product,
    single,
    store_tile,
    stream_tile,
)
from inductor_gqa.kernels.weights_tiles import store_turned_back, weights_tile


@triton.jit
def group_product(
    left, right, b, head0, col0, stride_left_h, stride_left_l, stride_left_s, stride_h, stride_l,
    stride_d, L, S,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, LEFT_TMA: tl.constexpr, CHECK: tl.constexpr,
):  # fmt: skip
    """Sum over a group's heads of left^T right, left [L, S] and right [L, WIDTH], for BN columns of
    left. Pointers, where they are not descriptors, stand at batch b.

    One loop over heads and rows, so that the copies of the next head start before this one is done.
    """
    acc = tl.zeros([BN, PADDED], tl.float32)
    tiles = tl.cdiv(L, BM)
    for step in tl.range(0, GROUP * tiles):
        head = head0 + step // tiles
        row0 = step % tiles * BM
        x = weights_tile(
            left if LEFT_TMA else left + tl.cast(head, tl.int64) * stride_left_h,
            b, head, row0, col0, stride_left_l, stride_left_s, L, S, BM, BN, CHECK, LEFT_TMA,
        )  # fmt: skip
        y = stream_tile(
            right if TMA else right + tl.cast(head, tl.int64) * stride_h,
            b, row0, head, stride_l, stride_d, L, BM, 0, PADDED, WIDTH, CHECK, TMA,
        )  # fmt: skip
        acc = add_product(acc, x.to(y.dtype).T, y, PRECISION)
    return acc


@triton.jit
def add_head(
    dk, weights, q, grad_out, v, delta_ptr, b, head, col0, stride_weights_l, stride_weights_s,
    stride_q_l, stride_q_d, stride_grad_out_l, stride_grad_out_e, L, length,
    D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, WEIGHTS_TMA: tl.constexpr, CHECK: tl.constexpr,
    TURNED: tl.constexpr,
):  # fmt: skip
    """Adds dS^T Q of one head, dS made again. TURNED: scores lie as [keys, rows], so that dS^T
    stays in registers and P is turned instead."""
    for row0 in tl.range(0, L, BM):
        p = weights_tile(
            weights, b, head, row0, col0, stride_weights_l, stride_weights_s, L, length, BM, BN,
            CHECK, WEIGHTS_TMA
        )  # fmt: skip
        rows = row0 + tl.arange(0, BM)
        delta = tl.load(delta_ptr + rows, mask=rows < L, other=0.0)
        do = stream_tile(
            grad_out, b, row0, head, stride_grad_out_l, stride_grad_out_e, L, BM, 0, EP, E, CHECK,
            TMA
        )  # fmt: skip
        q_tile = stream_tile(q, b, row0, head, stride_q_l, stride_q_d, L, BM, 0, DP, D, CHECK, TMA)
        if TURNED:
            dp = product(v, do.T, PRECISION)
            ds = (p.T.to(tl.float32) * (dp - delta[None, :])).to(q_tile.dtype)
            dk = add_product(dk, ds, q_tile, PRECISION)
        else:
            dp = product(do, v.T, PRECISION)
            ds = (p.to(tl.float32) * (dp - delta[:, None])).to(q_tile.dtype)
            dk = add_product(dk, ds.T, q_tile, PRECISION)
    return dk


@triton.jit
def weights_keys_kernel(
    weights_src, ds_src, q_src, v_ptr, grad_out_src, dk_ptr, dv_ptr, delta_ptr, cos_ptr, sin_ptr,
    stride_weights_b, stride_weights_h, stride_weights_l, stride_weights_s,
    stride_q_b, stride_q_l, stride_q_h, stride_q_d, stride_v_b, stride_v_s, stride_v_h, stride_v_e,
    stride_grad_out_b, stride_grad_out_l, stride_grad_out_h, stride_grad_out_e,
    stride_cos_b, stride_cos_n, stride_cos_w, stride_sin_b, stride_sin_n, stride_sin_w,
    first_dk, stride_dk_b, stride_dk_s, first_dv, stride_dv_b, stride_dv_s, L, S, pitch, length,
    key_programs, scale,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr,
    EP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, START: tl.constexpr, W: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, WEIGHTS_TMA: tl.constexpr, DS_TMA: tl.constexpr,
    CHECK: tl.constexpr, LOAD_DS: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    scale = single(scale)
    # `length`: columns of P to read, its pitch where it is a padded copy. dK first: it is the
    # longer part where dS is made again. Tiles vary fastest: they share Q and dO in L2.
    pid = tl.program_id(0)
    is_dk = pid < key_programs
    part = tl.where(is_dk, pid, pid - key_programs)
    K: tl.constexpr = H // GROUP
    tiles = tl.cdiv(S, BN)
    col0 = part % tiles * BN
    b = part // tiles // K
    k = part // tiles % K
    head0 = k * GROUP
    cols = col0 + tl.arange(0, BN)
    if not TMA:
        q_src += b.to(tl.int64) * stride_q_b
        grad_out_src += b.to(tl.int64) * stride_grad_out_b
    if not WEIGHTS_TMA:
        weights_src += b.to(tl.int64) * stride_weights_b

    if is_dk:
        if LOAD_DS:
            stride_ds_h = tl.cast(L, tl.int64) * pitch
            if not DS_TMA:
                ds_src += b.to(tl.int64) * H * stride_ds_h
            dk = group_product(
                ds_src, q_src, b, head0, col0, stride_ds_h, pitch, 1, stride_q_h, stride_q_l,
                stride_q_d,
                L, pitch, GROUP, D, DP, BM, BN, PRECISION, TMA, DS_TMA, CHECK,
            )  # fmt: skip
        else:
            dk = tl.zeros([BN, DP], tl.float32)
            for g in tl.range(0, GROUP):
                head = head0 + g
                v = load_tile(
                    v_ptr + head_offset(b, head, head, stride_v_b, stride_v_h, 0),
                    cols, stride_v_s, stride_v_e, S, 0, EP, E,
                )  # fmt: skip
                at = tl.cast(head, tl.int64)
                dk = add_head(
                    dk, weights_src if WEIGHTS_TMA else weights_src + at * stride_weights_h,
                    q_src if TMA else q_src + at * stride_q_h,
                    grad_out_src if TMA else grad_out_src + at * stride_grad_out_h,
                    v, delta_ptr + (b.to(tl.int64) * H + head) * L, b, head, col0, stride_weights_l,
                    stride_weights_s,
                    stride_q_l, stride_q_d, stride_grad_out_l, stride_grad_out_e, L, length,
                    D, DP, E, EP, BM, BN, PRECISION, TMA, WEIGHTS_TMA, CHECK, TURNED,
                )  # fmt: skip
        store_turned_back(
            dk * scale, dk_ptr + first_dk + b.to(tl.int64) * stride_dk_b + k * D, cols, stride_dk_s,
            S,
            cos_ptr + b.to(tl.int64) * stride_cos_b, sin_ptr + b.to(tl.int64) * stride_sin_b,
            stride_cos_n, stride_cos_w, stride_sin_n, stride_sin_w, D, DP, START, W, INTERLEAVED,
        )  # fmt: skip
    else:
        dv = group_product(
            weights_src, grad_out_src, b, head0, col0, stride_weights_h, stride_weights_l,
            stride_weights_s,
            stride_grad_out_h, stride_grad_out_l, stride_grad_out_e,
            L, length, GROUP, E, EP, BM, BN, PRECISION, TMA, WEIGHTS_TMA, CHECK,
        )  # fmt: skip
        store_tile(
            dv_ptr + first_dv + b.to(tl.int64) * stride_dv_b + k * E,
            dv,
            cols,
            stride_dv_s,
            S,
            0,
            EP,
            E,
        )

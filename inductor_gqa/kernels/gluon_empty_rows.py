"""Rows without a visible key: under a huge finite fill their softmax is uniform.

Grid: batch x key head, and FILL_ROWS query positions of the whole group, so that V is summed once
for all its rows. Rows are known by LSE = -inf; without any, only LSE is read.
"""

import triton
import triton.language as tl

from inductor_gqa.kernels.plan import Attention, Launch, named_strides

FILL_ROWS = 512


@triton.jit
def fill_empty_rows_kernel(
    v_ptr, out_ptr, lse_ptr, stride_v_b, stride_v_s, stride_v_k, stride_v_e, L, S,
    K: tl.constexpr, R: tl.constexpr, E: tl.constexpr,
    FILL_ROWS: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Those rows of out become the mean of V, their LSE +inf."""
    bk = tl.program_id(0)
    b = bk // K
    k = bk % K
    first = tl.program_id(1) * FILL_ROWS
    positions = first + tl.arange(0, FILL_ROWS)
    lse_ptr += bk.to(tl.int64) * R * L
    n_empty = 0
    for r in range(R):
        lse = tl.load(lse_ptr + r * L + positions, mask=positions < L, other=0.0)
        n_empty += tl.sum((lse == float("-inf")).to(tl.int32), 0)
    if n_empty > 0:
        cols = tl.arange(0, E)
        v_ptr += b.to(tl.int64) * stride_v_b + k.to(tl.int64) * stride_v_k
        mean = tl.zeros([E], tl.float32)
        for n0 in range(0, S, BN):
            keys = n0 + tl.arange(0, BN)
            at = keys.to(tl.int64)[:, None] * stride_v_s + cols[None, :] * stride_v_e
            v = tl.load(v_ptr + at, mask=(keys < S)[:, None] & (cols >= 0)[None, :], other=0.0)
            mean += tl.sum(v.to(tl.float32), 0)
        mean = mean / S
        for r in range(R):
            for m0 in range(first, tl.minimum(first + FILL_ROWS, L), BN):
                rows = m0 + tl.arange(0, BN)
                lse = tl.load(lse_ptr + r * L + rows, mask=rows < L, other=0.0)
                is_empty = lse == float("-inf")
                out = ((b.to(tl.int64) * L + rows) * K + k) * R + r
                at = out_ptr + out[:, None] * E + cols[None, :]
                value = tl.zeros([BN, E], tl.float32) + mean[None, :]
                tl.store(at, value.to(out_ptr.dtype.element_ty), mask=is_empty[:, None])
                # The threads of several warps have read this LSE to know which of their elements to
                # store: none may find it overwritten.
                tl.debug_barrier()
                infinite = tl.full([BN], float("inf"), tl.float32)
                tl.store(lse_ptr + r * L + rows, infinite, mask=is_empty)


def filling_launch(attention: Attention) -> Launch:
    """After the forward, on its out and lse."""
    B, L, S, K, R, _, E = attention.sizes
    scalars = named_strides("v", attention.tensors["v"], "bske")
    scalars |= {"L": L, "S": S, "K": K, "R": R, "E": E, "FILL_ROWS": FILL_ROWS, "BN": 64}
    tensors = {"v_ptr": "v", "out_ptr": "out", "lse_ptr": "lse"}
    grid = (B * K, -(-L // FILL_ROWS))
    return Launch(fill_empty_rows_kernel, grid, tensors, scalars, num_warps=4, num_stages=2)

"""What the backward for sm_90 needs of each row of queries, before it starts: LSE, delta, and zeros
where dQ is summed."""

from typing import Any

import triton
import triton.language as tl

from inductor_gqa.kernels.gluon_ends import BM
from inductor_gqa.kernels.plan import LOG2E, Attention, Launch, named_strides

ROWS = BM.value
TENSORS = ("out_ptr", "grad_out_ptr", "lse_ptr", "rows_ptr", "sums_ptr")


@triton.jit
def pad_kernel(
    out_ptr, grad_out_ptr, lse_ptr, rows_ptr, sums_ptr,
    stride_grad_out_b, stride_grad_out_l, stride_grad_out_k, stride_grad_out_r, stride_grad_out_e,
    L, to_scores, sums, K: tl.constexpr, R: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """LSE of a head, times `to_scores`, then delta = rowsum(dO * O), each with ROWS numbers in
    front and behind, which make P and dS zero there; zeros to the `sums` tiles of ROWS x E in which
    dQ of a head is summed. Grid: heads x tiles, the padding included."""
    bh = tl.program_id(0)
    b = bh // (K * R)
    k = bh % (K * R) // R
    r = bh % R
    rows = (tl.program_id(1) - 1) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, E)
    inside = (rows >= 0) & (rows < L)
    out_rows = ((b.to(tl.int64) * L + rows) * K + k) * R + r
    at_grad_out = b.to(tl.int64) * stride_grad_out_b + k.to(tl.int64) * stride_grad_out_k
    at_grad_out += r.to(tl.int64) * stride_grad_out_r + rows.to(tl.int64) * stride_grad_out_l
    mask = inside[:, None] & (cols >= 0)[None, :]
    out = tl.load(out_ptr + out_rows[:, None] * E + cols[None, :], mask=mask, other=0.0)
    at = grad_out_ptr + at_grad_out[:, None] + cols[None, :] * stride_grad_out_e
    grad_out = tl.load(at, mask=mask, other=0.0)
    delta = tl.sum(out.to(tl.float32) * grad_out.to(tl.float32), 1)
    lse = tl.load(lse_ptr + bh.to(tl.int64) * L + rows, mask=inside, other=float("inf"))
    padded = tl.num_programs(1) * ROWS
    at_rows = rows_ptr + bh.to(tl.int64) * 2 * padded + rows + ROWS
    tl.store(at_rows, lse * to_scores)
    tl.store(at_rows + padded, delta)
    tile = tl.program_id(1) - 1
    if (tile >= 0) & (tile < sums):
        first = (bh.to(tl.int64) * sums + tile) * (ROWS * E)
        tl.store(sums_ptr + first + tl.arange(0, ROWS * E), tl.zeros([ROWS * E], tl.float32))


def pad_launch(attention: Attention, row_tiles: int, sums: int) -> Launch:
    """`row_tiles`: those of a head, the padding included. `sums`: those in which dQ is summed; the
    kernel that sums takes LSE as it is, others take it in units of scores."""
    B, L, _, K, R, _, E = attention.sizes
    scalars: dict[str, Any] = named_strides("grad_out", attention.tensors["grad_out"], "blkre")
    scalars |= {"L": L, "K": K, "R": R, "E": E, "ROWS": ROWS}
    scalars |= {"to_scores": 1.0 if sums else 1 / (attention.scale * LOG2E), "sums": sums}
    slots = {name: name.removesuffix("_ptr") for name in TENSORS}
    slots["sums_ptr"] = "sums" if sums else "rows"
    return Launch(pad_kernel, (B * K * R, row_tiles), slots, scalars, 4, 1)

"""P = softmax(scores(scale * Q K^T)) written once, normalised, and O = P V.

Grid: query tiles x heads, heads fastest. Up to the width of a tile a whole row of scores stays on
chip; beyond that the keys stream twice, for each row's maximum and sum, then for P and O: a product
more, but P would otherwise move three times. Assumes q and k rotated and, for tf32, rounded.
"""

import triton
import triton.language as tl

from inductor_gqa.kernels.rules import BAND, BAND_LO, EMPTY_ROWS, EXACT, SHIFTED
from inductor_gqa.kernels.tiles import (
    LOG2E,
    add_product,
    head_offset,
    keys_of,
    load_tile,
    log_sum_exp,
    product,
    round_to_tf32,
    scores,
    single,
    softmax_step,
    store_tile,
    stream_tile,
)
from inductor_gqa.kernels.weights_tiles import weights_tile

# Lanes that one "ieee" sum takes; those of wider heads are added outside. Tensor cores truncate as
# they add, and one sum over 128 lanes was off by more than twice eager's error where few scores
# tell.
LANES_OF_A_SUM = tl.constexpr(64)


@triton.constexpr_function
def lanes_of_a_sum(DP, PRECISION):
    """Of a head of DP lanes, a power of two; in a kernel or outside."""
    return min(DP, LANES_OF_A_SUM.value) if PRECISION == "ieee" else DP


@triton.jit
def score_tile(
    q, k_src, b, head, rows, n0, stride_k_s, stride_k_d, bias, mask, key_mask, numbers,
    D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, RULES: tl.constexpr, EDGE: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Scores of one tile. q comes in parts of as many lanes as one sum takes; in tf32, q and k hold
    rounded values already."""
    LANES: tl.constexpr = lanes_of_a_sum(DP, PRECISION)
    S = numbers[1]
    for part in tl.static_range(DP // LANES):
        k = stream_tile(
            k_src, b, n0, head, stride_k_s, stride_k_d, S, BN, part * LANES, LANES, D, EDGE, TMA
        )
        if PRECISION == "tf32":
            summed = tl.dot(q[part], k.T, input_precision="tf32")
        else:
            summed = product(q[part], k.T, PRECISION)
        if part == 0:
            s = summed
        else:
            s += summed
    cols = n0 + tl.arange(0, BN)
    return scores(s, rows[:, None], cols[None, :], bias, mask, key_mask, numbers, RULES, EDGE)


@triton.jit
def row_sums(
    m, total, q, k_src, b, head, rows, lo, hi, stride_k_s, stride_k_d, unit, bias, mask, key_mask,
    numbers,
    D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, RULES: tl.constexpr, EDGE: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Running maximum and sum over the key tiles in [lo, hi)."""
    for n0 in tl.range(lo, hi, BN):
        s = score_tile(
            q, k_src, b, head, rows, n0, stride_k_s, stride_k_d, bias, mask, key_mask, numbers,
            D, DP, BN, RULES, EDGE, PRECISION, TMA,
        )  # fmt: skip
        m, p, shrink = softmax_step(s, m, unit, RULES)
        total = total * shrink + tl.sum(p, 1)
    return m, total


@triton.jit
def add_values(
    acc, p, v_src, b, head, n0, stride_v_s, stride_v_e, S,
    E: tl.constexpr, EP: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
    V_TMA: tl.constexpr, V_TURNED: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """acc + P V of one key tile; V_TURNED: V lies as [E, keys]."""
    if V_TURNED:
        v = weights_tile(
            v_src, b, head, 0, n0, stride_v_e, stride_v_s, E, S, EP, BN, EDGE or EP != E, V_TMA
        ).T
    else:
        v = stream_tile(v_src, b, n0, head, stride_v_s, stride_v_e, S, BN, 0, EP, E, EDGE, V_TMA)
    if PRECISION == "tf32":
        acc = tl.dot(round_to_tf32(p), v, acc, input_precision="tf32")
    else:
        acc = add_product(acc, p.to(v.dtype), v, PRECISION)
    return acc


@triton.jit
def store_weights(ptr, p, row0, n0, L, S, BM: tl.constexpr, BN: tl.constexpr):
    """Nothing reads them soon: they should not push K and V out of L2. Only the tile's first
    element needs 64 bits; rows of odd length are stored element by element, and wide addresses
    would take all registers."""
    rows = tl.arange(0, BM)[:, None]
    cols = tl.arange(0, BN)[None, :]
    at = ptr + (row0.to(tl.int64) * S + n0) + (rows * S + cols)
    tl.store(
        at,
        p.to(ptr.dtype.element_ty),
        mask=(rows < L - row0) & (cols < S - n0),
        cache_modifier=".cs",
    )


@triton.jit
def write_rows(
    acc, q, k_src, v_src, weights_ptr, m, inverse, share, is_empty, b, head, row0, rows, lo, hi,
    stride_k_s, stride_k_d, stride_v_s, stride_v_e, length, unit, bias, mask, key_mask, numbers,
    D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, BN: tl.constexpr,
    RULES: tl.constexpr, EDGE: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
    V_TMA: tl.constexpr, V_TURNED: tl.constexpr,
):  # fmt: skip
    """Stores P of the key tiles in [lo, hi) and adds P V."""
    for n0 in tl.range(lo, hi, BN):
        s = score_tile(
            q, k_src, b, head, rows, n0, stride_k_s, stride_k_d, bias, mask, key_mask, numbers,
            D, DP, BN, RULES, EDGE, PRECISION, TMA,
        )  # fmt: skip
        p = normalised(s, m, inverse, share, is_empty, n0, unit, numbers[1], BN, RULES)
        store_weights(weights_ptr, p, row0, n0, numbers[0], numbers[1], rows.shape[0], BN)
        acc = add_values(
            acc, p, v_src, b, head, n0, stride_v_s, stride_v_e, length, E, EP, BN, PRECISION,
            V_TMA, V_TURNED, EDGE
        )  # fmt: skip
    return acc


@triton.jit
def normalised(s, m, inverse, share, is_empty, n0, unit, S, BN: tl.constexpr, RULES: tl.constexpr):
    """P from scores. exp2(s - m) / sum, not exp2(s - lse): a rounded log-sum-exp would cost
    fp32 its last digits."""
    origin = tl.where(m == float("-inf"), 0.0, m)
    if SHIFTED & RULES:
        p = tl.exp2((s - origin[:, None]) * LOG2E) * inverse[:, None]
    else:
        p = tl.exp2(s * unit - origin[:, None]) * inverse[:, None]
    return with_uniform_rows(p, share, is_empty, n0, S, BN, RULES)


@triton.jit
def with_uniform_rows(p, share, is_empty, n0, S, BN: tl.constexpr, RULES: tl.constexpr):
    if EMPTY_ROWS & RULES:
        cols = n0 + tl.arange(0, BN)
        p = tl.where(is_empty[:, None], tl.where(cols < S, share, 0.0)[None, :], p)
    return p


@triton.jit
def fill_outside(
    acc, v_src, weights_ptr, is_empty, share, b, head, row0, rows, lo, hi, stride_v_s, stride_v_e,
    length, L, S,
    E: tl.constexpr, EP: tl.constexpr, BN: tl.constexpr, RULES: tl.constexpr,
    PRECISION: tl.constexpr,
    V_TMA: tl.constexpr, V_TURNED: tl.constexpr,
):  # fmt: skip
    """Stores P of the key tiles in [lo, hi), which the band hides: zero, but `share` in rows
    that see no key at all."""
    value = tl.where(is_empty, share, 0.0)
    for n0 in tl.range(lo, hi, BN):
        p = tl.zeros([rows.shape[0], BN], tl.float32) + value[:, None]
        store_weights(weights_ptr, p, row0, n0, L, S, rows.shape[0], BN)
    if EMPTY_ROWS & RULES:
        end = tl.where(tl.max((is_empty & (rows < L)).to(tl.int32), 0) > 0, hi, lo)
        for n0 in tl.range(lo, end, BN):
            cols = n0 + tl.arange(0, BN)
            p = tl.where((cols < S)[None, :], value[:, None], 0.0)
            acc = add_values(
                acc, p, v_src, b, head, n0, stride_v_s, stride_v_e, length, E, EP, BN, PRECISION,
                V_TMA, V_TURNED, True
            )  # fmt: skip
    return acc


@triton.jit
def weights_forward_kernel(
    q_ptr, k_src, v_src, out_ptr, weights_ptr, lse_ptr, bias_ptr, mask_ptr, key_mask_ptr,
    stride_q_b, stride_q_l, stride_q_k, stride_q_r, stride_q_d,
    stride_k_b, stride_k_s, stride_k_k, stride_k_d, stride_v_b, stride_v_s, stride_v_k, stride_v_e,
    stride_bias_b, stride_bias_k, stride_bias_r, stride_bias_l, stride_bias_s,
    stride_mask_b, stride_mask_k, stride_mask_r, stride_mask_l, stride_mask_s, stride_key_mask_b,
    stride_key_mask_s,
    B, L, S, length, scale, unit, softcap, fill, band_lo, band_hi,
    K: tl.constexpr, R: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr,
    EP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, RULES: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr, V_TMA: tl.constexpr, V_TURNED: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    scale, unit, softcap, fill = single(scale), single(unit), single(softcap), single(fill)
    # Longest first: under a causal mask the last rows carry the most work and must not be what the
    # grid ends on.
    pid = tl.program_id(0)
    heads = B * K * R
    row0 = (tl.cdiv(L, BM) - 1 - pid // heads) * BM
    bh = pid % heads
    b = bh // (K * R)
    k = bh % (K * R) // R
    r = bh % R
    rows = row0 + tl.arange(0, BM)

    q_ptr += head_offset(b, k, r, stride_q_b, stride_q_k, stride_q_r)
    LANES: tl.constexpr = lanes_of_a_sum(DP, PRECISION)
    q = ()
    for part in tl.static_range(DP // LANES):
        lanes = load_tile(q_ptr, rows, stride_q_l, stride_q_d, L, part * LANES, LANES, D)
        q = q + (lanes,)  # noqa: RUF005 (Triton does not unpack)
    if not TMA:
        k_src += head_offset(b, k, r, stride_k_b, stride_k_k, 0)
    if not V_TMA:
        v_src += head_offset(b, k, r, stride_v_b, stride_v_k, 0)
    weights_ptr += bh.to(tl.int64) * L * S
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

    m = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, EP], tl.float32)
    lo, full_lo, full_hi, hi = keys_of(
        row0, tl.minimum(row0 + BM, L), S, band_lo, band_hi, BN, RULES
    )
    if WHOLE:
        s = score_tile(
            q, k_src, b, k, rows, 0, stride_k_s, stride_k_d, bias, mask, key_mask, numbers,
            D, DP, BN, RULES, 2, PRECISION, TMA,
        )  # fmt: skip
        m, p, _ = softmax_step(s, m, unit, RULES)
        total = tl.sum(p, 1)
    else:
        if BAND_LO & RULES:
            m, total = row_sums(
                m, total, q, k_src, b, k, rows, lo, full_lo, stride_k_s, stride_k_d, unit,
                bias, mask, key_mask, numbers, D, DP, BN, RULES, 2, PRECISION, TMA,
            )  # fmt: skip
        m, total = row_sums(
            m, total, q, k_src, b, k, rows, full_lo, full_hi, stride_k_s, stride_k_d, unit,
            bias, mask, key_mask, numbers, D, DP, BN, RULES, 0, PRECISION, TMA,
        )  # fmt: skip
        m, total = row_sums(
            m, total, q, k_src, b, k, rows, full_hi, hi, stride_k_s, stride_k_d, unit,
            bias, mask, key_mask, numbers, D, DP, BN, RULES, 2, PRECISION, TMA,
        )  # fmt: skip

    # A row without a visible key is 0 / 0, NaN as in eager, unless its fill was finite: then it is
    # uniform.
    lse = log_sum_exp(m, total, RULES)
    is_empty = m == float("-inf")
    share = tl.full([], float("nan"), tl.float32)
    if EMPTY_ROWS & RULES:
        share = 1.0 / S
        total = tl.where(is_empty, 1.0, total)
        lse = tl.where(is_empty, float("inf"), lse)
    inverse = 1.0 / total

    if WHOLE:
        p = with_uniform_rows(p * inverse[:, None], share, is_empty, 0, S, BN, RULES)
        store_weights(weights_ptr, p, row0, 0, L, S, BM, BN)
        acc = add_values(
            acc,
            p,
            v_src,
            b,
            k,
            0,
            stride_v_s,
            stride_v_e,
            length,
            E,
            EP,
            BN,
            PRECISION,
            V_TMA,
            V_TURNED,
            2,
        )
    else:
        if BAND_LO & RULES:
            acc = write_rows(
                acc, q, k_src, v_src, weights_ptr, m, inverse, share, is_empty, b, k, row0, rows,
                lo, full_lo,
                stride_k_s, stride_k_d, stride_v_s, stride_v_e, length, unit, bias, mask, key_mask,
                numbers,
                D, DP, E, EP, BN, RULES, 2, PRECISION, TMA, V_TMA, V_TURNED,
            )  # fmt: skip
        acc = write_rows(
            acc, q, k_src, v_src, weights_ptr, m, inverse, share, is_empty, b, k, row0, rows,
            full_lo, full_hi,
            stride_k_s, stride_k_d, stride_v_s, stride_v_e, length, unit, bias, mask, key_mask,
            numbers,
            D, DP, E, EP, BN, RULES, 0, PRECISION, TMA, V_TMA, V_TURNED,
        )  # fmt: skip
        acc = write_rows(
            acc, q, k_src, v_src, weights_ptr, m, inverse, share, is_empty, b, k, row0, rows,
            full_hi, hi,
            stride_k_s, stride_k_d, stride_v_s, stride_v_e, length, unit, bias, mask, key_mask,
            numbers,
            D, DP, E, EP, BN, RULES, 2, PRECISION, TMA, V_TMA, V_TURNED,
        )  # fmt: skip
        if BAND & RULES and not (EXACT & RULES):
            end = lo + tl.cdiv(hi - lo, BN) * BN
            acc = fill_outside(
                acc, v_src, weights_ptr, is_empty, share, b, k, row0, rows, 0, lo, stride_v_s,
                stride_v_e, length, L, S,
                E, EP, BN, RULES, PRECISION, V_TMA, V_TURNED,
            )  # fmt: skip
            acc = fill_outside(
                acc, v_src, weights_ptr, is_empty, share, b, k, row0, rows, end, S, stride_v_s,
                stride_v_e, length, L, S,
                E, EP, BN, RULES, PRECISION, V_TMA, V_TURNED,
            )  # fmt: skip
    if not (EMPTY_ROWS & RULES):
        acc = tl.where(is_empty[:, None], float("nan"), acc)

    store_tile(
        out_ptr + (b.to(tl.int64) * L * K * R + k * R + r) * E, acc, rows, K * R * E, L, 0, EP, E
    )
    tl.store(lse_ptr + bh.to(tl.int64) * L + rows, lse, mask=rows < L)

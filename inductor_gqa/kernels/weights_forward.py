"""Attention forward that also returns its weights: P = softmax(scores(scale * Q K^T)), O = P V, P written once, normalised.

Grid: query tiles x heads, heads fastest. Up to the width of a tile a whole row of scores stays on chip; beyond that the
keys stream twice, for each row's maximum and sum, then for P and O: a product more, but P would otherwise move three times.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from inductor_gqa.kernels import rules
from inductor_gqa.kernels.configs import Tiles
from inductor_gqa.kernels.forward import collect
from inductor_gqa.kernels.plan import (
    Attention,
    Descriptor,
    Launch,
    Operand,
    Plan,
    execute,
    named_strides,
    score_arguments,
)
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
    softmax_step,
    store_tile,
    stream_tile,
)
from inductor_gqa.kernels.weights_prepare import plan_preparation
from inductor_gqa.kernels.weights_tiles import weights_tile


@triton.jit
def score_tile(
    q, k_src, b, head, rows, n0, stride_k_s, stride_k_d, bias, mask, key_mask, numbers,
    D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, RULES: tl.constexpr, EDGE: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Scores of one tile. In tf32, q and k hold rounded values already."""
    k = stream_tile(k_src, b, n0, head, stride_k_s, stride_k_d, numbers[1], BN, 0, DP, D, EDGE, TMA)
    if PRECISION == "tf32":
        s = tl.dot(q, k.T, input_precision="tf32")
    else:
        s = product(q, k.T, PRECISION)
    cols = n0 + tl.arange(0, BN)
    return scores(s, rows[:, None], cols[None, :], bias, mask, key_mask, numbers, RULES, EDGE)


@triton.jit
def row_sums(
    m, total, q, k_src, b, head, rows, lo, hi, stride_k_s, stride_k_d, unit, bias, mask, key_mask, numbers,
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
        v = weights_tile(v_src, b, head, 0, n0, stride_v_e, stride_v_s, E, S, EP, BN, EDGE or EP != E, V_TMA).T
    else:
        v = stream_tile(v_src, b, n0, head, stride_v_s, stride_v_e, S, BN, 0, EP, E, EDGE, V_TMA)
    if PRECISION == "tf32":
        return tl.dot(round_to_tf32(p), v, acc, input_precision="tf32")
    else:
        return add_product(acc, p.to(v.dtype), v, PRECISION)


@triton.jit
def store_weights(ptr, p, row0, n0, L, S, BM: tl.constexpr, BN: tl.constexpr):
    """Nothing reads them soon: they should not push K and V out of L2. Only the tile's first element needs 64 bits; rows
    of odd length are stored element by element, and wide addresses would take all registers."""
    rows = tl.arange(0, BM)[:, None]
    cols = tl.arange(0, BN)[None, :]
    at = ptr + (row0.to(tl.int64) * S + n0) + (rows * S + cols)
    tl.store(at, p.to(ptr.dtype.element_ty), mask=(rows < L - row0) & (cols < S - n0), cache_modifier=".cs")


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
        store_weights(weights_ptr, p, row0, n0, numbers[0], numbers[1], q.shape[0], BN)
        acc = add_values(
            acc, p, v_src, b, head, n0, stride_v_s, stride_v_e, length, E, EP, BN, PRECISION, V_TMA, V_TURNED, EDGE
        )  # fmt: skip
    return acc


@triton.jit
def normalised(s, m, inverse, share, is_empty, n0, unit, S, BN: tl.constexpr, RULES: tl.constexpr):
    """P from scores. exp2(s - m) / sum, not exp2(s - lse): a rounded log-sum-exp would cost fp32 its last digits."""
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
    acc, v_src, weights_ptr, is_empty, share, b, head, row0, rows, lo, hi, stride_v_s, stride_v_e, length, L, S,
    E: tl.constexpr, EP: tl.constexpr, BN: tl.constexpr, RULES: tl.constexpr, PRECISION: tl.constexpr,
    V_TMA: tl.constexpr, V_TURNED: tl.constexpr,
):  # fmt: skip
    """Stores P of the key tiles in [lo, hi), which the band hides: zero, but `share` in rows that see no key at all."""
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
                acc, p, v_src, b, head, n0, stride_v_s, stride_v_e, length, E, EP, BN, PRECISION, V_TMA, V_TURNED, True
            )  # fmt: skip
    return acc


@triton.jit
def weights_forward_kernel(
    q_ptr, k_src, v_src, out_ptr, weights_ptr, lse_ptr, bias_ptr, mask_ptr, key_mask_ptr,
    stride_q_b, stride_q_l, stride_q_k, stride_q_r, stride_q_d,
    stride_k_b, stride_k_s, stride_k_k, stride_k_d, stride_v_b, stride_v_s, stride_v_k, stride_v_e,
    stride_bias_b, stride_bias_k, stride_bias_r, stride_bias_l, stride_bias_s,
    stride_mask_b, stride_mask_k, stride_mask_r, stride_mask_l, stride_mask_s, stride_key_mask_b, stride_key_mask_s,
    B, L, S, length, scale, unit, softcap, fill, band_lo, band_hi,
    K: tl.constexpr, R: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, RULES: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr, V_TMA: tl.constexpr, V_TURNED: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    # Longest first: under a causal mask the last rows carry the most work and must not be what the grid ends on.
    pid = tl.program_id(0)
    heads = B * K * R
    row0 = (tl.cdiv(L, BM) - 1 - pid // heads) * BM
    bh = pid % heads
    b = bh // (K * R)
    k = bh % (K * R) // R
    r = bh % R
    rows = row0 + tl.arange(0, BM)

    q_ptr += head_offset(b, k, r, stride_q_b, stride_q_k, stride_q_r)
    q = load_tile(q_ptr, rows, stride_q_l, stride_q_d, L, 0, DP, D)
    if not TMA:
        k_src += head_offset(b, k, r, stride_k_b, stride_k_k, 0)
    if not V_TMA:
        v_src += head_offset(b, k, r, stride_v_b, stride_v_k, 0)
    weights_ptr += bh.to(tl.int64) * L * S
    bias = (bias_ptr + head_offset(b, k, r, stride_bias_b, stride_bias_k, stride_bias_r), stride_bias_l, stride_bias_s)
    mask = (mask_ptr + head_offset(b, k, r, stride_mask_b, stride_mask_k, stride_mask_r), stride_mask_l, stride_mask_s)
    key_mask = (key_mask_ptr + b.to(tl.int64) * stride_key_mask_b, stride_key_mask_s)
    numbers = (L, S, scale, softcap, fill, band_lo, band_hi)

    m = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, EP], tl.float32)
    lo, full_lo, full_hi, hi = keys_of(row0, tl.minimum(row0 + BM, L), S, band_lo, band_hi, BN, RULES)
    if WHOLE:
        s = score_tile(
            q, k_src, b, k, rows, 0, stride_k_s, stride_k_d, bias, mask, key_mask, numbers,
            D, DP, BN, RULES, 2, PRECISION, TMA,
        )  # fmt: skip
        m, p, shrink = softmax_step(s, m, unit, RULES)
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

    # A row without a visible key is 0 / 0, NaN as in eager, unless its fill was finite: then it is uniform.
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
        acc = add_values(acc, p, v_src, b, k, 0, stride_v_s, stride_v_e, length, E, EP, BN, PRECISION, V_TMA, V_TURNED, 2)
    else:
        if BAND_LO & RULES:
            acc = write_rows(
                acc, q, k_src, v_src, weights_ptr, m, inverse, share, is_empty, b, k, row0, rows, lo, full_lo,
                stride_k_s, stride_k_d, stride_v_s, stride_v_e, length, unit, bias, mask, key_mask, numbers,
                D, DP, E, EP, BN, RULES, 2, PRECISION, TMA, V_TMA, V_TURNED,
            )  # fmt: skip
        acc = write_rows(
            acc, q, k_src, v_src, weights_ptr, m, inverse, share, is_empty, b, k, row0, rows, full_lo, full_hi,
            stride_k_s, stride_k_d, stride_v_s, stride_v_e, length, unit, bias, mask, key_mask, numbers,
            D, DP, E, EP, BN, RULES, 0, PRECISION, TMA, V_TMA, V_TURNED,
        )  # fmt: skip
        acc = write_rows(
            acc, q, k_src, v_src, weights_ptr, m, inverse, share, is_empty, b, k, row0, rows, full_hi, hi,
            stride_k_s, stride_k_d, stride_v_s, stride_v_e, length, unit, bias, mask, key_mask, numbers,
            D, DP, E, EP, BN, RULES, 2, PRECISION, TMA, V_TMA, V_TURNED,
        )  # fmt: skip
        if BAND & RULES and not (EXACT & RULES):
            end = lo + tl.cdiv(hi - lo, BN) * BN
            acc = fill_outside(
                acc, v_src, weights_ptr, is_empty, share, b, k, row0, rows, 0, lo, stride_v_s, stride_v_e, length, L, S,
                E, EP, BN, RULES, PRECISION, V_TMA, V_TURNED,
            )  # fmt: skip
            acc = fill_outside(
                acc, v_src, weights_ptr, is_empty, share, b, k, row0, rows, end, S, stride_v_s, stride_v_e, length, L, S,
                E, EP, BN, RULES, PRECISION, V_TMA, V_TURNED,
            )  # fmt: skip
    if not (EMPTY_ROWS & RULES):
        acc = tl.where(is_empty[:, None], float("nan"), acc)

    store_tile(out_ptr + (b.to(tl.int64) * L * K * R + k * R + r) * E, acc, rows, K * R * E, L, 0, EP, E)
    tl.store(lse_ptr + bh.to(tl.int64) * L + rows, lse, mask=rows < L)


def weights_forward_tiles(attention: Attention) -> Tiles:
    """Tiles; one that is as wide as S is taken whole. By compiling for sm_80, sm_90 and sm_100: none of them spills."""
    _, _, S, _, _, D, E = attention.sizes
    capability, precision = attention.capability, attention.dot_precision
    if capability is None:
        return Tiles(16, 32, 4, 1)
    bits = attention.rules
    reads_scores = (rules.BIAS.value | rules.MASK.value) & bits
    is_plain = bits & ~(rules.SCALED.value) == 0
    span = max(16, 1 << (S - 1).bit_length())
    if max(D, E) > 128 or (max(D, E) > 64 and precision != "native"):
        return Tiles(32, 32, 8, 1) if precision == "native" else Tiles(16, 16, 4, 2)
    if precision == "ieee":
        return Tiles(32, 32, 8, 2) if reads_scores else Tiles(64 if capability[0] == 9 else 32, 32, 4, 2)
    if reads_scores or capability < (9, 0):
        return Tiles(64, 32, 8, 2)
    if is_plain and max(D, E) <= 64 and span <= 256:
        return Tiles(64, span, 4 if span <= 128 else 8, 1)
    return Tiles(64, 64, 4, 2) if is_plain else Tiles(64, 32, 4, 2)


def plan_weights_forward(
    attention: Attention,
    weights_dtype: torch.dtype,
    is_rounded: bool = False,
    use_descriptors: bool | None = None,
    tiles: Tiles | None = None,
) -> Plan:
    """Launches for `attention`: a preparation where it is needed, then the kernel. Results: out, weights, lse.

    `use_descriptors` None: where the device and the strides allow it; True overrules the device, not the strides.
    """
    tensors = attention.tensors
    B, L, S, K, R, D, E = attention.sizes
    scratch, launches, names = plan_preparation(attention, is_rounded)
    operands = {**tensors, **scratch}
    q, k, v = (operands[names[name]] for name in ("q", "k", "v"))
    is_turned = attention.dot_precision == "tf32"
    if is_turned and names["v"] == "v":
        v = Operand((B, K, E, S), (v.strides[0], v.strides[2], v.strides[3], v.strides[1]), v.dtype, v.is_aligned)
    if tiles is None:
        tiles = weights_forward_tiles(attention)
    if use_descriptors is None:
        use_descriptors = attention.has_descriptors

    sources, scalars = score_arguments(attention)
    scalars |= named_strides("q", q, "blkrd") | named_strides("k", k, "bskd")
    scalars |= named_strides("v", v, "bkes" if is_turned else "bske")
    scalars |= {"DP": 1 << (D - 1).bit_length(), "EP": 1 << (E - 1).bit_length()}
    scalars |= {"BM": tiles.BM, "BN": tiles.BN, "V_TURNED": is_turned, "WHOLE": tiles.BN >= S}
    scalars |= {"length": v.shape[-1] if is_turned else S}
    sources |= {"q_ptr": names["q"], "out_ptr": "out", "weights_ptr": "weights", "lse_ptr": "lse"}
    sources |= {"k_src": names["k"], "v_src": names["v"]}
    boxes: dict[str, Descriptor] = {}
    if use_descriptors and _is_describable(k) and D & (D - 1) == 0:
        boxes["k_src"] = Descriptor(names["k"], k.shape, k.strides, (1, tiles.BN, 1, D))
    if use_descriptors and _is_describable(v) and E & (E - 1) == 0:
        block = (1, 1, E, tiles.BN) if is_turned else (1, tiles.BN, 1, E)
        boxes["v_src"] = Descriptor(names["v"], v.shape, v.strides, block)
    scalars |= {"TMA": "k_src" in boxes, "V_TMA": "v_src" in boxes}

    parameters: list[str] = weights_forward_kernel.arg_names
    launch = Launch(
        weights_forward_kernel,
        (-(-L // tiles.BM) * B * K * R,),
        {name: slot for name, slot in sources.items() if name in parameters and name not in boxes},
        {name: value for name, value in scalars.items() if name in parameters},
        tiles.num_warps,
        tiles.num_stages,
        boxes,
    )
    outputs = {
        "out": Operand.contiguous((B, L, K, R, E), tensors["v"].dtype),
        "weights": Operand.contiguous((B, K, R, L, S), weights_dtype),
        "lse": Operand.contiguous((B, K, R, L), torch.float32),
    }
    return Plan(scratch | outputs, (*launches, launch), ("out", "weights", "lse"))


def _is_describable(x: Operand) -> bool:
    """Whether the copy engine reads it: aligned, rows of whole 16-byte vectors."""
    width = 16 // x.dtype.itemsize
    return x.is_aligned and x.strides[-1] == 1 and all(n > 0 and n % width == 0 for n in x.strides[:-1])


def weights_forward(
    q_BLKRD: torch.Tensor,
    k_BSKD: torch.Tensor,
    v_BSKE: torch.Tensor,
    *,
    weights_dtype: torch.dtype | None = None,
    cos_q: torch.Tensor | None = None,
    sin_q: torch.Tensor | None = None,
    cos_k: torch.Tensor | None = None,
    sin_k: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    key_mask: torch.Tensor | None = None,
    scale: float,
    band_lo: int | None = None,
    band_hi: int | None = None,
    fill: float = float("-inf"),
    fill_adds: bool = False,
    rope_start: int = 0,
    rope_interleaved: bool = False,
    precision: str = "ieee",
    is_rounded: bool = False,
    tiles: Tiles | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """out_BLKRE in v's dtype, weights_BKRLS in `weights_dtype` (v's if None) and lse_BKRL (fp32, base 2), contiguous.

    Keywords are the attention forward's. `is_rounded`: q, k and v already hold tf32 values; a v whose keys are contiguous
    is then read as it lies.
    """
    tensors, attention = collect(
        {"q": q_BLKRD, "k": k_BSKD, "v": v_BSKE, "cos_q": cos_q, "sin_q": sin_q, "cos_k": cos_k, "sin_k": sin_k}
        | {"bias": bias, "mask": mask, "key_mask": key_mask},
        {"scale": scale, "band_lo": band_lo, "band_hi": band_hi, "fill": fill, "fill_adds": fill_adds}
        | {"rope_start": rope_start, "rope_interleaved": rope_interleaved, "precision": precision},
    )
    plan = plan_weights_forward(attention, weights_dtype or v_BSKE.dtype, is_rounded, tiles=tiles)
    out, weights, lse = execute(plan, tensors)
    return out, weights, lse

"""Attention forward that also returns its weights: plan and launcher.

A preparation rotates and rounds where that is wanted, then one kernel writes O, P and log-sum-exp.
"""

import torch

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
from inductor_gqa.kernels.weights_forward_kernel import lanes_of_a_sum, weights_forward_kernel
from inductor_gqa.kernels.weights_prepare import plan_preparation


def weights_forward_tiles(attention: Attention) -> Tiles:
    """Tiles; one that is as wide as S is taken whole. Of fp32 by time on sm_90 (one H200, causal,
    lengths 512 and 2048); all others by compiling for sm_80, sm_90 and sm_100. Only "ieee" keeps
    more than a few bytes a thread outside of registers, on sm_90 up to 136."""
    _, _, S, _, _, D, E = attention.sizes
    capability, precision = attention.capability, attention.dot_precision
    if capability is None:
        return Tiles(16, 32, 4, 1)
    bits = attention.rules
    reads_scores = (rules.BIAS.value | rules.MASK.value) & bits
    is_plain = bits & ~(rules.SCALED.value) == 0
    span = max(16, 1 << (S - 1).bit_length())
    width = max(D, E)
    if width > 64 and precision != "native":
        if capability[0] != 9:
            return Tiles(16, 16, 4, 2)
        if width > 128:
            return Tiles(32, 16, 4, 2)
        if width & (width - 1):  # lanes that are masked take registers
            return Tiles(16, 32, 4, 2) if precision == "ieee" else Tiles(32, 32, 4, 2)
        return Tiles(64, 32, 4, 2)
    if width > 128:
        return Tiles(32, 32, 8, 1)
    if precision == "ieee":
        if reads_scores:
            return Tiles(32, 32, 8, 2)
        return Tiles(64, 64, 4, 2) if capability[0] == 9 else Tiles(32, 32, 4, 2)
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
    """Launches for `attention`: a preparation where it is needed, then the kernel. Results: out,
    weights, lse.

    `use_descriptors` None: where the device and the strides allow it; True overrules the device,
    not the strides.
    """
    tensors = attention.tensors
    B, L, S, K, R, D, E = attention.sizes
    scratch, launches, names = plan_preparation(attention, is_rounded)
    operands = {**tensors, **scratch}
    q, k, v = (operands[names[name]] for name in ("q", "k", "v"))
    is_turned = attention.dot_precision == "tf32"
    if is_turned and names["v"] == "v":
        v = Operand(
            (B, K, E, S),
            (v.strides[0], v.strides[2], v.strides[3], v.strides[1]),
            v.dtype,
            v.is_aligned,
        )
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
        width = lanes_of_a_sum(D, attention.dot_precision)
        boxes["k_src"] = Descriptor(names["k"], k.shape, k.strides, (1, tiles.BN, 1, width))
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
    return (
        x.is_aligned
        and x.strides[-1] == 1
        and all(n > 0 and n % width == 0 for n in x.strides[:-1])
    )


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
    """out_BLKRE in v's dtype, weights_BKRLS in `weights_dtype` (v's if None) and lse_BKRL (fp32,
    base 2), contiguous.

    Keywords are the attention forward's. `is_rounded`: q, k and v already hold tf32 values; a v
    whose keys are contiguous is then read as it lies.
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
        | {"bias": bias, "mask": mask, "key_mask": key_mask},
        {
            "scale": scale,
            "band_lo": band_lo,
            "band_hi": band_hi,
            "fill": fill,
            "fill_adds": fill_adds,
        }
        | {"rope_start": rope_start, "rope_interleaved": rope_interleaved, "precision": precision},
    )
    plan = plan_weights_forward(attention, weights_dtype or v_BSKE.dtype, is_rounded, tiles=tiles)
    out, weights, lse = execute(plan, tensors)
    return out, weights, lse

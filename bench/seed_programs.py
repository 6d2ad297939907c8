"""Two whole programs in plain PyTorch, one operator at a time: the backward of a GQA + RoPE block
written by hand (003, bf16) and the forward of one that returns its attention weights (075, fp32);
their inputs, truths and floors.

Every function computes in its inputs' dtype and rounds after each operator: on fp64 inputs it is
the truth.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

CASES: dict[str, list[dict[str, Any]]] = json.loads(
    Path(__file__).with_name("seed_cases.json").read_text(encoding="utf-8")
)
PASSING_SHARE = 0.99
# One H200: dense bf16 and tf32 FLOP/s, bytes/s.
BF16_RATE, TF32_RATE, BANDWIDTH = 790e12, 395e12, 4.3e12

HEADS_003, KV_HEADS_003, WIDTH_003, HIDDEN_003 = 32, 8, 128, 5120
HEADS_075, KV_HEADS_075, WIDTH_075, HIDDEN_075 = 16, 4, 64, 1024


def use_few_heads() -> None:
    """Groups and widths of heads as they are, but two groups and a narrow hidden state: for a CPU,
    on which products of the real sizes take all the time."""
    globals().update(HEADS_003=8, KV_HEADS_003=2, HIDDEN_003=160)
    globals().update(HEADS_075=8, KV_HEADS_075=2, HIDDEN_075=96)


def turned_back(g: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Adjoint of x * cos + rotate_half(x) * sin: the product with sin comes before the halves
    swap."""
    shared = g * sin
    half = g.shape[-1] // 2
    return g * cos + torch.cat((shared[..., half:], -shared[..., :half]), dim=-1)


def attention_backward_003(
    grad_out: torch.Tensor,
    weights: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    scaling: float,
    kv_heads: int = KV_HEADS_003,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq [B, 32, L, D] and dk, dv [B, 8, L, D] of the unrotated projections; all inputs [B, 32,
    L, ...]."""
    wide = torch.promote_types(grad_out.dtype, torch.float32)
    grad_weights = grad_out @ v.mT
    grad_v = weights.mT @ grad_out
    inner = (grad_weights.to(wide) * weights.to(wide)).sum(-1, keepdim=True)
    grad_scores = (weights.to(wide) * (grad_weights.to(wide) - inner)).to(grad_out.dtype) * scaling
    grad_q = grad_scores @ k
    grad_k = grad_scores.mT @ q
    B, H, L, D = q.shape
    grad_k = grad_k.reshape(B, kv_heads, H // kv_heads, L, D).sum(2)
    grad_v = grad_v.reshape(B, kv_heads, H // kv_heads, L, D).sum(2)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return turned_back(grad_q, cos, sin), turned_back(grad_k, cos, sin), grad_v


def backward_003(
    grad_output: torch.Tensor,
    hidden_states: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    v_weight: torch.Tensor,
    o_weight: torch.Tensor,
    query_states: torch.Tensor,
    key_states: torch.Tensor,
    value_states: torch.Tensor,
    attn_weights: torch.Tensor,
    attn_output: torch.Tensor,
    scaling: float,
) -> tuple[torch.Tensor, ...]:
    """Gradients of the hidden states and of the weights of q, k, v and o."""
    B, L, _ = grad_output.shape
    _, H, _, D = query_states.shape
    grad_rows = grad_output.reshape(B * L, -1)
    grad_attn = grad_output @ o_weight
    grad_o_weight = grad_rows.mT @ attn_output.reshape(B * L, -1)
    grad_heads = grad_attn.reshape(B, L, H, D).transpose(1, 2)
    grads = attention_backward_003(
        grad_heads,
        attn_weights,
        query_states,
        key_states,
        value_states,
        cos,
        sin,
        scaling,
        kv_heads=k_weight.shape[0] // D,
    )
    rows = [g.transpose(1, 2).contiguous().reshape(B, L, -1) for g in grads]
    states = hidden_states.reshape(B * L, -1)
    grad_q_x, grad_k_x, grad_v_x = (
        g @ weight for g, weight in zip(rows, (q_weight, k_weight, v_weight), strict=True)
    )
    grad_weights = [g.reshape(B * L, -1).mT @ states for g in rows]
    return grad_q_x + grad_k_x + grad_v_x, *grad_weights, grad_o_weight


def inputs_003(
    B: int, L: int, scaling: float, device: torch.device | str, seed: int = 0
) -> tuple[Any, ...]:
    """Drawn independently of each other: the weights are the softmax of noise, not of any
    scores."""
    make = torch.Generator(device).manual_seed(seed)
    heads, kv = HEADS_003 * WIDTH_003, KV_HEADS_003 * WIDTH_003

    def noise(*shape: int) -> torch.Tensor:
        x = torch.randn(*shape, generator=make, device=device)
        return x.to(torch.bfloat16)

    def weight(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=make, device=device) / columns**0.5).bfloat16()

    def angles() -> torch.Tensor:
        x = torch.randn(B, L, WIDTH_003, generator=make, device=device)
        return x.clamp(-torch.pi, torch.pi)

    per_head = (B, HEADS_003, L, WIDTH_003)
    return (
        noise(B, L, HIDDEN_003),
        noise(B, L, HIDDEN_003),
        angles().cos().bfloat16(),
        angles().sin().bfloat16(),
        weight(heads, HIDDEN_003),
        weight(kv, HIDDEN_003),
        weight(kv, HIDDEN_003),
        weight(HIDDEN_003, heads),
        noise(*per_head),
        noise(*per_head),
        noise(*per_head),
        torch.randn(B, HEADS_003, L, L, generator=make, device=device).softmax(-1).bfloat16(),
        noise(B, L, heads),
        scaling,
    )


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


def attention_forward_075(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    is_causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out [B, 16, L, D] and weights [B, 16, L, L] of q [B, 16, L, D] and k, v [B, 4, L, D]."""
    B, H, L, D = q.shape
    K = k.shape[1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    q, k = rotated(q, cos, sin), rotated(k, cos, sin)
    k, v = (x[:, :, None].expand(B, K, H // K, L, D).reshape(B, H, L, D) for x in (k, v))
    scores = q @ k.mT * 1.0
    if is_causal:
        hidden = torch.triu(torch.ones(L, L, dtype=torch.bool, device=q.device), 1)
        scores = scores.masked_fill(hidden, float("-inf"))
    weights = scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32))
    return weights @ v, weights


def tables_075(
    position_ids: torch.Tensor, inv_freq: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [B, L, 64]. The angles are an outer product, spelled as a matmul."""
    B = position_ids.shape[0]
    frequencies = inv_freq[None, :, None].expand(B, -1, 1)
    angles = (frequencies @ position_ids[:, None, :].to(inv_freq.dtype)).transpose(1, 2)
    both = torch.cat((angles, angles), dim=-1)
    return both.cos() * 1.0, both.sin() * 1.0


def forward_075(
    hidden_states: torch.Tensor,
    position_ids: torch.Tensor,
    q_proj_weight: torch.Tensor,
    k_proj_weight: torch.Tensor,
    v_proj_weight: torch.Tensor,
    o_proj_weight: torch.Tensor,
    inv_freq: torch.Tensor,
    is_causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The block's output and its attention weights."""
    B, L, _ = hidden_states.shape
    q, k, v = (
        (hidden_states @ weight.t()).view(B, L, -1, WIDTH_075).transpose(1, 2)
        for weight in (q_proj_weight, k_proj_weight, v_proj_weight)
    )
    out, weights = attention_forward_075(q, k, v, *tables_075(position_ids, inv_freq), is_causal)
    return out.transpose(1, 2).contiguous().view(B, L, -1) @ o_proj_weight.t(), weights


def inputs_075(
    B: int, L: int, is_causal: bool, device: torch.device | str, seed: int = 0
) -> tuple[Any, ...]:
    make = torch.Generator(device).manual_seed(seed)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=make, device=device)

    heads, kv = HEADS_075 * WIDTH_075, KV_HEADS_075 * WIDTH_075
    exponents = torch.arange(0, WIDTH_075, 2, device=device) / WIDTH_075
    return (
        noise(B, L, HIDDEN_075),
        torch.arange(L, device=device)[None].expand(B, L),
        0.02 * noise(heads, HIDDEN_075),
        0.02 * noise(kv, HIDDEN_075),
        0.02 * noise(kv, HIDDEN_075),
        0.02 * noise(HIDDEN_075, heads),
        10000.0**-exponents,
        is_causal,
    )


def truth(function: Any, inputs: Sequence[Any]) -> Any:
    """`function` on the same inputs in fp64."""
    return function(
        *(
            x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
            for x in inputs
        )
    )


def passing_share(x: torch.Tensor, true: torch.Tensor, atol: float, rtol: float) -> float:
    """Share of elements within atol + rtol * |truth|; nothing passes where x is not finite."""
    return ((x.double() - true).abs() <= atol + rtol * true.abs()).double().mean().item()


def floor_us_003(B: int, L: int) -> float:
    """Each input read once and each output written once, or all products at full rate: the
    longer."""
    rows = B * L
    flops = 209_715_200 * rows + 32_768 * rows * L
    moved = 2 * (32_000 * rows + 104_857_600 + 32 * rows * L)
    return 1e6 * max(flops / BF16_RATE, moved / BANDWIDTH)


def floor_us_075(B: int, L: int) -> float:
    rows = B * L
    flops = 5_242_880 * rows + 4096 * rows * L
    moved = 4 * (2048 * rows + 2_621_440 + 16 * rows * L) + 8 * L + 128
    return 1e6 * max(flops / TF32_RATE, moved / BANDWIDTH)


def attention_floor_us_003(B: int, L: int) -> float:
    """The attention part alone: four products; P, dO, q, k, v, cos, sin read and the packed
    gradients written."""
    flops = 4 * 2 * HEADS_003 * B * L * L * WIDTH_003
    moved = 2 * B * L * (HEADS_003 * L + 4 * 4096 + 2 * WIDTH_003 + 6144)
    return 1e6 * max(flops / BF16_RATE, moved / BANDWIDTH)


def attention_floor_us_075(B: int, L: int) -> float:
    """The attention part alone: two products; q, k, v, cos, sin read, P and O written."""
    flops = 2 * 2 * HEADS_075 * B * L * L * WIDTH_075
    moved = 4 * B * L * (HEADS_075 * L + 2 * 1024 + 2 * 256 + 2 * WIDTH_075)
    return 1e6 * max(flops / TF32_RATE, moved / BANDWIDTH)

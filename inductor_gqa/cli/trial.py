"""A small attention with grouped heads and rotation, fused and run both ways: does it work here?"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import inductor_gqa
from inductor_gqa.cli.measure import default_device

LENGTH, HEADS, KV_HEADS, DIM = 96, 4, 2, 32


def attention(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """q [B, H, L, D], k and v [B, K, L, D], cos and sin [L, D]; causal."""

    def rotate(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin

    q, k = rotate(q), rotate(k)
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1) @ v


def errors() -> tuple[str, float, float]:
    """(device, eager's error, ours): the largest of the output and the gradients, relative to
    float64. Raises NotFused, or whatever compiling or running raises."""
    device = default_device()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator().manual_seed(0)
    heads = (HEADS, KV_HEADS, KV_HEADS)
    made = [torch.randn(1, n, LENGTH, DIM, generator=generator).to(device, dtype) for n in heads]
    positions = torch.arange(float(LENGTH), device=device)
    angles = positions[:, None] * torch.logspace(0, -3, DIM // 2, device=device)
    tables = [f(torch.cat((angles, angles), -1)).to(dtype) for f in (torch.cos, torch.sin)]

    def results(run: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        inputs = [x.detach().to(dtype).requires_grad_() for x in made]
        out = run(*inputs, *(x.to(dtype) for x in tables))
        out.float().square().sum().backward()
        return [out.detach(), *(x.grad for x in inputs if x.grad is not None)]

    def error(found: list[Tensor]) -> float:
        pairs = zip(found, truth, strict=True)
        return max(float((a.double() - b).norm() / b.norm()) for a, b in pairs)

    truth = results(attention, torch.float64)
    eager = error(results(attention, dtype))
    torch.compiler.reset()
    try:
        with inductor_gqa.enabled(always=True, strict=True):
            fused = error(results(torch.compile(attention), dtype))
    finally:
        torch.compiler.reset()
    return device.type, eager, fused

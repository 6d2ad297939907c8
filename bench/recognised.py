"""What is recognised: small attentions in plain PyTorch, one for each word of the README's list.

`python bench/readme.py` runs `explain` on each, in inference and in training, and writes the list
from what it says. To see one: python bench/recognised.py [word]
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import inductor_gqa

B, H, K, L, D, E = 2, 4, 2, 12, 8, 32
Function = Callable[..., Any]


def heads(length: int = L, kv_heads: int = K) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v that need gradients, heads before positions."""
    shapes = ((B, H, L, D), (B, kv_heads, length, D), (B, kv_heads, length, D))
    q, k, v = (torch.randn(shape, requires_grad=True) for shape in shapes)
    return q, k, v


def angles(width: int = D) -> Tensor:
    half = torch.arange(L)[:, None] * torch.rand(width // 2)
    return torch.cat((half, half), dim=-1)


def halves(x: Tensor) -> Tensor:
    width = x.shape[-1]
    at = torch.arange(x.shape[-2])[:, None] * 0.5 ** torch.arange(width // 2)
    cos, sin = at.cos().repeat(1, 2), at.sin().repeat(1, 2)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def neighbours(x: Tensor) -> Tensor:
    at = torch.arange(x.shape[-2])[:, None] * 0.5 ** torch.arange(x.shape[-1] // 2)
    even, odd = x[..., ::2], x[..., 1::2]
    cos, sin = at.cos(), at.sin()
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)


def turned_as_complex(x: Tensor) -> Tensor:
    at = torch.arange(x.shape[-2])[:, None] * 0.5 ** torch.arange(x.shape[-1] // 2)
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(at), at)).flatten(-2)


def part(x: Tensor) -> Tensor:
    return torch.cat((halves(x[..., :4]), x[..., 4:]), dim=-1)


def in_float32(x: Tensor) -> Tensor:
    return halves(x.float()).to(x.dtype)


def interleaved(x: Tensor) -> Tensor:
    return x.repeat_interleave(H // x.shape[1], dim=1)


def expanded(x: Tensor) -> Tensor:
    return x[:, :, None].expand(-1, -1, H // x.shape[1], -1, -1).flatten(1, 2)


def tiled(x: Tensor) -> Tensor:
    return x.repeat(1, H // x.shape[1], 1, 1)


def causal(scores: Tensor, offset: int = 1) -> Tensor:
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(offset)
    return scores.masked_fill(hidden, float("-inf"))


def window(scores: Tensor) -> Tensor:
    ago = torch.arange(scores.shape[-2])[:, None] - torch.arange(scores.shape[-1])
    return scores.masked_fill((ago < 0) | (ago >= 5), float("-inf"))


def finite(scores: Tensor) -> Tensor:
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores + torch.zeros(scores.shape[-2:]).masked_fill(hidden, -1e9)


def by_hand(scores: Tensor) -> Tensor:
    weights = torch.exp(scores - scores.amax(dim=-1, keepdim=True))
    return weights / weights.sum(dim=-1, keepdim=True)


def attention(
    rotate: Function = halves,
    repeat: Function = interleaved,
    mask: Function = causal,
    score: Function = lambda scores: scores * 0.3,
    softmax: Function = lambda scores: scores.softmax(dim=-1),
    result: Function = lambda weights, v: weights @ v,
) -> Function:
    """An attention of which some part is as given."""

    def attend(q: Tensor, k: Tensor, v: Tensor, *extra: Tensor) -> Any:
        q, k = rotate(q), repeat(rotate(k))
        weights = softmax(mask(score(q @ k.mT), *extra))
        return result(weights, repeat(v))

    return attend


def five_dims(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q = halves(q).unflatten(1, (K, -1))
    return (causal(q @ halves(k)[:, :, None].mT * 0.3).softmax(-1) @ v[:, :, None]).flatten(1, 2)


def by_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q = halves(q).unflatten(1, (K, -1))
    scores = torch.einsum("bgrld,bgsd->bgrls", q, halves(k)) * 0.3
    return torch.einsum("bgrls,bgsd->bgrld", causal(scores).softmax(-1), v).flatten(1, 2)


def with_tables(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    def rotate(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin

    return attention(rotate)(q, k, v)


def with_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    def softmax(scores: Tensor) -> Tensor:
        column = sinks[None, :, None, None].expand(*scores.shape[:-1], 1)
        return torch.cat((scores, column), dim=-1).softmax(dim=-1)[..., :-1]

    return attention(softmax=softmax)(q, k, v)


def cached(q: Tensor, k: Tensor, v: Tensor, old_k: Tensor, old_v: Tensor) -> Tensor:
    k, v = torch.cat((old_k, halves(k)), dim=2), torch.cat((old_v, v), dim=2)
    scores = causal(halves(q) @ interleaved(k).mT * 0.3, offset=k.shape[2] - L + 1)
    return scores.softmax(dim=-1) @ interleaved(v)


def given_weights(weights: Tensor, grad: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Any:
    grad_weights = grad @ v.mT
    inner = (grad_weights * weights).sum(dim=-1, keepdim=True)
    grad_scores = weights * (grad_weights - inner) * 0.3
    return grad_scores @ k, grad_scores.mT @ q, weights.mT @ grad


class Projected(nn.Module):
    """Self-attention of x [B, L, E] from projections of its own."""

    def __init__(self, packed: bool = False, frozen: bool = False, adapter: bool = False) -> None:
        super().__init__()
        self.sizes = (H * D, K * D, K * D)
        self.all = nn.Linear(E, sum(self.sizes)) if packed else None
        self.each = nn.ModuleList(nn.Linear(E, n) for n in self.sizes)
        self.down = nn.Linear(E, 2, bias=False) if adapter else None
        self.up = nn.Linear(2, H * D, bias=False)
        if frozen:
            self.each[0].requires_grad_(False)
            self.each[1].requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        made = self.all(x).split(self.sizes, -1) if self.all else [layer(x) for layer in self.each]
        q, k, v = made
        if self.down is not None:
            q = q + self.up(self.down(x)) * 2.0
        q, k, v = (y.unflatten(-1, (-1, D)).transpose(1, 2) for y in (q, k, v))
        return attention()(q, k, v)


def tokens() -> tuple[Tensor]:
    return (torch.randn(B, L, E),)


def case(inputs: Callable[[], tuple[Tensor, ...]] = heads, **parts: Any) -> tuple[Function, Any]:
    return attention(**parts), inputs


def no_rotation(x: Tensor) -> Tensor:
    return x


def no_mask(scores: Tensor) -> Tensor:
    return scores


def padding(scores: Tensor, keep: Tensor) -> Tensor:
    return causal(scores).masked_fill(~keep[:, None, None], float("-inf"))


GROUPS: dict[str, dict[str, tuple[Function, Any]]] = {
    "rotary embeddings": {
        "halves": case(),
        "neighbours": case(rotate=neighbours),
        "complex numbers": case(rotate=turned_as_complex),
        "a part of the lanes": case(rotate=part),
        "none at all": case(rotate=no_rotation),
        "with tables given": (with_tables, lambda: (*heads(), angles().cos(), angles().sin())),
        "rotated in float32 in a bfloat16 model": case(
            lambda: tuple(x.detach().bfloat16().requires_grad_() for x in heads()),
            rotate=in_float32,
        ),
    },
    "heads": {
        "`repeat_interleave`": case(),
        "`expand` + `reshape`": case(repeat=expanded),
        "a grouped 5-D matmul": (five_dims, heads),
        "`einsum`": (by_einsum, heads),
        "tiled": case(repeat=tiled),
        "multi-query": case(lambda: heads(kv_heads=1)),
        "ordinary": case(lambda: heads(kv_heads=H), repeat=no_rotation),
        "a packed projection": (Projected(packed=True), tokens),
        "a cache": (cached, lambda: (*heads(), torch.randn(B, K, 7, D), torch.randn(B, K, 7, D))),
        "cross-attention": case(lambda: heads(length=19), mask=no_mask),
    },
    "scores": {
        "a scale on q": case(rotate=lambda x: halves(x) * 0.5),
        "a scale in a tensor": (
            lambda q, k, v, scale: attention(score=lambda s: s * scale)(q, k, v),
            lambda: (*heads(), torch.tensor(0.3)),
        ),
        "softcap": case(score=lambda s: 20.0 * torch.tanh(s * 0.3 / 20.0)),
        "sinks": (with_sinks, lambda: (*heads(), torch.randn(H, requires_grad=True))),
        "a softmax written by hand": case(softmax=by_hand),
        "dropout of the weights": case(softmax=lambda s: F.dropout(s.softmax(-1), 0.1, True)),
        "weights that are returned": case(result=lambda p, v: (p @ v, p.detach())),
    },
    "masks": {
        "causal": case(),
        "causal with an offset": (cached, lambda: (*heads(), *torch.randn(2, B, K, 7, D))),
        "sliding window": case(mask=window),
        "key padding": case(lambda: (*heads(), torch.ones(B, L, dtype=torch.bool)), mask=padding),
        "a boolean tensor": case(
            lambda: (*heads(), torch.rand(B, 1, L, L) > 0.3),
            mask=lambda s, keep: s.masked_fill(~keep, -1e9),
        ),
        "a bias": case(lambda: (*heads(), torch.randn(1, H, L, L)), mask=lambda s, b: s + b),
        "finite fills": case(mask=finite),
    },
    "gradients": {
        "all three": case(),
        "frozen projections": (Projected(frozen=True), tokens),
        "LoRA": (Projected(adapter=True, frozen=True), tokens),
        "a backward written by hand from given weights": (
            given_weights,
            lambda: (
                torch.rand(B, H, L, L),
                *(torch.randn(B, H, L, D) for _ in range(4)),
            ),
        ),
    },
}
FORWARD_ONLY = {"a backward written by hand from given weights"}  # it is a backward


def status(name: str, function: Function, inputs: Callable[[], tuple[Tensor, ...]]) -> str:
    """ "" where it fuses with its rotation in both directions, else what is missing."""
    missing: list[str] = []
    for direction in ("inference", "training"):
        if direction == "training" and name in FORWARD_ONLY:
            continue
        torch.manual_seed(0)
        torch.compiler.reset()
        with torch.set_grad_enabled(direction == "training"):
            report = inductor_gqa.explain(function, *inputs())
        if not report.fused or report.left:
            missing.append(f"not in {direction}")
        elif any(site.notes for site in report.sites):
            missing.append(f"rotation outside in {direction}")
    return ", ".join(missing)


def listed() -> str:
    """One line for each group: what fuses, with what is missing in parentheses."""
    lines: list[str] = []
    for group, cases in GROUPS.items():
        words: list[str] = []
        for name, (function, inputs) in cases.items():
            missing = status(name, function, inputs)
            words.append(f"{name} ({missing})" if missing else name)
        lines.append(f"- {group}: {', '.join(words)}")
    return "\n".join(lines)


def main() -> int:
    for group, cases in GROUPS.items():
        for name, (function, inputs) in cases.items():
            if len(sys.argv) < 2 or sys.argv[1] in name:
                print(f"{group}: {name}\n{inductor_gqa.explain(function, *inputs())}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

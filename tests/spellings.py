"""Spellings of attention that tests compose: rotations, tables, groupings, masks, and a module that
puts them together.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# ---- rotations of x [..., D] by tables that broadcast to it


def rotate_half(x: Tensor) -> Tensor:
    x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), -1)


def rotate_every_two(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + rotate_half(x) * sin


def half_by_chunk(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x1, x2 = x.chunk(2, dim=-1)
    return (x * cos) + (torch.cat((-x2, x1), dim=-1) * sin)


def half_in_fp32(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    wide = x.float()
    return (wide * cos.float() + rotate_half(wide) * sin.float()).to(x.dtype)


def half_by_parts(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    h = x.shape[-1] // 2
    x1, x2, c1, c2, s1, s2 = (
        x[..., :h],
        x[..., h:],
        cos[..., :h],
        cos[..., h:],
        sin[..., :h],
        sin[..., h:],
    )
    return torch.cat([x1 * c1 - x2 * s1, x2 * c2 + x1 * s2], -1)


def half_by_roll(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    h = x.shape[-1] // 2
    sign = torch.cat((-torch.ones(h, dtype=x.dtype), torch.ones(h, dtype=x.dtype)))
    return x * cos + torch.roll(x, h, -1) * (sin * sign)


def half_table(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Tables of half the width."""
    h = x.shape[-1] // 2
    q1, q2, c, s = x[..., :h], x[..., h:], cos[..., :h], sin[..., :h]
    return torch.cat([q1 * c - q2 * s, q2 * c + q1 * s], -1)


def half_table_other_order(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    q1, q2 = x.chunk(2, -1)
    c, s = cos[..., : q1.shape[-1]], sin[..., : q1.shape[-1]]
    return torch.cat([q1 * c - q2 * s, q1 * s + q2 * c], -1)


def interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + rotate_every_two(x) * sin


def interleaved_by_repeat(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    h = x.shape[-1] // 2
    cos = cos[..., :h].repeat_interleave(2, dim=-1)
    sin = sin[..., :h].repeat_interleave(2, dim=-1)
    return x * cos + rotate_every_two(x) * sin


def interleaved_by_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x as pairs, select, stack, flatten."""
    h = x.shape[-1] // 2
    pairs = x.reshape(*x.shape[:-1], h, 2)
    c, s = cos[..., :h], sin[..., :h]
    a, b = pairs[..., 0], pairs[..., 1]
    return torch.stack([a * c - b * s, b * c + a * s], -1).flatten(-2).type_as(x)


def interleaved_by_unbind(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x1, x2 = x.unflatten(-1, (-1, 2)).unbind(-1)
    return x * cos + torch.stack((-x2, x1), -1).flatten(-2) * sin


def interleaved_in_halves_out(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    h = x.shape[-1] // 2
    a, b, c, s = x[..., ::2], x[..., 1::2], cos[..., :h], sin[..., :h]
    return torch.cat([a * c - b * s, b * c + a * s], -1)


def regrouped_then_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs brought to halves by view and transpose, then rotate_half (DeepSeek v2)."""
    *lead, D = x.shape
    x = x.view(*lead, D // 2, 2).transpose(-1, -2).reshape(*lead, D)
    return x * cos + rotate_half(x) * sin


def partial(x: Tensor, cos: Tensor, sin: Tensor, width: int | None = None) -> Tensor:
    width = width or x.shape[-1] // 2
    turned, rest = x[..., :width], x[..., width:]
    return torch.cat((half(turned, cos[..., :width], sin[..., :width]), rest), -1)


def partial_by_split(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    width = x.shape[-1] // 2
    turned, rest = x.split([width, x.shape[-1] - width], -1)
    return torch.cat((interleaved(turned, cos[..., :width], sin[..., :width]), rest), -1)


def partial_at_end(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    width = x.shape[-1] // 2
    rest, turned = x[..., :-width], x[..., -width:]
    return torch.cat((rest, half(turned, cos[..., :width], sin[..., :width])), -1)


def inverse(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos - rotate_half(x) * sin


def inverse_by_negated_table(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + rotate_half(x) * (-sin)


ROTATIONS: dict[str, Callable[..., Tensor]] = {
    f.__name__: f
    for f in (
        half,
        half_by_chunk,
        half_in_fp32,
        half_by_parts,
        half_table,
        half_table_other_order,
        interleaved,
        interleaved_by_repeat,
        interleaved_by_pairs,
        interleaved_by_unbind,
        interleaved_in_halves_out,
        regrouped_then_half,
        partial,
        partial_by_split,
        partial_at_end,
        inverse,
        inverse_by_negated_table,
    )
}

# ---- groupings: scores of q [B, H, L, D] and k [B, K, S, D], and the output [B, H, L, E] of
# weights and v [B, K, S, E]


def repeat_kv(x: Tensor, times: int) -> Tensor:
    B, K, S, D = x.shape
    if times == 1:
        return x
    return x[:, :, None, :, :].expand(B, K, times, S, D).reshape(B, K * times, S, D)


class Grouping:
    """repeat by expand + reshape; others change one of the two products or the repeat."""

    def repeat(self, x: Tensor, times: int) -> Tensor:
        return repeat_kv(x, times)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return torch.matmul(q, self.repeat(k, q.shape[1] // k.shape[1]).transpose(2, 3))

    def out(self, p: Tensor, v: Tensor) -> Tensor:
        return torch.matmul(p, self.repeat(v, p.shape[1] // v.shape[1]))


class Interleave(Grouping):
    def repeat(self, x: Tensor, times: int) -> Tensor:
        return x.repeat_interleave(times, dim=1)


class Tiled(Grouping):
    """Query head h uses key/value head h % K."""

    def repeat(self, x: Tensor, times: int) -> Tensor:
        return x.repeat(1, times, 1, 1)


class TiledByExpand(Grouping):
    def repeat(self, x: Tensor, times: int) -> Tensor:
        B, K, S, D = x.shape
        return x[:, None].expand(B, times, K, S, D).reshape(B, times * K, S, D)


class FlattenedExpand(Grouping):
    def repeat(self, x: Tensor, times: int) -> Tensor:
        return x.unsqueeze(2).expand(-1, -1, times, -1, -1).flatten(1, 2)


class StackedCopies(Grouping):
    def repeat(self, x: Tensor, times: int) -> Tensor:
        return torch.stack([x] * times, 2).flatten(1, 2)


class Einsum(Grouping):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return torch.einsum("bhid,bhjd->bhij", q, self.repeat(k, q.shape[1] // k.shape[1]))

    def out(self, p: Tensor, v: Tensor) -> Tensor:
        return torch.einsum("bhij,bhje->bhie", p, self.repeat(v, p.shape[1] // v.shape[1]))


class Bmm(Grouping):
    """Batch and heads folded by hand."""

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        B, H, L, D = q.shape
        k = self.repeat(k, H // k.shape[1]).reshape(B * H, -1, D)
        return torch.bmm(q.reshape(B * H, L, D), k.transpose(1, 2)).view(B, H, L, -1)

    def out(self, p: Tensor, v: Tensor) -> Tensor:
        B, H, L, S = p.shape
        v = self.repeat(v, H // v.shape[1]).reshape(B * H, S, -1)
        return torch.bmm(p.reshape(B * H, L, S), v).view(B, H, L, -1)


class Grouped5D(Grouping):
    """Scores have the group as a dim of its own; masks broadcast to it."""

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        q = q.unflatten(1, (k.shape[1], -1))
        return torch.matmul(q, k[:, :, None].transpose(-1, -2))

    def out(self, p: Tensor, v: Tensor) -> Tensor:
        return torch.matmul(p, v[:, :, None]).flatten(1, 2)


class GroupedEinsum(Grouping):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return torch.einsum("bkrid,bkjd->bkrij", q.unflatten(1, (k.shape[1], -1)), k)

    def out(self, p: Tensor, v: Tensor) -> Tensor:
        return torch.einsum("bkrij,bkje->bkrie", p, v).flatten(1, 2)


class TiledEinsum(Grouping):
    """The group outside the key/value heads."""

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return torch.einsum("brkid,bkjd->brkij", q.unflatten(1, (-1, k.shape[1])), k)

    def out(self, p: Tensor, v: Tensor) -> Tensor:
        return torch.einsum("brkij,bkje->brkie", p, v).flatten(1, 2)


class FoldedRows(Grouping):
    """One product per key/value head, with the group folded into the rows and unfolded for the
    mask.
    """

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        B, H, L, D = q.shape
        K = k.shape[1]
        folded = q.reshape(B, K, H // K * L, D)
        return torch.matmul(folded, k.transpose(2, 3)).view(B, H, L, -1)

    def out(self, p: Tensor, v: Tensor) -> Tensor:
        B, H, L, S = p.shape
        K = v.shape[1]
        return torch.matmul(p.reshape(B, K, H // K * L, S), v).view(B, H, L, -1)


class Matmul(Grouping):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ self.repeat(k, q.shape[1] // k.shape[1]).mT

    def out(self, p: Tensor, v: Tensor) -> Tensor:
        return p @ self.repeat(v, p.shape[1] // v.shape[1])


GROUPINGS: dict[str, Grouping] = {
    g.__name__: g()
    for g in (
        Grouping,
        Interleave,
        Tiled,
        TiledByExpand,
        FlattenedExpand,
        StackedCopies,
        Einsum,
        Bmm,
        Grouped5D,
        GroupedEinsum,
        TiledEinsum,
        FoldedRows,
        Matmul,
    )
}

# ---- tables [B, L, D], computed as models do


def frequencies(D: int) -> Tensor:
    return 1.0 / (10.0 ** (torch.arange(0, D, 2).float() / D))


def angles(L: int, D: int, layout: str = "halves") -> Tensor:
    """Angles of positions 3 .. 3 + L, each used by two lanes."""
    freqs = torch.outer(torch.arange(3, 3 + L).float(), frequencies(D))
    if layout == "halves":
        return torch.cat((freqs, freqs), -1)
    return freqs.repeat_interleave(2, -1)


# ---- the module


def softmax_fp32(s: Tensor) -> Tensor:
    return F.softmax(s, dim=-1, dtype=torch.float32).to(s.dtype)


def softmax_by_hand(s: Tensor) -> Tensor:
    e = torch.exp(s - s.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True)


class Attention(nn.Module):
    """Projections, rotation, scores, mask, softmax, values; every part is a function that a test
    may replace.

    Buffers are made from a generator, so that two instances with equal arguments are equal.
    """

    def __init__(
        self,
        H: int = 4,
        K: int = 2,
        D: int = 8,
        E: int = 24,
        value_dim: int | None = None,
        rotation: Callable[..., Tensor] | None = half,
        rotate_q: bool = True,
        rotate_k: bool = True,
        grouping: Grouping | str = "Grouping",
        scale: float | None = None,
        scores: Callable[[Tensor], Tensor] | None = None,
        mask: Callable[..., Tensor] | None = None,
        softmax: Callable[[Tensor], Tensor] = softmax_fp32,
        finish: Callable[[Tensor], Tensor] | None = None,
        layout: str = "transpose",
        tables: Callable[..., tuple[Tensor, Tensor]] | None = None,
        unequal: bool = True,
        longest: int = 64,
        dtype: torch.dtype = torch.float32,
        buffers: dict[str, Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.H, self.K, self.D, self.V = H, K, D, value_dim or D
        generator = torch.Generator().manual_seed(1)
        make = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
        self.wq = nn.Parameter((make(H * D, E) / math.sqrt(E)).to(dtype))
        self.wk = nn.Parameter((make(K * D, E) / math.sqrt(E)).to(dtype))
        self.wv = nn.Parameter((make(K * self.V, E) / math.sqrt(E)).to(dtype))
        free = angles(longest, D)
        if (
            unequal
        ):  # tables whose halves differ, as no model has them, so that mixed up columns show
            free = free + 0.3 * make(longest, D)
        self.register_buffer("cos", free.cos().to(dtype))
        self.register_buffer("sin", free.sin().to(dtype))
        for name, value in (buffers or {}).items():
            self.register_buffer(name, value)
        self.rotation, self.rotate_q, self.rotate_k = rotation, rotate_q, rotate_k
        self.grouping = GROUPINGS[grouping] if isinstance(grouping, str) else grouping
        self.scale = 0.3 if scale is None else scale
        self.scores, self.mask, self.softmax, self.finish = scores, mask, softmax, finish
        self.layout, self.tables = layout, tables

    def heads(self, x: Tensor, n: int) -> Tensor:
        """[B, N, n * d] to [B, n, N, d]."""
        B, N, _ = x.shape
        if self.layout == "permute":
            return x.reshape(B, N, n, -1).permute(0, 2, 1, 3)
        if self.layout == "contiguous":
            return x.view(B, N, n, -1).transpose(1, 2).contiguous()
        if self.layout == "unflatten":
            return x.unflatten(-1, (n, -1)).swapaxes(1, 2)
        return x.view(B, N, n, -1).transpose(1, 2)

    def rotated(self, x: Tensor, length: int) -> Tensor:
        assert self.rotation is not None
        if self.tables is not None:
            cos, sin = self.tables(self, x, length)
        else:
            cos, sin = self.cos[:length], self.sin[:length]
        return self.rotation(x, cos, sin)

    def forward(self, x: Tensor, context: Tensor | None = None, *extra: Any) -> Tensor:
        source = x if context is None else context
        q = self.heads(F.linear(x, self.wq), self.H)
        k = self.heads(F.linear(source, self.wk), self.K)
        v = self.heads(F.linear(source, self.wv), self.K)
        if self.rotation is not None:
            q = self.rotated(q, x.shape[1]) if self.rotate_q else q
            k = self.rotated(k, source.shape[1]) if self.rotate_k else k
        return self.attend(q, k, v, *extra)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *extra: Any) -> Tensor:
        s = self.grouping.scores(q, k)
        s = self.scores(s) if self.scores is not None else s * self.scale
        if self.mask is not None:
            s = self.mask(self, s, *extra)
        p = self.softmax(s)
        o = self.grouping.out(p, v)
        if self.finish is not None:
            return self.finish(o)
        return o.transpose(1, 2).contiguous().flatten(2)


def inputs(
    B: int = 2,
    L: int = 11,
    S: int | None = None,
    E: int = 24,
    dtype: torch.dtype = torch.float32,
    grad: bool = True,
    seed: int = 0,
) -> tuple[Tensor, ...]:
    """x [B, L, E], and a context [B, S, E] if S is given."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(B, L, E)] + ([(B, S, E)] if S is not None else [])
    return tuple(
        torch.randn(shape, generator=generator).to(dtype).requires_grad_(grad) for shape in shapes
    )

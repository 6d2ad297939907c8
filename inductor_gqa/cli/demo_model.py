"""The demo's model: a small decoder with GQA and RoPE, written as one finds it in the wild.

It is plain PyTorch and knows nothing of this package. Nothing in it may be changed to make it fuse.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Sizes:
    """Sizes of the demo's model and batch; `heads` and `kv_heads` are H and K, `length` is L."""

    batch: int
    length: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    vocabulary: int = 512

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


def rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def repeat_kv(x: Tensor, repeats: int) -> Tensor:
    batch, heads, length, dim = x.shape
    x = x[:, :, None, :, :].expand(batch, heads, repeats, length, dim)
    return x.reshape(batch, heads * repeats, length, dim)


class Attention(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = sizes.heads, sizes.kv_heads, sizes.head_dim
        self.q_proj = nn.Linear(sizes.hidden, self.heads * self.dim, bias=False)
        self.k_proj = nn.Linear(sizes.hidden, self.kv_heads * self.dim, bias=False)
        self.v_proj = nn.Linear(sizes.hidden, self.kv_heads * self.dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.dim, sizes.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.q_proj(x).view(batch, length, self.heads, self.dim).transpose(1, 2)
        k = self.k_proj(x).view(batch, length, self.kv_heads, self.dim).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, self.kv_heads, self.dim).transpose(1, 2)
        q = q * cos + rotate_half(q) * sin
        k = k * cos + rotate_half(k) * sin
        k = repeat_kv(k, self.heads // self.kv_heads)
        v = repeat_kv(v, self.heads // self.kv_heads)
        scores = torch.matmul(q, k.transpose(2, 3)) * self.dim**-0.5
        scores = scores + mask
        weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        attended = torch.matmul(weights, v).transpose(1, 2).reshape(batch, length, -1)
        return self.o_proj(attended)


class Block(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(sizes.hidden, eps=1e-6)
        self.attention = Attention(sizes)
        self.mlp_norm = nn.RMSNorm(sizes.hidden, eps=1e-6)
        self.up = nn.Linear(sizes.hidden, 2 * sizes.hidden, bias=False)
        self.down = nn.Linear(2 * sizes.hidden, sizes.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin, mask)
        return x + self.down(F.silu(self.up(self.mlp_norm(x))))


class Decoder(nn.Module):
    """Token ids [B, L] to logits [B, L, vocabulary]."""

    inv_freq: Tensor

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.hidden, eps=1e-6)
        self.head = nn.Linear(sizes.hidden, sizes.vocabulary, bias=False)
        lanes = torch.arange(0, sizes.head_dim, 2, dtype=torch.float32)
        self.register_buffer("inv_freq", 10000.0 ** (-lanes / sizes.head_dim), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        x = self.embedding(ids)
        positions = torch.arange(length, device=ids.device, dtype=torch.float32)
        angles = torch.outer(positions, self.inv_freq.float())
        angles = torch.cat((angles, angles), dim=-1)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        mask = torch.full(
            (length, length), torch.finfo(x.dtype).min, device=x.device, dtype=x.dtype
        )
        mask = mask.triu(diagonal=1)
        for block in self.blocks:
            x = block(x, cos, sin, mask)
        return self.head(self.norm(x))

"""A small language model written by hand, with grouped-query attention and rotary embeddings.

Plain PyTorch; the attention is spelled as one would write it on a blackboard. It learns the
alphabet, on a CPU in seconds.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import inductor_gqa

TEXT = "abcdefghijklmnopqrstuvwxyz " * 40


def rotate(x: Tensor, theta: float = 10000.0) -> Tensor:
    """Rotary embedding of x [B, L, heads, D]."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, device=x.device) / half)
    angles = torch.arange(x.shape[1], device=x.device)[:, None, None] * frequencies
    a, b = x.split(half, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.dim, self.heads, self.kv_heads = width // heads, heads, kv_heads
        self.qkv = nn.Linear(width, (heads + 2 * kv_heads) * self.dim, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        B, L, _ = x.shape
        sizes = [self.heads, self.kv_heads, self.kv_heads]
        q, k, v = self.qkv(x).view(B, L, -1, self.dim).split(sizes, dim=2)
        q, k = rotate(q), rotate(k)
        q = q.unflatten(2, (self.kv_heads, -1))  # query heads in groups that share k and v
        scores = torch.einsum("blgrd,bsgd->bgrls", q, k) / self.dim**0.5
        future = torch.ones(L, L, dtype=torch.bool, device=x.device).triu(1)
        weights = scores.masked_fill(future, float("-inf")).softmax(dim=-1)
        return self.out(torch.einsum("bgrls,bsgd->blgrd", weights, v).reshape(B, L, -1))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width, eps=1e-6) for _ in range(2))
        self.attention = Attention(width, heads, kv_heads)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class Nano(nn.Module):
    def __init__(self, vocabulary: int, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*(Block(width, heads=4, kv_heads=2) for _ in range(layers)))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(ids)))


def main() -> None:
    torch.manual_seed(0)
    letters = sorted(set(TEXT))
    text = torch.tensor([letters.index(letter) for letter in TEXT])
    model = Nano(len(letters))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    inductor_gqa.enable(always=True)  # always: a small model, for which fusing would not pay
    print(inductor_gqa.explain(model, text[None, :48]))
    compiled = torch.compile(model)
    losses = []
    for _ in range(20):
        starts = torch.randint(len(text) - 49, (8, 1))
        batch = text[starts + torch.arange(49)]
        logits = compiled(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")


if __name__ == "__main__":
    main()

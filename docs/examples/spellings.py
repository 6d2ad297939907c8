"""One attention in two spellings, as litgpt and torchtune write it: nothing has to be adapted.

The first has packed projections, rotates halves of a part of each head and adds a mask of
infinities. The second keeps heads behind positions, rotates neighbours in float32 and expands the
keys over the query heads of their group.
"""

import copy

import torch
from torch import Tensor, nn

import inductor_gqa

WIDTH, HEADS, KV_HEADS, DIM = 64, 4, 2, 16


class PackedAttention(nn.Module):
    """As in litgpt."""

    def __init__(self, turned: int = 8) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * DIM, bias=False)
        self.proj = nn.Linear(HEADS * DIM, WIDTH, bias=False)
        self.turned = turned

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        rotated = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
        return ((x * cos) + (rotated * sin)).to(dtype=x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        q, k, v = self.qkv(x).split((HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM), dim=-1)
        q = q.view(B, T, HEADS, DIM).transpose(1, 2)
        k = k.view(B, T, KV_HEADS, DIM).transpose(1, 2)
        v = v.view(B, T, KV_HEADS, DIM).transpose(1, 2)

        n = self.turned
        angles = angles_of(T, n).repeat(1, 2)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        q = torch.cat((self.rope(q[..., :n], cos, sin), q[..., n:]), dim=-1)
        k = torch.cat((self.rope(k[..., :n], cos, sin), k[..., n:]), dim=-1)

        k = k.repeat_interleave(HEADS // KV_HEADS, dim=1)
        v = v.repeat_interleave(HEADS // KV_HEADS, dim=1)
        scores = q @ k.mT * DIM**-0.5
        mask = torch.ones(T, T, dtype=q.dtype).triu(diagonal=1)
        mask.masked_fill_(mask.bool(), torch.finfo(q.dtype).min)
        weights = (scores + mask).softmax(dim=-1, dtype=torch.float).to(dtype=q.dtype)
        return self.proj((weights @ v).transpose(1, 2).reshape(B, T, HEADS * DIM))


class HeadsBehindAttention(nn.Module):
    """As in torchtune."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, HEADS * DIM, bias=False)
        self.k_proj = nn.Linear(WIDTH, KV_HEADS * DIM, bias=False)
        self.v_proj = nn.Linear(WIDTH, KV_HEADS * DIM, bias=False)
        self.output_proj = nn.Linear(HEADS * DIM, WIDTH, bias=False)

    def rope(self, x: Tensor) -> Tensor:
        """x [b, s, heads, DIM]."""
        shaped = x.float().reshape(*x.shape[:-1], -1, 2)
        angles = angles_of(x.shape[1], DIM)
        cache = torch.stack((angles.cos(), angles.sin()), dim=-1)
        cache = cache.view(-1, shaped.size(1), 1, shaped.size(3), 2)
        out = torch.stack(
            (
                shaped[..., 0] * cache[..., 0] - shaped[..., 1] * cache[..., 1],
                shaped[..., 1] * cache[..., 0] + shaped[..., 0] * cache[..., 1],
            ),
            -1,
        )
        return out.flatten(3).type_as(x)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        group = HEADS // KV_HEADS
        q = self.rope(self.q_proj(x).view(b, s, KV_HEADS * group, DIM)).transpose(1, 2)
        k = self.rope(self.k_proj(x).view(b, s, -1, DIM)).transpose(1, 2)
        v = self.v_proj(x).view(b, s, -1, DIM).transpose(1, 2)
        shape = (b, KV_HEADS, group, s, DIM)
        k = k.unsqueeze(2).expand(shape).flatten(1, 2)
        v = v.unsqueeze(2).expand(shape).flatten(1, 2)
        visible = torch.tril(torch.ones(s, s, dtype=torch.bool))
        scores = torch.matmul(q, k.transpose(-2, -1)) / DIM**0.5
        weights = scores.masked_fill(visible.logical_not(), float("-inf")).softmax(dim=-1)
        return self.output_proj(torch.matmul(weights, v).transpose(1, 2).reshape(b, s, -1))


def angles_of(length: int, width: int) -> Tensor:
    """[length, width / 2]."""
    theta = 1.0 / (10000 ** (torch.arange(0, width, 2).float() / width))
    return torch.outer(torch.arange(length).float(), theta)


def gradient(model: nn.Module, run, x: Tensor) -> Tensor:
    """All gradients of a step in one vector."""
    model.zero_grad()
    run(x).square().mean().backward()
    grads = (parameter.grad for parameter in model.parameters())
    return torch.cat([grad.flatten() for grad in grads if grad is not None])


def main() -> None:
    torch.manual_seed(0)
    inductor_gqa.enable(always=True)  # always: a small model, for which fusing would not pay
    x = torch.randn(2, 48, WIDTH)
    for model in (PackedAttention(), HeadsBehindAttention()):
        print(f"{type(model).__name__}\n{inductor_gqa.explain(model, x)}")
        exact = copy.deepcopy(model).double()
        truth = gradient(exact, exact, x.double())
        found = [gradient(model, run, x) for run in (torch.compile(model), model)]
        errors = [(g - truth).norm() / truth.norm() for g in found]
        print(f"gradients: error {errors[0]:.2e}, in eager {errors[1]:.2e}\n")


if __name__ == "__main__":
    main()

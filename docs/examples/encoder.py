"""An encoder that returns its attention weights: inference, with padding.

The weights are a result, so they are written once; the scores before them are not. In training a
site whose weights are returned is left.
"""

import torch
from torch import Tensor, nn

import inductor_gqa


class Encoder(nn.Module):
    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor, is_token: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, L, width], is_token [B, L] bool; returns the output and weights [B, H, L, L]."""
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(~is_token[:, None, None], torch.finfo(scores.dtype).min)
        weights = scores.softmax(dim=-1)
        attended = (weights @ v).transpose(1, 2).flatten(2)
        return self.out(attended), weights


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    model = Encoder().eval()
    x = torch.randn(2, 40, 64)
    is_token = torch.arange(40) < torch.tensor([[40], [25]])

    inductor_gqa.enable(always=True)  # always: a small model, for which fusing would not pay
    print(inductor_gqa.explain(model, x, is_token))
    out, weights = torch.compile(model)(x, is_token)
    eager = torch.cat([result.flatten() for result in model(x, is_token)])
    ours = torch.cat([out.flatten(), weights.flatten()])
    truth = torch.cat([result.flatten() for result in model.double()(x.double(), is_token)])
    errors = [(result - truth).norm().item() for result in (ours, eager)]
    print(f"weights {list(weights.shape)}, error {errors[0]:.2e}, in eager {errors[1]:.2e}")


if __name__ == "__main__":
    main()

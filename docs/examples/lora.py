"""LoRA by hand on the query and value projections of a Transformers model.

All other weights are frozen. Of each attention the backward holds the gradients that are needed and
no others: in the first layer nothing below k needs one, so dK is not computed there.
"""

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import inductor_gqa


class LoRA(nn.Module):
    """A frozen linear layer and a trained product of two thin matrices beside it."""

    def __init__(self, frozen: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down = nn.Linear(frozen.in_features, rank, bias=False)
        self.up = nn.Linear(rank, frozen.out_features, bias=False)
        nn.init.zeros_(self.up.weight)  # starts as the frozen layer

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.up(self.down(x))


def build() -> nn.Module:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config).requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = LoRA(layer.self_attn.q_proj)
        layer.self_attn.v_proj = LoRA(layer.self_attn.v_proj)
    return model


def main() -> None:
    torch.manual_seed(0)
    model = build()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    print(f"{sum(p.numel() for p in trained)} of {sum(p.numel() for p in model.parameters())}")

    inductor_gqa.enable(always=True)  # always: a small model, for which fusing would not pay
    ids = (torch.randint(64, (8, 1)) + torch.arange(32)) % 64
    print(inductor_gqa.explain(model, input_ids=ids, use_cache=False))

    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    compiled = torch.compile(model)
    losses = []
    for _ in range(20):
        loss = compiled(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")


if __name__ == "__main__":
    main()

"""LoRA with peft on a Transformers model: `get_peft_model`, then compile as ever.

pip install peft. The adapters are linear layers beside the projections, so the attention in the
graph is the same; no gradient of a frozen projection is computed.
"""

import torch
from peft import LoraConfig, get_peft_model  # pyright: ignore[reportMissingImports]
from transformers import LlamaConfig, LlamaForCausalLM

import inductor_gqa


def build() -> torch.nn.Module:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="eager",  # what is written out is what can be read
    )
    adapters = LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"])
    return get_peft_model(LlamaForCausalLM(config), adapters)


def main() -> None:
    torch.manual_seed(0)
    model = build()
    model.print_trainable_parameters()

    inductor_gqa.enable(always=True)  # always: a small model, for which fusing would not pay
    ids = (torch.randint(64, (8, 1)) + torch.arange(32)) % 64
    print(inductor_gqa.explain(model, input_ids=ids, use_cache=False))

    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
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

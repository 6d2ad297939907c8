"""Fine-tune an unchanged Transformers model: a plain loop, or its Trainer with --trainer.

Random weights and a small size, so that it runs on a CPU in seconds; put your own model in
`build`. --trainer needs accelerate.
"""

import argparse

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

import inductor_gqa


def build():
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="eager",  # what is written out is what can be read
    )
    return LlamaForCausalLM(config)


class Sequences(Dataset):
    """Numbers that count upwards from a random start."""

    def __init__(self, count: int, length: int = 32) -> None:
        starts = torch.randint(64, (count, 1), generator=torch.Generator().manual_seed(0))
        self.ids = (starts + torch.arange(length)) % 64

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def loop(model, data: Sequences, steps: int) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    compiled = torch.compile(model)
    losses = []
    for step in range(steps):
        ids = data.ids[torch.arange(8) + 8 * step % len(data)]
        loss = compiled(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def with_trainer(model, data: Sequences, steps: int) -> list[float]:
    from transformers import Trainer, TrainingArguments

    settings = TrainingArguments(
        output_dir="unused",
        max_steps=steps,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        torch_compile=True,  # the Trainer compiles the model, and the pass runs
    )
    trainer = Trainer(model, settings, train_dataset=data)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trainer", action="store_true", help="use Transformers' Trainer")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    torch.manual_seed(0)
    model, data = build(), Sequences(count=64)

    # always: this model is too small for fusing to pay. Leave it out for yours.
    inductor_gqa.enable(always=True)
    print(inductor_gqa.explain(model, input_ids=data.ids[:8], use_cache=False))
    losses = (with_trainer if args.trainer else loop)(model, data, args.steps)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")


if __name__ == "__main__":
    main()

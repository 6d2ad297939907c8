"""What test_gpus.py runs on each of two ranks: twenty steps of a small Llama in FSDP2 or in tensor
parallel, with stock `torch.compile`, with sites fused, and in fp64 on one rank.

Ranks that share one GPU talk through gloo, since NCCL refuses that.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
import torch.distributed as dist
from fused import wrong
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from transformers import LlamaConfig, LlamaForCausalLM

import inductor_gqa
from inductor_gqa import report

# At larger rates the steps amplify any rounding.
STEPS, BATCH, LENGTH, RATE = 20, 2, 256, 0.03
SHARDED = {"q": ColwiseParallel, "k": ColwiseParallel, "v": ColwiseParallel, "o": RowwiseParallel}


def fresh() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=512,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        attn_implementation="eager",
    )
    return LlamaForCausalLM(config).cuda()


def tokens(step: int, rank: int) -> torch.Tensor:
    """Rows that count upwards, which twenty steps can learn."""
    generator = torch.Generator().manual_seed(2 * step + rank)
    first = torch.randint(0, 512, (BATCH, 1), generator=generator)
    return ((first + torch.arange(LENGTH)) % 512).cuda()


def sharded(model: Any, dtype: torch.dtype) -> Any:
    """Each layer compiled alone and sharded, parameters kept in fp32."""
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    mesh = init_device_mesh("cuda", (2,))
    for layer in model.model.layers:
        layer.compile()
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def split(model: Any) -> Any:
    """Heads over ranks, as Transformers' own plan does, the whole model compiled."""
    mesh = init_device_mesh("cuda", (2,))
    for layer in model.model.layers:
        plan = {f"self_attn.{name}_proj": kind() for name, kind in SHARDED.items()}
        parallelize_module(layer, mesh, plan)
    return torch.compile(model)


def trained(run: Any, owner: nn.Module, ranks: list[int], autocast: Any) -> dict[str, torch.Tensor]:
    """Losses of the first of the ranks, and the parameters after the last step. Where the run holds
    the batches of several ranks, its gradient is their mean."""
    losses = []
    optimizer = torch.optim.SGD(owner.parameters(), lr=RATE, foreach=False)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in ranks:
            ids = tokens(step, rank)
            with autocast:
                loss = run(input_ids=ids, labels=ids, use_cache=False).loss
            (loss / len(ranks)).backward()
            if rank == ranks[0]:
                losses.append(loss.detach().double())
        optimizer.step()
    found = {n: whole(p.detach()) for n, p in owner.named_parameters()}
    return {"losses": torch.stack(losses)} | found


def whole(p: torch.Tensor) -> torch.Tensor:
    """A parameter of which each rank may hold a part, in rows or columns."""
    if not isinstance(p, DTensor):
        return p.clone()
    (placement,) = p.placements
    assert isinstance(placement, Shard)
    part = p.to_local().movedim(placement.dim, 0).contiguous()
    made = part.new_empty(p.shape[placement.dim], *part.shape[1:])
    dist.all_gather_into_tensor(made, part)
    return made.movedim(0, placement.dim)


def outcome(rank: int, form: str, dtype: torch.dtype) -> dict[str, Any]:
    def distributed() -> dict[str, torch.Tensor]:
        torch._dynamo.reset()
        model = fresh()
        if form == "fsdp2":
            return trained(sharded(model, dtype), model, [rank], nullcontext())
        narrow = torch.autocast("cuda", dtype, enabled=dtype is not torch.float32)
        return trained(split(model), model, [0], narrow)

    wide = copy.deepcopy(fresh()).double()
    seen_batches = [rank, 1 - rank] if form == "fsdp2" else [0]
    truth = trained(wide, wide, seen_batches, nullcontext())
    stock = distributed()
    with inductor_gqa.enabled(always=True, strict=True), report.collected() as found:
        ours = distributed()
    errors = [(made["losses"] - truth["losses"]).abs().max().item() for made in (ours, stock)]
    return {
        "wrong": wrong(ours, stock, truth),
        "fused": sum(site.fused for site in found.sites),
        "backward": sum(site.has_backward for site in found.sites if site.fused),
        "left": [site.reason for site in found.sites if not site.fused],
        "losses": [truth["losses"][0].item(), truth["losses"][-1].item()],
        "errors of losses": errors,
    }


def main() -> None:
    rank, folder, form = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    devices = torch.cuda.device_count()
    torch.cuda.set_device(rank % devices)
    store = dist.FileStore(str(folder / "store"), 2)
    kind = "nccl" if devices > 1 else "gloo"
    dist.init_process_group(kind, store=store, rank=rank, world_size=2)
    found: dict[str, Any] = {"backend": kind}
    with (
        inductor_config.patch(fx_graph_cache=False),
        functorch_config.patch(enable_autograd_cache=False),
    ):
        for dtype in (torch.float32, torch.bfloat16):
            name = str(dtype).removeprefix("torch.")
            try:
                found[name] = outcome(rank, form, dtype)
            except Exception as why:
                found[name] = {"error": f"{type(why).__name__}: {why}"}
    (folder / f"rank{rank}.json").write_text(json.dumps(found, indent=1))
    dist.barrier()
    os._exit(0)  # destroying the group may wait for threads of gloo


if __name__ == "__main__":
    main()

"""What test_distributed.py runs on each of two ranks (gloo, CPU): a model of two attentions, in
DDP, FSDP2 and tensor parallel, eager and compiled, against fp64."""

from __future__ import annotations

import copy
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from fused import BACKWARD, FORWARD, Seen, backend, wrong
from spellings import Attention
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import inductor_gqa

E, H, K, D, L = 32, 4, 2, 8, 11


def causal(module, s):
    i = torch.arange(s.shape[-2], device=s.device)
    return s.masked_fill(i[None, :] > i[:, None], float("-inf"))


class Model(nn.Module):
    def __init__(self, checkpointed=False):
        super().__init__()
        self.layers = nn.ModuleList(Attention(H=H, K=K, D=D, E=E, mask=causal) for _ in range(2))
        self.checkpointed = checkpointed

    def forward(self, x):
        for layer in self.layers:
            if self.checkpointed:
                x = x + checkpoint(layer, x, use_reentrant=False) / 8
            else:
                x = x + layer(x) / 8
        return x


class Linears(nn.Module):
    """The attention with Linear modules, which is what tensor parallel plans name; the number of
    heads is that of this rank."""

    def __init__(self, shares=1):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k = nn.Linear(E, H * D, bias=False), nn.Linear(E, K * D, bias=False)
        self.v, self.o = nn.Linear(E, K * D, bias=False), nn.Linear(H * D, E, bias=False)
        self.inner = Attention(H=H // shares, K=K // shares, D=D, mask=causal, unequal=False)
        del self.inner.wq, self.inner.wk, self.inner.wv

    def forward(self, x):
        inner = self.inner
        q, k = inner.heads(self.q(x), inner.H), inner.heads(self.k(x), inner.K)
        v = inner.heads(self.v(x), inner.K)
        return self.o(inner.attend(inner.rotated(q, L), inner.rotated(k, L), v))


def batch(seed, dtype=torch.float32):
    return torch.randn(2, L, E, generator=torch.Generator().manual_seed(seed)).to(dtype)


def gradients(run, owner, x):
    run(x).square().sum().backward()
    found = {}
    for name, p in owner.named_parameters():
        g = p.grad
        found[name] = g.full_tensor() if isinstance(g, DTensor) else g
    return found


def averaged(owner):
    """Gradients of a plain model over both ranks' batches, as data parallel averages them."""
    dtype = next(owner.parameters()).dtype
    for rank in range(2):
        (owner(batch(rank, dtype)).square().sum() / 2).backward()
    return {name: p.grad for name, p in owner.named_parameters()}


def outcome(ours, eager, truth, seen):
    return {
        "wrong": wrong(ours, eager, truth),
        "forward": seen.count(FORWARD),
        "backward": seen.count(BACKWARD),
        "left": seen.reasons,
    }


def compiled(module, owner, x, **options):
    torch._dynamo.reset()
    seen = Seen()
    with inductor_gqa.enabled(always=True), backend(seen) as chosen:
        ours = gradients(torch.compile(module, backend=chosen, **options), owner, x)
    return ours, seen


def ddp(rank, checkpointed=False):
    module = Model(checkpointed)
    ours, seen = compiled(DistributedDataParallel(module), module, batch(rank))
    return outcome(ours, averaged(Model()), averaged(Model().double()), seen)


def replicated(rank):
    module = Model()
    replicate(module)
    ours, seen = compiled(module, module, batch(rank))
    return outcome(ours, averaged(Model()), averaged(Model().double()), seen)


def fsdp(rank, checkpointed=False):
    module, mesh = Model(checkpointed), init_device_mesh("cpu", (2,))
    seen = Seen()
    torch._dynamo.reset()
    with inductor_gqa.enabled(always=True), backend(seen) as chosen:
        for layer in module.layers:
            layer.compile(backend=chosen)
            fully_shard(layer, mesh=mesh)
        fully_shard(module, mesh=mesh)
        ours = gradients(module, module, batch(rank))
    return outcome(ours, averaged(Model()), averaged(Model().double()), seen)


def tensor_parallel(rank):
    module, mesh = Linears(shares=2), init_device_mesh("cpu", (2,))
    columns = dict.fromkeys("qkv", ColwiseParallel())
    parallelize_module(module, mesh, {**columns, "o": RowwiseParallel()})
    ours, seen = compiled(module, module, batch(0))
    plain = Linears()
    wide = copy.deepcopy(plain).double()
    eager, truth = gradients(plain, plain, batch(0)), gradients(wide, wide, batch(0, torch.double))
    return outcome(ours, eager, truth, seen)


RUNS = {
    "ddp": ddp,
    "ddp with checkpointing": lambda rank: ddp(rank, True),
    "replicate": replicated,
    "fsdp2": fsdp,
    "fsdp2 with checkpointing": lambda rank: fsdp(rank, True),
    "tensor parallel": tensor_parallel,
}


def main() -> None:
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    found = {}
    for name, run in RUNS.items():
        torch.manual_seed(0)
        try:
            found[name] = run(rank)
        except Exception as why:
            found[name] = {"error": f"{type(why).__name__}: {why}"}
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # destroying the group may wait for threads of gloo


if __name__ == "__main__":
    main()

"""A training step of one attention block (hidden 5120, 32 query and 8 key/value heads of 128, RoPE,
causal, bf16): forward and backward over the 16 shapes of program 003.

  eager   the block spelled out in matmuls and softmax, as it stands
  plain   the same under torch.compile
  fused   the same under torch.compile after inductor_gqa.enable()
  sdpa    the block with F.scaled_dot_product_attention (cuDNN, is_causal, enable_gqa) under
          torch.compile

The output and every gradient are first held against fp64: the norm of an error may be a tenth more
than that of the eager block, twice as much for sdpa. What is off is reported and not timed. Times
are medians of CUDA graph replays of a whole step with L2 emptied, variants taking turns; memory is
what a step allocates at most, and as `largest_bytes` its largest allocation.

--jobs N compiles in N processes first; they share a compile cache with the one that measures.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import types
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import inductor_gqa
import seed_programs
from inductor_gqa import report
from inductor_gqa.cli.measure import default_device
from inductor_gqa.cli.terminal import progress, table
from measure import compiled_beforehand, count_sites, record, replayed_us, write
from seeds import CACHES, geometric_mean

MARGINS = {"eager": 1.1, "plain": 1.1, "fused": 1.1, "sdpa": 2.0}
VARIANTS = tuple(MARGINS)
DTYPE = torch.bfloat16
Tensors = list[torch.Tensor]
Row = dict[str, Any]


class Block(nn.Module):
    """Attention between its projections."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.repeats = heads // kv_heads
        self.q = nn.Linear(hidden, heads * width, bias=False)
        self.k, self.v = (nn.Linear(hidden, kv_heads * width, bias=False) for _ in range(2))
        self.o = nn.Linear(heads * width, hidden, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.width)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        q, k = (seed_programs.rotated(y, cos, sin) for y in (q, k))
        return self.o(self.attend(q, k, v).transpose(1, 2).flatten(2))

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = (y.repeat_interleave(self.repeats, 1) for y in (k, v))
        length = q.shape[2]
        future = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
        scores = (q @ k.mT * self.width**-0.5).masked_fill(future, -torch.inf)
        wide = torch.promote_types(q.dtype, torch.float32)
        return scores.softmax(-1, dtype=wide).to(q.dtype) @ v


class SdpaBlock(Block):
    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def _own(kind: type[Block], name: str) -> type[Block]:
    """A class with a code object of its own: Dynamo keeps compiled code by code object and does not
    guard our pass."""
    code = kind.forward.__code__.replace(co_name=f"forward_{name}")
    forward = types.FunctionType(code, kind.forward.__globals__)
    return type(f"{kind.__name__}_{name}", (kind,), {"forward": forward})


def drawn(args: argparse.Namespace, B: int, L: int, device: torch.device) -> list[torch.Tensor]:
    """x, cos, sin and the output's gradient."""
    torch.manual_seed(L + 17 * B)
    hidden, *_, width = args.sizes
    positions = torch.arange(L, device=device)[:, None]
    steps = torch.arange(0, width, 2, device=device) / width
    angles = (positions * 10000.0**-steps).repeat(1, 2)
    x, grad = (torch.randn(B, L, hidden, device=device).to(DTYPE) for _ in range(2))
    return [x.requires_grad_(), angles.cos().to(DTYPE), angles.sin().to(DTYPE), grad]


def step_of(
    run: Callable[..., torch.Tensor], module: nn.Module, inputs: Tensors
) -> Callable[[], Tensors]:
    """Forward and backward: the output, the gradient of x and those of the weights."""
    x, cos, sin, grad = inputs

    def step() -> Tensors:
        out = run(x, cos, sin)
        grads = torch.autograd.grad(out, [x, *module.parameters()], grad)
        return [out.detach(), *grads]

    return step


@contextlib.contextmanager
def scope(variant: str) -> Generator[report.Report | None, None, None]:
    if variant == "fused":
        with inductor_gqa.enabled(always=True), report.collected() as found:
            yield found
    elif variant == "sdpa" and torch.cuda.is_available():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            yield None
    else:
        yield None


def errors(found: Tensors, truth: Tensors) -> list[float]:
    pairs = zip(found, truth, strict=True)
    return [float((a.double() - b).norm() / b.norm()) for a, b in pairs]


def measured(case: dict[str, Any], args: argparse.Namespace, device: torch.device) -> Row:
    """One shape, every variant checked and on a GPU timed."""
    B, L = case["B"], case["L"]
    row: Row = {"B": B, "L": L, "variants": {}}
    inputs = drawn(args, B, L, device)
    torch.manual_seed(0)
    base = Block(*args.sizes).to(device, DTYPE)
    wide = Block(*args.sizes).to(device, torch.float64)
    wide.load_state_dict(base.state_dict())
    eager: list[float] = []
    truth: Tensors = []
    if not args.compile_only:
        wide_inputs = [x.detach().double().requires_grad_(x.requires_grad) for x in inputs]
        truth = step_of(wide, wide, wide_inputs)()
        eager = errors(step_of(base, base, inputs)(), truth)
    steps: dict[str, Callable[[], Tensors]] = {}
    with contextlib.ExitStack() as stack:
        for variant in args.variants:
            kind = _own(SdpaBlock if variant == "sdpa" else Block, f"{variant}_{B}_{L}")
            module = kind(*args.sizes).to(device, DTYPE)
            module.load_state_dict(base.state_dict())
            run = module if variant == "eager" else torch.compile(module, dynamic=False)
            step = step_of(run, module, inputs)
            result: Row = {}
            row["variants"][variant] = result
            try:
                with scope(variant) as found:
                    results = step()
                if found is not None:
                    result |= {"sites_fused": found.fused, "sites_left": found.left}
                if args.compile_only:
                    continue
                pairs = zip(errors(results, truth), eager, strict=True)
                worst = max(error / least for error, least in pairs)
                result |= {"ok": worst <= MARGINS[variant], "error_beside_eager": worst}
                del results
                if result["ok"] and device.type == "cuda":
                    result |= memory_of(step, device)
                    steps[variant] = step
            except Exception as failure:  # one broken variant must not hide the others
                reason = f"{type(failure).__name__}: {failure}".replace("\n", " ")[:300]
                result |= {"ok": False, "failure": reason}
        if "sdpa" in steps:
            stack.enter_context(scope("sdpa"))
        if steps:
            for variant, times in replayed_us(steps, args.rounds).items():
                row["variants"][variant]["us"] = statistics.median(times)
    torch.compiler.reset()
    return row


def memory_of(step: Callable[[], Tensors], device: torch.device) -> Row:
    """What a step allocates at most, and the largest allocation in it."""
    torch.cuda.memory._record_memory_history(max_entries=100_000)
    try:
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        peak = torch.cuda.max_memory_allocated(device) - before
        traces = torch.cuda.memory._snapshot().get("device_traces", [])
        sizes = [e["size"] for trace in traces for e in trace if e["action"] == "alloc"]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    return {"peak_bytes": peak, "largest_bytes": max(sizes, default=0)}


def summary(rows: list[Row]) -> Row:
    """Geometric means, and the least speed-up beside each other variant."""
    ok = all(found.get("ok", False) for row in rows for found in row["variants"].values())
    times = {
        name: [row["variants"][name]["us"] for row in rows]
        for name in rows[0]["variants"]
        if all("us" in row["variants"][name] for row in rows)
    }
    out: Row = {"ok": ok, "us": {name: geometric_mean(us) for name, us in times.items()}}
    if "fused" in times:
        out["least_speed_up"] = {
            name: min(a / b for a, b in zip(us, times["fused"], strict=True))
            for name, us in times.items()
        }
    return out


def show(rows: list[Row], totals: Row) -> None:
    names = list(rows[0]["variants"])
    body: list[list[str]] = []
    for row in rows:
        cells = [f"{row['B']} x {row['L']}"]
        for name in names:
            found = row["variants"][name]
            state = "ok" if found.get("ok") else found.get("failure", "WRONG")[:60]
            cells.append(f"{found['us']:.1f}" if "us" in found else state)
        fused, sdpa = (row["variants"].get(name, {}).get("us") for name in ("fused", "sdpa"))
        cells.append(f"{sdpa / fused:.2f}" if fused and sdpa else "-")
        n_bytes = row["variants"].get("fused", {}).get("largest_bytes")
        cells.append(f"{n_bytes / 2**20:.1f}" if n_bytes else "-")
        body.append(cells)
    print(table(["B x L", *(f"{x} us" for x in names), "sdpa / fused", "largest MiB"], body))
    print(f"block: {totals}")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def names(text: str) -> list[str]:
        return text.split(",")

    parser.add_argument("--variants", type=names, default=["plain", "fused", "sdpa"])
    parser.add_argument("--cases", default="::1", help="a slice of the cases, as in 0::4")
    parser.add_argument("--rounds", type=int, default=25, help="timed replays (default: 25)")
    parser.add_argument("--jobs", type=int, default=0, help="processes that compile beforehand")
    parser.add_argument("--tiny", action="store_true", help="two small shapes, for a test on a CPU")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the JSON record here")
    parser.add_argument("--compile-only", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    unknown = [name for name in args.variants if name not in VARIANTS]
    if unknown:
        parser.error(f"unknown {', '.join(unknown)}, there are {', '.join(VARIANTS)}")
    args.sizes = (64, 4, 2, 16) if args.tiny else (5120, 32, 8, 128)
    return args


def cases_of(args: argparse.Namespace) -> list[dict[str, Any]]:
    cases = [{"B": 1, "L": 19}, {"B": 2, "L": 16}] if args.tiny else seed_programs.CASES["003"]
    return cases[slice(*(int(x) if x else None for x in args.cases.split(":")))]


def main(argv: list[str] | None = None) -> int:
    """Returns 1 where a shape is wrong."""
    args = parse(argv)
    device = default_device()
    compiled: list[Row] = []
    with contextlib.ExitStack() as stack:
        if not args.compile_only:
            folder = stack.enter_context(
                tempfile.TemporaryDirectory(prefix="inductor-cache-", ignore_cleanup_errors=True)
            )
            os.environ |= {name: os.path.join(folder, name.lower()) for name in CACHES}
            if args.jobs:
                options = ["--variants", ",".join(args.variants), *["--tiny"] * args.tiny]
                compiled = compiled_beforehand(options, args.jobs, Path(folder))
        settings = {name: getattr(args, name) for name in ("variants", "rounds", "tiny")}
        result = record("block", settings, device)
        rows: list[Row] = []
        for case in cases_of(args):
            with progress(f"{case['B']} x {case['L']}"):
                rows.append(measured(case, args, device))
        count_sites(rows, compiled, ("B", "L"))
        result["rows"] = rows
        if args.compile_only:
            write(result, args.out)
            return 0
        result["totals"] = summary(rows)
        show(rows, result["totals"])
        write(result, args.out)
    return 0 if result["totals"]["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())

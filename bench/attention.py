"""RoPE and attention on one GPU, forward and backward: ours beside RoPE compiled by Inductor with
cuDNN SDPA, flash SDPA and FlexAttention.

Random data, B * S tokens the same for every S, tables of [1, S, D]. Ours is the op that a fused
attention becomes; the peers get the rotated q and k of one compiled function and enable_gqa. Each
variant is first compared with fp64 on two key heads and all results, at the very shape that is
timed; what is off by more than twice same-dtype eager is reported and not timed. Times are medians
of CUDA graph replays with L2 emptied, variants taking turns: of a forward that saves what its
backward needs, and of both. A forward counts 4 B H S S D operations, half of it when causal, the
backward 2.5 times that; the rotation counts none. --without-rope measures attention alone, of the
same data unrotated.

The peers compile for seconds at every shape; --seconds starts no shape once the time is used up and
says what is left.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch._dynamo.config
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from attention_problem import Problem, Results, turned
from inductor_gqa import ops
from measure import DTYPES, choose_device, record, replayed_us, write

Row = dict[str, Any]
BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "math": SDPBackend.MATH,
}
VARIANTS = ("ours", *BACKENDS, "flex")


class Variant(NamedTuple):
    """`forward` gives out (and lse), `step` the gradients as well."""

    forward: Callable[[], Results]
    step: Callable[[], Results]


def ours(problem: Problem) -> Variant:
    named: dict[str, Any] = dict.fromkeys(ops.NAMES)
    named |= {"q": problem.q, "k": problem.k, "v": problem.v}
    if problem.has_rope:
        cos, sin = problem.tables
        named |= {"cos_q": cos, "sin_q": sin, "cos_k": cos, "sin_k": sin}
    named |= {"scale": problem.scale, "softcap": 0.0, "fill": -math.inf, "fill_adds": False}
    named |= {"rope_start": 0, "rope_interleaved": False, "keep_scale": 1.0, "precision": "ieee"}
    named |= {"band_hi": 0 if problem.is_causal else None}
    arguments = [named[name] for name in ops.NAMES]

    def forward() -> Results:
        out, lse = ops.attention(*arguments)
        return {"out": out, "lse": lse}

    def step() -> Results:
        made = forward()
        grads = ops.attention_backward(
            problem.grad_out, *made.values(), True, True, True, *arguments
        )
        return made | dict(zip(("dq", "dk", "dv"), grads, strict=True))

    return Variant(forward, step)


def both_turned(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return turned(q, cos, sin), turned(k, cos, sin)


turn_both = torch.compile(both_turned, dynamic=False)


def peer(attend: Callable[..., torch.Tensor], problem: Problem) -> Variant:
    """`attend` takes rotated q, k and v as [B, H, S, D]."""
    leaves = problem.leaves()
    cos, sin = (x[:, :, None] for x in problem.tables)
    grad_out = problem.grad_out.flatten(2, 3)

    def attended() -> torch.Tensor:
        q, k, v = leaves
        if problem.has_rope:
            q, k = turn_both(q, k, cos, sin)
        return attend(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)

    def forward() -> Results:
        return {"out": attended().detach()}

    def step() -> Results:
        out = attended()
        grads = torch.autograd.grad(out, leaves, grad_out)
        return {"out": out.detach(), **dict(zip(("dq", "dk", "dv"), grads, strict=True))}

    return Variant(forward, step)


def sdpa(backend: SDPBackend, problem: Problem) -> Variant:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=problem.is_causal, enable_gqa=True
            )

    return peer(attend, problem)


def flex(problem: Problem) -> Variant:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)
    mask = None
    if problem.is_causal:
        S, device = problem.S, str(problem.device)
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, S, S, device=device)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return compiled(q, k, v, block_mask=mask, enable_gqa=True)

    return peer(attend, problem)


def prepared(name: str, problem: Problem) -> Variant:
    if name == "ours":
        return ours(problem)
    return flex(problem) if name == "flex" else sdpa(BACKENDS[name], problem)


def measured(problem: Problem, args: argparse.Namespace) -> list[Row]:
    """One row a variant: checked, then timed where there is a GPU."""
    rows: dict[str, Row] = {}
    calls: dict[str, Callable[[], Results]] = {}
    for name in args.variants:
        shape = {"D": problem.D, "S": problem.S, "B": problem.B, "causal": problem.is_causal}
        rows[name] = {"variant": name, **shape, "status": "ok"}
        try:
            variant = prepared(name, problem)
            wrong = problem.wrong(variant.step())
        except Exception as failure:  # one variant that cannot run must not hide the others
            wrong = [f"{type(failure).__name__}: {str(failure).strip()[-300:]}"]
        else:
            if not wrong:
                calls |= {f"{name} forward": variant.forward, f"{name} step": variant.step}
        if wrong:
            rows[name]["status"] = "; ".join(wrong)
            print(f"NOT TIMED {problem.name} {name}: {rows[name]['status']}", flush=True)
    if problem.device.type != "cuda":
        return list(rows.values())
    times = {name: statistics.median(x) for name, x in replayed_us(calls, args.rounds).items()}
    for name, row in rows.items():
        if row["status"] != "ok":
            continue
        forward, step = times[f"{name} forward"], times[f"{name} step"]
        row |= {"forward_us": forward, "step_us": step, "backward_us": step - forward}
        row |= {"forward_tflops": 1e-6 * problem.operations(False) / forward}
        row |= {"step_tflops": 1e-6 * problem.operations(True) / step}
        if "cudnn step" in times:
            row["forward_vs_cudnn"] = times["cudnn forward"] / forward
            row["step_vs_cudnn"] = times["cudnn step"] / step
    return list(rows.values())


def line(row: Row) -> str:
    if "step_us" not in row:
        return f"{row['variant']:6} checked" if row["status"] == "ok" else ""
    cells = [f"{row['variant']:6}"]
    for part in ("forward", "step"):
        ratio = f" ({row[f'{part}_vs_cudnn']:.2f})" if f"{part}_vs_cudnn" in row else ""
        cells.append(f"{part} {row[f'{part}_us']:8.1f} us {row[f'{part}_tflops']:4.0f}{ratio}")
    return "  ".join(cells)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return [int(x) for x in text.split(",")]

    def among(accepted: tuple[str, ...]) -> Callable[[str], list[str]]:
        def names(text: str) -> list[str]:
            for name in text.split(","):
                if name not in accepted:
                    raise argparse.ArgumentTypeError(f"{name}, accepted {', '.join(accepted)}")
            return text.split(",")

        return names

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dims", type=numbers, help="head dims, default: 128,64, tiny: 32")
    parser.add_argument(
        "--sizes", type=numbers, help="S, default: 512,1024,2048,4096,8192,16384, tiny: 63,64"
    )
    parser.add_argument("--masks", type=among(("causal", "none")), default=["causal", "none"])
    parser.add_argument(
        "--variants",
        type=among(VARIANTS),
        help=f"of {','.join(VARIANTS)}; default: ours,cudnn,flash,flex, on a CPU ours,math",
    )
    parser.add_argument("--without-rope", action="store_true", help="q and k as they are")
    parser.add_argument("--tokens", type=int, help="B * S, default: 16384, tiny: 128")
    parser.add_argument("--rounds", type=int, default=12, help="timings of each (default: 12)")
    parser.add_argument("--seconds", type=float, default=280.0, help="start no shape after these")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: the GPU, if any")
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="default: bf16 on a GPU, else fp32")
    parser.add_argument("--tiny", action="store_true", help="sizes for a test on a CPU")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the JSON record here")
    args = parser.parse_args(argv)
    args.dims = args.dims or ([32] if args.tiny else [128, 64])
    args.sizes = args.sizes or ([63, 64] if args.tiny else [512, 1024, 2048, 4096, 8192, 16384])
    args.tokens = args.tokens or (128 if args.tiny else 16384)
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    device, dtype = choose_device(args)
    is_gpu = device.type == "cuda"
    args.variants = args.variants or (
        ["ours", "cudnn", "flash", "flex"] if is_gpu else ["ours", "math"]
    )
    heads = (4, 2) if args.tiny else (32, 8)
    torch.manual_seed(args.seed)
    started = time.monotonic()
    settings = vars(args) | {"out": None, "heads": heads, "dtype": str(dtype)}
    name = "attention-core" if args.without_rope else "attention"
    result = record(name, settings | {"device": device.type}, device)
    if is_gpu:
        result["environment"]["cudnn"] = torch.backends.cudnn.version()
    rows: list[Row] = []
    result["rows"] = rows
    left: list[str] = []
    print("microseconds, TFLOP/s (ratio to cuDNN)" if is_gpu else "checked, not timed: no GPU")
    for D, mask, S in itertools.product(args.dims, args.masks, args.sizes):
        if time.monotonic() - started > args.seconds:
            left.append(f"D{D}-S{S}-{mask}")
            continue
        B = max(1, args.tokens // S)
        has_rope = not args.without_rope
        problem = Problem(B, S, D, mask == "causal", heads, device, dtype, has_rope)
        # A graph a shape: past the default limit compiled functions silently run eager.
        with torch._dynamo.config.patch(recompile_limit=256):
            found = measured(problem, args)
        rows += found
        for row in found:
            if row["status"] == "ok":
                print(f"{problem.name:18} {line(row)}", flush=True)
        write(result, args.out)
    if left:
        print("not started, time used up: " + ", ".join(left))
    # A peer that cannot run a shape is a result.
    is_right = all(row["status"] == "ok" for row in rows if row["variant"] == "ours")
    return 0 if rows and is_right else 1


if __name__ == "__main__":
    sys.exit(main())

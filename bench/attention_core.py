"""Attention alone on one GPU, forward and backward: ours beside cuDNN, flash and FlexAttention.

bf16, 32 query and 8 key heads, random data, B * S tokens the same for every S. Every timed call is
first compared, at the very shape that is timed, with fp64 on two sampled groups of heads; what is
off by more than 1.5 times flash SDPA's own error is reported and not timed. A forward counts
4 B H S S D operations, half of it when causal, a backward 2.5 times that.

  --regime sustained   variants take turns on a chip that is loaded all the time
  --regime rested      each variant runs alone after a pause: below the power limit

Numbers of the two regimes are not comparable. FlexAttention compiles for seconds at every shape;
--seconds stops before the next shape once the time is used up and says what is left.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from inductor_gqa.cli.measure import median_ms, times_ms
from inductor_gqa.kernels.backward import attention_backward
from inductor_gqa.kernels.forward import attention_forward
from inductor_gqa.kernels.gluon_backward import attention_backward_sm90
from inductor_gqa.kernels.gluon_forward import Switches, attention_forward_sm90
from measure import record, write

K, R = 8, 4
ROWS = 2048  # of fp64 scores at a time
Results = dict[str, torch.Tensor]
Step = Callable[[], Results]


@dataclasses.dataclass
class Problem:
    """One shape. Heads are [K, R] for ours; the same storage serves the peers as [H]."""

    B: int
    S: int
    D: int
    is_causal: bool

    def __post_init__(self) -> None:
        def normal(*heads: int) -> torch.Tensor:
            shape = (self.B, self.S, *heads, self.D)
            return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

        self.q, self.k, self.v, self.grad_out = normal(K, R), normal(K), normal(K), normal(K, R)
        self.numbers: dict[str, Any] = {"scale": self.D**-0.5}
        if self.is_causal:
            self.numbers["band_hi"] = 0
        self.cache: dict[str, Any] = {}

    @property
    def name(self) -> str:
        return f"D{self.D} S{self.S} {'causal' if self.is_causal else 'none'}"

    def operations(self, direction: str) -> float:
        forward = 4.0 * self.B * K * R * self.S**2 * self.D * (0.5 if self.is_causal else 1.0)
        return forward * (2.5 if direction == "backward" else 1.0)

    def leaves(self) -> list[torch.Tensor]:
        """q, k, v as [B, S, H, D], for autograd."""
        inputs = (self.q.flatten(2, 3), self.k, self.v)
        return [x.detach().requires_grad_() for x in inputs]


def truth(problem: Problem, b: int, k: int) -> Results:
    """All results of one group in fp64: out, dq [R, S, D], dk, dv [S, D], lse [R, S] in base 2."""
    q, grad_out = (x[b, :, k].double().transpose(0, 1) for x in (problem.q, problem.grad_out))
    keys, values = problem.k[b, :, k].double(), problem.v[b, :, k].double()
    out, dq, lse = torch.empty_like(q), torch.empty_like(q), q.new_empty(R, problem.S)
    dk, dv = torch.zeros_like(keys), torch.zeros_like(values)
    scale = problem.numbers["scale"]
    for r, lo in itertools.product(range(R), range(0, problem.S, ROWS)):
        part = slice(lo, min(lo + ROWS, problem.S))
        s = q[r, part] @ keys.T * scale
        if problem.is_causal:
            row = torch.arange(part.start, part.stop, device=s.device)[:, None]
            s.masked_fill_(torch.arange(problem.S, device=s.device)[None] > row, -math.inf)
        lse[r, part] = torch.logsumexp(s, -1) / math.log(2)
        p = torch.softmax(s, -1)
        out[r, part] = p @ values
        dp = grad_out[r, part] @ values.T
        ds = p * (dp - (grad_out[r, part] * out[r, part]).sum(-1, keepdim=True)) * scale
        dq[r, part] = ds @ keys
        dk += ds.T @ q[r, part]
        dv += p.T @ grad_out[r, part]
    return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


def sampled(results: Results, problem: Problem, b: int, k: int) -> Results:
    """The same group of a kernel's results; heads may be [K, R] or [H]."""
    part = {}
    for name, x in results.items():
        if name in ("out", "dq"):
            x = x.reshape(problem.B, problem.S, K, R, problem.D)
            part[name] = x[b, :, k].transpose(0, 1)
        elif name == "lse":
            part[name] = x.reshape(problem.B, K, R, problem.S)[b, k]
        else:
            part[name] = x[b, :, k]
    return part


def errors(results: Results, problem: Problem) -> dict[str, float]:
    """Largest relative error (norms) over the sampled groups; for lse the largest difference."""
    if "truth" not in problem.cache:
        groups = {(0, 0), (problem.B - 1, K - 1)}
        problem.cache["truth"] = {at: truth(problem, *at) for at in sorted(groups)}
    worst = dict.fromkeys(results, 0.0)
    for at, known in problem.cache["truth"].items():
        for name, x in sampled(results, problem, *at).items():
            difference = x.double() - known[name]
            size = difference.abs().max() if name == "lse" else difference.norm()
            error = float(size / (1.0 if name == "lse" else known[name].norm()))
            worst[name] = max(worst[name], error) if error == error else math.nan
    return worst


def wrong_results(results: Results, problem: Problem) -> list[str]:
    """What is too far off. The peer reads contiguous copies: torch 2.11's SDPA returns wrong values
    for rows that lie D + 1 elements apart."""
    if "peer" not in problem.cache:
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in problem.leaves())
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = sdpa(leaves, problem, SDPBackend.FLASH_ATTENTION)
        grads = torch.autograd.grad(out, leaves, problem.grad_out.flatten(2, 3))
        peer = {"out": out.detach(), **dict(zip(("dq", "dk", "dv"), grads, strict=True))}
        problem.cache["peer"] = errors(peer, problem)
    limits = {name: 1.5 * x for name, x in problem.cache["peer"].items()} | {"lse": 1e-2}
    return [
        f"{name}: error is {error:.2e}, allowed {limits[name]:.2e}"
        for name, error in errors(results, problem).items()
        if not error <= limits[name]
    ]


def sdpa(leaves: list[torch.Tensor], problem: Problem, backend: SDPBackend) -> torch.Tensor:
    with sdpa_kernel(backend):
        q, k, v = (x.transpose(1, 2) for x in leaves)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=problem.is_causal, enable_gqa=True)
    return out.transpose(1, 2)


def flex(leaves: list[torch.Tensor], problem: Problem) -> torch.Tensor:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = None
    if problem.is_causal:
        if "mask" not in problem.cache:
            problem.cache["mask"] = create_block_mask(
                lambda b, h, i, j: i >= j, None, None, problem.S, problem.S
            )
        mask = problem.cache["mask"]
    if "flex" not in SHARED:
        # One graph a shape: past the default limit flex_attention silently runs eager.
        torch._dynamo.config.recompile_limit = 256
        SHARED["flex"] = torch.compile(flex_attention, dynamic=False)
    q, k, v = (x.transpose(1, 2) for x in leaves)
    return SHARED["flex"](q, k, v, block_mask=mask, enable_gqa=True).transpose(1, 2)


SHARED: dict[str, Any] = {}


def ours(forward: Callable[..., Any], has_tables: bool = False, **options: Any) -> Any:
    """A forward of ours. Tables turn by no angle: the cost of a rotation, the result without."""

    def prepare(problem: Problem) -> Step:
        numbers = problem.numbers | options
        if has_tables:
            cos = torch.ones(1, problem.S, problem.D, device="cuda").expand(problem.B, -1, -1)
            sin = torch.zeros_like(cos[:1]).expand(problem.B, -1, -1)
            numbers |= {"cos_q": cos, "sin_q": sin, "cos_k": cos, "sin_k": sin}

        def step() -> Results:
            out, lse = forward(problem.q, problem.k, problem.v, **numbers)
            return {"out": out, "lse": lse}

        return step

    return prepare


def peer_forward(attend: Callable[..., torch.Tensor], *options: Any) -> Any:
    def prepare(problem: Problem) -> Step:
        inputs = [x.detach() for x in problem.leaves()]
        return lambda: {"out": attend(inputs, problem, *options)}

    return prepare


def peer_backward(attend: Callable[..., torch.Tensor], *options: Any) -> Any:
    def prepare(problem: Problem) -> Step:
        leaves = problem.leaves()
        out = attend(leaves, problem, *options)
        grad_out = problem.grad_out.flatten(2, 3)

        def step() -> Results:
            grads = torch.autograd.grad(out, leaves, grad_out, retain_graph=True)
            return dict(zip(("dq", "dk", "dv"), grads, strict=True))

        return step

    return prepare


def our_backward(backward: Callable[..., Any]) -> Any:
    def prepare(problem: Problem) -> Step:
        inputs = (problem.q, problem.k, problem.v)
        out, lse = attention_forward(*inputs, **problem.numbers)

        def step() -> Results:
            grads = backward(problem.grad_out, *inputs, out, lse, **problem.numbers)
            return dict(zip(("dq", "dk", "dv"), grads, strict=True))

        return step

    return prepare


def gluon(is_persistent: bool, has_pingpong: bool) -> Any:
    return ours(attention_forward_sm90, switches=Switches(has_pingpong, is_persistent))


VARIANTS: dict[str, dict[str, Any]] = {
    "forward": {
        "triton": ours(attention_forward),
        "gluon": gluon(False, False),
        "gluon+pingpong": gluon(False, True),
        "gluon+persistent": gluon(True, False),
        "gluon+both": gluon(True, True),
        "cudnn": peer_forward(sdpa, SDPBackend.CUDNN_ATTENTION),
        "flash": peer_forward(sdpa, SDPBackend.FLASH_ATTENTION),
        "flex": peer_forward(flex),
        # Rotation of q and k included, in the launch or q in the kernel.
        "rope-triton": ours(attention_forward, True),
        "rope-gluon-launch": ours(attention_forward_sm90, True, switches=Switches(rotates_q=False)),
        "rope-gluon-inside": ours(attention_forward_sm90, True),
    },
    "backward": {
        "triton": our_backward(attention_backward),
        "gluon": our_backward(attention_backward_sm90),
        "cudnn": peer_backward(sdpa, SDPBackend.CUDNN_ATTENTION),
        "flash": peer_backward(sdpa, SDPBackend.FLASH_ATTENTION),
        "flex": peer_backward(flex),
    },
}


def sustained(steps: dict[str, Step], count: int) -> dict[str, float]:
    """Median milliseconds, the variants taking turns: drift of clock and power hits all alike."""
    device = torch.device("cuda")
    for step in steps.values():
        times_ms(step, device, 2)
    spans: dict[str, list[float]] = {name: [] for name in steps}
    pairs = []
    for _ in range(count):
        for name, step in steps.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            step()
            end.record()
            pairs.append((name, begin, end))
    torch.cuda.synchronize()
    for name, begin, end in pairs:
        spans[name].append(begin.elapsed_time(end))
    return {name: sorted(x)[len(x) // 2] for name, x in spans.items()}


def rested(steps: dict[str, Step], count: int, pause: float) -> dict[str, float]:
    """Median milliseconds, each variant alone on a chip that has rested."""
    device = torch.device("cuda")
    found = {}
    for name, step in steps.items():
        times_ms(step, device, 2)
        time.sleep(pause)
        found[name] = median_ms(step, device, count)
    return found


def measured(problem: Problem, direction: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row a variant: checked, then timed."""
    steps: dict[str, Step] = {}
    rows: dict[str, dict[str, Any]] = {}
    for name, prepare in VARIANTS[direction].items():
        if not name.startswith(tuple(args.variants)):
            continue
        shape = {"D": problem.D, "S": problem.S, "B": problem.B, "causal": problem.is_causal}
        rows[name] = {"direction": direction, "variant": name, **shape, "status": "ok"}
        try:
            step = prepare(problem)
            wrong = wrong_results(step(), problem)
            if not wrong:
                steps[name] = step
        except Exception as problem_met:  # one broken variant must not hide the others
            wrong = [f"{type(problem_met).__name__}: {str(problem_met).strip()[-300:]}"]
        if wrong:
            rows[name]["status"] = "; ".join(wrong)
            print(f"NOT TIMED {direction} {problem.name} {name}: {rows[name]['status']}")
    if args.regime == "rested":
        times = rested(steps, args.count, args.pause)
    else:
        times = sustained(steps, args.count)
    base = times.get("cudnn")
    for name, ms in times.items():
        rows[name] |= {
            "ms": ms,
            "tflops": problem.operations(direction) / ms * 1e-9,
            "vs_cudnn": base / ms if base else None,
        }
    return list(rows.values())


def line(problem: Problem, direction: str, rows: list[dict[str, Any]]) -> str:
    cells = []
    for row in rows:
        if "ms" in row:
            ratio = f" ({row['vs_cudnn']:.2f})" if row["vs_cudnn"] else ""
            cells.append(f"{row['variant']} {row['tflops']:.0f}{ratio}")
    return f"{direction:8} {problem.name:16} " + "  ".join(cells)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    def names(text: str) -> list[str]:
        return text.split(",")

    def numbers(text: str) -> list[int]:
        return [int(x) for x in text.split(",")]

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dims", type=numbers, default=[128, 64], help="default: 128,64")
    parser.add_argument("--sizes", type=numbers, default=[512, 1024, 2048, 4096, 16384], help="S")
    parser.add_argument("--masks", type=names, default=["none", "causal"], help="default: both")
    parser.add_argument(
        "--directions", type=names, default=["forward", "backward"], help="default: both"
    )
    parser.add_argument(
        "--variants",
        type=names,
        default=["triton", "gluon", "cudnn"],
        help=f"beginnings of names; forward: {', '.join(VARIANTS['forward'])}; "
        f"backward: {', '.join(VARIANTS['backward'])} (default: triton,gluon,cudnn)",
    )
    parser.add_argument("--tokens", type=int, default=16384, help="B * S (default: %(default)s)")
    parser.add_argument("--count", type=int, default=12, help="timings of each (default: 12)")
    parser.add_argument("--regime", choices=("sustained", "rested"), default="sustained")
    parser.add_argument("--pause", type=float, default=0.4, help="seconds of rest before a variant")
    parser.add_argument("--seconds", type=float, default=120.0, help="start no shape after these")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the JSON record here")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if not torch.cuda.is_available():
        print("attention_core: no CUDA device", file=sys.stderr)
        return 2
    torch.manual_seed(args.seed)
    started = time.monotonic()
    settings = vars(args) | {"out": None, "heads": [K * R, K], "dtype": "bf16"}
    result = record("attention_core", settings, torch.device("cuda"))
    result["environment"]["cudnn"] = torch.backends.cudnn.version()
    result["rows"] = rows = []
    left = []
    print(f"TFLOP/s (ratio to cuDNN), {args.regime}, {result['environment']['gpu']}", flush=True)
    for D, mask, S in itertools.product(args.dims, args.masks, args.sizes):
        if time.monotonic() - started > args.seconds:
            left.append(f"D{D} S{S} {mask}")
            continue
        problem = Problem(max(1, args.tokens // S), S, D, mask == "causal")
        for direction in args.directions:
            found = measured(problem, direction, args)
            rows += found
            print(line(problem, direction, found), flush=True)
        write(result, args.out)
    if left:
        print("not started, time used up: " + ", ".join(left))
    return 0 if rows and all(row["status"] == "ok" for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())

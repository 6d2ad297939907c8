"""Linear layers that share their input: one launch of ours beside separate matmuls, for their
gradients in bf16 or fp16, or with --forward for their results in fp32.

matmuls   dX as a chain of addmm, then every dW; or every result; by cuBLAS
chosen    one launch with the tile that is taken by default, and in `joins` whether the pass would
          write it at this size
wide, narrow, slim   one launch with a given tile (of the gradients)

Each variant is compared with fp64 first, at the very size that is timed: what is off by more than
the separate matmuls (a fiftieth more in the norm, at most) is reported and not timed. Times are
medians of CUDA graph replays with L2 emptied, variants taking turns.

A problem is NAME-C-N1-N2...: layers of N1, N2, ... outputs and C inputs. Without a GPU, --tiny
checks the op and times nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import torch

from inductor_gqa import decide, ops
from inductor_gqa.kernels import linear_backward as joined
from measure import record, replayed_us, write

PROBLEMS = (
    "qkv-5120-4096-1024-1024",
    "o-4096-5120",
    "qkv-4096-4096-1024-1024",
    "o-4096-4096",
    "qkv-2048-2048-512-512",
    "o-2048-2048",
    "qkv-1024-1024-256-256",
    "o-1024-1024",
    "qkv-768-768-768-768",
    "o-768-768",
)
FORWARD_PROBLEMS = (
    "qkv-1024-1024-256-256",
    "o-1024-1024",
    "kv-1024-512-512",
    "qkv-2048-2048-512-512",
    "o-2048-2048",
    "qkv-4096-4096-1024-1024",
    "qkv-768-768-768-768",
)
TOKENS = (64, 128, 131, 256, 293, 512, 691, 898, 1024, 2048, 4096, 8192, 16384)
TINY_PROBLEMS, TINY_TOKENS = ("qkv-64-64-16-16", "o-32-64"), (7, 40)
TILES = {"wide": joined.WIDE, "narrow": joined.NARROW, "slim": joined.SLIM}
MARGIN = 1.02
Tensors = list[torch.Tensor]
Row = dict[str, Any]


def matmuls(grads: Sequence[torch.Tensor], weights: Tensors, x: torch.Tensor) -> Tensors:
    dx = grads[0] @ weights[0]
    for g, w in zip(grads[1:], weights[1:], strict=True):
        dx = torch.addmm(dx, g, w)
    return [dx, *(g.mT @ x for g in grads)]


def in_fp64(grads: Sequence[torch.Tensor], weights: Tensors, x: torch.Tensor) -> Tensors:
    return matmuls([g.double() for g in grads], [w.double() for w in weights], x.double())


def errors(found: Tensors, truth: Tensors) -> list[float]:
    """Norm of the error of each result, in that of the result."""
    pairs = zip(found, truth, strict=True)
    return [float((a.double() - b).norm() / b.norm()) for a, b in pairs]


def drawn(
    columns: int, widths: Sequence[int], tokens: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensors, Tensors, torch.Tensor]:
    """Gradients side by side in one tensor [T, sum of N_i], weights [N_i, C], input [T, C]."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device).to(dtype)

    grads = list(normal(tokens, sum(widths)).split(list(widths), 1))
    return grads, [normal(n, columns) / columns**0.5 for n in widths], normal(tokens, columns)


def would_join(weights: Tensors, x: torch.Tensor, precision: str = "") -> bool:
    """What the pass would decide, asked with nodes that carry these tensors."""
    if precision:
        weights = [weight.mT for weight in weights]
    graph = torch.fx.Graph()
    nodes: list[torch.fx.Node] = []
    for n, tensor in enumerate((*weights, x)):
        node = graph.placeholder(f"x{n}")
        node.meta["val"] = tensor
        nodes.append(node)
    if precision:
        return decide.joins_forward(nodes[:-1], nodes[-1], precision)
    return decide.joins(nodes[:-1], nodes[-1])


def measured(problem: str, tokens: int, args: argparse.Namespace, device: torch.device) -> Row:
    """One problem at one number of tokens, checked and on a GPU timed."""
    columns, *widths = (int(n) for n in problem.split("-")[1:])
    dtype = getattr(torch, args.dtype)
    grads, weights, x = drawn(columns, widths, tokens, dtype, device)
    truth = in_fp64(grads, weights, x)
    allowed = [MARGIN * e for e in errors(matmuls(grads, weights, x), truth)]
    calls: dict[str, Callable[[], Tensors]] = {"matmuls": lambda: matmuls(grads, weights, x)}
    if device.type == "cuda":
        calls["chosen"] = lambda: joined.linear_backward(grads, weights, x)
        for name in args.tiles:
            tile = TILES[name]
            calls[name] = lambda tile=tile: joined.linear_backward(grads, weights, x, tile)
    else:
        calls["chosen"] = lambda: ops.linear_backward(grads, weights, x)
    row: Row = {"problem": problem, "tokens": tokens, "joins": would_join(weights, x), "us": {}}
    return judged(row, calls, truth, allowed, args, device)


@contextlib.contextmanager
def matmul_precision(precision: str) -> Generator[None, None, None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def measured_forward(
    problem: str, tokens: int, args: argparse.Namespace, device: torch.device
) -> Row:
    """As `measured`, of the results of the layers in fp32."""
    columns, *widths = (int(n) for n in problem.split("-")[1:])
    _, weights, x = drawn(columns, widths, tokens, torch.float32, device)
    truth = [x.double() @ weight.double().mT for weight in weights]

    def separate() -> Tensors:
        with matmul_precision(args.forward):
            return [x @ weight.mT for weight in weights]

    calls = {"matmuls": separate, "chosen": lambda: ops.linear_forward(x, weights, args.forward)}
    allowed = [MARGIN * e for e in errors(separate(), truth)]
    row: Row = {"problem": problem, "tokens": tokens, "us": {}}
    row["joins"] = would_join(weights, x, args.forward)
    return judged(row, calls, truth, allowed, args, device)


def judged(
    row: Row,
    calls: dict[str, Callable[[], Tensors]],
    truth: Tensors,
    allowed: list[float],
    args: argparse.Namespace,
    device: torch.device,
) -> Row:
    """The row with what is wrong in it, and the times of what is right."""
    found = {name: errors(call(), truth) for name, call in calls.items()}
    del truth
    wrong = {
        name: of
        for name, of in found.items()
        if not all(error <= most for error, most in zip(of, allowed, strict=True))
    }
    row["wrong"] = wrong
    right = {name: call for name, call in calls.items() if name not in wrong}
    if device.type == "cuda":
        times = replayed_us(right, args.rounds)
        row["us"] = {name: round(statistics.median(x), 2) for name, x in times.items()}
    return row


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def names(text: str) -> list[str]:
        return text.split(",")

    def numbers(text: str) -> list[int]:
        return [int(n) for n in text.split(",")]

    parser.add_argument("--problems", type=names, help=f"default: {','.join(PROBLEMS)}")
    parser.add_argument("--tokens", type=numbers, help=f"default: {','.join(map(str, TOKENS))}")
    parser.add_argument(
        "--forward", choices=("ieee", "tf32"), help="results in fp32, at this precision"
    )
    parser.add_argument("--tiles", type=names, default=[], help=f"of {','.join(TILES)}, or none")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=11, help="timings of each (default: 11)")
    parser.add_argument("--tiny", action="store_true", help="sizes for a test on a CPU")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the JSON record here")
    args = parser.parse_args(argv)
    problems = FORWARD_PROBLEMS if args.forward else PROBLEMS
    args.problems = args.problems or list(TINY_PROBLEMS if args.tiny else problems)
    args.tokens = args.tokens or list(TINY_TOKENS if args.tiny else TOKENS)
    for tile in args.tiles:
        if tile not in TILES:
            parser.error(f"unknown tile {tile}, there are {', '.join(TILES)}")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not args.tiny:
        print("layers: no CUDA device; --tiny checks on the CPU", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    name = "layers_forward" if args.forward else "layers"
    measured_ = measured_forward if args.forward else measured
    result = record(name, vars(args) | {"out": None}, device)
    result["rows"] = rows = []
    for problem in args.problems:
        for tokens in args.tokens:
            row = measured_(problem, tokens, args, device)
            rows.append(row)
            if row["wrong"]:
                print(f"{problem:26} {tokens:6} WRONG {row['wrong']}", flush=True)
            times = "  ".join(f"{name} {us:7.1f}" for name, us in row["us"].items())
            print(f"{problem:26} {tokens:6} {'joined' if row['joins'] else 'left':6} {times}")
        write(result, args.out)
    return 0 if rows and not any(row["wrong"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())

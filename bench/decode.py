"""Attention of few queries over a long cache on one GPU: ours in several configurations beside
flash and cuDNN SDPA with enable_gqa.

Each variant is first compared with fp64 on all heads, at the very shape that is timed; what is off
by more than twice same-dtype eager is reported and not timed. Times are medians of CUDA graph
replays with L2 emptied, variants taking turns. GB/s counts the keys and values that are seen, once;
SDPA is given no others.

A shape is B8-L1-S32768-D128, with -W4096 for a sliding window and -F8192 for a cache that is filled
to there and masked beyond; several queries are causal. A configuration is plain (the forward for
many queries), default or KEYSxWARPSxSTAGES, with /sN for N splits, /xN for N times as many as
chosen and /tma for descriptors. Without a GPU, in Triton's interpreter (TRITON_INTERPRET=1), --tiny
checks and times nothing.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from decode_problem import Problem, Results, sizes_of
from inductor_gqa.kernels import decode_tiles
from inductor_gqa.kernels.configs import Tiles
from inductor_gqa.kernels.decode import Choices, attention_decode, multiprocessors_of
from inductor_gqa.kernels.forward import attention_forward, collect
from measure import record, replayed_us, write

SHAPES = (
    "B8-L1-S32768-D128",
    "B8-L1-S32768-D64",
    "B1-L1-S32768-D128",
    "B32-L1-S4096-D128",
    "B8-L4-S32768-D128",
    "B8-L16-S32768-D128",
    "B8-L1-S32768-D128-W4096",
    "B8-L1-S32768-D128-F8192",
)
TINY = ("B2-L1-S600-D16", "B1-L3-S300-D32-W40", "B2-L1-S300-D16-F70")
# Every configuration compiles for seconds: all of them for the first shape, few for the others.
CONFIGS = ("default", "default/tma")
SWEPT = (
    *CONFIGS,
    "default/x2",
    "default/x4",
    "32x4x4",
    "128x4x3",
    "128x8x3/tma",
    "64x2x3",
    "plain",
)
TINY_CONFIGS = ("default", "default/s3", "32x4x1/tma", "16x4x1/x2", "plain")
Row = dict[str, Any]
PEERS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def choices_of(config: str, problem: Problem) -> Choices:
    """What a configuration's name says, for this shape."""
    named = {"q": problem.q, "k": problem.k, "v": problem.v}
    numbers = {name: x for name, x in problem.keywords.items() if name != "key_mask"}
    _, attention = collect({**named, "key_mask": problem.keywords.get("key_mask")}, numbers)
    tiles = decode_tiles.tiles_of(attention)
    size, *options = config.split("/")
    if size != "default":
        BN, num_warps, num_stages = (int(n) for n in size.split("x"))
        tiles = Tiles(tiles.BM, BN, num_warps, num_stages)
    splits = decode_tiles.splits_of(attention, tiles, multiprocessors_of(problem.device))
    for option in options:
        if option.startswith("s"):
            splits = int(option[1:])
        elif option.startswith("x"):
            splits *= int(option[1:])
    return Choices(tiles, splits, "tma" in options)


def ours(config: str, problem: Problem) -> Callable[[], Results]:
    choices = choices_of(config, problem)
    return lambda: attention_decode(
        problem.q, problem.k, problem.v, choices=choices, **problem.keywords
    )


def plain(problem: Problem) -> Callable[[], Results]:
    """The forward for many queries."""
    return lambda: attention_forward(problem.q, problem.k, problem.v, **problem.keywords)


def sdpa(backend: SDPBackend, problem: Problem) -> Callable[[], Results]:
    """A backend of SDPA, which is given only the keys that are seen."""
    from torch.nn.attention.bias import causal_lower_right

    lo, hi = problem.reach
    q = problem.q.flatten(2, 3).transpose(1, 2)
    k, v = (x[:, lo:hi].transpose(1, 2) for x in (problem.k, problem.v))
    hidden = problem.hidden[:, lo:hi]
    mask: Any = None
    if bool(hidden.any()):
        mask = ~hidden if problem.window else causal_lower_right(problem.L, hi - lo)

    def step() -> Results:
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return (out.transpose(1, 2),)

    return step


def prepared(problem: Problem, configs: Sequence[str]) -> dict[str, Callable[[], Results]]:
    """The variants by name."""
    peers = PEERS if problem.device.type == "cuda" else {"math": SDPBackend.MATH}
    made = {name: plain(problem) if name == "plain" else ours(name, problem) for name in configs}
    return made | {name: sdpa(backend, problem) for name, backend in peers.items()}


def measured(problem: Problem, configs: Sequence[str], args: argparse.Namespace) -> list[Row]:
    """One row a variant: checked, then timed where there is a GPU."""
    rows: dict[str, Row] = {}
    steps: dict[str, Callable[[], Results]] = {}
    for name, step in prepared(problem, configs).items():
        rows[name] = {"shape": problem.name, "variant": name, "status": "ok"}
        if name in configs and name != "plain":
            choices = choices_of(name, problem)
            rows[name] |= {"tiles": choices.tiles, "splits": choices.splits}
        try:
            wrong = problem.wrong(step())
        except Exception as failure:  # one variant that cannot run must not hide the others
            wrong = [f"{type(failure).__name__}: {str(failure).strip()[:300]}"]
        if wrong:
            rows[name]["status"] = "; ".join(wrong)
            print(f"NOT TIMED {problem.name} {name}: {rows[name]['status']}", flush=True)
        else:
            steps[name] = step
    if problem.device.type != "cuda":
        return list(rows.values())
    times = {name: statistics.median(x) for name, x in replayed_us(steps, args.rounds).items()}
    peer = min((times[name] for name in PEERS if name in times), default=None)
    for name, us in times.items():
        speed = 1e-3 * problem.bytes_read / us
        rows[name] |= {"us": us, "gb_per_second": speed, "share": speed / args.bandwidth}
        rows[name] |= {"vs_peer": peer / us if peer else None}
    return list(rows.values())


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    def names(text: str) -> list[str]:
        return text.split(",")

    def shapes(text: str) -> list[str]:
        for name in names(text):
            try:
                sizes_of(name)
            except ValueError as problem:
                raise argparse.ArgumentTypeError(str(problem)) from None
        return names(text)

    def configs(text: str) -> list[str]:
        for name in names(text):
            if not re.fullmatch(r"plain|(default|\d+x\d+x\d+)(/[sx][1-9]\d*|/tma)*", name):
                raise argparse.ArgumentTypeError(f"configuration is {name}, see --help")
        return names(text)

    def heads(text: str) -> tuple[int, int]:
        query_heads, key_heads = (int(n) for n in text.split("/"))
        if key_heads < 1 or query_heads % key_heads:
            raise argparse.ArgumentTypeError(f"heads are {text}, accepted a multiple, as 32/8")
        return query_heads, key_heads

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", type=shapes, help=f"default: {','.join(SHAPES)}")
    parser.add_argument(
        "--configs",
        type=configs,
        help=f"default: {','.join(SWEPT)}; the first two after the first shape",
    )
    parser.add_argument("--heads", type=heads, help="query/key heads, default: 32/8, tiny: 4/2")
    parser.add_argument("--rounds", type=int, default=12, help="timings of each (default: 12)")
    parser.add_argument("--seconds", type=float, default=100.0, help="start no shape after these")
    parser.add_argument(
        "--bandwidth", type=float, default=4300.0, help="GB/s that shares are of (default: H200's)"
    )
    parser.add_argument("--tiny", action="store_true", help="sizes for a test on a CPU")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the JSON record here")
    args = parser.parse_args(argv)
    args.shapes = args.shapes or list(TINY if args.tiny else SHAPES)
    if args.tiny:
        args.configs = args.configs or list(TINY_CONFIGS)
    args.heads = args.heads or ((4, 2) if args.tiny else (32, 8))
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        print("decode: no CUDA device, and TRITON_INTERPRET is not 1", file=sys.stderr)
        return 2
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    started = time.monotonic()
    result = record("decode", vars(args) | {"out": None, "dtype": str(dtype)}, device)
    rows: list[Row] = []
    result["rows"] = rows
    left: list[str] = []
    for name in args.shapes:
        if time.monotonic() - started > args.seconds:
            left.append(name)
            continue
        configs: Sequence[str] = args.configs or (CONFIGS if rows else SWEPT)
        found = measured(Problem(name, args.heads, device, dtype), configs, args)
        rows += found
        for row in found:
            if "us" in row:
                peer = f"  {row['vs_peer']:.2f} x peer" if row["vs_peer"] else ""
                print(
                    f"{name:26} {row['variant']:14} {row['us']:9.1f} us "
                    f"{row['gb_per_second']:6.0f} GB/s  {100 * row['share']:3.0f} %{peer}",
                    flush=True,
                )
            elif row["status"] == "ok":
                print(f"{name:26} {row['variant']:14} checked")
        write(result, args.out)
    if left:
        print("not started, time used up: " + ", ".join(left))
    # A peer that cannot run a shape is a result.
    is_right = all(row["status"] == "ok" for row in rows if row["variant"] not in PEERS)
    return 0 if rows and is_right else 1


if __name__ == "__main__":
    sys.exit(main())

"""The two whole programs of `seed_programs.py`, before and after: 003 (backward of a GQA + RoPE
block, bf16) and 075 (forward that returns its attention weights, fp32).

  eager   the program as it stands
  plain   under torch.compile
  fused   under torch.compile after inductor_gqa.enable()

Each case first passes its tolerance against float64 on fresh inputs (--checks rounds); what does
not is not timed. Times are medians of CUDA graph replays on the GPU, each behind a write that
overwrites L2, variants of a case after one another, all in one process. The score of a program is
1 / (1 + (T - floor) / (T_plain - floor)) on geometric means.

--jobs N compiles in N processes first; they share a compile cache with the one that measures. What
was fused is then counted where it was compiled: a graph from the cache is not read again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import sys
import tempfile
import types
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import inductor_gqa
import seed_programs
from inductor_gqa import report
from inductor_gqa.cli.measure import default_device
from inductor_gqa.cli.terminal import progress, table
from measure import compiled_beforehand, count_sites, graph_time_us, record, write

VARIANTS = ("eager", "plain", "fused")
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


@dataclass(frozen=True)
class Program:
    """A function of tensors, how to draw them for a case, and the precision of its products."""

    function: Callable[..., Any]
    cases: str
    precision: str = "highest"

    def inputs(self, case: Mapping[str, Any], device: torch.device, seed: int) -> tuple[Any, ...]:
        B, L = case["B"], case["L"]
        if self.cases == "003":
            return seed_programs.inputs_003(B, L, case["scaling"], device, seed)
        return seed_programs.inputs_075(B, L, case["is_causal"], device, seed)

    def floor_us(self, case: Mapping[str, Any]) -> float:
        floor = {"003": seed_programs.floor_us_003, "075": seed_programs.floor_us_075}
        return floor[self.cases](case["B"], case["L"])


PROGRAMS = {
    "003": Program(seed_programs.backward_003, "003"),
    "075": Program(seed_programs.forward_075, "075", "high"),
    "075-highest": Program(seed_programs.forward_075, "075"),
}


def variant_of(program: Program, name: str, place: str) -> Callable[..., Any]:
    """The program as a variant runs it. A code object of its own: Dynamo keeps compiled code by
    code object and does not guard our pass."""
    function = program.function
    if name == "eager":
        return function
    code = function.__code__.replace(co_name=f"{function.__name__}_{name}_{place}")
    own = types.FunctionType(code, function.__globals__, argdefs=function.__defaults__)
    return torch.compile(own, fullgraph=True, dynamic=False)


@contextlib.contextmanager
def scope(program: Program, name: str) -> Generator[report.Report | None, None, None]:
    """Precision of products, the pass for `fused`, and what it found."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(program.precision)
    try:
        if name == "fused":
            with inductor_gqa.enabled(always=True), report.collected() as found, torch.no_grad():
                yield found
        else:
            with torch.no_grad():
                yield None
    finally:
        torch.set_float32_matmul_precision(before)


def check(
    program: Program,
    case: Mapping[str, Any],
    run: Callable[..., Any],
    device: torch.device,
    rounds: int,
) -> dict[str, Any]:
    """The smallest share of elements within tolerance, over all outputs and rounds, and how far off
    the worst output is beside eager."""
    share, ratio = 1.0, 0.0
    for seed in range(rounds):
        inputs = program.inputs(case, device, seed)
        true = seed_programs.truth(program.function, inputs)
        ours = run(*inputs)
        near = program.function(*inputs) if seed == 0 else None
        for index, (x, exact) in enumerate(zip(ours, true, strict=True)):
            passing = seed_programs.passing_share(x, exact, case["atol"], case["rtol"])
            share = min(share, passing)
            if near is not None:
                error, base = ((y.double() - exact).norm() for y in (x, near[index]))
                ratio = max(ratio, float(error / base))
        del inputs, true, ours, near
    return {
        "ok": share >= seed_programs.PASSING_SHARE,
        "passing_share": share,
        "error_beside_eager": ratio,
    }


def measure_case(
    name: str,
    case: Mapping[str, Any],
    variants: list[str],
    args: argparse.Namespace,
    device: torch.device,
    flush: torch.Tensor | None,
) -> dict[str, Any]:
    """Correctness and time of every variant of a case."""
    program = PROGRAMS[name]
    row: dict[str, Any] = {"program": name, "B": case["B"], "L": case["L"]}
    row |= {"floor_us": program.floor_us(case), "variants": {}}
    for variant in variants:
        run = variant_of(program, variant, f"{name[:3]}_{case['B']}_{case['L']}")
        try:
            with scope(program, variant) as found:
                rounds = args.checks if variant == "fused" else 1
                result = check(program, case, run, device, rounds)
                if found is not None:
                    result |= {"sites_fused": found.fused, "sites_left": found.left}
                if result["ok"] and flush is not None:
                    inputs = program.inputs(case, device, args.checks)
                    result["peak_bytes"] = _peak_bytes(run, inputs, device)
                    result["us"] = graph_time_us(
                        lambda run=run, inputs=inputs: run(*inputs), flush, args.rounds
                    )
        except Exception as failure:  # one broken variant must not hide the others
            reason = f"{type(failure).__name__}: {failure}".replace("\n", " ")[:300]
            result = {"ok": False, "failure": reason}
        row["variants"][variant] = result
        torch.compiler.reset()
    return row


def _peak_bytes(run: Callable[..., Any], inputs: tuple[Any, ...], device: torch.device) -> int:
    """What a call allocates at most, its results included."""
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run(*inputs)
    return torch.cuda.max_memory_allocated(device) - before


def geometric_mean(values: list[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values)))


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Geometric means of one program's cases, the score, and the worst case beside plain."""
    out: dict[str, Any] = {
        "cases": len(rows),
        "ok": all(v["ok"] for row in rows for v in row["variants"].values()),
        "floor_us": geometric_mean([row["floor_us"] for row in rows]),
    }
    times = {
        name: [row["variants"][name]["us"] for row in rows]
        for name in rows[0]["variants"]
        if all("us" in row["variants"][name] for row in rows)
    }
    out["us"] = {name: geometric_mean(found) for name, found in times.items()}
    if {"plain", "fused"} <= times.keys():
        over, base = (out["us"][name] - out["floor_us"] for name in ("fused", "plain"))
        out["score"] = 1 / (1 + over / base)
        pairs = zip(times["plain"], times["fused"], strict=True)
        out["slowest_beside_plain"] = min(plain / fused for plain, fused in pairs)
    return out


def print_program(name: str, rows: list[dict[str, Any]], totals: Mapping[str, Any]) -> None:
    variants = list(rows[0]["variants"])
    body: list[list[str]] = []
    for row in rows:
        cells = [f"{row['B']} x {row['L']}", f"{row['floor_us']:.1f}"]
        for variant in variants:
            found = row["variants"][variant]
            state = "WRONG" if "failure" not in found else found["failure"][:40]
            cells.append(f"{found['us']:.1f}" if "us" in found else "ok" if found["ok"] else state)
        fused, plain = (row["variants"].get(x, {}).get("us") for x in ("fused", "plain"))
        cells.append(f"{fused / row['floor_us']:.2f}" if fused else "-")
        cells.append(f"{plain / fused:.2f}" if fused and plain else "-")
        body.append(cells)
    head = [name, "floor us", *variants, "fused / floor", "plain / fused"]
    print(table(head, body))
    means = ", ".join(f"{variant} {us:.1f}" for variant, us in totals["us"].items())
    print(f"{name}: geometric means in us: floor {totals['floor_us']:.1f}, {means or 'not timed'}")
    if "score" in totals:
        slowest = totals["slowest_beside_plain"]
        print(
            f"{name}: score {totals['score']:.3f}, least speed-up beside plain {slowest:.2f}, "
            f"all correct: {totals['ok']}"
        )


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def names(text: str) -> list[str]:
        return text.split(",")

    parser.add_argument("--programs", type=names, default=list(PROGRAMS), help="default: all")
    parser.add_argument("--variants", type=names, default=["plain", "fused"])
    parser.add_argument("--cases", default="::1", help="a slice of the cases, as in 0::4")
    parser.add_argument("--checks", type=int, default=10, help="rounds of checks (default: 10)")
    parser.add_argument("--rounds", type=int, default=50, help="timed replays (default: 50)")
    parser.add_argument("--jobs", type=int, default=0, help="processes that compile beforehand")
    parser.add_argument(
        "--tiny", action="store_true", help="two small shapes, few heads, for a CPU"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the JSON record here")
    parser.add_argument("--compile-only", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    for chosen, known in ((args.programs, PROGRAMS), (args.variants, VARIANTS)):
        unknown = [name for name in chosen if name not in known]
        if unknown:
            parser.error(f"unknown {', '.join(unknown)}, there are {', '.join(known)}")
    return args


def cases_of(args: argparse.Namespace, name: str) -> list[dict[str, Any]]:
    """The program's cases; --tiny replaces their sizes."""
    cases = seed_programs.CASES[PROGRAMS[name].cases]
    if args.tiny:
        cases = [{**cases[0], "B": B, "L": L} for B, L in ((1, 19), (2, 16))]
    return cases[slice(*(int(x) if x else None for x in args.cases.split(":")))]


def measure(args: argparse.Namespace, compiled: list[dict[str, Any]]) -> dict[str, Any]:
    device = default_device()
    times = device.type == "cuda" and not args.compile_only
    flush = torch.empty(2**28, dtype=torch.int8, device=device) if times else None
    if args.compile_only:
        args.checks = 1
    settings = {name: getattr(args, name) for name in ("variants", "checks", "rounds", "tiny")}
    result: dict[str, Any] = record("seeds", settings, device)
    result |= {"cases": [], "programs": {}}
    for name in args.programs:
        rows: list[dict[str, Any]] = []
        for case in cases_of(args, name):
            with progress(f"{name} {case['B']} x {case['L']}"):
                rows.append(measure_case(name, case, args.variants, args, device, flush))
        count_sites(rows, compiled, ("program", "B", "L"))
        result["cases"] += rows
        result["programs"][name] = summary(rows)
        if not args.compile_only:
            print_program(name, rows, result["programs"][name])
        write(result, args.out)  # after every program: what is measured stays, whatever comes
    return result


def main(argv: list[str] | None = None) -> int:
    """Returns 1 where a case is wrong."""
    args = parse(argv)
    if args.tiny:
        seed_programs.use_few_heads()
    compiled: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        if not args.compile_only:
            folder = stack.enter_context(
                tempfile.TemporaryDirectory(prefix="inductor-cache-", ignore_cleanup_errors=True)
            )
            os.environ |= {name: os.path.join(folder, name.lower()) for name in CACHES}
            if args.jobs:
                options = ["--variants", ",".join(args.variants)]
                options += ["--programs", ",".join(args.programs), *["--tiny"] * args.tiny]
                compiled = compiled_beforehand(options, args.jobs, Path(folder))
        result = measure(args, compiled)
    if not args.compile_only:
        print(json.dumps(result["programs"]))
    return 0 if all(found["ok"] for found in result["programs"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())

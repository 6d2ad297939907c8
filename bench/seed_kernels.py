"""Checks and times the attention kernels of the two programs of `seed_programs.py` alone, on one
GPU.

For each program a few configurations take turns on five shapes; the best by geometric mean then
runs all sixteen. Every timed launch is first compared with fp64: the largest error may be twice
that of eager in the same dtype. Times are medians of CUDA graph replays, each behind a write that
flushes L2.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import seed_programs
from inductor_gqa.kernels.configs import Tiles
from inductor_gqa.kernels.forward import collect
from inductor_gqa.kernels.plan import Operand, Plan, execute
from inductor_gqa.kernels.weights_backward import (
    WeightsBackward,
    WeightsConfig,
    plan_weights_backward,
)
from inductor_gqa.kernels.weights_forward import plan_weights_forward
from measure import graph_time_us

ALWAYS = 2**40
SMALL, LARGE = Tiles(64, 64, 4, 2), Tiles(128, 64, 8, 2)
CONFIGS_003 = {
    "64x64/4w/2s, dS in L2": WeightsConfig(SMALL, SMALL),
    "64x64/4w/2s, dS kept": WeightsConfig(SMALL, SMALL, ds_bytes=ALWAYS),
    "128x64/8w, 64x128/8w/3s, dS kept": WeightsConfig(LARGE, Tiles(64, 128, 8, 3), ds_bytes=ALWAYS),
    "128x64/8w, 64x64/4w/3s turned, dS again": WeightsConfig(
        LARGE, Tiles(64, 64, 4, 3), ds_bytes=0, is_turned=True
    ),
}
CONFIGS_075: dict[str, Tiles | None] = {
    "default": None,
    "64x64/4w/2s": Tiles(64, 64, 4, 2),
    "64x32/4w/3s": Tiles(64, 32, 4, 3),
    "128x64/8w/2s": Tiles(128, 64, 8, 2),
}
SWEPT = {
    "003": [(1, 128), (2, 449), (1, 1024), (4, 512), (1, 2048)],
    "075": [(1, 131), (8, 256), (16, 449), (16, 512), (1, 4096)],
}
# A tf32 operand keeps ten bits of mantissa, half an ulp of which is 2**-11; sums of rounded
# products differ by little more.
TF32_FLOOR = 2.0**-10


def worst(
    ours: Any, near: Any, true: Any, floor: float, case: Mapping[str, Any]
) -> dict[str, float | bool]:
    """Largest error as a share of what is allowed, and the smallest share of elements within
    the case's tolerance."""
    ratio, share = 0.0, 1.0
    for x, eager, exact in zip(ours, near, true, strict=True):
        x = x.double().reshape(exact.shape)
        error = (x - exact).abs().max().item()
        allowed = max(
            2 * (eager.double() - exact).abs().max().item(), floor * exact.abs().max().item()
        )
        ratio = max(ratio, error / allowed if math.isfinite(error) else math.inf)
        share = min(share, seed_programs.passing_share(x, exact, case["atol"], case["rtol"]))
    return {"error_ratio": ratio, "passing_share": share, "ok": ratio <= 1}


class Backward003:
    """One shape of the attention part of 003, in the layouts that the program has."""

    def __init__(self, case: Mapping[str, Any]) -> None:
        B, L = case["B"], case["L"]
        made = seed_programs.inputs_003(B, L, case["scaling"], "cuda")
        cos, sin, (q, k, v, weights, grad_out) = made[2], made[3], made[8:13]
        heads, width = seed_programs.HEADS_003, seed_programs.WIDTH_003
        grad_out = grad_out.view(B, L, heads, width)
        self.case, self.scaling = case, case["scaling"]
        self.reference_inputs: tuple[Any, ...] = (
            grad_out.transpose(1, 2),
            weights,
            q,
            k,
            v,
            cos,
            sin,
        )
        self.reference_inputs += (self.scaling, seed_programs.KV_HEADS_003)
        self.tensors = {"grad_out": grad_out, "weights": weights}
        self.tensors |= {"q": q.transpose(1, 2), "k": k.transpose(1, 2), "v": v.transpose(1, 2)}
        self.tensors |= {"cos_q": cos, "sin_q": sin, "cos_k": cos, "sin_k": sin}
        self.floor_us = seed_programs.attention_floor_us_003(B, L)

    def plan(self, config: WeightsConfig | None) -> Plan:
        subject = WeightsBackward(
            {name: Operand.of(x) for name, x in self.tensors.items()},
            self.scaling,
            seed_programs.HEADS_003 // seed_programs.KV_HEADS_003,
            capability=torch.cuda.get_device_capability(),
        )
        return plan_weights_backward(subject, is_packed=True, config=config)

    def check(self, config: WeightsConfig | None) -> dict[str, Any]:
        (packed,) = execute(self.plan(config), self.tensors)
        D = seed_programs.WIDTH_003
        wide, narrow = seed_programs.HEADS_003 * D, seed_programs.KV_HEADS_003 * D
        parts = packed.split((wide, narrow, narrow), dim=-1)
        ours = [x.unflatten(-1, (-1, D)).transpose(1, 2) for x in parts]
        near = seed_programs.attention_backward_003(*self.reference_inputs)
        true = seed_programs.truth(seed_programs.attention_backward_003, self.reference_inputs)
        return worst(ours, near, true, torch.finfo(torch.bfloat16).eps, self.case)


class Forward075:
    """One shape of the attention part of 075, from the projections on."""

    precision = "tf32"

    def __init__(self, case: Mapping[str, Any]) -> None:
        B, L, self.is_causal = case["B"], case["L"], case["is_causal"]
        made = seed_programs.inputs_075(B, L, self.is_causal, "cuda")
        cos, sin = seed_programs.tables_075(made[1], made[6])
        D = seed_programs.WIDTH_075
        q, k, v = (
            (made[0].double() @ weight.double().t()).float().view(B, L, -1, D)
            for weight in made[2:5]
        )
        self.case = case
        self.reference_inputs: tuple[Any, ...] = tuple(x.transpose(1, 2) for x in (q, k, v))
        self.reference_inputs += (cos, sin, self.is_causal)
        self.tensors: dict[str, torch.Tensor | None] = {"k": k, "v": v}
        self.tensors |= {"q": q.view(B, L, k.shape[2], -1, D)}
        self.tensors |= {"cos_q": cos, "sin_q": sin, "cos_k": cos, "sin_k": sin}
        self.given: dict[str, torch.Tensor] = {}
        self.floor_us = seed_programs.attention_floor_us_075(B, L)

    def plan(self, tiles: Tiles | None) -> Plan:
        numbers = {"scale": 1.0, "band_hi": 0 if self.is_causal else None}
        self.given, attention = collect(self.tensors, numbers | {"precision": self.precision})
        return plan_weights_forward(attention, torch.float32, tiles=tiles)

    def check(self, tiles: Tiles | None) -> dict[str, Any]:
        plan = self.plan(tiles)
        out, weights, _ = execute(plan, self.given)
        ours = out.flatten(2, 3).transpose(1, 2), weights.flatten(1, 2)
        torch.backends.cuda.matmul.allow_tf32 = self.precision == "tf32"
        near = seed_programs.attention_forward_075(*self.reference_inputs)
        torch.backends.cuda.matmul.allow_tf32 = False
        true = seed_programs.truth(seed_programs.attention_forward_075, self.reference_inputs)
        floor = TF32_FLOOR if self.precision == "tf32" else 8 * torch.finfo(torch.float32).eps
        return worst(ours, near, true, floor, self.case)


class Forward075Exact(Forward075):
    precision = "ieee"


PROGRAMS: dict[str, tuple[Any, Mapping[str, Any]]] = {
    "003": (Backward003, CONFIGS_003),
    "075": (Forward075, CONFIGS_075),
    "075-exact": (Forward075Exact, {"default": None}),
}


def measure(
    subject: Any, config: Any, flush: torch.Tensor, rounds: int, has_parts: bool
) -> dict[str, Any]:
    """Correctness, then the time of the whole plan and of each of its launches."""
    record = dict(subject.check(config))
    if not record["ok"]:
        return record
    plan = subject.plan(config)
    tensors = getattr(subject, "given", None) or subject.tensors
    record["us"] = graph_time_us(lambda: execute(plan, tensors), flush, rounds)
    if has_parts and len(plan.launches) > 1:
        for launch in plan.launches:
            part = replace(plan, launches=(launch,))
            name = launch.kernel.fn.__name__
            record[name] = graph_time_us(lambda part=part: execute(part, tensors), flush, rounds)
    return record


def run(name: str, flush: torch.Tensor, rounds: int) -> list[dict[str, Any]]:
    """Sweeps, then measures all shapes with the best; prints a line for each."""
    make, configs = PROGRAMS[name]
    cases = seed_programs.CASES[name[:3]]
    swept = [case for case in cases if (case["B"], case["L"]) in SWEPT[name[:3]]]
    records: list[dict[str, Any]] = []

    def note(
        stage: str, label: str, case: Mapping[str, Any], record: dict[str, Any], floor: float
    ) -> None:
        row = {"program": name, "stage": stage, "config": label, "B": case["B"], "L": case["L"]}
        records.append({**row, "floor_us": floor, **record})
        parts = "  ".join(
            f"{key} {value:.1f}" for key, value in record.items() if key.endswith("kernel")
        )
        state = "ok " if record.get("ok") else "BAD"
        numbers = f"{record.get('us', math.nan):8.1f} us  floor {floor:6.1f}"
        if "failure" in record:
            numbers = record["failure"][:100]
        elif "error_ratio" in record:
            numbers += (
                f"  error/allowed {record['error_ratio']:.2f}  pass {record['passing_share']:.4f}"
            )
        print(
            f"{name:10}{stage:6}{label:42}B{case['B']:<3}L{case['L']:<5}{state} {numbers}  {parts}",
            flush=True,
        )

    def attempt(subject: Any, config: Any, has_parts: bool) -> dict[str, Any]:
        # A configuration that does not fit the device is a result, not the end of the run.
        try:
            return measure(subject, config, flush, rounds, has_parts)
        except Exception as failure:
            return {
                "ok": False,
                "failure": f"{type(failure).__name__}: {failure}".replace("\n", " "),
            }

    times: dict[str, list[float]] = {label: [] for label in configs}
    if len(configs) > 1:
        for case in swept:
            subject = make(case)
            for label, config in configs.items():
                record = attempt(subject, config, has_parts=True)
                times[label].append(record.get("us", math.inf))
                note("sweep", label, case, record, subject.floor_us)
    best = min(times, key=lambda label: math.prod(times[label]))
    total = []
    for case in cases:
        subject = make(case)
        record = attempt(subject, configs[best], has_parts=False)
        total.append(record.get("us", math.inf))
        note("all", best, case, record, subject.floor_us)
    mean = math.exp(statistics.fmean(map(math.log, total)))
    print(f"{name}: best is {best}, geometric mean {mean:.1f} us")
    return records


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--programs", nargs="+", choices=tuple(PROGRAMS), default=list(PROGRAMS))
    parser.add_argument("--rounds", type=int, default=12, help="timed replays (default: 12)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the JSON record here")
    args = parser.parse_args()
    flush = torch.empty(2**28, dtype=torch.int8, device="cuda")
    start = time.perf_counter()
    records: list[dict[str, Any]] = []
    for name in args.programs:
        records += run(name, flush, args.rounds)
        if args.out:  # after every program: what is measured stays, whatever comes
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    print(f"{time.perf_counter() - start:.0f} s on {torch.cuda.get_device_name()}")


if __name__ == "__main__":
    main()

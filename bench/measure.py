"""What the benchmarks share: variants that take turns, out of memory as a result, the record."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch._inductor.utils import fresh_cache

from inductor_gqa.cli.measure import default_device, environment, release_memory, times_ms
from inductor_gqa.cli.measure import peak_memory as measure_peak_memory
from inductor_gqa.cli.terminal import progress

OUT_OF_MEMORY = "out of memory"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that every script has."""
    parser.add_argument("--tiny", action="store_true", help="sizes for a test on a CPU")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: the GPU, if any")
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="default: bf16 on a GPU, else fp32")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each variant (default: 3)")
    parser.add_argument("--steps", type=int, default=5, help="timed steps a turn (default: 5)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the JSON record here")
    parser.add_argument("--json", action="store_true", help="print the JSON record, no table")


def choose_device(args: argparse.Namespace) -> tuple[torch.device, torch.dtype]:
    """Device and dtype that the options ask for."""
    device = torch.device(args.device) if args.device else default_device()
    default = "bf16" if device.type == "cuda" else "fp32"
    return device, DTYPES[args.dtype or default]


@dataclass
class Variant:
    """One way to do the same work: `step` does it once, `scope` is entered around each turn."""

    name: str
    step: Callable[[], object]
    forward: Callable[[], object]
    scope: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    status: str = "ok"
    first_step_seconds: float = 0.0
    step_ms: list[float] = field(default_factory=list[float])
    forward_ms: list[float] = field(default_factory=list[float])
    peak_bytes: int | None = None
    facts: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def is_alive(self) -> bool:
        return self.status == "ok"

    def as_data(self, tokens: int) -> dict[str, Any]:
        """The variant's results; numbers only where it ran."""
        data: dict[str, Any] = {"status": self.status, **self.facts}
        if not self.is_alive:
            return data
        step = statistics.median(self.step_ms)
        return {
            **data,
            "step_ms": step,
            "step_ms_lowest": min(self.step_ms),
            "step_ms_highest": max(self.step_ms),
            "forward_ms": statistics.median(self.forward_ms),
            "tokens_per_second": 1e3 * tokens / step,
            "peak_bytes": self.peak_bytes,
            "first_step_seconds": self.first_step_seconds,
        }


@contextlib.contextmanager
def out_of_memory_is_a_result(
    variant: Variant, device: torch.device
) -> Generator[None, None, None]:
    """Running out of memory ends the variant, not the run."""
    try:
        yield
    except torch.OutOfMemoryError:
        variant.status = OUT_OF_MEMORY
    if not variant.is_alive:  # here the exception, whose frames hold tensors, is gone
        release_memory(device)


def first_steps(variants: Sequence[Variant], device: torch.device) -> None:
    """The first step of each variant, in which it is compiled; its cache is empty."""
    for variant in variants:
        release_memory(device)
        folder = os.environ["TORCHINDUCTOR_CACHE_DIR"]  # of cold_caches, which removes it at last
        with (
            fresh_cache(dir=folder, delete=False),
            progress(f"{variant.name}: compile and first step"),
            out_of_memory_is_a_result(variant, device),
            variant.scope(),
        ):
            start = time.perf_counter()
            variant.step()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            variant.first_step_seconds = time.perf_counter() - start


def take_turns(variants: Sequence[Variant], device: torch.device, rounds: int, steps: int) -> None:
    """Times the living variants in turns, so that a clock that drifts is no variant's advantage.

    Peak memory is the allocator's on CUDA, what a step adds to the process on a CPU.
    """
    for turn in range(rounds):
        for variant in variants:
            if not variant.is_alive:
                continue
            with (
                progress(f"{variant.name}: turn {turn + 1} of {rounds}"),
                out_of_memory_is_a_result(variant, device),
                variant.scope(),
            ):
                variant.step()  # warms up what the variant before has cooled down
                memory = measure_peak_memory(variant.step, device)
                if memory is not None:
                    peak = memory.peak if device.type == "cuda" else memory.added
                    variant.peak_bytes = max(variant.peak_bytes or 0, peak)
                variant.step_ms += times_ms(variant.step, device, steps)
                variant.forward_ms += times_ms(variant.forward, device, steps)


def graph_time_us(call: Callable[[], object], flush: torch.Tensor, rounds: int) -> float:
    """Median GPU time of a CUDA graph of the call, each replay after `flush` was written."""
    return statistics.median(replayed_us({"": call}, rounds, empty_cache=flush.zero_)[""])


def replayed_us(
    calls: Mapping[str, Callable[[], object]],
    rounds: int,
    warm_up: int = 2,
    empty_cache: Callable[[], object] | None = None,
) -> dict[str, list[float]]:
    """Microseconds of CUDA graphs of the calls, which take turns, each behind `empty_cache`.

    By default that is a read that empties L2: lines that a write leaves there go to memory at the
    expense of what is timed.
    """
    graphs: dict[str, tuple[torch.cuda.CUDAGraph, object]] = {}
    for name, call in calls.items():
        call()  # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = call()
        graphs[name] = graph, results
    if empty_cache is None:
        empty_cache = torch.zeros(2**26, device="cuda").sum  # 256 MiB, several times any L2
    found: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(warm_up + rounds):
        for name, (graph, _) in graphs.items():
            empty_cache()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            if turn >= warm_up:
                found[name].append(1e3 * begin.elapsed_time(end))
    return found


@contextlib.contextmanager
def cold_caches() -> Generator[None, None, None]:
    """Caches of this run's own: on a warm cache the pass does not run at all."""
    with tempfile.TemporaryDirectory(
        prefix="inductor-cache-", ignore_cleanup_errors=True
    ) as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        os.environ["TRITON_CACHE_DIR"] = os.path.join(folder, "triton")
        yield


def compiled_beforehand(options: Sequence[str], jobs: int, folder: Path) -> list[dict[str, Any]]:
    """Runs this script as it was started, with --compile-only, in `jobs` processes, each on its
    share of the cases, to fill the caches; returns the rows that they wrote."""
    records = [folder / f"compiled-{n}.json" for n in range(jobs)]
    own = sys.orig_argv[: len(sys.orig_argv) - len(sys.argv[1:])]
    command = [*own, "--compile-only", *options]
    processes = [
        subprocess.Popen([*command, "--cases", f"{n}::{jobs}", "--out", str(out)])
        for n, out in enumerate(records)
    ]
    for process in processes:
        process.wait()
    written = [json.loads(out.read_text(encoding="utf-8")) for out in records if out.exists()]
    return [row for found in written for row in found.get("cases", found.get("rows"))]


def count_sites(
    rows: list[dict[str, Any]], compiled: list[dict[str, Any]], names: Sequence[str]
) -> None:
    """Puts the counts of sites into rows whose graphs came from the cache, where nothing is read
    again; `names` tell rows apart."""

    def key(row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row[name] for name in names)

    known = {key(row): row["variants"].get("fused", {}) for row in compiled}
    for row in rows:
        ours, theirs = row["variants"].get("fused", {}), known.get(key(row), {})
        if ours.get("sites_fused") == ours.get("sites_left") == 0:
            ours |= {name: theirs[name] for name in ("sites_fused", "sites_left") if name in theirs}


def record(name: str, settings: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """The head of a result: which script, when, at which commit, on what, with which settings."""
    return {
        "benchmark": name,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "commit": _commit(),
        "environment": environment(device),
        "settings": settings,
    }


def write(result: dict[str, Any], path: Path | None) -> None:
    """Writes the record where --out says, if it does."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def _commit() -> str | None:
    """The checkout's commit, with a plus sign where files differ; None outside a checkout."""

    def git(*arguments: str) -> str:
        folder = Path(__file__).parent
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None

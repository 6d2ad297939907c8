"""Random attentions through every kernel, judged by the tests' own rule: against fp64 the error is
at most twice that of eager in the same dtype, or what rounding alone explains.

Every operand and every result lies in memory that is NaN around it, so that a read out of bounds
makes NaN and a write is seen. An error that is off by less than twice the bound is drawn sixteen
times more and stands if two of those are off as well: of few values eager's largest error is at
times small by chance. Both are counted.

Lengths are odd or not, masks and rotations of all kinds, strides transposed, sliced and zero,
gradients whole or in part, weights returned or given, keys split.

On a GPU the kernels are compiled, so examples come in families that share their compiled code; on
a CPU Triton's interpreter runs them. An example is found again by its numbers:

    python bench/fuzz.py --seed 0 --families 64 --only 12/3
"""

from __future__ import annotations

import argparse
import collections
import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench"), str(ROOT / "tests")]
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402  (it reads the number of threads when it is imported)

if not torch.cuda.is_available():  # before anything imports Triton
    from kernels.interpreter import use_interpreter

    use_interpreter()

from inductor_gqa.cli.measure import default_device  # noqa: E402
from measure import record, write  # noqa: E402

Found = dict[str, Any]
MOST_FAILURES = 40  # that are written down in full
MOST_RAISED = 3  # errors that end a family: a kernel that does not compile costs seconds each time


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--examples", type=int, default=20_000, help="in all (default: 20000)")
    parser.add_argument(
        "--families", type=int, help="default: 63 on a GPU, a fifth of the examples"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: 1)")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no example after these")
    parser.add_argument("--only", metavar="FAMILY/EXAMPLE", help="run one example, here")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the JSON record here")
    return parser.parse_args(arguments)


def run_family(
    seed: int, index: int, numbers: range, device: torch.device, end: float = float("inf")
) -> Found:
    """Examples of one family: how many ran, which were wrong and how, what they were."""
    from fuzz_checks import DRAWS, is_narrow, wrong
    from fuzz_families import Example, family

    of = family(seed, index, device.type == "cpu")
    start, ran, raised, is_lost = time.perf_counter(), 0, 0, False
    failures: list[Found] = []
    unlucky: list[Found] = []
    first = 0.0
    for number in numbers:
        if time.time() > end or is_lost or raised == MOST_RAISED:
            break
        example = Example(of, seed, number, device)
        try:
            found = wrong(example)
        except Exception as error:
            found = [f"{type(error).__name__}: {str(error)[:400]}"]
            raised += 1
            is_lost = isinstance(error, torch.AcceleratorError)  # no kernel runs after it
        if found and is_narrow(found):
            more = (Example(of, seed, number, device, again + 1) for again in range(DRAWS))
            if sum(bool(wrong(another)) for another in more) < 2:
                unlucky.append({"example": f"{index}/{number}", "wrong": found})
                found = []
        ran += 1
        first = first or time.perf_counter() - start
        if found:
            sizes = f"B{example.B}-L{example.L}-S{example.S}"
            failures.append({"example": f"{index}/{number}", "sizes": sizes, "wrong": found})
    kinds = {
        "route": of.route,
        "dtype": str(of.dtype).removeprefix("torch."),
        "mask": of.mask if of.route != "given" else "none",
        "rotation": of.rotation,
        "group": f"R{of.R}",
        "widths": f"D{of.D}-E{of.E}",
        "gradients": "".join(n for n, x in zip("qkv", of.needs, strict=True) if x)
        if of.route in ("plain", "chosen", "op", "given", "sm90")
        else "none",
    }
    kinds |= {f"layout of {name}": x for name, x in zip("qkvg", of.layouts, strict=True)}
    for name, is_there in (("sink", of.has_sink), ("dropout", of.has_keep)):
        kinds[name] = str(is_there and of.route != "given")
    return {
        "family": index,
        "described": repr(of),
        "ran": ran,
        "failures": failures,
        "unlucky": unlucky,
        "kinds": kinds,
        "seconds": time.perf_counter() - start,
        "first_seconds": first,
        "is_lost": is_lost,
    }


def work(tasks: Any, results: Any, args: argparse.Namespace, device: str, end: float) -> None:
    """One process: families until none is left or the device is lost."""
    torch.set_num_threads(1)
    while (task := tasks.get()) is not None:
        index, count = task
        results.put((os.getpid(), index, None))
        found = run_family(args.seed, index, range(count), torch.device(device), end)
        results.put((os.getpid(), index, found))
        if found["is_lost"]:
            return


def run_all(args: argparse.Namespace, device: torch.device) -> list[Found]:
    """All families, in `jobs` processes; one that ends early is replaced and its family noted."""
    counts = [args.examples // args.families] * args.families
    for i in range(args.examples % args.families):
        counts[i] += 1
    end = time.time() + args.seconds
    if args.jobs == 1:
        found: list[Found] = []
        for index, count in enumerate(counts):
            found.append(run_family(args.seed, index, range(count), device, end))
            _tell(found[-1], args.families)
        return found
    context = multiprocessing.get_context("spawn")
    tasks, results = context.Queue(), context.Queue()
    for task in [*enumerate(counts), *[None] * args.jobs]:
        tasks.put(task)
    start = lambda: context.Process(target=work, args=(tasks, results, args, str(device), end))  # noqa: E731
    processes = [start() for _ in range(args.jobs)]
    for process in processes:
        process.start()
    return _gather(processes, start, results, args)


def _gather(
    processes: list[Any], start: Any, results: Any, args: argparse.Namespace
) -> list[Found]:
    found: list[Found] = []
    running: dict[int, int] = {}
    while len(found) < args.families:
        if not results.empty():
            pid, index, made = results.get()
            running[pid] = index
            if made is not None:
                del running[pid]
                found.append(made)
                _tell(made, args.families)
            continue
        for i, process in enumerate(processes):
            if process.is_alive() or (process.exitcode == 0 and process.pid not in running):
                continue
            if not results.empty():
                break
            if process.pid in running:
                index = running.pop(process.pid)
                failure = {"example": f"{index}/?", "wrong": [f"process ended, {process.exitcode}"]}
                found.append({"family": index, "ran": 0, "failures": [failure], "kinds": {}})
                _tell(found[-1], args.families)
            processes[i] = start()
            processes[i].start()
        if all(not p.is_alive() for p in processes) and results.empty():
            if any(x.get("is_lost") for x in found):
                processes[0] = start()
                processes[0].start()
            else:
                break
        time.sleep(0.02)
    return found


def _tell(found: Found, of: int) -> None:
    line = f"family {found['family']} of {of}: {found['ran']} examples"
    line += f", {found.get('seconds', 0):.1f} s, {len(found['failures'])} wrong"
    print(line, flush=True)
    for failure in found["failures"][:3]:
        print(f"  {failure['example']}: {'; '.join(failure['wrong'])[:300]}", flush=True)
    if found["failures"]:
        print(f"  {found.get('described')}", flush=True)


def summary(found: list[Found]) -> Found:
    """Counts of examples by what they had, and the failures."""
    counts: dict[str, dict[str, int]] = collections.defaultdict(lambda: collections.Counter())
    for one in found:
        for kind, value in one["kinds"].items():
            counts[kind][value] += one["ran"]
    failures = [
        failure | {"family": one.get("described")} for one in found for failure in one["failures"]
    ]
    return {
        "examples": sum(one["ran"] for one in found),
        "wrong": len(failures),
        "families": len(found),
        "counts": {kind: dict(sorted(values.items())) for kind, values in counts.items()},
        "failures": failures[:MOST_FAILURES],
        "unlucky": [miss for one in found for miss in one.get("unlucky", [])],
    }


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    device = default_device()
    args.families = args.families or (63 if device.type == "cuda" else args.examples // 5 or 1)
    if args.only:
        index, number = (int(x) for x in args.only.split("/"))
        found = [run_family(args.seed, index, range(number, number + 1), device)]
        _tell(found[0], args.families)
        return int(bool(found[0]["failures"]))
    start = time.perf_counter()
    settings = {"seed": args.seed, "families": args.families, "jobs": args.jobs}
    result = record("fuzz", settings | {"asked": args.examples}, device)  # the commit that runs
    found = run_all(args, device)
    result |= summary(found) | {"seconds": time.perf_counter() - start}
    write(result, args.out)
    print(f"{result['examples']} of {args.examples} examples, {result['wrong']} wrong,", end=" ")
    print(f"{result['seconds']:.0f} s; families {result['families']}")
    return int(result["wrong"] > 0 or result["examples"] == 0)


if __name__ == "__main__":
    sys.exit(main())

"""The README's figures, from the committed results.

python bench/plot.py            writes docs/figures/*.svg
python bench/plot.py --check    exits with 1 where one differs from the results

`python bench/readme.py` does this and the README's tables.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from inductor_gqa.cli.terminal import CommandError, complain
from svg import Panel, bars, figure, lines

ROOT = Path(__file__).resolve().parent.parent
RESULTS, FIGURES = ROOT / "bench" / "results", ROOT / "docs" / "figures"
VARIANTS = {"plain": "torch.compile", "fused": "with enable()", "sdpa": "switched to SDPA"}
PROGRAMS = {
    "003": "backward written by hand, bf16",
    "075": "forward that returns its weights, TF32",
    "075-highest": "the same, fp32",
}
KERNELS = {
    "cudnn": "cuDNN",
    "ours": "ours",
    "flash": "FlashAttention in PyTorch",
    "flex": "FlexAttention",
}


def found(benchmark: str) -> list[dict[str, Any]]:
    """The committed records of a benchmark, by name of the file."""
    paths = sorted(RESULTS.glob("*.json"))
    records = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    return [r for r in records if isinstance(r, dict) and r.get("benchmark") == benchmark]


def steps() -> list[dict[str, Any]]:
    """Training steps by model, batch and length. Raises CommandError where one has no green
    check."""

    def order(record: dict[str, Any]) -> tuple[str, int, int]:
        settings = record["settings"]
        return settings["model"], settings["batch"], settings["length"]

    records = sorted(found("train_step"), key=order)
    for record in records:
        if not record["check"]["ok"]:
            raise CommandError(f"{record['settings']['model']}: the result has no green check", 1)
    return records


def training(records: Sequence[dict[str, Any]]) -> str:
    """Bars of step time and peak memory."""
    labels: list[str] = []
    values: dict[str, dict[str, list[float | str]]] = {
        unit: {name: [] for name in VARIANTS} for unit in ("ms", "GiB")
    }
    for record in records:
        settings = record["settings"]
        labels.append(
            f"{settings['model']}, {settings['layers']} layers\n"
            f"{settings['batch']} x {settings['length']}"
        )
        for name in VARIANTS:
            data = record["variants"].get(name, {})
            status = data.get("status", "not run")
            is_run = status == "ok"
            values["ms"][name].append(data["step_ms"] if is_run else status)
            values["GiB"][name].append(data["peak_bytes"] / 2**30 if is_run else status)
    rows = [
        [bars("Time of a training step", "ms", labels, values["ms"])],
        [bars("Peak memory", "GiB", labels, values["GiB"])],
    ]
    return figure("Time and memory of training steps", rows, list(VARIANTS.values()))


def programs(records: Sequence[dict[str, Any]]) -> str:
    """Time of every case of the two whole programs, as a multiple of its floor: the time that
    reading and writing its tensors and its products take at the least."""
    rows: list[list[Panel]] = []
    for record in records:
        for name, title in PROGRAMS.items():
            cases = [case for case in record["cases"] if case["program"] == name]
            cases.sort(key=lambda case: (case["B"] * case["L"], case["L"]))
            for case in cases:
                if not all(variant["ok"] for variant in case["variants"].values()):
                    raise CommandError(f"{name}: a case has no green check", 1)
            series: dict[str, list[float | str]] = {
                variant: [case["variants"][variant]["us"] / case["floor_us"] for case in cases]
                for variant in ("plain", "fused")
            }
            labels = [f"{case['B']} x\n{case['L']}" for case in cases]
            unit = "time / floor by batch x length"
            rows.append([bars(title, unit, labels, series, floor=1.0)])
    names = [VARIANTS["plain"], VARIANTS["fused"]]
    return figure("Time of whole programs as a multiple of the floor", rows, names, "the floor")


def memory(records: Sequence[dict[str, Any]], trained: Sequence[dict[str, Any]]) -> str:
    """Peak memory against length: training steps of one model and batch at several lengths, and the
    two programs for one sequence."""
    panels: list[Panel] = []
    series: dict[str, list[tuple[float, float]]] = {}
    kinds: dict[tuple[str, int, int], list[dict[str, Any]]] = {}
    for step in trained:
        settings = step["settings"]
        key = (settings["model"], settings["layers"], settings["batch"])
        kinds.setdefault(key, []).append(step)
    for (model, layers, batch), same in kinds.items():
        if len({step["settings"]["length"] for step in same}) < 2:
            continue
        series = {
            name: [
                (step["settings"]["length"], step["variants"][name]["peak_bytes"] / 2**30)
                for step in same
                if step["variants"].get(name, {}).get("status") == "ok"
            ]
            for name in VARIANTS
        }
        title = f"{model}, {layers} layers, batch {batch}"
        panels.append(lines(title, "GiB", series, "length"))
    for record in records:
        for name in ("003", "075"):
            cases = [c for c in record["cases"] if c["program"] == name and c["B"] == 1]
            series = {
                variant: [(c["L"], c["variants"][variant]["peak_bytes"] / 2**20) for c in cases]
                for variant in ("plain", "fused")
            }
            title = f"{PROGRAMS[name]}, batch 1"
            panels.append(lines(title, "MiB", series, "length"))
    rows = [panels[k : k + 2] for k in range(0, len(panels), 2)]
    names = [VARIANTS[name] for name in series]
    return figure("Peak memory against length", rows, names)


def speed(records: Sequence[dict[str, Any]]) -> str:
    """TFLOP/s of attention alone under a causal mask against length, of its forward and of its
    backward, which is a step less a forward and counts 2.5 times a forward's operations."""
    rows: list[list[Panel]] = []
    for record in records:
        for direction, operations in (("forward", 1.0), ("backward", 2.5)):
            row: list[Panel] = []
            for dim in sorted(record["settings"]["dims"]):
                own = [r for r in record["rows"] if (r["D"], r["causal"]) == (dim, True)]
                series: dict[str, list[tuple[float, float]]] = {name: [] for name in KERNELS}
                for r in own:
                    if r["variant"] in KERNELS and r["status"] == "ok":
                        done = operations * r["forward_tflops"] * r["forward_us"]
                        series[r["variant"]].append((r["S"], done / r[f"{direction}_us"]))
                title = f"{direction}, head dim {dim}, causal"
                row.append(lines(title, "TFLOP/s", series, "length"))
            rows.append(row)
    return figure("TFLOP/s of attention against length", rows, list(KERNELS.values()))


def figures() -> dict[str, str]:
    """Every figure by the name of its file."""
    seeds, trained = found("seeds"), steps()
    return {
        "training.svg": training(trained),
        "programs.svg": programs(seeds),
        "memory.svg": memory(seeds, trained),
        "speed.svg": speed(found("attention-core")),
    }


def write(check: bool) -> list[str]:
    """Writes the figures; returns the names of those that were not what they have to be."""
    differing: list[str] = []
    for name, text in figures().items():
        path = FIGURES / name
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            differing.append(name)
            if not check:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
    return differing


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="change nothing, compare")
    args = parser.parse_args(argv)
    try:
        differing = write(args.check)
    except CommandError as error:
        complain(str(error))
        return error.exit_code
    for name in differing:
        print(f"docs/figures/{name}: {'differs' if args.check else 'written'}")
    return int(args.check and bool(differing))


if __name__ == "__main__":
    sys.exit(main())

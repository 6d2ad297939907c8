"""Writes what the README shows: the speed table and the figures from the committed results, the
list of what is recognised from running it (recognised.py), half a minute on a CPU.

python bench/readme.py            rewrites the regions in README.md, and docs/figures/
python bench/readme.py --check    exits with 1 where one differs, and names it
"""

from __future__ import annotations

import argparse
import re
import sys
from typing import Any

import plot
import recognised
from inductor_gqa.cli.terminal import CommandError, complain, progress
from seeds import geometric_mean

README = plot.ROOT / "README.md"


def cell(variant: dict[str, Any] | None) -> str:
    if variant is None:
        return "not run"
    if variant["status"] != "ok":
        return str(variant["status"])
    return f"{variant['step_ms']:.0f} ms, {variant['peak_bytes'] / 2**30:.1f} GiB"


def table() -> str:
    """The training steps. Raises CommandError where one has no green check."""
    lines = [
        "| model | batch x length | `torch.compile` | with `enable()` | switched to SDPA |",
        "|---|---|---|---|---|",
    ]
    devices: set[str] = set()
    for result in plot.steps():
        settings, environment = result["settings"], result["environment"]
        name = f"{settings['model']}, {settings['layers']} layers, {settings['dtype']}"
        cells = [cell(result["variants"].get(v)) for v in plot.VARIANTS]
        size = f"{settings['batch']} x {settings['length']}"
        lines.append(f"| {name} | {size} | {' | '.join(cells)} |")
        device = f"{environment['gpu']}, torch {environment['torch']}"
        devices.add(f"{device}, Triton {environment['triton']}, {result['date']}")
    return "\n".join([*lines, "", f"Measured on {'; '.join(sorted(devices))}."])


PROGRAMS = {
    "003": "backward of a block written by hand from given weights, bfloat16",
    "075": "forward that returns its weights, float32 at precision `high`",
    "075-highest": "the same at `highest`, the default",
}


def programs() -> str:
    """Programs whose shapes are many: geometric means and the range over the shapes. Raises
    CommandError where a case has no green check."""
    cases = [row for record in plot.found("seeds") for row in record["cases"]]
    kinds = {text: [row for row in cases if row["program"] == n] for n, text in PROGRAMS.items()}
    kinds["training step of one block, bfloat16"] = [
        row for record in plot.found("block") for row in record["rows"]
    ]
    lines: list[str] = []
    for text, rows in kinds.items():
        if not all(found["ok"] for row in rows for found in row["variants"].values()):
            raise CommandError(f"a case of {text!r} has no green check", 1)
        us = {
            name: [row["variants"][name]["us"] for row in rows]
            for name in ("plain", "fused", "sdpa")
            if name in rows[0]["variants"]
        }
        means = {name: f"{geometric_mean(times):.0f} us" for name, times in us.items()}
        gains = [a / b for a, b in zip(us["plain"], us["fused"], strict=True)]
        beside = f"; {means['sdpa']} where it calls SDPA" if "sdpa" in means else ""
        lines.append(
            f"- {text}: {means['plain']} with `torch.compile`, {means['fused']} with `enable()`, "
            f"{min(gains):.2f} to {max(gains):.2f} times as fast{beside}"
        )
    return "\n".join([*lines, *alone()])


def alone() -> list[str]:
    """RoPE and attention alone beside RoPE and cuDNN, a line for each head dim. Raises CommandError
    where a shape has no green check."""
    shapes: dict[tuple[int, bool, int], dict[str, Any]] = {}
    for record in plot.found("attention"):
        for row in record["rows"]:
            if row["variant"] in ("ours", "cudnn"):
                shape = (row["D"], row["causal"], row["S"])
                shapes.setdefault(shape, {})[row["variant"]] = row
    lines: list[str] = []
    for dim in sorted({shape[0] for shape in shapes}, reverse=True):
        both = [found for shape, found in shapes.items() if shape[0] == dim]
        if not all(row["status"] == "ok" for found in both for row in found.values()):
            raise CommandError(f"a shape of head dim {dim} has no green check", 1)
        said: list[str] = []
        for name, key in (("forward", "forward_us"), ("training", "step_us")):
            gains = [found["cudnn"][key] / found["ours"][key] for found in both]
            low, high = min(gains), max(gains)
            said.append(f"{name} {geometric_mean(gains):.2f} ({low:.2f} to {high:.2f})")
        lines.append(
            f"- RoPE and attention alone, head dim {dim}, bfloat16, times as fast as RoPE and "
            f"cuDNN: {', '.join(said)}"
        )
    return lines


# What a red check forbids comes before what takes long.
REGIONS = {"speed": table, "programs": programs, "recognised": recognised.listed}


def region(name: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- generated:{name} -->\n).*?(\n<!-- end -->)", re.DOTALL)


def shown(name: str) -> str:
    """What the README shows in a region."""
    found = region(name).search(README.read_text(encoding="utf-8"))
    if found is None:
        raise CommandError(f"README.md has no region {name}", 1)
    return found[0][len(found[1]) : -len(found[2])]


def write(check: bool) -> list[str]:
    """Writes regions and figures; returns the names of those that were not what they have to be."""
    differing: list[str] = []
    for name, make in REGIONS.items():
        with progress(name):
            text = make()
        if text != shown(name):
            differing.append(f"README.md, {name}")
            if not check:
                old = README.read_text(encoding="utf-8")
                new = region(name).sub(lambda match, text=text: match[1] + text + match[2], old)
                README.write_text(new, encoding="utf-8")
    return [*differing, *(f"docs/figures/{name}" for name in plot.write(check))]


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
        print(f"{name}: {'differs' if args.check else 'written'}")
    return int(args.check and bool(differing))


if __name__ == "__main__":
    sys.exit(main())

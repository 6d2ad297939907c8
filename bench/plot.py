"""Bars of step time and peak memory from the committed training results.

python bench/plot.py                    writes train_step.svg
python bench/plot.py --out FILE.png     the format follows the name
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from inductor_gqa.cli.terminal import CommandError, complain
from readme import results

# Colours that stay apart for most colour-blind readers (Okabe and Ito).
VARIANTS = {"plain": "#999999", "fused": "#0072b2", "sdpa": "#e69f00"}
NAMES = {"plain": "torch.compile", "fused": "with enable()", "sdpa": "switched to SDPA"}


def bars(found: list[dict[str, Any]]) -> tuple[list[str], dict[str, list[tuple[float, float]]]]:
    """Labels, and for each variant (milliseconds, GiB) by label; 0 where it was not run or ran out
    of memory."""
    labels: list[str] = []
    heights: dict[str, list[tuple[float, float]]] = {name: [] for name in VARIANTS}
    for result in found:
        if not result["check"]["ok"]:
            raise CommandError(f"{result['settings']['model']}: the result has no green check", 1)
        settings = result["settings"]
        size = f"{settings['batch']} x {settings['length']}"
        labels.append(f"{settings['model']}\n{settings['layers']} layers, {size}")
        for name, pairs in heights.items():
            data = result["variants"].get(name, {})
            is_run = data.get("status") == "ok"
            pairs.append((data["step_ms"], data["peak_bytes"] / 2**30) if is_run else (0.0, 0.0))
    return labels, heights


def draw(out: Path) -> None:
    """Writes the figure. Raises CommandError without matplotlib."""
    try:
        import matplotlib as mpl  # pyright: ignore[reportMissingImports]
        from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        message = "this needs matplotlib: pip install -e '.[bench]'"
        raise CommandError(message, exit_code=3) from error
    mpl.rcParams["svg.hashsalt"] = "inductor_gqa"  # the same results make the same file
    labels, heights = bars(results())
    figure = Figure(figsize=(4 + 2.5 * len(labels), 6), layout="constrained")
    panels = figure.subplots(2, 1, sharex=True)
    for panel, index, what in zip(panels, (0, 1), ("step, ms", "peak memory, GiB"), strict=True):
        for place, (name, pairs) in enumerate(heights.items()):
            at = [group + 0.27 * (place - 1) for group in range(len(labels))]
            drawn = panel.bar(at, [pair[index] for pair in pairs], 0.25, color=VARIANTS[name])
            texts = [f"{pair[index]:.0f}" if pair[index] else "no result" for pair in pairs]
            panel.bar_label(drawn, texts, fontsize=7)
            drawn.set_label(NAMES[name])
        panel.set_ylabel(what)
        panel.set_xticks(range(len(labels)), labels)
    panels[0].legend()
    figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("train_step.svg"), metavar="FILE")
    args = parser.parse_args(argv)
    try:
        draw(args.out)
    except CommandError as error:
        complain(str(error))
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Writes the README's speed table from the committed results.

python bench/readme.py            rewrites the region in README.md
python bench/readme.py --check    exits with 1 where it differs from the results
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
REGION = re.compile(r"(<!-- generated:speed -->\n).*?(<!-- end -->)", re.DOTALL)


def results() -> list[dict[str, Any]]:
    """The committed training steps, by model, batch and length."""
    found = [json.loads(path.read_text()) for path in (ROOT / "bench/results").glob("*.json")]
    records = [result for result in found if isinstance(result, dict)]
    steps = [result for result in records if result.get("benchmark") == "train_step"]
    key = lambda r: (r["settings"]["model"], r["settings"]["batch"], r["settings"]["length"])  # noqa: E731
    return sorted(steps, key=key)


def cell(variant: dict[str, Any] | None) -> str:
    if variant is None:
        return "not run"
    if variant["status"] != "ok":
        return str(variant["status"])
    return f"{variant['step_ms']:.0f} ms, {variant['peak_bytes'] / 2**30:.1f} GiB"


def table() -> str:
    lines = [
        "| model | batch x length | `torch.compile` | with `enable()` | switched to SDPA |",
        "|---|---|---|---|---|",
    ]
    devices: set[str] = set()
    for result in results():
        settings, environment = result["settings"], result["environment"]
        if not result["check"]["ok"]:
            raise SystemExit(f"{settings['model']}: the result has no green check")
        name = f"{settings['model']}, {settings['layers']} layers, {settings['dtype']}"
        cells = [cell(result["variants"].get(v)) for v in ("plain", "fused", "sdpa")]
        size = f"{settings['batch']} x {settings['length']}"
        lines.append(f"| {name} | {size} | {' | '.join(cells)} |")
        device = f"{environment['gpu']}, torch {environment['torch']}"
        devices.add(f"{device}, Triton {environment['triton']}, {result['date']}")
    return "\n".join([*lines, "", f"Measured on {'; '.join(sorted(devices))}.", ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing, compare")
    check = parser.parse_args().check
    readme = ROOT / "README.md"
    old = readme.read_text()
    new = REGION.sub(lambda match: match[1] + table() + match[2], old)
    if check:
        return int(new != old)
    readme.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What happened to each attention: fused or left, as what, and why. Prints as a table; the log
shows the same records."""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

import torch

log = logging.getLogger("inductor_gqa")


@dataclass(frozen=True)
class Record:
    """One attention site. place is the user's file:line; reason is None where it was fused."""

    place: str
    fused: bool
    summary: str
    reason: str | None
    direction: str  # "inference" or "training"
    has_backward: bool
    seconds: float = 0.0

    def __str__(self) -> str:
        if self.fused:
            return f"{self.place} fused ({self.direction}): {self.summary}"
        return f"{self.place} left ({self.direction}): {self.reason}"


@dataclass
class Report:
    """Records of one or several compiles, in the order of the graphs."""

    sites: list[Record] = field(default_factory=list)

    @property
    def fused(self) -> int:
        return sum(site.fused for site in self.sites)

    @property
    def left(self) -> int:
        return len(self.sites) - self.fused

    def __str__(self) -> str:
        if not self.sites:
            return "no attention found"
        rows = [("place", "", "graph", "what was recognised, or why it was left")]
        rows += [
            (
                s.place,
                "fused" if s.fused else "left",
                s.direction,
                s.summary if s.fused else s.reason or "",
            )
            for s in self.sites
        ]
        widths = [max(len(row[k]) for row in rows) for k in range(3)]
        lines = [
            "  ".join(
                [*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]]
            ).rstrip()
            for row in rows
        ]
        lines.insert(1, "  ".join("-" * w for w in (*widths, 40)))
        return "\n".join([*lines, f"{self.fused} fused, {self.left} left"])

    def to_json(self) -> str:
        return json.dumps(
            {"fused": self.fused, "left": self.left, "sites": [asdict(s) for s in self.sites]}
        )


_lock = threading.Lock()
_collecting: list[Report] = []
_seconds = 0.0


@contextmanager
def collected() -> Generator[Report, None, None]:
    """Collects the records of the passes that run inside."""
    report = Report()
    with _lock:
        _collecting.append(report)
    try:
        yield report
    finally:
        with _lock:
            _collecting.remove(report)


def add(record: Record) -> None:
    with _lock:
        for report in _collecting:
            report.sites.append(record)
    log.info("%s", record)


def add_seconds(seconds: float) -> None:
    global _seconds
    with _lock:
        _seconds += seconds


def pass_seconds() -> float:
    """Seconds spent in our pass in this process so far."""
    return _seconds


def place_of(node: torch.fx.Node) -> str:
    """The user's file:line that a node comes from, or the node's name."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    own = [f for f in frames if "/torch/" not in f[0]]
    if not own and not frames:
        return node.name
    path, line = (own or frames)[-1]
    return f"{path.rsplit('/', 1)[-1]}:{line}"

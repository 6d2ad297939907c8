"""What happened to each attention: fused or left, as what, and why. Prints as at most three lines
a site and shows as a page in a notebook (page.py); the log has the same records."""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from .sizes import bytes_as_text, flops_as_text

log = logging.getLogger("inductor_gqa")
NOTES = 2  # beside a site's own words: a report is read at a glance


@dataclass(frozen=True)
class Details:
    """What explain() adds to a record.

    source: the user's line. score_matrices, score_bytes, flops, visible: as in costs.Costs.
    reading: (what, how it was read), exactly; words: the same in sentences. gone, come: operations
    that the rewrite takes out and puts in; stays: those around an attention that is left.
    """

    source: str = ""
    score_matrices: int = 0
    score_bytes: int = 0
    flops: int = 0
    visible: float = 1.0
    reading: tuple[tuple[str, str], ...] = ()
    words: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()
    come: tuple[str, ...] = ()
    stays: tuple[str, ...] = ()

    def costs(self, fused: bool) -> str:
        """E.g. "4 score matrices of 32.0 MiB in all leave the graph, 1.1 GFLOP, 50% visible"."""
        parts: list[str] = []
        if self.score_matrices:
            size, many = bytes_as_text(self.score_bytes), self.score_matrices > 1
            what = f"{self.score_matrices} score {'matrices' if many else 'matrix'} of {size}"
            verb = ("leave" if many else "leaves") if fused else ("stay" if many else "stays")
            where = "the graph" if fused else "in the graph"
            parts.append(f"{what}{' in all' if many else ''} {verb} {where}")
        if self.flops:
            parts.append(f"{flops_as_text(self.flops)} in matmuls")
        if self.visible < 1:
            parts.append(f"{self.visible:.0%} of the scores inside the band")
        return ", ".join(parts)


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
    details: Details = Details()
    notes: tuple[str, ...] = ()  # what was met and is not part of the site

    def __str__(self) -> str:
        if self.fused:
            first = f"{self.place} fused ({self.direction}): {self.summary}"
        else:
            first = f"{self.place} left ({self.direction}): {self.reason}"
        return "; ".join([first, *self.notes])

    @property
    def lines(self) -> tuple[str, ...]:
        """One to three lines: place and source; what was recognised, or why it was left; costs."""
        state = "fused" if self.fused else "left"
        what = self.summary if self.fused else self.reason or ""
        what = "; ".join([what, *self.notes[:NOTES]])
        costs = self.details.costs(self.fused)
        first = f"{self.place} {state} ({self.direction}): {self.details.source}".rstrip(": ")
        # A reason may quote an error, which may have lines of its own.
        return (first, f"    {' '.join(what.split())}", *([f"    {costs}"] if costs else []))

    def as_data(self) -> dict[str, Any]:
        """The record for JSON, without the lists of operations."""
        data = asdict(self)
        details = data.pop("details")
        for name in ("gone", "come", "stays"):
            details.pop(name)
        details["reading"] = dict(self.details.reading)
        return {**data, **details}


@dataclass(eq=False)  # collecting tells reports apart by identity
class Report:
    """Records of one or several compiles, in the order of the graphs."""

    sites: list[Record] = field(default_factory=list)

    @property
    def fused(self) -> int:
        return sum(site.fused for site in self.sites)

    @property
    def left(self) -> int:
        return len(self.sites) - self.fused

    @property
    def score_bytes(self) -> int:
        """Bytes of the score matrices that leave the graphs."""
        return sum(site.details.score_bytes for site in self.sites if site.fused)

    @property
    def flops(self) -> int:
        """FLOPs of the matmuls of the fused sites."""
        return sum(site.details.flops for site in self.sites if site.fused)

    def alike(self) -> list[tuple[Record, int]]:
        """Each record once, with how many there are like it: layers of a model read the same."""
        counts: dict[tuple[str, ...], list[Any]] = {}
        for site in self.sites:
            counts.setdefault(site.lines, [site, 0])[1] += 1
        return [(record, count) for record, count in counts.values()]

    def __str__(self) -> str:
        if not self.sites:
            return "no attention found"
        lines: list[str] = []
        for record, count in self.alike():
            first, *rest = record.lines
            lines += [f"{count} x {first}" if count > 1 else first, *rest]
        total = f"{self.fused} fused, {self.left} left"
        if self.score_bytes:
            size = bytes_as_text(self.score_bytes)
            lines.append(f"score matrices that leave the graph: {size} in all")
        return "\n".join([*lines, total])

    def to_json(self) -> str:
        return json.dumps(
            {
                "fused": self.fused,
                "left": self.left,
                "score_bytes": self.score_bytes,
                "flops": self.flops,
                "sites": [site.as_data() for site in self.sites],
            }
        )

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from .page import fragment

        return fragment(self)

    def save(self, path: str | Path, title: str = "inductor_gqa report") -> None:
        """Writes a page of HTML that needs no other file and no network."""
        from .page import page

        Path(path).write_text(page(self, title), encoding="utf-8")


_lock = threading.Lock()
_collecting: list[Report] = []
_detailing = 0
_seconds = 0.0


@contextmanager
def collected(details: bool = False) -> Generator[Report, None, None]:
    """Collects the records of the passes that run inside; with details (which take time) where
    asked for."""
    global _detailing
    report = Report()
    with _lock:
        _collecting.append(report)
        _detailing += details
    try:
        yield report
    finally:
        with _lock:
            _collecting.remove(report)
            _detailing -= details


def add(record: Record) -> None:
    with _lock:
        for report in _collecting:
            report.sites.append(record)
    log.info("%s", record)


def wants_details() -> bool:
    return _detailing > 0


def detailed(record: Record, **details: Any) -> Record:
    return replace(record, details=replace(record.details, **details))


def add_seconds(seconds: float) -> None:
    global _seconds
    with _lock:
        _seconds += seconds


def pass_seconds() -> float:
    """Seconds spent in our pass in this process so far."""
    return _seconds


def place_of(node: torch.fx.Node) -> str:
    """The user's file:line that a node comes from, or the node's name."""
    place, _ = _frame_of(node)
    return place or node.name


def source_of(node: torch.fx.Node) -> str:
    """The user's line that a node comes from, "" where it is not known."""
    _, source = _frame_of(node)
    return source


FRAME = re.compile(r'File "([^"]+)", line (\d+).*(?:\n(?!\s*File ")[ \t]*(\S.*))?')


def _frame_of(node: torch.fx.Node) -> tuple[str, str]:
    """(file:line, source) of the innermost frame outside torch."""
    frames = FRAME.findall(node.meta.get("stack_trace") or "")
    own = [f for f in frames if "/torch/" not in f[0]]
    if not frames:
        return "", ""
    path, line, source = (own or frames)[-1]
    return f"{path.rsplit('/', 1)[-1]}:{line}", source.strip()

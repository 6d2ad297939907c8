"""Bars and lines as SVG, with nothing but the standard library: the same results make the same
bytes on every machine, so that a test can hold the committed figures against them.

Colours follow the reader's light or dark setting and stay apart for most colour-blind readers
(Okabe and Ito); lines differ in their marks as well.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

STYLE = """
text { font: 12px system-ui, sans-serif; fill: #1b1f24; } .soft { fill: #59636e; font-size: 11px; }
.title { font-weight: 600; } .end { text-anchor: end; } .middle { text-anchor: middle; }
.grid { stroke: #d1d9e0; } .floor { stroke: #1b1f24; stroke-dasharray: 5 3; stroke-width: 1.5; }
.c0 { fill: #8a8f98; stroke: #8a8f98; } .c1 { fill: #0072b2; stroke: #0072b2; }
.c2 { fill: #e69f00; stroke: #e69f00; } .c3 { fill: #009e73; stroke: #009e73; }
path { fill: none !important; stroke-width: 2; } .back { fill: #ffffff; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6e9ed; } .soft { fill: #9aa4af; } .grid { stroke: #3a424c; }
  .floor { stroke: #e6e9ed; } .c1 { fill: #56b4e9; stroke: #56b4e9; } .back { fill: #14181d; }
}
""".strip()
LEFT, TOP, BOTTOM = 64, 34, 44  # room for the numbers, the title, and the labels below
HEIGHT = 190  # of what is drawn in
CHARACTER = 7.0  # width of one in a legend, on average


@dataclass
class Panel:
    """One chart: its own axis from 0 (or of powers of 2), its elements in pixels."""

    title: str
    width: int
    parts: list[str] = field(default_factory=list[str])

    def text(self, x: float, y: float, text: str, kind: str = "") -> None:
        style = f' class="{kind}"' if kind else ""
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}"{style}>{escape(text)}</text>')

    def line(self, x: float, y: float, to_x: float, to_y: float, kind: str) -> None:
        ends = f'x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}"'
        self.parts.append(f'<line {ends} class="{kind}"/>')

    def scale(self, ticks: Sequence[float], top: float, unit: str) -> None:
        """Grid lines with their numbers, from 0 to `top`."""
        for tick in ticks:
            y = TOP + HEIGHT * (1 - tick / top)
            self.line(LEFT, y, self.width, y, "grid")
            self.text(LEFT - 6, y + 4, f"{tick:g}", "soft end")
        head = f'<tspan class="title">{escape(self.title)}</tspan>, {escape(unit)}'
        self.parts.append(f'<text x="0" y="{TOP - 14}">{head}</text>')


def ticks_to(highest: float) -> list[float]:
    """About five round numbers from 0 to at least `highest`."""
    step = 10.0 ** math.floor(math.log10(highest / 4))
    step *= next(k for k in (1, 2, 2.5, 5, 10) if k * step * 5 >= highest)
    return [step * k for k in range(math.ceil(highest / step) + 1)]


def bars(
    title: str,
    unit: str,
    labels: Sequence[str],
    series: Mapping[str, Sequence[float | str]],
    floor: float | None = None,
    width: int = 760,
) -> Panel:
    """A group of bars for each label, one for each series; words stand where a bar is missing.
    floor: a line across.

    A label may have two lines.
    """
    panel = Panel(title, width)
    ticks = ticks_to(max(v for values in series.values() for v in values if not isinstance(v, str)))
    panel.scale(ticks, ticks[-1], unit)
    room = (width - LEFT) / len(labels)
    bar = min(0.8 * room / len(series), 60)
    is_wide = bar >= 26  # for a number above it
    for group, label in enumerate(labels):
        middle = LEFT + room * (group + 0.5)
        for place, values in enumerate(series.values()):
            value = values[group]
            x = middle + bar * (place - len(series) / 2)
            if isinstance(value, str):
                # Long words in two lines: a bar has room for about eight letters.
                parts = value.rsplit(" ", 1) if len(value) > 8 else [value]
                for row, part in enumerate(reversed(parts)):
                    panel.text(x + bar / 2, TOP + HEIGHT - 4 - 14 * row, part, "soft middle")
                continue
            y = TOP + HEIGHT * (1 - value / ticks[-1])
            size = f'width="{bar - 2:.1f}" height="{TOP + HEIGHT - y:.1f}"'
            panel.parts.append(f'<rect x="{x + 1:.1f}" y="{y:.1f}" {size} class="c{place}"/>')
            if is_wide:
                shown = f"{value:.0f}" if value >= 100 else f"{value:.1f}"
                panel.text(x + bar / 2, y - 3, shown, "soft middle")
        for row, part in enumerate(label.split("\n")):
            panel.text(middle, TOP + HEIGHT + 16 + 14 * row, part, "soft middle")
    if floor is not None:
        y = TOP + HEIGHT * (1 - floor / ticks[-1])
        panel.line(LEFT, y, width, y, "floor")
    return panel


def lines(
    title: str,
    unit: str,
    series: Mapping[str, Sequence[tuple[float, float]]],
    across: str,
    width: int = 370,
) -> Panel:
    """Lines over an axis of powers of 2, each point with its mark."""
    panel = Panel(title, width)
    points = [point for found in series.values() for point in found]
    ticks = ticks_to(max(y for _, y in points))
    panel.scale(ticks, ticks[-1], unit)
    low = math.floor(math.log2(min(x for x, _ in points)))
    high = math.ceil(math.log2(max(x for x, _ in points)))

    def place(x: float, y: float) -> tuple[float, float]:
        share = (math.log2(x) - low) / max(high - low, 1)
        return LEFT + 12 + (width - LEFT - 36) * share, TOP + HEIGHT * (1 - y / ticks[-1])

    for power in range(low, high + 1):
        panel.text(place(2**power, 0)[0], TOP + HEIGHT + 16, f"{2**power}", "soft middle")
    panel.text(LEFT + (width - LEFT) / 2, TOP + HEIGHT + 32, across, "soft middle")
    for number, found in enumerate(series.values()):
        at = [place(x, y) for x, y in sorted(found)]
        route = " L".join(f"{x:.1f} {y:.1f}" for x, y in at)
        panel.parts.append(f'<path d="M{route}" class="c{number}"/>')
        panel.parts += [_mark(number, x, y) for x, y in at]
    return panel


def _mark(number: int, x: float, y: float) -> str:
    """A square, a circle, a triangle or a diamond."""
    kind = f'class="c{number}"'
    if number == 0:
        return f'<rect x="{x - 3.5:.1f}" y="{y - 3.5:.1f}" width="7" height="7" {kind}/>'
    if number == 1:
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" {kind}/>'
    corners = (
        ((0, -5), (4.5, 3.5), (-4.5, 3.5)) if number == 2 else ((0, -5), (5, 0), (0, 5), (-5, 0))
    )
    points = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in corners)
    return f'<polygon points="{points}" {kind}/>'


def figure(
    about: str, rows: Sequence[Sequence[Panel]], legend: Sequence[str], floor: str = ""
) -> str:
    """Rows of panels with one legend above them. about: for who cannot see it."""
    parts: list[str] = []
    x = 0.0
    for number, name in enumerate(legend):
        parts.append(f'<rect x="{x:.1f}" y="4" width="12" height="12" class="c{number}"/>')
        parts.append(f'<text x="{x + 17:.1f}" y="14">{escape(name)}</text>')
        x += 17 + CHARACTER * len(name) + 18
    if floor:
        parts.append(f'<line x1="{x:.1f}" y1="10" x2="{x + 24:.1f}" y2="10" class="floor"/>')
        parts.append(f'<text x="{x + 30:.1f}" y="14">{escape(floor)}</text>')
    y = 26
    for row in rows:
        x = 0.0
        for panel in row:
            body = "\n".join(panel.parts)
            parts.append(f'<g transform="translate({x:.0f} {y})">\n{body}\n</g>')
            x += panel.width + 20
        y += TOP + HEIGHT + BOTTOM
    width = max(sum(panel.width + 20 for panel in row) - 20 for row in rows)
    body = "\n".join(parts)
    frame = f'viewBox="-12 -8 {width + 24} {y + 12}" width="{width + 24}" height="{y + 12}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {frame} role="img">\n<title>{escape(about)}'
        f'</title>\n<style>{STYLE}</style>\n<rect x="-12" y="-8" width="100%" height="100%" '
        f'class="back"/>\n{body}\n</svg>\n'
    )

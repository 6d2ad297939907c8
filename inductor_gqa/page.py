"""A report as HTML: for a notebook (`fragment`) and as a page of its own (`page`).

Nothing is fetched and no script runs. All text comes from a user's code or a graph, so all of it is
escaped. Colours follow the reader's light or dark setting.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from .report import Record, Report
from .sizes import bytes_as_text, flops_as_text

STYLE = """
.igqa { color-scheme: light dark; --ink: #1b1f24; --soft: #59636e; --line: #d1d9e0; --back: #ffffff;
  --good: #116329; --bad: #9a4f00; color: var(--ink); background: var(--back); padding: 1em;
  font: 14px/1.5 system-ui, sans-serif; }
@media (prefers-color-scheme: dark) {
  .igqa { --ink: #e6e9ed; --soft: #9aa4af; --line: #3a424c; --back: #14181d;
    --good: #5fd07e; --bad: #f0a350; }
}
.igqa code, .igqa pre { font: 12px/1.5 ui-monospace, monospace; }
.igqa pre { margin: 0; overflow-x: auto; }
.igqa table { border-collapse: collapse; margin: .5em 0; }
.igqa th, .igqa td { text-align: left; vertical-align: top; padding: .2em 1em .2em 0;
  border: 0; background: none; }
.igqa th { color: var(--soft); font-weight: normal; white-space: nowrap; }
.igqa details { border-top: 1px solid var(--line); padding: .5em 0; }
.igqa summary { cursor: pointer; }
.igqa .fused { color: var(--good); } .igqa .left { color: var(--bad); }
.igqa .soft { color: var(--soft); }
.igqa .sides { display: flex; flex-wrap: wrap; gap: 1em; }
.igqa .sides > div { flex: 1 1 30em; min-width: 0; }
""".strip()


def page(report: Report, title: str) -> str:
    """A whole document."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'\">\n"
        f"<title>{escape(title)}</title>\n</head>\n<body>\n"
        f"{fragment(report, title)}\n</body>\n</html>\n"
    )


def fragment(report: Report, title: str = "") -> str:
    """The report within one element, with its own style."""
    head = f"<h1>{escape(title)}</h1>\n" if title else ""
    sites = "\n".join(_site(record, count) for record, count in report.alike())
    return f'<div class="igqa">\n<style>{STYLE}</style>\n{head}{_totals(report)}\n{sites}\n</div>'


def _totals(report: Report) -> str:
    if not report.sites:
        return "<p>no attention found</p>"
    rows = [
        ("fused", str(report.fused)),
        ("left", str(report.left)),
        ("score matrices that leave the graph", bytes_as_text(report.score_bytes)),
        ("in matmuls of fused sites", flops_as_text(report.flops)),
    ]
    return _table(rows)


def _site(record: Record, count: int) -> str:
    details = record.details
    state = "fused" if record.fused else "left"
    many = f"{count} x " if count > 1 else ""
    what = record.summary if record.fused else record.reason or ""
    rows = [("source", details.source), ("recognised", record.summary)]
    rows += [("why left", record.reason or ""), ("cost", details.costs(record.fused))]
    parts = [_table([row for row in rows if row[1]])]
    if details.reading:
        parts.append(f"<h4>How it was read</h4>{_table(details.reading, code=True)}")
    if details.come:
        before = _operations(f"Before: {len(details.gone)} operations", details.gone)
        after = _operations(f"After: {len(details.come)} operations", details.come)
        parts.append(f'<div class="sides">{before}{after}</div>')
    return (
        f"<details><summary>{many}<code>{escape(record.place)}</code> "
        f'<b class="{state}">{state}</b> <span class="soft">({escape(record.direction)})</span> '
        f"{escape(what)}</summary>\n{''.join(parts)}</details>"
    )


def _operations(title: str, lines: Iterable[str]) -> str:
    return f"<div><h4>{escape(title)}</h4><pre>{escape(chr(10).join(lines))}</pre></div>"


def _table(rows: Iterable[tuple[str, str]], code: bool = False) -> str:
    def cell(text: str) -> str:
        return f"<code>{escape(text)}</code>" if code else escape(text)

    lines = (f"<tr><th>{escape(name)}</th><td>{cell(text)}</td></tr>" for name, text in rows)
    return f"<table>{''.join(lines)}</table>"

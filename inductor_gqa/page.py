"""A report as HTML: for a notebook (`fragment`) and as a page of its own (`page`).

Nothing is fetched and no script runs. All text comes from a user's code or a graph, so all of it is
escaped. Colours follow the reader's light or dark setting.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from html import escape

from .report import Record, Report
from .sizes import bytes_as_text, flops_as_text

STYLE = """
.igqa { color-scheme: light dark; --ink: #1b1f24; --soft: #59636e; --line: #d1d9e0; --back: #ffffff;
  --raised: #f6f8fa; --good: #116329; --bad: #9a4f00; --ours: #0a4fa3;
  color: var(--ink); background: var(--back); padding: 1em 1.5em; box-sizing: border-box;
  font: 14px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
@media (prefers-color-scheme: dark) {
  .igqa { --ink: #e6e9ed; --soft: #9aa4af; --line: #3a424c; --back: #14181d; --raised: #1c2229;
    --good: #5fd07e; --bad: #f0a350; --ours: #7db8ff; }
}
.igqa h1 { font-size: 1.5em; margin: .3em 0 .6em; }
.igqa h4 { font-size: 1em; margin: 1.2em 0 .3em; }
.igqa code, .igqa pre { font: 12px/1.5 ui-monospace, monospace; }
.igqa pre { margin: 0; padding: .6em .8em; max-height: 34em; overflow: auto; overflow-wrap: normal;
  background: var(--raised); border: 1px solid var(--line); border-radius: 4px; }
.igqa pre b { font-weight: 700; } .igqa pre .ours { color: var(--ours); }
.igqa table { border-collapse: collapse; margin: .3em 0; }
.igqa th, .igqa td { text-align: left; vertical-align: top; padding: .2em 1.2em .2em 0; border: 0;
  background: none; }
.igqa th { color: var(--soft); font-weight: normal; white-space: nowrap; }
.igqa .totals { display: flex; flex-wrap: wrap; gap: .2em 2.5em; margin: 0 0 1em; }
.igqa .totals dt { color: var(--soft); } .igqa .totals dd { font-size: 1.3em; margin: 0; }
.igqa ul { margin: 0; padding-left: 1.2em; max-width: 60em; }
.igqa details { border-top: 1px solid var(--line); padding: .6em 0; }
.igqa details details { border: 0; padding: .6em 0 0; }
.igqa summary { cursor: pointer; }
.igqa .fused { color: var(--good); } .igqa .left { color: var(--bad); }
.igqa .soft { color: var(--soft); font-weight: normal; }
.igqa .sides { display: flex; flex-wrap: wrap; gap: 0 1.5em; }
.igqa .sides > div { flex: 1 1 30em; min-width: 0; }
@media (max-width: 40em) {
  .igqa { padding: .6em .8em; }
  .igqa th, .igqa td { display: block; padding-right: 0; } .igqa th { padding-bottom: 0; }
  .igqa .sides > div { flex-basis: 100%; }
}
""".strip()
WHOLE = "body { margin: 0; } body > .igqa { min-height: 100vh; }"
OPEN = 3  # kinds of sites that a page shows unfolded
NAMED = 4  # kinds of operations that a title counts

# What a reader looks for in a list: matmuls, softmaxes, and what this package puts in.
MARKED = re.compile(
    r"^(.* = )"
    r"(aten\.(?:\w*mm|matmul|amax|exp|\w*softmax\w*|\w*attention\w*)\.\w+|inductor_gqa\.\S+?)"
    r"(?=\()"
)


def page(report: Report, title: str) -> str:
    """A whole document."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'\">\n"
        f"<title>{escape(title)}</title>\n<style>{WHOLE}</style>\n</head>\n<body>\n"
        f"{_all(report, title, unfolds=True)}\n</body>\n</html>\n"
    )


def fragment(report: Report, title: str = "") -> str:
    """The report within one element, with its own style; every site folded."""
    return _all(report, title, unfolds=False)


def _all(report: Report, title: str, unfolds: bool) -> str:
    head = f"<h1>{escape(title)}</h1>\n" if title else ""
    kinds = report.alike()
    is_open = unfolds and len(kinds) <= OPEN
    sites = "\n".join(_site(record, count, is_open) for record, count in kinds)
    return f'<div class="igqa">\n<style>{STYLE}</style>\n{head}{_totals(report)}\n{sites}\n</div>'


def _totals(report: Report) -> str:
    if not report.sites:
        return "<p>no attention found</p>"
    facts = [("fused", str(report.fused)), ("left", str(report.left))]
    if report.fused:
        facts.append(("score matrices that leave the graph", bytes_as_text(report.score_bytes)))
        facts.append(("in matmuls of fused sites", flops_as_text(report.flops)))
    stay = sum(site.details.score_bytes for site in report.sites if not site.fused)
    if stay:
        facts.append(("score matrices that stay, where their size was read", bytes_as_text(stay)))
    cells = (f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>" for name, text in facts)
    return f'<dl class="totals">{"".join(cells)}</dl>'


def _site(record: Record, count: int, is_open: bool) -> str:
    details = record.details
    state = "fused" if record.fused else "left"
    many = f"{count} x " if count > 1 else ""
    what = record.summary if record.fused else record.reason or ""
    rows = [("recognised", record.summary)]
    rows += [("why left", record.reason or "")]
    rows += [("note", note) for note in record.notes]
    rows += [("cost of each" if count > 1 else "cost", details.costs(record.fused))]
    source = _table([("source", details.source)], code=True) if details.source else ""
    parts = [source, _table([row for row in rows if row[1]])]
    if details.words:
        lines = "".join(f"<li>{escape(line)}</li>" for line in details.words)
        note = '<span class="soft">(name[...]: a tensor, and what each of its dims counts)</span>'
        parts.append(f"<h4>How it was read {note}</h4><ul>{lines}</ul>")
    if details.reading:
        exact = _table(details.reading, code=True)
        parts.append(f"<details><summary>Exactly, as positions in axes</summary>{exact}</details>")
    if details.come:
        both = _operations("Before", details.gone) + _operations("After", details.come)
        parts.append(f'<div class="sides">{both}</div>')
    elif details.stays:
        parts.append(_operations("Around the softmax, unchanged", details.stays))
    return (
        f"<details{' open' if is_open else ''}><summary>{many}<code>{escape(record.place)}</code> "
        f'<b class="{state}">{state}</b> <span class="soft">({escape(record.direction)})</span> '
        f"{escape(what)}</summary>\n{''.join(parts)}</details>"
    )


def _operations(title: str, lines: tuple[str, ...]) -> str:
    kinds = Counter(_name(line) for line in lines).most_common()
    counts = ", ".join(f"{count} {name}" for name, count in kinds[:NAMED])
    more = ", ..." if len(kinds) > NAMED else ""
    head = (
        f'{escape(title)}: {len(lines)} operations <span class="soft">{escape(counts)}{more}</span>'
    )
    body = "\n".join(_marked(line) for line in lines)
    return f'<div><h4>{head}</h4><pre tabindex="0">{body}</pre></div>'


def _name(line: str) -> str:
    """E.g. "mul" of "mul: float32[2] = aten.mul.Tensor(x, 2)"."""
    target = line.partition(" = ")[2].partition("(")[0]
    return target.split(".")[1] if "." in target else target


def _marked(line: str) -> str:
    found = MARKED.match(line)
    if found is None:
        return escape(line)
    kind = ' class="ours"' if found[2].startswith("inductor_gqa") else ""
    return f"{escape(found[1])}<b{kind}>{escape(found[2])}</b>{escape(line[found.end() :])}"


def _table(rows: Iterable[tuple[str, str]], code: bool = False) -> str:
    def cell(text: str) -> str:
        return f"<code>{escape(text)}</code>" if code else escape(text)

    lines = (f"<tr><th>{escape(name)}</th><td>{cell(text)}</td></tr>" for name, text in rows)
    return f"<table>{''.join(lines)}</table>"

"""What the commands print with: aligned tables, colour on a terminal only, progress on stderr."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from inductor_gqa import sizes

COLOURS = {"green": "32", "red": "31", "yellow": "33", "bold": "1", "dim": "2"}


class CommandError(Exception):
    """A command cannot go on: `str(error)` is for the user, `exit_code` for the shell."""

    def __init__(self, message: str, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def is_colourful(stream: TextIO) -> bool:
    """Colour only on a terminal; NO_COLOR (https://no-color.org) turns it off there too."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def paint(text: str, colour: str, stream: TextIO | None = None) -> str:
    """`text` in a colour of COLOURS, or unchanged where the stream is no terminal."""
    if not is_colourful(stream or sys.stdout):
        return text
    return f"\x1b[{COLOURS[colour]}m{text}\x1b[0m"


def complain(message: str) -> None:
    """One message to stderr, marked as an error."""
    print(f"{paint('error:', 'red', sys.stderr)} {message}", file=sys.stderr)


def print_json(data: Mapping[str, Any]) -> None:
    """One JSON object on stdout, keys in the order given."""
    print(json.dumps(data, indent=2))


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], words: int = 1) -> str:
    """A table in plain text: the first columns (`words` of them) to the left, numbers to the
    right."""
    grid = [list(headers), *[list(row) for row in rows]]
    widths = [max(len(row[column]) for row in grid) for column in range(len(headers))]
    lines = [
        "  ".join(
            cell.ljust(width) if column < words else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in grid
    ]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def bytes_as_text(count: int | None) -> str:
    """A number of bytes for a person, or a dash where it is not known."""
    return "-" if count is None else sizes.bytes_as_text(count)


@contextmanager
def progress(what: str) -> Generator[None, None, None]:
    """Says on stderr what is being done and how long it took; silent where that is no terminal."""
    if not sys.stderr.isatty():
        yield
        return
    start = time.perf_counter()
    print(paint(f"... {what}", "dim", sys.stderr), end="", flush=True, file=sys.stderr)
    try:
        yield
    finally:
        seconds = paint(f" {time.perf_counter() - start:.1f} s", "dim", sys.stderr)
        print(seconds, flush=True, file=sys.stderr)

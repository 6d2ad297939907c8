"""Run one of the before/after scripts of bench/.

The scripts are part of the source checkout, not of the installed package: run this in a checkout.
Options after the name go to the script, `bench NAME --help` lists them.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from pathlib import Path

from inductor_gqa.cli.terminal import CommandError, print_json, table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A name and whatever the script takes."""
    parser.add_argument("name", nargs="?", help="a script's name; without it they are listed")
    parser.add_argument("options", nargs=argparse.REMAINDER, help="options of the script")


def run(args: argparse.Namespace) -> int:
    """Returns the script's exit code."""
    scripts = find_scripts(Path.cwd())
    if args.name is None:
        summaries = {name: _summary(path) for name, path in scripts.items()}
        if args.json:
            print_json(summaries)
        else:
            rows = [[*row] for row in summaries.items()]
            print(table(["name", "what it does"], rows, words=2))
        return 0
    name = args.name.removesuffix(".py").replace("-", "_")
    if name not in scripts:
        raise CommandError(f"no benchmark is named {args.name}, there are: {', '.join(scripts)}")
    options = [*args.options, "--json"] if args.json else args.options
    return subprocess.run([sys.executable, str(scripts[name]), *options], check=False).returncode


def find_scripts(start: Path) -> dict[str, Path]:
    """The runnable scripts of bench/ in this checkout, by name."""
    for root in (start, *start.parents, Path(__file__).resolve().parents[2]):
        folder = root / "bench"
        if (folder / "train_step.py").is_file() and (root / "inductor_gqa").is_dir():
            return {path.stem: path for path in sorted(folder.glob("*.py")) if _is_script(path)}
    raise CommandError(
        "the benchmark scripts are in the source checkout's bench/, which is not above "
        f"{start}: run this in a checkout"
    )


def _is_script(path: Path) -> bool:
    return '\nif __name__ == "__main__":' in path.read_text(encoding="utf-8")


def _summary(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0]

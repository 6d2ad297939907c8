"""Run one of the before/after scripts of bench/.

The scripts are part of the source checkout, not of the installed package: run this in a checkout.
Options after the name go to the script, `bench NAME --help` lists them.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
import tempfile
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
    command = [sys.executable, str(scripts[name]), *args.options]
    if args.json:
        return _run_for_json(name, command)
    return subprocess.run(command, check=False).returncode


def _run_for_json(name: str, command: list[str]) -> int:
    """Runs a script so that its record, and nothing else, comes out on stdout. One that writes the
    record to a file only is given a file; what it prints goes to stderr."""
    asked = subprocess.run([*command[:2], "--help"], capture_output=True, text=True, check=False)
    if "--json" in asked.stdout:
        return subprocess.run([*command, "--json"], check=False).returncode
    if "--out FILE" not in asked.stdout:
        raise CommandError(f"{name} makes no record, accepted with --json are benchmarks that do")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "record.json"
        # Appended, so that it is the last --out that counts.
        done = subprocess.run([*command, "--out", str(out)], stdout=sys.stderr, check=False)
        if out.is_file():
            print_json(json.loads(out.read_text(encoding="utf-8")))
    return done.returncode


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

"""Injects each fault into a copy of the package and runs the test that must catch it:
`python tests/mutations/run.py [part of a name ...]`. Exit status 1 if a fault survives."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(Path(__file__).parent))
from faults import FAULTS, Fault  # noqa: E402
from faults_of_kernels import FAULTS_OF_KERNELS  # noqa: E402

ALL = (*FAULTS, *FAULTS_OF_KERNELS)


def injected(fault: Fault, folder: Path) -> None:
    """A copy of the package with the fault, and links to the tests."""
    shutil.copytree(ROOT / "patterns", folder / "patterns")
    shutil.copytree(ROOT / "inductor_gqa", folder / "inductor_gqa", symlinks=True)
    shutil.copytree(ROOT / "tests", folder / "tests")
    shutil.copy(ROOT / "pyproject.toml", folder)
    path = folder / fault.path
    source = path.read_text()
    assert source.count(fault.old) == 1, f"{fault.path} holds {fault.old!r} not once"
    path.write_text(source.replace(fault.old, fault.new))


def caught(fault: Fault) -> bool:
    """Whether the named test fails, or its process dies, as of an address out of bounds. Anything
    but that and passed (nothing collected, a usage error) is an error of the fault's
    description."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        injected(fault, folder)
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-n0", "-p", "no:cacheprovider"]
        command += ["-m", "not slow", *shlex.split(fault.test)]
        environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
    if done.returncode > 1:
        raise RuntimeError(f"{fault.name}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.returncode != 0


def main() -> int:
    chosen = [f for f in ALL if not sys.argv[1:] or any(w in f.name for w in sys.argv[1:])]
    survived = 0
    for fault in chosen:
        start = time.perf_counter()
        is_caught = caught(fault)
        survived += not is_caught
        seconds = time.perf_counter() - start
        print(
            f"{'caught' if is_caught else 'SURVIVED'}  {fault.name} ({seconds:.0f} s)", flush=True
        )
    print(f"{len(chosen) - survived} caught, {survived} survived")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())

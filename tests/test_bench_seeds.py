"""The benchmark of the two whole programs, tiny on a CPU: correct, fused, complete."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "bench" / "seeds.py"
WITHOUT_CPP = ROOT / "tests" / "without_cpp.py"


def run(*options):
    command = [sys.executable, str(WITHOUT_CPP), str(SCRIPT), *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_both_programs_are_fused_and_within_tolerance(tmp_path):
    """Compiled beforehand: what was fused is counted where it was compiled."""
    out = tmp_path / "seeds.json"
    options = ["--tiny", "--variants", "fused", "--checks", "1", "--programs", "003,075"]
    done = run(*options, "--jobs", "2", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text())
    assert [(row["program"], row["B"], row["L"]) for row in result["cases"]] == [
        *[("003", 1, 19), ("003", 2, 16)],
        *[("075", 1, 19), ("075", 2, 16)],
    ]
    for row in result["cases"]:
        fused = row["variants"]["fused"]
        assert fused["ok"]
        assert (fused["sites_fused"], fused["sites_left"]) == (1, 0)
        assert fused["error_beside_eager"] < 2
        assert "us" not in fused  # times are a GPU's
    assert all(found["ok"] for found in result["programs"].values())


def test_an_unknown_program_is_named(bench, capsys):
    with pytest.raises(SystemExit) as stopped:
        bench("seeds").main(["--programs", "076"])
    assert stopped.value.code == 2
    assert "unknown 076, there are 003, 075, 075-highest" in capsys.readouterr().err

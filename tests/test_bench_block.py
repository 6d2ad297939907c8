"""The benchmark of one block's training step, tiny on a CPU: correct, fused, complete."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "bench" / "block.py"
WITHOUT_CPP = ROOT / "tests" / "without_cpp.py"


def run(*options):
    command = [sys.executable, str(WITHOUT_CPP), str(SCRIPT), *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_every_variant_is_right_and_the_block_is_fused(tmp_path):
    """Compiled beforehand: what was fused is counted where it was compiled. By one process;
    that two share the work is claimed by test_bench_seeds.py."""
    out = tmp_path / "block.json"
    variants = "eager,plain,fused,sdpa"
    done = run("--tiny", "--variants", variants, "--jobs", "1", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text())
    assert [(row["B"], row["L"]) for row in result["rows"]] == [(1, 19), (2, 16)]
    for row in result["rows"]:
        assert set(row["variants"]) == set(variants.split(","))
        assert row["variants"]["fused"]["sites_fused"] == 1
        assert "us" not in row["variants"]["fused"]  # times are a GPU's


def test_an_unknown_variant_is_named(bench, capsys):
    with pytest.raises(SystemExit) as stopped:
        bench("block").main(["--variants", "flash"])
    assert stopped.value.code == 2
    assert "unknown flash, there are eager, plain, fused, sdpa" in capsys.readouterr().err

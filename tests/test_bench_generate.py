"""The decoding benchmark, tiny on a CPU: correctness first, then a complete record."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "bench" / "generate.py"
WITHOUT_CPP = ROOT / "tests" / "without_cpp.py"
TINY = ["--tiny", "--device", "cpu", "--rounds", "1", "--steps", "1"]
TIMED = ["--layers", "1", "--new", "4"]  # what is checked has two layers

pytest.importorskip("transformers")


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(WITHOUT_CPP), str(SCRIPT), *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The record of one run of all variants."""
    out = tmp_path_factory.mktemp("bench") / "generate.json"
    done = run(*TINY, *TIMED, "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(out.read_text())


@pytest.mark.slow
def test_checks_the_logits_before_it_times(result):
    check = result["check"]
    assert check["ok"]
    assert check["worst_ratio"] <= check["allowed_ratio"]
    assert check["sites_fused"] % 2 == 0  # two layers, in each compile of the step
    assert check["sites_fused"] > 0
    assert check["sites_left"] == 0


@pytest.mark.slow
def test_times_every_variant_and_fuses_only_one(result):
    assert list(result["variants"]) == ["eager", "plain", "fused", "sdpa"]
    for name, data in result["variants"].items():
        assert data["status"] == "ok"
        assert data["step_ms"] > 0
        assert data["prompt_ms"] > 0
        assert (data.get("sites_fused", 0) > 0) == (name == "fused")
        assert data.get("sites_left", 0) == 0


def test_refuses_an_unknown_variant(bench, capsys):
    with pytest.raises(SystemExit) as stopped:
        bench("generate").main(["--variants", "plain,flex"])
    assert stopped.value.code == 2
    assert "unknown variants flex" in capsys.readouterr().err

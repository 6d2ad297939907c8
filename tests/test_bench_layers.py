"""The benchmark of joined layer gradients on the CPU: its arguments, its check, no number without
it."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch):
    """bench/layers.py, imported as it imports its neighbours."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    yield importlib.import_module("layers")
    for name in ("measure", "layers"):
        sys.modules.pop(name, None)


def test_checks_every_problem(script, tmp_path):
    out = tmp_path / "layers.json"
    assert script.main(["--tiny", "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    wanted = [(problem, n) for problem in script.TINY_PROBLEMS for n in script.TINY_TOKENS]
    assert [(row["problem"], row["tokens"]) for row in rows] == wanted


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_checks_the_results_of_every_problem(script, precision, tmp_path):
    out = tmp_path / "layers.json"
    assert script.main(["--tiny", "--forward", precision, "--out", str(out)]) == 0
    made = json.loads(out.read_text())
    wanted = [(problem, n) for problem in script.TINY_PROBLEMS for n in script.TINY_TOKENS]
    assert [(row["problem"], row["tokens"]) for row in made["rows"]] == wanted
    assert made["benchmark"] == "layers_forward"


@pytest.mark.parametrize("name", ["linear_backward", "linear_forward"])
def test_a_wrong_result_is_reported_and_fails_the_run(script, name, monkeypatch, capsys):
    exact = getattr(script.ops, name)
    options = ["--forward", "ieee"] if name == "linear_forward" else []
    is_launcher = torch.cuda.is_available() and name == "linear_backward"

    def slightly_off(*args):
        return [1.01 * x for x in exact(*args)]

    monkeypatch.setattr(script.joined if is_launcher else script.ops, name, slightly_off)
    assert script.main(["--tiny", *options]) == 1
    assert "WRONG" in capsys.readouterr().out


def test_unknown_tile_is_named(script, capsys):
    with pytest.raises(SystemExit):
        script.main(["--tiles", "round"])
    assert "unknown tile round, there are wide, narrow, slim" in capsys.readouterr().err


def test_without_a_gpu_nothing_is_timed(script, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert script.main([]) == 2
    assert "no CUDA device" in capsys.readouterr().err

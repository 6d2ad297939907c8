"""The training benchmark, tiny on a CPU: correctness first, a complete record, out of memory."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "bench" / "train_step.py"
WITHOUT_CPP = ROOT / "tests" / "without_cpp.py"
NAMES = ["eager", "plain", "fused", "sdpa"]
TINY = ["--tiny", "--device", "cpu", "--rounds", "1", "--steps", "1"]
TIMED = ["--layers", "1", "--length", "16"]  # what is checked has two layers and an odd length

pytest.importorskip("transformers")


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(WITHOUT_CPP), str(SCRIPT), *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The record of one run of all variants."""
    out = tmp_path_factory.mktemp("bench") / "train_step.json"
    done = run(*TINY, *TIMED, "--variants", ",".join(NAMES), "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ok" in done.stdout
    return json.loads(out.read_text())


@pytest.fixture
def bench_module(monkeypatch: pytest.MonkeyPatch):
    """Imports a file of bench/ as the scripts do."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    yield load
    for name in ("measure", "shapes", "train_step"):
        sys.modules.pop(name, None)


@pytest.mark.slow
def test_checks_every_gradient_before_it_times(result):
    check = result["check"]
    assert check["ok"]
    assert check["worst_ratio"] <= check["allowed_ratio"]
    assert check["sites"] == check["sites_fused"] == 2
    assert check["tensors"] == 21  # the logits and the 20 parameters of two layers


@pytest.mark.slow
def test_measures_every_variant_that_was_asked_for(result):
    assert list(result["variants"]) == NAMES
    for data in result["variants"].values():
        assert data["status"] == "ok"
        assert data["tokens_per_second"] == pytest.approx(2 * 16 * 1e3 / data["step_ms"])
        assert data["forward_ms"] > 0


@pytest.mark.slow
def test_variants_start_from_the_same_weights_and_batch(result):
    losses = [data["first_loss"] for data in result["variants"].values()]
    assert max(losses) - min(losses) <= result["loss"]["allowed"] * max(losses)


@pytest.mark.slow
def test_records_the_share_of_our_pass_in_the_first_step(result):
    assert 0 < result["variants"]["fused"]["pass_share"] < 1
    assert "pass_share" not in result["variants"]["plain"]


@pytest.mark.slow
def test_record_says_what_it_was_measured_on(result):
    assert result["environment"]["torch"] == torch.__version__
    assert {"date", "commit", "settings"} <= result.keys()
    assert result["settings"]["batch"] == 2
    assert str(ROOT) not in json.dumps(result)


def test_refuses_an_unknown_variant(bench_module, capsys):
    with pytest.raises(SystemExit) as stopped:
        bench_module("train_step").parse(["--variants", "plain,flex"])
    assert stopped.value.code == 2
    assert "unknown variants flex" in capsys.readouterr().err


def test_out_of_memory_ends_a_variant_and_not_the_run(bench_module, monkeypatch):
    measure = bench_module("measure")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", os.environ.get("TMPDIR", "/tmp"))

    def too_large() -> None:
        raise torch.OutOfMemoryError("tried to allocate the score matrix")

    variants = [
        measure.Variant("large", too_large, too_large),
        measure.Variant("small", lambda: None, lambda: None),
    ]
    device = torch.device("cpu")
    measure.first_steps(variants, device)
    measure.take_turns(variants, device, rounds=1, steps=1)
    assert [variant.status for variant in variants] == ["out of memory", "ok"]
    assert variants[0].as_data(tokens=1) == {"status": "out of memory"}
    assert variants[1].as_data(tokens=1)["tokens_per_second"] > 0


def test_prints_no_number_where_the_check_fails(bench_module, monkeypatch, capsys):
    script = bench_module("train_step")
    failed = {"ok": False, "sites": 2, "sites_fused": 1, "allowed_ratio": 2.0}
    failed |= {"worst_ratio": 3.0, "worst_tensor": "output"}
    monkeypatch.setattr(script, "check", lambda *_: failed)
    assert script.main(TINY) == 1
    printed = capsys.readouterr().out
    assert "FAILED" in printed
    assert "tokens/s" not in printed

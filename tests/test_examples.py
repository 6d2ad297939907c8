"""Each example runs as it stands, on a CPU, fuses every attention and does what it says."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "docs" / "examples"
SITES = {"finetune": 2, "lora": 2, "lora_peft": 2, "nano": 2, "encoder": 1, "spellings": 1}
NEEDS = {"finetune": "transformers", "lora": "transformers", "lora_peft": "peft"}


def run(name: str, *options: str) -> str:
    """What the example prints, with a GPU out of sight and no C++ compiled: generated code in
    training is claimed by patterns/test_transformers.py."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    through = str(ROOT / "tests" / "without_cpp.py")
    script = str(EXAMPLES / f"{name}.py")
    command = [sys.executable, "-W", "ignore", through, script, *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_every_example_is_run_here():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(SITES)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["finetune", "lora", "lora_peft", "nano"])
def test_training_example_fuses_every_site_and_the_loss_falls(name):
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"needs {NEEDS[name]}")
    printed = run(name)
    assert f"{SITES[name]} fused, 0 left" in printed
    assert "rotate-half RoPE, causal" in printed  # of q and of k: nothing stays outside
    first, last = map(float, re.findall(r"loss (\S+) -> (\S+)", printed)[0])
    assert last < first


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="needs accelerate")
def test_the_trainer_fuses_as_the_loop_does(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    printed = run("finetune", "--trainer", "--steps", "8")
    assert "2 fused, 0 left" in printed
    first, last = map(float, re.findall(r"loss (\S+) -> (\S+)", printed)[0])
    assert last < first


@pytest.mark.slow
def test_encoder_returns_its_weights_no_further_off_than_twice_eager():
    printed = run("encoder")
    assert "returns the weights" in printed
    assert "1 fused, 0 left" in printed
    ours, eager = map(float, re.findall(r"error (\S+), in eager (\S+)", printed)[0])
    assert 0 < ours <= 2 * eager


@pytest.mark.slow
def test_spellings_of_other_libraries_fuse_with_gradients_no_further_off_than_twice_eager():
    printed = run("spellings")
    assert printed.count(f"{SITES['spellings']} fused, 0 left") == 2
    assert "rotate-half RoPE on 8 lanes, causal" in printed
    assert "interleaved RoPE, causal" in printed
    found = re.findall(r"error (\S+), in eager (\S+)", printed)
    assert len(found) == 2
    for ours, eager in found:
        assert 0 < float(ours) <= 2 * float(eager)


def test_what_examples_need_is_in_an_extra_and_not_in_the_tests():
    """Who installs the tests gets neither; those examples are skipped there."""
    text = (ROOT / "pyproject.toml").read_text()
    extras = dict(re.findall(r"^(test|examples) = \[(.*?)\]$", text, re.MULTILINE | re.DOTALL))
    names = {extra: set(re.findall(r'"([\w-]+)', listed)) for extra, listed in extras.items()}
    assert names["examples"] == {"accelerate", "peft", "transformers"}
    assert not names["test"] & {"accelerate", "peft"}

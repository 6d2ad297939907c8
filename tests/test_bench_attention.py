"""The attention benchmark on a CPU: its arguments, its check, no number without it."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
CPU = ["--tiny", "--device", "cpu"]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch):
    """bench/attention.py, imported as it imports its neighbours."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    yield importlib.import_module("attention")
    for name in ("measure", "attention_problem", "attention"):
        sys.modules.pop(name, None)


def problem_of(script, dtype=torch.float32, is_causal=True, has_rope=True):
    return script.Problem(2, 40, 16, is_causal, (4, 2), torch.device("cpu"), dtype, has_rope)


def test_checks_ours_and_a_peer_at_every_shape(script, tmp_path):
    out = tmp_path / "attention.json"
    assert script.main([*CPU, "--out", str(out)]) == 0
    record = json.loads(out.read_text())
    found = [(row["causal"], row["S"], row["variant"]) for row in record["rows"]]
    sizes = [(63, 64), ("ours", "math")]
    assert found == [(c, S, v) for c in (True, False) for S in sizes[0] for v in sizes[1]]
    assert {row["status"] for row in record["rows"]} == {"ok"}
    assert record["settings"]["heads"] == [4, 2]


def test_attention_alone_is_checked_and_recorded_as_such(script, tmp_path):
    out = tmp_path / "core.json"
    options = ["--sizes", "63", "--masks", "causal", "--without-rope"]
    assert script.main([*CPU, *options, "--out", str(out)]) == 0
    record = json.loads(out.read_text())
    assert record["benchmark"] == "attention-core"
    assert [row["status"] for row in record["rows"]] == ["ok", "ok"]


def test_a_wrong_gradient_is_reported_and_fails_the_run(script, monkeypatch, capsys):
    exact = script.ops.attention_backward

    def slightly_off(*args):
        dq, dk, dv = exact(*args)
        return dq, dk * 1.01, dv

    monkeypatch.setattr(script.ops, "attention_backward", slightly_off)
    options = ["--sizes", "63", "--masks", "causal", "--variants", "ours"]
    assert script.main([*CPU, *options]) == 1
    printed = capsys.readouterr().out
    assert "NOT TIMED D32-S63-causal ours: dk: error is" in printed
    assert "dq:" not in printed


@pytest.mark.parametrize(("is_causal", "has_rope"), [(False, True), (True, True), (True, False)])
def test_what_is_held_true_is_what_autograd_computes(script, is_causal, has_rope):
    """The chunked gradients, in fp64 and beyond one chunk of rows."""
    problem = problem_of(script, torch.float64, is_causal, has_rope)
    sys.modules["attention_problem"].ROWS = 16
    leaves = problem.leaves()
    cos, sin = (x[:, :, None] for x in problem.tables)
    q, k = leaves[:2]
    if has_rope:
        q, k = (script.turned(x, cos, sin) for x in (q, k))
    with script.sdpa_kernel(script.SDPBackend.MATH):
        out = script.F.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, leaves[2])), is_causal=is_causal, enable_gqa=True
        ).transpose(1, 2)
    grads = torch.autograd.grad(out, leaves, problem.grad_out.flatten(2, 3))
    results = {"out": out.detach(), **dict(zip(("dq", "dk", "dv"), grads, strict=True))}
    for at in ((0, 0), (1, 1)):
        expected = problem.group(results, *at)
        made = problem.computed(*at, torch.float64)
        for name, x in expected.items():
            torch.testing.assert_close(made[name], x, rtol=1e-10, atol=1e-10)


def test_check_names_every_result_that_is_off(script):
    problem = problem_of(script)
    results = script.ours(problem).step()
    assert problem.wrong(results) == []
    results["dv"][0, 3, 0, 5] += 1e-2
    results["lse"] = results["lse"] + torch.nan
    found = problem.wrong(results)
    assert [sentence.partition(":")[0] for sentence in found] == ["lse", "dv"]
    assert "error is inf" in found[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--variants", "ours,triton"], "triton, accepted ours, cudnn, flash, math, flex"),
        (["--masks", "window"], "window, accepted causal, none"),
    ],
)
def test_refuses_an_unknown_name(script, options, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        script.parse(options)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_starts_no_shape_when_the_time_is_used_up(script, capsys):
    assert script.main([*CPU, "--seconds", "-1"]) == 1
    left = "D32-S63-causal, D32-S64-causal, D32-S63-none, D32-S64-none"
    assert f"not started, time used up: {left}" in capsys.readouterr().out


@pytest.mark.parametrize(("is_causal", "factor"), [(False, 1.0), (True, 0.5)])
def test_counts_the_operations_of_the_matmuls(script, is_causal, factor):
    problem = problem_of(script, is_causal=is_causal)
    forward = factor * 2 * (2 * 4 * 40 * 40 * 16) * 2  # QK and PV: B H S S D, two operations each
    assert problem.operations(False) == forward
    assert problem.operations(True) == forward * (1 + 2.5)
